"""Keys go to rows: gathered, passed round, or only those that are needed; their gradients come home."""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .pieces import Layout, Piece, RowGradients, Sum, forward_whole
from .ranks import Ranks, Transfer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Block(NamedTuple):
    """How keys and values of some rows lie in one message: k [B, rows, Hkv, D], then v [B, rows, Hkv, Dv]."""

    batch: int
    heads: int
    head_size: int
    head_size_v: int

    def length(self, rows: int) -> int:
        return self.batch * rows * self.heads * (self.head_size + self.head_size_v)

    def joined(self, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.cat((k.flatten(), v.flatten()))

    def parts(self, flat: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        behind = self.batch * rows * self.heads * self.head_size
        return (
            flat[:behind].view(self.batch, rows, self.heads, self.head_size),
            flat[behind:].view(self.batch, rows, self.heads, self.head_size_v),
        )


def _direct(x: torch.Tensor, runs: list[slice] | None) -> list[slice] | None:
    """The runs, if their rows [B, rows, heads, size] lie one behind the other in memory, and so go as they are."""
    return runs if x.shape[0] == 1 else None


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


def _paired(
    out: list[torch.Tensor], into: list[torch.Tensor], rank: int
) -> list[tuple[torch.Tensor, int, torch.Tensor, int]]:
    """Moves that send the one to a rank and receive the other from it."""
    nothing = torch.empty(0)
    return [(a, rank, b, rank) for a, b in zip_longest(out, into, fillvalue=nothing)]


class KeysToRows:
    """One call, forward and backward, over its ranks, by ``gather``, ``ring`` or ``needed``."""

    def __init__(self, ranks: Ranks, layout: Layout, scheme: str, options: dict[str, Any]) -> None:
        self.ranks, self.layout, self.scheme, self.options = ranks, layout, scheme, options

    def before(self, steps: int) -> int:
        return (self.ranks.rank - steps) % self.ranks.size

    @staticmethod
    def block(k: torch.Tensor, v: torch.Tensor) -> Block:
        return Block(k.shape[0], k.shape[2], k.shape[3], v.shape[3])

    def at_once(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and values, in the whole's order, or those that this rank's rows need, in the same."""
        shares = self.layout.shares
        # Of lists, what is not needed has a place, too.
        made = torch.empty if sum(len(share.places) for share in shares) == self.layout.keys else torch.zeros
        all_k, all_v = (
            made(x.shape[0], self.layout.keys, *x.shape[2:], dtype=x.dtype, device=x.device) for x in (k, v)
        )
        moves, put = [], []
        for r, share in enumerate(shares):
            for x, whole in ((k, all_k), (v, all_v)):
                out = _taken(x, share.out_of, share.given)
                if r == self.ranks.rank:
                    _place(whole, share.into, share.places, out)
                    continue
                if _direct(whole, share.into) is not None:
                    into = _taken(whole, share.into, share.places)  # views
                else:
                    into = _room(whole, share.into, share.places)
                    put.append((whole, share, into))
                moves += _paired(out, into, r)
        self.ranks.start(moves, "keys gathered" if self.scheme == "gather" else "needed keys sent").wait()
        for whole, share, into in put:
            _place(whole, share.into, share.places, into)
        return all_k, all_v

    def passed_round(
        self, k: torch.Tensor, v: torch.Tensor
    ) -> Iterator[tuple[int, list[Piece], torch.Tensor, torch.Tensor]]:
        """Of each step its number, its pieces, and the keys and values that they are about, while the next ones are on their way: in two
        buffers by turns, which hold a step's until the next one."""
        block, lengths = self.block(k, v), self.layout.lengths
        here = block.joined(k, v)
        hops = len(self.layout.steps) - 1
        buffers = [here.new_empty(block.length(max(lengths))) for _ in range(min(hops, 2))]
        for step, pieces in enumerate(self.layout.steps):
            transfer, there = None, here
            if step < hops:
                there = buffers[step % 2][: block.length(lengths[self.before(step + 1)])]
                move = (here, self.before(-1), there, self.before(1))
                transfer = self.ranks.start([move], f"keys passed on, step {step + 1} of {hops}")
            yield step, pieces, *block.parts(here, lengths[self.before(step)])
            if transfer is not None:
                transfer.wait()
            here = there

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.layout.whole:
            return forward_whole(self.layout.steps[0], q, *self.at_once(k, v), self.options | {"sink": sink})
        total = Sum(q, v.shape[3])
        if self.scheme == "ring":
            for _, pieces, k_part, v_part in self.passed_round(k, v):
                total.add(pieces, q, k_part, v_part, self.options)
        else:
            total.add(self.layout.steps[0], q, *self.at_once(k, v), self.options)
        return total.finished(q.dtype, sink)

    def backward(
        self, rows: RowGradients, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """dk and dv of this rank's keys, float32; rows.dq is added to."""
        merged = not self.layout.whole
        options = self.options | ({} if merged else {"sink": sink})
        block = self.block(k, v)

        def add(pieces: list[Piece], k_part: torch.Tensor, v_part: torch.Tensor, share: torch.Tensor) -> None:
            """What these rows add to the gradients of a buffer of keys, as Block lays them out."""
            rows.add(pieces, k_part, v_part, *block.parts(share, k_part.shape[1]), merged, options)

        if self.scheme == "ring":
            return block.parts(self._ring_backward(k, v, block, add), k.shape[1])
        share = torch.zeros(block.length(self.layout.keys), device=k.device)
        add(self.layout.steps[0], *self.at_once(k, v), share)
        return self.home(*block.parts(share, self.layout.keys), k.shape[1])

    def home(self, dk: torch.Tensor, dv: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Of what each rank adds to the gradients of keys and values that at_once() gave it, float32, the sums for this rank's rows: of
        each the shares of those ranks that had it, in the order of ranks."""
        shares = self.layout.shares
        moves, of_ranks = [], []
        for r, share in enumerate(shares):
            came = []
            for x in (dk, dv):
                out = _taken(x, share.into, share.places)
                came.append(out if r == self.ranks.rank else _room(x, share.out_of, share.given))
                if r != self.ranks.rank:
                    moves += _paired(out, came[-1], r)
            of_ranks.append(came)
        what = "gradients of keys summed" if self.scheme == "gather" else "gradients of needed keys returned"
        self.ranks.start(moves, what).wait()
        first_has_all = len(shares[0].given) == rows
        made = torch.empty if first_has_all else torch.zeros
        totals = [made(x.shape[0], rows, *x.shape[2:], device=x.device) for x in (dk, dv)]
        for r, (share, came) in enumerate(zip(shares, of_ranks)):
            for total, parts in zip(totals, came):
                _place(total, share.out_of, share.given, parts, add=r > 0 or not first_has_all)
        return totals[0], totals[1]

    def _ring_backward(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        block: Block,
        add: Callable[[list[Piece], torch.Tensor, torch.Tensor, torch.Tensor], None],
    ) -> torch.Tensor:
        """A rank keeps what it adds to its own keys' gradients. What others add goes on from the next rank to the last, and home."""
        hops, lengths = len(self.layout.steps) - 1, self.layout.lengths

        def sums(length: int) -> torch.Tensor:
            return torch.empty(length, device=k.device)

        own = sums(block.length(k.shape[1])).zero_()
        longest = block.length(max(lengths))
        # A step's share is on its way while the next is computed; what comes is added before more does.
        shares = [sums(longest) for _ in range(min(hops, 2))]
        came = sums(longest if hops > 0 else 0)
        transfer: Transfer | None = None
        for step, pieces, k_part, v_part in self.passed_round(k, v):
            if step == 0:
                add(pieces, k_part, v_part, own)
                continue
            length = block.length(k_part.shape[1])
            share = shares[step % 2 if hops > 1 else 0][:length].zero_()
            add(pieces, k_part, v_part, share)
            if transfer is not None:
                transfer.wait()
                share += came[:length]  # the sum of the ranks before this one
            last = step == hops
            to, source = (self.before(hops), self.before(-hops)) if last else (self.before(-1), self.before(1))
            into = came[: block.length(lengths[self.before(0 if last else step + 1)])]
            transfer = self.ranks.start(
                [(share, to, into, source)], f"gradients of keys passed on, step {step} of {hops}"
            )
        if transfer is None:
            return own
        transfer.wait()
        return own + into
