"""torch.nn.functional.scaled_dot_product_attention's shapes and rules, for attention on torch tensors."""

from __future__ import annotations

import math

import torch
from torch.nn.functional import pad

from ..._options import ARRAYS
from . import direct as direct
from .checks import causal_of, check_operands, check_tensors, is_causal_bias, one_device
from .functional import attention, four

_any_autocast = torch._C._is_any_autocast_enabled
_deterministic = torch.are_deterministic_algorithms_enabled
_profiling = torch.autograd._profiler_enabled

_OPERANDS = ("query", "key", "value")
# The options that sdpa has no words for.
_NO_ARRAYS = (None,) * ARRAYS
_NO_SEED = (None, 0, 0, False)
_FREE_CHOICE = (False, 0, "", "")


def _shapes(query, key, value):
    return f"found query {list(query.shape)}, key {list(key.shape)}, value {list(value.shape)}"


def _check_extents(query, key, value):
    for name, x in zip(_OPERANDS, (query, key, value)):
        if x.dim() < 2:
            raise ValueError(
                f"[sdpa] {name} has {x.dim()} dimensions: it must be [..., H, L, E]; found {list(x.shape)}"
            )
    if key.shape[-1] != query.shape[-1]:
        raise ValueError(
            f"[sdpa] key has head size {key.shape[-1]} and query has {query.shape[-1]}: they must be equal; "
            + _shapes(query, key, value)
        )
    if value.shape[-2] != key.shape[-2]:
        raise ValueError(
            f"[sdpa] value has length {value.shape[-2]} and key has {key.shape[-2]}: they must be equal; "
            + _shapes(query, key, value)
        )


def _check_groups(query, key, value):
    heads = query.shape[-3]
    for name, x in (("key", key), ("value", value)):
        found = x.shape[-3]
        if heads > 0 and (found == 0 or heads % found != 0):
            raise ValueError(
                f"[sdpa] {name} has {found} heads and query has {heads}: with enable_gqa query's must be a multiple; "
                + _shapes(query, key, value)
            )


def _heads(query, key, value):
    """The heads of the result where all that differ are 1."""
    heads = query.shape[-3]
    for name, x in (("key", key), ("value", value)):
        found = x.shape[-3]
        if heads == 1:
            heads = found
        elif found != heads and found != 1:
            raise ValueError(
                f"[sdpa] {name} has {found} heads and query has {query.shape[-3]}: pass enable_gqa=True to share key "
                f"and value heads; {_shapes(query, key, value)}"
            )
    return heads


def _leading(query, key, value):
    try:
        return torch.broadcast_shapes(*(x.shape[:-3] for x in (query, key, value)))
    except RuntimeError:
        raise ValueError(
            f"[sdpa] leading dimensions of query, key and value do not broadcast: {_shapes(query, key, value)}"
        ) from None


