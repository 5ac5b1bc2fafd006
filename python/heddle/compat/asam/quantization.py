"""Quantised models, by the public module's name."""

from __future__ import annotations

import torch
from torch import nn

from ...nn import quantize_model

__all__ = ["quantize_asam_model"]


def quantize_asam_model(model: nn.Module, dtype: torch.dtype = torch.qint8) -> nn.Module:
    """The model with its linear layers in 8 bits, weights and activations (``heddle.nn.quantize_model``, which has 4 bits, too), or
    in float16.

    Args:
      model: any; it is changed.
      dtype: torch.qint8 or torch.float16.

    Raises:
      ValueError: another dtype.
    """
    if dtype == torch.qint8:
        return quantize_model(model, "int8_row+int8_x")
    if dtype == torch.float16:
        return model.half()
    raise ValueError(f"[quantize_asam_model] dtype is {dtype}: it must be torch.qint8 or torch.float16")
