"""Lists of patterns, made by the native module and kept, as numpy arrays and torch tensors."""

from __future__ import annotations

import functools
import operator
from typing import Any, NamedTuple

import numpy as np

from .. import _heddle

NAME = "patterns"


def int_of(name: str, value: Any, least: int | None = None) -> int:
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"[{NAME}] {name} is {value!r}: it must be an int") from None
    if least is not None and number < least:
        raise ValueError(f"[{NAME}] {name} is {number}: it must be at least {least}")
    return number


def length_of(value: Any) -> tuple[int, int]:
    """(rows, keys) of seq_len."""
    if isinstance(value, tuple):
        if len(value) != 2:
            raise ValueError(f"[{NAME}] seq_len is {value!r}: it must be an int, or a pair of rows and keys")
        return int_of("seq_len[0]", value[0], 0), int_of("seq_len[1]", value[1], 0)
    return (int_of("seq_len", value, 0),) * 2


def bounds_of(name: str, value: Any) -> tuple[int, ...]:
    """cu_seqlens as ints."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if not isinstance(value, (list, tuple)):
        raise TypeError(
            f"[{NAME}] {name} is a {type(value).__name__}: it must be int32 [sequences + 1], or a list of ints"
        )
    bounds = tuple(int_of(f"{name}[{n}]", bound) for n, bound in enumerate(value))
    if len(bounds) < 2 or bounds[0] != 0:
        raise ValueError(
            f"[{NAME}] {name} is {list(bounds[:3])}...: it must begin with 0 and have an end for each sequence"
        )
    for n, (begin, end) in enumerate(zip(bounds, bounds[1:])):
        if end < begin:
            raise ValueError(f"[{NAME}] {name}[{n + 1}] is {end}: it must be at least the one before, {begin}")
    return bounds


class Asked(NamedTuple):
    """What lists are made of, but for the batch and where they go."""

    expressions: tuple[str, ...]
    length: tuple[int, int] | None
    starts: tuple[tuple[int, ...], tuple[int, ...]] | None  # cu_seqlens of rows and keys
    heads: int
    causal: bool
    block_size: int
    query_rows: int
    offsets: bool | None

    def made(self) -> tuple[Any, Any, Any, Any, tuple[int, int, int, int, int]]:
        """Of the native module: offsets [L, N + 1], blocks, mask_ids, masks, and counts."""
        packed = self.starts is not None
        if self.starts is not None:
            rows, keys = ([end - begin for begin, end in zip(x, x[1:])] for x in self.starts)
            if len(rows) != len(keys):
                raise ValueError(f"[{NAME}] cu_seqlens has {len(rows)} sequences and cu_seqlens_k has {len(keys)}")
            sequences = list(zip(rows, keys))
        else:
            assert self.length is not None
            sequences = [self.length]
        expressions = list(self.expressions)
        sizes = self.block_size, self.query_rows
        return _heddle.pattern_lists(expressions, self.heads, sequences, self.causal, *sizes, packed)


def _of_one_length(offsets: Any, values: Any, n: int) -> Any:
    """int32 [N, L, n] of what lies one behind the other, -1 behind each list's end."""
    units, lists = offsets.shape[0], offsets.shape[1] - 1
    out = np.full((lists, units, n), -1, np.int32)
    begins, lengths = offsets[:, :-1].ravel(), np.diff(offsets, axis=1).ravel()
    place = np.arange(len(values)) - np.repeat(begins, lengths)
    unit, number = np.divmod(np.repeat(np.arange(units * lists), lengths), max(lists, 1))
    out[number, unit, place] = values
    return out


@functools.lru_cache(maxsize=32)
def _arrays(asked: Asked) -> dict[str, Any]:
    """What lists() returns, without a batch, as numpy arrays."""
    offsets, blocks, ids, masks, _ = asked.made()
    longest = int(np.diff(offsets, axis=1).max(initial=0))
    csr = asked.offsets
    if csr is None:
        csr = offsets.shape[0] * (offsets.shape[1] - 1) * longest > 2 * len(blocks)
    out: dict[str, Any] = {}
    if csr:
        out |= {"blocks": blocks, "mask_ids": ids, "offsets": offsets}
    else:
        out |= {name: _of_one_length(offsets, x, longest) for name, x in (("blocks", blocks), ("mask_ids", ids))}
    if len(masks):
        out["masks"] = masks
    else:
        del out["mask_ids"]
    if asked.starts is not None:
        for side, x in zip("qk", asked.starts):
            out[f"cu_seqlens_{side}"] = np.asarray(x, np.int32)
    for x in out.values():
        x.flags.writeable = False  # whoever asks for the same gets these
    return out


@functools.lru_cache(maxsize=32)
def _tensors(asked: Asked, device: str) -> dict[str, Any]:
    import torch

    # Tensors for every mode, whichever is on where they are first asked for.
    with torch.inference_mode(False):
        return {name: torch.tensor(x, device=device) for name, x in _arrays(asked).items()}


def arguments(asked: Asked, batch: int, device: str | None) -> dict[str, Any]:
    out = dict(_arrays(asked) if device is None else _tensors(asked, device))
    if asked.starts is None:
        batched = ("offsets",) if "offsets" in out else ("blocks", "mask_ids")
        for name in batched:
            if name in out:
                x = out[name]
                shape = (batch, *x.shape)
                out[name] = np.broadcast_to(x, shape) if device is None else x.expand(shape)
    else:
        longest = (max(end - begin for begin, end in zip(x, x[1:])) for x in asked.starts)
        out |= zip(("max_seqlen_q", "max_seqlen_k"), longest)
    causal = "bottom_right" if asked.causal else "none"
    return out | {"block_size": asked.block_size, "query_rows": asked.query_rows, "causal": causal}
