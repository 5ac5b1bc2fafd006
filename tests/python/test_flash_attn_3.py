"""heddle.flash_attn_3: FlashAttention 3's names over Heddle's kernels, against FlashAttention 2's and explicit
constructions."""

import inspect
import math

import heddle
import pytest
import torch
from heddle import flash_attn, flash_attn_3

SIGNATURES = {
    "flash_attn_func": "q k v softmax_scale=None causal=False qv=None q_descale=None k_descale=None v_descale=None "
    "window_size=(-1,-1) attention_chunk=0 softcap=0.0 num_splits=1 pack_gqa=None deterministic=False sm_margin=0 "
    "return_attn_probs=False",
    "flash_attn_qkvpacked_func": "qkv softmax_scale=None causal=False q_descale=None k_descale=None v_descale=None "
    "window_size=(-1,-1) attention_chunk=0 softcap=0.0 deterministic=False num_heads_q=None sm_margin=0 "
    "return_attn_probs=False",
    "flash_attn_varlen_func": "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k seqused_q=None seqused_k=None "
    "softmax_scale=None causal=False qv=None q_descale=None k_descale=None v_descale=None window_size=(-1,-1) "
    "attention_chunk=0 softcap=0.0 num_splits=1 pack_gqa=None deterministic=False sm_margin=0 return_attn_probs=False",
    "flash_attn_with_kvcache": "q k_cache v_cache k=None v=None qv=None rotary_cos=None rotary_sin=None cache_seqlens=None "
    "cache_batch_idx=None cache_leftpad=None page_table=None cu_seqlens_q=None cu_seqlens_k_new=None max_seqlen_q=None "
    "rotary_seqlens=None q_descale=None k_descale=None v_descale=None softmax_scale=None causal=False window_size=(-1,-1) "
    "attention_chunk=0 softcap=0.0 rotary_interleaved=True scheduler_metadata=None num_splits=0 pack_gqa=None sm_margin=0 "
    "return_softmax_lse=False",
    "flash_attn_combine": "out_partial lse_partial out=None out_dtype=None",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name):
    parameters = inspect.signature(getattr(flash_attn_3, name)).parameters.values()
    found = " ".join(
        p.name + ("" if p.default is p.empty else "=" + repr(p.default).replace(" ", "")) for p in parameters
    )
    assert found == SIGNATURES[name]
    assert name in flash_attn_3.__all__ and heddle.flash_attn_3 is flash_attn_3


def tensors(B=2, Sq=20, Sk=33, H=4, Hkv=2, D=16):
    torch.manual_seed(0)
    return torch.randn(B, Sq, H, D), torch.randn(B, Sk, Hkv, D), torch.randn(B, Sk, Hkv, D)


CU_Q = torch.tensor([0, 7, 40], dtype=torch.int32)
CU_K = torch.tensor([0, 30, 66], dtype=torch.int32)


def test_dense_calls_and_their_gradients():
    leaves = [x.requires_grad_() for x in tensors()]
    for options in (
        {},
        dict(causal=True),
        dict(softmax_scale=0.3, window_size=(4, 2), softcap=3.0, deterministic=True),
    ):
        for neutral in (
            {},
            dict(num_splits=0, pack_gqa=True),
            dict(num_splits=4, pack_gqa=False, qv=None, attention_chunk=0),
        ):
            out, lse = flash_attn_3.flash_attn_func(*leaves, **options, **neutral, return_attn_probs=True)
            expected, expected_lse, _ = flash_attn.flash_attn_func(*leaves, **options, return_attn_probs=True)
            assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
            assert torch.equal(flash_attn_3.flash_attn_func(*leaves, **options, **neutral), expected)
        for found, exact in zip(*(torch.autograd.grad(x.sum(), leaves) for x in (out, expected))):
            assert torch.equal(found, exact)


