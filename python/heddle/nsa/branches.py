"""The three branches of native sparse attention over one sequence, and the choice of blocks.

Shapes: q [n, HQ, D], its rows at positions t [n]; k [L, H, D]; v [L, H, Dv]; G = HQ // H, and the query heads h*G to h*G + G-1
read the key/value head h.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

Compress = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]

if TYPE_CHECKING:
    from .._types import ForcedName

FORCED: tuple[ForcedName, ...] = ("first", "previous", "current")

# Rows at a time: scores are [ROWS, HQ, keys], never [n, HQ, keys].
ROWS = 64


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keep: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention over the keys that ``keep`` [n, H or 1, m] has; a row that has none gives 0.

    Returns:
      o [n, HQ, Dv] and the probabilities [n, H, G, m].
    """
    heads = k.shape[1]
    grouped = q.unflatten(1, (heads, q.shape[1] // heads))
    keep = keep[:, :, None]
    with torch.autocast(q.device.type, enabled=False):
        s = scale * torch.einsum("nhgd,mhd->nhgm", grouped, k)
        # A row without keys is left as it is, and not made NaN, until its probabilities become 0.
        s = s.masked_fill(~keep & keep.any(-1, keepdim=True), -math.inf)
        p = torch.softmax(s, -1).masked_fill(~keep, 0)
        return torch.einsum("nhgm,mhd->nhgd", p, v).flatten(1, 2), p


def compressed_keys(
    k: torch.Tensor, v: torch.Tensor, block: int, stride: int, compress: Compress | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """One key and value [N, H, D], [N, H, Dv] for each complete block [i*stride, i*stride + block): its mean, or what
    ``compress`` makes of k's blocks [N, block, H, D] and v's."""
    if len(k) < block:
        return k[:0], v[:0]
    k_blocks, v_blocks = (x.unfold(0, block, stride).movedim(-1, 1) for x in (k, v))
    if compress is None:
        return k_blocks.mean(1), v_blocks.mean(1)
    return compressed_of_blocks(k_blocks, v_blocks, compress)


def compressed_of_blocks(
    k_blocks: torch.Tensor, v_blocks: torch.Tensor, compress: Compress
) -> tuple[torch.Tensor, torch.Tensor]:
    """What ``compress`` makes of blocks [N, block, H, D] and [N, block, H, Dv]: [N, H, D], [N, H, Dv] of their dtypes."""
    found = compress(k_blocks, v_blocks)
    if not isinstance(found, (tuple, list)) or [isinstance(x, torch.Tensor) for x in found] != [True, True]:
        raise TypeError(
            f"[compress] it gave a {type(found).__name__}: it must give a pair, a key and a value of each block"
        )
    for name, x, blocks in zip(("k", "v"), found, (k_blocks, v_blocks)):
        wanted = (blocks.shape[0], *blocks.shape[2:])
        if x.shape != wanted:
            raise ValueError(
                f"[compress] its {name} is {list(x.shape)} for blocks {list(blocks.shape)}: it must be {list(wanted)}"
            )
    return found[0].to(k_blocks.dtype), found[1].to(v_blocks.dtype)  # under autocast a module may give 16 bits


def visible_blocks(t: torch.Tensor, block: int, stride: int) -> torch.Tensor:
    """How many compressed blocks end at t or before: [n]. For block == stride, (t + 1) // block."""
    return torch.where(t + 1 >= block, (t + 1 - block).div(stride, rounding_mode="floor") + 1, 0)


def compressed_attention(
    q: torch.Tensor, k_cmp: torch.Tensor, v_cmp: torch.Tensor, t: torch.Tensor, block: int, stride: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """o [n, HQ, Dv] over the compressed blocks that are visible, and the probabilities summed over the heads of a group,
    [n, H, N], -inf where not visible; without gradient."""
    numbers = torch.arange(len(k_cmp), device=t.device)
    outputs, sums = [], []
    for q_part, t_part in zip(q.split(ROWS), t.split(ROWS)):
        keep = (numbers < visible_blocks(t_part, block, stride)[:, None])[:, None]
        o, p = attend(q_part, k_cmp, v_cmp, keep, scale)
        outputs.append(o)
        sums.append(p.detach().sum(2).masked_fill(~keep, -math.inf))
    return torch.cat(outputs), torch.cat(sums)


def block_scores(sums: torch.Tensor, blocks: int, block_size: int, block: int, stride: int) -> torch.Tensor:
    """What the compressed blocks' probabilities [n, H, N] say of each selection block, [n, H, blocks]: the paper's Eq. 9 with
    the sign that geometry asks for, p_slc[j] = sum over m < block_size/stride and n < block/stride of
    p_cmp[(block_size/stride) * j + m - n]. -inf for what no visible block touches. With block = stride = block_size it is
    p_cmp itself."""
    wide, narrow = block_size // stride, block // stride
    # Index i of p_cmp is index i + narrow - 1 here.
    padded = torch.nn.functional.pad(sums, (narrow - 1, wide * blocks - sums.shape[-1]), value=-math.inf)
    seen = padded > -math.inf
    padded = padded.masked_fill(~seen, 0)
    score = torch.zeros(*sums.shape[:-1], blocks, dtype=sums.dtype, device=sums.device)
    touched = torch.zeros_like(score, dtype=torch.bool)
    for m in range(wide):
        for n in range(narrow):
            at = slice(m - n + narrow - 1, m - n + narrow + wide * (blocks - 1), wide)
            score, touched = score + padded[..., at], touched | seen[..., at]
    return torch.where(touched, score, -math.inf)


def choose_blocks(
    scores: torch.Tensor, t: torch.Tensor, counts: torch.Tensor, slots: int, block_size: int, forced: frozenset[str]
) -> torch.Tensor:
    """The lists, int32 [n, H, slots]: forced blocks first, then by falling score, the lower number first among equals; -1
    behind the last, and in slots from ``counts`` [n, H] on."""
    current = (t // block_size)[:, None, None]
    number = torch.arange(scores.shape[-1], device=t.device)
    must = torch.zeros_like(scores, dtype=torch.bool)
    for name, block in zip(FORCED, (torch.zeros_like(current), current - 1, current)):
        if name in forced:
            must |= number == block
    scores = scores.masked_fill(must, math.inf)
    scores, order = torch.sort(scores, dim=-1, descending=True, stable=True)
    order = order.masked_fill(scores == -math.inf, -1)[..., :slots]
    order = torch.nn.functional.pad(order, (0, slots - order.shape[-1]), value=-1)
    slot = torch.arange(slots, device=t.device)
    return order.masked_fill(slot >= counts[..., None], -1).to(torch.int32)


def listed_blocks(
    lists: torch.Tensor, counts: torch.Tensor, t: torch.Tensor, blocks: int, block_size: int
) -> torch.Tensor:
    """Which blocks a row reads, bool [n, H, blocks], of its list [n, H, S], which is a set. What is no block, begins behind the
    row or stands in a slot from ``counts`` [n, H] on is not in it."""
    lists = lists.long()
    slot = torch.arange(lists.shape[-1], device=t.device)
    valid = (lists >= 0) & (lists < blocks) & (lists * block_size <= t[:, None, None]) & (slot < counts[..., None])
    found = torch.zeros(*lists.shape[:2], blocks + 1, dtype=torch.bool, device=t.device)  # the last is nobody's
    return found.scatter(-1, lists.where(valid, blocks), True)[..., :blocks]


def selected_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    t: torch.Tensor,
    listed: torch.Tensor,
    block_size: int,
    scale: float,
) -> torch.Tensor:
    """o [n, HQ, Dv] over the keys j <= t of the blocks that ``listed`` [n, H, blocks] has."""
    outputs = []
    for q_part, t_part, listed_part in zip(q.split(ROWS), t.split(ROWS), listed.split(ROWS)):
        end = int(t_part.max()) + 1
        j = torch.arange(end, device=t.device)
        keep = listed_part[..., j // block_size] & (j <= t_part[:, None])[:, None]
        outputs.append(attend(q_part, k[:end], v[:end], keep, scale)[0])
    return torch.cat(outputs)


def window_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, t: torch.Tensor, window: int, scale: float
) -> torch.Tensor:
    """o [n, HQ, Dv] over the keys [t - window + 1, t]."""
    outputs = []
    for q_part, t_part in zip(q.split(ROWS), t.split(ROWS)):
        begin, end = max(0, int(t_part.min()) - window + 1), int(t_part.max()) + 1
        j = torch.arange(begin, end, device=t.device)
        keep = (j <= t_part[:, None]) & (j > t_part[:, None] - window)
        outputs.append(attend(q_part, k[begin:end], v[begin:end], keep[:, None], scale)[0])
    return torch.cat(outputs)
