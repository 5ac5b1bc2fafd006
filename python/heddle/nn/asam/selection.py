"""The patterns of a layer: their parameters, the tiles that they select, and what their choices give back as gradients."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from . import patterns
from .config import CHOICES, ASAMConfig


class Tiles(NamedTuple):
    """What a pattern selects."""

    tiles: torch.Tensor  #: bool [B or 1, H or 1, N, N]
    row_weight: torch.Tensor | None = None  #: [B, T, H, 1], each 1, with a gradient: of rows' results
    key_weight: torch.Tensor | None = None  #: the same of values
    #: Disjoint sets of tiles that are the tiles together, each with the [1, H, 1] by which its lse differs: 0, with a gradient.
    parts: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()


def straight_through(soft: torch.Tensor) -> torch.Tensor:
    """0 with the gradient of soft."""
    return soft - soft.detach()


class Selection(nn.Module):
    """The patterns that a layer has, and parameters of those that have any: ``centroids`` [H, C, D] and ``temperature`` [1] of
    "clustered", ``scale_weights`` [scales, H] of "hierarchical", ``head_bias`` [H, 4] where pattern_logits choose."""

    def __init__(self, config: ASAMConfig) -> None:
        super().__init__()
        self.config = config
        self.names = CHOICES if config.pattern_type == "adaptive" else (config.pattern_type,)
        heads = config.num_heads
        if "clustered" in self.names:
            self.centroids = nn.Parameter(torch.randn(heads, config.num_clusters, config.dim_head) * 0.02)
            self.temperature = nn.Parameter(torch.full((1,), 0.5))
        if "hierarchical" in self.names:
            self.scale_weights = nn.Parameter(torch.ones(len(config.scales), heads))
        if config.pattern_type == "adaptive":
            self.head_bias = nn.Parameter(torch.zeros(heads, len(CHOICES)))

    def select(
        self,
        name: str,
        q: torch.Tensor,
        k: torch.Tensor,
        left: torch.Tensor,
        lengths: torch.Tensor | None,
        training: bool,
    ) -> Tiles:
        """
        Args:
          name: one of ``names``.
          q, k: [B, T, H, D].
          left: bool [B or 1, 1, N, N], the tiles that causality and lengths leave.
          lengths: int32 [B], keys in use.
          training: whether choices give gradients.
        """
        if name == "clustered":
            found = self._clustered(q, k, left.shape[-1], lengths, training)
        elif name == "hierarchical":
            found = self._hierarchical(left.shape[-1], q.device, training)
        else:
            found = Tiles(patterns.static(name, self.config, left))
        return found._replace(tiles=found.tiles & left, parts=tuple((part & left, bias) for part, bias in found.parts))

    def _membership(self, of_blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of vectors [B, N, H, D]: the cluster of each, int64 [B, H, N], and how far it belongs there, [B, H, N]."""
        with torch.autocast(of_blocks.device.type, enabled=False):
            unit = nn.functional.normalize(of_blocks.float(), dim=-1)
            centroids = nn.functional.normalize(self.centroids.float(), dim=-1)
            likeness = torch.einsum("bnhd,hcd->bhnc", unit, centroids)
            soft = (likeness / self.temperature.float().abs().clamp_min(1e-6)).softmax(-1)
        cluster = likeness.argmax(-1)
        return cluster, soft.gather(-1, cluster[..., None])[..., 0]

    def _clustered(
        self, q: torch.Tensor, k: torch.Tensor, tiles: int, lengths: torch.Tensor | None, training: bool
    ) -> Tiles:
        """A block of rows and a block of keys meet if their means are nearest to the same centroid, and a block meets itself.

        With causality a block of rows goes by its first row, before which all other blocks that it may meet end.

        The choice has the gradient of o_i = sum_j P_ij a_i a_j v_j, a_i how far i's block belongs to its cluster, at a = 1. With
        causality keys have none: in a row's own block the mean is of later keys, too.
        """
        block, length = self.config.block_size, q.shape[1]

        def means(x: torch.Tensor) -> torch.Tensor:
            """[B, N, H, D]: the block's mean, of positions in use."""
            ends = torch.full((1,), length, device=x.device) if lengths is None else lengths.long()
            used = torch.arange(length, device=x.device) < ends[:, None]
            x = x.float() * used[..., None, None]
            x = nn.functional.pad(x, (0, 0, 0, 0, 0, tiles * block - length)).unflatten(1, (tiles, block))
            count = (ends[:, None] - torch.arange(0, length, block, device=x.device)).clamp(1, block)
            return x.sum(2) / count[..., None, None]

        of_rows, row_weight = self._membership(q[:, ::block] if self.config.causal else means(q))
        of_keys, key_weight = self._membership(means(k))
        same = of_rows[..., None] == of_keys[..., None, :]
        found = same | patterns.local(tiles, 0, block, q.device)
        if not training:
            return Tiles(found)

        def for_each(weight: torch.Tensor) -> torch.Tensor:
            of_positions = straight_through(weight).repeat_interleave(block, -1)[..., :length]
            return (1 + of_positions).transpose(1, 2)[..., None]

        return Tiles(found, for_each(row_weight), None if self.config.causal else for_each(key_weight))

    def _hierarchical(self, tiles: int, device: torch.device, training: bool) -> Tiles:
        """Tiles whose scales have more than half of softmax(scale_weights). The choice has the gradient of attention in which the
        tiles' keys weigh as much as their scales together."""
        scales = [patterns.scale_of_tiles(tiles, scale, device) for scale in self.config.scales]
        weights = self.scale_weights.float().softmax(0)[..., None, None]  # [scales, H, 1, 1]
        total = sum(weight * scale for weight, scale in zip(weights, scales))
        assert isinstance(total, torch.Tensor)
        found = (total > 0.5)[None]  # [1, H, N, N]
        if not training:
            return Tiles(found)
        code = sum(scale.long() << bit for bit, scale in enumerate(scales))
        parts = []
        for which in range(1, 1 << len(scales)):  # the tiles of these scales and no other
            weight = sum(weights[bit] for bit in range(len(scales)) if which >> bit & 1)
            assert isinstance(weight, torch.Tensor)
            parts.append((found & (code == which), straight_through(weight)[None, :, :, 0]))
        return Tiles(found, parts=tuple(parts))
