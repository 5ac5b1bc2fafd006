"""Linear layers over packed weights for torch: the operators ``heddle::linear_*``, and the way past the dispatcher."""

from __future__ import annotations

import torch

from ... import _heddle
from ..._linear_options import (
    ACTIVATION,
    ARRAY_NAMES,
    ARRAYS,
    BIAS,
    NORM,
    NORM_BIAS,
    NORM_EPS,
    NORM_WEIGHT,
    OPTIONS,
    OPTIONS_SCHEMA,
    PARTS,
    PARTS_SCHEMA,
    RESIDUAL,
    WEIGHTS,
    of_backward,
    without_norm,
)
from .checks import check_tensors, one_device, refuse_gradients, refuse_tangents
from .direct import plain, watched
from .operators import changed, native, register, returns_nothing
from .transforms import for_transforms, no_second_derivative, save_nothing, transformed

_LIBRARY = torch.library.Library("heddle", "FRAGMENT")
_LIBRARY.define(f"linear_forward(Tensor x, {PARTS_SCHEMA}, {OPTIONS_SCHEMA}) -> Tensor")
_LIBRARY.define(f"linear_forward_out(Tensor x, {PARTS_SCHEMA}, Tensor(a!) out, {OPTIONS_SCHEMA}) -> ()")
# wanted: which of dx, dbias, dnorm_weight, dnorm_bias to compute; the others come back with no elements.
_LIBRARY.define(
    f"linear_backward(Tensor dy, Tensor? x, {PARTS_SCHEMA}, bool[4] wanted, {OPTIONS_SCHEMA}) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)
_PARTS = len(PARTS)
_WITH_GRADIENT = (BIAS, NORM_WEIGHT, NORM_BIAS)  # of linear_backward, beside x


def _result(x, parts):
    _, rows, columns, gated, *_ = parts
    shape = x.shape
    if not shape or shape[-1] != columns:
        raise ValueError(
            f"[linear_forward] x is {list(shape)} and weights have {columns} columns: x must be [..., {columns}]"
        )
    return x.new_empty((*shape[:-1], rows // 2 if gated else rows))


def _run(x, parts, options):
    y = _result(x, parts)
    native(_heddle.linear_forward, x, parts, y, options)
    return y


# The operators' arguments: x, the parts, [the result, or what is wanted,] the options.
def _forward_fake(x, *others):
    return _result(x, others[:_PARTS])


def _forward(x, *others):
    return _run(x, others[:_PARTS], others[_PARTS:])


def _forward_out(x, *others):
    out = others[_PARTS]
    native(_heddle.linear_forward, x, others[:_PARTS], out, others[_PARTS + 1 :])
    changed(out)


def _backward_fake(dy, x, *others):
    _, rows, columns, *_ = others
    shapes = ((*dy.shape[:-1], columns), (rows,), (columns,), (columns,))
    return tuple(dy.new_empty(shape if want else (0,)) for shape, want in zip(shapes, others[_PARTS]))


def _backward(dy, x, *others):
    parts, wanted, options = others[:_PARTS], others[_PARTS], others[_PARTS + 1 :]
    gradients = _backward_fake(dy, x, *others)
    written = tuple(g if want else None for g, want in zip(gradients, wanted))
    if dy.stride(-1) != 1 or (dy.is_cuda and not dy.is_contiguous()):  # of a sum, say
        dy = dy.contiguous()
    native(_heddle.linear_backward, dy, x, parts, written, of_backward(options))
    return gradients


def _save(ctx, inputs, output):
    x, *others = inputs
    *described, data, kept = others[:_PARTS]
    options = others[_PARTS:]
    arrays = list(options[:ARRAYS])
    arrays[RESIDUAL] = None
    # What the backward does not read may go.
    if options[ACTIVATION] == "none":
        arrays[BIAS] = None
        if options[NORM] == "none":
            x = None
    ctx.save_for_backward(x, data, kept, *arrays)
    ctx.described, ctx.settings = described, options[ARRAYS:]


def _gradients(ctx, dy, backward):
    needs = ctx.needs_input_grad
    of_options = needs[1 + _PARTS :]
    wanted = [needs[0], *(of_options[i] for i in _WITH_GRADIENT)]
    x, data, kept, *arrays = ctx.saved_tensors
    refuse_tangents("linear_backward", ("dy", "x", *ARRAY_NAMES), (dy, x, *arrays))
    found = [None] * 4
    if any(wanted):
        found = backward(dy, x, *ctx.described, data, kept, wanted, *arrays, *ctx.settings)
    dx, *others = (g if want else None for g, want in zip(found, wanted))
    of_arrays = dict(zip(_WITH_GRADIENT, others)) | {RESIDUAL: dy if of_options[RESIDUAL] else None}
    return (dx, *[None] * _PARTS, *(of_arrays.get(i) for i in range(len(OPTIONS))))


def _operator_backward(ctx, dy):
    return _gradients(ctx, dy, _BackwardForTransforms.apply if transformed() else torch.ops.heddle.linear_backward)


_no_second_derivative = no_second_derivative("linear_backward")
_ForwardForTransforms = for_transforms("linear_forward", _save, _operator_backward)
_BackwardForTransforms = for_transforms("linear_backward", save_nothing, _no_second_derivative)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):
        y = _forward(*inputs)
        _save(ctx, inputs, y)
        return y

    @staticmethod
    def backward(ctx, dy):
        direct = plain(dy) and not torch.is_grad_enabled() and not watched()
        return _gradients(ctx, dy, _backward if direct else torch.ops.heddle.linear_backward)


register(_LIBRARY, "linear_forward", _forward, _forward_fake)
register(_LIBRARY, "linear_forward_out", _forward_out, returns_nothing, without_backward=True)
register(_LIBRARY, "linear_backward", _backward, _backward_fake)
torch.library.register_autograd("heddle::linear_forward", _operator_backward, setup_context=_save, lib=_LIBRARY)
torch.library.register_autograd("heddle::linear_backward", _no_second_derivative, lib=_LIBRARY)


_OPERANDS = ("x", *ARRAY_NAMES)


def _torch_norm(x, options):
    """The norm by torch, whose gradients on a GPU the native backward has not."""
    columns, weight, eps = x.shape[-1:], options[NORM_WEIGHT], options[NORM_EPS]
    if options[NORM] == "layer_norm":
        return torch.nn.functional.layer_norm(x, columns, weight, options[NORM_BIAS], eps)
    return torch.nn.functional.rms_norm(x, columns, weight, eps)


def linear(x, parts, options):
    """parts, options: as the native module takes them, of torch tensors."""
    if x.is_cuda and options[NORM] != "none" and torch.is_grad_enabled():
        if any(t is not None and t.requires_grad for t in (x, *(options[i] for i in _WITH_GRADIENT))):
            x, options = _torch_norm(x, options), without_norm(options)
    arrays = options[:ARRAYS]
    direct, needs = not watched() and plain(x) and (x.is_cpu or x.is_cuda), x.requires_grad
    for other in arrays:
        if other is not None:
            direct, needs = direct and plain(other), needs or getattr(other, "requires_grad", False)
    if not direct:
        check_tensors("linear_forward", _OPERANDS, (x, *arrays))
        refuse_tangents("linear_forward", _OPERANDS, (x, *arrays))
        operator = _ForwardForTransforms.apply if transformed() else torch.ops.heddle.linear_forward
        return operator(x, *parts, *options)
    try:
        if needs and torch.is_grad_enabled():
            return _Linear.apply(x, *parts, *options)
        if needs:
            x = x.detach()
            options = (*(t if t is None else t.detach() for t in arrays), *options[ARRAYS:])
        return _run(x, parts, options)
    except ValueError:  # the native module names one device alone
        one_device("linear_forward", (*_OPERANDS, "weights"), (x, *arrays, parts[WEIGHTS]))
        raise


def linear_into(x, parts, options, out):
    """linear() with a result that the caller has."""
    names, tensors = (*_OPERANDS, "out"), (x, *options[:ARRAYS], out)
    check_tensors("linear_forward", names, tensors)
    refuse_gradients("linear_forward", names, tensors, "a call that writes to out has no backward")
    if transformed():
        raise ValueError(
            "[linear_forward] out is given inside a transform of torch.func, which cannot write to it: leave it out"
        )
    if watched() or not all(t is None or plain(t) for t in tensors):
        with torch.no_grad():
            torch.ops.heddle.linear_forward_out(x, *parts, out, *options)
        return out
    try:
        _forward_out(x, *parts, out, *options)
    except ValueError:
        one_device("linear_forward", (*_OPERANDS, "weights", "out"), (*tensors[:-1], parts[WEIGHTS], out))
        raise
    return out
