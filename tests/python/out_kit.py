"""Tensors for the tests of results that go where the caller says."""

import heddle
import torch
from heddle import lowbit

B, S, H, HKV, D = 2, 9, 4, 2, 8


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def cache():
    at = ints(3, 0)
    held = heddle.Int4Cache.empty(2, 400, 2, 64)
    held.append(normal(2, 150, 2, 64).bfloat16(), normal(2, 150, 2, 64, seed=1).bfloat16(), ints(0, 0))
    return at, held


PACKED = lowbit.pack(lowbit.quantize(normal(16, 64), "nvfp4"))
