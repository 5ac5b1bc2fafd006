"""Weights in 4 and 8 bits: formats, quantisation, its undoing, its error, and linear layers. docs/formats.md has every format to the bit.

>>> import numpy as np, heddle
>>> w = np.random.standard_normal((256, 1024)).astype(np.float32)   # [N, K]: y = x @ w.T
>>> q = heddle.lowbit.quantize(w, "nvfp4", rule="mse")
>>> q.nbytes, round(q.error(w).sqnr, 1)
(147460, 21.8)
>>> p = heddle.lowbit.pack(q)   # once, on load
>>> heddle.lowbit.linear(np.ones((3, 1024), np.float32), p, activation="silu").shape
(3, 256)
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import _heddle

__all__ = [
    "ACTIVATIONS",
    "FORMATS",
    "RULES",
    "FP4Codec",
    "PackedTensor",
    "QuantizationError",
    "QuantizedTensor",
    "StoredLayer",
    "dequantize",
    "layers",
    "layout_of",
    "linear",
    "load",
    "pack",
    "quantize",
]

#: Names of formats; ``nf4_bN`` and ``fp4_bnb_bN`` with N a power of two from 32 to 4096 are there besides.
FORMATS: tuple[str, ...] = tuple(_heddle.lowbit_formats())
#: Names of scale rules; ``quantize`` says which format has which.
RULES: tuple[str, ...] = ("plain", "four_six", "mse", "floor", "round_up", "even")
#: What ``linear`` may apply to its sums.
ACTIVATIONS: tuple[str, ...] = ("none", "relu", "gelu_erf", "gelu_tanh", "silu", "swiglu")

# By heddle::DType; numpy has no float8, so that its bits are bytes there.
_NUMPY = {0: np.float32, 1: np.float16, 5: np.uint8, 6: np.uint8, 7: np.int8}
_TORCH = {0: "float32", 1: "float16", 2: "bfloat16", 5: "float8_e4m3fn", 6: "uint8", 7: "int8"}


def _torch_of(x: Any) -> Any:
    """torch, with Heddle's reading of its tensors set up, if x is a torch tensor; else None."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(x, torch.Tensor):
        return None
    from . import _torch_ops  # noqa: F401

    return torch


def _kind(x: Any, operation: str, name: str) -> Any:
    """torch or None for numpy; other arrays are refused."""
    torch = _torch_of(x)
    if torch is None and not isinstance(x, np.ndarray):
        raise TypeError(f"[{operation}] {name} is a {type(x).__name__}: it must be a numpy array or a torch tensor")
    return torch


def _empty(torch: Any, described: tuple[tuple[int, ...], int] | None) -> Any:
    if described is None:
        return None
    shape, code = described
    return np.empty(shape, _NUMPY[code]) if torch is None else torch.empty(shape, dtype=getattr(torch, _TORCH[code]))


def _plain(x: Any) -> Any:
    """A torch tensor without its gradient; an e8m0 one as its bytes."""
    torch = _torch_of(x)
    if torch is None:
        return x
    if x.dtype is getattr(torch, "float8_e8m0fnu", None):
        x = x.view(torch.uint8)
    return x.detach()


def _size(x: Any) -> int:
    return 0 if x is None else x.nbytes


