"""Native sparse attention over a cache in pages: what it gives over rows of its own, bit for bit."""

import pytest
from heddle import nn, sparse_attention
from nsa_kit import MODES, nsa, one_thread, operands, torch  # noqa: F401  one_thread is a fixture

SIZE, SLOTS, WINDOW = 16, 3, 9
CHUNKS = [37, 1, 1, 20, 1, 16]
SHARING = {"plain": {}, **{name: dict(query_stride=3, **mode) for name, mode in MODES.items()}}
FORMS = {"own blocks": {}, "overlapping": {"block": 32, "stride": 8}, "small": {"block": 8, "stride": 4}}


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def caches(x, page_size, sharing, form, spare=3, dtype=torch.float32):
    """One with rows of its own, and one in pages that lie anyhow among others, which hold NaN."""
    q, k, v = x[:3]
    batch, capacity = len(q), -(-k.shape[1] // page_size) * page_size
    made = {"block": SIZE, "query_heads": q.shape[2], "block_counts": SLOTS, "dtype": dtype, **form, **sharing}
    sizes = k.shape[2], k.shape[3], v.shape[3]
    plain = nsa.Cache(batch, capacity, *sizes, **made)
    each = capacity // page_size
    paged = nsa.Cache(batch, capacity, *sizes, page_size=page_size, pages=batch * each + spare, **made)
    places = torch.randperm(batch * each + spare, generator=torch.Generator().manual_seed(1))
    paged.page_table.copy_(places[: batch * each].view(batch, each))
    for part in (paged.k, paged.v, paged.k_pooled, paged.v_pooled):
        part[places[batch * each :]] = float("nan")
    return plain, paged


def call(x, cache, begin, end, **options):
    part = [y[:, begin:end] for y in x]
    return nsa.nsa_with_cache(*part[:3], cache, *part[3:], SLOTS, SIZE, WINDOW, **options)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("strides", [1, 2, 5])
@pytest.mark.parametrize("sharing", SHARING.values(), ids=SHARING)
def test_pages_give_what_rows_give(sharing, strides, form):
    x = operands(sum(CHUNKS), batch=2, group=3, size=8, v_size=12, dtype=torch.float32)
    plain, paged = caches(x, strides * form.get("stride", SIZE), sharing, form)
    begin = 0
    for n in CHUNKS:
        expected, found = (call(x, cache, begin, begin + n) for cache in (plain, paged))
        assert torch.equal(found, expected), begin
        begin += n
    table = paged.page_table.long()
    for part in ("k", "v", "k_pooled", "v_pooled"):
        rows = getattr(plain, part)
        assert torch.equal(getattr(paged, part)[table].flatten(1, 2)[:, : rows.shape[1]], rows), part


def test_sequences_share_the_pages_of_a_prompt():
    x = operands(60, batch=2, group=2, size=8, v_size=8, dtype=torch.float32)
    x = tuple(torch.cat([y[:1, :32].expand(2, *y[:1, :32].shape[1:]), y[:, 32:]], 1) for y in x)  # the same first 32
    plain = nsa.Cache(2, 64, 2, 8, 8, block=SIZE)
    paged = nsa.Cache(2, 64, 2, 8, 8, block=SIZE, page_size=32, pages=3)
    paged.page_table.copy_(ints([1, 0], [1, 2]))
    prompt = nsa.Cache(1, 64, 2, 8, 8, block=SIZE, page_size=32, pages=3)
    for part in ("k", "v", "k_pooled", "v_pooled"):
        setattr(prompt, part, getattr(paged, part))
    prompt.page_table.copy_(ints([1, -1]))
    prompt.append(*(y[:1, :32] for y in x[1:3]))
    paged.lengths.fill_(32)
    call(x, plain, 0, 32)
    for begin in range(32, 60):
        assert torch.equal(call(x, paged, begin, begin + 1), call(x, plain, begin, begin + 1))


@pytest.mark.parametrize("cached", ["rows", "pages"])
@pytest.mark.parametrize("sharing", [{}, dict(query_stride=3, share="selection"), dict(query_stride=2, **MODES["all branches"])],
                         ids=["plain", "lists", "all"])  # fmt: skip
def test_lists_from_outside(sharing, cached):
    x = operands(70, batch=2, group=2, size=8, v_size=12, dtype=torch.float32)
    make = torch.Generator().manual_seed(3)
    lists = torch.randint(-1, 6, (2, 70, 2, 4), generator=make)
    counts = torch.randint(0, 5, (2, 70, 2), generator=make)
    expected = nsa.parallel_nsa(*x, lists, counts, SIZE, WINDOW, **sharing)
    made = {"block": SIZE, "query_heads": 4, "block_counts": 4, **sharing}
    cache = nsa.Cache(2, 80, 2, 8, 12, **made, **({"page_size": 16, "pages": 10} if cached == "pages" else {}))
    if cached == "pages":
        cache.page_table.copy_(torch.arange(10).view(2, 5))
    begin = 0
    for n in (40, 1, 28, 1):
        part, some = [y[:, begin : begin + n] for y in x], slice(begin, begin + n)
        found = nsa.nsa_with_cache(
            *part[:3], cache, *part[3:], counts[:, some], SIZE, WINDOW, block_indices=lists[:, some]
        )
        assert (found - expected[:, some]).norm() <= 2e-6 * expected[:, some].norm()
        begin += n


def test_the_kernels_over_pages():
    make = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 96, heads, 16, generator=make) for heads in (4, 2, 2))
    table, used = ints([3, 0, 4], [5, 1, 2]), ints(96, 70)
    in_pages = torch.empty(6, 32, 2, 16)
    in_pages[table.long().flatten()] = k.reshape(6, 32, 2, 16)
    pooled, expected = torch.zeros(6, 4, 2, 16), torch.zeros(2, 11, 2, 16)
    nsa.extend_pooled_keys(in_pages, pooled, 16, 8, seqused=used, appended=96, page_table=table)
    nsa.extend_pooled_keys(k, expected, 16, 8, seqused=used, appended=96)
    assert torch.equal(pooled[table.long()].flatten(1, 2)[:, :11], expected)
    of_numpy = torch.zeros(6, 4, 2, 16).numpy()
    nsa.extend_pooled_keys(
        in_pages.numpy(), of_numpy, 16, 8, seqused=used.numpy(), appended=96, page_table=table.numpy()
    )
    assert (of_numpy == pooled.numpy()).all()
    sizes = {"block_size": 16, "compression_block": 16, "compression_stride": 8, "seqused_k": ints(11, 7)}
    lists = nsa.select_blocks(q, pooled, 4, page_table=table, **sizes)
    assert torch.equal(lists, nsa.select_blocks(q, expected, 4, **sizes))
    assert (nsa.select_blocks(q.numpy(), pooled.numpy(), 4, page_table=table.numpy(),
                              **{**sizes, "seqused_k": ints(11, 7).numpy()}) == lists.numpy()).all()  # fmt: skip
    beside = torch.empty_like(in_pages)
    beside[table.long().flatten()] = v.reshape(6, 32, 2, 16)
    o = sparse_attention(q, in_pages, beside, lists, block_size=16, causal="top_left", page_table=table)
    assert torch.equal(o, sparse_attention(q, k, v, lists, block_size=16, causal="top_left"))
    sample = (q, pooled, 4, None, 16, 16, 8, 7, None, None, None, ints(11, 7), table, None, 1, 0, 0)
    torch.library.opcheck(torch.ops.heddle.select_blocks.default, sample)
    sample = (in_pages, pooled, 16, 8, used, 96, table)
    torch.library.opcheck(torch.ops.heddle.extend_pooled_keys.default, sample)


