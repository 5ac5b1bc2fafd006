"""The measures as calls on q and k. heddle.selection has their public names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..nsa import checks
from . import measures
from .lists import arguments, checked_limits
from .rows import Sequences, checked_form

if TYPE_CHECKING:
    from collections.abc import Callable

    from .lists import Limits


def pooled(
    q: torch.Tensor,
    k: torch.Tensor,
    *,
    top_k: int | None = None,
    top_p: float | None = None,
    least: int = 0,
    causal: bool = False,
    strict: bool = False,
    block_size: int = 64,
    query_rows: int = 64,
    per_group: bool = False,
    sink_blocks: int = 1,
    local_blocks: int = 1,
    scale: float | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    offsets: bool = False,
) -> dict[str, Any]:
    """Lists by means: a block of n keys weighs n * exp(scale * mean of rows . mean of keys) for a block of rows, which is no more than
    the mass that the mean row gives to it (Jensen's inequality). The cheapest measure, good where keys of a block are alike.

    A list always has the sink's blocks, those of its rows' own positions, those beside them, and blocks with a key that is not finite, so
    that what attention makes of it shows. Then come the others by falling share, the lower number first among equals. Rows and
    keys that are not finite count to no mean. Everything else is the same each time, too. Nothing is read on the host, and lists have no
    gradient.

    Args:
      q: [B, Sq, H, D], float32, float16 or bfloat16; with cu_seqlens_q [total_q, H, D]. Rows are the last positions.
      k: [B, Sk, Hkv, D], of q's dtype; packed [total_k, Hkv, D].
      top_k: most blocks of a list, those among them that it has in any case.
      top_p: in place of top_k, or below it: the share of the estimated mass that a list's blocks have, above 0 and up to 1: as few as
        have it.
      least: with top_p, fewest blocks of a list, where there are as many.
      causal: a row attends no later position. Rows of a block still choose together, and for each other: see strict.
      strict: with causality, the rows of the block before choose: no list depends on its own rows or on later ones, nor on keys from
        its first row on. For training. q and k must be of as many positions.
      block_size: keys of a block: 16, 32, 64 or 128.
      query_rows: rows that share a list, from 1 to 1024.
      per_group: one list for the heads of a group, by the mean of their shares (L = Hkv), in place of one for each head (L = H).
      sink_blocks: how many of the first blocks each list has.
      local_blocks: from 1 on, of how many blocks in a row those of the rows' positions are the last; without causality as many on the
        other side.
      scale: of the scores; 1 / sqrt(D) if None.
      cu_seqlens_q, cu_seqlens_k: int32 [B + 1], of packed sequences; k's are q's if None. Inside they are padded to the longest.
      max_seqlen_q, max_seqlen_k: the longest of them; needed on a GPU and under torch.compile, where cu_seqlens are not read.
      offsets: lists one behind the other (CSR) in place of counts. The tensor of entries has room for full lists either way.

    Returns:
      the arguments of ``heddle.sparse_attention``: blocks, int32 [B, N, L, n], n = top_k or all blocks, ascending, -1 behind the last;
      counts, int32 [B, N, L]; or blocks [entries] and offsets [B, L, N + 1]; packed as there, with cu_seqlens and max_seqlens;
      block_size, query_rows, and causal, "bottom_right" or "none".

    Raises:
      ValueError: a bad argument; the message names it, its value and the rule.
      TypeError: what is no tensor, no int, no number or no bool.

    Sources: Jiang et al., arXiv 2407.02490; Lai et al., arXiv 2502.20766.
    """
    form = checked_form(
        "selection.pooled",
        block_size,
        query_rows,
        strict,
        sink_blocks,
        local_blocks,
        causal=causal,
        per_group=per_group,
        offsets=offsets,
    )
    sequences = Sequences(form, q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return _by_share(sequences, top_k, top_p, least, scale, measures.pooled)


def antidiagonal(
    q: torch.Tensor,
    k: torch.Tensor,
    *,
    stride: int = 16,
    top_k: int | None = None,
    top_p: float | None = None,
    least: int = 0,
    causal: bool = False,
    strict: bool = False,
    block_size: int = 64,
    query_rows: int = 64,
    per_group: bool = False,
    sink_blocks: int = 1,
    local_blocks: int = 1,
    scale: float | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    offsets: bool = False,
) -> dict[str, Any]:
    """Lists by antidiagonals: of each tile of `stride` rows and keys one score, the mean over its antidiagonal; a softmax over a row of
    tiles; and the sums of that over blocks. Each row and each key is in it, and so are single keys, columns and diagonals, which means
    of blocks lose; it costs 1 / stride of the scores.

    Args:
      stride: rows and keys of a tile, which divides block_size and query_rows.
      the others: as for ``pooled``. A tile with a row that is not finite does not count; keys that are not count as zeros.

    Returns, raises:
      as ``pooled``.

    Source: Xu et al., arXiv 2503.16428.
    """
    form = checked_form(
        "selection.antidiagonal",
        block_size,
        query_rows,
        strict,
        sink_blocks,
        local_blocks,
        causal=causal,
        per_group=per_group,
        offsets=offsets,
    )
    stride = checks.integer(form.name, "stride", stride, 1)
    for what, size in (("block_size", form.block_size), ("query_rows", form.query_rows)):
        if size % stride:
            raise ValueError(f"[{form.name}] stride is {stride}: it must divide {what}, {size}")
    sequences = Sequences(form, q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)

    def measure(of: Sequences, limits: Limits, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        return measures.antidiagonal(of, limits, scale, stride)

    return _by_share(sequences, top_k, top_p, least, scale, measure)


def vertical_slash(
    q: torch.Tensor,
    k: torch.Tensor,
    *,
    columns: int,
    diagonals: int,
    probes: int = 64,
    block_size: int = 64,
    query_rows: int = 64,
    per_group: bool = False,
    sink_blocks: int = 1,
    local_blocks: int = 1,
    scale: float | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    offsets: bool = False,
) -> dict[str, Any]:
    """Lists of a prompt by its last rows: the blocks of keys that they attend most (columns), and the distances that they attend at most
    (diagonals), for all rows. Always causal, and the last tokens choose for all before them: for the prefill of a prompt, and refused
    while gradients are on.

    Args:
      columns: how many blocks of keys; those with a key that is not finite come first.
      diagonals: how many distances, in blocks: distance d is keys d * block_size to (d + 1) * block_size - 1 positions before a row,
        which lie in one block more than the rows do.
      probes: how many rows of each sequence are looked at, the last ones; all where there are fewer. Those that are not finite count not.
      the others: as for ``pooled``. What a list has in any case comes on top.

    Returns:
      as ``pooled``; n is what a list may have at the most.

    Raises:
      ValueError: as ``pooled``, and gradients that are on.
      TypeError: as ``pooled``.

    Source: Jiang et al., arXiv 2407.02490.
    """
    name = "selection.vertical_slash"
    if torch.is_grad_enabled():
        raise ValueError(
            f"[{name}] gradients are on: the last rows choose for all before them, so that a model would learn from what comes later; call "
            "it under torch.no_grad(), or take selection.antidiagonal(..., strict=True)"
        )
    form = checked_form(
        name,
        block_size,
        query_rows,
        False,
        sink_blocks,
        local_blocks,
        causal=True,
        per_group=per_group,
        offsets=offsets,
    )
    columns, diagonals = (
        checks.integer(name, what, x, 0) for what, x in (("columns", columns), ("diagonals", diagonals))
    )
    probes = checks.integer(name, "probes", probes, 1)
    sequences = Sequences(form, q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    factor = _scale(sequences, scale)
    with torch.autocast(sequences.device.type, enabled=False):
        blocks, counts = measures.vertical_slash(sequences, factor, columns, diagonals, probes)
        return arguments(sequences, blocks, counts)


def _by_share(
    sequences: Sequences,
    top_k: int | None,
    top_p: float | None,
    least: int,
    scale: float | None,
    measure: Callable[[Sequences, Limits, float], tuple[torch.Tensor, torch.Tensor]],
) -> dict[str, Any]:
    limits, factor = checked_limits(sequences, top_k, top_p, least), _scale(sequences, scale)
    with torch.no_grad(), torch.autocast(sequences.device.type, enabled=False):
        blocks, counts = measure(sequences, limits, factor)
        return arguments(sequences, blocks, counts)


def _scale(sequences: Sequences, scale: float | None) -> float:
    if scale is None:
        return float(sequences.q.shape[-1]) ** -0.5
    return checks.given_scale(sequences.form.name, scale)
