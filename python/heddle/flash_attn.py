"""FlashAttention 2's functions, names, arguments and defaults, on Heddle's kernels: ``from heddle.flash_attn import ...``.

Torch tensors; layout [B, S, H, D], packed [total, H, D]; float32 is taken as well as float16 and bfloat16, and any head
size from 1 to 256. ``causal`` is aligned to the bottom-right corner, as FlashAttention's since 2.1: row i attends keys
j <= i + Sk - Sq. Gradients flow to q, k and v (and from the returned log-sum-exp too), except in
``flash_attn_with_kvcache``, which is for inference as FlashAttention's is, and refuses tensors that require a gradient.

``return_attn_probs=True`` returns (out, softmax_lse, S_dmask) as FlashAttention does. It fills S_dmask only with dropout,
for testing: then it is [B, H, Sq, Sk] (packed: [B, H, max_seqlen_q, max_seqlen_k]), the true softmax probabilities,
negative where dropout dropped them; FlashAttention pads Sq and Sk and scales them otherwise. It costs the full matrix and
one more pass over each 256 keys, so keep it to modest sizes. Without dropout it is an empty tensor, as there.

Flags must be bools (numpy's and the ints 0 and 1 are taken too): ``causal="none"`` is a TypeError, since Python would take
any text for true.

Source of the interface: Dao, arXiv 2307.08691, and the package flash_attn 2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._options import flag
from .functional import _torch_path, attention, attention_with_kv_cache

if TYPE_CHECKING:
    import torch

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

_KEYS_AT_ONCE = 256  # the largest head size: v as a piece of the identity


def _causal(causal: bool, operation: str = "flash_attn") -> str:
    if causal is not True and causal is not False:
        causal = flag(operation, "causal", causal)
    return "bottom_right" if causal else "none"


def _local_positions(cu_seqlens: torch.Tensor, total: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each packed row: its sequence, and its position there."""
    import torch

    lengths = cu_seqlens.diff().long()
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    return sequence, torch.arange(total) - cu_seqlens.long()[sequence]


def _dropout_matrix(q, k, seed, options, max_seqlen_q=None, max_seqlen_k=None):
    """S_dmask: softmax probabilities, negative where dropped. Attention over v = identity gives its columns."""
    import torch

    from . import _torch

    options = {**options, "dropout_p": 0.0}
    p = options.pop("drop")
    cu_q, cu_k = options.get("cu_seqlens_q"), options.get("cu_seqlens_k")
    with torch.no_grad():
        if cu_k is None:
            batch, rows, heads, keys = q.shape[0], q.shape[1], q.shape[2], k.shape[1]
            identity = torch.eye(keys, dtype=q.dtype)[None, :, None].expand(batch, keys, k.shape[2], keys)
        else:
            batch, rows, heads, keys = len(cu_q) - 1, max_seqlen_q, q.shape[1], max_seqlen_k
            _, position = _local_positions(cu_k, k.shape[0])
            identity = torch.nn.functional.one_hot(position, keys).to(q.dtype)[:, None].expand(-1, k.shape[1], keys)
        columns = [
            attention(q, k, identity[..., begin : begin + _KEYS_AT_ONCE], **options)
            for begin in range(0, keys, _KEYS_AT_ONCE)
        ]
        probabilities = torch.cat(columns, dim=-1) if columns else q.new_zeros((*q.shape[:-1], 0))
        if cu_k is not None:
            padded = q.new_zeros((batch, rows, heads, keys))
            padded[_local_positions(cu_q, q.shape[0])] = probabilities
            probabilities = padded
        probabilities = probabilities.permute(0, 2, 1, 3)
        return torch.where(_torch.dropout_keep((batch, heads, rows, keys), p, seed), probabilities, -probabilities)


def _deterministic(deterministic: bool) -> bool | None:
    """False leaves it to torch.use_deterministic_algorithms."""
    return None if deterministic is False else flag("flash_attn", "deterministic", deterministic) or None


