"""A rank's calls, as its plan has them, on torch tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from .._options import CAUSAL_CODES, Causal
from ..functional import attention, merge_attention
from ..gradients import attention_backward
from .plan import Plan

CAUSAL_NAMES = {CAUSAL_CODES[corner]: corner for corner in Causal}
Where = Any  # of a batch: all of it, or one sequence


def _int32(numbers: Any, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(numbers.copy()).to(device)


class Piece(NamedTuple):
    """Rows [q_begin, q_end) of a rank's against keys [key_begin, key_end) of a buffer: one call of attention.

    options: of the call. aligned: the same without offsets, which some kernels are faster without, where each sequence's last row stands at
    its last key or positions say nothing; not beside ALiBi and a bias. first: no piece before it has any of these rows. numbers: of the
    sequences, int32 [n + 1], [n + 1], [n], [n] on the host: where rows and keys of each begin, and the offsets.
    """

    rows: slice
    keys: slice
    options: dict[str, Any]
    aligned: dict[str, Any]
    first: bool
    numbers: tuple[Any, Any, Any, Any]

    def options_beside(self, options: dict[str, Any], undisturbed: bool = False) -> dict[str, Any]:
        """Of a call with these others. undisturbed: no exchange's kernel runs meanwhile."""
        alibi, bias = options["alibi_slopes"], options["bias"]
        places = self.aligned if undisturbed and alibi is None and bias is None else self.options
        return options | places | {"bias": None if bias is None else bias[:, :, self.rows]}

    def alone(self) -> Iterator[Piece]:
        """Each sequence as a piece of its own."""
        if "cu_seqlens_q" not in self.options:
            yield self
            return
        cu_q, cu_k, q_offset, key_offset = self.numbers
        common = {name: self.options[name] for name in ("causal", "window", "q_step", "key_step")}
        for n, (q_at, key_at) in enumerate(zip(q_offset.tolist(), key_offset.tolist())):
            if cu_q[n] == cu_q[n + 1]:
                continue
            rows, keys = (
                slice(of.start + int(cu[n]), of.start + int(cu[n + 1]))
                for of, cu in ((self.rows, cu_q), (self.keys, cu_k))
            )
            places = common | {"q_offset": q_at, "key_offset": key_at}
            yield Piece(rows, keys, places, places, self.first, self.numbers)

    def calls(self, batch: int) -> Iterator[Where]:
        """Which sequences of a batch go into one call: all, or each by itself where the piece's are packed."""
        return iter(range(batch) if "cu_seqlens_q" in self.options else (slice(None),))

    def of_rows(self, x: torch.Tensor, where: Where) -> torch.Tensor:
        return x[where, self.rows] if isinstance(where, slice) else x[where][self.rows]

    def of_keys(self, x: torch.Tensor, where: Where) -> torch.Tensor:
        return x[where, self.keys] if isinstance(where, slice) else x[where][self.keys]

    def of_lse(self, x: torch.Tensor, where: Where) -> torch.Tensor:
        return x[where][..., self.rows]


def _piece(items: Any, device: torch.device) -> Piece:
    (q_begin, q_end, key_begin, key_end, causal, left, right, q_step, key_step, *numbers, max_q, max_k, first) = items
    window = (left, right)
    common = dict(causal=CAUSAL_NAMES[causal], window=window, q_step=q_step, key_step=key_step)
    cu_q, cu_k, q_offset, key_offset = (np.frombuffer(x, np.int32) for x in numbers)
    sequences: dict[str, Any] = {}
    offsets: dict[str, Any]
    if len(q_offset) > 1:
        sequences = dict(cu_seqlens_q=_int32(cu_q, device), cu_seqlens_k=_int32(cu_k, device))
        sequences |= dict(max_seqlen_q=max_q, max_seqlen_k=max_k)
        lengths_q, lengths_k = np.diff(cu_q), np.diff(cu_k)
        offsets = {"q_offset": _int32(q_offset, device), "key_offset": _int32(key_offset, device)}
    else:
        lengths_q, lengths_k = q_end - q_begin, key_end - key_begin
        offsets = {"q_offset": int(q_offset[0]), "key_offset": int(key_offset[0])}
    options = common | offsets | sequences
    aligned = options
    if not causal and window == (-1, -1):
        aligned = dict(causal="none") | sequences
    elif causal and q_step == key_step == 1 and np.all(q_offset + lengths_q == key_offset + lengths_k):
        aligned = dict(causal="bottom_right", window=window) | sequences
    return Piece(
        slice(q_begin, q_end), slice(key_begin, key_end), options, aligned, first, (cu_q, cu_k, q_offset, key_offset)
    )


