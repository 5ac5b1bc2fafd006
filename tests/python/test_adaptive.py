"""Attention with a tolerance: within its bound of exact attention, gradients of what it computed, and all that an operation is
held to; and the audit."""

import heddle
import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

B, H, HKV, ROWS, KEYS, D, DV = 2, 4, 2, 150, 400, 32, 24


def make(dtype=torch.float32, rows=ROWS, keys=KEYS, requires_grad=False, packed=False, seed=0):
    """q, k and v with some structure: values of neighbouring keys have something in common."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (
        ((rows, H, D), (keys, HKV, D), (keys, HKV, DV))
        if packed
        else ((B, rows, H, D), (B, keys, HKV, D), (B, keys, HKV, DV))
    )
    q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
    v += 2 * torch.randn(*v.shape[:-3], 1, 1, DV, generator=generator)
    q, k = q / 2, k / 2
    return [x.to(dtype).requires_grad_(requires_grad) for x in (q, k, v)]


def longest(v):
    """The unit of tol and bound, [B, H, 1]."""
    return v.double().norm(dim=-1).amax(1).repeat_interleave(H // HKV, -1)[..., None]


@pytest.mark.parametrize("options", [{}, {"causal": "bottom_right"}, {"window": (120, 60)}, {"softcap": 3.0}])
@pytest.mark.parametrize("dtype, rounding", [(torch.float32, 1e-6), (torch.float16, 2e-3), (torch.bfloat16, 1e-2)])
def test_rows_are_within_their_bounds(dtype, rounding, options):
    q, k, v = make(dtype)
    out, lse, bound = heddle.adaptive_attention(q, k, v, 0.02, **options)
    exact, exact_lse = heddle.attention(*(x.float() for x in (q, k, v)), return_lse=True, force="reference", **options)
    error = (out.double() - exact.double()).norm(dim=-1).transpose(1, 2) / longest(v)
    assert out.dtype == dtype and lse.dtype == bound.dtype == torch.float32
    assert bool((error <= bound + rounding).all())
    assert 0 <= bound.min() and 1e-3 < bound.max() <= 0.02
    torch.testing.assert_close(lse, exact_lse, atol=1e-5, rtol=1e-5)
    # The less is asked for, the more is replaced; next to nothing leaves exact attention.
    tight, _, none = heddle.adaptive_attention(q, k, v, 1e-9, **options)
    assert none.max() == 0
    torch.testing.assert_close(
        tight.float(), heddle.attention(q, k, v, **options).float(), atol=rounding, rtol=rounding
    )


def test_packed_sequences_and_sinks():
    q, k, v = make(packed=True)
    q_starts, k_starts = (torch.tensor(x, dtype=torch.int32) for x in ([0, 60, ROWS], [0, 170, KEYS]))
    options = {"cu_seqlens_q": q_starts, "cu_seqlens_k": k_starts, "sink": torch.tensor([0.5, -1.0, 3.0, 0.0])}
    for more in ({}, {"max_seqlen_q": 90, "max_seqlen_k": 230}):
        out, lse, bound = heddle.adaptive_attention(q, k, v, 0.05, **options, **more)
        for a, b, c, d in ((0, 60, 0, 170), (60, ROWS, 170, KEYS)):
            one = [x[None] for x in (q[a:b], k[c:d], v[c:d])]
            expected = heddle.adaptive_attention(*one, 0.05, sink=options["sink"])
            for x, y in zip((out[a:b], lse[:, a:b], bound[:, a:b]), expected):
                assert torch.equal(x, y[0])
        assert bound.max() > 1e-3


def test_gradients_are_those_of_what_was_computed():
    q, k, v = make(requires_grad=True)
    sink = torch.tensor([0.5, -1.0, 3.0, 0.0], requires_grad=True)
    generator = torch.Generator().manual_seed(1)
    weight, lse_weight, step = (
        torch.randn(shape, generator=generator).double() for shape in ((B, ROWS, H, DV), (B, H, ROWS), q.shape)
    )

    def loss(function, tol, *x):
        out, lse = function(*x[:3], *tol, causal="bottom_right", sink=x[3], **({} if tol else {"return_lse": True}))[:2]
        return (out * weight).sum() + (lse * lse_weight).sum()

    inputs = (q, k, v, sink)
    exact = torch.autograd.grad(loss(heddle.attention, (), *inputs), inputs)
    near = torch.autograd.grad(loss(heddle.adaptive_attention, (1e-9,), *inputs), inputs)
    far = torch.autograd.grad(loss(heddle.adaptive_attention, (0.1,), *inputs), inputs)
    for name, x, y, z in zip("qkvs", exact, near, far):
        torch.testing.assert_close(y, x, atol=1e-4, rtol=1e-4)
        assert 1e-4 * x.norm() < (z - x).norm(), name
    # q moves the results within the blocks that are replaced, which a small step does not change.
    step = 0.01 * step.float()
    with torch.no_grad():
        up, down = (loss(heddle.adaptive_attention, (3.0,), q + s * step, k, v, sink) for s in (1, -1))
    (dq,) = torch.autograd.grad(loss(heddle.adaptive_attention, (3.0,), *inputs), q)
    torch.testing.assert_close((up - down) / 2, (dq * step).double().sum(), atol=2e-4, rtol=1e-2)


def test_the_bound_has_no_gradient():
    q, k, v = make(requires_grad=True)
    out, lse, bound = heddle.adaptive_attention(q, k, v)
    assert out.requires_grad and lse.requires_grad and not bound.requires_grad
    with torch.no_grad():
        assert not heddle.adaptive_attention(q, k, v)[0].requires_grad


def test_what_a_backward_does_not_serve_is_refused():
    q, k, v = make(requires_grad=True)
    out, _, _ = heddle.adaptive_attention(q, k, v, softcap=2.0)
    with pytest.raises(ValueError, match="it has no gradients with ALiBi or softcap"):
        out.sum().backward()
    out, _, _ = heddle.adaptive_attention(*(x[:, :40] for x in (q, k, v)), softcap=2.0, force="reference")
    out.sum().backward()
    assert q.grad is not None


def test_numpy_gives_the_same():
    q, k, v = make()
    expected = heddle.adaptive_attention(q, k, v, 0.05, causal="bottom_right")
    found = heddle.adaptive_attention(q.numpy(), k.numpy(), v.numpy(), 0.05, causal="bottom_right")
    assert all(isinstance(x, np.ndarray) for x in found)
    for x, y in zip(found, expected, strict=True):
        assert np.array_equal(x, y.numpy())


@pytest.mark.parametrize("packed", [False, True])
def test_the_operator_is_one_that_torch_knows(packed):
    q, k, v = make(rows=30, keys=70, requires_grad=True, packed=packed)
    starts = [torch.tensor([0, 10, n], dtype=torch.int32) for n in (30, 70)] if packed else [None, None]
    items = heddle._options.pack(cu_seqlens_q=starts[0], cu_seqlens_k=starts[1], deterministic=False)
    torch.library.opcheck(torch.ops.heddle.adaptive_attention.default, (q, k, v, 0.05, "refine", *items))


def test_it_compiles():
    q, k, v = make(rows=30, keys=70, requires_grad=True)

    def call(q, k, v):
        out, _, bound = heddle.adaptive_attention(q, k, v, 0.05, causal="bottom_right")
        return out.square().sum(), bound

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for rows in (30, 21):
        inputs = (q[:, :rows], k, v)
        found, expected = compiled(*inputs), call(*inputs)
        assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
        for x, y in zip(torch.autograd.grad(found[0], inputs), torch.autograd.grad(expected[0], inputs)):
            torch.testing.assert_close(x, y)


def test_fake_tensors_and_functional_gradients():
    inputs = make(rows=30, keys=70)
    with FakeTensorMode() as mode:
        out, lse, bound = heddle.adaptive_attention(*(mode.from_tensor(x) for x in inputs))
    assert out.shape == (B, 30, H, DV) and lse.shape == bound.shape == (B, H, 30)

    def loss(q):
        return heddle.adaptive_attention(q, *inputs[1:], 0.05)[0].square().sum()

    leaf = inputs[0].clone().requires_grad_()
    torch.testing.assert_close(torch.func.grad(loss)(inputs[0]), torch.autograd.grad(loss(leaf), leaf)[0])
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(loss, (inputs[0],), (inputs[0],))


def test_autocast_computes_in_its_dtype():
    q, k, v = make()
    with torch.autocast("cpu", torch.bfloat16):
        out, _, bound = heddle.adaptive_attention(q, k, v)
    expected = heddle.adaptive_attention(*make(torch.bfloat16))
    assert out.dtype == torch.bfloat16 and torch.equal(out, expected[0]) and torch.equal(bound, expected[2])


@pytest.mark.parametrize("of", [torch.from_numpy, lambda x: x], ids=["torch", "numpy"])
def test_bad_arguments_are_named(of):
    q, k, v = (of(x.numpy()) for x in make(rows=5, keys=9))
    mask = of(np.ones((5, 9), bool))
    bad = [
        ({"tol": 0}, "tol is 0: it must be a finite number above 0, in units of the largest norm of a value"),
        ({"tol": float("nan")}, "tol is nan: it must be a finite number above 0"),
        ({"on_exceed": "guess"}, "on_exceed is 'guess': it must be refine, dense or report"),
        ({"mask": mask}, "mask is given: attention with a tolerance has none"),
        ({"dropout_p": 0.5, "dropout_seed": 1}, "dropout.p is 0.5: it must be 0"),
        ({"precision": "tf32"}, "precision is not f32"),
        ({"method": "flash"}, "method is 'flash'"),
    ]
    for options, message in bad:
        with pytest.raises(ValueError) as refused:
            heddle.adaptive_attention(q, k, v, **options)
        assert message in str(refused.value)
    for name in ("refine", "dense", "report"):
        heddle.adaptive_attention(q, k, v, on_exceed=name)
    with pytest.raises(TypeError, match="tol"):
        heddle.adaptive_attention(q, k, v, tol="x")
    with pytest.raises(ValueError, match="q has 3 dimensions"):
        heddle.adaptive_attention(q[0], k, v)
    with pytest.raises(ValueError, match="k has 2 dimensions|k is"):
        heddle.adaptive_attention(q, k[0, 0], v)


def test_explained():
    q, k, v = make()
    found = heddle.explain_adaptive_attention(q, k, v, 0.1)
    assert [x.name for x in found] == ["cpu", "reference"] and found.chosen.name == "cpu"
    assert "decided by" in found.chosen.plan
    refused = heddle.explain_adaptive_attention((1, 9, 4, 8), (1, 9, 2, 8), (1, 9, 2, 8), softcap=2.0, backward=True)
    assert refused.chosen is None and "no gradients with ALiBi or softcap" in refused[0].reason


@pytest.mark.parametrize("causal", ["none", "top_left", "bottom_right"])
def test_audit_finds_errors_and_bounds(causal):
    q, k, v = make()
    out, _, bound = heddle.adaptive_attention(q, k, v, 0.1, causal=causal, window=(150, -1))
    audit = heddle.audit_attention(q, k, v, out, bound, rows=40, causal=causal, window=(150, -1))
    assert audit.rows == 40 and audit.heads == H and audit.exceeded == 0
    assert 0 < audit.error[0.5] <= audit.error[1.0] <= audit.bound[1.0] <= 0.1
    assert 1 <= audit.bound_over_error[0.5] < 30
    arrays = [x.numpy() for x in (q, k, v, out, bound)]
    assert heddle.audit_attention(*arrays, rows=40, causal=causal, window=(150, -1)) == audit
    # Of exact attention nothing is left but rounding, and a wrong result shows.
    exact = heddle.audit_attention(q, k, v, heddle.attention(q, k, v, causal=causal), rows=10, causal=causal)
    assert exact.error[1.0] < 1e-6 and exact.bound is None and exact.exceeded is None
    wrong = heddle.audit_attention(q, k, v, out + 0.5, bound, rows=10, causal=causal, window=(150, -1))
    assert wrong.exceeded == 10 * H and wrong.error[0.5] > 0.1


def test_audit_knows_that_large_scores_are_rounded():
    generator = torch.Generator().manual_seed(5)
    q, k, v = torch.randn(3, 1, 200, 2, 64, generator=generator).unbind()
    q = 60 * q
    out = heddle.attention(q, k, v)
    nothing = torch.zeros(1, 2, 200)
    audit = heddle.audit_attention(q, k, v, out, nothing, rows=200)
    assert audit.error[1.0] > 2**-17 and audit.exceeded == 0
    out[:, :, 1] += 1e-3 * v.norm(dim=-1).amax() / 8  # of 64 elements
    assert heddle.audit_attention(q, k, v, out, nothing, rows=200).exceeded > 150


def test_audit_of_packed_sequences_in_16_bits():
    q, k, v = make(torch.bfloat16, packed=True)
    starts = {"cu_seqlens_q": torch.tensor([0, 60, ROWS]).int(), "cu_seqlens_k": torch.tensor([0, 170, KEYS]).int()}
    out, _, bound = heddle.adaptive_attention(q, k, v, 0.1, **starts)
    audit = heddle.audit_attention(q, k, v, out, bound, rows=60, **starts)
    assert audit.exceeded == 0 and audit.error[1.0] < 0.12
    whole = heddle.audit_attention(
        q, k, v, out, rows=60, cu_seqlens_q=torch.tensor([0, ROWS]).int(), cu_seqlens_k=torch.tensor([0, KEYS]).int()
    )
    assert whole.error[1.0] > 2 * audit.error[1.0]


def test_audit_refuses_what_it_does_not_know():
    q, k, v = make(rows=5, keys=9)
    out = heddle.attention(q, k, v)
    for options, message in [
        ({"mask": torch.ones(5, 9).bool()}, "mask is given: the audit knows causal, window"),
        ({"rows": 0}, "rows is 0: it must be at least 1"),
        ({"cu_seqlens_q": torch.tensor([0, 5]).int()}, "cu_seqlens_q is given and cu_seqlens_k is not"),
    ]:
        with pytest.raises(ValueError) as refused:
            heddle.audit_attention(q, k, v, out, **options)
        assert message in str(refused.value)
    with pytest.raises(ValueError, match="it must have the rows and heads of q"):
        heddle.audit_attention(q, k, v, out[:, :3])
