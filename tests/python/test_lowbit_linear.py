"""heddle.lowbit.linear: against numpy on the dequantised weights, for numpy and torch; refusals."""

import dataclasses
import math

import heddle
import numpy as np
import pytest
import torch
from heddle import lowbit

RANDOM = np.random.default_rng(0)


def normal(*shape):
    return RANDOM.standard_normal(shape).astype(np.float32)


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
    plain = lowbit.linear(x.float().numpy(), lowbit.pack(lowbit.quantize(q.dequantize().numpy(), "int8_row")), norm=norm)
    by_hand = xd / (xd**2).mean(-1, True).add(1e-5).sqrt()
    rows = torch.nn.functional.layer_norm(xd, (96,)) if norm == "layer_norm" else by_hand
    assert np.abs(plain - (rows @ q.dequantize().double().T).numpy()).max() < 1e-5


def outlying(rows, columns, generator):
    """x whose columns differ in size, a few by 50, as behind the norms of trained models."""
    size = torch.exp(0.5 * torch.randn(columns, generator=generator))
    size[::37] *= 50
    return torch.randn(rows, columns, generator=generator) * size


def test_smooth_is_exact_in_floats_and_helps_8_bits():
    generator = torch.Generator().manual_seed(1)
    x, weight = outlying(64, 256, generator), torch.randn(256, generator=generator)
    w = torch.randn(96, 256, generator=generator) / 16
    rows = torch.nn.functional.rms_norm(x, (256,), weight)
    s = lowbit.smooth(w, rows.abs().amax(0))
    assert s.dtype == torch.float32 and bool((torch.frexp(s)[0] == 0.5).all())
    smoothed = torch.nn.functional.rms_norm(x, (256,), weight / s)
    assert torch.equal(smoothed * s, rows) and torch.equal((smoothed * s)[:, None] * w, rows[:, None] * w)
    products = (smoothed[:, None] * (w * s)[None], rows[:, None] * w[None])
    assert torch.equal(*products)

    exact = rows.double() @ w.double().T
    errors = {}
    for name, matrix, parameter in (("plain", w, weight), ("smooth", w * s, weight / s)):
        p = lowbit.pack(lowbit.quantize(matrix, "int8_row"))
        y = lowbit.linear(x, p, norm="rms_norm", norm_weight=parameter, eps=torch.finfo(torch.float32).eps, int8_x=True)
        errors[name] = ((y - exact).norm() / exact.norm()).item()
    assert errors["smooth"] < 0.4 * errors["plain"], errors


def test_smooth_by_its_definition():
    w = [normal(5, 8), 3 * normal(7, 8)]
    largest = np.abs(np.concatenate(w)).max(0)
    x_absmax = np.exp(normal(8))
    w[0][:, 3] = w[1][:, 3] = 0
    x_absmax[5] = 0
    for alpha in (0, 0.3, 0.5, 1):
        s = lowbit.smooth(w, x_absmax, alpha)
        assert s.dtype == np.float32 and s[3] == s[5] == 1
        used, w_absmax, factors = (np.delete(a.astype(np.float64), [3, 5]) for a in (x_absmax, largest, s))
        ratio = factors / (used**alpha / w_absmax ** (1 - alpha))
        assert (ratio >= 2**-0.5001).all() and (ratio <= 2**0.5001).all()
    for match, call in [
        ("alpha is 1.5", lambda: lowbit.smooth(w, x_absmax, 1.5)),
        (r"weights are \[5, 7\]: they must be \[N, 8\]", lambda: lowbit.smooth(w[0][:, :7], x_absmax)),
        (r"x_absmax is \[8, 1\]", lambda: lowbit.smooth(w, x_absmax[:, None])),
        ("x_absmax has a negative number", lambda: lowbit.smooth(w, x_absmax - 9)),
        ("weights has a NaN", lambda: lowbit.smooth(w[0] * np.nan, x_absmax)),
    ]:
        with pytest.raises(ValueError, match=match):
            call()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_w8a8(dtype):
    q = lowbit.quantize(torch.from_numpy(normal(50, 4096 + 33)), "int8_row")
    p, x = lowbit.pack(q), torch.from_numpy(normal(5, 4096 + 33)).to(dtype)
    scale = x.float().abs().amax(1, keepdim=True) / 127
    integers = (x.float() / scale).round().to(torch.int64) @ q.codes.to(torch.int64).T
    expected = integers.double() * scale.double() * q.scales.double().T
    y = lowbit.linear(x, p, int8_x=True)
    assert (y - expected).abs().max() <= max(torch.finfo(dtype).eps, 5e-7) * expected.abs().max()


