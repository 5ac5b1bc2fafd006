"""Linear layers by cuBLASLt on a GPU: kept and decoded weights, W8A8, gradients, heddle.nn.Linear; against float64."""

import pytest
import torch
from heddle import _heddle, lowbit
from heddle.nn import Linear

if not torch.cuda.is_available():
    pytest.skip("torch sees no GPU here", allow_module_level=True)
if not _heddle.cuda_built():
    pytest.skip("this build of heddle has no GPU kernels", allow_module_level=True)

UNIT = {torch.bfloat16: 2**-8, torch.float16: 2**-11}


def quantized(n, k, format="nvfp4", seed=0):
    return lowbit.quantize(torch.randn(n, k, generator=torch.Generator().manual_seed(seed)), format)


def close(found, exact, factor=2.0):
    error = (found.double() - exact).abs().max() / exact.abs().max()
    assert error <= factor * UNIT[found.dtype], error


@pytest.mark.parametrize("dtype", UNIT)
def test_every_format(dtype):
    x = torch.randn(37, 256, device="cuda", dtype=dtype)
    for format in lowbit.FORMATS:
        q = quantized(136, 256, format)
        packed = lowbit.pack(q, device="cuda", order="matrix")
        close(lowbit.linear(x, packed), x.double() @ q.dequantize().double().cuda().T)
        assert torch.equal(packed.unpack().cpu(), q.dequantize())


def test_keep_16bit():
    q = quantized(1024, 512)
    plain, kept = (lowbit.pack(q, device="cuda", keep_16bit=keep) for keep in (False, True))
    assert kept.kept.dtype == torch.bfloat16 and kept.nbytes == plain.nbytes + 2 * 1024 * 512
    assert torch.equal(kept.kept.cpu(), q.dequantize(torch.bfloat16))
    few, many = (torch.randn(m, 512, device="cuda", dtype=torch.bfloat16) for m in (2, 32768))
    chosen = {
        m.shape[0]: next(c.name for c in lowbit.explain(m, kept, activation="gelu_tanh") if c.chosen)
        for m in (few, many)
    }
    assert chosen[32768] == "cublaslt"
    by_name = {c.name: c for c in lowbit.explain(many, kept)}
    assert by_name["cublaslt"].of_16bit > 0
    for x in (few, many):
        close(lowbit.linear(x, kept, activation="gelu_tanh"),
              torch.nn.functional.gelu(x.double() @ q.dequantize().double().cuda().T, approximate="tanh"))  # fmt: skip
    with pytest.raises(ValueError, match="keep_16bit is set and device is 'cpu'"):
        lowbit.pack(q, keep_16bit=True)
    with pytest.raises(ValueError, match="the kept copy of W is bfloat16 and x is float16"):
        lowbit.linear(few.half(), kept, force="cublaslt")


def test_w8a8():
    x = torch.randn(65, 320, device="cuda", dtype=torch.bfloat16)
    q = quantized(200, 320, "int8_row")
    packed = lowbit.pack(q, device="cuda", order="matrix")
    exact = x.double() @ q.dequantize().double().cuda().T
    found = lowbit.linear(x, packed, int8_x=True)
    scale = x.float().abs().amax(1, keepdim=True) / 127
    close(found, (x.float() / scale).round().double() * scale.double() @ q.dequantize().double().cuda().T, 1)
    assert (found.double() - exact).norm() / exact.norm() < 0.012
    q = quantized(200, 320, "fp8_row")
    packed = lowbit.pack(q, device="cuda", fp8_x=True)
    assert packed.order == "matrix8"
    exact = x.double() @ q.dequantize().double().cuda().T
    assert (lowbit.linear(x, packed).double() - exact).norm() / exact.norm() < 0.035


