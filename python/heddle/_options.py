"""The options of attention, checked as far as Python's types go and packed for the native module."""

from __future__ import annotations

import enum
import sys
from typing import Any

import numpy as np


class Causal(enum.Enum):
    """Which corner the causal diagonal starts from, where the lengths Sq and Sk differ.

    ``top_left`` lets row i attend keys j <= i (torch's ``is_causal``); ``bottom_right`` keys j <= i + Sk - Sq
    (FlashAttention's ``causal``). With Sq == Sk they are the same.
    """

    none = "none"
    top_left = "top_left"
    bottom_right = "bottom_right"


CAUSAL_CODES = {
    "none": 0,
    "top_left": 1,
    "bottom_right": 2,
    Causal.none: 0,
    Causal.top_left: 1,
    Causal.bottom_right: 2,
}

def causal_code(causal: Any) -> int:
    """0, 1 or 2 for "none", "top_left" or "bottom_right"."""
    if isinstance(causal, bool):
        raise TypeError(
            f"[attention] causal is {causal}: say which corner the diagonal starts from, 'top_left' (row i attends keys "
            "j <= i, as torch's is_causal) or 'bottom_right' (j <= i + Sk - Sq, as FlashAttention's causal), or 'none'"
        )
    code = CAUSAL_CODES.get(causal) if isinstance(causal, (str, Causal)) else None
    if code is None:
        raise ValueError(f"[attention] causal is {causal!r}: it must be 'none', 'top_left' or 'bottom_right'")
    return code


def flag(operation: str, name: str, value: Any) -> bool:
    """value as a bool: also numpy's, the ints 0 and 1, and what torch makes of a comparison of symbolic sizes. Python would
    take any other object for true or false too, "none" for true."""
    if isinstance(value, bool):
        return value
    if isinstance(value, np.bool_) or (type(value) is int and value in (0, 1)):
        return bool(value)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.SymBool):
        return bool(value)
    shown = repr(value) if value is None or isinstance(value, (str, int, float)) else f"a {type(value).__name__}"
    rule = "it must be True or False (numpy's bool and the ints 0 and 1 are taken too)"
    raise TypeError(f"[{operation}] {name} is {shown}: {rule}")


def pair(window: Any) -> tuple[int, int]:
    """The window's two sides; None, as -1, for an open one."""
    try:
        left, right = window
    except (TypeError, ValueError):
        raise TypeError(
            f"[attention] window is {window!r}: it must be a pair (left, right), -1 or None for an open side"
        ) from None
    return -1 if left is None else left, -1 if right is None else right


_SHORT = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


def dtype_name(dtype: Any) -> Any:
    """The name of a dtype as torch and numpy have it ("float16"): of theirs, and of the command's names (fp32, fp16,
    bf16). What is none of these comes back as it is."""
    if isinstance(dtype, str):
        return _SHORT.get(dtype, dtype)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(dtype, torch.dtype):
        return str(dtype).removeprefix("torch.")
    if isinstance(dtype, np.dtype) or (isinstance(dtype, type) and issubclass(dtype, np.generic)):
        return np.dtype(dtype).name
    return dtype


def check_rank(q_shape: Any, packed: bool) -> None:
    """lse's shape is read off q's, so this rule comes before the library's own checks."""
    if len(q_shape) != (3 if packed else 4):
        rule = "with cu_seqlens_q it must be [total_q, H, D]" if packed else "it must be [B, Sq, H, D]"
        raise ValueError(f"[attention_forward] q has {len(q_shape)} dimensions: {rule}; found q {list(q_shape)}")


def lse_shape(q_shape: Any, packed: bool) -> tuple[int, ...]:
    """[H, total_q] or [B, H, Sq]."""
    return (q_shape[1], q_shape[0]) if packed else (q_shape[0], q_shape[2], q_shape[1])


PRECISION_CODES = {"f32": 0, "tf32": 1, "int8_qk": 2}


def precision_code(precision: Any) -> int:
    """0, 1 or 2 for "f32", "tf32" or "int8_qk"."""
    code = PRECISION_CODES.get(precision) if isinstance(precision, str) else None
    if code is None:
        raise ValueError(f"[attention] precision is {precision!r}: it must be 'f32', 'tf32' or 'int8_qk'")
    return code


def torch_is_deterministic() -> bool:
    """What torch.use_deterministic_algorithms() was last told. Does not import torch."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.are_deterministic_algorithms_enabled()


# Where some items of the options tuple lie.
ALIBI_SLOPES, BIAS, MASK, SINK, CU_SEQLENS_Q, Q_SCALE, K_SCALE, V_SCALE, ARRAYS = 0, 1, 2, 3, 4, 12, 13, 14, 15
DROPOUT_P, DROPOUT_SEED = 20, 21

ARRAY_NAMES = (
    "alibi_slopes", "bias", "mask", "sink", "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "page_table",
    "cache_batch_idx", "cache_leftpad", "draft_mask", "q_scale", "k_scale", "v_scale",
)  # fmt: skip


def pack(
    *,
    scale=None,
    causal="none",
    window=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    bias=None,
    mask=None,
    sink=None,
    dropout_p=0.0,
    dropout_seed=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    seqused_q=None,
    seqused_k=None,
    page_table=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    draft_mask=None,
    q_scale=None,
    k_scale=None,
    v_scale=None,
    batch_invariant=False,
    deterministic=None,
    precision="f32",
    method=None,
    force=None,
) -> tuple:
    """The options tuple that the native module and the torch operators take: 15 arrays, then 14 other values."""
    left, right = pair(window)
    deterministic = torch_is_deterministic() if deterministic is None else flag("attention", "deterministic", deterministic)
    return (
        alibi_slopes,
        bias,
        mask,
        sink,
        cu_seqlens_q,
        cu_seqlens_k,
        seqused_q,
        seqused_k,
        page_table,
        cache_batch_idx,
        cache_leftpad,
        draft_mask,
        q_scale,
        k_scale,
        v_scale,
        scale,
        causal_code(causal),
        left,
        right,
        softcap,
        dropout_p,
        dropout_seed,
        max_seqlen_q or 0,
        max_seqlen_k or 0,
        flag("attention", "batch_invariant", batch_invariant),
        deterministic,
        precision_code(precision),
        method or "",
        force or "",
    )
