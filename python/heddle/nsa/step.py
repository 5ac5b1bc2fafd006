"""A step of decoding as one operation, where there is a kernel for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..hosts.torch import nsa_step_operator  # noqa: F401  registers the operator
from ..hosts.torch.checks import _cuda_built
from ..hosts.torch.transforms import transformed
from .branches import FORCED
from .sequences import Form

if TYPE_CHECKING:
    from .cache import Cache

_DTYPES = (torch.float16, torch.bfloat16)
_BLOCKS = (16, 32, 64, 128)
_HEAD, _GROUP, _SLOTS = 128, 16, 32  # the most that the kernel takes


def is_served(
    q: torch.Tensor,
    k_new: torch.Tensor,
    v_new: torch.Tensor,
    cache: Cache,
    form: Form,
    counts: torch.Tensor | None,
    major: int,
) -> bool:
    """Whether the candidate of a GPU of that compute capability takes the call: what it says itself, asked of what is known
    while a call is traced. What an argument does wrong is left to the operations that say so."""
    sizes = q.shape[3], v_new.shape[3]
    heads = k_new.shape[2]
    held = cache.k, cache.v, cache.k_pooled, cache.v_pooled
    batch, keys = q.shape[0], cache.capacity
    if cache.page_table is not None:
        batch, keys = cache.k.shape[:2]
    rows = keys, keys, keys // cache.block, keys // cache.block
    return (
        major == 9
        and q.shape[1] == 1
        and counts is None
        and cache.compress is None
        and not cache.own_keys
        and form.sharing.stride == 1
        and form.slots <= _SLOTS
        and cache.block == cache.stride == form.block_size
        and cache.block in _BLOCKS
        and q.dtype in _DTYPES
        and all(size % 8 == 0 and size <= _HEAD for size in sizes)
        and q.shape[2] <= _GROUP * heads
        and all(x.dtype == q.dtype for x in (k_new, v_new, *held))
        and all(x.device == q.device for x in (k_new, v_new, *held, cache.lengths))
        and all(
            x.shape == (batch, n, heads, size)
            and x.stride(3) == 1
            and all(stride % 8 == 0 for stride in x.stride()[:3])
            for x, n, size in zip(held, rows, (*sizes, *sizes))
        )
        and cache.lengths.shape == (q.shape[0],)
        and cache.lengths.is_contiguous()
        and cache.lengths.dtype == torch.int32
        and (
            cache.page_table is None
            or (
                keys % cache.block == 0
                and cache.page_table.shape == (q.shape[0], cache.capacity // keys)
                and cache.page_table.device == q.device
                and cache.page_table.is_contiguous()
            )
        )
    )


def serves(
    q: torch.Tensor,
    k_new: torch.Tensor,
    v_new: torch.Tensor,
    cache: Cache,
    form: Form,
    counts: torch.Tensor | None,
) -> bool:
    if not _cuda_built or not q.is_cuda or transformed():
        return False
    return is_served(q, k_new, v_new, cache, form, counts, torch.cuda.get_device_properties(q.device).major)


def step(
    q: torch.Tensor,
    k_new: torch.Tensor,
    v_new: torch.Tensor,
    cache: Cache,
    gates: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None],
    form: Form,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """One row of each sequence, by one launch and one that counts it. What is refused leaves the cache as it was."""
    if out is None:
        out = torch.empty((*q.shape[:3], v_new.shape[3]), dtype=q.dtype, device=q.device)
    forced = sum(1 << n for n, block in enumerate(FORCED) if block in form.forced)
    torch.ops.heddle.nsa_step(
        q, k_new, v_new, cache.k, cache.v, cache.k_pooled, cache.v_pooled, cache.lengths, *gates, out,
        form.slots, form.block_size, form.window, forced, form.scale, cache.page_table,
    )  # fmt: skip
    cache.lengths += 1
    return out
