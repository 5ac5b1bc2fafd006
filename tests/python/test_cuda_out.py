"""Results on a GPU that go where the caller says."""

import heddle
import pytest
import torch
from heddle import _heddle, lowbit, nsa
from out_kit import check_frame, framed

pytestmark = pytest.mark.skipif(
    not (_heddle.cuda_built() and torch.cuda.is_available()), reason="needs a GPU and a build with CUDA"
)


def normal(*shape, seed=0, dtype=torch.bfloat16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to("cuda", dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_attention(dtype):
    q, k, v = (normal(2, 300, h, 64, seed=h, dtype=dtype) for h in (8, 2, 2))
    expected = heddle.attention(q, k, v, causal="top_left", return_lse=True)
    (whole, out), (whole_lse, lse) = map(framed, expected)
    found = heddle.attention(q, k, v, causal="top_left", return_lse=True, out=out, lse_out=lse)
    assert found[0] is out and found[1] is lse
    check_frame(whole, out, expected[0])
    check_frame(whole_lse, lse, expected[1])
    with pytest.raises(ValueError, match="out is on another device than q"):
        heddle.attention(q, k, v, out=torch.empty_like(q, device="cpu"))
    with pytest.raises(ValueError, match="out shares memory with q"):
        heddle.attention(q, q, q, out=q)


def test_caches_and_rotary():
    q, new = normal(2, 1, 8, 64), normal(2, 1, 2, 64, seed=1)
    k_cache, v_cache = normal(2, 256, 2, 64, seed=2), normal(2, 256, 2, 64, seed=3)
    at = torch.tensor([200, 17], dtype=torch.int32, device="cuda")
    expected = heddle.attention_with_kv_cache(q, new, new, k_cache, v_cache, at, return_lse=True)
    (whole, out), (whole_lse, lse) = map(framed, expected)
    found = heddle.attention_with_kv_cache(q, new, new, k_cache, v_cache, at, return_lse=True, out=out, lse_out=lse)
    assert found[0] is out and found[1] is lse
    check_frame(whole, out, expected[0])
    check_frame(whole_lse, lse, expected[1])
    cos, sin = normal(256, 32, seed=4), normal(256, 32, seed=5)
    expected = heddle.apply_rotary(q, cos, sin, offsets=at)
    assert heddle.apply_rotary(q, cos, sin, offsets=at, out=q) is q and torch.equal(q, expected)
    held = heddle.Int4Cache.empty(2, 400, 2, 64, device="cuda")
    held.append(normal(2, 150, 2, 64), normal(2, 150, 2, 64, seed=1), at * 0)
    expected, out = held.attention(q, at * 0 + 150), torch.empty_like(q)
    assert held.attention(q, at * 0 + 150, out=out) is out and torch.equal(out, expected)


def test_linear_and_weights():
    q = lowbit.quantize(normal(64, 128), "nvfp4")
    packed, x, residual = lowbit.pack(q, device="cuda"), normal(5, 128), normal(5, 64, seed=1)
    expected = lowbit.linear(x, packed, activation="silu", residual=residual)
    assert lowbit.linear(x, packed, activation="silu", residual=residual, out=residual) is residual
    assert torch.equal(residual, expected)
    out = torch.empty(64, 128, device="cuda")
    assert q.dequantize(out=out) is out and torch.equal(out, q.dequantize())
    assert packed.unpack(out=out) is out and torch.equal(out, packed.unpack())
    other = lowbit.quantize(normal(64, 128, seed=9), "nvfp4")
    assert lowbit.quantize(normal(64, 128), "nvfp4", out=other) is other and torch.equal(other.codes, q.codes)


def steps_of_nsa(steps):
    """Two caches with the same 300 keys, and the rows of some steps of decoding behind them."""
    k, v = normal(2, 300, 2, 64, seed=1), normal(2, 300, 2, 64, seed=2)
    caches = [nsa.Cache(2, 400, 2, 64, dtype=k.dtype, device="cuda") for _ in range(2)]
    for held in caches:
        held.append(k, v)
    rows = [
        (
            *(normal(2, 1, h, 64, seed=10 * t + h) for h in (8, 2, 2)),
            *(normal(2, 1, 8, seed=10 * t + g) for g in (3, 4, 5)),
        )
        for t in range(1, steps + 1)
    ]
    return caches, rows


def step_of_nsa(held, q, k, v, *gates, **options):
    return nsa.nsa_with_cache(q, k, v, held, *gates, 3, 64, 100, **options)


def test_native_sparse_attention():
    q, k = normal(2, 300, 8, 64), normal(2, 300, 2, 64, seed=1)
    pooled = nsa.pool_keys(k, 64, 32)
    whole, out = framed(pooled)
    assert nsa.pool_keys(k, 64, 32, out=out) is out
    check_frame(whole, out, pooled)
    sizes = dict(block_size=64, compression_block=64, compression_stride=32)
    lists = nsa.select_blocks(q, pooled, 4, **sizes)
    whole, out = framed(lists)
    assert nsa.select_blocks(q, pooled, 4, **sizes, out=out) is out
    check_frame(whole, out, lists)
    caches, rows = steps_of_nsa(1)
    expected = step_of_nsa(caches[0], *rows[0])
    whole, out = framed(expected)
    assert step_of_nsa(caches[1], *rows[0], out=out) is out
    check_frame(whole, out, expected)
    with pytest.raises(ValueError, match="out is on another device than x"):
        nsa.pool_keys(k, 64, 32, out=pooled.cpu())
    with pytest.raises(ValueError, match="out shares memory with q"):
        step_of_nsa(caches[1], *rows[0], out=rows[0][0])
    assert caches[1].lengths.tolist() == [301, 301]


def test_gated_sums():
    os, gates = (
        [normal(2, 9, 4, 64, seed=n) for n in range(3)],
        [normal(2, 9, 4, dtype=torch.float32) for _ in range(3)],
    )
    expected = torch.ops.heddle.gate_branches(os, gates)
    whole, out = framed(expected)
    torch.ops.heddle.gate_branches_out(os, gates, out)
    check_frame(whole, out, expected)
    checks = ["test_schema", "test_faketensor", "test_aot_dispatch_dynamic"]
    sample = (os, gates, torch.empty_like(expected))
    torch.library.opcheck(torch.ops.heddle.gate_branches_out.default, sample, test_utils=checks)


def test_native_sparse_attention_in_a_graph():
    caches, rows = steps_of_nsa(4)
    static, out = [x.clone() for x in rows[0]], torch.empty_like(rows[0][0])
    with torch.no_grad():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step_of_nsa(caches[1], *static, out=out)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step_of_nsa(caches[1], *static, out=out)
        caches[1].lengths.fill_(300)
        for x in rows:
            for to, value in zip(static, x):
                to.copy_(value)
            graph.replay()
            assert torch.equal(out, step_of_nsa(caches[0], *x))


def test_native_sparse_attention_compiled():
    caches, rows = steps_of_nsa(1)
    expected, out = step_of_nsa(caches[0], *rows[0]), torch.empty_like(rows[0][0])
    compiled = torch.compile(
        lambda x, out: step_of_nsa(caches[1], *x, out=out) * 2, backend="aot_eager", fullgraph=True
    )
    assert torch.equal(compiled(rows[0], out), 2 * expected) and torch.equal(out, expected)


def test_capture_into_a_graph():
    q, k, v = (normal(2, 96, h, 64, seed=h) for h in (8, 2, 2))
    out = torch.empty_like(q)
    heddle.attention(q, k, v, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        heddle.attention(q, k, v, out=out)
    q.copy_(normal(2, 96, 8, 64, seed=20))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, heddle.attention(q, k, v))


def test_compiled():
    q, k, v = (normal(2, 96, h, 64, seed=h) for h in (8, 2, 2))
    out = torch.empty_like(q)
    compiled = torch.compile(lambda q, k, v, out: heddle.attention(q * 2, k, v, out=out) + 1, backend="aot_eager")
    expected = heddle.attention(q * 2, k, v)
    assert torch.equal(compiled(q, k, v, out), expected + 1) and torch.equal(out, expected)
