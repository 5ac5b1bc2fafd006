"""Native sparse attention on a GPU: that nothing waits for it, graphs, tracing, streams; caches and the layer."""

import heddle
import pytest
import torch
from cuda_nsa_kit import BLOCK, EVERY, NAMES, WINDOW, Expected, assert_near, both_dtypes, operands
from heddle import _heddle
from heddle.hosts.torch import sparse_operators  # noqa: F401  registers the operators
from nsa_kit import nsa

if not torch.cuda.is_available():
    pytest.skip("torch sees no GPU here", allow_module_level=True)
if not _heddle.cuda_built():
    pytest.skip("this build of heddle has no GPU kernels", allow_module_level=True)

STARTS = [0, 70, 333, 640]
CALLS = {
    "batched": dict(),
    "packed": dict(cu_seqlens=STARTS, max_seqlen=307),
    "seed": nsa.presets(4)["seed"],
    "fast": nsa.presets(4)["fast"],
    "fast, packed": dict(cu_seqlens=STARTS, max_seqlen=307, **nsa.presets(4)["fast"]),
}
all_calls = pytest.mark.parametrize("call", CALLS)


def run(x, call, lists=None, **more):
    """o and the gradients."""
    given = {**CALLS[call], **more}
    if "cu_seqlens" in given:
        given["cu_seqlens"] = torch.tensor(STARTS, dtype=torch.int32).pin_memory().to("cuda", non_blocking=True)
    o = nsa.parallel_nsa(*x, lists, **{"block_counts": 4, "block_size": BLOCK, "window_size": WINDOW, **given})
    return [o.detach(), *torch.autograd.grad(o, x, torch.ones_like(o))]


@all_calls
def test_nothing_waits_for_the_gpu(call):
    x = operands(640)
    counts = torch.randint(0, 5, (1, 640, 2)).cuda()
    expected = run(x, call)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = run(x, call)
        run(x, call, block_counts=counts, max_block_counts=4)
        run(x, call, torch.zeros(1, 640, 2, 3, dtype=torch.int32, device="cuda"), block_counts=counts)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(found[0], expected[0])


@all_calls
def test_bits_repeat(call):
    x = operands(640)
    torch.use_deterministic_algorithms(True)
    try:
        first, second = run(x, call), run(x, call)
    finally:
        torch.use_deterministic_algorithms(False)
    for name, a, b in zip(("o", *NAMES), first, second):
        assert torch.equal(a, b), name


@all_calls
def test_in_a_graph(call):
    x, other = operands(640), operands(640, seed=1)
    starts = torch.tensor(STARTS, dtype=torch.int32, device="cuda")
    given = {"block_counts": 4, "block_size": BLOCK, "window_size": WINDOW, **CALLS[call]}
    if "cu_seqlens" in given:
        given["cu_seqlens"] = starts

    def step(x):
        o = nsa.parallel_nsa(*x, **given)
        return [o.detach(), *torch.autograd.grad(o, x, torch.ones_like(o))]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step(x)
    first = [z.detach().clone() for z in x]
    for y in (first, other, first):
        with torch.no_grad():
            for to, value in zip(x, y):
                to.copy_(value)
        graph.replay()
        expected = step([z.detach().clone().requires_grad_() for z in y])
        for name, a, b in zip(("o", *NAMES), found, expected):
            assert_near(name, a, b, 2e-3)  # where kernels add gradients up in any order
        assert torch.equal(found[0], expected[0])


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@all_calls
def test_compiled(call, backend):
    if backend == "inductor":
        pytest.importorskip("triton")
    torch._dynamo.reset()
    x = operands(640)
    given = {"block_counts": 4, "block_size": BLOCK, "window_size": WINDOW, **CALLS[call]}
    if "cu_seqlens" in given:
        given["cu_seqlens"] = torch.tensor(STARTS, dtype=torch.int32, device="cuda")
    compiled = torch.compile(lambda *x: nsa.parallel_nsa(*x, **given), fullgraph=True, backend=backend)
    o, expected = compiled(*x), nsa.parallel_nsa(*x, **given)
    assert_near("o", o, expected, 1e-2)
    d_o = torch.ones_like(o)
    for name, a, b in zip(NAMES, torch.autograd.grad(o, x, d_o), torch.autograd.grad(expected, x, d_o)):
        assert_near("gradient of " + name, a, b, 1e-2)


CHECKS = ("test_schema", "test_faketensor", "test_autograd_registration")


