"""Attention over lists of key blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

from ._options import check_lse_out, flag, pack
from .hosts import arrays, is_torch, offsets, torch_host

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ._types import AnyArray, Array, AttentionOptions


def options_tuple(q: Any, options: dict[str, Any]) -> tuple[Any, ...]:
    """pack(), of the options of a call on q: offsets may be ints."""
    for name in ("q_offset", "key_offset"):
        if name in options:
            options[name] = offsets(name, options[name], q, options.get("cu_seqlens_q"))
    if options.get("deterministic") is None and is_torch(q):
        options["deterministic"] = torch_host().is_deterministic()
    return pack(**options)


@overload
def sparse_attention(
    q: Array,
    k: Array,
    v: Array,
    blocks: AnyArray,
    counts: AnyArray | None = None,
    *,
    offsets: AnyArray | None = None,
    masks: AnyArray | None = None,
    mask_ids: AnyArray | None = None,
    block_size: int = 64,
    query_rows: int = 1,
    return_lse: Literal[False] = False,
    **options: Unpack[AttentionOptions],
) -> Array: ...
@overload
def sparse_attention(
    q: Array,
    k: Array,
    v: Array,
    blocks: AnyArray,
    counts: AnyArray | None = None,
    *,
    offsets: AnyArray | None = None,
    masks: AnyArray | None = None,
    mask_ids: AnyArray | None = None,
    block_size: int = 64,
    query_rows: int = 1,
    return_lse: Literal[True],
    **options: Unpack[AttentionOptions],
) -> tuple[Array, Array]: ...
@overload
def sparse_attention(
    q: Array,
    k: Array,
    v: Array,
    blocks: AnyArray,
    counts: AnyArray | None = None,
    *,
    offsets: AnyArray | None = None,
    masks: AnyArray | None = None,
    mask_ids: AnyArray | None = None,
    block_size: int = 64,
    query_rows: int = 1,
    return_lse: bool,
    **options: Unpack[AttentionOptions],
) -> Array | tuple[Array, Array]: ...
def sparse_attention(
    q: Any,
    k: Any,
    v: Any,
    blocks: AnyArray,
    counts: AnyArray | None = None,
    *,
    offsets: AnyArray | None = None,
    masks: AnyArray | None = None,
    mask_ids: AnyArray | None = None,
    block_size: int = 64,
    query_rows: int = 1,
    return_lse: bool = False,
    out: AnyArray | None = None,
    lse_out: AnyArray | None = None,
    **options: Any,
) -> Any:
    """Attention over lists of key blocks: each row attends the keys of the blocks that its list names and no other.

    Keys of a sequence are cut into blocks of block_size, block c of keys c * block_size to (c + 1) * block_size - 1, the
    last of which may be shorter. Row i of a head attends key j if causality, window and mask let it, and its list holds
    j // block_size: exactly ``attention`` under the mask that says the same, at the cost of the pairs that are listed.

    A list is a set: entries come in any order, and one that is there twice counts once. Entries that name no block of the
    sequence (negative, as -1 where a list ends early, or too large), or none that the row may meet, say nothing. With masks an
    entry may have one, of the pairs of its block that are met; of entries that name the same block the first one counts.

    B sequences, H query heads, Hkv key/value heads, Sq and Sk lengths, as for ``attention``; float32, float16 or bfloat16.
    Torch tensors go through a torch operator with gradients of q, k, v and sink, also through the returned lse; no
    gradient passes through a list. Other arrays are forward only. What runs, and where: ``heddle.explain_sparse_attention``.

    Args:
      q, k, v: as for ``attention``: [B, Sq, H, D], [B, Sk, Hkv, D], [B, Sk, Hkv, Dv]; packed, or k and v in pages.
      blocks: int32 [B, N, L, n]: lists of n entries, for N = ceil(Sq / query_rows) runs of rows and L head units. L is 1
        (one list for all heads), Hkv (one for a group of heads), or H. Entries of a list are contiguous, strides are free
        else. With cu_seqlens_q: [N, L, n]; the list of row i of sequence b is number cu_seqlens_q[b] + i where query_rows
        is 1 (N = total_q), else cu_seqlens_q[b] // query_rows + b + i // query_rows (N = total_q // query_rows + B; those
        in between are not read). torch.topk gives int64: ``.int()``.
      counts: int32 [B, N, L], with cu_seqlens_q [N, L]: how many entries of each list count, the first ones; all if None.
      offsets: int32 [B, L, N + 1], with cu_seqlens_q [L, N + 1]: the lists are one behind the other (CSR), blocks is [entries],
        and list n of a head unit is blocks[offsets[..., n]:offsets[..., n + 1]]. For lists of many lengths; not beside counts.
      masks: int32 [M, query_rows, ceil(block_size / 32)], contiguous: a pool of masks for blocks of which not every pair is met.
        Bit j % 32 of word j // 32 of row r says whether the r-th row of a list meets key j of the block, if causality and window
        let it, too; bits from block_size on are not read. What makes them of boolean tiles: ``heddle.patterns.pack_masks``.
      mask_ids: int32, of blocks' shape: the number of each entry's mask, -1 for none (the whole block). A number that is no
        mask's lets nothing through.
      block_size: keys of a block: 16, 32, 64 or 128.
      query_rows: how many neighbouring rows share a list, counted from a sequence's first on; at least 1.
      return_lse: also return the log-sum-exp of each row's scores.
      out, lse_out: where to write the results, as for ``attention``.
      options: those of ``attention``, except draft_mask, key_step, precision and method. bias, mask, dropout_p and float8_e4m3fn are
        served by ``force="reference"`` alone; so are gradients with alibi_slopes or softcap. Gradients are refused with
        page_table, cache_batch_idx or cache_leftpad. GPUs serve no masks yet.

    Returns:
      out [B, Sq, H, Dv] (packed: [total_q, H, Dv]), of q's dtype (or out_dtype) and kind of array; with return_lse a pair with
      lse, float32 [B, H, Sq] (packed: [H, total_q]). A row without any key gives 0 and lse -inf (with a sink, lse = sink).

    Raises:
      ValueError: a bad argument; the message names it, its value and the rule. Nothing has been written. Also a tensor that
        requires a gradient beside out or lse_out, unless torch's gradients are off.
      TypeError: as ``attention``.
      NotImplementedError: a tensor with a tangent: there are no forward-mode derivatives.

    Sources: Yuan et al., arXiv 2502.11089; Lu et al., arXiv 2502.13189.
    """
    return_lse = flag("sparse_attention", "return_lse", return_lse)
    check_lse_out("sparse_attention", return_lse, lse_out)
    items = options_tuple(q, options)
    host = torch_host() if is_torch(q) else arrays
    return host.sparse_attention(
        q, k, v, (blocks, counts, offsets, masks, mask_ids, block_size, query_rows), items, return_lse, out, lse_out
    )
