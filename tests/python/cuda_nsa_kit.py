"""Calls of native sparse attention on a GPU, and the comparison with the naive functions in float64."""

import pytest
import torch

NAMES = ("q", "k", "v", "g_cmp", "g_slc", "g_swa")
BLOCK, WINDOW = 64, 100
EVERY = 64  # blocks of a list: all there are, so that it is no matter what rounding would choose differently
TINY = 1e-2  # a norm below it is rounding's: of a row over one key, q has no gradient
# Of a result's norm: operands are the same numbers, so what counts is rounding of probabilities, branches and the result.
LIMITS = {torch.bfloat16: 1e-2, torch.float16: 1.5e-3}
both_dtypes = pytest.mark.parametrize("dtype", LIMITS, ids=["bf16", "f16"])


def operands(rows, keys=None, batch=1, heads=2, group=4, size=128, dtype=torch.bfloat16, seed=0, gradients=True):
    """q, k, v, g_cmp, g_slc, g_swa."""
    make = torch.Generator().manual_seed(seed)
    keys = rows if keys is None else keys
    q = torch.randn(batch, rows, heads * group, size, generator=make)
    k, v = (torch.randn(batch, keys, heads, size, generator=make) for _ in range(2))
    gates = torch.sigmoid(torch.randn(3, batch, rows, heads * group, generator=make))
    return [x.to("cuda", dtype).requires_grad_(gradients) for x in (q, k, v, *gates)]


def wide(x):
    return [y.detach().double().requires_grad_(y.requires_grad) for y in x]


def relative(found, expected):
    """NaN, which no limit takes, if either has one."""
    return ((found.double() - expected.double()).norm() / expected.double().norm().clamp(min=TINY)).item()


def assert_near(what, found, expected, limit):
    assert found.shape == expected.shape, (what, found.shape, expected.shape)
    error = relative(found, expected)
    assert error <= limit, f"{what} differs by {error:.3g} of its norm, the limit is {limit:.3g}"
