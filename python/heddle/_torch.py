"""Operations on torch tensors: a direct call where nothing watches, the torch operators where something does."""

from __future__ import annotations

import torch

from . import _heddle
from ._options import ARRAYS, BIAS, CU_SEQLENS_Q, DROPOUT_P, DROPOUT_SEED, MASK, check_rank
from ._torch_ops import AttentionForTransforms, empty_lse, empty_out, native, transformed

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


_cuda_built = _heddle.cuda_built()
_DEVICES = ("cpu", "meta", "cuda") if _cuda_built else ("cpu", "meta")
# The options that sdpa has no words for.
_NO_ARRAYS = (None,) * (ARRAYS - 3)
_FREE_CHOICE = (0, 0, False, False, 0, "", "")


def _unwatched(q, k, v, arrays):
    """Whether the dispatcher would only pass the call on: no tracing, compiling, transform, mode, profiler or gradient,
    and strided tensors whose memory is what their values are.

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
        or not (q.is_cuda or q.is_cpu)
    ):
        return False
    grad = _grad_enabled()
    for x in (q, k, v):
        if type(x) not in _PLAIN_TYPES or x.is_neg() or (grad and x.requires_grad):
            return False
    for x in arrays:
        if x is not None and (type(x) not in _PLAIN_TYPES or x.is_neg() or (grad and x.requires_grad)):
            return False
    return True


def _check_tensors(names, tensors):
    for name, tensor in zip(names, tensors):
        if tensor is None:
            continue
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"[attention] {name} is a {type(tensor).__name__}: it must be a torch tensor, as q is")
        if tensor.device.type not in _DEVICES:
            where = "Heddle runs on the CPU and on NVIDIA GPUs" if _cuda_built else "this build of Heddle runs on the CPU"
            raise ValueError(f"[attention] {name} is on {tensor.device}: {where}")


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


def attention(q, k, v, items, return_lse):
    """See heddle.attention."""
    if items[BIAS] is not None or items[MASK] is not None:
        _check_tensors(("bias", "mask"), (items[BIAS], items[MASK]))
        items = (items[0], _four(items[BIAS]), _four(items[MASK]), *items[MASK + 1 :])
    if items[DROPOUT_P] == 0 and _unwatched(q, k, v, items[:ARRAYS]):
        out = empty_out(q, v)
        lse = None
        if return_lse:
            packed = items[CU_SEQLENS_Q] is not None
            check_rank(q.shape, packed)
            lse = empty_lse(q, packed)
        native(_heddle.attention_forward, q, k, v, out, lse, items)
        return (out, lse) if return_lse else out
    _check_tensors(("q", "k", "v"), (q, k, v))
    seed = _seed_tensor(items[DROPOUT_SEED]) if items[DROPOUT_P] != 0 else None
    operator = AttentionForTransforms.apply if transformed() else _forward_operator
    out, lse = operator(q, k, v, *items[:DROPOUT_SEED], seed, *items[DROPOUT_SEED + 1 :])
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
    _check_tensors(("query", "key", "value", "attn_mask"), (query, key, value, attn_mask))
    if is_causal and attn_mask is not None:
        raise ValueError("[sdpa] is_causal and attn_mask exclude each other: put the causal part into attn_mask")
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
    if simple:
        q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    else:
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
    items = (None, bias, mask, *_NO_ARRAYS, scale, 1 if is_causal else 0, -1, -1, 0.0, dropout_p, None, *_FREE_CHOICE)
    out = attention(q, k, v, items, False).transpose(1, 2)
    if simple:
        return out
    out = out.reshape(*lead, heads, q_shape[-2], v_shape[-1])
    return out if rank > 2 else out[0]


def apply_rotary(x, cos, sin, interleaved, offsets):
    """See heddle.apply_rotary."""
    return torch.ops.heddle.apply_rotary(x, cos, sin, interleaved, offsets)


def append_kv_cache(
    k_new, v_new, k_cache, v_cache, seqlens, page_table, cache_batch_idx, cos, sin, interleaved, k_scale, v_scale
):
    """See heddle.append_kv_cache."""
    with torch.no_grad():
        torch.ops.heddle.append_kv_cache(
            k_new, v_new, k_cache, v_cache, seqlens, page_table, cache_batch_idx, cos, sin, interleaved, k_scale, v_scale
        )


def attention_with_kv_cache(q, k_new, v_new, k_cache, v_cache, cos, sin, interleaved, items, return_lse):
    """See heddle.attention_with_kv_cache."""
    with torch.no_grad():
        seed = _seed_tensor(items[DROPOUT_SEED]) if items[DROPOUT_P] != 0 else None
        items = (*items[:DROPOUT_SEED], seed, *items[DROPOUT_SEED + 1 :])
        out, lse = torch.ops.heddle.attention_with_kv_cache(
            q, k_new, v_new, k_cache, v_cache, cos, sin, interleaved, *items
        )
    return (out, lse) if return_lse else out
