"""Heads are exchanged for rows inside of a group of ranks, which then is one rank of a plan of groups for its heads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from .. import _heddle
from .keys import KeysToRows
from .pieces import HeadShare, RowGradients, layout_of
from .plan import Plan
from .ranks import Ranks
from .ring import KeysInARing


class _Groups(NamedTuple):
    """What a call needs of its plan of groups. lengths: of each member's rows. places: where they lie among the group's."""

    plan: Plan
    lengths: list[int]
    places: list[torch.Tensor]


def _groups_of(plan: Plan, rank: int, size: int, device: torch.device) -> _Groups:
    def made() -> _Groups:
        groups = plan.grouped(size)
        group = rank // size
        place_of = np.empty(plan.rows, np.int64)
        rows = groups.rows_of_rank(group)
        place_of[rows.numpy()] = np.arange(len(rows))
        members = range(group * size, (group + 1) * size)
        places = [torch.from_numpy(place_of[plan.rows_of_rank(member).numpy()]).to(device) for member in members]
        return _Groups(groups, [len(at) for at in places], places)

    kept: _Groups = plan._keep(("groups", rank, size, device), made)
    return kept


class HeadsForRows:
    """One call, forward and backward, over its ranks, by ``ulysses`` or ``2d``.

    size: how many ranks, one after the other, exchange heads for rows. across: the scheme between such groups.
    """

    def __init__(
        self,
        ranks: Ranks,
        plan: Plan,
        size: int,
        across: str,
        options: dict[str, Any],
        chunked: bool,
        device: torch.device,
    ) -> None:
        groups = _groups_of(plan, ranks.rank, size, device)
        self.ranks, self.size, self.options, self._chunked = ranks, size, options, chunked
        self.lengths, self.places = groups.lengths, groups.places
        self.place = ranks.rank % size
        first = ranks.rank - self.place
        self._inside = ranks.subset(range(first, first + size))
        self._across = ranks.subset(range(self.place, ranks.size, size))
        self._layout = layout_of(groups.plan, ranks.rank // size, across, device)
        self._scheme = across

    def room_for_dq(self, q: torch.Tensor) -> torch.Tensor:
        return q.new_empty(q.shape)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        shares = self._shares(q, k)
        q, k, v = self._to_heads(((q, False), (k, True), (v, True)), shares, "rows exchanged for heads")
        o = q.new_empty(*q.shape[:3], v.shape[3])
        lse = q.new_empty(q.shape[:3], dtype=torch.float32)  # [B, rows, H], as everything that moves
        for part, sinks, call in self._calls(shares, k, sink):
            q_part, k_part, v_part = q[:, :, part.heads], k[:, :, part.kv_heads], v[:, :, part.kv_heads]
            o[:, :, part.heads], lse_part = call.forward(q_part, k_part, v_part, sinks)
            lse[:, :, part.heads] = lse_part.transpose(1, 2)
        (lse, o) = self._to_rows(((lse[..., None], False), (o, False)), shares, "heads exchanged for rows")
        return o, lse[..., 0].transpose(1, 2).contiguous()

    def backward(
        self,
        rows: RowGradients,
        k: torch.Tensor,
        v: torch.Tensor,
        sink: torch.Tensor | None,
        dk: torch.Tensor,
        dv: torch.Tensor,
    ) -> None:
        """Writes rows.dq, and dk and dv of this rank's keys, which are summed in float32, in their dtype."""
        shares = self._shares(rows.q, k)
        # Whether another rank has a gradient of lse is not known here: it is sent all the same.
        d_lse = torch.zeros_like(rows.lse) if rows.d_lse is None else rows.d_lse
        moved = (
            *((x.transpose(1, 2)[..., None], False) for x in (rows.lse, d_lse)),
            *((x, False) for x in (rows.o, rows.d_o, rows.q)),
            (k, True),
            (v, True),
        )
        lse, d_lse, o, d_o, q, k, v = self._to_heads(moved, shares, "rows and gradients exchanged for heads")
        lse, d_lse = (x[..., 0].transpose(1, 2) for x in (lse, d_lse))
        dq = torch.zeros_like(q)
        dk_sums, dv_sums = (torch.empty(x.shape, device=x.device) for x in (k, v))
        for part, sinks, call in self._calls(shares, k, sink):
            at, keys = part.heads, part.kv_heads
            dq_part = call.room_for_dq(q[:, :, at])
            of_part = RowGradients(q[:, :, at], o[:, :, at], lse[:, at], d_o[:, :, at], d_lse[:, at], dq_part)
            of_keys = (x[:, :, keys] for x in (dk_sums, dv_sums))
            call.backward(of_part, k[:, :, keys], v[:, :, keys], sinks, *of_keys)
            dq[:, :, at] = dq_part  # rounded here, if not before
        moved = ((dk_sums, True), (dv_sums, True), (dq, False))
        found = self._to_rows(moved, shares, "gradients of heads exchanged for those of rows")
        for x, of_rows in zip((dk, dv, rows.dq), found):
            x.copy_(of_rows)

    def _shares(self, q: torch.Tensor, k: torch.Tensor) -> list[HeadShare]:
        """Of each member."""
        self._group = q.shape[2] // k.shape[2]
        of_members = _heddle.ShardPlan.head_shares(q.shape[2], k.shape[2], self.size)
        return [HeadShare(slice(a, b), slice(c, d)) for a, b, c, d in of_members]

    def _calls(
        self, shares: list[HeadShare], k: torch.Tensor, sink: torch.Tensor | None
    ) -> Iterator[tuple[HeadShare, torch.Tensor | None, KeysToRows]]:
        """For each even part of this rank's heads: how they lie in its tensors, their sinks, and their call over the groups."""
        own = shares[self.place]
        kind = KeysInARing if self._scheme == "ring" else KeysToRows
        for part in own.even_parts(self._group):
            slopes = self.options["alibi_slopes"]
            options = self.options | {"alibi_slopes": None if slopes is None else slopes[part.heads]}
            sinks = None if sink is None else sink[part.heads]
            yield part.inside(own), sinks, kind(self._across, self._layout, self._scheme, options, self._chunked)

    def _to_heads(
        self, tensors: Sequence[tuple[torch.Tensor, bool]], shares: list[HeadShare], what: str
    ) -> list[torch.Tensor]:
        """Of (this rank's rows with all heads [B, rows, heads, D], whether they are of keys): the group's rows with its own heads."""
        own = shares[self.place]
        found, moves, put = [], [], []
        for x, of_keys in tensors:
            all_rows = x.new_empty(x.shape[0], sum(self.lengths), own.width(of_keys), x.shape[3])
            for member, share in enumerate(shares):
                part = x[:, :, share.kv_heads if of_keys else share.heads].contiguous()
                if member != self.place:
                    came = x.new_empty(x.shape[0], self.lengths[member], own.width(of_keys), x.shape[3])
                    moves.append((part, member, came, member))
                else:
                    came = part
                put.append((all_rows, member, came))
            found.append(all_rows)
        self._inside.start(moves, what).wait()
        for all_rows, member, came in put:
            all_rows.index_copy_(1, self.places[member], came)
        return found

    def _to_rows(
        self, tensors: Sequence[tuple[torch.Tensor, bool]], shares: list[HeadShare], what: str
    ) -> list[torch.Tensor]:
        """The way back; of keys, float32, the sum of what members send, in their order."""
        found, moves, put = [], [], []
        for x, of_keys in tensors:
            width = max((s.kv_heads if of_keys else s.heads).stop for s in shares)
            rows = x.new_zeros(x.shape[0], self.lengths[self.place], width, x.shape[3])
            for member, share in enumerate(shares):
                part = x.index_select(1, self.places[member])
                if member != self.place:
                    came = x.new_empty(x.shape[0], rows.shape[1], share.width(of_keys), x.shape[3])
                    moves.append((part, member, came, member))
                else:
                    came = part
                put.append((rows, share.kv_heads if of_keys else share.heads, came, of_keys))
            found.append(rows)
        self._inside.start(moves, what).wait()
        for rows, heads, came, of_keys in put:
            if of_keys:
                rows[:, :, heads] += came
            else:
                rows[:, :, heads] = came
        return found
