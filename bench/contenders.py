"""The calls that attention_bench.py times: Heddle's, torch's, and OpenBLAS' sgemm, for one row of shapes.json.

Each row gives a dict of name -> call, and a dict of name -> output for a comparison of results before anything is timed.
Everybody gets the layout of their own signature: Heddle [B, S, H, D] or packed [total, H, D], torch [B, H, S, D], all
contiguous and made beforehand.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import dataclasses
import functools
import os
from collections.abc import Callable

# OpenBLAS' threads otherwise spin for a while after each product and steal the cores of whoever comes next.
os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")

import heddle
import heddle.nsa
import sources
import torch
import torch.nn.functional as F
from heddle.sparse import options_tuple

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


@dataclasses.dataclass
class Row:
    """One line of the table: what is timed, how much arithmetic it is, and the goal."""

    group: str
    name: str  # "forward B1 H8 S512 D64 f32"
    dtype: str
    flops: float
    goal: float
    shape: list
    calls: Callable[[], dict[str, Callable[[], object]]]  # made only when the row runs
    reference: Callable | None = None  # makes the call to compare with, where the others compute something else
    rate: bool = False  # the goal is a share of sgemm's rate and not of torch's time
    rival: str | None = None  # whom the goal is about; None: whoever is fastest
    sources: tuple[str, ...] = sources.CPU_ATTENTION
    limit: Callable[[], float] | None = None  # of the difference, where the result may be off by more than rounding
    notes: Callable[[], dict] = dict  # what else the row says


def random(*shape, dtype, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def heddle_layout(x):
    """[B, H, S, D] to a contiguous [B, S, H, D]."""
    return x.transpose(1, 2).contiguous()


def dense(shape, dtype, causal, backward):
    B, H, S, D = shape
    q, k, v, d_o = (random(B, H, S, D, dtype=DTYPES[dtype], seed=i) for i in range(4))
    hq, hk, hv, hd_o = map(heddle_layout, (q, k, v, d_o))
    how = "top_left" if causal else "none"
    if not backward:
        return {
            "heddle": lambda: heddle.attention(hq, hk, hv, causal=how).transpose(1, 2),
            "torch": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal),
        }
    for x in (q, k, v, hq, hk, hv):
        x.requires_grad_(True)
    o = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    ho = heddle.attention(hq, hk, hv, causal=how)
    return {
        "heddle": lambda: torch.autograd.grad(ho, (hq, hk, hv), hd_o, retain_graph=True)[0].transpose(1, 2),
        "torch": lambda: torch.autograd.grad(o, (q, k, v), d_o, retain_graph=True)[0],
    }


def packed(shape, dtype):
    """Documents of different lengths: Heddle packed; torch padded with a mask, and one call for each document."""
    H, D, lengths = shape
    longest, total = max(lengths), sum(lengths)
    q, k, v = (random(total, H, D, dtype=DTYPES[dtype], seed=i) for i in range(3))
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    documents = [[x[a:b].transpose(0, 1).contiguous()[None] for x in (q, k, v)] for a, b in zip(cu, cu[1:])]

    def padded(parts):
        out = torch.zeros(len(lengths), H, longest, D, dtype=DTYPES[dtype])
        for b, part in enumerate(parts):
            out[b, :, : part.shape[2]] = part[0]
        return out

    pq, pk, pv = (padded([d[i] for d in documents]) for i in range(3))
    same = all(n == longest for n in lengths)
    mask = None if same else (torch.arange(longest)[None] < torch.tensor(lengths)[:, None])[:, None, None]

    def unpadded(out):
        return torch.cat([out[b, :, :n].transpose(0, 1) for b, n in enumerate(lengths)])

    # The comparison of results needs one layout; its cost stays out of the timing.
    calls = {
        "heddle": lambda: heddle.attention(
            q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=longest, max_seqlen_k=longest
        ),  # fmt: skip
        "torch padded": lambda: F.scaled_dot_product_attention(pq, pk, pv, attn_mask=mask),
        "torch one by one": lambda: [F.scaled_dot_product_attention(*d) for d in documents],
    }
    return calls, {
        "torch padded": unpadded,
        "torch one by one": lambda outs: torch.cat([o[0].transpose(0, 1) for o in outs]),
    }


def decode(shape, dtype):
    """One query row over a long cache; torch once with enable_gqa, and once with the group folded into query rows."""
    B, H, Hkv, Sk, D = shape
    q = random(B, H, 1, D, dtype=DTYPES[dtype], seed=0)
    k, v = (random(B, Hkv, Sk, D, dtype=DTYPES[dtype], seed=i) for i in (1, 2))
    hq, hk, hv = map(heddle_layout, (q, k, v))
    folded = q.reshape(B, Hkv, H // Hkv, D)
    return {
        "heddle": lambda: heddle.attention(hq, hk, hv).transpose(1, 2),
        "torch enable_gqa": lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        "torch folded": lambda: F.scaled_dot_product_attention(folded, k, v),
    }, {"torch folded": lambda out: out.reshape(B, H, 1, D)}


def block_lists(rows, heads, block, entries):
    """[1, rows, heads, entries]: of each row the first block, the one before its own, its own, and others before it at random,
    ascending; -1 where there are no more."""
    generator = torch.Generator().manual_seed(9)
    own = torch.arange(rows)[:, None, None] // block
    drawn = torch.rand(rows, heads, -(-rows // block), generator=generator)
    block_index = torch.arange(drawn.shape[-1])
    forced = (block_index == 0) | (block_index == own) | (block_index == own - 1)
    drawn = torch.where(block_index > own, -1.0, torch.where(forced, 2.0, drawn))
    score, chosen = drawn.topk(min(entries, drawn.shape[-1]), dim=-1)
    chosen = torch.where(score < 0, drawn.shape[-1], chosen).sort(-1).values
    return torch.where(chosen == drawn.shape[-1], -1, chosen).to(torch.int32)[None]


def sparse(shape, dtype, backward):
    """Lists of key blocks; Heddle's and torch's dense causal attention beside it, which compute something else."""
    T, H, Hkv, D, block, entries = shape
    q, k, v, d_o = (random(1, n, T, D, dtype=DTYPES[dtype], seed=i) for i, n in enumerate((H, Hkv, Hkv, H)))
    hq, hk, hv, hd_o = map(heddle_layout, (q, k, v, d_o))
    lists = block_lists(T, Hkv, block, entries)
    ours = lambda: heddle.sparse_attention(hq, hk, hv, lists, block_size=block, causal="top_left")  # noqa: E731
    own = lambda: heddle.attention(hq, hk, hv, causal="top_left")  # noqa: E731
    theirs = lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)  # noqa: E731
    if not backward:
        return {"heddle": ours, "heddle dense": own, "torch dense": theirs}, {}
    for x in (q, k, v, hq, hk, hv):
        x.requires_grad_(True)
    out, dense_out, torch_out = ours(), own(), theirs()
    return {
        "heddle": lambda: torch.autograd.grad(out, (hq, hk, hv), hd_o, retain_graph=True)[0],
        "heddle dense": lambda: torch.autograd.grad(dense_out, (hq, hk, hv), hd_o, retain_graph=True)[0],
        "torch dense": lambda: torch.autograd.grad(torch_out, (q, k, v), d_o, retain_graph=True)[0],
    }, {}


def masked(shape, dtype, backward):
    """What sparse() computes: attention under the mask that says the same."""
    T, H, Hkv, D, block, entries = shape
    q, k, v, d_o = (
        heddle_layout(random(1, n, T, D, dtype=DTYPES[dtype], seed=i)) for i, n in enumerate((H, Hkv, Hkv, H))
    )
    lists = block_lists(T, Hkv, block, entries)[0].permute(1, 0, 2).long()
    blocks = -(-T // block)
    lists = torch.where(lists < 0, blocks, lists)
    open_blocks = torch.zeros(Hkv, T, blocks + 1, dtype=torch.bool).scatter_(2, lists, True)[..., :-1]
    mask = open_blocks.repeat_interleave(H // Hkv, 0).repeat_interleave(block, 2)[None, ..., :T]
    if not backward:
        return lambda: heddle.attention(q, k, v, mask=mask, causal="top_left")
    for x in (q, k, v):
        x.requires_grad_(True)
    out = heddle.attention(q, k, v, mask=mask, causal="top_left")
    return lambda: torch.autograd.grad(out, (q, k, v), d_o)[0]


# Rows whose gradients the naive functions are asked for, the last ones: all do not fit into memory.
NAIVE_ROWS = 256


def nsa_operands(shape, dtype, requires_grad):
    """q, k, v and two gates of native sparse attention without a window, and d_o."""
    T, H, Hkv, D, _, _ = shape
    q, k, v, d_o = (random(1, T, n, D, dtype=DTYPES[dtype], seed=i) for i, n in enumerate((H, Hkv, Hkv, H)))
    gates = (torch.sigmoid(random(1, T, H, dtype=DTYPES[dtype], seed=i)) for i in (4, 5))
    return [x.requires_grad_(requires_grad) for x in (q, k, v, *gates)], d_o


def nsa(shape, dtype, backward):
    """Native sparse attention, all of it but a window; Heddle's and torch's dense causal attention beside it."""
    *_, block, entries = shape
    operands, d_o = nsa_operands(shape, dtype, backward)
    q, k, v = operands[:3]
    ours = lambda: heddle.nsa.parallel_nsa(*operands, None, None, entries, block)  # noqa: E731
    own = lambda: heddle.attention(q, k, v, causal="top_left")  # noqa: E731
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    theirs = lambda: F.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True).transpose(1, 2)  # noqa: E731
    if not backward:
        return {"heddle": ours, "heddle dense": own, "torch dense": theirs}, {}
    out, dense_out, torch_out = ours(), own(), theirs()
    return {
        "heddle": lambda: torch.autograd.grad(out, operands, d_o, retain_graph=True)[0],
        "heddle dense": lambda: torch.autograd.grad(dense_out, (q, k, v), d_o, retain_graph=True)[0],
        "torch dense": lambda: torch.autograd.grad(torch_out, (q, k, v), d_o, retain_graph=True)[0],
    }, {"heddle": lambda gradient: gradient[:, -NAIVE_ROWS:]}


def naive_nsa(shape, dtype, backward):
    """What nsa() computes, by the naive functions over the lists that it chose: which of two blocks of nearly the same score is
    listed is a matter of rounding."""
    *_, block, entries = shape
    (q, k, v, g_cmp, g_slc), d_o = nsa_operands(shape, dtype, backward)
    with torch.no_grad():
        k_pooled, v_pooled = (heddle.nsa.pool_keys(x, block) for x in (k, v))
        steps = {"key_offset": block - 1, "key_step": block}
        _, lse = heddle.attention(q, k_pooled, v_pooled, causal="top_left", return_lse=True, **steps)
        lists = heddle.nsa.select_blocks(q, k_pooled, entries, lse=lse, block_size=block)
    if backward:
        rows = slice(q.shape[1] - NAIVE_ROWS, None)
        last = [x[:, rows].detach().requires_grad_() for x in (q, g_cmp, g_slc)]
        o = heddle.nsa.naive_nsa(last[0], k, v, last[2], None, lists[:, rows], block_size=block)
        o = o + heddle.nsa.naive_nsa_compression(last[0], k, v, last[1], entries, block)[1]
        return lambda: torch.autograd.grad(o, last[0], d_o[:, rows])[0]
    with torch.no_grad():
        o = heddle.nsa.naive_nsa(q, k, v, g_slc, None, lists, block_size=block)
        o = o + heddle.nsa.naive_nsa_compression(q, k, v, g_cmp, entries, block)[1]
    return lambda: o


@dataclasses.dataclass
class Tolerated:
    """Operands of attention with a tolerance, and the tolerance."""

    q: torch.Tensor  # [1, T, H, D]
    k: torch.Tensor
    v: torch.Tensor
    tol: float

    def run(self, tol=None, heads=slice(None)):
        """out, lse, bound, and which blocks were replaced."""
        operands = [x[:, :, heads] for x in (self.q, self.k, self.v)]
        options = options_tuple(self.q, {})
        return torch.ops.heddle.adaptive_attention(*operands, self.tol if tol is None else tol, "refine", *options)

    def replaced(self, tol=None, heads=slice(None)):
        """The share of blocks that were replaced."""
        bits = self.run(tol, heads)[3]
        set_bits = sum((bits >> bit & 1).sum(dtype=torch.int64) for bit in range(8))
        blocks = -(-self.k.shape[1] // heddle._options.ADAPTIVE_KEYS)
        return set_bits.item() / (bits[..., 0].numel() * blocks)

    def allowed(self):
        """How far `out` may be from exact attention, of the largest exact value: tol beside rounding."""
        exact = heddle.attention(self.q, self.k, self.v).float()
        longest = self.v.float().norm(dim=-1).max()
        return (self.tol * longest / exact.abs().max()).item() + (1e-4 if self.q.dtype == torch.float32 else 0.04)


TOL = 1e-2  # of rows in which hardly a block can be replaced: the call's own default
STEPS = 12  # of the search for a tolerance


@functools.lru_cache(maxsize=1)
def tolerated(shape, dtype, replaced):
    """Random operands, and the tolerance at which about this share of the blocks is replaced.

    With 0 scores have a deviation of 1, of which TOL lets hardly any go. Else it is a quarter: rows that spread their mass evenly, as
    those are of which most can go. The tolerance is searched for on the first head; others are as it.
    """
    T, H, D = shape
    q, k, v = (heddle_layout(random(1, H, T, D, dtype=DTYPES[dtype], seed=i)) for i in range(3))
    if not replaced:
        return Tolerated(q, k, v, TOL)
    row = Tolerated(q / 4, k, v, TOL)
    low, high = 1e-5, 2.0
    for _ in range(STEPS):
        middle = (low * high) ** 0.5
        enough = row.replaced(middle, slice(0, 1)) >= replaced
        low, high = (low, middle) if enough else (middle, high)
    row.tol = high
    return row


def adaptive(shape, dtype, replaced):
    """Attention with a tolerance; Heddle's and torch's dense attention beside it."""
    row = tolerated(tuple(shape), dtype, replaced)
    heads_first = [x.transpose(1, 2).contiguous() for x in (row.q, row.k, row.v)]
    return {
        "heddle": lambda: heddle.adaptive_attention(row.q, row.k, row.v, row.tol)[0].transpose(1, 2),
        "heddle dense": lambda: heddle.attention(row.q, row.k, row.v).transpose(1, 2),
        "torch dense": lambda: F.scaled_dot_product_attention(*heads_first),
    }, {}


class Sgemm:
    """OpenBLAS' sgemm, n x n x n, on `threads` threads."""

    def __init__(self, threads, n=2048):
        path = ctypes.util.find_library("openblas")
        if path is None:
            raise RuntimeError("OpenBLAS is not installed: apt-get install libopenblas0")
        self.library = ctypes.CDLL(path)
        self.library.openblas_get_corename.restype = ctypes.c_char_p
        self.core = self.library.openblas_get_corename().decode()
        self.library.openblas_set_num_threads(threads)
        self.n, self.flops = n, 2.0 * n**3
        self.a, self.b, self.c = (random(n, n, dtype=torch.float32, seed=i) for i in range(3))

    def __call__(self):
        row_major, no_transpose, n = 101, 111, self.n
        self.library.cblas_sgemm(
            row_major, no_transpose, no_transpose, n, n, n, ctypes.c_float(1.0), ctypes.c_void_p(self.a.data_ptr()), n,
            ctypes.c_void_p(self.b.data_ptr()), n, ctypes.c_float(0.0), ctypes.c_void_p(self.c.data_ptr()), n,
        )  # fmt: skip
        return self.c


