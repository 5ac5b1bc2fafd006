"""heddle.flash_attn: where its results lie, which shapes they have, and calls without elements."""

import math

import pytest
import torch
from heddle import flash_attn
from heddle.flash_attn import run
from torch.utils._python_dispatch import TorchDispatchMode


class OnCpu(TorchDispatchMode):
    """The operators that were called with a device of the CPU, or without any, where they make tensors."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, torch.Tensor) and x.device.type == "cpu":
                self.found.append(str(function))
        return out


def packed(device, lengths=(3, 0, 9)):
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=device)
    return [torch.randn(int(sum(lengths)), h, 16, device=device) for h in (4, 2, 2)], cu, max(lengths)


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_all_is_made_where_q_is(p):
    """On meta, which as a GPU refuses to be mixed with the CPU. The seed, drawn from the default generator, stays
    there."""
    q, k, v = (torch.randn(2, n, h, 16, device="meta") for n, h in ((5, 4), (300, 2), (300, 2)))
    with OnCpu() as mode:
        out, lse, probabilities = flash_attn.flash_attn_func(q, k, v, p, causal=True, return_attn_probs=True)
    assert [x.device.type for x in (out, lse, probabilities)] == ["meta"] * 3
    assert out.shape == (2, 5, 4, 16) and lse.shape == (2, 4, 5) and lse.dtype == torch.float32
    assert tuple(probabilities.shape) == ((2, 4, 5, 300) if p else (0,)) and probabilities.dtype == q.dtype
    assert mode.found == ["aten.randint.low"] * (p > 0)
    (q, k, v), cu, longest = packed("meta")
    with OnCpu() as mode:
        out, lse, probabilities = flash_attn.flash_attn_varlen_func(
            q, k, v, cu, cu, longest, longest, p, return_attn_probs=True
        )
    assert [x.device.type for x in (out, lse, probabilities)] == ["meta"] * 3
    assert out.shape == (12, 4, 16) and lse.shape == (4, 12)
    assert tuple(probabilities.shape) == ((3, 4, 9, 9) if p else (0,))
    assert mode.found == ["aten.randint.low"] * (p > 0)


def test_local_positions():
    sequence, position = run._local_positions(torch.tensor([0, 3, 3, 5], dtype=torch.int32), 5)
    assert sequence.tolist() == [0, 0, 0, 2, 2] and position.tolist() == [0, 1, 2, 0, 1]


def test_without_dropout_there_are_no_probabilities():
    q, k, v = (torch.randn(2, n, 2, 16).bfloat16() for n in (5, 7, 7))
    out, lse, probabilities = flash_attn.flash_attn_func(q, k, v, return_attn_probs=True)
    assert probabilities.shape == (0,) and probabilities.dtype == torch.bfloat16
    exact = torch.einsum("bihd,bjhd->bhij", q.double(), k.double()) / 4
    torch.testing.assert_close(lse.double(), exact.logsumexp(-1), atol=1e-3, rtol=1e-3)
    assert torch.equal(out, flash_attn.flash_attn_func(q, k, v))


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_probabilities_of_shared_heads(kv_heads):
    """Query head h reads key head h // (H / Hkv)."""
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 6, 4, 16), torch.randn(2, 9, kv_heads, 16), torch.randn(2, 9, kv_heads, 16)
    out, lse, probabilities = flash_attn.flash_attn_func(q, k, v, 0.4, return_attn_probs=True)
    wide = k.repeat_interleave(4 // kv_heads, 2)
    scores = torch.einsum("bihd,bjhd->bhij", q, wide) / 4
    torch.testing.assert_close(probabilities.abs(), scores.softmax(-1), atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(lse, scores.logsumexp(-1))
    kept = torch.where(probabilities > 0, probabilities / 0.6, 0)
    torch.testing.assert_close(out, torch.einsum("bhij,bjhd->bihd", kept, v.repeat_interleave(4 // kv_heads, 2)))
    for bad in (3, 8):
        x = torch.randn(2, 9, bad, 16)
        with pytest.raises(ValueError, match=rf"k has {bad} heads and q has 4: q's heads must be a multiple of k's"):
            flash_attn.flash_attn_func(q, x, x)


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("batch, rows, keys", [(0, 5, 7), (2, 0, 7), (2, 5, 0), (2, 0, 0), (0, 0, 0)])
def test_nothing(batch, rows, keys, p):
    q = torch.randn(batch, rows, 4, 16, requires_grad=True)
    k, v = (torch.randn(batch, keys, 2, 16, requires_grad=True) for _ in "kv")
    for causal in (False, True):
        out, lse, probabilities = flash_attn.flash_attn_func(q, k, v, p, causal=causal, return_attn_probs=True)
        assert out.shape == q.shape and lse.shape == (batch, 4, rows)
        assert tuple(probabilities.shape) == ((batch, 4, rows, keys) if p else (0,))
        if keys == 0:
            assert torch.equal(out, torch.zeros_like(out)) and torch.equal(lse, torch.full_like(lse, -math.inf))
        for x, gradient in zip((q, k, v), torch.autograd.grad(out.sum(), (q, k, v))):
            assert gradient.shape == x.shape and torch.equal(gradient, torch.zeros_like(x))


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("lengths", [(), (0,), (0, 0), (0, 4, 0)])
def test_packed_sequences_of_nothing(lengths, p):
    (q, k, v), cu, longest = (
        packed("cpu", lengths)
        if lengths
        else ([torch.randn(0, h, 16) for h in (4, 2, 2)], torch.zeros(1, dtype=torch.int32), 0)
    )
    out, lse, probabilities = flash_attn.flash_attn_varlen_func(
        q, k, v, cu, cu, longest, longest, p, return_attn_probs=True
    )
    assert out.shape == q.shape and lse.shape == (4, q.shape[0])
    assert tuple(probabilities.shape) == ((len(lengths), 4, longest, longest) if p else (0,))


def test_caches_of_nothing():
    q, k, v = torch.randn(2, 3, 4, 16), torch.randn(2, 7, 2, 16), torch.randn(2, 7, 2, 16)
    out, lse = flash_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=0, return_softmax_lse=True)
    assert torch.equal(out, torch.zeros_like(q)) and torch.equal(lse, torch.full((2, 4, 3), -math.inf))
    assert flash_attn.flash_attn_with_kvcache(q[:0], k[:0], v[:0]).shape == (0, 3, 4, 16)
    assert flash_attn.flash_attn_with_kvcache(q[:, :0], k, v).shape == (2, 0, 4, 16)
    none = torch.randn(2, 0, 2, 16)
    again = flash_attn.flash_attn_with_kvcache(q, k.clone(), v.clone(), none, none, cache_seqlens=5)
    torch.testing.assert_close(again, flash_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=5))


def test_open_sides_of_windows():
    q, k, v = (torch.randn(2, 9, 2, 16) for _ in "qkv")
    for given, same in (((None, None), (-1, -1)), ((2, None), (2, -1)), ((None, 1), (-1, 1)), ([3, 0], (3, 0))):
        expected = flash_attn.flash_attn_func(q, k, v, window_size=same)
        assert torch.equal(flash_attn.flash_attn_func(q, k, v, window_size=given), expected)
