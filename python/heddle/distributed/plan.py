"""Which rank has which rows of a long problem, and what follows from that."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from .. import _heddle
from .._options import causal_code, dtype_name, pair

if TYPE_CHECKING:
    import torch

    from .._types import CausalName, FloatDType

OrderName = Literal["contiguous", "zigzag", "striped", "per_document", "balanced"]
SchemeName = Literal["auto", "gather", "ring", "needed", "ulysses", "2d"]


class Costs(NamedTuple):
    """What times are predicted from; the defaults are those of one H200 of two that NVLink joins, and of a network of 400 Gb/s a GPU.

    FLOP/s of one rank forward and backward, bytes/s of a ring's sums, bytes/s that a rank sends while it receives as many,
    seconds of an exchange. ranks_per_host: so many ranks, one after the other, are on one host (the last may have fewer; 0: all are),
    and what goes to other hosts takes network_bandwidth, bytes/s of each rank, in place of link_bandwidth.
    """

    forward_flops: float = 680e12
    backward_flops: float = 560e12
    memory_bandwidth: float = 4e12
    link_bandwidth: float = 350e9
    link_latency: float = 50e-6
    ranks_per_host: int = 0
    network_bandwidth: float = 50e9


@dataclass(frozen=True)
class Run:
    """Rows begin, begin + step, ... of the whole, ``count`` of them, which lie from row ``local`` of a rank's tensors on."""

    begin: int
    step: int
    count: int
    local: int


class SchemeCost(NamedTuple):
    """Of one scheme the largest of all ranks: bytes that a rank sends, and predicted seconds."""

    forward_bytes: float
    forward_seconds: float
    backward_bytes: float
    backward_seconds: float


