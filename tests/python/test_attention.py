"""heddle.attention on torch tensors, forward and gradients, against a double-precision computation."""

import math

import heddle
import pytest
import torch
from heddle.hosts.torch import functional as _torch
from kit import (
    DTYPES,
    FEW,
    ORDERS,
    assert_accurate,
    attending,
    bound,
    differentiate,
    in_orders,
    leaf,
    plain,
    scores_and_mask,
)

# name: (B, Sq, Sk, H, Hkv, D, Dv, dtype, options)
CASES = {
    "plain": (2, 64, 64, 4, 4, 32, 32, "f32", {}),
    "bf16": (2, 64, 64, 4, 4, 64, 64, "bf16", {}),
    "f16": (1, 48, 80, 2, 2, 64, 64, "f16", {}),
    "one row": (2, 1, 77, 8, 2, 64, 64, "bf16", {}),
    "odd sizes": (3, 37, 53, 3, 1, 17, 9, "f32", {}),
    "large head": (1, 20, 33, 2, 1, 256, 256, "f32", {}),
    "head of one": (1, 20, 33, 2, 1, 1, 3, "f32", {}),
    "scale": (1, 33, 33, 2, 2, 16, 16, "f32", {"scale": 0.3}),
    "top-left, more keys": (2, 31, 50, 4, 2, 32, 32, "f32", {"causal": "top_left"}),
    "bottom-right, more keys": (2, 31, 50, 4, 2, 32, 32, "f32", {"causal": "bottom_right"}),
    "top-left, more rows": (2, 50, 31, 4, 2, 32, 32, "f32", {"causal": "top_left"}),
    "bottom-right, rows without keys": (2, 50, 31, 4, 2, 32, 32, "f32", {"causal": "bottom_right"}),
    "window": (1, 70, 70, 2, 2, 32, 32, "f32", {"window": (7, 3)}),
    "window, causal": (1, 70, 90, 2, 2, 32, 32, "bf16", {"window": (12, -1), "causal": "bottom_right"}),
    "softcap": (1, 40, 40, 2, 2, 32, 32, "f32", {"softcap": 1.5}),
    "alibi": (2, 40, 50, 4, 2, 32, 32, "f32", {"alibi_slopes": "H", "causal": "bottom_right"}),
    "alibi per sequence": (2, 40, 50, 4, 2, 32, 32, "f32", {"alibi_slopes": "BH"}),
    "bias": (2, 33, 45, 4, 2, 16, 16, "f32", {"bias": (2, 4, 33, 45)}),
    "bias, broadcast": (2, 33, 45, 4, 2, 16, 16, "f32", {"bias": (4, 1, 45)}),
    "bias of two dimensions": (2, 33, 45, 4, 2, 16, 16, "bf16", {"bias": (33, 45)}),
    "mask": (2, 33, 45, 4, 2, 16, 16, "f32", {"mask": (2, 1, 33, 45)}),
    "sink": (2, 33, 45, 4, 2, 16, 16, "f32", {"sink": True}),
    "sink, rows without keys": (1, 45, 33, 4, 2, 16, 16, "f32", {"sink": True, "causal": "bottom_right"}),
    "dropout": (2, 33, 45, 4, 2, 16, 16, "f32", {"dropout_p": 0.25}),
    "everything": (
        2, 40, 48, 4, 2, 24, 20, "bf16",
        {"causal": "bottom_right", "window": (30, -1), "softcap": 5.0, "alibi_slopes": "H", "bias": (1, 4, 40, 48),
         "mask": (2, 1, 1, 48), "sink": True, "dropout_p": 0.1, "scale": 0.2},
    ),
}  # fmt: skip


def make(case):
    """Inputs of a case, and its options with their tensors drawn."""
    B, Sq, Sk, H, Hkv, D, Dv, dtype, wishes = case
    torch.manual_seed(7)
    dtype = DTYPES[dtype]
    q, k, v = torch.randn(B, Sq, H, D), torch.randn(B, Sk, Hkv, D), torch.randn(B, Sk, Hkv, Dv)
    options = dict(wishes)
    if "alibi_slopes" in options:
        options["alibi_slopes"] = torch.rand(*((H,) if wishes["alibi_slopes"] == "H" else (B, H)))
    if "bias" in options:
        options["bias"] = torch.randn(wishes["bias"]).to(dtype)
    if "mask" in options:
        options["mask"] = torch.rand(wishes["mask"]) > 0.3
        options["mask"][..., :5, :] &= wishes["mask"][-2] == 1  # rows without any key
    if "sink" in options:
        options["sink"] = torch.randn(H)
    return q.to(dtype), k.to(dtype), v.to(dtype), options


