"""The sum of gated branches, an operation of GPUs whose reference runs on the CPU: what it means, and what it refuses."""

import pytest

torch = pytest.importorskip("torch")
from heddle import _heddle  # noqa: E402
from heddle.hosts.torch.gate_operators import gate_branches  # noqa: E402

STEP = {torch.float32: 2**-23, torch.float16: 2**-10, torch.bfloat16: 2**-7}


def branches(count, shape, dtype):
    return [torch.randn(shape).to(dtype) for _ in range(count)], [torch.rand(shape[:-1]) for _ in range(count)]


@pytest.mark.parametrize("shape", [(2, 5, 3, 7), (9, 2, 8)], ids=["batched", "packed"])
@pytest.mark.parametrize("dtype", STEP, ids=str)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_reference_is_the_formula(count, dtype, shape):
    os, gates = branches(count, shape, dtype)
    out, d_out = torch.empty(shape, dtype=dtype), torch.randn(shape).to(dtype)
    _heddle.gate_branches(os, gates, out, "reference")
    exact = sum(gate[..., None].double() * o.double() for o, gate in zip(os, gates))
    torch.testing.assert_close(out.double(), exact, rtol=STEP[dtype], atol=1e-7)
    d_os, d_gates = [torch.empty_like(x) for x in os], [torch.empty_like(x) for x in gates]
    d_os[0] = None
    _heddle.gate_branches_backward(os, gates, d_out, d_os, d_gates, "reference")
    for o, gate, d_o, d_gate in zip(os, gates, d_os, d_gates):
        torch.testing.assert_close(d_gate.double(), (d_out.double() * o.double()).sum(-1), rtol=2**-23, atol=1e-7)
        if d_o is not None:
            exact = gate[..., None].double() * d_out.double()
            torch.testing.assert_close(d_o.double(), exact, rtol=STEP[dtype], atol=1e-7)


@pytest.fixture
def on_the_cpu(monkeypatch):
    """The operators of GPUs, with the reference in their kernels' place."""
    for name in ("gate_branches", "gate_branches_backward"):
        native = getattr(_heddle, name)
        at = 3 if name == "gate_branches" else 5  # of force
        monkeypatch.setattr(_heddle, name, lambda *x, native=native, at=at: native(*x[:at], "reference"))


@pytest.mark.parametrize("count", [1, 3])
def test_opcheck(count, on_the_cpu):
    """Sums are taken alike, so that tracing changes no bit."""
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    os, gates = branches(count, (2, 5, 3, 8), torch.float32)
    leaves = [[x.requires_grad_() for x in tensors] for tensors in (os, gates)]
    torch.library.opcheck(torch.ops.heddle.gate_branches.default, tuple(leaves), test_utils=checks)
    os, gates = ([x.detach() for x in tensors] for tensors in (os, gates))
    for wanted in ([True, True], [True, False], [False, True]):
        sample = (torch.randn(2, 5, 3, 8), os, gates, wanted)
        torch.library.opcheck(torch.ops.heddle.gate_branches_backward.default, sample, test_utils=checks)


def test_the_sum_goes_where_the_caller_says(on_the_cpu):
    os, gates = branches(3, (2, 5, 3, 7), torch.bfloat16)
    expected, memory = gate_branches(os, gates), torch.zeros(2, 5, 6, 7, dtype=torch.bfloat16)
    out = memory[:, :, 1:4]
    version = out._version
    assert gate_branches(os, gates, out) is out and torch.equal(out, expected) and out._version == version + 1
    assert not memory[:, :, 0].any() and not memory[:, :, 4:].any()
    checks = ["test_schema", "test_faketensor", "test_aot_dispatch_dynamic"]
    sample = (os, gates, torch.empty_like(expected))
    torch.library.opcheck(torch.ops.heddle.gate_branches_out.default, sample, test_utils=checks)


def refused():
    os, gates = branches(2, (1, 4, 2, 8), torch.float32)
    out = torch.empty_like(os[0])
    return {
        "there are 0 branches: there must be 1 to 3": ([], [], out),
        "there are 4 branches: there must be 1 to 3": (os * 2, gates * 2, out),
        "no candidate can serve this call; reference: it runs only when it is asked for$": (os, gates, out, ""),
        r"os\[0\] is missing": ([None], gates[:1], out),
        r"os\[0\] has 2 dimensions": ([os[0][0, 0]], gates[:1], out),
        r"os\[0\] has head size 300": ([torch.zeros(1, 1, 1, 300)], [torch.zeros(1, 1, 1)], out),
        r"os\[0\] is int32": ([os[0].int()], gates[:1], out),
        r"os\[1\] is \[1, 3, 2, 8\]: it must have the shape of os\[0\]": ([os[0], os[1][:, 1:]], gates, out),
        r"gates\[1\] is \[1, 4, 1\]: it must have a number for each row and head": (
            os,
            [gates[0], gates[1][..., :1]],
            out,
        ),
        r"gates\[0\] is bfloat16": (os, [gates[0].bfloat16(), gates[1]], out),
        r"out shares memory with os\[1\]": (os, gates, os[1]),
        "out is float16": (os, gates, out.half()),
    }


@pytest.mark.parametrize("words", refused())
def test_refuses(words):
    os, gates, out, *force = refused()[words]
    with pytest.raises(ValueError, match=r"\[gate_branches\] .*" + words):
        _heddle.gate_branches(os, gates, out, *(force or ["reference"]))
