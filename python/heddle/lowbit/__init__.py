"""Weights in 4 and 8 bits: formats, quantisation, its undoing, its error; linear layers; what checkpoints hold,
and checkpoints quantised. docs/formats.md has every format to the bit.

>>> import numpy as np, heddle
>>> w = np.random.standard_normal((256, 1024)).astype(np.float32)   # [N, K]: y = x @ w.T
>>> q = heddle.lowbit.quantize(w, "nvfp4", rule="mse")
>>> q.nbytes, round(q.error(w).sqnr, 1)
(147460, 21.8)
>>> p = heddle.lowbit.pack(q)   # once, on load
>>> heddle.lowbit.linear(np.ones((3, 1024), np.float32), p, activation="silu").shape
(3, 256)
"""

from __future__ import annotations

from .calibration import Calibration, calibrate
from .checkpoint import StoredLayer, layers, layout_of, load
from .codec import FP4Codec
from .conversion import LayerReport, QuantizeReport, linear_layer, quantize_checkpoint
from .explanation import explain_dequantize, explain_quantize
from .packed import PackedTensor, PackingError, pack
from .product import ACTIVATIONS, NORMS, explain, linear
from .smoothing import smooth
from .tensor import FORMATS, RULES, QuantizationError, QuantizedTensor, dequantize, quantize

__all__ = [
    "ACTIVATIONS",
    "FORMATS",
    "NORMS",
    "RULES",
    "Calibration",
    "FP4Codec",
    "LayerReport",
    "PackedTensor",
    "PackingError",
    "QuantizationError",
    "QuantizeReport",
    "QuantizedTensor",
    "StoredLayer",
    "calibrate",
    "dequantize",
    "explain",
    "explain_dequantize",
    "explain_quantize",
    "layers",
    "layout_of",
    "linear",
    "linear_layer",
    "load",
    "pack",
    "quantize",
    "quantize_checkpoint",
    "smooth",
]


def __dir__() -> list[str]:
    return __all__
