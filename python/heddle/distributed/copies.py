"""Keys go to rows, and gradients home, by copy engines: what keys.py has NCCL do, where all GPUs are in one host."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from .keys import BACKWARD, FORWARD, Arrival, KeysToRows, count_of_parts, parts_for_memory, parts_of_heads, sum_runs
from .peers import FIRST, FLAGS, GRADIENTS, REST, SLOTS, Move, Peers
from .pieces import HeadShare, Layout, RowGradients
from .ranks import Ranks

#: What is exchanged in front of the first part, and behind the last one, is not hidden behind products: of n parts an n-th of all. Each
#: part more costs what multiprocessors wait at the end of a call, some fifth of the time of a tile of so many rows. From bytes/s of a
#: link and FLOP/s of a multiprocessor of an H200. A part has some 0.8 ms of a forward's products at least, or 2 of a backward's.
_LINK, _MULTIPROCESSOR, _TILE, _TAIL = 350e9, 5e12, 128, 0.2
_PART_WORK, _HIDING_PARTS = 2.5e11, FLAGS
#: Runs of rows of all sequences, each of which is a copy of k and one of v.
_MOST_COPIES = 64
_ALIGNED = 256


class Room(NamedTuple):
    """Where in a rank's memory lies what comes from others: the same on all ranks, so that each can write to the others'. In bytes: k [B,
    most_keys, heads, D] and v, of all heads at once, or of SLOTS parts of them by turns; and behind them, by turns too, of each rank dk
    of the rows that it shares with this one, float32 [B, most_shared, a part's heads, D] at most, and dv."""

    k: int
    v: int
    dk: int
    dv: int
    ranks: int
    slots: int
    at_once: bool

    def keys(self, part: int) -> tuple[int, int]:
        at = 0 if self.at_once else part % self.slots * (self.k + self.v)
        return at, at + self.k

    def gradients(self, part: int, source: int) -> tuple[int, int]:
        behind = (1 if self.at_once else self.slots) * (self.k + self.v)
        at = behind + (part % self.slots * self.ranks + source) * (self.dk + self.dv)
        return at, at + self.dk

    def size(self, with_gradients: bool) -> int:
        behind = self.gradients(0, 0)[0]
        return behind + (self.slots * self.ranks * (self.dk + self.dv) if with_gradients else 0)


def copied(layout: Layout, batch: int) -> bool:
    """Whether what this rank shares with the others are few enough runs of rows, and all that it has room for comes."""
    if batch == 0 or sum(len(share.places) for share in layout.shares) != layout.keys:
        return False
    runs = [run for share in layout.shares for run in (share.into, share.out_of)]
    return all(run is not None for run in runs) and batch * sum(len(run or ()) for run in runs) <= _MOST_COPIES


class KeysByCopies(KeysToRows):
    """One call over ranks whose ``copied`` all say so. Parts of the heads are computed one after the other; keys of the next ones come,
    and gradients of the ones before go, meanwhile."""

    def __init__(
        self, ranks: Ranks, layout: Layout, scheme: str, options: dict[str, Any], chunked: bool, peers: Peers
    ) -> None:
        super().__init__(ranks, layout, scheme, options, chunked)
        self.peers = peers

    def has_multiprocessors(self, q: torch.Tensor, v: torch.Tensor) -> bool:
        # Of larger heads no other kernel is faster, and with these options it would be another candidate.
        return q.shape[3] <= 64 and v.shape[3] <= 64 and self.options["softcap"] == 0 and self.options["scale"] > 0

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
        sums = [coming.room_for_sums() for _ in coming.parts[:SLOTS]]
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
        count, at_once = _counts(call.layout, q, k, v, of_pass, call.chunked)
        self.parts = parts_of_heads(q, k, count)
        self.room = _room(call.layout, call.ranks.size, k, v, count, at_once)
        self._held: list[torch.Tensor] = []  # until what is sent has been read
        call.peers.begin()
        self._send(range(len(self.parts) if self.room.at_once else min(SLOTS, len(self.parts))))

    def _flag(self, n: int) -> int:
        return n if self.room.at_once else n % SLOTS

    def _rooms(self, n: int) -> list[torch.Tensor]:
        """k and v of a part [B, keys, heads, size], where they are of all ranks."""
        heads, out = self.parts[n].kv_heads, []
        for x, at in zip(self._kv, self.room.keys(n)):
            lying = x.shape[2] if self.room.at_once else heads.stop - heads.start
            whole = self._peers.room(at, (x.shape[0], self._layout.most_keys, lying, x.shape[3]), x.dtype)
            whole = whole[:, : self._layout.keys]
            out.append(whole[:, :, heads] if self.room.at_once else whole)
        return out

    def _send(self, parts: range) -> None:
        """Own keys are put where they belong, and go to others: from there, if the heads of a row are not one behind the other already."""
        dense = all(map(_dense, self._kv))
        if dense:
            self._push(parts)
        share = self._layout.shares[self._own]
        for n in parts[:1] if self.room.at_once else parts:
            heads = slice(None) if self.room.at_once else self.parts[n].kv_heads
            for x, at in zip(self._kv, self.room.keys(n)):
                of_heads = x[:, :, heads]
                shape = (x.shape[0], self._layout.most_keys, *of_heads.shape[2:])
                for run, place in zip(share.out_of or (), share.into or ()):
                    self._peers.room(at, shape, x.dtype)[:, place] = of_heads[:, run]
        if not dense:
            self._push(parts)

    def _push(self, parts: range) -> None:
        for n in parts:
            moves: list[list[Move]] = [[], []]
            for r in self._peers.others():
                share = self._layout.shares[r]
                for run, there, early in zip(share.out_of or (), share.there or (), share.first_out_of):
                    moves[FIRST if early else REST] += self._moves(n, r, run, there)
            for kind in (FIRST, REST):
                if moves[kind]:
                    self._peers.push(moves[kind], kind, self._flag(n))

    def _moves(self, n: int, to: int, run: slice, there: slice) -> Iterator[Move]:
        """Of a part's k and v, of each sequence, rows `run` of this rank's own, which lie at `there` in another's."""
        heads = self.parts[n].kv_heads
        for x, room, at in zip(self._kv, self._rooms(n), self.room.keys(n)):
            head = x.shape[3] * x.element_size()
            pitch = head * (x.shape[2] if self.room.at_once else heads.stop - heads.start)
            begin = at + (head * heads.start if self.room.at_once else 0)
            for b in range(x.shape[0]):
                rows = self._rows(x[b, :, heads], room[b], run)
                self._held.append(rows)
                yield rows, to, begin + (b * self._layout.most_keys + there.start) * pitch, pitch

    def _rows(self, x: torch.Tensor, room: torch.Tensor, run: slice) -> torch.Tensor:
        """A run of own rows of a sequence, each dense: as they are, as they lie in this rank's own room, or copied."""
        if _dense(x):
            return x[run]
        own = self._layout.shares[self._own]
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
        return _Arrived(k, v, self._peers, self._flag(n), awaited)

    def computed(self, n: int, *, gradients: bool) -> None:
        """Of a part: its keys are of no use any more, and the gradients of the part before have been read. Ranks meet where they write
        over either."""
        sends = not self.room.at_once and n + SLOTS < len(self.parts)
        if sends or (gradients and SLOTS <= n + 1 < len(self.parts)):
            self._peers.meet()
        if sends:
            self._send(range(n + SLOTS, n + SLOTS + 1))

    def room_for_sums(self) -> tuple[torch.Tensor, torch.Tensor]:
        """For what a part adds to the gradients of all keys of this rank, float32."""
        heads = self.parts[0].width(of_keys=True)
        k, v = (torch.empty(x.shape[0], self._layout.keys, heads, x.shape[3], device=x.device) for x in self._kv)
        return k, v

    def send_gradients(self, n: int, dk: torch.Tensor, dv: torch.Tensor) -> torch.cuda.Event | None:
        """To the ranks that have the keys."""
        moves = []
        for r in self._peers.others():
            for x, at in zip((dk, dv), self.room.gradients(n, self._own)):
                row = x.shape[2] * x.shape[3] * x.element_size()
                for run in self._layout.shares[r].into or ():
                    for b in range(len(x)):
                        moves.append((x[b, run], r, at, row))
                        at += (run.stop - run.start) * row
        if moves:
            self._peers.push(moves, GRADIENTS, n % SLOTS)
        return self._peers.pushed()

    def came(self, n: int, which: int) -> list[list[torch.Tensor]]:
        """Of each rank the gradients that it sent, of k or of v: of each run [B, rows, heads, D]."""
        heads, x = self.parts[n].kv_heads, self._kv[which]
        out = []
        for r, share in enumerate(self._layout.shares):
            at = self.room.gradients(n, r)[which]
            runs = []
            for run in share.out_of or () if r != self._own else ():
                shape = (x.shape[0], run.stop - run.start, heads.stop - heads.start, x.shape[3])
                runs.append(self._peers.room(at, shape, torch.float32))
                at += runs[-1].numel() * 4
            out.append(runs)
        return out


def _dense(x: torch.Tensor) -> bool:
    """Whether heads and elements of a row [..., heads, size] lie one behind the other, and rows apart."""
    return x.stride(-1) == 1 and x.stride(-2) == x.shape[-1] and x.stride(-3) >= x.shape[-2] * x.shape[-1]


class _Arrived(Arrival):
    """As keys.py's: k and v of a part, of which others' may still be on their way."""

    def __init__(self, k: torch.Tensor, v: torch.Tensor, peers: Peers, flag: int, awaited: list[list[int]]) -> None:
        super().__init__(k, v, [], [])
        self._peers, self._flag, self._awaited = peers, flag, awaited

    def await_keys_of(self, piece: int) -> None:
        self._await(FIRST)
        if piece > 0:
            self._await(REST)

    def await_all(self) -> None:
        self._await(FIRST)
        self._await(REST)

    def _await(self, kind: int) -> None:
        for r in self._awaited[kind]:
            self._peers.await_from(r, kind, self._flag)
        self._awaited[kind] = []


def _counts(
    layout: Layout, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, of_pass: int, chunked: bool
) -> tuple[int, bool]:
    """Of how many parts of as many key heads, and whether keys of all are there at once; all ranks find the same."""
    kv_heads, sizes = k.shape[2], k.shape[3] + v.shape[3]
    work = of_pass * layout.pairs * q.shape[0] * q.shape[2] * sizes
    row = layout.most_early * k.element_size() + (4 * layout.most_others if of_pass == BACKWARD else 0)
    exposed = row * q.shape[0] * kv_heads * sizes / _LINK
    tail = _TAIL * _TILE * layout.most_keys * of_pass * sizes / _MULTIPROCESSOR
    hiding = min(round(math.sqrt(exposed / tail)), work / (of_pass * _PART_WORK), _HIDING_PARTS) if tail > 0 else 1
    saving = parts_for_memory(layout, q, k, v, of_pass, chunked)
    return count_of_parts(k, max(hiding, saving)), saving < 2


def _room(layout: Layout, ranks: int, k: torch.Tensor, v: torch.Tensor, count: int, at_once: bool) -> Room:
    def of(x: torch.Tensor, rows: int, dtype: torch.dtype, heads: int) -> int:
        return -(-x.shape[0] * rows * heads * x.shape[3] * dtype.itemsize // _ALIGNED) * _ALIGNED

    of_part = k.shape[2] // count
    of_k, of_v = (of(x, layout.most_keys, x.dtype, x.shape[2] if at_once else of_part) for x in (k, v))
    of_dk, of_dv = (of(x, layout.most_shared, torch.float32, of_part) for x in (k, v))
    return Room(of_k, of_v, of_dk, of_dv, ranks, min(SLOTS, count), at_once)


def room_of(
    layout: Layout, ranks: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, chunked: bool, wanted: bool
) -> int:
    """Bytes that a call takes of a rank's memory, with or without its backward."""
    most = _ALIGNED
    for of_pass in (FORWARD, BACKWARD) if wanted else (FORWARD,):
        room = _room(layout, ranks, k, v, *_counts(layout, q, k, v, of_pass, chunked))
        most = max(most, room.size(with_gradients=of_pass == BACKWARD))
    return most
