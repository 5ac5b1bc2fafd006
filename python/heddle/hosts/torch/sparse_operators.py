"""The torch operators ``heddle::sparse_attention*``: attention over lists of key blocks."""

from __future__ import annotations

import torch

from ... import _heddle
from ..._options import CU_SEQLENS_Q, check_rank, schema
from .checks import refuse_tangents
from .operators import (
    changed,
    empty_lse,
    empty_out,
    gradient_buffers,
    gradients_of_arguments,
    native,
    native_items,
    register,
    returns_nothing,
    save_for_backward,
    saved,
    wanted_gradients,
)
from .transforms import for_transforms, no_second_derivative, save_nothing, transformed

_LIBRARY = torch.library.Library("heddle", "FRAGMENT")

_OPERANDS = (
    "Tensor q, Tensor k, Tensor v, Tensor blocks, Tensor? counts, Tensor? offsets, Tensor? masks, Tensor? mask_ids, "
    "SymInt block_size, SymInt query_rows"
)
_LISTS = slice(3, 10)  # blocks to query_rows among them

_LIBRARY.define(f"sparse_attention({_OPERANDS}, {schema()}) -> (Tensor, Tensor)")
_LIBRARY.define(f"sparse_attention_out({_OPERANDS}, Tensor(a!) out, Tensor(b!)? lse_out, {schema()}) -> ()")
# wanted: as for attention_backward. Nothing has a gradient in a list.
_LIBRARY.define(
    f"sparse_attention_backward(Tensor d_o, Tensor? d_lse, {_OPERANDS}, Tensor o, Tensor lse, bool[5] wanted, {schema()}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def _fake(q, k, v, blocks, counts, offsets, masks, mask_ids, block_size, query_rows, *options):
    packed = options[CU_SEQLENS_Q] is not None
    check_rank(q.shape, packed, "sparse_attention_forward")
    return empty_out(q, v, options), empty_lse(q, packed)


def _forward(q, k, v, blocks, counts, offsets, masks, mask_ids, block_size, query_rows, *options):
    lists = blocks, counts, offsets, masks, mask_ids, block_size, query_rows
    out, lse = _fake(q, k, v, *lists, *options)
    native(_heddle.sparse_attention_forward, q, k, v, *lists, out, lse, native_items(options))
    return out, lse


def _forward_out(q, k, v, blocks, counts, offsets, masks, mask_ids, block_size, query_rows, out, lse_out, *options):
    lists = blocks, counts, offsets, masks, mask_ids, block_size, query_rows
    native(_heddle.sparse_attention_forward, q, k, v, *lists, out, lse_out, native_items(options))
    changed(out, lse_out)


def _backward_fake(
    d_o, d_lse, q, k, v, blocks, counts, offsets, masks, mask_ids, block_size, query_rows, o, lse, wanted, *options
):
    return gradient_buffers(q, k, v, wanted, options)


def _backward_gradients(
    d_o, d_lse, q, k, v, blocks, counts, offsets, masks, mask_ids, block_size, query_rows, o, lse, wanted, *options
):
    lists = blocks, counts, offsets, masks, mask_ids, block_size, query_rows
    gradients = gradient_buffers(q, k, v, wanted, options)
    written = (x if want else None for x, want in zip(gradients, wanted))
    items = native_items(options)
    native(_heddle.sparse_attention_backward, q, k, v, *lists, o, lse, d_o, d_lse, *written, items)
    return gradients


def _save_for_backward(ctx, inputs, output):
    *lists, block_size, query_rows = inputs[_LISTS]
    ctx.sizes = block_size, query_rows
    tensors = (*inputs[: _LISTS.start], *lists, *output)
    save_for_backward("sparse_attention", ctx, tensors, inputs[_LISTS.stop :])


def _backward(ctx, d_o, d_lse):
    (q, k, v, *lists, out, lse), options = saved(ctx)
    names = ("d_o", "d_lse", "q", "k", "v", "o", "lse")
    refuse_tangents("sparse_attention_backward", names, (d_o, d_lse, q, k, v, out, lse))
    wanted = wanted_gradients(ctx.needs_input_grad)
    if d_o is None:
        d_o = torch.zeros_like(out)
    operator = _BackwardForTransforms.apply if transformed() else torch.ops.heddle.sparse_attention_backward
    gradients = operator(d_o, d_lse, q, k, v, *lists, *ctx.sizes, out, lse, wanted, *options)
    return gradients_of_arguments(gradients, wanted, len(ctx.needs_input_grad))


_no_second_derivative = no_second_derivative("sparse_attention_backward")
SparseForTransforms = for_transforms("sparse_attention", _save_for_backward, _backward)
_BackwardForTransforms = for_transforms("sparse_attention_backward", save_nothing, _no_second_derivative)

register(_LIBRARY, "sparse_attention", _forward, _fake)
register(_LIBRARY, "sparse_attention_out", _forward_out, returns_nothing, without_backward=True)
register(_LIBRARY, "sparse_attention_backward", _backward_gradients, _backward_fake)
torch.library.register_autograd("heddle::sparse_attention", _backward, setup_context=_save_for_backward, lib=_LIBRARY)
torch.library.register_autograd("heddle::sparse_attention_backward", _no_second_derivative, lib=_LIBRARY)
