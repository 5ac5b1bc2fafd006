"""Derivatives that there are none of are refused in words, wherever a tangent comes in: none is ever dropped."""

import heddle
import pytest
import torch
from heddle import lowbit
from torch.autograd import forward_ad

torch.manual_seed(0)
Q = torch.randn(2, 5, 4, 8)
LSE = torch.zeros(2, 4, 5)
TABLE = torch.randn(9, 4)
BLOCKS = torch.zeros(2, 5, 1, 1, dtype=torch.int32)
PACKED = lowbit.pack(lowbit.quantize(torch.randn(8, 32), "nvfp4"))


def heads_first(x):
    return heddle.sdpa(x, Q.transpose(1, 2), Q.transpose(1, 2))


CALLS = {
    "attention": (lambda x: heddle.attention(x, Q, Q), Q, "attention_backward"),
    "attention with a bias": (lambda x: heddle.attention(Q, Q, Q, bias=x), torch.randn(5, 5), "attention_backward"),
    "sparse": (lambda x: heddle.sparse_attention(x, Q, Q, BLOCKS), Q, "sparse_attention_backward"),
    "merge_attention": (lambda x: heddle.merge_attention([x, Q], [LSE, LSE])[0], Q, "merge_attention_backward"),
    "sdpa": (heads_first, Q.transpose(1, 2), "attention_backward"),
    "sdpa with few dimensions": (lambda x: heddle.sdpa(x, Q[0, 0], Q[0, 0]), Q[0, 0], "attention_backward"),
    "linear": (lambda x: lowbit.linear(x, PACKED), torch.randn(3, 32), "linear_backward"),
    "apply_rotary": (lambda x: heddle.apply_rotary(x, TABLE, TABLE), Q, "apply_rotary"),
}
WORDS = r"\[\w+\] .* has a tangent: there are no forward-mode derivatives"

TRANSFORMS = {
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
    "hessian": lambda f, x: torch.func.hessian(lambda y: f(y).sum())(x),
    "jvp of grad": lambda f, x: torch.func.jvp(torch.func.grad(lambda y: f(y).sum()), (x,), (x,)),
    "jvp of vjp": lambda f, x: torch.func.jvp(lambda d: torch.func.vjp(f, x)[1](d)[0], (f(x),), (f(x),)),
    "linearize": lambda f, x: torch.func.linearize(f, x)[1](x),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", CALLS)
def test_forward_mode_by_transforms(name, transform):
    call, x, _ = CALLS[name]
    with pytest.raises(NotImplementedError, match=WORDS):
        TRANSFORMS[transform](call, x)


@pytest.mark.parametrize("name", CALLS)
def test_forward_mode_by_dual_numbers(name):
    call, x, backward = CALLS[name]
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=WORDS):
        call(forward_ad.make_dual(x, x))
    # Forward over reverse: the tangent comes with the result's gradient, also of a result from before.
    leaf = x.clone().requires_grad_()
    before = call(leaf)
    with forward_ad.dual_level():
        for out in (before, call(leaf)):
            d = forward_ad.make_dual(torch.ones_like(out), torch.ones_like(out))
            with pytest.raises(
                NotImplementedError, match=rf"\[{backward}\] d\w+ has a tangent: there are no forward-mode"
            ):
                torch.autograd.grad(out, leaf, d)
        # Without a tangent gradients are what they are outside.
        out = call(leaf)
        inside = torch.autograd.grad(out, leaf, torch.ones_like(out))[0]
    out = call(leaf)
    torch.testing.assert_close(inside, torch.autograd.grad(out, leaf, torch.ones_like(out))[0])


# merge_attention's operator takes lists of tensors, of which vmap makes nothing.
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", [name for name in CALLS if name != "merge_attention"])
def test_reverse_mode_by_transforms(name):
    call, x, _ = CALLS[name]
    leaf = x.clone().requires_grad_()
    expected = torch.autograd.grad(call(leaf).square().sum(), leaf)[0]
    torch.testing.assert_close(torch.func.grad(lambda y: call(y).square().sum())(x), expected)
    mapped = torch.func.vmap(torch.func.grad(lambda y: call(y).square().sum()))(torch.stack([x, x]))
    torch.testing.assert_close(mapped, torch.stack([expected, expected]))


@pytest.mark.parametrize("name", [name for name in CALLS if name != "apply_rotary"])
def test_second_derivatives(name):
    call, x, _ = CALLS[name]
    words = r"heddle::\w+_backward has no derivative: second derivatives are not supported"
    with pytest.raises(RuntimeError, match=words):
        torch.func.grad(lambda y: torch.func.grad(lambda z: call(z).square().sum())(y).sum())(x)
    with pytest.raises(RuntimeError, match=words):
        torch.autograd.functional.hessian(lambda y: call(y).square().sum(), x)
