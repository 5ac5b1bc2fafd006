"""The torch operators ``heddle::adaptive_attention*``: attention with a tolerance, its bound, and its gradients."""

from __future__ import annotations

import torch

from ... import _heddle
from ..._options import CU_SEQLENS_Q, check_rank, replaced_shape, schema
from .checks import refuse_tangents
from .operators import (
    empty_lse,
    empty_out,
    gradient_buffers,
    gradients_of_arguments,
    native,
    native_items,
    register,
    save_for_backward,
    saved,
    wanted_gradients,
)
from .transforms import for_transforms, no_second_derivative, save_nothing, transformed

_LIBRARY = torch.library.Library("heddle", "FRAGMENT")

# out, lse, bound, and which blocks were replaced, for the backward.
_LIBRARY.define(
    f"adaptive_attention(Tensor q, Tensor k, Tensor v, float tol, str on_exceed, {schema()}) -> "
    "(Tensor, Tensor, Tensor, Tensor)"
)
# wanted: as for attention_backward. Nothing has a gradient in what was replaced.
_LIBRARY.define(
    "adaptive_attention_backward(Tensor d_o, Tensor? d_lse, Tensor q, Tensor k, Tensor v, Tensor replaced, Tensor o, "
    f"Tensor lse, bool[5] wanted, {schema()}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)

_FIRST_OPTION = 5  # among the operator's arguments


def _fake(q, k, v, tol, on_exceed, *options):
    packed = options[CU_SEQLENS_Q] is not None
    check_rank(q.shape, packed, "adaptive_attention_forward")
    shape = replaced_shape(q.shape, k.shape, options)
    replaced = torch.empty(shape, dtype=torch.uint8, device=q.device)
    return empty_out(q, v, options), empty_lse(q, packed), empty_lse(q, packed), replaced


def adaptive_forward(q, k, v, tol, on_exceed, *options):
    results = _fake(q, k, v, tol, on_exceed, *options)
    native(_heddle.adaptive_attention_forward, q, k, v, tol, on_exceed, *results, native_items(options))
    return results


def _backward_fake(d_o, d_lse, q, k, v, replaced, o, lse, wanted, *options):
    return gradient_buffers(q, k, v, wanted, options)


def _backward_gradients(d_o, d_lse, q, k, v, replaced, o, lse, wanted, *options):
    gradients = gradient_buffers(q, k, v, wanted, options)
    written = (x if want else None for x, want in zip(gradients, wanted))
    items = native_items(options)
    native(_heddle.adaptive_attention_backward, q, k, v, replaced, o, lse, d_o, d_lse, *written, items)
    return gradients


def _save_for_backward(ctx, inputs, output):
    out, lse, bound, replaced = output
    save_for_backward("adaptive_attention", ctx, (*inputs[:3], out, lse, replaced), inputs[_FIRST_OPTION:])
    ctx.mark_non_differentiable(bound, replaced)


def _backward(ctx, d_o, d_lse, *of_bound_and_replaced):
    (q, k, v, out, lse, replaced), options = saved(ctx)
    names = ("d_o", "d_lse", "q", "k", "v", "o", "lse")
    refuse_tangents("adaptive_attention_backward", names, (d_o, d_lse, q, k, v, out, lse))
    wanted = wanted_gradients(ctx.needs_input_grad)
    if d_o is None:
        d_o = torch.zeros_like(out)
    operator = _BackwardForTransforms.apply if transformed() else torch.ops.heddle.adaptive_attention_backward
    gradients = operator(d_o, d_lse, q, k, v, replaced, out, lse, wanted, *options)
    return gradients_of_arguments(gradients, wanted, len(ctx.needs_input_grad))


_no_second_derivative = no_second_derivative("adaptive_attention_backward")
AdaptiveForTransforms = for_transforms("adaptive_attention", _save_for_backward, _backward)
_BackwardForTransforms = for_transforms("adaptive_attention_backward", save_nothing, _no_second_derivative)

register(_LIBRARY, "adaptive_attention", adaptive_forward, _fake)
register(_LIBRARY, "adaptive_attention_backward", _backward_gradients, _backward_fake)
torch.library.register_autograd("heddle::adaptive_attention", _backward, setup_context=_save_for_backward, lib=_LIBRARY)
torch.library.register_autograd("heddle::adaptive_attention_backward", _no_second_derivative, lib=_LIBRARY)
