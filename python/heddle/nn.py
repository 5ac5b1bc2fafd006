"""torch modules over Heddle's operations: linear layers in 4 and 8 bits, a Transformer block, precision layer by layer.
docs/nn.md has the whole of it. Imports torch.

>>> import torch, heddle.nn
>>> model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10)).eval()
>>> report = heddle.nn.choose_policy(model, torch.randn(64, 256), error=0.05)
>>> print(report)
>>> model = heddle.nn.quantize_model(model, report.policy)
"""

from __future__ import annotations

from . import _needs_torch  # noqa: F401
from ._nn_block import TransformerBlock
from ._nn_calibrate import CalibrationReport, LayerCalibration, calibrate
from ._nn_choose import PolicyReport, choose_policy
from ._nn_linear import Linear
from ._nn_policy import Policy, linear_layers, quantize_model
from ._nn_study import FlashAttention, FusedFP4Linear, OptimizedTransformerBlock
from .lowbit import FP4Codec

__all__ = [
    "CalibrationReport",
    "FP4Codec",
    "FlashAttention",
    "FusedFP4Linear",
    "LayerCalibration",
    "Linear",
    "OptimizedTransformerBlock",
    "Policy",
    "PolicyReport",
    "TransformerBlock",
    "calibrate",
    "choose_policy",
    "linear_layers",
    "quantize_model",
]
