"""What native sparse attention needs beside attention, by Heddle's kernels: pooled keys, and the choice of blocks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ..hosts import arrays, is_torch
from ..hosts.torch import nsa_operators
from . import checks
from .branches import FORCED

if TYPE_CHECKING:
    from .._types import AnyArray, Array, ForcedName


def pool_keys(
    x: Array,
    block: int,
    stride: int | None = None,
    cu_seqlens: AnyArray | None = None,
    *,
    seqused: AnyArray | None = None,
    out: AnyArray | None = None,
) -> Array:
    """The means of blocks of keys, or of values: row c is the mean of rows [c * stride, c * stride + block) of a sequence, for
    each complete block, so N = (S - block) // stride + 1 of S keys, none where S < block.

    Torch tensors go through a torch operator, with gradients; numpy's and other arrays are forward only.

    Args:
      x: [B, S, Hkv, D], float32, float16 or bfloat16, any strides; with cu_seqlens [total, Hkv, D].
      block: keys of a block, at least stride.
      stride: keys from one block to the next, at least 1; block if None.
      cu_seqlens: int32 [B + 1], starts of packed sequences, from 0 to total.
      seqused: int32 [B], how many keys of each sequence are used, the first ones; all if None.
      out: where to write the result, as for ``heddle.attention``; any strides. Without gradients.

    Returns:
      [B, N, Hkv, D], of x's dtype and kind of array; sums are float32. With cu_seqlens [total // stride, Hkv, D], in which sequence b's rows begin
      at cu_seqlens[b] // stride: ``cu_seqlens // stride`` and each sequence's N are the cu_seqlens_k and seqused_k of attention
      over them. Rows that no sequence has, and with seqused those behind its own N, are 0. Gradients of torch tensors are
      autograd's, of any order; keys in no complete block have 0.

    Raises:
      ValueError: a bad argument; the message names it, its value and the rule; what is no array. Also what no kernel of its
        device serves, and a tensor that requires a gradient beside out, unless torch's gradients are off.
      TypeError: what is no torch tensor beside one, or no int.
      NotImplementedError: a tensor with a tangent: there are no forward-mode derivatives.

    Source: Yuan et al., arXiv 2502.11089, Eq. 7, with the mean.
    """
    name = "pool_keys"
    block = checks.integer(name, "block", block, 1)
    stride = block if stride is None else checks.integer(name, "stride", stride, 1)
    host: Any = nsa_operators if is_torch(x) else arrays
    return host.pool_keys(x, block, stride, cu_seqlens, seqused, out)


def extend_pooled_keys(
    x: Array,
    k_pooled: Array,
    block: int,
    stride: int | None = None,
    *,
    seqused: AnyArray,
    appended: int,
    page_table: AnyArray | None = None,
) -> None:
    """Pools the blocks that new keys complete, in place: what ``pool_keys`` gives, but only those rows of k_pooled are
    written. So a cache of pooled keys grows with its cache of keys.

    Args:
      x: [B, S, Hkv, D], the cache of keys, or of values, with the new ones.
      k_pooled: [B, N, Hkv, D] of x's dtype, N = (S - block) // stride + 1; written.
      block, stride: as for pool_keys.
      seqused: int32 [B], how many keys each sequence has, the new ones among them.
      appended: how many of them are new, the last ones, at least 1.
      page_table: int32 [B, pages of a sequence], of a cache in pages: x is then [pages, page_size, Hkv, D] and k_pooled [pages,
        page_size // stride, Hkv, D], with page_size a multiple of stride. Page page_table[b, n] has keys n * page_size and on of
        sequence b, and the pooled keys of the blocks that begin there.

    Raises:
      ValueError, TypeError: as pool_keys; a tensor that requires a gradient, unless torch's are off: what is written would
        have none.
    """
    name = "extend_pooled_keys"
    block = checks.integer(name, "block", block, 1)
    stride = block if stride is None else checks.integer(name, "stride", stride, 1)
    appended = checks.integer(name, "appended", appended, 1)
    host: Any = nsa_operators if is_torch(k_pooled) else arrays
    host.extend_pooled_keys(x, k_pooled, block, stride, seqused, appended, page_table)


def select_blocks(
    q: Array,
    k_pooled: Array,
    n: int,
    *,
    lse: AnyArray | None = None,
    block_size: int = 64,
    compression_block: int | None = None,
    compression_stride: int | None = None,
    forced: Iterable[ForcedName] = FORCED,
    scale: float | None = None,
    cu_seqlens_q: AnyArray | None = None,
    cu_seqlens_k: AnyArray | None = None,
    seqused_k: AnyArray | None = None,
    page_table: AnyArray | None = None,
    q_offset: AnyArray | int | None = None,
    q_step: int = 1,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    out: AnyArray | None = None,
) -> Array:
    """The lists of blocks that naive_nsa_compression makes, for each row and key/value head, for ``heddle.sparse_attention``:
    forced blocks, then the highest scores, the lower number first among equals, -1 behind the last. Scores are not stored.

    Row i of sequence b stands at position q_offset[b] + q_step * i and sees pooled key c if c * compression_stride +
    compression_block - 1 is not above it. A pooled key's score is the sum of its probabilities over the heads of the group; a
    block's the sum of those of the pooled keys that touch it, each as often as strides of the two meet.

    Args:
      q: [B, Sq, H, D], float32, float16 or bfloat16; with cu_seqlens_q [total_q, H, D].
      k_pooled: [B, N, Hkv, D], of q's dtype, as pool_keys makes them; with cu_seqlens_k [.., Hkv, D].
      n: blocks of a list.
      lse: float32 [B, H, Sq], with cu_seqlens_q [H, total_q]: the log-sum-exp of attention over the pooled keys that each row
        sees. None: it is found, at the price of a second product.
      block_size: keys of a block of the lists: 16, 32, 64 or 128.
      compression_block, compression_stride: keys of a pooled key, and from one to the next; block_size if None, and each other.
        The stride divides both sizes.
      forced: which blocks come before all others: "first" (0), "previous" (t // block_size - 1), "current" (t // block_size).
      scale: of the scores; 1 / sqrt(D) if None.
      cu_seqlens_q, cu_seqlens_k: int32 [B + 1], where packed rows, and packed pooled keys, of each sequence begin.
      seqused_k: int32 [B], how many pooled keys each sequence has; all if None.
      page_table: int32 [B, pages of a sequence]: k_pooled is [pages, page_size, Hkv, D], as extend_pooled_keys fills it.
      q_offset: int32 [B], or an int for all: the position of the first row; 0 if None. q_step: from a row to the next.
      max_seqlen_q, max_seqlen_k: upper bounds of packed rows and pooled keys of a sequence; found from cu_seqlens if None, but
        to be given on a GPU, whose index data is not read here.
      out: where to write the lists, int32, as for ``heddle.attention``; entries of a list are contiguous, strides are free else.

    Returns:
      int32 [B, Sq, Hkv, n], with cu_seqlens_q [total_q, Hkv, n], of q's kind of array; without gradient.

    Raises:
      ValueError, TypeError: as pool_keys.

    Source: Yuan et al., arXiv 2502.11089, Eq. 8 to 11.
    """
    name = "select_blocks"
    n = checks.integer(name, "n", n, 0)
    sizes, bits, scale = checked_choice(name, block_size, compression_block, compression_stride, forced, scale)
    if q_offset is not None and not hasattr(q_offset, "__dlpack__"):
        q_offset = checks.integer(name, "q_offset", q_offset, 0)
        if q_offset >= 2**31:
            raise ValueError(f"[{name}] q_offset is {q_offset}: positions must be below 2^31 - 1")
    q_step = checks.integer(name, "q_step", q_step, 1)
    sequences = cu_seqlens_q, cu_seqlens_k, seqused_k, page_table
    longest = [0 if x is None else checks.integer(name, what, x, 0)
               for what, x in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k))]  # fmt: skip
    host: Any = nsa_operators if is_torch(q) else arrays
    return host.select_blocks(q, k_pooled, n, lse, sizes, bits, scale, sequences, q_offset, q_step, longest, out)


def checked_choice(
    name: str,
    block_size: int,
    compression_block: int | None,
    compression_stride: int | None,
    forced: Iterable[ForcedName],
    scale: float | None,
) -> tuple[tuple[int, int | None, int | None], int, float | None]:
    """Sizes (of a block of the lists, of a pooled key, from one of these to the next), the bits of forced blocks, the scale."""
    names = checks.some_of(name, "forced", forced, FORCED)
    bits = sum(1 << k for k, block in enumerate(FORCED) if block in names)
    size = checks.integer(name, "block_size", block_size, 1)
    block, stride = (
        None if x is None else checks.integer(name, what, x, 1)
        for what, x in (("compression_block", compression_block), ("compression_stride", compression_stride))
    )
    return (size, block, stride), bits, None if scale is None else checks.given_scale(name, scale)
