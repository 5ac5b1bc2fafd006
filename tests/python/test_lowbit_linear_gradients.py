"""Gradients of heddle.lowbit.linear: those of torch in double, by every way, and what is refused."""

import pytest
import torch
from heddle import lowbit
from kit import normal


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
        options = (bias, None, weight, None, "silu", "rms_norm", 1e-5, False, False, "")
        return torch.ops.heddle.linear_forward(x, *p._parts(), *options)

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
        (
            x,
            *p._parts(),
            bias,
            None,
            weight,
            None,
            "silu",
            "rms_norm",
            1e-5,
            False,
            False,
            "",
        ),
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
        assert [tuple(t.shape) for t in kept[1:]] == [(2, 32), tuple(p.data.shape), (16,)]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        a = x * 1
        y = lowbit.linear(a, p, activation="silu")
        a.mul_(2)
        y.sum().backward()


def test_gradients_that_there_are_not():
    p = lowbit.pack(lowbit.quantize(torch.from_numpy(normal(16, 32)), "mxfp4"))
    x = torch.ones(2, 32, requires_grad=True)
    with pytest.raises(ValueError, match="x requires a gradient: a call that writes to out has no backward"):
        lowbit.linear(x, p, out=torch.empty(2, 16))
    with torch.no_grad():
        assert lowbit.linear(x, p, out=torch.empty(2, 16)).shape == (2, 16)
        assert not lowbit.linear(x, p).requires_grad
    dx = torch.autograd.grad(lowbit.linear(x, p, activation="silu").sum(), x, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="second derivatives are not supported"):
        dx.sum().backward()
