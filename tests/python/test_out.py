"""Results that go where the caller says: the same bits, the same object, nothing beside it."""

import heddle
import numpy as np
import pytest
import torch
from dlpack_kit import Producer
from heddle import lowbit, nsa
from out_kit import HKV, PACKED, B, D, H, S, cache, ints, normal

NOT_GIVEN = object()
GATED = lowbit.pack(lowbit.quantize(normal(16, 64), "int4_g32"), gated=True)


def linear(x, bias, residual, out=None):
    return lowbit.linear(x, PACKED, activation="relu", bias=bias, residual=residual, norm="rms_norm", out=out)


def cache_of_nsa(k, v):
    """With the first 30 keys."""
    held = nsa.Cache(B, 60, HKV, D, 6, block=16, stride=8, dtype=k.dtype)
    held.append(k[:, :30], v[:, :30])
    return held


def step_of_nsa(q, k, v, *gates, held=None, **o):
    """20 new rows behind 30."""
    held = cache_of_nsa(k, v) if held is None else held
    return nsa.nsa_with_cache(q, k[:, 30:], v[:, 30:], held, *gates, 2, 16, 9, **o)


# call -> (function of its tensors, tensors, the results' names)
CALLS = {
    "attention": (
        lambda q, k, v, **o: heddle.attention(q, k, v, causal="top_left", return_lse=True, **o),
        lambda: (normal(B, S, H, D), normal(B, S, HKV, D, seed=1), normal(B, S, HKV, 6, seed=2)),
        ("out", "lse_out"),
    ),
    "attention without lse": (
        lambda q, k, v, bias, mask, **o: heddle.attention(q, k, v, bias=bias, mask=mask, **o),
        lambda: (*(normal(B, S, H, D, seed=i) for i in range(3)), normal(1, 1, S, S), normal(1, 1, 1, S) > -1),
        ("out",),
    ),
    "packed": (
        lambda q, k, v, cu, **o: heddle.attention(
            q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, dropout_p=0.25, dropout_seed=3, return_lse=True, **o
        ),
        lambda: (*(normal(B * S, H, D, seed=i) for i in range(3)), ints(0, 5, B * S)),
        ("out", "lse_out"),
    ),
    "sparse": (
        lambda q, k, v, blocks, counts, **o: heddle.sparse_attention(
            q, k, v, blocks, counts, block_size=16, query_rows=4, return_lse=True, **o
        ),
        lambda: (
            normal(B, S, H, D), normal(B, 40, HKV, D, seed=1), normal(B, 40, HKV, 6, seed=2),
            ints(*range(12)).reshape(B, 3, 1, 2) % 3, ints(1, 2, 0, 2, 2, 2).reshape(B, 3, 1),
        ),
        ("out", "lse_out"),
    ),
    "kv cache": (
        lambda q, k, v, kc, vc, at, **o: heddle.attention_with_kv_cache(q, k, v, kc, vc, at, return_lse=True, **o),
        lambda: (
            normal(B, 1, H, D), normal(B, 1, HKV, D, seed=1), normal(B, 1, HKV, D, seed=2),
            normal(B, 12, HKV, D, seed=3), normal(B, 12, HKV, D, seed=4), ints(5, 11),
        ),
        ("out", "lse_out"),
    ),
    "rotary": (
        lambda x, cos, sin, at, **o: heddle.apply_rotary(x, cos, sin, offsets=at, **o),
        lambda: (normal(B, S, H, D), normal(40, 3, seed=1), normal(40, 3, seed=2), ints(7, 0)),
        ("out",),
    ),
    "int4 cache": (
        lambda q, blocks, k, v, at, **o: heddle.Int4Cache(blocks, k, v).attention(q, at, return_lse=True, **o),
        lambda: (normal(2, 1, 4, 64).bfloat16(), cache()[1].blocks, cache()[1].k_tail, cache()[1].v_tail, ints(150, 140)),
        ("out", "lse_out"),
    ),
    "pooled keys": (
        lambda x, used, **o: nsa.pool_keys(x, 8, 4, seqused=used, **o),
        lambda: (normal(B, 40, HKV, D), ints(33, 40)),
        ("out",),
    ),
    "packed pooled keys": (
        lambda x, cu, **o: nsa.pool_keys(x, 8, 4, cu, **o), lambda: (normal(50, HKV, D), ints(0, 21, 50)), ("out",)
    ),
    "chosen blocks": (
        lambda q, k, at, **o: nsa.select_blocks(q, k, 3, block_size=16, compression_block=8, q_offset=at, **o),
        lambda: (normal(B, 60, H, D), normal(B, 10, HKV, D, seed=1), ints(20, 0)),
        ("out",),
    ),
    "packed chosen blocks": (
        lambda q, k, cu, cu_k, **o: nsa.select_blocks(
            q, k, 3, block_size=16, cu_seqlens_q=cu, cu_seqlens_k=cu_k, max_seqlen_q=70, max_seqlen_k=4, **o
        ),
        lambda: (normal(100, H, D), normal(6, HKV, D, seed=1), ints(0, 30, 100), ints(0, 2, 6)),
        ("out",),
    ),
    "native sparse attention": (
        step_of_nsa,
        lambda: (
            normal(B, 20, H, D), normal(B, 50, HKV, D, seed=1), normal(B, 50, HKV, 6, seed=2),
            *(normal(B, 20, H, seed=i) for i in (3, 4, 5)),
        ),
        ("out",),
    ),
    "native sparse attention in 16 bits": (
        lambda *x, **o: step_of_nsa(*(y.bfloat16() for y in x[:3]), None, x[3], x[4], **o),
        lambda: (
            normal(B, 20, H, D), normal(B, 50, HKV, D, seed=1), normal(B, 50, HKV, 6, seed=2),
            *(normal(B, 20, H, seed=i) for i in (3, 4)),
        ),
        ("out",),
    ),
    "linear": (linear, lambda: (normal(3, 5, 64), normal(16), normal(3, 5, 16, seed=1)), ("out",)),
    "gated linear": (
        lambda x, **o: lowbit.linear(x, GATED, activation="swiglu", **o), lambda: (normal(7, 64),), ("out",)
    ),
}  # fmt: skip
ARRAYS = [name for name in CALLS if name != "int4 cache" and not name.startswith("native")]
DLPACK = [
    "attention", "attention without lse", "packed", "sparse", "kv cache", "rotary", "pooled keys", "packed pooled keys",
    "chosen blocks", "packed chosen blocks", "linear", "gated linear",
]  # fmt: skip


