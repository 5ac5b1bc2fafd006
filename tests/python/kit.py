"""The yardstick: attention written out in torch, in any precision, and the accuracy rule that everything is held to."""

import math

import numpy as np
import torch

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
RANDOM = np.random.default_rng(0)


def normal(*shape):
    return RANDOM.standard_normal(shape).astype(np.float32)


def scores_and_mask(
    q, k, *, scale=None, causal="none", window=(-1, -1), softcap=0.0, alibi_slopes=None, bias=None, mask=None
):
    """[B, H, Sq, Sk] scores and the pairs that are attended, from q [B, Sq, H, D], k [B, Sk, H, D] of one dtype."""
    rows, keys = q.shape[1], k.shape[1]
    s = torch.einsum("bihd,bjhd->bhij", q, k) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    off = 0 if causal == "top_left" else keys - rows
    distance = torch.arange(keys, device=q.device)[None, :] - (torch.arange(rows, device=q.device)[:, None] + off)
    if alibi_slopes is not None:
        slopes = alibi_slopes.to(s.dtype)
        slopes = slopes[None] if slopes.dim() == 1 else slopes
        s = s - slopes[:, :, None, None] * distance.abs().to(s.dtype)
    keep = torch.ones(rows, keys, dtype=torch.bool, device=q.device)
    if causal != "none":
        keep = keep & (distance <= 0)
    if window[0] >= 0:
        keep = keep & (distance >= -window[0])
    if window[1] >= 0:
        keep = keep & (distance <= window[1])
    keep = keep.expand(s.shape)
    if bias is not None:
        s = s + bias.to(s.dtype)
        keep = keep & (bias > -math.inf)
    if mask is not None:
        keep = keep & mask
    return s, keep


def plain(q, k, v, *, sink=None, dropout_p=0.0, kept=None, **options):
    """(out [B, Sq, H, Dv], lse [B, H, Sq]), unfused, in the dtype of q. kept: what dropout keeps, [B, H, Sq, Sk]."""
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    s, keep = scores_and_mask(q, k, **options)
    s = torch.where(keep, s, -math.inf)
    if sink is not None:
        s = torch.cat([s, sink.to(s.dtype)[None, :, None, None].expand(*s.shape[:3], 1)], -1)
    alive = torch.isfinite(s).any(-1, keepdim=True)
    s = torch.where(alive, s, 0)  # a row without keys: any finite values, replaced below
    lse = torch.where(alive[..., 0], torch.logsumexp(s, -1), -math.inf)
    p = torch.where(alive, torch.softmax(s, -1), 0)
    if sink is not None:
        p = p[..., :-1]
    if dropout_p:
        p = torch.where(kept, p / (1 - dropout_p), 0)
    return torch.einsum("bhij,bjhd->bihd", p, v), lse


def bound(exact, rough, dtype, factor=2):
    """The accuracy rule: `factor` times the plain computation's error in the same dtype, plus 8 roundings of the value."""
    scale = exact[torch.isfinite(exact)].abs().max().item() if torch.isfinite(exact).any() else 0.0
    difference = (rough.double() - exact)[torch.isfinite(exact)].abs()
    error = difference.max().item() if difference.numel() else 0.0
    assert error == error, "the yardstick itself is NaN"
    return factor * error + 8 * torch.finfo(dtype).eps * scale


def assert_accurate(name, found, exact, rough, dtype, factor=2):
    """`found` against the double-precision `exact`; infinities must agree; a NaN fails."""
    assert found.shape == exact.shape, (name, found.shape, exact.shape)
    found = found.detach().double()
    exact = exact.detach()
    finite = torch.isfinite(exact)
    assert torch.equal(found[~finite], exact[~finite]), f"{name}: infinities differ"
    if not finite.any():
        return
    error = (found - exact)[finite].abs().max().item()
    limit = bound(exact, rough.detach(), dtype, factor)
    assert error <= limit, f"{name}: error {error:.3g} is above {limit:.3g}"


def leaf(x, dtype=None):
    return x.detach().to(dtype or x.dtype).requires_grad_()


def differentiate(function, q, k, v, options, weight, lse_weight, dtype):
    """out, lse and the gradients of sum(out * weight) + sum(finite lse * lse_weight), computed in `dtype`."""
    q, k, v = leaf(q, dtype), leaf(k, dtype), leaf(v, dtype)
    options = dict(options)
    inputs = [q, k, v]
    for name in ("bias", "sink"):
        if options.get(name) is not None:
            options[name] = leaf(options[name], dtype if function is plain or name == "bias" else None)
            inputs.append(options[name])
    out, lse = function(q, k, v, **options)
    loss = (out * weight.to(out.dtype)).sum() + torch.where(
        torch.isfinite(lse), lse * lse_weight.to(lse.dtype), 0
    ).sum()
    return [out, lse, *torch.autograd.grad(loss, inputs)]


class OnlyDLPack:
    """An array of a library of which only DLPack is known: it makes none."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack__(self, **options):
        return self.tensor.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()
