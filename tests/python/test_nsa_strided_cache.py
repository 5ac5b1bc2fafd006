"""nsa_with_cache with a query stride: rows take from anchors of earlier calls what they take within one call of parallel_nsa."""

import contextlib

import pytest
from heddle.nsa import cache as cache_module
from heddle.nsa import parallel
from heddle.nsa.cache_rows import CachedRows
from nsa_kit import MODES, nsa, one_thread, operands, relative, torch  # noqa: F401  one_thread is a fixture

SIZE, WINDOW, SLOTS = 32, 9, 3
CHUNKS = {"steps": [1] * 70, "chunks": [50, 1, 1, 30, 1], "few": [7, 64, 2], "grouped": [64, 3, 40]}
SHARING = {name: dict(query_stride=3, **mode) for name, mode in MODES.items()}
SHARING |= {name: nsa.presets(2)[name] for name in nsa.presets(2)}
every_sharing = pytest.mark.parametrize("sharing", SHARING.values(), ids=SHARING)
both = pytest.mark.parametrize("unread", [False, True], ids=["lengths read", "lengths not read"])


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Lengths are not read: phases are in tensors alone."""

    @contextlib.contextmanager
    def patched(unread=True):
        with monkeypatch.context() as patch:
            if unread:
                patch.setattr(cache_module, "known_phase", lambda name, cache, phase: phase)
            yield

    return patched


def rows_of(x, begin, end, b=slice(None)):
    return [None if y is None else y[b, begin:end] for y in x]


def cache_of(x, capacity, sharing, **form):
    q, k, v = x[:3]
    heads = q.shape[2], k.shape[2]
    made = {"block": SIZE, "query_heads": heads[0], "block_counts": SLOTS, **form, **sharing}
    return nsa.Cache(q.shape[0], capacity, heads[1], k.shape[3], v.shape[3], **made)


def call(x, cache, counts=SLOTS, window=WINDOW, **options):
    return nsa.nsa_with_cache(*x[:3], cache, *x[3:], counts, SIZE, window, **options)


def whole(x, sharing, counts=SLOTS, window=WINDOW, **options):
    return nsa.parallel_nsa(*x, None, counts, SIZE, window, **sharing, **options)


def check(x, chunks, sharing, counts=SLOTS, window=WINDOW, form=None, forced=("first", "current"), phases=False):
    form = form or {}
    compression = {"compression_" + name: value for name, value in form.items()}
    expected = whole(x, sharing, counts, window, forced=forced, **compression)
    cache = cache_of(x, sum(chunks) + 3, sharing, **form)
    places = {name: y.data_ptr() for name, y in cache.anchors.items()}
    begin = 0
    for n in chunks:
        end = begin + n
        some = counts if isinstance(counts, int) else counts[:, begin:end]
        phase = begin % sharing["query_stride"] if phases else None
        o = call(rows_of(x, begin, end), cache, some, window, forced=forced, max_block_counts=SLOTS, phase=phase)
        assert relative(o, expected[:, begin:end]) < 2e-6, begin
        begin = end
    assert cache.lengths.tolist() == [begin] * len(x[0])
    assert {name: y.data_ptr() for name, y in cache.anchors.items()} == places  # as a graph has them


@both
@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
@every_sharing
def test_a_cache_gives_what_the_whole_gives(as_on_a_gpu, sharing, chunks, unread):
    x = operands(sum(chunks), batch=2, group=2, size=8, v_size=12, dtype=torch.float32)
    with as_on_a_gpu(unread):
        check(x, chunks, sharing)
        check(x, chunks, sharing, phases=True)


@both
@pytest.mark.parametrize("stride", [2, 16, 48, 100])
@pytest.mark.parametrize("mode", MODES)
def test_strides_and_compressed_blocks_that_overlap(as_on_a_gpu, mode, stride, unread):
    chunks = [50, 1, 3, 1, 75, 1]
    x = operands(sum(chunks), batch=2, heads=1, group=3, size=8, v_size=8, dtype=torch.float32)
    with as_on_a_gpu(unread):
        check(x, chunks, dict(query_stride=stride, **MODES[mode]), form={"stride": 16}, forced=())


@both
@every_sharing
def test_the_naive_functions_in_float64(as_on_a_gpu, sharing, unread):
    chunks = [33, 1, 1, 30]
    x = operands(65, batch=2, size=8, v_size=8, dtype=torch.float32)
    expected = nsa.naive_nsa_with_compression(*(y.double() for y in x), SLOTS, SIZE, WINDOW, **sharing)
    cache, begin = cache_of(x, 65, sharing), 0
    with as_on_a_gpu(unread):
        for n in chunks:
            o = call(rows_of(x, begin, begin + n), cache)
            assert relative(o, expected[:, begin : begin + n]) < 2e-6, begin
            begin += n


@both
@pytest.mark.parametrize("mode", ["A", "B", "C", "all branches"])
def test_branches_that_are_not_there_and_counts_of_rows(as_on_a_gpu, mode, unread):
    x = list(operands(80, batch=2, size=8, v_size=8, dtype=torch.float32))
    counts = torch.randint(0, SLOTS + 1, (2, 80, 2), generator=torch.Generator().manual_seed(3))
    with as_on_a_gpu(unread):
        for stride in (3, 16):
            sharing = dict(query_stride=stride, **MODES[mode])
            check(x, [32, 1, 1, 1, 13, 32], sharing, counts)
            check([*x[:3], None, *x[4:]], [32, 1, 1, 14, 32], sharing)
            check([*x[:5], None], [32, 1, 1, 14, 32], sharing, window=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@every_sharing
def test_16_bits(sharing, dtype):
    x = operands(70, batch=2, size=8, v_size=8, dtype=dtype)  # two blocks and a part: all are listed
    expected, cache = whole(x, sharing), cache_of(x, 70, sharing, dtype=dtype)
    parts = [call(rows_of(x, begin, begin + n), cache) for begin, n in ((0, 40), (40, 1), (41, 1), (42, 28))]
    assert relative(torch.cat(parts, 1), expected) < (8e-3 if dtype == torch.bfloat16 else 1e-3)


@pytest.mark.parametrize("mode", MODES)
def test_stride_1_is_plain_to_the_bit(mode):
    x = operands(70, batch=2, size=8, v_size=8, dtype=torch.float32)
    plain, strided = cache_of(x, 70, {}), cache_of(x, 70, dict(query_stride=1, **MODES[mode]))
    assert strided.anchors == {}
    for begin, end in ((0, 40), (40, 41), (41, 70)):
        assert torch.equal(call(rows_of(x, begin, end), strided, phase=0), call(rows_of(x, begin, end), plain))


@both
@every_sharing
def test_sequences_are_at_phases_of_their_own(as_on_a_gpu, sharing, unread):
    stride = sharing["query_stride"]
    x = operands(160, batch=3, size=8, v_size=8, dtype=torch.float32)
    cache = cache_of(x, 160, sharing)
    expected = whole(x, sharing)
    at = [41, 20 // stride * stride, 0]  # the last two are set back to an anchor
    call(rows_of(x, 0, 41), cache)
    cache.lengths.copy_(torch.tensor(at))
    with as_on_a_gpu(unread):
        for n in (1, 1, 1, 4, 1, 2, 1, 1, 5, 2 * stride + 1):
            rows = [torch.stack([y[b, t : t + n] for b, t in enumerate(at)]) for y in x]
            o = call(rows, cache)
            for b, t in enumerate(at):
                assert relative(o[b], expected[b, t : t + n]) < 2e-6, (b, t)
            at = [t + n for t in at]
    anchors = [(t - 1) // stride * stride for t in at]
    assert cache.anchors["position"].tolist() == anchors


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("mode", MODES)
def test_out(mode, n):
    x = operands(50, batch=2, size=8, v_size=8, dtype=torch.float32)
    caches = [cache_of(x, 50, dict(query_stride=3, **MODES[mode])) for _ in range(2)]
    for cache in caches:
        call(rows_of(x, 0, 40), cache)
    out = torch.zeros(2, n, 4, 8)
    assert call(rows_of(x, 40, 40 + n), caches[0], out=out) is out
    assert torch.equal(out, call(rows_of(x, 40, 40 + n), caches[1]))
    held = next(y for name, y in caches[0].anchors.items() if name != "position")
    over = torch.as_strided(held.view(torch.float32), out.shape, out.stride()) if held.numel() >= out.numel() else None
    if over is not None:
        with pytest.raises(ValueError, match=r"out shares memory with cache.anchors\["):
            call(rows_of(x, 40 + n, 40 + 2 * n), caches[0], out=over)


@every_sharing
def test_a_step_without_anchors_leaves_shared_branches_out(monkeypatch, sharing):
    x = operands(40, batch=2, size=8, v_size=8, dtype=torch.float32)
    cache = cache_of(x, 40, sharing)
    call(rows_of(x, 0, 32 // sharing["query_stride"] * sharing["query_stride"] + 1), cache)
    called = []
    for name in ("attention", "select_blocks", "sparse_attention"):
        real = getattr(parallel, name)
        monkeypatch.setattr(
            parallel, name, lambda *y, _real=real, _name=name, **z: called.append(_name) or _real(*y, **z)
        )
    t = int(cache.lengths[0])
    call(rows_of(x, t, t + 1), cache)
    branches = set(sharing.get("share_branches", ("slc",)))
    alone = {"cmp", "swa", "slc"} - (branches if sharing["share"] != "selection" else set())
    assert called.count("attention") == len(alone & {"cmp", "swa"})
    assert called.count("sparse_attention") == len(alone & {"slc"})
    assert called.count("select_blocks") == ("slc" not in branches)


@every_sharing
def test_what_an_anchor_has_goes_with_a_copy(sharing):
    x = operands(60, batch=2, size=8, v_size=8, dtype=torch.float32)
    cache, other = cache_of(x, 60, sharing), cache_of([y[:1] for y in x], 60, sharing)
    call(rows_of(x, 0, 41), cache)
    for part in ("k", "v", "k_pooled", "v_pooled", "lengths"):
        getattr(other, part).copy_(getattr(cache, part)[1:])
    for name, y in other.anchors.items():
        y.copy_(cache.anchors[name][1:])
    o = call(rows_of(x, 41, 44, slice(1, 2)), other)
    assert relative(o, whole(x, sharing)[1:, 41:44]) < 2e-6


def test_lengths_that_are_set_back():
    sharing = dict(query_stride=4, share="output")
    x = operands(40, size=8, v_size=8, dtype=torch.float32)
    other = operands(40, size=8, v_size=8, dtype=torch.float32, seed=1)
    cache = cache_of(x, 40, sharing)
    call(rows_of(x, 0, 23), cache)  # the last anchor is 20
    for length in (22, 21, 20, 16, 0):
        if length < 20:
            call(rows_of(x, 20, 23), cache)
        cache.lengths.fill_(length)
        mixed = [torch.cat([y[:, :length], z[:, length:30]], 1) for y, z in zip(x, other)]
        assert relative(call(rows_of(mixed, length, 30), cache), whole(mixed, sharing)[:, length:]) < 2e-6
        cache.lengths.fill_(0)
        call(rows_of(x, 0, 23 if length > 20 else 20), cache)
    cache = cache_of(x, 40, sharing)
    call(rows_of(x, 0, 23), cache)
    for length, anchor in ((19, 16), (3, 0)):
        cache.lengths.fill_(length)
        words = f"sequence 0 has {length} keys, and its next row takes from the anchor at {anchor}, of which the cache has that of 20"
        with pytest.raises(ValueError, match=words):
            call(rows_of(x, length, length + 1), cache)
        assert cache.lengths.tolist() == [length]
    cache.lengths.fill_(19)
    cache.append(*rows_of(x[1:3], 19, 22))  # another key at 20, whose row nobody asked for
    with pytest.raises(ValueError, match="the anchor at 20, of which the cache has none"):
        call(rows_of(x, 22, 23), cache)
    fresh = cache_of(x, 40, sharing)
    fresh.append(*rows_of(x[1:3], 0, 5))
    with pytest.raises(ValueError, match="the anchor at 4, of which the cache has none: set lengths to a multiple"):
        call(rows_of(x, 5, 6), fresh)
    fresh.lengths.fill_(4)
    assert relative(call(rows_of(x, 4, 9), fresh), whole(x, sharing)[:, 4:9]) < 2e-6


def test_what_is_refused_leaves_the_cache():
    x = operands(20, size=8, v_size=8, dtype=torch.float32)
    cache = cache_of(x, 12, dict(query_stride=4, share="selection"))
    call(rows_of(x, 0, 9), cache)
    held = {"lengths": cache.lengths, **cache.anchors}
    before = {name: y.clone() for name, y in held.items()}
    for words, options in (
        ("phase is 4: it must be below the cache's query_stride, 4", dict(phase=4)),
        ("phase is -1", dict(phase=-1)),
        ("phase is 0: sequence 0 has 9 keys, which is 1 behind a multiple of query_stride, 4", dict(phase=0)),
        ("block_counts has 4 blocks in a list: the cache was made for block_counts 3", dict(counts=4)),
    ):
        with pytest.raises(ValueError, match=words):
            call(rows_of(x, 9, 10), cache, **options)
    with pytest.raises(ValueError):  # more than the capacity
        call(rows_of(x, 9, 13), cache)
    with pytest.raises(ValueError, match="block"):  # what kernels alone refuse
        nsa.nsa_with_cache(*rows_of(x, 9, 10)[:3], cache, *rows_of(x, 9, 10)[3:], SLOTS, 96, WINDOW)
    for name, y in held.items():
        assert torch.equal(y, before[name]), name


def test_what_a_cache_refuses():
    for words, options in (
        ("query_heads is None and share is 'output': say how many heads q has", dict(query_stride=2, share="output")),
        ("query_stride is 2 and share is 'none'", dict(query_stride=2)),
        ("share_branches is", dict(query_stride=2, share="delta", share_branches=("cmp",))),
        ("block_counts is -1", dict(block_counts=-1)),
    ):
        with pytest.raises(ValueError, match=r"\[Cache\] " + words):
            nsa.Cache(1, 40, 2, 8, **options)
    x = operands(8, size=8, v_size=8, dtype=torch.float32)
    cache = nsa.Cache(1, 40, 2, 8, query_stride=2, share="delta", query_heads=8)
    with pytest.raises(ValueError, match="q has 4 heads: the cache was made for query_heads 8"):
        nsa.nsa_with_cache(*x[:3], cache, *x[3:], 3, 64, 9)
    with pytest.raises(ValueError, match=r"\[nsa_with_cache\] window_size is 0 and share is 'delta'"):
        nsa.nsa_with_cache(*x[:3], cache, *x[3:], 3, 64, 0)


@pytest.mark.parametrize("sharing", [SHARING[name] for name in ("A", "C", "seed_4_3")])
def test_compiled(sharing):
    torch._dynamo.reset()
    x = operands(44, batch=2, size=8, v_size=8, dtype=torch.float32)
    caches = [cache_of(x, 50, sharing) for _ in range(2)]
    for cache in caches:
        call(rows_of(x, 0, 40), cache)
    step = torch.compile(call, backend="aot_eager")
    for t in range(40, 44):
        assert relative(step(rows_of(x, t, t + 1), caches[0]), call(rows_of(x, t, t + 1), caches[1])) < 1e-6
        for name, y in caches[0].anchors.items():
            assert relative(y, caches[1].anchors[name]) < 1e-6, name


@pytest.mark.parametrize("known", [False, True])
def test_an_anchors_whole_row_may_be_one_launch(monkeypatch, as_on_a_gpu, known):
    """A stand-in for the kernel, which is asked for plain steps alone."""
    sharing, launched = nsa.presets(2)["seed_4_3"], []

    def serves(q, k_new, v_new, cache, form, counts):
        return q.shape[1] == 1 and form.sharing.stride == 1

    def step(q, k_new, v_new, cache, gates, form, out):
        launched.append(1)
        cache.append(k_new, v_new)
        held = (cache.k, cache.v, cache.k, cache.v), (cache.k_pooled, cache.v_pooled)
        return parallel.attend(CachedRows(1, cache), q, *held, gates, None, None, form, out)

    monkeypatch.setattr(cache_module.step, "serves", serves)
    monkeypatch.setattr(cache_module.step, "step", step)
    x = operands(60, batch=2, size=8, v_size=8, dtype=torch.float32)
    cache, expected = cache_of(x, 60, sharing), whole(x, sharing)
    with as_on_a_gpu():
        call(rows_of(x, 0, 39), cache)
        for t in range(39, 60):
            out = torch.empty(2, 1, 4, 8) if t % 3 else None
            o = call(rows_of(x, t, t + 1), cache, phase=t % 2 if known else None, out=out)
            assert out is None or o is out
            assert relative(o, expected[:, t : t + 1]) < 2e-6, t
            assert cache.anchors["position"].tolist() == [t // 2 * 2] * 2
            o.zero_()  # it is no part of the cache
    assert len(launched) == (10 if known else 21)
