"""An audit of results of attention: rows drawn at random, against exact attention."""

from __future__ import annotations

import dataclasses
import operator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ._options import CAUSAL_CODES, causal_code
from .functional import attention
from .hosts import is_torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from typing_extensions import Unpack

    from ._types import QuestionOptions

_KNOWN = ("causal", "window", "scale", "softcap", "sink", "cu_seqlens_q", "cu_seqlens_k")


@dataclasses.dataclass(frozen=True)
class AttentionAudit:
    """What ``audit_attention`` found. Each of its dicts has the values of the quantiles that were asked for.

    Attributes:
      rows: how many rows were computed exactly; heads: in each of how many heads.
      error: of norm(out - exact) / largest, over all sampled rows of all heads; largest is the largest norm of a value of the
        sequence and kv head.
      bound: of the bounds of these rows, and bound_over_error: of bound / error, over rows whose error is not 0. None where no
        bound was given.
      exceeded: how many of these have an error above their bound by more than twice what rounding to out's dtype may take (of
        float32: 2**-17 of the row), and what float32 sums of scores may: 2**-22 of scale |q| |k|, k the longest key. None without
        bound.
    """

    rows: int
    heads: int
    error: dict[float, float]
    bound: dict[float, float] | None
    bound_over_error: dict[float, float] | None
    exceeded: int | None


class _Sequence(NamedTuple):
    """q, k and v as a batch of one; out [Sq, H, Dv] and bound [H, Sq]."""

    q: Any
    k: Any
    v: Any
    out: Any
    bound: Any


def sequences_of(q: Any, k: Any, v: Any, out: Any, bound: Any, q_starts: Any, k_starts: Any) -> list[_Sequence]:
    if (q_starts is None) != (k_starts is None):
        given, missing = ("cu_seqlens_k", "q") if q_starts is None else ("cu_seqlens_q", "k")
        raise ValueError(f"[audit_attention] {given} is given and cu_seqlens_{missing} is not: give both")
    if q_starts is None:
        return [
            _Sequence(q[b : b + 1], k[b : b + 1], v[b : b + 1], out[b], None if bound is None else bound[b])
            for b in range(q.shape[0])
        ]
    of_q, of_k = ([int(n) for n in starts.tolist()] for starts in (q_starts, k_starts))
    return [
        _Sequence(q[a:b][None], k[c:d][None], v[c:d][None], out[a:b], None if bound is None else bound[:, a:b])
        for a, b, c, d in zip(of_q, of_q[1:], of_k, of_k[1:])
    ]


def _doubles(x: Any) -> np.ndarray[Any, Any]:
    if is_torch(x):
        return x.detach().to("cpu").double().numpy()
    return np.asarray(x, dtype=np.float64)


# Scores are sums in float32. One that is off by d moves a row by no more than 2 d of the largest value.
_OF_SCORES = 2.0**-22


