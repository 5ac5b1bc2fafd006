"""The torch operators ``heddle::merge_attention*``, which join partial results of attention, and their function."""

from __future__ import annotations

import torch

from ... import _heddle
from ..._options import lse_shape
from .checks import check_tensors, refuse_gradients, refuse_tangents
from .operators import changed, native, register, returns_nothing
from .transforms import for_transforms, no_second_derivative, save_nothing, transformed

_LIBRARY = torch.library.Library("heddle", "FRAGMENT")

_LIBRARY.define("merge_attention(Tensor[] os, Tensor[] lses, Tensor? sink, bool float32_out) -> (Tensor, Tensor)")
_LIBRARY.define(
    "merge_attention_out(Tensor[] os, Tensor[] lses, Tensor? sink, Tensor(a!) out, Tensor(b!) lse_out) -> ()"
)
# The gradients of os, of lses and of sink; those that are not wanted (one for each of the three) have no elements.
_LIBRARY.define(
    "merge_attention_backward(Tensor d_o, Tensor? d_lse, Tensor[] os, Tensor[] lses, Tensor? sink, bool[3] wanted) "
    "-> (Tensor[], Tensor[], Tensor)"
)


def _check_rank(o):
    """lse's shape is read off o's, so this rule comes before the library's own checks."""
    if o.dim() not in (3, 4):
        raise ValueError(
            f"[merge_attention] os[0] has {o.dim()} dimensions: it must be [B, Sq, H, Dv], or packed [total_q, H, Dv]"
        )


def _empty_out(o, float32_out):
    return torch.empty(o.shape, dtype=torch.float32 if float32_out else o.dtype, device=o.device)


def _empty_lse(o):
    return torch.empty(lse_shape(o.shape, o.dim() == 3), dtype=torch.float32, device=o.device)


def _fake(os, lses, sink, float32_out):
    _check_rank(os[0])
    return _empty_out(os[0], float32_out), _empty_lse(os[0])


def _into(os, lses, sink, out, lse_out):
    native(lambda first, *rest: _heddle.merge_attention(os, lses, sink, out, lse_out, *rest), os[0])


def _merge(os, lses, sink, float32_out):
    out, lse = _fake(os, lses, sink, float32_out)
    _into(os, lses, sink, out, lse)
    return out, lse


def _merge_out(os, lses, sink, out, lse_out):
    _into(os, lses, sink, out, lse_out)
    changed(out, lse_out)


def _backward_fake(d_o, d_lse, os, lses, sink, wanted):
    def like(tensors, want):
        return [torch.empty_like(x) if want else x.new_empty(0) for x in tensors]

    dsink = torch.empty_like(sink) if wanted[2] else d_o.new_empty(0, dtype=torch.float32)
    return like(os, wanted[0]), like(lses, wanted[1]), dsink


def _backward_gradients(d_o, d_lse, os, lses, sink, wanted):
    d_os, d_lses, dsink = gradients = _backward_fake(d_o, d_lse, os, lses, sink, wanted)
    written = (d_os if wanted[0] else [None] * len(os), d_lses if wanted[1] else [None] * len(os))
    native(
        lambda first, *rest: _heddle.merge_attention_backward(
            os, lses, sink, first, d_lse, *written, dsink if wanted[2] else None, *rest
        ),
        d_o,
    )
    return gradients


def _gradients(d_o, d_lse, out, os, lses, sink, wanted):
    """What _backward_gradients() has of derivatives as autograd gives them."""
    names = ("d_o", "d_lse", *_names(os, lses))
    refuse_tangents("merge_attention_backward", names, (d_o, d_lse, *os, *lses, sink))
    if d_o is None:
        d_o = torch.zeros_like(out)
    return backward_operator()(d_o, d_lse, os, lses, sink, wanted)


def _save_for_backward(ctx, inputs, output):
    os, lses, sink, _ = inputs
    ctx.parts = len(os)
    ctx.save_for_backward(output[0], sink, *os, *lses)
    ctx.set_materialize_grads(False)


def _backward(ctx, d_o, d_lse):
    out, sink, *parts = ctx.saved_tensors
    needs_o, needs_lse, needs_sink, _ = ctx.needs_input_grad
    wanted = [any(needs_o), any(needs_lse), needs_sink]
    d_os, d_lses, dsink = _gradients(d_o, d_lse, out, parts[: ctx.parts], parts[ctx.parts :], sink, wanted)
    return (
        d_os if wanted[0] else [None] * ctx.parts,
        d_lses if wanted[1] else [None] * ctx.parts,
        dsink if wanted[2] else None,
        None,
    )


