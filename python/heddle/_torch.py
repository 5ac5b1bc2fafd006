"""Operations on torch tensors: a direct call where at most autograd watches, the torch operators where more does."""

from __future__ import annotations

import torch

from . import _heddle
from . import _torch_direct as direct
from ._options import (
    ALIBI_SLOPES,
    ARRAY_NAMES,
    ARRAYS,
    BIAS,
    DROPOUT_P,
    DROPOUT_SEED,
    K_SCALE,
    MASK,
    Q_SCALE,
    SINK,
    V_SCALE,
)
from ._torch_checks import (
    blame_subclass,
    causal_of,
    check_tensors,
    is_causal_bias,
    one_device,
    refuse_gradients,
    refuse_tangents,
)
from ._torch_ops import AttentionForTransforms, seed_tensor, transformed

_forward_operator = torch.ops.heddle.attention_forward.default
_append_operator = torch.ops.heddle.append_kv_cache.default
_cached_operator = torch.ops.heddle.attention_with_kv_cache.default
_any_autocast = torch._C._is_any_autocast_enabled
_deterministic = torch.are_deterministic_algorithms_enabled
_compiling = torch.compiler.is_compiling
_profiling = torch.autograd._profiler_enabled
_grad_enabled = torch.is_grad_enabled
_forward_ad = torch.autograd.forward_ad

# The options that sdpa has no words for.
_NO_ARRAYS = (None,) * ARRAYS
_NO_SEED = (None, 0, 0, False)
_FREE_CHOICE = (0, "", "")
_OPERANDS = ("q", "k", "v")
_SDPA_OPERANDS = ("query", "key", "value")


def _four(x):
    """bias or mask with leading extents of 1 added."""
    return x if x is None or x.dim() >= 4 else x[(None,) * (4 - x.dim())]


# What autocast casts, as it does for torch's own attention; float8_e4m3fn is a choice of the caller.
_CAST = frozenset((torch.float32, torch.float16, torch.bfloat16))


def _cast(q, k, v, items):
    """The operands as torch.autocast wants them. A float32 bias stays: it may stand beside any operands."""
    device = q.device.type
    if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
        return q, k, v, items
    dtype = torch.get_autocast_dtype(device)
    q, k, v = (x.to(dtype) if x.dtype in _CAST else x for x in (q, k, v))
    bias = items[BIAS]
    if bias is not None and bias.dtype in _CAST and bias.dtype != torch.float32:
        items = (*items[:BIAS], bias.to(dtype), *items[BIAS + 1 :])
    return q, k, v, items


def attention(q, k, v, items, return_lse, heads_first=False):
    """See heddle.attention. heads_first: q, k, v and the result are [B, H, S, D]."""
    if items[BIAS] is not None or items[MASK] is not None:
        if not heads_first:  # sdpa has done that, by its own names
            check_tensors("attention", ("bias", "mask"), (items[BIAS], items[MASK]))
        items = (items[0], _four(items[BIAS]), _four(items[MASK]), *items[MASK + 1 :])
    if _compiling() or _any_autocast():
        check_tensors("attention", _OPERANDS, (q, k, v))
        q, k, v, items = _cast(q, k, v, items)
    if direct.is_direct(q, k, v) and direct.are_direct(items[:ARRAYS]):
        try:
            if not _profiling():
                return direct.attention(q, k, v, items, return_lse, heads_first)
            with torch.autograd.profiler.record_function("heddle::attention_forward"):
                return direct.attention(q, k, v, items, return_lse, heads_first)
        except Exception:
            # These have better words for what nobody asked before the call.
            check_tensors("attention", _OPERANDS, (q, k, v))
            one_device("attention_forward", (*_OPERANDS, *ARRAY_NAMES), (q, k, v, *items[:ARRAYS]))
            raise
    check_tensors("attention", _OPERANDS, (q, k, v))
    if _forward_ad._current_level >= 0:
        refuse_tangents("attention", (*_OPERANDS, *ARRAY_NAMES), (q, k, v, *items[:ARRAYS]))
    seed = seed_tensor(items[DROPOUT_SEED]) if items[DROPOUT_P] != 0 else None
    operator = AttentionForTransforms.apply if transformed() else _forward_operator
    if heads_first:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    try:
        out, lse = operator(q, k, v, *items[:DROPOUT_SEED], seed, *items[DROPOUT_SEED + 1 :])
    except (TypeError, NotImplementedError) as error:
        blame_subclass("attention", (*_OPERANDS, *ARRAY_NAMES), (q, k, v, *items[:ARRAYS]), error)
        raise
    if heads_first:
        out = out.transpose(1, 2)
    return (out, lse) if return_lse else out


