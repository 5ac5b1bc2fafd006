"""Partial results of attention joined. heddle.flash_attn_3 is the public name."""

from __future__ import annotations

import math

import torch

from ..hosts.torch.checks import check_tensors, one_device, refuse_gradients

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def flash_attn_combine(
    out_partial: torch.Tensor,
    lse_partial: torch.Tensor,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over all keys from attention over parts of them. For inference: no gradient.

    Args:
      out_partial: float32 [parts, B, Sq, H, Dv], packed [parts, total_q, H, Dv]: each part's result.
      lse_partial: float32 [parts, B, Sq, H], packed [parts, total_q, H]: the log-sum-exp of each row's scores; -inf
        where a part has no key for a row, whose values are then not read.
      out: where to write the result; made if None.
      out_dtype: torch.float32, float16 or bfloat16; out's if None, float32 without out.

    Returns:
      (out [B, Sq, H, Dv], softmax_lse float32 [B, Sq, H]), packed without B. Rows without a key in any part give 0 and
      -inf.

    Raises:
      ValueError: a bad argument, or one that requires a gradient. TypeError: no torch tensor.
    """
    operation, names = "flash_attn_combine", ("out_partial", "lse_partial", "out")
    check_tensors(operation, names, (out_partial, lse_partial, out))
    one_device(operation, names, (out_partial, lse_partial, out))
    refuse_gradients(operation, names, (out_partial, lse_partial, out))
    if out_partial.dim() not in (4, 5) or lse_partial.shape != out_partial.shape[:-1]:
        raise ValueError(
            f"[{operation}] out_partial is {list(out_partial.shape)} and lse_partial is {list(lse_partial.shape)}: "
            "they must be [parts, B, Sq, H, Dv] and [parts, B, Sq, H], or packed without B"
        )
    for name, x in (("out_partial", out_partial), ("lse_partial", lse_partial)):
        if x.dtype != torch.float32:
            raise ValueError(f"[{operation}] {name} is {x.dtype}: it must be torch.float32")
    dtype = out_dtype or (torch.float32 if out is None else out.dtype)
    if dtype not in _DTYPES:
        raise ValueError(
            f"[{operation}] out_dtype is {dtype}: it must be torch.float32, torch.float16 or torch.bfloat16"
        )
    if out is not None and (out.shape != out_partial.shape[1:] or out.dtype != dtype):
        raise ValueError(
            f"[{operation}] out is {out.dtype} {list(out.shape)}: it must be {dtype} {list(out_partial.shape[1:])}"
        )
    with torch.no_grad():
        lse = torch.logsumexp(lse_partial, 0)
        # A row without any key, and not a difference of infinities.
        weights = torch.where(lse_partial > -math.inf, torch.exp(lse_partial - lse), 0)[..., None]
        joined = torch.where(weights > 0, out_partial * weights, 0).sum(0).to(dtype)
    if out is None:
        return joined, lse
    out.copy_(joined)
    return out, lse
