"""Programs that set torch's default device: what is made inside lies where its operands, or kernels of the CPU, want it."""

import pytest

torch = pytest.importorskip("torch")

import heddle  # noqa: E402
import heddle.nn  # noqa: E402
from heddle import lowbit  # noqa: E402


@pytest.fixture(autouse=True)
def elsewhere():
    """Tensors that are made without saying where have no memory in these tests."""
    with torch.device("meta"):
        yield


def on_cpu(*shape):
    return torch.randn(*shape, device="cpu")


@pytest.mark.parametrize("options", [{}, dict(dropout_p=0.25), dict(dropout_p=0.25, dropout_seed=3)], ids=str)
def test_attention(options):
    q, k, v = (on_cpu(1, 9, 2, 8).requires_grad_() for _ in range(3))
    out = heddle.attention(q, k, v, causal="top_left", **options)
    out.sum().backward()
    assert out.device.type == q.grad.device.type == "cpu"
    assert out.isfinite().all() and q.grad.isfinite().all()


@pytest.mark.parametrize("format", ["nvfp4", "int8_row", "int4_g32_zp"])
def test_weights(format):
    weight, x = on_cpu(16, 64), on_cpu(3, 64)
    packed = lowbit.pack(lowbit.quantize(weight, format))
    y = lowbit.linear(x, packed)
    assert y.device.type == "cpu" and (y - x @ weight.T).norm() < 0.3 * (x @ weight.T).norm()


def test_modules():
    layer = heddle.nn.Linear.from_linear(torch.nn.Linear(64, 16, device="cpu"), "fp8_row")
    assert layer(on_cpu(3, 64)).shape == (3, 16)
    whole = torch.nn.Linear(8, 6, device="cpu")
    assert torch.equal(heddle.nn.ColumnParallelLinear(whole).weight, whole.weight)
    block = heddle.nn.TransformerBlock(64, 4, 96, causal="top_left", device="cpu")
    block.qkv.quantize("nvfp4")
    assert block(on_cpu(1, 5, 64)).isfinite().all()