@pytest.mark.parametrize("activation", lowbit.ACTIVATIONS)
def test_gradients(activation):
    gated = activation == "swiglu"
    q = quantized(128, 192)
    weights = (
        q.dequantize(torch.bfloat16).double().cuda()
    )  # as products have them: else z has another sign here and there
    layer = lambda x, bias, packed: lowbit.linear(x, packed, activation=activation, bias=bias)  # noqa: E731
    act = {
        "none": lambda z: z,
        "relu": torch.relu,
        "gelu_erf": torch.nn.functional.gelu,
        "gelu_tanh": lambda z: torch.nn.functional.gelu(z, approximate="tanh"),
        "silu": torch.nn.functional.silu,
        "swiglu": lambda z: torch.nn.functional.silu(z[..., ::2]) * z[..., 1::2],
    }[activation]
    for order, keep in (("fragments16", False), ("fragments16", True), ("matrix", False)):
        if order == "fragments16" and torch.cuda.get_device_capability()[0] != 9:
            continue
        packed = lowbit.pack(q, gated=gated, device="cuda", order=order, keep_16bit=keep)
        x = torch.randn(3, 17, 192, device="cuda", dtype=torch.bfloat16).requires_grad_()
        bias = torch.randn(128, device="cuda", dtype=torch.bfloat16).requires_grad_()
        y = layer(x, bias, packed)
        dy = torch.randn_like(y)
        y.backward(dy)
        exact_x, exact_bias = (t.detach().double().requires_grad_() for t in (x, bias))
        act(exact_x @ weights.T + exact_bias).backward(dy.double())
        close(x.grad, exact_x.grad, 4)  # z near 0 under relu, and dz, are rounded too
        close(bias.grad, exact_bias.grad, 4)
        x.grad = None
        layer(x, None, packed).sum().backward()  # an expanded dy
        assert x.grad.isfinite().all()


@pytest.mark.parametrize("format", ["int4_g128", "int4_g32_zp", "nf4", "fp4_bnb", "int8_row", "fp8_row", "mxfp4"])
def test_gradients_over_packed_weights(format):
    """The order of the forward's products serves the gradients: nothing is packed twice."""
    q = quantized(128, 256, format)
    packed = lowbit.pack(q, device="cuda")
    assert packed.order == "fragments16"
    assert torch.equal(packed.unpack(torch.bfloat16).cpu(), q.dequantize(torch.bfloat16))
    x = torch.randn(5, 256, device="cuda", dtype=torch.bfloat16).requires_grad_()
    y = lowbit.linear(x, packed)
    dy = torch.randn_like(y)
    y.backward(dy)
    close(x.grad, dy.double() @ q.dequantize().double().cuda(), 4)
    module = Linear.from_quantized(q).cuda()
    x.grad = None
    module(x).backward(dy)
    assert module._packed_weights(x.dtype).order == "fragments16"
    close(x.grad, dy.double() @ q.dequantize().double().cuda(), 4)


def test_module():
    torch.manual_seed(0)
    base = torch.nn.Linear(256, 384)
    norm = torch.nn.LayerNorm(256).cuda().bfloat16()
    for format in ("nvfp4", "nf4", "int8_row"):
        if format == "nvfp4" and torch.cuda.get_device_capability()[0] != 9:
            continue
        layer = Linear.from_linear(base, format, activation="silu", keep_16bit=True).cuda()
        x = torch.randn(5, 256, device="cuda", dtype=torch.bfloat16).requires_grad_()
        y = layer(x, norm=norm)
        y.sum().backward()
        assert x.grad.isfinite().all() and norm.weight.grad is not None and layer.bias.grad is not None
        weights = layer.dequantized().double()
        with torch.no_grad():
            close(layer(x), torch.nn.functional.silu(x.double() @ weights.T + layer.bias.double()), 4)
        assert list(layer._kept) == [torch.bfloat16]
    on_gpu = Linear.from_linear(torch.nn.Linear(256, 384).cuda(), "mxfp4")  # quantised where it is
    assert on_gpu.codes.is_cuda


def test_streams_and_graphs():
    q = quantized(512, 1024, "int4_g128")
    packed = lowbit.pack(q, device="cuda", order="matrix")
    x = torch.randn(300, 1024, device="cuda", dtype=torch.bfloat16)
    eager = lowbit.linear(x, packed, activation="silu")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = lowbit.linear(x, packed, activation="silu")
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, eager)


def test_refusals():
    x = torch.randn(4, 64, device="cuda", dtype=torch.bfloat16)
    packed = lowbit.pack(quantized(64, 64, "nf4"), device="cuda", order="matrix")
    with pytest.raises(ValueError, match="batch_invariant|order of its sums"):
        lowbit.linear(x, packed, batch_invariant=True)
    with pytest.raises(ValueError, match="order matrix8 has fp8_row"):
        lowbit.pack(quantized(64, 64, "nf4"), device="cuda", order="matrix8")
    with pytest.raises(ValueError, match="int8_x is not set"):
        lowbit.linear(
            x, lowbit.pack(quantized(64, 64, "int8_row"), device="cuda", order="matrix"), force="cublaslt_w8a8"
        )