def test_refusals():
    x, pooled, used = torch.zeros(6, 32, 2, 16), torch.zeros(6, 4, 2, 16), ints(96, 70)
    table = ints([3, 0, 4], [5, 1, 2])

    def extend(block=16, stride=8, x=x, pooled=pooled, table=table, used=used, appended=96):
        nsa.extend_pooled_keys(x, pooled, block, stride, seqused=used, appended=appended, page_table=table)

    extend()
    wrong = table.clone()
    wrong[1, 1] = 6
    for words, given in [
        (r"page_table\[1, 1\] is 6: it must be from 0 to 5 \(x has 6 pages\)", dict(table=wrong)),
        (r"x has pages of 32 keys: it must be a multiple of stride, 12", dict(block=24, stride=12)),
        (
            r"k_pooled is \[6, 3, 2, 16\]: it must be \[6, 4, 2, 16\], a row for each stride of a page",
            dict(pooled=pooled[:, 1:]),
        ),
        (r"seqused has 3 entries: it must have 2", dict(used=ints(1, 2, 3))),
        (r"page_table has 1 dimensions", dict(table=table[0])),
        (r"page_table is int64: it must be int32", dict(table=table.long())),
        (r"page_table's rows must be contiguous", dict(table=table.repeat(1, 2)[:, ::2])),
        (r"seqused\[0\] is 97: it must be from 0 to the sequence's length, 96", dict(used=ints(97, 0))),
    ]:
        with pytest.raises(ValueError, match=r"^\[extend_pooled_keys\] " + words):
            extend(**given)
    wrong[1, 1], wrong[1, 2] = 1, -1
    extend(table=wrong, used=ints(96, 64))  # a page that nobody uses yet
    with pytest.raises(ValueError, match=r"page_table\[1, 2\] is -1"):
        extend(table=wrong, used=ints(96, 72))
    q = torch.zeros(2, 5, 4, 16)
    with pytest.raises(ValueError, match=r"\[select_blocks\] page_table\[1, 2\] is -1"):
        nsa.select_blocks(q, pooled, 4, page_table=wrong)
    with pytest.raises(
        ValueError, match=r"\[select_blocks\] page_table is \[1, 3\]: it must have one row for each of 2"
    ):
        nsa.select_blocks(q, pooled, 4, page_table=table[:1])
    for words, given in [
        (r"page_size is 24: it must be a multiple of stride, 16", dict(page_size=24, pages=3)),
        (r"page_size is 48: .* and capacity, 64, one of it", dict(page_size=48, pages=3)),
        (r"pages is None: say how many pages of page_size keys there are", dict(page_size=32)),
        (r"pages is 3 and page_size is None", dict(pages=3)),
        (r"page_size is 0: it must be at least 1", dict(page_size=0, pages=3)),
    ]:
        with pytest.raises(ValueError, match=r"^\[Cache\] " + words):
            nsa.Cache(2, 64, 2, 8, block=16, **given)


