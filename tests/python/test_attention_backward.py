"""heddle.attention_backward: gradients written where the caller says, of whole calls and of pieces, against autograd's."""

import heddle
import numpy as np
import pytest

torch = pytest.importorskip("torch")

OPTIONS = {
    "plain": {},
    "causal": {"causal": "top_left"},
    "window, softcap": {"causal": "top_left", "window": (9, None), "softcap": 5.0},
}


def operands(dtype=torch.float32, rows=40):
    make = torch.Generator().manual_seed(0)
    shapes = ((2, rows, 4, 16), (2, rows, 2, 16), (2, rows, 2, 24), (2, rows, 4, 24))
    return [torch.randn(shape, generator=make).to(dtype) for shape in shapes]


def autograd(q, k, v, d_o, **options):
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    extra = [options[name].requires_grad_() for name in ("bias", "sink") if name in options]
    o, lse = heddle.attention(*leaves, return_lse=True, **options)
    return o.detach(), lse.detach(), torch.autograd.grad(o, leaves + extra, d_o)


@pytest.mark.parametrize("library", ["torch", "numpy"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_whole_call_has_autograds_bits(options, library):
    q, k, v, d_o = operands()
    options = {**options, "bias": torch.randn(4, 40, 40), "sink": torch.randn(4)}
    o, lse, expected = autograd(q, k, v, d_o, **options)
    written = [torch.full_like(x, 7) for x in expected]
    given, to = (q, k, v, o, lse, d_o), dict(zip(("dq", "dk", "dv", "dbias", "dsink"), written))
    options = {name: x.detach() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    if library == "numpy":
        given = [x.numpy() for x in given]
        to = {name: x.numpy() for name, x in to.items()}
        options = {name: x.numpy() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    assert heddle.attention_backward(*given, **to, **options) is None
    for name, found, gradient in zip(to, written, expected):
        assert torch.equal(found, gradient), name


def test_what_is_not_given_is_not_computed():
    q, k, v, d_o = operands()
    o, lse, expected = autograd(q, k, v, d_o)
    dk = torch.empty_like(k)
    heddle.attention_backward(q, k, v, o, lse, d_o, dk=dk)
    assert torch.equal(dk, expected[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_ring_over_pieces_of_the_keys(dtype):
    q, k, v, d_o = operands(dtype)
    d_lse = torch.randn(2, 4, 40)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    o, lse = heddle.attention(*leaves, causal="top_left", return_lse=True, out_dtype="float32")
    expected = torch.autograd.grad((o, lse), leaves, (d_o.float(), d_lse))
    dq, dk, dv = (torch.zeros(x.shape) for x in (q, k, v))
    for at in (0, 24, 12, 36):  # in any order
        keys = slice(at, at + 12)
        heddle.attention_backward(
            q, k[:, keys], v[:, keys], o.detach(), lse.detach(), d_o.float(), d_lse,
            dq=dq, dk=dk[:, keys], dv=dv[:, keys],
            accumulate=True, merged=True, causal="top_left", key_offset=at, out_dtype="float32",
        )  # fmt: skip
    for name, found, gradient in zip("qkv", (dq, dk, dv), expected):
        error = (found - gradient.float()).norm() / gradient.float().norm()
        assert error < (2e-6 if dtype == torch.float32 else 4e-3), name


def test_accumulate_adds():
    q, k, v, d_o = operands()
    o, lse, expected = autograd(q, k, v, d_o)
    dv = torch.ones_like(v)
    heddle.attention_backward(q, k, v, o, lse, d_o, dv=dv, accumulate=True)
    torch.testing.assert_close(dv, expected[2] + 1)


def test_the_operator():
    q, k, v, d_o = operands()
    o, lse, expected = autograd(q, k, v, d_o)
    operator = torch.ops.heddle.attention_backward_out.default

    def into(q, k, v, o, lse, d_o):
        dq = torch.empty_like(q)
        heddle.attention_backward(q, k, v, o, lse, d_o, dq=dq)
        return dq

    assert torch.equal(torch.compile(into, fullgraph=True)(q, k, v, o, lse, d_o), expected[0])
    from heddle._options import pack

    dq = torch.empty_like(q)
    torch.library.opcheck(operator, (d_o, None, q, k, v, o, lse, dq, None, None, None, None, False, False, *pack()))
    version = dq._version
    heddle.attention_backward(q, k, v, o, lse, d_o, dq=dq)
    assert dq._version > version


def test_dropout():
    q, k, v, d_o = operands()
    o, lse, expected = autograd(q, k, v, d_o, dropout_p=0.3, dropout_seed=5)
    dq = torch.empty_like(q)
    heddle.attention_backward(q, k, v, o, lse, d_o, dq=dq, dropout_p=0.3, dropout_seed=5)
    assert torch.equal(dq, expected[0])


def test_refusals():
    q, k, v, d_o = operands()
    o, lse, _ = autograd(q, k, v, d_o)
    call, given = heddle.attention_backward, (q, k, v, o, lse, d_o)
    for message, change in {
        "out is given": {"out": o},
        "dropout_seed is missing": {"dropout_p": 0.1},
        "dq is [2, 40, 2, 16]: it must have the shape of q": {"dq": torch.empty_like(k)},
        "dq is bfloat16: it must be float32": {"dq": torch.empty_like(q, dtype=torch.bfloat16)},
        "accumulate is 2": {"accumulate": 2},
    }.items():
        with pytest.raises((ValueError, TypeError)) as caught:
            call(*given, **change)
        assert message in str(caught.value)
    with pytest.raises(ValueError, match="q requires a gradient"):
        call(q.clone().requires_grad_(), *given[1:], dq=torch.empty_like(q))
    with pytest.raises(ValueError, match="with accumulate it must be float32"):
        halves = [x.half() if x is not lse else x for x in given]
        call(*halves, dq=torch.empty_like(halves[0]), accumulate=True)
    with pytest.raises(TypeError, match="o is None"):
        call(q, k, v, None, lse, d_o)
    frozen = np.empty(q.shape, np.float32)
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="dq"):
        call(*(x.numpy() for x in given), dq=frozen)
    with pytest.raises(ValueError, match="inside a transform"):
        torch.func.vmap(lambda x: call(x, *(y[0] for y in given[1:]), dq=torch.empty_like(x)))(q[:, None])
