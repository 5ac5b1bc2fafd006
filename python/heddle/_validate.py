"""What was found wrong with index data on a GPU."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from . import _heddle

if TYPE_CHECKING:
    import torch


def check_errors(device: torch.device | str | int | None = None) -> None:
    """Waits for all work on a GPU and raises what validate mode has found wrong with index data there.

    On the CPU, index data (``cu_seqlens_*``, ``seqused_*``, ``seqlens``, ``page_table``, ``cache_batch_idx``,
    ``cache_leftpad``, ``offsets``) is always checked before a call. On a GPU the host does not read it: wrong values are
    clamped or dropped without a word, unless the environment has ``HEDDLE_VALIDATE=1`` before ``heddle`` is imported. Then a
    kernel in front of each operation checks it by the CPU's rules, without waiting. The outputs of a call with wrong index
    data mean nothing. The next call of Heddle's on that stream raises what was found by then, in place of what it was asked
    for; this function raises what was found on all streams.

    Args:
      device: the GPU, as ``torch.cuda.synchronize`` takes it. None: the current one.

    Raises:
      ValueError: for each stream, a line with the first mistake since it was last asked: operation, tensor, index, value and
        rule, in the words that the CPU uses. They are then forgotten.

    Without torch, without a GPU in use, or in a build without GPU kernels, it returns at once.
    """
    torch = sys.modules.get("torch")
    if torch is None or not _heddle.cuda_built() or not torch.cuda.is_initialized():
        return
    torch.cuda.synchronize(device)
    _heddle.raise_bad_indices(torch.cuda._utils._get_device_index(device, optional=True))
