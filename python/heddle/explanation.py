"""Which kernel a call would run, and why not the others."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from . import _heddle
from ._options import BIAS, DROPOUT_SEED, DTYPE_CODES, MASK, dtype_name, flag, parts_of, wants_float32
from .hosts import is_torch, torch_host
from .sparse import options_tuple

if TYPE_CHECKING:
    from collections.abc import Iterable

    from typing_extensions import Unpack

    from ._types import AnyArray, Float32, FloatDType, GpuName, QuestionOptions

_FLOATS = ("float32", "float16", "bfloat16")
_INT32, UINT8 = DTYPE_CODES["int32"], DTYPE_CODES["uint8"]


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One kernel that could serve a call.

    Attributes:
      name: what ``force`` takes. method: "flash", "baseline", "naive", "merge", "rotary", "append", "linear", "quantize",
        "dequantize", "unpack", "pool", "select", "nsa_step" or "reference".
      supported: whether it can compute the call at all.
      reason: why it may not run, if it may not.
      seconds: estimated time, workspace: scratch bytes; 0 if not supported.
      chosen: whether the call would run it.
      plan: what it would run, in words (its variant, tiles, how keys are split); empty if not supported.
      of_16bit: of a linear layer on a GPU, `seconds` over those estimated of cuBLAS with weights in 16 bits: above 1,
        ``heddle.lowbit.pack``'s keep_16bit would make the call faster. Else 0.
    """

    name: str
    method: str
    supported: bool
    reason: str
    seconds: float
    workspace: int
    chosen: bool
    plan: str = ""
    of_16bit: float = 0.0


class Explanation(list[Candidate]):
    """A list of ``Candidate``; prints as a table, and the plan of the one that is chosen below it."""

    @property
    def chosen(self) -> Candidate | None:
        """The candidate that would run; None if the call would be refused."""
        return next((candidate for candidate in self if candidate.chosen), None)

    def __str__(self) -> str:
        head = ("", "candidate", "method", "estimate", "workspace", "why not")
        rows = [
            (
                "*" if c.chosen else "",
                c.name,
                c.method,
                duration(c.seconds) if c.supported else "-",
                _bytes(c.workspace) if c.supported else "-",
                c.reason,
            )
            for c in self
        ]
        widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in [head, *rows]]
        if self.chosen is not None:
            lines += ["", f"{self.chosen.name}: {self.chosen.plan}"]
        return "\n".join(lines)


