"""Which kernels pooled keys and the choice of blocks would run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .. import _heddle
from .._options import flag
from ..explanation import Explanation, explanation, gpu_name, shape_only
from . import checks
from .branches import FORCED
from .kernels import checked_choice


def explain_pool_keys(
    x: Any,
    block: int,
    stride: int | None = None,
    *,
    backward: bool = False,
    dtype: Any = "float32",
    gpu: str | None = None,
) -> Explanation:
    """The candidates for ``pool_keys(x, block, stride)`` and which one would run. No data is read.

    Args:
      x: a tensor [B, S, Hkv, D], or only its shape as a tuple, of dtype `dtype`.
      block, stride: as pool_keys takes them.
      backward: explain the kernel of the gradient instead.
      gpu: answer as a machine with that GPU would, which need not be here; see ``heddle.explain``.

    Raises:
      ValueError, TypeError: a bad argument, as pool_keys would refuse it; a gpu that is not known.
    """
    name = "explain_pool_keys"
    block = checks.integer(name, "block", block, 1)
    stride = block if stride is None else checks.integer(name, "stride", stride, 1)
    keys = _four(name, "x", x, dtype)
    backward = flag(name, "backward", backward)
    return explanation(_heddle.explain_pool_keys(keys, block, stride, backward, gpu_name(gpu)))


def explain_select_blocks(
    q: Any,
    k_pooled: Any,
    n: int,
    *,
    lse: bool = True,
    block_size: int = 64,
    compression_block: int | None = None,
    compression_stride: int | None = None,
    forced: Iterable[str] = FORCED,
    scale: float | None = None,
    q_step: int = 1,
    dtype: Any = "float32",
    gpu: str | None = None,
) -> Explanation:
    """The candidates for ``select_blocks(q, k_pooled, n, ...)`` and which one would run. No data is read.

    Args:
      q, k_pooled: tensors [B, Sq, H, D] and [B, N, Hkv, D], or only their shapes as tuples, of dtype `dtype`.
      lse: whether the compressed branch's lse will be there.
      n, block_size, compression_block, compression_stride, forced, scale, q_step: as select_blocks takes them.
      gpu: answer as a machine with that GPU would, which need not be here; see ``heddle.explain``.

    Raises:
      ValueError, TypeError: a bad argument, as select_blocks would refuse it; a gpu that is not known.
    """
    name = "explain_select_blocks"
    n = checks.integer(name, "n", n, 0)
    sizes, bits, scale = checked_choice(name, block_size, compression_block, compression_stride, forced, scale)
    views = [_four(name, what, x, dtype) for what, x in (("q", q), ("k_pooled", k_pooled))]
    lse, step = flag(name, "lse", lse), checks.integer(name, "q_step", q_step, 1)
    return explanation(_heddle.explain_select_blocks(*views, n, lse, *sizes, bits, scale, step, gpu_name(gpu)))


def _four(operation: str, name: str, x: Any, dtype: Any) -> Any:
    """A tensor of rank 4, or a view of no data for its shape."""
    shape = x if isinstance(x, tuple) else _heddle.describe(x, operation, name)[0]
    if len(shape) != 4:
        raise ValueError(f"[{operation}] {name} is {list(shape)}: it must be [B, S, heads, D]")
    return shape_only(shape, dtype, operation) if isinstance(x, tuple) else x
