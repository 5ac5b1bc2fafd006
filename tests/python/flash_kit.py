"""Calls of torch's operators of flash attention, and torch's math that says the same. For the CPU and for GPUs."""

import math
from contextlib import contextmanager

import torch
from heddle import _heddle

LENGTHS = ((7, 0, 12, 5), (9, 4, 12, 3))  # of queries and keys: none, as many, fewer and more
HEADS, KV_HEADS = 4, 2


def draw(shape, seed, device="cpu", dtype=torch.float32):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return x.to(device, dtype)


def bounds(lengths, device="cpu"):
    return torch.tensor([0, *lengths], device=device).cumsum(0).int()


def packed(device="cpu", dtype=torch.float32, head_size=16, requires_grad=True):
    rows, keys = map(sum, LENGTHS)
    shapes = (rows, HEADS), (keys, KV_HEADS), (keys, KV_HEADS)
    return [draw((*s, head_size), i, device, dtype).requires_grad_(requires_grad) for i, s in enumerate(shapes)]


def met(rows, keys, causal=False, window=(-1, -1), device="cpu"):
    """bool [rows, keys], from the bottom-right corner."""
    apart = torch.arange(keys, device=device) - torch.arange(rows, device=device)[:, None] - (keys - rows)
    left, right = window
    right = 0 if causal else right
    return (apart >= -left if left >= 0 else True) & (apart <= right if right >= 0 else True) & (apart == apart)


def by_math(q, k, v, scale=None, slopes=None, **options):
    """q [S, H, D], k and v [Sk, Hkv, D] -> out [S, H, D], lse [H, S] in float64, +inf where a row meets no key."""
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[0] // x.shape[0], 0) for x in (k, v))
    scores = q @ k.mT * (scale or 1 / math.sqrt(q.shape[-1]))
    rows, keys = scores.shape[-2:]
    if slopes is not None:
        apart = torch.arange(keys) - torch.arange(rows)[:, None] - (keys - rows)
        scores = scores - slopes.double()[:, None, None] * apart.abs().to(scores.device)
    mask = met(rows, keys, device=q.device, **options)
    scores = scores.masked_fill(~mask, -torch.inf)
    empty = ~mask.any(-1) if keys else torch.ones(rows, dtype=torch.bool, device=q.device)
    weights = scores.masked_fill(empty[:, None], 0.0).softmax(-1).masked_fill(empty[:, None], 0.0)
    lse = scores.logsumexp(-1) if keys else scores.new_full((q.shape[0], rows), -torch.inf)
    return (weights @ v).transpose(0, 1), lse.masked_fill(empty, torch.inf)


def packed_by_math(q, k, v, used=None, **options):
    (rows, keys), found = LENGTHS, []
    for b, (own_q, own_k, own_v) in enumerate(zip(q.split(rows), k.split(keys), v.split(keys))):
        n = keys[b] if used is None else used[b]
        found.append(by_math(own_q, own_k[:n], own_v[:n], **options))
    outs, lses = zip(*found)
    return torch.cat(outs), torch.cat(lses, 1)


def close(found, expected, bound):
    """Within bound times the largest, infinities where there are such; NaN fails."""
    found, expected = found.detach().double(), expected.detach().double()
    assert found.shape == expected.shape
    endless = expected.isinf()
    assert torch.equal(found[endless], expected[endless])
    difference = (found - expected)[~endless].abs()
    assert difference.numel() == 0 or difference.max() <= bound * max(1.0, float(expected[~endless].abs().max()))


@contextmanager
def native_calls(monkeypatch):
    """The names of the native functions, as they are called by what activate() puts in torch's place."""
    seen = []

    def spied(function):
        def spy(*arguments):
            seen.append(function.__name__)
            return function(*arguments)

        return spy

    with monkeypatch.context() as patched:
        for name in ("attention_forward", "attention_backward"):
            patched.setattr(_heddle, name, spied(getattr(_heddle, name)))
        yield seen