def double_layer(q, activation, norm, eps):
    """The layer in torch, in double, on the stored weights."""
    w = q.dequantize().double()
    f = torch.nn.functional
    activate = {
        "none": lambda z: z, "relu": torch.relu, "gelu_erf": f.gelu, "gelu_tanh": lambda z: f.gelu(z, approximate="tanh"),
        "silu": f.silu, "swiglu": lambda z: f.silu(z[..., ::2]) * z[..., 1::2],
    }[activation]  # fmt: skip

    def layer(x, bias, residual, norm_weight, norm_bias):
        if norm == "layer_norm":
            x = f.layer_norm(x, x.shape[-1:], norm_weight, norm_bias, eps)
        elif norm == "rms_norm":
            x = f.rms_norm(x, x.shape[-1:], norm_weight, eps)
        return activate(x @ w.T + bias) + residual

    return layer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm", lowbit.NORMS)
@pytest.mark.parametrize("activation", lowbit.ACTIVATIONS)
def test_gradients_are_those_of_torch(activation, norm, dtype):
    q = lowbit.quantize(torch.from_numpy(normal(48, 96)) / 10, "mxfp4")
    p = lowbit.pack(q, gated=activation == "swiglu")
    outputs = 24 if activation == "swiglu" else 48
    shapes = {"x": (3, 7, 96), "bias": (48,), "residual": (3, 7, outputs), "norm_weight": (96,), "norm_bias": (96,)}
    tensors = {name: torch.from_numpy(normal(*shape)).to(dtype).requires_grad_() for name, shape in shapes.items()}
    if norm == "none":
        del tensors["norm_weight"]
    if norm != "layer_norm":
        del tensors["norm_bias"]
    doubles = {name: t.detach().double().requires_grad_() for name, t in tensors.items()}
    y = lowbit.linear(weights=p, activation=activation, norm=norm, eps=1e-3, **tensors)
    expected = double_layer(q, activation, norm, 1e-3)(**{name: doubles.get(name) for name in shapes})
    weight = torch.from_numpy(normal(*y.shape)).to(dtype)
    found = torch.autograd.grad((y * weight).sum(), list(tensors.values()))
    wanted = torch.autograd.grad((expected * weight.double()).sum(), list(doubles.values()))
    for name, a, b in zip(tensors, found, wanted):
        assert a.dtype == dtype and a.shape == b.shape
        # Norms, as a sum that rounding moves across 0 turns one row of ReLU's gradient on or off.
        bound = 2e-6 if dtype is torch.float32 else 0.1 if activation == "relu" else 2e-2
        assert (a - b).norm() <= bound * b.norm(), name


def test_gradients_by_every_way():
    """autograd, the operator, a compiled function and checkpointing agree to the bit; expanded and strided dy are taken."""
    q = lowbit.quantize(torch.from_numpy(normal(32, 64)), "nvfp4")
    p = lowbit.pack(q)
    x = torch.from_numpy(normal(5, 64)).requires_grad_()
    bias = torch.from_numpy(normal(32)).requires_grad_()
    weight = torch.from_numpy(normal(64)).requires_grad_()

    def call(x, bias, weight):
        return lowbit.linear(x, p, activation="silu", bias=bias, norm="rms_norm", norm_weight=weight)

    def operator(x, bias, weight):
        options = (p.format, 32, 64, False, p.order, "silu", "rms_norm", 1e-5, False, False, "")
        return torch.ops.heddle.linear_forward(x, bias, None, weight, None, p.data, None, *options)

    ways = {
        "autograd": call,
        "operator": operator,
        "compiled": torch.compile(call, backend="aot_eager", fullgraph=True),
        "checkpoint": lambda *t: torch.utils.checkpoint.checkpoint(call, *t, use_reentrant=False),
    }
    results = {}
    for name, way in ways.items():
        y = way(x, bias, weight)
        results[name] = (y.detach(), *torch.autograd.grad(y.sum(), (x, bias, weight)))
    for name, found in results.items():
        for a, b in zip(found, results["autograd"]):
            assert torch.equal(a, b), name
    dx = torch.autograd.grad(call(x, bias, weight).t(), x, torch.ones(32, 5))[0]
    assert torch.equal(dx, results["autograd"][1])
    assert torch.library.opcheck(
        torch.ops.heddle.linear_forward,
        (x, bias, None, weight, None, p.data, None, p.format, 32, 64, False, p.order, "silu", "rms_norm", 1e-5, False, False, ""),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )


