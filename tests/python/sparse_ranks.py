"""Runs attention over lists of blocks, and native sparse attention, over processes: what test_distributed_sparse.py asks.

usage: sparse_ranks.py RESULTS.json
"""

import sys
from dataclasses import dataclass, field
from types import SimpleNamespace

import distributed_ranks
import heddle
import heddle.distributed as hd
import heddle.nsa
import torch
from distributed_ranks import DEVICE, SECONDS, gradients, plain
from heddle.patterns import pack_masks
from ranks_kit import Counted
from sdpa_ranks import close
from sparse_kit import csr

HEADS, KV_HEADS, SIZE, SIZE_V = 4, 2, 16, 24


@dataclass
class Case:
    """Lists of one problem: of units heads each, of n random blocks, some of them none."""

    name: str
    rows: int
    order: str = "zigzag"
    causal: str = "top_left"
    window: tuple = (-1, -1)
    batch: int = 1
    units: int = KV_HEADS
    n: int = 3
    query_rows: int = 1
    masks: int = 0
    counts: bool = False
    csr: bool = False
    sink: bool = False
    dtype: torch.dtype = torch.float32
    options: dict = field(default_factory=dict)


BLOCK = 16


def cases():
    return [
        Case("zigzag_window_sink", 101, window=(40, 0), sink=True),
        Case("striped_bfloat16", 90, order="striped", batch=2, units=HEADS, dtype=torch.bfloat16),
        Case("balanced_counts", 77, order="balanced", units=1, counts=True, options=dict(scale=0.4)),
        Case("csr_sink", 83, causal="none", batch=2, csr=True, sink=True),
        Case("shared_masks", 192, order="contiguous", query_rows=16, masks=5, batch=2),
        Case("no_lists", 50, n=0),
        Case("fewer_rows_than_ranks", 1, sink=True),
    ]


