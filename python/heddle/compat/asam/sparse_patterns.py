"""Patterns as masks of pairs, by the public module's name. They are [T, T] or [H, T, T]; lists of tiles do without: docs/asam.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ...nn.asam import token_masks

__all__ = [
    "ClusteredSparsePattern",
    "HierarchicalSparsePattern",
    "LocalSparsePattern",
    "RandomSparsePattern",
    "SparsePattern",
    "StridedSparsePattern",
]


class SparsePattern(nn.Module):
    """A mask of pairs of a sequence of seq_len positions, which is made once and kept.

    The public class keeps it in the state dict; here state dicts that have it load, and none has it.

    Args:
      seq_len: T.
    """

    def __init__(self, seq_len: int) -> None:
        super().__init__()
        self.seq_len = seq_len
        self._made: torch.Tensor | None = None

    def build_pattern(self) -> torch.Tensor:
        """bool [T, T] or [H, T, T], true where row i attends key j."""
        raise NotImplementedError(f"[{type(self).__name__}] build_pattern is missing: a pattern must have it")

    def get_pattern(self, device: torch.device | str) -> torch.Tensor:
        """``build_pattern``, on a device."""
        if self._made is None:
            self._made = self.build_pattern()
        self._made = self._made.to(device)
        return self._made

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        state_dict.pop(f"{prefix}_cached_pattern", None)
        super()._load_from_state_dict(state_dict, prefix, *args)


class LocalSparsePattern(SparsePattern):
    """Keys at most window_size / 2 away."""

    def __init__(self, seq_len: int, window_size: int = 128) -> None:
        super().__init__(seq_len)
        self.window_size = window_size

    def build_pattern(self) -> torch.Tensor:
        return token_masks.local(self.seq_len, self.window_size)


class StridedSparsePattern(SparsePattern):
    """Keys at most local_window away, and every stride-th from the first on."""

    def __init__(self, seq_len: int, stride: int = 32, local_window: int = 16) -> None:
        super().__init__(seq_len)
        self.stride, self.local_window = stride, local_window

    def build_pattern(self) -> torch.Tensor:
        return token_masks.strided(self.seq_len, self.stride, self.local_window)


class RandomSparsePattern(SparsePattern):
    """num_random keys of each head and row, the same ones as the public class draws. That one seeds torch's own generator on the way;
    this one leaves it."""

    def __init__(self, seq_len: int, num_random: int = 128, num_heads: int = 8) -> None:
        super().__init__(seq_len)
        self.num_random, self.num_heads = num_random, num_heads

    def build_pattern(self) -> torch.Tensor:
        return token_masks.random(self.seq_len, self.num_random, self.num_heads)


class ClusteredSparsePattern(SparsePattern):
    """Pairs that belong to the same of num_clusters learned centroids of each head: softmaxes of cosines whose product is above 0.1.

    The threshold gives the centroids no gradient; ``heddle.nn.ASAMLayer`` with pattern_type="clustered" does.
    """

    def __init__(self, seq_len: int, num_clusters: int = 32, num_heads: int = 8, dim_head: int = 64) -> None:
        super().__init__(seq_len)
        self.num_clusters, self.num_heads, self.dim_head = num_clusters, num_heads, dim_head
        self.centroids = nn.Parameter(torch.randn(num_heads, num_clusters, dim_head) * 0.02)
        self.temperature = nn.Parameter(torch.full((1,), 0.5))

    def build_pattern(self) -> torch.Tensor:
        """All pairs: which are left depends on queries and keys."""
        return torch.ones(self.seq_len, self.seq_len, dtype=torch.bool)

    def compute_cluster_assignment(
        self, queries: torch.Tensor, keys: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[B, H, T, num_clusters] of queries and of keys, [B, H, T, D]."""
        return token_masks.memberships(queries, keys, self.centroids, self.temperature)

    def apply_cluster_mask(
        self, attn_scores: torch.Tensor, q_assign: torch.Tensor, k_assign: torch.Tensor
    ) -> torch.Tensor:
        """attn_scores [B, H, T, T], -inf for pairs that are not together."""
        return attn_scores.masked_fill(~token_masks.together(q_assign, k_assign), float("-inf"))


class HierarchicalSparsePattern(SparsePattern):
    """Pairs of strided patterns of several strides, by learned weights of each head: those whose strides have more than half.

    The threshold gives the weights no gradient; ``heddle.nn.ASAMLayer`` with pattern_type="hierarchical" does.
    """

    def __init__(self, seq_len: int, scales: Sequence[int] | None = None, num_heads: int = 8) -> None:
        super().__init__(seq_len)
        self.scales, self.num_heads = list(scales or (4, 16, 64)), num_heads
        self.patterns = nn.ModuleList(
            [StridedSparsePattern(seq_len, stride=s, local_window=s // 4) for s in self.scales]
        )
        self.scale_weights = nn.Parameter(torch.ones(len(self.scales), num_heads))

    def build_pattern(self) -> torch.Tensor:
        """[T, T]: the first stride's."""
        return token_masks.strided(self.seq_len, self.scales[0], self.scales[0] // 4)

    def combine_patterns(self, device: torch.device | str) -> torch.Tensor:
        """[H, T, T]: those that are kept."""
        return token_masks.hierarchical(self.seq_len, self.scales, self.scale_weights.detach(), device)
