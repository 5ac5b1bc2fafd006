"""Results on a GPU that go where the caller says."""

import heddle
import pytest
import torch
from heddle import _heddle, lowbit

pytestmark = pytest.mark.skipif(
    not (_heddle.cuda_built() and torch.cuda.is_available()), reason="needs a GPU and a build with CUDA"
)


def normal(*shape, seed=0, dtype=torch.bfloat16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to("cuda", dtype)


def framed(like):
    """Memory for a result amid a larger tensor of sevens."""
    whole = torch.full([n + 8 for n in like.shape], 7.0, dtype=like.dtype, device="cuda")
    return whole, whole[tuple(slice(0, n) for n in like.shape)]


def check(whole, view, expected):
    assert torch.equal(view, expected)
    assert int((whole != 7).sum()) <= expected.numel(), "written outside"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_attention(dtype):
    q, k, v = (normal(2, 300, h, 64, seed=h, dtype=dtype) for h in (8, 2, 2))
    expected = heddle.attention(q, k, v, causal="top_left", return_lse=True)
    (whole, out), (whole_lse, lse) = map(framed, expected)
    found = heddle.attention(q, k, v, causal="top_left", return_lse=True, out=out, lse_out=lse)
    assert found[0] is out and found[1] is lse
    check(whole, out, expected[0])
    check(whole_lse, lse, expected[1])
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
    check(whole, out, expected[0])
    check(whole_lse, lse, expected[1])
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
