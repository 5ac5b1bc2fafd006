"""nsa_with_cache's step in one launch against the same step composed of operations, over caches that grow."""

import pytest
import torch
from cuda_nsa_kit import LIMITS, assert_near, both_dtypes, operands
from heddle import _heddle
from heddle.nsa import step as one_launch
from nsa_kit import nsa

if not torch.cuda.is_available():
    pytest.skip("torch sees no GPU here", allow_module_level=True)
if not _heddle.cuda_built():
    pytest.skip("this build of heddle has no GPU kernels", allow_module_level=True)
if torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("a step in one launch is for Hopper", allow_module_level=True)

PARTS = ("k", "v", "k_pooled", "v_pooled", "lengths")


def filled(x, rows, block, capacity, size):
    """A cache that has the first rows."""
    q, k, v = x[:3]
    cache = nsa.Cache(q.shape[0], capacity, k.shape[2], size, block=block, dtype=q.dtype, device="cuda")
    cache.append(k[:, :rows], v[:, :rows])
    return cache


def row(x, t):
    return [None if y is None else y[:, t : t + 1] for y in x]


@pytest.fixture
def launched(monkeypatch):
    """How often a step was one launch."""
    calls = []
    real = one_launch.step
    monkeypatch.setattr(one_launch, "step", lambda *y: calls.append(1) or real(*y))
    return calls


def composed(monkeypatch, call):
    with monkeypatch.context() as patch:
        patch.setattr(one_launch, "serves", lambda *_: False)
        return call()


@both_dtypes
@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("group, size, block", [(16, 128, 64), (4, 64, 64), (1, 72, 32), (4, 128, 16), (3, 128, 128)])
@pytest.mark.parametrize("compressed", [True, False], ids=["g_cmp", "no g_cmp"])
def test_as_composed(monkeypatch, launched, compressed, group, size, block, window, dtype):
    begin, end = 250, 262  # 256 keys are whole blocks of every size
    x = operands(end, batch=3, group=group, size=size, dtype=dtype, gradients=False)
    x[3] = x[3] if compressed else None
    caches = [filled(x, begin, block, 300, size) for _ in range(2)]
    for cache in caches:
        cache.lengths[1] = 191  # which forgets, and completes a block in its first step
        cache.lengths[2] = 63
    for t in range(begin, end):
        given = row(x, t)
        step = lambda cache: nsa.nsa_with_cache(*given[:3], cache, *given[3:], 32, block, window)  # noqa: B023, E731
        found = step(caches[0])
        expected = composed(monkeypatch, lambda: step(caches[1]))  # noqa: B023
        assert_near(f"row {t}", found, expected, 2 * LIMITS[dtype])
        for part in PARTS:
            assert torch.equal(getattr(caches[0], part), getattr(caches[1], part)), (t, part)
    assert len(launched) == end - begin


@pytest.mark.parametrize("forced", [("first", "previous", "current"), (), ("current",)], ids=str)
def test_chosen_blocks(monkeypatch, launched, forced):
    """Few of many blocks: both choose the same."""
    x = operands(5000, batch=2, group=16, gradients=False)
    caches = [filled(x, 4990, 64, 5000, 128) for _ in range(2)]
    for t in range(4990, 5000):
        given = row(x, t)
        step = lambda cache: nsa.nsa_with_cache(*given[:3], cache, *given[3:], 6, 64, 512, forced=forced)  # noqa: B023, E731
        found = step(caches[0])
        assert_near(f"row {t}", found, composed(monkeypatch, lambda: step(caches[1])), 1e-2)  # noqa: B023
    assert len(launched) == 10


def test_out_and_rows_of_any_stride(monkeypatch, launched):
    x = operands(200, batch=2, gradients=False)
    caches = [filled(x, 190, 64, 300, 128) for _ in range(2)]
    for t in range(190, 195):
        q, k, v, *gates = row(x, t)
        wide = [torch.stack([y, y], -1)[..., 0] for y in (q, k, v)]
        out = torch.full_like(torch.cat([q, q], -1), float("nan"))
        found = nsa.nsa_with_cache(*wide, caches[0], *gates, 3, 64, 100, out=out[..., :128])
        expected = composed(monkeypatch, lambda: nsa.nsa_with_cache(q, k, v, caches[1], *gates, 3, 64, 100))  # noqa: B023
        assert found.data_ptr() == out.data_ptr() and out[..., 128:].isnan().all()
        assert_near(f"row {t}", found, expected, 2e-2)
    assert len(launched) == 5


