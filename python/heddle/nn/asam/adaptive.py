"""Adaptive sparse attention of one call: a pattern's tiles, chosen for each head, and by the gate also the rest of the keys."""

from __future__ import annotations

import torch
from torch import nn

from ...functional import merge_attention
from . import patterns
from .config import ASAMConfig
from .gate import GateScores
from .selection import Selection, Tiles, straight_through


def _of_rows(of_tiles: torch.Tensor, length: int, config: ASAMConfig) -> torch.Tensor:
    """[B, T, H, 1] of [B, H, R], R 1 or N."""
    if config.causal:
        of_tiles = of_tiles.repeat_interleave(config.block_size, -1)[..., :length]
    return of_tiles.transpose(1, 2)[..., None]


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    found: Tiles,
    config: ASAMConfig,
    lengths: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over what a pattern selects, with the gradients of its choices."""
    if found.key_weight is not None:
        v = v * found.key_weight.to(v.dtype)
    if found.parts:
        results = [patterns.attend(q, k, v, part, config, lengths) for part, _ in found.parts]
        biases = [bias for _, bias in found.parts]
        o, lse = merge_attention([o for o, _ in results], [lse + bias for (_, lse), bias in zip(results, biases)])
    else:
        o, lse = patterns.attend(q, k, v, found.tiles, config, lengths)
    if found.row_weight is not None:
        o = o * found.row_weight.to(o.dtype)
    return o, lse


class Adaptive:
    """One call's choices, and its attention.

    Args:
      q, k, v: [B, T, H, D].
      scores: of the gate; None without one.
      temperature: of the softmax over pattern logits.
      lengths: int32 [B], keys in use.
    """

    def __init__(
        self,
        selection: Selection,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scores: GateScores | None,
        temperature: float,
        lengths: torch.Tensor | None,
    ) -> None:
        self.config, self.scores, self.lengths = selection.config, scores, lengths
        self.q, self.k, self.v = q, k, v
        # Without gradients what is not chosen is not computed.
        learns = q.requires_grad or any(parameter.requires_grad for parameter in selection.parameters())
        self.training = torch.is_grad_enabled() and (learns or (scores is not None and scores.logits.requires_grad))
        tiles = patterns.tiles_across(q.shape[1], self.config.block_size)
        self.allowed = left = patterns.allowed(tiles, self.config, lengths, q.device)
        self.found = [selection.select(name, q, k, left, lengths, self.training) for name in selection.names]
        self.choice: torch.Tensor | None = None  # int64 [B, H, R]: the pattern of each head
        self.tiles = self.found[0].tiles  # of the pattern, as chosen
        if len(self.found) > 1:
            assert scores is not None
            logits = scores.patterns[:, None] + selection.head_bias.float()[:, None]  # [B, H, R, 4]
            self.choice, self.shares = logits.argmax(-1), (logits / temperature).softmax(-1)
            of_choices = [
                (self.choice == n)[..., None] & found.tiles for n, found in enumerate(self.found)
            ]  # R stands for the blocks of rows
            self.tiles = torch.stack(of_choices).any(0)
        self.dense: torch.Tensor | None = None  # bool [B, H, R]: all keys, and not the pattern's alone
        if scores is not None and self.config.gate == "hard":
            self.dense = scores.logits <= 0

    def attended(self) -> torch.Tensor:
        """bool [B or 1, H or 1, N, N]: the tiles that the result depends on."""
        if self.scores is None:
            return self.tiles
        return self.allowed if self.dense is None else self.tiles | (self.dense[..., None] & self.allowed)

    def _sparse(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The pattern's part: o and lse."""
        if self.choice is None:
            return _attend(self.q, self.k, self.v, self.found[0], self.config, self.lengths)
        if not self.training:
            return _attend(self.q, self.k, self.v, Tiles(self.tiles), self.config, self.lengths)
        # The straight-through estimator: the chosen one's result, with the gradient of the mean of all by their shares.
        results = [_attend(self.q, self.k, self.v, found, self.config, self.lengths) for found in self.found]
        o, lse = torch.zeros_like(results[0][0]), results[0][1]
        for n, (of_n, lse_of_n) in enumerate(results):
            chosen = _of_rows(self.choice == n, self.q.shape[1], self.config)
            weight = chosen + _of_rows(straight_through(self.shares[..., n]), self.q.shape[1], self.config)
            o = o + weight.to(o.dtype) * of_n
            lse = torch.where(chosen[..., 0].transpose(1, 2), lse_of_n, lse)
        return o, lse

    def __call__(self) -> torch.Tensor:
        """[B, T, H, D]."""
        if self.scores is None:
            return self._sparse()[0]
        if self.dense is not None and not self.training:
            return patterns.attend(self.q, self.k, self.v, self.attended(), self.config, self.lengths)[0]
        o, lse = self._sparse()
        rest = self.allowed & ~self.tiles  # so that no pair is there twice
        o_rest, lse_rest = patterns.attend(self.q, self.k, self.v, rest, self.config, self.lengths)
        logits = self.scores.logits
        length = self.q.shape[1]
        if self.dense is None:
            outside = _of_rows(nn.functional.logsigmoid(-logits), length, self.config)  # log(1 - gate), never -inf
            return merge_attention([o, o_rest], [lse, lse_rest + outside[..., 0].transpose(1, 2)])[0]
        whole = merge_attention([o, o_rest], [lse, lse_rest])[0]
        share = self.dense + straight_through(logits.neg().sigmoid())  # 1 - gate, rounded to 0 or 1
        share = _of_rows(share, length, self.config).to(o.dtype)
        return share * whole + (1 - share) * o