class HeadShare(NamedTuple):
    """A rank's query heads, and the key heads that they attend with."""

    heads: slice
    kv_heads: slice

    def width(self, of_keys: bool) -> int:
        chosen = self.kv_heads if of_keys else self.heads
        return int(chosen.stop - chosen.start)

    def even_parts(self, group: int) -> Iterator[HeadShare]:
        """Heads that one call takes, with as many query heads to each key head: the share less groups that are cut, and these."""
        begin, end = self.heads.start, self.heads.stop
        while begin < end:
            groups_end = end // group * group
            stop = groups_end if begin % group == 0 and groups_end > begin else min((begin // group + 1) * group, end)
            yield HeadShare(slice(begin, stop), slice(begin // group, -(-stop // group)))
            begin = stop

    def inside(self, whole: HeadShare) -> HeadShare:
        """The same heads as they lie in tensors of another share's alone."""
        first, kv_first = whole.heads.start, whole.kv_heads.start
        return HeadShare(
            slice(self.heads.start - first, self.heads.stop - first),
            slice(self.kv_heads.start - kv_first, self.kv_heads.stop - kv_first),
        )


def of_heads(bias: torch.Tensor, heads: slice) -> torch.Tensor:
    """What a bias [B or 1, H or 1, rows, keys], or its gradient, has for some of the heads."""
    return bias[:, heads] if bias.shape[1] > 1 else bias


class Share(NamedTuple):
    """What goes between this rank and another one.

    places: where the other's keys lie in this rank's buffer of keys; given: of this rank's own keys those that go to the other; int64.
    into, out_of: the same as slices, where they are no more than a few runs that lie one behind the other on both ranks; there: where the
    receiver puts out_of. first_into, first_out_of: of each of these runs, or of all there is where there are none, whether the first
    piece of its receiver has it.
    """

    places: torch.Tensor
    given: torch.Tensor
    into: list[slice] | None
    out_of: list[slice] | None
    there: list[slice] | None
    first_into: list[bool]
    first_out_of: list[bool]

    def to(self, device: torch.device) -> Share:
        return self._replace(places=self.places.to(device), given=self.given.to(device))


_MOST_RUNS = 8  # each is a message of its own, of k and of v


def share_of(
    theirs: Any, places: Any, given: Any, at: Any, first: slice | None = None, first_there: slice | None = None
) -> Share:
    """theirs: the other's rows that come, places: where they go; given: this rank's rows that go, at: where the other puts them. int64
    arrays, in the order of sending. first, first_there: the keys of this rank's first piece, and of the other's, as they lie in the
    buffer; None: all."""
    into, _, first_into = _runs(places, theirs, _among(places, first))
    out_of, there, first_out_of = _runs(given, at, _among(at, first_there))
    return Share(
        torch.from_numpy(places.copy()), torch.from_numpy(given.copy()), into, out_of, there, first_into, first_out_of
    )


def _among(places: Any, first: slice | None) -> Any:
    return np.full(len(places), True) if first is None else (places >= first.start) & (places < first.stop)


def _runs(here: Any, there: Any, early: Any) -> tuple[list[slice] | None, list[slice] | None, list[bool]]:
    """Slices of `here`, and of `there`, that are runs in both and of one kind, early or not, if they are few, and of which kind: both ranks
    find the same."""
    if len(here) == 0:
        return [], [], []
    cuts = np.flatnonzero((np.diff(here) != 1) | (np.diff(there) != 1) | (early[1:] != early[:-1])) + 1
    if len(cuts) >= _MOST_RUNS:
        return None, None, [bool(early.any())]
    begins, ends = [0, *cuts.tolist()], [*cuts.tolist(), len(here)]
    of_here, of_there = ([slice(int(x[a]), int(x[a]) + b - a) for a, b in zip(begins, ends)] for x in (here, there))
    return of_here, of_there, [bool(early[a]) for a in begins]


class Layout(NamedTuple):
    """What a call needs of its plan, which it does not hold: autograd may keep it until the interpreter has ended.

    lengths: how many rows each rank has. steps: pieces, of ``ring`` one list for each rank whose keys come by, else one list. whole:
    each row is in one piece, so that nothing is merged. keys: how many a rank has at once, but in ``ring``: all in the whole's order,
    or those that it needs. shares: with each rank, but in ``ring``. pairs: (row, key) pairs of a head, the most of all ranks. most_keys:
    the most that a rank has at once; most_others, most_shared: the most of them that are others', and one other's; most_early: the most
    that come for a first piece. splits_keys: whether exchanges that run one after the other are better two, the first of these, by the
    plan's prediction.
    """

    lengths: list[int]
    steps: list[list[Piece]]
    whole: bool
    keys: int
    shares: list[Share]
    pairs: float = 0
    most_keys: int = 0
    most_others: int = 0
    most_shared: int = 0
    most_early: int = 0
    splits_keys: bool = False

    def unpacked(self) -> Layout:
        """Each sequence of a piece is a piece of its own, as a bias needs it."""
        return self._replace(steps=[[one for piece in step for one in piece.alone()] for step in self.steps])

    def on(self, device: torch.device) -> Layout:
        """What is exchanged by index is there."""
        return self._replace(shares=[share.to(device) for share in self.shares])


def layout_of(plan: Plan, rank: int, scheme: str, device: torch.device) -> Layout:
    def made() -> Layout:
        steps = [[_piece(items, device) for items in step] for step in plan._native.pieces(rank, scheme)]
        pieces = [piece for step in steps for piece in step]
        covered = sum(piece.rows.stop - piece.rows.start for piece in pieces)
        once = all(piece.first for piece in pieces) and covered == plan.rows_of(rank) and scheme != "ring"
        ranks = range(plan.ranks)
        lengths = [plan.rows_of(r) for r in ranks]
        if scheme == "ring":
            return Layout(lengths, steps, once, plan.rows, [])
        first = [_keys_of_first(plan._native.pieces(r, scheme)) for r in ranks]
        if scheme == "gather":
            keys, needed = plan.rows, [np.arange(plan.rows) for _ in ranks]
            rows = [plan.rows_of_rank(r).numpy() for r in ranks]
            local = np.arange(lengths[rank])
            shares = [share_of(np.arange(lengths[r]), rows[r], local, rows[rank], first[rank], first[r]) for r in ranks]
        else:
            needed = [np.frombuffer(plan._native.needed_keys(r), np.int64) for r in ranks]
            keys, shares = len(needed[rank]), shares_of_needs(plan, rank, needed, first)
        pairs = max(plan.pairs(r) for r in ranks)
        most_keys, splits = max(map(len, needed)), plan._splits_keys(scheme)
        most = _most(plan, needed, first)
        return Layout(lengths, steps, once, keys, shares, pairs, most_keys, *most, splits).on(device)

    kept: Layout = plan._keep((scheme, rank, device), made)
    return kept


def _most(plan: Plan, needed: list[Any], first: list[slice]) -> tuple[int, int, int]:
    """most_others, most_shared and most_early of a Layout."""
    owners = np.repeat(np.arange(plan.ranks), [plan.rows_of(r) for r in range(plan.ranks)])[plan.inverse()]
    others = shared = early = 0
    for r, keys in enumerate(needed):
        counts = np.bincount(owners[keys], minlength=plan.ranks)
        counts[r] = 0
        others, shared = max(others, int(counts.sum())), max(shared, int(counts.max()))
        early = max(early, int((owners[keys[first[r]]] != r).sum()))
    return others, shared, early


def _keys_of_first(steps: Any) -> slice:
    """Of the first piece, as they lie in the buffer."""
    for step in steps:
        for _, _, begin, end, *_ in step:
            return slice(begin, end)
    return slice(0, 0)


def shares_of_needs(
    plan: Plan, rank: int, needed: list[Any], first: list[slice] | None = None, in_place: bool = False
) -> list[Share]:
    """needed: of each rank the keys that it needs, numbers of the whole's rows in ascending order; they lie one behind the other in its
    buffer, or in_place, where they lie in the whole. first: those of each rank's first piece, as they lie there."""
    inverse, own = plan.inverse(), plan.inverse()[needed[rank]]
    ends = np.cumsum([plan.rows_of(r) for r in range(plan.ranks)])
    begins = ends - [plan.rows_of(r) for r in range(plan.ranks)]

    def between(source: int, to: int) -> tuple[Any, Any]:
        """Rows of one rank that another needs, and where it puts them."""
        at = own if to == rank else inverse[needed[to]]
        chosen = np.flatnonzero((at >= begins[source]) & (at < ends[source]))
        return at[chosen] - begins[source], needed[to][chosen] if in_place else chosen

    def of(r: int) -> slice | None:
        return None if first is None else first[r]

    return [share_of(*between(r, rank), *between(rank, r), of(rank), of(r)) for r in range(plan.ranks)]


class Sum:
    """Partial results of a rank's rows joined piece after piece: float32, 0 and lse -inf where there is none yet."""

    def __init__(self, q: torch.Tensor, head_size_v: int) -> None:
        batch, rows, heads, _ = q.shape
        self.o = torch.zeros(batch, rows, heads, head_size_v, device=q.device)
        self.lse = torch.full((batch, heads, rows), -torch.inf, device=q.device)

    def add(
        self, pieces: list[Piece], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any]
    ) -> None:
        for piece in pieces:
            for where in piece.calls(q.shape[0]):
                q_part, k_part, v_part = piece.of_rows(q, where), piece.of_keys(k, where), piece.of_keys(v, where)
                o, lse = piece.of_rows(self.o, where), piece.of_lse(self.lse, where)
                call = piece.options_beside(options) | dict(out_dtype="float32")
                if piece.first:
                    attention(q_part, k_part, v_part, return_lse=True, out=o, lse_out=lse, **call)
                    continue
                part = attention(q_part, k_part, v_part, return_lse=True, **call)
                merge_attention((o, part[0]), (lse, part[1]), out=o, lse_out=lse)

    def finished(self, dtype: torch.dtype, sink: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """The sink enters here, once."""
        if sink is None or self.o.numel() == 0:
            return self.o.to(dtype), self.lse
        o = self.o if dtype == torch.float32 else torch.empty_like(self.o, dtype=dtype)
        return merge_attention((self.o,), (self.lse,), sink, out=o, lse_out=self.lse)


def attend(
    piece: Piece,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    options: dict[str, Any],
    undisturbed: bool,
) -> None:
    """Writes o and lse of rows that are in no other piece."""
    for where in piece.calls(q.shape[0]):
        attention(
            piece.of_rows(q, where),
            piece.of_keys(k, where),
            piece.of_keys(v, where),
            return_lse=True,
            out=piece.of_rows(o, where),
            lse_out=piece.of_lse(lse, where),
            **piece.options_beside(options, undisturbed),
        )


class RowGradients(NamedTuple):
    """What a backward of pieces reads of the rows, and dq: float32, which it adds to, or of 16 bits, which it writes. dbias: float32 of the
    bias's shape, which it adds to; None: it is not wanted."""

    q: torch.Tensor
    o: torch.Tensor
    lse: torch.Tensor
    d_o: torch.Tensor
    d_lse: torch.Tensor | None
    dq: torch.Tensor
    dbias: torch.Tensor | None = None

    def of_heads(self, heads: slice) -> RowGradients:
        return RowGradients(
            self.q[:, :, heads],
            self.o[:, :, heads],
            self.lse[:, heads],
            self.d_o[:, :, heads],
            None if self.d_lse is None else self.d_lse[:, heads],
            self.dq[:, :, heads],
            None if self.dbias is None else of_heads(self.dbias, heads),
        )

    def add(
        self,
        pieces: list[Piece],
        k: torch.Tensor,
        v: torch.Tensor,
        dk: torch.Tensor,
        dv: torch.Tensor,
        merged: bool,
        options: dict[str, Any],
    ) -> None:
        """Adds to dk and dv, and writes dq or adds to it, in the order of the pieces."""
        for piece in pieces:
            call = piece.options_beside(options)
            dbias = None if self.dbias is None else torch.empty_like(call["bias"])
            for where in piece.calls(self.q.shape[0]):
                attention_backward(
                    piece.of_rows(self.q, where),
                    piece.of_keys(k, where),
                    piece.of_keys(v, where),
                    piece.of_rows(self.o, where),
                    piece.of_lse(self.lse, where),
                    piece.of_rows(self.d_o, where),
                    None if self.d_lse is None else piece.of_lse(self.d_lse, where),
                    dq=piece.of_rows(self.dq, where),
                    dk=piece.of_keys(dk, where),
                    dv=piece.of_keys(dv, where),
                    dbias=dbias,
                    accumulate=True,
                    merged=merged,
                    **call,
                )
            if self.dbias is not None and dbias is not None:
                first = call["key_offset"]
                columns = slice(first, first + piece.keys.stop - piece.keys.start)  # 0 in all others
                self.dbias[:, :, piece.rows, columns] += dbias[..., columns]
