"""Keys go to rows: gathered, passed round, or only those that are needed; their gradients come home."""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch

from .pieces import HeadShare, Layout, RowGradients, Share, Sum, attend, of_heads
from .ranks import Ranks, Transfer

if TYPE_CHECKING:
    from collections.abc import Iterator


def _direct(x: torch.Tensor, runs: list[slice] | None) -> list[slice] | None:
    """The runs, if their rows [B, rows, heads, size] lie one behind the other in memory, and so go as they are."""
    return runs if x.shape[0] == 1 else None


def _of_messages(x: torch.Tensor, runs: list[slice] | None, of_runs: list[bool]) -> list[bool]:
    """What is known of runs, of the messages that they make."""
    return of_runs if _direct(x, runs) is not None else [any(of_runs)]


def _taken(x: torch.Tensor, runs: list[slice] | None, index: torch.Tensor) -> list[torch.Tensor]:
    """Rows of x as messages: of each run its own, else all in one."""
    if (direct := _direct(x, runs)) is not None:
        return [x[0, run].contiguous() for run in direct]
    return [x.index_select(1, index)]


def _room(x: torch.Tensor, runs: list[slice] | None, index: torch.Tensor) -> list[torch.Tensor]:
    """Memory for the messages of such rows."""
    if (direct := _direct(x, runs)) is not None:
        return [x.new_empty(run.stop - run.start, *x.shape[2:]) for run in direct]
    return [x.new_empty(x.shape[0], len(index), *x.shape[2:])]


def _place(
    x: torch.Tensor, runs: list[slice] | None, index: torch.Tensor, parts: list[torch.Tensor], add: bool = False
) -> None:
    """Messages where their rows are, or added there."""
    if (direct := _direct(x, runs)) is not None:
        for run, part in zip(direct, parts):
            if add:
                x[0, run] += part
            else:
                x[0, run] = part
        return
    if add:
        x.index_add_(1, index, parts[0])
    else:
        x.index_copy_(1, index, parts[0])


def _keep(whole: torch.Tensor, x: torch.Tensor, share: Share) -> None:
    """A rank's own rows of x, where they are in the whole."""
    if (direct := _direct(x, share.out_of)) is not None:
        for run, place in zip(direct, share.into or []):
            whole[0, place] = x[0, run]
    else:
        whole.index_copy_(1, share.places, x.index_select(1, share.given))


def _paired(
    out: list[torch.Tensor], into: list[torch.Tensor], rank: int
) -> list[tuple[torch.Tensor, int, torch.Tensor, int]]:
    """Moves that send the one to a rank and receive the other from it."""
    nothing = torch.empty(0)
    return [(a, rank, b, rank) for a, b in zip_longest(out, into, fillvalue=nothing)]


#: Floating-point operations of a pair of a row and a key over D + Dv.
FORWARD, BACKWARD = 2, 5
#: The least of them that a part of the heads is to have, some 100 ms of an H200: next to that its calls and copies are nothing. And how
#: many parts save all the memory that is worth it.
LEAST_WORK, MOST_PARTS = 7e13, 8


def parts_for_memory(
    layout: Layout, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, of_pass: int, chunked: bool
) -> float:
    """In how many parts of the heads a call is to go at most, so that it takes less memory."""
    work = of_pass * layout.pairs * q.shape[0] * q.shape[2] * (k.shape[3] + v.shape[3])
    return MOST_PARTS if chunked and len(layout.lengths) > 1 else min(work / LEAST_WORK, MOST_PARTS)


def count_of_parts(k: torch.Tensor, most: float) -> int:
    """The most that divide key heads evenly."""
    return max((n for n in range(1, k.shape[2] + 1) if k.shape[2] % n == 0 and n <= most), default=1)


def parts_of_heads(q: torch.Tensor, k: torch.Tensor, count: int) -> list[HeadShare]:
    size, group = k.shape[2] // count, q.shape[2] // k.shape[2]
    return [
        HeadShare(slice(begin * group, (begin + size) * group), slice(begin, begin + size))
        for begin in range(0, k.shape[2], size)
    ]


class Arrival:
    """Keys and values on their way: transfers of what the first piece has, and of the rest. put: what comes in one message, and goes to
    its places then."""

    def __init__(self, k: torch.Tensor, v: torch.Tensor, transfers: list[Transfer], put: list[Any]) -> None:
        self.k, self.v = k, v
        self._transfers, self._put = transfers, put

    def await_keys_of(self, piece: int) -> None:
        """Of the first piece, 0, or of any other."""
        if piece > 0 or self._put:
            self.await_all()
        elif len(self._transfers) == 2:
            self._transfers.pop(0).wait()

    def await_all(self) -> None:
        while self._transfers:
            self._transfers.pop(0).wait()
        for whole, share, into in self._put:
            _place(whole, share.into, share.places, into)
        self._put = []


