"""The cache in 4 bits from Python: what it holds, how far attention over it is from 16 bits, and its operators."""

import heddle
import pytest
import torch

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]


def keys_with_outliers(b, s, h, d, generator):
    """Channels of K that are far from 0 and wide, the same for all keys, as models have them."""
    k = torch.randn(b, s, h, d, generator=generator)
    wide = torch.randperm(d, generator=generator)[:4]
    k[..., wide] = k[..., wide] * 4 + torch.tensor([12.0, -9.0, 15.0, -7.0])
    return k


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("paged", [False, True])
def test_attention_is_near_that_of_16_bits(device, paged):
    generator = torch.Generator().manual_seed(1)
    b, s, hkv, d = 2, 700, 2, 128
    k = keys_with_outliers(b, s, hkv, d, generator).bfloat16().to(device)
    v = torch.randn(b, s, hkv, d, generator=generator).bfloat16().to(device)
    q = torch.randn(b, 1, 8, d, generator=generator).bfloat16().to(device)
    cache = heddle.Int4Cache.empty(b, 800, hkv, d, device=device)
    if paged:
        pages = torch.randperm(2 * cache.blocks.shape[1], generator=generator).int().reshape(2, -1).to(device)
        cache = heddle.Int4Cache(cache.blocks.flatten(0, 1), cache.k_tail, cache.v_tail, page_table=pages)
    at = torch.zeros(b, dtype=torch.int32, device=device)
    for step in (600, 1, 99):
        start = int(at[0])
        cache.append(k[:, start : start + step], v[:, start : start + step], at)
        at = at + step
    out, lse = cache.attention(q, at, causal="bottom_right", return_lse=True)
    expected, expected_lse = heddle.attention(q, k, v, causal="bottom_right", return_lse=True)
    error = ((out - expected).float().norm() / expected.float().norm()).item()
    assert 0.05 < error < 0.2  # of white noise averaged; codes alone give 0.14
    assert (lse - expected_lse).abs().max() < 0.1


def test_block_sizes():
    assert heddle.Int4Cache.block_bytes(128) == 9216
    assert [heddle.Int4Cache.blocks_of(n) for n in (0, 127, 128, 192)] == [0, 0, 1, 2]
    with pytest.raises(ValueError, match="a head size is 96: in 4 bits it must be a multiple of 64 up to 256"):
        heddle.Int4Cache.block_bytes(96)


def test_refusals_name_the_argument():
    cache = heddle.Int4Cache.empty(1, 100, 2, 64)
    new = torch.zeros(1, 3, 2, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"\[append_int4_cache\] seqlens\[0\] is 125: with 3 rows"):
        cache.append(new, new, torch.tensor([125], dtype=torch.int32))
    with pytest.raises(ValueError, match=r"\[attention_over_int4_cache\] seqused_k\[0\] is 128"):
        cache.attention(new[:, :1], torch.tensor([128], dtype=torch.int32))
    with pytest.raises(ValueError, match="k_new is float16 and k_tail is bfloat16: they must be equal"):
        cache.append(new.half(), new.half(), torch.tensor([0], dtype=torch.int32))


def test_operators():
    cache = heddle.Int4Cache.empty(1, 300, 2, 64)
    new = torch.randn(1, 200, 2, 64).bfloat16()
    at = torch.tensor([0], dtype=torch.int32)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    sample = (new, new.clone(), cache.blocks, cache.k_tail, cache.v_tail, None, None, at, None, None, False)
    torch.library.opcheck(torch.ops.heddle.append_int4_cache.default, sample, test_utils=checks)
    cache.append(new, new, at)

    @torch.compile(backend="eager", fullgraph=True)
    def attend(q, lengths):
        return cache.attention(q, lengths, causal="bottom_right")

    lengths = torch.tensor([200], dtype=torch.int32)
    q = torch.randn(1, 1, 4, 64).bfloat16()
    assert torch.equal(attend(q, lengths), cache.attention(q, lengths, causal="bottom_right"))
