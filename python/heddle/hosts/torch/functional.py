"""Operations on torch tensors: a direct call where at most autograd watches, the torch operators where more does."""

from __future__ import annotations

import torch

from ... import _heddle
from ..._options import (
    ARRAY_NAMES,
    ARRAYS,
    BIAS,
    CU_SEQLENS_Q,
    DROPOUT_P,
    DROPOUT_SEED,
    MASK,
    SINK,
    WITH_GRADIENT,
    WITHOUT_GRADIENT,
    check_rank,
    replaced,
)
from . import direct as direct
from . import flops  # noqa: F401  of this host, too
from .adaptive_operators import AdaptiveForTransforms, adaptive_forward
from .cache_operators import rotary_operator
from .checks import (
    OUTPUTS,
    WRITES,
    blame_subclass,
    check_operands,
    check_outputs,
    check_tensors,
    one_device,
    refuse_gradients,
    refuse_tangents,
    without_gradients,
)
from .linear import linear, linear_into  # noqa: F401  of this host, too
from .operators import AttentionForTransforms, changed, empty_lse, empty_out, native, native_items, seed_tensor
from .partial import merge_attention  # noqa: F401  of this host, too
from .sparse_operators import SparseForTransforms
from .transforms import transformed

_forward_operator = torch.ops.heddle.attention_forward.default
_backward_out_operator = torch.ops.heddle.attention_backward_out.default
_append_operator = torch.ops.heddle.append_kv_cache.default
_forward_out_operator = torch.ops.heddle.attention_forward_out.default
_cached_operator = torch.ops.heddle.attention_with_kv_cache.default
_cached_out_operator = torch.ops.heddle.attention_with_kv_cache_out.default
_sparse_operator = torch.ops.heddle.sparse_attention.default
_sparse_out_operator = torch.ops.heddle.sparse_attention_out.default
_adaptive_operator = torch.ops.heddle.adaptive_attention.default
_over_int4_operator = torch.ops.heddle.attention_over_int4_cache.default
_over_int4_out_operator = torch.ops.heddle.attention_over_int4_cache_out.default
is_deterministic = torch.are_deterministic_algorithms_enabled
_any_autocast = torch._C._is_any_autocast_enabled
_compiling = torch.compiler.is_compiling
_profiling = torch.autograd._profiler_enabled
_grad_enabled = torch.is_grad_enabled
_forward_ad = torch.autograd.forward_ad

_OPERANDS = ("q", "k", "v")


def four(x):
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
        items = replaced(items, BIAS, bias.to(dtype))
    return q, k, v, items


def attention(q, k, v, items, return_lse, heads_first=False):
    """See heddle.attention. heads_first: q, k, v and the result are [B, H, S, D]."""
    if items[BIAS] is not None or items[MASK] is not None:
        if not heads_first:  # sdpa has done that, by its own names
            check_tensors("attention", ("bias", "mask"), (items[BIAS], items[MASK]))
        items = replaced(replaced(items, BIAS, four(items[BIAS])), MASK, four(items[MASK]))
    if _compiling() or _any_autocast():
        check_operands("attention", _OPERANDS, (q, k, v))
        q, k, v, items = _cast(q, k, v, items)
    if direct.is_direct(q, k, v) and direct.are_direct(items[:ARRAYS]):
        try:
            if not _profiling():
                return direct.attention(q, k, v, items, return_lse, heads_first)
            with torch.autograd.profiler.record_function("heddle::attention_forward"):
                return direct.attention(q, k, v, items, return_lse, heads_first)
        except Exception:
            # These have better words for what nobody asked before the call.
            check_operands("attention", _OPERANDS, (q, k, v))
            one_device("attention_forward", (*_OPERANDS, *ARRAY_NAMES), (q, k, v, *items[:ARRAYS]))
            raise
    check_operands("attention", _OPERANDS, (q, k, v))
    check_tensors("attention", ARRAY_NAMES, items[:ARRAYS])
    refuse_tangents("attention", (*_OPERANDS, *ARRAY_NAMES), (q, k, v, *items[:ARRAYS]))
    seed = seed_tensor(items[DROPOUT_SEED]) if items[DROPOUT_P] != 0 else None
    operator = AttentionForTransforms.apply if transformed() else _forward_operator
    if heads_first:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    try:
        out, lse = operator(q, k, v, *replaced(items, DROPOUT_SEED, seed))
    except (TypeError, NotImplementedError) as error:
        blame_subclass("attention", (*_OPERANDS, *ARRAY_NAMES), (q, k, v, *items[:ARRAYS]), error)
        raise
    if heads_first:
        out = out.transpose(1, 2)
    return (out, lse) if return_lse else out


