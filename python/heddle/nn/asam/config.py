"""What a layer of adaptive sparse attention is made of, of heddle.nn, which is its public name."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...nsa import checks

if TYPE_CHECKING:
    from ..._types import ASAMCompatName, ASAMGateName, ASAMPatternName

#: The patterns that pattern_logits choose from, in their order.
CHOICES: tuple[ASAMPatternName, ...] = ("local", "strided", "random", "clustered")
#: Values of pattern_type.
PATTERNS: tuple[ASAMPatternName, ...] = ("adaptive", *CHOICES, "hierarchical")
GATES: tuple[ASAMGateName, ...] = ("hard", "soft")
BLOCK_SIZES = (16, 32, 64, 128)


@dataclass
class ASAMConfig:
    """Of ``heddle.nn.ASAMLayer``, ``ASAMEncoder`` and ``HybridASAM``. The first ten fields are those of the public package asam, in
    its order and with its defaults but for pattern_type; docs/asam.md says what differs.

    Raises:
      ValueError, TypeError: a value that cannot be, with its name and the rule.
    """

    dim: int = 512  #: width of x
    num_heads: int = 8  #: query heads, and as many of keys and values
    dim_head: int = 64  #: head size, from 1 to 256
    dropout: float = 0.1  #: behind the projections and in the feed-forward network; none on attention weights
    pattern_type: ASAMPatternName = "adaptive"  #: "adaptive" (chosen by pattern_logits), or the pattern of all heads
    window_size: int = 128  #: of "local": keys up to half of it to either side, in whole tiles
    stride: int = 32  #: of "strided": every stride-th block of keys
    num_clusters: int = 32  #: of "clustered"
    use_adaptive_gate: bool = (
        True  #: whether a gate decides between the pattern and all keys; without it the pattern is all
    )
    gate_hidden_dim: int = 128  #: width of the gate's layers
    use_gradient_checkpointing: bool = False  #: compute the layer again in the backward, and keep nothing of it
    causal: bool = False  #: a row attends no later position, and its gate, pattern and selection know none
    block_size: int = 64  #: rows and keys of a tile: 16, 32, 64 or 128
    gate: ASAMGateName = "hard"  #: "hard": the pattern or all keys; "soft": keys outside the pattern weigh 1 - gate
    num_random: int = 128  #: of "random": keys of a row, in whole blocks
    seed: int = 42  #: of "random"
    scales: tuple[int, ...] = (4, 16, 64)  #: of "hierarchical": strides in blocks
    compat: ASAMCompatName | None = None  #: "asam": the public layer's own formulae, token by token, dense

    def __post_init__(self) -> None:
        for name in ("dim", "num_heads", "dim_head", "window_size", "stride", "num_clusters", "gate_hidden_dim"):
            checks.integer("ASAMConfig", name, getattr(self, name), 1)
        checks.integer("ASAMConfig", "num_random", self.num_random, 1)
        checks.integer("ASAMConfig", "seed", self.seed, 0)
        if self.dim_head > 256:
            raise ValueError(f"[ASAMConfig] dim_head is {self.dim_head}: it must be from 1 to 256")
        if not (isinstance(self.dropout, (int, float)) and 0 <= self.dropout < 1):
            raise ValueError(f"[ASAMConfig] dropout is {self.dropout!r}: it must be from 0 up and below 1")
        checks.one_of("ASAMConfig", "pattern_type", self.pattern_type, PATTERNS)
        checks.one_of("ASAMConfig", "gate", self.gate, GATES)
        for name in ("use_adaptive_gate", "use_gradient_checkpointing", "causal"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"[ASAMConfig] {name} is {getattr(self, name)!r}: it must be True or False")
        if self.block_size not in BLOCK_SIZES:
            raise ValueError(f"[ASAMConfig] block_size is {self.block_size!r}: it must be 16, 32, 64 or 128")
        self.scales = tuple(self.scales)
        if not self.scales or len(self.scales) > 4:
            raise ValueError(f"[ASAMConfig] scales has {len(self.scales)} strides: it must have from 1 to 4")
        for scale in self.scales:
            checks.integer("ASAMConfig", "an element of scales", scale, 1)
        check_compat("ASAMConfig", self.compat)
        if self.pattern_type == "adaptive" and not self.use_adaptive_gate:
            raise ValueError(
                "[ASAMConfig] pattern_type is 'adaptive' and use_adaptive_gate False: the gate's features choose the pattern, so "
                f"without it pattern_type must be one of {', '.join(map(repr, PATTERNS[1:]))}"
            )
        if self.compat is not None and (self.pattern_type == "adaptive" or self.causal):
            raise ValueError(
                f"[ASAMConfig] compat is {self.compat!r} and pattern_type {self.pattern_type!r}, causal {self.causal}: the public "
                f"layer is not causal and has one pattern, of {', '.join(map(repr, PATTERNS[1:]))}"
            )

    @property
    def scale(self) -> float:
        """Of the scores."""
        return 1 / math.sqrt(self.dim_head)


def check_compat(operation: str, compat: object) -> None:
    if compat is not None:
        checks.one_of(operation, "compat", compat, ("asam",))
