"""compat="asam": the public layer's attention, g * sparse + (1 - g) * dense, each a softmax of its own over masked scores."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ...functional import attention
from . import token_masks
from .config import ASAMConfig
from .selection import Selection

LOCAL_WINDOW = 16  # of the public strided pattern


@functools.lru_cache(maxsize=8)
def _drawn(length: int, count: int, heads: int, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        return token_masks.random(length, count, heads, device)


def pattern_options(config: ASAMConfig, selection: Selection, q: torch.Tensor, k: torch.Tensor) -> dict[str, Any]:
    """The pattern as options of ``heddle.attention``."""
    name, length, device = config.pattern_type, q.shape[1], q.device
    if name == "local":
        return {"window": (config.window_size // 2, config.window_size // 2)}
    if name == "strided":
        return {"mask": token_masks.strided(length, config.stride, LOCAL_WINDOW, device)[None, None]}
    if name == "random":
        return {"mask": _drawn(length, config.num_random, config.num_heads, device)[None]}
    with torch.no_grad():  # the public threshold has no gradient
        if name == "clustered":
            of_heads = q.detach().transpose(1, 2).float(), k.detach().transpose(1, 2).float()
            centroids, temperature = selection.centroids.float(), selection.temperature.float()
            return {"mask": token_masks.clustered(*of_heads, centroids, temperature)}
        return {"mask": token_masks.hierarchical(length, config.scales, selection.scale_weights, device)[None]}


def mixture(
    config: ASAMConfig,
    selection: Selection,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gate: torch.Tensor | None,
    mask: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Args:
      q, k, v: [B, T, H, D].
      gate: [B, H, T]; None: the pattern alone.
      mask: bool, broadcastable to [B, H, T, T].

    Returns:
      o [B, T, H, D], and float32 []: the share of pairs that o depends on.
    """
    options = pattern_options(config, selection, q, k)
    length = q.shape[1]
    kept = options.get("mask")
    if kept is None:
        kept = token_masks.local(length, config.window_size, q.device)
    if mask is not None:
        kept = kept & mask
        options["mask"] = options["mask"] & mask if "mask" in options else mask
    sparse = attention(q, k, v, scale=config.scale, **options)
    if gate is None:
        return sparse, kept.float().mean()
    dense = attention(q, k, v, scale=config.scale, mask=mask)
    of_sparse = gate.transpose(1, 2)[..., None].to(sparse.dtype)
    everything = torch.ones((), device=q.device) if mask is None else mask.float().mean()
    return of_sparse * sparse + (1 - of_sparse) * dense, everything
