"""Native sparse attention over a cache that holds pooled keys beside the keys, so that a step reads few of either."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ..kv_cache import append_kv_cache
from . import checks, step
from .branches import FORCED
from .kernels import extend_pooled_keys
from .parallel import attend, checked_form
from .rows import BatchedRows


class Cache:
    """Keys and values of B sequences, each of a length of its own, and their pooled keys and values.

    Args:
      batch, capacity: B, and the most keys of a sequence.
      kv_heads, head_size, v_head_size: H, D, Dv (D if None).
      block, stride: keys of a pooled one, and from one to the next (block if None): compression_block and
        compression_stride of the calls that read it.

    Attributes:
      k, v: [B, capacity, H, D], [B, capacity, H, Dv].
      k_pooled, v_pooled: [B, N, H, D], [B, N, H, Dv], N = (capacity - block) // stride + 1, of complete blocks alone.
      lengths: int32 [B], keys there are. Smaller ones forget the keys behind them, and what was pooled of those is
        replaced when new keys complete the blocks again.
    """

    def __init__(
        self,
        batch: int,
        capacity: int,
        kv_heads: int,
        head_size: int,
        v_head_size: int | None = None,
        *,
        block: int = 64,
        stride: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: Any = None,
    ) -> None:
        sizes = {"batch": batch, "capacity": capacity, "kv_heads": kv_heads, "head_size": head_size, "block": block}
        for name, value in sizes.items():
            checks.integer("Cache", name, value, 1)
        stride = block if stride is None else checks.integer("Cache", "stride", stride, 1)
        if block % stride != 0:
            raise ValueError(f"[Cache] block is {block}: it must be a multiple of stride, {stride}")
        widths = (
            head_size,
            head_size if v_head_size is None else checks.integer("Cache", "v_head_size", v_head_size, 1),
        )
        self.block, self.stride, self.capacity = block, stride, capacity
        pooled = max(0, (capacity - block) // stride + 1)
        # Zeros: what lies behind a sequence's end takes part in products, with a weight of 0.
        made: dict[str, Any] = {"dtype": dtype, "device": device}
        self.k, self.v = (torch.zeros(batch, capacity, kv_heads, width, **made) for width in widths)
        self.k_pooled, self.v_pooled = (torch.zeros(batch, pooled, kv_heads, width, **made) for width in widths)
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=device)

    def complete(self, lengths: torch.Tensor) -> torch.Tensor:
        """How many blocks end within the first ``lengths`` keys."""
        if self.stride == self.block:
            return lengths // self.block
        return (lengths - self.block).clamp(min=-self.stride) // self.stride + 1

    @torch.no_grad()
    def append(self, k_new: torch.Tensor, v_new: torch.Tensor) -> None:
        """k_new [B, n, H, D] and v_new [B, n, H, Dv] behind each sequence's keys, and the pooled ones of blocks that end among
        them.

        Raises:
          ValueError: a shape or dtype that is not the cache's, or a sequence that would be longer than the capacity.
        """
        append_kv_cache(k_new, v_new, self.k, self.v, self.lengths)
        n = k_new.shape[1]
        if n == 0:
            return
        self.lengths += n
        try:
            for x, pooled in ((self.k, self.k_pooled), (self.v, self.v_pooled)):
                extend_pooled_keys(x, pooled, self.block, self.stride, seqused=self.lengths, appended=n)
        except Exception:  # what kernels alone refuse
            self.lengths -= n
            raise


class _CachedRows(BatchedRows):
    """n new rows, whose keys are the last that the cache has."""

    def __init__(self, rows: int, cache: Cache) -> None:
        super().__init__(rows, 0)
        self._cache, self._lengths = cache, cache.lengths

    def of_q(self, stride: int) -> dict[str, Any]:
        return {"q_offset": self._lengths - self.rows, "q_step": stride}

    def of_k(self) -> dict[str, Any]:
        return {"seqused_k": self._lengths}  # behind which bottom_right ends

    def of_q_and_pooled(self, stride: int, block: int, block_stride: int) -> dict[str, Any]:
        if self.rows > 1:
            return super().of_q_and_pooled(stride, block, block_stride)
        # The last position sees all complete blocks: what kernels of decoding serve.
        return {"seqused_k": self._cache.complete(self._lengths)}


def nsa_with_cache(
    q: torch.Tensor,
    k_new: torch.Tensor,
    v_new: torch.Tensor,
    cache: Cache,
    g_cmp: torch.Tensor | None,
    g_slc: torch.Tensor,
    g_swa: torch.Tensor | None = None,
    block_counts: torch.Tensor | int = 16,
    block_size: int = 64,
    window_size: int = 0,
    scale: float | None = None,
    *,
    forced: Iterable[str] = FORCED,
    max_block_counts: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Appends k_new and v_new to the cache, then native sparse attention of q's rows, which are the last n positions of each
    sequence: a step of decoding with n = 1, a chunk of a prefill with more. What ``parallel_nsa`` gives over all keys there
    are. Without gradients. On a Hopper GPU a step in 16 bits is one launch, and one that counts it, where block_counts is an
    int to 32, compressed blocks are block_size keys and as far apart, heads are multiples of 8 to 128, and HQ is no more than
    16 H; its branches are not rounded before they are summed.

    Args:
      q: [B, n, HQ, D]; k_new, v_new: [B, n, H, D], [B, n, H, Dv], of the cache's dtype.
      g_cmp, g_slc, g_swa, block_counts, block_size, window_size, scale, forced, max_block_counts: as for parallel_nsa.
        Compressed blocks are the cache's.
      out: where to write the result, as for ``heddle.attention``; it shares no memory with the cache either.

    Returns:
      [B, n, HQ, Dv] of q's dtype.

    Raises:
      ValueError, TypeError: a bad argument, or a sequence that would be longer than the capacity; the cache has the keys it had.
        Also a tensor that requires a gradient beside out, unless torch's gradients are off.
    """
    name = "nsa_with_cache"
    if not isinstance(cache, Cache):
        raise TypeError(f"[{name}] cache is {checks.shown(cache)}: it must be a heddle.nsa.Cache")
    checks.operands(name, q, k_new, v_new)
    if q.shape[1] != k_new.shape[1]:
        raise ValueError(f"[{name}] q has {q.shape[1]} rows and k_new {k_new.shape[1]}: each row comes with its key")
    most = None if max_block_counts is None else checks.integer(name, "max_block_counts", max_block_counts, 0)
    gates, form, counts = checked_form(
        name, q, k_new, (g_cmp, g_slc, g_swa), block_counts, block_size, window_size, scale, forced,
        cache.block, cache.stride, None, 1, "none", (), "own", most,
    )  # fmt: skip
    if out is not None:
        read = {"q": q, "k_new": k_new, "v_new": v_new, "g_cmp": g_cmp, "g_slc": g_slc, "g_swa": g_swa}
        held = ("k", "v", "k_pooled", "v_pooled", "lengths")
        read |= {f"cache.{part}": getattr(cache, part) for part in held}
        checks.out(name, out, (*q.shape[:3], v_new.shape[3]), read)
    with torch.no_grad():
        if step.serves(q, k_new, v_new, cache, form, counts):
            return step.step(q, k_new, v_new, cache, gates, form, out)
        before = cache.lengths.clone()
        cache.append(k_new, v_new)
        if q.shape[0] * q.shape[1] == 0:
            return q.new_zeros(*q.shape[:3], v_new.shape[3]) if out is None else out
        keys, pooled = (cache.k, cache.v, cache.k, cache.v), (cache.k_pooled, cache.v_pooled)
        try:
            return attend(_CachedRows(q.shape[1], cache), q, keys, pooled, gates, None, counts, form, out)
        except Exception:  # what kernels alone refuse
            cache.lengths.copy_(before)
            raise
