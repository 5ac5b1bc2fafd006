"""Quantised matrices: formats, quantisation, its undoing and its error. heddle.lowbit is their public name."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Generic

import numpy as np

from .. import _heddle
from .._types import Kind
from ..hosts import is_torch

if TYPE_CHECKING:
    from .._types import FormatName, LibraryDType, RuleName

#: Names of formats; ``nf4_bN`` and ``fp4_bnb_bN`` with N a power of two from 32 to 4096 are there besides.
FORMATS: tuple[str, ...] = tuple(_heddle.lowbit_formats())
#: Names of scale rules; ``quantize`` says which format has which.
RULES: tuple[str, ...] = tuple(_heddle.lowbit_rules())

# By heddle::DType; numpy has no float8, so that its bits are bytes there.
_NUMPY = {0: np.float32, 1: np.float16, 5: np.uint8, 6: np.uint8, 7: np.int8}
_TORCH = {0: "float32", 1: "float16", 2: "bfloat16", 5: "float8_e4m3fn", 6: "uint8", 7: "int8"}


def torch_of(x: Any) -> Any:
    """torch, with Heddle's reading of its tensors set up, if x is a torch tensor; else None."""
    if not is_torch(x):
        return None
    import torch

    from ..hosts.torch import operators  # noqa: F401

    return torch


def kind(x: Any, operation: str, name: str) -> Any:
    """torch or None for numpy; other arrays are refused."""
    torch = torch_of(x)
    if torch is None and not isinstance(x, np.ndarray):
        raise TypeError(f"[{operation}] {name} is a {type(x).__name__}: it must be a numpy array or a torch tensor")
    return torch


def empty(torch: Any, described: tuple[tuple[int, ...], int] | None, device: Any = "cpu") -> Any:
    if described is None:
        return None
    shape, code = described
    if torch is None:
        return np.empty(shape, _NUMPY[code])
    return torch.empty(shape, dtype=getattr(torch, _TORCH[code]), device=device)


def call(torch: Any, function: Any, first: Any, *arguments: Any) -> None:
    """One of the native module's functions, of torch tensors on the device and the current stream of the first one."""
    if torch is None:
        function(first, *arguments)
    else:
        from ..hosts.torch.operators import native

        native(function, first, *arguments)


def _changed(torch: Any, *written: Any) -> None:
    """Has torch's autograd notice that these tensors were written."""
    if torch is not None:
        from ..hosts.torch.operators import changed

        changed(*written)


def plain(x: Any) -> Any:
    """A torch tensor without its gradient; an e8m0 one as its bytes."""
    torch = torch_of(x)
    if torch is None:
        return x
    if x.dtype is getattr(torch, "float8_e8m0fnu", None):
        x = x.view(torch.uint8)
    return x.detach()


def _size(x: Any) -> int:
    return 0 if x is None else x.nbytes


@dataclass(frozen=True, eq=False)
class QuantizationError(Generic[Kind]):
    """Of d = dequantised - weight: sqnr in dB (10 log10(sum w^2 / sum d^2)), mean and max of abs(d), where the first
    largest is, and of each row sqnr and max, float32 [N]."""

    sqnr: float
    mean: float
    max: float
    max_at: tuple[int, int]
    row_sqnr: Kind
    row_max: Kind


