"""Selection by input: the key blocks that q and k themselves say matter, as lists for ``heddle.sparse_attention``. docs/sparse.md has
what each measure costs and which of them know no later position. Imports torch; every call runs on the tensors' device, and nothing of
them is read on the host.

>>> from heddle import selection
>>> lists = selection.antidiagonal(q, k, top_p=0.9, causal=True)        # q [B, S, H, D]
>>> out = heddle.sparse_attention(q, k, v, **lists)
"""

from __future__ import annotations

from ..hosts import torch as _needs_torch  # noqa: F401
from .calls import antidiagonal, pooled, vertical_slash

__all__ = ["antidiagonal", "pooled", "vertical_slash"]


def __dir__() -> list[str]:
    return __all__
