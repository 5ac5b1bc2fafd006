"""torch modules over Heddle's operations: linear layers in 4 and 8 bits, a Transformer block, precision layer by layer.
docs/nn.md has the whole of it. Imports torch.

>>> import torch, heddle.nn
>>> model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10)).eval()
>>> report = heddle.nn.choose_policy(model, torch.randn(64, 256), error=0.05)
>>> print(report)
>>> model = heddle.nn.quantize_model(model, report.policy)
"""

from __future__ import annotations

from ..hosts import torch as _needs_torch  # noqa: F401
from ..lowbit import FP4Codec
from .block import TransformerBlock
from .calibration import CalibrationReport, LayerCalibration, calibrate
from .choice import PolicyReport, choose_policy
from .linear import Linear
from .native_sparse_attention import NativeSparseAttention
from .policy import Policy, linear_layers, quantize_model
from .study import FlashAttention, FusedFP4Linear, OptimizedTransformerBlock

__all__ = [
    "CalibrationReport",
    "FP4Codec",
    "FlashAttention",
    "FusedFP4Linear",
    "LayerCalibration",
    "Linear",
    "NativeSparseAttention",
    "OptimizedTransformerBlock",
    "Policy",
    "PolicyReport",
    "TransformerBlock",
    "calibrate",
    "choose_policy",
    "linear_layers",
    "quantize_model",
]


def __dir__() -> list[str]:
    return __all__
