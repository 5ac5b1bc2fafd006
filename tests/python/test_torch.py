"""What torch asks of an operator: schema, fake tensors, autograd, compile, transforms, and the direct call beside it."""

import heddle
import pytest
import torch
from heddle._options import pack
from heddle.hosts.torch import functional as _torch
from torch._subclasses.fake_tensor import FakeTensorMode

OPS = torch.ops.heddle


def tensors(B=2, S=9, H=4, Hkv=2, D=8, dtype=torch.float32):
    torch.manual_seed(0)
    return [torch.randn(B, S, h, D, dtype=dtype) for h in (H, Hkv, Hkv)]


def arguments(bias=None, sink=None, seed=None, p=0.0, cu=None, longest=0):
    return pack(
        bias=bias,
        sink=sink,
        cu_seqlens_q=cu,
        cu_seqlens_k=cu,
        causal="top_left",
        dropout_p=p,
        dropout_seed=seed,
        max_seqlen_q=longest,
        max_seqlen_k=longest,
    )


CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


@pytest.mark.parametrize("kind", ["plain", "bias and sink", "dropout", "packed", "steps"])
def test_opcheck_forward(kind):
    q, k, v = (x.requires_grad_() for x in tensors())
    options = arguments()
    if kind == "bias and sink":
        options = arguments(torch.randn(1, 4, 9, 9, requires_grad=True), torch.randn(4, requires_grad=True))
    elif kind == "dropout":
        options = arguments(seed=torch.tensor(3), p=0.2)
    elif kind == "packed":
        q, k, v = (x.detach().flatten(0, 1).requires_grad_() for x in (q, k, v))
        options = arguments(cu=torch.tensor([0, 4, 18], dtype=torch.int32), longest=14)
    elif kind == "steps":
        options = pack(causal="top_left", q_step=3, key_step=2)
    torch.library.opcheck(OPS.attention_forward.default, (q, k, v, *options), test_utils=CHECKS)


@pytest.mark.parametrize("wanted", [[True] * 5, [False, True, False, False, True]])
def test_opcheck_backward(wanted):
    q, k, v = tensors()
    options = arguments(torch.randn(1, 4, 9, 9), torch.randn(4))
    out, lse = OPS.attention_forward(q, k, v, *options)
    for d_lse in (None, torch.randn_like(lse)):
        sample = (torch.randn_like(out), d_lse, q, k, v, out, lse, wanted, *options)
        torch.library.opcheck(OPS.attention_backward.default, sample, test_utils=CHECKS)


def test_opcheck_rotary_and_append():
    x = torch.randn(2, 5, 3, 8, requires_grad=True)
    cos, sin, at = torch.randn(16, 4), torch.randn(16, 4), torch.tensor([3, 0], dtype=torch.int32)
    torch.library.opcheck(OPS.apply_rotary.default, (x, cos, sin, True, at), test_utils=CHECKS)
    new, cache = torch.randn(2, 5, 3, 8), torch.zeros(2, 12, 3, 8)
    sample = (new, new.clone(), cache, cache.clone(), at, None, None, cos, sin, False)
    torch.library.opcheck(OPS.append_kv_cache.default, sample, test_utils=CHECKS)
    narrow = [torch.zeros(2, 12, 3, 8).to(torch.float8_e4m3fn) for _ in "kv"]
    scales = [torch.ones(2, 12, 3) for _ in "kv"]
    sample = (new.half(), new.half(), *narrow, at, None, None, cos, sin, False, *scales)
    # The check of schemas multiplies what is changed, for which torch has no float8.
    checks = [name for name in CHECKS if name != "test_schema"]
    torch.library.opcheck(OPS.append_kv_cache.default, sample, test_utils=checks)


def loss_of(function, inputs, *rest):
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    loss = function(*inputs, *rest)
    return loss.detach(), torch.autograd.grad(loss, inputs)


