"""heddle.flash_attn and heddle.flash_attn_3 on a GPU, as on the CPU."""

import pytest
import torch
from heddle import _heddle, flash_attn, flash_attn_3

if not torch.cuda.is_available():
    pytest.skip("torch sees no GPU here", allow_module_level=True)
if not _heddle.cuda_built():
    pytest.skip("this build of heddle has no GPU kernels", allow_module_level=True)

E4M3 = torch.float8_e4m3fn


def draw(*shapes, dtype=torch.bfloat16):
    random = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=random).to("cuda", dtype) for shape in shapes]


def close(found, expected, tolerance=2**-6):
    assert found.is_cuda
    torch.testing.assert_close(found.cpu().float(), expected.float(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kv_heads, keys", [(4, 300), (1, 77), (2, 8)])
@pytest.mark.parametrize("causal", [False, True])
def test_probabilities_with_dropout(dtype, kv_heads, keys, causal):
    q, k, v = draw((2, 20, 4, 64), (2, keys, kv_heads, 64), (2, keys, kv_heads, 64), dtype=dtype)
    torch.manual_seed(3)
    out, lse, probabilities = flash_attn.flash_attn_func(q, k, v, 0.3, causal=causal, return_attn_probs=True)
    torch.manual_seed(3)
    expected = flash_attn.flash_attn_func(*(x.cpu() for x in (q, k, v)), 0.3, causal=causal, return_attn_probs=True)
    assert probabilities.shape == (2, 4, 20, keys) and probabilities.dtype == dtype
    for found, host in zip((out, lse, probabilities), expected):
        close(found, host)
    assert torch.equal(torch.signbit(probabilities).cpu(), torch.signbit(expected[2]))  # the same are dropped
    out, lse, none = flash_attn.flash_attn_func(q, k, v, causal=causal, return_attn_probs=True)
    assert none.is_cuda and none.shape == (0,)
    expected = flash_attn.flash_attn_func(*(x.cpu() for x in (q, k, v)), causal=causal, return_attn_probs=True)
    close(out, expected[0])
    close(lse, expected[1])


def test_probabilities_of_packed_sequences():
    q, k, v = draw((40, 4, 64), (50, 2, 64), (50, 2, 64))
    cu_q = torch.tensor([0, 7, 7, 40], dtype=torch.int32, device="cuda")
    cu_k = torch.tensor([0, 12, 20, 50], dtype=torch.int32, device="cuda")
    found, expected = [], []
    for results, device in ((found, "cuda"), (expected, "cpu")):
        torch.manual_seed(5)
        results += flash_attn.flash_attn_varlen_func(
            *(x.to(device) for x in (q, k, v, cu_q, cu_k)), 33, 30, 0.2, causal=True, return_attn_probs=True
        )
    for x, host in zip(found, expected):
        close(x, host)
    assert found[2].shape == (3, 4, 33, 30)


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("batch, rows, keys", [(0, 5, 7), (2, 0, 7), (2, 5, 0)])
def test_nothing(batch, rows, keys, p):
    q, k, v = (x.requires_grad_() for x in draw((batch, rows, 4, 64), (batch, keys, 2, 64), (batch, keys, 2, 64)))
    out, lse, probabilities = flash_attn.flash_attn_func(q, k, v, p, return_attn_probs=True)
    assert out.shape == q.shape and lse.shape == (batch, 4, rows)
    assert tuple(probabilities.shape) == ((batch, 4, rows, keys) if p else (0,))
    assert torch.equal(out, torch.zeros_like(out)) or keys > 0
    for x, gradient in zip((q, k, v), torch.autograd.grad(out.sum(), (q, k, v))):
        assert torch.equal(gradient, torch.zeros_like(x))


def test_flash_attn_3():
    q, k, v = draw((2, 20, 4, 64), (2, 33, 2, 64), (2, 33, 2, 64))
    host = [x.cpu() for x in (q, k, v)]
    out, lse = flash_attn_3.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    expected = flash_attn_3.flash_attn_func(*host, causal=True, return_attn_probs=True)
    close(out, expected[0])
    close(lse, expected[1])
    cu = torch.tensor([0, 15, 20], dtype=torch.int32, device="cuda")
    found = flash_attn_3.flash_attn_with_kvcache(
        q[0], k, v, cache_seqlens=21, cu_seqlens_q=cu, max_seqlen_q=15, causal=True
    )
    close(
        found,
        flash_attn_3.flash_attn_with_kvcache(
            host[0][0], *host[1:], cache_seqlens=21, cu_seqlens_q=cu.cpu(), causal=True
        ),
    )
    parts = [
        flash_attn_3.flash_attn_func(q, k[:, p], v[:, p], return_attn_probs=True) for p in (slice(0, 9), slice(9, 33))
    ]
    joined, _ = flash_attn_3.flash_attn_combine(
        torch.stack([o.float() for o, _ in parts]),
        torch.stack([x.transpose(1, 2) for _, x in parts]),
        out_dtype=q.dtype,
    )
    close(joined, flash_attn_3.flash_attn_func(*host))


@pytest.mark.parametrize("shared", [False, True])
def test_descale(shared):
    q, k, v = draw((2, 12, 4, 64), (2, 33, 2, 64), (2, 33, 2, 64))
    k, v = k.to(E4M3), v.to(E4M3)
    scales = [torch.rand(2, 2, device="cuda") + 0.5 for _ in "qkv"]
    if shared:
        scales = [s[:1].expand(2, 2) for s in scales]
    wide = [(x.float() * s[:, None, :, None]).bfloat16().cpu() for x, s in zip((k, v), scales[1:])]
    names = dict(k_descale=scales[1], v_descale=scales[2])
    close(flash_attn_3.flash_attn_with_kvcache(q, k, v, causal=True, **names),
          flash_attn_3.flash_attn_with_kvcache(q.cpu(), *wide, causal=True), 2**-4)  # fmt: skip
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("queries in float8_e4m3fn are Hopper's")
    narrow = q.to(E4M3)
    exact = (narrow.float() * scales[0].repeat_interleave(2, 1)[:, None, :, None]).bfloat16().cpu()
    names["q_descale"] = scales[0]
    found = flash_attn_3.flash_attn_func(narrow, k, v, **names)
    close(found, flash_attn_3.flash_attn_func(exact, *wide), 2**-3)
    cu = [torch.tensor([0, n, 2 * n], dtype=torch.int32, device="cuda") for n in (12, 33)]
    packed = flash_attn_3.flash_attn_varlen_func(*(x.flatten(0, 1) for x in (narrow, k, v)), *cu, 12, 33, **names)
    torch.testing.assert_close(packed.float(), found.flatten(0, 1).float(), atol=2**-5, rtol=2**-5)
