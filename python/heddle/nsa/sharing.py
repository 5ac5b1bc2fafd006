"""Query stride: which rows are anchors, and what the rows behind an anchor take from it.

Of a sequence, with a stride r, the anchors are the positions 0, r, 2r, ...; the position t belongs to the anchor
a(t) = r * (t // r), the first of its group, so that nothing comes from the future.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict

import torch

from .checks import integer, one_of, some_of

if TYPE_CHECKING:
    from .._types import BranchName, GateName, ShareName

SHARES: tuple[ShareName, ...] = ("none", "selection", "output", "delta")
BRANCHES: tuple[BranchName, ...] = ("cmp", "slc", "swa")
GATES: tuple[GateName, ...] = ("own", "anchor")


class SharingOptions(TypedDict):
    """The arguments that say what is shared; see naive_nsa."""

    query_stride: int
    share: ShareName
    share_branches: tuple[BranchName, ...]
    gate: GateName


def presets(group: int) -> dict[str, SharingOptions]:
    """Named ways of sharing, as arguments: ``naive_nsa(..., **presets(group)["seed"])``.

    ========  ===========  =========  ===============  ======  ========================================================
    name      stride       share      branches         gate
    ========  ===========  =========  ===============  ======  ========================================================
    seed      2            output     slc, swa         anchor  odd rows copy gated rows; compression is made for all
    seed_4_3  2            output     cmp, slc, swa    anchor  compression, too, at even rows alone
    fast      64 // group  selection  slc              own     r rows times the group's heads are a tile of 64
    ========  ===========  =========  ===============  ======  ========================================================

    Args:
      group: query heads a key/value head, HQ / H. Only ``fast`` depends on it; its stride is at least 1.
    """
    group = integer("presets", "group", group, 1)
    return {
        "seed": {"query_stride": 2, "share": "output", "share_branches": ("slc", "swa"), "gate": "anchor"},
        "seed_4_3": {"query_stride": 2, "share": "output", "share_branches": ("cmp", "slc", "swa"), "gate": "anchor"},
        "fast": {
            "query_stride": max(1, 64 // group),
            "share": "selection",
            "share_branches": ("slc",),
            "gate": "own",
        },
    }


@dataclass(frozen=True)
class Sharing:
    """Checked arguments. As it stands, plain NSA: no row takes anything from another."""

    stride: int = 1
    share: ShareName = "none"
    branches: frozenset[BranchName] = frozenset()
    gate: GateName = "own"

    @property
    def list_stride(self) -> int:
        """Of the rows that have a list of blocks of their own."""
        return self.stride if "slc" in self.branches else 1

    @property
    def whole(self) -> bool:
        """Whether a row is its anchor's, all of it."""
        return self.share == "output" and self.gate == "anchor" and self.branches == set(BRANCHES)

    def output_stride(self, branch: str) -> int:
        """Of the rows at which a branch is computed."""
        return self.stride if branch in self.branches and self.share in ("output", "delta") else 1


def checked_sharing(
    operation: str,
    query_stride: int,
    share: ShareName,
    share_branches: Iterable[BranchName],
    gate: GateName,
    window_size: int | None,
) -> Sharing:
    """window_size: None where the operation has no window branch to ask for."""
    stride = integer(operation, "query_stride", query_stride, 1)
    one_of(operation, "share", share, SHARES)
    one_of(operation, "gate", gate, GATES)
    branches: frozenset[BranchName] = some_of(operation, "share_branches", share_branches, BRANCHES)
    if share in ("selection", "delta") and branches != {"slc"}:
        reason = "has a list to share" if share == "selection" else "is corrected by the window"
        raise ValueError(
            f"[{operation}] share_branches is {sorted(branches)} and share is {share!r}: it must be ('slc',), since that "
            f"branch alone {reason}"
        )
    if share == "selection" and gate == "anchor":
        raise ValueError(
            f"[{operation}] gate is 'anchor' and share is 'selection': it must be 'own', since each row has an output of its own"
        )
    if stride == 1:
        return Sharing()
    if share == "none":
        raise ValueError(
            f"[{operation}] query_stride is {stride} and share is 'none': say what rows take from their anchor, or give 1"
        )
    if not branches:
        raise ValueError(
            f"[{operation}] share_branches is empty and query_stride is {stride}: name a branch, or give a stride of 1"
        )
    if share == "delta" and window_size == 0:
        raise ValueError(
            f"[{operation}] window_size is 0 and share is 'delta': it must be at least 1, since what changes from the anchor "
            "to a row is taken from the window branch"
        )
    return Sharing(stride, share, branches, gate)


def at_anchors(rows: torch.Tensor, stride: int) -> torch.Tensor:
    """Of what has a row each, that of the anchors. The first row of a sequence is one (checks.spans)."""
    return rows[::stride]


def from_anchors(anchors: torch.Tensor, stride: int, rows: int) -> torch.Tensor:
    """To each of the rows what its anchor has."""
    return anchors[torch.arange(rows, device=anchors.device) // stride]


def branch(
    name: str,
    output: Callable[[torch.Tensor], torch.Tensor],
    gate: torch.Tensor,
    sharing: Sharing,
    cheap: torch.Tensor | None = None,
) -> torch.Tensor:
    """What a branch adds to the result, [n, HQ, Dv].

    Args:
      output: the branch's attention without its gate, [m, HQ, Dv], of the rows whose numbers it is given, [m].
      gate: [n, HQ].
      cheap: for share="delta", [n, HQ, Dv]: what is known of every row.
    """
    n = len(gate)
    rows = torch.arange(n, device=gate.device)
    stride = sharing.output_stride(name)
    if stride == 1:
        return gate[..., None] * output(rows)
    o = output(at_anchors(rows, stride))
    anchor_gate = at_anchors(gate, stride)
    if sharing.share == "output" and sharing.gate == "anchor":
        return from_anchors(anchor_gate[..., None] * o, stride, n)
    o = from_anchors(o, stride, n)
    if sharing.share == "delta":
        assert cheap is not None
        o = o + (cheap - from_anchors(at_anchors(cheap, stride), stride, n))  # at an anchor o + 0: o itself
    if sharing.gate == "anchor":
        gate = from_anchors(anchor_gate, stride, n)
    return gate[..., None] * o
