"""The linear layer of heddle.nn, which is its public name."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from ..lowbit.product import ACTIVATIONS, linear
from ..lowbit.tensor import QuantizedTensor, default_rule, quantize
from .weights import StoredWeights, refuse_x

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from typing_extensions import Self, Unpack

    from .._types import ActivationName, AnyArray, FormatName, LinearOptions, RuleName

_ACTIVATE: dict[ActivationName, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": lambda z: z,
    "relu": torch.relu,
    "gelu_erf": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "silu": F.silu,
    "swiglu": lambda z: F.silu(z[..., ::2]) * z[..., 1::2],
}


def norm_arguments(norm: Any, columns: int, dtype: torch.dtype) -> dict[str, Any] | None:
    """What ``lowbit.linear`` takes for a norm module over the last dimension; None if it takes no such module."""
    if norm is None:
        return {}
    if type(norm) not in (nn.LayerNorm, nn.RMSNorm) or tuple(norm.normalized_shape) != (columns,):
        return None

    def cast(parameter: torch.Tensor | None) -> torch.Tensor | None:
        return None if parameter is None else parameter.to(dtype)

    if type(norm) is nn.LayerNorm:
        bias, weight = cast(norm.bias), cast(norm.weight)
        return {"norm": "layer_norm", "norm_weight": weight, "norm_bias": bias, "eps": norm.eps}
    eps = torch.finfo(dtype).eps if norm.eps is None else norm.eps
    return {"norm": "rms_norm", "norm_weight": cast(norm.weight), "eps": eps}


class Linear(StoredWeights):
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

    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        format: FormatName | None = None,
        activation: ActivationName = "none",
        int8_x: bool = False,
        fp8_x: bool = False,
        keep_16bit: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(f"[Linear] activation is '{activation}': it must be one of {', '.join(ACTIVATIONS)}")
        self.in_features, self.out_features = in_features, out_features
        if int8_x and fp8_x:
            raise ValueError(f"[Linear] {refuse_x('int8_row', int8_x, fp8_x)}")
        if keep_16bit and (int8_x or fp8_x):
            raise ValueError(
                f"[Linear] keep_16bit and {'int8_x' if int8_x else 'fp8_x'} are set: products with x in 8 bits do not "
                "read weights in 16"
            )
        self.activation, self.int8_x, self.fp8_x, self.keep_16bit = activation, int8_x, fp8_x, keep_16bit
        self._kept = {}
        self.format = None
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
        layer: nn.Linear | Linear,
        format: FormatName | None = None,
        *,
        rule: RuleName | None = None,
        importance: torch.Tensor | None = None,
        **options: Unpack[LinearOptions],
    ) -> Linear:
        """Of a torch.nn.Linear, whose weight (in floats) and bias parameters it shares. options: activation, int8_x, fp8_x
        and keep_16bit."""
        found = cls._shell(layer.in_features, layer.out_features, layer.bias, **options)
        found.weight = layer.weight
        found.train(layer.training)
        return found if format is None else found.quantize(format, rule=rule, importance=importance)

    @classmethod
    def from_quantized(
        cls,
        matrix: QuantizedTensor[torch.Tensor],
        bias: torch.Tensor | None = None,
        *,
        column_order: torch.Tensor | Sequence[int] | AnyArray | None = None,
        **options: Unpack[LinearOptions],
    ) -> Linear:
        """Of a quantised matrix of torch tensors, as ``heddle.lowbit.quantize`` and ``load`` give it. column_order: [K], of a
        matrix that was loaded with ``reorder_columns`` the ``StoredLayer.column_order``: column i of the matrix meets column
        column_order[i] of x. options: activation, int8_x, fp8_x and keep_16bit."""
        rows, columns = matrix.shape
        parameter = bias if bias is None or isinstance(bias, nn.Parameter) else nn.Parameter(bias)
        found = cls._shell(columns, rows, parameter, **options)
        if column_order is not None:
            if not isinstance(column_order, torch.Tensor):
                column_order = torch.tensor(column_order, device="cpu")
            column_order = column_order.to(matrix.codes.device, torch.int32)
        found._take(matrix, column_order)
        return found

    @classmethod
    def _shell(
        cls,
        in_features: int,
        out_features: int,
        bias: Any,
        *,
        activation: ActivationName = "none",
        int8_x: bool = False,
        fp8_x: bool = False,
        keep_16bit: bool = False,
    ) -> Linear:
        found = Linear(0, 0, False, activation=activation, int8_x=int8_x, fp8_x=fp8_x, keep_16bit=keep_16bit)
        found.in_features, found.out_features, found.bias = in_features, out_features, bias
        return found

    def quantize(
        self, format: FormatName, *, rule: RuleName | None = None, importance: torch.Tensor | None = None
    ) -> Self:
        """Replaces W by W in a format; see ``heddle.lowbit.quantize``. rule: "mse" for 4 bits and "plain" for 8 if None."""
        if self.format is not None:
            raise ValueError(f"[Linear.quantize] the weights are {self.format} already: quantise the floats")
        rule = default_rule(format) if rule is None else rule
        matrix = quantize(self.weight.detach(), format, rule=rule, importance=importance)
        self._take(matrix)
        return self

    def forward(
        self, x: torch.Tensor, *, norm: nn.Module | None = None, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """norm: a module that is applied to x first; a LayerNorm or RMSNorm over K is part of the same call. residual: as
        y."""
        return self._product(x, self.bias, norm, residual)

    def _product(
        self, x: torch.Tensor, bias: torch.Tensor | None, norm: nn.Module | None, residual: torch.Tensor | None
    ) -> torch.Tensor:
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        if self.format is None:
            y = self._in_floats(x if norm is None else norm(x), bias)
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
            bias=None if bias is None else bias.to(x.dtype),
            residual=residual if inside else None,
            int8_x=self.int8_x,
            **arguments,
        )
        if flat:
            y = y.reshape(*lead, y.shape[-1])
        return y if residual is None or inside else y + residual

    def _in_floats(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        z = F.linear(x.to(self.weight.dtype), self.weight).to(x.dtype)
        return _ACTIVATE[self.activation](z if bias is None else z + bias.to(x.dtype))

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
