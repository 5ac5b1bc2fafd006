"""Operations on torch tensors: a direct call where nothing watches, the torch operators where something does."""

from __future__ import annotations

import torch

from . import _heddle
from ._torch_ops import AttentionForTransforms, check_rank, empty_lse, empty_out, seed_number, transformed, view

_forward_operator = torch.ops.heddle.attention_forward.default
_PLAIN_TYPES = frozenset((torch.Tensor, torch.nn.Parameter))
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_functorch_level = torch._C._functorch.peek_interpreter_stack
_jit_tracing = torch._C._get_tracing_state
_profiling = torch.autograd._profiler_enabled
_compiling = torch.compiler.is_compiling
_grad_enabled = torch.is_grad_enabled
_forward_ad = torch.autograd.forward_ad


def _plain(tensor, grad):
    """A strided CPU tensor whose memory is what its values are, and that no gradient is asked of."""
    return type(tensor) in _PLAIN_TYPES and tensor.is_cpu and not tensor.is_neg() and not (grad and tensor.requires_grad)


def _unwatched(q, k, v, arrays):
    """Whether the dispatcher would only pass the call on: no tracing, compiling, transform, mode, profiler or gradient.

    Skipping it then saves more than a short call's own time.
    """
    if (
        _compiling()
        or _dispatch_modes()
        or _function_modes()
        or _functorch_level() is not None
        or _jit_tracing() is not None
        or _forward_ad._current_level >= 0
        or _profiling()
    ):
        return False
    grad = _grad_enabled()
    if not (_plain(q, grad) and _plain(k, grad) and _plain(v, grad)):
        return False
    for tensor in arrays:
        if tensor is not None and not _plain(tensor, grad):
            return False
    return True


def _check_tensors(names, tensors):
    for name, tensor in zip(names, tensors):
        if tensor is None:
            continue
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"[attention] {name} is a {type(tensor).__name__}: it must be a torch tensor, as q is")
        if tensor.device.type not in ("cpu", "meta"):
            raise ValueError(f"[attention] {name} is on {tensor.device}: this build of Heddle runs on the CPU")


def _four(x):
    """bias or mask with leading extents of 1 added."""
    return x if x is None or x.dim() >= 4 else x[(None,) * (4 - x.dim())]


def _seed_tensor(seed):
    """int64 of one element, from an int, such a tensor, or torch's default generator."""
    if seed is None:
        return torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64)
    if isinstance(seed, torch.Tensor):
        return seed
    seed &= 0xFFFFFFFFFFFFFFFF
    return torch.tensor(seed - (1 << 64) if seed >> 63 else seed, dtype=torch.int64)


def attention(q, k, v, arrays, numbers, seed, rest, return_lse):
    """See heddle.attention."""
    dropout = numbers[5] != 0
    if arrays[1] is not None or arrays[2] is not None:
        alibi_slopes, bias, mask, *others = arrays
        _check_tensors(("bias", "mask"), (bias, mask))
        arrays = (alibi_slopes, _four(bias), _four(mask), *others)
    if not dropout and _unwatched(q, k, v, arrays):
        packed = arrays[4] is not None
        check_rank(q, packed)
        out = empty_out(q, v)
        lse = empty_lse(q, packed) if return_lse else None
        items = (*map(view, arrays), *numbers, 0, *rest)
        _heddle.attention_forward(view(q), view(k), view(v), view(out), view(lse), items)
        return (out, lse) if return_lse else out
    _check_tensors(("q", "k", "v"), (q, k, v))
    operator = AttentionForTransforms.apply if transformed() else _forward_operator
    out, lse = operator(q, k, v, *arrays, *numbers, _seed_tensor(seed) if dropout else None, *rest)
    return (out, lse) if return_lse else out


def dropout_keep(shape, p, seed):
    """bool [B, H, Sq, Sk]: which probabilities dropout keeps under this seed (an int64 tensor of one element)."""
    keep = torch.empty(shape, dtype=torch.bool)
    _heddle.dropout_mask(view(keep), p, seed_number(seed))
    return keep


def _batched(x, lead, heads):
    """[..., H, L, E] as [B, L, H, E], its leading extents broadcast to `lead` and flattened."""
    x = x.expand(*lead, heads if x.shape[-3] == 1 else x.shape[-3], *x.shape[-2:])
    return x.reshape(-1, *x.shape[-3:]).transpose(1, 2)


def _mask_planes(mask, lead):
    """attn_mask with four extents, each 1 or that of [B, H, L, S]."""
    if mask.dim() <= 3:
        return _four(mask)
    if all(extent == 1 for extent in mask.shape[:-3]):
        return mask.reshape(1, *mask.shape[-3:])
    return mask.expand(*lead, *mask.shape[-3:]).reshape(-1, *mask.shape[-3:])


def sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa):
    """See heddle.sdpa."""
    _check_tensors(("query", "key", "value", "attn_mask"), (query, key, value, attn_mask))
    if is_causal and attn_mask is not None:
        raise ValueError("[sdpa] is_causal and attn_mask exclude each other: put the causal part into attn_mask")
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dim() < 2:
            raise ValueError(f"[sdpa] {name} has {x.dim()} dimensions: it must be [..., H, L, E]; found {list(x.shape)}")
    rank = query.dim()
    query, key, value = (x if x.dim() >= 3 else x[None] for x in (query, key, value))
    heads, kv_heads = query.shape[-3], key.shape[-3]
    if not enable_gqa and kv_heads not in (heads, 1):
        raise ValueError(
            f"[sdpa] key has {kv_heads} heads and query has {heads}: pass enable_gqa=True to share key and value heads; "
            f"found query {list(query.shape)}, key {list(key.shape)}"
        )
    lead = torch.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])
    shared = kv_heads if enable_gqa else heads
    bias = mask = None
    if attn_mask is not None:
        planes = _mask_planes(attn_mask, lead)
        bias, mask = (None, planes) if planes.dtype == torch.bool else (planes, None)
    out = attention(
        _batched(query, lead, heads),
        _batched(key, lead, shared),
        _batched(value, lead, shared),
        (None, bias, mask) + (None,) * 8,
        (scale, 1 if is_causal else 0, -1, -1, 0.0, dropout_p),
        None,
        (0, 0, False, False, "", ""),
        False,
    )
    out = out.transpose(1, 2).reshape(*lead, heads, query.shape[-2], value.shape[-1])
    return out if rank >= 3 else out[0]


def apply_rotary(x, cos, sin, interleaved, offsets):
    """See heddle.apply_rotary."""
    return torch.ops.heddle.apply_rotary(x, cos, sin, interleaved, offsets)


def append_kv_cache(
    k_new, v_new, k_cache, v_cache, seqlens, page_table, cache_batch_idx, rotary_cos, rotary_sin, interleaved
):
    """See heddle.append_kv_cache."""
    with torch.no_grad():
        torch.ops.heddle.append_kv_cache(
            k_new, v_new, k_cache, v_cache, seqlens, page_table, cache_batch_idx, rotary_cos, rotary_sin, interleaved
        )
