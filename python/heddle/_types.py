"""Types of the public functions' arguments, for type checkers and editors alone: nothing imports this when a program runs."""

from __future__ import annotations

from typing import Any, Literal, TypedDict, TypeVar

from ._options import Causal

#: A library's arrays: torch.Tensor, numpy.ndarray, or what else supports DLPack.
Array = TypeVar("Array")

CausalName = Literal["none", "top_left", "bottom_right"] | Causal
PrecisionName = Literal["f32", "tf32", "int8_qk"]
MethodName = Literal["flash", "baseline"]


class AttentionOptions(TypedDict, total=False):
    """The options of heddle.attention, but for return_lse, which decides what it returns; see there."""

    scale: float | None
    causal: CausalName
    window: tuple[int | None, int | None]
    softcap: float
    alibi_slopes: Any
    bias: Any
    mask: Any
    sink: Any
    dropout_p: float
    dropout_seed: Any
    cu_seqlens_q: Any
    cu_seqlens_k: Any
    max_seqlen_q: int | None
    max_seqlen_k: int | None
    seqused_q: Any
    seqused_k: Any
    page_table: Any
    cache_batch_idx: Any
    cache_leftpad: Any
    draft_mask: Any
    q_offset: Any
    key_offset: Any
    q_step: int
    key_step: int
    q_scale: Any
    k_scale: Any
    v_scale: Any
    out_dtype: Any
    out: Any
    lse_out: Any
    batch_invariant: bool
    deterministic: bool | None
    precision: PrecisionName
    method: MethodName | None
    force: str | None
