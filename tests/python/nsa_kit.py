"""Native sparse attention as a double loop in float64, and the comparison with it."""

import math

import pytest

torch = pytest.importorskip("torch")
from heddle import nsa  # noqa: E402  where there is torch

FORCED = ("first", "previous", "current")
MODES = {
    "A": dict(share="output", gate="own"),
    "B": dict(share="output", gate="anchor"),
    "C": dict(share="selection"),
    "D": dict(share="delta"),
    "D, anchor's gate": dict(share="delta", gate="anchor"),
    "window copied": dict(share="output", share_branches=("slc", "swa")),
    "only the compressed branch": dict(share="output", share_branches=("cmp",)),
    "all branches": dict(share="output", share_branches=("swa", "cmp", "slc"), gate="anchor"),
}


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def operands(rows, keys=None, batch=1, heads=2, group=2, size=4, v_size=3, seed=0, dtype=torch.float64):
    """q, k, v, g_cmp, g_slc, g_swa."""
    make = torch.Generator().manual_seed(seed)
    keys = rows if keys is None else keys
    q = torch.randn(batch, rows, heads * group, size, generator=make, dtype=torch.float64)
    k, v = (torch.randn(batch, keys, heads, d, generator=make, dtype=torch.float64) for d in (size, v_size))
    gates = torch.sigmoid(torch.randn(3, batch, rows, heads * group, generator=make, dtype=torch.float64))
    return tuple(x.to(dtype) for x in (q, k, v, *gates))


def relative(found, expected):
    return ((found.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30)).item()


# ---------------------------------------------------------------- the loop


def attend(q, k, v, scale):
    """One row over the keys that are there: its output, and its probabilities."""
    if len(k) == 0:
        return torch.zeros(v.shape[1], dtype=v.dtype), torch.zeros(0, dtype=v.dtype)
    s = scale * (k @ q)
    p = torch.exp(s - s.max())
    p = p / p.sum()
    return p @ v, p


class Loop:
    """One sequence: q [n, HQ, D], the last n of its positions; k [L, H, D]; v [L, H, Dv]."""

    def __init__(self, q, k, v, block_size, scale=None, window=0, count=0, forced=FORCED, block=None, stride=None,
                 k_cmp=None, v_cmp=None, k_swa=None, v_swa=None):  # fmt: skip
        self.q, self.k, self.v, self.size, self.window, self.forced = q, k, v, block_size, window, forced
        self.k_cmp, self.v_cmp = (k, v) if k_cmp is None else (k_cmp, v_cmp)
        self.k_swa, self.v_swa = (k, v) if k_swa is None else (k_swa, v_swa)
        self.scale = q.shape[-1] ** -0.5 if scale is None else scale
        self.block = block or block_size
        self.stride = stride or self.block
        self.first = len(k) - len(q)
        self.group = q.shape[1] // k.shape[1]
        self.blocks = math.ceil(len(k) / block_size)
        self.count = count if callable(count) else lambda t, h: count

    def query(self, t, hq):
        return self.q[t - self.first, hq]

    def compressed(self, t, hq):
        h, ends = (
            hq // self.group,
            range(self.block, t + 2, self.stride),
        )  # the block [end - block, end) ends at t or before
        k, v = (
            torch.stack([x[end - self.block : end, h].mean(0) for end in ends]) if len(ends) else x[:0, h]
            for x in (self.k_cmp, self.v_cmp)
        )
        return attend(self.query(t, hq), k, v, self.scale)

    def list(self, t, h):
        probabilities = sum(self.compressed(t, h * self.group + g)[1] for g in range(self.group)).tolist()
        score = {}
        for i, p in enumerate(probabilities):  # cells of a stride: those of compressed block i, in selection block j
            for cell in range(i, i + self.block // self.stride):
                j = cell * self.stride // self.size
                score[j] = score.get(j, 0) + p
        own = t // self.size
        for name, c in (("first", 0), ("previous", own - 1), ("current", own)):
            if name in self.forced and c >= 0:
                score[c] = math.inf
        return sorted(score, key=lambda c: (-score[c], c))[: self.count(t, h)]

    def selected(self, t, hq, blocks):
        keys = [j for j in range(t + 1) if j // self.size in blocks]
        h = hq // self.group
        return attend(self.query(t, hq), self.k[keys, h], self.v[keys, h], self.scale)[0]

    def swa(self, t, hq):
        h, begin = hq // self.group, max(0, t - self.window + 1)
        return attend(self.query(t, hq), self.k_swa[begin : t + 1, h], self.v_swa[begin : t + 1, h], self.scale)[0]

    def result(self, gates, query_stride=1, share="none", share_branches=("slc",), gate="own", list_of=None):
        """[n, HQ, Dv]: the three branches, by the table of modes."""
        of_anchor = list_of or self.list
        lists = {}
        out = torch.zeros(*self.q.shape[:2], self.v.shape[-1], dtype=self.q.dtype)
        for row in range(len(self.q)):
            t = self.first + row
            a = t - t % query_stride
            for hq in range(self.q.shape[1]):
                h = hq // self.group
                at = a if "slc" in share_branches and share != "none" else t
                if (at, h) not in lists:
                    lists[at, h] = of_anchor(at, h)
                blocks = set(lists[at, h])
                if share == "selection" and t // self.size != a // self.size:
                    blocks.add(t // self.size)
                branches = {
                    "cmp": lambda t, hq=hq: self.compressed(t, hq)[0],
                    "slc": lambda t, hq=hq, blocks=blocks: self.selected(t, hq, blocks),
                    "swa": lambda t, hq=hq: self.swa(t, hq),
                }
                for name, g in zip(("cmp", "slc", "swa"), gates):
                    if g is None or (name == "swa" and self.window == 0):
                        continue
                    branch, own, anchor = branches[name], g[row, hq], g[a - self.first, hq]
                    if share == "output" and name in share_branches:
                        out[row, hq] += (anchor if gate == "anchor" else own) * branch(a)
                    elif share == "delta" and name in share_branches:
                        correction = branch(a) - branches["swa"](a)
                        out[row, hq] += (anchor if gate == "anchor" else own) * (branches["swa"](t) + correction)
                    else:
                        out[row, hq] += own * branch(t)
        return out


def spans(cu_q, cu_k):
    return [(slice(*a), slice(*b)) for a, b in zip(zip(cu_q, cu_q[1:]), zip(cu_k, cu_k[1:]))]


def same(found, expected):
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)


def check_whole(x, count, block_size, window, cu=None, sharing=None, **options):
    """naive_nsa_with_compression against the loop. cu: the starts of q's and of k's sequences."""
    q, k, v, *gates = x
    starts = None if cu is None else tuple(torch.tensor(c) for c in cu)
    found = nsa.naive_nsa_with_compression(
        *x, count, block_size, window, cu_seqlens=starts, **(sharing or {}), **options
    )
    pieces = [(slice(None), slice(None))] if cu is None else spans(*cu)
    form = {name: options[name] for name in ("forced", "scale") if name in options}
    for b in range(len(q)):
        for rows, keys in pieces:
            counts = count
            if isinstance(count, torch.Tensor):
                here = count[b, rows]
                first = len(k[b, keys]) - len(q[b, rows])
                counts = lambda t, h, here=here, first=first: int(here[t - first, h])  # noqa: E731
            loop = Loop(q[b, rows], k[b, keys], v[b, keys], block_size, window=window, count=counts, **form)
            same(found[b, rows], loop.result([g[b, rows] for g in gates], **(sharing or {})))