def forward_flops(B, H, Sq, Sk, D, causal=False):
    pairs = Sq * (Sq + 1) / 2 if causal else Sq * Sk
    return 4.0 * B * H * pairs * D


def make_row(group, shape, dtype, threads):
    """The row of one shape of a group of shapes.json."""
    kind, causal = group["kind"], group.get("causal", False)
    backward, reference, more = group["pass"] == "backward", None, {}
    goal = group["goal"]
    if kind == "packed":
        H, D, lengths = shape
        name = f"H{H} D{D} {len(lengths)} documents of {min(lengths)}..{max(lengths)}"
        flops = sum(forward_flops(1, H, n, n, D) for n in lengths)
        calls = lambda: packed(shape, dtype)  # noqa: E731
    elif kind == "sparse":
        T, H, Hkv, D, block, entries = shape
        name = f"T{T} H{H}/{Hkv} D{D}, {entries} blocks of {block}"
        pairs = sum(min(t // block + 1, entries) * block for t in range(T))  # as they are multiplied
        flops = 4.0 * H * D * pairs * (2.5 if backward else 1.0)
        calls = lambda: sparse(shape, dtype, backward)  # noqa: E731
        reference = lambda: masked(shape, dtype, backward)  # noqa: E731
    elif kind == "nsa":
        T, H, Hkv, D, block, entries = shape
        name = f"T{T} H{H}/{Hkv} D{D}, {entries} blocks of {block}"
        pairs = sum(min(t // block + 1, entries) * block + (t + 1) // block for t in range(T))
        flops = 4.0 * H * D * pairs * (2.5 if backward else 1.0)
        calls = lambda: nsa(shape, dtype, backward)  # noqa: E731
        reference = lambda: naive_nsa(shape, dtype, backward)  # noqa: E731
    elif kind == "adaptive":
        T, H, D = shape
        name = f"T{T} H{H} D{D}"
        flops = forward_flops(1, H, T, T, D)  # as if nothing were replaced
        replaced = group["replaced"]
        calls = lambda: adaptive(shape, dtype, replaced)  # noqa: E731
        row = lambda: tolerated(tuple(shape), dtype, replaced)  # noqa: E731
        more = {
            "limit": lambda: row().allowed(),
            "notes": lambda: {"tol": row().tol, "replaced": row().replaced()},
        }
    elif kind == "decode":
        B, H, Hkv, Sk, D = shape
        name = f"B{B} H{H}/{Hkv} Sk{Sk} D{D}"
        flops = forward_flops(B, H, 1, Sk, D)
        calls = lambda: decode(shape, dtype)  # noqa: E731
    else:
        B, H, S, D = shape
        name = f"B{B} H{H} S{S} D{D}"
        flops = forward_flops(B, H, S, S, D, causal) * (2.5 if backward else 1.0)
        goal = goal[str(S)] if isinstance(goal, dict) else goal
        if kind == "sgemm":
            calls = lambda: ({"heddle": dense(shape, dtype, causal, False)["heddle"], "sgemm": Sgemm(threads)}, {})  # noqa: E731
            reference = lambda: dense(shape, dtype, causal, False)["torch"]  # noqa: E731
        else:
            calls = lambda: (dense(shape, dtype, causal, backward), {})  # noqa: E731
    of_kind = {"sparse": sources.CPU_SPARSE, "nsa": sources.CPU_NSA, "adaptive": sources.CPU_ADAPTIVE}
    return Row(group["name"], f"{group['name']} {name} {dtype}", dtype, flops, goal, shape, calls, reference,
               kind == "sgemm", group.get("rival"), of_kind.get(kind, sources.CPU_ATTENTION), **more)  # fmt: skip