def _batched(x, lead, heads):
    """[..., h, L, E] as [B, L, heads, E], its leading extents broadcast to `lead` and flattened; h is heads, divides it
    or is 1."""
    if x.shape[-3] != heads:
        x = (
            x.expand(*x.shape[:-3], heads, *x.shape[-2:])
            if x.shape[-3] == 1
            else x.repeat_interleave(heads // x.shape[-3], -3)
        )
    return x.expand(*lead, *x.shape[-3:]).reshape(math.prod(lead), *x.shape[-3:]).transpose(1, 2)


def _planes(mask, query, weights, lead):
    """attn_mask with four extents, each 1 or that of [B, H, L, S]. weights: the shape of the attention weights."""
    fits = mask.dim() <= len(weights) and all(a in (1, b) for a, b in zip(reversed(mask.shape), reversed(weights)))
    if not fits:
        raise ValueError(
            f"[sdpa] attn_mask is {list(mask.shape)}: it must be broadcastable to [..., H, L, S] = {list(weights)}"
        )
    if mask.dtype not in (torch.bool, torch.float32, query.dtype) and not _any_autocast():
        raise ValueError(
            f"[sdpa] attn_mask is {mask.dtype}: it must be torch.bool (True = attend), torch.float32 or query's dtype, "
            f"{query.dtype}"
        )
    if mask.dim() <= 4 and len(lead) <= 1:
        return four(mask)
    mask = mask[(None,) * (len(lead) + 3 - mask.dim())]
    if all(extent == 1 for extent in mask.shape[:-3]):
        return mask.reshape(1, *mask.shape[-3:])
    return mask.expand(*lead, *mask.shape[-3:]).reshape(math.prod(lead), *mask.shape[-3:])


def _options(bias, mask, scale, causal, dropout_p):
    return (
        None,
        bias,
        mask,
        *_NO_ARRAYS[3:],
        scale,
        causal,
        -1,
        -1,
        1,
        1,
        0.0,
        dropout_p,
        *_NO_SEED,
        _deterministic(),
        *_FREE_CHOICE,
    )


def sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa):
    """See heddle.sdpa."""
    # What most calls are, with as little ado as may be: their kernels take a few microseconds.
    if attn_mask is None and direct.is_direct(query, key, value) and not _any_autocast() and not _profiling():
        try:
            if query.dim() == 4 and query.shape == key.shape == value.shape and query.numel() > 0:
                items = _options(None, None, scale, 1 if is_causal else 0, dropout_p)
                return direct.attention(query, key, value, items, False, True)
        except Exception:
            check_tensors("sdpa", _OPERANDS, (query, key, value))  # as in attention()
            one_device("sdpa", _OPERANDS, (query, key, value))
            raise
    if is_causal and attn_mask is not None:
        raise ValueError("[sdpa] is_causal and attn_mask exclude each other: put the causal part into attn_mask")
    causal_bias = None
    if attn_mask is not None and is_causal_bias(attn_mask):
        causal_bias, attn_mask = attn_mask, None
    check_operands("sdpa", _OPERANDS, (query, key, value))
    check_tensors("sdpa", ("attn_mask",), (attn_mask,))
    device = query.device
    if key.device != device or value.device != device or (attn_mask is not None and attn_mask.device != device):
        one_device("sdpa", (*_OPERANDS, "attn_mask"), (query, key, value, attn_mask))
    _check_extents(query, key, value)
    causal = 1 if is_causal else 0
    if causal_bias is not None:
        causal = causal_of(causal_bias, query.shape[-2], key.shape[-2])
    return _general(query, key, value, attn_mask, dropout_p, causal, scale, enable_gqa)


def _general(query, key, value, attn_mask, dropout_p, causal, scale, enable_gqa):
    """What has been checked, of any number of dimensions."""
    rank = max(query.dim(), key.dim(), value.dim())
    query, key, value = (x[(None,) * (3 - x.dim())] if x.dim() < 3 else x for x in (query, key, value))
    rows, keys, width = query.shape[-2], key.shape[-2], value.shape[-1]
    if enable_gqa:
        _check_groups(query, key, value)
        heads = query.shape[-3]
        shared = key.shape[-3] if key.shape[-3] == value.shape[-3] else math.lcm(key.shape[-3], value.shape[-3])
    else:
        heads = _heads(query, key, value)
        shared = value.shape[-3] if key.shape[-3] == 1 else key.shape[-3]
    lead = _leading(query, key, value)
    shape = (*lead, heads, rows, width)
    bias = mask = None
    if attn_mask is not None:
        planes = _planes(attn_mask, query, (*lead, heads, rows, keys)[-max(rank, 2) :], lead)
        bias, mask = (None, planes) if planes.dtype == torch.bool else (planes, None)
    items = _options(bias, mask, scale, causal, dropout_p)
    if heads == 0 or width == 0:
        # No kernel has anything to write; the gradients are zeros.
        out = query.new_zeros(shape) + 0 * (query.sum() + key.sum() + value.sum())
    else:
        if query.shape[-1] == 0:  # every score is 0
            query, key = pad(query, (0, 1)), pad(key, (0, 1))
        alike = query.shape[:-3] == key.shape[:-3] == value.shape[:-3] and key.shape[-3] == value.shape[-3]
        if alike and len(lead) == 1 and query.shape[-3] == heads:
            return attention(query, key, value, items, False, heads_first=True)
        q, k, v = _batched(query, lead, heads), _batched(key, lead, shared), _batched(value, lead, shared)
        out = attention(q, k, v, items, False).transpose(1, 2).reshape(shape)
    return out if rank > 2 else out[0]
