"""Operations on numpy arrays and on those of every library that supports DLPack and has no module of its own here."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import numpy as np

from .. import _heddle
from .._options import (
    BIAS,
    CU_SEQLENS_Q,
    DROPOUT_P,
    DROPOUT_SEED,
    DTYPE_CODES,
    FLOAT32_OUT,
    MASK,
    check_chosen,
    check_list_length,
    check_pooled,
    check_rank,
    lse_shape,
)
from . import is_torch
from . import offsets as int_offsets

_FLOAT32, _BFLOAT16, _FLOAT8, _INT32 = (DTYPE_CODES[name] for name in ("float32", "bfloat16", "float8_e4m3fn", "int32"))
# Of results that need not have the first array's dtype.
_NUMPY_DTYPES = {_FLOAT32: np.float32, _INT32: np.int32}
_DTYPES = {code: name for name, code in DTYPE_CODES.items()}
_GPUS = (2, 13)  # DLPack's devices: memory of a GPU, and memory that it shares with the host
_LEGACY_STREAM = 1  # as DLPack numbers streams
# Whose arrays nobody may write, though DLPack exports them as if one might.
_IMMUTABLE = ("jax", "jaxlib")


def _package(x: Any) -> str:
    return type(x).__module__.partition(".")[0]


def _immutable(x: Any) -> bool:
    return _package(x) in _IMMUTABLE


def _check_written(operation: str, **arrays: Any) -> None:
    for name, x in arrays.items():
        if _immutable(x):
            raise ValueError(
                f"[{operation}] {name} is a {type(x).__name__}, which nobody may write: it is written, so it must be writable"
            )


def _namespace(x: Any, on_gpu: bool) -> Any:
    """The module that has the functions of x's library: that of its array API, on a GPU else the package of its type; None
    where there is none that imports arrays."""
    found = getattr(x, "__array_namespace__", None)
    if found is not None:
        return found()
    package = sys.modules.get(_package(x)) if on_gpu else None
    return package if hasattr(package, "from_dlpack") else None


class _Asked(Exception):
    pass


class _Question:
    """Stands for an array on a GPU. A library that imports one says, by DLPack's protocol, on which stream it will use it: that
    is all this is for."""

    def __init__(self, device: tuple[int, int]) -> None:
        self.device = device
        self.stream: Any = -1

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, *, stream: Any = None, **options: Any) -> Any:
        self.stream = stream
        raise _Asked


def stream_of(namespace: Any, device: tuple[int, int]) -> int | None:
    """The stream that a library works on now, in DLPack's numbers; None if it does not say."""
    if namespace is None:
        return None
    question = _Question(device)
    with contextlib.suppress(Exception):  # _Asked, or what the library makes of it
        namespace.from_dlpack(question)
    if question.stream is None:
        return _LEGACY_STREAM
    return question.stream if question.stream >= 0 else None


class _Cpu:
    """Where a call of an array on the CPU runs; results are of its library."""

    stream = 0  # its handle

    def __init__(self, operation: str, name: str, x: Any, namespace: Any) -> None:
        self.operation, self.name, self.model, self.namespace = operation, name, x, namespace

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        pass

    def memory(self, name: str, given: Any, shape: tuple[int, ...], code: int) -> Any:
        """What to write a result to: an array that the caller gave, or a new one."""
        if given is None:
            return self._empty(shape, code)
        if is_torch(given):
            raise TypeError(f"[{self.operation}] {name} is a torch tensor: it must be an array, as {self.name} is")
        _check_written(self.operation, **{name: given})
        return given

    def returned(self, given: Any, memory: Any) -> Any:
        """memory() as the caller gets it: what he gave, or an array of the library's own where that says which it is."""
        return self._owned(memory) if given is None else given

    def _empty(self, shape: tuple[int, ...], code: int) -> Any:
        return _heddle.empty(shape, code)  # which only knows DLPack

    def _owned(self, memory: Any) -> Any:
        return memory if self.namespace is None else self.namespace.from_dlpack(memory)


class _Numpy(_Cpu):
    def __init__(self, operation: str, name: str, x: Any) -> None:
        self.operation, self.name, self.model = operation, name, x

    def _empty(self, shape: tuple[int, ...], code: int) -> Any:
        return np.empty(shape, _NUMPY_DTYPES.get(code, self.model.dtype))

    def _owned(self, memory: Any) -> Any:
        return memory


