"""Layers of local attention by the public package's names, of heddle.nn, which is their public name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ...functional import attention
from ...nsa.checks import integer
from . import checks
from .config import check_compat
from .layer import Info, feed_forward

if TYPE_CHECKING:
    from ..._types import ASAMCompatName


def check_sizes(layer: str, dim: int, num_heads: int, window_size: int, dropout: float) -> None:
    for name, value in (("dim", dim), ("num_heads", num_heads), ("window_size", window_size)):
        integer(layer, name, value, 1)
    if dim % num_heads != 0:
        raise ValueError(f"[{layer}] dim is {dim} and num_heads {num_heads}: num_heads must divide dim")
    if not (isinstance(dropout, (int, float)) and 0 <= dropout < 1):
        raise ValueError(f"[{layer}] dropout is {dropout!r}: it must be from 0 up and below 1")


def share_of_window(length: int, reach: int | None, causal: bool, device: torch.device) -> torch.Tensor:
    """float32 []: of the pairs that causality leaves, those at most `reach` apart; all if None."""
    if reach is None:
        return torch.ones((), device=device)
    at = torch.arange(length, device=device)
    before, after = at.clamp(max=reach), (length - 1 - at).clamp(max=reach)
    all_pairs = length * (length + 1) / 2 if causal else length * length
    kept = (before + 1).sum() if causal else (before + after + 1).sum()
    return kept.float() / all_pairs


class EfficientASAMLayer(nn.Module):
    """A Transformer layer of local attention: y = x + out_proj(attention(norm(x))), then y + ffn(y), over x [B, T, dim].

    A row attends the keys at most window_size / 2 positions away where T is above window_size, and all keys else, as in the public
    layer; here by a window, at the cost of the pairs in it, where that has a mask over all of them. Names and shapes of
    parameters are the same.

    Args:
      dim, num_heads: the width of x, and heads of size dim / num_heads.
      window_size: see above.
      dropout: on attention weights, behind out_proj and in the feed-forward network.
      use_local_attention: False: all keys at any T.
      causal: a row attends no later position.

    Raises:
      ValueError, TypeError: a size that is no int from 1 up, heads that do not divide dim, a dropout below 0 or from 1 up.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        window_size: int = 128,
        dropout: float = 0.1,
        use_local_attention: bool = True,
        *,
        causal: bool = False,
    ) -> None:
        super().__init__()
        self.layer = type(self).__name__
        check_sizes(self.layer, dim, num_heads, window_size, dropout)
        self.dim, self.num_heads, self.head_dim = dim, num_heads, dim // num_heads
        self.window_size, self.use_local_attention, self.causal = window_size, use_local_attention, causal
        self.qkv = nn.Linear(dim, dim * 3, bias=False)
        self.out_proj = nn.Linear(dim, dim, bias=False)
        self.dropout = nn.Dropout(dropout)
        self.norm = nn.LayerNorm(dim)
        self.ffn = feed_forward(dim, dropout)
        nn.init.xavier_uniform_(self.qkv.weight)
        nn.init.xavier_uniform_(self.out_proj.weight)

    def forward(
        self,
        x: torch.Tensor,
        mask: torch.Tensor | None = None,
        return_info: bool = False,
        *,
        lengths: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, Info | None]:
        """
        Args:
          x: [B, T, dim], T any from 1 up.
          mask: bool, broadcastable to [B, H, T, T], true where a key is attended. Rows that have none give 0 before out_proj.
          return_info: whether to return what is attended.
          lengths: int32 [B], how many keys of each sequence are in use, from 1 up; costs less than a mask that says the same.

        Returns:
          y [B, T, dim], and None or a dict of ``sparse_ratio``, float32 []: the share of pairs in the window, of those that causality
          leaves. Mask and lengths do not count.

        Raises:
          ValueError: x of another width, a mask that does not broadcast. TypeError: a mask that is not bool.
        """
        checks.width(self.layer, x, self.dim)
        mask = checks.token_mask(self.layer, mask, x, self.num_heads)
        if lengths is not None:
            lengths = checks.used_lengths(self.layer, None, lengths, x)
        length = x.shape[1]
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.num_heads, self.head_dim)).unbind(2)
        reach = self.window_size // 2 if self.use_local_attention and length > self.window_size else None
        options: dict[str, Any] = {"mask": mask, "seqused_k": lengths, "causal": "top_left" if self.causal else "none"}
        if reach is not None:
            options["window"] = (reach, reach)
            if lengths is not None and not self.causal:
                options["q_offset"] = 0  # else rows are the last positions of the keys in use
        o = attention(q, k, v, dropout_p=self.dropout.p if self.training else 0.0, **options)
        y = x + self.dropout(self.out_proj(o.flatten(2)))
        y = y + self.ffn(y)
        return y, {"sparse_ratio": share_of_window(length, reach, self.causal, x.device)} if return_info else None


class FlashASAMLayer(EfficientASAMLayer):
    """``EfficientASAMLayer`` by the name of the public layer that turns local attention off.

    That one attends all keys whatever window_size says, and reports a sparse ratio of 1. Here the window holds, since the kernels
    take it; ``compat="asam"`` attends all keys, as a model that was trained so needs.

    Args:
      dim, num_heads, window_size, dropout, use_local_attention, causal: as for ``EfficientASAMLayer``.
      compat: "asam": as the public layer.

    Raises:
      ValueError: use_local_attention beside compat="asam", which the public layer takes and leaves.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        window_size: int = 128,
        dropout: float = 0.1,
        use_local_attention: bool | None = None,
        *,
        causal: bool = False,
        compat: ASAMCompatName | None = None,
    ) -> None:
        check_compat("FlashASAMLayer", compat)
        if compat is not None and use_local_attention:
            raise ValueError(
                f"[FlashASAMLayer] use_local_attention is {use_local_attention} beside compat='asam': the public layer attends all "
                "keys whatever it is told; leave it out, or leave compat out"
            )
        is_local = compat is None if use_local_attention is None else use_local_attention
        super().__init__(dim, num_heads, window_size, dropout, is_local, causal=causal)
