"""What blocks of keys weigh for blocks of rows: shares of their probability, estimated. All without gradients."""

from __future__ import annotations

import torch

from .lists import Limits, ascending, choose
from .rows import CHUNK_BYTES, Sequences, finite


def pooled(sequences: Sequences, limits: Limits, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Lists by means of rows against means of keys: a block of n keys weighs n * exp(scale * q_mean . k_mean)."""
    form = sequences.form
    k, broken = sequences.clean_keys()
    number, keys = sequences.key_blocks, sequences.keys_in_use()
    means = k.unflatten(1, (number, form.block_size)).sum(2, dtype=torch.float32) / keys.clamp_min(1)[..., None, None]
    size = (keys.clamp_min(1) / form.block_size).log()[:, None, None, None]  # [B or 1, 1, 1, 1, K]
    found = []
    for begin, end in sequences.chunks(8 * sequences.batch * sequences.heads * number):
        q, in_use, finite_rows, _ = sequences.choosers(begin, end)
        there = in_use[..., None] & finite_rows
        q = q.masked_fill(~there[..., None], 0)
        runs = (end - begin, form.query_rows)
        rows = there.unflatten(1, runs).sum(2).clamp_min(1)[..., None]
        q_mean = q.unflatten(1, runs).sum(2, dtype=torch.float32) / rows
        grouped = q_mean.unflatten(2, (sequences.kv_heads, -1))
        met = sequences.keys_met(end)
        scores = scale * torch.einsum("bnhgd,bkhd->bnhgk", grouped, means[:, :met]) + size[..., :met]
        seen = sequences.measured(begin, end)[:, :, None, :, :met]
        shares = scores.masked_fill(~seen, -torch.inf).softmax(-1).masked_fill(~seen, 0)
        found.append(choose(sequences, limits, begin, end, sequences.per_unit(shares), broken))
    return joined(sequences, limits.top_k, found)


def antidiagonal(sequences: Sequences, limits: Limits, scale: float, stride: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Lists by sums over antidiagonals: of each tile of `stride` rows and keys the mean score on its antidiagonal, a softmax over the
    tiles of a row of them, and the sums of that over blocks. Products are of q's dtype, as attention's are."""
    form = sequences.form
    batch, of_keys, size = sequences.batch, sequences.kv_heads, form.block_size // stride
    group, step = sequences.heads // of_keys, form.query_rows // stride
    k, broken = sequences.clean_keys()
    # Keys of a tile in falling order, one behind the other: one product of stride * D is the sum over an antidiagonal.
    k = (
        (k * (scale / stride)).unflatten(1, (-1, stride)).flip(2).permute(0, 3, 1, 2, 4).flatten(3)
    )  # [B, Hkv, Sk / stride, stride * D]
    number = sequences.key_blocks
    found = []
    for begin, end in sequences.chunks(4 * batch * sequences.heads * number * max(step, 2)):
        q, in_use, finite_rows, positions = sequences.choosers(begin, end)
        if sequences.packed:  # rows of the next sequence lie behind the last
            q = q.masked_fill(~in_use[..., None, None], 0)
        positions = positions[:, ::stride]
        tiles = q.unflatten(1, (-1, stride)).permute(0, 3, 1, 2, 4).flatten(3)
        tiles = tiles.unflatten(1, (of_keys, group))  # [B, Hkv, G, tiles, stride * D]
        parts = []
        for first, last in sequences.parts(begin, end, batch * sequences.heads * step * k.shape[2] * k.element_size()):
            met, of_part = sequences.keys_met(last), slice((first - begin) * step, (last - begin) * step)
            scores = tiles[..., of_part, :].flatten(2, 3) @ k[:, :, : met * size].mT
            scores = scores.unflatten(2, (group, -1))
            seen, at = _tiles_seen(sequences, first, last, positions[:, of_part], met, stride)
            scores[..., at:].masked_fill_(~seen, -torch.inf)
            mass = scores.softmax(-1).unflatten(-1, (met, size)).sum(-1, dtype=torch.float32)
            parts.append(torch.nn.functional.pad(mass, (0, number - met)))
        runs = (end - begin, step)
        # A tile of rows counts if one of them is there and all that are are finite.
        in_use = in_use[..., None]
        rows = in_use.unflatten(1, (-1, stride)).any(2) & (finite_rows | ~in_use).unflatten(1, (-1, stride)).all(2)
        rows = rows.transpose(1, 2).unflatten(1, (of_keys, group))[..., None]
        of_lists = torch.cat(parts, 3).masked_fill(~rows, 0).unflatten(3, runs).sum(4)
        shares = of_lists / rows.unflatten(3, runs).sum(4).clamp_min(1)  # [B, Hkv, G, n, K]
        found.append(choose(sequences, limits, begin, end, sequences.per_unit(shares.permute(0, 3, 1, 2, 4)), broken))
    return joined(sequences, limits.top_k, found)


def _tiles_seen(
    sequences: Sequences, begin: int, end: int, positions: torch.Tensor, met: int, stride: int
) -> tuple[torch.Tensor, int]:
    """bool [B or 1, 1, 1, tiles of rows, tiles of keys from `first` on], and first: tiles before it are seen by all rows.

    Args:
      positions: [B or 1, tiles of rows], of their first rows.
    """
    form, first = sequences.form, 0
    if form.causal and sequences.known_offset is not None and not sequences.packed:
        begins = sequences.known_offset + begin * form.query_rows
        first = max(0, begins - max(form.query_rows, form.block_size)) // stride
    keys = torch.arange(first, met * form.block_size // stride, device=sequences.device) * stride
    seen = (keys < sequences.used_k)[:, None]
    if form.causal:
        seen = seen & (keys <= positions[..., None])
    if form.strict:
        first_row, _, _ = sequences.bounds(begin, end)
        ends = (keys // form.block_size + 1) * form.block_size
        before = ends <= first_row[..., None]
        seen = seen & before.repeat_interleave(form.query_rows // stride, 1)
    return seen[:, None, None], first


def joined(
    sequences: Sequences, width: int | None, found: list[tuple[torch.Tensor, torch.Tensor]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Lists and counts of all chunks."""
    if not found:
        width = sequences.key_blocks if width is None else min(width, sequences.key_blocks)
        blocks = torch.zeros(sequences.batch, 0, sequences.units, width, dtype=torch.int32, device=sequences.device)
        return blocks, blocks[..., 0] if width else blocks.new_zeros(blocks.shape[:-1])
    blocks, counts = (torch.cat(parts, 1) for parts in zip(*found))
    return blocks, counts


def vertical_slash(
    sequences: Sequences, scale: float, columns: int, diagonals: int, probes: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Lists of the blocks of keys, and of the distances in blocks, to which the last rows of a sequence give most."""
    number, size = sequences.key_blocks, sequences.form.block_size
    k, broken = sequences.clean_keys()
    of_columns, of_distances = _probed(sequences, k, scale, probes)  # [B, L, K]
    of_columns = of_columns.masked_fill(broken[:, 0], torch.inf)
    marks = []
    for weights, n in ((of_columns, columns), (of_distances, diagonals)):
        chosen = weights.sort(dim=-1, descending=True, stable=True).indices[..., :n]
        marks.append(torch.zeros_like(weights, dtype=torch.bool).scatter(-1, chosen, True))
    # Of the distances below each, how many are chosen.
    chosen_below = torch.nn.functional.pad(marks[1].cumsum(-1), (1, 0))[:, None]
    block = torch.arange(number, device=k.device)
    width = min(sequences.most_forced() + columns + diagonals * (sequences.most_own() + 1), number)
    found = []
    for begin, end in sequences.chunks(8 * sequences.batch * sequences.units * number):
        first, last, _ = sequences.bounds(begin, end)
        # Keys d blocks away are d * block_size to (d + 1) * block_size - 1 positions before a row: these d reach from a row to the block.
        nearest, farthest = first[..., None] // size - 1 - block, last[..., None] // size - block
        below, up_to = (
            chosen_below.expand(-1, end - begin, -1, -1).gather(
                -1, at.clamp(0, number)[:, :, None].expand(sequences.batch, -1, sequences.units, -1)
            )
            for at in (nearest, farthest + 1)
        )
        kept = (up_to > below) | marks[0][:, None] | sequences.forced(begin, end)
        kept = kept & sequences.reach(begin, end)
        found.append((ascending(block.expand(kept.shape), kept, number)[..., :width], kept.sum(-1, dtype=torch.int32)))
    return joined(sequences, width, found)


def _probed(sequences: Sequences, k: torch.Tensor, scale: float, probes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Float32 [B, L, K] twice: of the probabilities of a sequence's last rows, what is on each block of keys, and what is on the keys
    each number of blocks away."""
    form, number = sequences.form, sequences.key_blocks
    heads = (sequences.kv_heads, sequences.heads // sequences.kv_heads)
    sequence = torch.arange(sequences.batch, device=sequences.device)[:, None]
    k = k.permute(0, 2, 3, 1)  # [B, Hkv, D, Sk]
    at_keys = torch.arange(k.shape[-1], device=sequences.device)
    columns = torch.zeros(sequences.batch, *heads, k.shape[-1], device=sequences.device)
    distances = torch.zeros_like(columns)
    probes = min(probes, sequences.q.shape[1])
    step = max(1, min(probes, CHUNK_BYTES // max(4 * columns.numel(), 1)))
    for begin in range(0, probes, step):
        rows = (
            torch.arange(begin, min(begin + step, probes), device=sequences.device) - probes + sequences.used_q
        )  # [B or 1, R]
        q = sequences.q[sequence, rows.clamp_min(0)]
        there = (rows >= 0)[..., None] & finite(q)  # [B, R, H]
        q = q.masked_fill(~there[..., None], 0) * scale
        scores = q.transpose(1, 2).unflatten(1, heads).flatten(2, 3) @ k
        positions = rows + sequences.offset
        seen = (at_keys <= positions[..., None])[:, None, None]
        p = scores.unflatten(2, (heads[1], -1)).masked_fill(~seen, -torch.inf).softmax(-1, dtype=torch.float32)
        p = p.masked_fill(~there.transpose(1, 2).unflatten(1, heads)[..., None], 0)
        columns += p.sum(-2)
        # The last row first, each one place to the right of the row behind it: what is below each other is of one distance.
        many = p.shape[-2]
        skewed = torch.nn.functional.pad(p.flip(-2), (0, many)).flatten(-2)[..., : many * (k.shape[-1] + many - 1)]
        diagonals = skewed.unflatten(-1, (many, -1)).sum(-2)
        place = positions[:, -1:] - at_keys  # of distance d: that far before the last row
        found = diagonals.gather(-1, place.clamp_min(0)[:, None, None].expand_as(columns))
        distances += found.masked_fill((place < 0)[:, None, None], 0)
    of_columns, of_distances = (x.unflatten(-1, (number, form.block_size)).sum(-1) for x in (columns, distances))
    if form.per_group:
        return of_columns.mean(2), of_distances.mean(2)
    return of_columns.flatten(1, 2), of_distances.flatten(1, 2)