def duration(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"


def _bytes(count: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


def shape_only(shape: tuple[int, ...], dtype: Any, operation: str = "explain") -> tuple[Any, ...]:
    """A view of no data, of a dtype by its name, or torch's or numpy's."""
    name = dtype_name(dtype)
    if not isinstance(name, str) or name not in _FLOATS:
        raise ValueError(f"[{operation}] dtype is {dtype!r}: it must be 'float32', 'float16' or 'bfloat16'")
    return stand_in(shape, DTYPE_CODES[name])


def stand_in(shape: tuple[int, ...], code: int) -> tuple[Any, ...]:
    """A view for an operation that does not read the data: no address of anything, aligned as an allocator's."""
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return (64, code, tuple(shape), tuple(reversed(strides)))


def gpu_name(gpu: Any) -> str:
    """What the native module takes for ``gpu``."""
    if gpu is not None and (not isinstance(gpu, str) or not gpu):
        raise ValueError(f"[explain] gpu is {gpu!r}: it must be a name, as 'h100', or None")
    return gpu or ""


def explanation(found: Any) -> Explanation:
    """What the native module tells, as candidates."""
    return Explanation(Candidate(*parts) for parts in found)


def _asked(q: Any, options: dict[str, Any]) -> tuple[Any, ...]:
    """The options tuple of a question."""
    items = list(options_tuple(q, options))
    for i in (BIAS, MASK):
        if items[i] is not None and items[i].ndim < 4:
            items[i] = items[i][(None,) * (4 - items[i].ndim)]
    if is_torch(items[DROPOUT_SEED]):
        items[DROPOUT_SEED] = None  # its value chooses nothing
    return tuple(items)


def explain(
    q: AnyArray | tuple[int, ...],
    k: AnyArray | tuple[int, ...],
    v: AnyArray | tuple[int, ...],
    *,
    backward: bool = False,
    dtype: FloatDType = "float32",
    gpu: GpuName | None = None,
    **options: Unpack[QuestionOptions],
) -> Explanation:
    """The candidates for ``heddle.attention(q, k, v, **options)`` and which one would run.

    Args:
      q, k, v: arrays as for ``attention``, or only their shapes as tuples, of dtype `dtype`.
      backward: explain the gradient's kernels instead of the forward's.
      dtype: "float32", "float16" or "bfloat16", for q, k and v given as shapes; also "fp32", "fp16" and "bf16", and
        torch's and numpy's dtypes.
      gpu: answer as a machine with that GPU would, which need not be here: "a100", "rtx4090", "l40s", "h100" or "h200".
        The tensors are taken to be on it, wherever they are, and no data is read, index data neither: packed sequences need
        max_seqlen_q and max_seqlen_k. Seconds rest on costs measured on an H200, as there, unless HEDDLE_TUNING names a
        file made on such a GPU. How many clusters of thread blocks a Hopper GPU holds only its driver knows: the workspace
        of "sm90_decode" may be another there.
      options: as ``attention`` takes them. Data is not read, except index data.

    Raises:
      ValueError: a bad argument, as ``attention`` would refuse it; a gpu that is not known, listing those that are.
    """
    items = _asked(q, dict(options))
    if any(map(is_torch, (q, k, v, *items))):
        torch_host()
    views: list[Any] = [shape_only(x, dtype) if isinstance(x, tuple) else x for x in (q, k, v)]
    q, k, v = views
    return explanation(_heddle.explain_attention(q, k, v, items, backward, gpu_name(gpu)))


def explain_sparse_attention(
    q: AnyArray | tuple[int, ...],
    k: AnyArray | tuple[int, ...],
    v: AnyArray | tuple[int, ...],
    blocks: AnyArray | tuple[int, ...],
    counts: AnyArray | tuple[int, ...] | None = None,
    *,
    offsets: AnyArray | tuple[int, ...] | None = None,
    masks: AnyArray | tuple[int, ...] | None = None,
    mask_ids: AnyArray | tuple[int, ...] | None = None,
    block_size: int = 64,
    query_rows: int = 1,
    backward: bool = False,
    dtype: FloatDType = "float32",
    gpu: GpuName | None = None,
    **options: Unpack[QuestionOptions],
) -> Explanation:
    """The candidates for ``heddle.sparse_attention`` with these arguments and which one would run. Data is not read, except
    index data; that of lists is not.

    Args:
      q, k, v: arrays as for ``sparse_attention``, or only their shapes as tuples, of dtype `dtype`; see ``explain``.
      blocks, counts, offsets, masks, mask_ids: the same, int32.
      block_size, query_rows, options: as ``sparse_attention`` takes them.
      backward: explain the gradient's kernels instead of the forward's.
      dtype: of q, k and v given as shapes; see ``explain``.
      gpu: answer as a machine with that GPU would, which need not be here; see ``explain``.

    Raises:
      ValueError: a bad argument, as ``sparse_attention`` would refuse it; a gpu that is not known, listing those that are.
    """
    items = _asked(q, dict(options))
    if any(map(is_torch, (q, k, v, blocks, counts, offsets, masks, mask_ids, *items))):
        torch_host()
    name = gpu_name(gpu)
    views: list[Any] = [shape_only(x, dtype) if isinstance(x, tuple) else x for x in (q, k, v)]
    arrays = (blocks, counts, offsets, masks, mask_ids)
    views += (stand_in(x, _INT32) if isinstance(x, tuple) else x for x in arrays)
    q, k, v, blocks, counts, offsets, masks, mask_ids = views
    lists = (blocks, counts, offsets, masks, mask_ids, block_size, query_rows)
    return explanation(_heddle.explain_sparse_attention(q, k, v, *lists, items, backward, name))


def explain_adaptive_attention(
    q: AnyArray | tuple[int, ...],
    k: AnyArray | tuple[int, ...],
    v: AnyArray | tuple[int, ...],
    tol: float = 1e-2,
    *,
    backward: bool = False,
    dtype: FloatDType = "float32",
    **options: Unpack[QuestionOptions],
) -> Explanation:
    """The candidates for ``heddle.adaptive_attention`` with these arguments and which one would run. Data is not read, except
    index data; estimates are those of a call that replaces nothing.

    Args:
      q, k, v: arrays as for ``adaptive_attention``, or only their shapes as tuples, of dtype `dtype`; see ``explain``.
      tol, options: as ``adaptive_attention`` takes them.
      backward: explain the gradient's kernels instead of the forward's.
      dtype: of q, k and v given as shapes; see ``explain``.

    Raises:
      ValueError: a bad argument, as ``adaptive_attention`` would refuse it.
    """
    items = _asked(q, dict(options))
    if any(map(is_torch, (q, k, v, *items))):
        torch_host()
    views: list[Any] = [shape_only(x, dtype) if isinstance(x, tuple) else x for x in (q, k, v)]
    q, k, v = views
    return explanation(_heddle.explain_adaptive_attention(q, k, v, tol, items, backward))


def explain_merge_attention(
    os: Iterable[AnyArray],
    lses: Iterable[AnyArray],
    sink: AnyArray | None = None,
    *,
    out_dtype: Float32 | None = None,
    backward: bool = False,
    gpu: GpuName | None = None,
) -> Explanation:
    """The candidates for ``heddle.merge_attention`` with these arguments and which one would run. No data is read.

    Args:
      os: a sequence of results, each [B, Sq, H, Dv] or packed [total_q, H, Dv]. lses: their lse, float32 [B, H, Sq] or packed
        [H, total_q].
      sink, out_dtype: as ``merge_attention`` takes them.
      backward: explain the kernels of the gradients, of os, lses and sink, instead of the merge's.
      gpu: answer as a machine with that GPU would, which need not be here; see ``explain``.

    Raises:
      ValueError: a bad argument, as ``merge_attention`` would refuse it; a gpu that is not known, listing those that are.
      TypeError: what is no bool as backward.
    """
    os, lses = parts_of("explain_merge_attention", os, lses)
    float32_out = wants_float32("explain_merge_attention", out_dtype)
    backward = flag("explain_merge_attention", "backward", backward)
    if any(map(is_torch, (*os, *lses, sink))):
        torch_host()
    return explanation(_heddle.explain_merge_attention(os, lses, sink, float32_out, backward, gpu_name(gpu)))


def explain_apply_rotary(
    x: AnyArray,
    cos: AnyArray,
    sin: AnyArray,
    *,
    interleaved: bool = False,
    offsets: AnyArray | None = None,
    gpu: GpuName | None = None,
) -> Explanation:
    """The candidates for ``heddle.apply_rotary`` with these arguments and which one would run. Data is not read, except
    index data on the CPU.

    Args:
      x, cos, sin, interleaved, offsets: as ``apply_rotary`` takes them.
      gpu: answer as a machine with that GPU would, which need not be here; see ``explain``.

    Raises:
      ValueError: a bad argument, as ``apply_rotary`` would refuse it; a gpu that is not known, listing those that are.
    """
    interleaved = flag("explain_apply_rotary", "interleaved", interleaved)
    if any(map(is_torch, (x, cos, sin, offsets))):
        torch_host()
    return explanation(_heddle.explain_apply_rotary(x, cos, sin, interleaved, offsets, gpu_name(gpu)))


def explain_append_kv_cache(
    k_new: AnyArray,
    v_new: AnyArray,
    k_cache: AnyArray,
    v_cache: AnyArray,
    seqlens: AnyArray,
    *,
    page_table: AnyArray | None = None,
    cache_batch_idx: AnyArray | None = None,
    rotary_cos: AnyArray | None = None,
    rotary_sin: AnyArray | None = None,
    interleaved: bool = False,
    k_scale: AnyArray | None = None,
    v_scale: AnyArray | None = None,
    gpu: GpuName | None = None,
) -> Explanation:
    """The candidates for ``heddle.append_kv_cache`` with these arguments and which one would run. Nothing is written, and
    data is not read, except index data on the CPU.

    Args:
      k_new .. v_scale: as ``append_kv_cache`` takes them.
      gpu: answer as a machine with that GPU would, which need not be here; see ``explain``.

    Raises:
      ValueError: a bad argument, as ``append_kv_cache`` would refuse it; a gpu that is not known, listing those that are.
    """
    interleaved = flag("explain_append_kv_cache", "interleaved", interleaved)
    cache = (k_new, v_new, k_cache, v_cache, seqlens, page_table, cache_batch_idx, rotary_cos, rotary_sin)
    if any(map(is_torch, (*cache, k_scale, v_scale))):
        torch_host()
    return explanation(_heddle.explain_append_kv_cache(*cache, interleaved, k_scale, v_scale, gpu_name(gpu)))
