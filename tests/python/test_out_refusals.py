"""Results that cannot go where the caller says: what is refused, and that nothing was written."""

import heddle
import numpy as np
import pytest
import torch
from heddle import lowbit, nsa
from out_kit import HKV, PACKED, B, D, H, S, cache, ints, normal


def refused():
    """name -> (what is given, the words); over q, k, v of [2, 9, 4, 8]."""
    q, k, v = (normal(B, S, H, D, seed=i) for i in range(3))
    lse = torch.empty(B, H, S)
    lengths = torch.zeros(B * S * H * D, dtype=torch.int32)
    wide = torch.zeros(B, S, 2 * H, D)
    return {
        "shape": (dict(out=torch.empty(B, S, H, 7)), r"out is \[2, 9, 4, 7\]: its last extent must be 8"),
        "rank": (dict(out=torch.empty(S, H, D)), "out .*3 dimensions"),
        "dtype": (dict(out=torch.empty(B, S, H, D, dtype=torch.float16)), "out is float16: it must be float32"),
        "long dtype": (dict(out=torch.empty(B, S, H, D, dtype=torch.float64)), "out is float64: it must be"),
        "expanded": (dict(out=torch.empty(1, S, H, D).expand(B, -1, -1, -1)), "out .*(overlap|share|more than one)"),
        "q": (dict(q=q, out=q), "out shares memory with q, which is read while it is written"),
        "part of k": (dict(k=wide[:, :, :H], v=v, out=wide[:, :, 2 : H + 2]), "out shares memory with k"),
        "bias": (dict(bias=(b := torch.zeros(B, H, S, S)), out=b.view(-1)[: q.numel()].view(q.shape)), "out shares memory with bias"),
        "lengths": (
            dict(seqused_k=lengths[:B], out=lengths.view(torch.float32).view(q.shape)), "out shares memory with seqused_k"
        ),
        "lse shape": (dict(return_lse=True, lse_out=torch.empty(B, S, H)), r"lse_out is \[2, 9, 4\]: it must be .*\[2, 4, 9\]"),
        "lse dtype": (dict(return_lse=True, lse_out=lse.half()), "lse_out is float16: it must be float32"),
        "long lse": (dict(return_lse=True, lse_out=lse.double()), "lse_out is float64: it must be float32"),
        "lse in out": (
            dict(return_lse=True, out=(o := torch.empty_like(q)), lse_out=o.view(-1)[: B * H * S].view(B, H, S)),
            "out and lse_out share memory: outputs must be apart",
        ),
        "lse that nobody asked for": (dict(lse_out=lse), "lse_out is given and return_lse is False"),
    }  # fmt: skip


# What the compiler copies shares no memory.
COPIED = ("q", "part of k", "bias", "lengths", "lse in out", "expanded")


@pytest.mark.parametrize(
    "name, kind",
    [(n, k) for n in refused() for k in ("torch", "numpy", "compiled") if k != "compiled" or n not in COPIED],
)
def test_refusals_of_attention(name, kind):
    given, words = refused()[name]
    q, k, v = (normal(B, S, H, D, seed=i) for i in range(3))
    given = {"q": q, "k": k, "v": v, **given}
    if kind == "numpy":
        given = {n: x.numpy() if isinstance(x, torch.Tensor) else x for n, x in given.items()}
    before = {n: x.copy() if kind == "numpy" else x.clone() for n, x in given.items() if not isinstance(x, bool)}
    call = torch.compile(heddle.attention, backend="aot_eager") if kind == "compiled" else heddle.attention
    with pytest.raises(ValueError, match=words):
        call(given["q"], given["k"], given["v"], **{n: x for n, x in given.items() if n not in "qkv"})
    for n, x in before.items():
        assert np.array_equal(np.asarray(given[n]), np.asarray(x), equal_nan=True), f"{n} was written"


