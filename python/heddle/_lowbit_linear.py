"""Linear layers over packed weights. heddle.lowbit is their public name."""

from __future__ import annotations

import dataclasses
import functools
import sys
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from . import _heddle
from ._gpu import gpu_of
from ._lowbit_tensor import QuantizedTensor, call, kind, on_cpu, plain
from .explanation import UINT8, gpu_name, stand_in

#: What ``linear`` may apply to its sums.
ACTIVATIONS: tuple[str, ...] = ("none", "relu", "gelu_erf", "gelu_tanh", "silu", "swiglu")
#: What it may do to each row of x before the product.
NORMS: tuple[str, ...] = ("none", "layer_norm", "rms_norm")


@dataclass(frozen=True)
class PackingError:
    """What packing changed of the weights: how many, the largest abs(packed - stored) / abs(stored), which is 1 for a weight
    that became 0, and where the first such is."""

    changed: int
    max: float
    max_at: tuple[int, int]


@dataclass(frozen=True, eq=False)
class PackedTensor:
    """Weights of a linear layer in the order that a device's kernels read; ``pack`` makes them.

    Attributes:
      format, shape: those of the quantised matrix.
      gated: whether its rows are gates and ups, for "swiglu".
      data: uint8 [bytes], numpy or torch, aligned to 64 bytes. The order may change with any version: store what
        ``quantize`` gives and pack it on load.
      order: "rows16" for CPUs, "fragments16", "fragments8", "matrix" or "matrix8" for GPUs.
      kept: the weights in 16 bits, [N, K], beside data, for calls of many rows (``pack``'s keep_16bit), or None.
      error: what packing changed of the weights, a PackingError; None if nobody said.
    """

    format: str
    shape: tuple[int, int]
    gated: bool
    data: Any
    order: str = "rows16"
    kept: Any = None
    error: PackingError | None = None

    _described: tuple[Any, ...] = field(init=False, repr=False)  # what calls say of it

    def __post_init__(self) -> None:
        object.__setattr__(self, "_described", (self.format, *map(int, self.shape), self.gated, self.order))

    @property
    def nbytes(self) -> int:
        """Bytes of data, and of what is kept beside it."""
        return self.data.nbytes + (0 if self.kept is None else self.kept.nbytes)

    def unpack(self, dtype: Any = None) -> Any:
        """The weights [N, K] that the packed data stands for, where it is; dtype: see ``dequantize``."""
        torch = kind(self.data, "unpack_weights", "data")
        if torch is None:
            out = np.empty(self.shape, np.float32 if dtype is None else dtype)
        else:
            out = torch.empty(self.shape, dtype=torch.float32 if dtype is None else dtype, device=self.data.device)
        call(torch, _heddle.unpack_weights, out, self._parts())
        return out

    def _parts(self) -> tuple[Any, ...]:
        return (*self._described, self.data, self.kept)

    def __repr__(self) -> str:
        rows, columns = self.shape
        changed = f", {self.error.changed} weights changed" if self.error is not None and self.error.changed else ""
        gated = ", gated" if self.gated else ""
        return f"PackedTensor({self.format}, [{rows}, {columns}]{gated}, {self.nbytes} bytes{changed})"


