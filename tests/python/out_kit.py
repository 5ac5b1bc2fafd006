"""Tensors for the tests of results that go where the caller says."""

import heddle
import torch
from heddle import lowbit

B, S, H, HKV, D = 2, 9, 4, 2, 8


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def framed(like):
    """Memory for a result on a GPU, amid a larger tensor of sevens."""
    whole = torch.full([n + 8 for n in like.shape], 7, dtype=like.dtype, device="cuda")
    return whole, whole[tuple(slice(0, n) for n in like.shape)]


def check_frame(whole, view, expected):
    assert torch.equal(view, expected)
    assert int((whole != 7).sum()) <= expected.numel(), "written outside"


def cache():
    at = ints(3, 0)
    held = heddle.Int4Cache.empty(2, 400, 2, 64)
    held.append(normal(2, 150, 2, 64).bfloat16(), normal(2, 150, 2, 64, seed=1).bfloat16(), ints(0, 0))
    return at, held


PACKED = lowbit.pack(lowbit.quantize(normal(16, 64), "nvfp4"))
