"""heddle.nn under the names of an early study of FP4 linear layers and fused attention, so that its programs run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ..functional import attention
from .linear import Linear

if TYPE_CHECKING:
    from typing_extensions import Self

    from .._types import ActivationName, FormatName, RuleName


class FusedFP4Linear(Linear):
    """A linear layer with its activation ("gelu", by erf, "relu" or "none"); ``quantize()`` makes it FP4 with a scale a row.

    Better formats than the study's are a word away: ``quantize("nvfp4")``. use_triton means nothing: there is one kernel.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        activation: Literal["gelu"] | ActivationName = "gelu",
        use_triton: bool = True,
    ) -> None:
        super().__init__(in_features, out_features, bias, activation="gelu_erf" if activation == "gelu" else activation)

    def quantize(
        self,
        format: FormatName = "e2m1_row",
        *,
        rule: RuleName | None = None,
        importance: torch.Tensor | None = None,
    ) -> Self:
        """rule: "plain" for the study's own format if None. A layer that is quantised stays as it is."""
        if self.format is None:
            rule = "plain" if rule is None and format == "e2m1_row" else rule
            super().quantize(format, rule=rule, importance=importance)
        return self


class FlashAttention(nn.Module):
    """Self-attention over [B, S, d_model] with packed projections ``qkv`` and ``o_proj``. Dropout, in training, is the
    study's: of the result."""

    def __init__(self, d_model: int, n_heads: int, dropout: float = 0.1, use_triton: bool = True) -> None:
        super().__init__()
        if d_model % n_heads != 0:
            raise ValueError(
                f"[FlashAttention] d_model is {d_model} and n_heads {n_heads}: n_heads must divide d_model"
            )
        self.n_heads = n_heads
        self.qkv, self.o_proj = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """mask: bool [B, S, S], True = attend."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.n_heads, -1)).unbind(2)
        o = attention(q, k, v, mask=None if mask is None else mask[:, None])
        return self.dropout(self.o_proj(o.flatten(2)))


class OptimizedTransformerBlock(nn.Module):
    """Pre-norm block of ``FlashAttention`` and a feed-forward network of ``FusedFP4Linear`` (use_fp4) or float layers;
    ``quantize()`` on its layers makes them FP4. use_checkpoint: in training, activations are computed again."""

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        d_ff: int,
        dropout: float = 0.1,
        use_fp4: bool = True,
        use_checkpoint: bool = False,
    ) -> None:
        super().__init__()
        self.use_checkpoint = use_checkpoint
        self.attn = FlashAttention(d_model, n_heads, dropout)
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        layer: Any = FusedFP4Linear if use_fp4 else lambda k, n, activation: Linear(k, n, activation=activation)
        activation = "gelu" if use_fp4 else "gelu_erf"
        self.ffn = nn.Sequential(layer(d_model, d_ff, activation=activation), layer(d_ff, d_model, activation="none"))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        if self.use_checkpoint and self.training:
            return checkpoint(self._block, x, mask, use_reentrant=False)
        return self._block(x, mask)

    def _block(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        x = x + self.dropout(self.attn(self.norm1(x), mask))
        up, down = self.ffn
        return x + self.dropout(down(up(x, norm=self.norm2)))
