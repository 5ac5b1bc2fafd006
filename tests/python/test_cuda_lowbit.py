"""heddle.lowbit's quantize and dequantize on a GPU: the CPU's bytes, streams, and what is refused."""

import pytest
import torch
from heddle import _heddle, lowbit

if not torch.cuda.is_available():
    pytest.skip("torch sees no GPU here", allow_module_level=True)
if not _heddle.cuda_built():
    pytest.skip("this build of heddle has no GPU kernels", allow_module_level=True)

PARTS = ("codes", "scales", "zeros", "global_scale")


def same(found, expected):
    for name in PARTS:
        x, y = getattr(found, name), getattr(expected, name)
        assert (x is None) == (y is None), name
        if x is not None:
            assert x.is_cuda and x.dtype == y.dtype and torch.equal(x.cpu().view(torch.uint8), y.view(torch.uint8)), (
                name
            )


@pytest.mark.parametrize("format", lowbit.FORMATS)
def test_bytes_of_the_cpu(format):
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        weights = torch.randn(96, 640, generator=torch.Generator().manual_seed(1)).to(dtype)
        for rule in ("plain", "mse"):
            expected = lowbit.quantize(weights, format, rule=rule)
            found = lowbit.quantize(weights.cuda(), format, rule=rule)
            same(found, expected)
        for to in (torch.float32, torch.float16, torch.bfloat16):
            back = found.dequantize(to)
            assert back.is_cuda and torch.equal(back.cpu(), expected.dequantize(to))


def test_strides_importance_and_global_scale():
    weights = torch.randn(256, 64, generator=torch.Generator().manual_seed(2))
    importance = torch.rand(256)
    expected = lowbit.quantize(weights.T, "nvfp4", rule="mse", importance=importance, global_scale=0.01)
    found = lowbit.quantize(weights.cuda().T, "nvfp4", rule="mse", importance=importance.cuda(), global_scale=0.01)
    same(found, expected)


def test_streams():
    """What is quantised is what the stream has written before."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        weights = torch.zeros(4096, 4096, device="cuda", dtype=torch.bfloat16)
        for _ in range(20):
            weights = weights + 1
        found = lowbit.quantize(weights, "nvfp4")
        back = found.dequantize(torch.bfloat16)
        exact = bool((back == 20).all())  # waits for this stream
    assert exact


def test_refusals():
    weights = torch.randn(4, 64, device="cuda")
    weights[2, 5] = float("nan")
    with pytest.raises(ValueError, match=r"weights\[2, 5\] is nan"):
        lowbit.quantize(weights, "nvfp4")
    with pytest.raises(ValueError, match="importance is on another device"):
        lowbit.quantize(weights, "nvfp4", rule="mse", importance=torch.ones(64))
    q = lowbit.quantize(torch.randn(4, 64, device="cuda"), "nvfp4")
    with pytest.raises(ValueError, match="on a GPU|this operation runs on the CPU"):
        q.error(torch.randn(4, 64))