def pack(
    matrix: QuantizedTensor,
    *,
    gated: bool = False,
    device: Any = "cpu",
    fp8_x: bool = False,
    keep_16bit: Any = False,
    order: str | None = None,
    exact: bool = False,
) -> PackedTensor:
    """A quantised matrix in the order that linear layers read on a device. Where that order cannot hold every weight
    (mxfp4 on GPUs, nvfp4 with fp8_x), the result's ``error`` says how many were changed.

    Args:
      matrix: a QuantizedTensor; it is not needed afterwards. On a GPU it is copied to the CPU to be packed.
      gated: rows 2j and 2j + 1 are gate and up of output j, for activation "swiglu".
      device: "cpu", or of torch a CUDA device, Ampere or newer.
      fp8_x: on a GPU, layers round x to float8_e4m3fn, a scale for each row, and multiply in 8 bits: faster from 64 rows
        on, and less exact. For nvfp4 (rounded to e4m3 too, by at most 2^-4 of a weight), mxfp4 and e2m1_row on Hopper, and
        for fp8_row, by cuBLASLt.
      keep_16bit: on a GPU, keep the weights in bfloat16 (True) or in a torch dtype of 16 bits too: calls with x of that
        dtype and so many rows that 4 bits cannot win take cuBLASLt's product of them. 2 N K bytes more, which ``nbytes``
        counts: 4.6 times the memory of nvfp4. ``explain`` says from how many rows on it pays.
      order: instead of the usual one: "matrix" takes every format on a GPU, whose weights are decoded before cuBLASLt's
        product, and int8_row for ``linear``'s int8_x (W8A8).
      exact: refuse what would change a weight.

    Raises:
      ValueError: tensors that are not what the format has, a NaN or an infinity among scales or codes, an odd number of
        gated rows, a format that the device's order does not have, or a device that is none; with exact, a weight that
        would change, with its place. RuntimeError: no such GPU,
        or a build without CUDA. TypeError: no QuantizedTensor.
    """
    if not isinstance(matrix, QuantizedTensor):
        raise TypeError(f"[pack_weights] matrix is a {type(matrix).__name__}: it must be a lowbit.QuantizedTensor")
    torch = kind(matrix.codes, "pack_weights", "codes")
    gpu = str(device) != "cpu"
    if gpu and torch is None:
        raise ValueError(f"[pack_weights] device is {str(device)!r}: weights of numpy are packed for 'cpu'")
    if fp8_x and not gpu:
        raise ValueError("[pack_weights] fp8_x is set and device is 'cpu': it is for GPUs; CPUs have linear's int8_x")
    if keep_16bit is not False and not gpu:
        raise ValueError("[pack_weights] keep_16bit is set and device is 'cpu': it is for GPUs")
    if order is None:
        if not gpu:
            order = "rows16"
        elif not fp8_x:
            order = "fragments16"
        else:
            order = "matrix8" if matrix.format == "fp8_row" else "fragments8"
    elif gpu == (order == "rows16"):
        raise ValueError(
            f"[pack_weights] order is {order!r} and device is {str(device)!r}: rows16 is for CPUs, the others "
            "are for GPUs"
        )
    if gpu and str(device) != "meta":  # where a layer may be before it is loaded
        device = gpu_of("pack_weights", device)
    rows, columns = map(int, matrix.shape)
    count = _heddle.lowbit_packed_bytes(matrix.format, rows, columns, gated, order)
    memory: Any
    if torch is None:
        memory = np.empty(count + 63, np.uint8)
        address = memory.ctypes.data
    else:
        memory = torch.empty(count + 63, dtype=torch.uint8)
        address = memory.data_ptr()
    data = memory[-address % 64 :][:count]
    changed, largest, *at = _heddle.lowbit_pack(on_cpu(matrix)._parts(), gated, order, data, exact)
    error = PackingError(changed, largest, tuple(at))
    packed = PackedTensor(matrix.format, (rows, columns), gated, data.to(device) if gpu else data, order, error=error)
    if keep_16bit is False:
        return packed
    dtype = torch.bfloat16 if keep_16bit is True else keep_16bit
    if dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(
            f"[pack_weights] keep_16bit is {keep_16bit!r}: it must be a bool, torch.bfloat16 or torch.float16"
        )
    return dataclasses.replace(packed, kept=packed.unpack(dtype))


@dataclass(frozen=True)
class LinearCandidate:
    """A kernel that could serve a call of ``linear``; see ``explain``.

    Attributes:
      name: as ``force`` takes it. method: "linear" or "reference".
      supported, reason: whether it could run, and why it does not.
      seconds, workspace: estimated; bytes.
      chosen: whether the call would run it.
      of_16bit: on a GPU, `seconds` over those estimated of cuBLAS with weights in 16 bits: above 1, ``pack``'s keep_16bit
        would make the call faster.
      plan: what it would run, in words; empty if it could not.
    """

    name: str
    method: str
    supported: bool
    reason: str
    seconds: float
    workspace: int
    chosen: bool
    of_16bit: float
    plan: str = ""


def explain(
    x: Any,
    weights: PackedTensor,
    *,
    activation: str = "none",
    bias: Any = None,
    residual: Any = None,
    norm: str = "none",
    norm_weight: Any = None,
    norm_bias: Any = None,
    eps: float = 1e-5,
    int8_x: bool = False,
    batch_invariant: bool = False,
    force: str = "",
    gpu: str | None = None,
) -> list[LinearCandidate]:
    """The candidates for ``linear`` with these arguments, and which one would run. Nothing is computed.

    gpu: answer as a machine with that GPU would, as ``heddle.explain`` does. Weights that were packed for the CPU are taken
    as ``pack`` has them on a GPU by itself, in order "fragments16". cuBLASLt is taken to be found there; seconds of few rows
    may be others on a Hopper GPU, whose driver alone knows how many clusters of thread blocks it holds.

    Raises:
      ValueError: a bad argument, as ``linear`` would refuse it; a gpu that is not known, listing those that are.
    """
    kind(x, "explain_linear", "x")
    _check_packed("explain_linear", weights)
    name = gpu_name(gpu)
    options = (
        activation,
        plain(bias),
        plain(residual),
        norm,
        plain(norm_weight),
        plain(norm_bias),
        eps,
        int8_x,
        batch_invariant,
        force,
    )
    parts = weights._parts()
    if name and weights.order == "rows16":
        described = (*parts[:4], "fragments16")
        parts = (*described, stand_in((_heddle.lowbit_packed_bytes(*described),), UINT8), None)
    return [LinearCandidate(*found) for found in _heddle.explain_linear(plain(x), parts, options, name)]


