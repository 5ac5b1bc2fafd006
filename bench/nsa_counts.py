"""What native sparse attention has to compute, move and keep, counted from shapes, causality and the lists that were used.

One sequence of T rows, q [T, HQ, D], k [T, H, D], v [T, H, D]; keys of a row are counted for each key/value head. Nothing is
estimated: every count is a sum over rows. A multiply and an addition are one FLOP each; what is done once an element (softmax,
gates, copies) is not counted as FLOPs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

STEPS = ("pooling", "compressed", "selection", "selected", "window", "result")
BRANCHES = {"compressed": "cmp", "selected": "slc", "window": "swa"}
PARTS = ("all", "even", "odd")
WORD = 4  # bytes of float32 and int32: outputs of branches, log-sum-exps, gates, lists


@dataclass(frozen=True)
class Case:
    """Shapes of a call: rows T, query heads HQ, key/value heads H, head size D, keys a block, blocks a list, keys of the window
    (0: none), bytes of an element of q, k, v and the result."""

    rows: int
    heads: int
    kv_heads: int
    head_size: int
    block: int
    slots: int
    window: int
    element: int = 4


@dataclass(frozen=True)
class Strides:
    """At every how many rows each step is done; see heddle.nsa.presets."""

    compressed: int = 1
    selection: int = 1
    selected: int = 1
    window: int = 1


def strides(options: dict) -> Strides:
    """options: of sharing, as heddle.nsa.presets gives them, with share="output"; {} is plain NSA."""
    if not options:
        return Strides()
    if options["share"] != "output":
        raise ValueError(f"share is {options['share']!r}: only 'output' is counted")
    of = {step: options["query_stride"] if name in options["share_branches"] else 1 for step, name in BRANCHES.items()}
    return Strides(selection=of["selected"], **of)


def part_of(rows: int, part: str) -> torch.Tensor:
    """Which rows belong to "all", "even" or "odd", bool [rows]."""
    t = torch.arange(rows)
    return {"all": t >= 0, "even": t % 2 == 0, "odd": t % 2 == 1}[part]


def done(case: Case, sharing: Strides, step: str) -> torch.Tensor:
    """At which rows a step is done, bool [T]."""
    if step == "window" and case.window == 0:
        return torch.zeros(case.rows, dtype=torch.bool)
    return torch.arange(case.rows) % getattr(sharing, step) == 0


def listed(case: Case, lists: torch.Tensor) -> torch.Tensor:
    """How many keys a row reads of each slot of its list, int64 [T, H, S]; lists: [T, H, S], -1 where a slot is empty."""
    first = lists.long() * case.block
    keys = (torch.arange(case.rows)[:, None, None] - first + 1).clamp(0, case.block)
    return keys.where(lists >= 0, 0)


def keys_seen(case: Case, sharing: Strides, lists: torch.Tensor) -> dict[str, torch.Tensor]:
    """step -> keys that a row attends (pooled ones in "compressed" and "selection"), int64 [T, H]; 0 where it is not done."""
    end = torch.arange(1, case.rows + 1)
    each = torch.ones(1, case.kv_heads, dtype=torch.int64)
    pooled = (end // case.block)[:, None] * each
    seen = {
        "compressed": pooled,
        "selection": pooled,
        "selected": listed(case, lists).sum(-1),
        "window": end.clamp(max=case.window)[:, None] * each,
    }
    return {step: keys * done(case, sharing, step)[:, None] for step, keys in seen.items()}


def in_blocks(case: Case) -> torch.Tensor:
    """Which keys lie in a complete block, bool [T]: those that are pooled."""
    return torch.arange(case.rows) < case.rows // case.block * case.block


def flops(case: Case, sharing: Strides, lists: torch.Tensor) -> dict[str, dict[str, dict[str, int]]]:
    """pass -> step -> part -> FLOP of products, and of the pooled keys' sums (which count at the key's own row).

    Forward is q k and p v; backward is q k again, dp, dq, dk and dv. "selection" is q k once more, without gradient.
    """
    group, size = case.heads // case.kv_heads, case.head_size
    by_row = {"pooling": in_blocks(case).long() * 2 * case.kv_heads * size}
    backward = dict(by_row)
    for step, keys in keys_seen(case, sharing, lists).items():
        pairs = keys.sum(1) * group
        by_row[step] = pairs * 2 * size * (1 if step == "selection" else 2)
        backward[step] = pairs * 2 * size * (0 if step == "selection" else 5)
    return {
        name: {step: in_parts(rows) for step, rows in found.items()}
        for name, found in (("forward", by_row), ("backward", backward))
    }


def latest_blocks(rows: int, block: int, slots: int) -> torch.Tensor:
    """Lists int32 [rows, 1, slots] of each row's own block and those before it. Every list that has the row's own block and is
    as full has as many keys."""
    number = torch.arange(rows)[:, None] // block - torch.arange(slots)
    return number.clamp(min=-1).to(torch.int32)[:, None]


def in_parts(by_row: torch.Tensor) -> dict[str, int]:
    return {part: int(by_row[part_of(len(by_row), part)].sum()) for part in PARTS}


def distinct_keys(case: Case, sharing: Strides, lists: torch.Tensor, part: torch.Tensor) -> dict[str, int]:
    """step -> how many keys, of all key/value heads, the rows of a part read at all; part: bool [T]."""
    found = {}
    for step, keys in keys_seen(case, sharing, lists).items():
        rows = part & done(case, sharing, step)
        if step in ("compressed", "selection"):
            found[step] = int(keys[rows].amax(0).sum()) if rows.any() else 0
        elif step == "window":
            found[step] = distinct_in_windows(case, rows) * case.kv_heads
        else:
            found[step] = distinct_in_lists(case, lists, rows)
    return found


def distinct_in_windows(case: Case, rows: torch.Tensor) -> int:
    changes = torch.zeros(case.rows + 1, dtype=torch.int64)
    t = rows.nonzero()[:, 0]
    changes.index_add_(0, (t + 1 - case.window).clamp(min=0), torch.ones_like(t))
    changes.index_add_(0, t + 1, -torch.ones_like(t))
    return int((changes[:-1].cumsum(0) > 0).sum())


def distinct_in_lists(case: Case, lists: torch.Tensor, rows: torch.Tensor) -> int:
    """Of each block and key/value head, as many keys as the row reads that reads most."""
    chosen, keys = lists[rows].long(), listed(case, lists)[rows]
    most = torch.zeros(case.kv_heads, case.rows // case.block + 2, dtype=torch.int64)  # the last is nobody's
    for head in range(case.kv_heads):
        blocks = chosen[:, head].where(chosen[:, head] >= 0, most.shape[1] - 1)
        most[head].scatter_reduce_(0, blocks.flatten(), keys[:, head].flatten(), "amax")
    return int(most.sum())


def attending(case: Case, step: str) -> tuple[int, int]:
    """Bytes of a row of a step, forward: read and written beside keys, (q, what it writes and reads of rows)."""
    q, lse, lists = case.heads * case.head_size * case.element, case.heads * WORD, case.kv_heads * case.slots * WORD
    if step == "selection":
        return q, lse + lists
    return q, case.heads * case.head_size * WORD + lse + (lists if step == "selected" else 0)


def moved(case: Case, sharing: Strides, lists: torch.Tensor, *, each_row: bool) -> dict[str, dict[str, dict[str, int]]]:
    """pass -> step -> part -> bytes that are read and written.

    each_row: keys and values are read by each row for itself, once for the heads of its group, as in a loop over rows, and a
    copied row is read again for each copy; else each tensor is read once, however many rows use it, which is the least there
    is. Then a part is what its rows alone would need, so that even and odd together are more than all.
    """
    found = {name: {step: {} for step in STEPS} for name in ("forward", "backward")}
    for part in PARTS:
        rows = part_of(case.rows, part)
        forward, backward = moved_of_part(case, sharing, lists, rows, each_row)
        for step in STEPS:
            found["forward"][step][part], found["backward"][step][part] = forward[step], backward[step]
    return found


def moved_of_part(
    case: Case, sharing: Strides, lists: torch.Tensor, rows: torch.Tensor, each_row: bool
) -> tuple[dict[str, int], dict[str, int]]:
    """Of the rows of a part, bool [T]: step -> bytes, forward and backward."""
    seen = keys_seen(case, sharing, lists)
    distinct = distinct_keys(case, sharing, lists, rows)
    key = case.head_size * case.element
    pooled = case.rows // case.block if bool(rows[0]) else 0  # they are made once: counted with the first row
    forward = {"pooling": 2 * key * case.kv_heads * (int((rows & in_blocks(case)).sum()) + pooled)}
    backward = dict(forward)
    for step, keys in seen.items():
        count = int((rows & done(case, sharing, step)).sum())
        read = int(keys[rows].sum()) if each_row else distinct[step]
        q, of_rows = attending(case, step)
        forward[step] = count * (q + of_rows) + read * key * (1 if step == "selection" else 2)
        # Rows: q, o, its gradient, the log-sum-exp, a list, and dq; keys: k and v read, dk and dv written once.
        gradient = count * (2 * q + of_rows + case.heads * case.head_size * WORD) + 2 * key * (read + distinct[step])
        backward[step] = 0 if step == "selection" else gradient
    forward["result"], backward["result"] = moved_by_result(case, sharing, rows, each_row)
    return forward, backward


def moved_by_result(case: Case, sharing: Strides, rows: torch.Tensor, each_row: bool) -> tuple[int, int]:
    """Of the gated sum and the copies: bytes forward and backward."""
    row, gate = case.heads * case.head_size, case.heads * WORD
    out = int(rows.sum()) * row * case.element
    forward, backward = out, out
    for step in BRANCHES:
        if step == "window" and case.window == 0:
            continue
        own = int((rows & done(case, sharing, step)).sum())
        copies = int(rows.sum()) - own if each_row else 0
        forward += own * gate + (own + copies) * row * WORD
        # The branch's output and gate are read, their gradients written.
        backward += own * 2 * (gate + row * WORD)
    return forward, backward


def kept(case: Case, sharing: Strides, lists: torch.Tensor) -> dict[str, int]:
    """part -> bytes that the backward needs of the forward: operands, pooled keys (counted with the first row), gates, and of
    each branch's rows the output, the log-sum-exp and the list. k and v count at the key's own row."""
    found = {}
    for part in PARTS:
        rows = part_of(case.rows, part)
        attended = torch.zeros_like(rows)
        total = int(rows.sum()) * 2 * case.kv_heads * case.head_size * case.element
        if bool(rows[0]):
            total += case.rows // case.block * 2 * case.kv_heads * case.head_size * case.element
        for step in BRANCHES:
            here = rows & done(case, sharing, step)
            attended |= here
            total += int(here.sum()) * (attending(case, step)[1] + case.heads * WORD)  # and its gate
        found[part] = total + int(attended.sum()) * case.heads * case.head_size * case.element
    return found