def test_refusals_of_other_calls():
    new, at = normal(B, 1, HKV, D), ints(5, 0)
    k_cache, v_cache, table = normal(B, 12, HKV, D), normal(B, 12, HKV, D), normal(40, 4)
    q = normal(B, 1, H, D)

    def step(**given):
        return heddle.attention_with_kv_cache(q, new, new.clone(), k_cache, v_cache, at, **given)

    memory = torch.zeros(B, 1, H, D)
    held = cache()[1]
    x, w = normal(5, 64), normal(5, 16)
    for words, call in [
        ("out shares memory with k_cache", lambda: step(out=k_cache.view(-1)[: q.numel()].view(q.shape))),
        ("out shares memory with q", lambda: step(out=q)),
        (r"out is \[2, 2, 4, 8\]: dimension 1 must be q.s, 1", lambda: step(out=torch.empty(B, 2, H, D))),
        ("lse_out is given and return_lse is False", lambda: step(lse_out=torch.empty(B, H, 1))),
        (
            "out shares memory with k_new",
            lambda: heddle.attention_with_kv_cache(q, memory[:, :, :HKV], new, k_cache, v_cache, at, out=memory),
        ),
        (
            "out shares memory with cos",
            lambda: step(rotary_cos=table, rotary_sin=table.clone(), out=table.view(-1)[: q.numel()].view(q.shape)),
        ),
        (
            "out shares memory with blocks",
            lambda: held.attention(
                normal(2, 1, 4, 64).bfloat16(),
                ints(150, 140),
                out=held.blocks.view(torch.bfloat16).view(-1)[: 2 * 4 * 64].view(2, 1, 4, 64),
            ),
        ),
        (
            r"out is \[2, 9, 4, 7\]",
            lambda: heddle.apply_rotary(normal(B, S, H, D), table, table, out=torch.empty(B, S, H, 7)),
        ),
        (
            "out shares memory with x",
            lambda: heddle.apply_rotary((y := normal(B, S + 1, H, D))[:, 1:], table, table, out=y[:, :-1]),
        ),
        (r"out is \[5, 15\]: it must be \[5, 16\]", lambda: lowbit.linear(x, PACKED, out=torch.empty(5, 15))),
        ("out is float16: it must be float32", lambda: lowbit.linear(x, PACKED, out=torch.empty(5, 16).half())),
        ("out shares memory with x", lambda: lowbit.linear(x, PACKED, out=x.view(-1)[:80].view(5, 16))),
        ("out shares memory with residual", lambda: lowbit.linear(x[:4], PACKED, residual=w[1:], out=w[:-1])),
    ]:
        with pytest.raises(ValueError, match=words):
            call()


@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_refusals_of_pooled_keys_and_lists(kind):
    x, q, k = normal(B, 40, HKV, D), normal(B, S, H, D), normal(B, 10, HKV, D)
    pooled, lists = torch.empty(B, 9, HKV, D), torch.empty(B, S, HKV, 3, dtype=torch.int32)
    row = torch.empty(1, 9, HKV, D)

    def pool(**given):
        return nsa.pool_keys, dict(x=x, block=8, stride=4, **given)

    def select(**given):
        return nsa.select_blocks, {**dict(q=q, k_pooled=k, n=3, block_size=16), **given}

    for words, (function, given) in [
        (r"out is \[2, 8, 2, 8\]: it must be \[2, 9, 2, 8\], a row for each complete block", pool(out=pooled[:, 1:])),
        ("out has 3 dimensions", pool(out=pooled[0])),
        ("out is float16: it must be float32", pool(out=pooled.half())),
        ("out is float64: it must be", pool(out=pooled.double())),
        ("out is an output whose elements overlap", pool(out=row.expand(B, -1, -1, -1))),
        ("out shares memory with x, which is read while it is written", pool(out=x[:, :9])),
        (
            "out shares memory with seqused",
            pool(seqused=(m := torch.zeros(pooled.numel(), dtype=torch.int32))[:B], out=m.view(torch.float32).view(pooled.shape)),
        ),
        (r"out is \[2, 9, 2, 3\]: its last extent must be 2", select(n=2, out=lists)),
        (r"out is \[2, 8, 2, 3\]: it must be \[2, 9, 2, n\], a list for each row", select(out=lists[:, 1:])),
        ("out has 3 dimensions", select(out=lists[0])),
        ("out is float32: it must be int32", select(out=lists.float())),
        ("out is int64: it must be", select(out=lists.long())),
        ("out must have contiguous entries: the last stride is 2", select(out=lists.repeat(1, 1, 1, 2)[..., ::2])),
        ("out shares memory with q", select(out=q.view(torch.int32).view(-1)[: lists.numel()].view(lists.shape))),
        (
            "out shares memory with q_offset",
            select(q_offset=(m := torch.zeros(lists.numel(), dtype=torch.int32))[:B], out=m.view(lists.shape)),
        ),
    ]:  # fmt: skip
        if kind == "numpy":
            given = {n: y.numpy() if isinstance(y, torch.Tensor) else y for n, y in given.items()}
        before = given["out"].copy() if kind == "numpy" else given["out"].clone()
        with pytest.raises(ValueError, match=rf"^\[{function.__name__}\] " + words):
            function(**given)
        assert np.array_equal(np.asarray(given["out"]), np.asarray(before), equal_nan=True)