def test_a_page_that_is_not_there_leaves_the_cache_as_it_was():
    x = operands(20, batch=1, group=2, size=8, v_size=8, dtype=torch.float32)
    cache = nsa.Cache(1, 32, 2, 8, 8, block=SIZE, page_size=16, pages=2)
    cache.page_table[0, 0] = 1
    call(x, cache, 0, 10)
    with pytest.raises(ValueError, match=r"page_table\[0, 1\] is -1: it must be from 0 to 1 \(k_cache has 2 pages\)"):
        call(x, cache, 10, 20)
    assert cache.lengths.tolist() == [10]
    cache.page_table[0, 1] = 0
    call(x, cache, 10, 20)
    assert cache.lengths.tolist() == [20]


def test_a_layer_over_pages_and_gradients_over_a_cache():
    torch.manual_seed(0)
    layer = nn.NativeSparseAttention(48, 6, 2, block_size=SIZE, block_counts=3, window_size=9)
    x, paged = torch.randn(1, 40, 48), layer.cache(1, 64, page_size=32, pages=3)
    paged.page_table.copy_(ints([2, 0]))
    with torch.no_grad():
        assert torch.equal(layer(x, cache=paged), layer(x, cache=layer.cache(1, 64)))
    with pytest.raises(
        ValueError, match=r"\[nsa_with_cache\] q requires a gradient: a call over a cache has no backward"
    ):
        layer(x, cache=layer.cache(1, 64))
