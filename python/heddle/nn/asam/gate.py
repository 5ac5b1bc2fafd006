"""The gate of adaptive sparse attention, of heddle.nn, which is its public name."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from ...nsa import checks
from .config import CHOICES


class GateScores(NamedTuple):
    """Of each head, from R prefixes of a sequence: one, the whole, or one for each tile of rows."""

    logits: torch.Tensor  #: float32 [B, H, R]: sigmoid is the gate
    confidence: torch.Tensor  #: [B, H, R], from 0 to 1
    patterns: torch.Tensor  #: [B, R, 4]: logits of the patterns


class AdaptiveGate(nn.Module):
    """Says of each head how far a pattern of sparse attention will do (gate 1) or all keys are wanted (gate 0), and which pattern.

    The public module's features and parameters: x is averaged over time into dim, dim / 2, ... bins, which are weighted by
    softmax(bin . mean of x); three small networks make complexity, confidence and pattern logits of that, and

        gate = sigmoid((sparse_threshold - complexity) * confidence / |gate_temp|)

    With ``causal`` this is done for each tile of rows, of the positions up to the tile's first row. So what a gate says of a tile is
    what one that is not causal says of x[:, : first row + 1].

    Args:
      dim, num_heads, hidden_dim: the width of x, heads, and the width of the networks.
      num_pools: sizes of bins: dim, dim / 2, ... dim / 2^(num_pools - 1).
      temperature: of the softmax over pattern logits, through which their choice has its gradient.
      causal: whether a row's gate knows no later position.
      block_size: rows of a tile, if it is causal.

    Raises:
      ValueError, TypeError: a size that is no int from 1 up, a temperature that is not above 0.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        hidden_dim: int = 128,
        num_pools: int = 4,
        temperature: float = 1.0,
        *,
        causal: bool = False,
        block_size: int = 64,
    ) -> None:
        super().__init__()
        sizes = {"dim": dim, "num_heads": num_heads, "num_pools": num_pools, "block_size": block_size}
        for name, value in sizes.items():
            checks.integer("AdaptiveGate", name, value, 1)
        checks.integer("AdaptiveGate", "hidden_dim", hidden_dim, 2)
        if not temperature > 0:
            raise ValueError(f"[AdaptiveGate] temperature is {temperature!r}: it must be above 0")
        self.dim, self.num_heads, self.temperature = dim, num_heads, temperature
        self.causal, self.block_size = causal, block_size
        self.pool_sizes = [max(1, dim // 2**i) for i in range(num_pools)]
        self.feature_proj = nn.Sequential(
            nn.Linear(sum(self.pool_sizes), hidden_dim), nn.LayerNorm(hidden_dim), nn.GELU(), nn.Dropout(0.1)
        )

        def network(out: int) -> list[nn.Module]:
            return [nn.Linear(hidden_dim, hidden_dim // 2), nn.ReLU(), nn.Linear(hidden_dim // 2, out)]

        self.complexity_estimator = nn.Sequential(*network(num_heads))
        self.confidence_predictor = nn.Sequential(*network(num_heads), nn.Sigmoid())
        self.pattern_selector = nn.Sequential(*network(len(CHOICES)))
        self.sparse_threshold = nn.Parameter(torch.full((num_heads,), 0.5))
        self.gate_temp = nn.Parameter(torch.full((1,), 0.1))

    def _pooled(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """[B, R, bins]: of the prefixes x[:, :ends], ends int64 [B or 1, R] from 1 up, each bin's sum over the width, weighted.

        A bin of a prefix is a difference of running sums. These are float64: at a bin of one position in thousands little would be
        left of float32.
        """
        batch, length, _ = x.shape
        size = torch.cat([torch.full((n,), n, device=x.device) for n in self.pool_sizes])
        place = torch.cat([torch.arange(n, device=x.device) for n in self.pool_sizes])
        begin = place * ends[..., None] // size
        end = ((place + 1) * ends[..., None] + size - 1) // size
        begin, end = (n.expand(batch, -1, -1) for n in (begin, end))
        x = x.double()
        last = (ends - 1).expand(batch, -1)[..., None].expand(-1, -1, x.shape[-1])
        mean = x.cumsum(1).gather(1, last) / ends[..., None]  # [B, R, dim]

        def averages(values: torch.Tensor) -> torch.Tensor:
            """[B, R, bins] of values [B, R, T]."""
            running = nn.functional.pad(values.cumsum(-1), (1, 0))
            return (running.gather(-1, end) - running.gather(-1, begin)) / (end - begin)

        weights = averages(mean @ x.transpose(1, 2)).softmax(-1)
        return averages(x.sum(-1)[:, None].expand(-1, ends.shape[-1], -1)) * weights

    def scores(self, x: torch.Tensor, lengths: torch.Tensor | None = None) -> GateScores:
        """
        Args:
          x: [B, T, dim].
          lengths: int32 [B], positions of each sequence that are in use; T if None.
        """
        if x.dim() != 3 or x.shape[-1] != self.dim or x.shape[1] == 0:
            raise ValueError(f"[AdaptiveGate] x is {list(x.shape)}: it must be [B, T, {self.dim}], T from 1 up")
        length = x.shape[1]
        if self.causal:
            ends = torch.arange(0, length, self.block_size, device=x.device)[None] + 1
        else:
            ends = torch.full((1, 1), length, device=x.device)
        if lengths is not None:
            ends = torch.minimum(ends, lengths.long().clamp(1, length)[:, None])
        with torch.autocast(x.device.type, enabled=False):
            pooled = self._pooled(x, ends).to(x.dtype)
        features = self.feature_proj(pooled)
        complexity = self.complexity_estimator(features).float()
        confidence = self.confidence_predictor(features).float()
        temperature = self.gate_temp.float().abs().clamp_min(1e-6)  # 0 would make NaN of a difference of 0
        logits = (self.sparse_threshold.float() - complexity) * confidence / temperature
        return GateScores(logits.transpose(1, 2), confidence.transpose(1, 2), self.pattern_selector(features).float())

    def rows(self, of_tiles: torch.Tensor, length: int) -> torch.Tensor:
        """[..., T] of [..., R]: each row has what its prefix has."""
        if not self.causal:
            return of_tiles.expand(*of_tiles.shape[:-1], length)
        return of_tiles.repeat_interleave(self.block_size, -1)[..., :length]

    def info(self, scores: GateScores, length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What ``forward`` returns."""
        gate = self.rows(scores.logits.sigmoid(), length)
        if self.causal:
            patterns = self.rows(scores.patterns.transpose(1, 2), length).transpose(1, 2)
            return gate, self.rows(scores.confidence, length), patterns
        return gate, scores.confidence[..., 0], scores.patterns[:, 0]

    def forward(
        self, x: torch.Tensor, lengths: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """
        Args:
          x: [B, T, dim].
          lengths: int32 [B], positions of each sequence that are in use; T if None.

        Returns:
          gate_values [B, H, T], confidence [B, H] and pattern_logits [B, 4], in the order of local, strided, random, clustered; if
          it is causal, confidence [B, H, T] and pattern_logits [B, T, 4].

        Raises:
          ValueError: x of another width.
        """
        return self.info(self.scores(x, lengths), x.shape[1])

    def get_attention_mode(self, gate_values: torch.Tensor) -> torch.Tensor:
        """bool [B, H]: whether a head's gate is above a half in the mean over its rows."""
        return gate_values.mean(dim=-1) > 0.5
