"""heddle.flash_attn: FlashAttention 2's semantics, against explicit constructions."""

import inspect
import math

import heddle
import pytest
import torch
from heddle import flash_attn
from kit import ORDERS, assert_accurate, attending, plain

SIGNATURES = {
    "flash_attn_func": "q k v dropout_p=0.0 softmax_scale=None causal=False window_size=(-1,-1) softcap=0.0 "
    "alibi_slopes=None deterministic=False return_attn_probs=False",
    "flash_attn_kvpacked_func": "q kv dropout_p=0.0 softmax_scale=None causal=False window_size=(-1,-1) softcap=0.0 "
    "alibi_slopes=None deterministic=False return_attn_probs=False",
    "flash_attn_qkvpacked_func": "qkv dropout_p=0.0 softmax_scale=None causal=False window_size=(-1,-1) softcap=0.0 "
    "alibi_slopes=None deterministic=False return_attn_probs=False",
    "flash_attn_varlen_func": "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p=0.0 softmax_scale=None "
    "causal=False window_size=(-1,-1) softcap=0.0 alibi_slopes=None deterministic=False return_attn_probs=False "
    "block_table=None",
    "flash_attn_varlen_kvpacked_func": "q kv cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p=0.0 "
    "softmax_scale=None causal=False window_size=(-1,-1) softcap=0.0 alibi_slopes=None deterministic=False "
    "return_attn_probs=False",
    "flash_attn_varlen_qkvpacked_func": "qkv cu_seqlens max_seqlen dropout_p=0.0 softmax_scale=None causal=False "
    "window_size=(-1,-1) softcap=0.0 alibi_slopes=None deterministic=False return_attn_probs=False",
    "flash_attn_with_kvcache": "q k_cache v_cache k=None v=None rotary_cos=None rotary_sin=None cache_seqlens=None "
    "cache_batch_idx=None cache_leftpad=None block_table=None softmax_scale=None causal=False window_size=(-1,-1) "
    "softcap=0.0 rotary_interleaved=True alibi_slopes=None num_splits=0 return_softmax_lse=False",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name):
    parameters = inspect.signature(getattr(flash_attn, name)).parameters.values()
    found = " ".join(
        p.name + ("" if p.default is p.empty else "=" + repr(p.default).replace(" ", "")) for p in parameters
    )
    assert found == SIGNATURES[name]


def tensors(B=2, Sq=20, Sk=33, H=4, Hkv=2, D=16):
    torch.manual_seed(0)
    return torch.randn(B, Sq, H, D), torch.randn(B, Sk, Hkv, D), torch.randn(B, Sk, Hkv, D)


def check(found, q, k, v, **options):
    exact, lse = plain(q.double(), k.double(), v.double(), **options)
    rough = [plain(q, k, v, order=order, **options)[0] for order in ORDERS]
    assert_accurate("out", found, exact, rough, q.dtype, attending(lse))
    return lse


def test_dense_options():
    q, k, v = tensors()
    check(flash_attn.flash_attn_func(q, k, v), q, k, v)
    check(flash_attn.flash_attn_func(q, k, v, causal=True), q, k, v, causal="bottom_right")
    slopes = torch.rand(4)
    out, lse, dmask = flash_attn.flash_attn_func(q, k, v, 0.0, 0.3, True, (9, -1), 4.0, slopes, True, True)
    exact = check(out, q, k, v, scale=0.3, causal="bottom_right", window=(9, -1), softcap=4.0, alibi_slopes=slopes)
    torch.testing.assert_close(lse, exact.float())
    assert dmask.numel() == 0
    check(flash_attn.flash_attn_func(q, k, v, window_size=(4, 2)), q, k, v, window=(4, 2))
    # More queries than keys: the first rows meet no key.
    out, lse, _ = flash_attn.flash_attn_func(q, k[:, :5], v[:, :5], causal=True, return_attn_probs=True)
    assert torch.equal(out[:, :15], torch.zeros(2, 15, 4, 16)) and torch.equal(
        lse[..., :15], torch.full((2, 4, 15), -math.inf)
    )


