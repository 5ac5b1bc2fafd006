"""Attention in float64 for some rows, where no contender computes the same: what a benchmark's outputs are compared with.

It is for sampled rows of calls that are too large for tests, and says no more than that a timed call did its work; the
accuracy rule (docs/numerics.md) is tested elsewhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch


def places(batch: int, length: int, heads: int, count: int = 12) -> list[tuple[int, int, int]]:
    """Rows (b, i, h) spread over a call: its first and last, and others between."""
    last = max(count - 1, 1)
    return [
        (
            (batch - 1) * n // last,
            (length - 1) * (n * 5 % (last + 1)) // last,
            (heads - 1) * (n * 7 % (last + 1)) // last,
        )
        for n in range(count)
    ]


@dataclasses.dataclass
class Attention:
    """o[b, i, h] of q [B, Sq, H, D], k and v [B, Sk, Hkv, D]; options as of heddle.attention, causality from the bottom right."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    causal: bool = False
    left: int | None = None  # of a window
    softcap: float = 0.0
    alibi_slopes: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    sink: torch.Tensor | None = None
    q_scale: torch.Tensor | None = None
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None

    def _operand(self, x, scale, b, h):
        """[S, D] of one sequence and head, as stored values times scales."""
        wide = x[b, :, h].double()
        return wide if scale is None else wide * scale.expand(*x.shape[:-1])[b, :, h, None].double()

    def _pairs(self, x, b, i, h):
        """[Sk] of what is broadcast to [B, H, Sq, Sk]."""
        (batch, rows, heads), keys = self.q.shape[:3], self.k.shape[1]
        return x.expand(batch, heads, rows, keys)[b, h, i]

    def row(self, b: int, i: int, h: int) -> torch.Tensor:
        group = self.q.shape[2] // self.k.shape[2]
        k, v = self._operand(self.k, self.k_scale, b, h // group), self._operand(self.v, self.v_scale, b, h // group)
        q = self._operand(self.q, self.q_scale, b, h)[i]
        distance = i + self.k.shape[1] - self.q.shape[1] - torch.arange(self.k.shape[1], device=k.device)
        scores = k @ q * self.q.shape[-1] ** -0.5
        if self.softcap:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        if self.alibi_slopes is not None:
            scores = scores - self.alibi_slopes[h].double() * distance.abs()
        if self.bias is not None:
            scores = scores + self._pairs(self.bias, b, i, h).double()
        if self.mask is not None:
            scores = scores.masked_fill(~self._pairs(self.mask, b, i, h), -torch.inf)
        if self.causal:
            scores = scores.masked_fill(distance < 0, -torch.inf)
        if self.left is not None:
            scores = scores.masked_fill(distance > self.left, -torch.inf)
        sink = [] if self.sink is None else [self.sink[h : h + 1].double()]
        weights = torch.softmax(torch.cat([scores, *sink]), 0)[: len(scores)]
        return weights @ v


@dataclasses.dataclass
class Expected:
    """Some of an output, as it should be: part(output) is compared with `values`, row by row."""

    part: Callable
    values: torch.Tensor

    def worst(self, output) -> float:
        """The worst relative distance of a row, so that none hides behind longer ones; NaN if any is. A row of zeros must be
        zeros."""
        mine, values = self.part(output).double().flatten(1), self.values.double().flatten(1)
        off = (mine - values).norm(dim=1)
        return torch.where(off == 0, 0, off / values.norm(dim=1)).max().item()


def sampled(problem: Attention) -> Expected:
    """Rows of o [B, Sq, H, Dv]."""
    where = places(problem.q.shape[0], problem.q.shape[1], problem.q.shape[2])
    b, i, h = (list(indices) for indices in zip(*where))
    return Expected(lambda o: o[b, i, h], torch.stack([problem.row(*place) for place in where]))


def sampled_documents(q, k, v, starts: list[int], causal: bool) -> Expected:
    """Rows of o [total, H, Dv] of packed sequences, of the first, the last and two between."""
    count = len(starts) - 1
    documents = sorted({0, count // 3, 2 * count // 3, count - 1})
    indices, values = [], []
    for n in documents:
        cut = slice(starts[n], starts[n + 1])
        problem = Attention(*(x[None, cut] for x in (q, k, v)), causal=causal)
        for _, i, h in places(1, starts[n + 1] - starts[n], q.shape[1], 4):
            indices.append((starts[n] + i, h))
            values.append(problem.row(0, i, h))
    i, h = (list(each) for each in zip(*indices))
    return Expected(lambda o: o[i, h], torch.stack(values))


def distance(mine: torch.Tensor, other: torch.Tensor) -> float:
    """Of `mine` from `other`, relative, in the Frobenius norm; NaN if either has one."""
    wide = torch.float64 if torch.float64 in (mine.dtype, other.dtype) else torch.float32
    return ((mine.to(wide) - other.to(wide)).norm() / other.to(wide).norm()).item()
