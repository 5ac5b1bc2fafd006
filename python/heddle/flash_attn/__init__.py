"""FlashAttention 2's functions, names, arguments and defaults, on Heddle's kernels.

Torch tensors; layout [B, S, H, D], packed [total, H, D]; float32 is taken as well as float16 and bfloat16, and any head
size from 1 to 256. ``causal`` is aligned to the bottom-right corner, as FlashAttention's since 2.1: row i attends keys
j <= i + Sk - Sq. Gradients flow to q, k and v (and from the returned log-sum-exp too), except in
``flash_attn_with_kvcache``, which is for inference as FlashAttention's is, and refuses tensors that require a gradient.

``return_attn_probs=True`` returns (out, softmax_lse, S_dmask) as FlashAttention does. It fills S_dmask only with
dropout, for testing: then it is [B, H, Sq, Sk] (packed: [B, H, max_seqlen_q, max_seqlen_k]), the true softmax
probabilities, negative where dropout dropped them; FlashAttention pads Sq and Sk and scales them otherwise. It costs
the full matrix and one more pass over each 256 keys, so keep it to modest sizes. Without dropout it is an empty tensor,
as there.

Shapes without elements are served: no sequences, no queries, no keys (rows of zeros, with a log-sum-exp of -inf, as
rows that meet no key).

Flags must be bools (numpy's and the ints 0 and 1 are taken too): ``causal="none"`` is a TypeError, since Python would
take any text for true.

heddle.flash_attn_3 has FlashAttention 3's. Importing either needs torch.

Source of the interface: Dao, arXiv 2307.08691, and the package flash_attn 2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

from ..hosts import torch as _needs_torch  # noqa: F401
from .cache import flash_attn_with_kvcache
from .run import alignment, repeatable, with_probabilities
from .varlen import (
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)

if TYPE_CHECKING:
    import torch

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]


def __dir__() -> list[str]:
    return __all__


# fmt: off
@overload
def flash_attn_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float = ..., softmax_scale: float | None = ...,
    causal: bool = ..., window_size: tuple[int, int] = ..., softcap: float = ...,
    alibi_slopes: torch.Tensor | None = ..., deterministic: bool = ..., return_attn_probs: Literal[False] = ...,
) -> torch.Tensor: ...
@overload
def flash_attn_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float = ..., softmax_scale: float | None = ...,
    causal: bool = ..., window_size: tuple[int, int] = ..., softcap: float = ...,
    alibi_slopes: torch.Tensor | None = ..., deterministic: bool = ..., *, return_attn_probs: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...
@overload
def flash_attn_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float = ..., softmax_scale: float | None = ...,
    causal: bool = ..., window_size: tuple[int, int] = ..., softcap: float = ...,
    alibi_slopes: torch.Tensor | None = ..., deterministic: bool = ..., return_attn_probs: bool = ...,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...
# fmt: on
def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attention of q [B, Sq, H, D] over k [B, Sk, Hkv, D], v [B, Sk, Hkv, Dv]; H a multiple of Hkv.

    Args:
      dropout_p: probability of dropping; 0 in evaluation. The seed comes from torch's default generator.
      softmax_scale: 1 / sqrt(D) if None.
      causal: row i attends keys j <= i + Sk - Sq (bottom-right).
      window_size: (left, right), -1 open: row i attends keys from i + Sk - Sq - left to i + Sk - Sq + right.
      softcap: 0 for none.
      alibi_slopes: float32 [H] or [B, H]; adds -slope * |i + Sk - Sq - j|.
      deterministic: bitwise repeatable gradients; so are they under torch.use_deterministic_algorithms.
      return_attn_probs: return (out, softmax_lse float32 [B, H, Sq], S_dmask); see the module's text.

    Returns:
      out [B, Sq, H, Dv]. Rows without a key give 0.

    Raises:
      ValueError: a bad argument.
    """
    return with_probabilities(
        q,
        k,
        v,
        dropout_p,
        return_attn_probs,
        scale=softmax_scale,
        causal=alignment(causal),
        window=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        deterministic=repeatable(deterministic),
    )


# fmt: off
@overload
def flash_attn_kvpacked_func(
    q: torch.Tensor, kv: torch.Tensor, dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ...,
    window_size: tuple[int, int] = ..., softcap: float = ..., alibi_slopes: torch.Tensor | None = ...,
    deterministic: bool = ..., return_attn_probs: Literal[False] = ...,
) -> torch.Tensor: ...
@overload
def flash_attn_kvpacked_func(
    q: torch.Tensor, kv: torch.Tensor, dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ...,
    window_size: tuple[int, int] = ..., softcap: float = ..., alibi_slopes: torch.Tensor | None = ...,
    deterministic: bool = ..., *, return_attn_probs: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...
@overload
def flash_attn_kvpacked_func(
    q: torch.Tensor, kv: torch.Tensor, dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ...,
    window_size: tuple[int, int] = ..., softcap: float = ..., alibi_slopes: torch.Tensor | None = ...,
    deterministic: bool = ..., return_attn_probs: bool = ...,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...
# fmt: on
def flash_attn_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """flash_attn_func with k and v in one tensor, kv [B, Sk, 2, Hkv, D]."""
    k, v = kv.unbind(2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


# fmt: off
@overload
def flash_attn_qkvpacked_func(
    qkv: torch.Tensor, dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ...,
    window_size: tuple[int, int] = ..., softcap: float = ..., alibi_slopes: torch.Tensor | None = ...,
    deterministic: bool = ..., return_attn_probs: Literal[False] = ...,
) -> torch.Tensor: ...
@overload
def flash_attn_qkvpacked_func(
    qkv: torch.Tensor, dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ...,
    window_size: tuple[int, int] = ..., softcap: float = ..., alibi_slopes: torch.Tensor | None = ...,
    deterministic: bool = ..., *, return_attn_probs: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...
@overload
def flash_attn_qkvpacked_func(
    qkv: torch.Tensor, dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ...,
    window_size: tuple[int, int] = ..., softcap: float = ..., alibi_slopes: torch.Tensor | None = ...,
    deterministic: bool = ..., return_attn_probs: bool = ...,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...
# fmt: on
def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """flash_attn_func with q, k and v in one tensor, qkv [B, S, 3, H, D]."""
    q, k, v = qkv.unbind(2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )
