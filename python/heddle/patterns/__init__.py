"""Patterns of sparse attention: which keys a row attends by where both stand, as expressions, and the lists of key blocks and masks
that say the same to ``heddle.sparse_attention``. docs/patterns.md has what each means.

>>> from heddle.patterns import attention, local, sink, strided
>>> pattern = local(128) | strided(32) | sink(4)
>>> pattern
local(128) | strided(32) | sink(4)
>>> out = attention(q, k, v, pattern, causal=True)          # q [B, S, H, D]
>>> pattern.kept(4096, causal=True)                         # the shares of tiles and of pairs that are computed
"""

from __future__ import annotations

from .._packed_masks import pack_masks
from .calls import attention
from .choice import HeadChoice, per_head
from .pattern import (
    Kept,
    Pattern,
    a_shape,
    by_head,
    columns,
    diagonals,
    dilated,
    global_tokens,
    local,
    parse,
    random,
    rows,
    sink,
    strided,
    vertical_slash,
)

__all__ = [
    "HeadChoice",
    "Kept",
    "Pattern",
    "a_shape",
    "attention",
    "by_head",
    "columns",
    "diagonals",
    "dilated",
    "global_tokens",
    "local",
    "pack_masks",
    "parse",
    "per_head",
    "random",
    "rows",
    "sink",
    "strided",
    "vertical_slash",
]


def __dir__() -> list[str]:
    return __all__
