"""Column factors that move the difficulty of 8-bit inputs into the weights. heddle.lowbit is the public name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .tensor import torch_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .._types import AnyArray, Kind


def _array(x: Any, name: str) -> np.ndarray:
    torch = torch_of(x)
    found = np.asarray(x) if torch is None else x.detach().to(torch.float32).cpu().numpy()
    if not np.isfinite(found).all():
        raise ValueError(f"[smooth] {name} has a NaN or an infinity: it must be finite")
    return found.astype(np.float64)


def smooth(weights: AnyArray | Sequence[AnyArray], x_absmax: Kind, alpha: float = 0.5) -> Kind:
    """Factors s [K] for SmoothQuant: with x / s and W * s instead of x and W a layer computes the same, and its inputs have
    columns of more equal size, which one scale a row (``int8_x``) rounds better.

    Fold them once, into the norm in front and into the weights, before those are quantised (``heddle.nn.calibrate`` does it for
    a model whose policy rounds x to 8 bits, with the alpha that its output's error asks for):

    >>> s = heddle.lowbit.smooth([wq, wk, wv], x_absmax)      # doctest: +SKIP
    >>> norm.weight /= s; norm.bias /= s                      # doctest: +SKIP
    >>> wq, wk, wv = wq * s, wk * s, wv * s                   # doctest: +SKIP

    s is x_absmax^alpha / (largest |W| of the column)^(1 - alpha), rounded to a power of two: then the folding is exact in
    floats (where nothing leaves their range), and so is every product. Columns in which x or W is zero have 1.

    Args:
      weights: [N, K], or a list of such for layers that share their input; numpy or torch.
      x_absmax: [K], the largest |x| of each column over sample inputs, as they enter the product.
      alpha: 0 moves nothing that x has to the weights' columns, 1 all of it.

    Returns:
      float32 [K], numpy or a torch tensor as x_absmax is.

    Raises:
      ValueError: shapes that do not fit, numbers that are not finite, a negative x_absmax, alpha outside [0, 1].

    Source: Xiao et al., arXiv 2211.10438.
    """
    if not 0 <= alpha <= 1:
        raise ValueError(f"[smooth] alpha is {alpha}: it must be in [0, 1]")
    largest_x = _array(x_absmax, "x_absmax")
    if largest_x.ndim != 1:
        raise ValueError(f"[smooth] x_absmax is {list(largest_x.shape)}: it must be [K]")
    if (largest_x < 0).any():
        raise ValueError("[smooth] x_absmax has a negative number: it must be the largest magnitudes")
    matrices = list(weights) if isinstance(weights, (list, tuple)) else [weights]
    largest_w = np.zeros_like(largest_x)
    for matrix in matrices:
        found = _array(matrix, "weights")
        if found.ndim != 2 or found.shape[1] != largest_x.size:
            raise ValueError(
                f"[smooth] weights are {list(found.shape)}: they must be [N, {largest_x.size}], as x_absmax is "
                f"[{largest_x.size}]"
            )
        largest_w = np.maximum(largest_w, np.abs(found).max(0, initial=0.0))
    used = (largest_x > 0) & (largest_w > 0)
    exponent = np.zeros_like(largest_x)
    exponent[used] = np.rint(alpha * np.log2(largest_x[used]) - (1 - alpha) * np.log2(largest_w[used]))
    factors: Any = np.exp2(np.clip(exponent, -126, 126)).astype(np.float32)
    torch = torch_of(x_absmax)
    beside: Any = x_absmax
    return factors if torch is None else torch.from_numpy(factors).to(beside.device)