def _outputs(q, v, packed, items, return_lse, out, lse_out, operation="attention_forward"):
    """What the caller has not brought of out and, if it is wanted, lse."""
    check_rank(q.shape, packed, operation)
    out = empty_out(q, v, items) if out is None else out
    return out, empty_lse(q, packed) if return_lse and lse_out is None else lse_out


def _is_quick(q, k, v, items, out, lse_out):
    """Whether attention_into() has nothing to look at, ask or refuse."""
    if _compiling() or _any_autocast() or not direct.is_direct(q, k, v):
        return False
    if not direct.are_direct((*items[:ARRAYS], out, lse_out)):
        return False
    differentiable = (q, k, v, items[BIAS], items[SINK])
    return not (_grad_enabled() and any(x is not None and x.requires_grad for x in differentiable))


def attention_into(q, k, v, items, return_lse, out, lse_out):
    """attention() with an output that the caller has, or two."""
    names = (*_OPERANDS, *ARRAY_NAMES, *OUTPUTS)
    quick = _is_quick(q, k, v, items, out, lse_out)
    if not quick:
        check_operands("attention", _OPERANDS, (q, k, v))
        check_tensors("attention", ARRAY_NAMES, items[:ARRAYS])
        check_outputs("attention", out, lse_out)
        if _grad_enabled() or _forward_ad._current_level >= 0:
            refuse_gradients("attention", names, (q, k, v, *items[:ARRAYS], out, lse_out), WRITES)
        q, k, v, items = _cast(q, k, v, items)
    if items[BIAS] is not None or items[MASK] is not None:
        items = replaced(replaced(items, BIAS, four(items[BIAS])), MASK, four(items[MASK]))
    seed = seed_tensor(items[DROPOUT_SEED]) if items[DROPOUT_P] != 0 else None
    out, lse_out = _outputs(q, v, items[CU_SEQLENS_Q] is not None, items, return_lse, out, lse_out)
    if not quick:
        without_gradients(_forward_out_operator, q, k, v, out, lse_out, *replaced(items, DROPOUT_SEED, seed))
        return (out, lse_out) if return_lse else out
    try:
        items = items if seed is None else replaced(items, DROPOUT_SEED, int(seed))
        native(_heddle.attention_forward, q, k, v, out, lse_out, items, False)
    except Exception:
        # These have better words for what nobody asked before the call.
        tensors = (q, k, v, *items[:ARRAYS], out, lse_out)
        check_tensors("attention", names, tensors)
        one_device("attention_forward", names, tensors)
        raise
    changed(out, lse_out)
    return (out, lse_out) if return_lse else out


_GRADIENTS = ("dq", "dk", "dv", "dbias", "dsink")


def attention_backward(q, k, v, o, lse, d_o, d_lse, gradients, items, accumulate, merged):
    """See heddle.attention_backward. gradients: dq, dk, dv, dbias and dsink."""
    names = (*_OPERANDS, "o", "lse", "d_o", "d_lse", *_GRADIENTS, *ARRAY_NAMES)
    tensors = (q, k, v, o, lse, d_o, d_lse, *gradients, *items[:ARRAYS])
    check_operands("attention_backward", names[:6], tensors[:6])
    check_tensors("attention_backward", names[6:], tensors[6:])
    if transformed():
        raise ValueError(
            "[attention_backward] called inside a transform of torch.func, which cannot write to its outputs: use "
            "heddle.attention and its gradients"
        )
    if items[DROPOUT_P] != 0 and items[DROPOUT_SEED] is None:
        raise ValueError(
            f"[attention_backward] dropout_p is {items[DROPOUT_P]} and dropout_seed is missing: give the forward's"
        )
    if _grad_enabled() or _forward_ad._current_level >= 0:
        refuse_gradients("attention_backward", names, tensors, "a call that writes gradients has no backward")
    if items[BIAS] is not None or items[MASK] is not None:
        items = replaced(replaced(items, BIAS, four(items[BIAS])), MASK, four(items[MASK]))
        dbias = gradients[3]
        gradients = (*gradients[:3], four(dbias), gradients[4])
    seed = seed_tensor(items[DROPOUT_SEED]) if items[DROPOUT_P] != 0 else None
    items = replaced(items, DROPOUT_SEED, seed)
    without_gradients(_backward_out_operator, d_o, d_lse, q, k, v, o, lse, *gradients, accumulate, merged, *items)


_LISTED = (*_OPERANDS, "blocks")
_LISTED_ARRAYS = ("counts", "offsets", "masks", "mask_ids", *ARRAY_NAMES)


