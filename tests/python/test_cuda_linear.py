"""heddle.lowbit.linear on a GPU: against float64, streams, graphs, and what is refused."""

import heddle
import pytest
import torch
from heddle import _heddle, lowbit

if not torch.cuda.is_available():
    pytest.skip("torch sees no GPU here", allow_module_level=True)
if not _heddle.cuda_built():
    pytest.skip("this build of heddle has no GPU kernels", allow_module_level=True)
HOPPER = torch.cuda.get_device_capability()[0] == 9

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


@pytest.mark.parametrize("format", [*lowbit.FORMATS, "nf4_b256", "fp4_bnb_b32"])
@pytest.mark.parametrize("m", [5, 70])
def test_every_format(format, m):
    """By the kernel that is for all of them, and by the one that is chosen."""
    weights, packed = layer(200, 768, format)
    for dtype in DTYPES.values():
        x = torch.randn(m, 768, device="cuda").to(dtype)
        exact = x.double() @ weights.T
        close(lowbit.linear(x, packed, force="sm80_linear"), exact)
        close(lowbit.linear(x, packed), exact)


@pytest.mark.parametrize("format", lowbit.FORMATS)
def test_module_moves_to_the_gpu(format):
    """heddle.nn.Linear packs its weights anew there, whatever they are."""
    module = heddle.nn.Linear(256, 96, activation="silu").quantize(format).bfloat16()
    x = torch.randn(9, 256).bfloat16()
    with torch.no_grad():
        expected = module(x)
        found = module.cuda()(x.cuda())
        close(found.cpu(), expected.double(), 3.0)
        assert torch.equal(module.cpu()(x), expected)


def test_only_some_formats_have_a_kernel_of_their_own():
    _, packed = layer(256, 512, "int4_g128")
    x = torch.randn(8, 512, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="it takes nvfp4, mxfp4 and e2m1_row, not int4_g128"):
        lowbit.linear(x, packed, force="sm90_w4a16")


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


@pytest.mark.skipif(not HOPPER, reason="x in 8 bits is for Hopper")
@pytest.mark.parametrize("m", [3, 64, 150, 600])
@pytest.mark.parametrize("format", ["mxfp4", "nvfp4", "e2m1_row"])
def test_x_in_8_bits(m, format):
    weights, packed = layer(256, 512, format, fp8_x=True)
    assert packed.order == "fragments8"
    if format == "nvfp4":  # rounded to e4m3 too
        products = packed.unpack(torch.float32).double()
        assert ((products - weights).abs() <= weights.abs() / 16).all() and not torch.equal(products, weights)
        assert (products - weights).norm() < 0.025 * weights.norm()
        weights = products
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
    with pytest.raises(ValueError, match="fp8_x is set and the format is nf4"):
        lowbit.pack(lowbit.quantize(torch.randn(64, 64), "nf4"), device="cuda", fp8_x=True)
    with pytest.raises(ValueError, match="sm90_w4a8"):
        lowbit.linear(x.bfloat16(), packed, force="sm90_w4a8")
    assert heddle.lowbit.linear(x[:0].bfloat16(), packed).shape == (0, 64)
