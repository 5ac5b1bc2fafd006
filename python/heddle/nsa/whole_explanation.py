"""Which kernels parallel_nsa would run, what they are estimated to take, and from which length on that is less than dense
attention takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ..explanation import Explanation, duration, explain, explain_sparse_attention
from . import checks
from .branches import FORCED
from .explanation import explain_pool_keys, explain_select_blocks
from .sharing import checked_sharing

if TYPE_CHECKING:
    import torch

    from .._types import BranchName, Float32, FloatDType, ForcedName, GateName, GpuName, ShareName

LONGEST = 1 << 20


@dataclasses.dataclass(frozen=True)
class ParallelExplanation:
    """What a call is made of; prints as a table.

    Attributes:
      steps: "pooled keys" (of k and of v), "compressed", "selection", "selected" and "window", those that the call has ->
        the candidates for each.
      dense: the candidates for dense causal attention of the same rows and keys.
      dense_below: below about so many keys, each with a row, dense attention is estimated to be faster; 0: nowhere; None: up
        to 2^20 keys it is everywhere, or a step or dense attention is not served. Nothing chooses by it:
        native sparse attention never turns into dense attention by itself.
    """

    steps: dict[str, Explanation]
    dense: Explanation
    dense_below: int | None

    @property
    def seconds(self) -> float | None:
        """Estimated, of all steps but the gated sum; None if one would be refused."""
        return _total(self.steps)

    @property
    def dense_seconds(self) -> float | None:
        return None if self.dense.chosen is None else self.dense.chosen.seconds

    def __str__(self) -> str:
        rows = [("step", "candidate", "estimate", "why none")]
        rows += [_row(name, step) for name, step in self.steps.items()]
        rows += [("all", "", _time(self.seconds), ""), _row("dense attention", self.dense)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
        if self.dense_below is not None:
            where = f"below about {self.dense_below} keys" if self.dense_below else "nowhere"
            lines += ["", f"dense attention is estimated to be faster {where}"]
        return "\n".join(lines)


def explain_parallel_nsa(
    q: torch.Tensor | tuple[int, ...],
    k: torch.Tensor | tuple[int, ...],
    v: torch.Tensor | tuple[int, ...] | None = None,
    block_counts: int = 16,
    block_size: int = 64,
    window_size: int = 0,
    *,
    forced: Iterable[ForcedName] = FORCED,
    compression_block: int | None = None,
    compression_stride: int | None = None,
    query_stride: int = 1,
    share: ShareName = "none",
    share_branches: Iterable[BranchName] = ("slc",),
    gate: GateName = "own",
    backward: bool = False,
    dtype: FloatDType = "float32",
    gpu: GpuName | None = None,
) -> ParallelExplanation:
    """The candidates for each step of ``parallel_nsa`` with these arguments, all branches there, and which would run. No data
    is read.

    Args:
      q, k, v: tensors [B, Tq, HQ, D], [B, Tk, H, D], [B, Tk, H, Dv], or only their shapes as tuples, of dtype `dtype`; v: as k.
      block_counts: an int. It and all others are as parallel_nsa takes them.
      backward: explain the kernels of the gradients instead.
      gpu: answer as a machine with that GPU would, which need not be here; see ``heddle.explain``.

    Raises:
      ValueError, TypeError: a bad argument, as parallel_nsa would refuse it; a gpu that is not known.
    """
    name = "explain_parallel_nsa"
    v = k if v is None else v
    shapes = [tuple(x if isinstance(x, tuple) else x.shape) for x in (q, k, v)]
    for what, shape in zip("qkv", shapes):
        if len(shape) != 4:
            raise ValueError(f"[{name}] {what} is {list(shape)}: it must be [B, T, heads, D]")
    on_gpu = gpu is not None or (not isinstance(q, tuple) and q.is_cuda)
    call = _Call(
        sizes=(shapes[0][0], shapes[0][2], shapes[1][2], shapes[0][3], shapes[2][3]),
        slots=checks.integer(name, "block_counts", block_counts, 0),
        block_size=checks.integer(name, "block_size", block_size, 1),
        window=checks.integer(name, "window_size", window_size, 0),
        forced=tuple(checks.some_of(name, "forced", forced, FORCED)),
        compression=checks.compression(name, block_size, compression_block, compression_stride, None),
        sharing=checked_sharing(name, query_stride, share, share_branches, gate, window_size),
        about={"dtype": dtype if isinstance(q, tuple) else q.dtype, "gpu": gpu},
        backward=backward,
        out_dtype=None if on_gpu else "float32",
    )
    rows, keys = shapes[0][1], shapes[1][1]
    if rows > keys:
        raise ValueError(f"[{name}] q has {rows} rows and k {keys}: the rows of q are the last positions")
    return ParallelExplanation(call.steps(rows, keys), call.dense(rows, keys), call.dense_below())


@dataclasses.dataclass(frozen=True)
class _Call:
    """A checked call, of any number of rows and keys. sizes: B, HQ, H, D, Dv."""

    sizes: tuple[int, int, int, int, int]
    slots: int
    block_size: int
    window: int
    forced: tuple[ForcedName, ...]
    compression: tuple[int, int]
    sharing: Any
    about: dict[str, Any]
    backward: bool
    out_dtype: Float32 | None

    def dense(self, rows: int, keys: int) -> Explanation:
        q, k, v = self._operands(rows, keys)
        return explain(q, k, v, causal="bottom_right", backward=self.backward, **self.about)

    def steps(self, rows: int, keys: int) -> dict[str, Explanation]:
        batch, heads, kv_heads, size, _ = self.sizes
        (block, stride), listing = self.compression, self.sharing.list_stride
        pooled = (keys - block) // stride + 1 if keys >= block else 0
        _, k, v = self._operands(rows, keys)

        def attention(rows: int, keys: int, **options: Any) -> Explanation:
            q, k, v = self._operands(rows, keys)
            return explain(q, k, v, **options, **self._common())

        steps = {"pooled keys": explain_pool_keys(k, block, stride, backward=self.backward, **self.about)}
        if v != k:
            steps["pooled values"] = explain_pool_keys(v, block, stride, backward=self.backward, **self.about)
        at = self.sharing.output_stride("cmp")
        steps["compressed"] = attention(
            _anchors(rows, at),
            pooled,
            causal="top_left",
            key_offset=block - 1,
            key_step=stride,
            **self._of_rows(at, rows, keys),
        )
        slots = min(self.slots, -(-keys // self.block_size))
        if not self.backward:
            steps["selection"] = explain_select_blocks(
                (batch, _anchors(rows, listing), heads, size),
                (batch, pooled, kv_heads, size),
                slots,
                block_size=self.block_size,
                compression_block=block,
                compression_stride=stride,
                forced=self.forced,
                q_step=listing,
                **self.about,
            )
        at = self.sharing.output_stride("slc")
        shared = self.sharing.share == "selection"
        query_rows = listing if shared and self.block_size % listing == 0 else 1
        if shared and query_rows == 1 and listing > 1:
            slots += 1  # a row's own block, where its anchor stands in another
        lists = -(-_anchors(rows, at) // query_rows)
        steps["selected"] = explain_sparse_attention(
            (batch, _anchors(rows, at), heads, size),
            k,
            v,
            (batch, lists, kv_heads, slots),
            block_size=self.block_size,
            query_rows=query_rows,
            **self._of_rows_and_keys(at, rows, keys),
            **self._common(),
        )
        if self.window:
            at = self.sharing.output_stride("swa")
            steps["window"] = attention(
                _anchors(rows, at), keys, window=(self.window - 1, None), **self._of_rows_and_keys(at, rows, keys)
            )
        return steps

    def dense_below(self) -> int | None:
        """By doubling, then by halves."""
        slow, fast = 0, self.block_size  # dense attention is faster at `slow`, native sparse attention at `fast`
        while (faster := self._dense_is_faster(fast)) is not False:
            slow, fast = fast, 2 * fast
            if faster is None or fast > LONGEST:
                return None
        while fast - slow > self.block_size:
            middle = (slow + fast) // 2 // self.block_size * self.block_size
            if self._dense_is_faster(middle):
                slow = middle
            else:
                fast = middle
        return fast if slow else 0

    def _dense_is_faster(self, length: int) -> bool | None:
        mine, dense = _total(self.steps(length, length)), self.dense(length, length).chosen
        return None if mine is None or dense is None else dense.seconds <= mine

    def _operands(self, rows: int, keys: int) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        batch, heads, kv_heads, size, value_size = self.sizes
        return (batch, rows, heads, size), (batch, keys, kv_heads, size), (batch, keys, kv_heads, value_size)

    def _common(self) -> dict[str, Any]:
        return {"out_dtype": self.out_dtype, "backward": self.backward, **self.about}

    @staticmethod
    def _of_rows(stride: int, rows: int, keys: int) -> dict[str, Any]:
        return {"q_offset": keys - rows or None, "q_step": stride}

    def _of_rows_and_keys(self, stride: int, rows: int, keys: int) -> dict[str, Any]:
        if stride == 1:
            return {"causal": "bottom_right"}
        return {"causal": "top_left", **self._of_rows(stride, rows, keys)}


def _anchors(rows: int, stride: int) -> int:
    return -(-rows // stride)


def _total(steps: dict[str, Explanation]) -> float | None:
    if any(step.chosen is None for step in steps.values()):
        return None
    both = 2 if "pooled values" not in steps else 1  # values are pooled as keys are
    return sum(c.seconds * (both if name == "pooled keys" else 1) for name, s in steps.items() if (c := s.chosen))


def _time(seconds: float | None) -> str:
    return "-" if seconds is None else duration(seconds)


def _row(name: str, step: Explanation) -> tuple[str, str, str, str]:
    if step.chosen is not None:
        return name, step.chosen.name, duration(step.chosen.seconds), ""
    return name, "-", "-", "; ".join(dict.fromkeys(c.reason for c in step))
