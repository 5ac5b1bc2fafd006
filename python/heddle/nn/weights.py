"""Where the weights of heddle.nn.Linear lie once they are quantised: buffers of bytes, plain and packed, and what a state
holds of them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from .. import _heddle
from ..lowbit.packed import PACKED_BY, PackedTensor, PackingError, pack
from ..lowbit.tensor import QuantizedTensor, empty

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Self

    from .._types import ActivationName, FormatName, OrderName

_PLAIN = ("codes", "scales", "zeros", "global_scale")


def _text(name: str, device: Any) -> torch.Tensor:
    return torch.tensor(list(name.encode()), dtype=torch.uint8, device=device)


def _of_text(buffer: torch.Tensor) -> Any:
    return bytes(buffer.tolist()).decode(errors="backslashreplace")  # what is no name is refused as one


def refuse_x(format: str, int8_x: bool, fp8_x: bool) -> str:
    """Why x cannot be rounded so for weights of a format, wherever they are; empty if it can."""
    return _heddle.lowbit_packed_order(format, 0, 0, False, int8_x=int8_x, fp8_x=fp8_x)[1]


class StoredWeights(nn.Module):
    """W [out_features, in_features] in one of ``heddle.lowbit.FORMATS``, or in floats as the parameter ``weight`` while
    ``format`` is None. Linear, its subclass, says what is asked of it: activation, int8_x, fp8_x, keep_16bit."""

    in_features: int
    out_features: int
    activation: ActivationName
    int8_x: bool
    fp8_x: bool
    keep_16bit: bool
    format: FormatName | None
    weight: nn.Parameter | Any  # None once quantised; Any, so that who has floats need not ask
    codes: torch.Tensor
    packed: Any
    column_order: torch.Tensor | None
    packing_error: PackingError | None = None
    _kept: dict[torch.dtype, torch.Tensor]
    _packed_order: OrderName | Literal[""]  # "": nothing is packed

    def drop_plain(self) -> Self:
        """Keeps the packed weights alone, half of the memory. They and the state are then for this version of Heddle and for
        devices as the layer is on now, CPUs or GPUs; ``quantized`` and ``dequantized`` are gone."""
        format = self._require_plain("drop_plain")
        packed = self._packed_weights()
        self._take_packed(format, packed.data, packed.order, self.column_order)
        return self

    def quantized(self) -> QuantizedTensor[torch.Tensor]:
        """The stored matrix, its columns as they are stored; it shares the layer's memory."""
        format = self._require_plain("quantized")
        return self._matrix_of(format, {name: getattr(self, name) for name in _PLAIN})

    def dequantized(self) -> torch.Tensor:
        """float32 [N, K]: what the stored weights stand for, column k for column k of x, or the weights."""
        if self.format is None:
            return self.weight.detach().float()
        weights = self.quantized().dequantize()
        order = self.column_order
        return weights if order is None else torch.empty_like(weights).index_copy_(1, order.long(), weights)

    @property
    def weight_bytes(self) -> int:
        """Bytes of W as the state has it."""
        if self.format is None:
            return self.weight.nbytes
        return self._plain_bytes() or self.packed.nbytes

    @property
    def held_bytes(self) -> int:
        """Bytes that W takes in memory now: plain storage, the packed weights beside it (they are made anew by the first call
        after a move), and what keep_16bit keeps."""
        if self.format is None:
            return self.weight.nbytes
        beside = [x.nbytes for x in (self.packed, *self._kept.values()) if x is not None]
        return self._plain_bytes() + sum(beside)

    def _plain_bytes(self) -> int:
        plain = [getattr(self, name, None) for name in _PLAIN]
        return sum(x.nbytes for x in plain if x is not None)

    def _require_plain(self, operation: str) -> FormatName:
        if self.format is None:
            raise ValueError(f"[Linear.{operation}] the weights are floats: quantise them first")
        if not hasattr(self, "codes"):
            raise ValueError(f"[Linear.{operation}] plain storage was dropped: load the state that was saved before")
        return self.format

    def _empty(self, format: FormatName, device: torch.device | str = "cpu") -> QuantizedTensor[torch.Tensor]:
        """A matrix of the layer's shape whose memory was not written."""
        shape = (self.out_features, self.in_features)
        tensors = [empty(torch, described, device) for described in _heddle.lowbit_storage(format, *shape)]
        return QuantizedTensor(format, shape, *tensors)

    def _zeros(self, format: FormatName) -> QuantizedTensor[torch.Tensor]:
        matrix = self._empty(format)
        for tensor in (getattr(matrix, name) for name in _PLAIN):
            if tensor is not None:
                tensor.view(torch.uint8).zero_()
        return matrix

    def _check_columns(self, order: torch.Tensor) -> None:
        shape = [self.in_features]
        if list(order.shape) != shape or not torch.equal(
            order.long().sort()[0], torch.arange(*shape, device=order.device)
        ):
            raise ValueError(
                f"[Linear] column_order is {list(order.shape)}: it must have each of 0 to {shape[0] - 1} once"
            )

    def _take(self, matrix: QuantizedTensor[torch.Tensor], column_order: torch.Tensor | None = None) -> None:
        """matrix into buffers: bytes, which no cast of the module touches."""
        if column_order is not None:
            self._check_columns(column_order)
        order = self._order(matrix.format, matrix.codes.is_cpu)
        packed = self._pack(matrix, order)  # first: what it refuses leaves the layer as it was
        self.hold(matrix, column_order)
        self._packed_order, self.packed, self.packing_error = order, packed.data, packed.error

    def hold(self, matrix: QuantizedTensor[torch.Tensor], column_order: torch.Tensor | None = None) -> None:
        """matrix into buffers, which the first call packs and which that call checks: for loaders."""
        self._begin(matrix.format, "", matrix.codes.device, column_order)
        for name in _PLAIN:
            tensor = getattr(matrix, name)
            self.register_buffer(name, None if tensor is None else tensor.detach().view(torch.uint8))
        self.register_buffer("packed", None, persistent=False)
        self.packing_error = None

    def pack_now(self) -> None:
        """Packs plain storage where it is not yet, since it was read or the layer has moved: what a call does first."""
        if self.packed is None:
            order = self._order(self._require_plain("pack_now"), self.codes.is_cpu)
            packed = self._pack(self.quantized(), order)
            self._packed_order = order
            self.packed, self.packing_error = packed.data, packed.error

    def await_state(self, format: FormatName, device: torch.device | str) -> None:
        """Buffers of a format whose memory was not written, for a loader that assigns to each what it read."""
        self.hold(self._empty(format, device))

    def _take_packed(
        self, format: FormatName, packed: torch.Tensor, order: OrderName, column_order: torch.Tensor | None
    ) -> None:
        """Packed weights alone."""
        self._begin(format, order, packed.device, column_order)
        self.register_buffer("packed", packed)
        self.register_buffer("packed_by", _text(PACKED_BY, packed.device))
        gated = " gated" if self.activation == "swiglu" else ""  # gates and ups lie in an order of their own
        self.register_buffer("packed_as", _text(order + gated, packed.device))

    def _begin(
        self,
        format: FormatName,
        order: OrderName | Literal[""],
        device: torch.device,
        column_order: torch.Tensor | None,
    ) -> None:
        self.format, self._packed_order = format, order
        self._kept = {}
        self.weight = None
        for name in (*_PLAIN, "format_name", "packed", "packed_by", "packed_as"):
            if name in self._buffers:
                del self._buffers[name]
        self.register_buffer("format_name", _text(format, device))
        self.register_buffer("column_order", column_order)

    def _matrix_of(self, format: FormatName, stored: dict[str, Any]) -> QuantizedTensor[torch.Tensor]:
        """A matrix of bytes such as the buffers hold."""
        shape = (self.out_features, self.in_features)
        dtypes = [
            None if d is None else empty(torch, (((0,), d[1]))).dtype for d in _heddle.lowbit_storage(format, *shape)
        ]
        tensors = (None if x is None else x.view(dtype) for x, dtype in zip((stored[n] for n in _PLAIN), dtypes))
        return QuantizedTensor(format, shape, *tensors)

    def _order(self, format: FormatName, cpu: bool) -> OrderName:
        """Of the packed weights on a CPU, or on a GPU."""
        order, refusal = self._order_and_refusal(format, not cpu, int8_x=self.int8_x, fp8_x=self.fp8_x)
        if refusal:
            raise ValueError(f"[Linear] {refusal}")
        return order

    def _order_and_refusal(self, format: FormatName, gpu: bool, **x: bool) -> tuple[OrderName, str]:
        gated = self.activation == "swiglu"
        return _heddle.lowbit_packed_order(format, self.out_features, self.in_features, gpu, gated, **x)

    def _pack(self, matrix: QuantizedTensor[torch.Tensor], order: OrderName) -> PackedTensor[torch.Tensor]:
        return pack(matrix, gated=self.activation == "swiglu", device=matrix.codes.device, order=order)

    def _packed_weights(self, dtype: torch.dtype | None = None) -> PackedTensor[torch.Tensor]:
        """dtype: of x, for the copy that keep_16bit wants."""
        assert self.format is not None
        shape, gated = (self.out_features, self.in_features), self.activation == "swiglu"
        self.pack_now()
        cpu, order = self.packed.is_cpu, self._packed_order
        assert order
        if cpu != (order == "rows16"):
            here, there = ("a CPU", "GPUs") if cpu else ("a GPU", "CPUs")
            raise ValueError(
                f"[Linear] the layer is on {here} and its packed weights are for {there}, and plain storage was "
                "dropped: move it back, or load a state with plain storage"
            )
        if cpu and self.fp8_x:
            raise ValueError(
                "[Linear] fp8_x is set and the layer is on a CPU: products with x in float8_e4m3fn are for GPUs, "
                "to which it may be moved; CPUs have int8_x"
            )
        found = PackedTensor(self.format, shape, gated, self.packed, order)
        if not self.keep_16bit or cpu or dtype not in (torch.bfloat16, torch.float16):
            return found
        if dtype not in self._kept:
            self._kept[dtype] = found.unpack(dtype)
        return dataclasses.replace(found, kept=self._kept[dtype])

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        if self.format is None:
            return super()._apply(fn, recurse)
        weights = "codes" if hasattr(self, "codes") else "packed"
        before = getattr(self, weights).device
        super()._apply(fn, recurse)
        if getattr(self, weights).device != before:
            self._kept = {}
            if weights == "codes":
                self.packed = self.packing_error = None  # devices have orders of their own: packed anew when next used
        return self

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"packed_by": PACKED_BY}  # of a layer that is pickled whole, packed weights and all

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        by = state.pop("packed_by", None)
        super().__setstate__(state)
        if by == PACKED_BY or self.format is None:
            return
        if not hasattr(self, "codes"):
            raise ValueError(
                f"[Linear] weights were packed by Heddle {by}, this is {PACKED_BY}, and plain storage was dropped: save the "
                "state of a layer that has it"
            )
        self.packed, self._kept, self.packing_error = None, {}, None  # packed anew when next used

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing: list[str],
        unexpected: list[str],
        errors: list[str],
    ) -> None:
        stored = state_dict.get(prefix + "format_name")
        if stored is not None:
            format = _of_text(stored)
            try:
                self._take_state(format, state_dict, prefix)
            except (ValueError, KeyError, RuntimeError) as error:
                errors.append(f"{prefix}: a state of {format} for [{self.out_features}, {self.in_features}]: {error}")
                return
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, unexpected, errors)

    def _take_state(self, format: FormatName, state_dict: dict[str, Any], prefix: str) -> None:
        held = (*self._parameters.values(), *self._buffers.values())
        device = next((t.device for t in held if t is not None and not t.is_meta), "cpu")
        columns = state_dict.get(prefix + "column_order")
        columns = None if columns is None else columns.detach().to(device, torch.int32, copy=True)
        if prefix + "packed" in state_dict:
            by = _of_text(state_dict[prefix + "packed_by"])
            if by != PACKED_BY:
                raise ValueError(f"weights were packed by Heddle {by}, this is {PACKED_BY}: save plain storage instead")
            order, *gated = _of_text(state_dict[prefix + "packed_as"]).split(" ")
            if bool(gated) != (self.activation == "swiglu"):
                raise ValueError(
                    f"weights were packed {'for' if gated else 'without'} swiglu, and the layer's activation is "
                    f"'{self.activation}'"
                )
            if order != "rows16" and (order == self._order_and_refusal(format, True, fp8_x=True)[0]) != self.fp8_x:
                raise ValueError(f"weights were packed in order {order}, and fp8_x is {self.fp8_x}")
            shape = [_heddle.lowbit_packed_bytes(format, self.out_features, self.in_features, bool(gated), order)]
            packed = state_dict[prefix + "packed"]
            if list(packed.shape) != shape:
                raise ValueError(f"packed weights are {list(packed.shape)}: they must be {shape}")
            if columns is not None:
                self._check_columns(columns)
            self._take_packed(format, torch.empty(shape, dtype=torch.uint8, device=device), order, columns)
            self.packing_error = None
            return  # the module's own loading copies
        # A copy, so that the layer does not share its memory with the state.
        stored = {
            n: None if (x := state_dict.get(prefix + n)) is None else x.detach().to(device, copy=True) for n in _PLAIN
        }
        if stored["codes"] is None:
            raise ValueError("codes are missing")
        self._take(self._matrix_of(format, stored), columns)
