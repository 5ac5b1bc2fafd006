"""What calls on torch tensors refuse before anything is computed, since it would be wrong without a word."""

from __future__ import annotations

import sys

import torch

from ... import _heddle
from .transforms import transformed

# Of no special kind: memory is what the values are, but for nested and sparse tensors. Not a set, into which torch 2.6 cannot trace.
PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)

_strided = torch.strided
_grad_enabled = torch.is_grad_enabled
_forward_ad = torch.autograd.forward_ad
_cuda_built = _heddle.cuda_built()
_DEVICES = ("cpu", "meta", "cuda") if _cuda_built else ("cpu", "meta")


def is_causal_bias(x):
    """Whether x is of torch.nn.attention.bias, whose tensors say in attributes what they mean: nobody wrote their memory."""
    if type(x) in PLAIN_TYPES:
        return False
    bias = sys.modules.get("torch.nn.attention.bias")  # who has such a tensor has imported it
    return bias is not None and isinstance(x, bias.CausalBias)


def causal_of(bias, rows, keys):
    """The code of ``causal`` that a CausalBias over [rows, keys] stands for."""
    variant = getattr(bias, "variant", None)
    if variant is None:
        raise TypeError(
            "[sdpa] attn_mask is a CausalBias that has lost its variant, as operations on one do: give what "
            "causal_upper_left or causal_lower_right returned"
        )
    if (bias.seq_len_q, bias.seq_len_kv) != (rows, keys):
        raise ValueError(
            f"[sdpa] attn_mask is a CausalBias of [{bias.seq_len_q}, {bias.seq_len_kv}] and query and key have lengths "
            f"[{rows}, {keys}]: they must be equal"
        )
    return 1 if variant == sys.modules["torch.nn.attention.bias"].CausalVariant.UPPER_LEFT else 2


def is_distributed(x):
    """Whether x is a DTensor."""
    distributed = sys.modules.get("torch.distributed.tensor")  # who has such a tensor has imported it
    return distributed is not None and isinstance(x, distributed.DTensor)


def check_tensors(operation, names, tensors):
    """Refuses what is no tensor whose values lie in its memory, on a device that there are kernels for. None passes."""
    for name, x in zip(names, tensors):
        if x is None:
            continue
        if (
            type(x) in PLAIN_TYPES
            and (x.is_cpu or (_cuda_built and x.is_cuda))
            and x.layout is _strided
            and not x.is_nested
        ):
            continue
        if not isinstance(x, torch.Tensor):
            kind = type(x).__name__
            raise TypeError(f"[{operation}] {name} is a {kind}: it must be a torch tensor, as the others are")
        if is_causal_bias(x):
            raise TypeError(
                f"[{operation}] {name} is a CausalBias, whose memory holds no values: say causal='top_left' for "
                "causal_upper_left or causal='bottom_right' for causal_lower_right; heddle.sdpa takes it as attn_mask"
            )
        if x.is_nested:
            raise TypeError(
                f"[{operation}] {name} is a {type(x).__name__} of nested sequences: it must be a tensor of one shape; give "
                f"{name}.values(), for attention with {name}.offsets().int() as cu_seqlens_q and cu_seqlens_k"
            )
        if is_distributed(x):
            raise TypeError(
                f"[{operation}] {name} is a DTensor, which is spread over processes: Heddle's operators have no rules for that; "
                f"give each process its own part, {name}.to_local(), for attention of whole sequences"
            )
        if x.layout is not _strided:
            raise TypeError(
                f"[{operation}] {name} is a {type(x).__name__} of layout {x.layout}: it must be torch.strided"
            )
        if x.device.type not in _DEVICES:
            where = (
                "Heddle runs on the CPU and on NVIDIA GPUs" if _cuda_built else "this build of Heddle runs on the CPU"
            )
            raise ValueError(f"[{operation}] {name} is on {x.device}: {where}")


def check_operands(operation, names, tensors):
    """As check_tensors(), and refuses None."""
    for name, x in zip(names, tensors):
        if x is None:
            raise TypeError(f"[{operation}] {name} is None: it must be a torch tensor")
    check_tensors(operation, names, tensors)


def one_device(operation, names, tensors):
    """Refuses tensors on several devices. A seed is read on the host, wherever the call runs."""
    first = first_name = None
    for name, x in zip(names, tensors):
        if not isinstance(x, torch.Tensor) or name == "dropout_seed":
            continue
        if first is None:
            first, first_name = x, name
        elif x.device != first.device:
            raise ValueError(
                f"[{operation}] {name} is on another device than {first_name}: {name} is on {x.device}, {first_name} on "
                f"{first.device}; all tensors of a call must be on one"
            )


def blame_subclass(operation, names, tensors, error):
    """Names the tensor whose type refused an operator that ordinary tensors take; returns if none did."""
    for name, x in zip(names, tensors):
        if not isinstance(x, torch.Tensor) or type(x).__torch_dispatch__ is torch.Tensor.__torch_dispatch__:
            continue
        if not isinstance(x, torch._subclasses.FakeTensor):
            raise TypeError(
                f"[{operation}] {name} is a {type(x).__name__}, a type that does not take Heddle's operators: give its "
                "values as a plain tensor"
            ) from error


def refuse_tangents(operation, names, tensors):
    """Of all calls under forward-mode differentiation, which no_grad() does not turn off: tangents would be dropped."""
    if _forward_ad._current_level < 0:
        return
    for name, x in zip(names, tensors):
        if isinstance(x, torch.Tensor) and _forward_ad.unpack_dual(x).tangent is not None:
            raise NotImplementedError(
                f"[{operation}] {name} has a tangent: there are no forward-mode derivatives; give its primal value"
            )


def refuse_gradients(operation, names, tensors, why="this call has no backward"):
    """Of calls without a backward, which would drop gradients."""
    if _grad_enabled():
        for name, x in zip(names, tensors):
            if x is not None and getattr(x, "requires_grad", False):
                raise ValueError(
                    f"[{operation}] {name} requires a gradient: {why}; make it under torch.no_grad(), or detach {name}"
                )
    refuse_tangents(operation, names, tensors)


OUTPUTS = ("out", "lse_out")
WRITES = "a call that writes to out has no backward"


def check_outputs(operation, *outputs):
    """Of what the caller has for results."""
    check_tensors(operation, OUTPUTS, outputs)
    if transformed():
        raise ValueError(
            f"[{operation}] out is given inside a transform of torch.func, which cannot write to it: leave it out"
        )


def without_gradients(operator, *arguments):
    """A call that has refused what requires a gradient, so that autograd need not look."""
    try:
        if not _grad_enabled():
            return operator(*arguments)
        with torch.no_grad():
            return operator(*arguments)
    except RuntimeError:  # of the dispatcher, whose words for what is no tensor are of positions and types
        schema = operator._schema
        given = {a.name: x for a, x in zip(schema.arguments, arguments) if "Tensor" in str(a.type)}
        names = ["seqlens" if name == "seqused_k" else name for name in given]
        check_tensors(schema.name.removeprefix("heddle::"), names, given.values())
        raise
