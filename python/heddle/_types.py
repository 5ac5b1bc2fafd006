"""Types of the public functions' arguments and results. When a program runs, classes take ``Kind`` from here and nothing else does:
the rest is for type checkers and editors. tests/python/test_typing.py holds each list of names to what the library takes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, TypedDict

import numpy as np

from ._options import Causal

if TYPE_CHECKING:
    import torch
    from typing_extensions import TypeVar  # has defaults
else:
    from typing import TypeVar


class AnyArray(Protocol):
    """An array of any library: torch.Tensor, numpy.ndarray, or what else supports DLPack."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __dlpack_device__(self) -> Any: ...


class SizedArray(AnyArray, Protocol):
    """numpy.ndarray, torch.Tensor, and others that say how large they are."""

    @property
    def shape(self) -> Any: ...
    @property
    def nbytes(self) -> int: ...


#: A library's arrays: what a function returns is of the kind that it is given.
Array = TypeVar("Array", bound=AnyArray)
if TYPE_CHECKING:
    #: The same in heddle.lowbit. A class of this kind whose name stands alone has arrays of any.
    Kind = TypeVar("Kind", bound=SizedArray, default=Any)
else:
    Kind = TypeVar("Kind")

CausalName = Literal["none", "top_left", "bottom_right"] | Causal
PrecisionName = Literal["f32", "tf32", "int8_qk"]
MethodName = Literal["flash", "baseline"]
OnExceedName = Literal["refine", "dense", "report"]
GpuName = Literal["a100", "rtx4090", "l40s", "h100", "h200"]

Float32Name = Literal["float32", "fp32"]
FloatName = Literal["float32", "float16", "bfloat16", "fp32", "fp16", "bf16"]
#: torch's or numpy's dtype.
LibraryDType: TypeAlias = "torch.dtype | np.dtype[Any] | type[np.generic]"
#: Of a result that is not rounded.
Float32: TypeAlias = "Float32Name | LibraryDType"
FloatDType: TypeAlias = "FloatName | LibraryDType"

#: heddle.lowbit.FORMATS, and nf4 and fp4_bnb with a block size.
FormatName = Literal[
    "nvfp4",
    "mxfp4",
    "e2m1_row",
    "nf4",
    "fp4_bnb",
    "int4_g32",
    "int4_g64",
    "int4_g128",
    "int4_g32_zp",
    "int4_g64_zp",
    "int4_g128_zp",
    "int8_row",
    "fp8_row",
    "nf4_b32",
    "nf4_b64",
    "nf4_b128",
    "nf4_b256",
    "nf4_b512",
    "nf4_b1024",
    "nf4_b2048",
    "nf4_b4096",
    "fp4_bnb_b32",
    "fp4_bnb_b64",
    "fp4_bnb_b128",
    "fp4_bnb_b256",
    "fp4_bnb_b512",
    "fp4_bnb_b1024",
    "fp4_bnb_b2048",
    "fp4_bnb_b4096",
]
RuleName = Literal["plain", "four_six", "mse", "floor", "round_up", "even"]
#: What heddle.nn.Policy knows beside formats alone.
PolicyName = (
    FormatName
    | Literal[
        "float32",
        "16bit",
        "nvfp4+int8_x",
        "mxfp4+int8_x",
        "e2m1_row+int8_x",
        "int4_g32+int8_x",
        "int4_g64+int8_x",
        "int4_g128+int8_x",
        "int4_g32_zp+int8_x",
        "int4_g64_zp+int8_x",
        "int4_g128_zp+int8_x",
        "int8_row+int8_x",
        "nvfp4+fp8_x",
        "mxfp4+fp8_x",
        "e2m1_row+fp8_x",
        "fp8_row+fp8_x",
    ]
)
#: {pattern: format}, or pairs. Not PolicyName: a dict that stands in a variable is one of str.
Rules: TypeAlias = Mapping[str, str] | Iterable[tuple[str, str]]
OrderName = Literal["rows16", "fragments16", "fragments8", "matrix", "matrix8"]
ActivationName = Literal["none", "relu", "gelu_erf", "gelu_tanh", "silu", "swiglu"]
NormName = Literal["none", "layer_norm", "rms_norm"]
BlockNormName = Literal["layer_norm", "rms_norm"]
CalibrationMethod = Literal["awq", "smoothquant"]
FrameworkName = Literal["numpy", "torch"]

# Of native sparse attention: what rows take from their anchor, in which branches, whose gate, and blocks chosen before others.
ShareName = Literal["none", "selection", "output", "delta"]
BranchName = Literal["cmp", "slc", "swa"]
OwnKeyName = Literal["cmp", "swa"]
CompressionName = Literal["mean", "learned"]
GateName = Literal["own", "anchor"]
ForcedName = Literal["first", "previous", "current"]


class _Options(TypedDict, total=False):
    """What all of attention's functions take."""

    scale: float | None
    causal: CausalName
    window: tuple[int | None, int | None]
    softcap: float
    alibi_slopes: AnyArray | None
    bias: AnyArray | None
    mask: AnyArray | None
    sink: AnyArray | None
    dropout_p: float
    dropout_seed: AnyArray | int | None
    max_seqlen_q: int | None
    max_seqlen_k: int | None
    seqused_q: AnyArray | None
    cache_leftpad: AnyArray | None
    draft_mask: AnyArray | None
    q_step: int
    key_step: int
    q_scale: AnyArray | None
    k_scale: AnyArray | None
    v_scale: AnyArray | None
    out_dtype: Float32 | None
    batch_invariant: bool
    deterministic: bool | None
    precision: PrecisionName
    method: MethodName | None
    force: str | None


class _Pages(TypedDict, total=False):
    page_table: AnyArray | None
    cache_batch_idx: AnyArray | None


class Int4CacheOptions(_Options, total=False):
    """The options of Int4Cache.attention, but for return_lse, out and lse_out; see there."""

    q_offset: AnyArray | None
    key_offset: AnyArray | None


class CacheOptions(Int4CacheOptions, _Pages, total=False):
    """The options of heddle.attention_with_kv_cache, but for return_lse, out and lse_out; see there."""


class QuestionOptions(_Options, _Pages, total=False):
    """The options of heddle.explain, those of heddle.attention but for return_lse and where results go; see there."""

    cu_seqlens_q: AnyArray | None
    cu_seqlens_k: AnyArray | None
    seqused_k: AnyArray | None
    q_offset: AnyArray | int | None
    key_offset: AnyArray | int | None


class AttentionOptions(QuestionOptions, total=False):
    """The options of heddle.attention, but for return_lse, which decides what it returns; see there."""

    out: AnyArray | None
    lse_out: AnyArray | None


class LinearOptions(TypedDict, total=False):
    """What heddle.nn.Linear is asked for beside its weights; see there."""

    activation: ActivationName
    int8_x: bool
    fp8_x: bool
    keep_16bit: bool