def results(found):
    return found if isinstance(found, tuple) else (found,)


class Framed:
    """Memory for a result amid a larger array of sevens: `strided` has gaps in every dimension but the last."""

    def __init__(self, like, strided=False):
        steps = [2] * (like.dim() - 1) + [1] if strided else [1] * like.dim()
        self.whole = torch.full([n * s + 4 for n, s in zip(like.shape, steps)], 7.0, dtype=like.dtype)
        self.index = tuple(slice(2, 2 + n * s, s) for n, s in zip(like.shape, steps))
        self.view = self.whole[self.index]

    def check(self, expected):
        assert torch.equal(self.view, expected)
        around = self.whole.clone()
        around[self.index] = 7
        assert (around == 7).all(), "written outside"


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_torch(name, strided):
    call, tensors, names = CALLS[name]
    expected = results(call(*tensors()))
    for given in ({names[0]}, set(names), {names[-1]}):
        frames = {n: Framed(e, strided) for n, e in zip(names, expected) if n in given}
        written = tensors()
        versions = {n: f.view._version for n, f in frames.items()}
        found = results(call(*written, **{n: f.view for n, f in frames.items()}))
        for n, f, e in zip(names, found, expected):
            if n in frames:
                assert f is frames[n].view and f._version == versions[n] + 1
                frames[n].check(e)
            else:
                assert torch.equal(f, e)


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("name", ARRAYS)
def test_numpy(name, strided):
    call, tensors, names = CALLS[name]
    arrays = [x.numpy() for x in tensors()]
    expected = results(call(*[x.copy() for x in arrays]))
    frames = {n: Framed(torch.from_numpy(e), strided) for n, e in zip(names, expected)}
    outs = {n: f.view.numpy() for n, f in frames.items()}
    found = results(call(*arrays, **outs))
    for n, f, e in zip(names, found, expected):
        assert f is outs[n]
        frames[n].check(torch.from_numpy(e))