@pytest.mark.parametrize("name", CASES)
def test_forward_and_gradients(name):
    case = CASES[name]
    q, k, v, options = make(case)
    dtype = q.dtype
    B, Sq, H = q.shape[:3]
    weight, lse_weight = torch.randn(B, Sq, H, v.shape[-1]).to(dtype), torch.randn(B, H, Sq)
    kept = {}
    if "dropout_p" in options:
        seed = 2**63 + 11  # the sign bit of the int64 that carries it
        kept = {"kept": _torch.dropout_keep((B, H, Sq, k.shape[1]), options["dropout_p"], torch.tensor(seed - 2**64))}

    def ours(q, k, v, **options):
        extra = {"dropout_seed": seed} if kept else {}
        return heddle.attention(q, k, v, return_lse=True, **extra, **options)

    exact = differentiate(plain, q, k, v, {**options, **kept}, weight, lse_weight, torch.float64)
    rough = in_orders(
        lambda order: differentiate(plain, q, k, v, {**options, **kept, "order": order}, weight, lse_weight, dtype)
    )
    found = differentiate(ours, q, k, v, options, weight, lse_weight, dtype)
    names = ["out", "lse", "dq", "dk", "dv"] + ["dbias"] * ("bias" in options) + ["dsink"] * ("sink" in options)
    assert found[0].dtype == dtype and found[1].dtype == torch.float32
    for label, x, e, r in zip(names, found, exact, rough):
        assert_accurate(label, x, e, r, x.dtype, attending(exact[1]))