def test_compile_fullgraph_with_inductor():
    def step(q, k, v, bias, sink):
        out, lse = heddle.attention(
            q * 2, k, v, causal="bottom_right", bias=bias, sink=sink, softcap=3.0, return_lse=True
        )
        return (out.sin() * out).sum() + lse.sum()

    inputs = [*tensors(), torch.randn(4, 9, 9), torch.randn(4)]
    expected, gradients = loss_of(step, inputs)
    found, compiled = loss_of(torch.compile(step, fullgraph=True), inputs)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(compiled, gradients)


def test_compile_traces_every_entry_fullgraph_and_dynamic():
    from heddle import flash_attn

    cos, sin = torch.randn(32, 4), torch.randn(32, 4)

    def step(q, k, v):
        a = heddle.attention(q, k, v, window=(3, 3), causal=heddle.Causal.top_left)
        b = flash_attn.flash_attn_func(q, k, v, causal=True)
        c = heddle.sdpa(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True)
        d = heddle.apply_rotary(q, cos, sin)
        return (a + b + c.transpose(1, 2) + d).square().sum()

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    for S in (9, 12):
        inputs = tensors(S=S)
        torch.testing.assert_close(loss_of(compiled, inputs), loss_of(step, inputs))

    def decode(q, k, v, k_cache, v_cache, lengths):
        return flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cos, sin, lengths, causal=True)

    q, k, v = tensors(S=2)
    caches = [torch.zeros(2, 10, 2, 8) for _ in range(4)]
    lengths = torch.tensor([4, 0], dtype=torch.int32)
    expected = decode(q, k, v, *caches[:2], lengths)
    torch.testing.assert_close(
        torch.compile(decode, fullgraph=True, backend="aot_eager")(q, k, v, *caches[2:], lengths), expected
    )
    assert torch.equal(caches[0], caches[2]) and caches[0].abs().sum() > 0


def test_compiled_dropout_draws_and_replays():
    def step(q, k, v):
        return heddle.attention(q, k, v, dropout_p=0.5).square().sum()

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    inputs = tensors()
    torch.manual_seed(4)
    expected = loss_of(step, inputs)
    torch.manual_seed(4)
    torch.testing.assert_close(loss_of(compiled, inputs), expected)
    assert not torch.equal(loss_of(compiled, inputs)[0], expected[0])


def test_fake_and_meta_tensors_give_shapes():
    with FakeTensorMode():
        q = torch.empty(2, 9, 4, 8, dtype=torch.bfloat16)
        out, lse = heddle.attention(q, q, q[..., :3], return_lse=True)
        assert type(out).__name__ == "FakeTensor"
        assert out.shape == (2, 9, 4, 3) and out.dtype == torch.bfloat16 and lse.shape == (2, 4, 9)
    q = torch.empty(2, 9, 4, 8, device="meta")
    assert heddle.attention(q, q, q).device.type == "meta"


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_functional_transforms():
    q, k, v = tensors()

    def loss(q):
        return heddle.attention(q, k, v, causal="top_left").square().sum()

    expected = loss_of(loss, [q])[1][0]
    torch.testing.assert_close(torch.func.grad(loss)(q), expected)
    many = torch.stack([q, q + 1])
    looped = torch.stack([heddle.attention(x, k, v) for x in many])
    torch.testing.assert_close(torch.func.vmap(lambda x: heddle.attention(x, k, v))(many), looped)
    per_sample = torch.func.vmap(torch.func.grad(loss))(many)
    torch.testing.assert_close(per_sample, torch.stack([loss_of(loss, [x])[1][0] for x in many]))


