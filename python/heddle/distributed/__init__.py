"""Attention over several processes: each rank holds some rows of one long problem, and together they compute what one process would.

A ``plan`` says which rank has which rows, what each sends, and how even the work is; it needs no process group. ``shard`` takes a
rank's rows, ``attention`` is its share of the call, with gradients, over a group of ``torch.distributed``. docs/distributed.md has
an example. Imports torch.
"""

from __future__ import annotations

from ..hosts import torch as _needs_torch  # noqa: F401
from . import operators as _operators  # noqa: F401
from .attention import attention
from .decode import decode
from .nsa import parallel_nsa
from .peers import kept_memory, release_memory
from .plan import Costs, Plan, Run, SchemeCost, plan
from .sdpa import SDPA, sdpa
from .shards import shard, unshard
from .sparse import sparse_attention

__all__ = [
    "SDPA",
    "Costs",
    "Plan",
    "Run",
    "SchemeCost",
    "attention",
    "decode",
    "kept_memory",
    "parallel_nsa",
    "plan",
    "release_memory",
    "sdpa",
    "shard",
    "sparse_attention",
    "unshard",
]


def __dir__() -> list[str]:
    return __all__
