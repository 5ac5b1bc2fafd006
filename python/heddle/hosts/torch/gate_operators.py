"""The torch operators ``heddle::gate_branches*``, the end of native sparse attention on a GPU: branches times their gates,
summed, each read and written once."""

from __future__ import annotations

import torch

from ... import _heddle
from .checks import refuse_tangents
from .operators import changed, native, register, returns_nothing
from .transforms import no_second_derivative

_LIBRARY = torch.library.Library("heddle", "FRAGMENT")

# os: [B, Sq, H, Dv], packed [total_q, H, Dv], of one dtype; gates: float32, without Dv.
_LIBRARY.define("gate_branches(Tensor[] os, Tensor[] gates) -> Tensor")
_LIBRARY.define("gate_branches_out(Tensor[] os, Tensor[] gates, Tensor(a!) out) -> ()")
# wanted: of os, and of gates; what is not wanted has no elements.
_LIBRARY.define(
    "gate_branches_backward(Tensor d_out, Tensor[] os, Tensor[] gates, bool[2] wanted) -> (Tensor[], Tensor[])"
)


def _contiguous(x):
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _fake(os, gates):
    return _contiguous(os[0])


def _into(os, gates, out):
    native(lambda first, *rest: _heddle.gate_branches(os, gates, out, "", *rest), os[0])


def _gate(os, gates):
    out = _fake(os, gates)
    _into(os, gates, out)
    return out


def _gate_out(os, gates, out):
    _into(os, gates, out)
    changed(out)


def _backward_fake(d_out, os, gates, wanted):
    return tuple(
        [_contiguous(x) if want else x.new_empty(0) for x in tensors] for tensors, want in zip((os, gates), wanted)
    )


def _backward_gradients(d_out, os, gates, wanted):
    gradients = _backward_fake(d_out, os, gates, wanted)
    d_os, d_gates = (found if want else [None] * len(os) for found, want in zip(gradients, wanted))
    native(lambda first, *rest: _heddle.gate_branches_backward(os, gates, first, d_os, d_gates, "", *rest), d_out)
    return gradients


def _save_for_backward(ctx, inputs, output):
    os, gates = inputs
    ctx.branches = len(os)
    ctx.save_for_backward(*os, *gates)


def _backward(ctx, d_out):
    os, gates = ctx.saved_tensors[: ctx.branches], ctx.saved_tensors[ctx.branches :]
    refuse_tangents("gate_branches_backward", ("d_out",), (d_out,))
    wanted = [any(needs) for needs in ctx.needs_input_grad]
    found = torch.ops.heddle.gate_branches_backward(d_out, os, gates, wanted)
    return tuple(x if want else [None] * ctx.branches for x, want in zip(found, wanted))


register(_LIBRARY, "gate_branches", _gate, _fake)
register(_LIBRARY, "gate_branches_out", _gate_out, returns_nothing, without_backward=True)
register(_LIBRARY, "gate_branches_backward", _backward_gradients, _backward_fake)
torch.library.register_autograd("heddle::gate_branches", _backward, setup_context=_save_for_backward, lib=_LIBRARY)
torch.library.register_autograd(
    "heddle::gate_branches_backward", no_second_derivative("gate_branches_backward"), lib=_LIBRARY
)


def gate_branches(os, gates, out=None):
    """The sum of gate * o, of os' dtype; sums are float32. out: where it is written, which takes no gradients."""
    refuse_tangents("gate_branches", [f"os[{n}]" for n in range(len(os))], os)
    refuse_tangents("gate_branches", [f"gates[{n}]" for n in range(len(os))], gates)
    if out is None:
        return torch.ops.heddle.gate_branches(os, gates)
    with torch.no_grad():
        torch.ops.heddle.gate_branches_out(os, gates, out)
    return out
