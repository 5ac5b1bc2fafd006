"""Native sparse attention (NSA: Yuan et al., arXiv 2502.11089): its reference functions, in plain torch, under the names of
fla-org/native-sparse-attention, and two of its steps by kernels. docs/nsa.md has what they compute. Imports torch.

naive_* are the yardstick of kernels: written to be read, not run for speed; exact in what they mean, with gradients by
autograd, in float64 if the operands are, and calling no kernel of Heddle's. pool_keys and select_blocks are kernels: keys of
blocks become their mean, and scores the lists of blocks that heddle.sparse_attention takes.

>>> import torch, heddle.nsa
>>> q, k, v = torch.randn(1, 512, 8, 64), torch.randn(1, 512, 2, 64), torch.randn(1, 512, 2, 64)
>>> g_cmp, g_slc, g_swa = torch.rand(3, 1, 512, 8)
>>> o = heddle.nsa.naive_nsa_with_compression(q, k, v, g_cmp, g_slc, g_swa, 4, block_size=32, window_size=64)
"""

from __future__ import annotations

from ..hosts import torch as _needs_torch  # noqa: F401
from .kernels import pool_keys, select_blocks
from .reference import (
    naive_nsa,
    naive_nsa_compression,
    naive_nsa_compression_varlen,
    naive_nsa_with_compression,
)
from .sharing import SharingOptions, presets

__all__ = [
    "SharingOptions",
    "naive_nsa",
    "naive_nsa_compression",
    "naive_nsa_compression_varlen",
    "naive_nsa_with_compression",
    "pool_keys",
    "presets",
    "select_blocks",
]
