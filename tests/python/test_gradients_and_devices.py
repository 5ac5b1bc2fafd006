"""Calls without a backward refuse what requires a gradient, calls refuse tangents, and tensors on several devices."""

import heddle
import pytest
import torch
from heddle import flash_attn, lowbit
from heddle._options import pack
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

LENGTHS = torch.tensor([1, 2], dtype=torch.int32)


def given(D=8, dtype=torch.float32):
    """All that a call over a cache may be given."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 5, 4, D, dtype=dtype) for _ in "qkv")
    found = {"q": q, "k_new": k, "v_new": v}
    found.update({name: torch.zeros(2, 12, 4, D, dtype=dtype) for name in ("k_cache", "v_cache")})
    found.update({name: torch.randn(16, 4, dtype=dtype) for name in ("rotary_cos", "rotary_sin")})
    return {**found, "alibi_slopes": torch.rand(4), "bias": torch.randn(5, 12, dtype=dtype), "sink": torch.randn(4)}


def with_kv_cache(x):
    operands = [x.pop(name) for name in ("q", "k_new", "v_new", "k_cache", "v_cache")]
    return heddle.attention_with_kv_cache(*operands, LENGTHS, **x)


def append(x):
    operands = [x[name] for name in ("k_new", "v_new", "k_cache", "v_cache")]
    return heddle.append_kv_cache(*operands, LENGTHS, rotary_cos=x["rotary_cos"], rotary_sin=x["rotary_sin"])


def flash(x):
    operands = [x[name] for name in ("q", "k_cache", "v_cache", "k", "v", "rotary_cos", "rotary_sin")]
    return flash_attn.flash_attn_with_kvcache(*operands, LENGTHS, causal=True, alibi_slopes=x["alibi_slopes"])


def flash_whole(x):
    return flash_attn.flash_attn_with_kvcache(x["q"], x["k_cache"], x["v_cache"], alibi_slopes=x["alibi_slopes"])


def by_operator(x):
    operands = [x[name] for name in ("q", "k_new", "v_new", "k_cache", "v_cache")]
    options = pack(seqused_k=LENGTHS)
    return torch.ops.heddle.attention_with_kv_cache(*operands, None, None, False, *options)[0]


CALLS = {
    "attention_with_kv_cache": (
        with_kv_cache, "q k_new v_new k_cache v_cache rotary_cos rotary_sin alibi_slopes bias sink"
    ),
    "append_kv_cache": (append, "k_new v_new k_cache v_cache rotary_cos rotary_sin"),
    "flash_attn_with_kvcache": (flash, "q k v k_cache v_cache rotary_cos rotary_sin alibi_slopes"),
    "flash_attn_with_kvcache without new keys": (flash_whole, "q k_cache v_cache alibi_slopes"),
    "attention_with_kv_cache by operator": (by_operator, "q k_new v_cache"),
}  # fmt: skip


def named(x, call):
    return {{"k_new": "k", "v_new": "v"}.get(n, n): t for n, t in x.items()} if call is flash else x


@pytest.mark.parametrize("name", CALLS)
def test_gradients_over_caches(name):
    call, differentiable = CALLS[name]
    rule = r" requires a gradient: this call has no backward; make it under torch.no_grad\(\), or detach "
    expected = call(named(given(), call))
    for wanted in differentiable.split():
        x = named(given(), call)
        before = {n: t.clone() for n, t in x.items()}
        x[wanted].requires_grad_()
        operation = name.split()[0]
        with pytest.raises(ValueError, match=rf"\[{operation}\] {wanted}{rule}{wanted}"):
            call(dict(x))
        assert all(torch.equal(x[n], before[n]) for n in x)  # nothing was written
        with torch.no_grad():
            found = call(dict(x))
        assert found is expected is None or torch.equal(found, expected)
        found = call({n: t.detach().copy_(before[n]) for n, t in x.items()})
        assert found is expected is None or torch.equal(found, expected)


def test_gradients_over_four_bits():
    cache = heddle.Int4Cache.empty(2, 300, 4, 64)
    x = torch.randn(2, 3, 4, 64).bfloat16().requires_grad_()
    zero = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"\[append_int4_cache\] k_new requires a gradient: this call has no backward"):
        cache.append(x, x.detach(), zero)
    with pytest.raises(ValueError, match=r"\[attention_over_int4_cache\] q requires a gradient"):
        cache.attention(x, zero)
    sink = torch.zeros(4, requires_grad=True)
    with pytest.raises(ValueError, match=r"\[attention_over_int4_cache\] sink requires a gradient"):
        cache.attention(x.detach(), zero, sink=sink)
    with torch.inference_mode():
        cache.append(x, x, zero)
        assert cache.attention(x, zero + 3, sink=sink).shape == x.shape


@pytest.mark.parametrize("call", [with_kv_cache, flash, flash_whole])
@pytest.mark.parametrize("fullgraph", [False, True])
def test_compiled_calls_over_caches(call, fullgraph):
    x = named(given(), call)
    compiled = torch.compile(lambda x: call(dict(x)), backend="aot_eager", fullgraph=fullgraph)
    x["q"].requires_grad_()
    with pytest.raises(Exception, match="q requires a gradient: this call has no backward"):
        compiled(x)
    with torch.no_grad():
        found = compiled(x)
    again = named(given(), call)
    torch.testing.assert_close(found, call(again))


@pytest.mark.parametrize("name", ["attention_with_kv_cache", "flash_attn_with_kvcache without new keys"])
def test_transforms_of_calls_over_caches(name):
    call, _ = CALLS[name]
    x = given()
    with pytest.raises(ValueError, match="q requires a gradient: this call has no backward"):
        torch.func.grad(lambda q: call({**x, "q": q}).sum())(x["q"])
    with pytest.raises(NotImplementedError, match="q has a tangent: there are no forward-mode derivatives"):
        torch.func.jvp(lambda q: call({**x, "q": q}), (x["q"],), (x["q"],))


def test_tangents():
    """torch would drop them where nothing requires a gradient."""
    x = given()
    q, k, v, table = x["q"], x["k_new"], x["v_new"], x["rotary_cos"]
    weights = lowbit.pack(lowbit.quantize(torch.randn(32, 64), "nvfp4"))
    for operation, name, call in (
        ("attention", "q", lambda q: heddle.attention(q, k, v)),
        ("attention", "v", lambda q: heddle.attention(k, k, q)),
        ("attention", "q", lambda q: heddle.sdpa(q, k, v)),
        ("sparse_attention", "q", lambda q: heddle.sparse_attention(q, k, v, LENGTHS.expand(2, 5, 1, 2))),
        ("apply_rotary", "x", lambda q: heddle.apply_rotary(q, table, table)),
        ("attention_with_kv_cache", "q", lambda q: with_kv_cache({**x, "q": q})),
        ("linear_forward", "x", lambda q: lowbit.linear(q.reshape(-1, 64), weights)),
    ):
        with pytest.raises(NotImplementedError, match=rf"\[{operation}\] {name} has a tangent"):
            with forward_ad.dual_level():
                call(forward_ad.make_dual(q, torch.ones_like(q)))
    with forward_ad.dual_level():  # of others than the call's tensors it does not matter
        assert torch.equal(heddle.attention(q, k, v), heddle.attention(q, k, v))
    with pytest.raises(NotImplementedError):
        torch.func.jvp(lambda q: heddle.apply_rotary(q, table, table), (q,), (q,))


def test_scales_have_no_gradients():
    q, k, v = (torch.randn(1, 5, 2, 8).to(torch.float8_e4m3fn) for _ in "qkv")
    for name in ("q_scale", "k_scale", "v_scale"):
        with pytest.raises(ValueError, match=rf"\[attention\] {name} requires a gradient: it has none; detach it"):
            heddle.attention(q, k, v, force="reference", **{name: torch.ones(1, 1, 1, requires_grad=True)})


def on_meta(name, x):
    return {n: t.to("meta") if n == name else t for n, t in x.items()}


def dense(x):
    return heddle.attention(**x)


def sparse(x):
    return heddle.sparse_attention(**x)


def sdpa(x):
    return heddle.sdpa(**x)


def rotary(x):
    return heddle.apply_rotary(x["x"], x["cos"], x["sin"], offsets=x["offsets"])


def append_of(x):
    return heddle.append_kv_cache(*x.values())


def over_cache(x):
    return heddle.attention_with_kv_cache(*x.values())


def on_devices():
    x = given()
    q, k, v = x["q"], x["k_new"], x["v_new"]
    heads_first = [t.transpose(1, 2) for t in (q, k, v)]
    operands = {"q": q, "k": k, "v": v}
    cu = torch.tensor([0, 5, 10], dtype=torch.int32)
    flat = {name: t.flatten(0, 1) for name, t in operands.items()}
    caches = {"k_cache": x["k_cache"], "v_cache": x["v_cache"]}
    new = {"k_new": k, "v_new": v, **caches, "seqlens": LENGTHS}
    pages = {"q": q, "k": x["k_cache"], "v": x["v_cache"], "page_table": LENGTHS[:, None] - 1}
    return {
        "attention": (dense, {**operands, "bias": torch.randn(5, 5), "sink": torch.randn(4), "seqused_k": LENGTHS}),
        "a mask": (dense, {**operands, "mask": torch.ones(5, 5, dtype=torch.bool), "alibi_slopes": torch.rand(4)}),
        "packed": (dense, {**flat, "cu_seqlens_q": cu, "cu_seqlens_k": cu}),
        "pages": (dense, pages),
        "sparse": (
            sparse,
            {
                **operands,
                "blocks": torch.zeros(2, 5, 1, 2, dtype=torch.int32),
                "counts": torch.ones(2, 5, 1, dtype=torch.int32),
                "sink": torch.randn(4),
                "seqused_k": LENGTHS,
            },
        ),
        "sdpa": (sdpa, dict(zip(("query", "key", "value"), heads_first))),
        "masked sdpa": (sdpa, dict(zip(("query", "key", "value", "attn_mask"), (*heads_first, torch.randn(5, 5))))),
        "rotary": (rotary, {"x": q, "cos": x["rotary_cos"], "sin": x["rotary_sin"], "offsets": LENGTHS}),
        "append": (append_of, new),
        "with cache": (over_cache, {"q": q, **new}),
    }


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("name", on_devices())
def test_one_device(name, gradients):
    """A tensor on `meta` has a shape and no values; torch takes an operator's shapes from its fake then."""
    call, x = on_devices()[name]
    if gradients and "k_cache" not in x and "page_table" not in x:
        x = {n: t.requires_grad_() if n in ("q", "query", "x") else t for n, t in x.items()}
    call(x)
    first, second = list(x)[:2]
    for wrong in x:
        one, other = (wrong, first) if wrong != first else (second, first)
        meta, cpu = (one, other) if wrong != first else (other, one)
        with pytest.raises(ValueError) as error:
            call(on_meta(wrong, x))
        text = str(error.value)
        assert f"{one} is on another device than {other}: " in text, text
        assert f"{meta} is on meta" in text or f"{meta} on meta" in text, text
        assert f"{cpu} is on cpu" in text or f"{cpu} on cpu" in text, text
    found = call({n: t.to("meta") for n, t in x.items()})
    assert found is None or (found.device.type == "meta" and found.shape == call(x).shape)


