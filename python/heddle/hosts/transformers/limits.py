"""Which keys a row meets, as a few numbers in place of a mask of every pair, and how a model carries them.

transformers makes its masks before the layers run (in ``generate`` even before the compiled model is called) and hands them
through as tensors of four dimensions; only those pass unchanged. So limits travel as one: uint32, a type of no other mask,
which no logic of a mask takes. Its values are lengths; what must be known without reading them is its shape:

  [B, 1 + flags, arrays, 1 + window]      flags: see _FLAGS; window: 0 for none
  [1, 1 + flags, documents + 1, 1 + window] with documents: where they begin in the batch's rows, laid end to end

The second and last extents take no memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

_ARRAYS = ("leftpad", "used_k", "used_q", "documents")
# Extent 1 + n -> the names of what is there, of the bits of n.
_FLAGS = tuple(
    frozenset(name for bit, name in enumerate(("causal", *_ARRAYS)) if n >> bit & 1)
    for n in range(1 << (1 + len(_ARRAYS)))
)


@dataclass(frozen=True)
class Limits:
    """The keys of each row: those of its sequence (or document), up to its own position if causal, in its window.

    Rows and keys end together: the last row in use stands at the last key in use.

    causal: a row meets keys up to its own position.
    window: with causal a row's own position and window - 1 before it; else positions at most window away; None: all.
    leftpad: int32 [B], keys to skip at the beginning; used_k, used_q: int32 [B], the end of keys and of rows in use.
    documents: int32 [n + 1], where sequences begin in the rows [B * S] of the whole batch; not with the other three.
    """

    causal: bool
    window: int | None = None
    leftpad: torch.Tensor | None = None
    used_k: torch.Tensor | None = None
    used_q: torch.Tensor | None = None
    documents: torch.Tensor | None = None

    def of_all_keys(self) -> bool:
        """Whether no key is excluded for where its sequence begins or ends."""
        return self.leftpad is None and self.used_k is None and self.used_q is None and self.documents is None

    def sides(self) -> tuple[int, int]:
        """heddle.attention's window."""
        if self.window is None:
            return (-1, -1)
        return (self.window - 1, -1) if self.causal else (self.window, self.window)

    def tensor(self, batch: int, device: torch.device | str) -> torch.Tensor:
        """The form that models carry."""
        present = {name: getattr(self, name) for name in _ARRAYS if getattr(self, name) is not None}
        flags = _FLAGS.index(frozenset((*(("causal",) if self.causal else ()), *present)))
        if self.documents is not None:
            values = self.documents[None, None, :, None]
        elif present:
            values = torch.stack(tuple(present.values()), 1)[:, None, :, None]
        else:
            values = torch.zeros((batch, 1, 1, 1), dtype=torch.int32, device=device)
        values = values.to(device=device, dtype=torch.int32).view(torch.uint32)
        return values.expand(-1, 1 + flags, -1, 1 + (self.window or 0))

    def mask(self, batch: int, rows: int, keys: int, device: torch.device) -> torch.Tensor:
        """The same as a mask: bool [B or 1, 1, rows, keys], True = attend."""
        if self.documents is not None:
            places = torch.arange(batch * rows, dtype=torch.int32, device=device)
            document = torch.searchsorted(self.documents[1:], places, right=True).view(batch, rows)
            apart = document[:, None, :, None] == document[:, None, None, :]
            return replace(self, documents=None).mask(batch, rows, keys, device) & apart

        def per_sequence(x: torch.Tensor | None, otherwise: int) -> torch.Tensor:
            return torch.full((1, 1, 1, 1), otherwise, device=device) if x is None else x[:, None, None, None]

        row = torch.arange(rows, device=device)[:, None]
        key = torch.arange(keys, device=device)
        end = per_sequence(self.used_k, keys)
        # The position among the keys of each row.
        at = row + end - per_sequence(self.used_q, rows)
        attend = (key >= per_sequence(self.leftpad, 0)) & (key < end) & (row < per_sequence(self.used_q, rows))
        left, right = self.sides()
        if self.causal:
            attend = attend & (key <= at)
        if left >= 0:
            attend = attend & (key >= at - left)
        if right >= 0:
            attend = attend & (key <= at + right)
        return attend


def is_limits(mask: torch.Tensor) -> bool:
    return mask.dtype is torch.uint32


def read_limits(mask: torch.Tensor) -> Limits:
    """The limits of which `mask` is the tensor.

    Raises:
      ValueError: the model has changed its shape on the way.
    """
    known = mask.dim() == 4 and mask.shape[1] <= len(_FLAGS)
    flags = _FLAGS[int(mask.shape[1]) - 1] if known else frozenset()
    arrays = [name for name in _ARRAYS if name in flags]
    packed = "documents" in flags
    if not known or (mask.shape[2] < 2 if packed else mask.shape[2] != max(1, len(arrays))):
        raise ValueError(
            f"[heddle attention] attention_mask is {list(mask.shape)} of uint32, and not as Heddle made it: this model "
            "changes masks on their way to its layers; register with masks='boolean'"
        )
    values = mask.view(torch.int32)[:, 0, :, 0]
    found = (
        {"documents": values[0].contiguous()}
        if packed
        else {name: values[:, i].contiguous() for i, name in enumerate(arrays)}
    )
    window = int(mask.shape[3]) - 1
    return Limits("causal" in flags, window or None, **found)
