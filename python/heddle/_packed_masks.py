"""Masks of pairs as words of bits. heddle.patterns has the public name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .hosts import is_torch

if TYPE_CHECKING:
    from ._types import Array


def pack_masks(tiles: Array) -> Array:
    """masks of ``heddle.sparse_attention``, int32 [M, query_rows, ceil(block_size / 32)], of bool [M, query_rows, block_size].

    Args:
      tiles: a numpy array or a torch tensor, true where the row meets the key.
    """
    x: Any = tiles
    wide = -(-x.shape[-1] // 32) * 32
    if is_torch(x):
        import torch

        bits = torch.nn.functional.pad(x.bool(), (0, wide - x.shape[-1])).unflatten(-1, (-1, 32))
        places = torch.arange(32, device=x.device)
        words = (bits.long() << places).sum(-1)
        return torch.where(words < 2**31, words, words - 2**32).int()  # type: ignore[return-value]
    x = np.asarray(x, bool)
    padded = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, wide - x.shape[-1])])
    return np.packbits(padded, axis=-1, bitorder="little").view("<i4").astype(np.int32)  # type: ignore[return-value]