def met(case, blocks, counts, masks, mask_ids):
    """[B, H, S, S], by the definitions; of entries that name the same block the first counts."""
    row, key = torch.arange(case.rows)[:, None], torch.arange(case.rows)[None, :]
    inside = torch.ones(case.rows, case.rows, dtype=torch.bool)
    if case.causal != "none":
        inside &= key <= row
    if case.window[0] >= 0:
        inside &= row - key <= case.window[0]
    out = torch.zeros(case.batch, case.units, case.rows, case.rows, dtype=torch.bool)
    for b in range(case.batch):
        for i in range(case.rows):
            for unit in range(case.units):
                entries = blocks[b, i // case.query_rows, unit].tolist()
                if counts is not None:
                    entries = entries[: counts[b, i // case.query_rows, unit]]
                for n, c in enumerate(entries):
                    if c < 0 or c in entries[:n]:
                        continue
                    at = slice(c * BLOCK, min((c + 1) * BLOCK, case.rows))
                    tile = torch.ones(BLOCK, dtype=torch.bool)
                    if mask_ids is not None and (m := mask_ids[b, i // case.query_rows, unit, n]) >= 0:
                        tile = masks[m, i % case.query_rows]
                    out[b, unit, i, at] = tile[: at.stop - at.start] if c * BLOCK < case.rows else False
    return inside & out.repeat_interleave(HEADS // case.units, 1)


def check_lists(case, rank, ranks):
    torch.manual_seed(6)
    shapes = ((HEADS, SIZE), (KV_HEADS, SIZE), (KV_HEADS, SIZE_V), (HEADS, SIZE_V))
    *tensors, d_o = (torch.randn(case.batch, case.rows, *shape).to(case.dtype) for shape in shapes)
    tensors = [x.requires_grad_() for x in tensors]
    sink = torch.randn(HEADS, requires_grad=True) if case.sink else None
    d_lse = torch.randn(case.batch, HEADS, case.rows)
    number = -(-case.rows // case.query_rows)
    shape = (case.batch, number, case.units, case.n)
    blocks = torch.randint(-1, -(-case.rows // BLOCK), shape, dtype=torch.int32)
    counts = torch.randint(case.n + 1, shape[:3], dtype=torch.int32) if case.counts or case.csr else None
    tiles = torch.rand(case.masks, case.query_rows, BLOCK) < 0.5
    mask_ids = torch.randint(-1, case.masks, shape, dtype=torch.int32) if case.masks else None
    pool = pack_masks(tiles) if case.masks else None

    exact_of = [None if x is None else x.detach().double().requires_grad_() for x in (*tensors, sink)]
    like = SimpleNamespace(heads=(HEADS, KV_HEADS), sizes=(SIZE, SIZE_V), rows=case.rows, options=case.options)
    exact = plain(like, met(case, blocks, counts, tiles, mask_ids), *exact_of, None)
    exact += gradients(*exact, d_o, d_lse, exact_of)
    options = dict(block_size=BLOCK, query_rows=case.query_rows, **case.options)
    one = heddle.sparse_attention(
        *tensors, blocks, counts, masks=pool, mask_ids=mask_ids, sink=sink, causal=case.causal, window=case.window,
        return_lse=True, **options,
    )  # fmt: skip
    one += gradients(*one, d_o, d_lse, (*tensors, sink))

    plan = hd.plan(
        case.rows, ranks, heads=HEADS, kv_heads=KV_HEADS, head_size=SIZE, causal=case.causal, window=case.window,
        order=case.order,
    )  # fmt: skip
    own = plan.rows_of_rank(rank)
    of_own = own[:: case.query_rows] // case.query_rows
    mine = [hd.shard(x.detach(), plan, rank).requires_grad_() for x in tensors]
    lists = [None if x is None else x[:, of_own] for x in (blocks, counts, mask_ids)]
    given = dict(counts=lists[1], mask_ids=lists[2], masks=pool)
    if case.csr:
        lists[0], offsets = csr(lists[0], lists[1])
        given = dict(offsets=offsets)
    runs = []
    for _ in range(2):
        of_sink = None if sink is None else sink.detach().clone().requires_grad_()
        out, lse = hd.sparse_attention(
            *mine, lists[0], plan=plan, sink=of_sink, return_lse=True, timeout=SECONDS, **given, **options
        )
        runs.append((out, lse, *gradients(out, lse, d_o[:, own], d_lse[..., own], (*mine, of_sink))))
    assert all(torch.equal(a, b) for a, b in zip(*runs)), "two runs differ"
    found = runs[0]
    if DEVICE == "cpu":
        assert torch.equal(out, one[0][:, own]) and torch.equal(lse, one[1][..., own]), "not the bits of one process"
    elif len(own) > 0:  # where another kernel may take another number of lists
        close("out", out, exact[0][:, own], one[0][:, own])
        there = ~exact[1][..., own].isinf()
        assert torch.equal(~lse.isinf(), there)
        if there.any():
            close("lse", *(x[there] for x in (lse, exact[1][..., own], one[1][..., own])))
    for n, name in enumerate(("dq", "dk", "dv", "dsink")[: len(found) - 2], 2):
        at = (lambda x: x) if n == 5 else lambda x: x[:, own]
        if found[n].numel() > 0:
            close(name, found[n], at(exact[n]), at(one[n]))


def check_what_is_sent(rank, ranks):
    """Rows that list blocks of their own rank send what lists name, a byte a block; one block of another rank costs its keys."""
    rows = 32 * ranks
    plan = hd.plan(rows, ranks, heads=HEADS, head_size=SIZE, order="contiguous")
    x = torch.randn(1, plan.rows_of(rank), HEADS, SIZE)
    blocks = (plan.rows_of_rank(rank) // BLOCK).int().view(1, -1, 1, 1).repeat(1, 1, 1, 2)
    counts = torch.full(blocks.shape[:3], 2, dtype=torch.int32)
    for far, there in ((False, 2), (True, 2), (True, 1)):
        if far and rank == 1:
            blocks[0, 7, 0, 1] = 0
            counts[0, 7] = there  # or else behind the end of its list
        with Counted() as counted:
            hd.sparse_attention(x, x, x, blocks, counts, plan=plan, block_size=BLOCK, timeout=SECONDS)
        keys = BLOCK * HEADS * 2 * SIZE * 4 if far and there == 2 and rank == 0 else 0
        assert counted.sent == (ranks - 1) * rows // BLOCK + keys, (far, there, counted.sent)


#: Rows, order, window, gates, dtype, options.
NSA = {
    "zigzag": (101, "zigzag", 20, (0, 1, 2), torch.float32, {}),
    "striped": (70, "striped", 3, (0, 1, 2), torch.float32, dict(forced=("current",))),
    "contiguous_bfloat16": (96, "contiguous", 40, (0, 1, 2), torch.bfloat16, dict(scale=0.3)),
    "no_compressed_branch": (90, "balanced", 0, (1,), torch.float32, {}),
    "lists_from_outside": (75, "zigzag", 7, (1, 2), torch.float32, dict(block_indices=True)),
    "less_than_a_block": (9, "zigzag", 4, (0, 1, 2), torch.float32, {}),
    "fewer_rows_than_ranks": (1, "zigzag", 4, (0, 1, 2), torch.float32, {}),
}


def check_nsa(name, rank, ranks):
    rows, order, window, gates, dtype, given = NSA[name]
    torch.manual_seed(7)
    batch, dtype = 2, dtype if DEVICE == "cpu" else torch.bfloat16
    shapes = ((HEADS, SIZE), (KV_HEADS, SIZE), (KV_HEADS, SIZE_V), (HEADS, SIZE_V))
    *tensors, d_out = (torch.randn(batch, rows, *shape).to(dtype) for shape in shapes)
    tensors += [torch.rand(batch, rows, HEADS) for _ in gates]
    given = dict(given)
    if given.pop("block_indices", False):
        given["block_indices"] = torch.randint(-1, -(-rows // BLOCK), (batch, rows, KV_HEADS, 3))
    options = dict(block_counts=3, block_size=BLOCK, window_size=window, **given)

    def results(call, tensors, cotangent, **options):
        tensors = [x.detach().clone().requires_grad_() for x in tensors]
        of_gates = [None] * 3
        for place, gate in zip(gates, tensors[3:]):
            of_gates[place] = gate
        out = call(*tensors[:3], *of_gates, **options)
        return [out.detach(), *torch.autograd.grad(out, tensors, cotangent)]

    def naive(q, k, v, g_cmp, g_slc, g_swa, block_indices=None, **options):
        if block_indices is not None:
            return heddle.nsa.naive_nsa(q, k, v, g_slc, g_swa, block_indices, **options)
        g_cmp = torch.zeros_like(g_slc) if g_cmp is None else g_cmp
        return heddle.nsa.naive_nsa_with_compression(q, k, v, g_cmp, g_slc, g_swa, **options)

    right = results(naive, [x.double() for x in tensors], d_out.double(), **options)
    one = results(heddle.nsa.parallel_nsa, tensors, d_out, **options)
    plan = hd.plan(rows, ranks, heads=HEADS, kv_heads=KV_HEADS, head_size=SIZE, causal="top_left", order=order)
    if "block_indices" in options:
        options["block_indices"] = hd.shard(options["block_indices"], plan, rank)
    mine = [hd.shard(x, plan, rank) for x in tensors]
    found = results(hd.parallel_nsa, mine, hd.shard(d_out, plan, rank), plan=plan, timeout=SECONDS, **options)
    for n, x in enumerate(found):
        exactly, single = (hd.shard(whole[n], plan, rank) for whole in (right, one))
        assert x.dtype == single.dtype
        # Of one key the derivative of a score is nothing but the rounding of o, of 16 bits here and of 32 in one process.
        if x.numel() > 0 and not (DEVICE == "cuda" and rows == 1 and n in (1, 2)):
            close(f"{name} {n}", x, exactly, single)


def check_words(rank, ranks):
    """Refused on every rank, before anything is sent, or after they have compared."""
    contiguous, zigzag = (
        hd.plan(20 * ranks, ranks, heads=2, head_size=8, causal="top_left", order=order)
        for order in ("contiguous", "zigzag")
    )
    x = torch.zeros(1, 20, 2, 8)
    for plan, rows, options, text in (
        (contiguous, 2, dict(query_rows=16), "query_rows is 16 and rank 0 has rows 0 to 19 by steps of 1, which cuts list 1, of rows 16 to 31"),
        (zigzag, 20, dict(scale=1.0 + rank), "ranks do not agree: scale is 1.0 on rank 0 and 2.0 on rank 1"),
    ):  # fmt: skip
        try:
            hd.sparse_attention(
                x, x, x, torch.zeros(1, rows, 1, 1).int(), plan=plan, block_size=16, timeout=SECONDS, **options
            )
        except ValueError as error:
            assert str(error).startswith(f"[distributed.sparse_attention] {text}"), error
        else:
            raise AssertionError("nothing was said")


def worlds():
    of_cases = {case.name: (check_lists, (case,)) for case in cases()}
    of_cases |= {f"nsa_{name}": (check_nsa, (name,)) for name in NSA}
    of_cases |= {"what_is_sent": (check_what_is_sent, ()), "words": (check_words, ())}
    page = (distributed_ranks.check_page, ("## Lists of key blocks",))
    return {"2": (2, of_cases), "3": (3, of_cases), "page": (2, {"page": page})}


if __name__ == "__main__":
    import torch._dynamo  # before processes are forked, none of which then waits for it

    distributed_ranks.main(sys.argv[1], worlds())
