"""Keys go to rows: gathered, passed round, or only those that are needed; their gradients come home."""

from __future__ import annotations

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
        block, layout = self.block(k, v), self.layout
        if self.scheme == "gather":
            lengths = layout.lengths
            parts = self.ranks.all_gather(block.joined(k, v), [block.length(n) for n in lengths], "keys gathered")
        else:
            lengths = [len(places) for places in layout.places]
            given = [block.joined(k.index_select(1, rows), v.index_select(1, rows)) for rows in layout.given]
            parts = self.ranks.all_to_all(given, [block.length(n) for n in lengths], "needed keys sent")
        made = (
            torch.empty if sum(lengths) == layout.keys else torch.zeros
        )  # of lists, what is not needed has a place, too
        all_k, all_v = (made(x.shape[0], layout.keys, *x.shape[2:], dtype=x.dtype) for x in (k, v))
        for part, length, places in zip(parts, lengths, layout.places):
            k_part, v_part = block.parts(part, length)
            all_k.index_copy_(1, places, k_part)
            all_v.index_copy_(1, places, v_part)
        return all_k, all_v

    def passed_round(
        self, k: torch.Tensor, v: torch.Tensor
    ) -> Iterator[tuple[int, list[Piece], torch.Tensor, torch.Tensor]]:
        """Of each step its number, its pieces, and the keys and values that they are about, while the next ones are on their way."""
        block, lengths = self.block(k, v), self.layout.lengths
        here = block.joined(k, v)
        hops = len(self.layout.steps) - 1
        for step, pieces in enumerate(self.layout.steps):
            transfer, there = None, here
            if step < hops:
                there = here.new_empty(block.length(lengths[self.before(step + 1)]))
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

        def added(pieces: list[Piece], k_part: torch.Tensor, v_part: torch.Tensor) -> torch.Tensor:
            """What these rows add to the gradients of a buffer of keys."""
            share = torch.zeros(block.length(k_part.shape[1]))
            rows.add(pieces, k_part, v_part, *block.parts(share, k_part.shape[1]), merged, options)
            return share

        if self.scheme == "ring":
            return block.parts(self._ring_backward(k, v, block, added), k.shape[1])
        dk, dv = block.parts(added(self.layout.steps[0], *self.at_once(k, v)), self.layout.keys)
        return self.home(dk, dv, k.shape[1])

    def home(self, dk: torch.Tensor, dv: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Of what each rank adds to the gradients of keys and values that at_once() gave it, float32, the sums for this rank's rows."""
        block = self.block(dk, dv)
        parts = [block.joined(*(x.index_select(1, at) for x in (dk, dv))) for at in self.layout.places]
        if self.scheme == "gather":
            return block.parts(self.ranks.reduce_scatter(parts, "gradients of keys summed"), rows)
        # Of each key the shares of those ranks that need it, in the order of ranks.
        lengths = [len(given) for given in self.layout.given]
        came = self.ranks.all_to_all(parts, [block.length(n) for n in lengths], "gradients of needed keys returned")
        dk, dv = (torch.zeros(x.shape[0], rows, *x.shape[2:]) for x in (dk, dv))
        for share, given, length in zip(came, self.layout.given, lengths):
            k_share, v_share = block.parts(share, length)
            dk.index_add_(1, given, k_share)
            dv.index_add_(1, given, v_share)
        return dk, dv

    def _ring_backward(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        block: Block,
        added: Callable[[list[Piece], torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """A rank keeps what it adds to its own keys' gradients. What others add goes on from the next rank to the last, and home."""
        hops = len(self.layout.steps) - 1
        own = torch.empty(0)
        transfer: Transfer | None = None
        came = torch.empty(0)  # the sum of the ranks before this one
        for step, pieces, k_part, v_part in self.passed_round(k, v):
            share = added(pieces, k_part, v_part)
            if step == 0:
                own = share
                continue
            if transfer is not None:
                transfer.wait()
                share = came + share
            last = step == hops
            to, source = (self.before(hops), self.before(-hops)) if last else (self.before(-1), self.before(1))
            came = torch.empty(block.length(self.layout.lengths[self.before(0 if last else step + 1)]))
            transfer = self.ranks.start(
                [(share, to, came, source)], f"gradients of keys passed on, step {step} of {hops}"
            )
        if transfer is None:
            return own
        transfer.wait()
        return own + came