@dataclass(frozen=True, eq=False)
class QuantizationError:
    """Of d = dequantised - weight: sqnr in dB (10 log10(sum w^2 / sum d^2)), mean and max of abs(d), where the first
    largest is, and of each row sqnr and max, float32 [N]."""

    sqnr: float
    mean: float
    max: float
    max_at: tuple[int, int]
    row_sqnr: Any
    row_max: Any


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """A quantised matrix in plain storage; numpy arrays or torch tensors on the CPU, all contiguous.

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

    format: str
    shape: tuple[int, int]
    codes: Any
    scales: Any
    zeros: Any = None
    global_scale: Any = None

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales, zero points and global scale."""
        return _size(self.codes) + _size(self.scales) + _size(self.zeros) + _size(self.global_scale)

    @property
    def bits_per_weight(self) -> float:
        """8 * nbytes / (N * K)."""
        return 8 * self.nbytes / max(self.shape[0] * self.shape[1], 1)

    def dequantize(self, dtype: Any = None) -> Any:
        """See ``dequantize``."""
        return dequantize(self, dtype)

    def error(self, weights: Any) -> QuantizationError:
        """The error of this matrix against the weights [N, K] that it was made of."""
        torch = _kind(weights, "quantization_error", "weights")
        rows = [_empty(torch, (tuple(weights.shape[:1]), 0)) for _ in range(2)]
        sqnr, mean, largest, row, column = _heddle.lowbit_error(_plain(weights), self._parts(), *rows)
        return QuantizationError(sqnr, mean, largest, (row, column), *rows)

    def _parts(self) -> tuple[Any, ...]:
        tensors = (self.codes, self.scales, self.zeros, self.global_scale)
        return (self.format, *map(int, self.shape), *map(_plain, tensors))

    def __repr__(self) -> str:
        rows, columns = self.shape
        return f"QuantizedTensor({self.format}, [{rows}, {columns}], {self.bits_per_weight:.3f} bits per weight)"


def quantize(
    weights: Any, format: str = "nvfp4", *, rule: str = "plain", importance: Any = None, global_scale: float | None = None
) -> QuantizedTensor:
    """Quantises a weight matrix on the CPU.

    Args:
      weights: [N, K], N outputs and K inputs; float32, float16 or bfloat16, any strides, all finite. K must be a multiple
        of the format's group.
      format: "nvfp4" (16 columns share an e4m3 scale), "mxfp4" (32, a power of two), "nf4" and "fp4_bnb" (64; nf4_b128:
        128), "int4_g32", "int4_g64", "int4_g128", each also with zero points as "..._zp", "int8_row", "fp8_row" and
        "e2m1_row" (one scale a row).
      rule: how scales are chosen. "plain": the largest weight of a group becomes the largest code. "mse": of several
        scales the one with the least squared error, slower by 4 (nvfp4) to 20 times (nf4). "four_six", nvfp4 only: the
        largest weight becomes 6 or 4. "floor", "round_up" (what plain is) and "even", mxfp4 only: the way to a power of two.
      importance: float32 [K], at least 0: in the search of "mse" and "four_six", column k's squared errors count
        importance[k] times. The mean of x[:, k] ** 2 over sample inputs makes that the output's error, inputs uncorrelated.
      global_scale: of nvfp4, instead of the matrix's own: for matrices that must share one.

    Returns:
      A QuantizedTensor of numpy arrays for numpy, of torch tensors for torch.

    Raises:
      ValueError: a bad argument, or a weight that is NaN or infinite; the message names it. TypeError: no array.

    Sources: OCP Microscaling Formats 1.0 (mxfp4, floor); Dettmers et al., arXiv 2305.14314 (nf4); Cook et al., arXiv
    2512.02010 (four_six).
    """
    torch = _kind(weights, "quantize", "weights")
    if len(weights.shape) != 2:
        raise ValueError(f"[quantize] weights has {len(weights.shape)} dimensions: it must be [N, K]")
    rows, columns = map(int, weights.shape)
    tensors = [_empty(torch, described) for described in _heddle.lowbit_storage(format, rows, columns)]
    out = QuantizedTensor(format, (rows, columns), *tensors)
    if global_scale is not None and not global_scale > 0:
        raise ValueError(f"[quantize] global_scale is {global_scale}: it must be positive and finite")
    _heddle.lowbit_quantize(_plain(weights), out._parts(), rule, _plain(importance), global_scale or 0.0)
    return out


