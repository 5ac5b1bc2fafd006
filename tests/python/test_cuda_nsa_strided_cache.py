"""Native sparse attention with a query stride over a cache on a GPU: against the naive functions, in graphs, without waiting."""

import heddle
import pytest
import torch
from cuda_nsa_kit import BLOCK, EVERY, WINDOW, Expected, assert_near, both_dtypes, operands
from heddle import _heddle
from heddle.nsa import cache_rows
from nsa_kit import MODES, nsa

if not torch.cuda.is_available():
    pytest.skip("torch sees no GPU here", allow_module_level=True)
if not _heddle.cuda_built():
    pytest.skip("this build of heddle has no GPU kernels", allow_module_level=True)

SHARING = {name: dict(query_stride=3, **mode) for name, mode in MODES.items()}
SHARING |= {name: nsa.presets(4)[name] for name in nsa.presets(4)}
every_sharing = pytest.mark.parametrize("sharing", SHARING.values(), ids=SHARING)
phases = pytest.mark.parametrize("known", [False, True], ids=["phase unknown", "phase known"])


def cache_of(x, capacity, sharing):
    q, k = x[:2]
    made = dict(block=BLOCK, query_heads=q.shape[2], block_counts=EVERY, dtype=q.dtype, device=q.device, **sharing)
    return nsa.Cache(q.shape[0], capacity, k.shape[2], k.shape[3], **made)


def rows_of(x, begin, end):
    return [y[:, begin:end] for y in x]


def call(x, cache, **options):
    return nsa.nsa_with_cache(*x[:3], cache, *x[3:], EVERY, BLOCK, WINDOW, **options)


def exact(x, sharing):
    return Expected(lambda *y: nsa.naive_nsa_with_compression(*y, EVERY, BLOCK, WINDOW, **sharing), x)


