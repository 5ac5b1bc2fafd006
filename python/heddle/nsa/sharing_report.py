"""Whether rows may share with their anchor, asked of the user's own tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from . import checks
from .branches import FORCED, Compress, attend, listed_blocks
from .parallel import checked_form, chosen_blocks, laid_out, parallel_nsa, pooled_keys
from .sharing import SharingOptions

if TYPE_CHECKING:
    from .._types import ForcedName


@dataclass(frozen=True)
class SharingReport:
    """Of the rows that are no anchors, means for each query head (``overlap``: for each key/value head), float64.

    Attributes:
      query_stride, rows: the stride, and how many rows were looked at.
      similarity: cosine of a row's q and its anchor's.
      overlap: of the blocks in a row's list, the part that its anchor's list has too; of rows that have a list.
      own_mass, anchor_mass: the part of dense attention's probability that lies on the blocks of a row's own list, and of its
        anchor's.
      errors: for each way of sharing, ||y - y_plain|| / ||y_plain|| over the rows.
    """

    query_stride: int
    rows: int
    similarity: torch.Tensor
    overlap: torch.Tensor
    own_mass: torch.Tensor
    anchor_mass: torch.Tensor
    errors: dict[str, torch.Tensor]

    def __str__(self) -> str:
        def line(name: str, x: torch.Tensor) -> str:
            return f"{name:<34}{x.mean():>9.3f}{x.min():>9.3f}{x.max():>9.3f}"

        return "\n".join(
            [
                f"query stride {self.query_stride}, {self.rows} rows that are no anchors",
                f"{'':<34}{'mean':>9}{'least':>9}{'most':>9}   of the heads",
                line("cosine of q and the anchor's", self.similarity),
                line("the list's blocks in the anchor's", self.overlap),
                line("attention's mass on the own list", self.own_mass),
                line("attention's mass on the anchor's", self.anchor_mass),
                *(line(f"error of {name}", x) for name, x in self.errors.items()),
            ]
        )


@torch.no_grad()
def sharing_report(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g_cmp: torch.Tensor,
    g_slc: torch.Tensor,
    g_swa: torch.Tensor | None = None,
    block_counts: int = 16,
    block_size: int = 64,
    window_size: int = 0,
    scale: float | None = None,
    cu_seqlens: torch.Tensor | Sequence[torch.Tensor] | None = None,
    *,
    query_stride: int = 2,
    rows: int = 256,
    forced: Iterable[ForcedName] = FORCED,
    compression_block: int | None = None,
    compression_stride: int | None = None,
    compress: Compress | None = None,
) -> SharingReport:
    """What rows would lose if they took their list or their output from an anchor: on these tensors, of one layer, as a model
    has them. It does not say what a model loses that was trained to share.

    Args:
      q, k, v, g_cmp, g_slc, g_swa, block_counts, block_size, window_size, scale, cu_seqlens, forced, compression_block,
        compression_stride, compress: as for parallel_nsa.
      query_stride: r >= 2.
      rows: at most so many rows, evenly spaced among those that are no anchors, are compared with dense attention, at the
        cost of a dense row each; errors are of all rows.

    Returns:
      A SharingReport; print it. "delta" is among the errors where window_size is not 0.

    Raises:
      ValueError, TypeError: as parallel_nsa; or there is no row that is no anchor.
    """
    name = "sharing_report"
    checks.operands(name, q, k, v)
    stride = checks.integer(name, "query_stride", query_stride, 2)
    most = checks.integer(name, "rows", rows, 1)
    slots = checks.integer(name, "block_counts", block_counts, 1)
    spans = checks.spans(name, q, k, cu_seqlens, stride)
    form: dict[str, Any] = {
        "scale": scale,
        "forced": forced,
        "compression_block": compression_block,
        "compression_stride": compression_stride,
        "compress": compress,
    }

    ways: dict[str, SharingOptions] = {
        "selection": {"query_stride": stride, "share": "selection", "share_branches": ("slc",), "gate": "own"},
        "output": {"query_stride": stride, "share": "output", "share_branches": ("slc",), "gate": "own"},
        "output, all branches": {
            "query_stride": stride,
            "share": "output",
            "share_branches": ("cmp", "slc", "swa"),
            "gate": "own",
        },
    }
    if window_size != 0:
        ways["delta"] = {"query_stride": stride, "share": "delta", "share_branches": ("slc",), "gate": "own"}

    def whole(**sharing: Any) -> torch.Tensor:
        return parallel_nsa(
            q, k, v, g_cmp, g_slc, g_swa, None, slots, block_size, window_size, cu_seqlens=cu_seqlens, **form, **sharing
        ).double()

    # The rows that are no anchors: batch entry, row, and the anchor's row.
    batch, row, anchor = [], [], []
    for span in spans:
        t = torch.arange(span.first, span.keys.stop - span.keys.start, device=q.device)
        others = t[t % stride != 0]
        batch.append(torch.full_like(others, span.batch))
        row.append(span.rows.start + others - span.first)
        anchor.append(span.rows.start + others // stride * stride - span.first)
    b, i, a = (torch.cat(x) for x in (batch, row, anchor))
    if len(b) == 0:
        raise ValueError(
            f"[{name}] q is {list(q.shape)} and query_stride is {stride}: there is no row that is not an anchor"
        )
    plain = whole()
    size = plain[b, i].square().sum((0, 2)).clamp(min=torch.finfo(torch.float64).tiny)
    errors = {way: ((whole(**ways[way])[b, i] - plain[b, i]).square().sum((0, 2)) / size).sqrt() for way in ways}
    similarity = torch.cosine_similarity(q[b, i].double(), q[b, a].double(), dim=-1).mean(0)

    some = torch.linspace(0, len(b) - 1, min(most, len(b)), device=q.device).round().long()
    of_all = _all_lists(name, q, k, g_slc, slots, block_size, cu_seqlens, form)
    overlap: list[torch.Tensor] = []
    own_mass: list[torch.Tensor] = []
    anchor_mass: list[torch.Tensor] = []
    for span in spans:
        here = some[(b[some] == span.batch) & (i[some] >= span.rows.start) & (i[some] < span.rows.stop)]
        if len(here) == 0:
            continue
        k_here = k[span.batch, span.keys].double()
        t = span.first + i[here] - span.rows.start
        blocks = -(-len(k_here) // block_size)
        counts = torch.full((len(here), k.shape[2]), slots, device=q.device)
        own, shared = (listed_blocks(of_all[b[here], at[here]], counts, t, blocks, block_size) for at in (i, a))
        overlap.append((own & shared).sum(-1) / own.sum(-1))  # NaN: a row without a list
        number = torch.arange(len(k_here), device=q.device)
        keep = (number <= t[:, None])[:, None]
        p = attend(q[b[here], i[here]].double(), k_here, k_here, keep, checks.scale_of(name, scale, q))[1]
        for found, of in ((own_mass, own), (anchor_mass, shared)):
            found.append((p * of[..., number // block_size][:, :, None]).sum(-1).flatten(1))
    return SharingReport(
        stride,
        len(b),
        similarity,
        torch.cat(overlap).double().nanmean(0),
        torch.cat(own_mass).mean(0),
        torch.cat(anchor_mass).mean(0),
        errors,
    )


def _all_lists(
    name: str,
    q: torch.Tensor,
    k: torch.Tensor,
    gate: torch.Tensor,
    slots: int,
    block_size: int,
    cu_seqlens: Any,
    form: dict[str, Any],
) -> torch.Tensor:
    """Every row's list of its own, [B, Tq, H, slots]."""
    _, plain, _ = checked_form(
        name,
        q,
        k,
        (None, gate, None),
        slots,
        block_size,
        0,
        query_stride=1,
        share="none",
        share_branches=(),
        gate="own",
        **form,
    )
    rows, (q_rows, k_rows) = laid_out(name, cu_seqlens, None, 1, (q, k))
    lists = chosen_blocks(rows, q_rows, k_rows, pooled_keys(rows, k_rows, k_rows, plain)[0], None, plain)
    return lists.view(*q.shape[:2], *lists.shape[-2:])