def dequantize(matrix: QuantizedTensor, dtype: Any = None) -> Any:
    """The weights [N, K] that a quantised matrix stands for, a numpy array or a torch tensor as its codes are.

    Args:
      matrix: a QuantizedTensor.
      dtype: numpy.float32 or numpy.float16; torch.float32, torch.float16 or torch.bfloat16. float32 if None.

    Raises:
      ValueError: another dtype, or a matrix whose tensors are not what its format has.
    """
    torch = _kind(matrix.codes, "dequantize", "codes")
    (codes_shape, _), *_ = _heddle.lowbit_storage(matrix.format, *matrix.shape)
    if tuple(matrix.codes.shape) != codes_shape:  # before memory for the result is asked for
        found, wanted = list(matrix.codes.shape), list(codes_shape)
        raise ValueError(f"[dequantize] matrix.codes is {found}: it must be {wanted} for {matrix.format}")
    if torch is None:
        out = np.empty(matrix.shape, np.float32 if dtype is None else dtype)
    else:
        out = torch.empty(matrix.shape, dtype=torch.float32 if dtype is None else dtype)
    _heddle.lowbit_dequantize(matrix._parts(), out)
    return out


@dataclass(frozen=True, eq=False)
class PackedTensor:
    """Weights of a linear layer in the order that the CPU's kernels read; ``pack`` makes them.

    Attributes:
      format, shape: those of the quantised matrix.
      gated: whether its rows are gates and ups, for "swiglu".
      data: uint8 [bytes], numpy or torch, aligned to 64 bytes. The order may change with any version: store what
        ``quantize`` gives and pack it on load.
    """

    format: str
    shape: tuple[int, int]
    gated: bool
    data: Any

    @property
    def nbytes(self) -> int:
        """Bytes of data."""
        return self.data.nbytes

    def __repr__(self) -> str:
        rows, columns = self.shape
        return f"PackedTensor({self.format}, [{rows}, {columns}]{', gated' if self.gated else ''}, {self.nbytes} bytes)"


def pack(matrix: QuantizedTensor, *, gated: bool = False) -> PackedTensor:
    """A quantised matrix in the order that linear layers read on a CPU.

    Args:
      matrix: a QuantizedTensor on the CPU; it is not needed afterwards.
      gated: rows 2j and 2j + 1 are gate and up of output j, for activation "swiglu".

    Raises:
      ValueError: tensors that are not what the format has, a NaN or an infinity among scales or codes, or an odd number
        of gated rows.
    """
    torch = _kind(matrix.codes, "pack_weights", "codes")
    rows, columns = map(int, matrix.shape)
    count = _heddle.lowbit_packed_bytes(matrix.format, rows, columns, gated)
    if torch is None:
        memory = np.empty(count + 63, np.uint8)
        address = memory.ctypes.data
    else:
        memory = torch.empty(count + 63, dtype=torch.uint8)
        address = memory.data_ptr()
    data = memory[-address % 64 :][:count]
    _heddle.lowbit_pack(matrix._parts(), gated, data)
    return PackedTensor(matrix.format, (rows, columns), gated, data)


