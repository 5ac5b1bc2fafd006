"""Column scales that keep large inputs' weights exact, or inputs even, by the output's error. heddle.lowbit is the public
name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic

import numpy as np

from .._types import Kind
from .smoothing import smooth
from .tensor import default_rule, kind, plain, quantize, torch_of

if TYPE_CHECKING:
    from .._types import CalibrationMethod, FormatName, RuleName

# Rules whose search takes an importance.
_SEARCHES = ("mse", "four_six")
# Whose scales are tried.
METHODS: tuple[CalibrationMethod, ...] = ("awq", "smoothquant")
# Columns whose mean is less than this part of the largest count as having that.
_LEAST_MEAN = 1e-4


@dataclass(frozen=True, eq=False)
class Calibration(Generic[Kind]):
    """What ``calibrate`` found. Errors are relative errors of the output, |x (Q - W)^T| / |x W^T|.

    Attributes:
      scales: float32 [K], numpy or a torch tensor as the weights are: quantise W * scales, divide x by them.
      method: whose scales they are, "awq" or "smoothquant"; "none": they are 1.
      alpha: of the scales; 0 of "none".
      importance: float32 [K], the mean square of the inputs divided by the scales, for ``quantize``; None where the rule
        searches nothing, or its own search is better.
      plain_error, error: of all matrices together, quantised as they are and with scales and importance.
      plain_errors, errors: the same of each.
    """

    scales: Kind = field(repr=False)
    method: str
    alpha: float
    importance: Kind | None = field(repr=False)
    plain_error: float
    error: float
    plain_errors: tuple[float, ...]
    errors: tuple[float, ...]


def _floats(x: Any, name: str) -> Any:
    torch = kind(x, "calibrate", name)
    return np.asarray(x, np.float32) if torch is None else plain(x).to(torch.float32)


def _numpy(x: Any) -> np.ndarray:
    return (np.asarray(x) if torch_of(x) is None else x.detach().cpu().numpy()).astype(np.float64)


def _like(values: np.ndarray, x: Any) -> Any:
    torch = torch_of(x)
    values = values.astype(np.float32)
    return values if torch is None else torch.from_numpy(values).to(x.device)


def _check_finite(x: Any, name: str) -> None:
    if not bool((abs(x) < float("inf")).all()):
        raise ValueError(f"[calibrate] {name} has a NaN or an infinity: it must be finite")


class _Output:
    """Squares of sums over the sample rows, of x [T, K] or of its second moments [K, K]."""

    def __init__(self, x: Any, moment: Any) -> None:
        if moment is None and x.shape[0] > x.shape[1]:
            moment = x.T @ x
        self.x, self.moment = x, moment

    def square(self, w: Any) -> float:
        """|x w^T|^2."""
        if self.moment is None:
            y = self.x @ w.T
            return float((y * y).sum())
        return max(float(((w @ self.moment) * w).sum()), 0.0)


def _rounded(x: Any, int8: bool) -> Any:
    """x [T, K] as products in 8 bits take it, a scale for each row, in floats."""
    torch = torch_of(x)
    lib = np if torch is None else torch
    largest = lib.amax(abs(x), 1)[:, None]
    scale = lib.where(largest > 0, largest, lib.ones_like(largest)) / (127 if int8 else 448)
    x = x / scale
    if int8:
        return lib.round(x) * scale
    if torch is not None:
        return x.to(torch.float8_e4m3fn).to(x.dtype) * scale
    step = np.ldexp(np.float32(1), np.maximum(np.frexp(x)[1] - 1, -6) - 3)  # 4 bits, the least exponent is -6
    return np.round(x / step) * step * scale


def _relative(error: float, size: float) -> float:
    return 0.0 if error == 0 else float(np.sqrt(error / size)) if size > 0 else float("inf")


def calibrate(
    weights: Kind | Sequence[Kind],
    x: Kind | None = None,
    *,
    format: FormatName = "nvfp4",
    rule: RuleName | None = None,
    int8_x: bool = False,
    fp8_x: bool = False,
    absmean: Kind | None = None,
    absmax: Kind | None = None,
    moment: Kind | None = None,
    methods: Sequence[CalibrationMethod] | None = None,
    steps: int = 20,
) -> Calibration[Kind]:
    """Column scales s [K] for AWQ: with x / s and Q(W * s) instead of x and Q(W) a layer's output errs less, because columns
    that meet large inputs are rounded in smaller steps.

    s is mean|x|^alpha, divided by the root of its largest times its smallest, and alpha the one of 0, 1 / steps, ... 1 whose
    quantised weights have the least error of the output on the sample; the weights as they are, with the rule's own search,
    are tried too, so the error never grows. Searches of scales ("mse", "four_six") weigh errors by the mean of (x / s)^2.

    Where x is rounded to 8 bits, errors are measured so, and SmoothQuant's scales (see ``smooth``) of the same alphas are
    tried besides: columns of x of more equal size lose less to one scale a row.

    Fold s once, into the norm in front or into the rows of the linear layer in front, and quantise:

    >>> c = heddle.lowbit.calibrate([wq, wk, wv], x, format="nvfp4")            # doctest: +SKIP
    >>> norm.weight /= c.scales; norm.bias /= c.scales                          # doctest: +SKIP
    >>> q = heddle.lowbit.quantize(wq * c.scales, "nvfp4", rule="mse", importance=c.importance)  # doctest: +SKIP

    Args:
      weights: [N, K], or a list of such for layers that share their input; numpy or torch.
      x: [..., K], sample inputs as they enter the product, on the weights' device.
      format: as for ``quantize``.
      rule: as for ``quantize``; None: "mse" for 4 bits, "plain" for 8.
      int8_x, fp8_x: the products round x, as ``linear`` and ``pack`` say.
      absmean, absmax: [K], the mean and the largest of |x|, where there is no x or they were taken over more of it.
      moment: [K, K], the mean of x^T x, instead of x.
      methods: whose scales are tried, of "awq" and "smoothquant"; None: both where x is rounded to 8 bits, else AWQ's. Those of
        SmoothQuant are powers of two, with which floats compute what they did to the bit.
      steps: of alpha between 0 and 1; 0: no scales are tried, but the importance is.

    Raises:
      ValueError: shapes that do not fit, numbers that are not finite, an x without rows or zero everywhere, a format that
        does not have such weights. TypeError: no array.

    Source: Lin et al., arXiv 2306.00978; Xiao et al., arXiv 2211.10438.
    """
    if not (isinstance(steps, int) and steps >= 0):
        raise ValueError(f"[calibrate] steps is {steps}: it must be an integer, 0 or more")
    matrices = [_floats(w, "weights") for w in (weights if isinstance(weights, (list, tuple)) else [weights])]
    if not matrices:
        raise ValueError("[calibrate] weights is an empty list: it must have a matrix")
    columns = int(matrices[0].shape[-1]) if matrices[0].ndim else 0
    for w in matrices:
        if w.ndim != 2 or int(w.shape[1]) != columns:
            raise ValueError(
                f"[calibrate] weights are {list(w.shape)}: they must be [N, {columns}], as the first are "
                f"{list(matrices[0].shape)}"
            )
        _check_finite(w, "weights")
    in_8_bits = int8_x or fp8_x
    methods = METHODS if methods is None and in_8_bits else ("awq",) if methods is None else tuple(methods)
    if unknown := [method for method in methods if method not in METHODS]:
        raise ValueError(f"[calibrate] methods has {unknown[0]!r}: they are {' and '.join(METHODS)}")
    if int8_x and fp8_x:
        raise ValueError("[calibrate] int8_x and fp8_x are set: x is rounded one way")
    if in_8_bits and x is None:
        raise ValueError("[calibrate] x must be given where it is rounded to 8 bits: its moments do not say how")
    mean, square, output = _statistics(columns, x, absmean, moment)
    largest: Any = _largest(output.x, absmax, columns) if "smoothquant" in methods else None
    rule = default_rule(format) if rule is None else rule
    sizes = [output.square(w) for w in matrices]
    exact = [output.x @ w.T for w in matrices] if in_8_bits else []

    def errors(scales: Any, importance: Any) -> list[float]:
        found = []
        rounded = _rounded(output.x if scales is None else output.x / scales, int8_x) if in_8_bits else None
        for i, w in enumerate(matrices):
            q = quantize(w if scales is None else w * scales, format, rule=rule, importance=importance).dequantize()
            if rounded is not None:
                found.append(float(((rounded @ q.T - exact[i]) ** 2).sum()))
            else:
                found.append(output.square((q if scales is None else q / scales) - w))
        return found

    mean = np.maximum(mean, _LEAST_MEAN * mean.max())
    tried = [("none", 0.0, np.ones(columns))]
    for step in range(1, steps + 1):
        alpha = step / steps
        if "awq" in methods:
            scales = mean**alpha
            tried.append(("awq", alpha, scales / np.sqrt(scales.max() * scales.min())))
        if "smoothquant" in methods:
            tried.append(("smoothquant", alpha, _numpy(smooth(matrices, largest, alpha))))
    plain_found = errors(None, None)
    best: tuple[Any, str, float, np.ndarray, np.ndarray | None] = (plain_found, *tried[0], None)
    for method, alpha, scales in tried:
        importance = square / scales**2 if rule in _SEARCHES else None
        weighed = None if importance is None else _like(importance, matrices[0])
        found = errors(None if method == "none" else _like(scales, matrices[0]), weighed)
        if sum(found) < sum(best[0]):
            best = (found, method, alpha, scales, importance)
    found, method, alpha, scales, importance = best
    return Calibration(
        scales=_like(scales, matrices[0]),
        method=method,
        alpha=alpha,
        importance=None if importance is None else _like(importance, matrices[0]),
        plain_error=_relative(sum(plain_found), sum(sizes)),
        error=_relative(sum(found), sum(sizes)),
        plain_errors=tuple(map(_relative, plain_found, sizes)),
        errors=tuple(map(_relative, found, sizes)),
    )


def _largest(x: Any, absmax: Any, columns: int) -> Any:
    """max |x|, [K]."""
    if absmax is None:
        if x is None:
            raise ValueError("[calibrate] absmax must be given where moment is: it does not follow from it")
        return abs(x).max(0) if torch_of(x) is None else abs(x).amax(0)
    absmax = _floats(absmax, "absmax")
    if tuple(absmax.shape) != (columns,):
        raise ValueError(f"[calibrate] absmax is {list(absmax.shape)}: it must be [{columns}]")
    _check_finite(absmax, "absmax")
    if bool((absmax < 0).any()):
        raise ValueError("[calibrate] absmax has a negative number: it must be the largest magnitudes")
    return absmax


def _statistics(columns: int, x: Any, absmean: Any, moment: Any) -> tuple[np.ndarray, np.ndarray, _Output]:
    """mean |x|, mean x^2, and what gives the output's squares."""
    if (x is None) == (moment is None):
        raise ValueError("[calibrate] one of x and moment must be given" + (", not both" if x is not None else ""))
    if x is not None:
        x = _floats(x, "x")
        if x.ndim == 0 or int(x.shape[-1]) != columns:
            raise ValueError(
                f"[calibrate] x is {list(x.shape)}: it must be [..., {columns}], as weights are [N, {columns}]"
            )
        x = x.reshape(-1, columns)
        if x.shape[0] == 0:
            raise ValueError("[calibrate] x has no rows: there is nothing to measure")
        _check_finite(x, "x")
        mean, square = _numpy(abs(x).mean(0)), _numpy((x * x).mean(0))
    else:
        if absmean is None:
            raise ValueError("[calibrate] absmean must be given where moment is: it does not follow from it")
        moment = _floats(moment, "moment")
        if tuple(moment.shape) != (columns, columns):
            raise ValueError(f"[calibrate] moment is {list(moment.shape)}: it must be [{columns}, {columns}]")
        _check_finite(moment, "moment")
        square = _numpy(moment.diagonal())
        if (square < 0).any():
            raise ValueError("[calibrate] moment has a negative number on its diagonal: it must be the mean of x^T x")
    if absmean is not None:
        absmean = _floats(absmean, "absmean")
        if tuple(absmean.shape) != (columns,):
            raise ValueError(f"[calibrate] absmean is {list(absmean.shape)}: it must be [{columns}]")
        _check_finite(absmean, "absmean")
        mean = _numpy(absmean)
        if (mean < 0).any():
            raise ValueError("[calibrate] absmean has a negative number: it must be the mean of magnitudes")
    if not mean.any() or not square.any():
        raise ValueError("[calibrate] x is zero everywhere: no scales follow from it")
    return mean, square, _Output(x, moment)