def test_packed_variants_equal_the_plain_function():
    q, k, v = tensors(Sk=20, Hkv=4)
    expected = flash_attn.flash_attn_func(q, k, v, causal=True)
    qkv, kv = torch.stack([q, k, v], 2), torch.stack([k, v], 2)
    assert torch.equal(flash_attn.flash_attn_qkvpacked_func(qkv, causal=True), expected)
    assert torch.equal(flash_attn.flash_attn_kvpacked_func(q, kv, causal=True), expected)
    cu = torch.tensor([0, 20, 40], dtype=torch.int32)
    expected = expected.flatten(0, 1)
    flat = qkv.flatten(0, 1)
    assert torch.equal(flash_attn.flash_attn_varlen_qkvpacked_func(flat, cu, 20, causal=True), expected)
    found = flash_attn.flash_attn_varlen_kvpacked_func(flat[:, 0], flat[:, 1:], cu, cu, 20, 20, causal=True)
    assert torch.equal(found, expected)
    # The gradient comes back packed.
    flat.requires_grad_()
    (packed,) = torch.autograd.grad(flash_attn.flash_attn_varlen_qkvpacked_func(flat, cu, 20, causal=True).sum(), flat)
    parts = [x.requires_grad_() for x in (q, k, v)]
    apart = torch.autograd.grad(flash_attn.flash_attn_func(*parts, causal=True).sum(), parts)
    torch.testing.assert_close(packed, torch.stack([x.flatten(0, 1) for x in apart], 1))


def test_s_dmask_is_the_signed_probabilities():
    q, k, v = tensors(Sk=300)
    for options in ({}, {"causal": True, "softcap": 2.0}):
        out, lse, dmask = flash_attn.flash_attn_func(q, k, v, dropout_p=0.3, return_attn_probs=True, **options)
        assert dmask.shape == (2, 4, 20, 300)
        ours = {**options, "causal": "bottom_right"} if options else {}
        kept = torch.where(dmask > 0, dmask / 0.7, 0).permute(0, 2, 1, 3)
        torch.testing.assert_close(out, torch.einsum("bihj,bjhd->bihd", kept, v.repeat_interleave(2, 2)))
        eye = torch.eye(300).double()[None, :, None].expand(2, 300, 2, 300)
        probabilities, _ = plain(q.double(), k.double(), eye, **ours)
        torch.testing.assert_close(dmask.abs().double(), probabilities.permute(0, 2, 1, 3), atol=1e-6, rtol=1e-4)
        live = dmask != 0
        assert 0.25 < (dmask[live] < 0).float().mean() < 0.35


def test_s_dmask_of_packed_sequences():
    q, k, v = (x.flatten(0, 1) for x in tensors(Sq=20, Sk=20))
    cu_q = torch.tensor([0, 7, 40], dtype=torch.int32)
    cu_k = torch.tensor([0, 12, 40], dtype=torch.int32)
    out, lse, dmask = flash_attn.flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, 33, 28, dropout_p=0.2, causal=True, return_attn_probs=True
    )
    assert dmask.shape == (2, 4, 33, 28) and lse.shape == (4, 40)
    assert torch.equal(dmask[0, :, 7:], torch.zeros(4, 26, 28)) and torch.equal(
        dmask[0, :, :, 12:], torch.zeros(4, 33, 16)
    )
    for b, (i, j) in enumerate([(slice(0, 7), slice(0, 12)), (slice(7, 40), slice(12, 40))]):
        kept = torch.where(dmask > 0, dmask / 0.8, 0)[b, :, : i.stop - i.start, : j.stop - j.start]
        torch.testing.assert_close(out[i], torch.einsum("hij,jhd->ihd", kept, v[j].repeat_interleave(2, 1)))


