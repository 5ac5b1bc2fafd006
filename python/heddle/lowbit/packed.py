"""Weights in the order that a device's kernels read. heddle.lowbit is the public name."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic

import numpy as np

from .. import _heddle
from .._types import Kind
from ..explanation import UINT8, Candidate, Explanation, gpu_name, shape_only, stand_in
from ..hosts.gpu import gpu_of
from .tensor import QuantizedTensor, kind, on_cpu, torch_of, write_weights

# Who wrote packed bytes, and how: the number changes with what their bits mean (test_packed_bytes_are_those_of_the_layout).
PACKED_BY = f"{_heddle.version()}, layout 2"


def _aligned(torch: Any, count: int) -> Any:
    """uint8 [count] in CPU memory that begins at a multiple of 64 bytes, which is what kernels ask of packed weights."""
    memory: Any
    if torch is None:
        memory = np.empty(count + 63, np.uint8)
        address = memory.ctypes.data
    else:
        memory = torch.empty(count + 63, dtype=torch.uint8, device="cpu")
        address = memory.data_ptr()
    return memory[-address % 64 :][:count]


if TYPE_CHECKING:
    import torch

    from .._types import FloatDType, FormatName, GpuName, LibraryDType, OrderName


@dataclass(frozen=True)
class PackingError:
    """What packing changed of the weights: how many, the largest abs(packed - stored) / abs(stored), which is 1 for a weight
    that became 0, and where the first such is."""

    changed: int
    max: float
    max_at: tuple[int, int]


@dataclass(frozen=True, eq=False)
class PackedTensor(Generic[Kind]):
    """Weights of a linear layer in the order that a device's kernels read; ``pack`` makes them.

    Attributes:
      format, shape: those of the quantised matrix.
      gated: whether its rows are gates and ups, for "swiglu".
      data: uint8 [bytes], numpy or torch, aligned to 64 bytes. The order may change with any version: store what
        ``quantize`` gives and pack it on load. What another version pickled is refused.
      order: "rows16" for CPUs, "fragments16", "fragments8", "matrix" or "matrix8" for GPUs.
      kept: the weights in 16 bits, [N, K], beside data, for calls of many rows (``pack``'s keep_16bit), or None.
      error: what packing changed of the weights, a PackingError; None if nobody said.
    """

    format: FormatName
    shape: tuple[int, int]
    gated: bool
    data: Kind
    order: OrderName = "rows16"
    kept: Kind | None = None
    error: PackingError | None = None

    _described: tuple[Any, ...] = field(init=False, repr=False)  # what calls say of it

    def __post_init__(self) -> None:
        object.__setattr__(self, "_described", (self.format, *map(int, self.shape), self.gated, self.order))

    def __getstate__(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.init} | {"packed_by": PACKED_BY}

    def __setstate__(self, state: dict[str, Any]) -> None:
        by = state.get("packed_by")
        if by != PACKED_BY:
            raise ValueError(
                f"[PackedTensor] weights were packed by Heddle {by}, this is {PACKED_BY}: pickle the QuantizedTensor instead"
            )
        for f in dataclasses.fields(self):
            if f.init:
                object.__setattr__(self, f.name, state[f.name])
        held: Any = self.data
        torch = torch_of(held)
        if torch is None or held.is_cpu:  # memory of a copy or of a file begins anywhere
            address = held.ctypes.data if torch is None else held.data_ptr()
            if address % 64 != 0:
                data = _aligned(torch, held.shape[0])
                data[:] = held
                object.__setattr__(self, "data", data)
        self.__post_init__()

    @property
    def nbytes(self) -> int:
        """Bytes of data, and of what is kept beside it."""
        return self.data.nbytes + (0 if self.kept is None else self.kept.nbytes)

    def unpack(self, dtype: LibraryDType | None = None, *, out: Kind | None = None) -> Kind:
        """The weights [N, K] that the packed data stands for, where it is; dtype, out: see ``dequantize``."""
        torch = kind(self.data, "unpack_weights", "data")
        return write_weights("unpack_weights", torch, _heddle.unpack_weights, self, self.data, dtype, out)

    def explain_unpack(self, dtype: FloatDType = "float32", *, gpu: GpuName | None = None) -> Explanation:
        """The candidates for ``unpack`` to weights [N, K] of a dtype and which one would run. Nothing is read.

        Args:
          dtype: "float32", "float16" or "bfloat16", or torch's or numpy's dtype of that name.
          gpu: answer as a machine with that GPU would, which need not be here; see ``heddle.explain``. Weights that were packed
            for the CPU are taken as ``pack`` has them on a GPU by itself.

        Raises:
          ValueError: another dtype; a gpu that is not known, listing those that are. TypeError: data that is no array.
        """
        out = shape_only(self._described[1:3], dtype, "explain_unpack_weights")
        kind(self.data, "explain_unpack_weights", "data")
        name = gpu_name(gpu)
        return Explanation(
            Candidate(*parts) for parts in _heddle.explain_unpack_weights(out, self._parts_on(name), name)
        )

    def _parts(self) -> tuple[Any, ...]:
        return (*self._described, self.data, self.kept)

    def _parts_on(self, gpu: str) -> tuple[Any, ...]:
        """_parts() of these weights packed for a GPU, which is only asked about; "": as they are."""
        if not gpu or self.order != "rows16":
            return self._parts()
        format, rows, columns, gated, _ = self._described
        order, _ = _heddle.lowbit_packed_order(format, rows, columns, True, gated)
        described = (format, rows, columns, gated, order)
        return (*described, stand_in((_heddle.lowbit_packed_bytes(*described),), UINT8), None)

    def __repr__(self) -> str:
        rows, columns = self.shape
        changed = f", {self.error.changed} weights changed" if self.error is not None and self.error.changed else ""
        gated = ", gated" if self.gated else ""
        return f"PackedTensor({self.format}, [{rows}, {columns}]{gated}, {self.nbytes} bytes{changed})"


def pack(
    matrix: QuantizedTensor[Kind],
    *,
    gated: bool = False,
    device: torch.device | str = "cpu",
    fp8_x: bool = False,
    keep_16bit: bool | torch.dtype = False,
    order: OrderName | None = None,
    exact: bool = False,
) -> PackedTensor[Kind]:
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
      order: instead of the usual one, which on a GPU is "fragments16" where K and the columns of y are multiples of 8:
        "matrix" takes every format and shape there, whose weights are decoded before cuBLASLt's product, and int8_row for
        ``linear``'s int8_x (W8A8).
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
    rows, columns = map(int, matrix.shape)
    if order is None:
        order, refusal = _heddle.lowbit_packed_order(matrix.format, rows, columns, gpu, gated, fp8_x=fp8_x)
        if refusal:
            raise ValueError(f"[pack_weights] {refusal}")
    elif gpu == (order == "rows16"):
        raise ValueError(
            f"[pack_weights] order is {order!r} and device is {str(device)!r}: rows16 is for CPUs, the others "
            "are for GPUs"
        )
    if gpu and str(device) != "meta":  # where a layer may be before it is loaded
        device = gpu_of("pack_weights", device)
    count = _heddle.lowbit_packed_bytes(matrix.format, rows, columns, gated, order)
    data = _aligned(torch, count)
    changed, largest, row, column = _heddle.lowbit_pack(on_cpu(matrix)._parts(), gated, order, data, exact)
    error = PackingError(changed, largest, (row, column))
    packed = PackedTensor(matrix.format, (rows, columns), gated, data.to(device) if gpu else data, order, error=error)
    if keep_16bit is False:
        return packed
    assert torch is not None  # on a GPU
    dtype = torch.bfloat16 if keep_16bit is True else keep_16bit
    if dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(
            f"[pack_weights] keep_16bit is {keep_16bit!r}: it must be a bool, torch.bfloat16 or torch.float16"
        )
    return dataclasses.replace(packed, kept=packed.unpack(dtype))
