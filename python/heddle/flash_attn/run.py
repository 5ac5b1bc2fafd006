"""What FlashAttention's functions have in common on Heddle's kernels. heddle.flash_attn and heddle.flash_attn_3 are the
public names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .._options import flag
from ..functional import attention
from ..hosts.torch import functional as _torch
from ..hosts.torch.operators import seed_tensor

if TYPE_CHECKING:
    from .._types import CausalName

_KEYS_AT_ONCE = 256  # the largest head size: v as a piece of the identity


def alignment(causal: Any, operation: str = "flash_attn") -> CausalName:
    """heddle.attention's causal for FlashAttention's."""
    if causal is not True and causal is not False:
        causal = flag(operation, "causal", causal)
    return "bottom_right" if causal else "none"


def repeatable(deterministic: Any, operation: str = "flash_attn") -> bool | None:
    """heddle.attention's deterministic: False leaves it to torch.use_deterministic_algorithms."""
    return None if deterministic is False else flag(operation, "deterministic", deterministic) or None


def sequences_of(cu_seqlens: torch.Tensor, total: int) -> torch.Tensor:
    """Of each packed row the number of its sequence. Nothing is read on the host, whatever cu_seqlens holds."""
    rows = torch.arange(total, device=cu_seqlens.device)
    last = cu_seqlens.shape[0] - 2
    return torch.searchsorted(cu_seqlens[1:].long(), rows, right=True).clamp(max=last)


def _local_positions(cu_seqlens: torch.Tensor, total: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each packed row: its sequence, and its position there."""
    sequence = sequences_of(cu_seqlens, total)
    return sequence, torch.arange(total, device=cu_seqlens.device) - cu_seqlens.long()[sequence]


def _dropout_matrix(
    q: torch.Tensor,
    k: torch.Tensor,
    seed: torch.Tensor,
    drop: float,
    options: dict[str, Any],
    max_seqlen_q: Any = None,
    max_seqlen_k: Any = None,
) -> torch.Tensor:
    """S_dmask: softmax probabilities, negative where dropped. Attention over v = identity gives its columns."""
    cu_q: Any = options.get("cu_seqlens_q")
    cu_k: Any = options.get("cu_seqlens_k")
    with torch.no_grad():
        if cu_k is None:
            batch, rows, heads, keys = q.shape[0], q.shape[1], q.shape[2], k.shape[1]
            position = torch.arange(keys, device=q.device).expand(batch, keys)
        else:
            batch, rows, heads, keys = len(cu_q) - 1, max_seqlen_q, q.shape[1], max_seqlen_k
            _, position = _local_positions(cu_k, k.shape[0])
        # Rows of 16 bytes' multiples, as kernels on GPUs take them.
        columns = torch.arange((keys + 7) // 8 * 8, device=q.device)
        identity = (position[..., None] == columns).to(q.dtype).unsqueeze(-2).expand(*k.shape[:-1], len(columns))
        parts = [
            attention(q, k, identity[..., begin : begin + _KEYS_AT_ONCE], **options)
            for begin in range(0, keys, _KEYS_AT_ONCE)
        ]
        probabilities = torch.cat(parts, dim=-1)[..., :keys] if parts else q.new_zeros((*q.shape[:-1], 0))
        if cu_k is not None:
            padded = q.new_zeros((batch, rows, heads, keys))
            padded[_local_positions(cu_q, q.shape[0])] = probabilities
            probabilities = padded
        probabilities = probabilities.permute(0, 2, 1, 3)
        kept = _torch.dropout_keep((batch, heads, rows, keys), drop, seed, q.device)
        return torch.where(kept, probabilities, -probabilities)


def with_probabilities(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float, return_attn_probs: bool, **options: Any
) -> Any:
    """attention(), with FlashAttention 2's three results if asked for."""
    if return_attn_probs is not True and not flag("flash_attn", "return_attn_probs", return_attn_probs):
        return attention(q, k, v, dropout_p=dropout_p, **options)
    if dropout_p == 0.0:
        out, lse = attention(q, k, v, return_lse=True, **options)
        return out, lse, q.new_empty(0)
    if options.get("page_table") is not None:
        raise ValueError(
            "[flash_attn] return_attn_probs with dropout does not take a block_table: gather the keys first"
        )
    seed = seed_tensor(None)
    out, lse = attention(q, k, v, dropout_p=dropout_p, dropout_seed=seed, return_lse=True, **options)
    longest = (options["max_seqlen_q"], options["max_seqlen_k"]) if "max_seqlen_q" in options else ()
    return out, lse, _dropout_matrix(q, k, seed, dropout_p, options, *longest)
