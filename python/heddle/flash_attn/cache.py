"""FlashAttention 2's attention over caches, and what it has in common with FlashAttention 3's. heddle.flash_attn and
heddle.flash_attn_3 are the public names."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch

from .._options import flag
from ..functional import attention
from ..hosts.torch.checks import refuse_gradients
from ..kv_cache import attention_with_kv_cache
from .run import alignment

_NAME = "flash_attn_with_kvcache"


def _check(k: Any, v: Any, rotary_cos: Any, rotary_sin: Any, cache_seqlens: Any, num_splits: int) -> None:
    if not num_splits >= 0:
        raise ValueError(f"[{_NAME}] num_splits is {num_splits}: it must be at least 0 (0: free choice)")
    if (k is None) != (v is None):
        raise ValueError(f"[{_NAME}] k and v must be given together")
    if (rotary_cos is None) != (rotary_sin is None):
        raise ValueError(f"[{_NAME}] rotary_cos and rotary_sin must be given together")
    if k is None and rotary_cos is not None:
        raise ValueError(f"[{_NAME}] rotary_cos is given and k is not: rotary needs new keys to append")
    if k is not None and cache_seqlens is None:
        raise ValueError(f"[{_NAME}] k is given and cache_seqlens is not: say where to append")


def attend_over_cache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    rotary_cos: torch.Tensor | None,
    rotary_sin: torch.Tensor | None,
    cache_seqlens: int | torch.Tensor | None,
    causal: bool,
    rotary_interleaved: bool,
    num_splits: int,
    return_softmax_lse: bool,
    **options: Any,
) -> Any:
    """The call, by FlashAttention's names; options: what heddle.attention has besides, by its names."""
    _check(k, v, rotary_cos, rotary_sin, cache_seqlens, num_splits)
    if rotary_interleaved is not True:
        rotary_interleaved = flag(_NAME, "rotary_interleaved", rotary_interleaved)
    if return_softmax_lse is not False:
        return_softmax_lse = flag(_NAME, "return_softmax_lse", return_softmax_lse)
    names: tuple[str, ...] = ("q", "k_cache", "v_cache", "alibi_slopes")
    tensors: tuple[Any, ...] = (q, k_cache, v_cache, options.get("alibi_slopes"))
    if k is not None:
        names, tensors = (*names, "k", "v", "rotary_cos", "rotary_sin"), (*tensors, k, v, rotary_cos, rotary_sin)
    refuse_gradients(_NAME, names, tensors)
    if isinstance(cache_seqlens, int):
        sequences = q.shape[0] if options.get("cu_seqlens_q") is None else len(options["cu_seqlens_q"]) - 1
        cache_seqlens = torch.full((sequences,), cache_seqlens, dtype=torch.int32, device=q.device)
    options.update(causal=alignment(causal, _NAME), batch_invariant=num_splits == 1, return_lse=return_softmax_lse)
    if k is None:
        return attention(q, k_cache, v_cache, seqused_k=cache_seqlens, **options)
    options.update(rotary_cos=rotary_cos, rotary_sin=rotary_sin, interleaved=rotary_interleaved)
    assert v is not None and cache_seqlens is not None  # as _check() found
    return attention_with_kv_cache(q, k, v, k_cache, v_cache, cache_seqlens, **options)


# fmt: off
@overload
def flash_attn_with_kvcache(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor | None = ...,
    v: torch.Tensor | None = ..., rotary_cos: torch.Tensor | None = ..., rotary_sin: torch.Tensor | None = ...,
    cache_seqlens: int | torch.Tensor | None = ..., cache_batch_idx: torch.Tensor | None = ...,
    cache_leftpad: torch.Tensor | None = ..., block_table: torch.Tensor | None = ...,
    softmax_scale: float | None = ..., causal: bool = ..., window_size: tuple[int, int] = ..., softcap: float = ...,
    rotary_interleaved: bool = ..., alibi_slopes: torch.Tensor | None = ..., num_splits: int = ...,
    return_softmax_lse: Literal[False] = ...,
) -> torch.Tensor: ...
@overload
def flash_attn_with_kvcache(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor | None = ...,
    v: torch.Tensor | None = ..., rotary_cos: torch.Tensor | None = ..., rotary_sin: torch.Tensor | None = ...,
    cache_seqlens: int | torch.Tensor | None = ..., cache_batch_idx: torch.Tensor | None = ...,
    cache_leftpad: torch.Tensor | None = ..., block_table: torch.Tensor | None = ...,
    softmax_scale: float | None = ..., causal: bool = ..., window_size: tuple[int, int] = ..., softcap: float = ...,
    rotary_interleaved: bool = ..., alibi_slopes: torch.Tensor | None = ..., num_splits: int = ..., *,
    return_softmax_lse: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def flash_attn_with_kvcache(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor | None = ...,
    v: torch.Tensor | None = ..., rotary_cos: torch.Tensor | None = ..., rotary_sin: torch.Tensor | None = ...,
    cache_seqlens: int | torch.Tensor | None = ..., cache_batch_idx: torch.Tensor | None = ...,
    cache_leftpad: torch.Tensor | None = ..., block_table: torch.Tensor | None = ...,
    softmax_scale: float | None = ..., causal: bool = ..., window_size: tuple[int, int] = ..., softcap: float = ...,
    rotary_interleaved: bool = ..., alibi_slopes: torch.Tensor | None = ..., num_splits: int = ...,
    return_softmax_lse: bool = ...,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...
# fmt: on
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
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Attention over a cache, after appending k and v to it in place. For inference: no gradient.

    Args:
      q: [B, Sq, H, D].
      k_cache, v_cache: [Bc, Smax, Hkv, D or Dv]; with block_table pages [blocks, page_size, Hkv, D or Dv], of any page
        size.
      k, v: [B, Sn, Hkv, D or Dv], written at positions cache_seqlens[b] .. cache_seqlens[b] + Sn - 1 first; both or
        none.
      rotary_cos, rotary_sin: [max_position, R / 2]. Rotate k by its position. q is rotated at positions
        cache_seqlens[b] + i if causal or windowed, else all rows at cache_seqlens[b]. Only with k.
      cache_seqlens: int, or int32 [B]: keys in the cache before the append. None: the whole cache; not with k.
      cache_batch_idx: int32 [B], each sequence's row of the cache (not with block_table).
      cache_leftpad: int32 [B], slots to skip at the beginning of each sequence's cache.
      block_table: int32 [B, max_blocks].
      softmax_scale, causal, window_size, softcap, alibi_slopes: as flash_attn_func; Sk is the length after the append.
      rotary_interleaved: rotate pairs (0, 1), (2, 3), ...; else halves.
      num_splits: 1 asks for bits that do not depend on the rest of the batch (``batch_invariant``); 0 and more than 1
        leave the splitting of the keys to Heddle.
      return_softmax_lse: return (out, softmax_lse float32 [B, H, Sq]).

    Returns:
      out [B, Sq, H, Dv].

    Raises:
      ValueError: a bad argument, a tensor that requires a gradient (where FlashAttention drops it: make the call under
        ``torch.no_grad()`` or detach it), or an append beyond the cache, which leaves the cache as it was. (On a GPU
        lengths are not read before: rows beyond the cache are dropped.)
    """
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
        alibi_slopes=alibi_slopes,
        page_table=block_table,
        cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad,
    )