@pytest.mark.parametrize("name", DLPACK)
def test_a_library_of_dlpack_alone(name):
    call, tensors, names = CALLS[name]
    expected = results(call(*[x.numpy() for x in tensors()]))
    outs = {n: Producer(np.zeros_like(e)) for n, e in zip(names, expected)}
    found = results(call(*[Producer(x.numpy()) for x in tensors()], **outs))
    for n, f, e in zip(names, found, expected):
        assert f is outs[n] and np.array_equal(f.array, e)


@pytest.mark.parametrize("name", [name for name in CALLS if not name.startswith("native")])
def test_compiled(name):
    call, tensors, names = CALLS[name]
    expected = results(call(*tensors()))
    given = tensors()
    outs = {n: torch.full_like(e, 7) for n, e in zip(names, expected)}

    def twice(given, outs):
        found = results(call(*[x * 1 if x.is_floating_point() else x for x in given], **outs))
        return found, found[0] + found[0]

    torch._dynamo.reset()  # the calls share one code, which torch compiles a few times at most
    compiled = torch.compile(twice, backend="aot_eager", fullgraph=True)
    found, doubled = compiled(given, outs)
    assert torch.equal(doubled, 2 * expected[0])
    for n, f, e in zip(names, found, expected):
        assert torch.equal(outs[n], e) and f.data_ptr() == outs[n].data_ptr()


@pytest.mark.parametrize("name", [name for name in CALLS if name.startswith("native")])
def test_compiled_with_a_cache(name):
    call, tensors, _ = CALLS[name]
    given = tensors()
    expected = call(*given)
    k, v = (x.to(expected.dtype) for x in given[1:3])
    held, out = cache_of_nsa(k, v), torch.full_like(expected, 7)

    def twice(given, out):
        return call(*given, held=held, out=out) * 2

    torch._dynamo.reset()
    doubled = torch.compile(twice, backend="aot_eager", fullgraph=True)(given, out)
    assert torch.equal(out, expected) and torch.equal(doubled, 2 * expected)
    assert held.lengths.tolist() == [50, 50]


def test_operators():
    q, k, v = (normal(B, S, h, D, seed=h) for h in (H, HKV, HKV))
    checks = ["test_schema", "test_faketensor", "test_aot_dispatch_dynamic"]
    options = heddle._options.pack()
    for lse in (torch.empty(B, H, S), None):
        sample = (q, k, v, torch.empty_like(q), lse, *options)
        torch.library.opcheck(torch.ops.heddle.attention_forward_out.default, sample, test_utils=checks)
    caches = normal(B, 12, HKV, D, seed=3), normal(B, 12, HKV, D, seed=4)
    new = normal(B, 1, HKV, D, seed=1), normal(B, 1, HKV, D, seed=2)
    items = heddle._options.pack(seqused_k=ints(5, 11))
    sample = (q[:, :1].contiguous(), *new, *caches, None, None, False, torch.empty(B, 1, H, D), None, *items)
    torch.library.opcheck(torch.ops.heddle.attention_with_kv_cache_out.default, sample, test_utils=checks)
    sample = (q, normal(40, 3), normal(40, 3), False, None, torch.empty_like(q))
    torch.library.opcheck(torch.ops.heddle.apply_rotary_out.default, sample, test_utils=checks)
    for packed, sample in (
        (False, (normal(B, 40, HKV, D), 8, 4, None, ints(33, 40))),
        (True, (normal(50, HKV, D), 8, 4, ints(0, 20, 50), None)),
    ):
        out = torch.empty((12, HKV, D) if packed else (B, 9, HKV, D))
        torch.library.opcheck(torch.ops.heddle.pool_keys_out.default, (*sample, out), test_utils=checks)
    choice = (16, 8, None, 7, None, None, None, None, None, ints(20, 0), 1, 0, 0)
    lists = torch.empty(B, S, HKV, 3, dtype=torch.int32)
    for lse in (normal(B, H, S), None):
        sample = (q, normal(B, 10, HKV, D), lse, lists, *choice)
        torch.library.opcheck(torch.ops.heddle.select_blocks_out.default, sample, test_utils=checks)