def test_refusals_of_native_sparse_attention_over_a_cache():
    held = nsa.Cache(B, 60, HKV, D, block=16)
    held.append(normal(B, 30, HKV, D), normal(B, 30, HKV, D, seed=1))
    before = [x.clone() for x in (held.k, held.v, held.k_pooled, held.v_pooled, held.lengths)]
    shape = (B, 20, H, D)
    wide = torch.zeros(B, 20, 2 * H, D)
    given = dict(q=normal(*shape), k_new=normal(B, 20, HKV, D), v_new=normal(B, 20, HKV, D, seed=2), cache=held)
    given |= {f"g_{name}": normal(B, 20, H, seed=3) for name in ("cmp", "slc", "swa")}

    def within(x):
        return x.view(-1)[: B * 20 * H * D // 2].view(B, 20, H // 2, D)

    half = {name: x[:, :, : H // 2] for name, x in given.items() if name[0] in "qg"}
    for error, words, change in [
        (ValueError, r"out is \[2, 20, 4, 7\]: it must be \[B, n, HQ, Dv\], here \[2, 20, 4, 8\]", dict(out=torch.empty(B, 20, H, 7))),
        (ValueError, "out is float16: it must be float32, as q is", dict(out=torch.empty(shape).half())),
        (ValueError, "out is on another device than q: out is on meta, q on cpu", dict(out=torch.empty(shape, device="meta"))),
        (TypeError, "out is a ndarray: it must be a torch tensor", dict(out=np.empty(shape, np.float32))),
        (ValueError, "out is an output whose elements overlap", dict(out=torch.empty(1, 20, H, D).expand(shape))),
        (ValueError, "out shares memory with q, which is read while it is written", dict(out=given["q"])),
        (ValueError, "out shares memory with k_new", dict(k_new=wide[:, :, :HKV], out=wide[:, :, :H])),
        (
            ValueError,
            "out shares memory with g_slc",
            dict(g_slc=(m := torch.zeros(shape))[..., 0], out=m),
        ),
        (ValueError, "out shares memory with cache.k,", {**half, "out": within(held.k)}),
        (ValueError, "out shares memory with cache.v,", {**half, "out": within(held.v)}),
    ]:  # fmt: skip
        with pytest.raises(error, match=rf"^\[nsa_with_cache\] {words}"):
            nsa.nsa_with_cache(**{**given, **change}, block_counts=2, block_size=16, window_size=9)
        for x, y in zip((held.k, held.v, held.k_pooled, held.v_pooled, held.lengths), before):
            assert torch.equal(x, y)
    out = wide[:, :, H:]  # beside q in the memory of both
    assert (
        nsa.nsa_with_cache(**{**given, "q": wide[:, :, :H]}, block_counts=2, block_size=16, window_size=9, out=out)
        is out
    )


def test_other_kinds_and_devices():
    q, k, v = (normal(B, S, H, D, seed=i) for i in range(3))
    n = [x.numpy() for x in (q, k, v)]
    with pytest.raises(TypeError, match="out is a ndarray: it must be a torch tensor"):
        heddle.attention(q, k, v, out=n[0])
    with pytest.raises(TypeError, match="out is a torch tensor: it must be an array, as q is"):
        heddle.attention(*n, out=torch.empty_like(q))
    with pytest.raises(TypeError, match="out is a ndarray: it must be a torch tensor"):
        lowbit.linear(normal(5, 64), PACKED, out=np.empty((5, 16), np.float32))
    with pytest.raises(TypeError, match="out is a torch tensor: it must be an array, as x is"):
        lowbit.linear(normal(5, 64).numpy(), PACKED, out=torch.empty(5, 16))
    with pytest.raises(TypeError, match="out is a ndarray: it must be a torch tensor"):
        nsa.pool_keys(q, 8, out=n[0])
    with pytest.raises(TypeError, match="out is a torch tensor: it must be an array, as q is"):
        nsa.select_blocks(n[0], n[1], 2, out=torch.empty(B, S, H, 2, dtype=torch.int32))
    with pytest.raises(ValueError, match="out is on another device than x: out is on meta, x on cpu"):
        nsa.pool_keys(q, 8, out=torch.empty(B, 1, H, D, device="meta"))
    with pytest.raises(ValueError, match="out is on another device than q: out is on meta, q on cpu"):
        heddle.attention(q, k, v, out=torch.empty_like(q, device="meta"))
    frozen = np.empty(q.shape, np.float32)
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="out is read-only: it is written, so it must be writable"):
        heddle.attention(*n, out=frozen)
    meta = [x.to("meta") for x in (q, k, v)]
    out = torch.empty_like(q, device="meta")
    assert heddle.attention(*meta, out=out) is out