def _listed(q, k, v, lists, items, return_lse, out, lse_out):
    """sparse_attention() past the dispatcher."""
    packed = items[CU_SEQLENS_Q] is not None
    o, lse = _outputs(q, v, packed, items, return_lse, out, lse_out, "sparse_attention_forward")
    try:
        native(_heddle.sparse_attention_forward, q, k, v, *lists, o, lse, native_items(items))
    except ValueError:
        names = (*_LISTED, *_LISTED_ARRAYS, *OUTPUTS)
        one_device("sparse_attention_forward", names, (q, k, v, *lists[:5], *items[:ARRAYS], out, lse_out))
        raise
    changed(out, lse_out)
    return o, lse


def sparse_attention(q, k, v, lists, items, return_lse, out=None, lse_out=None):
    """See heddle.sparse_attention. lists: blocks, counts, offsets, masks, mask_ids, block_size and query_rows."""
    operands, arrays = (q, k, v, lists[0]), (*lists[1:5], *items[:ARRAYS])
    check_operands("sparse_attention", _LISTED, operands)
    check_tensors("sparse_attention", _LISTED_ARRAYS, arrays)
    names, tensors = (*_LISTED, *_LISTED_ARRAYS, *OUTPUTS), (*operands, *arrays, out, lse_out)
    written = out is not None or lse_out is not None
    if written:
        check_outputs("sparse_attention", out, lse_out)
        refuse_gradients("sparse_attention", names, tensors, WRITES)
    else:
        refuse_tangents("sparse_attention", names, tensors)
    q, k, v, items = _cast(q, k, v, items)
    items = replaced(replaced(items, BIAS, four(items[BIAS])), MASK, four(items[MASK]))
    items = replaced(items, DROPOUT_SEED, seed_tensor(items[DROPOUT_SEED]) if items[DROPOUT_P] != 0 else None)
    quick = _is_quick(q, k, v, items, out, lse_out) and all(x is None or direct.plain(x) for x in lists[:5])
    if quick and not _profiling():
        out, lse = _listed(q, k, v, lists, items, return_lse, out, lse_out)
        return (out, lse) if return_lse else out
    if written:
        packed = items[CU_SEQLENS_Q] is not None
        out, lse = _outputs(q, v, packed, items, return_lse, out, lse_out, "sparse_attention_forward")
        without_gradients(_sparse_out_operator, q, k, v, *lists, out, lse, *items)
        return (out, lse) if return_lse else out
    operator = SparseForTransforms.apply if transformed() else _sparse_operator
    try:
        out, lse = operator(q, k, v, *lists, *items)
    except (TypeError, NotImplementedError, RuntimeError) as error:
        blame_subclass("sparse_attention", names, tensors, error)
        if direct.is_direct(q, k, v):
            _listed(q, k, v, lists, items, True, None, None)  # words for values are the native module's
        raise
    return (out, lse) if return_lse else out


def adaptive_attention(q, k, v, tol, on_exceed, items):
    """See heddle.adaptive_attention."""
    names, tensors = (*_OPERANDS, *ARRAY_NAMES), (q, k, v, *items[:ARRAYS])
    check_operands("adaptive_attention", _OPERANDS, (q, k, v))
    check_tensors("adaptive_attention", ARRAY_NAMES, items[:ARRAYS])
    refuse_tangents("adaptive_attention", names, tensors)
    q, k, v, items = _cast(q, k, v, items)
    items = replaced(items, DROPOUT_SEED, None)  # dropout is refused
    operator = AdaptiveForTransforms.apply if transformed() else _adaptive_operator
    try:
        return operator(q, k, v, tol, on_exceed, *items)[:3]
    except (TypeError, NotImplementedError, RuntimeError) as error:
        blame_subclass("adaptive_attention", names, tensors, error)
        if direct.is_direct(q, k, v):
            adaptive_forward(q, k, v, tol, on_exceed, *items)  # words for values are the native module's
        raise


_CPU = torch.device("cpu")


def dropout_keep(shape, p, seed, device=_CPU):
    """bool [B, H, Sq, Sk]: which probabilities dropout keeps under this seed (an int64 tensor of one element)."""
    if device.type == "meta":
        return torch.empty(shape, dtype=torch.bool, device=device)
    keep = torch.empty(shape, dtype=torch.bool, device=_CPU)
    _heddle.dropout_mask(keep, p, int(seed) & 0xFFFFFFFFFFFFFFFF)
    return keep.to(device)