def test_dropout_gradient_replays_the_mask():
    q, k, v = (x.requires_grad_() for x in tensors(Sk=20))
    torch.manual_seed(6)
    out, _, dmask = flash_attn.flash_attn_func(q, k, v, dropout_p=0.3, return_attn_probs=True)
    weight = torch.randn_like(out)
    found = torch.autograd.grad((out * weight).sum(), (q, k, v))
    inputs = [x.detach().double().requires_grad_() for x in (q, k, v)]
    exact, _ = plain(*inputs, dropout_p=0.3, kept=dmask >= 0)
    for x, e in zip(found, torch.autograd.grad((exact * weight).sum(), inputs)):
        torch.testing.assert_close(x.double(), e, atol=1e-5, rtol=1e-4)


def test_varlen_pages():
    torch.manual_seed(1)
    q = torch.randn(9, 4, 16)
    cu_q, cu_k = torch.tensor([0, 2, 9], dtype=torch.int32), torch.tensor([0, 11, 18], dtype=torch.int32)
    k, v = torch.randn(18, 2, 16), torch.randn(18, 2, 16)
    table = torch.tensor([[4, 1, 3], [0, 2, -1]], dtype=torch.int32)
    pages = torch.full((2, 5, 5, 2, 16), math.nan)  # k and v; page size 5; unused slots must not be read
    for b in range(2):
        for j in range(cu_k[b + 1] - cu_k[b]):
            for n, x in enumerate((k, v)):
                pages[n, table[b, j // 5], j % 5] = x[cu_k[b] + j]
    expected = flash_attn.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 7, 11, causal=True)
    found = flash_attn.flash_attn_varlen_func(q, *pages, cu_q, cu_k, 7, 11, causal=True, block_table=table)
    torch.testing.assert_close(found, expected)
    with pytest.raises(ValueError, match="does not take a block_table"):
        flash_attn.flash_attn_varlen_func(q, *pages, cu_q, cu_k, 7, 11, 0.1, return_attn_probs=True, block_table=table)


def turn(x, angle, interleaved):
    """x [S, H, D] rotated by angle [S, R / 2]."""
    half = angle.shape[-1]
    head, tail = x[..., : 2 * half], x[..., 2 * half :]
    a, b = (head[..., 0::2], head[..., 1::2]) if interleaved else (head[..., :half], head[..., half:])
    c, s = angle.cos()[:, None], angle.sin()[:, None]
    pairs = (a * c - b * s, a * s + b * c)
    head = torch.stack(pairs, -1).flatten(-2) if interleaved else torch.cat(pairs, -1)
    return torch.cat([head, tail], -1)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("causal, window", [(True, (-1, -1)), (False, (6, 2)), (False, (-1, -1))])
@pytest.mark.parametrize("interleaved", [True, False])
def test_kvcache_appends_rotates_and_attends(paged, causal, window, interleaved):
    torch.manual_seed(4)
    B, Sn, H, Hkv, D, Smax, page = 2, 3, 4, 2, 16, 21, 4
    lengths = torch.tensor([13, 5], dtype=torch.int32)
    q, k, v = torch.randn(B, Sn, H, D), torch.randn(B, Sn, Hkv, D), torch.randn(B, Sn, Hkv, D)
    angle = torch.randn(32, 6)  # rotates 12 of 16 dimensions
    rows = torch.tensor([3, 1], dtype=torch.int32)
    full = torch.full((2, 4, Smax + 3, Hkv, D), math.nan)
    for b in range(B):
        full[:, rows[b], : lengths[b]] = torch.randn(2, lengths[b], Hkv, D)
    options = {"cache_batch_idx": rows}
    caches = full.clone()
    if paged:
        table = torch.stack([rows * 6 + n for n in range(6)], 1).flip(0).flip(0).to(torch.int32)
        options = {"block_table": table.contiguous()}
        caches = full.reshape(2, 24, page, Hkv, D).clone()
    out, lse = flash_attn.flash_attn_with_kvcache(
        q, *caches, k, v, angle.cos(), angle.sin(), lengths, **options, causal=causal, window_size=window,
        rotary_interleaved=interleaved, return_softmax_lse=True,
    )  # fmt: skip
    caches = caches.reshape(full.shape)
    for b in range(B):
        n = int(lengths[b])
        positions = torch.arange(n, n + Sn)
        new = torch.stack([turn(k[b], angle[positions], interleaved), v[b]])
        torch.testing.assert_close(caches[:, rows[b], n : n + Sn], new)
        untouched = [slice(0, n), slice(n + Sn, None)]
        for part in untouched:
            assert torch.equal(caches[:, rows[b], part].nan_to_num(7), full[:, rows[b], part].nan_to_num(7))
        at = positions if causal or window != (-1, -1) else torch.full((Sn,), n)
        keys, values = caches[:, rows[b], : n + Sn]
        exact, exact_lse = plain(
            turn(q[b], angle[at], interleaved)[None].double(), keys[None].double(), values[None].double(),
            causal="bottom_right" if causal else "none", window=window,
        )  # fmt: skip
        torch.testing.assert_close(out[b : b + 1].double(), exact, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(lse[b : b + 1].double(), exact_lse, atol=1e-5, rtol=1e-5)
    assert torch.equal(lengths, torch.tensor([13, 5], dtype=torch.int32))
    assert torch.equal(caches[:, 0].nan_to_num(7), full[:, 0].nan_to_num(7))  # another sequence's row


def test_kvcache_without_append():
    q, k, v = tensors(Sq=1)
    whole = flash_attn.flash_attn_with_kvcache(q, k, v)
    torch.testing.assert_close(whole, flash_attn.flash_attn_func(q, k, v))
    part = flash_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=20, num_splits=1)
    torch.testing.assert_close(part, flash_attn.flash_attn_func(q, k[:, :20], v[:, :20]))
    leftpad = torch.tensor([4, 0], dtype=torch.int32)
    lengths = torch.tensor([20, 33], dtype=torch.int32)
    padded = flash_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, cache_leftpad=leftpad, causal=True)
    for b in range(2):
        used = slice(int(leftpad[b]), int(lengths[b]))
        alone = flash_attn.flash_attn_func(q[b : b + 1], k[b : b + 1, used], v[b : b + 1, used], causal=True)
        torch.testing.assert_close(padded[b : b + 1], alone)
    with torch.no_grad():
        assert torch.equal(flash_attn.flash_attn_with_kvcache(q.requires_grad_(), k, v), whole)


