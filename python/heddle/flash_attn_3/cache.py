"""FlashAttention 3's attention over caches. heddle.flash_attn_3 is the public name."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch

from ..flash_attn.cache import attend_over_cache
from .descale import descale_by_sequence, descale_of_cache
from .rules import refuse_unserved

_NAME = "flash_attn_with_kvcache"


# fmt: off
@overload
def flash_attn_with_kvcache(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor | None = ...,
    v: torch.Tensor | None = ..., qv: None = ..., rotary_cos: torch.Tensor | None = ...,
    rotary_sin: torch.Tensor | None = ..., cache_seqlens: int | torch.Tensor | None = ...,
    cache_batch_idx: torch.Tensor | None = ..., cache_leftpad: torch.Tensor | None = ...,
    page_table: torch.Tensor | None = ..., cu_seqlens_q: torch.Tensor | None = ..., cu_seqlens_k_new: None = ...,
    max_seqlen_q: int | None = ..., rotary_seqlens: None = ..., q_descale: torch.Tensor | None = ...,
    k_descale: torch.Tensor | None = ..., v_descale: torch.Tensor | None = ..., softmax_scale: float | None = ...,
    causal: bool = ..., window_size: tuple[int, int] = ..., attention_chunk: int = ..., softcap: float = ...,
    rotary_interleaved: bool = ..., scheduler_metadata: None = ..., num_splits: int = ..., pack_gqa: bool | None = ...,
    sm_margin: int = ..., return_softmax_lse: Literal[False] = ...,
) -> torch.Tensor: ...
@overload
def flash_attn_with_kvcache(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor | None = ...,
    v: torch.Tensor | None = ..., qv: None = ..., rotary_cos: torch.Tensor | None = ...,
    rotary_sin: torch.Tensor | None = ..., cache_seqlens: int | torch.Tensor | None = ...,
    cache_batch_idx: torch.Tensor | None = ..., cache_leftpad: torch.Tensor | None = ...,
    page_table: torch.Tensor | None = ..., cu_seqlens_q: torch.Tensor | None = ..., cu_seqlens_k_new: None = ...,
    max_seqlen_q: int | None = ..., rotary_seqlens: None = ..., q_descale: torch.Tensor | None = ...,
    k_descale: torch.Tensor | None = ..., v_descale: torch.Tensor | None = ..., softmax_scale: float | None = ...,
    causal: bool = ..., window_size: tuple[int, int] = ..., attention_chunk: int = ..., softcap: float = ...,
    rotary_interleaved: bool = ..., scheduler_metadata: None = ..., num_splits: int = ..., pack_gqa: bool | None = ...,
    sm_margin: int = ..., *, return_softmax_lse: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def flash_attn_with_kvcache(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor | None = ...,
    v: torch.Tensor | None = ..., qv: None = ..., rotary_cos: torch.Tensor | None = ...,
    rotary_sin: torch.Tensor | None = ..., cache_seqlens: int | torch.Tensor | None = ...,
    cache_batch_idx: torch.Tensor | None = ..., cache_leftpad: torch.Tensor | None = ...,
    page_table: torch.Tensor | None = ..., cu_seqlens_q: torch.Tensor | None = ..., cu_seqlens_k_new: None = ...,
    max_seqlen_q: int | None = ..., rotary_seqlens: None = ..., q_descale: torch.Tensor | None = ...,
    k_descale: torch.Tensor | None = ..., v_descale: torch.Tensor | None = ..., softmax_scale: float | None = ...,
    causal: bool = ..., window_size: tuple[int, int] = ..., attention_chunk: int = ..., softcap: float = ...,
    rotary_interleaved: bool = ..., scheduler_metadata: None = ..., num_splits: int = ..., pack_gqa: bool | None = ...,
    sm_margin: int = ..., return_softmax_lse: bool = ...,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...
# fmt: on
def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    qv: None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Attention over a cache, after appending k and v to it in place. For inference: no gradient.

    Args:
      q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, rotary_interleaved, cache_seqlens, cache_batch_idx,
        cache_leftpad, softmax_scale, causal, window_size, softcap, num_splits: as
        ``heddle.flash_attn.flash_attn_with_kvcache``.
      page_table: int32 [B, max_pages]; k_cache and v_cache are then pages [pages, page_size, Hkv, D or Dv], of any page
        size.
      cu_seqlens_q: int32 [B + 1]: q is packed, [total_q, H, D]; then without k and v. max_seqlen_q: the longest, to be
        given on a GPU.
      rotary_seqlens: cache_seqlens itself is taken too.
      The others: see the module's text.

    Returns:
      out [B, Sq, H, Dv], packed [total_q, H, Dv]; with return_softmax_lse (out, softmax_lse float32 [B, H, Sq], packed
      [H, total_q]).

    Raises:
      ValueError: a bad argument, one that is not served, a tensor that requires a gradient, or an append beyond the
        cache; as there. TypeError: a flag that is no bool.
    """
    refuse_unserved(
        _NAME,
        num_splits=num_splits,
        pack_gqa=pack_gqa,
        qv=qv,
        attention_chunk=attention_chunk,
        sm_margin=sm_margin,
        scheduler_metadata=scheduler_metadata,
        cu_seqlens_k_new=cu_seqlens_k_new,
        rotary_seqlens=None if rotary_seqlens is cache_seqlens else rotary_seqlens,
    )
    if k is not None and cu_seqlens_q is not None:
        raise ValueError(
            f"[{_NAME}] k is given beside cu_seqlens_q: new keys are appended for q of [B, Sq, H, D]; append them "
            "before, with heddle.append_kv_cache"
        )
    if k is not None and k.dtype == torch.float8_e4m3fn:
        raise ValueError(
            f"[{_NAME}] k is torch.float8_e4m3fn: new keys must have 16 bits; they are rounded into the cache"
        )
    options: dict[str, Any] = {}
    if cu_seqlens_q is not None:
        options.update(cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q)
    if q_descale is not None or k_descale is not None or v_descale is not None:
        sequences = q.shape[0] if cu_seqlens_q is None else len(cu_seqlens_q) - 1
        moved = "page_table" if page_table is not None else "cache_batch_idx" if cache_batch_idx is not None else None
        options["q_scale"] = descale_by_sequence(
            _NAME, "q_descale", q_descale, "q", q, q.shape[-2], k_cache.shape[2], cu_seqlens_q
        )
        for name, scale, cache in (("k", k_descale, k_cache), ("v", v_descale, v_cache)):
            options[f"{name}_scale"] = descale_of_cache(
                _NAME, f"{name}_descale", scale, f"{name}_cache", cache, sequences, moved, k is not None
            )
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
        page_table=page_table,
        cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad,
        **options,
    )
