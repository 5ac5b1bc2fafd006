"""The libraries whose arrays Heddle takes: a module or a package each, with the operations of ``heddle.functional`` on that
library's arrays. ``arrays`` serves every library that has none of its own."""

from __future__ import annotations

import operator
import sys
from typing import Any

import numpy as np

from .. import _heddle


def __dir__() -> list[str]:
    return ["torch", "transformers"]  # what is public, imported or not


def is_torch(x: Any) -> bool:
    """Whether x is a torch tensor, of any subclass. Does not import torch."""
    # By name: looking torch up in sys.modules, torch.compile would trace that dictionary, which grows meanwhile.
    for base in type(x).__mro__:
        if base.__name__ == "Tensor" and base.__module__ == "torch":
            return True
    return False


_torch: Any = None


def torch_host() -> Any:
    """The operations on torch tensors, imported when the first one is seen."""
    global _torch
    if _torch is None:
        from .torch import functional

        _torch = functional
    return _torch


def count_flops(counter: Any) -> None:
    """Hands torch.utils.flop_counter the formulas of the operators on torch tensors."""
    torch_host().flops.register(counter)


def _first_extent(x: Any, name: str) -> Any:
    """Of an array, or of a shape."""
    if isinstance(x, tuple):
        return x[0]
    return x.shape[0] if hasattr(x, "shape") else _heddle.describe(x, "attention_forward", name)[0][0]


def offsets(name: str, value: Any, q: Any, cu_seqlens_q: Any) -> Any:
    """int32 [B], beside q, of an int; arrays and None come back as they are."""
    number = isinstance(value, (int, np.integer))
    if value is None or (not number and (hasattr(value, "shape") or hasattr(value, "__dlpack__"))):
        return value
    try:
        index = operator.index(value)
    except TypeError:
        shown = repr(value) if isinstance(value, (str, float)) else f"a {type(value).__name__}"
        raise TypeError(f"[attention] {name} is {shown}: it must be an int or an int32 array [B]") from None
    if not 0 <= index < 2**31:
        raise ValueError(f"[attention] {name} is {index}: positions are from 0 to 2^31 - 1")
    starts = cu_seqlens_q is not None
    sequences = _first_extent(cu_seqlens_q, "cu_seqlens_q") - 1 if starts else _first_extent(q, "q")
    if is_torch(q):
        torch = sys.modules["torch"]
        return torch.full((sequences,), index, dtype=torch.int32, device=q.device)
    return np.full((sequences,), index, np.int32)
