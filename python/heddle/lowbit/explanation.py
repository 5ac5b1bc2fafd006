"""Which kernel quantises, and which undoes it. heddle.lowbit is their public name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .. import _heddle
from ..explanation import Candidate, Explanation, gpu_name, shape_only
from .tensor import QuantizedTensor, kind, plain

if TYPE_CHECKING:
    from .._types import AnyArray, FloatDType, FormatName, GpuName, RuleName


def explain_quantize(
    weights: AnyArray,
    format: FormatName = "nvfp4",
    *,
    rule: RuleName = "plain",
    importance: AnyArray | None = None,
    global_scale: float | None = None,
    gpu: GpuName | None = None,
) -> Explanation:
    """The candidates for ``quantize`` with these arguments and which one would run. No weight is read.

    Args:
      weights, format, rule, importance, global_scale: as ``quantize`` takes them.
      gpu: answer as a machine with that GPU would, which need not be here; see ``heddle.explain``.

    Raises:
      ValueError: a bad argument, as ``quantize`` would refuse it; a gpu that is not known, listing those that are.
    """
    kind(weights, "explain_quantize", "weights")
    arguments = (plain(weights), format, rule, plain(importance), global_scale or 0.0, gpu_name(gpu))
    return Explanation(Candidate(*parts) for parts in _heddle.explain_quantize(*arguments))


def explain_dequantize(
    matrix: QuantizedTensor[Any], dtype: FloatDType = "float32", *, gpu: GpuName | None = None
) -> Explanation:
    """The candidates for ``dequantize`` of a matrix to weights of a dtype, "float32", "float16" or "bfloat16" (or torch's or
    numpy's of that name), and which one would run. Nothing is read. gpu: as for ``explain_quantize``."""
    out = shape_only(tuple(map(int, matrix.shape)), dtype, "explain_dequantize")
    kind(matrix.codes, "explain_dequantize", "codes")
    found = _heddle.explain_dequantize(out, matrix._parts(), gpu_name(gpu))
    return Explanation(Candidate(*parts) for parts in found)