class Plan:
    """Which rank has which rows; made by ``plan``. The same arguments give the same plan, on every rank."""

    def __init__(
        self,
        native: _heddle.ShardPlan,
        rows: int,
        ranks: int,
        order: str,
        is_causal: bool | None,
        window: tuple[int, int],
        documents: int | None,
        costs: Costs,
    ) -> None:
        self._native = native
        #: Rows of all ranks together, and how many ranks there are.
        self.rows = rows
        self.ranks = ranks
        self.order = order
        #: Whether rows attend no key behind them; None of areas, of which each says that for itself.
        self.is_causal = is_causal
        self._window = window
        self._documents = documents  # None of areas
        self._costs = costs
        #: What operators of torch know the plan by: the same of plans that are the same, with their predictions.
        self.handle = f"{self.digest} ulysses {native.ulysses('2d')} {tuple(costs)}"
        # The first plan of a handle stands for all of them, and lives as long as any.
        first = _of_handle.setdefault(self.handle, self)
        self._first = None if first is self else first
        self._chosen: str | None = None
        self._kept: dict[Any, Any] = {}  # what was made of the plan, for the functions of this package

    @property
    def digest(self) -> str:
        """16 hexadecimal digits: of all that decides who computes what. Ranks with the same digest have the same plan."""
        return f"{self._native.digest:016x}"

    @property
    def balance(self) -> float:
        """The mean work of the ranks over the largest, in (row, key) pairs: 1 is even."""
        return self._native.balance

    @property
    def scheme(self) -> str:
        """What ``scheme="auto"`` is: the one that is predicted to take the least time, both passes together."""
        if self._chosen is None:
            self._chosen = self._native.chosen()
        return self._chosen

    def rows_of(self, rank: int) -> int:
        """How many rows a rank has; 0 is allowed."""
        return self._native.rows(rank)

    def runs(self, rank: int) -> list[Run]:
        """A rank's rows, as its tensors have them."""
        return [Run(*run) for run in self._native.runs(rank)]

    def pairs(self, rank: int) -> float:
        """(row, key) pairs of one head that a rank's rows attend: its work."""
        return self._native.pairs(rank)

    def keys_needed(self, rank: int) -> int:
        """Keys of other ranks that some row of the rank attends: the least that it must be sent, whatever the scheme."""
        return self._native.keys_needed(rank)

    def permutation(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """int64 [rows]: the whole's row at each place, rank 0's rows first."""
        return np.frombuffer(self._native.permutation(), np.int64)

    def inverse(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """int64 [rows]: the place of each of the whole's rows."""
        return np.frombuffer(self._native.inverse(), np.int64)

    def position_ids(self, rank: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """int64 [rows of the rank]: where each of its rows stands in its document, for rotary embeddings; beside areas, in the whole."""
        return np.frombuffer(self._native.positions(rank), np.int32).astype(np.int64)

    @property
    def ulysses(self) -> int:
        """Of the scheme "2d": how many ranks, one after the other, exchange heads for rows."""
        return self._native.ulysses("2d")

    @property
    def across(self) -> str:
        """Of the scheme "2d": how keys get from group to group, "gather", "ring" or "needed", by the prediction."""
        across: str = self._keep("across", self._native.across)
        return across

    def cost(self, scheme: Literal["gather", "ring", "needed", "ulysses", "2d"]) -> SchemeCost:
        """What a scheme sends, and how long it is predicted to take."""
        return SchemeCost(*self._native.cost(scheme))

    def _fastest_for_keys(self) -> str:
        """Of the schemes in which keys go to rows."""

        def found() -> str:
            schemes: tuple[Literal["gather", "ring", "needed"], ...] = ("gather", "ring", "needed")
            costs = [self.cost(scheme) for scheme in schemes]
            return min(zip((each.forward_seconds + each.backward_seconds for each in costs), schemes))[1]

        fastest: str = self._keep("fastest for keys", found)
        return fastest

    def __repr__(self) -> str:
        return f"Plan({self.rows} rows, {self.ranks} ranks, {self.order}, balance {self.balance:.3f}, digest {self.digest})"

    def rows_of_rank(self, rank: int) -> torch.Tensor:
        """int64 [rows of the rank]: the rank's rows of the whole, as an index of torch's."""
        import torch

        def made() -> torch.Tensor:
            begin = sum(self.rows_of(r) for r in range(rank))
            return torch.from_numpy(self.permutation()[begin : begin + self.rows_of(rank)].copy())

        rows: torch.Tensor = self._keep(("rows", rank), made)
        return rows

    def _splits_keys(self, scheme: str, ulysses: int = 1) -> bool:
        """Whether keys of ``gather`` or ``needed`` come in two exchanges, in the plan of such groups."""

        def found() -> bool:
            return bool((self if ulysses == 1 else self.grouped(ulysses))._native.splits_keys(scheme))

        splits: bool = scheme != "ring" and self._keep(("splits keys", scheme, ulysses), found)
        return splits

    def grouped(self, size: int) -> Plan:
        """The plan in which each ``size`` ranks, one after the other, are one, with all their rows; size divides the ranks."""
        native = self._native.grouped(_integer("size", size))
        of_plan = (self.order, self.is_causal, self._window, self._documents, self._costs)
        return Plan(native, self.rows, self.ranks // size, *of_plan)

    def _keep(self, key: Any, make: Any) -> Any:
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]


_of_handle: weakref.WeakValueDictionary[str, Plan] = weakref.WeakValueDictionary()


def plan_of(handle: str) -> Plan:
    """The plan of a handle, for operators, to which it is a string.

    Raises:
      RuntimeError: there is none any more.
    """
    found = _of_handle.get(handle)
    if found is None:
        raise RuntimeError(
            f"[distributed.plan] the plan {handle.split()[0]} of a compiled call is gone: keep it until the backward has run"
        )
    return found


def plan(
    rows: int,
    ranks: int,
    *,
    heads: int,
    head_size: int,
    kv_heads: int | None = None,
    head_size_v: int | None = None,
    batch: int = 1,
    dtype: FloatDType = "bfloat16",
    causal: CausalName = "none",
    window: tuple[int | None, int | None] = (-1, -1),
    cu_seqlens: Iterable[int] | None = None,
    areas: Iterable[Sequence[Any]] | None = None,
    order: OrderName = "zigzag",
    ulysses: int | None = None,
    costs: Costs | None = None,
) -> Plan:
    """Deals the rows of one long problem out to ranks. Needs no process group; any lengths, ranks without rows too.

    Args:
      rows: of all ranks together: the sequence length, or that of all documents packed.
      ranks: how many processes share them.
      heads, head_size, kv_heads, head_size_v, batch, dtype: of attention, for what bytes and times are predicted; kv_heads and
        head_size_v are heads and head_size if None.
      causal, window: of each document, as of ``heddle.attention``. A document's rows and keys are the same, so "top_left" and
        "bottom_right" are one.
      cu_seqlens: where documents begin, from 0 to rows; None: there is one. Rows attend keys of their own document alone.
      areas: any mask instead of documents, causal and window: tuples (q_begin, q_end, key_begin, key_end, causal, window), the last
        two may be left out. Each is a call of attention over these rows and keys; no pair is in two of them.
      order: who gets what. "contiguous": a part each. "zigzag": one part of 2 P from either end, even under causality.
        "striped": every P-th row. "per_document": zigzag inside of each document. "balanced": parts of about rows / (16 P), dealt
        out by a solver so that work is even and no rank has more than its share of rows.
      ulysses: of the scheme "2d": how many ranks, one after the other, exchange heads for rows: a divisor of ranks. None: the largest
        below ranks that is no more than kv_heads, or the least above 1.
      costs: what times are predicted from.

    Raises:
      ValueError: a bad argument; the message names it, its value and the rule.

    Sources: Liu, Zaharia and Abbeel, arXiv 2310.01889; Brandon et al., arXiv 2311.09431; Dubey et al., arXiv 2407.21783; Jacobs et
    al., arXiv 2309.14509; Fang and Zhao, arXiv 2405.07719.
    """
    left, right = pair(window)
    given = [] if areas is None else [_area(n, area) for n, area in enumerate(areas)]
    ends = [] if cu_seqlens is None else [_integer("cu_seqlens", end) for end in cu_seqlens]
    costs = costs or Costs()
    costs = costs._replace(ranks_per_host=_integer("ranks_per_host", costs.ranks_per_host))
    sizes = {
        "batch": batch,
        "heads": heads,
        "kv_heads": heads if kv_heads is None else kv_heads,
        "head_size": head_size,
        "head_size_v": head_size if head_size_v is None else head_size_v,
    }
    native = _heddle.ShardPlan.make(
        rows=_integer("rows", rows),
        ranks=_integer("ranks", ranks),
        sizes=[_integer(name, size) for name, size in sizes.items()],
        dtype=dtype_name(dtype),
        causal=causal_code(causal),
        window_left=left,
        window_right=right,
        cu_seqlens=ends,
        areas=given,
        order=order,
        ulysses=0 if ulysses is None else _integer("ulysses", ulysses),
        costs=costs,
    )
    documents = None if given else 1 if cu_seqlens is None else len(ends) - 1
    is_causal = None if given else causal_code(causal) != 0
    return Plan(native, rows, ranks, order, is_causal, (left, right), documents, costs)


def _integer(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"[distributed.plan] {name} is {value!r}: it must be an int") from None


def _area(n: int, area: Any) -> tuple[int, int, int, int, int, int, int]:
    items = tuple(area)
    if not 4 <= len(items) <= 6:
        raise ValueError(
            f"[distributed.plan] areas[{n}] has {len(items)} items: it must be (q_begin, q_end, key_begin, key_end), and causal "
            "and window behind them"
        )
    q_begin, q_end, key_begin, key_end = (_integer(f"areas[{n}]", x) for x in items[:4])
    left, right = pair(items[5] if len(items) > 5 else (-1, -1))
    return q_begin, q_end, key_begin, key_end, causal_code(items[4] if len(items) > 4 else "none"), left, right