def test_packed_in_one_tensor():
    q, k, v = tensors(Sk=20)
    expected = flash_attn_3.flash_attn_func(q, k, v, causal=True)
    assert torch.equal(
        flash_attn_3.flash_attn_qkvpacked_func(torch.cat([q, k, v], 2), causal=True, num_heads_q=4), expected
    )
    q, k, v = tensors(Sk=20, Hkv=4)
    expected = flash_attn_3.flash_attn_func(q, k, v, causal=True)
    assert torch.equal(flash_attn_3.flash_attn_qkvpacked_func(torch.stack([q, k, v], 2), causal=True), expected)
    for given in (dict(), dict(num_heads_q=5), dict(num_heads_q=13)):
        with pytest.raises(ValueError, match=r"qkv is \[2, 20, 12, 16\] and num_heads_q is .*: qkv must be"):
            flash_attn_3.flash_attn_qkvpacked_func(torch.cat([q, k, v], 2), **given)


def test_sequences_packed_and_partly_used():
    q, k, v = (x.flatten(0, 1) for x in tensors())
    used_q, used_k = torch.tensor([5, 33], dtype=torch.int32), torch.tensor([30, 11], dtype=torch.int32)
    out, lse = flash_attn_3.flash_attn_varlen_func(
        q, k, v, CU_Q, CU_K, 33, 36, used_q, used_k, causal=True, return_attn_probs=True
    )
    assert lse.shape == (4, 40)
    for b in range(2):
        rows = slice(int(CU_Q[b]), int(CU_Q[b] + used_q[b]))
        keys = slice(int(CU_K[b]), int(CU_K[b] + used_k[b]))
        alone, alone_lse = flash_attn_3.flash_attn_func(
            q[None, rows], k[None, keys], v[None, keys], causal=True, return_attn_probs=True
        )
        torch.testing.assert_close(out[rows], alone[0])
        torch.testing.assert_close(lse[:, rows], alone_lse[0])
    assert torch.equal(
        flash_attn_3.flash_attn_varlen_func(q, k, v, CU_Q, CU_K, 33, 36),
        flash_attn.flash_attn_varlen_func(q, k, v, CU_Q, CU_K, 33, 36),
    )


def cache():
    """FlashAttention 2's arguments for an append with rotation over pages, and the same by 3's names."""
    torch.manual_seed(1)
    q, new = torch.randn(2, 3, 4, 16), torch.randn(2, 2, 3, 2, 16)
    pages = torch.randn(2, 12, 4, 2, 16)
    angle = torch.randn(32, 8)
    table = torch.arange(12, dtype=torch.int32).reshape(2, 6).flip(1).contiguous()
    common = dict(rotary_cos=angle.cos(), rotary_sin=angle.sin(), cache_seqlens=torch.tensor([13, 5], dtype=torch.int32),
                  causal=True, rotary_interleaved=False, return_softmax_lse=True)  # fmt: skip
    return q, pages, new, table, common


def test_caches_as_flash_attention_2():
    q, pages, new, table, common = cache()
    expected_pages, found_pages = pages.clone(), pages.clone()
    expected = flash_attn.flash_attn_with_kvcache(q, *expected_pages, *new, block_table=table, **common)
    found = flash_attn_3.flash_attn_with_kvcache(
        q, *found_pages, *new, page_table=table, rotary_seqlens=common["cache_seqlens"], pack_gqa=True, **common
    )
    assert all(map(torch.equal, found, expected)) and torch.equal(found_pages, expected_pages)
    assert not torch.equal(found_pages, pages)
    rows = torch.tensor([3, 1], dtype=torch.int32)
    options = dict(
        cache_seqlens=11, cache_batch_idx=rows, cache_leftpad=torch.tensor([2, 0], dtype=torch.int32), num_splits=1
    )
    caches = pages.reshape(2, 4, 12, 2, 16)
    assert torch.equal(
        flash_attn_3.flash_attn_with_kvcache(q, *caches, **options),
        flash_attn.flash_attn_with_kvcache(q, *caches, **options),
    )


def test_packed_queries_over_a_cache():
    _, pages, _, table, _ = cache()
    q = torch.randn(5, 4, 16)
    cu = torch.tensor([0, 4, 5], dtype=torch.int32)
    for lengths in (9, torch.tensor([14, 6], dtype=torch.int32)):
        out, lse = flash_attn_3.flash_attn_with_kvcache(
            q, *pages, page_table=table, cache_seqlens=lengths, cu_seqlens_q=cu, max_seqlen_q=4, causal=True,
            return_softmax_lse=True,
        )  # fmt: skip
        for b in range(2):
            n = lengths if isinstance(lengths, int) else int(lengths[b])
            keys, values = (x[table[b].long()].flatten(0, 1)[None, :n] for x in pages)
            rows = slice(int(cu[b]), int(cu[b + 1]))
            alone, alone_lse = flash_attn_3.flash_attn_func(
                q[None, rows], keys, values, causal=True, return_attn_probs=True
            )
            torch.testing.assert_close(out[rows], alone[0])
            torch.testing.assert_close(lse[:, rows], alone_lse[0])