def _check_packed(operation: str, weights: Any) -> None:
    if isinstance(weights, PackedTensor):
        return
    rule = "it must be a PackedTensor"
    if isinstance(weights, QuantizedTensor):
        rule = "pack it first, heddle.lowbit.pack(weights)"
    raise TypeError(f"[{operation}] weights is a {type(weights).__name__}: {rule}")


@functools.cache
def _torch_way() -> Any:
    from . import _torch_linear

    return _torch_linear.linear


def linear(
    x: Any,
    weights: PackedTensor,
    *,
    activation: str = "none",
    bias: Any = None,
    residual: Any = None,
    norm: str = "none",
    norm_weight: Any = None,
    norm_bias: Any = None,
    eps: float = 1e-5,
    out: Any = None,
    int8_x: bool = False,
    batch_invariant: bool = False,
    force: str = "",
) -> Any:
    """activation(norm(x) @ W.T + bias) + residual, W decoded inside the product.

    torch tensors have gradients of x, bias, residual, norm_weight and norm_bias, not of the weights: adapters train over
    frozen layers. With an activation the backward computes the sums again, so that only x is kept for it; without
    activation and norm nothing is. On a GPU all runs on the current stream and can be captured in a CUDA graph; gradients
    take cuBLASLt, and with them a norm is torch's own.

    Args:
      x: [..., K], up to four dimensions; float32, float16 or, of torch, bfloat16; the last dimension contiguous. On a
        GPU float16 or bfloat16, rows one stride apart, K and N in multiples of 8.
      weights: a PackedTensor of [N, K], on x's device.
      activation: one of ``ACTIVATIONS``. "swiglu" takes gated weights and gives N / 2 columns, silu(gate) * up.
      bias: [N], of x's dtype.
      residual: as the result, of x's dtype.
      norm: one of ``NORMS``, applied to each row of x before the product, once a row.
      norm_weight, norm_bias: [K], of x's dtype; ones and zeros if None. The bias is layer_norm's only.
      eps: added to the row's variance, or its mean square.
      out: where to write the result; may be the residual itself. Without gradients.
      int8_x: x is rounded to 8 bits, a scale for each row, and multiplied in integers: faster, and less exact. For nvfp4,
        mxfp4, e2m1_row, int4 and int8_row (W8A8) on a CPU; on a GPU for int8_row in order "matrix", and see ``pack``'s
        fp8_x.
      batch_invariant: a row's bits do not depend on how many rows x has. float32 and float16 promise it without; bfloat16
        is slower with it on processors that multiply it in pairs.
      force: a candidate by name, as ``explain`` lists them.

    Returns:
      [..., N] or [..., N / 2] of x's dtype; a numpy array or a torch tensor as x is.

    Raises:
      ValueError: a bad argument; the message names it. RuntimeError: `out` beside a tensor that requires a gradient while
        torch records them; second derivatives. TypeError: no array, or weights that are not packed.
      NotImplementedError: a tensor with a tangent: there are no forward-mode derivatives.
    """
    if type(weights) is not PackedTensor:
        _check_packed("linear", weights)
    torch = sys.modules.get("torch")
    if torch is not None and out is None and isinstance(x, torch.Tensor):  # the way of most calls: as short as can be
        options = (*weights._described, activation, norm, eps, int8_x, batch_invariant, force)
        data = weights.data if isinstance(weights.data, torch.Tensor) else torch.from_numpy(weights.data)
        return _torch_way()(x, bias, residual, norm_weight, norm_bias, data, weights.kept, options)
    torch = kind(x, "linear_forward", "x")
    rows, columns = map(int, weights.shape)
    if torch is not None and torch.is_grad_enabled():
        tensors = {"x": x, "bias": bias, "residual": residual, "norm_weight": norm_weight, "norm_bias": norm_bias}
        for name, tensor in tensors.items():
            if tensor is not None and tensor.requires_grad:
                raise RuntimeError(
                    f"[linear_forward] {name} requires a gradient, which a call with `out` does not have: "
                    "leave it out, or call under torch.no_grad()"
                )
    if out is None:
        if len(x.shape) == 0 or x.shape[-1] != columns:  # before memory for the result is asked for
            raise ValueError(
                f"[linear_forward] x is {list(x.shape)} and weights have {columns} columns: x must be [..., {columns}]"
            )
        shape = (*x.shape[:-1], rows // 2 if weights.gated else rows)
        out = np.empty(shape, x.dtype)
    parts = weights._parts()
    options = (
        activation,
        plain(bias),
        plain(residual),
        norm,
        plain(norm_weight),
        plain(norm_bias),
        eps,
        int8_x,
        batch_invariant,
        force,
    )
    if torch is None:
        _heddle.linear_forward(x, parts, out, options)
    else:
        from ._torch_checks import one_device
        from ._torch_ops import native

        try:
            native(_heddle.linear_forward, plain(x), parts, plain(out), options)
        except ValueError:
            names = ("x", "weights", "out", "bias", "residual", "norm_weight", "norm_bias")
            one_device("linear_forward", names, (x, weights.data, out, bias, residual, norm_weight, norm_bias))
            raise
    return out
