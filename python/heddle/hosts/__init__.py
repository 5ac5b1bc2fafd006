"""The libraries whose arrays Heddle takes: a module or a package each, with the operations of ``heddle.functional`` on that
library's arrays. ``arrays`` serves every library that has none of its own."""

from __future__ import annotations

import operator
import sys
from typing import Any

import numpy as np


def is_torch(x: Any) -> bool:
    """Whether x is a torch tensor, of any subclass. Does not import torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


_torch: Any = None


def torch_host() -> Any:
    """The operations on torch tensors, imported when the first one is seen."""
    global _torch
    if _torch is None:
        from .torch import functional

        _torch = functional
    return _torch


def offsets(name: str, value: Any, sequences: Any, model: Any) -> Any:
    """int32 [sequences] beside the array `model`, of an int; arrays and None come back as they are."""
    if value is None or hasattr(value, "shape"):
        return value
    try:
        index = operator.index(value)
    except TypeError:
        shown = repr(value) if isinstance(value, (str, float)) else f"a {type(value).__name__}"
        raise TypeError(f"[attention] {name} is {shown}: it must be an int or an int32 array [B]") from None
    if not -(2**31) <= index < 2**31:
        raise ValueError(f"[attention] {name} is {index}: positions are from 0 to 2^31 - 1")
    if is_torch(model):
        torch = sys.modules["torch"]
        return torch.full((sequences,), index, dtype=torch.int32, device=model.device)
    return np.full((sequences,), index, np.int32)
