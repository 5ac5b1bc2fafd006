"""Operations on numpy arrays and on any other array in CPU memory that supports DLPack."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import _heddle

_FLOAT32 = 0  # heddle::DType


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


def attention(q, k, v, arrays, numbers, seed, rest, return_lse):
    """See heddle.attention."""
    alibi_slopes, bias, mask, *others = arrays
    if seed is None:
        if numbers[5] != 0:
            raise ValueError(f"[attention] dropout_p is {numbers[5]} and dropout_seed is missing: give a seed")
        seed = 0
    items = (alibi_slopes, _four(bias), _four(mask), *others, *numbers, int(seed) & 0xFFFFFFFFFFFFFFFF, *rest)
    q_shape, code = _heddle.describe(q, "attention_forward", "q")
    v_shape, _ = _heddle.describe(v, "attention_forward", "v")
    out = _empty_like_kind(q, q_shape[:-1] + v_shape[-1:], code)
    packed = arrays[4] is not None
    lse = None
    if return_lse and len(q_shape) == (3 if packed else 4):
        lse = _empty_like_kind(q, (q_shape[1], q_shape[0]) if packed else (q_shape[0], q_shape[2], q_shape[1]), _FLOAT32)
    _heddle.attention_forward(q, k, v, out, lse, items)
    return (_as_kind(q, out), _as_kind(q, lse)) if return_lse else _as_kind(q, out)


def apply_rotary(x, cos, sin, interleaved, offsets):
    """See heddle.apply_rotary."""
    shape, code = _heddle.describe(x, "apply_rotary", "x")
    out = _empty_like_kind(x, shape, code)
    _heddle.apply_rotary(x, out, cos, sin, interleaved, offsets)
    return _as_kind(x, out)


def append_kv_cache(
    k_new, v_new, k_cache, v_cache, seqlens, page_table, cache_batch_idx, rotary_cos, rotary_sin, interleaved
):
    """See heddle.append_kv_cache."""
    _heddle.append_kv_cache(
        k_new, v_new, k_cache, v_cache, seqlens, page_table, cache_batch_idx, rotary_cos, rotary_sin, interleaved
    )
