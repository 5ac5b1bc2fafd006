"""Results that cannot go where the caller says: what is refused, and that nothing was written."""

import heddle
import numpy as np
import pytest
import torch
from heddle import lowbit
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
    with pytest.raises(ValueError, match="out is on another device than q: out is on meta, q on cpu"):
        heddle.attention(q, k, v, out=torch.empty_like(q, device="meta"))
    frozen = np.empty(q.shape, np.float32)
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="out is read-only: it is written, so it must be writable"):
        heddle.attention(*n, out=frozen)
    meta = [x.to("meta") for x in (q, k, v)]
    out = torch.empty_like(q, device="meta")
    assert heddle.attention(*meta, out=out) is out
