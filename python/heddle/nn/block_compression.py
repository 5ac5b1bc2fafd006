"""Learned compression of blocks of keys, of heddle.nn, which is its public name."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..nsa import checks
from .linear import Linear


class BlockCompression(nn.Module):
    """One key and one value for each block of keys, learned: what ``heddle.nsa.parallel_nsa``, its reference functions and
    ``heddle.nsa.Cache`` take as ``compress``, and phi of Yuan et al., arXiv 2502.11089, Eq. 7.

    A position encoding inside the block is added to its rows, and a perceptron of two layers goes over all of them: one for
    keys and one for values, the same for every head. Its result is added to the block's mean and begins as 0, so that a new
    module compresses as without one.

    Args:
      head_size, block: D, and keys of a block.
      v_head_size: Dv; D if None.
      hidden: width between the two layers; block * head_size / 4, rounded up, if None.

    Raises:
      ValueError, TypeError: a size that is no int from 1 up.
    """

    def __init__(
        self,
        head_size: int,
        block: int,
        v_head_size: int | None = None,
        *,
        hidden: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        v_head_size = head_size if v_head_size is None else v_head_size
        sizes = {
            "head_size": head_size,
            "block": block,
            "v_head_size": v_head_size,
            "hidden": 1 if hidden is None else hidden,
        }
        for name, value in sizes.items():
            checks.integer("BlockCompression", name, value, 1)
        self.block, self.head_size, self.v_head_size = block, head_size, v_head_size
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.keys = _OfRows(self.head_size, block, hidden, made)
        self.values = _OfRows(self.v_head_size, block, hidden, made)

    def forward(self, k_blocks: torch.Tensor, v_blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Args:
          k_blocks, v_blocks: [N, block, Hkv, D], [N, block, Hkv, Dv].

        Returns:
          [N, Hkv, D], [N, Hkv, Dv].

        Raises:
          ValueError: blocks of another size than the module's. TypeError: what is no tensor.
        """
        for name, x, size in (("k_blocks", k_blocks, self.head_size), ("v_blocks", v_blocks, self.v_head_size)):
            if not isinstance(x, torch.Tensor):
                raise TypeError(f"[BlockCompression] {name} is {checks.shown(x)}: it must be a torch tensor")
            if x.dim() != 4 or x.shape[1] != self.block or x.shape[3] != size:
                raise ValueError(
                    f"[BlockCompression] {name} is {list(x.shape)}: it must be [N, {self.block}, Hkv, {size}]"
                )
        return self.keys(k_blocks), self.values(v_blocks)

    def extra_repr(self) -> str:
        return f"head_size={self.head_size}, block={self.block}, v_head_size={self.v_head_size}"


class _OfRows(nn.Module):
    def __init__(self, size: int, block: int, hidden: int | None, made: dict[str, Any]) -> None:
        super().__init__()
        hidden = -(-block * size // 4) if hidden is None else hidden
        self.positions = nn.Parameter(torch.empty(block, size, **made))
        nn.init.normal_(self.positions, std=0.02)
        self.into = Linear(block * size, hidden, activation="gelu_erf", **made)
        self.out = Linear(hidden, size, False, **made)  # what is added to all keys alike changes no weight
        assert self.out.weight is not None
        nn.init.zeros_(self.out.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = (x + self.positions[:, None]).transpose(1, 2).flatten(2)  # [N, Hkv, block * size]
        return x.mean(1) + self.out(self.into(rows))