@pytest.mark.parametrize("name", ["plain", "bf16", "f16", "one row", "sink", "everything"])
def test_the_rule_sees_faults(name):
    """For one row the key less that counts most, a scale that is off by a tenth, and one element that is off by 16 times the plain error."""
    q, k, v, options = make(CASES[name])
    options = {each: value for each, value in options.items() if each != "dropout_p"}
    exact, lse = plain(*(x.double() for x in (q, k, v)), **options)
    rough = [plain(q, k, v, order=order, **options)[0] for order in ORDERS]
    rows = attending(lse)

    def refused(found):
        with pytest.raises(AssertionError, match="is above"):
            assert_accurate("out", found, exact, rough, q.dtype, rows)

    of_scores = {each: value for each, value in options.items() if each != "sink"}
    scores, keep = scores_and_mask(q.double(), k.double().repeat_interleave(q.shape[2] // k.shape[2], 2), **of_scores)
    kept = torch.ones_like(keep).flatten()
    kept[scores.masked_fill(~keep, -math.inf).argmax()] = False
    mask = kept.reshape(keep.shape) & options.get("mask", True)
    refused(plain(q, k, v, **{**options, "mask": mask})[0])
    refused(plain(q, k, v, **{**options, "scale": 1.1 * options.get("scale", q.shape[-1] ** -0.5)})[0])
    found = exact.flatten().clone()
    found[7] += 16 / (4 if rows >= FEW else 12) * bound(exact, rough, q.dtype, rows)
    refused(found.reshape(exact.shape))
    assert_accurate("out", heddle.attention(q, k, v, **options), exact, rough, q.dtype, rows)


def packed_case():
    lengths_q, lengths_k = [5, 0, 17, 30], [9, 4, 0, 41]
    torch.manual_seed(3)
    q, k, v = torch.randn(52, 4, 16), torch.randn(54, 2, 16), torch.randn(54, 2, 24)
    cu_q = torch.tensor([0, 5, 5, 22, 52], dtype=torch.int32)
    cu_k = torch.tensor([0, 9, 13, 13, 54], dtype=torch.int32)
    return lengths_q, lengths_k, q, k, v, cu_q, cu_k


@pytest.mark.parametrize("causal", ["none", "top_left", "bottom_right"])
def test_packed_equals_each_sequence_alone(causal):
    lengths_q, lengths_k, q, k, v, cu_q, cu_k = packed_case()

    def alone(q, k, v, sink, order="forward"):
        outs, lses = [], []
        for x, y, z in zip(q.split(lengths_q), k.split(lengths_k), v.split(lengths_k)):
            out, lse = plain(x[None], y[None], z[None], causal=causal, sink=sink, order=order)
            outs.append(out[0])
            lses.append(lse[0])
        return torch.cat(outs), torch.cat(lses, 1)

    def ours(q, k, v, sink):
        return heddle.attention(
            q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, causal=causal, sink=sink, return_lse=True
        )

    sink, weight, lse_weight = torch.randn(4), torch.randn(52, 4, 24), torch.randn(4, 52)

    def all_of(function, dtype, **order):
        inputs = [leaf(x, dtype) for x in (q, k, v, sink)]
        out, lse = function(*inputs, **order)
        loss = (out * weight).sum() + (lse * lse_weight).sum()
        return [out, lse, *torch.autograd.grad(loss, inputs)]

    exact, found = all_of(alone, torch.float64), all_of(ours, torch.float32)
    rough = in_orders(lambda order: all_of(alone, torch.float32, order=order))
    for name, x, e, r in zip(("out", "lse", "dq", "dk", "dv", "dsink"), found, exact, rough):
        assert_accurate(name, x, e, r, torch.float32, attending(exact[1]))


def test_seqused_limits_rows_and_keys():
    torch.manual_seed(5)
    q, k, v = torch.randn(2, 9, 2, 8), torch.randn(2, 12, 2, 8), torch.randn(2, 12, 2, 8)
    k[0, 7:], v[0, 7:] = math.nan, math.nan  # beyond a length: must not be read
    used_q, used_k = torch.tensor([9, 4], dtype=torch.int32), torch.tensor([7, 12], dtype=torch.int32)
    out = heddle.attention(q, k, v, seqused_q=used_q, seqused_k=used_k, causal="bottom_right")
    for b in range(2):
        i, j = used_q[b], used_k[b]
        alone = heddle.attention(q[b : b + 1, :i], k[b : b + 1, :j], v[b : b + 1, :j], causal="bottom_right")
        torch.testing.assert_close(out[b : b + 1, :i], alone)


def test_strides_are_free():
    torch.manual_seed(5)
    base = torch.randn(2, 4, 30, 3, 32)
    q, k, v = (base[:, :, :, i, ::2].transpose(1, 2) for i in range(3))  # nothing contiguous, last stride 2
    expected = heddle.attention(q.contiguous(), k.contiguous(), v.contiguous(), causal="top_left")
    torch.testing.assert_close(heddle.attention(q, k, v, causal="top_left"), expected)
    one = torch.randn(1, 30, 1, 16)
    shared = one.expand(2, 30, 4, 16)  # strides 0
    bias = torch.randn(1, 1, 1, 30).expand(2, 4, 30, 30)
    torch.testing.assert_close(
        heddle.attention(q, shared, shared, bias=bias),
        heddle.attention(q, shared.contiguous(), shared.contiguous(), bias=bias.contiguous()),
    )
    x = leaf(one)
    heddle.attention(x.expand(2, 30, 4, 16), x.expand(2, 30, 4, 16), x.expand(2, 30, 4, 16)).sum().backward()
    y = leaf(one, torch.float64)
    plain(*[y.expand(2, 30, 4, 16)] * 3)[0].sum().backward()
    torch.testing.assert_close(x.grad.double(), y.grad, atol=1e-4, rtol=1e-4)


def test_empty_extents():
    assert heddle.attention(torch.empty(0, 4, 2, 8), torch.empty(0, 4, 2, 8), torch.empty(0, 4, 2, 8)).shape == (
        0,
        4,
        2,
        8,
    )
    q = torch.randn(1, 3, 2, 8, requires_grad=True)
    out, lse = heddle.attention(q, torch.empty(1, 0, 2, 8), torch.empty(1, 0, 2, 8), return_lse=True)
    assert torch.equal(out, torch.zeros(1, 3, 2, 8)) and torch.equal(lse, torch.full((1, 2, 3), -math.inf))
    out.sum().backward()
    assert torch.equal(q.grad, torch.zeros_like(q))
    assert heddle.attention(torch.empty(2, 0, 2, 8), torch.randn(2, 5, 2, 8), torch.randn(2, 5, 2, 8)).shape == (
        2,
        0,
        2,
        8,
    )


def test_dropout_follows_its_seed():
    torch.manual_seed(1)
    q = torch.randn(1, 40, 2, 8)
    once = heddle.attention(q, q, q, dropout_p=0.5, dropout_seed=4)
    assert torch.equal(once, heddle.attention(q, q, q, dropout_p=0.5, dropout_seed=torch.tensor(4)))
    assert not torch.equal(once, heddle.attention(q, q, q, dropout_p=0.5, dropout_seed=5))
    torch.manual_seed(9)
    drawn = heddle.attention(q, q, q, dropout_p=0.5)
    assert not torch.equal(drawn, heddle.attention(q, q, q, dropout_p=0.5))
    torch.manual_seed(9)
    assert torch.equal(drawn, heddle.attention(q, q, q, dropout_p=0.5))
    # v = identity shows the probabilities: those kept are scaled by 1 / (1 - p), and about half are kept.
    p = heddle.attention(torch.zeros(1, 64, 4, 8), torch.zeros(1, 64, 4, 8), torch.eye(64)[None, :, None].expand(1, 64, 4, 64),
                         dropout_p=0.5, dropout_seed=0)  # fmt: skip
    assert set(p.mul(64).round(decimals=3).unique().tolist()) == {0.0, 2.0}
    assert 0.45 < (p > 0).float().mean() < 0.55


@pytest.mark.parametrize("name", ["plain", "bf16", "bottom-right, more keys", "mask", "sink"])
def test_methods_and_forced_candidates_agree(name):
    q, k, v, options = make(CASES[name])
    exact, lse = plain(*(x.double() for x in (q, k, v)), **options)
    rough = [plain(q, k, v, order=order, **options)[0] for order in ORDERS]
    rows = attending(lse)
    for candidate in heddle.explain(q, k, v, **options):
        if candidate.supported:
            forced = heddle.attention(q, k, v, force=candidate.name, **options)
            assert_accurate(candidate.name, forced, exact, rough, q.dtype, rows)
    for method in ("flash", "baseline"):
        assert_accurate(method, heddle.attention(q, k, v, method=method, **options), exact, rough, q.dtype, rows)


def test_batch_invariant_rows_do_not_depend_on_the_batch():
    torch.manual_seed(2)
    q, k, v = torch.randn(3, 1, 8, 32), torch.randn(3, 700, 2, 32), torch.randn(3, 700, 2, 32)
    together = heddle.attention(q, k, v, batch_invariant=True)
    for b in range(3):
        alone = heddle.attention(q[b : b + 1], k[b : b + 1], v[b : b + 1], batch_invariant=True)
        assert torch.equal(together[b : b + 1], alone)


def test_draft_mask_is_the_mask_that_it_describes():
    torch.manual_seed(4)
    q, k, v = torch.randn(2, 5, 4, 32), torch.randn(2, 60, 2, 32), torch.randn(2, 60, 2, 32)
    tree = torch.tensor([[1, 3, 5, 11, 17]] * 2, dtype=torch.int32)  # row i sees the drafts whose bits are set
    mask = torch.ones(2, 1, 5, 60, dtype=torch.bool)
    mask[:, 0, :, 55:] = (tree[..., None] >> torch.arange(5)) & 1 == 1
    torch.testing.assert_close(heddle.attention(q, k, v, draft_mask=tree), heddle.attention(q, k, v, mask=mask))
    with pytest.raises(ValueError, match=r"draft_mask is \[2, 4\]: it must be \[B, Sq\] = \[2, 5\]"):
        heddle.attention(q, k, v, draft_mask=tree[:, :4].contiguous())


@pytest.mark.parametrize("narrow_q", [False, True])
def test_eight_bit_operands_stand_for_their_scaled_values(narrow_q):
    torch.manual_seed(5)
    k, v = (torch.randn(2, 40, 2, 32).to(torch.float8_e4m3fn) for _ in range(2))
    q = torch.randn(2, 7, 4, 32).to(torch.float8_e4m3fn if narrow_q else torch.bfloat16)
    scales = {"k_scale": torch.rand(2, 1, 2) + 0.5, "v_scale": torch.rand(2, 40, 2) + 0.5}
    wide_q = q.double()
    if narrow_q:
        scales["q_scale"] = torch.rand(1, 1, 1) + 0.5
        wide_q = wide_q * scales["q_scale"][..., None]
    wide_k, wide_v = k.double() * scales["k_scale"][..., None], v.double() * scales["v_scale"][..., None]
    for candidate in ("reference",) if narrow_q else ("reference", "cpu"):
        found = heddle.attention(q, k, v, force=candidate, **scales)
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found.double(), plain(wide_q, wide_k, wide_v)[0], rtol=2**-8, atol=1e-3)
    if narrow_q:
        with pytest.raises(ValueError, match="it takes queries in float32, float16 and bfloat16, not float8_e4m3fn"):
            heddle.attention(q, k, v, force="cpu", **scales)
    with pytest.raises(ValueError, match=r"k_scale is given and k is bfloat16: scales belong to float8_e4m3fn"):
        heddle.attention(wide_q.bfloat16(), k.bfloat16(), v.bfloat16(), k_scale=scales["k_scale"])


def test_precision_is_one_of_three_words():
    q = torch.randn(1, 4, 2, 8)
    torch.testing.assert_close(heddle.attention(q, q, q, precision="tf32"), heddle.attention(q, q, q))
    with pytest.raises(ValueError, match="precision is 'high': it must be 'f32', 'tf32' or 'int8_qk'"):
        heddle.attention(q, q, q, precision="high")


def test_int8_qk_is_refused_on_the_cpu():
    q = torch.randn(1, 4, 2, 64, dtype=torch.bfloat16)
    with pytest.raises(
        ValueError, match=r"no candidate can serve this call; cpu: it does not multiply q and k in 8 bits"
    ):
        heddle.attention(q, q, q, precision="int8_qk")
    assert heddle.explain(q, q, q, precision="int8_qk").chosen is None


def test_attention_with_kv_cache_is_append_rotate_attend():
    torch.manual_seed(6)
    q, new = torch.randn(2, 3, 4, 16), torch.randn(2, 3, 2, 16)
    caches = torch.randn(2, 30, 2, 16), torch.randn(2, 30, 2, 16)
    at = torch.tensor([20, 5], dtype=torch.int32)
    cos, sin = torch.randn(30, 8), torch.randn(30, 8)
    table = {"rotary_cos": cos, "rotary_sin": sin}
    k, v = (x.clone() for x in caches)
    heddle.append_kv_cache(new, new, k, v, at, **table)
    rotated = heddle.apply_rotary(q, cos, sin, offsets=at)
    expected = heddle.attention(rotated, k, v, seqused_k=at + 3, causal="bottom_right", return_lse=True)
    for kind in (lambda x: x, lambda x: x.numpy()):
        k_cache, v_cache = (x.clone() for x in caches)
        out, lse = heddle.attention_with_kv_cache(
            kind(q), kind(new), kind(new), kind(k_cache), kind(v_cache), kind(at), causal="bottom_right", return_lse=True,
            **{name: kind(x) for name, x in table.items()},
        )  # fmt: skip
        assert torch.equal(torch.as_tensor(out), expected[0]) and torch.equal(torch.as_tensor(lse), expected[1])
        assert torch.equal(k_cache, k) and torch.equal(v_cache, v)


def test_scales_of_an_eight_bit_cache_are_found():
    torch.manual_seed(7)
    q, new = torch.randn(2, 3, 4, 16).bfloat16(), (3 * torch.randn(2, 2, 3, 2, 16)).bfloat16()
    at = torch.tensor([20, 5], dtype=torch.int32)
    caches = [torch.zeros(2, 30, 2, 16).to(torch.float8_e4m3fn) for _ in "kv"]
    scales = [torch.ones(2, 30, 2) for _ in "kv"]
    out = heddle.attention_with_kv_cache(
        q, *new, *caches, at, causal="bottom_right", k_scale=scales[0], v_scale=scales[1]
    )
    for x, cache, scale in zip(new, caches, scales):
        for b in range(2):
            rows, found = x[b].float(), scale[b, at[b] : at[b] + 3]
            torch.testing.assert_close(found, rows.abs().amax(-1) / 448, rtol=1e-6, atol=0)
            stored = cache[b, at[b] : at[b] + 3].float()
            assert torch.equal(stored, (rows / found[..., None]).to(torch.float8_e4m3fn).float())
            assert (scale[b] == 1).sum() == 27 * 2
    k, v = (c.float() * s[..., None] for c, s in zip(caches, scales))
    expected = heddle.attention(q.float(), k, v, seqused_k=at + 3, causal="bottom_right")
    torch.testing.assert_close(out.float(), expected, rtol=0.02, atol=0.02)
    with pytest.raises(ValueError, match=r"k_scale is \[2, 29, 2\]: it must be"):
        heddle.append_kv_cache(*new, *caches, at, k_scale=scales[0][:, 1:], v_scale=scales[1])


def test_attention_with_kv_cache_names_its_own_arguments():
    q, new, cache = torch.zeros(2, 1, 4, 8), torch.zeros(2, 1, 2, 8), torch.zeros(2, 30, 2, 8)

    def refused(match, seqlens, k_cache=cache):
        with pytest.raises(ValueError, match=r"\[attention_with_kv_cache\] " + match):
            heddle.attention_with_kv_cache(q, new, new, k_cache, cache.clone(), seqlens)

    refused(
        r"seqlens\[1\] is 30: with 1 rows sequence 1 ends at position 31", torch.tensor([20, 30], dtype=torch.int32)
    )
    refused(r"seqlens\[0\] is 31: it must be from 0", torch.tensor([31, 30], dtype=torch.int32))
    refused("seqlens has 3 entries: it must have 2", torch.zeros(3, dtype=torch.int32))
    refused("seqlens is int64: it must be int32", torch.tensor([20, 30]))
    refused("seqlens is missing", None)
    refused("k_cache has head size 7 and q has 8", torch.zeros(2, dtype=torch.int32), cache[..., :7])
