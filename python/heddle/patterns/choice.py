"""A pattern for each head, by what it costs and how far its sampled rows are off."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from .._options import CAUSAL_CODES
from ..audit import errors_of, exact_rows, sequences_of
from ..hosts import is_torch
from .calls import attention
from .lists import NAME, int_of
from .pattern import Pattern, by_head, parse

if TYPE_CHECKING:
    from collections.abc import Sequence

ALL_KEYS = "strided(1)"


@dataclasses.dataclass(frozen=True)
class HeadChoice:
    """What ``per_head`` chose.

    Attributes:
      pattern: ``by_head`` of the chosen expressions.
      chosen: the expression of each head.
      errors: of each candidate that was computed, cheapest first, the quantile of the errors of each head's sampled rows, in units
        of the largest norm of a value. Of "strided(1)", all keys, none: it is exact.
      tiles: the share of tiles that each of these computes.
    """

    pattern: Pattern
    chosen: tuple[str, ...]
    errors: dict[str, tuple[float, ...]]
    tiles: dict[str, float]


def per_head(
    q: Any,
    k: Any,
    v: Any,
    candidates: Sequence[Pattern | str],
    error: float,
    *,
    quantile: float = 0.99,
    rows: int = 32,
    seed: int = 0,
    causal: bool = False,
    block_size: int = 64,
    query_rows: int = 64,
) -> HeadChoice:
    """For each head the cheapest of some patterns whose sampled rows are near enough to exact attention; all keys where none is.

    Candidates are computed from the cheapest on, for all heads, until each head has one. Rows are drawn and computed as by
    ``heddle.audit_attention``: what is promised is the error of those rows, and of other inputs nothing. For use before a model is
    served: results are waited for, and a row takes what the reference takes for it.

    Args:
      q, k, v: arrays or torch tensors, [B, Sq, H, D], [B, Sk, Hkv, D], [B, Sk, Hkv, Dv]; rows are the last positions.
      candidates: patterns for one head, or their expressions; at least one.
      error: most that the quantile may be, above 0, in units of the largest norm of a value of the sequence and kv head.
      quantile: of the errors of a head's rows, from 0 to 1.
      rows: how many rows to draw, over all sequences, at least 1; seed: of numpy's generator that draws them.
      causal, block_size, query_rows: as for ``heddle.patterns.attention``, also for what a pattern costs: the tiles that it keeps.

    Raises:
      ValueError: no candidate, a pattern of several heads, numbers out of range, packed operands.
      TypeError: what is no pattern, no number.
    """
    if isinstance(candidates, (str, Pattern)) or not len(candidates):
        raise ValueError(f"[{NAME}] candidates is {candidates!r}: it must be patterns, at least one")
    found = [parse(x) if isinstance(x, str) else x for x in candidates]
    for pattern in found:
        if not isinstance(pattern, Pattern):
            raise TypeError(f"[{NAME}] a candidate is a {type(pattern).__name__}: it must be a Pattern, or a str")
        if len(pattern.expressions) != 1:
            raise ValueError(f"[{NAME}] a candidate is {pattern!r}: it must be a pattern for one head")
    for name, x in (("error", error), ("quantile", quantile)):
        if isinstance(x, bool) or not isinstance(x, (int, float)):
            raise TypeError(f"[{NAME}] {name} is {x!r}: it must be a number")
    if not error > 0:
        raise ValueError(f"[{NAME}] error is {error}: it must be above 0")
    if not 0 <= quantile <= 1:
        raise ValueError(f"[{NAME}] quantile is {quantile}: it must be from 0 to 1")
    rows = int_of("rows", rows, 1)
    if len(q.shape) != 4 or 0 in q.shape[:3]:
        raise ValueError(
            f"[{NAME}] q is {list(q.shape)}: it must be [B, Sq, H, D], with rows; packed sequences one at a time"
        )
    heads, lengths = q.shape[2], (q.shape[1], k.shape[1])
    sizes: dict[str, Any] = {"causal": causal, "block_size": block_size, "query_rows": query_rows}
    cost = {str(x): x.kept(lengths, heads=heads, **sizes).tiles for x in found}
    code = CAUSAL_CODES["bottom_right" if causal else "none"]
    sequences = sequences_of(q, k, v, q, None, None, None)
    with _without_gradients(q):
        exact = list(exact_rows(sequences, rows, seed, code, {}))
    chosen: list[str | None] = [None] * heads
    errors: dict[str, tuple[float, ...]] = {}
    for expression in sorted(cost, key=lambda x: cost[x]):
        if all(chosen):
            break
        with _without_gradients(q):
            out = attention(q, k, v, expression, **sizes)
        of_rows = np.stack([errors_of(row, out[b, i], unit) for b, i, row, unit in exact])
        of_heads = np.quantile(of_rows, quantile, axis=0)
        errors[expression] = tuple(map(float, of_heads))
        chosen = [x or (expression if off <= error else None) for x, off in zip(chosen, of_heads)]
    names = tuple(x or ALL_KEYS for x in chosen)
    tiles = {x: cost[x] for x in errors} | ({ALL_KEYS: 1.0} if ALL_KEYS in names else {})
    return HeadChoice(by_head(*map(parse, names)), names, errors, tiles)


def _without_gradients(q: Any) -> contextlib.AbstractContextManager[Any]:
    if not is_torch(q):
        return contextlib.nullcontext()
    import torch

    return torch.no_grad()