class _Gpu(_Cpu):
    """An array's GPU, and the stream that its library works on. Within it that GPU is the current one; all that the call starts
    is done before what its arrays' libraries start next: it is on that stream, or over where the library does not say which,
    and where an array is of another one, which may write to its memory again as soon as the call has let go of it."""

    def __init__(self, operation: str, name: str, x: Any, device: tuple[int, int], others: tuple[Any, ...]) -> None:
        super().__init__(operation, name, x, _namespace(x, on_gpu=True))
        self.device = device
        package = _package(x)
        self.waits = any(hasattr(y, "__dlpack_device__") and _package(y) != package for y in others)

    def __enter__(self) -> None:
        self.before = _heddle.exchange_current_gpu(self.device[1])
        try:
            stream = stream_of(self.namespace, self.device)
            self.waits |= stream is None
            self.stream = 0 if stream is None or stream == _LEGACY_STREAM else stream
            if _heddle.validates():
                _heddle.raise_bad_index(self.stream)
        except BaseException:
            _heddle.exchange_current_gpu(self.before)
            raise

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        try:
            if self.waits and kind is None:
                _heddle.wait_for(self.stream)
        finally:
            _heddle.exchange_current_gpu(self.before)

    def _empty(self, shape: tuple[int, ...], code: int) -> Any:
        make, dtype = (getattr(self.namespace, name, None) for name in ("empty", _DTYPES[code]))
        if make is None or dtype is None or _immutable(self.model):
            raise ValueError(
                f"[{self.operation}] {self.name} is a {type(self.model).__name__} on a GPU, whose library makes no array of "
                f"{_DTYPES[code]} that Heddle could write: give out, and lse_out for lse"
            )
        try:
            return make(shape, dtype=dtype, device=self.model.device)
        except TypeError:  # older than the array API's `device`: on the current GPU
            return make(shape, dtype=dtype)

    def _owned(self, memory: Any) -> Any:
        return memory


def _place(operation: str, name: str, x: Any, others: tuple[Any, ...]) -> Any:
    """Where a call runs, by its first array; others: its other arguments."""
    if isinstance(x, np.ndarray):
        return _Numpy(operation, name, x)
    if hasattr(x, "__dlpack_device__") and _heddle.cuda_built():
        kind, number = map(int, x.__dlpack_device__())
        if kind in _GPUS:  # what is elsewhere the native module refuses by name
            return _Gpu(operation, name, x, (kind, number), others)
    return _Cpu(operation, name, x, _namespace(x, on_gpu=False))


def _four(x: Any) -> Any:
    """A numpy bias or mask with leading extents of 1 added."""
    return x[(None,) * (4 - x.ndim)] if isinstance(x, np.ndarray) and x.ndim < 4 else x


def _out_code(code: int, items: Any) -> int:
    """The result's dtype beside operands of dtype `code`."""
    return _FLOAT32 if items[FLOAT32_OUT] else _BFLOAT16 if code == _FLOAT8 else code


def _attend(operation, call, q, v, others, items, return_lse, out, lse_out):
    """call: the native function, of the results, the options and the stream. others: arrays that it has besides q and v."""
    if items[DROPOUT_P] != 0 and items[DROPOUT_SEED] is None:
        name = operation.removesuffix("_forward")
        raise ValueError(f"[{name}] dropout_p is {items[DROPOUT_P]} and dropout_seed is missing: give a seed")
    items = list(items)
    items[BIAS], items[MASK] = _four(items[BIAS]), _four(items[MASK])
    q_shape, code = _heddle.describe(q, operation, "q")
    v_shape, _ = _heddle.describe(v, operation, "v")
    packed = items[CU_SEQLENS_Q] is not None
    if return_lse:
        check_rank(q_shape, packed, operation)
    place = _place(operation, "q", q, (v, *others, out, lse_out, *items))
    with place:
        o = place.memory("out", out, q_shape[:-1] + v_shape[-1:], _out_code(code, items))
        lse = place.memory("lse_out", lse_out, lse_shape(q_shape, packed), _FLOAT32) if return_lse else None
        call(o, lse, tuple(items), place.stream)
    out = place.returned(out, o)
    return (out, place.returned(lse_out, lse)) if return_lse else out


def attention(q, k, v, items, return_lse, out=None, lse_out=None):
    """See heddle.attention."""

    def call(o, lse, items, stream):
        _heddle.attention_forward(q, k, v, o, lse, items, False, stream)

    return _attend("attention_forward", call, q, v, (k,), items, return_lse, out, lse_out)


