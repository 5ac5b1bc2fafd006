"""heddle.lowbit.linear on a GPU: against float64, streams, graphs, and what is refused."""

import pytest
import torch

import heddle
from heddle import _heddle, lowbit

if not torch.cuda.is_available():
    pytest.skip("torch sees no GPU here", allow_module_level=True)
if not _heddle.cuda_built():
    pytest.skip("this build of heddle has no GPU kernels", allow_module_level=True)
if torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("linear layers on GPUs need a Hopper GPU", allow_module_level=True)

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}
UNIT = {torch.bfloat16: 2**-8, torch.float16: 2**-11}


def layer(n, k, format="nvfp4", gated=False, fp8_x=False, seed=0):
    generator = torch.Generator().manual_seed(seed)
    quantized = lowbit.quantize(torch.randn(n, k, generator=generator), format)
    return quantized.dequantize().double().cuda(), lowbit.pack(quantized, gated=gated, device="cuda", fp8_x=fp8_x)


def close(found, exact, factor=2.0):
    """Rounded once to its dtype, and summed in float32: relative to the largest terms."""
    error = (found.double() - exact).abs().max() / exact.abs().max()
    assert error <= factor * UNIT[found.dtype], error


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("m", [1, 7, 16, 33, 100, 300])
def test_matches_float64(name, m):
    weights, packed = layer(264, 320)
    x = torch.randn(m, 320, device="cuda").to(DTYPES[name])
    close(lowbit.linear(x, packed), x.double() @ weights.T)


def test_epilogue_and_leading_dimensions():
    weights, packed = layer(512, 256, gated=True)
    x = torch.randn(2, 5, 3, 256, device="cuda", dtype=torch.bfloat16)
    bias = torch.randn(512, device="cuda", dtype=torch.bfloat16)
    residual = torch.randn(2, 5, 3, 256, device="cuda", dtype=torch.bfloat16)
    sums = x.double() @ weights.T + bias.double()
    exact = torch.nn.functional.silu(sums[..., 0::2]) * sums[..., 1::2] + residual.double()
    close(lowbit.linear(x, packed, activation="swiglu", bias=bias, residual=residual), exact)
    out = residual.clone()
    assert lowbit.linear(x, packed, activation="swiglu", bias=bias, residual=out, out=out) is out
    close(out, exact)


@pytest.mark.parametrize("m", [3, 64, 150])
def test_x_in_8_bits(m):
    weights, packed = layer(256, 512, "mxfp4", fp8_x=True)
    assert packed.order == "fragments8"
    x = torch.randn(m, 512, device="cuda", dtype=torch.bfloat16)
    exact = x.double() @ weights.T
    error = (lowbit.linear(x, packed).double() - exact).norm() / exact.norm()
    assert error < 0.035, error  # e4m3 rounds by up to a sixteenth, evenly spread: 2^-4 / sqrt(3) at most


def test_streams_and_graphs():
    weights, packed = layer(512, 4096)
    x = torch.randn(16, 4096, device="cuda", dtype=torch.bfloat16)
    eager = lowbit.linear(x, packed)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        other = lowbit.linear(x, packed)
    stream.synchronize()
    assert torch.equal(other, eager)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = lowbit.linear(x, packed)
    for _ in range(20):
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, eager)
    x.copy_(torch.randn_like(x))
    graph.replay()
    close(captured, x.double() @ weights.T)


def test_layers_that_follow_each_other():
    """Launches overlap: each waits for what the one before writes."""
    first, packed_first = layer(1024, 1024, seed=1)
    second, packed_second = layer(1024, 1024, seed=2)
    x = torch.randn(16, 1024, device="cuda", dtype=torch.bfloat16)
    expected = lowbit.linear(lowbit.linear(x, packed_first), packed_second).clone()
    torch.cuda.synchronize()
    for _ in range(200):
        found = lowbit.linear(lowbit.linear(x, packed_first), packed_second)
    assert torch.equal(found, expected)


def test_refusals():
    _, packed = layer(64, 64)
    x = torch.randn(4, 64, device="cuda")
    with pytest.raises(ValueError, match="float16 or bfloat16"):
        lowbit.linear(x, packed)
    with pytest.raises(ValueError, match="another device"):
        lowbit.linear(x.cpu().bfloat16(), packed)
    with pytest.raises(ValueError, match="order fragments16 has"):
        lowbit.pack(lowbit.quantize(torch.randn(64, 64), "nf4"), device="cuda")
    with pytest.raises(ValueError, match="order fragments8 has"):
        lowbit.pack(lowbit.quantize(torch.randn(64, 64), "nvfp4"), device="cuda", fp8_x=True)
    with pytest.raises(ValueError, match="sm90_w4a8"):
        lowbit.linear(x.bfloat16(), packed, force="sm90_w4a8")
    assert heddle.lowbit.linear(x[:0].bfloat16(), packed).shape == (0, 64)
