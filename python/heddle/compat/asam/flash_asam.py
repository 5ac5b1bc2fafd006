"""Modules around dense attention, by the public module's name."""

from __future__ import annotations

import torch
from torch.nn import Module

from ...functional import attention
from ...nn import HybridASAM
from .asam_layer import ASAMConfig

__all__ = ["FlashASAMLayer", "HybridASAM", "SparseFlashAttention"]


class FlashASAMLayer(Module):
    """A config and a function of dense attention: the public class has no parameters and no forward. The layer of this name that has
    them is that of ``efficient_attention``. It needs no flash-attn.

    Args:
      config: an ASAMConfig.
    """

    def __init__(self, config: ASAMConfig) -> None:
        super().__init__()
        self.config = config

    def flash_attention_forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False
    ) -> torch.Tensor:
        """[B, T, H, D] of q, k, v [B, T, H, D]; causal by the last key, as flash_attn_func has it."""
        return attention(q, k, v, causal="bottom_right" if causal else "none")


class SparseFlashAttention(Module):
    """Attention under a mask of pairs, by Heddle's dense kernels, which compute what the mask leaves out, too.

    Args:
      config: an ASAMConfig.
    """

    def __init__(self, config: ASAMConfig) -> None:
        super().__init__()
        self.config = config

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pattern_mask: torch.Tensor) -> torch.Tensor:
        """[B, T, H, D] of q, k, v [B, T, H, D] and pattern_mask, bool [T, T]; 0 in rows that it leaves no key."""
        return attention(q, k, v, mask=pattern_mask[None, None])
