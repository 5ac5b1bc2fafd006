"""Calls of native sparse attention on a GPU, and the comparison with the naive functions: in float64, by the accuracy rule
(docs/numerics.md), whose yardstick are the same functions in float32 with the roundings of 16-bit operands."""

import contextlib

import pytest
import torch
from heddle.nsa import branches, sequences
from kit import ORDERS, SCALED_FIRST, Rounded, assert_accurate, attended, contracted
from nsa_kit import nsa

NAMES = ("q", "k", "v", "g_cmp", "g_slc", "g_swa")
BLOCK, WINDOW = 64, 100
EVERY = 64  # blocks of a list: all there are, so that it is no matter what rounding would choose differently
TINY = 1e-2  # a norm below it is rounding's: of a row over one key, q has no gradient
# Of a result's norm, where there is no plain computation to compare with, as between two of the library's ways.
LIMITS = {torch.bfloat16: 1e-2, torch.float16: 1.5e-3}
# Half an ulp, in float32, of the largest terms of sums that may cancel: products of normals with some 100 addends.
CANCELS = 2.0**-18
both_dtypes = pytest.mark.parametrize("dtype", LIMITS, ids=["bf16", "f16"])


def operands(rows, keys=None, batch=1, heads=2, group=4, size=128, v_size=None, dtype=torch.bfloat16,
             seed=0, gradients=True, device="cuda"):  # fmt: skip
    """q, k, v, g_cmp, g_slc, g_swa."""
    make = torch.Generator().manual_seed(seed)
    keys = rows if keys is None else keys
    q = torch.randn(batch, rows, heads * group, size, generator=make)
    k, v = (torch.randn(batch, keys, heads, d, generator=make) for d in (size, v_size or size))
    gates = torch.sigmoid(torch.randn(3, batch, rows, heads * group, generator=make))
    return [x.to(device, dtype).requires_grad_(gradients) for x in (q, k, v, *gates)]


def wide(x):
    return [y.detach().double().requires_grad_(y.requires_grad) for y in x]


def relative(found, expected):
    """NaN, which no limit takes, if either has one."""
    return ((found.double() - expected.double()).norm() / expected.double().norm().clamp(min=TINY)).item()


def assert_near(what, found, expected, limit):
    assert found.shape == expected.shape, (what, found.shape, expected.shape)
    error = relative(found, expected)
    assert error <= limit, f"{what} differs by {error:.3g} of its norm, the limit is {limit:.3g}"


@contextlib.contextmanager
def roundings(dtype, order):
    """In it the naive functions round what is stored, or an operand of a product, to `dtype`, with their gradients: pooled keys, P, each
    branch, the gradient of a score; and sum in this order."""

    def attend(q, k, v, keep, scale):
        heads, kv_heads = q.shape[1], k.shape[1]
        q, group = Rounded.apply(q, dtype), heads // kv_heads
        k, v = (x.repeat_interleave(group, 1)[None] for x in (k, v))
        factor = scale if order in SCALED_FIRST else 1.0
        s = contracted("bihd,bjhd->bhij", factor * q[None], k, (3, 3), order) * (scale / factor)
        keep = keep.expand(-1, kv_heads, -1).repeat_interleave(group, 1).transpose(0, 1)[None]
        o, _, p = attended(s, keep, v, dtype, order)
        return Rounded.apply(o[0], dtype), p[0].transpose(0, 1).unflatten(1, (kv_heads, group))

    def compressed_keys(*arguments):
        return tuple(Rounded.apply(x, dtype) for x in right(*arguments))

    right = sequences.compressed_keys
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(branches, "attend", attend)
        patch.setattr(sequences, "compressed_keys", compressed_keys)
        yield


def in_roundings(call, x):
    """call(*x) in each order."""
    found = []
    for order in ORDERS:
        with roundings(x[0].dtype, order):
            found.append(call(*x))
    return found


class Expected:
    """The naive call of doubles of x, what it is in every order, and the rule."""

    def __init__(self, call, x):
        self.exact, self.rough = call(*wide(x)), in_roundings(call, x)

    def assert_accurate(self, name, found, part):
        """found against part(o)."""
        exact, *rough = (part(y) for y in (self.exact, *self.rough))
        assert_accurate(name, found, exact, rough, found.dtype, found.shape[:-1].numel(), CANCELS)


def check_call(x, found, expected, names=NAMES):
    """found of x against expected of (doubles of x), of naive functions: results and gradients."""
    leaves = [y.requires_grad for y in x]
    d_o = None

    def all_of(call, x):
        nonlocal d_o
        o = call(*x)
        d_o = torch.randn(o.shape, generator=torch.Generator().manual_seed(9)).to(o) if d_o is None else d_o
        some = [y for y in x if y.requires_grad]
        return [o.detach(), *(torch.autograd.grad(o, some, d_o.to(o.dtype)) if some else ())]

    outputs = all_of(found, x)
    assert outputs[0].device == x[0].device and outputs[0].dtype == x[0].dtype
    rough = in_roundings(lambda *y: all_of(expected, y), x)
    of = ["o", *(f"gradient of {name}" for name, wanted in zip(names, leaves) if wanted)]
    for name, y, e, *r in zip(of, outputs, all_of(expected, wide(x)), *rough):
        assert_accurate(name, y, e, r, y.dtype, outputs[0].shape[:-1].numel(), CANCELS)


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
        names,
    )
