"""Attention: the operation itself, as torch calls it, and the merge of partial results. Caches are kv_cache.py's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

from ._options import (
    CAUSAL_CODES,
    causal_code,
    check_lse_out,
    flag,
    pair,
    parts_of,
    precision_code,
    torch_is_deterministic,
    wants_float32,
)
from .hosts import arrays, is_torch, offsets, torch_host

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch
    from typing_extensions import Unpack

    from ._types import AnyArray, Array, AttentionOptions, CausalName, Float32, MethodName, PrecisionName

_loaded_sdpa = None


def _sdpa() -> Any:
    """The function for torch tensors, imported as torch_host() is."""
    global _loaded_sdpa
    found: Any = _loaded_sdpa
    if found is None:
        from .hosts.torch.sdpa import sdpa

        _loaded_sdpa = found = sdpa
    return found  # not the global: torch 2.6 would trace it as it was before


@overload
def attention(
    q: Array, k: Array, v: Array, *, return_lse: Literal[False] = False, **options: Unpack[AttentionOptions]
) -> Array: ...
@overload
def attention(
    q: Array, k: Array, v: Array, *, return_lse: Literal[True], **options: Unpack[AttentionOptions]
) -> tuple[Array, Array]: ...
@overload
def attention(
    q: Array, k: Array, v: Array, *, return_lse: bool, **options: Unpack[AttentionOptions]
) -> Array | tuple[Array, Array]: ...
def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    scale: float | None = None,
    causal: CausalName = "none",
    window: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: AnyArray | None = None,
    bias: AnyArray | None = None,
    mask: AnyArray | None = None,
    sink: AnyArray | None = None,
    dropout_p: float = 0.0,
    dropout_seed: AnyArray | int | None = None,
    cu_seqlens_q: AnyArray | None = None,
    cu_seqlens_k: AnyArray | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: AnyArray | None = None,
    seqused_k: AnyArray | None = None,
    page_table: AnyArray | None = None,
    cache_batch_idx: AnyArray | None = None,
    cache_leftpad: AnyArray | None = None,
    draft_mask: AnyArray | None = None,
    q_offset: AnyArray | int | None = None,
    key_offset: AnyArray | int | None = None,
    q_step: int = 1,
    key_step: int = 1,
    q_scale: AnyArray | None = None,
    k_scale: AnyArray | None = None,
    v_scale: AnyArray | None = None,
    return_lse: bool = False,
    out_dtype: Float32 | None = None,
    out: AnyArray | None = None,
    lse_out: AnyArray | None = None,
    batch_invariant: bool = False,
    deterministic: bool | None = None,
    precision: PrecisionName = "f32",
    method: MethodName | None = None,
    force: str | None = None,
) -> Any:
    """Exact attention: ``softmax(scale * q k^T + ...) v``, without the matrix of scores in memory.

    B sequences, H query heads, Hkv key/value heads (H a multiple of Hkv), Sq and Sk lengths, D and Dv head sizes (1 to
    256). float32, float16 or bfloat16; sums are float32. k and v may be torch.float8_e4m3fn beside 16-bit q (a cache in 8
    bits), or all three, with a bfloat16 result. Strides are free. Torch tensors go through a torch operator
    with gradients of q, k, v, bias and sink, also through the returned lse; other arrays are forward only. Tensors
    on a GPU run there, on torch's current stream or the one that their library works on (docs/arrays.md), as far as a
    candidate takes them (see ``heddle.explain``). Under
    ``torch.autocast`` q, k and v are cast to its dtype, as for torch's own attention; a float32 bias stays as it is. All
    tensors of a call are on one device (a dropout_seed may stay on the CPU); if that is ``meta``, so is the result.

    Args:
      q: [B, Sq, H, D], or packed [total_q, H, D] with cu_seqlens_q.
      k: [B, Sk, Hkv, D], packed [total_k, Hkv, D] with cu_seqlens_k, or pages [pages, page_size, Hkv, D] with page_table.
      v: as k, with head size Dv.
      scale: of the scores; 1 / sqrt(D) if None.
      causal: "none", "top_left" (row i attends keys j <= i) or "bottom_right" (j <= i + Sk - Sq), or a ``Causal``.
      window: (left, right): row i attends keys from i + off - left to i + off + right, where off is 0 for top_left and
        Sk - Sq otherwise; -1 or None leaves a side open.
      softcap: scores become softcap * tanh(scores / softcap); 0 for none.
      alibi_slopes: float32 [H] or [B, H]; adds -slope * |i + off - j|. No gradient.
      bias: added to the scores; float32 or q's dtype, broadcastable to [B, H, Sq, Sk]; -inf removes a pair.
      mask: bool, broadcastable to [B, H, Sq, Sk]; True = attend.
      sink: float32 [H], one more logit in each row's denominator, not scaled.
      dropout_p: probability of dropping each softmax probability, in [0, 1).
      dropout_seed: int (64 bits), or an int64 tensor of one element. None draws one from torch's default generator;
        other arrays than torch's need a seed. One seed gives one mask, whatever the kernel.
      cu_seqlens_q, cu_seqlens_k: int32 [B + 1], starts of the packed sequences, from 0 to the total.
      max_seqlen_q, max_seqlen_k: upper bounds of the packed lengths; found from cu_seqlens if None, but to be given on a
        GPU, whose index data is not read here.
      seqused_q, seqused_k: int32 [B], rows and keys in use.
      page_table: int32 [B, max_pages], the page of each page_size keys.
      cache_batch_idx: int32 [B], the row of k and v that each sequence reads (not with page_table).
      cache_leftpad: int32 [B], slots to skip before each sequence's first key.
      draft_mask: int32 [B, Sq], Sq <= 32: bit t of entry [b, i] lets row i attend the key at position Sk - Sq + t, the
        last Sq keys (lengths as used) being the draft's own.
      q_offset, key_offset: int32 [B], or an int for all: where rows and keys of a piece of a longer problem begin
        (docs/partial.md); one that is None is 0 beside the other. Row i then stands at position q_offset[b] + i and key j at
        key_offset[b] + j, and off is q_offset[b] - key_offset[b]: causality ("top_left", a row's own position and before),
        window, ALiBi and dropout are about positions. Bias and mask have the piece's rows and the longer problem's columns.
      q_step, key_step: for rows or keys that stand for several positions: row i stands at q_offset[b] + q_step * i and key j
        at key_offset[b] + key_step * j. With one above 1 offsets that are None are 0, causal is "none" or "top_left", and
        there are no alibi_slopes, bias, mask, dropout or draft_mask.
      q_scale, k_scale, v_scale: float32, beside float8_e4m3fn: the shape of q (k, v) without its last extent, each extent
        that or 1; a stored x stands for x * scale. 1 if None.
      return_lse: also return the log-sum-exp of each row's scores.
      out_dtype: float32 ("float32", torch's or numpy's) for a result that is not rounded to q's dtype, which None gives.
      out: where to write the result, which is then the one that is returned: an array of the same library, dtype and shape
        as the result would have, on q's device, any strides whose elements are apart (on a GPU a slower candidate may run
        unless rows are contiguous and begin at multiples of 16 bytes). It shares no memory with what is read. Without
        gradients.
      lse_out: the same for lse, float32; beside return_lse.
      batch_invariant: a row's bits do not depend on the rest of the batch, also where keys are split.
      deterministic: bitwise repeatable gradients (the CPU's are so always). None follows
        ``torch.use_deterministic_algorithms``.
      precision: of products of float32 on a GPU: "f32" (as float32 rounds) or "tf32" (11 bits, faster). "int8_qk": of
        q k^T of 16-bit operands, rounded to 8 bits after the keys' mean is taken off; forward only, on GPUs from Ampere on.
      method: "flash" or "baseline" (the full score matrix); None chooses.
      force: a candidate's name, as ``heddle.explain`` lists it; None chooses.

    Returns:
      out [B, Sq, H, Dv] (packed: [total_q, H, Dv]), of q's dtype (or out_dtype) and kind of array; with return_lse a pair with lse,
      float32 [B, H, Sq] (packed: [H, total_q]). A row without any key gives 0 and lse -inf (with a sink, lse = sink).

    Raises:
      ValueError: a bad argument; the message names it, its value and the rule. Nothing has been written. Also a tensor that
        requires a gradient beside out or lse_out, unless torch's gradients are off.
      TypeError: a bool as ``causal``, what is no bool as return_lse, batch_invariant or deterministic (numpy's bool and
        the ints 0 and 1 are), what is no number, an object that is no array, or a tensor whose memory is not its
        values: torch's ``CausalBias``, nested and sparse ones.
      NotImplementedError: a tensor with a tangent: there are no forward-mode derivatives.
      RuntimeError: something outside the arguments failed.

    Sources: Dao et al., arXiv 2205.14135 and 2307.08691; ALiBi: Press et al., arXiv 2108.12409.
    """
    # As _options.pack(), written out: this is the way of every call, and a short call takes a few microseconds.
    if return_lse is not False and return_lse is not True:
        return_lse = flag("attention", "return_lse", return_lse)
    if batch_invariant is not False and batch_invariant is not True:
        batch_invariant = flag("attention", "batch_invariant", batch_invariant)
    if deterministic is None:
        deterministic = torch_host().is_deterministic() if is_torch(q) else torch_is_deterministic()
    elif deterministic is not False and deterministic is not True:
        deterministic = flag("attention", "deterministic", deterministic)
    left, right = window if type(window) is tuple and len(window) == 2 else pair(window)
    if q_offset is not None or key_offset is not None:
        q_offset = offsets("q_offset", q_offset, q, cu_seqlens_q)
        key_offset = offsets("key_offset", key_offset, q, cu_seqlens_q)
    items = (
        alibi_slopes,
        bias,
        mask,
        sink,
        cu_seqlens_q,
        cu_seqlens_k,
        seqused_q,
        seqused_k,
        page_table,
        cache_batch_idx,
        cache_leftpad,
        draft_mask,
        q_offset,
        key_offset,
        q_scale,
        k_scale,
        v_scale,
        scale,
        CAUSAL_CODES[causal] if type(causal) is str and causal in CAUSAL_CODES else causal_code(causal),
        -1 if left is None else left,
        -1 if right is None else right,
        q_step,
        key_step,
        softcap,
        dropout_p,
        dropout_seed,
        max_seqlen_q or 0,
        max_seqlen_k or 0,
        batch_invariant,
        deterministic,
        out_dtype is not None and wants_float32("attention", out_dtype),
        0 if precision == "f32" else precision_code(precision),
        method or "",
        force or "",
    )
    if out is not None or lse_out is not None:
        check_lse_out("attention", return_lse, lse_out)
        if is_torch(q):
            return torch_host().attention_into(q, k, v, items, return_lse, out, lse_out)
        return arrays.attention(q, k, v, items, return_lse, out, lse_out)
    if is_torch(q):
        return torch_host().attention(q, k, v, items, return_lse)
    return arrays.attention(q, k, v, items, return_lse)


def sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """``torch.nn.functional.scaled_dot_product_attention`` on Heddle's kernels: same signature, shapes and rules.

    Args:
      query: torch tensor [..., H, L, E], or [L, E].
      key: [..., Hkv, S, E], value: [..., Hkv, S, Ev]; heads and what is in front of them broadcast between the three.
        Extents of 0 are served; head sizes are at most 256.
      attn_mask: broadcastable to the attention weights, [..., H, L, S]: bool (True = attend), or float32 or query's
        dtype, added to the scores, with its gradient. Or a ``CausalBias`` of ``torch.nn.attention.bias`` for lengths L
        and S: causal_upper_left is is_causal, causal_lower_right lets row i attend keys j <= i + S - L.
      dropout_p: probability of dropping, in [0, 1); the seed comes from torch's default generator. At 1, where torch
        gives zeros on some devices and an error on others, an error.
      is_causal: row i attends keys j <= i (top-left, as torch), also if L != S. Not together with attn_mask.
      scale: of the scores; 1 / sqrt(E) if None.
      enable_gqa: H may be a multiple of the heads of key and of those of value, instead of broadcasting with them. Like
        is_causal a bool; numpy's and the ints 0 and 1 are taken too.

    Gradients are bitwise repeatable under ``torch.use_deterministic_algorithms``; ``torch.autocast`` casts as for
    ``heddle.attention``.

    Returns:
      [..., H, L, Ev]. Rows that are masked fully give 0, with gradients of 0: also the first L - S under
      causal_lower_right, of which torch warns that they may be NaN.

    Raises:
      ValueError: a bad argument. TypeError: not torch tensors, or of a kind whose memory is not its values.
      NotImplementedError: a tensor with a tangent: there are no forward-mode derivatives.
    """
    if not is_torch(query):
        raise TypeError(f"[sdpa] query is a {type(query).__name__}: it must be a torch tensor; see heddle.attention")
    if is_causal is not False and is_causal is not True:
        is_causal = flag("sdpa", "is_causal", is_causal)
    if enable_gqa is not False and enable_gqa is not True:
        enable_gqa = flag("sdpa", "enable_gqa", enable_gqa)
    return _sdpa()(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def merge_attention(
    os: Iterable[Array],
    lses: Iterable[Array],
    sink: AnyArray | None = None,
    *,
    out_dtype: Float32 | None = None,
    out: AnyArray | None = None,
    lse_out: AnyArray | None = None,
) -> tuple[Array, Array]:
    """Joins results of ``attention`` over parts of a row's keys: together they are the call over all of them.

    ``lse = ln(sum_p exp(lse_p) + exp(sink))`` and ``out = sum_p exp(lse_p - lse) o_p``, summed in the order of the parts.
    The gradients of os, lses and sink follow for torch tensors; other arrays are forward only. docs/partial.md has an
    example.

    Args:
      os: a sequence of results over the same rows, each [B, Sq, H, Dv] or packed [total_q, H, Dv], of one dtype; float32
        (``out_dtype`` of ``attention``) keeps what rounding each would lose.
      lses: their lse, float32 [B, H, Sq] or packed [H, total_q], as ``return_lse`` gives them.
      sink: float32 [H], one more logit in each row's denominator. It enters here, once: the parts are made without it.
      out_dtype: float32 ("float32", torch's or numpy's) beside os in 16 bits; None gives their dtype.
      out, lse_out: where to write the results, which are then those that are returned; may be one of os (lses) itself.
        Without gradients.

    Returns:
      (out, lse). Parts without any key (lse -inf) count nothing; where all are so, out is 0 and lse -inf (with a sink, lse
      = sink). NaN stays NaN. One part alone comes back to the bit.

    Raises:
      ValueError: a bad argument; the message names it, its value and the rule. Nothing has been written. Also a tensor that
        requires a gradient beside out or lse_out, unless torch's gradients are off.
      NotImplementedError: a tensor with a tangent: there are no forward-mode derivatives.
    """
    os, lses = parts_of("merge_attention", os, lses)
    float32_out = wants_float32("merge_attention", out_dtype)
    host = torch_host() if is_torch(os[0]) else arrays
    return host.merge_attention(os, lses, sink, float32_out, out, lse_out)
