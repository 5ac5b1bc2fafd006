"""What the reference functions refuse before anything is computed: argument, value and rule."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import Any, NamedTuple, TypeVar

import torch

from .. import _heddle
from .._options import DTYPE_CODES
from ..hosts.torch import direct
from ..hosts.torch.checks import WRITES, check_outputs, one_device, refuse_gradients

INDEX_DTYPES = (torch.int32, torch.int64)
LARGEST, LARGEST_INT64 = torch.iinfo(torch.int32).max, torch.iinfo(torch.int64).max

_Name = TypeVar("_Name", bound=str)


class Span(NamedTuple):
    """Where one sequence lies: rows of q and keys of k in the batch entry ``batch``. The rows are its last positions."""

    batch: int
    rows: slice
    keys: slice

    @property
    def first(self) -> int:
        """The position of its first row."""
        return (self.keys.stop - self.keys.start) - (self.rows.stop - self.rows.start)


def shown(value: Any) -> str:
    if value is None or isinstance(value, (str, int, float, tuple, list)):
        return repr(value)
    return f"a {type(value).__name__}"


def integer(operation: str, name: str, value: Any, least: int) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"[{operation}] {name} is {shown(value)}: it must be an int") from None
    if number < least:
        raise ValueError(f"[{operation}] {name} is {number}: it must be at least {least}")
    if number > LARGEST_INT64:
        raise ValueError(f"[{operation}] {name} is {number}: it must be below 2^63")
    return number


def one_of(operation: str, name: str, value: Any, names: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in names:
        raise ValueError(f"[{operation}] {name} is {shown(value)}: it must be one of {', '.join(map(repr, names))}")


def some_of(operation: str, name: str, values: Iterable[_Name], names: tuple[_Name, ...]) -> frozenset[_Name]:
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise TypeError(f"[{operation}] {name} is {shown(values)}: it must be a tuple of {', '.join(map(repr, names))}")
    values = tuple(values)
    for value in values:
        one_of(operation, f"an element of {name}", value, names)
    return frozenset(values)


def no_head_first(operation: str, head_first: Any) -> None:
    if head_first is not False:
        raise ValueError(
            f"[{operation}] head_first is {shown(head_first)}: it must be False, since tensors are [B, T, H, D]; give "
            "q.transpose(1, 2) and so on"
        )


def scale_of(operation: str, scale: Any, q: torch.Tensor) -> float:
    if scale is None:
        return 1 / math.sqrt(q.shape[-1])
    return given_scale(operation, scale)


def given_scale(operation: str, scale: Any) -> float:
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise TypeError(f"[{operation}] scale is {shown(scale)}: it must be a number, or None for 1 / sqrt(D)")
    if not -math.inf < scale < math.inf:  # not isfinite(), through which tracing cannot look
        raise ValueError(f"[{operation}] scale is {scale}: it must be finite")
    return float(scale)


def _tensor(operation: str, name: str, x: Any) -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"[{operation}] {name} is {shown(x)}: it must be a torch tensor")
    if x.is_nested or x.layout is not torch.strided:
        raise TypeError(f"[{operation}] {name} is nested or sparse: it must be a tensor of one shape, torch.strided")


def _same_device(operation: str, name: str, x: torch.Tensor, q: torch.Tensor) -> None:
    if x.device != q.device:
        raise ValueError(f"[{operation}] {name} is on {x.device} and q on {q.device}: they must be on one device")


def operands(operation: str, q: Any, k: Any, v: Any) -> None:
    """q [B, Tq, HQ, D], k [B, Tk, H, D], v [B, Tk, H, Dv], Tq <= Tk."""
    for name, x, shape in (("q", q, "[B, T, HQ, D]"), ("k", k, "[B, T, H, D]"), ("v", v, "[B, T, H, Dv]")):
        _tensor(operation, name, x)
        if x.dim() != 4:
            raise ValueError(
                f"[{operation}] {name} has {x.dim()} dimensions: it must be {shape}; found {list(x.shape)}"
            )
        if not x.dtype.is_floating_point:
            raise ValueError(f"[{operation}] {name} is {str(x.dtype)[6:]}: it must be a floating-point tensor")
        if x.dtype != q.dtype:
            raise ValueError(f"[{operation}] {name} is {str(x.dtype)[6:]}: it must be {str(q.dtype)[6:]}, as q is")
        _same_device(operation, name, x, q)
    found = f"found q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    if not (q.shape[0] == k.shape[0] == v.shape[0]):
        raise ValueError(f"[{operation}] q, k and v must have the same batch; {found}")
    if k.shape[1:3] != v.shape[1:3]:
        raise ValueError(f"[{operation}] v must have k's length and heads; {found}")
    if q.shape[3] != k.shape[3] or q.shape[3] == 0:
        raise ValueError(f"[{operation}] q and k must have the same head size, at least 1; {found}")
    if k.shape[2] == 0 or q.shape[2] == 0 or q.shape[2] % k.shape[2] != 0:
        raise ValueError(f"[{operation}] q's heads must be a multiple of k's; {found}")
    if q.shape[1] > k.shape[1]:
        raise ValueError(f"[{operation}] q must not be longer than k, whose last positions its rows are; {found}")


def like(operation: str, name: str, x: Any, model_name: str, model: torch.Tensor) -> torch.Tensor:
    """An operand of another branch: model itself if x is None."""
    if x is None:
        return model
    _tensor(operation, name, x)
    if x.shape != model.shape or x.dtype != model.dtype:
        raise ValueError(
            f"[{operation}] {name} is {str(x.dtype)[6:]} {list(x.shape)} and {model_name} is {str(model.dtype)[6:]} "
            f"{list(model.shape)}: they must be alike"
        )
    _same_device(operation, name, x, model)
    return x


def of_branch(
    operation: str, name: str, x: Any, model_name: str, model: torch.Tensor, own: bool
) -> torch.Tensor | None:
    """New keys or values of a branch that has its own in a cache, or has none there."""
    if not own:
        if x is not None:
            raise ValueError(f"[{operation}] {name} is given: the cache was made without such keys in own_keys")
        return None
    if x is None:
        raise ValueError(f"[{operation}] {name} is None: the cache was made with such keys in own_keys")
    return like(operation, name, x, model_name, model)


def gate(operation: str, name: str, x: Any, q: torch.Tensor) -> None:
    """[B, Tq, HQ], any floating-point dtype."""
    _tensor(operation, name, x)
    if x.shape != q.shape[:3]:
        raise ValueError(
            f"[{operation}] {name} is {list(x.shape)}: it must be [B, T, HQ], a number for each row and head of q "
            f"{list(q.shape)}"
        )
    if not x.dtype.is_floating_point:
        raise ValueError(f"[{operation}] {name} is {str(x.dtype)[6:]}: it must be a floating-point tensor")
    _same_device(operation, name, x, q)


def gate_or_ones(operation: str, name: str, x: Any, q: torch.Tensor) -> torch.Tensor:
    if x is None:
        return q.new_ones(()).expand(q.shape[:3])
    gate(operation, name, x, q)
    found: torch.Tensor = x
    return found


_READABLE = frozenset(getattr(torch, name) for name in DTYPE_CODES)


def out(operation: str, x: Any, shape: tuple[int, ...], read: dict[str, torch.Tensor | None]) -> None:
    """What the caller has for a result of that shape and q's dtype. read: q and the call's other tensors."""
    check_outputs(operation, x)
    refuse_gradients(operation, (*read, "out"), (*read.values(), x), WRITES)
    q = read["q"]
    assert q is not None
    if x.shape != shape:
        raise ValueError(f"[{operation}] out is {list(x.shape)}: it must be [B, n, HQ, Dv], here {list(shape)}")
    if x.dtype != q.dtype:
        raise ValueError(f"[{operation}] out is {str(x.dtype)[6:]}: it must be {str(q.dtype)[6:]}, as q is")
    one_device(operation, ("q", "out"), (q, x))
    if direct.is_direct(q, x, x):
        # What has another dtype is converted, and so read, before out is written.
        there = {name: y for name, y in read.items() if y is not None and direct.plain(y) and y.dtype in _READABLE}
        _heddle.check_out(operation, x, list(there), list(there.values()))


def lists(operation: str, block_indices: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """[B, Tq, H, S]. Any values are taken."""
    _tensor(operation, "block_indices", block_indices)
    if block_indices.dim() != 4 or block_indices.shape[:3] != (*q.shape[:2], k.shape[2]):
        raise ValueError(
            f"[{operation}] block_indices is {list(block_indices.shape)}: it must be [B, T, H, S], a list for each row of q "
            f"{list(q.shape)} and head of k {list(k.shape)}"
        )
    if block_indices.dtype not in INDEX_DTYPES:
        raise ValueError(f"[{operation}] block_indices is {str(block_indices.dtype)[6:]}: it must be int32 or int64")
    _same_device(operation, "block_indices", block_indices, q)
    found: torch.Tensor = block_indices
    return found


def counts(operation: str, block_counts: Any, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, int]:
    """int64 [B, Tq, H] and the largest, from an int or a tensor of that shape."""
    shape = (*q.shape[:2], k.shape[2])
    if not isinstance(block_counts, torch.Tensor):
        number = integer(operation, "block_counts", block_counts, 0)
        return torch.full(shape, number, dtype=torch.int64, device=q.device), number
    checked_counts(operation, block_counts, q, k)
    return block_counts.long(), _largest(block_counts)


def _largest(block_counts: torch.Tensor) -> int:
    return max(0, int(block_counts.max())) if block_counts.numel() else 0


def checked_counts(operation: str, block_counts: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> None:
    shape = (*q.shape[:2], k.shape[2])
    if block_counts.shape != shape:
        raise ValueError(
            f"[{operation}] block_counts is {list(block_counts.shape)}: it must be an int or [B, T, H], here {list(shape)}"
        )
    if block_counts.dtype not in INDEX_DTYPES:
        raise ValueError(f"[{operation}] block_counts is {str(block_counts.dtype)[6:]}: it must be int32 or int64")
    _same_device(operation, "block_counts", block_counts, q)


def slots_and_counts(
    operation: str, block_counts: Any, q: torch.Tensor, k: torch.Tensor, most: int | None = None
) -> tuple[int, torch.Tensor | None]:
    """The longest list, and how long each is, int32 [B, Tq, H]; None where all are as long. most: no list is longer; without
    it a tensor is read."""
    if not isinstance(block_counts, torch.Tensor):
        slots = integer(operation, "block_counts", block_counts, 0)
        return slots if most is None else min(slots, most), None
    checked_counts(operation, block_counts, q, k)
    if most is None:
        most = _largest(block_counts)
    return most, block_counts.clamp(0, min(most, LARGEST)).int()


def compression(operation: str, block_size: int, block: Any, stride: Any, compress: Any) -> tuple[int, int]:
    """(block, stride) of the compressed keys; both are block_size if not given."""
    block = block_size if block is None else integer(operation, "compression_block", block, 1)
    stride = block if stride is None else integer(operation, "compression_stride", stride, 1)
    for name, size in (("compression_block", block), ("block_size", block_size)):
        if size % stride != 0:
            raise ValueError(f"[{operation}] {name} is {size}: it must be a multiple of compression_stride, {stride}")
    callable_or_none(operation, compress)
    return block, stride


def callable_or_none(operation: str, compress: Any) -> None:
    if compress is None:
        return
    if not callable(compress) or isinstance(compress, type):
        raise TypeError(
            f"[{operation}] compress is {shown(compress)}: it must be callable (a heddle.nn.BlockCompression(D, block), say), "
            "or None for the mean of a block"
        )


def _is_starts(operation: str, name: str, x: Any) -> None:
    _tensor(operation, name, x)
    if x.dim() != 1 or len(x) < 2 or x.dtype not in INDEX_DTYPES:
        raise ValueError(
            f"[{operation}] {name} is {str(x.dtype)[6:]} {list(x.shape)}: it must be int32 or int64 [N + 1], N at least 1"
        )


def _starts(operation: str, name: str, x: Any, length: int, owner: str) -> list[int]:
    _is_starts(operation, name, x)
    starts: list[int] = x.tolist()
    if starts[0] != 0:
        raise ValueError(f"[{operation}] {name}[0] is {starts[0]}: it must be 0")
    for n, (start, end) in enumerate(zip(starts, starts[1:])):
        if end < start:
            raise ValueError(f"[{operation}] {name}[{n + 1}] is {end}: it must be at least the one before, {start}")
    if starts[-1] != length:
        raise ValueError(
            f"[{operation}] {name}[{len(starts) - 1}] is {starts[-1]}: it must be the length of {owner}, {length}"
        )
    return starts


def anchor_first(operation: str, owner: str, first: int, query_stride: int) -> None:
    if first % query_stride != 0:
        raise ValueError(
            f"[{operation}] the first row of {owner} stands at position {first}: it must be a multiple of query_stride, "
            f"{query_stride}, since the row takes from an anchor that is not among the rows"
        )


def spans(operation: str, q: torch.Tensor, k: torch.Tensor, cu_seqlens: Any, query_stride: int) -> list[Span]:
    """The sequences of a call. With a stride, the first row of each is an anchor."""
    if cu_seqlens is None:
        found = [Span(b, slice(0, q.shape[1]), slice(0, k.shape[1])) for b in range(q.shape[0])]
    else:
        (q_name, of_q), (k_name, of_k) = _pair_of_starts(operation, q, cu_seqlens)
        q_starts = _starts(operation, q_name, of_q, q.shape[1], "q")
        k_starts = _starts(operation, k_name, of_k, k.shape[1], "k")
        _as_many(operation, len(q_starts), len(k_starts))
        edges = zip(q_starts, q_starts[1:], k_starts, k_starts[1:])
        found = [Span(0, slice(q0, q1), slice(k0, k1)) for q0, q1, k0, k1 in edges]
    for n, span in enumerate(found):
        if span.first < 0:
            raise ValueError(
                f"[{operation}] sequence {n} has {span.rows.stop - span.rows.start} rows of q and "
                f"{span.keys.stop - span.keys.start} keys: q must not be longer than k, whose last positions its rows are"
            )
        if span.rows.stop > span.rows.start:
            anchor_first(operation, f"sequence {n}", span.first, query_stride)
    return found


def _pair_of_starts(operation: str, q: torch.Tensor, cu_seqlens: Any) -> tuple[tuple[str, Any], tuple[str, Any]]:
    """What is given for q and for k, and its name."""
    if q.shape[0] != 1:
        raise ValueError(f"[{operation}] q is {list(q.shape)}: with cu_seqlens the batch must be 1")
    if not isinstance(cu_seqlens, (tuple, list)):
        return ("cu_seqlens", cu_seqlens), ("cu_seqlens", cu_seqlens)
    if len(cu_seqlens) != 2:
        raise ValueError(
            f"[{operation}] cu_seqlens has {len(cu_seqlens)} elements: it must be a tensor, or a pair (of q, of k)"
        )
    return ("cu_seqlens[0]", cu_seqlens[0]), ("cu_seqlens[1]", cu_seqlens[1])


def _as_many(operation: str, of_q: int, of_k: int) -> None:
    if of_q != of_k:
        raise ValueError(
            f"[{operation}] cu_seqlens has {of_q - 1} sequences of q and {of_k - 1} of k: they must be as many"
        )


def packed(
    operation: str, q: torch.Tensor, k: torch.Tensor, cu_seqlens: Any, max_seqlen: Any, query_stride: int
) -> tuple[torch.Tensor, torch.Tensor, tuple[int, int]]:
    """Starts of the sequences of q and of k, and lengths that none of them exceeds. With max_seqlen the starts are not read:
    on a GPU that would wait for it."""
    if max_seqlen is None:
        found = spans(operation, q, k, cu_seqlens, query_stride)
        longest = (
            max(span.rows.stop - span.rows.start for span in found),
            max(span.keys.stop - span.keys.start for span in found),
        )
        of_q, of_k = (x for _, x in _pair_of_starts(operation, q, cu_seqlens))
        return of_q, of_k, longest
    (q_name, of_q), (k_name, of_k) = _pair_of_starts(operation, q, cu_seqlens)
    for name, x in ((q_name, of_q), (k_name, of_k)):
        _is_starts(operation, name, x)
        _same_device(operation, name, x, q)
    _as_many(operation, len(of_q), len(of_k))
    if not isinstance(max_seqlen, (tuple, list)):
        longest_of_both = integer(operation, "max_seqlen", max_seqlen, 1)
        return of_q, of_k, (longest_of_both, longest_of_both)
    if len(max_seqlen) != 2:
        raise ValueError(
            f"[{operation}] max_seqlen has {len(max_seqlen)} elements: it must be an int, or a pair (of q, of k)"
        )
    of_rows, of_keys = (integer(operation, f"max_seqlen[{n}]", x, 1) for n, x in enumerate(max_seqlen))
    return of_q, of_k, (of_rows, of_keys)
