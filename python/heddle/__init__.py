"""Heddle: attention for Transformers, exact, forward and backward, over dense, packed and cached keys.

The package is a thin layer on the C++ library of the same name. It takes numpy arrays, any array that supports DLPack, on
GPUs too, and torch tensors (with autograd and ``torch.compile``); torch is not imported before a torch tensor is seen, or one of
``heddle.compat.asam``, ``heddle.distributed``, ``heddle.flash_attn``, ``heddle.flash_attn_3``, ``heddle.nn``, ``heddle.nsa`` and ``heddle.selection`` is asked for.

>>> import numpy as np, heddle
>>> q = np.random.rand(2, 128, 8, 64).astype(np.float32)   # [B, S, H, D]
>>> out = heddle.attention(q, q, q, causal="top_left")
>>> print(heddle.explain(q, q, q, causal="top_left"))      # which kernel runs, and why
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import lowbit, patterns
from ._heddle import version as _version
from ._options import Causal
from ._runtime import cpu_target, cpu_targets, num_threads, set_cpu_target, set_num_threads
from ._validate import check_errors
from .adaptive import adaptive_attention
from .audit import AttentionAudit, audit_attention
from .encoder import Encoder, EncoderLayer, PrecisionChoice, PrecisionTrial
from .explanation import (
    Candidate,
    Explanation,
    explain,
    explain_adaptive_attention,
    explain_append_kv_cache,
    explain_apply_rotary,
    explain_merge_attention,
    explain_sparse_attention,
)
from .functional import attention, merge_attention, sdpa
from .gradients import attention_backward
from .hosts import count_flops as _count_flops
from .hosts.when_imported import when_imported as _when_imported
from .int4_cache import Int4Cache
from .kv_cache import append_kv_cache, apply_rotary, attention_with_kv_cache
from .sparse import sparse_attention

__version__: str = _version()

_when_imported("torch.utils.flop_counter", _count_flops)


__all__ = [
    "AttentionAudit",
    "Candidate",
    "Causal",
    "Encoder",
    "EncoderLayer",
    "Explanation",
    "Int4Cache",
    "PrecisionChoice",
    "PrecisionTrial",
    "adaptive_attention",
    "append_kv_cache",
    "apply_rotary",
    "attention",
    "attention_backward",
    "attention_with_kv_cache",
    "audit_attention",
    "check_errors",
    "cpu_target",
    "cpu_targets",
    "explain",
    "explain_adaptive_attention",
    "explain_append_kv_cache",
    "explain_apply_rotary",
    "explain_merge_attention",
    "explain_sparse_attention",
    "lowbit",
    "merge_attention",
    "num_threads",
    "patterns",
    "sdpa",
    "set_cpu_target",
    "set_num_threads",
    "sparse_attention",
]

_NEED_TORCH = (
    "compat",
    "distributed",
    "flash_attn",
    "flash_attn_3",
    "nn",
    "nsa",
    "selection",
)  # imported when asked for

if TYPE_CHECKING:
    from . import compat as compat
    from . import distributed as distributed
    from . import flash_attn as flash_attn
    from . import flash_attn_3 as flash_attn_3
    from . import hosts as hosts
    from . import nn as nn
    from . import nsa as nsa
    from . import selection as selection
else:  # a type checker would take any name to be there

    def __getattr__(name):
        if name in _NEED_TORCH:
            import importlib

            return importlib.import_module(f".{name}", __name__)
        raise AttributeError(f"module 'heddle' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *_NEED_TORCH, "__version__", "hosts"})
