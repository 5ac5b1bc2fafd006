"""The codec of an early study of FP4 linear layers. heddle.lowbit is its public name."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from .tensor import QuantizedTensor, quantize, torch_of

if TYPE_CHECKING:
    import torch


class FP4Codec:
    """Format "e2m1_row" under the names of an early study of FP4 linear layers: the same codes, scales and packing.

    For torch tensors of any shape; the last dimension is the row that shares a scale.
    """

    #: Values of the codes 0 to 15.
    FP4_TABLE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)

    @staticmethod
    def encode(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """packed int8 [..., (K + 1) // 2], column 2j in the high four bits, and scale float32 [...] = max(amax / 6, 1e-8).

        Raises:
          ValueError: NaN or infinity in the tensor, another dtype than float32, float16 or bfloat16.
        """
        torch = torch_of(tensor)
        if torch is None:
            raise TypeError(f"[FP4Codec.encode] tensor is a {type(tensor).__name__}: it must be a torch tensor")
        *lead, columns = tensor.shape
        q = quantize(tensor.reshape(math.prod(lead), columns), "e2m1_row")
        return q.codes.view(torch.int8).reshape(*lead, (columns + 1) // 2), q.scales.reshape(lead)

    @staticmethod
    def decode(packed: torch.Tensor, scale: torch.Tensor, original_size: int) -> torch.Tensor:
        """float32 [..., original_size] from what encode() returned; packed may be uint8 too."""
        torch = torch_of(packed)
        if torch is None:
            raise TypeError(f"[FP4Codec.decode] packed is a {type(packed).__name__}: it must be a torch tensor")
        *lead, width = packed.shape
        rows = math.prod(lead)
        codes = packed.reshape(rows, width).view(torch.uint8).contiguous()
        scales = scale.to(torch.float32).reshape(rows, 1).contiguous()
        q = QuantizedTensor("e2m1_row", (rows, original_size), codes, scales)
        return q.dequantize().reshape(*lead, original_size)
