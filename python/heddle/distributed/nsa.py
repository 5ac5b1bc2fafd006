"""Native sparse attention over the ranks of a group: pooled keys go to all ranks, and of the others those that lists and windows name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch._compile import _disable_dynamo  # the public one imports all of torch.compile
from torch.autograd.function import once_differentiable

from ..functional import attention
from ..nsa import checks
from ..nsa.branches import FORCED
from ..nsa.kernels import pool_keys, select_blocks
from .attention import _check, _check_rows
from .keys import KeysToRows
from .pieces import Layout, share_of, shares_of_needs
from .plan import Plan, Run
from .ranks import Ranks, on_device_of
from .sparse import (
    BLOCK_SIZES,
    SHOWN,
    Lists,
    layout_of_needs,
    of_operands,
    one_sequence,
    over_lists,
    position_of,
    refuse_on_gpu,
    rows_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch.distributed as dist

    from .._types import ForcedName

_NAME = "distributed.parallel_nsa"


@_disable_dynamo  # its exchanges depend on what the lists say
def parallel_nsa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g_cmp: torch.Tensor | None = None,
    g_slc: torch.Tensor | None = None,
    g_swa: torch.Tensor | None = None,
    block_indices: torch.Tensor | None = None,
    block_counts: int = 16,
    block_size: int = 64,
    window_size: int = 0,
    scale: float | None = None,
    *,
    plan: Plan,
    forced: Iterable[ForcedName] = FORCED,
    group: dist.ProcessGroup | None = None,
    timeout: float | None = None,
) -> torch.Tensor:
    """This rank's share of ``heddle.nsa.parallel_nsa`` over all ranks of a group, with gradients, which every rank must ask for alike.

    Every rank calls this at the same place of its program, with its own rows. A block is pooled by the rank that has its first key,
    which gets the others; the pooled keys go to all ranks. Each then chooses its rows' blocks, and gets the keys of these, and those
    of its rows' windows. Of batched sequences, on the CPU and on GPUs, where the host waits for what the lists name, so that no graph can be
    captured of it.

    Args:
      q, k, v: this rank's rows in the plan's order, [B, rows, HQ, D], [B, rows, H, D], [B, rows, H, Dv]; float32, float16 or bfloat16.
      g_cmp, g_slc, g_swa: [B, rows, HQ], the branches' gates, as for ``heddle.nsa.parallel_nsa``; the same of them on every rank.
      block_indices: int32 or int64 [B, rows, H, S], lists of this rank's rows from outside, entries being blocks of the whole sequence.
      block_counts: how many blocks a list has, an int.
      block_size, window_size, scale, forced: as for ``heddle.nsa.parallel_nsa``.
      plan: of ``heddle.distributed.plan``, of one sequence, causal, without a window.
      group, timeout: as of ``heddle.distributed.attention``.

    Returns:
      [B, rows, HQ, Dv] of q's dtype. Branches are summed in float32 and rounded once; on GPUs the selected one has been rounded before.

    Raises:
      ValueError, TypeError: a bad argument, before anything is sent; the message names it, its value and the rule. Also, on every rank,
        ranks that do not agree.
      RuntimeError: a rank is lost or took longer than the timeout. The group is of no use then.

    Source: Yuan et al., arXiv 2502.11089.
    """
    if not isinstance(plan, Plan):
        raise TypeError(f"[{_NAME}] plan is a {type(plan).__name__}: it must be of heddle.distributed.plan")
    one_sequence(_NAME, plan)
    if not plan.is_causal or plan._window != (-1, -1):
        raise ValueError(
            f"[{_NAME}] the plan is {'causal' if plan.is_causal else 'not causal'} and has window {plan._window}: native sparse attention "
            "is causal, and says its window itself"
        )
    ranks = Ranks(_NAME, plan, group, timeout)
    if _check(q, k, v, _NAME):
        raise ValueError(f"[{_NAME}] q is {list(q.shape)}: it must be [B, rows, HQ, D]")
    _check_rows(q, k, v, plan, ranks.rank, False, _NAME)
    count = checks.integer(_NAME, "block_counts", block_counts, 0)
    refuse_on_gpu(_NAME, q, v, count)
    window = checks.integer(_NAME, "window_size", window_size, 0)
    if block_size not in BLOCK_SIZES:
        raise ValueError(f"[{_NAME}] block_size is {block_size}: it must be 16, 32, 64 or 128")
    for name, gate in (("g_cmp", g_cmp), ("g_slc", g_slc), ("g_swa", g_swa)):
        if gate is not None or (name == "g_swa" and window > 0):
            checks.gate(_NAME, name, gate, q)
    chosen = checks.some_of(_NAME, "forced", forced, FORCED)
    if block_indices is not None:
        checks.lists(_NAME, block_indices, q, k)
    scale = checks.scale_of(_NAME, scale, q)
    if window == 0:
        g_swa = None
    gates = {"g_cmp": g_cmp, "g_slc": g_slc, "g_swa": g_swa}
    grads = torch.is_grad_enabled()
    ranks.agree(
        {
            **of_operands(q, k, v, plan, scale),
            "block_counts": count,
            "block_size": block_size,
            "window_size": window,
            "block_indices": int(block_indices is not None),
            **{name: int(gate is not None) for name, gate in gates.items()},
            **{f"forced {name}": int(name in chosen) for name in FORCED},
            **{
                f"whether a gradient of {n} is wanted": int(grads and x.requires_grad) for n, x in zip("qkv", (q, k, v))
            },
        },
        SHOWN,
        q.device,
    )
    with on_device_of(q):
        return _computed(q, k, v, gates, block_indices, count, block_size, window, scale, chosen, ranks, plan)


def _computed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gates: dict[str, torch.Tensor | None],
    block_indices: torch.Tensor | None,
    count: int,
    block_size: int,
    window: int,
    scale: float,
    chosen: Any,
    ranks: Ranks,
    plan: Plan,
) -> torch.Tensor:
    """parallel_nsa() of arguments that have been checked, and that ranks agree on."""
    g_cmp, g_slc, g_swa = gates.values()
    # A rank without rows makes every call, too, of none: others wait for its part, forward and backward.
    runs = plan.runs(ranks.rank) or [Run(0, 1, 0, 0)]

    def of_rows(one: Callable[[torch.Tensor, Run], Any]) -> list[Any]:
        return [one(q[:, rows_of(run)], run) for run in runs]

    common: dict[str, Any] = {"scale": scale, "causal": "top_left", "out_dtype": torch.float32}
    branches: list[tuple[torch.Tensor, torch.Tensor | None]] = []
    pooled, lses = None, None
    if g_cmp is not None or block_indices is None:
        pooled = _pooled(ranks, plan, k, v, block_size)
    if g_cmp is not None:
        assert pooled is not None
        k_pooled, v_pooled = pooled
        places = {"key_offset": block_size - 1, "key_step": block_size}

        def compressed(x: torch.Tensor, run: Run) -> tuple[torch.Tensor, torch.Tensor]:
            where = position_of(run) | places
            return attention(x, k_pooled, v_pooled, return_lse=True, **where, **common)

        found = of_rows(compressed)
        lses = [lse for _, lse in found]
        branches.append((torch.cat([o for o, _ in found], 1), g_cmp))
    if block_indices is None:
        assert pooled is not None
        slots = min(count, -(-plan.rows // block_size))
        sizes: dict[str, Any] = {"block_size": block_size, "forced": tuple(chosen), "scale": scale}
        with torch.no_grad():
            chosen_of = [
                select_blocks(q[:, rows_of(run)], pooled[0], slots, lse=lse, **sizes, **position_of(run))
                for run, lse in zip(runs, lses or [None] * len(runs))
            ]
        blocks = torch.cat(chosen_of, 1)
    else:
        # What is no block in 64 bits is none in 32.
        blocks = block_indices[..., :count].clamp(-1, checks.LARGEST).int().contiguous()
    of_lists = Lists(blocks, None, None, None, None, block_size, 1)
    # Kernels of GPUs have no gradients beside a float32 out.
    selected, _ = over_lists(q, k, v, None, ranks, plan, of_lists, scale, None if q.is_cuda else "float32")
    branches.append((selected, g_slc))
    if g_swa is not None:
        k_near, v_near = _fetched(
            ranks, layout_of_needs(plan, ranks.rank, _windows(plan, window), q.device), "needed", k, v
        )

        def near(x: torch.Tensor, run: Run) -> torch.Tensor:
            first = max(run.begin - window + 1, 0)
            at = slice(first, run.begin + run.step * (run.count - 1) + 1)
            where = position_of(run) | {"key_offset": first, "window": (window - 1, None)}
            return attention(x, k_near[:, at], v_near[:, at], **where, **common)

        branches.insert(len(branches) - 1, (torch.cat(of_rows(near), 1), g_swa))
    gated = [o if gate is None else gate.float()[..., None] * o for o, gate in branches]
    total = gated[0]
    for part in gated[1:]:
        total = total + part
    return total.to(q.dtype)


def _pooled(ranks: Ranks, plan: Plan, k: torch.Tensor, v: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The means of all complete blocks, on every rank."""
    count = plan.rows // size
    owner = np.searchsorted(
        np.cumsum([plan.rows_of(r) for r in range(plan.ranks)]), plan.inverse()[: count * size : size], side="right"
    )
    blocks = [np.flatnonzero(owner == r) for r in range(plan.ranks)]
    needs = [(of_rank[:, None] * size + np.arange(size)).flatten() for of_rank in blocks]
    lengths = [plan.rows_of(r) for r in range(plan.ranks)]
    own = Layout(lengths, [], True, len(needs[ranks.rank]), shares_of_needs(plan, ranks.rank, needs)).on(k.device)
    means = (pool_keys(x, size) for x in _fetched(ranks, own, "needed", k, v))
    local = np.arange(len(blocks[ranks.rank]))
    shares = [share_of(np.arange(len(x)), x, local, blocks[ranks.rank]) for x in blocks]
    everywhere = Layout([len(x) for x in blocks], [], True, count, shares).on(k.device)
    return _fetched(ranks, everywhere, "gather", *means)