def test_what_is_not_served_is_refused():
    q, k, v = tensors()
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    qv, metadata = torch.randn(2, 20, 4, 16), torch.zeros(4, dtype=torch.int32)
    calls = {
        "flash_attn_func": lambda **x: flash_attn_3.flash_attn_func(q, k, v, **x),
        "flash_attn_varlen_func": lambda **x: flash_attn_3.flash_attn_varlen_func(*flat, CU_Q, CU_K, 33, 36, **x),
        "flash_attn_with_kvcache": lambda **x: flash_attn_3.flash_attn_with_kvcache(q, k, v, **x),
    }
    for name, call in calls.items():
        for given, words in (
            (dict(qv=qv), r"qv is a Tensor of \[2, 20, 4, 16\]: only None is taken: scores are one product here"),
            (dict(attention_chunk=64), "attention_chunk is 64: only 0 is taken: there are no chunks here"),
            (dict(sm_margin=8), "sm_margin is 8: only 0 is taken: kernels use all multiprocessors"),
            (dict(num_splits=-1), "num_splits is -1: it must be at least 0"),
        ):
            with pytest.raises(ValueError, match=rf"\[{name}\] {words}"):
                call(**given)
        with pytest.raises(TypeError, match=rf"\[{name}\] pack_gqa is 'yes': it must be True or False"):
            call(pack_gqa="yes")
        with pytest.raises(TypeError, match=rf"\[{name}\] causal is 'none': it must be True or False"):
            call(causal="none")
        with pytest.raises(
            ValueError, match=rf"\[{name}\] k_descale is given and k\w* is torch.float32: scales belong to"
        ):
            call(k_descale=torch.ones(2, 2))
    call = calls["flash_attn_with_kvcache"]
    new = torch.randn(2, 3, 2, 16)
    lengths = torch.tensor([3, 4], dtype=torch.int32)
    for given, words in (
        (
            dict(scheduler_metadata=metadata),
            r"scheduler_metadata is a Tensor of \[4\]: only None is taken: a call is planned when",
        ),
        (
            dict(cu_seqlens_k_new=CU_K),
            r"cu_seqlens_k_new is a Tensor of \[3\]: only None is taken: k and v to append must be",
        ),
        (
            dict(rotary_seqlens=lengths),
            r"rotary_seqlens is a Tensor of \[2\]: only None is taken: rotation is by cache_seqlens",
        ),
        (
            dict(k=new, v=new, cache_seqlens=lengths, cu_seqlens_q=CU_Q),
            "k is given beside cu_seqlens_q: .* heddle.append_kv_cache",
        ),
        (dict(k=new), "k and v must be given together"),
        (dict(k=new, v=new), "k is given and cache_seqlens is not: say where to append"),
    ):
        with pytest.raises(ValueError, match=rf"\[flash_attn_with_kvcache\] {words}"):
            call(**given)
    with pytest.raises(ValueError, match=r"\[flash_attn_with_kvcache\] q requires a gradient"):
        flash_attn_3.flash_attn_with_kvcache(q.requires_grad_(), k, v)


# Scales of float8_e4m3fn. The reference alone multiplies such queries on a CPU.

E4M3 = torch.float8_e4m3fn


def scales(B=2, Hkv=2):
    torch.manual_seed(5)
    return [torch.rand(B, Hkv) + 0.5 for _ in "qkv"]


