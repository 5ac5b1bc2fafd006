"""The yardstick: attention written out in torch, in any precision and several orders of summation, and the accuracy rule that everything is held to."""

import math

import numpy as np
import torch

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
RANDOM = np.random.default_rng(0)


def normal(*shape):
    return RANDOM.standard_normal(shape).astype(np.float32)


# How a sum goes: from the first term on, from the last, in blocks, by every eighth term. In the second and third P is multiplied
# with V before it is divided by its sum; in the second and fourth q is scaled before it is multiplied.
ORDERS = ("forward", "backward", "blocks", "lanes")
FUSED, SCALED_FIRST = ("backward", "blocks"), ("backward", "lanes")
PARTS = 8


def contracted(equation, a, b, axes, order):
    """The einsum of a and b, whose sum runs over their axes `axes`, in this order."""
    n = a.shape[axes[0]]
    if order == "forward" or n < 2:
        return torch.einsum(equation, a, b)
    if order == "backward":
        return torch.einsum(equation, a.flip(axes[0]), b.flip(axes[1]))
    if order == "blocks":
        size = -(-n // PARTS)
        places = [torch.arange(i, min(i + size, n), device=a.device) for i in range(0, n, size)]
    else:
        places = [torch.arange(i, n, PARTS, device=a.device) for i in range(min(PARTS, n))]
    parts = [torch.einsum(equation, a.index_select(axes[0], p), b.index_select(axes[1], p)) for p in places]
    while len(parts) > 1:
        pairs = list(zip(parts[::2], parts[1::2])) if order == "lanes" else [(parts[0], parts[1])]
        rest = parts[2 * len(pairs) :]
        parts = [x + y for x, y in pairs] + rest
    return parts[0]


def scores_and_mask(
    q, k, *, scale=None, causal="none", window=(-1, -1), softcap=0.0, alibi_slopes=None, bias=None, mask=None,
    order="forward",
):  # fmt: skip
    """[B, H, Sq, Sk] scores and the pairs that are attended, from q [B, Sq, H, D], k [B, Sk, H, D] of one dtype."""
    rows, keys = q.shape[1], k.shape[1]
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    if order in SCALED_FIRST:
        s = contracted("bihd,bjhd->bhij", q * scale, k, (3, 3), order)
    else:
        s = contracted("bihd,bjhd->bhij", q, k, (3, 3), order) * scale
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


class Softmax(torch.autograd.Function):
    """o [B, Sq, H, Dv], of `narrow`'s values, and lse, of scores [B, H, Sq, Sk + 1], the last of which has no value, and v [B, Sk, H, Dv]. What
    is an operand of a product is rounded to `narrow`. The backward has P from lse and delta from o, as kernels have."""

    @staticmethod
    def forward(ctx, s, v, factors, narrow, order):
        """factors: what P is multiplied with, which is dropout."""
        keys = v.shape[1]
        largest = s.amax(-1, keepdim=True)
        p = torch.exp(s - largest)
        total = p.sum(-1, keepdim=True)
        lse = (largest + torch.log(total))[..., 0]
        p = p if order in FUSED else p / total
        o = contracted("bhij,bjhd->bihd", rounded(p[..., :keys] * factors, narrow), v, (3, 1), order)
        o = rounded(o / total[..., 0].transpose(1, 2)[..., None] if order in FUSED else o, narrow)
        ctx.save_for_backward(s, v, o, lse)
        ctx.rest = factors, narrow, order
        return o, lse

    @staticmethod
    def backward(ctx, d_o, d_lse):
        (s, v, o, lse), (factors, narrow, order) = ctx.saved_tensors, ctx.rest
        p = torch.exp(s - lse[..., None])
        d_s = (d_lse - (d_o * o).sum(-1).transpose(1, 2))[..., None].expand(s.shape).clone()
        keys = v.shape[1]
        d_s[..., :keys] += contracted("bihd,bjhd->bhij", d_o, v, (3, 3), order) * factors
        d_s *= p
        d_v = contracted("bhij,bihd->bjhd", rounded(p[..., :keys] * factors, narrow), d_o, (2, 1), order)
        return torch.cat([rounded(d_s[..., :keys], narrow), d_s[..., keys:]], -1), d_v, None, None, None


class Rounded(torch.autograd.Function):
    """x, and its gradient, of a dtype's values."""

    @staticmethod
    def forward(ctx, x, dtype):
        ctx.dtype = dtype
        return rounded(x, dtype)

    @staticmethod
    def backward(ctx, gradient):
        return rounded(gradient, ctx.dtype), None


def rounded(x, dtype):
    return x.to(dtype).to(x.dtype)


def plain(q, k, v, *, sink=None, dropout_p=0.0, kept=None, order="forward", **options):
    """(out [B, Sq, H, Dv], lse [B, H, Sq]) in the dtype of q; of 16 bits, scores, softmax and lse are float32. kept: what dropout
    keeps, [B, H, Sq, Sk]."""
    narrow, wide = q.dtype, torch.promote_types(q.dtype, torch.float32)
    group = q.shape[2] // k.shape[2]
    q, k, v = q.to(wide), k.to(wide).repeat_interleave(group, 2), v.to(wide).repeat_interleave(group, 2)
    s, keep = scores_and_mask(q, k, order=order, **options)
    o, lse, _ = attended(s, keep, v, narrow, order, sink, kept.to(wide) / (1 - dropout_p) if dropout_p else None)
    return o.to(narrow), lse


def attended(s, keep, v, narrow, order, sink=None, factors=None):
    """o, lse and P of scores [B, H, Sq, Sk], of the pairs that are attended; see Softmax. A row without keys: o 0, lse -inf, P 0."""
    rest = s.new_full((*s.shape[:3], 1), -math.inf)  # so that there are scores where there are no keys
    if sink is not None:
        rest = sink.to(s.dtype)[None, :, None, None].expand(rest.shape)
    every = torch.cat([torch.where(keep, s, -math.inf), rest], -1)
    alive = torch.isfinite(every).any(-1, keepdim=True)
    every = torch.where(alive, every, 0)  # any finite values, replaced below
    o, lse = Softmax.apply(every, v, s.new_ones(()) if factors is None else factors, narrow, order)
    p = torch.exp(every.detach() - lse.detach()[..., None])[..., :-1].masked_fill(~keep, 0)
    return torch.where(alive.transpose(1, 2), o, 0), torch.where(alive[..., 0], lse, -math.inf), p


def in_orders(function):
    """What `function(order)` gives in each: several results at once, each a tuple of all orders' tensors."""
    return [tuple(each) for each in zip(*(function(order) for order in ORDERS))]


FEW = 128  # rows that attend a key; of fewer errors the largest is a matter of luck


def bound(exact, rough, dtype, rows, least=0.0):
    """The accuracy rule (docs/numerics.md): 4 times the largest error of the plain computation in any order (`rough`), 12 times where few
    rows attend a key. That error is at least half an ulp of the largest result, and `least`, where all terms may cancel."""
    finite = torch.isfinite(exact)
    if not finite.any():
        return 0.0
    errors = torch.stack([(each.detach().double() - exact)[finite].abs().max() for each in rough])
    assert not errors.isnan().any(), "the yardstick itself is NaN"
    scale = exact[finite].abs().max().item()
    ulp = torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(scale)) if scale > 0 else 0.0
    return (4 if rows >= FEW else 12) * max(errors.max().item(), ulp / 2, least)


