"""The libraries whose arrays Heddle takes: a module or a package each, with the operations of ``heddle.functional`` on that
library's arrays. ``arrays`` serves every library that has none of its own."""

from __future__ import annotations

import sys
from typing import Any


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