def sum_runs(total: torch.Tensor, shares: list[Share], of_ranks: list[list[torch.Tensor]]) -> None:
    """total [rows, heads, size]: of each row the sum of the ranks that had it, in their order, float32 and then rounded."""
    runs = [(run, part) for share, parts in zip(shares, of_ranks) for run, part in zip(share.out_of or [], parts)]
    edges = sorted({0, len(total), *(edge for run, _ in runs for edge in (run.start, run.stop))})
    for begin, end in zip(edges, edges[1:]):
        addends = [part[begin - run.start : end - run.start] for run, part in runs if run.start <= begin < run.stop]
        into = total[begin:end]
        if not addends:
            into.zero_()
        elif len(addends) == 1:
            into.copy_(addends[0])
        else:
            found = addends[0]
            for part in addends[1:-1]:
                found = found + part
            torch.add(found, addends[-1], out=into)


class KeysToRows:
    """One call, forward and backward, over its ranks, by ``gather`` or ``needed``. chunked: in as many parts of the heads as memory is
    saved by, whatever that takes."""

    def __init__(
        self, ranks: Ranks, layout: Layout, scheme: str, options: dict[str, Any], chunked: bool = False
    ) -> None:
        self.ranks, self.layout, self.scheme, self.options, self.chunked = ranks, layout, scheme, options, chunked

    def at_once(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and values, in the whole's order, or those that this rank's rows need, in the same."""
        arrival = self._arriving(k, v)
        arrival.await_all()
        return arrival.k, arrival.v

    def _arriving(self, k: torch.Tensor, v: torch.Tensor, before: Arrival | None = None) -> Arrival:
        """Those of at_once(), on their way in two exchanges, what receivers' first pieces have, and the rest, or all in the first. before:
        of other heads, whose memory they may have."""
        shares, own, together = self.layout.shares, self.ranks.rank, not self.layout.splits_keys
        # Of lists, what is not needed has a place, too.
        made = torch.empty if sum(len(share.places) for share in shares) == self.layout.keys else torch.zeros
        if before is None:
            rooms = [made(x.shape[0], self.layout.keys, *x.shape[2:], dtype=x.dtype, device=x.device) for x in (k, v)]
        else:
            rooms = [before.k, before.v]
        all_k, all_v = rooms
        first: list[Any] = []
        rest: list[Any] = []
        put = []
        for r, share in enumerate(shares):
            if r == own:
                continue
            for x, whole in ((k, all_k), (v, all_v)):
                out = _taken(x, share.out_of, share.given)
                if _direct(whole, share.into) is not None:
                    into = _taken(whole, share.into, share.places)  # views
                else:
                    into = _room(whole, share.into, share.places)
                    put.append((whole, share, into))
                early_out = _of_messages(x, share.out_of, share.first_out_of)
                early_into = _of_messages(x, share.into, share.first_into)
                for moves, kind in ((first, True), (rest, False)):
                    sent = [message for message, early in zip(out, early_out) if (together or early) is kind]
                    came = [room for room, early in zip(into, early_into) if (together or early) is kind]
                    moves += _paired(sent, came, r)
        what = "keys gathered" if self.scheme == "gather" else "needed keys sent"
        transfers = [self.ranks.start(first, what), self.ranks.start(rest, what)]
        for x, whole in ((k, all_k), (v, all_v)):
            _keep(whole, x, shares[own])
        return Arrival(all_k, all_v, transfers, put)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        batch, rows, heads, _ = q.shape
        o = q.new_empty(batch, rows, heads, v.shape[3])
        lse = torch.empty(batch, heads, rows, device=q.device)
        for part, arrival in self._parts(q, k, v, FORWARD):
            q_part, o_part, lse_part = q[:, :, part.heads], o[:, :, part.heads], lse[:, part.heads]
            if not self.layout.whole:
                arrival.await_all()
                total = Sum(q_part, v.shape[3])
                total.add(self.layout.steps[0], q_part, arrival.k, arrival.v, self._options_of(part, None))
                for x, found in zip(
                    (o_part, lse_part), total.finished(q.dtype, None if sink is None else sink[part.heads])
                ):
                    x.copy_(found)
                continue
            options = self._options_of(part, sink)
            for n, piece in enumerate(self.layout.steps[0]):
                arrival.await_keys_of(n)
                attend(piece, q_part, arrival.k, arrival.v, o_part, lse_part, options, self.has_multiprocessors(q, v))
        return o, lse

    def has_multiprocessors(self, q: torch.Tensor, v: torch.Tensor) -> bool:
        """Whether kernels may be of use that deal their tiles out beforehand: beside an exchange's they are slower."""
        return False

    def room_for_dq(self, q: torch.Tensor) -> torch.Tensor:
        """What backward() writes, or adds to where rows are in several pieces; and on the CPU, where all gradients are added to or none."""
        if self.layout.whole and q.is_cuda and q.dtype != torch.float32:
            return q.new_empty(q.shape)
        return torch.zeros(q.shape, device=q.device)

    def backward(
        self,
        rows: RowGradients,
        k: torch.Tensor,
        v: torch.Tensor,
        sink: torch.Tensor | None,
        dk: torch.Tensor,
        dv: torch.Tensor,
    ) -> None:
        """Writes dk and dv of this rank's keys, which are summed in float32, in their dtype. rows.dq: room_for_dq()."""
        room: tuple[torch.Tensor, torch.Tensor] | None = None
        rooms: list[list[list[torch.Tensor]]] = []
        for part, arrival in self._parts(rows.q, k, v, BACKWARD):
            if room is None:
                room = torch.empty(arrival.k.shape, device=k.device), torch.empty(arrival.v.shape, device=k.device)
            dk_share, dv_share = (x.zero_() for x in room)
            of_part = rows.of_heads(part.heads)
            options = self._options_of(part, sink if self.layout.whole else None)
            for n, piece in enumerate(self.layout.steps[0]):
                arrival.await_keys_of(n)
                of_part.add([piece], arrival.k, arrival.v, dk_share, dv_share, not self.layout.whole, options)
            totals = (dk[:, :, part.kv_heads], dv[:, :, part.kv_heads])
            rooms = self._bring_home(dk_share, dv_share, totals, rooms)

    def _options_of(self, part: HeadShare, sink: torch.Tensor | None) -> dict[str, Any]:
        slopes, bias = self.options["alibi_slopes"], self.options["bias"]
        return self.options | {
            "alibi_slopes": None if slopes is None else slopes[part.heads],
            "bias": None if bias is None else of_heads(bias, part.heads),
            "sink": None if sink is None else sink[part.heads],
        }

    def _parts(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, of_pass: int
    ) -> Iterator[tuple[HeadShare, Arrival]]:
        """Key heads with their query heads, all or some at a time, and their keys, in the same memory: what an exchange has had the
        allocator gives out again only when the GPU is through with it, which the host is far ahead of."""
        arrival: Arrival | None = None
        for part in self.head_parts(q, k, v, of_pass):
            arrival = self._arriving(k[:, :, part.kv_heads], v[:, :, part.kv_heads], arrival)
            yield part, arrival
            arrival.await_all()  # a rank may have no piece, and send

    def head_parts(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, of_pass: int) -> list[HeadShare]:
        """Of equal numbers of key heads; all ranks find the same."""
        return parts_of_heads(q, k, count_of_parts(k, parts_for_memory(self.layout, q, k, v, of_pass, self.chunked)))

    def home(self, dk: torch.Tensor, dv: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Of what each rank adds to the gradients of keys and values that at_once() gave it, float32, the sums for this rank's rows: of
        each the shares of those ranks that had it, in the order of ranks."""
        totals = tuple(x.new_empty(x.shape[0], rows, *x.shape[2:]) for x in (dk, dv))
        self._bring_home(dk, dv, totals, [])
        return totals[0], totals[1]

    def _bring_home(
        self,
        dk: torch.Tensor,
        dv: torch.Tensor,
        totals: tuple[torch.Tensor, ...],
        rooms: list[list[list[torch.Tensor]]],
    ) -> list[list[list[torch.Tensor]]]:
        """home() into totals, of any dtype. rooms: of a call before, of other heads, where others' shares may come again."""
        own, shares = self.ranks.rank, self.layout.shares
        rooms = rooms or [
            [[] if r == own else _room(x, share.out_of, share.given) for r, share in enumerate(shares)]
            for x in (dk, dv)
        ]
        moves, of_ranks = [], []
        for x, came in zip((dk, dv), rooms):
            out = [_taken(x, share.into, share.places) for share in shares]
            of_ranks.append([out[r] if r == own else came[r] for r in range(len(shares))])
            for r in range(len(shares)):
                if r != own:
                    moves += _paired(out[r], came[r], r)
        what = "gradients of keys summed" if self.scheme == "gather" else "gradients of needed keys returned"
        self.ranks.start(moves, what).wait()
        for total, parts in zip(totals, of_ranks):
            if all(_direct(total, share.out_of) is not None for share in shares):
                sum_runs(total[0], shares, parts)
                continue
            sums = torch.zeros(total.shape, device=total.device)
            for share, part in zip(shares, parts):
                _place(sums, share.out_of, share.given, part, add=True)
            total.copy_(sums)
        return rooms
