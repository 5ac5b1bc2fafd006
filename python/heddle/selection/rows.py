"""Where blocks of rows and of keys stand in a batch of sequences, and q and k cut into them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from .._options import flag
from ..hosts.torch.checks import check_operands, one_device
from ..nsa import checks

BLOCK_SIZES = (16, 32, 64, 128)
MOST_ROWS = 1024  # that share a list
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
#: Of one temporary tensor: blocks of rows are gone through in chunks that need no more.
CHUNK_BYTES = 256 << 20
#: With causality scores are multiplied in this many parts, unless they would be smaller than that: keys behind a part's last row
#: are left out.
CAUSAL_PARTS, SMALL_PART_BYTES = 16, 16 << 20


class Form(NamedTuple):
    """What every measure takes; the arguments of these names."""

    name: str
    block_size: int
    query_rows: int
    causal: bool
    strict: bool
    per_group: bool
    sink_blocks: int
    local_blocks: int
    offsets: bool


def checked_form(
    name: str, block_size: Any, query_rows: Any, strict: Any, sink_blocks: Any, local_blocks: Any, **flags: Any
) -> Form:
    if isinstance(block_size, bool) or block_size not in BLOCK_SIZES:
        raise ValueError(f"[{name}] block_size is {checks.shown(block_size)}: it must be 16, 32, 64 or 128")
    rows = checks.integer(name, "query_rows", query_rows, 1)
    if rows > MOST_ROWS:
        raise ValueError(f"[{name}] query_rows is {rows}: it must be from 1 to {MOST_ROWS}")
    form = Form(
        name=name,
        block_size=int(block_size),
        query_rows=rows,
        strict=flag(name, "strict", strict),
        sink_blocks=checks.integer(name, "sink_blocks", sink_blocks, 0),
        local_blocks=checks.integer(name, "local_blocks", local_blocks, 1),
        **{what: flag(name, what, x) for what, x in flags.items()},
    )
    if form.strict and not form.causal:
        raise ValueError(
            f"[{name}] strict is True and causal is False: rows choose for those behind them under causality"
        )
    return form


class Sequences:
    """q and k as a batch of padded sequences, rows being the last positions. N blocks of rows, K of keys, L heads of lists.

    Attributes:
      q, k: [B, Sq, H, D], [B, Sk, Hkv, D].
      used_q, used_k: int64 [B or 1, 1], how many positions are in use, the first ones.
      offset: int64 [B or 1, 1], the position of the first row; known_offset: the same where shapes say it.
      packed: of packed sequences cu_seqlens_q, cu_seqlens_k, max_seqlen_q and max_seqlen_k.
    """

    def __init__(
        self, form: Form, q: Any, k: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: Any, max_seqlen_k: Any
    ) -> None:
        name, self.form = form.name, form
        check_operands(name, ("q", "k"), (q, k))
        one_device(name, ("q", "k"), (q, k))
        _check_shapes(name, q, k, packed=cu_seqlens_q is not None)
        self.packed: dict[str, Any] = {}
        self.rows = q.shape[0] if cu_seqlens_q is not None else q.shape[1]
        self.known_offset: int | None = None
        if cu_seqlens_q is None:
            given = {"cu_seqlens_k": cu_seqlens_k, "max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
            for what, x in given.items():
                if x is not None:
                    raise ValueError(f"[{name}] {what} is given without cu_seqlens_q")
            rows, keys = q.shape[1], k.shape[1]
            if rows > keys:
                raise ValueError(f"[{name}] q has {rows} rows and k {keys} keys: there must be no more rows than keys")
            if form.strict and rows != keys:
                raise ValueError(
                    f"[{name}] strict is True, and q has {rows} rows and k {keys} keys: there must be as many, so that the rows before "
                    "each are there"
                )
            self.q, self.k, self.known_offset = q, k, keys - rows
            self.used_q, self.used_k = (torch.full((1, 1), n, device=q.device) for n in (rows, keys))
        else:
            if cu_seqlens_k is None:
                if k.shape[0] != q.shape[0]:
                    raise ValueError(
                        f"[{name}] q has {q.shape[0]} rows and k {k.shape[0]} keys: without cu_seqlens_k there must be as many"
                    )
                if max_seqlen_k is not None:
                    raise ValueError(f"[{name}] max_seqlen_k is given without cu_seqlens_k")
                cu_seqlens_k, self.known_offset = cu_seqlens_q, 0
            elif form.strict:
                raise ValueError(
                    f"[{name}] strict is True and cu_seqlens_k is given: keys must be the rows' own, so leave it out"
                )
            self.q, self.used_q, longest_q = _padded(name, "q", q, cu_seqlens_q, max_seqlen_q)
            self.k, self.used_k, longest_k = _padded(
                name, "k", k, cu_seqlens_k, longest_q if self.known_offset == 0 else max_seqlen_k
            )
            if self.used_q.shape != self.used_k.shape:
                raise ValueError(
                    f"[{name}] cu_seqlens_q is {list(cu_seqlens_q.shape)} and cu_seqlens_k {list(cu_seqlens_k.shape)}: they must be of as "
                    "many sequences"
                )
            self.packed = {
                "cu_seqlens_q": cu_seqlens_q,
                "cu_seqlens_k": cu_seqlens_k,
                "max_seqlen_q": longest_q,
                "max_seqlen_k": longest_k,
            }
        self.offset = self.used_k - self.used_q
        self.batch, self.heads, self.kv_heads = self.q.shape[0], self.q.shape[2], self.k.shape[2]
        self.units = self.kv_heads if form.per_group else self.heads
        self.row_blocks = -(-self.q.shape[1] // form.query_rows)
        self.key_blocks = -(-self.k.shape[1] // form.block_size)
        self.device = self.q.device

    def most_own(self) -> int:
        """Most blocks that the positions of a list's rows lie in."""
        size, rows = self.form.block_size, self.form.query_rows
        if self.known_offset is not None and self.known_offset % size == 0 and (rows % size == 0 or size % rows == 0):
            return max(rows // size, 1)
        return (rows + size - 2) // size + 1

    def most_forced(self) -> int:
        """Most blocks that a list has in any case."""
        beside = (self.form.local_blocks - 1) * (1 if self.form.causal else 2)
        return min(self.form.sink_blocks + self.most_own() + beside, self.key_blocks)

    def bounds(self, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of the lists from begin up to end, [B or 1, n] each: positions of the first row and of the last, and whether there are any."""
        first = torch.arange(begin, end, device=self.device)[None] * self.form.query_rows
        last = torch.minimum(first + self.form.query_rows, self.used_q) - 1
        return first + self.offset, last + self.offset, first < self.used_q

    def reach(self, begin: int, end: int) -> torch.Tensor:
        """bool [B or 1, n, 1, K]: blocks of keys that a row of the list may meet."""
        _, last, there = self.bounds(begin, end)
        first_key = torch.arange(self.key_blocks, device=self.device) * self.form.block_size
        ends = last + 1 if self.form.causal else self.used_k
        return ((first_key < ends[..., None]) & there[..., None])[:, :, None]

    def forced(self, begin: int, end: int) -> torch.Tensor:
        """bool [B or 1, n, 1, K]: the sink, the blocks of the rows' own positions, and those beside."""
        first, last, _ = self.bounds(begin, end)
        block = torch.arange(self.key_blocks, device=self.device)
        beside = self.form.local_blocks - 1
        own = (block >= (first // self.form.block_size - beside)[..., None]) & (
            block <= (last // self.form.block_size + beside)[..., None]
        )
        return (own | (block < self.form.sink_blocks))[:, :, None]

    def measured(self, begin: int, end: int) -> torch.Tensor:
        """bool [B or 1, n, 1, K]: blocks of keys that the rows which choose may look at. With strict those that end before the
        first row of the list: all others that it may meet are its own."""
        if not self.form.strict:
            return self.reach(begin, end)
        first, _, there = self.bounds(begin, end)
        ends = (torch.arange(self.key_blocks, device=self.device) + 1) * self.form.block_size
        return ((ends <= first[..., None]) & there[..., None])[:, :, None]

    def choosers(self, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The rows that choose: those of the list, with strict those of the list before.

        Returns:
          [B, n * query_rows, H, D]; bool [B or 1, n * query_rows], whether there is such a row (where not, anything); bool
          [B, n * query_rows, H], whether it is finite; int64 [B or 1, n * query_rows], its position.
        """
        rows, length = self.form.query_rows, self.q.shape[1]
        shift = rows if self.form.strict else 0
        first, last = begin * rows - shift, end * rows - shift
        part = self.q[:, max(first, 0) : last]
        if first < 0 or last > length:
            part = torch.nn.functional.pad(part, (0, 0, 0, 0, max(-first, 0), max(last - length, 0)))
        number = torch.arange(first, last, device=self.device)[None]
        return part, (number >= 0) & (number < self.used_q), finite(part), number + self.offset

    def clean_keys(self) -> tuple[torch.Tensor, torch.Tensor]:
        """k in whole blocks, [B, K * block_size, Hkv, D], 0 where there is no key, or one that is not finite; and which blocks have
        such a key, bool [B, 1, L, K]: no list leaves them out, so that what attention makes of them shows."""
        size = self.form.block_size
        k = self.k
        if k.shape[1] != self.key_blocks * size:
            k = torch.nn.functional.pad(k, (0, 0, 0, 0, 0, self.key_blocks * size - k.shape[1]))
        in_use = (torch.arange(k.shape[1], device=self.device) < self.used_k)[..., None]
        broken = ~finite(k) & in_use
        k = k.masked_fill((broken | ~in_use)[..., None], 0)
        of_blocks = broken.unflatten(1, (self.key_blocks, size)).any(2).transpose(1, 2)[:, None]
        return k, of_blocks.repeat_interleave(self.units // self.kv_heads, 2)

    def keys_in_use(self) -> torch.Tensor:
        """int64 [B or 1, K]: keys of each block."""
        size = self.form.block_size
        return (self.used_k - torch.arange(self.key_blocks, device=self.device) * size).clamp(0, size)

    def chunks(self, bytes_of_list: int) -> Iterator[tuple[int, int]]:
        """Runs of lists of which no temporary is above CHUNK_BYTES, by what the largest has for each list beside its rows."""
        of_rows = self.batch * self.heads * self.form.query_rows * self.q.shape[-1] * self.q.element_size()
        return _runs(0, self.row_blocks, CHUNK_BYTES // max(bytes_of_list, of_rows, 1))

    def parts(self, begin: int, end: int, bytes_of_list: int) -> Iterator[tuple[int, int]]:
        """The same of a run of lists, where scores are multiplied: with causality each part meets keys up to its own end alone."""
        step = CHUNK_BYTES // max(bytes_of_list, 1)
        if self.form.causal:
            step = min(step, max(-(-self.row_blocks // CAUSAL_PARTS), SMALL_PART_BYTES // max(bytes_of_list, 1)))
        return _runs(begin, end, step)

    def keys_met(self, end: int) -> int:
        """How many blocks of keys the lists before `end` may meet at most."""
        if not self.form.causal or self.known_offset is None:
            return self.key_blocks
        return min(self.key_blocks, -(-(self.known_offset + end * self.form.query_rows) // self.form.block_size))

    def per_unit(self, of_heads: torch.Tensor) -> torch.Tensor:
        """[B, n, L, K] of [B, n, Hkv, G, K]: with per_group the mean over a group."""
        return of_heads.mean(3) if self.form.per_group else of_heads.flatten(2, 3)


def finite(x: torch.Tensor) -> torch.Tensor:
    """bool [...] of [..., D], in one pass: whether all are."""
    return torch.linalg.vector_norm(x, ord=torch.inf, dim=-1).isfinite()


def _runs(begin: int, end: int, step: int) -> Iterator[tuple[int, int]]:
    step = max(step, 1)
    for at in range(begin, end, step):
        yield at, min(at + step, end)


def _check_shapes(name: str, q: torch.Tensor, k: torch.Tensor, packed: bool) -> None:
    for what, x in (("q", q), ("k", k)):
        if x.dim() != (3 if packed else 4):
            form = "[total, heads, D], as cu_seqlens_q is given" if packed else "[B, S, heads, D]"
            raise ValueError(f"[{name}] {what} is {list(x.shape)}: it must be {form}")
        if x.dtype not in DTYPES:
            raise ValueError(f"[{name}] {what} is {x.dtype}: it must be float32, float16 or bfloat16")
    if q.dtype != k.dtype:
        raise ValueError(f"[{name}] q is {q.dtype} and k {k.dtype}: they must be of one dtype")
    if q.shape[-1] != k.shape[-1] or q.shape[-1] == 0:
        raise ValueError(
            f"[{name}] q is {list(q.shape)} and k {list(k.shape)}: they must have one head size, from 1 up"
        )
    if k.shape[-2] == 0 or q.shape[-2] % k.shape[-2] or q.shape[-2] == 0:
        raise ValueError(
            f"[{name}] q has {q.shape[-2]} heads and k {k.shape[-2]}: those of q must be a multiple of those of k"
        )
    if not packed and q.shape[0] != k.shape[0]:
        raise ValueError(f"[{name}] q has {q.shape[0]} sequences and k {k.shape[0]}: there must be as many")


def _padded(name: str, what: str, x: torch.Tensor, starts: Any, longest: Any) -> tuple[torch.Tensor, torch.Tensor, int]:
    """A packed tensor as a batch of sequences, how much of each is in use, int64 [B, 1], and the longest length."""
    given = f"cu_seqlens_{what}"
    if not isinstance(starts, torch.Tensor) or starts.dtype != torch.int32 or starts.dim() != 1 or len(starts) < 2:
        found = f"{list(starts.shape)} of {starts.dtype}" if isinstance(starts, torch.Tensor) else checks.shown(starts)
        raise ValueError(f"[{name}] {given} is {found}: it must be an int32 tensor [B + 1]")
    one_device(name, (what, given), (x, starts))
    if longest is not None:
        longest = checks.integer(name, f"max_seqlen_{what}", longest, 0)
    elif starts.device.type == "cpu" and not torch.compiler.is_compiling():
        longest = int((starts[1:] - starts[:-1]).max())
    else:
        raise ValueError(
            f"[{name}] max_seqlen_{what} is missing: on a GPU and under torch.compile {given} is not read, so give it"
        )
    lengths = (starts[1:] - starts[:-1]).long()[:, None]
    if x.shape[0] == 0:
        return x.new_zeros(len(lengths), longest, *x.shape[1:]), lengths, longest
    at = starts[:-1].long()[:, None] + torch.arange(longest, device=x.device)
    return x[at.clamp(max=x.shape[0] - 1)], lengths, longest
