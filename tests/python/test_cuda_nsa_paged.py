"""Native sparse attention over a cache in pages on a GPU: what it gives over rows of its own."""

import heddle
import pytest
import torch
from heddle import _heddle, nsa

if not torch.cuda.is_available():
    pytest.skip("torch sees no GPU here", allow_module_level=True)
if not _heddle.cuda_built():
    pytest.skip("this build of heddle has no GPU kernels", allow_module_level=True)

BLOCK, SLOTS, WINDOW = 64, 4, 96
CHUNKS = [300, 1, 1, 40, 1, 150, 1]
FORMS = {"own blocks": {}, "overlapping": {"block": 64, "stride": 32}, "small": {"block": 32, "stride": 32}}
HEADS = {"16": (32, 2), "4": (8, 2), "5": (10, 2), "1": (2, 2)}


def operands(batch, rows, heads, kv_heads, size, dtype, seed=0):
    make = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=make, device="cuda").to(dtype)

    q = normal(batch, rows, heads, size)
    k, v = normal(batch, rows, kv_heads, size), normal(batch, rows, kv_heads, size)
    gates = [torch.sigmoid(torch.randn(batch, rows, heads, generator=make, device="cuda")) for _ in range(3)]
    return (q, k, v, *gates)


def caches(x, page_size, form, spare=5):
    q, k = x[:2]
    batch, capacity = len(q), -(-k.shape[1] // page_size) * page_size
    made = {"block": BLOCK, "dtype": q.dtype, "device": "cuda", **form}
    plain = nsa.Cache(batch, capacity, k.shape[2], k.shape[3], **made)
    each = capacity // page_size
    paged = nsa.Cache(batch, capacity, k.shape[2], k.shape[3], page_size=page_size, pages=batch * each + spare, **made)
    places = torch.randperm(batch * each + spare, generator=torch.Generator().manual_seed(1)).cuda()
    paged.page_table.copy_(places[: batch * each].view(batch, each))
    for part in (paged.k, paged.v, paged.k_pooled, paged.v_pooled):
        part[places[batch * each :]] = float("nan")
    return plain, paged


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("page_size", [64, 128, 320])
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_pages_give_what_rows_give(heads, page_size, form, dtype):
    x = operands(3, sum(CHUNKS), *heads, 128, dtype)
    plain, paged = caches(x, page_size, form)
    begin = 0
    for n in CHUNKS:
        part = [y[:, begin : begin + n] for y in x]
        expected, found = (
            nsa.nsa_with_cache(*part[:3], cache, *part[3:], SLOTS, BLOCK, WINDOW).float() for cache in (plain, paged)
        )
        # Kernels may differ: a step over rows of its own is one launch on Hopper.
        assert (found - expected).norm() <= 0.02 * expected.norm(), begin
        rows = (found - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=0.1 * expected.norm(dim=-1).mean())
        assert not (rows.max() > 0.1), (begin, rows.max())
        begin += n
    table = paged.page_table.long()
    for part in ("k", "v", "k_pooled", "v_pooled"):
        rows = getattr(plain, part)
        assert torch.equal(getattr(paged, part)[table].flatten(1, 2)[:, : rows.shape[1]], rows), part


@pytest.mark.parametrize("group", [1, 4, 16])
@pytest.mark.parametrize("rows", [1, 5, 200])
def test_the_kernels_over_pages(rows, group):
    """Lists, their attention and pooled keys have the bits that they have without pages, where the same kernels run."""
    x = operands(2, 1024, 2 * group, 2, 128, torch.bfloat16)
    q, k, v = x[0][:, -rows:], x[1], x[2]
    table = torch.randperm(2 * 8 + 3, generator=torch.Generator().manual_seed(2))[:16].view(2, 8).int().cuda()
    used = torch.tensor([1024, 900], dtype=torch.int32, device="cuda")

    def in_pages(y):
        out = torch.full((19, 128, 2, 128), float("nan"), dtype=y.dtype, device="cuda")
        out[table.long().flatten()] = y.reshape(16, 128, 2, 128)
        return out

    k_pages, v_pages = in_pages(k), in_pages(v)
    pooled, plain = (torch.zeros(*shape, 2, 128, dtype=k.dtype, device="cuda") for shape in ((19, 2), (2, 16)))
    nsa.extend_pooled_keys(k_pages, pooled, 64, 64, seqused=used, appended=1024, page_table=table)
    nsa.extend_pooled_keys(k, plain, 64, 64, seqused=used, appended=1024)
    assert torch.equal(pooled[table.long()].flatten(1, 2)[0], plain[0])
    assert torch.equal(pooled[table.long()].flatten(1, 2)[1, :14], plain[1, :14])
    how = dict(block_size=64, q_offset=used - rows, seqused_k=used // 64)
    lists = nsa.select_blocks(q, pooled, 4, page_table=table, **how)
    assert torch.equal(lists, nsa.select_blocks(q, plain, 4, **how))
    of_lists = dict(block_size=64, causal="bottom_right", seqused_k=used, return_lse=True)
    found = heddle.sparse_attention(q, k_pages, v_pages, lists, page_table=table, **of_lists)
    expected = heddle.sparse_attention(q, k, v, lists, **of_lists)
    for a, b in zip(found, expected):
        assert (a.float() - b.float()).norm() <= 0.01 * b.float().norm()


def test_pages_that_cut_blocks_are_refused():
    x = operands(1, 256, 4, 2, 64, torch.bfloat16)
    table = torch.arange(8, dtype=torch.int32, device="cuda")[None]
    lists = torch.zeros(1, 256, 2, 2, dtype=torch.int32, device="cuda")
    k, v = (y.view(8, 32, 2, 64) for y in x[1:3])
    with pytest.raises(ValueError, match="pages must hold whole blocks of 64 keys, not 32 keys"):
        heddle.sparse_attention(x[0], k, v, lists, block_size=64, causal="top_left", page_table=table)


def test_pages_out_of_range_do_no_harm():
    """Index data on a GPU is clamped: results mean nothing, and nothing is read or written outside."""
    x = operands(2, 192, 8, 2, 64, torch.bfloat16)
    for value in (-1, 7, 2**31 - 1, -(2**31)):
        cache = nsa.Cache(2, 256, 2, 64, block=64, page_size=64, pages=6, dtype=torch.bfloat16, device="cuda")
        cache.page_table.fill_(value)
        nsa.nsa_with_cache(*x[:3], cache, *x[3:], SLOTS, BLOCK, WINDOW)
        one = [y[:, :1] for y in x]
        nsa.nsa_with_cache(*one[:3], cache, *one[3:], SLOTS, BLOCK, WINDOW)
    torch.cuda.synchronize()
