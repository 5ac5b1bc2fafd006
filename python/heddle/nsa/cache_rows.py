"""How the new rows lie of sequences that have a cache, and what those behind an anchor take that an earlier call computed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .. import _heddle
from . import checks
from .rows import BatchedRows, own_blocks
from .sharing import BRANCHES, Sharing

if TYPE_CHECKING:
    from .cache import Cache


class CachedRows(BatchedRows):
    """n new rows, whose keys are the last that the cache has."""

    def __init__(self, rows: int, cache: Cache) -> None:
        super().__init__(rows, 0)
        self._cache, self._lengths = cache, cache.lengths
        self._pages = {} if cache.page_table is None else {"page_table": cache.page_table}

    def of_q(self, stride: int) -> dict[str, Any]:
        return {"q_offset": self._lengths - self.rows, "q_step": stride}

    def of_k(self) -> dict[str, Any]:
        return {"seqused_k": self._lengths, **self._pages}  # behind which bottom_right ends

    def keys(self, k: torch.Tensor) -> int:
        return self._cache.capacity

    def of_pooled(self, block: int, stride: int) -> dict[str, Any]:
        # Pages behind a sequence's end may not be there.
        return {"seqused_k": self._cache.complete(self._lengths), **self._pages} if self._pages else {}

    def of_q_and_pooled(self, stride: int, block: int, block_stride: int) -> dict[str, Any]:
        if self.rows > 1:
            return super().of_q_and_pooled(stride, block, block_stride)
        # The last position sees all complete blocks: what kernels of decoding serve.
        return {"seqused_k": self._cache.complete(self._lengths), **self._pages}


class StridedRows(CachedRows):
    """The same with a query stride r. Rows before the first anchor among them take what the cache keeps of the anchor before,
    ``cache.anchors``; what the last one has is kept for the next call, by ``commit``.

    Args:
      rows, cache: n, at least 1, and the cache, to which their keys have been appended.
      phase: how many positions the first row of every sequence stands behind its anchor; None: each its own, which tensors
        alone say. Places of anchors are then n / r, rounded up, in each sequence, of which some may be nobody's.
    """

    carries = True

    def __init__(self, rows: int, cache: Cache, phase: int | None) -> None:
        super().__init__(rows, cache)
        self._stride = stride = cache.sharing.stride
        self._kept = cache.anchors
        self._found: dict[str, torch.Tensor] = {}
        self._phase, self._first = phase, self._lengths - rows
        self.first_is_anchor = phase == 0 and rows > 1
        if phase is not None:
            self._skipped = min(-phase % stride, rows)  # rows before the first anchor
            self.has_anchors = self._skipped < rows
        elif rows == 1:
            self._is_anchor = self._first % stride == 0  # [B]
        else:
            # [B, n]: 0: the anchor that is kept; from 1 on: those among the rows.
            self._place = self._positions() // stride - ((self._first + (stride - 1)) // stride)[:, None] + 1
            self._sequence = torch.arange(len(self._first), device=self._first.device)[:, None]
            anchors = torch.arange(-(-rows // stride), device=self._first.device) * stride
            self._rows_of_anchors = ((-self._first % stride)[:, None] + anchors).clamp(max=rows - 1)

    def _positions(self) -> torch.Tensor:
        return self._first[:, None] + torch.arange(self.rows, dtype=torch.int32, device=self._first.device)

    def at(self, x: torch.Tensor, stride: int) -> torch.Tensor:
        if stride == 1:
            return x
        if self._phase is not None:
            return x[:, self._skipped :: stride]
        # A single row is computed as if it were an anchor.
        return x if self.rows == 1 else x[self._sequence, self._rows_of_anchors]

    def lse_at(self, lse: torch.Tensor, stride: int) -> torch.Tensor:
        return lse if stride == 1 else self.at(lse.transpose(1, 2), stride).transpose(1, 2).contiguous()

    def spread(self, x: torch.Tensor, stride: int, what: str) -> torch.Tensor:
        kept, x = self._kept[what][:, None], self._as_kept(x, what)
        if not self.has_anchors:
            return kept.expand(-1, self.rows, *kept.shape[2:])
        if self._phase is not None:
            x = x.repeat_interleave(stride, 1)[:, : self.rows - self._skipped] if self.rows > 1 else x
            if self._skipped:
                x = torch.cat([kept.expand(-1, self._skipped, *kept.shape[2:]), x], 1)
        elif self.rows == 1:
            x = torch.where(self._is_anchor.view(-1, *[1] * (x.dim() - 1)), x, kept)
        else:
            x = torch.cat([kept, x], 1)[self._sequence, self._place]
        self._found[what] = x[:, -1]
        return x

    def keep(self, x: torch.Tensor, what: str) -> None:
        """Of what anchors have, the last one's, where it is not spread."""
        self._found[what] = self._as_kept(x[:, -1:], what)[:, 0]

    def _as_kept(self, x: torch.Tensor, what: str) -> torch.Tensor:
        kept = self._kept[what]
        if what == "lists":
            x = torch.nn.functional.pad(x, (0, kept.shape[-1] - x.shape[-1]), value=-1)
        return x.to(kept.dtype)

    def of_q(self, stride: int) -> dict[str, Any]:
        first = self._first
        if stride > 1 and self.rows > 1:
            first = first + (-first % stride if self._phase is None else self._skipped)
        return {"q_offset": first, "q_step": stride}

    def of_q_and_k(self, stride: int) -> dict[str, Any]:
        return super().of_q_and_k(1 if self.rows == 1 else stride)

    def with_own_blocks(self, lists: torch.Tensor, stride: int, block_size: int) -> torch.Tensor:
        found = self.spread(lists, stride, "lists")
        return found if block_size % stride == 0 else own_blocks(found, self._positions(), stride, block_size)

    def anchors(self) -> _Anchors:
        return _Anchors(self, self._stride)

    def copied(self, o: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        """Whole rows, from those of anchors() and the one that is kept."""
        o = self.spread(o, self._stride, "sum")
        self.commit()
        if out is not None:
            return out.copy_(o)
        return o if self.has_anchors else o.clone()  # no part of the cache

    def commit(self) -> None:
        """What was found of the last anchors, into the cache."""
        if not self.has_anchors:
            return
        for what, x in self._found.items():
            self._kept[what].copy_(x)
        position = self._kept["position"]
        if self._phase is not None:
            position.copy_(self._lengths - (1 + (self._phase + self.rows - 1) % self._stride))
            return
        last = (self._lengths - 1) // self._stride * self._stride if self.rows > 1 else self._first
        position.copy_(torch.where(last >= self._first if self.rows > 1 else self._is_anchor, last, position))


class _Anchors(BatchedRows):
    """The anchors of strided rows alone, as rows that share nothing."""

    def __init__(self, rows: StridedRows, stride: int) -> None:
        super().__init__(0, 0)
        self._rows, self._stride = rows, stride

    def of_q(self, stride: int) -> dict[str, Any]:
        return self._rows.of_q(self._stride)

    def of_k(self) -> dict[str, Any]:
        return self._rows.of_k()

    def of_q_and_k(self, stride: int) -> dict[str, Any]:
        return self._rows.of_q_and_k(self._stride)

    def of_pooled(self, block: int, stride: int) -> dict[str, Any]:
        return self._rows.of_pooled(block, stride)

    def keys(self, k: torch.Tensor) -> int:
        return self._rows.keys(k)

    def of_q_and_pooled(self, stride: int, block: int, block_stride: int) -> dict[str, Any]:
        return self._rows.of_q_and_pooled(self._stride, block, block_stride)


def kept_of_anchors(
    sharing: Sharing,
    batch: int,
    heads: tuple[int, int],
    v_size: int,
    slots: int,
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, torch.Tensor]:
    """``Cache.anchors``, of no anchor yet. heads: query heads, key/value heads; slots: of a list."""

    def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(batch, *shape, dtype=dtype, device=device)

    if sharing.stride == 1:
        return {}
    kept = {"position": zeros(dtype=torch.int32) - 1}
    if sharing.share == "selection":
        return {**kept, "lists": zeros(heads[1], slots, dtype=torch.int32) - 1}
    if sharing.whole:
        return {**kept, "sum": zeros(heads[0], v_size, dtype=dtype)}
    # As attend() has branches before their gates.
    branch = dtype if device.type == "cuda" else torch.float32
    outputs = ("slc", "swa") if sharing.share == "delta" else tuple(b for b in BRANCHES if b in sharing.branches)
    kept |= {name: zeros(heads[0], v_size, dtype=branch) for name in outputs}
    if sharing.gate == "anchor":
        gated = ("slc",) if sharing.share == "delta" else outputs
        kept |= {"g_" + name: zeros(heads[0], dtype=torch.float32) for name in gated}
    return kept


def known_phase(operation: str, cache: Cache, phase: int | None) -> int | None:
    """What is known on the host of all sequences: how many keys behind an anchor they end. Lengths on a CPU are read and
    checked, and on a GPU where HEDDLE_VALIDATE asks for it."""
    stride = cache.sharing.stride
    if phase is not None:
        phase = checks.integer(operation, "phase", phase, 0)
        if phase >= stride:
            raise ValueError(f"[{operation}] phase is {phase}: it must be below the cache's query_stride, {stride}")
    if stride == 1:
        return 0
    on_host = cache.lengths.device.type == "cpu"
    if torch.compiler.is_compiling() or not (on_host or _validated()):
        return phase
    lengths, positions = cache.lengths.tolist(), cache.anchors["position"].tolist()
    for b, (length, position) in enumerate(zip(lengths, positions)):
        behind = length % stride
        if phase is not None and behind != phase:
            raise ValueError(
                f"[{operation}] phase is {phase}: sequence {b} has {length} keys, which is {behind} behind a multiple of "
                f"query_stride, {stride}"
            )
        if behind and position != length - behind:
            there = "none" if position < 0 else f"that of {position}"
            raise ValueError(
                f"[{operation}] sequence {b} has {length} keys, and its next row takes from the anchor at {length - behind}, "
                f"of which the cache has {there}: set lengths to a multiple of query_stride, {stride}, and give the rows from there"
            )
    phases = {length % stride for length in lengths}
    return phases.pop() if on_host and len(phases) == 1 else phase


def _validated() -> bool:
    return bool(_heddle.validates()) and not torch.cuda.is_current_stream_capturing()
