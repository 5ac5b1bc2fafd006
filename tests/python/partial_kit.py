"""Calls in pieces; partial results of attention, and their merge as the formula has it."""

import heddle
import torch

CUTS = ((0, 1), (1, 1), (1, 30), (30, 70))
OPTIONS = {
    "plain": {},
    "causal": {"causal": "top_left"},
    "window": {"window": (9, 4)},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625]), "causal": "top_left"},
    "bias": {"bias": torch.sin(torch.arange(4.0 * 70 * 70).reshape(1, 4, 70, 70))},
    "mask": {"mask": torch.arange(70 * 70).reshape(70, 70) % 3 != 1},
    "dropout": {"dropout_p": 0.3, "dropout_seed": 11, "causal": "top_left"},
    "softcap": {"softcap": 3.0},
}


def operands(dtype=torch.float32, requires_grad=False, device="cpu"):
    make = torch.Generator().manual_seed(3)

    def normal(*shape, dtype=torch.float32):
        return torch.randn(*shape, generator=make).to(device, dtype).requires_grad_(requires_grad)

    return *(normal(2, 70, h, 24, dtype=dtype) for h in (4, 2, 2)), normal(4)


def merged(q, k, v, sink, options, rows=(0, 70)):
    """The rows of q, against the keys in pieces."""
    first, last = rows
    options = {
        name: x[..., first:last, :] if name in ("bias", "mask") else x for name, x in options.items()
    }  # all columns stay
    parts = [
        heddle.attention(
            q[:, first:last],
            k[:, a:b],
            v[:, a:b],
            q_offset=first,
            key_offset=a,
            return_lse=True,
            out_dtype="float32",
            **options,
        )
        for a, b in CUTS
    ]
    return heddle.merge_attention([o for o, _ in parts], [lse for _, lse in parts], sink)


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
