"""The Transformer block of heddle.nn, which is its public name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from ..functional import attention
from .linear import Linear

if TYPE_CHECKING:
    from .._types import ActivationName, BlockNormName, CausalName

_NORMS: dict[str, Any] = {"layer_norm": nn.LayerNorm, "rms_norm": nn.RMSNorm}


class TransformerBlock(nn.Module):
    """Attention and a feed-forward network, each with a norm and a residual, over x [B, S, dim].

    Its four linear layers are ``heddle.nn.Linear``: ``qkv``, ``out``, ``up`` (gate and up rows in turn for "swiglu") and
    ``down``. Each may have a format of its own; quantised, a norm in front, the activation and the residual are part of the
    layer's call.

    Args:
      dim, heads, hidden: the width, the query heads, and the outputs of ``up`` after the activation.
      kv_heads: key/value heads, by which heads is divisible; heads if None.
      norm: "layer_norm" or "rms_norm"; eps: its epsilon.
      norm_first: x + f(norm(x)); else norm(x + f(x)).
      activation: of the feed-forward network: "gelu_erf", "gelu_tanh", "relu", "silu" or "swiglu".
      bias: whether the linear layers (and LayerNorms) have one.
      dropout: in training, of attention's probabilities, of the feed-forward's inner values and of both results.
      causal: "none", "top_left" or "bottom_right", as for ``heddle.attention``.
      checkpointing: in training, keeps x alone and computes the block again in the backward.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        hidden: int,
        *,
        kv_heads: int | None = None,
        norm: BlockNormName = "layer_norm",
        eps: float = 1e-5,
        norm_first: bool = True,
        activation: ActivationName = "gelu_erf",
        bias: bool = True,
        dropout: float = 0.0,
        causal: CausalName = "none",
        checkpointing: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        if dim % heads != 0 or heads % kv_heads != 0:
            raise ValueError(
                f"[TransformerBlock] dim is {dim}, heads {heads}, kv_heads {kv_heads}: heads must divide dim, "
                "and kv_heads heads"
            )
        if norm not in _NORMS:
            raise ValueError(f"[TransformerBlock] norm is '{norm}': it must be one of {', '.join(_NORMS)}")
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, dim // heads
        self.norm_first, self.checkpointing = norm_first, checkpointing
        self.causal: CausalName = causal
        self.dropout = dropout
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        norm_made = made | ({"bias": bias} if norm == "layer_norm" else {})
        self.norm1: nn.LayerNorm | nn.RMSNorm = _NORMS[norm](dim, eps=eps, **norm_made)
        self.norm2: nn.LayerNorm | nn.RMSNorm = _NORMS[norm](dim, eps=eps, **norm_made)
        self.qkv = Linear(dim, (heads + 2 * kv_heads) * self.head_dim, bias, **made)
        self.out = Linear(dim, dim, bias, **made)
        rows = 2 * hidden if activation == "swiglu" else hidden
        self.up = Linear(dim, rows, bias, activation=activation, **made)
        self.down = Linear(hidden, dim, bias, **made)

    @classmethod
    def from_torch(cls, layer: nn.TransformerEncoderLayer, **options: Any) -> TransformerBlock:
        """With copies of the weights of a torch.nn.TransformerEncoderLayer, in its mode (training or not). x is [B, S, dim],
        also where the layer is not batch_first. options: causal and checkpointing."""
        attend = layer.self_attn
        if not isinstance(layer.norm1, nn.LayerNorm):
            raise ValueError("[TransformerBlock.from_torch] the layer has no LayerNorm")
        names: dict[Any, ActivationName] = {F.relu: "relu", torch.relu: "relu", F.gelu: "gelu_erf", F.silu: "silu"}
        activation = names.get(layer.activation)
        if isinstance(layer.activation, nn.GELU):
            activation = "gelu_tanh" if layer.activation.approximate == "tanh" else "gelu_erf"
        elif isinstance(layer.activation, (nn.ReLU, nn.SiLU)):
            activation = "relu" if isinstance(layer.activation, nn.ReLU) else "silu"
        if activation is None:
            raise ValueError(
                f"[TransformerBlock.from_torch] activation is {layer.activation}: it must be ReLU, GELU or SiLU"
            )
        block = cls(
            attend.embed_dim,
            attend.num_heads,
            layer.linear1.out_features,
            eps=layer.norm1.eps,
            norm_first=layer.norm_first,
            activation=activation,
            bias=layer.linear1.bias is not None,
            dropout=layer.dropout.p,
            device=layer.linear1.weight.device,
            dtype=layer.linear1.weight.dtype,
            **options,
        )
        with torch.no_grad():
            pairs: Any = (
                (block.qkv, attend.in_proj_weight, attend.in_proj_bias),
                (block.out, attend.out_proj.weight, attend.out_proj.bias),
                *(
                    (to, of.weight, of.bias)
                    for to, of in (
                        (block.up, layer.linear1),
                        (block.down, layer.linear2),
                        (block.norm1, layer.norm1),
                        (block.norm2, layer.norm2),
                    )
                ),
            )
            for to, weight, bias in pairs:
                to.weight.copy_(weight)
                if bias is not None:
                    to.bias.copy_(bias)
        return block.train(layer.training)

    def forward(self, x: torch.Tensor, *, mask: torch.Tensor | None = None) -> torch.Tensor:
        """mask: bool, broadcastable to [B, heads, S, S]; True = attend."""
        if self.checkpointing and self.training and torch.is_grad_enabled():
            return checkpoint(self._block, x, mask, use_reentrant=False)
        return self._block(x, mask)

    def _block(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        if self.norm_first:
            x = self._attend(x, self.norm1, mask)
            return self._feed_forward(x, self.norm2)
        x = self.norm1(self._attend(x, None, mask))
        return self.norm2(self._feed_forward(x, None))

    def _attend(self, x: torch.Tensor, norm: nn.Module | None, mask: torch.Tensor | None) -> torch.Tensor:
        rows = self.qkv(x, norm=norm).unflatten(-1, (self.heads + 2 * self.kv_heads, self.head_dim))
        q, k, v = rows.split((self.heads, self.kv_heads, self.kv_heads), dim=2)
        p = self.dropout if self.training else 0.0
        return self._add(self.out, attention(q, k, v, causal=self.causal, mask=mask, dropout_p=p).flatten(2), x)

    def _feed_forward(self, x: torch.Tensor, norm: nn.Module | None) -> torch.Tensor:
        return self._add(self.down, self._dropped(self.up(x, norm=norm)), x)

    def _add(self, layer: Linear, inner: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if self.dropout > 0 and self.training:
            return x + self._dropped(layer(inner))
        return layer(inner, residual=x)

    def _dropped(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, self.dropout, self.training) if self.dropout > 0 else x

    def extra_repr(self) -> str:
        order = "norm first" if self.norm_first else "norm last"
        return f"heads={self.heads}, kv_heads={self.kv_heads}, head_dim={self.head_dim}, {order}, causal={self.causal}"
