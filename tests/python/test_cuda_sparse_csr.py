"""Lists one behind the other on a GPU: what lists of one length give, whatever the offsets say, and as they stand when a
graph runs."""

import random

import heddle
import pytest
import torch
from cuda_nsa_kit import LIMITS, assert_near, wide
from heddle import _heddle
from sparse_kit import csr

if not torch.cuda.is_available():
    pytest.skip("torch sees no GPU here", allow_module_level=True)
if not _heddle.cuda_built():
    pytest.skip("this build of heddle has no GPU kernels", allow_module_level=True)

SEEDS = range(48)
#: query heads of a kv head, query_rows
WAYS = {"by keys": (4, 1), "by keys, groups of 1": (1, 1), "by keys, groups of 12": (12, 1), "by rows": (8, 8)}


def operands(rows, keys, heads, group, size, dtype=torch.bfloat16, batch=1, seed=0):
    make = torch.Generator("cuda").manual_seed(seed)
    shapes = (rows, heads * group), (keys, heads), (keys, heads)
    return [torch.randn(batch, *x, size, generator=make, device="cuda").to(dtype).requires_grad_() for x in shapes]


def drawn_lists(batch, rows, units, slots, blocks, seed=0):
    """Some entries name no block, some twice; counts from 0 on."""
    make = torch.Generator("cuda").manual_seed(seed)
    draw = lambda end, *shape: torch.randint(0, end, shape, generator=make, device="cuda").int()  # noqa: E731
    return draw(blocks + 2, batch, rows, units, slots) - 1, draw(slots + 1, batch, rows, units)


