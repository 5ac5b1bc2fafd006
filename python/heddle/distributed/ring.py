"""Keys go from rank to rank, while those before are computed with; what they gather of gradients goes on behind them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from .keys import BACKWARD, FORWARD, KeysToRows
from .pieces import Piece, RowGradients, Sum

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .ranks import Transfer


class _Block(NamedTuple):
    """How keys and values of some rows lie in one message: k [B, rows, Hkv, D], then v [B, rows, Hkv, Dv]."""

    batch: int
    heads: int
    head_size: int
    head_size_v: int

    def length(self, rows: int) -> int:
        return self.batch * rows * self.heads * (self.head_size + self.head_size_v)

    def parts(self, flat: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        behind = self.batch * rows * self.heads * self.head_size
        return (
            flat[:behind].view(self.batch, rows, self.heads, self.head_size),
            flat[behind:].view(self.batch, rows, self.heads, self.head_size_v),
        )


class _Rooms:
    """Memory of messages, for as many heads as a part has, which the next part uses again: what an exchange has had the allocator gives
    out only when the GPU is through with it, which the host is far ahead of. All transfers of a part are waited for before its end."""

    def __init__(self, block: _Block, rows: int, lengths: list[int], hops: int, like: torch.Tensor) -> None:
        longest = block.length(max(lengths))
        self.own = like.new_empty(block.length(rows))
        self.by_turns = [like.new_empty(longest) for _ in range(min(hops, 2))]


class KeysInARing(KeysToRows):
    """One call, forward and backward, over its ranks, by ``ring``: of all heads, or of parts of them, one after the other."""

    def _before(self, steps: int) -> int:
        return (self.ranks.rank - steps) % self.ranks.size

    @property
    def _hops(self) -> int:
        return len(self.layout.steps) - 1

    def _rooms(self, block: _Block, rows: int, like: torch.Tensor) -> _Rooms:
        return _Rooms(block, rows, self.layout.lengths, self._hops, like)

    def _passed_round(
        self, block: _Block, rooms: _Rooms, k: torch.Tensor, v: torch.Tensor
    ) -> Iterator[tuple[int, list[Piece], torch.Tensor, torch.Tensor]]:
        """Of each step its number, its pieces, and the keys and values that they are about, while the next ones are on their way: in two
        buffers by turns, which hold a step's until the next one."""
        lengths, here = self.layout.lengths, rooms.own
        for x, place in zip((k, v), block.parts(here, k.shape[1])):
            place.copy_(x)
        for step, pieces in enumerate(self.layout.steps):
            transfer, there = None, here
            if step < self._hops:
                there = rooms.by_turns[step % 2][: block.length(lengths[self._before(step + 1)])]
                move = (here, self._before(-1), there, self._before(1))
                transfer = self.ranks.start([move], f"keys passed on, step {step + 1} of {self._hops}")
            yield step, pieces, *block.parts(here, lengths[self._before(step)])
            if transfer is not None:
                transfer.wait()
            here = there

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        parts = self.head_parts(q, k, v, FORWARD)
        block = _Block(k.shape[0], k.shape[2] // len(parts), k.shape[3], v.shape[3])
        rooms = self._rooms(block, k.shape[1], k)
        o, lse = q.new_empty(0), q.new_empty(0)
        if len(parts) > 1:
            o = q.new_empty(*q.shape[:3], v.shape[3])
            lse = torch.empty(q.shape[0], q.shape[2], q.shape[1], device=q.device)
        for part in parts:
            q_part, options = q[:, :, part.heads], self._options_of(part, None)
            total = Sum(q_part, v.shape[3])
            keys = k[:, :, part.kv_heads], v[:, :, part.kv_heads]
            for _, pieces, k_part, v_part in self._passed_round(block, rooms, *keys):
                total.add(pieces, q_part, k_part, v_part, options)
            found = total.finished(q.dtype, None if sink is None else sink[part.heads])
            if len(parts) == 1:
                return found
            o[:, :, part.heads], lse[:, part.heads] = found
        return o, lse

    def backward(
        self,
        rows: RowGradients,
        k: torch.Tensor,
        v: torch.Tensor,
        sink: torch.Tensor | None,
        dk: torch.Tensor,
        dv: torch.Tensor,
    ) -> None:
        parts = self.head_parts(rows.q, k, v, BACKWARD)
        block = _Block(k.shape[0], k.shape[2] // len(parts), k.shape[3], v.shape[3])
        rooms = self._rooms(block, k.shape[1], k)
        sums = self._rooms(block, k.shape[1], k.new_empty(0, dtype=torch.float32))
        came = sums.own.new_empty(block.length(max(self.layout.lengths)) if self._hops > 0 else 0)
        for part in parts:
            keys = k[:, :, part.kv_heads], v[:, :, part.kv_heads]
            steps = self._passed_round(block, rooms, *keys)
            found = self._summed(steps, block, sums, came, rows.of_heads(part.heads), self._options_of(part, None))
            for x, total in zip((dk, dv), block.parts(found, k.shape[1])):
                x[:, :, part.kv_heads] = total

    def _summed(
        self,
        steps: Iterator[tuple[int, list[Piece], torch.Tensor, torch.Tensor]],
        block: _Block,
        sums: _Rooms,
        came: torch.Tensor,
        rows: RowGradients,
        options: dict[str, object],
    ) -> torch.Tensor:
        """A rank keeps what it adds to its own keys' gradients. What others add goes on from the next rank to the last, and home."""
        own, hops, lengths = sums.own.zero_(), self._hops, self.layout.lengths
        transfer: Transfer | None = None
        for step, pieces, k_part, v_part in steps:
            if step == 0:
                rows.add(pieces, k_part, v_part, *block.parts(own, k_part.shape[1]), True, options)
                continue
            length = block.length(k_part.shape[1])
            # A step's share is on its way while the next is computed; what comes is added before more does.
            share = sums.by_turns[step % 2 if hops > 1 else 0][:length].zero_()
            rows.add(pieces, k_part, v_part, *block.parts(share, k_part.shape[1]), True, options)
            if transfer is not None:
                transfer.wait()
                share += came[:length]  # the sum of the ranks before this one
            last = step == hops
            to, source = (self._before(hops), self._before(-hops)) if last else (self._before(-1), self._before(1))
            into = came[: block.length(lengths[self._before(0 if last else step + 1)])]
            transfer = self.ranks.start(
                [(share, to, into, source)], f"gradients of keys passed on, step {step} of {hops}"
            )
        if transfer is None:
            return own
        transfer.wait()
        own += into
        return own
