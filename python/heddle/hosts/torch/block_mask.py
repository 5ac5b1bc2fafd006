"""FlexAttention's BlockMask as lists of key blocks. heddle.hosts.torch.lists_of_block_mask is the public name."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn

import torch

from ..._options import causal_code, pair
from ..._packed_masks import pack_masks

_NAME = "lists_of_block_mask"
_BLOCK_SIZES = (128, 64, 32, 16)
LARGEST = torch.iinfo(torch.int32).max


class _Applied(NamedTuple):
    """What the call itself applies: causality and a window."""

    causal: Any
    left: int
    right: int

    def __call__(self, rows: torch.Tensor, keys: torch.Tensor, lengths: tuple[int, int]) -> torch.Tensor:
        """bool [rows, keys] of rows and keys of a sequence by their positions in it."""
        code = causal_code(self.causal)
        apart = keys - rows[:, None] - (0 if code == 1 else lengths[1] - lengths[0])
        meets = torch.ones_like(apart, dtype=torch.bool)
        if code:
            meets &= apart <= 0
        if self.left >= 0:
            meets &= apart >= -self.left
        if self.right >= 0:
            meets &= apart <= self.right
        return meets


class _Truth:
    """What a BlockMask says of pairs."""

    def __init__(self, block_mask: Any) -> None:
        self.rows, self.keys = block_mask.seq_lengths
        self.query_rows, self.block_size = block_mask.BLOCK_SIZE
        indices = block_mask.kv_indices
        if indices.dim() != 4:
            raise ValueError(
                f"[{_NAME}] block_mask.kv_indices is {list(indices.shape)}: it must be [B, H, query blocks, key blocks]"
            )
        self.device = indices.device
        self.partial = self._dense(block_mask.kv_num_blocks, indices)
        self.full = torch.zeros_like(self.partial)
        if block_mask.full_kv_indices is not None:
            self.full = self._dense(block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
        self.batch, self.heads = indices.shape[:2]
        mod: Callable[..., Any] = block_mask.mask_mod
        for dimensions in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None)):
            mod = torch.vmap(mod, in_dims=dimensions)
        self._mod = mod

    def _dense(self, counts: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """bool [B, H, query blocks, key blocks] of lists; what lies behind a list's end is undefined."""
        blocks = -(-self.keys // self.block_size)
        places = torch.arange(indices.shape[-1], device=indices.device)
        listed = (places < counts[..., None]) & (indices < blocks)
        found = torch.zeros((*indices.shape[:-1], blocks + 1), dtype=torch.bool, device=indices.device)
        found.scatter_(-1, torch.where(listed, indices, blocks).long(), True)
        return found[..., :blocks]

    def keys_met(self, rows: torch.Tensor) -> torch.Tensor:
        """The keys of all blocks that are listed for one of the rows, in any sequence and head."""
        blocks = (self.partial | self.full)[:, :, rows.unique() // self.query_rows].any(2).any(1).any(0).nonzero()
        keys = (blocks * self.block_size + torch.arange(self.block_size, device=self.device)).flatten()
        return keys[keys < self.keys]

    def __call__(self, rows: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """bool [B, H, rows, keys]."""

        def of_pairs(blocks: torch.Tensor) -> torch.Tensor:
            return blocks[:, :, (rows // self.query_rows)[:, None], (keys // self.block_size)[None]]

        meets, partial = of_pairs(self.full), of_pairs(self.partial)
        if bool(partial.any()):
            b, h = (torch.arange(n, device=self.device) for n in (self.batch, self.heads))
            meets = meets | (partial & self._mod(b, h, rows, keys))
        return meets


def _sequences(cu_seqlens: torch.Tensor | None, truth: _Truth) -> Iterator[tuple[int, int, int, int]]:
    """Where the rows and the keys of each sequence begin and end."""
    if cu_seqlens is None:
        yield 0, truth.rows, 0, truth.keys
        return
    bounds = cu_seqlens.tolist()
    if truth.batch != 1:
        raise ValueError(f"[{_NAME}] cu_seqlens is given and block_mask has {truth.batch} sequences: it must have one")
    if not bounds or bounds[0] != 0 or bounds[-1] != truth.rows or truth.rows != truth.keys:
        raise ValueError(
            f"[{_NAME}] cu_seqlens goes from {bounds[:1]} to {bounds[-1:]} and block_mask is over {truth.rows} rows and "
            f"{truth.keys} keys: it must go from 0 to their number"
        )
    for n, (begin, end) in enumerate(zip(bounds, bounds[1:])):
        if end < begin:
            raise ValueError(f"[{_NAME}] cu_seqlens[{n + 1}] is {end}: it must be at least the one before, {begin}")
    for begin, end in zip(bounds, bounds[1:]):
        yield begin, end, begin, end


def _refuse(truth: _Truth, applied: _Applied, where: torch.Tensor, rows: torch.Tensor, keys: torch.Tensor) -> NoReturn:
    b, h, i, j = (int(x) for x in where)
    row, key = int(rows[i]), int(keys[j])
    block = row // truth.query_rows, key // truth.block_size
    kind = "full" if bool(truth.full[b, h, block[0], block[1]]) else "partial"
    raise ValueError(
        f"[{_NAME}] block {block} of sequence {b}, head {h} is {kind}: block_mask lets row {row} attend key {key}, and a call "
        f"with causal={applied.causal!r} and window={(applied.left, applied.right)} does not: what it applies itself, with "
        "packed sequences (cu_seqlens), must be no less than what block_mask lets"
    )


class _Found(NamedTuple):
    """What a list needs of the blocks of its sequence."""

    listed: torch.Tensor  # bool [B, H, blocks]
    partial: torch.Tensor  # int64 [n, 3]: those of them, (b, h, block), of which the call alone would say more
    tiles: torch.Tensor  # bool [n, query_rows, block_size]: what they meet


def _of_list(
    truth: _Truth,
    applied: _Applied,
    rows: torch.Tensor,
    of_rows: tuple[int, int],
    of_keys: tuple[int, int],
    sizes: tuple[int, int],
) -> _Found:
    """The blocks that these rows need. of_rows, of_keys: where their sequence lies; sizes: query_rows and block_size."""
    (begin, end), (first, last), (query_rows, block_size) = of_rows, of_keys, sizes
    blocks = -(-(last - first) // block_size)
    keys = truth.keys_met(rows)
    touched = keys[(keys >= first) & (keys < last)].sub(first).div(block_size, rounding_mode="floor").unique()
    whole = (touched[:, None] * block_size + torch.arange(block_size, device=truth.device)).flatten() + first
    keys = torch.cat((keys, whole[whole < last])).unique()
    meets, own = truth(rows, keys), (keys >= first) & (keys < last)
    lets = applied(rows - begin, keys - first, (end - begin, last - first)) & own
    wrong = (meets & ~lets).nonzero()
    if len(wrong):
        _refuse(truth, applied, wrong[0], rows, keys)

    def tiled(pairs: torch.Tensor) -> torch.Tensor:
        """[..., touched, query_rows, block_size] of [..., rows, keys]: false where there is no row or key."""
        keys_of = (keys[own] - first).div(block_size, rounding_mode="floor")
        place = torch.searchsorted(touched, keys_of) * block_size + (keys[own] - first) % block_size
        wide = torch.zeros(
            (*pairs.shape[:-2], query_rows, len(touched) * block_size), dtype=torch.bool, device=truth.device
        )
        wide[..., : len(rows), :].index_copy_(-1, place, pairs[..., own])
        return wide.unflatten(-1, (len(touched), block_size)).movedim(-2, -3)

    tiles = tiled(meets)
    met = tiles.flatten(-2).any(-1)
    listed = torch.zeros((*meets.shape[:2], blocks), dtype=torch.bool, device=truth.device)
    listed[..., touched] = met
    at = (met & (tiles != tiled(lets)).flatten(-2).any(-1)).nonzero()
    partial = at.clone()
    partial[:, 2] = touched[at[:, 2]]
    return _Found(listed, partial, tiles[at[:, 0], at[:, 1], at[:, 2]])


def _masks(found: list[tuple[int, _Found]], listed: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Each mask once (None: there is none), and their numbers, int64 of listed's shape, -1 for none."""
    ids = torch.full(listed.shape, -1, dtype=torch.int64, device=listed.device)
    packed = [pack_masks(x.tiles) for _, x in found]
    if not any(map(len, packed)):
        return None, ids
    masks, own = torch.cat(packed).unique(dim=0, return_inverse=True)
    at = 0
    for number, x in found:
        b, h, block = x.partial.unbind(-1)
        ids[b, number, h, block] = own[at : at + len(b)]
        at += len(b)
    return masks, ids


def _whole(name: str, value: Any, least: int) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"[{_NAME}] {name} is {value!r}: it must be an int") from None
    if number < least:
        raise ValueError(f"[{_NAME}] {name} is {number}: it must be at least {least}")
    return number


def lists_of_block_mask(
    block_mask: Any,
    causal: Any,
    window: Any,
    cu_seqlens: torch.Tensor | None,
    batch: int | None,
    block_size: int | None,
    query_rows: int | None,
) -> dict[str, Any]:
    """See heddle.hosts.torch.lists_of_block_mask."""
    from torch.nn.attention.flex_attention import BlockMask

    if not isinstance(block_mask, BlockMask):
        raise TypeError(f"[{_NAME}] block_mask is a {type(block_mask).__name__}: it must be a BlockMask")
    causal_code(causal)
    left, right = (_whole("a side of window", side, -LARGEST) for side in pair(window))
    if cu_seqlens is not None and not isinstance(cu_seqlens, torch.Tensor):
        raise TypeError(f"[{_NAME}] cu_seqlens is a {type(cu_seqlens).__name__}: it must be a torch tensor")
    if cu_seqlens is not None and (cu_seqlens.dim() != 1 or cu_seqlens.dtype != torch.int32):
        raise ValueError(
            f"[{_NAME}] cu_seqlens is {str(cu_seqlens.dtype)[6:]} {list(cu_seqlens.shape)}: it must be int32 [documents + 1]"
        )
    batch = None if batch is None else _whole("batch", batch, 1)
    truth, applied = _Truth(block_mask), _Applied(causal, left, right)
    query_rows = truth.query_rows if query_rows is None else _whole("query_rows", query_rows, 1)
    if block_size is None:
        block_size = next((size for size in _BLOCK_SIZES if truth.block_size % size == 0), None)
        if block_size is None:
            raise ValueError(
                f"[{_NAME}] block_mask has blocks of {truth.block_size} keys: give block_size, 16, 32, 64 or 128"
            )
    if _whole("block_size", block_size, 1) not in _BLOCK_SIZES:
        raise ValueError(f"[{_NAME}] block_size is {block_size}: it must be 16, 32, 64 or 128")
    if batch is not None and (cu_seqlens is not None or truth.batch not in (1, batch)):
        raise ValueError(
            f"[{_NAME}] batch is {batch} and block_mask has {truth.batch} sequences: it must have as many, or one for all, "
            "and not be packed"
        )

    found: list[tuple[int, _Found]] = []  # beside a list's number
    for b, (begin, end, first, last) in enumerate(_sequences(cu_seqlens, truth)):
        number = begin if query_rows == 1 else begin // query_rows + b
        for n, start in enumerate(range(begin, end, query_rows)):
            rows = torch.arange(start, min(start + query_rows, end), device=truth.device)
            sizes = query_rows, block_size
            found.append((number + n, _of_list(truth, applied, rows, (begin, end), (first, last), sizes)))

    if cu_seqlens is None:
        lists = -(-truth.rows // query_rows)
    else:
        lists = truth.rows if query_rows == 1 else truth.rows // query_rows + len(cu_seqlens) - 1
    longest = max((x.listed.shape[-1] for _, x in found), default=0)
    listed = torch.zeros((truth.batch, lists, truth.heads, max(longest, 1)), dtype=torch.bool, device=truth.device)
    for number, x in found:
        listed[:, number, :, : x.listed.shape[-1]] = x.listed
    entries = max(int(listed.sum(-1).max()) if listed.numel() else 0, 1)
    order = listed.byte().argsort(dim=-1, descending=True, stable=True)[..., :entries]
    there = listed.gather(-1, order)
    of_lists = {"blocks": torch.where(there, order, -1).int()}
    masks, ids = _masks(found, listed)
    if masks is not None:
        of_lists |= {"masks": masks, "mask_ids": torch.where(there, ids.gather(-1, order), -1).int()}
    arguments = {"block_size": block_size, "query_rows": query_rows, "causal": causal, "window": window}
    for name in of_lists.keys() - {"masks"}:
        of_list = of_lists[name]
        if cu_seqlens is not None:
            of_lists[name] = of_list[0]
        elif batch is not None:
            of_lists[name] = of_list.expand(batch, -1, -1, -1)
    if cu_seqlens is not None:
        arguments |= {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens}
    return {**of_lists, **arguments}
