"""Which kernels pooled keys, the choice of blocks and a step of decoding would run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from .. import _heddle
from .._options import DTYPE_CODES, flag
from ..explanation import Explanation, explanation, gpu_name, shape_only, stand_in
from . import checks
from .branches import FORCED
from .kernels import checked_choice

if TYPE_CHECKING:
    import torch

    from .._types import AnyArray, FloatDType, ForcedName, GpuName


def explain_pool_keys(
    x: AnyArray | tuple[int, ...],
    block: int,
    stride: int | None = None,
    *,
    backward: bool = False,
    dtype: FloatDType = "float32",
    gpu: GpuName | None = None,
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
    q: AnyArray | tuple[int, ...],
    k_pooled: AnyArray | tuple[int, ...],
    n: int,
    *,
    lse: bool = True,
    block_size: int = 64,
    compression_block: int | None = None,
    compression_stride: int | None = None,
    forced: Iterable[ForcedName] = FORCED,
    scale: float | None = None,
    q_step: int = 1,
    dtype: FloatDType = "float32",
    gpu: GpuName | None = None,
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
    given: tuple[Any, Any] = (_four(name, "q", q, dtype), _four(name, "k_pooled", k_pooled, dtype))
    lse, step = flag(name, "lse", lse), checks.integer(name, "q_step", q_step, 1)
    return explanation(_heddle.explain_select_blocks(*given, n, lse, *sizes, bits, scale, step, gpu_name(gpu)))


def explain_nsa_step(
    q: torch.Tensor | tuple[int, ...],
    k_new: torch.Tensor | tuple[int, ...],
    v_new: torch.Tensor | tuple[int, ...] | None = None,
    capacity: int = 65536,
    block_counts: int = 16,
    block_size: int = 64,
    window_size: int = 0,
    scale: float | None = None,
    *,
    compressed: bool = True,
    forced: Iterable[ForcedName] = FORCED,
    dtype: FloatDType = "bfloat16",
    gpu: GpuName | None = None,
) -> Explanation:
    """The candidates for a step of ``nsa_with_cache`` in one launch, over a ``Cache`` of blocks of block_size keys without a
    query stride, or of an anchor whose whole row others copy. Where none serves, a step is made of the operations one after
    the other. No data is read.

    Args:
      q, k_new, v_new: tensors [B, 1, HQ, D], [B, 1, H, D], [B, 1, H, Dv], or only their shapes as tuples, of dtype `dtype`;
        v_new: as k_new.
      capacity: the cache's.
      block_counts, block_size, window_size, scale, forced: as nsa_with_cache takes them; block_counts an int.
      compressed: whether there will be a g_cmp.
      gpu: answer as a machine with that GPU would, which need not be here; see ``heddle.explain``.

    Raises:
      ValueError, TypeError: a bad argument, as nsa_with_cache would refuse it; a gpu that is not known.
    """
    name = "explain_nsa_step"
    capacity = checks.integer(name, "capacity", capacity, 1)
    slots = checks.integer(name, "block_counts", block_counts, 0)
    window = checks.integer(name, "window_size", window_size, 0)
    sizes, bits, scale = checked_choice(name, block_size, None, None, forced, scale)
    block = sizes[0]
    given = (("q", q), ("k_new", k_new), ("v_new", k_new if v_new is None else v_new))
    views = [_four(name, what, x, dtype) for what, x in given]
    (batch, rows, heads, _), (_, _, kv_heads, size), (*_, v_size) = (
        x[2] if isinstance(x, tuple) else tuple(x.shape) for x in views
    )
    kind = dtype if isinstance(q, tuple) else q.dtype
    widths = [(capacity, size), (capacity, v_size), (capacity // block, size), (capacity // block, v_size)]
    cache = [shape_only((batch, n, kv_heads, width), kind, name) for n, width in widths]
    lengths = stand_in((batch,), DTYPE_CODES["int32"])
    gates = [shape_only((batch, rows, heads), "float32", name)] * (2 if window == 0 else 3)
    out = shape_only((batch, rows, heads, v_size), kind, name)
    # The operation refuses tensors that share memory: each stand-in has an address of its own, where no memory is.
    all_views: list[Any] = [
        ((n + 1) << 50, *x[1:]) if isinstance(x, tuple) else x
        for n, x in enumerate((*views, *cache, lengths, *gates, out))
    ]
    q, k_new, v_new, *held, out = all_views
    g_cmp, g_slc, g_swa = (*held[5:], None)[:3]
    if not flag(name, "compressed", compressed):
        g_cmp = None
    return explanation(
        _heddle.explain_nsa_step(
            q,
            k_new,
            v_new,
            (*held[:5], None),
            (g_cmp, g_slc, g_swa),
            out,
            slots,
            block,
            window,
            bits,
            scale,
            gpu_name(gpu),
        )
    )


def _four(operation: str, name: str, x: Any, dtype: Any) -> Any:
    """A tensor of rank 4, or a view of no data for its shape."""
    shape = x if isinstance(x, tuple) else _heddle.describe(x, operation, name)[0]
    if len(shape) != 4:
        raise ValueError(f"[{operation}] {name} is {list(shape)}: it must be [B, S, heads, D]")
    return shape_only(shape, dtype, operation) if isinstance(x, tuple) else x
