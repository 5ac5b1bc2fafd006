"""Native sparse attention in float64: sampled rows of what a benchmark timed at its full size, over the lists of blocks that the
library chose, which are themselves held to the scores in float64; and gradients of some keys, from all rows.

Rows come in groups, an anchor and the rows that take something from it; without sharing each row is one. A whole call's
outputs are o, or the gradients of q, k, v and the gates.
"""

from __future__ import annotations

import torch
from gpu_branches import Dense, Listed, Pooled, Window, attend, key_gradients, row_gradients
from gpu_reference import Expected, places

CHOSEN_LIMIT = 1e-4  # of a score: sums over the heads of a group, of float32 products of the same 16-bit numbers
GROUPS = 8  # that are sampled


def first_of(length, block):
    """Rows from here on see enough blocks for gradients that are not rounding's alone, which over one key they are."""
    return min(8 * block, length // 2)


def sampled_groups(batch, length, kv_heads, stride=1, first=0, count=GROUPS):
    """[(b, anchor, kv head)] spread over a call."""
    groups = -(-(length - first) // stride)
    begin = first // stride * stride
    return [(b, begin + n * stride, h) for b, n, h in places(batch, groups, kv_heads, count)]


def sampled_keys(length, block, device):
    """Of the first block, which every row has, of one in the middle and of the last."""
    blocks = length // block
    chosen = torch.tensor(sorted({0, blocks // 2, blocks - 1}), device=device)
    return (chosen[:, None] * block + torch.arange(block, device=device)).flatten()


def gathered(found):
    """Expected of [(b, t [n], heads [G], values [n, G, D] or [n, G])], rows of [B, T, H, D] or of [B, T, H], there all heads of
    a group as one."""
    b = torch.cat([torch.full_like(t, b) for b, t, *_ in found])[:, None]
    t = torch.cat([t for _, t, *_ in found])[:, None]
    heads = torch.cat([heads.expand(len(t), -1) for _, t, heads, _ in found])
    values = torch.cat([each for *_, each in found])
    whole = values.dim() == 2
    return Expected(
        lambda x: x[b, t, heads] if whole else x[b, t, heads].flatten(0, 1), values if whole else values.flatten(0, 1)
    )


def of_keys(b, keys, h, values):
    return Expected(lambda x: x[b, keys, h], values)


class Choice:
    """What lists [B, N, H, n] of the positions 0, stride, 2 stride, ... must be: forced blocks, and of the others that the row
    sees those with the highest scores. Its distance: by how much a score that was left out is above one that was taken."""

    def __init__(self, q, k, block, stride=1, pooled=False, count=32):
        self.q, self.k, self.block, self.stride, self.pooled = q, k, block, stride, pooled
        self.length = q.shape[1]
        self.spots = sampled_groups(q.shape[0], self.length, k.shape[2], stride, count=count)

    def scores(self, b, t, h):
        """[N], -inf where no complete block is seen; which blocks are forced."""
        group = self.q.shape[2] // self.k.shape[2]
        pooled = Pooled(*2 * (self.k[b, :, h],), self.block, self.pooled)
        row = torch.tensor([t], device=self.q.device)
        _, p = attend(self.q[b, row, h * group : (h + 1) * group].double(), *pooled.at(row))
        blocks = -(-self.length // self.block)
        scores = torch.full((blocks,), -torch.inf, dtype=torch.double, device=p.device)
        seen = (t + 1) // self.block
        scores[:seen] = p[0, :, :seen].sum(0)
        return scores, sorted({0, max(t // self.block - 1, 0), t // self.block})

    def worst(self, lists) -> float:
        found = 0.0
        for b, t, h in self.spots:
            scores, forced = self.scores(b, t, h)
            taken = [c for c in lists[b, t // self.stride, h].tolist() if c != -1]
            free = scores.clone()
            free[forced] = -torch.inf
            wanted = min(lists.shape[-1], int((free > -torch.inf).sum()) + len(forced))
            if len(taken) != wanted or len(set(taken)) != wanted or not set(forced[:wanted]) <= set(taken) or max(taken) > t // self.block:  # fmt: skip
                return float("inf")
            chosen = sorted(set(taken) - set(forced))
            left = free.clone()
            left[chosen] = -torch.inf
            if chosen and left.max() > -torch.inf:
                found = max(found, (1 - free[chosen].min() / left.max()).item())
        return found


class Whole:
    """q, k, v, g_cmp, g_slc and g_swa (None: no window) of a call, the library's lists, and how rows share (heddle.nsa.presets)."""

    def __init__(self, x, lists, block, window, sharing=None):
        self.x, self.lists, self.block, self.window = [y if y is None else y.detach() for y in x], lists, block, window
        sharing = sharing or {"query_stride": 1, "share": "none", "share_branches": (), "gate": "own"}
        self.stride, self.outputs = sharing["query_stride"], sharing["share"] == "output"
        if self.outputs and sharing["gate"] != "anchor" or not self.outputs and block % self.stride:
            raise ValueError(f"there is no reference of {sharing}")
        self.shared = sharing["share_branches"] if self.outputs else ()
        self.gates = {name: y for name, y in zip(("cmp", "slc", "swa"), self.x[3:]) if y is not None}
        self.group = x[0].shape[2] // x[1].shape[2]
        worst = Choice(*self.x[:2], block, self.stride).worst(lists)
        if not worst <= CHOSEN_LIMIT:
            raise ValueError(
                f"a list is not of the best blocks: a score that was left out is higher by {worst:.3g} of itself"
            )

    def at(self, name):
        """The stride of the rows at which a branch is computed."""
        return self.stride if name in self.shared else 1

    def heads(self, h):
        return torch.arange(h * self.group, (h + 1) * self.group, device=self.x[0].device)

    def rows(self, x, b, t, h):
        return x[b, t][:, h * self.group : (h + 1) * self.group].double()

    def branches(self, b, h):
        k, v = (y[b, :, h] for y in self.x[1:3])
        wide = k.double(), v.double()
        made = {"cmp": Pooled(k, v, self.block)}
        made["slc"] = Listed(*wide, self.lists[b, :, h], self.block, self.stride)
        return made | ({"swa": Window(*wide, self.window)} if self.window else {})

    def weights(self, weight, name, b, t, h):
        """What a branch's output at the rows t gets of the weight of o: of all rows that it is added to."""
        at = self.at(name)
        rows = t[:, None] + torch.arange(at, device=t.device)
        there = rows < self.x[0].shape[1]
        of_rows = self.rows(weight, b, rows.clamp(max=self.x[0].shape[1] - 1).flatten(), h).unflatten(0, rows.shape)
        return (of_rows * there[..., None, None]).sum(1)

    def expected(self, weight=None):
        """(Expected of o,), or of the gradients of sum(o * weight)."""
        q, k = self.x[:2]
        first = 0 if weight is None else first_of(q.shape[1], self.block)
        spots = sampled_groups(q.shape[0], q.shape[1], k.shape[2], self.stride, first)
        outputs, dqs, dgs = [], [], {name: [] for name in self.gates}
        for b, anchor, h in spots:
            t = torch.arange(anchor, min(anchor + self.stride, q.shape[1]), device=q.device)
            rows = self.rows(q, b, t, h)
            o, dq = torch.zeros_like(rows), torch.zeros_like(rows)
            for name, branch in self.branches(b, h).items():
                at = self.at(name)
                gate = self.rows(self.gates[name], b, t[::at], h)
                if weight is None:
                    o += (gate[..., None] * attend(rows[::at], *branch.at(t[::at]))[0]).repeat_interleave(at, 0)[
                        : len(t)
                    ]
                    continue
                do = self.weights(weight, name, b, t[::at], h)
                of_branch, dq_of_branch = row_gradients(branch, t[::at], rows[::at], gate[..., None] * do)
                dq[::at] += dq_of_branch
                dg = torch.zeros(rows.shape[:2], dtype=rows.dtype, device=rows.device)
                dg[::at] = (do * of_branch).sum(-1)
                dgs[name].append((b, t, self.heads(h), dg))
            outputs.append((b, t, self.heads(h), o))
            dqs.append((b, t, self.heads(h), dq))
        if weight is None:
            return (gathered(outputs),)
        return (gathered(dqs), *self.of_keys(weight), *(gathered(found) for found in dgs.values()))

    def of_keys(self, weight):
        """Expected of dk and of dv, of some keys of the last key/value head."""
        b, h = self.x[1].shape[0] - 1, self.x[1].shape[2] - 1
        length = self.x[1].shape[1]
        keys = sampled_keys(length, self.block, self.x[1].device)
        total = [0, 0]
        for name, branch in self.branches(b, h).items():

            def rows(t, name=name):
                gate = self.rows(self.gates[name], b, t, h)[..., None]
                return self.rows(self.x[0], b, t, h), gate * self.weights(weight, name, b, t, h)

            t = torch.arange(0, length, self.at(name), device=keys.device)
            if name == "cmp":
                blocks = keys[:: self.block] // self.block
                found = [
                    y.repeat_interleave(self.block, 0) / self.block for y in key_gradients(branch, blocks, t, rows)
                ]
            else:
                found = key_gradients(branch, keys, t, rows)
            total = [a + y for a, y in zip(total, found)]
        return tuple(of_keys(b, keys, h, y) for y in total)


def of_branch(q, k, v, make, weight=None, keys=None, first=0):
    """(Expected of o,), or of dq, dk and dv, of one branch without gates: make(b, h) is the branch of a key/value head. keys: whose
    dk and dv are looked at, in the last head."""
    group = q.shape[2] // k.shape[2]
    heads = lambda h: torch.arange(h * group, (h + 1) * group, device=q.device)  # noqa: E731
    rows = lambda x, b, t, h: x[b, t][:, h * group : (h + 1) * group].double()  # noqa: E731
    outputs, dqs = [], []
    for b, t, h in sampled_groups(q.shape[0], q.shape[1], k.shape[2], 1, first):
        t, branch = torch.tensor([t], device=q.device), make(b, h)
        if weight is None:
            outputs.append((b, t, heads(h), attend(rows(q, b, t, h), *branch.at(t))[0]))
        else:
            dqs.append((b, t, heads(h), row_gradients(branch, t, rows(q, b, t, h), rows(weight, b, t, h))[1]))
    if weight is None:
        return (gathered(outputs),)
    b, h = k.shape[0] - 1, k.shape[2] - 1
    t = torch.arange(q.shape[1], device=q.device)
    found = key_gradients(make(b, h), keys, t, lambda t: (rows(q, b, t, h), rows(weight, b, t, h)))
    return (gathered(dqs), *(of_keys(b, keys, h, y) for y in found))


def dense(q, k, v, weight=None):
    """Of causal attention over all keys; gradients of keys at the end, which few rows see."""
    q, k, v = (x.detach() for x in (q, k, v))
    length = k.shape[1]
    keys = torch.arange(max(0, length - 64), length, device=q.device)
    make = lambda b, h: Dense(k[b, :, h], v[b, :, h])  # noqa: E731
    return of_branch(q, k, v, make, weight, keys, 0 if weight is None else min(64, length // 2))


def decoded(q, k, v, gates, block, blocks, window, count=GROUPS):
    """(Expected of o [B, 1, HQ, D],): of a step at the last of the keys, over the blocks that the scores in float64 choose. Heads
    in which two blocks at the end of the list are as good as each other are left out."""
    batch, length, kv_heads = k.shape[:3]
    group, found = q.shape[2] // kv_heads, []
    t = torch.tensor([length - 1], device=q.device)
    at = torch.zeros_like(t)
    for b, h in ((b, h) for b in range(batch) for h in range(kv_heads)):
        heads = torch.arange(h * group, (h + 1) * group, device=q.device)
        rows = q[b][:, heads].double()
        pair = k[b, :, h], v[b, :, h]
        branches = {"cmp": Pooled(*pair, block), "swa": Window(*pair, window)}
        # As Choice has it, but for the last position.
        p = attend(rows, *branches["cmp"].at(t))[1][0].sum(0)
        forced = sorted({0, max((length - 1) // block - 1, 0), (length - 1) // block})
        free = p.clone()
        free[[c for c in forced if c < len(p)]] = -torch.inf
        order, numbers = free.sort(descending=True)
        others = blocks - len(forced)
        if others < len(order) and order[others] > -torch.inf and 1 - order[others] / order[others - 1] < CHOSEN_LIMIT:
            continue
        lists = [*forced, *(c for c, score in zip(numbers.tolist(), order.tolist()) if score > -torch.inf)][:blocks]
        listed = Listed(*pair, torch.tensor([lists], device=q.device), block, length)
        o = sum(
            gate[b][:, heads].double()[..., None] * attend(rows, *branch.at(t))[0]
            for gate, branch in zip(gates, (branches["cmp"], listed, branches["swa"]))
        )
        found.append((b, at, heads, o))
        if len(found) == count:
            break
    if not found:
        raise ValueError("no head's list of blocks is one by its scores alone")
    return (gathered(found),)
