"""Operations on numpy arrays and on any other array in CPU memory that supports DLPack."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import _heddle
from .._options import BIAS, CU_SEQLENS_Q, DROPOUT_P, DROPOUT_SEED, MASK, check_rank, lse_shape

_FLOAT32, _BFLOAT16, _FLOAT8 = 0, 2, 5  # heddle::DType


def _empty_like_kind(model: Any, shape: tuple[int, ...], code: int) -> Any:
    """Memory for a result: a numpy array for numpy, else an array that only knows DLPack."""
    if isinstance(model, np.ndarray):
        return np.empty(shape, np.float32 if code == _FLOAT32 else model.dtype)
    return _heddle.empty(shape, code)


def _as_kind(model: Any, result: Any) -> Any:
    """`result` as an array of model's library, where that library can say which it is."""
    if isinstance(model, np.ndarray):
        return result
    namespace = getattr(model, "__array_namespace__", None)
    return result if namespace is None else namespace().from_dlpack(result)


def _four(x: Any) -> Any:
    """A numpy bias or mask with leading extents of 1 added."""
    return x[(None,) * (4 - x.ndim)] if isinstance(x, np.ndarray) and x.ndim < 4 else x


def attention(q, k, v, items, return_lse):
    """See heddle.attention."""
    if items[DROPOUT_P] != 0 and items[DROPOUT_SEED] is None:
        raise ValueError(f"[attention] dropout_p is {items[DROPOUT_P]} and dropout_seed is missing: give a seed")
    items = list(items)
    items[BIAS], items[MASK] = _four(items[BIAS]), _four(items[MASK])
    q_shape, code = _heddle.describe(q, "attention_forward", "q")
    v_shape, _ = _heddle.describe(v, "attention_forward", "v")
    out = _empty_like_kind(q, q_shape[:-1] + v_shape[-1:], _BFLOAT16 if code == _FLOAT8 else code)
    lse = None
    if return_lse:
        packed = items[CU_SEQLENS_Q] is not None
        check_rank(q_shape, packed)
        lse = _empty_like_kind(q, lse_shape(q_shape, packed), _FLOAT32)
    _heddle.attention_forward(q, k, v, out, lse, tuple(items))
    return (_as_kind(q, out), _as_kind(q, lse)) if return_lse else _as_kind(q, out)


def apply_rotary(x, cos, sin, interleaved, offsets):
    """See heddle.apply_rotary."""
    shape, code = _heddle.describe(x, "apply_rotary", "x")
    out = _empty_like_kind(x, shape, code)
    _heddle.apply_rotary(x, out, cos, sin, interleaved, offsets)
    return _as_kind(x, out)


def append_kv_cache(
    k_new, v_new, k_cache, v_cache, seqlens, page_table, cache_batch_idx, cos, sin, interleaved, k_scale, v_scale
):
    """See heddle.append_kv_cache."""
    _heddle.append_kv_cache(
        k_new, v_new, k_cache, v_cache, seqlens, page_table, cache_batch_idx, cos, sin, interleaved, k_scale, v_scale
    )


def attention_with_kv_cache(q, k_new, v_new, k_cache, v_cache, cos, sin, interleaved, items, return_lse):
    """See heddle.attention_with_kv_cache."""
    q_shape, code = _heddle.describe(q, "attention_with_kv_cache", "q")
    v_shape, _ = _heddle.describe(v_cache, "attention_with_kv_cache", "v_cache")
    check_rank(q_shape, False)
    out = _empty_like_kind(q, q_shape[:-1] + v_shape[-1:], code)
    lse = _empty_like_kind(q, lse_shape(q_shape, False), _FLOAT32) if return_lse else None
    _heddle.attention_with_kv_cache(q, k_new, v_new, k_cache, v_cache, out, lse, cos, sin, interleaved, items)
    return (_as_kind(q, out), _as_kind(q, lse)) if return_lse else _as_kind(q, out)
