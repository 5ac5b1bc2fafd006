"""Linear layers over packed weights for torch: the operators ``heddle::linear_*``, and the way past the dispatcher."""

from __future__ import annotations

import torch

from ... import _heddle
from ..._options import LINEAR_BOTH_WAYS
from .checks import check_tensors, one_device, refuse_gradients, refuse_tangents
from .direct import plain, watched
from .operators import changed, native, register, returns_nothing
from .transforms import for_transforms, no_second_derivative, save_nothing, transformed

_LIBRARY = torch.library.Library("heddle", "FRAGMENT")
_OPTIONS = (
    "str format, int rows, int columns, bool gated, str order, str activation, str norm, float eps, bool int8_x, bool batch_invariant, "
    "str force"
)
_LIBRARY.define(
    "linear_forward(Tensor x, Tensor? bias, Tensor? residual, Tensor? norm_weight, Tensor? norm_bias, Tensor weights, "
    f"Tensor? kept, {_OPTIONS}) -> Tensor"
)
_LIBRARY.define(
    "linear_forward_out(Tensor x, Tensor? bias, Tensor? residual, Tensor? norm_weight, Tensor? norm_bias, Tensor weights, "
    f"Tensor? kept, Tensor(a!) out, {_OPTIONS}) -> ()"
)
# wanted: which of dx, dbias, dnorm_weight, dnorm_bias to compute; the others come back with no elements.
_LIBRARY.define(
    "linear_backward(Tensor dy, Tensor? x, Tensor? bias, Tensor? norm_weight, Tensor? norm_bias, Tensor weights, "
    f"Tensor? kept, bool[4] wanted, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)"
)