def _windows(plan: Plan, window: int) -> list[Any]:
    """Of each rank the keys that some row of its has in its window."""
    found = []
    for rank in range(plan.ranks):
        rows = plan.rows_of_rank(rank).numpy()
        begins = np.bincount(np.maximum(rows - window + 1, 0), minlength=plan.rows + 1)
        ends = np.bincount(rows + 1, minlength=plan.rows + 1)
        found.append(np.flatnonzero(np.cumsum(begins - ends)[: plan.rows]))
    return found


def _fetched(
    ranks: Ranks, layout: Layout, scheme: str, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    found: tuple[torch.Tensor, torch.Tensor] = _Fetched.apply(k, v, KeysToRows(ranks, layout, scheme, {}))
    return found


class _Fetched(torch.autograd.Function):
    """Keys and values as a rank gets them; their gradients go home, where they are summed in float32."""

    @staticmethod
    def forward(ctx: Any, k: Any, v: Any, call: KeysToRows) -> Any:
        ctx.call, ctx.rows = call, k.shape[1]
        return call.at_once(k, v)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dk: Any, dv: Any) -> Any:
        found = ctx.call.home(dk.float(), dv.float(), ctx.rows)
        return *(x.to(y.dtype) if need else None for x, y, need in zip(found, (dk, dv), ctx.needs_input_grad)), None