def test_what_is_kept_for_the_backward():
    p = lowbit.pack(lowbit.quantize(torch.from_numpy(normal(16, 32)), "mxfp4"))
    x = torch.from_numpy(normal(2, 32)).requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        lowbit.linear(x, p, residual=torch.ones(2, 16))
        assert [t.dtype for t in kept] == [torch.uint8]
        lowbit.linear(x, p, activation="silu", bias=torch.ones(16))
        assert [tuple(t.shape) for t in kept[1:]] == [(2, 32), (16,), tuple(p.data.shape)]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        a = x * 1
        y = lowbit.linear(a, p, activation="silu")
        a.mul_(2)
        y.sum().backward()


def test_gradients_that_there_are_not():
    p = lowbit.pack(lowbit.quantize(torch.from_numpy(normal(16, 32)), "mxfp4"))
    x = torch.ones(2, 32, requires_grad=True)
    with pytest.raises(RuntimeError, match="x requires a gradient, which a call with `out` does not have"):
        lowbit.linear(x, p, out=torch.empty(2, 16))
    with torch.no_grad():
        assert lowbit.linear(x, p, out=torch.empty(2, 16)).shape == (2, 16)
        assert not lowbit.linear(x, p).requires_grad
    dx = torch.autograd.grad(lowbit.linear(x, p, activation="silu").sum(), x, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="second derivatives are not supported"):
        dx.sum().backward()


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
        (r"y is \[2, 15\]", lambda: lowbit.linear(x, p, out=normal(2, 15))),
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


def test_explain_names_candidates():
    p = lowbit.pack(lowbit.quantize(normal(16, 32), "mxfp4"))
    found = {c.name: c for c in lowbit.explain(normal(3, 32), p)}
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


def calibrated_error(w, x, c, format, rule):
    """What quantising as the calibration says gives, computed here in double."""
    q = lowbit.quantize(w * c.scales, format, rule=rule, importance=c.importance).dequantize().double()
    x, w = x.double(), w.double()
    return ((x / c.scales) @ q.T - x @ w.T).norm().item() / (x @ w.T).norm().item()


# Of inputs with a few columns 50 times as large; where it was measured, by how much less the output errs.
@pytest.mark.parametrize(
    ("format", "factor"), [("nvfp4", 0.4), ("nf4", 0.45), ("int4_g128", 0.55), ("int4_g32_zp", 0.3), ("e2m1_row", 0.75),
                           ("int8_row", 0.75)]
)  # fmt: skip
def test_calibrate_lowers_the_output_s_error(format, factor):
    generator = torch.Generator().manual_seed(1)
    w = torch.randn(96, 256, generator=generator) / 16
    x = outlying(512, 256, generator)
    rule = "plain" if format == "int8_row" else "mse"
    c = lowbit.calibrate(w, x, format=format)
    exact = x.double() @ w.double().T
    plain = x.double() @ lowbit.quantize(w, format, rule=rule).dequantize().double().T
    plain_error = ((plain - exact).norm() / exact.norm()).item()
    error = calibrated_error(w, x, c, format, rule)
    assert abs(c.plain_error / plain_error - 1) < 1e-3 and abs(c.error / error - 1) < 1e-3
    assert error < factor * plain_error, (error, plain_error)
    assert 0 < c.alpha <= 1 and c.scales.dtype == torch.float32 and c.errors == (c.error,)
    mean = x.abs().double().mean(0)
    expected = mean**c.alpha / (mean.max() * mean.min()) ** (c.alpha / 2)
    assert (c.scales / expected - 1).abs().max() < 1e-5
    # The grid's own choice: neighbours of alpha are no better.
    for alpha in (c.alpha - 0.05, c.alpha + 0.05):
        s = (mean**alpha / (mean.max() * mean.min()) ** (alpha / 2)).float()
        weighed = None if rule == "plain" else (x**2).mean(0) / s**2
        other = dataclasses.replace(c, scales=s, importance=weighed)
        assert calibrated_error(w, x, other, format, rule) > 0.999 * error


def test_calibrate_of_moments_and_several_matrices():
    generator = torch.Generator().manual_seed(2)
    w = [torch.randn(n, 64, generator=generator).numpy() for n in (24, 16)]
    x = outlying(40, 64, generator).numpy()  # fewer rows than columns, and below more
    for rows in (x, np.concatenate([x] * 3)):
        c = lowbit.calibrate(w, rows.reshape(2, -1, 64), format="int4_g32")
        of_moments = lowbit.calibrate(
            w, format="int4_g32", absmean=np.abs(rows).mean(0), moment=rows.T @ rows / len(rows)
        )
        assert isinstance(c.scales, np.ndarray) and len(c.errors) == len(c.plain_errors) == 2
        assert c.alpha == of_moments.alpha and abs(c.error / of_moments.error - 1) < 1e-3
        assert c.error < c.plain_error
    # Columns that the sample does not use, and a sample of one row, have scales too.
    x[:, 7] = 0
    assert np.isfinite(lowbit.calibrate(w, x[:1], format="int4_g32").scales).all()
    none = lowbit.calibrate(w, x, format="int4_g32", steps=0)
    assert none.alpha == 0 and (none.scales == 1).all() and none.error <= none.plain_error
    # Weights that the format holds leave nothing to win.
    exact = lowbit.calibrate(np.zeros((8, 64), np.float32), x, format="int4_g32")
    assert exact.error == exact.plain_error == 0 and exact.alpha == 0 and exact.importance is None