def test_in_a_graph(launched):
    x = operands(400, batch=3, gradients=False)
    caches = [filled(x, 380, 64, 400, 128) for _ in range(2)]
    static = [y.clone() for y in row(x, 380)]

    def step(given, cache):
        return nsa.nsa_with_cache(*given[:3], cache, *given[3:], 4, 64, 100)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(static, caches[1])
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step(static, caches[1])
    caches[1].lengths.fill_(380)
    for t in range(380, 400):
        for to, y in zip(static, row(x, t)):
            to.copy_(y)
        graph.replay()
        assert torch.equal(found, step(row(x, t), caches[0])), t
    for part in PARTS:
        assert torch.equal(getattr(caches[0], part), getattr(caches[1], part)), part
    assert len(launched) == 22


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(backend):
    if backend == "inductor":
        pytest.importorskip("triton")
    torch._dynamo.reset()
    x = operands(200, batch=2, gradients=False)
    caches = [filled(x, 190, 64, 300, 128) for _ in range(2)]

    def step(given, cache):
        return nsa.nsa_with_cache(*given[:3], cache, *given[3:], 3, 64, 100)

    compiled = torch.compile(step, backend=backend)
    for t in range(190, 194):
        assert torch.equal(compiled(row(x, t), caches[0]), step(row(x, t), caches[1]))
        for part in PARTS:
            assert torch.equal(getattr(caches[0], part), getattr(caches[1], part)), (t, part)


@pytest.mark.parametrize("branches", [slice(0, 3), slice(1, 2)], ids=["all", "selected alone"])
def test_opcheck(branches):
    x = operands(200, batch=2, gradients=False)
    cache = filled(x, 191, 64, 300, 128)
    q, k, v, *gates = (y.contiguous() for y in row(x, 191))
    gates = [y if n in range(3)[branches] else None for n, y in enumerate(gates)]
    sample = (q, k, v, *(getattr(cache, part) for part in PARTS), *gates, torch.empty_like(q))
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(
        torch.ops.heddle.nsa_step.default,
        (*sample, 3, 64, 100 if gates[2] is not None else 0, 7, None),
        test_utils=checks,
    )


def test_what_is_refused_leaves_the_cache():
    x = operands(100, batch=2, gradients=False)
    cache = filled(x, 90, 64, 300, 128)
    q, k, v, *gates = row(x, 90)
    before = [getattr(cache, part).clone() for part in PARTS]
    with pytest.raises(ValueError):
        nsa.nsa_with_cache(q, k[..., :64], v, cache, *gates, 3, 64, 100)
    with pytest.raises(ValueError):
        nsa.nsa_with_cache(q, k, v, cache, *gates, 3, 48, 100)
    for part, x in zip(PARTS, before):
        assert torch.equal(getattr(cache, part), x), part


@pytest.mark.parametrize("change", [dict(count=33), dict(rows=2), dict(group=17)], ids=str)
def test_what_is_not_served_is_composed(launched, change):
    count, rows = change.pop("count", 4), change.pop("rows", 1)
    x = operands(100, batch=2, gradients=False, **change)
    cache = filled(x, 90, 64, 300, x[0].shape[3])
    q, k, v, *gates = (y[:, 90 : 90 + rows] for y in x)
    o = nsa.nsa_with_cache(q, k, v, cache, *gates, count, 64, 100)
    assert o.isfinite().all() and launched == []


@pytest.mark.parametrize("known", [False, True], ids=["phase unknown", "phase known"])
def test_rows_that_copy_their_anchors_row_are_one_launch(monkeypatch, launched, known):
    x = operands(420, batch=3, gradients=False)
    q, k = x[:2]
    seed_4_3 = nsa.presets(4)["seed_4_3"]
    made = dict(block=64, query_heads=q.shape[2], dtype=q.dtype, device="cuda", **seed_4_3)
    caches = [nsa.Cache(3, 420, k.shape[2], 128, **made) for _ in range(2)]

    def step(cache, begin, end, **options):
        given = [y[:, begin:end] for y in x]
        return nsa.nsa_with_cache(*given[:3], cache, *given[3:], 32, 64, 100, **options)

    for cache in caches:
        step(cache, 0, 399)
    for t in range(399, 420):
        phase = t % 2 if known else None
        found = step(caches[0], t, t + 1, phase=phase)
        expected = composed(monkeypatch, lambda: step(caches[1], t, t + 1, phase=phase))  # noqa: B023
        assert_near(f"step {t}", found, expected, 1e-2)
        for part in PARTS:
            assert torch.equal(getattr(caches[0], part), getattr(caches[1], part)), (t, part)
        assert caches[0].anchors["position"].tolist() == [t // 2 * 2] * 3
    assert len(launched) == (10 if known else 21)
