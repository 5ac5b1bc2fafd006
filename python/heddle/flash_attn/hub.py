"""FlashAttention's functions as the kernels of the Hub have them: flash_attn's, and sinks, which programs that load such
kernels pass only where a function's own signature has them."""

from __future__ import annotations

from typing import Any

import torch

from ..functional import attention
from .cache import attend_over_cache
from .run import alignment, repeatable

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]


def _sink(s_aux: torch.Tensor | None) -> torch.Tensor | None:
    return None if s_aux is None else s_aux.float()


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
    s_aux: torch.Tensor | None = None,
) -> torch.Tensor:
    """``heddle.flash_attn.flash_attn_func``; s_aux: [H], sinks, one more logit in each row's denominator, with a gradient."""
    return attention(
        q,
        k,
        v,
        dropout_p=dropout_p,
        scale=softmax_scale,
        causal=alignment(causal, "flash_attn_func"),
        window=window_size,
        softcap=softcap,
        deterministic=repeatable(deterministic, "flash_attn_func"),
        sink=_sink(s_aux),
    )


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
    block_table: torch.Tensor | None = None,
    s_aux: torch.Tensor | None = None,
) -> torch.Tensor:
    """``heddle.flash_attn.flash_attn_varlen_func``; max_seqlen_q and max_seqlen_k may be tensors of one element; s_aux as of
    flash_attn_func."""
    keys: dict[str, Any] = dict(cu_seqlens_k=cu_seqlens_k, max_seqlen_k=int(max_seqlen_k))
    if block_table is not None:
        keys = dict(page_table=block_table, seqused_k=cu_seqlens_k.diff())
    return attention(
        q,
        k,
        v,
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=int(max_seqlen_q),
        dropout_p=dropout_p,
        scale=softmax_scale,
        causal=alignment(causal, "flash_attn_varlen_func"),
        window=window_size,
        softcap=softcap,
        deterministic=repeatable(deterministic, "flash_attn_varlen_func"),
        sink=_sink(s_aux),
        **keys,
    )


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    s_aux: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """``heddle.flash_attn.flash_attn_with_kvcache``; s_aux as of flash_attn_func, without a gradient."""
    return attend_over_cache(
        q,
        k_cache,
        v_cache,
        k,
        v,
        rotary_cos,
        rotary_sin,
        cache_seqlens,
        causal,
        rotary_interleaved,
        num_splits,
        return_softmax_lse,
        scale=softmax_scale,
        window=window_size,
        softcap=softcap,
        page_table=block_table,
        cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad,
        sink=_sink(s_aux),
    )
