"""What the layers of adaptive sparse attention refuse: argument, value and rule."""

from __future__ import annotations

import torch


def width(layer: str, x: torch.Tensor, dim: int) -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"[{layer}] x is a {type(x).__name__}: it must be a torch tensor")
    if x.dim() != 3 or x.shape[-1] != dim or 0 in x.shape:
        raise ValueError(f"[{layer}] x is {list(x.shape)}: it must be [B, T, {dim}], B and T from 1 up")


def token_mask(layer: str, mask: torch.Tensor | None, x: torch.Tensor, heads: int) -> torch.Tensor | None:
    """A mask for ``heddle.attention``, with four dimensions."""
    if mask is None:
        return None
    _boolean(layer, mask)
    shape, target = tuple(mask.shape), (x.shape[0], heads, x.shape[1], x.shape[1])
    if len(shape) > 4 or any(n not in (1, m) for n, m in zip(reversed(shape), reversed(target))):
        raise ValueError(f"[{layer}] mask is {list(shape)}: it must be broadcastable to [B, H, T, T], {list(target)}")
    return mask[(None,) * (4 - len(shape))]


def _boolean(layer: str, mask: torch.Tensor) -> None:
    if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool:
        what = str(mask.dtype).removeprefix("torch.") if isinstance(mask, torch.Tensor) else f"a {type(mask).__name__}"
        raise TypeError(f"[{layer}] mask is {what}: it must be a bool tensor, true where a key is attended")


def used_lengths(
    layer: str, mask: torch.Tensor | None, lengths: torch.Tensor | None, x: torch.Tensor
) -> torch.Tensor | None:
    """int32 [B], of lengths or of a mask that says the same."""
    batch, length = x.shape[:2]
    if lengths is not None:
        if mask is not None:
            raise ValueError(f"[{layer}] mask is given beside lengths: both say which keys are in use; give lengths")
        if not isinstance(lengths, torch.Tensor) or lengths.dtype not in (torch.int32, torch.int64):
            what = lengths.dtype if isinstance(lengths, torch.Tensor) else f"a {type(lengths).__name__}"
            raise TypeError(f"[{layer}] lengths is {what}: it must be a tensor of int32 or int64")
        if tuple(lengths.shape) != (batch,):
            raise ValueError(f"[{layer}] lengths is {list(lengths.shape)}: it must be [B], [{batch}]")
        return lengths.int()
    if mask is None:
        return None
    _boolean(layer, mask)
    of_keys = mask[:, 0, 0] if mask.dim() == 4 and mask.shape[1] == mask.shape[2] == 1 else mask
    if of_keys.dim() != 2 or tuple(of_keys.shape) != (batch, length):
        raise ValueError(
            f"[{layer}] mask is {list(mask.shape)}: it must be of keys, [B, T] or [B, 1, 1, T] for B {batch} and T {length}; masks of "
            "pairs are for compat='asam'"
        )
    if torch.compiler.is_compiling():
        raise ValueError(
            f"[{layer}] mask is given under torch.compile, which cannot look at its values: give lengths, mask.sum(-1), and "
            "pad on the right"
        )
    found = of_keys.sum(-1, dtype=torch.int32)
    if not bool((of_keys == (torch.arange(length, device=mask.device) < found[:, None])).all()):
        raise ValueError(
            f"[{layer}] mask has a key in use behind one that is not: sequences must be padded on the right; masks of any form "
            "are for compat='asam'"
        )
    return found
