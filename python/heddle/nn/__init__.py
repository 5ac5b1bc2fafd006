"""torch modules over Heddle's operations: linear layers in 4 and 8 bits, a Transformer block, native and adaptive sparse
attention, precision layer by layer. docs/nn.md has the whole of it. Imports torch.

>>> import torch, heddle.nn
>>> model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10)).eval()
>>> report = heddle.nn.choose_policy(model, torch.randn(64, 256), error=0.05)
>>> print(report)
>>> model = heddle.nn.quantize_model(model, report.policy)
"""

from __future__ import annotations

from ..hosts.torch import torch as _torch  # says how to install it
from ..lowbit import FP4Codec, PackedTensor, PackingError, QuantizedTensor
from .asam.config import ASAMConfig
from .asam.efficient import EfficientASAMLayer, FlashASAMLayer
from .asam.gate import AdaptiveGate
from .asam.hybrid import HybridASAM
from .asam.layer import ASAMEncoder, ASAMLayer
from .block import TransformerBlock
from .block_compression import BlockCompression
from .calibration import CalibrationReport, LayerCalibration, calibrate
from .choice import PolicyReport, choose_policy
from .linear import Linear
from .native_sparse_attention import NativeSparseAttention
from .parallel_block import TensorParallelBlock
from .parallel_linear import ColumnParallelLinear, RowParallelLinear
from .policy import Policy, linear_layers, load_quantized, quantize_model
from .report import StoredWeight, WeightsReport, weights_report
from .study import FlashAttention, FusedFP4Linear, OptimizedTransformerBlock

# Plain data, which is checked where it is used, for torch.load(weights_only=True).
_torch.serialization.add_safe_globals([QuantizedTensor, PackedTensor, PackingError])

__all__ = [
    "ASAMConfig",
    "ASAMEncoder",
    "ASAMLayer",
    "AdaptiveGate",
    "BlockCompression",
    "CalibrationReport",
    "ColumnParallelLinear",
    "EfficientASAMLayer",
    "FP4Codec",
    "FlashASAMLayer",
    "FlashAttention",
    "FusedFP4Linear",
    "HybridASAM",
    "LayerCalibration",
    "Linear",
    "NativeSparseAttention",
    "OptimizedTransformerBlock",
    "Policy",
    "PolicyReport",
    "RowParallelLinear",
    "StoredWeight",
    "TensorParallelBlock",
    "TransformerBlock",
    "WeightsReport",
    "calibrate",
    "choose_policy",
    "linear_layers",
    "load_quantized",
    "quantize_model",
    "weights_report",
]


def __dir__() -> list[str]:
    return __all__