def apply_rotary(x, cos, sin, interleaved, offsets, out=None):
    """See heddle.apply_rotary."""
    if out is not None:
        check_outputs("apply_rotary", out)
        refuse_gradients("apply_rotary", ("x", "cos", "sin", "out"), (x, cos, sin, out), WRITES)
        without_gradients(torch.ops.heddle.apply_rotary_out.default, x, cos, sin, interleaved, offsets, out)
        return out
    check_operands("apply_rotary", ("x", "cos", "sin"), (x, cos, sin))
    check_tensors("apply_rotary", ("offsets",), (offsets,))
    refuse_tangents("apply_rotary", ("x", "cos", "sin"), (x, cos, sin))
    return rotary_operator()(x, cos, sin, interleaved, offsets)


def append_kv_cache(
    k_new, v_new, k_cache, v_cache, seqlens, page_table, cache_batch_idx, cos, sin, interleaved, k_scale, v_scale
):
    """See heddle.append_kv_cache."""
    if _grad_enabled() or _forward_ad._current_level >= 0:
        names = ("k_new", "v_new", "k_cache", "v_cache", "rotary_cos", "rotary_sin", "k_scale", "v_scale")
        refuse_gradients("append_kv_cache", names, (k_new, v_new, k_cache, v_cache, cos, sin, k_scale, v_scale))
    without_gradients(
        _append_operator,
        k_new,
        v_new,
        k_cache,
        v_cache,
        seqlens,
        page_table,
        cache_batch_idx,
        cos,
        sin,
        interleaved,
        k_scale,
        v_scale,
    )


def _refuse_without_backward(operation, names, tensors, items):
    """What attention over a cache that is written or in 4 bits cannot do with its operands and its options."""
    if _grad_enabled() or _forward_ad._current_level >= 0:
        refuse_gradients(operation, names, tensors)
        for i in (*WITH_GRADIENT, *WITHOUT_GRADIENT):
            if items[i] is not None:
                refuse_gradients(operation, (ARRAY_NAMES[i],), (items[i],))
    if items[BIAS] is not None or items[MASK] is not None:
        check_tensors(operation, ("bias", "mask"), (items[BIAS], items[MASK]))


def attention_with_kv_cache(
    q, k_new, v_new, k_cache, v_cache, cos, sin, interleaved, items, return_lse, out=None, lse_out=None
):
    """See heddle.attention_with_kv_cache."""
    names = ("q", "k_new", "v_new", "k_cache", "v_cache", "rotary_cos", "rotary_sin", *OUTPUTS)
    operands = (q, k_new, v_new, k_cache, v_cache, cos, sin)
    _refuse_without_backward("attention_with_kv_cache", names, (*operands, out, lse_out), items)
    seed = seed_tensor(items[DROPOUT_SEED]) if items[DROPOUT_P] != 0 else None
    items = replaced(items, DROPOUT_SEED, seed)
    if out is None and lse_out is None:
        out, lse_out = without_gradients(_cached_operator, *operands, interleaved, *items)
    else:
        check_tensors("attention_with_kv_cache", names, operands)
        check_outputs("attention_with_kv_cache", out, lse_out)
        out, lse_out = _outputs(q, v_cache, False, items, return_lse, out, lse_out)
        without_gradients(_cached_out_operator, *operands, interleaved, out, lse_out, *items)
    return (out, lse_out) if return_lse else out


def append_int4_cache(k_new, v_new, blocks, k_tail, v_tail, page_table, row_idx, seqlens, cos, sin, interleaved):
    """See heddle.Int4Cache."""
    names = ("k_new", "v_new", "k_tail", "v_tail", "rotary_cos", "rotary_sin")
    refuse_gradients("append_int4_cache", names, (k_new, v_new, k_tail, v_tail, cos, sin))
    without_gradients(
        torch.ops.heddle.append_int4_cache.default,
        k_new,
        v_new,
        blocks,
        k_tail,
        v_tail,
        page_table,
        row_idx,
        seqlens,
        cos,
        sin,
        interleaved,
    )


def attention_over_int4_cache(q, cache, items, return_lse, out=None, lse_out=None):
    """See heddle.Int4Cache."""
    names, operands = ("q", "k_tail", "v_tail"), (q, cache[1], cache[2])
    _refuse_without_backward("attention_over_int4_cache", (*names, *OUTPUTS), (*operands, out, lse_out), items)
    seed = seed_tensor(items[DROPOUT_SEED]) if items[DROPOUT_P] != 0 else None
    items = replaced(items, DROPOUT_SEED, seed)
    if out is None and lse_out is None:
        out, lse_out = without_gradients(_over_int4_operator, q, *cache, *items)
    else:
        check_tensors("attention_over_int4_cache", names, operands)
        check_outputs("attention_over_int4_cache", out, lse_out)
        out, lse_out = _outputs(q, cache[2], False, items, return_lse, out, lse_out)
        without_gradients(_over_int4_out_operator, q, *cache, out, lse_out, *items)
    return (out, lse_out) if return_lse else out