def by_head(scale, x, sequences=None):
    """x in float32, times its sequence's scale; x [B, S, h, D], or packed with the sequence of each row."""
    scale = scale.repeat_interleave(x.shape[-2] // scale.shape[1], 1)
    return x.float() * (scale[:, None] if sequences is None else scale[sequences])[..., None]


@pytest.mark.parametrize("shared", [False, True])
def test_descale_of_dense_and_packed_operands(monkeypatch, shared):
    monkeypatch.setenv("HEDDLE_KERNEL", "reference")
    q, k, v = (x.to(E4M3) for x in tensors())
    given = [s[:1].expand(2, 2) for s in scales()] if shared else scales()
    names = dict(zip(("q_descale", "k_descale", "v_descale"), given))
    found = flash_attn_3.flash_attn_func(q, k, v, causal=True, **names)
    assert found.dtype == torch.bfloat16
    exact = flash_attn_3.flash_attn_func(*map(by_head, given, (q, k, v)), causal=True)
    torch.testing.assert_close(found.float(), exact, atol=2e-2, rtol=2e-2)
    one = flash_attn_3.flash_attn_func(q, k, v, v_descale=given[2])
    exact = flash_attn_3.flash_attn_func(q.float(), k.float(), by_head(given[2], v))
    torch.testing.assert_close(one.float(), exact, atol=2e-2, rtol=2e-2)

    flat = [x.flatten(0, 1) for x in (q, k, v)]
    found = flash_attn_3.flash_attn_varlen_func(*flat, CU_Q, CU_K, 33, 36, **names)
    rows = [torch.repeat_interleave(torch.arange(2), cu.diff().long()) for cu in (CU_Q, CU_K, CU_K)]
    exact = flash_attn_3.flash_attn_varlen_func(*map(by_head, given, flat, rows), CU_Q, CU_K, 33, 36)
    torch.testing.assert_close(found.float(), exact, atol=2e-2, rtol=2e-2)


def test_descale_of_caches():
    q, pages, new, table, common = cache()
    q, caches = q.bfloat16(), pages.to(E4M3).reshape(2, 2, 24, 2, 16)
    _, k_descale, v_descale = scales()
    names = dict(k_descale=k_descale, v_descale=v_descale)
    lengths = common["cache_seqlens"]
    found = flash_attn_3.flash_attn_with_kvcache(q, *caches, cache_seqlens=lengths, **names)
    whole = [by_head(s, x).bfloat16() for s, x in zip((k_descale, v_descale), caches)]
    torch.testing.assert_close(
        found, flash_attn_3.flash_attn_with_kvcache(q, *whole, cache_seqlens=lengths), atol=4e-2, rtol=4e-2
    )

    # In pages, by rows and with new keys: the same for all sequences.
    rows = torch.tensor([1, 0], dtype=torch.int32)
    same = {name: scale[:1].expand(2, 2) for name, scale in names.items()}
    paged = pages.to(E4M3)
    by_page = [(x.float() * s[0][:, None]).bfloat16() for x, s in zip(paged, same.values())]
    found = flash_attn_3.flash_attn_with_kvcache(q, *paged, cache_seqlens=lengths, page_table=table, **same)
    exact = flash_attn_3.flash_attn_with_kvcache(q, *by_page, cache_seqlens=lengths, page_table=table)
    torch.testing.assert_close(found, exact, atol=4e-2, rtol=4e-2)
    by_row = [(x.float() * s[0][:, None]).bfloat16() for x, s in zip(caches, same.values())]
    found = flash_attn_3.flash_attn_with_kvcache(q, *caches, cache_seqlens=lengths, cache_batch_idx=rows, **same)
    exact = flash_attn_3.flash_attn_with_kvcache(q, *by_row, cache_seqlens=lengths, cache_batch_idx=rows)
    torch.testing.assert_close(found, exact, atol=4e-2, rtol=4e-2)
    written = paged.clone()
    appended = flash_attn_3.flash_attn_with_kvcache(
        q, *written, *new.bfloat16(), cache_seqlens=lengths, page_table=table, causal=True, **same
    )
    assert appended.shape == q.shape and not torch.equal(written.float(), paged.float())
    slot = (table[0, 13 // 4], 13 % 4)
    stored = (new[0].bfloat16().float()[0, 0] / k_descale[0][:, None]).to(E4M3).float()
    assert torch.equal(written[0][slot].float(), stored)
    for words, options in {
        "beside page_table": dict(page_table=table),
        "beside cache_batch_idx": dict(cache_batch_idx=rows),
        "with new keys to append": dict(k=new[0].bfloat16(), v=new[1].bfloat16()),
    }.items():
        held = paged if "page_table" in options else caches
        with pytest.raises(
            ValueError, match=rf"k_descale has 2 rows {words}: scales of a cache must be the same for all"
        ):
            flash_attn_3.flash_attn_with_kvcache(q, *held, cache_seqlens=lengths, **names, **options)


def test_bad_descale():
    q, k, v = (x.to(E4M3) for x in tensors())
    for given, error, words in (
        (
            torch.ones(2, 4),
            ValueError,
            r"q_descale is torch.float32 \[2, 4\]: it must be torch.float32 \[B, Hkv\] = \[2, 2\]",
        ),
        (
            torch.ones(2, 2, dtype=torch.float64),
            ValueError,
            r"q_descale is torch.float64 \[2, 2\]: it must be torch.float32",
        ),
        (0.5, TypeError, "q_descale is a float: it must be a torch tensor"),
    ):
        with pytest.raises(error, match=rf"\[flash_attn_func\] {words}"):
            flash_attn_3.flash_attn_func(q, k, v, q_descale=given)
    new = torch.randn(2, 3, 2, 16).to(E4M3)
    with pytest.raises(ValueError, match="k is torch.float8_e4m3fn: new keys must have 16 bits"):
        flash_attn_3.flash_attn_with_kvcache(q, k, v, new, new, cache_seqlens=3)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
def test_combine(packed, dtype):
    q, k, v = tensors(Sk=30)
    parts = [slice(0, 7), slice(7, 7), slice(7, 30)]  # the second one has no keys
    found = [flash_attn_3.flash_attn_func(q, k[:, p], v[:, p], return_attn_probs=True) for p in parts]
    out = torch.stack([o for o, _ in found])
    out[1] = math.nan  # of a part without keys nothing is read
    lse = torch.stack([x.transpose(1, 2) for _, x in found])
    expected, expected_lse = flash_attn_3.flash_attn_func(q, k, v, return_attn_probs=True)
    expected, expected_lse = expected.to(dtype or torch.float32), expected_lse.transpose(1, 2)
    if packed:
        out, lse, expected, expected_lse = (
            out.flatten(1, 2),
            lse.flatten(1, 2),
            expected.flatten(0, 1),
            expected_lse.flatten(0, 1),
        )
    joined, joined_lse = flash_attn_3.flash_attn_combine(out, lse, out_dtype=dtype)
    torch.testing.assert_close(joined, expected)
    torch.testing.assert_close(joined_lse, expected_lse)
    into = torch.empty_like(expected)
    again, _ = flash_attn_3.flash_attn_combine(out, lse, into)
    assert again is into and torch.equal(into, joined)


def test_combine_of_rows_without_keys_and_refusals():
    out, lse = torch.full((3, 2, 4, 2, 8), math.nan), torch.full((3, 2, 4, 2), -math.inf)
    joined, joined_lse = flash_attn_3.flash_attn_combine(out, lse)
    assert torch.equal(joined, torch.zeros(2, 4, 2, 8)) and torch.equal(joined_lse, lse[0])
    combine = flash_attn_3.flash_attn_combine
    for call, words in (
        (
            lambda: combine(out, lse.transpose(2, 3)),
            r"out_partial is \[3, 2, 4, 2, 8\] and lse_partial is \[3, 2, 2, 4\]",
        ),
        (lambda: combine(out.bfloat16(), lse), "out_partial is torch.bfloat16: it must be torch.float32"),
        (lambda: combine(out, lse.double()), "lse_partial is torch.float64: it must be torch.float32"),
        (lambda: combine(out, lse, out_dtype=torch.float64), "out_dtype is torch.float64: it must be"),
        (
            lambda: combine(out, lse, joined[:1]),
            r"out is torch.float32 \[1, 4, 2, 8\]: it must be torch.float32 \[2, 4, 2, 8\]",
        ),
        (lambda: combine(out, lse, joined, torch.float16), "out is torch.float32 .*: it must be torch.float16"),
        (lambda: combine(out.requires_grad_(), lse), "out_partial requires a gradient: this call has no backward"),
        (lambda: combine(out.detach(), lse.to("meta")), "lse_partial is on another device than out_partial"),
    ):
        with pytest.raises(ValueError, match=r"\[flash_attn_combine\] " + words):
            call()