def test_opcheck():
    ops = torch.ops.heddle
    x = operands(130, gradients=False)
    q, k, v = x[:3]
    pooled = nsa.pool_keys(k, BLOCK)
    torch.library.opcheck(ops.pool_keys.default, (k, BLOCK, BLOCK, None, None), test_utils=CHECKS)
    torch.library.opcheck(ops.pool_keys_backward.default, (pooled, 130, BLOCK, BLOCK, None, None), test_utils=CHECKS)
    sample = (q, pooled, 3, None, BLOCK, None, None, 7, None, None, None, None, None, None, 1, 0, 0)
    torch.library.opcheck(ops.select_blocks.default, sample, test_utils=CHECKS)


def test_opcheck_of_sums_and_lists():
    ops = torch.ops.heddle
    make = lambda: [torch.randn(2, 9, 4, 64).to("cuda", torch.bfloat16) for _ in range(3)]  # noqa: E731
    os, gates = make(), [torch.rand(2, 9, 4, device="cuda") for _ in range(3)]
    for wanted in ([True, True], [False, True]):
        torch.library.opcheck(ops.gate_branches_backward.default, (make()[0], os, gates, wanted), test_utils=CHECKS)
    leaves = [[x.requires_grad_() for x in tensors] for tensors in (os, gates)]
    torch.library.opcheck(ops.gate_branches.default, tuple(leaves), test_utils=CHECKS)

    q, k, v = operands(130, gradients=False)[:3]
    lists = torch.zeros(1, 130, 2, 3, dtype=torch.int32, device="cuda")
    given, options = (q, k, v, lists, None, None, None, None, BLOCK, 1), heddle._options.pack(causal="bottom_right")
    o, lse = ops.sparse_attention(*given, *options)
    backward = (torch.randn_like(o), None, *given, o, lse, [True, True, True, False, False], *options)
    torch.library.opcheck(ops.sparse_attention_backward.default, backward, test_utils=CHECKS)
    leaves = (*(x.requires_grad_() for x in (q, k, v)), *given[3:])
    torch.library.opcheck(ops.sparse_attention.default, (*leaves, *options), test_utils=CHECKS)


def test_opcheck_of_what_the_caller_has():
    ops, checks = torch.ops.heddle, ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    q, k, v = operands(130, gradients=False)[:3]
    pooled = nsa.pool_keys(k, BLOCK)
    sample = (k, BLOCK, BLOCK, None, None, torch.empty_like(pooled))
    torch.library.opcheck(ops.pool_keys_out.default, sample, test_utils=checks)
    used = torch.full((1,), 130, dtype=torch.int32, device="cuda")
    sample = (k, torch.zeros_like(pooled), BLOCK, BLOCK, used, 6)
    torch.library.opcheck(ops.extend_pooled_keys.default, sample, test_utils=checks)
    lists = torch.zeros(1, 130, 2, 3, dtype=torch.int32, device="cuda")
    sample = (q, pooled, None, lists, BLOCK, None, None, 7, None, None, None, None, None, None, 1, 0, 0)
    torch.library.opcheck(ops.select_blocks_out.default, sample, test_utils=checks)
    options = heddle._options.pack(causal="bottom_right")
    for lse in (torch.empty(1, 8, 130, device="cuda"), None):
        sample = (q, k, v, lists, None, None, None, None, BLOCK, 1, torch.empty_like(q), lse, *options)
        torch.library.opcheck(ops.sparse_attention_out.default, sample, test_utils=checks)


def test_other_streams_and_gpus():
    """The copy into q is held up on a side stream: only a call on that stream comes after it."""
    x = operands(300, gradients=False)
    given = dict(block_counts=4, block_size=BLOCK, window_size=WINDOW)
    expected = nsa.parallel_nsa(*x, **given)
    late = torch.zeros_like(x[0])
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        late.copy_(x[0])
        o = nsa.parallel_nsa(late, *x[1:], **given)
    side.synchronize()
    assert torch.equal(o, expected)
    if torch.cuda.device_count() > 1:
        assert torch.equal(nsa.parallel_nsa(*(y.to("cuda:1") for y in x), **given).to("cuda:0"), expected)


def test_explained():
    q, k, v = operands(130, gradients=False)[:3]
    lists = torch.zeros(1, 130, 2, 3, dtype=torch.int32, device="cuda")
    for backward in (False, True):
        found = heddle.explain_sparse_attention(
            q, k, v, lists, block_size=BLOCK, causal="bottom_right", backward=backward
        )
        assert found.chosen is not None, "\n".join(f"{one.name}: {one.reason}" for one in found)


