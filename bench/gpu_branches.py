"""Attention in float64 over the keys that a row of one key/value head attends, whatever says which: rows of its output and of
dq one by one, and dk and dv of some keys from all rows, a chunk of rows at a time.

Shapes: t [n], positions of rows; q, do [n, G, D], of the G query heads of a key/value head; k, v [S, D]. A branch's at(t) are
keys and values, [m, D] if all rows share them and else [n, m, D], and which of them count, [n, m].
"""

from __future__ import annotations

from collections.abc import Callable

import torch

CHUNK = 512 << 20  # bytes of what a chunk of rows has at a time


def attend(q, k, v, keep):
    """o [n, G, D] and the probabilities [n, G, m]; 0 for a row without keys."""
    keep = keep[:, None]
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~keep, -torch.inf)
    p = scores.softmax(-1).masked_fill(~keep, 0)
    return p @ v, p


def of_products(p, k, v, do):
    """The gradient of the products q k, before they are scaled, [n, G, m]."""
    dp = do @ v.mT
    return p * (dp - (p * dp).sum(-1, keepdim=True)) * k.shape[-1] ** -0.5


class Dense:
    """All keys, or with `causal` those up to the row."""

    gathered = False

    def __init__(self, k, v, causal=True):
        self.k, self.v, self.causal = k.double(), v.double(), causal
        self.length = len(k)
        self.most = self.length

    def at(self, t):
        j = torch.arange(self.length, device=t.device)
        return self.k, self.v, (j <= t[:, None]) if self.causal else (j >= 0).expand(len(t), -1)

    def rows(self, keys, t):
        """Of the rows t, those that may attend one of these keys."""
        return t[t >= keys.min()] if self.causal else t

    def where(self, keys, t):
        """Where at(t) has these keys, [n, K], and whether it does."""
        return keys.expand(len(t), -1), torch.ones(len(t), len(keys), dtype=torch.bool, device=t.device)


class Pooled(Dense):
    """The means of complete blocks that end at the row or before, rounded to the operands' dtype as pooled keys are. Its keys are
    numbers of blocks."""

    def __init__(self, k, v, block, pooled=False):
        """pooled: k and v are the means."""
        if not pooled:
            complete = len(k) // block * block
            k, v = (x[:complete].double().unflatten(0, (-1, block)).mean(1).to(x.dtype) for x in (k, v))
        super().__init__(k, v)
        self.block = block

    def at(self, t):
        c = torch.arange(self.length, device=t.device)
        return self.k, self.v, c < ((t + 1) // self.block)[:, None]

    def rows(self, keys, t):
        return t[t >= (keys.min() + 1) * self.block - 1]


class Listed(Dense):
    """The keys up to the row of the blocks in its list; lists [N, S] of the positions 0, stride, 2 stride, ..., whose list the rows
    behind them have. No block stands in a list twice."""

    gathered = True

    def __init__(self, k, v, lists, block, stride=1):
        super().__init__(k, v)
        self.lists, self.block, self.stride = lists.long(), block, stride
        self.most = lists.shape[-1] * block

    def at(self, t):
        inside = torch.arange(self.block, device=t.device)
        j = (self.lists[t // self.stride][..., None] * self.block + inside).flatten(1)
        keep = (j >= 0) & (j <= t[:, None])
        j = j.clamp(0, self.length - 1)
        return self.k[j], self.v[j], keep

    def rows(self, keys, t):
        named = torch.zeros(-(-self.length // self.block), dtype=torch.bool, device=t.device)
        named[keys // self.block] = True
        lists = self.lists[t // self.stride]
        return t[(named[lists.clamp(min=0)] & (lists >= 0)).any(-1)]

    def where(self, keys, t):
        found = self.lists[t // self.stride][:, None] == (keys // self.block)[:, None]  # [n, K, S]
        return found.int().argmax(-1) * self.block + keys % self.block, found.any(-1)


class Window(Dense):
    """The last `window` keys up to the row."""

    gathered = True

    def __init__(self, k, v, window):
        super().__init__(k, v)
        self.most = window

    def at(self, t):
        j = t[:, None] - torch.arange(self.most, device=t.device)
        return self.k[j.clamp(min=0)], self.v[j.clamp(min=0)], j >= 0

    def rows(self, keys, t):
        return t[(t >= keys.min()) & (t < keys.max() + self.most)]

    def where(self, keys, t):
        back = t[:, None] - keys
        return back.clamp(0, self.most - 1), (back >= 0) & (back < self.most)


class Tiles(Dense):
    """The keys of the blocks in a list that `tile` rows share, all of them; lists [N, n]. at() takes rows of one tile."""

    def __init__(self, k, v, lists, block, tile):
        super().__init__(k, v, causal=False)
        self.lists, self.block, self.tile = lists.long(), block, tile
        self.most = lists.shape[-1] * block

    def at(self, t):
        j = (self.lists[t[0] // self.tile][:, None] * self.block + torch.arange(self.block, device=t.device)).flatten()
        return self.k[j], self.v[j], torch.ones(len(t), len(j), dtype=torch.bool, device=t.device)

    def rows(self, keys, t):
        named = (self.lists[..., None] == (keys // self.block).unique()).flatten(1).any(-1)
        return t[named[t // self.tile]]

    def where(self, keys, t):
        found = self.lists[t[0] // self.tile] == (keys // self.block)[:, None]  # [K, n]
        place = found.int().argmax(-1) * self.block + keys % self.block
        return place.expand(len(t), -1), found.any(-1).expand(len(t), -1)


def chunks(branch, t, group):
    """t in parts of which none takes more than CHUNK bytes, and of Tiles none has rows of two tiles."""
    if isinstance(branch, Tiles):
        return t.split((t // branch.tile).unique_consecutive(return_counts=True)[1].tolist())
    width = branch.k.shape[-1]
    bytes_of_row = 8 * branch.most * (6 * group + (2 * width if branch.gathered else 0))
    return t.split(max(1, CHUNK // bytes_of_row))


def key_gradients(branch, keys, t, rows: Callable):
    """dk and dv [K, D] of the keys with these numbers, from the rows t; rows(t) -> q, do."""
    dk, dv = (torch.zeros(len(keys), x.shape[-1], dtype=torch.double, device=x.device) for x in (branch.k, branch.v))
    t = branch.rows(keys, t)
    if not len(t):
        return dk, dv
    group = rows(t[:1])[0].shape[1]
    for part in chunks(branch, t, group):
        q, do = rows(part)
        k, v, keep = branch.at(part)
        p = attend(q, k, v, keep)[1]
        place, there = branch.where(keys, part)
        for total, weights, by in ((dk, of_products(p, k, v, do), q), (dv, p, do)):
            of_keys = weights.gather(-1, place[:, None].expand(-1, group, -1)).masked_fill(~there[:, None], 0)
            total += of_keys.flatten(0, 1).T @ by.flatten(0, 1)
    return dk, dv


def row_gradients(branch, t, q, do):
    """o and dq [n, G, D]."""
    k, v, keep = branch.at(t)
    o, p = attend(q, k, v, keep)
    return o, of_products(p, k, v, do) @ k