def attention_backward(
    q, k, v, o, lse, d_o, d_lse, gradients: tuple[Any, Any, Any, Any, Any], items, accumulate, merged
):
    """See heddle.attention_backward. gradients: dq, dk, dv, dbias and dsink."""
    if items[DROPOUT_P] != 0 and items[DROPOUT_SEED] is None:
        raise ValueError(
            f"[attention_backward] dropout_p is {items[DROPOUT_P]} and dropout_seed is missing: give the forward's"
        )
    items = list(items)
    items[BIAS], items[MASK] = _four(items[BIAS]), _four(items[MASK])
    gradients = (*gradients[:3], _four(gradients[3]), gradients[4])
    _check_written("attention_backward", **dict(zip(("dq", "dk", "dv", "dbias", "dsink"), gradients)))
    place = _place("attention_backward", "q", q, (k, v, o, lse, d_o, d_lse, *gradients, *items))
    with place:
        _heddle.attention_backward(
            q, k, v, o, lse, d_o, d_lse, *gradients, tuple(items), False, accumulate, merged, place.stream
        )


def sparse_attention(q, k, v, lists: tuple[Any, Any, Any, Any, Any], items, return_lse, out=None, lse_out=None):
    """See heddle.sparse_attention. lists: blocks, counts, offsets, block_size and query_rows."""

    def call(o, lse, items, stream):
        _heddle.sparse_attention_forward(q, k, v, *lists, o, lse, items, stream)

    return _attend("sparse_attention_forward", call, q, v, (k, *lists), items, return_lse, out, lse_out)


def adaptive_attention(q, k, v, tol, on_exceed, items):
    """See heddle.adaptive_attention."""
    operation = "adaptive_attention_forward"
    q_shape, code = _heddle.describe(q, operation, "q")
    v_shape, _ = _heddle.describe(v, operation, "v")
    packed = items[CU_SEQLENS_Q] is not None
    check_rank(q_shape, packed, operation)
    rows = lse_shape(q_shape, packed)
    place = _place(operation, "q", q, (k, v, *items))
    with place:
        o = place.memory("out", None, q_shape[:-1] + v_shape[-1:], _out_code(code, items))
        lse, bound = (place.memory(name, None, rows, _FLOAT32) for name in ("lse", "bound"))
        _heddle.adaptive_attention_forward(q, k, v, tol, on_exceed, o, lse, bound, None, items, place.stream)
    return tuple(place.returned(None, x) for x in (o, lse, bound))


def pool_keys(x, block, stride, cu_seqlens, seqused, out=None):
    """See heddle.nsa.pool_keys."""
    shape, code = _heddle.describe(x, "pool_keys", "x")
    packed = cu_seqlens is not None
    check_pooled(shape, packed)
    keys = shape[-3]
    rows = keys // stride if packed else max(0, (keys - block) // stride + 1)
    place = _place("pool_keys", "x", x, (cu_seqlens, seqused, out))
    with place:
        pooled = place.memory("out", out, (*shape[:-3], rows, *shape[-2:]), code)
        _heddle.pool_keys(x, pooled, block, stride, cu_seqlens, seqused, place.stream)
    return place.returned(out, pooled)


def extend_pooled_keys(x, k_pooled, block, stride, seqused, appended, page_table):
    """See heddle.nsa.extend_pooled_keys."""
    _check_written("extend_pooled_keys", k_pooled=k_pooled)
    place = _place("extend_pooled_keys", "k_pooled", k_pooled, (x, seqused, page_table))
    with place:
        _heddle.extend_pooled_keys(x, k_pooled, block, stride, seqused, appended, page_table, place.stream)


def select_blocks(
    q,
    k_pooled,
    n,
    lse,
    sizes: tuple[Any, Any, Any],
    forced,
    scale,
    sequences: tuple[Any, Any, Any],
    q_offset,
    q_step,
    longest: tuple[Any, Any],
    out=None,
):
    """See heddle.nsa.select_blocks; hosts.torch.nsa_operators.select_blocks has what the arguments are."""
    q_shape, _ = _heddle.describe(q, "select_blocks", "q")
    k_shape, _ = _heddle.describe(k_pooled, "select_blocks", "k_pooled")
    check_chosen(q_shape, k_shape, *(starts is not None for starts in sequences[:2]))
    q_offset = int_offsets("q_offset", q_offset, q, sequences[0])
    place = _place("select_blocks", "q", q, (k_pooled, lse, *sequences, q_offset, out))
    with place:
        blocks = place.memory("out", out, (*q_shape[:-2], k_shape[-2], n), _INT32)
        if out is not None:
            check_list_length(_heddle.describe(out, "select_blocks", "out")[0], n)
        _heddle.select_blocks(
            q, k_pooled, lse, blocks, *sizes, forced, scale, *sequences, q_offset, q_step, *longest, place.stream
        )
    return place.returned(out, blocks)