@dataclass(frozen=True, eq=False)
class QuantizedTensor(Generic[Kind]):
    """A quantised matrix in plain storage; numpy arrays, or torch tensors on the CPU or a GPU, all contiguous.

    Attributes:
      format: its name, see ``FORMATS``.
      shape: (N, K) of the weights.
      codes: uint8 [N, K / 2], column 2j in the low four bits of byte j (e2m1_row: in the high ones, and odd K padded);
        int8_row: int8 [N, K]; fp8_row: float8_e4m3fn [N, K].
      scales: [N, K / group], [N, 1] for row formats; float32, float16 (int4), float8_e4m3fn (nvfp4), uint8 exponents
        (mxfp4). For numpy, float8_e4m3fn is uint8 bits.
      zeros: uint8 [N, K / group], only with zero points.
      global_scale: float32 [1], only of nvfp4.

    ``load`` makes it of a checkpoint. What is made by hand is checked when it is used: a ValueError names the tensor, what
    was found and what the format has.
    """

    format: FormatName
    shape: tuple[int, int]
    codes: Kind
    scales: Kind
    zeros: Kind | None = None
    global_scale: Kind | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Without float8, which torch's tensors cannot be pickled in but by torch.save."""
        state = dict(self.__dict__)
        for name in ("codes", "scales"):
            if str(getattr(state[name], "dtype", "")) == "torch.float8_e4m3fn":
                state[name] = state[name].view(torch_of(state[name]).uint8)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        for each in fields(self):
            object.__setattr__(self, each.name, state[each.name])
        for name, described in zip(("codes", "scales"), _heddle.lowbit_storage(self.format, *map(int, self.shape))):
            torch = torch_of(state[name])
            if torch is not None and described is not None and _TORCH[described[1]] == "float8_e4m3fn":
                object.__setattr__(self, name, state[name].view(torch.float8_e4m3fn))

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales, zero points and global scale."""
        return _size(self.codes) + _size(self.scales) + _size(self.zeros) + _size(self.global_scale)

    @property
    def bits_per_weight(self) -> float:
        """8 * nbytes / (N * K)."""
        return 8 * self.nbytes / max(self.shape[0] * self.shape[1], 1)

    def dequantize(self, dtype: LibraryDType | None = None, *, out: Kind | None = None) -> Kind:
        """See ``dequantize``."""
        return dequantize(self, dtype, out=out)

    def error(self, weights: Kind) -> QuantizationError[Kind]:
        """The error of this matrix against the weights [N, K] that it was made of."""
        torch = kind(weights, "quantization_error", "weights")
        rows: Any = [empty(torch, (tuple(weights.shape[:1]), 0)) for _ in range(2)]
        sqnr, mean, largest, row, column = _heddle.lowbit_error(plain(weights), self._parts(), *rows)
        return QuantizationError(sqnr, mean, largest, (row, column), *rows)

    def _parts(self) -> tuple[Any, ...]:
        tensors = (self.codes, self.scales, self.zeros, self.global_scale)
        return (self.format, *map(int, self.shape), *map(plain, tensors))

    def __repr__(self) -> str:
        rows, columns = self.shape
        return f"QuantizedTensor({self.format}, [{rows}, {columns}], {self.bits_per_weight:.3f} bits per weight)"


def default_rule(format: FormatName) -> RuleName:
    """The rule of a layer that is told none: the search for 4 bits, where it pays, "plain" for 8."""
    return "plain" if format in ("int8_row", "fp8_row") else "mse"


def on_cpu(matrix: QuantizedTensor[Any]) -> QuantizedTensor[Any]:
    """The matrix, or a copy of it, in CPU memory."""
    if torch_of(matrix.codes) is None or matrix.codes.is_cpu:
        return matrix
    tensors = (matrix.codes, matrix.scales, matrix.zeros, matrix.global_scale)
    return QuantizedTensor(matrix.format, matrix.shape, *(None if t is None else t.cpu() for t in tensors))


def quantize(
    weights: Kind,
    format: FormatName = "nvfp4",
    *,
    rule: RuleName = "plain",
    importance: Kind | None = None,
    global_scale: float | None = None,
    out: QuantizedTensor[Kind] | None = None,
) -> QuantizedTensor[Kind]:
    """Quantises a weight matrix where it is, on the CPU or, of torch, on a GPU: the same bytes. On a GPU the current stream is
    waited for once.

    Args:
      weights: [N, K], N outputs and K inputs; float32, float16 or bfloat16, any strides, all finite. K must be a multiple
        of the format's group.
      format: "nvfp4" (16 columns share an e4m3 scale), "mxfp4" (32, a power of two), "nf4" and "fp4_bnb" (64; nf4_b128:
        128), "int4_g32", "int4_g64", "int4_g128", each also with zero points as "..._zp", "int8_row", "fp8_row" and
        "e2m1_row" (one scale a row).
      rule: how scales are chosen. "plain": the largest weight of a group becomes the largest code. "mse": of several
        scales the one with the least squared error, slower by 4 (nvfp4) to 20 times (nf4). "four_six", nvfp4 only: the
        largest weight becomes 6 or 4. "floor", "round_up" (what plain is) and "even", mxfp4 only: the way to a power of two.
      importance: float32 [K], at least 0, on the weights' device: in the search of "mse" and "four_six", column k's squared
        errors count importance[k] times. The mean of x[:, k] ** 2 over sample inputs makes that the output's error, inputs
        uncorrelated.
      global_scale: of nvfp4, instead of the matrix's own: for matrices that must share one.
      out: a QuantizedTensor of this format and shape, where the weights are, to write to; it is then the one returned.

    Returns:
      A QuantizedTensor of numpy arrays for numpy, of torch tensors for torch.

    Raises:
      ValueError: a bad argument, or a weight that is NaN or infinite; the message names it. TypeError: no array.

    Sources: OCP Microscaling Formats 1.0 (mxfp4, floor); Dettmers et al., arXiv 2305.14314 (nf4); Cook et al., arXiv
    2512.02010 (four_six).
    """
    torch = kind(weights, "quantize", "weights")
    if len(weights.shape) != 2:
        raise ValueError(f"[quantize] weights has {len(weights.shape)} dimensions: it must be [N, K]")
    rows, columns = map(int, weights.shape)
    if out is None:
        beside: Any = weights
        device = "cpu" if torch is None else beside.device
        tensors = [empty(torch, described, device) for described in _heddle.lowbit_storage(format, rows, columns)]
        out = QuantizedTensor(format, (rows, columns), *tensors)
    else:
        _check_out("quantize", out, format, (rows, columns))
    if global_scale is not None and not global_scale > 0:
        raise ValueError(f"[quantize] global_scale is {global_scale}: it must be positive and finite")
    call(torch, _heddle.lowbit_quantize, plain(weights), out._parts(), rule, plain(importance), global_scale or 0.0)
    _changed(torch, out.codes, out.scales, out.zeros, out.global_scale)
    return out


def _check_out(operation: str, out: Any, format: str, shape: tuple[int, int]) -> None:
    """Of a matrix to write to; the native module looks at its tensors."""
    if not isinstance(out, QuantizedTensor):
        raise TypeError(f"[{operation}] out is a {type(out).__name__}: it must be a QuantizedTensor")
    if (out.format, tuple(out.shape)) != (format, shape):
        raise ValueError(
            f"[{operation}] out is {out.format} {list(out.shape)}: it must be {format} {list(shape)}, as the weights become"
        )


def dequantize(matrix: QuantizedTensor[Kind], dtype: LibraryDType | None = None, *, out: Kind | None = None) -> Kind:
    """The weights [N, K] that a quantised matrix stands for, a numpy array or a torch tensor as its codes are.

    Args:
      matrix: a QuantizedTensor.
      dtype: numpy.float32 or numpy.float16; torch.float32, torch.float16 or torch.bfloat16. float32 if None.
      out: where to write the weights, [N, K] of one of these dtypes, any strides; it is then the one returned.

    Raises:
      ValueError: another dtype, or a matrix whose tensors are not what its format has.
    """
    torch = kind(matrix.codes, "dequantize", "codes")
    (codes_shape, _), *_ = _heddle.lowbit_storage(matrix.format, *matrix.shape)
    if tuple(matrix.codes.shape) != codes_shape:  # before memory for the result is asked for
        found, wanted = list(matrix.codes.shape), list(codes_shape)
        raise ValueError(f"[dequantize] matrix.codes is {found}: it must be {wanted} for {matrix.format}")
    return write_weights("dequantize", torch, _heddle.lowbit_dequantize, matrix, matrix.codes, dtype, out)


def write_weights(operation: str, torch: Any, function: Any, matrix: Any, beside: Any, dtype: Any, out: Any) -> Any:
    """Has one of the native module's functions write a matrix's weights [N, K] to `out`, or to a new array beside its own."""
    if out is None and torch is None:
        out = np.empty(matrix.shape, np.float32 if dtype is None else dtype)
    elif out is None:
        out = torch.empty(matrix.shape, dtype=torch.float32 if dtype is None else dtype, device=beside.device)
    else:
        if kind(out, operation, "out") is not torch:
            raise TypeError(f"[{operation}] out is a {type(out).__name__}: it must be of the library of the matrix")
        if dtype is not None and dtype != out.dtype:
            raise ValueError(f"[{operation}] dtype is {dtype} and out is {out.dtype}: give one of them")
        if torch is not None:
            from ..hosts.torch.checks import refuse_gradients

            refuse_gradients(operation, ("out",), (out,))
    call(torch, function, plain(out), matrix._parts())
    _changed(torch, out)
    return out