def test_kvcache_errors_leave_the_cache_alone():
    q, k, v = tensors(Sq=2)
    new = torch.randn(2, 2, 2, 16)
    before = k.clone()
    with pytest.raises(ValueError, match="attention_with_kv_cache"):
        flash_attn.flash_attn_with_kvcache(q, k, v, new, new, cache_seqlens=torch.tensor([5, 32], dtype=torch.int32))
    assert torch.equal(k, before)
    for message, given in {
        "k and v must be given together": dict(k=new),
        "say where to append": dict(k=new, v=new),
        "rotary needs new keys": dict(rotary_cos=torch.ones(9, 4), rotary_sin=torch.ones(9, 4)),
        "num_splits is -1": dict(num_splits=-1),
    }.items():
        with pytest.raises(ValueError, match=message):
            flash_attn.flash_attn_with_kvcache(q, k, v, **given)


def test_errors_keep_their_text():
    q, k, v = tensors()
    with pytest.raises(ValueError, match=r"max_seqlen_k is 3: the longest sequence has 33"):
        cu = torch.tensor([0, 20, 40], dtype=torch.int32), torch.tensor([0, 33, 66], dtype=torch.int32)
        flash_attn.flash_attn_varlen_func(*(x.flatten(0, 1) for x in (q, k, v)), *cu, 20, 3)
    assert heddle.flash_attn is flash_attn