def dropout_keep(shape, p, seed):
    """bool [B, H, Sq, Sk]: which probabilities dropout keeps under this seed (an int64 tensor of one element)."""
    keep = torch.empty(shape, dtype=torch.bool)
    _heddle.dropout_mask(keep, p, int(seed) & 0xFFFFFFFFFFFFFFFF)
    return keep


def _batched(x, lead, heads):
    """[..., H, L, E] as [B, L, H, E], its leading extents broadcast to `lead` and flattened."""
    x = x.expand(*lead, heads if x.shape[-3] == 1 else x.shape[-3], *x.shape[-2:])
    return x.reshape(-1, *x.shape[-3:]).transpose(1, 2)


def _mask_planes(mask, lead):
    """attn_mask with four extents, each 1 or that of [B, H, L, S]."""
    if mask.dim() <= 4:
        return _four(mask)
    if all(extent == 1 for extent in mask.shape[:-3]):
        return mask.reshape(1, *mask.shape[-3:])
    return mask.expand(*lead, *mask.shape[-3:]).reshape(-1, *mask.shape[-3:])


def sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa):
    """See heddle.sdpa."""
    # What most calls are, with as little ado as may be: their kernels take a few microseconds.
    if attn_mask is None and direct.is_direct(query, key, value) and not _any_autocast() and not _profiling():
        try:
            if query.dim() == 4 and query.shape == key.shape == value.shape:
                items = (*_NO_ARRAYS, scale, 1 if is_causal else 0, -1, -1, 0.0, dropout_p, *_NO_SEED, _deterministic(), *_FREE_CHOICE)
                return direct.attention(query, key, value, items, False, True)
        except Exception:
            check_tensors("sdpa", _SDPA_OPERANDS, (query, key, value))  # as in attention()
            one_device("sdpa", _SDPA_OPERANDS, (query, key, value))
            raise
    if is_causal and attn_mask is not None:
        raise ValueError("[sdpa] is_causal and attn_mask exclude each other: put the causal part into attn_mask")
    causal_bias = None
    if attn_mask is not None and is_causal_bias(attn_mask):
        causal_bias, attn_mask = attn_mask, None
    check_tensors("sdpa", (*_SDPA_OPERANDS, "attn_mask"), (query, key, value, attn_mask))
    device = query.device
    if key.device != device or value.device != device or (attn_mask is not None and attn_mask.device != device):
        one_device("sdpa", (*_SDPA_OPERANDS, "attn_mask"), (query, key, value, attn_mask))
    rank = query.dim()
    if rank < 2 or key.dim() < 2 or value.dim() < 2:
        name, x = next((n, x) for n, x in (("query", query), ("key", key), ("value", value)) if x.dim() < 2)
        raise ValueError(f"[sdpa] {name} has {x.dim()} dimensions: it must be [..., H, L, E]; found {list(x.shape)}")
    if rank == 2:
        query = query[None]
    if key.dim() == 2:
        key = key[None]
    if value.dim() == 2:
        value = value[None]
    q_shape, k_shape, v_shape = query.shape, key.shape, value.shape
    heads, kv_heads = q_shape[-3], k_shape[-3]
    if kv_heads != heads and kv_heads != 1 and not enable_gqa:
        raise ValueError(
            f"[sdpa] key has {kv_heads} heads and query has {heads}: pass enable_gqa=True to share key and value heads; "
            f"found query {list(q_shape)}, key {list(k_shape)}"
        )
    lead = q_shape[:-3]
    simple = rank == 4 and k_shape[:-3] == lead and v_shape[:-3] == lead and v_shape[1] == kv_heads
    if not simple:
        lead = torch.broadcast_shapes(lead, k_shape[:-3], v_shape[:-3])
        shared = kv_heads if enable_gqa else heads
        q, k, v = _batched(query, lead, heads), _batched(key, lead, shared), _batched(value, lead, shared)
    bias = mask = None
    if attn_mask is not None:
        planes = _mask_planes(attn_mask, lead)
        if planes.dtype == torch.bool:
            mask = planes
        else:
            bias = planes
    causal, deterministic = 1 if is_causal else 0, _deterministic()
    if causal_bias is not None:
        causal = causal_of(causal_bias, q_shape[-2], k_shape[-2])
    items = (
        None, bias, mask, *_NO_ARRAYS[3:], scale, causal, -1, -1, 0.0, dropout_p, *_NO_SEED, deterministic, *_FREE_CHOICE
    )  # fmt: skip
    if simple:
        return attention(query, key, value, items, False, heads_first=True)
    out = attention(q, k, v, items, False).transpose(1, 2)
    out = out.reshape(*lead, heads, q_shape[-2], v_shape[-1])
    return out if rank > 2 else out[0]


