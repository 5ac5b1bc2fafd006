"""Native sparse attention (NSA: Yuan et al., arXiv 2502.11089) under the names of fla-org/native-sparse-attention. docs/nsa.md
has what is computed. Imports torch.

``parallel_nsa`` and ``nsa_with_cache`` run Heddle's kernels. The naive functions are their yardstick, in plain torch: written
to be read, not run for speed; exact in what they mean, with gradients by autograd, in float64 if the operands are.

>>> import torch, heddle.nsa
>>> q, k, v = torch.randn(1, 512, 8, 64), torch.randn(1, 512, 2, 64), torch.randn(1, 512, 2, 64)
>>> g_cmp, g_slc, g_swa = torch.rand(3, 1, 512, 8)
>>> o = heddle.nsa.parallel_nsa(q, k, v, g_cmp, g_slc, g_swa, block_counts=4, block_size=32, window_size=64)
"""

from __future__ import annotations

from ..hosts import torch as _needs_torch  # noqa: F401
from .cache import Cache, nsa_with_cache
from .explanation import explain_nsa_step, explain_pool_keys, explain_select_blocks
from .kernels import extend_pooled_keys, pool_keys, select_blocks
from .parallel import parallel_nsa
from .reference import (
    naive_nsa,
    naive_nsa_compression,
    naive_nsa_compression_varlen,
    naive_nsa_with_compression,
)
from .sharing import SharingOptions, presets
from .sharing_report import SharingReport, sharing_report
from .whole_explanation import ParallelExplanation, explain_parallel_nsa

__all__ = [
    "Cache",
    "ParallelExplanation",
    "SharingOptions",
    "SharingReport",
    "explain_nsa_step",
    "explain_parallel_nsa",
    "explain_pool_keys",
    "explain_select_blocks",
    "extend_pooled_keys",
    "naive_nsa",
    "naive_nsa_compression",
    "naive_nsa_compression_varlen",
    "naive_nsa_with_compression",
    "nsa_with_cache",
    "parallel_nsa",
    "pool_keys",
    "presets",
    "select_blocks",
    "sharing_report",
]


def __dir__() -> list[str]:
    return __all__