def _largest_scores(x: _Sequence, i: int, scale: float | None) -> np.ndarray[Any, Any]:
    """[H]: what no score of row i exceeds."""
    of_keys = np.linalg.norm(_doubles(x.k[0]), axis=-1).max(axis=0, initial=0.0)
    of_row = np.linalg.norm(_doubles(x.q[0, i]), axis=-1)
    scale = x.q.shape[-1] ** -0.5 if scale is None else abs(scale)
    found: np.ndarray[Any, Any] = scale * of_row * np.repeat(of_keys, len(of_row) // len(of_keys))
    return found


# By how much of itself a result of attention may be off for its rounding alone.
_ROUNDING = {"float32": 2.0**-17, "float16": 2.0**-9, "bfloat16": 2.0**-7}


def _exact_row(x: _Sequence, i: int, causal: int, options: dict[str, Any]) -> Any:
    """Row i of a sequence, [1, 1, H, Dv] in float32, as a piece of the call: all its keys, and its place among them."""
    at = i if causal == CAUSAL_CODES["top_left"] else i + x.k.shape[1] - x.q.shape[1]
    options |= {"q_offset": max(at, 0), "key_offset": max(-at, 0), "causal": "top_left" if causal else "none"}
    if str(x.q.dtype).removeprefix("torch.") != "float32":
        options["out_dtype"] = "float32"
    return attention(x.q[:, i : i + 1], x.k, x.v, force="reference", **options)


def exact_rows(
    sequences: list[_Sequence], rows: int, seed: int, causal: int, options: dict[str, Any]
) -> Iterator[tuple[int, int, np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    """Rows drawn at random, with replacement, over all sequences: for each the number of its sequence, its own there, its exact
    result [H, Dv], and the largest norm of a value for each of its heads, [H] (1 where that is 0)."""
    ends = np.cumsum([x.q.shape[1] for x in sequences])
    drawn = np.sort(np.random.default_rng(seed).integers(ends[-1], size=rows))
    for number, (x, end) in enumerate(zip(sequences, ends)):
        first = end - x.q.shape[1]
        of_sequence = drawn[(first <= drawn) & (drawn < end)] - first
        if of_sequence.size == 0:
            continue
        longest = np.linalg.norm(_doubles(x.v[0]), axis=-1).max(axis=0, initial=0.0)
        unit = np.repeat(np.where(longest > 0, longest, 1), x.q.shape[2] // x.k.shape[2])
        for i in map(int, of_sequence):
            yield number, i, _doubles(_exact_row(x, i, causal, dict(options)))[0, 0], unit


def errors_of(exact: np.ndarray[Any, Any], out: Any, unit: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """[H]: how far a row's result [H, Dv] is off, in units of the largest value."""
    found: np.ndarray[Any, Any] = np.linalg.norm(_doubles(out) - exact, axis=-1) / unit
    return found


def _quantiles(values: np.ndarray[Any, Any], of: Sequence[float]) -> dict[float, float]:
    return {x: float(np.quantile(values, x)) if values.size else float("nan") for x in of}


def audit_attention(
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    bound: Any = None,
    *,
    rows: int = 32,
    seed: int = 0,
    quantiles: Sequence[float] = (0.5, 0.9, 0.99, 1.0),
    **options: Unpack[QuestionOptions],
) -> AttentionAudit:
    """How far results of attention are from exact attention: rows drawn at random are computed in float64, each over all its
    keys, and compared. For results that are promised something (``adaptive_attention``) and for those that are not (a choice
    of blocks, a model's pattern of sparsity). A row costs what the reference takes for it, some 10 ms for 8192 keys of 8 heads.

    Args:
      q, k, v: as for ``attention``, torch tensors or arrays, batched or packed.
      out: the result to be judged, [B, Sq, H, Dv] (packed: [total_q, H, Dv]).
      bound: of each row, in units of the largest norm of a value: float32 [B, H, Sq] (packed: [H, total_q]).
      rows: how many rows to draw, with replacement, over all sequences; all their heads are computed. At least 1.
      seed: of numpy's generator that draws them.
      quantiles: from 0 to 1, those to return.
      options: of ``attention``, what ``out`` was computed with: causal, window, scale, softcap, sink, cu_seqlens_q and
        cu_seqlens_k. Others are refused.

    Raises:
      ValueError: an option that the audit does not know, no rows, a shape that does not fit.
    """
    for name, value in options.items():
        if name not in _KNOWN and value is not None:
            raise ValueError(f"[audit_attention] {name} is given: the audit knows {', '.join(_KNOWN)}")
    rows = operator.index(rows)
    if rows < 1:
        raise ValueError(f"[audit_attention] rows is {rows}: it must be at least 1")
    if tuple(out.shape[:-1]) != tuple(q.shape[:-1]):
        rule = f"it must have the rows and heads of q, {list(q.shape)}"
        raise ValueError(f"[audit_attention] out is {list(out.shape)}: {rule}")
    given: dict[str, Any] = dict(options)
    causal = causal_code(given.pop("causal", "none"))
    sequences = sequences_of(q, k, v, out, bound, given.pop("cu_seqlens_q", None), given.pop("cu_seqlens_k", None))
    if not any(x.q.shape[1] for x in sequences):
        raise ValueError(f"[audit_attention] q is {list(q.shape)}: it has no rows")
    errors: list[Any] = []
    bounds: list[Any] = []
    allowed: list[Any] = []
    for number, i, exact, unit in exact_rows(sequences, rows, seed, causal, given):
        x = sequences[number]
        errors.append(errors_of(exact, x.out[i], unit))
        size = np.maximum(np.linalg.norm(exact, axis=-1) / unit, 0.1)
        of_rounding = _ROUNDING[str(out.dtype).removeprefix("torch.")] * size
        allowed.append(of_rounding + _OF_SCORES * _largest_scores(x, i, given.get("scale")))
        if x.bound is not None:
            bounds.append(_doubles(x.bound[:, i]))
    error = np.concatenate(errors)
    found = AttentionAudit(rows, q.shape[-2], _quantiles(error, quantiles), None, None, None)
    if not bounds:
        return found
    of_rows = np.concatenate(bounds)
    return dataclasses.replace(
        found,
        bound=_quantiles(of_rows, quantiles),
        bound_over_error=_quantiles(of_rows[error > 0] / error[error > 0], quantiles),
        exceeded=int((error > of_rows + np.concatenate(allowed)).sum()),
    )
