"""The public layer of windows, by its module's name."""

from __future__ import annotations

import torch
from torch import nn

from ...functional import attention
from ...nn import AdaptiveGate
from ...nn.asam.checks import width
from ...nn.asam.efficient import check_sizes, share_of_window
from ...nn.asam.layer import feed_forward
from ...nsa.checks import one_of

__all__ = ["OptimizedASAMLayer"]

STRIDE, STRIDED_REACH = 32, 16  # of "strided"


class OptimizedASAMLayer(nn.Module):
    """y = x + out_proj(attention(norm(x))), then y + ffn(y), over x [B, T, dim].

    Of "local" a row attends the keys at most window_size / 2 away. Of "strided" it has the mean of two softmaxes, over the keys at
    most 16 away and over every 32nd from the first on, in which a key may be in both, as the public layer has it.

    Where the public layer pads with zeros at the ends of a sequence, and lets these take part in the softmax, here a row attends the keys
    that there are: the rows within half a window of an end differ. Its gate says something in the info and changes nothing, as in the
    public layer, and is not computed otherwise. Its fallback of any other pattern to "local" is refused.

    Args:
      dim, num_heads: the width of x, and heads of size dim / num_heads.
      window_size: of "local".
      dropout: on attention weights, behind out_proj and in the feed-forward network.
      use_adaptive_gate: whether there is a gate, of 8 heads whatever num_heads is.
      pattern_type: "local" or "strided".

    Raises:
      ValueError, TypeError: a size that is no int from 1 up, heads that do not divide dim, another pattern.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        window_size: int = 128,
        dropout: float = 0.1,
        use_adaptive_gate: bool = True,
        pattern_type: str = "local",
    ) -> None:
        super().__init__()
        check_sizes("OptimizedASAMLayer", dim, num_heads, window_size, dropout)
        one_of("OptimizedASAMLayer", "pattern_type", pattern_type, ("local", "strided"))
        self.dim, self.num_heads, self.head_dim = dim, num_heads, dim // num_heads
        self.window_size, self.pattern_type = window_size, pattern_type
        self.qkv = nn.Linear(dim, dim * 3)
        self.out_proj = nn.Linear(dim, dim)
        self.dropout = nn.Dropout(dropout)
        self.use_adaptive_gate = use_adaptive_gate
        self.adaptive_gate: AdaptiveGate | None = AdaptiveGate(dim) if use_adaptive_gate else None
        self.norm = nn.LayerNorm(dim)
        self.ffn = feed_forward(dim, dropout)
        for projection in (self.qkv, self.out_proj):
            nn.init.xavier_uniform_(projection.weight)
            nn.init.zeros_(projection.bias)

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor | None = None, return_info: bool = False
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor] | None]:
        """
        Args:
          x: [B, T, dim].
          mask: None; the public layer takes one and leaves it.
          return_info: whether to return ``gate_values`` and ``confidence``, if there is a gate, and ``sparse_ratio``, float32 []: the
            share of pairs that are attended.

        Returns:
          y [B, T, dim], and None or the dict.

        Raises:
          ValueError: x of another width, a mask.
        """
        width("OptimizedASAMLayer", x, self.dim)
        if mask is not None:
            raise ValueError(
                "[OptimizedASAMLayer] mask is given: the public layer leaves it; give none, or take heddle.nn.EfficientASAMLayer"
            )
        length, normed = x.shape[1], self.norm(x)
        q, k, v = self.qkv(normed).unflatten(-1, (3, self.num_heads, self.head_dim)).unbind(2)
        dropped = self.dropout.p if self.training else 0.0
        reach = self.window_size // 2 if self.pattern_type == "local" else STRIDED_REACH
        o = attention(q, k, v, window=(reach, reach), dropout_p=dropped)
        if self.pattern_type == "strided":
            o = (o + attention(q, k[:, ::STRIDE], v[:, ::STRIDE], dropout_p=dropped)) / 2
        y = x + self.dropout(self.out_proj(o.flatten(2)))
        y = y + self.ffn(y)
        if not return_info:
            return y, None
        info = {"sparse_ratio": share_of_window(length, reach, False, x.device)}
        if self.pattern_type == "strided":
            at = torch.arange(length, device=x.device)
            near = (at[:, None] - at[::STRIDE]).abs() <= reach
            info["sparse_ratio"] = info["sparse_ratio"] + (~near).sum() / length**2
        if self.adaptive_gate is not None:
            info["gate_values"], info["confidence"], _ = self.adaptive_gate(normed)
        return y, info
