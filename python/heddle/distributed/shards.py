"""A rank's rows out of the whole, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from .plan import Plan
from .ranks import Ranks


def shard(x: torch.Tensor, plan: Plan, rank: int, *, dim: int = 1) -> torch.Tensor:
    """The rows of a rank, in the plan's order, with their gradient.

    Args:
      x: any tensor with plan.rows entries along ``dim``: q, k, v as [B, S, H, D], token ids [B, S], packed rows with dim 0.
      plan, rank: whose rows.
      dim: along which the rows lie.

    Raises:
      ValueError: x has not plan.rows entries along dim.
    """
    if x.shape[dim] != plan.rows:
        raise ValueError(f"[distributed.shard] x is {list(x.shape)}: extent {dim} must be the plan's rows, {plan.rows}")
    return x.index_select(dim, plan.rows_of_rank(rank).to(x.device))


def unshard(
    x: torch.Tensor | Sequence[torch.Tensor],
    plan: Plan,
    *,
    group: dist.ProcessGroup | None = None,
    dim: int = 1,
    timeout: float | None = None,
) -> torch.Tensor:
    """The whole, in its own order, of what ranks hold: of this rank's tensor, with all other ranks, or of a list of all ranks' tensors,
    without any process. It has no gradient.

    Args:
      x: as ``shard`` gives it; of a list, rank 0's first.
      plan, dim: as of ``shard``.
      group: of torch.distributed; None: the default one.
      timeout: seconds that a rank may take; None: the group's own.

    Raises:
      ValueError: shapes that are not the plan's, or a tensor that requires a gradient, unless gradients are off.
      RuntimeError: a rank is lost, or took too long.
    """
    operation = "distributed.unshard"
    parts: Any = list(x) if not isinstance(x, torch.Tensor) else [x]
    if torch.is_grad_enabled() and any(part.requires_grad for part in parts):
        raise ValueError(f"[{operation}] x requires a gradient, which ends here: give x.detach()")
    if isinstance(x, torch.Tensor):
        ranks = Ranks(operation, plan, group, timeout)
        ranks.serve(x.device)
        _check(operation, x, plan, ranks.rank, dim)
        rows_first = x.movedim(dim, 0).contiguous()
        lengths = [plan.rows_of(r) * rows_first.shape[1:].numel() for r in range(ranks.size)]
        flat = ranks.all_gather(rows_first.flatten(), lengths, "rows gathered")
        parts = [part.view(plan.rows_of(r), *rows_first.shape[1:]).movedim(0, dim) for r, part in enumerate(flat)]
    else:
        if len(parts) != plan.ranks:
            raise ValueError(
                f"[{operation}] x has {len(parts)} tensors: there must be one for each of {plan.ranks} ranks"
            )
        for rank, part in enumerate(parts):
            _check(operation, part, plan, rank, dim)
    inverse = torch.from_numpy(plan.inverse().copy()).to(parts[0].device)
    return torch.cat(parts, dim).index_select(dim, inverse)


def _check(operation: str, x: torch.Tensor, plan: Plan, rank: int, dim: int) -> None:
    if x.shape[dim] != plan.rows_of(rank):
        raise ValueError(
            f"[{operation}] x is {list(x.shape)}: extent {dim} must be the {plan.rows_of(rank)} rows of rank {rank}"
        )
