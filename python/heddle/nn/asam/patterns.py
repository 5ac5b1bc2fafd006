"""Patterns of sparse attention as sets of tiles, and attention over them.

A tile is `block` rows by `block` keys; a set of tiles is bool [B or 1, H or 1, N, N], N = ceil(T / block), true where tile (n, c), rows of
block n and keys of block c, is attended. The whole of a tile counts, but for what causality takes off the diagonal. Beside what attention
itself takes, a set of tiles is 1 / block^2 of the pairs, which joining the pattern with the rest asks for anyway.
"""

from __future__ import annotations

import torch

from ...selection.lists import of_tiles
from ...sparse import sparse_attention
from .config import ASAMConfig


def tiles_across(length: int, block: int) -> int:
    """N of T."""
    return (length + block - 1) // block


def reach_of(distance: int, block: int) -> int:
    """How many blocks to either side of its own hold keys at most `distance` positions from some row of a block."""
    return 0 if distance < 1 else (distance - 1) // block + 1


def places(tiles: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 [N, 1] and [1, N]: blocks of rows and of keys."""
    at = torch.arange(tiles, device=device)
    return at[:, None], at[None, :]


def allowed(tiles: int, config: ASAMConfig, lengths: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """bool [B or 1, 1, N, N]: the tiles that causality and lengths, int32 [B], leave."""
    every = torch.ones(1, 1, tiles, tiles, dtype=torch.bool, device=device)
    if config.causal:
        every = every.tril()
    if lengths is None:
        return every
    first = torch.arange(tiles, device=device) * config.block_size
    return every & (first < lengths[:, None])[:, None, None]


def local(tiles: int, distance: int, block: int, device: torch.device) -> torch.Tensor:
    """bool [1, 1, N, N]: tiles with a pair that is at most `distance` positions apart."""
    rows, keys = places(tiles, device)
    return ((rows - keys).abs() <= reach_of(distance, block))[None, None]


def columns(tiles: int, stride: int, device: torch.device) -> torch.Tensor:
    """bool [1, 1, N, N]: every stride-th block of keys, from the first on."""
    _, keys = places(tiles, device)
    return (keys % stride == 0).expand(tiles, -1)[None, None]


def strided(tiles: int, stride: int, device: torch.device) -> torch.Tensor:
    """bool [1, 1, N, N]: every stride-th block of keys, the row's own and those beside it."""
    return columns(tiles, stride, device) | local(tiles, 1, 1, device)


def random(count: int, seed: int, heads: int, left: torch.Tensor) -> torch.Tensor:
    """bool [B or 1, H, N, N]: `count` blocks of keys for each head and block of rows, of the tiles `left`, or all if there are no more.

    A block's rank is a hash of seed, head and the two blocks: the same on every device, and whatever other blocks there are.
    """
    rows, keys = places(left.shape[-1], left.device)
    head = torch.arange(heads, device=left.device)[:, None, None]
    word = ((seed % 65537 * 4096 + head) * 65537 + rows) * 65537 + keys
    for multiplier in (0x7FEB352D, 0x046CA68B):  # below 2^31, so that products of 32 bits stay below 2^63
        word = word & 0xFFFFFFFF
        word = (word ^ (word >> 16)) * multiplier
    rank = ((word >> 8) & 0xFFFFFFFF) << 24 | keys  # no two are equal
    rank = torch.where(left, rank, torch.iinfo(torch.int64).max)
    return (rank <= rank.sort(-1).values[..., :count][..., -1:]) & left


def scale_of_tiles(tiles: int, scale: int, device: torch.device) -> torch.Tensor:
    """bool [N, N], of a scale of "hierarchical": every scale-th block, and those up to a quarter of scale away."""
    rows, keys = places(tiles, device)
    return (keys % scale == 0) | ((rows - keys).abs() <= scale // 4)


def static(name: str, config: ASAMConfig, left: torch.Tensor) -> torch.Tensor:
    """bool [B or 1, H or 1, N, N] of a pattern that neither data nor parameters change, of the tiles that causality and lengths leave."""
    tiles, device = left.shape[-1], left.device
    if name == "local":
        return local(tiles, config.window_size // 2, config.block_size, device)
    if name == "strided":
        return strided(tiles, config.stride, device)
    count = (config.num_random + config.block_size - 1) // config.block_size
    return random(count, config.seed, config.num_heads, left)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tiles: torch.Tensor,
    config: ASAMConfig,
    lengths: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of q, k, v [B, T, H, D] over a set of tiles: o [B, T, H, D] and lse float32 [B, H, T]. Rows without keys: 0, -inf."""
    blocks, counts = of_tiles(tiles.transpose(1, 2))
    return sparse_attention(
        q,
        k,
        v,
        blocks.expand(q.shape[0], -1, -1, -1),
        counts.expand(q.shape[0], -1, -1),
        block_size=config.block_size,
        query_rows=config.block_size,
        causal="top_left" if config.causal else "none",
        scale=config.scale,
        seqused_k=lengths,
        return_lse=True,
    )


def share_of_pairs(tiles: torch.Tensor, length: int, config: ASAMConfig, lengths: torch.Tensor | None) -> torch.Tensor:
    """float32 []: of the pairs of a row and a key that causality and lengths leave, those in the tiles."""
    block = config.block_size
    first = torch.arange(0, length, block, device=tiles.device)
    ends = torch.full((1, 1), length, device=tiles.device) if lengths is None else lengths.long()[:, None]
    size = (ends - first).clamp(0, block)  # [B or 1, N]: positions of each block
    pairs = (size[:, :, None] * size[:, None, :]).double()
    if config.causal:
        own = torch.diag_embed((size * (size + 1) // 2).double())
        pairs = pairs.tril(-1) + own
    pairs = pairs[:, None]
    kept = (pairs * tiles).mean(1).sum((-1, -2)).mean()
    return (kept / pairs.sum((-1, -2)).mean().clamp_min(1)).float()