def test_in_place():
    x, cos, sin = normal(B, S, H, D), normal(40, 3), normal(40, 3, seed=1)
    for a in (x.clone(), x.numpy().copy()):
        table = (cos, sin) if isinstance(a, torch.Tensor) else (cos.numpy(), sin.numpy())
        expected = heddle.apply_rotary(a, *table)
        assert heddle.apply_rotary(a, *table, out=a) is a and np.array_equal(a, expected)
    x, residual = normal(5, 64), normal(5, 16)
    expected = lowbit.linear(x, PACKED, residual=residual)
    assert lowbit.linear(x, PACKED, residual=residual, out=residual) is residual
    assert torch.equal(residual, expected)


@pytest.mark.parametrize("format", ["nvfp4", "int4_g32_zp", "int8_row"])
@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_weights(format, kind):
    w = normal(16, 64) if kind == "torch" else normal(16, 64).numpy()
    first, other = lowbit.quantize(w, format), lowbit.quantize(w * 2, format)
    assert lowbit.quantize(w, format, out=other) is other
    assert all(
        torch.equal(*(torch.as_tensor(x).view(torch.uint8) for x in pair)) for pair in zip(parts(first), parts(other))
    )
    plain = first.dequantize()
    for matrix in (first, lowbit.pack(first)):
        out = plain * 0
        undo = matrix.dequantize if matrix is first else matrix.unpack
        assert undo(out=out) is out and np.array_equal(out, plain)
        with pytest.raises(ValueError, match=r"out is \[15, 64\]: it must be \[16, 64\]"):
            undo(out=out[1:])
        with pytest.raises(ValueError, match="dtype is .*float16.* and out is .*float32: give one of them"):
            undo(torch.float16 if kind == "torch" else np.float16, out=out)
        with pytest.raises(TypeError, match="out is a .*: it must be"):
            undo(out=out.numpy() if kind == "torch" else torch.from_numpy(out))
    with pytest.raises(ValueError, match=rf"out is {format} \[16, 64\]: it must be {format} \[8, 64\]"):
        lowbit.quantize(w[:8], format, out=first)
    with pytest.raises(ValueError, match=rf"out is {format} \[16, 64\]: it must be nf4"):
        lowbit.quantize(w, "nf4", out=first)
    with pytest.raises(TypeError, match="out is a .*: it must be a QuantizedTensor"):
        lowbit.quantize(w, format, out=w)
    with pytest.raises(ValueError, match="shares memory with weights"):
        memory = first.codes.view(np.uint8) if kind == "numpy" else first.codes.view(torch.uint8)
        shared = memory.reshape(-1)[:256].view(np.float32 if kind == "numpy" else torch.float32).reshape(1, 64)
        lowbit.quantize(
            shared, format, out=lowbit.QuantizedTensor(format, (1, 64), *(cut(t) for t in parts(first, True)))
        )


def parts(q, all_of_them=False):
    tensors = (q.codes, q.scales, q.zeros, q.global_scale)
    return tensors if all_of_them else [t for t in tensors if t is not None]


def cut(t):
    return t if t is None else t[:1]


