"""Attention alone: time against length, batch, heads and head size, and its error against float64."""

from __future__ import annotations

import math
import statistics

from . import isolate, machine
from .memory import inputs, needed
from .progress import NO_MEMORY, OUT_OF_TIME

STAGE = "Attention alone: time against length"
MOST_ROUNDS = 25
LEAST_ROUNDS = 3


def _runner(method: str, q, k, v):
    import heddle
    import torch.nn.functional as functional

    if method != "torch":
        return lambda: heddle.attention(q, k, v, method=method)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # torch's layout is [B, H, S, D]; strides are free there as well
    return lambda: functional.scaled_dot_product_attention(q, k, v)


class Timer:
    """Times points (B, H, S, D) for several (method, dtype) side by side, in rounds, so that all meet the same noise."""

    def __init__(self, progress):
        self.progress = progress
        self._rate: dict = {}  # (method, dtype) -> seconds of one pair and channel, from the last point

    def expected(self, shape: tuple, kind: tuple) -> float:
        """Seconds of one call, from the last point of this kind; a cautious 20 GFLOP/s before there is one."""
        batch, heads, length, head_size = shape
        return self._rate.get(kind, 4 / 20e9) * batch * heads * length * length * head_size

    def along(self, shapes, kinds, share: float, say=True) -> list[dict]:
        """The points of all shapes, in order; repeats take at most `share` seconds of each kind, less when the stage is short of time."""
        points = []
        for index, shape in enumerate(shapes):
            # Half of what is left is kept for the shapes to come, which are longer.
            fair = 0.5 * self.progress.left() / ((len(shapes) - index) * len(kinds))
            fresh = self.point(shape, kinds, min(share, fair))
            points += fresh
            if say and fresh:
                self.progress.step(f"B {shape[0]} H {shape[1]} S {shape[2]} D {shape[3]}: {said(fresh)}")
        return points

    def point(self, shape: tuple, kinds, share: float) -> list[dict]:
        """Times of every kind at this shape: least and median seconds. `share`: seconds to spend on repeats of each kind.

        A kind that does not fit in memory or in the stage's time is left out and recorded.
        """
        batch, heads, length, head_size = shape
        runs, seconds, missing = {}, {}, {}
        tensors = {dtype: inputs(*shape, dtype) for dtype in dict.fromkeys(dtype for _, dtype in kinds)}
        promised = 0.0
        for kind in kinds:
            cost = 2 * self.expected(shape, kind)
            if needed(shape, *kind) > 0.8 * machine.memory_bytes():
                missing.setdefault(NO_MEMORY, []).append(" ".join(kind))
            elif promised + cost > self.progress.left():
                missing.setdefault(OUT_OF_TIME, []).append(" ".join(kind))
            else:
                promised += cost
                runs[kind] = _runner(kind[0], *tensors[kind[1]])
                first, _ = isolate.seconds(runs[kind])
                seconds[kind] = []
                self._rate[kind] = first / (batch * heads * length * length * head_size)
        for why, names in missing.items():
            at = f"batch {batch}, {heads} heads, length {length}, head size {head_size}"
            self.progress.leave_out(f"time at {at} of {', '.join(names)}", why, len(names), length)
        for round_number in range(MOST_ROUNDS):
            spent = {kind: sum(times) for kind, times in seconds.items()}
            going = [kind for kind in runs if round_number < LEAST_ROUNDS or spent[kind] < share]
            if not going or (round_number > 0 and self.progress.left() <= 0):
                break
            for kind in going:
                # A call of microseconds is repeated until a clock reading costs nothing beside it.
                inner = max(1, int(0.002 / max(self.expected(shape, kind), 1e-9)))
                taken, _ = isolate.seconds(lambda run=runs[kind], inner=inner: [run() for _ in range(inner)] and None)
                seconds[kind].append(taken / inner)
                self._rate[kind] = min(seconds[kind]) / (batch * heads * length * length * head_size)
        return [
            {
                "batch": batch,
                "heads": heads,
                "length": length,
                "head_size": head_size,
                "method": method,
                "dtype": dtype,
                "seconds": min(times),
                "median": statistics.median(times),
                "rounds": len(times),
                "gflops": 4e-9 * batch * heads * length**2 * head_size / min(times),
            }
            for (method, dtype), times in seconds.items()
            if times
        ]


