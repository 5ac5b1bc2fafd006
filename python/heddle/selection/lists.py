"""From what blocks of keys weigh to the lists of ``heddle.sparse_attention``."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..nsa import checks
from .rows import Sequences

#: Shares are summed as integers, in units of 2^-UNIT_BITS: sums are then exact, in any order.
UNIT_BITS = 30


class Limits(NamedTuple):
    """How many blocks a list has."""

    top_k: int | None
    top_p: float | None
    least: int


def checked_limits(sequences: Sequences, top_k: Any, top_p: Any, least: Any) -> Limits:
    name = sequences.form.name
    if top_k is None and top_p is None:
        raise ValueError(
            f"[{name}] neither top_k nor top_p is given: say how many blocks a list has, or of which share of the mass"
        )
    least = checks.integer(name, "least", least, 0)
    if top_k is not None:
        top_k = checks.integer(name, "top_k", top_k, 1)
        forced = sequences.most_forced()
        if top_k < forced:
            raise ValueError(
                f"[{name}] top_k is {top_k}: it must be at least {forced}, the blocks that a list has in any case: the sink's, those of its "
                "rows' own positions and those beside"
            )
        if least > top_k:
            raise ValueError(f"[{name}] least is {least}: it must be no more than top_k, {top_k}")
    if top_p is None:
        if least:
            raise ValueError(
                f"[{name}] least is {least} without top_p: a list has top_k blocks, where there are as many"
            )
        return Limits(top_k, None, 0)
    if isinstance(top_p, bool) or not isinstance(top_p, (int, float)):
        raise TypeError(f"[{name}] top_p is {checks.shown(top_p)}: it must be a number")
    if not 0 < top_p <= 1:
        raise ValueError(f"[{name}] top_p is {top_p}: it must be above 0 and no more than 1")
    return Limits(top_k, float(top_p), least)


def of_tiles(kept: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The blocks of a set, bool [..., K]: int32 [..., K], ascending, -1 behind the last; and how many they are, int32 [...]."""
    number = kept.shape[-1]
    blocks = torch.arange(number, device=kept.device, dtype=torch.int32)
    return ascending(blocks.expand(kept.shape), kept, number), kept.sum(-1, dtype=torch.int32)


def ascending(blocks: torch.Tensor, kept: torch.Tensor, number: int) -> torch.Tensor:
    """int32: those of [..., n] that are kept, of `number` blocks, in ascending order; -1 behind them."""
    found = blocks.masked_fill(~kept, number).sort(-1).values
    return found.masked_fill(found == number, -1).int()


def choose(
    sequences: Sequences, limits: Limits, begin: int, end: int, shares: torch.Tensor, broken: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The lists begin to end - 1: blocks int32 [B, n, L, width], and counts int32 [B, n, L].

    Args:
      shares: float32 [B, n, L, K'], of the first K' blocks of keys: what the rows which choose give to each.
      broken: bool [B, 1, L, K]: blocks that are listed whatever their share.
    """
    number = shares.shape[-1]
    reach, forced = (x[..., :number] for x in (sequences.reach(begin, end), sequences.forced(begin, end)))
    rank = torch.where(broken[..., :number] | shares.isnan(), 2.0, shares)  # above all shares
    rank = torch.where(forced, 3.0, rank)
    rank = torch.where(reach, rank, -1.0)
    rank, order = rank.sort(dim=-1, descending=True, stable=True)  # the lower number first among equals
    width = sequences.key_blocks if limits.top_k is None else min(limits.top_k, sequences.key_blocks)
    kept = rank >= 0
    if limits.top_p is not None and limits.top_p < 1:
        units = (shares.nan_to_num(0).clamp(0, 1) * 2.0**UNIT_BITS).long().where(reach, 0)
        total = units.sum(-1, keepdim=True)
        units = units.gather(-1, order)
        sum_before = units.cumsum(-1) - units
        slot = torch.arange(number, device=rank.device)
        kept &= (sum_before.double() < limits.top_p * total.double()) | (rank >= 2) | (slot < limits.least)
    kept, order = kept[..., :width], order[..., :width]
    blocks = torch.nn.functional.pad(ascending(order, kept, number), (0, max(width - number, 0)), value=-1)
    return blocks, kept.sum(-1, dtype=torch.int32)


def arguments(sequences: Sequences, blocks: torch.Tensor, counts: torch.Tensor) -> dict[str, Any]:
    """Of ``heddle.sparse_attention``, of lists [B, N, L, n] that are ascending, and how many entries they have."""
    form = sequences.form
    if sequences.packed:
        blocks, counts = (_packed(sequences, x, fill) for x, fill in ((blocks, -1), (counts, 0)))
    if form.offsets:
        lists = _one_behind_the_other(form.name, blocks, counts)
    else:
        lists = {"blocks": blocks, "counts": counts}
    return {
        **lists,
        **sequences.packed,
        "block_size": form.block_size,
        "query_rows": form.query_rows,
        "causal": "bottom_right" if form.causal else "none",
    }


def _packed(sequences: Sequences, x: torch.Tensor, fill: int) -> torch.Tensor:
    """[N, ...] of [B, N, ...]: where docs/sparse.md has the lists of packed sequences; `fill` in those that nobody reads."""
    rows, starts = sequences.form.query_rows, sequences.packed["cu_seqlens_q"][:-1].long()[:, None]
    sequence = torch.arange(sequences.batch, device=x.device)[:, None]
    number = sequences.rows if rows == 1 else sequences.rows // rows + sequences.batch
    first = starts if rows == 1 else starts // rows + sequence
    block = torch.arange(x.shape[1], device=x.device)
    place = torch.where(block * rows < sequences.used_q, first + block, number)  # the last place is nobody's
    out = torch.full((number + 1, *x.shape[2:]), fill, dtype=x.dtype, device=x.device)
    return out.index_copy(0, place.flatten(), x.flatten(0, 1).contiguous())[:number]


def _one_behind_the_other(name: str, blocks: torch.Tensor, counts: torch.Tensor) -> dict[str, Any]:
    """blocks int32 [entries] and offsets int32 [B, L, N + 1], packed [L, N + 1], of lists of one width. How many entries there are
    is not read: there is room for full lists."""
    most = blocks.numel()
    if most >= 2**31:
        raise ValueError(f"[{name}] there is room for {most} entries: it must be below 2^31; give a smaller top_k")
    by_unit = blocks.transpose(-3, -2)  # [(B,) L, N, n]
    of_lists = counts.transpose(-2, -1).flatten().long()
    ends = of_lists.cumsum(0)
    begins = ends - of_lists
    slot = torch.arange(blocks.shape[-1], device=blocks.device)
    place = torch.where(slot < of_lists[:, None], begins[:, None] + slot, most).flatten()
    out = torch.full((most + 1,), -1, dtype=torch.int32, device=blocks.device)
    out = out.index_copy(0, place, by_unit.flatten())[:most]
    shape = by_unit.shape[:-1]
    offsets = (
        torch.cat([begins.view(shape), ends.view(shape)[..., -1:]], -1)
        if shape[-1]
        else begins.new_zeros(*shape[:-1], 1)
    )
    return {"blocks": out, "offsets": offsets.int()}
