"""The options of attention, checked as far as Python's types go and packed for the native module."""

from __future__ import annotations

import enum
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from . import _heddle


class Causal(enum.Enum):
    """Which corner the causal diagonal starts from, where the lengths Sq and Sk differ.

    ``top_left`` lets row i attend keys j <= i (torch's ``is_causal``); ``bottom_right`` keys j <= i + Sk - Sq
    (FlashAttention's ``causal``). With Sq == Sk they are the same.
    """

    none = "none"
    top_left = "top_left"
    bottom_right = "bottom_right"


#: The numbers that stand for members of the library's enumerations where the native module is called.
CODES: dict[str, dict[str, int]] = {
    "dtype": {
        "float32": 0,
        "float16": 1,
        "bfloat16": 2,
        "int32": 3,
        "bool": 4,
        "float8_e4m3fn": 5,
        "uint8": 6,
        "int8": 7,
    },
    "causal": {"none": 0, "top_left": 1, "bottom_right": 2},
    "precision": {"f32": 0, "tf32": 1, "int8_qk": 2},
}
DTYPE_CODES, PRECISION_CODES = CODES["dtype"], CODES["precision"]
CAUSAL_CODES = CODES["causal"] | {corner: CODES["causal"][corner.value] for corner in Causal}


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


def of_torch(value: Any, name: str) -> bool:
    """Whether value is of torch's class of that name. As hosts.is_torch, by names."""
    return type(value).__name__ == name and type(value).__module__ == "torch"


def flag(operation: str, name: str, value: Any) -> bool:
    """value as a bool: also numpy's, the ints 0 and 1, and what torch makes of a comparison of symbolic sizes. Python would
    take any other object for true or false too, "none" for true."""
    if isinstance(value, bool):
        return value
    if isinstance(value, np.bool_) or (type(value) is int and value in (0, 1)):
        return bool(value)
    if of_torch(value, "SymBool"):
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
    if of_torch(dtype, "dtype"):
        return str(dtype).removeprefix("torch.")
    if isinstance(dtype, np.dtype) or (isinstance(dtype, type) and issubclass(dtype, np.generic)):
        return np.dtype(dtype).name
    return dtype


def check_rank(q_shape: Any, packed: bool, operation: str = "attention_forward") -> None:
    """lse's shape is read off q's, so this rule comes before the library's own checks."""
    if len(q_shape) != (3 if packed else 4):
        rule = "with cu_seqlens_q it must be [total_q, H, D]" if packed else "it must be [B, Sq, H, D]"
        raise ValueError(f"[{operation}] q has {len(q_shape)} dimensions: {rule}; found q {list(q_shape)}")


def check_dimensions(operation: str, name: str, shape: Any, packed: str | None, dense: str) -> None:
    """Results' shapes are read off it, so this rule comes before the library's own checks. packed: what it must be where
    sequences are packed, else None."""
    wanted, rule = (4, dense) if packed is None else (3, packed)
    if len(shape) != wanted:
        raise ValueError(f"[{operation}] {name} has {len(shape)} dimensions: it must be {rule}; found {list(shape)}")


def check_pooled(shape: Any, packed: bool, operation: str = "pool_keys", name: str = "x") -> None:
    """check_dimensions() of what pool_keys, or its gradient, is given."""
    check_dimensions(operation, name, shape, "[total, Hkv, D] with cu_seqlens" if packed else None, "[B, S, Hkv, D]")


def check_chosen(q_shape: Any, k_shape: Any, packed_q: bool, packed_k: bool) -> None:
    """check_dimensions() of select_blocks' q and k_pooled."""
    name, of_q, of_k = "select_blocks", "[total_q, H, D] with cu_seqlens_q", "[total, Hkv, D] with cu_seqlens_k"
    check_dimensions(name, "q", q_shape, of_q if packed_q else None, "[B, Sq, H, D]")
    check_dimensions(name, "k_pooled", k_shape, of_k if packed_k else None, "[B, N, Hkv, D]")


def check_list_length(out_shape: Any, n: int) -> None:
    """Of select_blocks' lists: all else of their shape is the native module's to check, n is not told there."""
    if len(out_shape) > 0 and out_shape[-1] != n:
        raise ValueError(f"[select_blocks] out is {list(out_shape)}: its last extent must be {n}")


def lse_shape(q_shape: Any, packed: bool) -> tuple[int, ...]:
    """[H, total_q] or [B, H, Sq]."""
    return (q_shape[1], q_shape[0]) if packed else (q_shape[0], q_shape[2], q_shape[1])


