"""The GPU that a caller names as torch does."""

from __future__ import annotations

from typing import Any

from .. import _heddle


def gpu_of(operation: str, device: Any) -> Any:
    """A torch.device with a number, of "cuda", "cuda:N" or a torch.device.

    Raises:
      ValueError: another kind of device. RuntimeError: no torch, a build without CUDA, or no such GPU.
    """
    where = f"[{operation}] device is {str(device)!r}"
    try:
        import torch

        from .torch import operators  # noqa: F401  so that torch's tensors are read and give workspace
    except ImportError as error:
        raise RuntimeError(f"{where}: a GPU needs torch; pip install 'torch>=2.6'") from error
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        found = None
    if found is None or found.type != "cuda":
        raise ValueError(f"{where}: it must be 'cpu', 'cuda' or 'cuda:N'")
    if not _heddle.cuda_built():
        raise RuntimeError(f"{where}: this heddle was built without CUDA")
    if not torch.cuda.is_available():
        raise RuntimeError(f"{where}: torch sees no GPU here")
    if found.index is not None and found.index >= torch.cuda.device_count():
        raise RuntimeError(f"{where}: torch sees {torch.cuda.device_count()} GPUs here, from 0")
    return torch.device("cuda", torch.cuda.current_device()) if found.index is None else found
