"""The linear layer of heddle.nn, which is its public name."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from . import _heddle
from ._lowbit_linear import ACTIVATIONS, PackedTensor, PackingError, linear, pack
from ._lowbit_tensor import QuantizedTensor, default_rule, empty, quantize

_ACTIVATE = {
    "none": lambda z: z,
    "relu": torch.relu,
    "gelu_erf": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "silu": F.silu,
    "swiglu": lambda z: F.silu(z[..., ::2]) * z[..., 1::2],
}
_PLAIN = ("codes", "scales", "zeros", "global_scale")
_FP8_ORDERS = ("fragments8", "matrix8")
# Who wrote packed bytes, and how: the number changes with what their bits mean (test_packed_bytes_are_those_of_the_layout).
_PACKED_BY = f"{_heddle.version()}, layout 2"


def _text(name: str, device: Any) -> torch.Tensor:
    return torch.tensor(list(name.encode()), dtype=torch.uint8, device=device)


def _of_text(buffer: torch.Tensor) -> str:
    return bytes(buffer.tolist()).decode()


def refuse_x(format: str, int8_x: bool, fp8_x: bool) -> str:
    """Why x cannot be rounded so for weights of a format; empty if it can."""
    e2m1 = format in ("nvfp4", "mxfp4", "e2m1_row")
    if int8_x and fp8_x:
        return "int8_x and fp8_x are set: x is rounded one way"
    if int8_x and not (e2m1 or format == "int8_row" or format.startswith("int4")):
        return f"int8_x is set and the format is {format}: it is for nvfp4, mxfp4, e2m1_row, int4 and int8_row"
    if fp8_x and not (e2m1 or format == "fp8_row"):
        return f"fp8_x is set and the format is {format}: it is for nvfp4, mxfp4, e2m1_row and fp8_row"
    return ""


def norm_arguments(norm: Any, columns: int, dtype: torch.dtype) -> dict[str, Any] | None:
    """What ``lowbit.linear`` takes for a norm module over the last dimension; None if it takes no such module."""
    if norm is None:
        return {}
    if type(norm) not in (nn.LayerNorm, nn.RMSNorm) or tuple(norm.normalized_shape) != (columns,):
        return None

    def cast(parameter):
        return None if parameter is None else parameter.to(dtype)

    if type(norm) is nn.LayerNorm:
        bias, weight = cast(norm.bias), cast(norm.weight)
        return {"norm": "layer_norm", "norm_weight": weight, "norm_bias": bias, "eps": norm.eps}
    eps = torch.finfo(dtype).eps if norm.eps is None else norm.eps
    return {"norm": "rms_norm", "norm_weight": cast(norm.weight), "eps": eps}


class Linear(nn.Module):
    """y = activation(norm(x) Wᵀ + bias) + residual, W in floats or in one of ``heddle.lowbit.FORMATS``.

    In floats it is torch's linear layer, with gradients of W; the product runs in W's dtype, whatever x's is. Quantised, W
    is decoded inside the product, x, bias, norm and residual have gradients, and W is frozen: bytes in buffers, which
    ``state_dict`` holds and ``.to(dtype)`` leaves alone. A state of another format than the layer's turns the layer into
    that format.

    Args:
      in_features, out_features: K, and N, the rows of W. With "swiglu" rows 2j and 2j + 1 are gate and up of output j, so
        that y has N / 2 columns.
      bias: whether there is one, [N].
      format: None: floats, drawn as torch draws them. Else the weights are zeros until a state is loaded.
      activation: one of ``heddle.lowbit.ACTIVATIONS``.
      int8_x: quantised, x is rounded to 8 bits; see ``heddle.lowbit.linear``. On a GPU for int8_row alone.
      fp8_x: quantised and on a GPU, x is rounded to float8_e4m3fn; see ``heddle.lowbit.pack``. On a CPU the layer holds its
        weights and refuses calls.
      keep_16bit: quantised and on a GPU, W is kept in x's dtype too from the first call on, for calls of many rows: 2 N K
        bytes more for each dtype, see ``heddle.lowbit.pack``. Not part of the state, and not beside int8_x or fp8_x, whose
        products would not read it.

    Attributes:
      packing_error: what packing for the layer's device changed of the stored weights, which some orders for GPUs do; None
        in floats, between a move to another device and the next call, and where a state brought packed weights.
    """

    packing_error: PackingError | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        format: str | None = None,
        activation: str = "none",
        int8_x: bool = False,
        fp8_x: bool = False,
        keep_16bit: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(f"[Linear] activation is '{activation}': it must be one of {', '.join(ACTIVATIONS)}")
        self.in_features, self.out_features = in_features, out_features
        if int8_x and fp8_x:
            raise ValueError(f"[Linear] {refuse_x('', int8_x, fp8_x)}")
        if keep_16bit and (int8_x or fp8_x):
            raise ValueError(
                f"[Linear] keep_16bit and {'int8_x' if int8_x else 'fp8_x'} are set: products with x in 8 bits do not "
                "read weights in 16"
            )
        self.activation, self.int8_x, self.fp8_x, self.keep_16bit = activation, int8_x, fp8_x, keep_16bit
        self._kept: dict[torch.dtype, torch.Tensor] = {}
        self.format: str | None = None
        self.column_order: torch.Tensor | None
        self.register_buffer("column_order", None)
        self.bias = nn.Parameter(torch.zeros(out_features, device=device, dtype=dtype)) if bias else None
        if format is None:
            self.weight = nn.Parameter(torch.empty(out_features, in_features, device=device, dtype=dtype))
            bound = 1 / math.sqrt(in_features) if in_features > 0 else 0
            nn.init.uniform_(self.weight, -bound, bound)
            if self.bias is not None:
                nn.init.uniform_(self.bias, -bound, bound)
        else:
            self.register_parameter("weight", None)
            self._take(self._zeros(format))

    @classmethod
    def from_linear(
        cls,
        layer: nn.Module,
        format: str | None = None,
        *,
        rule: str | None = None,
        importance: Any = None,
        **options: Any,
    ) -> Linear:
        """Of a torch.nn.Linear, whose weight (in floats) and bias parameters it shares. options: activation, int8_x, fp8_x
        and keep_16bit."""
        found = cls._shell(layer.in_features, layer.out_features, layer.bias, **options)
        found.weight = layer.weight
        found.train(layer.training)
        return found if format is None else found.quantize(format, rule=rule, importance=importance)

    @classmethod
    def from_quantized(
        cls, matrix: QuantizedTensor, bias: torch.Tensor | None = None, *, column_order: Any = None, **options: Any
    ) -> Linear:
        """Of a quantised matrix of torch tensors, as ``heddle.lowbit.quantize`` and ``load`` give it. column_order: [K], of a
        matrix that was loaded with ``reorder_columns`` the ``StoredLayer.column_order``: column i of the matrix meets column
        column_order[i] of x. options: activation, int8_x, fp8_x and keep_16bit."""
        rows, columns = matrix.shape
        parameter = bias if bias is None or isinstance(bias, nn.Parameter) else nn.Parameter(bias)
        found = cls._shell(columns, rows, parameter, **options)
        if column_order is not None:
            if not isinstance(column_order, torch.Tensor):
                column_order = torch.tensor(column_order)
            column_order = column_order.to(matrix.codes.device, torch.int32)
        found._take(matrix, column_order)
        return found

    @classmethod
    def _shell(cls, in_features, out_features, bias, *, activation="none", int8_x=False, fp8_x=False, keep_16bit=False):
        found = Linear(0, 0, False, activation=activation, int8_x=int8_x, fp8_x=fp8_x, keep_16bit=keep_16bit)
        found.in_features, found.out_features, found.bias = in_features, out_features, bias
        return found

    def quantize(self, format: str, *, rule: str | None = None, importance: Any = None) -> Linear:
        """Replaces W by W in a format; see ``heddle.lowbit.quantize``. rule: "mse" for 4 bits and "plain" for 8 if None."""
        if self.format is not None:
            raise ValueError(f"[Linear.quantize] the weights are {self.format} already: quantise the floats")
        rule = default_rule(format) if rule is None else rule
        matrix = quantize(self.weight.detach(), format, rule=rule, importance=importance)
        self._take(matrix)
        return self

    def drop_plain(self) -> Linear:
        """Keeps the packed weights alone, half of the memory. They and the state are then for this version of Heddle and for
        devices as the layer is on now, CPUs or GPUs; ``quantized`` and ``dequantized`` are gone."""
        self._require_plain("drop_plain")
        self._take_packed(self.format, self._packed_weights().data, self._packed_order, self.column_order)
        return self

    def quantized(self) -> QuantizedTensor:
        """The stored matrix, its columns as they are stored; it shares the layer's memory."""
        self._require_plain("quantized")
        return self._matrix_of(self.format, {name: getattr(self, name) for name in _PLAIN})

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

    def _plain_bytes(self):
        plain = [getattr(self, name, None) for name in _PLAIN]
        return sum(x.nbytes for x in plain if x is not None)

    def forward(
        self, x: torch.Tensor, *, norm: nn.Module | None = None, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """norm: a module that is applied to x first; a LayerNorm or RMSNorm over K is part of the same call. residual: as
        y."""
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        if self.format is None:
            y = self._in_floats(x if norm is None else norm(x))
            return y if residual is None else y + residual
        arguments = norm_arguments(norm, self.in_features, x.dtype)
        if x.is_cuda and norm is not None and self.in_features % 8 != 0:  # no kernel has a norm over such rows
            arguments = None
        if arguments is None:
            x, arguments = x if norm is None else norm(x), {}
        order = self.column_order
        if order is not None and x.shape[-1:] == order.shape:
            x = x.index_select(-1, order)
            for name in ("norm_weight", "norm_bias"):
                if arguments.get(name) is not None:
                    arguments[name] = arguments[name].index_select(0, order)
        lead, flat = x.shape[:-1], x.dim() > 4
        if flat:
            x = x.reshape(-1, x.shape[-1])
        if x.dim() > 0 and x.stride(-1) != 1:
            x = x.contiguous()
        inside = residual is not None and not flat and residual.dtype == x.dtype and residual.stride(-1) == 1
        y = linear(
            x,
            self._packed_weights(x.dtype),
            activation=self.activation,
            bias=None if self.bias is None else self.bias.to(x.dtype),
            residual=residual if inside else None,
            int8_x=self.int8_x,
            **arguments,
        )
        if flat:
            y = y.reshape(*lead, y.shape[-1])
        return y if residual is None or inside else y + residual

    def _in_floats(self, x):
        z = F.linear(x.to(self.weight.dtype), self.weight).to(x.dtype)
        return _ACTIVATE[self.activation](z if self.bias is None else z + self.bias.to(x.dtype))

    def _require_plain(self, operation):
        if self.format is None:
            raise ValueError(f"[Linear.{operation}] the weights are floats: quantise them first")
        if not hasattr(self, "codes"):
            raise ValueError(f"[Linear.{operation}] plain storage was dropped: load the state that was saved before")

    def _zeros(self, format):
        shapes = _heddle.lowbit_storage(format, self.out_features, self.in_features)
        tensors = [empty(torch, described) for described in shapes]
        for tensor in tensors:
            if tensor is not None:
                tensor.view(torch.uint8).zero_()
        return QuantizedTensor(format, (self.out_features, self.in_features), *tensors)

    def _check_columns(self, order):
        shape = [self.in_features]
        if list(order.shape) != shape or not torch.equal(
            order.long().sort()[0], torch.arange(*shape, device=order.device)
        ):
            raise ValueError(
                f"[Linear] column_order is {list(order.shape)}: it must have each of 0 to {shape[0] - 1} once"
            )

    def _take(self, matrix, column_order=None):
        """matrix into buffers: bytes, which no cast of the module touches."""
        if column_order is not None:
            self._check_columns(column_order)
        order = self._order(matrix.format, matrix.codes.is_cpu)
        packed = self._pack(matrix, order)  # first: what it refuses leaves the layer as it was
        self._begin(matrix.format, order, packed.data.device, column_order)
        self.packing_error = packed.error
        for name in _PLAIN:
            tensor = getattr(matrix, name)
            self.register_buffer(name, None if tensor is None else tensor.detach().view(torch.uint8))
        self.register_buffer("packed", packed.data, persistent=False)

    def _take_packed(self, format, packed, order, column_order):
        """Packed weights alone."""
        self._begin(format, order, packed.device, column_order)
        self.register_buffer("packed", packed)
        self.register_buffer("packed_by", _text(_PACKED_BY, packed.device))
        gated = " gated" if self.activation == "swiglu" else ""  # gates and ups lie in an order of their own
        self.register_buffer("packed_as", _text(order + gated, packed.device))

    def _begin(self, format, order, device, column_order):
        self.format, self._packed_order = format, order
        self._kept = {}
        self.weight = None
        for name in (*_PLAIN, "format_name", "packed", "packed_by", "packed_as"):
            if name in self._buffers:
                del self._buffers[name]
        self.register_buffer("format_name", _text(format, device))
        self.register_buffer("column_order", column_order)

    def _matrix_of(self, format, stored):
        """A matrix of bytes such as the buffers hold."""
        shape = (self.out_features, self.in_features)
        dtypes = [
            None if d is None else empty(torch, (((0,), d[1]))).dtype for d in _heddle.lowbit_storage(format, *shape)
        ]
        tensors = (None if x is None else x.view(dtype) for x, dtype in zip((stored[n] for n in _PLAIN), dtypes))
        return QuantizedTensor(format, shape, *tensors)

    def _order(self, format, cpu):
        """Of the packed weights on a CPU, or on a GPU."""
        if reason := refuse_x(format, self.int8_x, self.fp8_x):
            raise ValueError(f"[Linear] {reason}")
        if cpu:
            return "rows16"
        if self.fp8_x:
            return "matrix8" if format == "fp8_row" else "fragments8"
        if self.int8_x and format != "int8_row":
            raise ValueError(
                f"[Linear] int8_x is set and the weights are {format}, on a GPU: there it is for int8_row, and fp8_x "
                "for nvfp4, mxfp4, e2m1_row and fp8_row"
            )
        return "matrix" if self.int8_x or not self._whole_vectors() else "fragments16"

    def _whole_vectors(self):
        """Whether rows of x and y are whole vectors of 16 bytes, as kernels over fragments want them; cuBLASLt takes any."""
        outputs = self.out_features // 2 if self.activation == "swiglu" else self.out_features
        return self.in_features % 8 == 0 and outputs % 8 == 0

    def _pack(self, matrix, order):
        return pack(matrix, gated=self.activation == "swiglu", device=matrix.codes.device, order=order)

    def _packed_weights(self, dtype=None):
        """dtype: of x, for the copy that keep_16bit wants."""
        shape, gated = (self.out_features, self.in_features), self.activation == "swiglu"
        if self.packed is None:  # since the layer has moved
            self._packed_order = self._order(self.format, self.codes.is_cpu)
            packed = self._pack(self.quantized(), self._packed_order)
            self.packed, self.packing_error = packed.data, packed.error
        cpu = self.packed.is_cpu
        if cpu != (self._packed_order == "rows16"):
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
        found = PackedTensor(self.format, shape, gated, self.packed, self._packed_order)
        if not self.keep_16bit or cpu or dtype not in (torch.bfloat16, torch.float16):
            return found
        if dtype not in self._kept:
            self._kept[dtype] = found.unpack(dtype)
        return dataclasses.replace(found, kept=self._kept[dtype])

    def _apply(self, fn, recurse=True):
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

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing, unexpected, errors):
        stored = state_dict.get(prefix + "format_name")
        if stored is not None:
            format = _of_text(stored)
            try:
                self._take_state(format, state_dict, prefix)
            except (ValueError, KeyError, RuntimeError) as error:
                errors.append(f"{prefix}: a state of {format} for [{self.out_features}, {self.in_features}]: {error}")
                return
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, unexpected, errors)

    def _take_state(self, format, state_dict, prefix):
        held = (*self._parameters.values(), *self._buffers.values())
        device = next((t.device for t in held if t is not None and not t.is_meta), "cpu")
        columns = state_dict.get(prefix + "column_order")
        columns = None if columns is None else columns.detach().to(device, torch.int32, copy=True)
        if prefix + "packed" in state_dict:
            by = _of_text(state_dict[prefix + "packed_by"])
            if by != _PACKED_BY:
                raise ValueError(
                    f"weights were packed by Heddle {by}, this is {_PACKED_BY}: save plain storage instead"
                )
            order, *gated = _of_text(state_dict[prefix + "packed_as"]).split(" ")
            if bool(gated) != (self.activation == "swiglu"):
                raise ValueError(
                    f"weights were packed {'for' if gated else 'without'} swiglu, and the layer's activation is "
                    f"'{self.activation}'"
                )
            if order != "rows16" and (order in _FP8_ORDERS) != self.fp8_x:
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

    def extra_repr(self) -> str:
        words = [f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"]
        words.append(f"format={self.format or str(self.weight.dtype).removeprefix('torch.')}")
        if self.activation != "none":
            words.append(f"activation={self.activation}")
        if self.format is not None:
            words += ["columns reordered"] if self.column_order is not None else []
            words += [option for option in ("int8_x", "fp8_x") if getattr(self, option)]
            if self.packing_error is not None and self.packing_error.changed:
                words.append(f"{self.packing_error.changed} weights changed by packing")
        return ", ".join(words)
