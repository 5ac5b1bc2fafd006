"""FlashAttention 2's functions over packed sequences. heddle.flash_attn is their public name."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch

from .run import alignment, repeatable, with_probabilities


# fmt: off
@overload
def flash_attn_varlen_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int, max_seqlen_k: int, dropout_p: float = ..., softmax_scale: float | None = ...,
    causal: bool = ..., window_size: tuple[int, int] = ..., softcap: float = ...,
    alibi_slopes: torch.Tensor | None = ..., deterministic: bool = ..., return_attn_probs: Literal[False] = ...,
    block_table: torch.Tensor | None = ...,
) -> torch.Tensor: ...
@overload
def flash_attn_varlen_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int, max_seqlen_k: int, dropout_p: float = ..., softmax_scale: float | None = ...,
    causal: bool = ..., window_size: tuple[int, int] = ..., softcap: float = ...,
    alibi_slopes: torch.Tensor | None = ..., deterministic: bool = ..., *, return_attn_probs: Literal[True],
    block_table: torch.Tensor | None = ...,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...
@overload
def flash_attn_varlen_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int, max_seqlen_k: int, dropout_p: float = ..., softmax_scale: float | None = ...,
    causal: bool = ..., window_size: tuple[int, int] = ..., softcap: float = ...,
    alibi_slopes: torch.Tensor | None = ..., deterministic: bool = ..., return_attn_probs: bool = ...,
    block_table: torch.Tensor | None = ...,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...
# fmt: on
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
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> Any:
    """flash_attn_func over packed sequences: q [total_q, H, D], k [total_k, Hkv, D], v [total_k, Hkv, Dv].

    Args:
      cu_seqlens_q, cu_seqlens_k: int32 [B + 1], starts of the sequences, from 0 to the total.
      max_seqlen_q, max_seqlen_k: upper bounds of the lengths.
      block_table: int32 [B, max_blocks]; k and v are then pages [blocks, page_size, Hkv, D or Dv] of any page size, and
        cu_seqlens_k gives the lengths. No gradient then.
      return_attn_probs: return (out, softmax_lse float32 [H, total_q], S_dmask).

    Returns:
      out [total_q, H, Dv].

    Raises:
      ValueError: a bad argument.
    """
    options = dict(
        scale=softmax_scale,
        causal=alignment(causal),
        window=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        deterministic=repeatable(deterministic),
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=max_seqlen_q,
    )
    if block_table is None:
        options.update(cu_seqlens_k=cu_seqlens_k, max_seqlen_k=max_seqlen_k)
    else:
        options.update(page_table=block_table, seqused_k=cu_seqlens_k.diff())
    return with_probabilities(q, k, v, dropout_p, return_attn_probs, **options)


# fmt: off
@overload
def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor, kv: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, max_seqlen_q: int,
    max_seqlen_k: int, dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ...,
    window_size: tuple[int, int] = ..., softcap: float = ..., alibi_slopes: torch.Tensor | None = ...,
    deterministic: bool = ..., return_attn_probs: Literal[False] = ...,
) -> torch.Tensor: ...
@overload
def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor, kv: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, max_seqlen_q: int,
    max_seqlen_k: int, dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ...,
    window_size: tuple[int, int] = ..., softcap: float = ..., alibi_slopes: torch.Tensor | None = ...,
    deterministic: bool = ..., *, return_attn_probs: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...
@overload
def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor, kv: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, max_seqlen_q: int,
    max_seqlen_k: int, dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ...,
    window_size: tuple[int, int] = ..., softcap: float = ..., alibi_slopes: torch.Tensor | None = ...,
    deterministic: bool = ..., return_attn_probs: bool = ...,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...
# fmt: on
def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """flash_attn_varlen_func with k and v in one tensor, kv [total_k, 2, Hkv, D]."""
    k, v = kv.unbind(1)
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


# fmt: off
@overload
def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int, dropout_p: float = ...,
    softmax_scale: float | None = ..., causal: bool = ..., window_size: tuple[int, int] = ..., softcap: float = ...,
    alibi_slopes: torch.Tensor | None = ..., deterministic: bool = ..., return_attn_probs: Literal[False] = ...,
) -> torch.Tensor: ...
@overload
def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int, dropout_p: float = ...,
    softmax_scale: float | None = ..., causal: bool = ..., window_size: tuple[int, int] = ..., softcap: float = ...,
    alibi_slopes: torch.Tensor | None = ..., deterministic: bool = ..., *, return_attn_probs: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...
@overload
def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int, dropout_p: float = ...,
    softmax_scale: float | None = ..., causal: bool = ..., window_size: tuple[int, int] = ..., softcap: float = ...,
    alibi_slopes: torch.Tensor | None = ..., deterministic: bool = ..., return_attn_probs: bool = ...,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...
# fmt: on
def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """flash_attn_varlen_func with q, k and v in one tensor, qkv [total, 3, H, D]."""
    q, k, v = qkv.unbind(1)
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )
