"""From checked arguments to results: one sequence after the other, with what rows share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .branches import (
    Compress,
    block_scores,
    choose_blocks,
    compressed_attention,
    compressed_keys,
    listed_blocks,
    selected_attention,
    window_attention,
)
from .checks import Span
from .sharing import Sharing, at_anchors, branch, from_anchors

if TYPE_CHECKING:
    from .._types import ForcedName


@dataclass(frozen=True)
class Form:
    """What a call is made of beside its tensors, checked. Not all of it is every function's."""

    block_size: int
    scale: float
    sharing: Sharing
    window: int = 0
    slots: int = 0  # of a list
    forced: frozenset[ForcedName] = frozenset()
    compression: tuple[int, int] = (0, 0)  # keys a compressed block, and from one to the next
    compress: Compress | None = None


def _wide(x: torch.Tensor) -> torch.Tensor:
    """In what sums are taken: float64 if the operands are, else float32."""
    return x if x.dtype == torch.float64 else x.float()


def _positions(span: Span, device: torch.device) -> torch.Tensor:
    return torch.arange(span.first, span.keys.stop - span.keys.start, device=device)


def _joined(parts: list[torch.Tensor], shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """Results of sequences, which lie one behind the other."""
    return torch.cat(parts).reshape(shape) if parts else like.new_zeros(shape)


def _compression_of_sequence(
    form: Form,
    t: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    counts: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Lists [n, H, slots] and the gated branch [n, HQ, Dv] of rows at positions t."""
    (block, stride), sharing = form.compression, form.sharing
    k_cmp, v_cmp = compressed_keys(k, v, block, stride, form.compress)
    # Anchors suffice if neither the branch nor the lists are wanted of the rows between them.
    step = min(sharing.list_stride, sharing.output_stride("cmp"))
    o, sums = compressed_attention(q[::step], k_cmp, v_cmp, t[::step], block, stride, form.scale)

    listing = sharing.list_stride
    blocks = -(-len(k) // form.block_size)
    scores = block_scores(sums[:: listing // step], blocks, form.block_size, block, stride)
    lists = choose_blocks(
        scores, at_anchors(t, listing), at_anchors(counts, listing), form.slots, form.block_size, form.forced
    )
    return from_anchors(lists, listing, len(t)), branch("cmp", lambda rows: o[rows // step], g, sharing)


def _selection_and_window_of_sequence(
    form: Form,
    t: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_swa: torch.Tensor,
    v_swa: torch.Tensor,
    g_slc: torch.Tensor,
    g_swa: torch.Tensor | None,
    lists: torch.Tensor,
    counts: torch.Tensor,
) -> torch.Tensor:
    """The two gated branches' sum [n, HQ, Dv] of rows at positions t."""
    sharing, listing = form.sharing, form.sharing.list_stride
    lists, counts = (from_anchors(at_anchors(x, listing), listing, len(t)) for x in (lists, counts))
    blocks = -(-len(k) // form.block_size)
    listed = listed_blocks(lists, counts, t, blocks, form.block_size)
    if sharing.share == "selection":  # a row's own block, where its anchor stands in another
        own = t // form.block_size
        moved = own != from_anchors(at_anchors(own, listing), listing, len(t))
        listed = listed | ((torch.arange(blocks, device=t.device) == own[:, None]) & moved[:, None])[:, None]

    def selected(rows: torch.Tensor) -> torch.Tensor:
        return selected_attention(q[rows], k, v, t[rows], listed[rows], form.block_size, form.scale)

    def window(rows: torch.Tensor) -> torch.Tensor:
        return window_attention(q[rows], k_swa, v_swa, t[rows], form.window, form.scale)

    if form.window == 0:
        return branch("slc", selected, g_slc, sharing)
    assert g_swa is not None
    if sharing.share == "delta":
        cheap = window(torch.arange(len(t), device=t.device))
        return branch("slc", selected, g_slc, sharing, cheap) + g_swa[..., None] * cheap
    return branch("slc", selected, g_slc, sharing) + branch("swa", window, g_swa, sharing)


def compression(
    form: Form,
    spans: list[Span],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g_cmp: torch.Tensor,
    counts: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Lists [B, Tq, H, slots] and the gated branch [B, Tq, HQ, Dv], not yet rounded to q's dtype."""
    lists, outputs = [], []
    for span in spans:
        if (t := _positions(span, q.device)).numel():
            q_here, g_here, counts_here = (x[span.batch, span.rows] for x in (_wide(q), _wide(g_cmp), counts))
            k_here, v_here = (x[span.batch, span.keys] for x in (_wide(k), _wide(v)))
            found = _compression_of_sequence(form, t, q_here, k_here, v_here, g_here, counts_here)
            lists.append(found[0])
            outputs.append(found[1])
    batch, rows, heads, _ = q.shape
    return (
        _joined(lists, (batch, rows, k.shape[2], form.slots), counts.int()),
        _joined(outputs, (batch, rows, heads, v.shape[3]), _wide(q)),
    )


def selection_and_window(
    form: Form,
    spans: list[Span],
    q: torch.Tensor,
    keys: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    g_slc: torch.Tensor,
    g_swa: torch.Tensor | None,
    lists: torch.Tensor,
    counts: torch.Tensor,
) -> torch.Tensor:
    """The two gated branches' sum [B, Tq, HQ, Dv], not yet rounded. keys: k, v, k_swa, v_swa."""
    outputs = []
    for span in spans:
        if (t := _positions(span, q.device)).numel():
            q_here, g_slc_here, lists_here, counts_here = (
                x[span.batch, span.rows] for x in (_wide(q), _wide(g_slc), lists, counts)
            )
            g_swa_here = None if g_swa is None else _wide(g_swa)[span.batch, span.rows]
            k_here, v_here, k_swa_here, v_swa_here = (_wide(x)[span.batch, span.keys] for x in keys)
            outputs.append(
                _selection_and_window_of_sequence(
                    form,
                    t,
                    q_here,
                    k_here,
                    v_here,
                    k_swa_here,
                    v_swa_here,
                    g_slc_here,
                    g_swa_here,
                    lists_here,
                    counts_here,
                )
            )
    return _joined(outputs, (*q.shape[:3], keys[1].shape[3]), _wide(q))