def gradients(out, x, seed=9):
    d_o = torch.randn(out.shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(out)
    return torch.autograd.grad(out, x, d_o)


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("block_size", [16, 64, 128])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_same_bits_as_lists_of_one_length(way, block_size, dtype):
    group, query_rows = way
    x = operands(300, 1000, 2, group, 128 if block_size == 64 else 40, dtype, batch=2)
    blocks, counts = drawn_lists(2, -(-300 // query_rows), 2, 9, -(-1000 // block_size))
    entries, offsets = csr(blocks, counts)
    # Neighbours together, which Hopper's own candidate takes lists of one length, have other bits.
    given = dict(block_size=block_size, query_rows=query_rows, causal="bottom_right", force="sm80", return_lse=True)
    expected, lse = heddle.sparse_attention(*x, blocks, counts, **given)
    found, found_lse = heddle.sparse_attention(*x, entries, offsets=offsets, **given)
    assert torch.equal(found, expected) and torch.equal(found_lse, lse)
    wanted = gradients(expected, x)
    for _ in range(2):  # of a forward of its own: the graph is gone
        found = heddle.sparse_attention(*x, entries, offsets=offsets, **given)[0]
        for name, one, other in zip("qkv", gradients(found, x), wanted):
            assert torch.equal(one, other), name


@pytest.mark.parametrize("packed", [False, True], ids=["batched", "packed"])
@pytest.mark.parametrize("seed", SEEDS)
def test_any_offsets(seed, packed):
    """Lists that overlap, fall, or lead out of the entries, against the CPU in float32."""
    draw, make = random.Random(seed), torch.Generator().manual_seed(seed)
    dtype, block_size = draw.choice(list(LIMITS)), draw.choice([16, 32, 64, 128])
    heads, group, query_rows = draw.choice([1, 2]), draw.randint(1, 16), draw.choice([1, 1, 1, 2, 9])
    units = draw.choice([1, heads, heads * group])
    options = dict(causal=draw.choice(["none", "bottom_right"]), window=draw.choice([(-1, -1), (100, 50)]))
    lengths = [draw.choice([0, 1, draw.randint(1, 200)]) for _ in range(3)]
    if packed:
        lengths[draw.randrange(3)] = 60
        rows = sum(lengths)
        cu = torch.tensor([0, *lengths]).cumsum(0).int()
        options |= dict(max_seqlen_q=max(lengths), max_seqlen_k=max(lengths))
        lists, batch = rows if query_rows == 1 else rows // query_rows + 3, 1
        shape = (units, lists + 1)
    else:
        rows, batch = draw.randint(1, 250), draw.choice([1, 2])
        lists = -(-rows // query_rows)
        shape = (batch, units, lists + 1)
    longest = max(lengths) if packed else rows
    entries = draw.choice([0, 1, 40, 3000])
    blocks = torch.randint(-2, -(-longest // block_size) + 3, (entries,), generator=make, dtype=torch.int32)
    wild = torch.tensor([-(2**31), -1, 2**31 - 1, 10**9], dtype=torch.int32)
    where = torch.randint(0, 9, blocks.shape, generator=make) == 0
    blocks = torch.where(where, wild[torch.randint(0, 4, blocks.shape, generator=make)], blocks)
    offsets = torch.randint(-20, entries + 20, shape, generator=make, dtype=torch.int32)
    if draw.random() < 0.5:  # one behind the other, as they should be
        offsets = offsets.flatten().sort().values.view(shape)
    elif draw.random() < 0.3:
        offsets[..., 1::2] = wild[2]
    x = [
        torch.randn(*((rows,) if packed else (batch, rows)), h, 8 * draw.randint(1, 16), generator=make)
        for h in (heads * group, heads, heads)
    ]
    x[1] = torch.randn(*x[1].shape[:-1], x[0].shape[-1], generator=make)
    x = [y.to("cuda", dtype).requires_grad_() for y in x]
    given = dict(block_size=block_size, query_rows=query_rows, **options)

    def on(device):
        at = dict(cu_seqlens_q=cu.to(device), cu_seqlens_k=cu.to(device)) if packed else {}
        return dict(offsets=offsets.to(device), **at, **given)

    def expected(q, k, v):
        q, k, v = (y.float().cpu() for y in (q, k, v))
        return heddle.sparse_attention(q, k, v, blocks, **on("cpu")).double().cuda()

    out, doubles = heddle.sparse_attention(*x, blocks.cuda(), **on("cuda")), wide(x)
    exact = expected(*doubles)
    assert out.is_cuda and out.dtype == dtype
    assert_near("o", out, exact, LIMITS[dtype])
    d_o = torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).to(out)
    for name, one, other in zip(
        "qkv", torch.autograd.grad(out, x, d_o), torch.autograd.grad(exact, doubles, d_o.double())
    ):
        assert_near("gradient of " + name, one, other, 3 * LIMITS[dtype])


def test_a_list_of_more_blocks_than_one_length_takes():
    """By rows and by keys: 1500 blocks, each twice, one list among empty ones."""
    for group, query_rows in ((8, 8), (4, 1)):
        rows, blocks = 160, 1500
        x = operands(rows, 16 * blocks, 1, group, 64)
        entries = torch.randperm(blocks, generator=torch.Generator().manual_seed(3)).int().cuda()
        lists, mine = rows // query_rows, 11
        offsets = torch.zeros(1, 1, lists + 1, dtype=torch.int32, device="cuda")
        offsets[..., mine + 1 :] = 2 * blocks
        out = heddle.sparse_attention(
            *x, torch.cat([entries, entries]), offsets=offsets, block_size=16, query_rows=query_rows
        )
        found = gradients(out, x)
        here = slice(mine * query_rows, (mine + 1) * query_rows)
        dense = heddle.attention(x[0][:, here], *x[1:])
        assert_near("o", out[:, here], dense, 2 * LIMITS[torch.bfloat16])
        assert out[:, : here.start].abs().max() == 0 and out[:, here.stop :].abs().max() == 0
        d_o = torch.randn(out.shape, generator=torch.Generator("cuda").manual_seed(9), device="cuda").to(out)
        for name, one, other in zip("qkv", found, torch.autograd.grad(dense, x, d_o[:, here])):
            assert_near(name, one, other, 4 * LIMITS[torch.bfloat16])


def test_many_rounds():
    """More pairs than have partial results at a time: four rounds forward, two backward."""
    rows, heads, group, slots, block_size = 12288, 4, 16, 16, 64
    x = operands(rows, rows, heads, group, 128)
    current = torch.arange(rows, device="cuda")[None, :, None, None] // block_size
    make = torch.Generator("cuda").manual_seed(1)
    blocks = (torch.rand(1, rows, heads, slots, generator=make, device="cuda") * (current + 1)).int()
    entries, offsets = csr(blocks, None)
    given = dict(block_size=block_size, causal="top_left", force="sm80", return_lse=True)
    expected, lse = heddle.sparse_attention(*x, blocks, **given)
    wanted, all_found = gradients(expected, x), []
    for _ in range(3):
        found, found_lse = heddle.sparse_attention(*x, entries, offsets=offsets, **given)
        assert torch.equal(found, expected) and torch.equal(found_lse, lse)
        all_found.append(gradients(found, x))
        assert all(map(torch.equal, all_found[-1], all_found[0]))
    assert torch.equal(all_found[0][0], wanted[0])
    # Rounds begin with other lists than those of lists of one length, and so sums over rows have another order.
    assert_near("dk", all_found[0][1], wanted[1], 2e-3)
    assert_near("dv", all_found[0][2], wanted[2], 2e-3)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_graph_reads_lengths_when_it_runs(way):
    group, query_rows = way
    x = operands(256, 800, 2, group, 64)
    lists = 256 // query_rows
    given = dict(block_size=32, query_rows=query_rows, causal="bottom_right")
    variants = [csr(*drawn_lists(1, lists, 2, 12, 25, seed)) for seed in (1, 2, 3)]
    longest = max(len(entries) for entries, _ in variants)
    entries = torch.full((longest,), -1, dtype=torch.int32, device="cuda")
    offsets = torch.zeros_like(variants[0][1])
    d_o = torch.randn(1, 256, 2 * group, 64, device="cuda").bfloat16()

    def call():
        out = heddle.sparse_attention(*x, entries, offsets=offsets, **given)
        return out, *torch.autograd.grad(out, x, d_o)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # what is loaded and allocated first
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    for new_entries, new_offsets in variants:
        entries[: len(new_entries)] = new_entries
        offsets.copy_(new_offsets)
        graph.replay()
        found = [y.clone() for y in captured]
        for name, one, other in zip(("o", "q", "k", "v"), found, call()):
            assert torch.equal(one, other), name
        assert found[0].abs().max() > 0