def _result(x, rows, columns, gated):
    shape = x.shape
    if not shape or shape[-1] != columns:
        raise ValueError(
            f"[linear_forward] x is {list(shape)} and weights have {columns} columns: x must be [..., {columns}]"
        )
    return x.new_empty((*shape[:-1], rows // 2 if gated else rows))


def _forward_fake(x, bias, residual, norm_weight, norm_bias, weights, kept, *options):
    return _result(x, *options[1:4])


def _write(x, bias, residual, norm_weight, norm_bias, weights, kept, y, options):
    format, rows, columns, gated, order, activation, norm, eps, int8_x, batch_invariant, force = options
    packed = (format, rows, columns, gated, order, weights, kept)
    items = (activation, bias, residual, norm, norm_weight, norm_bias, eps, int8_x, batch_invariant, force)
    native(_heddle.linear_forward, x, packed, y, items)
    return y


def _run(x, bias, residual, norm_weight, norm_bias, weights, kept, options):
    y = _result(x, *options[1:4])
    return _write(x, bias, residual, norm_weight, norm_bias, weights, kept, y, options)


def _forward_out(x, bias, residual, norm_weight, norm_bias, weights, kept, out, *options):
    _write(x, bias, residual, norm_weight, norm_bias, weights, kept, out, options)
    changed(out)


def _forward(x, bias, residual, norm_weight, norm_bias, weights, kept, *options):
    return _run(x, bias, residual, norm_weight, norm_bias, weights, kept, options)


def _backward_fake(dy, x, bias, norm_weight, norm_bias, weights, kept, wanted, *options):
    _, rows, columns, _ = options[:4]
    shapes = ((*dy.shape[:-1], columns), (rows,), (columns,), (columns,))
    return tuple(dy.new_empty(shape if want else (0,)) for shape, want in zip(shapes, wanted))


def _backward(dy, x, bias, norm_weight, norm_bias, weights, kept, wanted, *options):
    gradients = _backward_fake(dy, x, bias, norm_weight, norm_bias, weights, kept, wanted, *options)
    written = tuple(g if want else None for g, want in zip(gradients, wanted))
    if dy.stride(-1) != 1 or (dy.is_cuda and not dy.is_contiguous()):  # of a sum, say
        dy = dy.contiguous()
    activation, norm, eps, int8_x, batch_invariant, force = options[5:]
    force = force if force in LINEAR_BOTH_WAYS else ""
    items = (activation, bias, None, norm, norm_weight, norm_bias, eps, int8_x, batch_invariant, force)
    native(_heddle.linear_backward, dy, x, (*options[:5], weights, kept), written, items)
    return gradients


def _save(ctx, inputs, output):
    x, bias, _, norm_weight, norm_bias, weights, kept, *options = inputs
    activation, norm = options[5:7]
    # What the backward does not read may go.
    if activation == "none":
        bias = None
        if norm == "none":
            x = None
    ctx.save_for_backward(x, bias, norm_weight, norm_bias, weights, kept)
    ctx.options = tuple(options)


def _gradients(ctx, dy, backward):
    needs = ctx.needs_input_grad
    wanted = [needs[0], needs[1], needs[3], needs[4]]
    x, bias, norm_weight, norm_bias, weights, kept = ctx.saved_tensors
    refuse_tangents(
        "linear_backward", ("dy", "x", "bias", "norm_weight", "norm_bias"), (dy, x, bias, norm_weight, norm_bias)
    )
    found = [None] * 4
    if any(wanted):
        found = backward(dy, x, bias, norm_weight, norm_bias, weights, kept, wanted, *ctx.options)
    dx, dbias, dnorm_weight, dnorm_bias = (g if want else None for g, want in zip(found, wanted))
    return (dx, dbias, dy if needs[2] else None, dnorm_weight, dnorm_bias, None, None, *[None] * len(ctx.options))


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


_OPERANDS = ("x", "bias", "residual", "norm_weight", "norm_bias")


def _torch_norm(x, weight, bias, options):
    """The norm by torch, whose gradients on a GPU the native backward has not; the options without it."""
    columns, norm, eps = options[2], options[6], options[7]
    if norm == "layer_norm":
        x = torch.nn.functional.layer_norm(x, (columns,), weight, bias, eps)
    else:
        x = torch.nn.functional.rms_norm(x, (columns,), weight, eps)
    return x, (*options[:6], "none", *options[7:])


def linear(x, bias, residual, norm_weight, norm_bias, weights, kept, options):
    """options: as the operator's, from format on."""
    if x.is_cuda and options[6] != "none" and torch.is_grad_enabled():
        if any(t is not None and t.requires_grad for t in (x, norm_weight, norm_bias, bias)):
            x, options = _torch_norm(x, norm_weight, norm_bias, options)
            norm_weight = norm_bias = None
    tensors = (x, bias, residual, norm_weight, norm_bias)
    direct, needs = not watched() and plain(x) and (x.is_cpu or x.is_cuda), x.requires_grad
    for other in tensors[1:]:
        if other is not None:
            direct, needs = direct and plain(other), needs or getattr(other, "requires_grad", False)
    if not direct:
        check_tensors("linear_forward", _OPERANDS, tensors)
        refuse_tangents("linear_forward", _OPERANDS, tensors)
        operator = _ForwardForTransforms.apply if transformed() else torch.ops.heddle.linear_forward
        return operator(*tensors, weights, kept, *options)
    try:
        if needs and torch.is_grad_enabled():
            return _Linear.apply(*tensors, weights, kept, *options)
        if needs:
            tensors = tuple(t if t is None else t.detach() for t in tensors)
        return _run(*tensors, weights, kept, options)
    except ValueError:
        one_device("linear_forward", (*_OPERANDS, "weights"), (*tensors, weights))  # the native module names one alone
        raise


def linear_into(x, bias, residual, norm_weight, norm_bias, weights, kept, options, out):
    """linear() with a result that the caller has."""
    names, tensors = (*_OPERANDS, "out"), (x, bias, residual, norm_weight, norm_bias, out)
    check_tensors("linear_forward", names, tensors)
    refuse_gradients("linear_forward", names, tensors, "a call that writes to out has no backward")
    if transformed():
        raise ValueError(
            "[linear_forward] out is given inside a transform of torch.func, which cannot write to it: leave it out"
        )
    arguments = (*tensors[:-1], weights, kept, out)
    if watched() or not all(t is None or plain(t) for t in tensors):
        with torch.no_grad():
            torch.ops.heddle.linear_forward_out(*arguments, *options)
        return out
    try:
        _forward_out(*arguments, *options)
    except ValueError:
        one_device("linear_forward", (*_OPERANDS, "weights", "out"), (*tensors[:-1], weights, out))
        raise
    return out