# ---------------------------------------------------------------- caches, the layer


@both_dtypes
@pytest.mark.parametrize("chunks", [[500, 1, 1, 1, 97], [64, 300, 200, 1]], ids=str)
def test_a_cache_gives_what_the_whole_gives(chunks, dtype):
    total = sum(chunks)
    q, k, v, *gates = operands(total, batch=3, dtype=dtype, gradients=False)
    expected = Expected(lambda *y: nsa.naive_nsa_with_compression(*y, EVERY, BLOCK, WINDOW), (q, k, v, *gates))
    cache = nsa.Cache(3, total + 5, 2, 128, block=BLOCK, dtype=dtype, device="cuda")
    begin = 0
    for n in chunks:
        rows = slice(begin, begin + n)
        o = nsa.nsa_with_cache(
            q[:, rows], k[:, rows], v[:, rows], cache, *(g[:, rows] for g in gates), EVERY, BLOCK, WINDOW
        )
        expected.assert_accurate(f"rows from {begin}", o, lambda y: y[:, rows])  # noqa: B023
        begin += n
    done = int(cache.complete(cache.lengths)[0])
    assert torch.equal(cache.k_pooled[:, :done], nsa.pool_keys(k, BLOCK)[:, :done])


def test_decoding_in_a_graph():
    q, k, v, *gates = operands(520, batch=3, gradients=False)
    caches = [nsa.Cache(3, 600, 2, 128, block=BLOCK, dtype=q.dtype, device="cuda") for _ in range(2)]
    rows = lambda begin, end: [x[:, begin:end] for x in (q, k, v, *gates)]  # noqa: E731

    def step(x, cache, count=4):
        return nsa.nsa_with_cache(*x[:3], cache, *x[3:], count, BLOCK, WINDOW)

    for cache in caches:
        step(rows(0, 500), cache)
    static = [x.clone() for x in rows(500, 501)]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(static, caches[1])
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step(static, caches[1])
    caches[1].lengths.fill_(500)
    for t in range(500, 520):
        for to, x in zip(static, rows(t, t + 1)):
            to.copy_(x)
        graph.replay()
        assert torch.equal(found, step(rows(t, t + 1), caches[0])), t
    assert caches[1].lengths.tolist() == [520] * 3


def layer(**options):
    torch.manual_seed(0)
    model = heddle.nn.NativeSparseAttention(
        256, 16, 4, 64, **{"block_size": BLOCK, "block_counts": EVERY, "window_size": WINDOW, **options}
    )
    return model, torch.randn(2, 300, 256)


@pytest.mark.parametrize("sharing", [None, *nsa.presets(4)])
def test_the_layer_is_that_of_the_cpu(sharing):
    model, x = layer(sharing=None if sharing is None else nsa.presets(4)[sharing])
    x.requires_grad_()
    expected = model(x)
    exact = torch.autograd.grad(expected.square().sum(), [x, *model.parameters()])
    there, y = model.cuda(), x.detach().cuda().requires_grad_()
    with torch.autocast("cuda", torch.bfloat16):
        o = there(y)
    assert_near("o", o.cpu(), expected, 2e-2)
    found = torch.autograd.grad(o.float().square().sum(), [y, *there.parameters()])
    for name, a, b in zip(("x", *(name for name, _ in there.named_parameters())), found, exact):
        assert_near("gradient of " + name, a.cpu(), b, 6e-2)


def test_the_layer_packed_and_decoding():
    model, x = layer()
    model, x = model.to("cuda", torch.bfloat16), x[:1].to("cuda", torch.bfloat16)
    with torch.no_grad():
        whole = model(x)
        two = torch.cat([x, x[:, :150]], 1)
        cu = torch.tensor([0, 300, 450], dtype=torch.int32, device="cuda")
        packed = model(two, cu_seqlens=cu, max_seqlen=300)
        assert_near("the first document", packed[:, :300], whole, 1e-2)
        assert_near("the second document", packed[:, 300:], whole[:, :150], 1e-2)
        cache = model.cache(1, 300)
        parts = [model(part, cache=cache) for part in x.split([290, *[1] * 10], 1)]
        assert_near("decoded", torch.cat(parts, 1), whole, 2e-2)