_no_second_derivative = no_second_derivative("merge_attention_backward")

register(_LIBRARY, "merge_attention", _merge, _fake)
register(_LIBRARY, "merge_attention_out", _merge_out, returns_nothing, without_backward=True)
register(_LIBRARY, "merge_attention_backward", _backward_gradients, _backward_fake)
torch.library.register_autograd("heddle::merge_attention", _backward, setup_context=_save_for_backward, lib=_LIBRARY)
torch.library.register_autograd("heddle::merge_attention_backward", _no_second_derivative, lib=_LIBRARY)


# Transforms see the arguments of a torch.autograd.Function one by one, and not what is in a list.


def _flat_forward(float32_out, sink, *parts):
    half = len(parts) // 2
    return torch.ops.heddle.merge_attention(parts[:half], parts[half:], sink, float32_out)


def _flat_save(ctx, inputs, output):
    _, sink, *parts = inputs
    ctx.save_for_backward(output[0], sink, *parts)
    ctx.set_materialize_grads(False)


def _flat_backward(ctx, d_o, d_lse):
    out, sink, *parts = ctx.saved_tensors
    half = len(parts) // 2
    wanted = [True, True, sink is not None]
    d_os, d_lses, dsink = _gradients(d_o, d_lse, out, parts[:half], parts[half:], sink, wanted)
    return None, dsink if wanted[2] else None, *d_os, *d_lses


def _flat_gradients(d_lse_given, wanted, d_o, *rest):
    d_lse, sink, *parts = rest
    half = len(parts) // 2
    d_os, d_lses, dsink = torch.ops.heddle.merge_attention_backward(
        d_o, d_lse if d_lse_given else None, parts[:half], parts[half:], sink, wanted
    )
    return *d_os, *d_lses, dsink


_MergeForTransforms = for_transforms("merge_attention", _flat_save, _flat_backward, _flat_forward)
_BackwardForTransforms = for_transforms(
    "merge_attention_backward", save_nothing, _no_second_derivative, _flat_gradients
)


def backward_operator():
    if not transformed():
        return torch.ops.heddle.merge_attention_backward

    def flat(d_o, d_lse, os, lses, sink, wanted):
        found = _BackwardForTransforms.apply(d_lse is not None, wanted, d_o, d_lse, sink, *os, *lses)
        return found[: len(os)], found[len(os) : -1], found[-1]

    return flat


def _names(os, lses):
    return (*(f"os[{n}]" for n in range(len(os))), *(f"lses[{n}]" for n in range(len(lses))), "sink")


def merge_attention(os, lses, sink, float32_out, out=None, lse_out=None):
    """See heddle.merge_attention."""
    names, tensors = _names(os, lses), (*os, *lses, sink)
    for name, x in zip(names, (*os, *lses)):
        if x is None:
            raise TypeError(f"[merge_attention] {name} is None: it must be a torch tensor")
    check_tensors("merge_attention", names, tensors)
    if out is None and lse_out is None:
        refuse_tangents("merge_attention", names, tensors)
        if transformed():
            return _MergeForTransforms.apply(float32_out, sink, *os, *lses)
        return torch.ops.heddle.merge_attention(os, lses, sink, float32_out)
    check_tensors("merge_attention", ("out", "lse_out"), (out, lse_out))
    if float32_out and out is not None and out.dtype != torch.float32:
        raise ValueError(f"[merge_attention] out is {str(out.dtype)[6:]}: it must be float32, which was asked for")
    if transformed():
        raise ValueError(
            "[merge_attention] out is given inside a transform of torch.func, which cannot write to it: leave it out"
        )
    why = "a call that writes to out has no backward"
    refuse_gradients("merge_attention", (*names, "out", "lse_out"), (*tensors, out, lse_out), why)
    _check_rank(os[0])
    out = _empty_out(os[0], float32_out) if out is None else out
    lse_out = _empty_lse(os[0]) if lse_out is None else lse_out
    with torch.no_grad():
        torch.ops.heddle.merge_attention_out(os, lses, sink, out, lse_out)
    return out, lse_out
