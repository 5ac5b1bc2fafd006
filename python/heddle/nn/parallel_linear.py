"""Linear layers whose weights are split over the ranks of a group. heddle.nn is their public name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .. import _heddle
from ..lowbit.tensor import QuantizedTensor
from .exchanges import Shared
from .linear import Linear

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch.distributed as dist


def even_parts(units: int, ranks: int) -> list[tuple[int, int]]:
    """[begin, end) of each rank, the first ones' longer by one where they must be."""
    sizes = [units // ranks + (rank < units % ranks) for rank in range(ranks)]
    return [(sum(sizes[:rank]), sum(sizes[: rank + 1])) for rank in range(ranks)]


def unit_of_columns(layer: Linear) -> int:
    """Columns of W that are stored together: a group that has a scale, or those of a byte."""
    if layer.format is None:
        return 1
    many = 1 << 14  # so that a scale for each row and one for each group differ
    ((_, codes), _), ((_, scales), _), *_ = _heddle.lowbit_storage(layer.format, 1, many)
    return many // (scales if scales > 1 else codes)


class ParallelLinear(Linear):
    """A share of a layer: its options, and a part of its weights, copied."""

    def __init__(self, layer: Linear, shared: Shared) -> None:
        super().__init__(
            0,
            0,
            False,
            activation=layer.activation,
            int8_x=layer.int8_x,
            fp8_x=layer.fp8_x,
            keep_16bit=layer.keep_16bit,
        )
        self._shared = shared
        self.train(layer.training)

    def _set(
        self, weights: torch.Tensor | QuantizedTensor[torch.Tensor], bias: torch.Tensor | None, layer: Linear
    ) -> None:
        self.out_features, self.in_features = weights.shape
        if bias is not None:
            assert layer.bias is not None
            self.bias = nn.Parameter(bias, requires_grad=layer.bias.requires_grad)
        if isinstance(weights, QuantizedTensor):
            order = layer.column_order
            self._take(weights, None if order is None else order.clone())
        else:
            self.weight = nn.Parameter(weights, requires_grad=layer.weight.requires_grad)

    def extra_repr(self) -> str:
        order = ", rows dealt out" if self._shared.sequence_parallel else ""
        return f"{super().extra_repr()}, rank {self._shared.rank} of {self._shared.size}{order}"


def _as_linear(layer: Any, operation: str) -> Linear:
    if not isinstance(layer, (nn.Linear, Linear)):
        raise TypeError(
            f"[{operation}] layer is a {type(layer).__name__}: it must be a heddle.nn.Linear or torch.nn.Linear"
        )
    return layer if isinstance(layer, Linear) else Linear.from_linear(layer)


class ColumnParallelLinear(ParallelLinear):
    """Some outputs of a linear layer, the others on the other ranks: y_r = activation(x W_rᵀ + bias_r).

    Every rank has all of x, and the gradient of x is summed over ranks, in their order; with sequence_parallel every rank has as many
    rows of x, which are gathered, and gets the sum of its rows' gradients. The layer's state is that of a ``Linear`` of its share.

    Args:
      layer: the whole, a heddle.nn.Linear, in floats or quantised, or a torch.nn.Linear; the same on every rank. It is copied.
      outputs: of W's rows those of this rank, int64, or (begin, end); None: even parts of them ("swiglu" keeps pairs together).
      group: of torch.distributed; None: the default one. Without any, this process is the only rank.
      sequence_parallel: x [..., rows, K] has this rank's rows.
      timeout: seconds that an exchange may take; None: the group's own.

    Raises:
      ValueError: a layer of fewer outputs than ranks; packed weights without plain storage; by the call, ranks that do not agree, or
        an x that is neither on the CPU nor on a CUDA GPU.
      RuntimeError: by the call or its backward, a rank that is lost or took longer than the timeout.

    Source: Shoeybi et al., arXiv 1909.08053; sequence parallelism: Korthikanti et al., arXiv 2205.05198.
    """

    def __init__(
        self,
        layer: nn.Linear | Linear,
        *,
        outputs: torch.Tensor | tuple[int, int] | None = None,
        group: dist.ProcessGroup | None = None,
        sequence_parallel: bool = False,
        timeout: float | None = None,
    ) -> None:
        name = type(self).__name__
        whole = _as_linear(layer, name)
        super().__init__(whole, Shared(f"nn.{name}", group, sequence_parallel, timeout))
        if outputs is None:
            unit = 2 if whole.activation == "swiglu" else 1
            begin, end = _part(name, "outputs", whole.out_features, unit, self._shared)
            outputs = (begin, end)
        rows = outputs if isinstance(outputs, torch.Tensor) else torch.arange(*outputs, device="cpu")
        bias = None if whole.bias is None else whole.bias.detach()[rows]
        if whole.format is None:
            self._set(whole.weight.detach()[rows], bias, whole)
            return
        matrix = whole.quantized()
        zeros = None if matrix.zeros is None else matrix.zeros[rows]
        shape = (len(rows), whole.in_features)
        codes, scales = (_rows_of(x, rows) for x in (matrix.codes, matrix.scales))
        self._set(QuantizedTensor(matrix.format, shape, codes, scales, zeros, _copy(matrix.global_scale)), bias, whole)

    def forward(
        self, x: torch.Tensor, *, norm: nn.Module | None = None, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[..., rows, outputs of this rank]. norm: of x, before rows are gathered. residual: as the result."""
        return super().forward(self._shared.entered(x if norm is None else norm(x)), residual=residual)


class RowParallelLinear(ParallelLinear):
    """A linear layer some of whose inputs each rank has: y = Σ_r x_r W_rᵀ + bias.

    The sum is made in float32, in the order of ranks, of products of x's dtype, and rounded once; every rank gets it, with
    sequence_parallel its part of the rows. The bias is whole on every rank, and so is its gradient.

    Args:
      layer: as of ``ColumnParallelLinear``, without an activation.
      inputs: (begin, end) of W's columns; None: even parts of them, of whole groups of a low-bit format.
      group, sequence_parallel, timeout: as of ``ColumnParallelLinear``; with sequence_parallel y's rows, of which there must be a
        multiple of the ranks, are dealt out in ranges.

    Raises:
      ValueError: as of ``ColumnParallelLinear``; also an activation, which is not of parts of sums; a quantised layer whose columns are
        reordered; inputs that cut a group of a format.
      RuntimeError: as of ``ColumnParallelLinear``.

    Source: Shoeybi et al., arXiv 1909.08053; sequence parallelism: Korthikanti et al., arXiv 2205.05198.
    """

    def __init__(
        self,
        layer: nn.Linear | Linear,
        *,
        inputs: tuple[int, int] | None = None,
        group: dist.ProcessGroup | None = None,
        sequence_parallel: bool = False,
        timeout: float | None = None,
    ) -> None:
        name = type(self).__name__
        whole = _as_linear(layer, name)
        super().__init__(whole, Shared(f"nn.{name}", group, sequence_parallel, timeout))
        if whole.activation != "none":
            raise ValueError(
                f"[{name}] the layer's activation is '{whole.activation}': it is of sums over all ranks, and here is a part of each"
            )
        if whole.column_order is not None:
            raise ValueError(f"[{name}] the layer's columns are reordered: a range of inputs is no range of its groups")
        unit = unit_of_columns(whole)
        begin, end = inputs or _part(name, "inputs", whole.in_features, unit, self._shared)
        if begin % unit != 0 or (end % unit != 0 and end != whole.in_features):
            raise ValueError(
                f"[{name}] inputs are {begin} to {end}: {whole.format} stores {unit} columns together, which must not be cut"
            )
        bias = None if whole.bias is None else whole.bias.detach().clone()
        if whole.format is None:
            self._set(whole.weight.detach()[:, begin:end].clone(), bias, whole)
            return
        matrix = whole.quantized()

        def columns(x: torch.Tensor) -> torch.Tensor:
            """Of stored columns, each of which stands for as many of W's; one that stands for all is every rank's."""
            if x.shape[1] == 1:
                return x.clone()
            each = -(-whole.in_features // x.shape[1])
            return x[:, begin // each : -(-end // each)].contiguous()

        zeros = None if matrix.zeros is None else columns(matrix.zeros)
        shape = (whole.out_features, end - begin)
        codes, scales = columns(matrix.codes), columns(matrix.scales)
        self._set(QuantizedTensor(matrix.format, shape, codes, scales, zeros, _copy(matrix.global_scale)), bias, whole)

    def forward(
        self, x: torch.Tensor, *, norm: nn.Module | None = None, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """residual: as the result."""
        if norm is not None:
            raise ValueError("[RowParallelLinear] norm is given: it is over all columns of x, and here are this rank's")
        y = self._shared.left(self._product(x, None, None, None))
        (bias,) = self._shared.alike(self.bias)
        y = y if bias is None else y + bias.to(y.dtype)
        return y if residual is None else y + residual


def _part(name: str, what: str, features: int, unit: int, shared: Shared) -> tuple[int, int]:
    units = -(-features // unit)
    if units < shared.size:
        together = f", {unit} of which are stored together," if unit > 1 else ""
        raise ValueError(
            f"[{name}] the layer has {features} {what}{together} for {shared.size} ranks: each must have some"
        )
    begin, end = even_parts(units, shared.size)[shared.rank]
    return begin * unit, min(end * unit, features)


def _rows_of(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """By its bytes: torch has no index of float8."""
    return x.view(torch.uint8)[rows].view(x.dtype) if x.element_size() == 1 else x[rows]


def _copy(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else x.clone()


def joined(ranges: Sequence[tuple[int, int]]) -> torch.Tensor:
    return torch.cat([torch.arange(begin, end, device="cpu") for begin, end in ranges])
