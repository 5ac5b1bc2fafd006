"""The functions that users of fla-org/native-sparse-attention know by name: what they mean, and their checks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from . import checks
from .branches import FORCED, Compress
from .sequences import Form, compression, selection_and_window
from .sharing import checked_sharing

if TYPE_CHECKING:
    from .._types import BranchName, ForcedName, GateName, ShareName


def naive_nsa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g_slc: torch.Tensor | None = None,
    g_swa: torch.Tensor | None = None,
    block_indices: torch.Tensor | None = None,
    block_counts: torch.Tensor | int | None = None,
    block_size: int = 64,
    window_size: int = 0,
    scale: float | None = None,
    cu_seqlens: torch.Tensor | Sequence[torch.Tensor] | None = None,
    head_first: bool = False,
    *,
    k_swa: torch.Tensor | None = None,
    v_swa: torch.Tensor | None = None,
    query_stride: int = 1,
    share: ShareName = "none",
    share_branches: Iterable[BranchName] = ("slc",),
    gate: GateName = "own",
) -> torch.Tensor:
    """Native sparse attention over given lists of blocks: the selected branch and the window, each times its gate.

    A row at position t attends the keys j <= t of the blocks in its list, ``[c * block_size, (c + 1) * block_size)`` for a
    block c, and for itself those of the window ``[t - window_size + 1, t]``; positions are counted from its sequence's first
    key. The result is ``g_slc * o_slc + g_swa * o_swa``. A row without any key has o = 0 in that branch.

    Args:
      q: [B, Tq, HQ, D], floating-point; sums are float64 if it is, else float32.
      k: [B, Tk, H, D], HQ a multiple of H. Tq <= Tk: the rows of q are the last Tq positions.
      v: [B, Tk, H, Dv].
      g_slc, g_swa: [B, Tq, HQ], what the branches are multiplied with: what a sigmoid gave. Without g_slc the selected branch
        is added as it is; g_swa may be None where window_size is 0.
      block_indices: to be given: int32 or int64 [B, Tq, H, S], one list for the heads of a group. A list is a set: a block that stands in
        it twice counts once. What is negative, no block of the sequence, or begins behind t is as if it were not there.
      block_counts: how many slots of a list count, from the first: an int or [B, Tq, H]; None: all.
      block_size: keys a block.
      window_size: keys of the window; 0: no such branch.
      scale: of the scores; 1 / sqrt(D) if None.
      cu_seqlens: int32 or int64 [N + 1], starts of packed sequences, from 0 to T, with B = 1; or a pair of them, of q and of
        k. The rows of each sequence are the last of its positions.
      head_first: False; a name that others have. Tensors are [B, T, H, D].
      k_swa, v_swa: keys and values of the window branch, if it has its own; shaped as k and v.
      query_stride: r, the distance of anchors. Of each sequence, the positions 0, r, 2r, ... are anchors; a row's anchor a is
        the last one up to it. 1: plain NSA, to the bit, whatever is shared. Above it, the first row of q must be an anchor.
      share: what the rows take from their anchor. "selection": its list, and the block that the row stands in where that is
        another than the anchor's. "output": the branch's attention. "delta": the selected branch's attention plus what the
        window's changes from the anchor to the row, ``o_slc[a] + o_swa[t] - o_swa[a]``. "none": nothing, with a stride of 1.
      share_branches: in which branches, of "cmp" (naive_nsa_compression's), "slc" and "swa". A function passes over a branch
        that it does not have. "selection" and "delta" are the selected branch's alone.
      gate: whose gate a shared output is multiplied with: the row's "own", or the "anchor"'s, which shares the gated output.

    Returns:
      [B, Tq, HQ, Dv], of q's dtype. Gradients are autograd's, of q, k, v and the gates; in branches that share their output
      those of q are 0 for rows that are no anchors.

    Raises:
      ValueError, TypeError: a bad argument; the message names it, its value and the rule. Nothing has been computed.

    Source: Yuan et al., arXiv 2502.11089.
    """
    name = "naive_nsa"
    checks.no_head_first(name, head_first)
    checks.operands(name, q, k, v)
    k_swa, v_swa = checks.like(name, "k_swa", k_swa, "k", k), checks.like(name, "v_swa", v_swa, "v", v)
    block_size = checks.integer(name, "block_size", block_size, 1)
    window_size = checks.integer(name, "window_size", window_size, 0)
    g_slc = checks.gate_or_ones(name, "g_slc", g_slc, q)
    if g_swa is not None or window_size > 0:
        checks.gate(name, "g_swa", g_swa, q)
    block_indices = checks.lists(name, block_indices, q, k)
    counts, _ = checks.counts(name, block_indices.shape[3] if block_counts is None else block_counts, q, k)
    sharing = checked_sharing(name, query_stride, share, share_branches, gate, window_size)
    form = Form(block_size, checks.scale_of(name, scale, q), sharing, window_size)
    spans = checks.spans(name, q, k, cu_seqlens, sharing.stride)
    return selection_and_window(form, spans, q, (k, v, k_swa, v_swa), g_slc, g_swa, block_indices, counts).to(q.dtype)


def naive_nsa_compression(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g_cmp: torch.Tensor,
    block_counts: torch.Tensor | int,
    block_size: int = 64,
    scale: float | None = None,
    head_first: bool = False,
    *,
    forced: Iterable[ForcedName] = FORCED,
    compression_block: int | None = None,
    compression_stride: int | None = None,
    compress: Compress | None = None,
    query_stride: int = 1,
    share: ShareName = "none",
    share_branches: Iterable[BranchName] = ("slc",),
    gate: GateName = "own",
) -> tuple[torch.Tensor, torch.Tensor]:
    """The compressed branch, and the lists of blocks that its scores choose.

    Keys and values of a complete block become one each, their mean. A row at position t attends those of blocks that end at t
    or before, ``(t + 1) // block_size`` of them; without any, o = 0. A block's score is the sum of its probabilities over the
    heads of the group; it has no gradient. The row's list are the ``block_counts`` blocks with the highest scores, forced
    blocks before all others, the lower number first among equals.

    Args:
      q, k, v, scale, head_first, query_stride, share, share_branches, gate: as for naive_nsa. Where the selected branch shares
        anything, the rows' lists are their anchor's; the branch itself is shared by share="output" with "cmp" among
        share_branches.
      g_cmp: [B, Tq, HQ], what the branch is multiplied with.
      block_counts: how many blocks a list has, S: an int, or [B, Tq, H] with S its largest element.
      block_size: keys a block of the lists.
      forced: which blocks are chosen before all others: "first" (0), "previous" (t // block_size - 1) and "current"
        (t // block_size), which is not complete.
      compression_block, compression_stride: keys a compressed block, and from one to the next; block_size if None, and each
        other. The stride divides both sizes. A block of the lists has the scores of the compressed blocks that touch it, each
        as often as strides of the two meet: the paper's Eq. 9.
      compress: called for each sequence, ``(k_blocks [N, block, H, D], v_blocks [N, block, H, Dv]) -> ([N, H, D], [N, H, Dv])``,
        in place of the mean. Its parameters get gradients.

    Returns:
      block_indices, int32 [B, Tq, H, S], by falling score with -1 behind the last, so that the first n slots are the list of n
      blocks; and ``g_cmp * o_cmp`` [B, Tq, HQ, Dv], of q's dtype.

    Raises:
      ValueError, TypeError: as naive_nsa.
    """
    name = "naive_nsa_compression"
    options = (forced, compression_block, compression_stride, compress, query_stride, share, share_branches, gate)
    return _compression(name, q, k, v, g_cmp, block_counts, block_size, scale, None, head_first, *options)


def naive_nsa_compression_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g_cmp: torch.Tensor,
    block_counts: torch.Tensor | int,
    block_size: int = 64,
    scale: float | None = None,
    cu_seqlens: torch.Tensor | Sequence[torch.Tensor] | None = None,
    head_first: bool = False,
    *,
    forced: Iterable[ForcedName] = FORCED,
    compression_block: int | None = None,
    compression_stride: int | None = None,
    compress: Compress | None = None,
    query_stride: int = 1,
    share: ShareName = "none",
    share_branches: Iterable[BranchName] = ("slc",),
    gate: GateName = "own",
) -> tuple[torch.Tensor, torch.Tensor]:
    """naive_nsa_compression over packed sequences: B = 1, with cu_seqlens as for naive_nsa. Blocks, positions and anchors are
    counted from each sequence's first key."""
    name = "naive_nsa_compression_varlen"
    if cu_seqlens is None:
        raise TypeError(
            f"[{name}] cu_seqlens is None: it must be int32 or int64 [N + 1]; without, naive_nsa_compression"
        )
    options = (forced, compression_block, compression_stride, compress, query_stride, share, share_branches, gate)
    return _compression(name, q, k, v, g_cmp, block_counts, block_size, scale, cu_seqlens, head_first, *options)


def _compression(
    name: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g_cmp: torch.Tensor,
    block_counts: torch.Tensor | int,
    block_size: int,
    scale: float | None,
    cu_seqlens: Any,
    head_first: bool,
    forced: Iterable[ForcedName],
    compression_block: int | None,
    compression_stride: int | None,
    compress: Compress | None,
    query_stride: int,
    share: ShareName,
    share_branches: Iterable[BranchName],
    gate: GateName,
) -> tuple[torch.Tensor, torch.Tensor]:
    checks.no_head_first(name, head_first)
    checks.operands(name, q, k, v)
    block_size = checks.integer(name, "block_size", block_size, 1)
    checks.gate(name, "g_cmp", g_cmp, q)
    counts, slots = checks.counts(name, block_counts, q, k)
    sharing = checked_sharing(name, query_stride, share, share_branches, gate, None)
    form = Form(
        block_size,
        checks.scale_of(name, scale, q),
        sharing,
        slots=slots,
        forced=checks.some_of(name, "forced", forced, FORCED),
        compression=checks.compression(name, block_size, compression_block, compression_stride, compress),
        compress=compress,
    )
    spans = checks.spans(name, q, k, cu_seqlens, sharing.stride)
    lists, o = compression(form, spans, q, k, v, g_cmp, counts)
    return lists, o.to(q.dtype)


def naive_nsa_with_compression(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g_cmp: torch.Tensor,
    g_slc: torch.Tensor | None,
    g_swa: torch.Tensor | None,
    block_counts: torch.Tensor | int,
    block_size: int = 64,
    window_size: int = 0,
    scale: float | None = None,
    cu_seqlens: torch.Tensor | Sequence[torch.Tensor] | None = None,
    head_first: bool = False,
    *,
    k_cmp: torch.Tensor | None = None,
    v_cmp: torch.Tensor | None = None,
    k_swa: torch.Tensor | None = None,
    v_swa: torch.Tensor | None = None,
    forced: Iterable[ForcedName] = FORCED,
    compression_block: int | None = None,
    compression_stride: int | None = None,
    compress: Compress | None = None,
    query_stride: int = 1,
    share: ShareName = "none",
    share_branches: Iterable[BranchName] = ("slc",),
    gate: GateName = "own",
) -> torch.Tensor:
    """The whole of native sparse attention: naive_nsa over the lists of naive_nsa_compression, plus the compressed branch,
    ``g_cmp * o_cmp + g_slc * o_slc + g_swa * o_swa``.

    Args:
      k_cmp, v_cmp: keys and values that are compressed, if that branch has its own; shaped as k and v, not yet compressed.
      The others: as for these two functions, which have them all.

    Returns:
      [B, Tq, HQ, Dv], of q's dtype, to which it is rounded once, after the sum.

    Raises:
      ValueError, TypeError: as naive_nsa.
    """
    name = "naive_nsa_with_compression"
    checks.no_head_first(name, head_first)
    checks.operands(name, q, k, v)
    k_cmp, v_cmp = checks.like(name, "k_cmp", k_cmp, "k", k), checks.like(name, "v_cmp", v_cmp, "v", v)
    k_swa, v_swa = checks.like(name, "k_swa", k_swa, "k", k), checks.like(name, "v_swa", v_swa, "v", v)
    block_size = checks.integer(name, "block_size", block_size, 1)
    window_size = checks.integer(name, "window_size", window_size, 0)
    checks.gate(name, "g_cmp", g_cmp, q)
    g_slc = checks.gate_or_ones(name, "g_slc", g_slc, q)
    if g_swa is not None or window_size > 0:
        checks.gate(name, "g_swa", g_swa, q)
    counts, slots = checks.counts(name, block_counts, q, k)
    sharing = checked_sharing(name, query_stride, share, share_branches, gate, window_size)
    form = Form(
        block_size,
        checks.scale_of(name, scale, q),
        sharing,
        window_size,
        slots,
        checks.some_of(name, "forced", forced, FORCED),
        checks.compression(name, block_size, compression_block, compression_stride, compress),
        compress,
    )
    spans = checks.spans(name, q, k, cu_seqlens, sharing.stride)
    lists, o_cmp = compression(form, spans, q, k_cmp, v_cmp, g_cmp, counts)
    o = selection_and_window(form, spans, q, (k, v, k_swa, v_swa), g_slc, g_swa, lists, counts)
    return (o_cmp + o).to(q.dtype)