def apply_rotary(x, cos, sin, interleaved, offsets, out=None):
    """See heddle.apply_rotary."""
    shape, code = _heddle.describe(x, "apply_rotary", "x")
    place = _place("apply_rotary", "x", x, (cos, sin, offsets, out))
    with place:
        turned = place.memory("out", out, shape, code)
        _heddle.apply_rotary(x, turned, cos, sin, interleaved, offsets, place.stream)
    return place.returned(out, turned)


def append_kv_cache(
    k_new, v_new, k_cache, v_cache, seqlens, page_table, cache_batch_idx, cos, sin, interleaved, k_scale, v_scale
):
    """See heddle.append_kv_cache."""
    _check_written("append_kv_cache", k_cache=k_cache, v_cache=v_cache)
    others = (k_new, v_new, v_cache, seqlens, page_table, cache_batch_idx, cos, sin, k_scale, v_scale)
    place = _place("append_kv_cache", "k_cache", k_cache, others)
    with place:
        _heddle.append_kv_cache(
            k_new,
            v_new,
            k_cache,
            v_cache,
            seqlens,
            page_table,
            cache_batch_idx,
            cos,
            sin,
            interleaved,
            k_scale,
            v_scale,
            place.stream,
        )


def attention_with_kv_cache(
    q, k_new, v_new, k_cache, v_cache, cos, sin, interleaved, items, return_lse, out=None, lse_out=None
):
    """See heddle.attention_with_kv_cache."""
    q_shape, code = _heddle.describe(q, "attention_with_kv_cache", "q")
    v_shape, _ = _heddle.describe(v_cache, "attention_with_kv_cache", "v_cache")
    check_rank(q_shape, False)
    _check_written("attention_with_kv_cache", k_cache=k_cache, v_cache=v_cache)
    others = (k_new, v_new, k_cache, v_cache, cos, sin, out, lse_out, *items)
    place = _place("attention_with_kv_cache", "q", q, others)
    with place:
        o = place.memory("out", out, q_shape[:-1] + v_shape[-1:], _out_code(code, items))
        lse = place.memory("lse_out", lse_out, lse_shape(q_shape, False), _FLOAT32) if return_lse else None
        _heddle.attention_with_kv_cache(
            q, k_new, v_new, k_cache, v_cache, o, lse, cos, sin, interleaved, items, place.stream
        )
    out = place.returned(out, o)
    return (out, place.returned(lse_out, lse)) if return_lse else out


def linear(x, weights, options, out=None):
    """See heddle.lowbit.linear. weights, options: as the native module takes them."""
    shape, code = _heddle.describe(x, "linear_forward", "x")
    _, rows, columns, gated, *_, data, kept = weights
    if shape[-1] != columns:  # before memory for the result is asked for
        raise ValueError(
            f"[linear_forward] x is {list(shape)} and weights have {columns} columns: x must be [..., {columns}]"
        )
    place = _place("linear_forward", "x", x, (data, kept, *options, out))
    with place:
        y = place.memory("out", out, (*shape[:-1], rows // 2 if gated else rows), code)
        _heddle.linear_forward(x, weights, y, options, place.stream)
    return place.returned(out, y)


def merge_attention(os, lses, sink, float32_out, out=None, lse_out=None):
    """See heddle.merge_attention."""
    shape, code = _heddle.describe(os[0], "merge_attention", "os[0]")
    if len(shape) not in (3, 4):  # before memory for the results is asked for
        raise ValueError(
            f"[merge_attention] os[0] has {len(shape)} dimensions: it must be [B, Sq, H, Dv], or packed [total_q, H, Dv]"
        )
    if float32_out and out is not None and (found := _heddle.describe(out, "merge_attention", "out")[1]) != _FLOAT32:
        raise ValueError(f"[merge_attention] out is {_DTYPES[found]}: it must be float32, which was asked for")
    place = _place("merge_attention", "os[0]", os[0], (*os, *lses, sink, out, lse_out))
    with place:
        o = place.memory("out", out, shape, _FLOAT32 if float32_out else code)
        lse = place.memory("lse_out", lse_out, lse_shape(shape, len(shape) == 3), _FLOAT32)
        _heddle.merge_attention(os, lses, sink, o, lse, place.stream)
    return place.returned(out, o), place.returned(lse_out, lse)
