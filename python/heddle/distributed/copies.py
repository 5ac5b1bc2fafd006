"""Keys go to rows, and gradients home, by copy engines: what keys.py has NCCL do, where all GPUs are in one host."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from .keys import BACKWARD, FORWARD, LEAST_WORK, MOST_PARTS, Arrival, KeysToRows, sum_runs
from .peers import FIRST, GRADIENTS, REST, SLOTS, Peers
from .pieces import HeadShare, Layout, RowGradients
from .ranks import Ranks

#: The last part's gradients are not hidden behind products: of n parts an n-th of all. Each part more costs what multiprocessors wait at
#: the end of a call, some tenth of the time of a tile of so many rows. From bytes/s of a link and FLOP/s of a multiprocessor of an H200.
#: A part has some 2 ms of products at least. Forward it costs more to copy a part's heads out of all than it hides. Where there is more
#: work by far, parts are there to save memory, as keys.py has it.
_LINK, _MULTIPROCESSOR, _TILE, _TAIL = 350e9, 5e12, 128, 0.1
_PART_WORK, _HIDING_PARTS = 1e12, 4
#: Runs of rows of all sequences, each of which is a copy of k and one of v.
_MOST_COPIES = 64
_ALIGNED = 256


class Room(NamedTuple):
    """Where in a rank's memory lies what comes from others, of one part of the heads: the same on all ranks, so that each can write to the
    others'. In bytes, of SLOTS parts by turns: k [B, most_keys, heads, D] and v, and behind them of each rank dk of the rows that it
    shares with this one, float32 [B, most_shared, heads, D] at most, and dv."""

    k: int
    v: int
    dk: int
    dv: int
    ranks: int
    slots: int

    def keys(self, slot: int) -> tuple[int, int]:
        at = slot * (self.k + self.v)
        return at, at + self.k

    def gradients(self, slot: int, source: int) -> tuple[int, int]:
        at = self.slots * (self.k + self.v) + (slot * self.ranks + source) * (self.dk + self.dv)
        return at, at + self.dk

    def size(self, with_gradients: bool) -> int:
        return self.gradients(self.slots if with_gradients else 0, 0)[0]


def copied(layout: Layout, batch: int) -> bool:
    """Whether what this rank shares with the others are few enough runs of rows, and all that it has room for comes."""
    if sum(len(share.places) for share in layout.shares) != layout.keys:
        return False
    runs = [run for share in layout.shares for run in (share.into, share.out_of)]
    return all(run is not None for run in runs) and batch * sum(len(run or ()) for run in runs) <= _MOST_COPIES


class KeysByCopies(KeysToRows):
    """One call over ranks whose ``copied`` all say so. Parts of the heads are computed one after the other; keys of the next ones come,
    and gradients of the ones before go, meanwhile."""

    def __init__(self, ranks: Ranks, layout: Layout, scheme: str, options: dict[str, Any], peers: Peers) -> None:
        super().__init__(ranks, layout, scheme, options)
        self.peers = peers

    def has_multiprocessors(self, q: torch.Tensor) -> bool:
        return q.shape[3] <= 64  # kernels for larger heads have nothing that is faster

    def _parts(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, of_pass: int
    ) -> Iterator[tuple[HeadShare, Arrival]]:
        coming = _Coming(self, q, k, v, of_pass)
        for n, part in enumerate(coming.parts):
            arrival = coming.arrival(n)
            yield part, arrival
            arrival.await_all()  # a rank may have no piece
            coming.computed(n, gradients=False)
        self.peers.end()

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
        coming = _Coming(self, rows.q, k, v, BACKWARD)
        last = len(coming.parts) - 1
        sums = [coming.own_room(torch.float32) for _ in coming.parts[:SLOTS]]
        sent: list[torch.cuda.Event | None] = []
        for n, part in enumerate(coming.parts):
            if n >= SLOTS and (event := sent[n - SLOTS]) is not None:
                torch.cuda.current_stream().wait_event(event)
            dk_share, dv_share = (x.zero_() for x in sums[n % SLOTS])
            arrival = coming.arrival(n)
            of_part = rows.of_heads(part.heads)
            options = self._options_of(part, sink if self.layout.whole else None)
            for i, piece in enumerate(self.layout.steps[0]):
                arrival.await_keys_of(i)
                of_part.add([piece], arrival.k, arrival.v, dk_share, dv_share, not self.layout.whole, options)
            arrival.await_all()
            sent.append(coming.send_gradients(n, dk_share, dv_share))
            if n > 0:
                self._sum(coming, n - 1, sums, dk, dv)
            coming.computed(n, gradients=True)
        self._sum(coming, last, sums, dk, dv)
        self.peers.end()

    def _sum(
        self, coming: _Coming, n: int, sums: list[tuple[torch.Tensor, torch.Tensor]], dk: torch.Tensor, dv: torch.Tensor
    ) -> None:
        """Of a part: own gradients and those that the others sent, in the order of ranks."""
        own, shares, heads = self.ranks.rank, self.layout.shares, coming.parts[n].kv_heads
        for r in self.peers.others():
            if shares[r].out_of:
                self.peers.await_from(r, GRADIENTS, n % SLOTS)
        for x, total, came in zip(sums[n % SLOTS], (dk, dv), (coming.came(n, 0), coming.came(n, 1))):
            for b in range(len(total)):
                of_ranks = [
                    [x[b, run] for run in share.into or ()] if r == own else [part[b] for part in came[r]]
                    for r, share in enumerate(shares)
                ]
                sum_runs(total[b, :, heads], shares, of_ranks)


class _Coming:
    """Keys on their way in parts of the heads."""

    def __init__(self, call: KeysByCopies, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, of_pass: int) -> None:
        self._peers, self._layout, self._own = call.peers, call.layout, call.ranks.rank
        self._kv = (k, v)
        self.parts = _parts_of(call.layout, q, k, v, of_pass)
        self.room = _room(call.layout, call.ranks.size, self.parts, k, v)
        self._held: list[torch.Tensor] = []  # until what is sent has been read
        call.peers.begin()
        for n in range(min(SLOTS, len(self.parts))):
            self._send(n)

    def _rooms(self, n: int) -> list[torch.Tensor]:
        """k and v of a part [B, keys, heads, size], where they are of all ranks."""
        heads = self.parts[n].width(of_keys=True)
        return [
            self._peers.room(at, (x.shape[0], self._layout.most_keys, heads, x.shape[3]), x.dtype)[
                :, : self._layout.keys
            ]
            for x, at in zip(self._kv, self.room.keys(n % SLOTS))
        ]

    def _send(self, n: int) -> None:
        """Own keys are put where they belong, and go to others: from there, unless a part's heads lie one behind the other already."""
        heads, share = self.parts[n].kv_heads, self._layout.shares[self._own]
        rooms = self._rooms(n)
        direct = all(x[0, :, heads].is_contiguous() for x in self._kv)
        if direct:
            self._push(n, rooms)
        for x, room in zip(self._kv, rooms):
            for run, place in zip(share.out_of or (), share.into or ()):
                room[:, place] = x[:, run, heads]
        if not direct:
            self._push(n, rooms)

    def _push(self, n: int, rooms: list[torch.Tensor]) -> None:
        early_moves: list[tuple[torch.Tensor, int, int]] = []
        later_moves: list[tuple[torch.Tensor, int, int]] = []
        for r in self._peers.others():
            share = self._layout.shares[r]
            for run, there, early in zip(share.out_of or (), share.there or (), share.first_out_of):
                for x, room, at in zip(self._kv, rooms, self.room.keys(n % SLOTS)):
                    row = room.shape[2] * room.shape[3] * room.element_size()
                    for b in range(x.shape[0]):
                        rows = self._rows(x[b, :, self.parts[n].kv_heads], room[b], run)
                        self._held.append(rows)
                        moves = early_moves if early else later_moves
                        moves.append((rows, r, at + (b * self._layout.most_keys + there.start) * row))
        for kind, moves in ((FIRST, early_moves), (REST, later_moves)):
            if moves:
                self._peers.push(moves, kind, n % SLOTS)

    def _rows(self, x: torch.Tensor, room: torch.Tensor, run: slice) -> torch.Tensor:
        """A run of own rows of a sequence, contiguous: as they are, as they lie in this rank's own room, or copied."""
        own = self._layout.shares[self._own]
        if not x[run].is_contiguous():
            for rows, place in zip(own.out_of or (), own.into or ()):
                if rows.start <= run.start and run.stop <= rows.stop:
                    begin = place.start + run.start - rows.start
                    return room[begin : begin + run.stop - run.start]
        return x[run].contiguous()

    def arrival(self, n: int) -> _Arrived:
        k, v = self._rooms(n)
        awaited: list[list[int]] = [[], []]
        for r in self._peers.others():
            early = self._layout.shares[r].first_into if self._layout.shares[r].into else []
            if True in early:
                awaited[FIRST].append(r)
            if False in early:
                awaited[REST].append(r)
        return _Arrived(k, v, self._peers, n % SLOTS, awaited)

    def computed(self, n: int, *, gradients: bool) -> None:
        """Of a part: its keys are of no use any more, and the gradients of the part before have been read. Ranks meet where they write
        over either."""
        sends, sends_gradients = n + SLOTS < len(self.parts), gradients and SLOTS <= n + 1 < len(self.parts)
        if sends or sends_gradients:
            self._peers.meet()
        if sends:
            self._send(n + SLOTS)

    def own_room(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """For what a part has of all keys of this rank."""
        heads = self.parts[0].kv_heads
        k, v = (
            torch.empty(
                x.shape[0], self._layout.keys, heads.stop - heads.start, x.shape[3], dtype=dtype, device=x.device
            )
            for x in self._kv
        )
        return k, v

    def send_gradients(self, n: int, dk: torch.Tensor, dv: torch.Tensor) -> torch.cuda.Event | None:
        """To the ranks that have the keys."""
        moves = []
        for r in self._peers.others():
            for x, at in zip((dk, dv), self.room.gradients(n % SLOTS, self._own)):
                row = x.shape[2] * x.shape[3] * x.element_size()
                for run in self._layout.shares[r].into or ():
                    for b in range(len(x)):
                        moves.append((x[b, run], r, at))
                        at += (run.stop - run.start) * row
        if moves:
            self._peers.push(moves, GRADIENTS, n % SLOTS)
        return self._peers.pushed()

    def came(self, n: int, which: int) -> list[list[torch.Tensor]]:
        """Of each rank the gradients that it sent, of k or of v: of each run [B, rows, heads, D]."""
        heads, x = self.parts[n].kv_heads, self._kv[which]
        out = []
        for r, share in enumerate(self._layout.shares):
            at = self.room.gradients(n % SLOTS, r)[which]
            runs = []
            for run in share.out_of or () if r != self._own else ():
                shape = (x.shape[0], run.stop - run.start, heads.stop - heads.start, x.shape[3])
                runs.append(self._peers.room(at, shape, torch.float32))
                at += runs[-1].numel() * 4
            out.append(runs)
        return out


class _Arrived(Arrival):
    """As keys.py's: k and v of a part, of which others' may still be on their way."""

    def __init__(self, k: torch.Tensor, v: torch.Tensor, peers: Peers, slot: int, awaited: list[list[int]]) -> None:
        super().__init__(k, v, [], [])
        self._peers, self._slot, self._awaited = peers, slot, awaited

    def await_keys_of(self, piece: int) -> None:
        self._await(FIRST)
        if piece > 0:
            self._await(REST)

    def await_all(self) -> None:
        self._await(FIRST)
        self._await(REST)

    def _await(self, kind: int) -> None:
        for r in self._awaited[kind]:
            self._peers.await_from(r, kind, self._slot)
        self._awaited[kind] = []


def _parts_of(layout: Layout, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, of_pass: int) -> list[HeadShare]:
    """Of equal numbers of key heads; all ranks find the same."""
    kv_heads, group, sizes = k.shape[2], q.shape[2] // k.shape[2], k.shape[3] + v.shape[3]
    work = of_pass * layout.pairs * q.shape[0] * q.shape[2] * sizes
    tail = _TAIL * _TILE * layout.most_keys * of_pass * sizes / _MULTIPROCESSOR
    hiding = 1.0
    if of_pass == BACKWARD and tail > 0:
        exposed = (
            q.shape[0] * kv_heads * sizes * (layout.most_early * k.element_size() + layout.most_others * 4) / _LINK
        )
        hiding = min(round(math.sqrt(exposed / tail)), work / _PART_WORK, _HIDING_PARTS)
    most = max(hiding, min(work / LEAST_WORK, MOST_PARTS))
    size = kv_heads // max((n for n in range(1, kv_heads + 1) if kv_heads % n == 0 and n <= most), default=1)
    return [
        HeadShare(slice(begin * group, (begin + size) * group), slice(begin, begin + size))
        for begin in range(0, kv_heads, size)
    ]


def _room(layout: Layout, ranks: int, parts: list[HeadShare], k: torch.Tensor, v: torch.Tensor) -> Room:
    heads = parts[0].width(of_keys=True)

    def of(x: torch.Tensor, rows: int, dtype: torch.dtype) -> int:
        return -(-x.shape[0] * rows * heads * x.shape[3] * dtype.itemsize // _ALIGNED) * _ALIGNED

    of_k, of_v = (of(x, layout.most_keys, x.dtype) for x in (k, v))
    of_dk, of_dv = (of(x, layout.most_shared, torch.float32) for x in (k, v))
    return Room(of_k, of_v, of_dk, of_dv, ranks, min(SLOTS, len(parts)))


def room_of(layout: Layout, ranks: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, wanted: bool) -> int:
    """Bytes that a call takes of a rank's memory, with or without its backward."""
    forward = _room(layout, ranks, _parts_of(layout, q, k, v, FORWARD), k, v).size(False)
    backward = _room(layout, ranks, _parts_of(layout, q, k, v, BACKWARD), k, v).size(True)
    return max(forward, backward if wanted else 0, _ALIGNED)
