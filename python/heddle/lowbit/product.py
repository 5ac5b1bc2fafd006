"""Linear layers over packed weights. heddle.lowbit is their public name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .. import _heddle
from .._linear_options import of_backward, without_norm
from .._options import flag
from ..explanation import Candidate, Explanation, gpu_name
from ..hosts import arrays, is_torch, torch_host
from .packed import PackedTensor
from .tensor import QuantizedTensor, kind, plain

if TYPE_CHECKING:
    from .._types import ActivationName, AnyArray, Array, GpuName, NormName

#: What ``linear`` may apply to its sums.
ACTIVATIONS: tuple[str, ...] = tuple(_heddle.linear_activations())
#: What it may do to each row of x before the product.
NORMS: tuple[str, ...] = tuple(_heddle.linear_norms())


def explain(
    x: AnyArray,
    weights: PackedTensor[Any],
    *,
    activation: ActivationName = "none",
    bias: AnyArray | None = None,
    residual: AnyArray | None = None,
    norm: NormName = "none",
    norm_weight: AnyArray | None = None,
    norm_bias: AnyArray | None = None,
    eps: float = 1e-5,
    int8_x: bool = False,
    batch_invariant: bool = False,
    force: str = "",
    backward: bool = False,
    gpu: GpuName | None = None,
) -> Explanation:
    """The candidates for ``linear`` with these arguments, and which one would run. Nothing is computed.

    Args:
      x .. force: as ``linear`` takes them.
      backward: explain the kernels of the gradients instead: of x [..., K], and of bias [N], norm_weight [K] and norm_bias [K]
        as far as they are given. On a GPU without the norm, whose gradients are torch's own there. force is heard where it
        names one of them.
      gpu: answer as a machine with that GPU would, as ``heddle.explain`` does. Weights that were packed for the CPU are taken
        as ``pack`` has them on a GPU by itself. cuBLASLt is taken to be found there; seconds of few rows
        may be others on a Hopper GPU, whose driver alone knows how many clusters of thread blocks it holds.

    Raises:
      ValueError: a bad argument, as ``linear`` would refuse it; a gpu that is not known, listing those that are.
      TypeError: no array, weights that are not packed, or what is no bool as backward.
    """
    _check_array("explain_linear", x)
    _check_packed("explain_linear", weights)
    backward = flag("explain_linear", "backward", backward)
    int8_x = flag("explain_linear", "int8_x", int8_x)
    batch_invariant = flag("explain_linear", "batch_invariant", batch_invariant)
    name = gpu_name(gpu)
    given = (plain(bias), plain(residual), plain(norm_weight), plain(norm_bias))
    options = (*given, activation, norm, eps, int8_x, batch_invariant, force)
    arguments = (plain(x), weights._parts_on(name))
    found = _heddle.explain_linear(*arguments, options, name)
    if backward:  # of arguments that the forward has taken
        if name or weights.order != "rows16":
            options = without_norm(options)
        found = _heddle.explain_linear_backward(*arguments, of_backward(options), name)
    return Explanation(Candidate(*parts) for parts in found)


def _check_packed(operation: str, weights: Any) -> None:
    if isinstance(weights, PackedTensor):
        return
    rule = "it must be a PackedTensor"
    if isinstance(weights, QuantizedTensor):
        rule = "pack it first, heddle.lowbit.pack(weights)"
    raise TypeError(f"[{operation}] weights is a {type(weights).__name__}: {rule}")


def linear(
    x: Array,
    weights: PackedTensor[Any],
    *,
    activation: ActivationName = "none",
    bias: AnyArray | None = None,
    residual: AnyArray | None = None,
    norm: NormName = "none",
    norm_weight: AnyArray | None = None,
    norm_bias: AnyArray | None = None,
    eps: float = 1e-5,
    out: Array | None = None,
    int8_x: bool = False,
    batch_invariant: bool = False,
    force: str = "",
) -> Array:
    """activation(norm(x) @ W.T + bias) + residual, W decoded inside the product.

    torch tensors have gradients of x, bias, residual, norm_weight and norm_bias, not of the weights: adapters train over
    frozen layers. With an activation the backward computes the sums again, so that only x is kept for it; without
    activation and norm nothing is. On a GPU all runs on the current stream and can be captured in a CUDA graph; gradients
    take cuBLASLt, and with them a norm is torch's own.

    Args:
      x: [..., K], up to four dimensions, an array of any library (docs/arrays.md); float32, float16 or, of torch, bfloat16; the last dimension contiguous. On a
        GPU float16 or bfloat16, rows one stride apart, K and N in multiples of 8.
      weights: a PackedTensor of [N, K], on x's device.
      activation: one of ``ACTIVATIONS``. "swiglu" takes gated weights and gives N / 2 columns, silu(gate) * up.
      bias: [N], of x's dtype.
      residual: as the result, of x's dtype.
      norm: one of ``NORMS``, applied to each row of x before the product, once a row.
      norm_weight, norm_bias: [K], of x's dtype; ones and zeros if None. The bias is layer_norm's only.
      eps: added to the row's variance, or its mean square.
      out: where to write the result, which is then returned: as the result, the last dimension contiguous; may be the
        residual itself, and shares no memory with anything else that is read. Without gradients.
      int8_x: x is rounded to 8 bits, a scale for each row, and multiplied in integers: faster, and less exact. For nvfp4,
        mxfp4, e2m1_row, int4 and int8_row (W8A8) on a CPU; on a GPU for int8_row in order "matrix", and see ``pack``'s
        fp8_x.
      batch_invariant: a row's bits do not depend on how many rows x has. float32 and float16 promise it without; bfloat16
        is slower with it on processors that multiply it in pairs.
      force: a candidate by name, as ``explain`` lists them.

    Returns:
      [..., N] or [..., N / 2] of x's dtype; an array of x's library.

    Raises:
      ValueError: a bad argument; the message names it. Also `out` beside a tensor that requires a gradient while torch
        records them. RuntimeError: second derivatives. TypeError: no array, or weights that are not packed.
      NotImplementedError: a tensor with a tangent: there are no forward-mode derivatives.
    """
    if type(weights) is not PackedTensor:
        _check_packed("linear", weights)
    if int8_x is not False and int8_x is not True:
        int8_x = flag("linear_forward", "int8_x", int8_x)
    if batch_invariant is not False and batch_invariant is not True:
        batch_invariant = flag("linear_forward", "batch_invariant", batch_invariant)
    settings = (activation, norm, eps, int8_x, batch_invariant, force)
    if is_torch(x):  # the way of most calls: as short as can be
        host = torch_host()
        options = (bias, residual, norm_weight, norm_bias, *settings)
        data = weights.data if is_torch(weights.data) else host.torch.from_numpy(weights.data)
        parts = (*weights._described, data, weights.kept)
        if out is None:
            return host.linear(x, parts, options)
        return host.linear_into(x, parts, options, out)
    _check_array("linear_forward", x)
    options = (plain(bias), plain(residual), plain(norm_weight), plain(norm_bias), *settings)
    return arrays.linear(x, weights._parts(), options, out)


def _check_array(operation: str, x: Any) -> None:
    if not hasattr(x, "__dlpack__"):
        kind(x, operation, "x")  # numpy's, or it says so
