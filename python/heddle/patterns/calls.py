"""Attention under a pattern."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from .. import _heddle
from .._options import CAUSAL_CODES
from ..hosts import is_torch
from ..sparse import sparse_attention
from .lists import NAME
from .pattern import Pattern, parse

if TYPE_CHECKING:
    from .._types import AnyArray, Array


def attention(
    q: Array,
    k: Array,
    v: Array,
    pattern: Pattern | str,
    *,
    causal: bool = False,
    cu_seqlens_q: AnyArray | Sequence[int] | None = None,
    cu_seqlens_k: AnyArray | Sequence[int] | None = None,
    block_size: int = 64,
    query_rows: int = 64,
    **options: Any,
) -> Any:
    """Attention under a pattern: ``heddle.sparse_attention`` with the pattern's lists, which are made once for each length and kept.

    Args:
      q, k, v: as for ``sparse_attention``: [B, Sq, H, D], [B, Sk, Hkv, D], [B, Sk, Hkv, Dv], or packed. Rows are the last positions.
      pattern: a Pattern, or its expression.
      causal: a row attends no key behind its own position.
      cu_seqlens_q, cu_seqlens_k: of packed sequences: int32 [sequences + 1], or ints. On a GPU they are waited for, ints are not.
      block_size, query_rows: of the lists; see ``Pattern.lists``.
      options: those of ``sparse_attention`` beside lists, and return_lse.

    Returns:
      as ``sparse_attention``.

    Raises:
      ValueError: as ``Pattern.lists`` and ``sparse_attention``.
      TypeError: a causal that is no bool, a pattern that is none.
    """
    if isinstance(pattern, str):
        pattern = parse(pattern)
    if not isinstance(pattern, Pattern):
        raise TypeError(f"[{NAME}] pattern is a {type(pattern).__name__}: it must be a Pattern, or a str")
    if isinstance(causal, str) and causal in CAUSAL_CODES:
        raise TypeError(f"[{NAME}] causal is {causal!r}: it must be True or False, as rows are the last positions")
    of_q, of_k = (_shape(x, name) for x, name in ((q, "q"), (k, "k")))
    make: Callable[..., dict[str, Any]] = functools.partial(
        pattern.lists,
        heads=of_q[-2],
        causal=causal,
        block_size=block_size,
        query_rows=query_rows,
        device=q.device if is_torch(q) else None,  # type: ignore[attr-defined]
    )
    if cu_seqlens_q is not None:
        lists = make(cu_seqlens=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    else:
        lists = make((of_q[1], of_k[1]), batch=max(of_q[0], 1))
    return sparse_attention(q, k, v, **lists, **options)


def _shape(x: Any, name: str) -> tuple[int, ...]:
    shape = tuple(x.shape) if hasattr(x, "shape") else _heddle.describe(x, "sparse_attention_forward", name)[0]
    if len(shape) < 3:
        raise ValueError(f"[{NAME}] {name} is {list(shape)}: it must be [B, S, H, D], or packed [total, H, D]")
    return shape