def said(points: list[dict]) -> str:
    """One line for the progress display."""
    return ", ".join(f"{p['method']} {p['dtype']} {1e3 * p['seconds']:.2f} ms" for p in points)


def batch_shapes(lengths, heads: int, head_size: int, most_tokens: int) -> list[tuple]:
    """Shapes with batch 1, 2, 4, ... up to most_tokens tokens in the call, for every length."""
    return [
        (2**power, heads, length, head_size)
        for length in lengths
        for power in range(max(1, (most_tokens // length).bit_length()))
    ]


def choose_batch(points: list[dict]) -> list[dict]:
    """For each length and kind: the smallest batch whose tokens per second are within 3 % of the best measured."""
    rows = []
    for length, method, dtype in sorted({(p["length"], p["method"], p["dtype"]) for p in points}):
        own = sorted(
            (p for p in points if (p["length"], p["method"], p["dtype"]) == (length, method, dtype)),
            key=lambda p: p["batch"],
        )
        rates = [p["batch"] * p["length"] / p["seconds"] for p in own]
        index = next(i for i, rate in enumerate(rates) if rate >= 0.97 * max(rates))
        rows.append(
            {
                "length": length,
                "method": method,
                "dtype": dtype,
                "batch": own[index]["batch"],
                "tokens_per_second": rates[index],
                "gain_over_batch_1": rates[index] / rates[0],
                "largest_tried": own[-1]["batch"],
            }
        )
    return rows


def _exact(q, k, v, rows):
    """float64 attention of the given query rows: [rows, H, D], from any dtype."""
    import torch

    q, k, v = (x[0].transpose(0, 1).double() for x in (q[:, rows], k, v))
    scores = q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])
    return (torch.softmax(scores, -1) @ v).transpose(0, 1)


def _plain(q, k, v, rows):
    """The same rows by plain torch operations in the tensors' own dtype."""
    import torch

    q, k, v = (x[0].transpose(0, 1) for x in (q[:, rows], k, v))
    scores = (q @ k.transpose(1, 2)) * (1 / math.sqrt(q.shape[-1]))
    return (torch.softmax(scores, -1) @ v).transpose(0, 1)


def _relative(found, exact) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def errors(lengths, kinds, heads: int, head_size: int, progress, most_rows: int = 64) -> list[dict]:
    """Errors at each length (batch 1), over `most_rows` query rows spread over the sequence and all heads.

    own: relative error (Frobenius) against float64 on the same, already rounded, operands. largest: the largest element error over
    the root mean square of the result. plain: the error of plain torch operations in that dtype, on the same operands.
    total: like own, but against float64 on the operands before they were rounded: what a user of that dtype gets.
    """
    import heddle
    import torch

    points = []
    for length in lengths:
        rows = torch.linspace(0, length - 1, min(length, most_rows)).round().long()
        originals = inputs(1, heads, length, head_size, "float32")
        target = _exact(*originals, rows)
        for dtype in dict.fromkeys(dtype for _, dtype in kinds):
            operands = [x.to(getattr(torch, dtype)) for x in originals]
            exact, plain = _exact(*operands, rows), _relative(_plain(*operands, rows), _exact(*operands, rows))
            for method in (method for method, other in kinds if other == dtype and method != "torch"):
                what = f"error of {method} {dtype} at length {length}"
                if needed((1, heads, length, head_size), method, dtype) > 0.8 * machine.memory_bytes():
                    progress.leave_out(what, NO_MEMORY, length=length)
                    continue
                if progress.left() <= 0:
                    progress.leave_out(what, OUT_OF_TIME, length=length)
                    continue
                found = heddle.attention(*operands, method=method)[0, rows]
                points.append(
                    {
                        "length": length,
                        "method": method,
                        "dtype": dtype,
                        "own": _relative(found, exact),
                        "largest": float((found.double() - exact).abs().max() / exact.square().mean().sqrt()),
                        "plain": plain,
                        "total": _relative(found, target),
                        "rows": len(rows),
                    }
                )
        own = [f"{p['method']} {p['dtype']} {p['own']:.1e}" for p in points if p["length"] == length]
        progress.step(f"length {length:5d}: " + ", ".join(own))
    return points
