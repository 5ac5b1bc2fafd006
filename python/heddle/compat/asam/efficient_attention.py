"""Layers of local and of dense attention, by the public module's name."""

from __future__ import annotations

from ... import nn
from ...nn import EfficientASAMLayer

__all__ = ["EfficientASAMLayer", "FlashASAMLayer"]


class FlashASAMLayer(nn.FlashASAMLayer):
    """``heddle.nn.FlashASAMLayer`` with compat="asam": attention over all keys, whatever window_size says, as the public layer has it.

    Raises:
      ValueError: use_local_attention=True, which the public layer takes and leaves.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        window_size: int = 128,
        dropout: float = 0.1,
        use_local_attention: bool = False,
    ) -> None:
        super().__init__(dim, num_heads, window_size, dropout, use_local_attention, compat="asam")