def test_one_device_of_operators_and_fakes():
    q, k, v = (given()[name] for name in ("q", "k_new", "v_new"))
    options = pack()
    words = "k is on another device than q: k is on {}, q on {}; all tensors of a call must be on one"
    with pytest.raises(ValueError, match=words.format("cpu", "meta")):
        torch.ops.heddle.attention_forward(q.to("meta"), k, v, *options)
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(x) for x in (q, k, v)]
        assert heddle.attention(*fake).shape == q.shape
        with pytest.raises(ValueError, match=words.format("meta", "cpu")):
            heddle.attention(fake[0], fake[1].to("meta"), fake[2])
    with pytest.raises(Exception, match=words.format("cpu", "meta")):
        torch.compile(heddle.attention, backend="aot_eager", fullgraph=True)(q.to("meta"), k, v)
    seed = torch.tensor(3)  # is read on the host
    assert heddle.attention(*(x.to("meta") for x in (q, k, v)), dropout_p=0.5, dropout_seed=seed).shape == q.shape
    cache, zero = heddle.Int4Cache.empty(2, 300, 4, 64), torch.zeros(2, dtype=torch.int32)
    new = torch.zeros(2, 1, 4, 64, dtype=torch.bfloat16, device="meta")
    with pytest.raises(ValueError, match="blocks is on another device than k_new"):
        cache.append(new, new, zero)
    with pytest.raises(ValueError, match="blocks is on another device than q"):
        cache.attention(new, zero)
    with pytest.raises(ValueError, match="weights is on another device than x"):
        packed = lowbit.pack(lowbit.quantize(torch.randn(32, 64), "nvfp4"))
        with FakeTensorMode(allow_non_fake_inputs=True):
            lowbit.linear(torch.empty(3, 64, device="meta"), packed)
