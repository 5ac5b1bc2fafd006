"""Native sparse attention beside dense attention on the CPU: time, memory, rounding errors, and what sharing changes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from . import isolate, rounds
from .progress import OUT_OF_TIME
from .rounds import FORWARD, GRADIENTS

DTYPE = "float32"
MODES = ("dense", "nsa", "seed", "seed_4_3", "fast")
SHARING = MODES[2:]
KINDS = ("random", "alike")
ALIKE = 0.95  # correlation of neighbouring positions
EXACT_ROWS = 64


@dataclass(frozen=True)
class Form:
    """What is the same in all calls; batch 1."""

    heads: int = 32
    kv_heads: int = 8
    head_size: int = 128
    blocks: int = 16
    block_size: int = 64
    window: int = 512

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads


def inputs(form: Form, length: int, kind: str = "random") -> list:
    """q, k, v [1, T, heads, D] and three gates [1, T, HQ].

    random: independent normals. alike: of the same variance, but each position is ALIKE times the one before and a fresh
    normal, as neighbouring positions of a model are alike.
    """
    import torch

    generator = torch.Generator().manual_seed(0)
    tensors = [
        torch.randn(1, length, heads, form.head_size, generator=generator)
        for heads in (form.heads, form.kv_heads, form.kv_heads)
    ]
    if kind == "alike":
        for x in tensors:
            x[:, 1:] *= math.sqrt(1 - ALIKE**2)
            for t in range(1, length):
                x[:, t] += ALIKE * x[:, t - 1]
    gates = torch.sigmoid(torch.randn(3, 1, length, form.heads, generator=generator))
    return [*tensors, *gates]


def attend(form: Form, mode: str, x: list):
    """One forward call of a mode."""
    import heddle
    import heddle.nsa

    if mode == "dense":
        return heddle.attention(*x[:3], causal="top_left")
    sharing = heddle.nsa.presets(form.group)[mode] if mode in SHARING else {}
    return heddle.nsa.parallel_nsa(*x, None, form.blocks, form.block_size, form.window, **sharing)


def used(mode: str, x: list) -> list:
    """The operands of a mode: dense attention has no gates."""
    return x[:3] if mode == "dense" else x


def runner(form: Form, mode: str, direction: str, x: list):
    """A call without arguments: forward, or forward and gradients of all operands."""
    import torch

    def forward():
        with torch.no_grad():
            return attend(form, mode, x)

    leaves = [y.detach().requires_grad_() for y in x]
    do = torch.ones_like(x[0]) if direction == GRADIENTS else None  # an operand, made before: o has the shape of q

    def gradients():
        o = attend(form, mode, leaves)
        return o.detach(), torch.autograd.grad(o, used(mode, leaves), do)

    return forward if direction == FORWARD else gradients


def needed(form: Form, length: int, direction: str) -> int:
    """Bytes that a call takes at most, operands and results included, to decide whether to try it."""
    return (10 if direction == FORWARD else 25) * 4 * length * form.heads * form.head_size


class Timer(rounds.Timer):
    """Of the modes of one form."""

    def __init__(self, form: Form, progress):
        super().__init__(MODES, DTYPE, progress)
        self.form = form

    def inputs(self, length: int) -> list:
        return inputs(self.form, length)

    def runner(self, mode: str, direction: str, x: list):
        return runner(self.form, mode, direction, x)

    def needed(self, mode: str, length: int, direction: str) -> int:
        return needed(self.form, length, direction)

    def work(self, length: int, direction: str) -> float:
        return 2 * self.form.heads * self.form.head_size * length**2 * (1 if direction == FORWARD else 3.5)

    def growth(self, mode: str) -> float:
        return 2 if mode == "dense" else 1.5


def _held(form: Form, mode: str, direction: str, length: int) -> dict:
    """What one call has in memory at its peak, beside operands and results. In a process of its own."""
    import heddle
    import torch

    isolate.fresh_pages()
    torch.set_num_threads(heddle.num_threads())
    # Code pages, threads and their stacks become resident at the first call; they are not what is asked for. Workspaces are,
    # and stay resident, too: two rows need next to none.
    runner(form, mode, direction, inputs(form, 2))()
    x = inputs(form, length)
    call = runner(form, mode, direction, x)
    with isolate.Residence() as residence:
        found = call()
    results = [found] if direction == FORWARD else [found[0], *found[1]]
    operands = used(mode, x) + ([x[0]] if direction == GRADIENTS else [])  # do is as large as q
    results_bytes = sum(y.numel() * y.element_size() for y in results)
    return {
        "length": length,
        "method": mode,
        "dtype": DTYPE,
        "direction": direction,
        "inputs": sum(y.numel() * y.element_size() for y in operands),
        "results": results_bytes,
        "resident": residence.grown,
        "beside": max(0, residence.grown - results_bytes),
        "resident_how": residence.how,
    }


def memory(form: Form, lengths, direction: str, timer: Timer) -> list[dict]:
    """A point for each length and mode."""
    return rounds.memory(timer, lengths, direction, lambda *of: isolate.call(_held, form, *of[:-1], timeout=of[-1]))


def relative(found, exact) -> float:
    """Frobenius."""
    return float((found.double() - exact.double()).norm() / exact.double().norm())


def dense_rounding(form: Form, x: list, o) -> float:
    """Of dense attention, on EXACT_ROWS rows that are spread over the sequence, against float64."""
    import torch

    q, k, v = (y[0].transpose(0, 1).double() for y in x[:3])
    length = q.shape[1]
    rows = torch.linspace(0, length - 1, min(length, EXACT_ROWS)).round().long()
    squares, differences = 0.0, 0.0
    for head in range(form.heads):  # a head at a time: float64 scores of all would be large
        scores = q[head, rows] @ k[head // form.group].T / math.sqrt(form.head_size)
        scores.masked_fill_(torch.arange(length) > rows[:, None], -math.inf)
        exact = torch.softmax(scores, -1) @ v[head // form.group]
        squares += float(exact.square().sum())
        differences += float((o[0, rows, head].double() - exact).square().sum())
    return math.sqrt(differences / squares)


def sparse_rounding(form: Form, length: int, mode: str) -> float:
    """Of a mode of native sparse attention, on all rows of one key/value head's group, against the naive function in float64."""
    import heddle.nsa
    import torch

    small = Form(form.group, 1, form.head_size, form.blocks, form.block_size, form.window)
    x = inputs(small, length)
    sharing = heddle.nsa.presets(form.group)[mode] if mode in SHARING else {}
    with torch.no_grad():
        exact = heddle.nsa.naive_nsa_with_compression(
            *(y.double() for y in x), form.blocks, form.block_size, form.window, **sharing
        )
        return relative(attend(small, mode, x), exact)


