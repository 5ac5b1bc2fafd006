"""The layer and the encoder, by the public module's name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ... import nn
from ...nn import ASAMEncoder, ASAMLayer

if TYPE_CHECKING:
    from ..._types import ASAMCompatName, ASAMPatternName

__all__ = ["ASAMConfig", "ASAMEncoder", "ASAMLayer", "AdaptiveSparseAttention"]


@dataclass
class ASAMConfig(nn.ASAMConfig):
    """``heddle.nn.ASAMConfig`` with the public defaults: pattern_type "hierarchical", and compat "asam"."""

    pattern_type: ASAMPatternName = "hierarchical"  #: as of ``heddle.nn.ASAMConfig``; "adaptive" needs compat None
    compat: ASAMCompatName | None = "asam"  #: None: as ``heddle.nn`` computes


AdaptiveSparseAttention = ASAMLayer
