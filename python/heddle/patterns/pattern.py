"""Patterns as expressions, and the functions that make them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .. import _heddle
from .._options import flag
from .lists import NAME, Asked, arguments, bounds_of, int_of, length_of

if TYPE_CHECKING:
    import torch

    from .._types import AnyArray


class Kept(NamedTuple):
    """What a pattern keeps, over all heads. With causality, of what causality leaves."""

    tiles: float  #: share of tiles, of query_rows rows and block_size keys, that are computed
    pairs: float  #: share of pairs of a row and a key that meet
    whole_tiles: int  #: tiles without a mask
    partial_tiles: int  #: tiles with one
    all_tiles: int  #: tiles that there are


class Pattern:
    """Which keys a row attends: an expression, or one for each head. ``parse`` and the functions beside it make them.

    ``a | b`` keeps the pairs of either, ``a & b`` those of both. What is printed is the expression, which ``parse`` reads and by
    which two are compared, in this order of its parts; of heads it is the call of ``by_head``. Immutable, and a key of dictionaries.
    """

    __slots__ = ("expressions",)

    expressions: tuple[str, ...]  #: one for all heads, or one for each

    def __init__(self, *expressions: str) -> None:
        """
        Args:
          expressions: one, or one for each head, as ``parse`` takes them.

        Raises:
          ValueError: what is no pattern, with the character and what was expected there.
          TypeError: what is no str.
        """
        if not expressions:
            raise ValueError(f"[{NAME}] there is no expression")
        for expression in expressions:
            if not isinstance(expression, str):
                raise TypeError(f"[{NAME}] an expression is a {type(expression).__name__}: it must be a str")
        object.__setattr__(self, "expressions", tuple(map(_heddle.pattern_text, expressions)))

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"[{NAME}] a Pattern cannot be changed")

    def __reduce__(self) -> tuple[type[Pattern], tuple[str, ...]]:
        return Pattern, self.expressions

    def __repr__(self) -> str:
        if len(self.expressions) == 1:
            return self.expressions[0]
        return f"by_head({', '.join(self.expressions)})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Pattern) and self.expressions == other.expressions

    def __hash__(self) -> int:
        return hash(self.expressions)

    def _joined(self, sign: str, other: object) -> Pattern:
        if not isinstance(other, Pattern):
            return NotImplemented
        one, two = self.expressions, other.expressions
        heads = max(len(one), len(two))
        if len(one) not in (1, heads) or len(two) not in (1, heads):
            raise ValueError(f"[{NAME}] patterns of {len(one)} and of {len(two)} heads cannot be joined")
        one, two = (x if len(x) == heads else x * heads for x in (one, two))
        return Pattern(*(f"({a}) {sign} ({b})" for a, b in zip(one, two)))

    def __or__(self, other: object) -> Pattern:
        return self._joined("|", other)

    def __and__(self, other: object) -> Pattern:
        return self._joined("&", other)

    def lists(
        self,
        seq_len: int | tuple[int, int] | None = None,
        *,
        cu_seqlens: AnyArray | Sequence[int] | None = None,
        cu_seqlens_k: AnyArray | Sequence[int] | None = None,
        heads: int | None = None,
        batch: int = 1,
        causal: bool = False,
        block_size: int = 64,
        query_rows: int = 64,
        offsets: bool | None = None,
        device: torch.device | str | None = None,
    ) -> dict[str, Any]:
        """The pattern as arguments of ``heddle.sparse_attention``: ``sparse_attention(q, k, v, **pattern.lists(...))``.

        The time and memory that it takes are those of the tiles that are kept (of ``a & b`` those of a and of b within reach of
        both), not of all there are. Equal masks are there once: what repeats, as ``strided``, has a handful.

        Args:
          seq_len: rows and keys of each sequence; or (rows, keys), of which rows are the last positions.
          cu_seqlens: in place of seq_len int32 [sequences + 1], or ints: packed sequences. On a GPU it is waited for.
          cu_seqlens_k: those of the keys, where they are others.
          heads: query heads. Needed where they differ: with ``random`` and ``by_head``.
          batch: sequences that are not packed, which have the same lists.
          causal: a row attends no key behind its own position. Beside the pattern in the call, and in no mask.
          block_size: keys of a block: 16, 32, 64 or 128.
          query_rows: rows that share a list, from 1 to 1024.
          offsets: whether lists are one behind the other (CSR), for lists of many lengths. None: if lists of one length would
            have more than twice the entries.
          device: torch tensors there; None: numpy arrays.

        Returns:
          blocks, int32 [batch, N, L, n] (packed [N, L, n]; with offsets [entries]), -1 behind a list's end; offsets if so; masks
          and mask_ids if a tile is partial; block_size, query_rows and causal; packed, also cu_seqlens_q, cu_seqlens_k,
          max_seqlen_q and max_seqlen_k.

        Raises:
          ValueError: more rows than keys, sizes that there are no kernels for, cu_seqlens that fall, both or neither length.
          TypeError: what is no int, no bool.
        """
        packed = cu_seqlens is not None
        if (seq_len is not None) == packed:
            raise ValueError(f"[{NAME}] give seq_len or cu_seqlens: " + ("not both" if packed else "neither is there"))
        if cu_seqlens_k is not None and not packed:
            raise ValueError(f"[{NAME}] cu_seqlens_k is given without cu_seqlens")
        if offsets is not None:
            offsets = flag(NAME, "offsets", offsets)
        starts = None
        if packed:
            starts = (
                bounds_of("cu_seqlens", cu_seqlens),
                bounds_of("cu_seqlens_k", cu_seqlens if cu_seqlens_k is None else cu_seqlens_k),
            )
        asked = Asked(
            self.expressions,
            None if packed else length_of(seq_len),
            starts,
            self._heads(heads),
            flag(NAME, "causal", causal),
            int_of("block_size", block_size, 1),
            int_of("query_rows", query_rows, 1),
            offsets,
        )
        return arguments(asked, int_of("batch", batch, 1), None if device is None else str(device))

    def mask(
        self, seq_len: int | tuple[int, int], *, heads: int | None = None, causal: bool = False
    ) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """bool [heads or 1, rows, keys], true where a row attends a key: pair by pair, for tests and pictures.

        Args:
          seq_len, heads, causal: as for ``lists``.
        """
        rows, keys = length_of(seq_len)
        if rows > keys:
            raise ValueError(
                f"[{NAME}] a sequence has {rows} rows and {keys} keys: there must be no more rows than keys"
            )
        number = self._heads(heads) if heads is not None or self._differs() else 1
        made: Any = _heddle.pattern_mask(list(self.expressions), number, rows, keys, flag(NAME, "causal", causal))
        return made

    def kept(
        self,
        seq_len: int | tuple[int, int],
        *,
        heads: int | None = None,
        causal: bool = False,
        block_size: int = 64,
        query_rows: int = 64,
    ) -> Kept:
        """What is computed of a sequence, and what is met: the lists are made and counted.

        Args:
          seq_len, heads, causal, block_size, query_rows: as for ``lists``.
        """
        sizes = int_of("block_size", block_size, 1), int_of("query_rows", query_rows, 1)
        asked = Asked(
            self.expressions, length_of(seq_len), None, self._heads(heads), flag(NAME, "causal", causal), *sizes, None
        )
        whole, partial, tiles, pairs, all_pairs = asked.made()[-1]
        return Kept((whole + partial) / max(tiles, 1), pairs / max(all_pairs, 1), whole, partial, tiles)

    def _differs(self) -> bool:
        return len(self.expressions) > 1 or _heddle.pattern_by_head(self.expressions[0])

    def _heads(self, heads: Any) -> int:
        if heads is not None:
            return int_of("heads", heads, 1)
        if len(self.expressions) == 1 and self._differs():
            raise ValueError(f"[{NAME}] heads is missing: random draws for each head")
        return len(self.expressions)


def parse(expression: str) -> Pattern:
    """The pattern of an expression such as ``"local(128) | strided(32) & sink(4)"``, in which & binds closer than |.

    Its names are local, strided, dilated, sink, columns, rows, diagonals and random, with the numbers of the functions so called.

    Raises:
      ValueError: what is no pattern, with the character and what was expected there.
      TypeError: what is no str.
    """
    return Pattern(expression)


def _made(name: str, *numbers: Any, **named: Any) -> Pattern:
    given = [f"{int_of(f'a number of {name}', x)}" for x in numbers]
    given += [f"{key}={int_of(f'{key} of {name}', x)}" for key, x in named.items()]
    return Pattern(f"{name}({', '.join(given)})")


def local(left: int, right: int | None = None) -> Pattern:
    """A window: the `left` keys before a row's position and the `right` after it (as many, if None), and its own."""
    return _made("local", left) if right is None else _made("local", left, right)