def _run(q, k, v, dropout_p, return_attn_probs, **options):
    """attention(), with FlashAttention's three results if asked for."""
    if return_attn_probs is not True and not flag("flash_attn", "return_attn_probs", return_attn_probs):
        return attention(q, k, v, dropout_p=dropout_p, **options)
    import torch

    from . import _torch

    if dropout_p == 0.0:
        out, lse = attention(q, k, v, return_lse=True, **options)
        return out, lse, q.new_empty(0)
    if options.get("page_table") is not None:
        raise ValueError("[flash_attn] return_attn_probs with dropout does not take a block_table: gather the keys first")
    seed = _torch.seed_tensor(None)
    out, lse = attention(q, k, v, dropout_p=dropout_p, dropout_seed=seed, return_lse=True, **options)
    longest = (options["max_seqlen_q"], options["max_seqlen_k"]) if "max_seqlen_q" in options else ()
    return out, lse, _dropout_matrix(q, k, seed, {**options, "drop": dropout_p}, *longest)


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attention of q [B, Sq, H, D] over k [B, Sk, Hkv, D], v [B, Sk, Hkv, Dv]; H a multiple of Hkv.

    Args:
      dropout_p: probability of dropping; 0 in evaluation. The seed comes from torch's default generator.
      softmax_scale: 1 / sqrt(D) if None.
      causal: row i attends keys j <= i + Sk - Sq (bottom-right).
      window_size: (left, right), -1 open: row i attends keys from i + Sk - Sq - left to i + Sk - Sq + right.
      softcap: 0 for none.
      alibi_slopes: float32 [H] or [B, H]; adds -slope * |i + Sk - Sq - j|.
      deterministic: bitwise repeatable gradients; so are they under torch.use_deterministic_algorithms.
      return_attn_probs: return (out, softmax_lse float32 [B, H, Sq], S_dmask); see the module's text.

    Returns:
      out [B, Sq, H, Dv]. Rows without a key give 0.

    Raises:
      ValueError: a bad argument.
    """
    return _run(
        q,
        k,
        v,
        dropout_p,
        return_attn_probs,
        scale=softmax_scale,
        causal=_causal(causal),
        window=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        deterministic=_deterministic(deterministic),
    )


def flash_attn_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """flash_attn_func with k and v in one tensor, kv [B, Sk, 2, Hkv, D]."""
    k, v = kv.unbind(2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """flash_attn_func with q, k and v in one tensor, qkv [B, S, 3, H, D]."""
    q, k, v = qkv.unbind(2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> Any:
    """flash_attn_func over packed sequences: q [total_q, H, D], k [total_k, Hkv, D], v [total_k, Hkv, Dv].

    Args:
      cu_seqlens_q, cu_seqlens_k: int32 [B + 1], starts of the sequences, from 0 to the total.
      max_seqlen_q, max_seqlen_k: upper bounds of the lengths.
      block_table: int32 [B, max_blocks]; k and v are then pages [blocks, page_size, Hkv, D or Dv] of any page size, and
        cu_seqlens_k gives the lengths. No gradient then.
      return_attn_probs: return (out, softmax_lse float32 [H, total_q], S_dmask).

    Returns:
      out [total_q, H, Dv].

    Raises:
      ValueError: a bad argument.
    """
    options = dict(
        scale=softmax_scale,
        causal=_causal(causal),
        window=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        deterministic=_deterministic(deterministic),
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=max_seqlen_q,
    )
    if block_table is None:
        options.update(cu_seqlens_k=cu_seqlens_k, max_seqlen_k=max_seqlen_k)
    else:
        options.update(page_table=block_table, seqused_k=cu_seqlens_k.diff())
    return _run(q, k, v, dropout_p, return_attn_probs, **options)


def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """flash_attn_varlen_func with k and v in one tensor, kv [total_k, 2, Hkv, D]."""
    k, v = kv.unbind(1)
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """flash_attn_varlen_func with q, k and v in one tensor, qkv [total, 3, H, D]."""
    q, k, v = qkv.unbind(1)
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Attention over a cache, after appending k and v to it in place. For inference: no gradient.

    Args:
      q: [B, Sq, H, D].
      k_cache, v_cache: [Bc, Smax, Hkv, D or Dv]; with block_table pages [blocks, page_size, Hkv, D or Dv], of any page
        size.
      k, v: [B, Sn, Hkv, D or Dv], written at positions cache_seqlens[b] .. cache_seqlens[b] + Sn - 1 first; both or none.
      rotary_cos, rotary_sin: [max_position, R / 2]. Rotate k by its position. q is rotated at positions
        cache_seqlens[b] + i if causal or windowed, else all rows at cache_seqlens[b]. Only with k.
      cache_seqlens: int, or int32 [B]: keys in the cache before the append. None: the whole cache; not with k.
      cache_batch_idx: int32 [B], each sequence's row of the cache (not with block_table).
      cache_leftpad: int32 [B], slots to skip at the beginning of each sequence's cache.
      block_table: int32 [B, max_blocks].
      softmax_scale, causal, window_size, softcap, alibi_slopes: as flash_attn_func; Sk is the length after the append.
      rotary_interleaved: rotate pairs (0, 1), (2, 3), ...; else halves.
      num_splits: 1 asks for bits that do not depend on the rest of the batch (``batch_invariant``); 0 and more than 1
        leave the splitting of the keys to Heddle.
      return_softmax_lse: return (out, softmax_lse float32 [B, H, Sq]).

    Returns:
      out [B, Sq, H, Dv].

    Raises:
      ValueError: a bad argument, a tensor that requires a gradient (where FlashAttention drops it: make the call under
        ``torch.no_grad()`` or detach it), or an append beyond the cache, which leaves the cache as it was. (On a GPU
        lengths are not read before: rows beyond the cache are dropped.)
    """
    import torch

    if num_splits < 0:
        raise ValueError(f"[flash_attn_with_kvcache] num_splits is {num_splits}: it must be at least 0 (0: free choice)")
    if (k is None) != (v is None):
        raise ValueError("[flash_attn_with_kvcache] k and v must be given together")
    if (rotary_cos is None) != (rotary_sin is None):
        raise ValueError("[flash_attn_with_kvcache] rotary_cos and rotary_sin must be given together")
    if k is None and rotary_cos is not None:
        raise ValueError("[flash_attn_with_kvcache] rotary_cos is given and k is not: rotary needs new keys to append")
    if k is not None and cache_seqlens is None:
        raise ValueError("[flash_attn_with_kvcache] k is given and cache_seqlens is not: say where to append")
    if rotary_interleaved is not True:
        rotary_interleaved = flag("flash_attn_with_kvcache", "rotary_interleaved", rotary_interleaved)
    if return_softmax_lse is not False:
        return_softmax_lse = flag("flash_attn_with_kvcache", "return_softmax_lse", return_softmax_lse)
    names, tensors = ("q", "k_cache", "v_cache", "alibi_slopes"), (q, k_cache, v_cache, alibi_slopes)
    if k is not None:
        names, tensors = (*names, "k", "v", "rotary_cos", "rotary_sin"), (*tensors, k, v, rotary_cos, rotary_sin)
    _torch_path().refuse_gradients("flash_attn_with_kvcache", names, tensors)
    lengths = cache_seqlens
    if isinstance(lengths, int):
        lengths = torch.full((q.shape[0],), lengths, dtype=torch.int32, device=q.device)
    options = dict(
        scale=softmax_scale,
        causal=_causal(causal, "flash_attn_with_kvcache"),
        window=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        page_table=block_table,
        cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad,
        batch_invariant=num_splits == 1,
        return_lse=return_softmax_lse,
    )
    if k is None:
        return attention(q, k_cache, v_cache, seqused_k=lengths, **options)
    options.update(rotary_cos=rotary_cos, rotary_sin=rotary_sin, interleaved=rotary_interleaved)
    return attention_with_kv_cache(q, k, v, k_cache, v_cache, lengths, **options)