def test_gradients_are_refused():
    q, k, v = (normal(B, S, H, D, seed=i) for i in range(3))
    words = "requires a gradient: a call that writes to out has no backward; make it under torch.no_grad.., or detach"
    for name, changed in {
        "q": {"q": q.clone().requires_grad_()},
        "v": {"v": v.clone().requires_grad_()},
        "bias": {"bias": normal(S, S).requires_grad_()},
        "sink": {"sink": normal(H).requires_grad_()},
        "alibi_slopes": {"alibi_slopes": normal(H).requires_grad_()},
        "out": {"out": torch.empty_like(q).requires_grad_()},
    }.items():
        given = {"q": q, "k": k, "v": v, "out": torch.full_like(q, 7), **changed}
        with pytest.raises(ValueError, match=rf"\[attention\] {name} {words} {name}"):
            heddle.attention(given.pop("q"), given.pop("k"), given.pop("v"), **given)
        given = {"q": q, "k": k, "v": v, "out": torch.full_like(q, 7), **changed}
        with torch.no_grad():
            out = given["out"]
            assert heddle.attention(given.pop("q"), given.pop("k"), given.pop("v"), **given) is out
        assert not (out == 7).any()
    with pytest.raises(ValueError, match="lse_out requires a gradient"):
        heddle.attention(q, k, v, return_lse=True, lse_out=torch.empty(B, H, S).requires_grad_())
    with pytest.raises(ValueError, match="x requires a gradient"):
        heddle.apply_rotary(q.clone().requires_grad_(), normal(40, 3), normal(40, 3), out=torch.empty_like(q))
    at, new = ints(0, 0), (k[:, :1].contiguous(), v[:, :1].contiguous())
    with pytest.raises(ValueError, match="out requires a gradient"):
        heddle.attention_with_kv_cache(q[:, :1], *new, k, v, at, out=torch.empty(B, 1, H, D).requires_grad_())
    with pytest.raises(ValueError, match="out requires a gradient"):
        lowbit.quantize(normal(16, 64), "nvfp4").dequantize(out=torch.empty(16, 64).requires_grad_())
    pooled, lists = torch.empty(B, 1, H, D), torch.empty(B, S, H, 1, dtype=torch.int32)
    for name, x in {"x": q.clone().requires_grad_(), "out": q}.items():
        out = pooled.clone().requires_grad_(name == "out")
        with pytest.raises(ValueError, match=rf"\[pool_keys\] {name} {words} {name}"):
            nsa.pool_keys(x, 8, out=out)
    with pytest.raises(ValueError, match=rf"\[select_blocks\] k_pooled {words} k_pooled"):
        nsa.select_blocks(q, pooled.requires_grad_(), 1, out=lists)
    with torch.no_grad():
        assert nsa.select_blocks(q, pooled, 1, out=lists) is lists
    x, out, held = CALLS["native sparse attention"][1](), torch.empty(B, 20, H, 6), nsa.Cache(B, 60, HKV, D, 6)
    given = dict(cache=held, g_cmp=x[3], g_slc=x[4], g_swa=x[5], k_new=x[1][:, :20], v_new=x[2][:, :20], out=out)
    with pytest.raises(
        ValueError, match=r"\[nsa_with_cache\] g_slc requires a gradient: a call over a cache has no backward"
    ):
        nsa.nsa_with_cache(x[0], **{**given, "g_slc": x[4].clone().requires_grad_()})
    with pytest.raises(ValueError, match=rf"\[nsa_with_cache\] out {words} out"):
        nsa.nsa_with_cache(x[0], **{**given, "out": out.clone().requires_grad_()})
    assert not held.lengths.any()
    with torch.no_grad():
        assert nsa.nsa_with_cache(x[0].requires_grad_(), **given) is out
    with torch.inference_mode():
        out = torch.empty_like(q)
        assert heddle.attention(q, k, v, out=out) is out


def test_autograd_notices_that_out_was_written():
    q, k, v = (normal(B, S, H, D, seed=i) for i in range(3))
    out, w = torch.ones_like(q), normal(B, S, H, D, seed=3).requires_grad_()
    loss = (w * out).sum()
    heddle.attention(q, k, v, out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_transforms_are_refused():
    q = normal(3, B, S, H, D)
    out = torch.empty(B, S, H, D)
    with pytest.raises(ValueError, match="out is given inside a transform of torch.func"):
        torch.func.vmap(lambda x: heddle.attention(x, x, x, out=out))(q)
    with pytest.raises(ValueError, match="out is given inside a transform of torch.func"):
        torch.func.vmap(lambda x: lowbit.linear(x, PACKED, out=torch.empty(4, 16)))(normal(3, 4, 64))
    with pytest.raises(ValueError, match=r"\[pool_keys\] out is given inside a transform of torch.func"):
        torch.func.vmap(lambda x: nsa.pool_keys(x, 8, out=torch.empty(B, 1, H, D)))(q)


def test_autocast_decides_the_dtype():
    q, k, v = (normal(B, S, H, D, seed=i) for i in range(3))
    with torch.autocast("cpu", torch.bfloat16):
        out = torch.empty(B, S, H, D, dtype=torch.bfloat16)
        assert heddle.attention(q, k, v, out=out) is out and torch.equal(out, heddle.attention(q, k, v))
        with pytest.raises(ValueError, match="out is float32: it must be bfloat16"):
            heddle.attention(q, k, v, out=torch.empty_like(q))