def rounding(form: Form, lengths, naive_lengths, timer: Timer) -> list[dict]:
    """Relative errors against float64: dense attention at `lengths`, the sparse modes at `naive_lengths`."""
    import torch

    progress, points = timer.progress, []
    for length in lengths:
        if 1.5 * timer.expected("dense", FORWARD, length) + 1 > progress.left():
            progress.leave_out(f"rounding error of dense at length {length}", OUT_OF_TIME, length=length)
            continue
        x = inputs(form, length)
        with torch.no_grad():
            error = dense_rounding(form, x, attend(form, "dense", x))
        points.append({"length": length, "method": "dense", "error": error})
    cost = 5.0
    for length in naive_lengths:
        for mode in MODES[1:]:
            if cost > progress.left():
                progress.leave_out(f"rounding error of {mode} at length {length}", OUT_OF_TIME, length=length)
                continue
            cost, error = isolate.seconds(lambda length=length, mode=mode: sparse_rounding(form, length, mode))
            points.append({"length": length, "method": mode, "error": error})
        cost *= 4
    for p in points:
        progress.step(f"{p['method']} at length {p['length']}: {p['error']:.1e}")
    return points


def changes(form: Form, lengths, timer: Timer) -> list[dict]:
    """How far each way of sharing is from plain native sparse attention on the same tensors, for each kind of them."""
    import torch

    progress, points = timer.progress, []
    for length in lengths:
        cost = 1.3 * sum(timer.expected(mode, FORWARD, length) for mode in MODES[1:]) + 1
        for kind in KINDS:
            if cost > progress.left():
                what = f"what sharing changes on {kind} tensors at length {length}"
                progress.leave_out(what, OUT_OF_TIME, len(SHARING), length)
                continue
            x = inputs(form, length, kind)
            with torch.no_grad():
                plain = attend(form, "nsa", x)
                fresh = [
                    {"length": length, "kind": kind, "method": mode, "change": relative(attend(form, mode, x), plain)}
                    for mode in SHARING
                ]
            points += fresh
            progress.step(
                f"{kind}, length {length}: " + ", ".join(f"{p['method']} {100 * p['change']:.1f} %" for p in fresh)
            )
    return points


def recall(form: Form, lengths, timer: Timer, stride: int = 2, rows: int = 128) -> list[dict]:
    """How much of dense attention's probability lies on a row's blocks and on those of its anchor (heddle.nsa.sharing_report)."""
    import heddle.nsa

    progress, points = timer.progress, []
    for length in lengths:
        for kind in KINDS:
            if 8 * timer.expected("nsa", FORWARD, length) + 2 > progress.left():
                progress.leave_out(f"mass recall on {kind} tensors at length {length}", OUT_OF_TIME, length=length)
                continue
            found = heddle.nsa.sharing_report(
                *inputs(form, length, kind),
                form.blocks,
                form.block_size,
                form.window,
                query_stride=stride,
                rows=rows,
            )
            means = {
                name: float(getattr(found, name).mean())
                for name in ("similarity", "overlap", "own_mass", "anchor_mass")
            }
            points.append({"length": length, "kind": kind, "stride": stride, "rows": min(rows, found.rows)} | means)
            progress.step(f"{kind}, length {length}: {100 * means['own_mass']:.1f} % of dense attention's mass")
    return points
