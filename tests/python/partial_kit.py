"""Partial results of attention, and their merge as the formula has it."""

import torch


def parts(dtype=torch.float32, requires_grad=False, count=3, device="cpu", rows=(2, 9, 4, 16)):
    """(os, lses, sink)."""
    make = torch.Generator().manual_seed(5)

    def normal(*shape, dtype=torch.float32):
        return torch.randn(*shape, generator=make).to(device, dtype).requires_grad_(requires_grad)

    os = [normal(*rows, dtype=dtype) for _ in range(count)]
    lses = [normal(*rows[:-3], rows[-2], rows[-3]) for _ in range(count)]
    return os, lses, normal(rows[-2])


def plain_merge(os, lses, sink):
    """The formula in torch, in double."""
    logits = torch.stack(
        [lse.double() for lse in lses] + ([sink.double()[:, None].expand_as(lses[0])] if sink is not None else [])
    )
    lse = torch.logsumexp(logits, 0)
    weights = [torch.exp(x.double() - lse).transpose(-1, -2)[..., None] for x in lses]
    return sum(w * o.double() for w, o in zip(weights, os)), lse