def test_modes_and_subclasses_see_the_call():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    class Tagged(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return super().__torch_function__(function, types, args, kwargs or {})

    q, k, v = tensors()
    seen = []
    with Recorder():
        heddle.attention(q, k, v)
    assert "heddle.attention_forward.default" in seen
    seen.clear()
    assert type(heddle.attention(q.as_subclass(Tagged), k, v)) is Tagged
    assert any("attention_forward" in name for name in seen)
    with torch.profiler.profile() as profile:
        heddle.attention(q, k, v)
    assert any("heddle::attention_forward" in event.key for event in profile.key_averages())


def test_direct_call_and_operator_agree_bitwise():
    q, k, v = tensors()
    assert _torch.direct.is_direct(q, k, v)
    direct = heddle.attention(q, k, v, causal="top_left", return_lse=True)
    through = heddle.attention(q.clone().requires_grad_(), k, v, causal="top_left", return_lse=True)
    assert torch.equal(direct[0], through[0]) and torch.equal(direct[1], through[1])
    assert through[0].requires_grad and through[1].requires_grad and not direct[0].requires_grad
    with torch.no_grad():
        assert not heddle.attention(q.clone().requires_grad_(), k, v).requires_grad
    with torch.inference_mode():
        assert torch.equal(heddle.attention(q, k, v, causal="top_left"), direct[0])


def test_negated_views_are_read_as_their_values():
    z = torch.randn(2, 9, 4, 8, dtype=torch.complex64)
    q = z.conj().imag  # the negative bit is set and memory holds the opposite sign
    assert q.is_neg()
    k = torch.randn(2, 9, 4, 8)
    torch.testing.assert_close(heddle.attention(q, k, k), heddle.attention(q.resolve_neg(), k, k))


def test_gradients_only_where_asked():
    q, k, v = tensors()
    k.requires_grad_()
    heddle.attention(q, k, v).sum().backward()
    assert k.grad is not None and q.grad is None and v.grad is None
    _, lse = heddle.attention(q, k, v, return_lse=True)
    (dk,) = torch.autograd.grad(lse.sum(), k)
    kk = k.detach().double().requires_grad_()
    scores = torch.einsum("bihd,bjhd->bhij", q.double(), kk.repeat_interleave(2, 2)) / 8**0.5
    torch.testing.assert_close(
        dk.double(), torch.autograd.grad(scores.logsumexp(-1).sum(), kk)[0], atol=1e-5, rtol=1e-5
    )


def test_what_has_no_derivative_says_so():
    q, k, v = tensors()
    q.requires_grad_()
    with pytest.raises(ValueError, match="alibi_slopes requires a gradient"):
        heddle.attention(q, k, v, alibi_slopes=torch.rand(4, requires_grad=True))
    (dq,) = torch.autograd.grad(heddle.attention(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivatives"):
        dq.sum().backward()
    cache = torch.zeros(1, 16, 2, 8)
    pages = torch.zeros(2, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match="page_table has no backward"):
        heddle.attention(q, cache, cache, page_table=pages).sum().backward()


def test_rotary_gradient():
    x = torch.randn(2, 5, 3, 8, requires_grad=True)
    angle = torch.randn(16, 4)
    offsets = torch.tensor([3, 7], dtype=torch.int32)
    weight = torch.randn(2, 5, 3, 8)
    for interleaved in (False, True):
        out = heddle.apply_rotary(x, angle.cos(), angle.sin(), interleaved=interleaved, offsets=offsets)
        (dx,) = torch.autograd.grad((out * weight).sum(), x)
        # Rotations keep lengths and inner products: the gradient is the weight turned back.
        torch.testing.assert_close(
            heddle.apply_rotary(dx, angle.cos(), angle.sin(), interleaved=interleaved, offsets=offsets), weight
        )
        a = angle[offsets[:, None] + torch.arange(5)][:, :, None]
        pairs = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :4], x[..., 4:])
        turned = (pairs[0] * a.cos() - pairs[1] * a.sin(), pairs[0] * a.sin() + pairs[1] * a.cos())
        expected = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
        torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("method", ["flash", "baseline"])
def test_errors_do_not_grow_with_every_key(method):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 128, 1, 64, generator=generator)
    k = torch.randn(1, 8192, 1, 64, generator=generator) * 0.1
    v = torch.rand(1, 8192, 1, 64, generator=generator)  # of one sign, so that nothing cancels
    wide = (x.double().transpose(1, 2) for x in (q, k, v))
    exact = torch.nn.functional.scaled_dot_product_attention(*wide).transpose(1, 2)
    error = (heddle.attention(q, k, v, method=method) - exact).abs().max().item()
    assert error < 1.2e-6  # 3.3e-7; in one running sum 2.5e-6
