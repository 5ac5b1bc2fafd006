"""FlashAttention 3's scales of float8_e4m3fn, by sequence and key head, as Heddle's, by what they scale."""

from __future__ import annotations

from typing import Any

import torch

from ..flash_attn.run import sequences_of


def _check(
    operation: str, name: str, scale: Any, data_name: str, data: torch.Tensor, sequences: int, kv_heads: int
) -> None:
    if not isinstance(scale, torch.Tensor):
        raise TypeError(f"[{operation}] {name} is a {type(scale).__name__}: it must be a torch tensor")
    if data.dtype != torch.float8_e4m3fn:
        raise ValueError(
            f"[{operation}] {name} is given and {data_name} is {data.dtype}: scales belong to torch.float8_e4m3fn"
        )
    if tuple(scale.shape) != (sequences, kv_heads) or scale.dtype != torch.float32:
        raise ValueError(
            f"[{operation}] {name} is {scale.dtype} {list(scale.shape)}: it must be torch.float32 [B, Hkv] = "
            f"[{sequences}, {kv_heads}]"
        )


def _for_all_sequences(scale: torch.Tensor) -> torch.Tensor | None:
    """[1, Hkv] where one row was expanded over all sequences, or there is one; else None."""
    return scale[:1] if scale.shape[0] == 1 or scale.stride(0) == 0 else None


def descale_by_sequence(
    operation: str,
    name: str,
    scale: torch.Tensor | None,
    data_name: str,
    data: torch.Tensor,
    heads: int,
    kv_heads: int,
    cu_seqlens: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Of q, or of k and v that are no cache: [B, S, heads, D], or with cu_seqlens packed [total, heads, D]."""
    if scale is None:
        return None
    sequences = data.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    _check(operation, name, scale, data_name, data, sequences, kv_heads)
    by_head = scale.repeat_interleave(heads // max(kv_heads, 1), 1) if heads != kv_heads else scale
    if cu_seqlens is None:
        return by_head[:, None]
    if _for_all_sequences(scale) is not None:
        return by_head[:1]
    return by_head[sequences_of(cu_seqlens, data.shape[0])]


def descale_of_cache(
    operation: str,
    name: str,
    scale: torch.Tensor | None,
    cache_name: str,
    cache: torch.Tensor,
    sequences: int,
    moved: str | None,
    appends: bool,
) -> torch.Tensor | None:
    """Of a cache [.., .., Hkv, D]. moved: the argument that says which rows or pages of it are a sequence's, or
    None."""
    if scale is None:
        return None
    _check(operation, name, scale, cache_name, cache, sequences, cache.shape[2])
    shared = _for_all_sequences(scale)
    if shared is not None:
        return shared[:, None]
    if moved is not None or appends:
        beside = f"beside {moved}" if moved is not None else "with new keys to append"
        raise ValueError(
            f"[{operation}] {name} has {sequences} rows {beside}: scales of a cache must be the same for all sequences "
            "there, [1, Hkv] expanded to [B, Hkv]; heddle.attention takes one for each slot of the cache"
        )
    return scale[:, None]
