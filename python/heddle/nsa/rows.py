"""How the rows of a call lie, batched or packed, and which of them are anchors: what operations are told of them.

Tensors have their rows in dimension 1 if batched, [B, T, ...], in dimension 0 if packed, [T, ...]. Of packed sequences the
anchors with a stride r lie from cu_seqlens[b] // r + b on, which needs no sum over the sequences before: of the
T // r + B places, some belong to nobody (as the lists of ``heddle.sparse_attention`` with query_rows).
"""

from __future__ import annotations

from typing import Any

import torch

from .branches import Compress, compressed_keys


class BatchedRows:
    """Tq rows, the last positions of Tk keys, in each sequence."""

    cu_seqlens_k: torch.Tensor | None = None
    carries = False  # whether rows may have their anchor in an earlier call
    first_is_anchor = has_anchors = True  # of the rows, as far as the host knows

    def __init__(self, rows: int, keys: int) -> None:
        self.rows, self.first = rows, keys - rows

    def at(self, x: torch.Tensor, stride: int) -> torch.Tensor:
        """Of x, which has all rows, every stride-th."""
        return x if stride == 1 else x[:, ::stride]

    def lse_at(self, lse: torch.Tensor, stride: int) -> torch.Tensor:
        return lse if stride == 1 else lse[..., ::stride]

    def spread(self, x: torch.Tensor, stride: int, what: str) -> torch.Tensor:
        """To every row what its anchor has in x. what: the name of x where rows carry it from call to call."""
        return x.repeat_interleave(stride, 1)[:, : self.rows]

    def keep(self, x: torch.Tensor, what: str) -> None:
        """For later calls, where rows carry it."""

    def of_q(self, stride: int) -> dict[str, Any]:
        """Options of an operation on at(q, stride)."""
        return {"q_offset": self.first or None, "q_step": stride}

    def of_k(self) -> dict[str, Any]:
        return {}

    def keys(self, k: torch.Tensor) -> int:
        """The most that a sequence has."""
        return k.shape[1]

    def of_q_and_k(self, stride: int) -> dict[str, Any]:
        """Options of causal attention of at(q, stride) over k."""
        if stride == 1:  # the last rows: offsets would say the same to fewer kernels
            return {"causal": "bottom_right", **self.of_all_q(), **self.of_k()}
        return {"causal": "top_left", **self.of_q(stride), **self.of_k()}

    def of_all_q(self) -> dict[str, Any]:
        return {}

    def of_pooled(self, block: int, stride: int) -> dict[str, Any]:
        return {}

    def of_q_and_pooled(self, stride: int, block: int, block_stride: int) -> dict[str, Any]:
        """Options of attention of at(q, stride) over the pooled keys that each row sees."""
        return _over_pooled(self, stride, block, block_stride)

    def compressed(
        self, k: torch.Tensor, v: torch.Tensor, block: int, stride: int, compress: Compress
    ) -> tuple[torch.Tensor, torch.Tensor]:
        found = [compressed_keys(*pair, block, stride, compress) for pair in zip(k, v)]
        return torch.stack([x[0] for x in found]), torch.stack([x[1] for x in found])

    def with_own_blocks(self, lists: torch.Tensor, stride: int, block_size: int) -> torch.Tensor:
        """Each row's list, its anchor's, with one slot more: the row's block where the anchor stands in another, else -1."""
        t = self.first + torch.arange(self.rows, device=lists.device)
        return own_blocks(self.spread(lists, stride, "lists"), t, stride, block_size)


