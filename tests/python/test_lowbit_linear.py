"""heddle.lowbit.linear: against numpy on the dequantised weights, for numpy and torch; refusals."""

import dataclasses
import math

import heddle
import numpy as np
import pytest
import torch
from heddle import lowbit
from kit import normal

ERF = np.vectorize(math.erf, otypes=[np.float64])
BY_DEFINITION = {
    "none": lambda s: s,
    "relu": lambda s: np.maximum(s, 0),
    "gelu_erf": lambda s: s / 2 * (1 + ERF(s / math.sqrt(2))),
    "gelu_tanh": lambda s: s / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (s + 0.044715 * s**3))),
    "silu": lambda s: s / (1 + np.exp(-s)),
    "swiglu": lambda s: s[..., ::2] / (1 + np.exp(-s[..., ::2])) * s[..., 1::2],
}


@pytest.mark.parametrize("activation", lowbit.ACTIVATIONS)
@pytest.mark.parametrize("format", lowbit.FORMATS)
def test_is_what_numpy_computes(format, activation):
    q = lowbit.quantize(normal(70, 256) / 16, format)
    p = lowbit.pack(q, gated=activation == "swiglu")
    assert p.nbytes < 1.3 * q.nbytes + 16 * 256 + 4096 and p.format == format and p.shape == (70, 256)
    bias, x = normal(70), normal(2, 7, 256)
    expected = BY_DEFINITION[activation](x.astype(np.float64) @ q.dequantize().astype(np.float64).T + bias)
    residual = normal(*expected.shape)
    y = lowbit.linear(x, p, activation=activation, bias=bias, residual=residual)
    assert y.dtype == np.float32 and y.shape == expected.shape
    assert np.abs(y - (expected + residual)).max() < 1e-5
    one = lowbit.linear(x[1, 3], p, activation=activation, bias=bias, residual=residual[1, 3])
    assert np.array_equal(one, y[1, 3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_torch_tensors_of_any_dtype(dtype):
    q = lowbit.quantize(torch.from_numpy(normal(48, 64)), "nvfp4", rule="mse")
    p = lowbit.pack(q)
    assert isinstance(p.data, torch.Tensor) and repr(p) == f"PackedTensor(nvfp4, [48, 64], {p.nbytes} bytes)"
    x = torch.from_numpy(normal(20, 64)).to(dtype)
    y = lowbit.linear(x, p, activation="relu", bias=torch.ones(48, dtype=dtype))
    expected = torch.relu(x.double() @ q.dequantize().double().T + 1)
    assert y.dtype == dtype and (y - expected).abs().max() <= 2 * torch.finfo(dtype).eps * expected.abs().max()
    few = lowbit.linear(x[:3], p, batch_invariant=True)
    assert torch.equal(few, lowbit.linear(x, p, batch_invariant=True)[:3])


def test_rows_anywhere_and_results_in_place():
    p = lowbit.pack(lowbit.quantize(normal(32, 64), "int8_row"))
    x = torch.from_numpy(normal(5, 3, 128))[..., 64:].transpose(0, 1)
    y = lowbit.linear(x.contiguous(), p)
    assert torch.equal(lowbit.linear(x, p), y)
    residual = torch.from_numpy(normal(3, 5, 32))
    expected = residual + y
    assert lowbit.linear(x, p, residual=residual, out=residual) is residual
    assert torch.equal(residual, expected)
    assert lowbit.linear(x[:0], p).shape == (0, 5, 32)


def test_rows_in_8_bits():
    q = lowbit.quantize(normal(48, 256), "int4_g128")
    p, x = lowbit.pack(q), normal(5, 256)
    scale = np.abs(x).max(1, keepdims=True) / np.float32(127)
    rounded = np.rint(x / scale) * scale
    y = lowbit.linear(x, p, int8_x=True)
    expected = rounded.astype(np.float64) @ q.dequantize().astype(np.float64).T
    assert np.abs(y - expected).max() < 1e-5 * np.abs(expected).max() and not np.array_equal(y, lowbit.linear(x, p))


@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_in_front(norm, dtype):
    q = lowbit.quantize(torch.from_numpy(normal(48, 96)) / 10, "int8_row")
    p, x = lowbit.pack(q), torch.from_numpy(normal(3, 20, 96) + 5).to(dtype)
    weight, bias = (torch.from_numpy(normal(96)).to(dtype) for _ in range(2))
    xd, wd = x.double(), weight.double()
    if norm == "layer_norm":
        rows = torch.nn.functional.layer_norm(xd, (96,), wd, bias.double(), 1e-3)
        parameters = {"norm_weight": weight, "norm_bias": bias}
    else:
        rows, parameters = torch.nn.functional.rms_norm(xd, (96,), wd, 1e-3), {"norm_weight": weight}
    y = lowbit.linear(x, p, norm=norm, eps=1e-3, **parameters)
    expected = rows @ q.dequantize().double().T
    assert y.dtype == dtype and (y - expected).abs().max() <= max(2e-6, torch.finfo(dtype).eps * expected.abs().max())
    plain = lowbit.linear(
        x.float().numpy(), lowbit.pack(lowbit.quantize(q.dequantize().numpy(), "int8_row")), norm=norm
    )
    by_hand = xd / (xd**2).mean(-1, True).add(1e-5).sqrt()
    rows = torch.nn.functional.layer_norm(xd, (96,)) if norm == "layer_norm" else by_hand
    assert np.abs(plain - (rows @ q.dequantize().double().T).numpy()).max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_w8a8(dtype):
    q = lowbit.quantize(torch.from_numpy(normal(50, 4096 + 33)), "int8_row")
    p, x = lowbit.pack(q), torch.from_numpy(normal(5, 4096 + 33)).to(dtype)
    scale = x.float().abs().amax(1, keepdim=True) / 127
    integers = (x.float() / scale).round().to(torch.int64) @ q.codes.to(torch.int64).T
    expected = integers.double() * scale.double() * q.scales.double().T
    y = lowbit.linear(x, p, int8_x=True)
    assert (y - expected).abs().max() <= max(torch.finfo(dtype).eps, 5e-7) * expected.abs().max()


def misaligned(p):
    memory = np.empty(p.nbytes + 64, np.uint8)
    start = (32 - memory.ctypes.data) % 64
    return lowbit.PackedTensor(p.format, p.shape, p.gated, memory[start:][: p.nbytes])


def test_refusals():
    q = lowbit.quantize(normal(16, 32), "mxfp4")
    p, x = lowbit.pack(q), normal(2, 32)
    for match, call in [
        (r"x is \[2, 31\] and weights have 32 columns", lambda: lowbit.linear(x[:, :31], p)),
        ("activation is 'gelu': it must be one of none, relu", lambda: lowbit.linear(x, p, activation="gelu")),
        ("swiglu takes weights packed as gated", lambda: lowbit.linear(x, p, activation="swiglu")),
        ("int8_x is set and weights are nf4",
         lambda: lowbit.linear(normal(2, 64), lowbit.pack(lowbit.quantize(normal(16, 64), "nf4")), int8_x=True)),
        (r"bias is \[15\]: it must be \[N\] = \[16\]", lambda: lowbit.linear(x, p, bias=normal(15))),
        ("norm is 'batch': it must be one of none, layer_norm, rms_norm", lambda: lowbit.linear(x, p, norm="batch")),
        (r"norm_weight is \[31\]: it must be \[K\] = \[32\]",
         lambda: lowbit.linear(x, p, norm="rms_norm", norm_weight=normal(31))),
        ("norm_bias is given and norm is rms_norm",
         lambda: lowbit.linear(x, p, norm="rms_norm", norm_bias=normal(32))),
        ("norm_eps is -1: it must be finite", lambda: lowbit.linear(x, p, norm="rms_norm", eps=-1)),
        (r"residual is \[2, 15\]", lambda: lowbit.linear(x, p, residual=normal(2, 15))),
        (r"out is \[2, 15\]", lambda: lowbit.linear(x, p, out=normal(2, 15))),
        ("last dimension has stride 2", lambda: lowbit.linear(normal(2, 64)[:, ::2], p)),
        ("x is float64|float64", lambda: lowbit.linear(x.astype(np.float64), p)),
        ("force is 'gpu': the candidates are cpu, reference", lambda: lowbit.linear(x, p, force="gpu")),
        ("must be aligned to 64 bytes", lambda: lowbit.linear(x, misaligned(p))),
        (r"weights.data is \[", lambda: lowbit.linear(x, lowbit.PackedTensor("mxfp4", (16, 32), False, p.data[:-1]))),
        ("an even number", lambda: lowbit.pack(lowbit.quantize(normal(15, 32), "mxfp4"), gated=True)),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=match):
            call()
    with pytest.raises(TypeError, match="x is a list: it must be a numpy array or a torch tensor"):
        lowbit.linear([1.0], p)
    q.scales[0, 0] = 255
    with pytest.raises(ValueError, match=r"matrix.scales\[0, 0\] is nan: it must be finite"):
        lowbit.pack(q)


@pytest.mark.parametrize("format", lowbit.FORMATS)
def test_unpacked_weights_are_the_dequantised_ones(format):
    q = lowbit.quantize(normal(24, 128), format)
    found = lowbit.pack(q).unpack()
    assert np.array_equal(found, q.dequantize())


def test_names_are_the_librarys():
    assert lowbit.ACTIVATIONS[0] == "none" and lowbit.ACTIVATIONS[-1] == "swiglu" and len(lowbit.ACTIVATIONS) == 6
    assert lowbit.NORMS == ("none", "layer_norm", "rms_norm")
    assert lowbit.RULES == ("plain", "four_six", "mse", "floor", "round_up", "even")


def test_explain_names_candidates():
    p = lowbit.pack(lowbit.quantize(normal(16, 32), "mxfp4"))
    told = lowbit.explain(normal(3, 32), p)
    assert isinstance(told, heddle.Explanation) and told.chosen.name == "cpu" and told.chosen.plan in str(told)
    found = {c.name: c for c in told}
    assert found["cpu"].chosen and found["cpu"].of_16bit == 0 and not found["cublaslt"].supported
    reason = "another device" if heddle._heddle.cuda_built() else "built without CUDA"
    assert reason in found["cublaslt"].reason and "cublaslt_w8a8" in found


def test_what_is_for_gpus_is_refused_on_a_cpu():
    q = lowbit.quantize(torch.from_numpy(normal(16, 32)), "fp8_row")
    with pytest.raises(ValueError, match="keep_16bit is set and device is 'cpu'"):
        lowbit.pack(q, keep_16bit=True)
    with pytest.raises(ValueError, match="order is 'matrix' and device is 'cpu'"):
        lowbit.pack(q, order="matrix")
    with pytest.raises(ValueError, match="order is 'rows16' and device is 'cuda'"):
        lowbit.pack(q, device="cuda", order="rows16")
    kept = torch.zeros(16, 32, dtype=torch.bfloat16)
    p = dataclasses.replace(lowbit.pack(q), kept=kept)
    assert p.nbytes == p.data.nbytes + kept.nbytes
    with pytest.raises(ValueError, match="weights.kept is given and weights are on the CPU"):
        lowbit.linear(torch.from_numpy(normal(3, 32)), p)