def attending(lse):
    """How many rows, of all sequences and heads, attend a key."""
    return int((lse > -math.inf).sum())


def assert_accurate(name, found, exact, rough, dtype, rows=FEW, least=0.0):
    """`found` against the double-precision `exact`; infinities must agree; a NaN fails. rough: in each order. rows: that attend a
    key. least: as for bound()."""
    assert found.shape == exact.shape, (name, found.shape, exact.shape)
    found = found.detach().double()
    exact = exact.detach()
    finite = torch.isfinite(exact)
    assert torch.equal(found[~finite], exact[~finite]), f"{name}: infinities differ"
    if not finite.any():
        return
    error = (found - exact)[finite].abs().max().item()
    limit = bound(exact, rough, dtype, rows, least)
    assert error <= limit, f"{name}: error {error:.3g} is above {limit:.3g}"


def leaf(x, dtype=None):
    return x.detach().to(dtype or x.dtype).requires_grad_()


def differentiate(function, q, k, v, options, weight, lse_weight, dtype):
    """out, lse and the gradients of sum(out * weight) + sum(finite lse * lse_weight), computed in `dtype`. weight: of values that the
    operands' dtype has."""
    q, k, v = leaf(q, dtype), leaf(k, dtype), leaf(v, dtype)
    options = dict(options)
    inputs = [q, k, v]
    for name, of_dtype in (("bias", dtype), ("sink", torch.promote_types(dtype, torch.float32))):
        if options.get(name) is not None:
            options[name] = leaf(options[name], of_dtype)
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