def linear(
    x: Any,
    weights: PackedTensor,
    *,
    activation: str = "none",
    bias: Any = None,
    residual: Any = None,
    out: Any = None,
    int8_x: bool = False,
    batch_invariant: bool = False,
    force: str = "",
) -> Any:
    """activation(x @ W.T + bias) + residual, W decoded inside the product; on the CPU, without gradients.

    Args:
      x: [..., K], up to four dimensions; float32, float16 or, of torch, bfloat16; the last dimension contiguous.
      weights: a PackedTensor of [N, K].
      activation: one of ``ACTIVATIONS``. "swiglu" takes gated weights and gives N / 2 columns, silu(gate) * up.
      bias: [N], of x's dtype.
      residual: as the result, of x's dtype.
      out: where to write the result; may be the residual itself.
      int8_x: x is rounded to 8 bits, a scale for each row, and multiplied in integers: faster, and less exact. For nvfp4,
        mxfp4, e2m1_row and int4.
      batch_invariant: a row's bits do not depend on how many rows x has. float32 and float16 promise it without; bfloat16
        is slower with it on processors that multiply it in pairs.
      force: a candidate by name: "cpu" or "reference".

    Returns:
      [..., N] or [..., N / 2] of x's dtype; a numpy array or a torch tensor as x is.

    Raises:
      ValueError: a bad argument; the message names it. RuntimeError: a tensor that requires a gradient while torch records
        them. TypeError: no array.
    """
    torch = _kind(x, "linear_forward", "x")
    if torch is not None and torch.is_grad_enabled():
        for name, tensor in (("x", x), ("bias", bias), ("residual", residual)):
            if tensor is not None and tensor.requires_grad:
                raise RuntimeError(f"[linear_forward] {name} requires a gradient, which this operation does not have: "
                                   "call it under torch.no_grad()")  # fmt: skip
    rows, columns = map(int, weights.shape)
    if out is None:
        if len(x.shape) == 0 or x.shape[-1] != columns:  # before memory for the result is asked for
            raise ValueError(f"[linear_forward] x is {list(x.shape)} and weights have {columns} columns: x must be "
                             f"[..., {columns}]")  # fmt: skip
        shape = (*x.shape[:-1], rows // 2 if weights.gated else rows)
        out = np.empty(shape, x.dtype) if torch is None else torch.empty(shape, dtype=x.dtype)
    parts = (weights.format, rows, columns, weights.gated, weights.data)
    x, bias, residual, y = _plain(x), _plain(bias), _plain(residual), _plain(out)
    _heddle.linear_forward(x, parts, y, activation, bias, residual, int8_x, batch_invariant, force)
    return out


@dataclass(frozen=True, eq=False)
class StoredLayer:
    """A low-bit layer of a checkpoint, as ``layers`` and ``layout_of`` find it.

    Attributes:
      name: what its tensors' names begin with.
      layout: who wrote it and how: "gpt_oss_mxfp4", "modelopt_nvfp4", "compressed_tensors_nvfp4",
        "compressed_tensors_mxfp4", "compressed_tensors_int4", "bitsandbytes", "gptq" or "awq"; None if it is refused.
      reason: what the layout was told by.
      format: the format that it loads into, see ``FORMATS``; None if it is refused.
      shape: (N, K), of one expert's matrix where there are several.
      experts: how many matrices it holds; 0: it is one.
      gate_up_interleaved: row 2i is row i of the gate, row 2i + 1 that of the up projection.
      column_order: int32 [K] where columns that share a scale do not lie together (g_idx of "act-order"), else None. It
        loads with ``reorder_columns=True`` as weights[:, column_order], so that y = x[:, column_order] @ loaded.T.
      refusal: why it cannot be loaded, or "".
    """

    name: str
    layout: str | None
    reason: str
    format: str | None
    shape: tuple[int, int]
    experts: int
    gate_up_interleaved: bool
    column_order: np.ndarray | None
    refusal: str


def _open(paths: Any, gptq_version: int | None) -> Any:
    one = isinstance(paths, (str, os.PathLike))
    return _heddle.Checkpoint.open([os.fspath(path) for path in ([paths] if one else paths)], gptq_version or 0)


def _stored(parts: tuple[Any, ...]) -> StoredLayer:
    name, layout, reason, format, rows, columns, experts, interleaved, order, refusal = parts
    column_order = np.frombuffer(order, np.int32) if order else None
    return StoredLayer(name, layout, reason, format, (rows, columns), experts, interleaved, column_order, refusal)


def layers(
    paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]], *, gptq_version: int | None = None
) -> dict[str, StoredLayer]:
    """The low-bit layers of a checkpoint by name, those that cannot be loaded too: see their ``refusal``.

    Args:
      paths: a safetensors file, or a folder for all of its *.safetensors, or several of them. Nothing is read but headers,
        small tensors and g_idx.
      gptq_version: 1 if zero points of GPTQ are stored less 1, 2 if as they are. None: as config.json or
        quantize_config.json beside the files says; without those, layers of GPTQ are refused.

    Raises:
      ValueError: a file that is no safetensors file, or a tensor in two files. RuntimeError: a file that cannot be read.
    """
    return {parts[0]: _stored(parts) for parts in _open(paths, gptq_version).layers()}