@pytest.mark.parametrize("option", ["int8_x", "fp8_x"])
def test_calibrate_rounds_x_as_products_do(option):
    random = np.random.default_rng(2)
    w, x = (random.standard_normal(shape).astype(np.float32) for shape in ((48, 64), (200, 64)))
    x[:, ::7] *= 30
    x[3], x[4, 1] = 0, 1e-6
    format = "int8_row" if option == "int8_x" else "fp8_row"
    c = lowbit.calibrate(w, x, format=format, **{option: True})
    of_torch = lowbit.calibrate(torch.from_numpy(w), torch.from_numpy(x), format=format, **{option: True})
    assert c.method == of_torch.method and c.alpha == of_torch.alpha > 0 and np.allclose(c.scales, of_torch.scales)
    assert math.isclose(c.error, of_torch.error, rel_tol=1e-4)
    assert c.error < (0.8 if option == "int8_x" else 0.95) * c.plain_error  # floats hold outliers better
    if option == "int8_x":
        exact = x.astype(np.float64) @ w.T
        for scales, error in ((np.ones(64, np.float32), c.plain_error), (c.scales, c.error)):
            y = lowbit.linear(x / scales, lowbit.pack(lowbit.quantize(w * scales, format)), int8_x=True)
            assert math.isclose(np.linalg.norm(y - exact) / np.linalg.norm(exact), error, rel_tol=1e-2)


def test_calibrate_refuses():
    w, x = normal(5, 64), normal(9, 64)
    for match, call in [
        (r"one of x and moment must be given$", lambda: lowbit.calibrate(w)),
        ("given, not both", lambda: lowbit.calibrate(w, x, moment=x.T @ x)),
        ("absmean must be given where moment is", lambda: lowbit.calibrate(w, moment=x.T @ x)),
        (r"x is \[9, 63\]: it must be \[..., 64\]", lambda: lowbit.calibrate(w, x[:, :63])),
        (r"weights are \[5, 32\]: they must be \[N, 64\]", lambda: lowbit.calibrate([w, w[:, :32]], x)),
        ("weights is an empty list", lambda: lowbit.calibrate([], x)),
        ("x has no rows", lambda: lowbit.calibrate(w, x[:0])),
        ("x has a NaN", lambda: lowbit.calibrate(w, x * np.nan)),
        ("weights has a NaN", lambda: lowbit.calibrate(w * np.float32(np.nan), x)),
        ("x is zero everywhere", lambda: lowbit.calibrate(w, 0 * x)),
        ("steps is -1", lambda: lowbit.calibrate(w, x, steps=-1)),
        (r"absmean is \[3\]: it must be \[64\]", lambda: lowbit.calibrate(w, x, absmean=x[0, :3])),
        ("absmean has a negative number", lambda: lowbit.calibrate(w, x, absmean=x[0])),
        (r"moment is \[9, 64\]", lambda: lowbit.calibrate(w, absmean=abs(x[0]), moment=x)),
        ("moment has a negative number", lambda: lowbit.calibrate(w, absmean=abs(x[0]), moment=-(x.T @ x))),
        ("multiple of its group", lambda: lowbit.calibrate(w, x, format="int4_g128")),
        ("rule", lambda: lowbit.calibrate(w, x, format="nvfp4", rule="even")),
        ("int8_x and fp8_x are set", lambda: lowbit.calibrate(w, x, int8_x=True, fp8_x=True)),
        ("x must be given where it is rounded", lambda: lowbit.calibrate(w, absmean=abs(x[0]), moment=x.T @ x, int8_x=True)),
        ("absmax must be given where moment is",
         lambda: lowbit.calibrate(w, absmean=abs(x[0]), moment=x.T @ x, methods=["smoothquant"])),
        (r"absmax is \[3\]: it must be \[64\]", lambda: lowbit.calibrate(w, x, absmax=x[0, :3], int8_x=True)),
        ("absmax has a negative number", lambda: lowbit.calibrate(w, x, absmax=x[0], int8_x=True)),
    ]:
        with pytest.raises(ValueError, match=match):
            call()
    with pytest.raises(TypeError, match="x is a list"):
        lowbit.calibrate(w, x.tolist())