def captured(step):
    """A graph of step(), which has run once before, and its result."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    return graph, found


@both_dtypes
@phases
@every_sharing
def test_a_cache_gives_what_the_whole_gives(sharing, known, dtype):
    chunks = [256, 90, 1, 1, 1, 1, 40, 1, 1, 130]
    x = operands(sum(chunks), batch=3, dtype=dtype, gradients=False)
    expected, cache, begin = exact(x, sharing), cache_of(x, sum(chunks) + 5, sharing), 0
    for n in chunks:
        phase = begin % sharing["query_stride"] if known else None
        o = call(rows_of(x, begin, begin + n), cache, phase=phase)
        expected.assert_accurate(f"rows from {begin}", o, lambda y: y[:, begin : begin + n])  # noqa: B023
        begin += n


@every_sharing
def test_sequences_are_at_phases_of_their_own(sharing):
    stride = sharing["query_stride"]
    x = operands(400, batch=3, gradients=False)
    expected, cache = exact(x, sharing), cache_of(x, 400, sharing)
    at = [301, 150 // stride * stride, 0]
    call(rows_of(x, 0, 301), cache)
    cache.lengths.copy_(torch.tensor(at))
    for n in (1, 1, 1, 4, 1, 2, 1, 2 * stride + 1, 1):
        o = call([torch.stack([y[b, t : t + n] for b, t in enumerate(at)]) for y in x], cache)
        for b, t in enumerate(at):
            expected.assert_accurate(f"sequence {b} from {t}", o[b], lambda y: y[b, t : t + n])  # noqa: B023
        at = [t + n for t in at]
    assert cache.anchors["position"].tolist() == [(t - 1) // stride * stride for t in at]


@every_sharing
def test_decoding_in_a_graph(sharing):
    """One graph for all steps, of sequences at phases of their own."""
    stride = sharing["query_stride"]
    x = operands(340, batch=2, gradients=False)
    caches = [cache_of(x, 400, sharing) for _ in range(2)]
    at = [300, 200 // stride * stride]
    static = [y[:, :1].clone() for y in x]
    row = lambda i: [torch.stack([y[b, t + i : t + i + 1] for b, t in enumerate(at)]) for y in x]  # noqa: E731
    for cache in caches:
        call(rows_of(x, 0, 300), cache)
    for to, y in zip(static, row(0)):
        to.copy_(y)
    kept = {name: y.clone() for name, y in caches[1].anchors.items()}
    graph, found = captured(lambda: call(static, caches[1]))
    for cache in caches:
        cache.lengths.copy_(torch.tensor(at))
    for name, y in kept.items():  # steps before the capture, and what was set back, are forgotten
        caches[1].anchors[name].copy_(y)
    for i in range(36):
        for to, y in zip(static, row(i)):
            to.copy_(y)
        graph.replay()
        assert torch.equal(found, call(row(i), caches[0])), i
    for name, y in caches[0].anchors.items():
        assert torch.equal(y, caches[1].anchors[name]), name


@every_sharing
def test_a_graph_of_anchors_and_one_of_others(sharing):
    """Two graphs, where the host knows the phase: of 0, and of 1, which serves all others."""
    stride = sharing["query_stride"]
    x = operands(340, batch=2, gradients=False)
    begin = 300 // stride * stride
    caches = [cache_of(x, 400, sharing) for _ in range(2)]
    for cache in caches:
        call(rows_of(x, 0, begin), cache, phase=0)
    static = [y[:, begin : begin + 1].clone() for y in x]
    graphs = [captured(lambda phase=phase: call(static, caches[1], phase=phase)) for phase in (0, 1)]
    caches[1].lengths.fill_(begin)
    for t in range(begin, 340):
        for to, y in zip(static, rows_of(x, t, t + 1)):
            to.copy_(y)
        graph, found = graphs[t % stride > 0]
        graph.replay()
        assert torch.equal(found, call(rows_of(x, t, t + 1), caches[0], phase=t % stride)), t
    for name, y in caches[0].anchors.items():
        assert torch.equal(y, caches[1].anchors[name]), name


@phases
@every_sharing
def test_nothing_waits_for_the_gpu(sharing, known):
    x = operands(330, batch=2, gradients=False)
    cache = cache_of(x, 400, sharing)
    call(rows_of(x, 0, 300), cache)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for begin, end in ((300, 301), (301, 302), (302, 320), (320, 321)):
            call(rows_of(x, begin, end), cache, phase=begin % sharing["query_stride"] if known else None)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_validate_mode_looks_at_lengths(monkeypatch):
    x = operands(60, batch=2, gradients=False)
    cache = cache_of(x, 100, SHARING["A"])
    call(rows_of(x, 0, 50), cache)
    cache.lengths[1] = 40
    monkeypatch.setattr(cache_rows, "_validated", lambda: True)
    with pytest.raises(ValueError, match="sequence 1 has 40 keys, and its next row takes from the anchor at 39"):
        call(rows_of(x, 50, 51), cache)
    with pytest.raises(ValueError, match="phase is 0: sequence 0 has 50 keys"):
        call(rows_of(x, 50, 51), cache, phase=0)


@pytest.mark.parametrize("name", ["A", "C", "D", "seed", "seed_4_3"])
def test_compiled(name):
    torch._dynamo.reset()
    x = operands(200, batch=2, gradients=False)
    caches = [cache_of(x, 300, SHARING[name]) for _ in range(2)]
    for cache in caches:
        call(rows_of(x, 0, 190), cache)
    step = torch.compile(call, backend="aot_eager")
    for t in range(190, 194):
        row = rows_of(x, t, t + 1)
        assert_near(f"step {t}", step(row, caches[0]), call(row, caches[1]), 1e-3)


@phases
@pytest.mark.parametrize("preset", nsa.presets(4))
def test_the_layer_decodes(preset, known):
    torch.manual_seed(0)
    sharing = nsa.presets(4)[preset]
    form = dict(block_size=BLOCK, block_counts=EVERY, window_size=WINDOW, sharing=sharing)
    model = heddle.nn.NativeSparseAttention(256, 16, 4, 64, **form).to("cuda", torch.bfloat16)
    x = torch.randn(2, 300, 256).to("cuda", torch.bfloat16)
    with torch.no_grad():
        whole, cache, parts = model(x), model.cache(2, 300), []
        for part in x.split([280, *[1] * 20], 1):
            t = sum(y.shape[1] for y in parts)
            parts.append(model(part, cache=cache, phase=t % sharing["query_stride"] if known else None))
        assert_near("decoded", torch.cat(parts, 1), whole, 2e-2)
