"""Calls past the dispatcher, with their gradients, where nothing but autograd watches: a short call's time is mostly what
lies between Python and the kernel.
"""

from __future__ import annotations

import torch

from ... import _heddle
from ..._options import ARRAYS, BIAS, CU_SEQLENS_Q, DROPOUT_P, DROPOUT_SEED, SINK, check_rank, replaced
from .checks import PLAIN_TYPES, refuse_tangents
from .operators import backward_operator, empty_lse, empty_out, native, out_dtype, seed_tensor

_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_functorch_level = torch._C._functorch.peek_interpreter_stack
_legacy_batched = torch._C._functorch.is_legacy_batchedtensor  # what is_grads_batched makes
_jit_tracing = torch._C._get_tracing_state
_compiling = torch.compiler.is_compiling
_grad_enabled = torch.is_grad_enabled
_LSE_DTYPE = torch.float32
_forward_ad = torch.autograd.forward_ad


def watched():
    """Whether something wants to see the operators: tracing, compiling, a transform or a mode."""
    return (
        _compiling()
        or _dispatch_modes()
        or _function_modes()
        or _functorch_level() is not None
        or _jit_tracing() is not None
        or _forward_ad._current_level >= 0
    )


def plain(x):
    """Whether x is a tensor of no special kind, whose memory is what its values are."""
    return type(x) in PLAIN_TYPES and not x.is_neg() and not _legacy_batched(x)


def is_direct(q, k, v):
    """Whether the dispatcher would only pass the call on, to autograd at most."""
    if watched():
        return False
    for x in (q, k, v):  # plain(), written out: this is the way of every call
        if type(x) not in PLAIN_TYPES or x.is_neg() or _legacy_batched(x):
            return False
    return q.is_cuda or q.is_cpu


def are_direct(arrays):
    """As is_direct(), of the options' arrays."""
    for x in arrays:
        # Two of them have gradients; the operator says so of the others.
        if x is not None and (not plain(x) or (x.requires_grad and x is not arrays[BIAS] and x is not arrays[SINK])):
            return False
    return True


def forward(q, k, v, items, with_lse, heads_first):
    """(out, lse or None). out lies in memory as [B, S, H, D], also where q is [B, H, S, D]."""
    lse = None
    if heads_first:
        batch, heads, rows, _ = q.shape
        size = v.shape[-1]
        strides = (rows * heads * size, size, heads * size, 1)
        out = q.new_empty_strided((batch, heads, rows, size), strides, dtype=out_dtype(q, items))
        if with_lse:  # contiguous, by the function that is at hand
            lse = q.new_empty_strided((batch, heads, rows), (heads * rows, rows, 1), dtype=_LSE_DTYPE)
    else:
        out = empty_out(q, v, items)
        if with_lse:
            packed = items[CU_SEQLENS_Q] is not None
            check_rank(q.shape, packed)
            lse = empty_lse(q, packed)
    native(_heddle.attention_forward, q, k, v, out, lse, items, heads_first)
    return out, lse


#: Where bias and sink, which the items hold too, lie among _Attention's arguments where they have gradients.
_BIAS_ARGUMENT, _SINK_ARGUMENT = 6, 7


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, items, return_lse, heads_first, bias=None, sink=None):
        out, lse = forward(q, k, v, items, True, heads_first)
        arrays = items[:ARRAYS]
        for x in arrays:
            if x is not None:
                ctx.save_for_backward(q, k, v, out, lse, *arrays)
                ctx.items = items[ARRAYS:]  # the arrays are watched for changes, as saved tensors
                break
        else:
            ctx.save_for_backward(q, k, v, out, lse)
            ctx.items = items
        ctx.heads_first = heads_first
        if not return_lse:
            return out
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, d_o, d_lse=None):
        q, k, v, out, lse, *arrays = ctx.saved_tensors
        items = (*arrays, *ctx.items) if arrays else ctx.items
        needs = ctx.needs_input_grad
        if d_o is None:
            d_o = torch.zeros_like(out)
        if _grad_enabled() or watched() or not plain(d_o) or not (d_lse is None or plain(d_lse)):
            return _by_operator(d_o, d_lse, q, k, v, out, lse, needs, items, ctx.heads_first)
        dq = torch.empty_like(q) if needs[0] else None
        dk = torch.empty_like(k) if needs[1] else None
        dv = torch.empty_like(v) if needs[2] else None
        dbias = torch.empty_like(items[BIAS]) if len(needs) > _BIAS_ARGUMENT and needs[_BIAS_ARGUMENT] else None
        dsink = torch.empty_like(items[SINK]) if len(needs) > _SINK_ARGUMENT and needs[_SINK_ARGUMENT] else None
        native(
            _heddle.attention_backward,
            q,
            k,
            v,
            out,
            lse,
            d_o,
            d_lse,
            dq,
            dk,
            dv,
            dbias,
            dsink,
            items,
            ctx.heads_first,
            False,
            False,
        )
        return (dq, dk, dv, None, None, None, dbias, dsink)[: len(needs)]


# What Function.apply() looks for besides, is_direct() has found absent.
_apply = super(torch.autograd.Function, _Attention).apply


def attention(q, k, v, items, return_lse, heads_first):
    """The call and its gradients, for what is_direct(). heads_first: q, k, v and out are [B, H, S, D]."""
    if items[DROPOUT_P] != 0:
        seed = int(seed_tensor(items[DROPOUT_SEED])) & 0xFFFFFFFFFFFFFFFF
        items = replaced(items, DROPOUT_SEED, seed)
    if _grad_enabled():
        bias, sink = items[BIAS], items[SINK]
        if (bias is not None and bias.requires_grad) or (sink is not None and sink.requires_grad):
            return _apply(q, k, v, items, return_lse, heads_first, bias, sink)
        if q.requires_grad or k.requires_grad or v.requires_grad:
            return _apply(q, k, v, items, return_lse, heads_first)
    out, lse = forward(q, k, v, items, return_lse, heads_first)
    return (out, lse) if return_lse else out


def _by_operator(d_o, d_lse, q, k, v, out, lse, needs, items, heads_first):
    """The gradients where more than autograd watches the backward: create_graph, batched gradients, modes."""
    refuse_tangents("attention_backward", ("d_o", "d_lse", "q", "k", "v", "o", "lse"), (d_o, d_lse, q, k, v, out, lse))
    if heads_first:
        d_o, q, k, v, out = (x.transpose(-3, -2) for x in (d_o, q, k, v, out))
    if items[DROPOUT_SEED] is not None:
        items = replaced(items, DROPOUT_SEED, seed_tensor(items[DROPOUT_SEED]))
    wanted = [*needs[:3], *(needs[_BIAS_ARGUMENT:] or (False, False))]
    found = backward_operator()(d_o, d_lse, q, k, v, out, lse, wanted, *items)
    dq, dk, dv, dbias, dsink = (x if want else None for x, want in zip(found, wanted))
    if heads_first:
        dq, dk, dv = (x if x is None else x.transpose(-3, -2) for x in (dq, dk, dv))
    return (dq, dk, dv, None, None, None, dbias, dsink)[: len(needs)]
