"""FlashAttention 3's functions, names, arguments and defaults, on Heddle's kernels.

As ``heddle.flash_attn``, which has FlashAttention 2's, on the CPU and on every GPU that Heddle runs on: torch tensors,
[B, S, H, D] or packed [total, H, D], float32 too, ``causal`` aligned to the bottom-right corner, gradients of q, k and
v except over caches. On Hopper GPUs q, k and v may be torch.float8_e4m3fn, with a bfloat16 result and no gradient;
k_cache and v_cache may be so everywhere, beside q in 16 bits: on GPUs for up to 16 queries a sequence.

- ``q_descale``, ``k_descale``, ``v_descale``: float32 [B, Hkv], beside float8_e4m3fn; a stored x stands for x * scale.
  Of a cache in pages, with ``cache_batch_idx`` or with new keys they must be the same for all sequences: [1, Hkv]
  expanded to [B, Hkv]. New keys have q's dtype, 16 bits, and are rounded into such a cache.
- ``pack_gqa`` (None or a bool) changes no result and nothing here: grouped heads always share their keys' reads.
- ``num_splits``, at least 0: Heddle decides how keys are split. Over a cache 1 asks for bits that do not depend on the
  rest of the batch; elsewhere ``heddle.attention`` has ``batch_invariant``.
- ``qv``, ``attention_chunk``, ``sm_margin``, ``scheduler_metadata``, ``cu_seqlens_k_new`` and ``rotary_seqlens`` are
  refused with a ValueError, unless they are the default.

``return_attn_probs=True`` and ``return_softmax_lse=True`` give (out, softmax_lse), softmax_lse float32 [B, H, Sq],
packed [H, total_q].

Source of the interface: Shah et al., arXiv 2407.08608, and its module flash_attn_interface.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

from .._options import flag
from ..flash_attn.run import alignment, repeatable
from ..functional import attention
from ..hosts import torch as _needs_torch  # noqa: F401
from .cache import flash_attn_with_kvcache
from .combine import flash_attn_combine
from .descale import descale_by_sequence
from .rules import refuse_unserved

if TYPE_CHECKING:
    import torch

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
]


def __dir__() -> list[str]:
    return __all__


# fmt: off
@overload
def flash_attn_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float | None = ..., causal: bool = ...,
    qv: None = ..., q_descale: torch.Tensor | None = ..., k_descale: torch.Tensor | None = ...,
    v_descale: torch.Tensor | None = ..., window_size: tuple[int, int] = ..., attention_chunk: int = ...,
    softcap: float = ..., num_splits: int = ..., pack_gqa: bool | None = ..., deterministic: bool = ...,
    sm_margin: int = ..., return_attn_probs: Literal[False] = ...,
) -> torch.Tensor: ...
@overload
def flash_attn_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float | None = ..., causal: bool = ...,
    qv: None = ..., q_descale: torch.Tensor | None = ..., k_descale: torch.Tensor | None = ...,
    v_descale: torch.Tensor | None = ..., window_size: tuple[int, int] = ..., attention_chunk: int = ...,
    softcap: float = ..., num_splits: int = ..., pack_gqa: bool | None = ..., deterministic: bool = ...,
    sm_margin: int = ..., *, return_attn_probs: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def flash_attn_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float | None = ..., causal: bool = ...,
    qv: None = ..., q_descale: torch.Tensor | None = ..., k_descale: torch.Tensor | None = ...,
    v_descale: torch.Tensor | None = ..., window_size: tuple[int, int] = ..., attention_chunk: int = ...,
    softcap: float = ..., num_splits: int = ..., pack_gqa: bool | None = ..., deterministic: bool = ...,
    sm_margin: int = ..., return_attn_probs: bool = ...,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...
# fmt: on
def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """Attention of q [B, Sq, H, D] over k [B, Sk, Hkv, D], v [B, Sk, Hkv, Dv]; H a multiple of Hkv.

    Args:
      softmax_scale, causal, window_size, softcap, deterministic: as ``heddle.flash_attn.flash_attn_func``.
      The others: see the module's text.

    Returns:
      out [B, Sq, H, Dv]; with return_attn_probs (out, softmax_lse float32 [B, H, Sq]).

    Raises:
      ValueError: a bad argument, or one that is not served; the message names it. TypeError: a flag that is no bool.
    """
    return _attend(
        "flash_attn_func",
        q,
        k,
        v,
        (q_descale, k_descale, v_descale),
        dict(qv=qv, attention_chunk=attention_chunk, num_splits=num_splits, pack_gqa=pack_gqa, sm_margin=sm_margin),
        return_attn_probs,
        scale=softmax_scale,
        causal=alignment(causal, "flash_attn_func"),
        window=window_size,
        softcap=softcap,
        deterministic=repeatable(deterministic, "flash_attn_func"),
    )


# fmt: off
@overload
def flash_attn_qkvpacked_func(
    qkv: torch.Tensor, softmax_scale: float | None = ..., causal: bool = ..., q_descale: torch.Tensor | None = ...,
    k_descale: torch.Tensor | None = ..., v_descale: torch.Tensor | None = ..., window_size: tuple[int, int] = ...,
    attention_chunk: int = ..., softcap: float = ..., deterministic: bool = ..., num_heads_q: int | None = ...,
    sm_margin: int = ..., return_attn_probs: Literal[False] = ...,
) -> torch.Tensor: ...
@overload
def flash_attn_qkvpacked_func(
    qkv: torch.Tensor, softmax_scale: float | None = ..., causal: bool = ..., q_descale: torch.Tensor | None = ...,
    k_descale: torch.Tensor | None = ..., v_descale: torch.Tensor | None = ..., window_size: tuple[int, int] = ...,
    attention_chunk: int = ..., softcap: float = ..., deterministic: bool = ..., num_heads_q: int | None = ...,
    sm_margin: int = ..., *, return_attn_probs: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def flash_attn_qkvpacked_func(
    qkv: torch.Tensor, softmax_scale: float | None = ..., causal: bool = ..., q_descale: torch.Tensor | None = ...,
    k_descale: torch.Tensor | None = ..., v_descale: torch.Tensor | None = ..., window_size: tuple[int, int] = ...,
    attention_chunk: int = ..., softcap: float = ..., deterministic: bool = ..., num_heads_q: int | None = ...,
    sm_margin: int = ..., return_attn_probs: bool = ...,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...
# fmt: on
def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """flash_attn_func with q, k and v in one tensor, qkv [B, S, 3, H, D], or [B, S, H + 2 Hkv, D] with num_heads_q
    H."""
    if qkv.dim() == 5:
        q, k, v = qkv.unbind(2)
    else:
        rest = qkv.shape[2] - num_heads_q if qkv.dim() == 4 and num_heads_q is not None else -1
        if rest < 0 or rest % 2 != 0:
            raise ValueError(
                f"[flash_attn_qkvpacked_func] qkv is {list(qkv.shape)} and num_heads_q is {num_heads_q}: qkv must be "
                "[B, S, 3, H, D], or [B, S, H + 2 Hkv, D] with num_heads_q H"
            )
        q, k, v = qkv.split((num_heads_q, rest // 2, rest // 2), 2)
    return flash_attn_func(
        q,
        k,
        v,
        softmax_scale,
        causal,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        window_size=window_size,
        attention_chunk=attention_chunk,
        softcap=softcap,
        deterministic=deterministic,
        sm_margin=sm_margin,
        return_attn_probs=return_attn_probs,
    )


# fmt: off
@overload
def flash_attn_varlen_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int, max_seqlen_k: int, seqused_q: torch.Tensor | None = ..., seqused_k: torch.Tensor | None = ...,
    softmax_scale: float | None = ..., causal: bool = ..., qv: None = ..., q_descale: torch.Tensor | None = ...,
    k_descale: torch.Tensor | None = ..., v_descale: torch.Tensor | None = ..., window_size: tuple[int, int] = ...,
    attention_chunk: int = ..., softcap: float = ..., num_splits: int = ..., pack_gqa: bool | None = ...,
    deterministic: bool = ..., sm_margin: int = ..., return_attn_probs: Literal[False] = ...,
) -> torch.Tensor: ...
@overload
def flash_attn_varlen_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int, max_seqlen_k: int, seqused_q: torch.Tensor | None = ..., seqused_k: torch.Tensor | None = ...,
    softmax_scale: float | None = ..., causal: bool = ..., qv: None = ..., q_descale: torch.Tensor | None = ...,
    k_descale: torch.Tensor | None = ..., v_descale: torch.Tensor | None = ..., window_size: tuple[int, int] = ...,
    attention_chunk: int = ..., softcap: float = ..., num_splits: int = ..., pack_gqa: bool | None = ...,
    deterministic: bool = ..., sm_margin: int = ..., *, return_attn_probs: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def flash_attn_varlen_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int, max_seqlen_k: int, seqused_q: torch.Tensor | None = ..., seqused_k: torch.Tensor | None = ...,
    softmax_scale: float | None = ..., causal: bool = ..., qv: None = ..., q_descale: torch.Tensor | None = ...,
    k_descale: torch.Tensor | None = ..., v_descale: torch.Tensor | None = ..., window_size: tuple[int, int] = ...,
    attention_chunk: int = ..., softcap: float = ..., num_splits: int = ..., pack_gqa: bool | None = ...,
    deterministic: bool = ..., sm_margin: int = ..., return_attn_probs: bool = ...,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...
# fmt: on
def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """flash_attn_func over packed sequences: q [total_q, H, D], k [total_k, Hkv, D], v [total_k, Hkv, Dv].

    Args:
      cu_seqlens_q, cu_seqlens_k: int32 [B + 1], starts of the sequences, from 0 to the total.
      max_seqlen_q, max_seqlen_k: upper bounds of the lengths.
      seqused_q, seqused_k: int32 [B], rows and keys in use of each sequence.

    Returns:
      out [total_q, H, Dv]; with return_attn_probs (out, softmax_lse float32 [H, total_q]).

    Raises:
      ValueError: a bad argument, or one that is not served; the message names it. TypeError: a flag that is no bool.
    """
    return _attend(
        "flash_attn_varlen_func",
        q,
        k,
        v,
        (q_descale, k_descale, v_descale),
        dict(qv=qv, attention_chunk=attention_chunk, num_splits=num_splits, pack_gqa=pack_gqa, sm_margin=sm_margin),
        return_attn_probs,
        scale=softmax_scale,
        causal=alignment(causal, "flash_attn_varlen_func"),
        window=window_size,
        softcap=softcap,
        deterministic=repeatable(deterministic, "flash_attn_varlen_func"),
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
    )


def _attend(
    operation: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    descales: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None],
    others: dict[str, Any],
    return_attn_probs: bool,
    **options: Any,
) -> Any:
    refuse_unserved(operation, **others)
    cu_q, cu_k = options.get("cu_seqlens_q"), options.get("cu_seqlens_k")
    if any(scale is not None for scale in descales):
        kv_heads = k.shape[-2]
        for name, scale, data, heads, cu in zip(
            "qkv", descales, (q, k, v), (q.shape[-2], kv_heads, kv_heads), (cu_q, cu_k, cu_k)
        ):
            options[f"{name}_scale"] = descale_by_sequence(
                operation, f"{name}_descale", scale, name, data, heads, kv_heads, cu
            )
    return attention(q, k, v, return_lse=flag(operation, "return_attn_probs", return_attn_probs), **options)