def layout_of(
    paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]], name: str, *, gptq_version: int | None = None
) -> StoredLayer:
    """One layer of ``layers``, for example "model.layers.0.mlp.down_proj"; ValueError if it is not there or is refused."""
    return _stored(_open(paths, gptq_version).layer(name))


def load(
    paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    name: str,
    *,
    expert: int | None = None,
    gptq_version: int | None = None,
    reorder_columns: bool = False,
    framework: str = "numpy",
) -> QuantizedTensor:
    """Reads a low-bit layer that another tool wrote: its bits are moved, nothing is quantised again.

    Args:
      paths, gptq_version: see ``layers``.
      name: of the layer: what comes before ".qweight", ".weight_packed", ".weight", ".blocks" or "_blocks".
      expert: which matrix, of a layer with experts.
      reorder_columns: take a layer with a ``StoredLayer.column_order``, in that order, instead of refusing it.
      framework: "numpy" or "torch", whose arrays the result has.

    Raises:
      ValueError: a layer that is not there, whose layout is not known, or that plain storage cannot hold exactly; the
        message names the tensor, the value and the rule. RuntimeError: a file that cannot be read.

    docs/formats.md, "Reading checkpoints", lists layouts and refusals.
    """
    if framework not in ("numpy", "torch"):
        raise ValueError(f"[load] framework is {framework!r}: it must be 'numpy' or 'torch'")
    torch = None
    if framework == "torch":
        import torch

        from . import _torch_ops  # noqa: F401
    checkpoint = _open(paths, gptq_version)
    layer = _stored(checkpoint.layer(name))
    if expert is None and layer.experts > 0:
        raise ValueError(f"[load] expert is None: layer {name!r} has {layer.experts} of them, from 0")
    tensors = [_empty(torch, described) for described in _heddle.lowbit_storage(layer.format, *layer.shape)]
    out = QuantizedTensor(layer.format, layer.shape, *tensors)
    checkpoint.load(name, out._parts(), expert or 0, reorder_columns)
    return out


class FP4Codec:
    """Format "e2m1_row" under the names of an early study of FP4 linear layers: the same codes, scales and packing.

    For torch tensors of any shape; the last dimension is the row that shares a scale.
    """

    #: Values of the codes 0 to 15.
    FP4_TABLE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)

    @staticmethod
    def encode(tensor: Any) -> tuple[Any, Any]:
        """packed int8 [..., (K + 1) // 2], column 2j in the high four bits, and scale float32 [...] = max(amax / 6, 1e-8).

        Raises:
          ValueError: NaN or infinity in the tensor, another dtype than float32, float16 or bfloat16.
        """
        torch = _torch_of(tensor)
        if torch is None:
            raise TypeError(f"[FP4Codec.encode] tensor is a {type(tensor).__name__}: it must be a torch tensor")
        *lead, columns = tensor.shape
        q = quantize(tensor.reshape(math.prod(lead), columns), "e2m1_row")
        return q.codes.view(torch.int8).reshape(*lead, (columns + 1) // 2), q.scales.reshape(lead)

    @staticmethod
    def decode(packed: Any, scale: Any, original_size: int) -> Any:
        """float32 [..., original_size] from what encode() returned; packed may be uint8 too."""
        torch = _torch_of(packed)
        if torch is None:
            raise TypeError(f"[FP4Codec.decode] packed is a {type(packed).__name__}: it must be a torch tensor")
        *lead, width = packed.shape
        rows = math.prod(lead)
        codes = packed.reshape(rows, width).view(torch.uint8).contiguous()
        scales = scale.to(torch.float32).reshape(rows, 1).contiguous()
        q = QuantizedTensor("e2m1_row", (rows, original_size), codes, scales)
        return q.dequantize().reshape(*lead, original_size)