#: Query rows of a kv head, and keys, that adaptive attention decides on together.
ADAPTIVE_ROWS, ADAPTIVE_KEYS = 12, 32


def replaced_shape(q_shape: Any, k_shape: Any, items: Sequence[Any]) -> tuple[int, ...]:
    """Of adaptive attention's bits: which blocks of keys were replaced for which runs of rows ([B,] Hkv, N, W). q has the rank
    that check_rank() asks for; other shapes that are wrong the library refuses by name."""
    cu_seqlens_q, heads, kv_heads = items[CU_SEQLENS_Q], q_shape[-2], k_shape[-2] if len(k_shape) > 1 else 1
    group = heads // kv_heads if kv_heads else 1
    pages = items[INDEX["page_table"]]
    if pages is not None:
        keys = pages.shape[-1] * k_shape[1] if len(k_shape) > 1 else 0
    elif items[INDEX["cu_seqlens_k"]] is None:
        keys = k_shape[1] if len(k_shape) > 1 else 0
    else:  # how long the longest sequence is nobody reads here
        keys = items[INDEX["max_seqlen_k"]] or k_shape[0]
    width = (keys + 8 * ADAPTIVE_KEYS - 1) // (8 * ADAPTIVE_KEYS)
    if cu_seqlens_q is None:
        return (q_shape[0], kv_heads, (q_shape[1] * group + ADAPTIVE_ROWS - 1) // ADAPTIVE_ROWS, width)
    return (kv_heads, q_shape[0] * group // ADAPTIVE_ROWS + max(cu_seqlens_q.shape[0] - 1, 0), width)


def check_lse_out(operation: str, return_lse: bool, lse_out: Any) -> None:
    if lse_out is not None and not return_lse:
        raise ValueError(f"[{operation}] lse_out is given and return_lse is False: lse is written where it is returned")


def precision_code(precision: Any) -> int:
    """0, 1 or 2 for "f32", "tf32" or "int8_qk"."""
    code = PRECISION_CODES.get(precision) if isinstance(precision, str) else None
    if code is None:
        raise ValueError(f"[attention] precision is {precision!r}: it must be 'f32', 'tf32' or 'int8_qk'")
    return code


def parts_of(operation: str, os: Any, lses: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The results that a merge joins, and their lse: as many of each."""
    os, lses = tuple(os), tuple(lses)
    if len(os) == 0 or len(os) != len(lses):
        rule = "there must be at least one" if len(os) == 0 else "there must be as many"
        raise ValueError(f"[{operation}] os are {len(os)} and lses are {len(lses)}: {rule}")
    return os, lses


def wants_float32(operation: str, out_dtype: Any) -> bool:
    """Whether the result is to be float32, whatever the operands are."""
    if out_dtype is None:
        return False
    if dtype_name(out_dtype) != "float32":
        raise ValueError(f"[{operation}] out_dtype is {out_dtype!r}: it must be float32, or None for the operands' own")
    return True


def torch_is_deterministic() -> bool:
    """What torch.use_deterministic_algorithms() was last told. Does not import torch."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.are_deterministic_algorithms_enabled()


class Option(NamedTuple):
    """One item of the options tuple, which the native module, the operators and their gradients all take."""

    name: str
    schema: str  # its type in the operators' schemas
    default: Any = None
    gradient: bool = False


#: All of them, in their order; arrays come first. The native module has the same names in the same order.
OPTIONS = (
    Option("alibi_slopes", "Tensor?"),
    Option("bias", "Tensor?", gradient=True),
    Option("mask", "Tensor?"),
    Option("sink", "Tensor?", gradient=True),
    Option("cu_seqlens_q", "Tensor?"),
    Option("cu_seqlens_k", "Tensor?"),
    Option("seqused_q", "Tensor?"),
    Option("seqused_k", "Tensor?"),
    Option("page_table", "Tensor?"),
    Option("cache_batch_idx", "Tensor?"),
    Option("cache_leftpad", "Tensor?"),
    Option("draft_mask", "Tensor?"),
    Option("q_offset", "Tensor?"),
    Option("key_offset", "Tensor?"),
    Option("q_scale", "Tensor?"),
    Option("k_scale", "Tensor?"),
    Option("v_scale", "Tensor?"),
    Option("scale", "float?"),
    Option("causal", "int", 0),
    Option("window_left", "SymInt", -1),
    Option("window_right", "SymInt", -1),
    Option("q_step", "SymInt", 1),
    Option("key_step", "SymInt", 1),
    Option("softcap", "float", 0.0),
    Option("dropout_p", "float", 0.0),
    Option("dropout_seed", "Tensor?"),
    Option("max_seqlen_q", "SymInt", 0),
    Option("max_seqlen_k", "SymInt", 0),
    Option("batch_invariant", "bool", False),
    Option("deterministic", "bool", False),
    Option("float32_out", "bool", False),
    Option("precision", "int", 0),
    Option("method", "str", ""),
    Option("force", "str", ""),
)
INDEX = {option.name: i for i, option in enumerate(OPTIONS)}

#: How many of them are arrays; the seed, which torch's operators take as a tensor, is not one of those.
ARRAYS = next(i for i, option in enumerate(OPTIONS) if option.schema != "Tensor?")
ARRAY_NAMES = tuple(option.name for option in OPTIONS[:ARRAYS])
ALIBI_SLOPES, BIAS, MASK, SINK, CU_SEQLENS_Q, Q_SCALE, K_SCALE, V_SCALE, DROPOUT_P, DROPOUT_SEED, FLOAT32_OUT = (
    INDEX[name]
    for name in (
        "alibi_slopes",
        "bias",
        "mask",
        "sink",
        "cu_seqlens_q",
        "q_scale",
        "k_scale",
        "v_scale",
        "dropout_p",
        "dropout_seed",
        "float32_out",
    )
)
WITH_GRADIENT = tuple(i for i, option in enumerate(OPTIONS) if option.gradient)
WITHOUT_GRADIENT = tuple(INDEX[name] for name in ("alibi_slopes", "q_scale", "k_scale", "v_scale"))  # of floats


_VERSIONS = "heddle's native module and its Python code are of different versions"


def check_names(native: tuple[str, ...], own: Sequence[str] = tuple(INDEX)) -> None:
    """Raises ImportError unless the items of a tuple are those that the native module takes."""
    if native != tuple(own):
        other = next((f"{a!r} and {b!r}" for a, b in zip(native, own) if a != b), f"{len(native)} and {len(own)}")
        raise ImportError(f"{_VERSIONS}: their options differ, {other}")


def check_codes(native: dict[str, dict[str, int]]) -> None:
    """Raises ImportError unless these are the numbers of the library's enumerations."""
    for kind in native.keys() | CODES.keys():
        theirs, own = native.get(kind, {}), CODES.get(kind, {})
        for name in theirs.keys() | own.keys():
            if theirs.get(name) != own.get(name):
                raise ImportError(f"{_VERSIONS}: {kind} {name!r} is {theirs.get(name)} there and {own.get(name)} here")


check_names(_heddle.option_names())
check_codes(_heddle.codes())


def schema(written: dict[str, str] | None = None, options: Sequence[Option] = OPTIONS) -> str:
    """The options as arguments in an operator's schema. written: name -> alias, of arrays that the operator writes."""
    aliases = written or {}
    return ", ".join(f"{o.schema.replace('Tensor', 'Tensor' + aliases.get(o.name, ''))} {o.name}" for o in options)


def replaced(items: tuple[Any, ...], index: int, value: Any) -> tuple[Any, ...]:
    """The options tuple with one item replaced."""
    return (*items[:index], value, *items[index + 1 :])


def pack(
    *,
    causal: Any = "none",
    window: Any = (-1, -1),
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    batch_invariant: Any = False,
    deterministic: bool | None = None,
    out_dtype: Any = None,
    precision: Any = "f32",
    method: str | None = None,
    force: str | None = None,
    **others: Any,
) -> tuple[Any, ...]:
    """The options tuple of arguments as heddle.attention takes them."""
    left, right = pair(window)
    given = others | {
        "causal": causal_code(causal),
        "window_left": left,
        "window_right": right,
        "max_seqlen_q": max_seqlen_q or 0,
        "max_seqlen_k": max_seqlen_k or 0,
        "batch_invariant": flag("attention", "batch_invariant", batch_invariant),
        "deterministic": torch_is_deterministic()
        if deterministic is None
        else flag("attention", "deterministic", deterministic),
        "float32_out": wants_float32("attention", out_dtype),
        "precision": precision_code(precision),
        "method": method or "",
        "force": force or "",
    }
    if unknown := given.keys() - INDEX.keys():
        raise TypeError(f"[attention] there is no option {', '.join(sorted(unknown))}")
    return tuple(given.get(option.name, option.default) for option in OPTIONS)
