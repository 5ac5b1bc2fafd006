"""What ranks that share a layer send each other, forward and backward. Rows lie along the dimension before the last."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

from ..distributed.attention import DEVICES
from ..distributed.ranks import Ranks

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch.distributed as dist

_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


class Shared:
    """The ranks that share a layer, and whether rows between layers are dealt out to them (sequence parallelism) or on each."""

    def __init__(
        self, operation: str, group: dist.ProcessGroup | None, sequence_parallel: bool, timeout: float | None
    ) -> None:
        self.ranks = Ranks(operation, None, group, timeout)
        self.rank, self.size = self.ranks.rank, self.ranks.size
        self.sequence_parallel = sequence_parallel

    def __deepcopy__(self, memo: Any) -> Shared:
        """Copies of a layer are shared by the same ranks."""
        return self

    def entered(self, x: torch.Tensor) -> torch.Tensor:
        """All rows, of those that this rank has between layers; backward, the sum over ranks of these rows' gradients."""
        self._agree("x", x)
        return _Rows.apply(x, self) if self.sequence_parallel else _Alike.apply(self, x)[0]

    def left(self, y: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, of the rows that this rank has between layers."""
        self._agree("y", y)
        if self.sequence_parallel and y.shape[-2] % self.size != 0:
            raise ValueError(
                f"[{self.ranks.operation}] y is {list(y.shape)}: with sequence_parallel its rows must be a multiple of {self.size} ranks"
            )
        return _RowsOfSum.apply(y, self) if self.sequence_parallel else _Sum.apply(y, self)

    def alike(self, *parameters: torch.Tensor | None) -> list[torch.Tensor | None]:
        """Parameters that every rank has and that meet its own rows alone; backward, the sum over ranks of their gradients."""
        if not self.sequence_parallel:
            return list(parameters)
        given = iter(_Alike.apply(self, *(p for p in parameters if p is not None)))
        return [None if p is None else next(given) for p in parameters]

    def _agree(self, name: str, x: torch.Tensor) -> None:
        if x.device.type not in DEVICES or x.dim() < 2 or x.dtype not in _DTYPES:
            raise ValueError(
                f"[{self.ranks.operation}] {name} is {x.dtype} {list(x.shape)} on {x.device}: it must be of floats, [..., rows, columns], "
                "on the CPU or a CUDA GPU"
            )
        words = {"rows": x.shape[-2], "columns": x.shape[-1], "elements": x.numel(), "dtype": _DTYPES.index(x.dtype)}
        flags = {"sequence_parallel": int(self.sequence_parallel), "whether gradients are wanted": int(x.requires_grad)}
        self.ranks.agree({"where": name == "y", **words, **flags}, _SHOWN, x.device)

    def all_rows(self, x: torch.Tensor, what: str) -> torch.Tensor:
        x = x.contiguous()
        parts = self.ranks.all_gather(x.flatten(), [x.numel()] * self.size, what)
        return torch.cat([part.view(x.shape) for part in parts], -2)

    def sum_of_rows(self, x: torch.Tensor, what: str) -> torch.Tensor:
        parts = [part.contiguous() for part in x.tensor_split(self.size, -2)]
        return self.ranks.reduce_scatter(parts, what)

    def sum(self, x: torch.Tensor, what: str) -> torch.Tensor:
        """Each rank sums a part, in the order of ranks, and hands it to the others: all get the same bits."""
        parts = list(x.contiguous().flatten().tensor_split(self.size))
        own = self.ranks.reduce_scatter(parts, what)
        return torch.cat(self.ranks.all_gather(own, [part.numel() for part in parts], what)).view(x.shape)


_SHOWN: dict[str, Callable[[int], object]] = {"dtype": _DTYPES.__getitem__, "where": ("x", "y").__getitem__}


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, shared: Shared) -> Any:
        ctx.shared = shared
        return shared.all_rows(x, "rows gathered")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_rows: Any) -> Any:
        return ctx.shared.sum_of_rows(d_rows, "gradients of rows summed"), None


class _RowsOfSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Any, shared: Shared) -> Any:
        ctx.shared = shared
        return shared.sum_of_rows(y, "rows summed")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Any) -> Any:
        return ctx.shared.all_rows(d_y, "gradients of rows gathered"), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Any, shared: Shared) -> Any:
        return shared.sum(y, "rows summed")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Any) -> Any:
        return d_y, None


class _Alike(torch.autograd.Function):
    """What every rank has, of one dtype, whose gradients are then the sum over ranks."""

    @staticmethod
    def forward(ctx: Any, shared: Shared, *given: Any) -> Any:
        ctx.shared = shared
        return tuple(x.view_as(x) for x in given)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        parts = ctx.shared.sum(flat, "gradients summed").split([gradient.numel() for gradient in gradients])
        return None, *(part.view(gradient.shape) for part, gradient in zip(parts, gradients))
