"""Attention with a tolerance in and a proved bound out, and an audit of results of attention."""

from __future__ import annotations

import dataclasses
import operator
from typing import TYPE_CHECKING, Any

import numpy as np

from ._options import causal_code
from .functional import attention
from .hosts import arrays, is_torch, torch_host
from .sparse import options_tuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Unpack

    from ._types import AnyArray, Array, OnExceedName, QuestionOptions


def adaptive_attention(
    q: Array,
    k: Array,
    v: Array,
    tol: float = 1e-2,
    on_exceed: OnExceedName = "refine",
    **options: Unpack[QuestionOptions],
) -> tuple[Array, Array, Array]:
    """Attention that leaves out what counts little, up to a tolerance, and says how far each row may be off.

    Scores, softmax and lse are those of ``attention``, of every pair. For blocks of 32 keys that have little of a row's mass,
    or whose keys share it evenly, the product with v is replaced by the block's mass times the mean of its values. Then, for
    each row of each head,

        norm(out - exact) <= bound * largest      bound <= tol

    beside the rounding that ``attention`` has. The norm is Euclidean, largest is the largest norm of a value of the sequence
    and kv head, and exact is what ``attention`` would give. Proof: docs/numerics.md. The more is replaced, the faster the call;
    where nothing can be, it costs what ``attention`` costs.

    A block is replaced for up to 48 neighbouring rows at once, if each of them allows it and meets all of it. So within its
    bound a row depends on its neighbours, later ones too, and tol's unit on all values of the sequence.

    B sequences, H query heads, Hkv key/value heads, Sq and Sk lengths, as for ``attention``; float32, float16 or bfloat16, on
    the CPU. Torch tensors go through a torch operator with gradients of q, k, v and sink, of what was computed: also through
    lse; bound has none. Other arrays are forward only.

    Args:
      q, k, v: as for ``attention``: [B, Sq, H, D], [B, Sk, Hkv, D], [B, Sk, Hkv, Dv]; packed, or k and v in pages.
      tol: most that bound may be, above 0. An error of bfloat16's rounding is about 4e-3.
      on_exceed: what to do with a row whose bound comes out above tol: "refine" it, compute the call as "dense" attention, or
        "report" it. Blocks are replaced only while every bound stays within tol, so that none comes out above it, and the
        three give the same.
      options: those of ``attention``, except bias, mask, draft_mask, dropout_p, precision and method. Gradients with
        alibi_slopes or softcap are served by ``force="reference"`` alone, and refused with page_table, cache_batch_idx or
        cache_leftpad.

    Returns:
      out [B, Sq, H, Dv] (packed: [total_q, H, Dv]), of q's dtype (or out_dtype) and kind of array; lse and bound, float32
      [B, H, Sq] (packed: [H, total_q]). A row without any key gives out 0, lse -inf (with a sink, lse = sink) and bound 0; one
      with scores that are no numbers has a bound that is none.

    Raises:
      ValueError: a bad argument; the message names it, its value and the rule. Nothing has been written.
      TypeError: as ``attention``.
      NotImplementedError: a tensor with a tangent: there are no forward-mode derivatives.
    """
    items = options_tuple(q, dict(options))
    if is_torch(q):
        return torch_host().adaptive_attention(q, k, v, tol, on_exceed, items)
    return arrays.adaptive_attention(q, k, v, tol, on_exceed, items)


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
        float32: 2**-17 of the row). None without bound.
    """

    rows: int
    heads: int
    error: dict[float, float]
    bound: dict[float, float] | None
    bound_over_error: dict[float, float] | None
    exceeded: int | None


def _doubles(x: Any) -> np.ndarray[Any, Any]:
    if is_torch(x):
        return x.detach().to("cpu").double().numpy()
    return np.asarray(x, dtype=np.float64)


def _starts(x: Any) -> list[int]:
    return [int(n) for n in (x.tolist() if hasattr(x, "tolist") else x)]


# By how much of itself a result of attention may be off for its rounding alone.
_ROUNDING = {"float32": 2.0**-17, "float16": 2.0**-9, "bfloat16": 2.0**-7}


def _exact_row(q: Any, k: Any, v: Any, i: int, causal: Any, options: dict[str, Any]) -> Any:
    """Row i of a sequence, [1, 1, H, Dv] in float32, as a piece of the call: all its keys, and its place among them."""
    code = causal_code(causal)
    at = i if code == 1 else i + k.shape[1] - q.shape[1]
    options |= {"q_offset": max(at, 0), "key_offset": max(-at, 0), "causal": "top_left" if code else "none"}
    if str(q.dtype).removeprefix("torch.") != "float32":
        options["out_dtype"] = "float32"
    return attention(q[:, i : i + 1], k, v, force="reference", **options)


def _quantiles(values: np.ndarray[Any, Any], of: Sequence[float]) -> dict[float, float]:
    return {x: float(np.quantile(values, x)) if values.size else float("nan") for x in of}


def audit_attention(
    q: AnyArray,
    k: AnyArray,
    v: AnyArray,
    out: AnyArray,
    bound: AnyArray | None = None,
    *,
    rows: int = 32,
    seed: int = 0,
    quantiles: Sequence[float] = (0.5, 0.9, 0.99, 1.0),
    causal: Any = "none",
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
      causal: as for ``attention``.
      options: of ``attention``, what ``out`` was computed with: scale, window, softcap, sink, cu_seqlens_q and cu_seqlens_k.
        Others are refused.

    Raises:
      ValueError: an option that the audit does not know, no rows, a shape that does not fit.
    """
    known = ("scale", "window", "softcap", "sink", "cu_seqlens_q", "cu_seqlens_k")
    for name, value in options.items():
        if name not in known and value is not None:
            raise ValueError(f"[audit_attention] {name} is given: the audit knows {', '.join(known)} and causal")
    rows = operator.index(rows)
    if rows < 1:
        raise ValueError(f"[audit_attention] rows is {rows}: it must be at least 1")
    starts = [options.pop(name, None) for name in ("cu_seqlens_q", "cu_seqlens_k")]  # type: ignore[misc]
    packed = starts[0] is not None
    if packed != (starts[1] is not None):
        raise ValueError("[audit_attention] one of cu_seqlens_q and cu_seqlens_k is given: give both")
    if packed:
        (q_starts, k_starts) = map(_starts, starts)
        sequences = [
            (q[a:b][None], k[c:d][None], v[c:d][None], out[a:b], None if bound is None else bound[:, a:b])
            for a, b, c, d in zip(q_starts, q_starts[1:], k_starts, k_starts[1:])
        ]
    else:
        sequences = [
            (q[b : b + 1], k[b : b + 1], v[b : b + 1], out[b], None if bound is None else bound[b])
            for b in range(q.shape[0])
        ]
    if tuple(out.shape[:-1]) != tuple(q.shape[:-1]):
        raise ValueError(f"[audit_attention] out is {list(out.shape)}: it must have the rows and heads of q, {list(q.shape)}")
    lengths = np.array([sequence[0].shape[1] for sequence in sequences])
    if lengths.sum() == 0:
        raise ValueError("[audit_attention] q has no rows")
    drawn = np.sort(np.random.default_rng(seed).integers(lengths.sum(), size=rows))
    sequence_of = np.searchsorted(np.cumsum(lengths), drawn, side="right")
    row_of = drawn - (np.cumsum(lengths) - lengths)[sequence_of]
    errors, bounds, allowed = [], [], []
    rounding = _ROUNDING[str(out.dtype).removeprefix("torch.")]
    for b in np.unique(sequence_of):
        q_b, k_b, v_b, out_b, bound_b = sequences[b]
        group = q_b.shape[2] // k_b.shape[2]
        largest = np.repeat(np.linalg.norm(_doubles(v_b[0]), axis=-1).max(axis=0, initial=0.0), group)
        for i in row_of[sequence_of == b]:
            exact = _doubles(_exact_row(q_b, k_b, v_b, int(i), causal, dict(options)))[0, 0]
            unit = np.where(largest > 0, largest, 1)
            errors.append(np.linalg.norm(_doubles(out_b[int(i)]) - exact, axis=-1) / unit)
            allowed.append(rounding * np.maximum(np.linalg.norm(exact, axis=-1) / unit, 0.1))
            if bound_b is not None:
                bounds.append(_doubles(bound_b[:, int(i)]))
    error = np.concatenate(errors)
    found = {"rows": rows, "heads": q.shape[-2], "error": _quantiles(error, quantiles)}
    if not bounds:
        return AttentionAudit(**found, bound=None, bound_over_error=None, exceeded=None)
    given = np.concatenate(bounds)
    return AttentionAudit(
        **found,
        bound=_quantiles(given, quantiles),
        bound_over_error=_quantiles(given[error > 0] / error[error > 0], quantiles),
        exceeded=int((error > given + np.concatenate(allowed)).sum()),
    )
