"""The public package asam by its own names, over Heddle: ``from heddle.compat.asam.asam_layer import ASAMLayer, ASAMConfig``.

Layers compute what the public ones do (``compat="asam"`` of ``heddle.nn``), with their parameters. Where a public class is broken, what is
done in its place stands with the class. For layers whose work follows what is kept, take ``heddle.nn``: docs/asam.md.
"""

from __future__ import annotations

from ...nn import AdaptiveGate
from .asam_layer import ASAMConfig, ASAMLayer
from .sparse_patterns import ClusteredSparsePattern, LocalSparsePattern, RandomSparsePattern, StridedSparsePattern

__all__ = [
    "ASAMConfig",
    "ASAMLayer",
    "AdaptiveGate",
    "ClusteredSparsePattern",
    "LocalSparsePattern",
    "RandomSparsePattern",
    "StridedSparsePattern",
]


def __dir__() -> list[str]:
    return __all__