def strided(step: int) -> Pattern:
    """The keys that are a multiple of `step` positions from the row, before and after. Child et al., arXiv 1904.10509."""
    return _made("strided", step)


def dilated(n: int, step: int) -> Pattern:
    """The `n` keys to each side that are step, 2 * step, ... positions away, and the row's own. Beltagy et al., arXiv 2004.05150."""
    return _made("dilated", n, step)


def sink(n: int) -> Pattern:
    """The first `n` keys of the sequence. Xiao et al., arXiv 2309.17453."""
    return _made("sink", n)


def columns(*keys: int) -> Pattern:
    """These keys, by their positions, for every row."""
    return _made("columns", *keys)


def rows(*positions: int) -> Pattern:
    """Every key, for the rows at these positions."""
    return _made("rows", *positions)


def diagonals(*distances: int) -> Pattern:
    """The keys these distances before a row's position; negative ones are after it."""
    return _made("diagonals", *distances)


def random(n: int, size: int = 64, seed: int = 0) -> Pattern:
    """Blocks of `size` rows and keys: each block of rows has `n` of the blocks of keys, or all if there are no more. Zaheer et al.,
    arXiv 2007.14062.

    Drawn for each head and block of rows from its number and the seed alone: everywhere the same, whatever the batch and the other
    rows. With causality from the blocks up to the row's own, so that longer sequences begin as shorter ones do.
    """
    return _made("random", n, size=size, seed=seed)


def a_shape(n: int, left: int) -> Pattern:
    """``sink(n) | local(left, 0)``, with causality the A of Jiang et al., arXiv 2407.02490."""
    return sink(n) | local(left, 0)


def vertical_slash(keys: Iterable[int], distances: Iterable[int]) -> Pattern:
    """``columns(*keys) | diagonals(*distances)``, of which Jiang et al., arXiv 2407.02490, choose some for each head."""
    return columns(*keys) | diagonals(*distances)


def global_tokens(*positions: int) -> Pattern:
    """``rows(*positions) | columns(*positions)``: these attend all, and all attend them. Beltagy et al., arXiv 2004.05150."""
    return rows(*positions) | columns(*positions)


def by_head(*patterns: Pattern) -> Pattern:
    """A pattern for each query head."""
    for pattern in patterns:
        if not isinstance(pattern, Pattern) or len(pattern.expressions) != 1:
            raise TypeError(f"[{NAME}] by_head has {pattern!r}: it must be a pattern for one head")
    return Pattern(*(pattern.expressions[0] for pattern in patterns))
