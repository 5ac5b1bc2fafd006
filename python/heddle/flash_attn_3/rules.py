"""What FlashAttention 3's functions take and Heddle's kernels have not. heddle.flash_attn_3 is the public name."""

from __future__ import annotations

from typing import Any

from .._options import flag

# By argument: what means that nothing is asked for, and what is said of anything else.
_UNSERVED = {
    "qv": (None, "scores are one product here; join qv to q and v to k, up to head size 256"),
    "attention_chunk": (0, "there are no chunks here; heddle.attention takes a mask"),
    "sm_margin": (0, "kernels use all multiprocessors"),
    "scheduler_metadata": (None, "a call is planned when it is made"),
    "cu_seqlens_k_new": (None, "k and v to append must be [B, Sn, Hkv, D], as many for each sequence"),
    "rotary_seqlens": (None, "rotation is by cache_seqlens"),
}


def refuse_unserved(operation: str, *, num_splits: int = 0, pack_gqa: bool | None = None, **given: Any) -> None:
    """Raises for what is not served, and for what is no value of FlashAttention's own arguments."""
    for name, value in given.items():
        nothing, reason = _UNSERVED[name]
        if value is None if nothing is None else type(value) is int and value == nothing:
            continue
        shape = getattr(value, "shape", None)
        shown = repr(value) if shape is None else f"a {type(value).__name__} of {list(shape)}"
        raise ValueError(f"[{operation}] {name} is {shown}: only {nothing} is taken: {reason}")
    if not num_splits >= 0:
        raise ValueError(f"[{operation}] num_splits is {num_splits}: it must be at least 0 (0: free choice)")
    if pack_gqa is not None:
        flag(operation, "pack_gqa", pack_gqa)
