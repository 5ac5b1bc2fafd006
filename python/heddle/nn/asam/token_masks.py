"""The public package's patterns, pair by pair: bool [T, T] or [H, T, T], true where row i attends key j."""

from __future__ import annotations

from collections.abc import Iterable

import torch

SEED = 42  #: of the public random pattern: head h draws by SEED + h


def _distance(length: int, device: torch.device | str) -> torch.Tensor:
    at = torch.arange(length, device=device)
    return (at[:, None] - at).abs()


def local(length: int, window_size: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """[T, T]: keys at most window_size / 2 away."""
    return _distance(length, device) <= window_size // 2


def strided(length: int, stride: int, local_window: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """[T, T]: keys at most local_window away, and every stride-th from the first on."""
    return (_distance(length, device) <= local_window) | (torch.arange(length, device=device) % stride == 0)


def random(length: int, count: int, heads: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """[H, T, T]: count keys of each row, drawn as the public package draws them, but not from torch's own generator."""
    mask = torch.zeros(heads, length, length, dtype=torch.bool)
    for head in range(heads):
        generator = torch.Generator().manual_seed(SEED + head)
        drawn = [torch.randperm(length, generator=generator)[:count] for _ in range(length)]
        mask[head].scatter_(1, torch.stack(drawn), True)
    return mask.to(device)


def clustered(q: torch.Tensor, k: torch.Tensor, centroids: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """[B, H, T, T] of q and k [B, H, T, D]: pairs whose memberships have a product above 0.1."""
    return together(*memberships(q, k, centroids, temperature))


def together(q_assign: torch.Tensor, k_assign: torch.Tensor) -> torch.Tensor:
    """[B, H, T, T] of memberships."""
    return q_assign @ k_assign.transpose(-1, -2) > 0.1


def memberships(
    q: torch.Tensor, k: torch.Tensor, centroids: torch.Tensor, temperature: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """[B, H, T, C] of q and of k [B, H, T, D]: softmax(cosine / |temperature|) over the centroids [H, C, D]."""
    unit = torch.nn.functional.normalize(centroids, dim=-1).transpose(-1, -2)
    one, two = ((torch.nn.functional.normalize(x, dim=-1) @ unit / temperature.abs()).softmax(-1) for x in (q, k))
    return one, two


def hierarchical(
    length: int, scales: Iterable[int], scale_weights: torch.Tensor, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """[H, T, T]: pairs whose scales have more than half of softmax(scale_weights), [scales, H]."""
    of_scales = torch.stack([strided(length, scale, scale // 4, device) for scale in scales]).float()
    weights = scale_weights.float().softmax(0).to(device)
    return (of_scales[:, None] * weights[..., None, None]).sum(0) > 0.5
