"""Calls of native sparse attention on a GPU, and the comparison with the naive functions in float64."""

import pytest
import torch
from nsa_kit import nsa

NAMES = ("q", "k", "v", "g_cmp", "g_slc", "g_swa")
BLOCK, WINDOW = 64, 100
EVERY = 64  # blocks of a list: all there are, so that it is no matter what rounding would choose differently
TINY = 1e-2  # a norm below it is rounding's: of a row over one key, q has no gradient
# Of a result's norm: operands are the same numbers, so what counts is rounding of probabilities, branches and the result.
LIMITS = {torch.bfloat16: 1e-2, torch.float16: 1.5e-3}
both_dtypes = pytest.mark.parametrize("dtype", LIMITS, ids=["bf16", "f16"])


def operands(rows, keys=None, batch=1, heads=2, group=4, size=128, v_size=None, dtype=torch.bfloat16,
             seed=0, gradients=True):  # fmt: skip
    """q, k, v, g_cmp, g_slc, g_swa."""
    make = torch.Generator().manual_seed(seed)
    keys = rows if keys is None else keys
    q = torch.randn(batch, rows, heads * group, size, generator=make)
    k, v = (torch.randn(batch, keys, heads, d, generator=make) for d in (size, v_size or size))
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


def check_call(x, found, expected, limit, names=NAMES):
    """found of x against expected of (doubles of x): results and gradients."""
    doubles = wide(x)
    o, exact = found(*x), expected(*doubles)
    assert o.is_cuda and o.dtype == x[0].dtype
    assert_near("o", o, exact, limit)
    leaves = [y.requires_grad for y in x]
    if not any(leaves):
        return
    d_o = torch.randn(o.shape, generator=torch.Generator().manual_seed(9)).to(o)
    gradients = torch.autograd.grad(o, [y for y in x if y.requires_grad], d_o)
    exact = torch.autograd.grad(exact, [y for y in doubles if y.requires_grad], d_o.double())
    for name, y, e in zip([n for n, wanted in zip(names, leaves) if wanted], gradients, exact):
        assert_near("gradient of " + name, y, e, 3 * limit)


def check_whole(x, count=EVERY, window=WINDOW, max_seqlen=None, own=(), **options):
    """own: the names of operands behind the gates, as k_cmp."""
    given = {"block_size": BLOCK, "window_size": window, **options}
    if window == 0:
        x = [*x[:5], x[5].detach(), *x[6:]]
    names, bounded = (*NAMES, *own), {"block_counts": count, "max_seqlen": max_seqlen}
    check_call(
        x,
        lambda *y: nsa.parallel_nsa(*y[:6], **bounded, **given, **dict(zip(own, y[6:]))),
        lambda *y: nsa.naive_nsa_with_compression(*y[:6], count, **given, **dict(zip(own, y[6:]))),
        LIMITS[x[0].dtype],
        names,
    )