def apply_rotary(x, cos, sin, interleaved, offsets):
    """See heddle.apply_rotary."""
    if _forward_ad._current_level >= 0:
        refuse_tangents("apply_rotary", ("x", "cos", "sin"), (x, cos, sin))
    return torch.ops.heddle.apply_rotary(x, cos, sin, interleaved, offsets)


def _without_gradients(operator, *arguments):
    """A call that has refused what requires a gradient, so that autograd need not look."""
    if not _grad_enabled():
        return operator(*arguments)
    with torch.no_grad():
        return operator(*arguments)


def append_kv_cache(
    k_new, v_new, k_cache, v_cache, seqlens, page_table, cache_batch_idx, cos, sin, interleaved, k_scale, v_scale
):
    """See heddle.append_kv_cache."""
    if _grad_enabled() or _forward_ad._current_level >= 0:
        names = ("k_new", "v_new", "k_cache", "v_cache", "rotary_cos", "rotary_sin", "k_scale", "v_scale")
        refuse_gradients("append_kv_cache", names, (k_new, v_new, k_cache, v_cache, cos, sin, k_scale, v_scale))
    _without_gradients(
        _append_operator,
        k_new, v_new, k_cache, v_cache, seqlens, page_table, cache_batch_idx, cos, sin, interleaved, k_scale, v_scale,
    )  # fmt: skip


# The options that might have gradients.
_FLOATS = (ALIBI_SLOPES, BIAS, SINK, Q_SCALE, K_SCALE, V_SCALE)


def _refuse_without_backward(operation, names, tensors, items):
    """What attention over a cache that is written or in 4 bits cannot do with its operands and its options."""
    if _grad_enabled() or _forward_ad._current_level >= 0:
        refuse_gradients(operation, names, tensors)
        for i in _FLOATS:
            if items[i] is not None:
                refuse_gradients(operation, (ARRAY_NAMES[i],), (items[i],))
    if items[BIAS] is not None or items[MASK] is not None:
        check_tensors(operation, ("bias", "mask"), (items[BIAS], items[MASK]))


def attention_with_kv_cache(q, k_new, v_new, k_cache, v_cache, cos, sin, interleaved, items, return_lse):
    """See heddle.attention_with_kv_cache."""
    names = ("q", "k_new", "v_new", "k_cache", "v_cache", "rotary_cos", "rotary_sin")
    operands = (q, k_new, v_new, k_cache, v_cache, cos, sin)
    _refuse_without_backward("attention_with_kv_cache", names, operands, items)
    seed = seed_tensor(items[DROPOUT_SEED]) if items[DROPOUT_P] != 0 else None
    items = (*items[:DROPOUT_SEED], seed, *items[DROPOUT_SEED + 1 :])
    out, lse = _without_gradients(_cached_operator, *operands, interleaved, *items)
    return (out, lse) if return_lse else out


def append_int4_cache(k_new, v_new, blocks, k_tail, v_tail, page_table, row_idx, seqlens, cos, sin, interleaved):
    """See heddle.Int4Cache."""
    names = ("k_new", "v_new", "k_tail", "v_tail", "rotary_cos", "rotary_sin")
    refuse_gradients("append_int4_cache", names, (k_new, v_new, k_tail, v_tail, cos, sin))
    _without_gradients(
        torch.ops.heddle.append_int4_cache.default,
        k_new, v_new, blocks, k_tail, v_tail, page_table, row_idx, seqlens, cos, sin, interleaved,
    )  # fmt: skip


def attention_over_int4_cache(q, cache, items, return_lse):
    """See heddle.Int4Cache."""
    _refuse_without_backward("attention_over_int4_cache", ("q", "k_tail", "v_tail"), (q, cache[1], cache[2]), items)
    seed = seed_tensor(items[DROPOUT_SEED]) if items[DROPOUT_P] != 0 else None
    items = (*items[:DROPOUT_SEED], seed, *items[DROPOUT_SEED + 1 :])
    out, lse = _without_gradients(torch.ops.heddle.attention_over_int4_cache.default, q, *cache, *items)
    return (out, lse) if return_lse else out