class PackedRows:
    """The rows of sequence b are [cu_q[b], cu_q[b + 1]), the last positions of its keys. Index data stays where it is: what is
    made of it is made there."""

    carries, first_is_anchor, has_anchors = False, True, True

    def __init__(self, cu_q: torch.Tensor, cu_k: torch.Tensor, longest: tuple[int, int], total: int) -> None:
        self.cu_q, self.cu_seqlens_k, self.total = cu_q.int(), cu_k.int(), total
        self.longest_q, self.longest_k = longest
        self.lengths, self.key_lengths = self.cu_q.diff(), self.cu_seqlens_k.diff()
        self.first = self.key_lengths - self.lengths

    def _starts(self, stride: int) -> torch.Tensor:
        """Where the anchors of each sequence lie, [B + 1]."""
        return self.cu_q // stride + torch.arange(len(self.cu_q), dtype=torch.int32, device=self.cu_q.device)

    def _row_of_place(self, stride: int) -> torch.Tensor:
        starts = self._starts(stride)
        place = torch.arange(self.total // stride + len(self.lengths), device=starts.device)
        sequence = (torch.searchsorted(starts, place.int(), right=True) - 1).clamp(max=len(starts) - 2)
        inside = ((place - starts[sequence]) * stride).minimum(self.lengths[sequence] - 1).clamp(min=0)
        return (self.cu_q[sequence] + inside).clamp(max=max(self.total - 1, 0)).long()

    def _sequence_and_row(self) -> tuple[torch.Tensor, torch.Tensor]:
        t = torch.arange(self.total, dtype=torch.int32, device=self.cu_q.device)
        sequence = torch.searchsorted(self.cu_q[1:].contiguous(), t, right=True)
        return sequence, t - self.cu_q[sequence]

    def at(self, x: torch.Tensor, stride: int) -> torch.Tensor:
        return x if stride == 1 else x.index_select(0, self._row_of_place(stride))

    def lse_at(self, lse: torch.Tensor, stride: int) -> torch.Tensor:
        return lse if stride == 1 else lse.index_select(1, self._row_of_place(stride))

    def spread(self, x: torch.Tensor, stride: int, what: str) -> torch.Tensor:
        sequence, row = self._sequence_and_row()
        return x.index_select(0, self._starts(stride)[sequence] + row // stride)

    def keep(self, x: torch.Tensor, what: str) -> None:
        pass

    def of_q(self, stride: int) -> dict[str, Any]:
        if stride == 1:
            return {**self.of_all_q(), "q_offset": self.first, "q_step": 1}
        return {
            "cu_seqlens_q": self._starts(stride),
            "max_seqlen_q": self.longest_q // stride + 2,  # of places
            "seqused_q": (self.lengths + (stride - 1)) // stride,
            "q_offset": self.first,
            "q_step": stride,
        }

    def of_k(self) -> dict[str, Any]:
        return {"cu_seqlens_k": self.cu_seqlens_k, "max_seqlen_k": self.longest_k}

    def keys(self, k: torch.Tensor) -> int:
        return k.shape[0]

    def of_q_and_k(self, stride: int) -> dict[str, Any]:
        if stride == 1:
            return {"causal": "bottom_right", **self.of_all_q(), **self.of_k()}
        return {"causal": "top_left", **self.of_q(stride), **self.of_k()}

    def of_all_q(self) -> dict[str, Any]:
        return {"cu_seqlens_q": self.cu_q, "max_seqlen_q": self.longest_q}

    def of_pooled(self, block: int, stride: int) -> dict[str, Any]:
        complete = (self.key_lengths - block).clamp(min=-stride) // stride + 1
        return {
            "cu_seqlens_k": self.cu_seqlens_k // stride,
            "max_seqlen_k": self.longest_k // stride + 1,
            "seqused_k": complete,
        }

    def of_q_and_pooled(self, stride: int, block: int, block_stride: int) -> dict[str, Any]:
        return _over_pooled(self, stride, block, block_stride)

    def compressed(
        self, k: torch.Tensor, v: torch.Tensor, block: int, stride: int, compress: Compress
    ) -> tuple[torch.Tensor, torch.Tensor]:
        starts = self.cu_seqlens_k.tolist()
        parts: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        for begin, end in zip(starts, starts[1:]):
            for part, x in zip(parts, compressed_keys(k[begin:end], v[begin:end], block, stride, compress)):
                part.append(torch.nn.functional.pad(x, (0, 0, 0, 0, 0, end // stride - begin // stride - len(x))))
        return torch.cat(parts[0]), torch.cat(parts[1])

    def with_own_blocks(self, lists: torch.Tensor, stride: int, block_size: int) -> torch.Tensor:
        sequence, row = self._sequence_and_row()
        t = self.first[sequence] + row
        return own_blocks(self.spread(lists, stride, "lists"), t, stride, block_size)


def _over_pooled(rows: BatchedRows | PackedRows, stride: int, block: int, block_stride: int) -> dict[str, Any]:
    return {
        "causal": "top_left",
        "key_offset": block - 1,
        "key_step": block_stride,
        **rows.of_q(stride),
        **rows.of_pooled(block, block_stride),
    }


def own_blocks(lists: torch.Tensor, t: torch.Tensor, stride: int, block_size: int) -> torch.Tensor:
    """Lists with one slot more: the block of the row, which stands at t, where its anchor stands in another, else -1."""
    own, of_anchor = t // block_size, t // stride * stride // block_size
    extra = torch.where(own != of_anchor, own, -1).int()[..., None, None]
    return torch.cat([lists, extra.expand(*lists.shape[:-1], 1)], -1)


Rows = BatchedRows | PackedRows
