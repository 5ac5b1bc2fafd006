"""Attention of a window and of strided keys joined by a gate, of heddle.nn, which is its public name."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from ...functional import attention, merge_attention
from ...nsa.checks import integer
from . import checks, patterns
from .config import ASAMConfig
from .layer import Info

STRIDE = 32  # of the public module's global keys


class HybridASAM(nn.Module):
    """Attention of a row over the keys near it and over strided ones far from it, with projections, over x [B, T, dim].

    Near are the tiles with a pair at most local_window_size / 2 apart, far those of every config.stride-th block of keys that are not
    near. They are two disjoint sets, joined in one softmax in which near keys weigh g = sigmoid(combine_gate(x)) and far ones 1 - g.

    The public module calls a ``combine_gate`` that it never makes, and multiplies it in a shape that does not fit, so it cannot run; its
    two sets also share keys. Here ``combine_gate`` is a Linear(dim, 1) that begins as 0 (g = 1/2) and stays as it is where a
    state dict has none. With config.compat="asam" the module is what the public one was to be: g * near + (1 - g) * far of two softmaxes,
    near being for each run of local_window_size rows the keys from half a run before to half a run behind it, and far every 32nd key.

    Args:
      config: dim, num_heads, dim_head, stride, block_size, causal and compat are used.
      local_window_size: see above.
      use_flash_local: True, and there for its name: Heddle has one attention.

    Raises:
      ValueError, TypeError: a size that is no int from 1 up; what is no ASAMConfig.
    """

    def __init__(self, config: ASAMConfig, local_window_size: int = 512, use_flash_local: bool = True) -> None:
        super().__init__()
        if not isinstance(config, ASAMConfig):
            raise TypeError(f"[HybridASAM] config is a {type(config).__name__}: it must be an ASAMConfig")
        self.config = config
        self.local_window_size = integer("HybridASAM", "local_window_size", local_window_size, 1)
        self.use_flash_local = use_flash_local
        inner = config.dim_head * config.num_heads
        self.to_qkv = nn.Linear(config.dim, inner * 3, bias=False)
        self.to_out = nn.Linear(inner, config.dim)
        self.combine_gate = nn.Linear(config.dim, 1)
        nn.init.zeros_(self.combine_gate.weight)
        nn.init.zeros_(self.combine_gate.bias)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None, return_info: bool = False) -> Any:
        """
        Args:
          x: [B, T, dim].
          mask: bool [B, T] or [B, 1, 1, T], the keys in use, which come first; not with compat="asam", whose public module takes and
            leaves it.
          return_info: whether to return what is attended.

        Returns:
          [B, T, dim]; with return_info a pair with a dict of ``gate_values`` [B, 1, T], g, and ``sparse_ratio``, as of ``ASAMLayer``.

        Raises:
          ValueError: x of another width, a mask that cannot be served. TypeError: a mask that is not bool.
        """
        config, length = self.config, x.shape[-2]
        checks.width("HybridASAM", x, config.dim)
        logits = self.combine_gate(x).float().transpose(1, 2)  # [B, 1, T]
        q, k, v = self.to_qkv(x).unflatten(-1, (3, config.num_heads, config.dim_head)).unbind(2)
        if config.compat is not None:
            if mask is not None:
                raise ValueError(
                    "[HybridASAM] mask is given beside compat='asam': the public module leaves it; give none"
                )
            o, ratio = self._mixture(q, k, v, logits.sigmoid())
        else:
            lengths = checks.used_lengths("HybridASAM", mask, None, x)
            across = patterns.tiles_across(length, config.block_size)
            allowed = patterns.allowed(across, config, lengths, x.device)
            near = patterns.local(across, self.local_window_size // 2, config.block_size, x.device) & allowed
            far = patterns.columns(across, config.stride, x.device) & allowed & ~near
            results = [patterns.attend(q, k, v, tiles, config, lengths) for tiles in (near, far)]
            weights = nn.functional.logsigmoid(logits), nn.functional.logsigmoid(-logits)
            o, _ = merge_attention([o for o, _ in results], [lse + w for (_, lse), w in zip(results, weights)])
            ratio = patterns.share_of_pairs(near | far, length, config, lengths)
        y = self.to_out(o.flatten(2))
        if not return_info:
            return y
        info: Info = {"gate_values": logits.sigmoid(), "sparse_ratio": ratio}
        return y, info

    def _mixture(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gate: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The public formulae: o [B, T, H, D], and float32 []: the share of pairs in either set."""
        length, run = q.shape[1], self.local_window_size
        near, pairs = [], 0
        for first in range(0, length, run):
            begin, end = max(0, first - run // 2), min(length, first + run + run // 2)
            rows = q[:, first : first + run]
            near.append(attention(rows, k[:, begin:end], v[:, begin:end]))
            outside = math.ceil(length / STRIDE) - len(range(-(-begin // STRIDE) * STRIDE, end, STRIDE))
            pairs += rows.shape[1] * (end - begin + outside)
        far = attention(q, k[:, ::STRIDE], v[:, ::STRIDE])
        of_near = gate.transpose(1, 2)[..., None].to(far.dtype)
        ratio = torch.tensor(pairs / length**2, device=q.device)
        return of_near * torch.cat(near, 1) + (1 - of_near) * far, ratio

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # Not for what a parameter of this module alone is: those are all absent, or none is.
        names = [f"{prefix}combine_gate.{name}" for name in ("weight", "bias")]
        if not any(name in state_dict for name in names):
            state_dict.update(zip(names, (self.combine_gate.weight.detach(), self.combine_gate.bias.detach())))
        super()._load_from_state_dict(state_dict, prefix, *args)
