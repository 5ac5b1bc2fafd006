"""Calls of several modes side by side at each length: in rounds, so that all meet the same noise, and what they have in memory."""

from __future__ import annotations

import statistics

from . import isolate, machine
from .progress import NO_MEMORY, OUT_OF_TIME

FORWARD, GRADIENTS = "forward", "gradients"
MOST_ROUNDS, LEAST_ROUNDS = 9, 2
CAUTIOUS = 20e9  # FLOP/s that are expected of what was never timed


def named(mode: str, direction: str, length: int) -> str:
    return f"{direction} of {mode} at length {length}"


class Timer:
    """Times the modes of each length. What they are is the subclass's to say.

    Args:
      modes: their names, in the order in which they take turns.
      dtype: of the points.
      progress: what is left of the time.
    """

    def __init__(self, modes: tuple[str, ...], dtype: str, progress):
        self.modes, self.dtype, self.progress = modes, dtype, progress
        self.last: dict = {}  # (mode, direction) -> length and seconds of the last point

    def inputs(self, length: int):
        """Operands of a call, the same for all modes."""
        raise NotImplementedError

    def runner(self, mode: str, direction: str, x):
        """A call without arguments: forward, or forward and gradients of all operands."""
        raise NotImplementedError

    def needed(self, mode: str, length: int, direction: str) -> int:
        """Bytes that a call of a mode takes at most, operands and results included, to decide whether to try it."""
        raise NotImplementedError

    def work(self, length: int, direction: str) -> float:
        """FLOPs of the slowest mode, about."""
        raise NotImplementedError

    def growth(self, mode: str) -> float:
        """The power of the length that its time is expected to grow with."""
        raise NotImplementedError

    def expected(self, mode: str, direction: str, length: int) -> float:
        """Seconds of a call; from the last point of this kind, else a cautious guess."""
        at, seconds = self.last.get((mode, direction), (length, self.work(length, direction) / CAUTIOUS))
        return seconds * (length / at) ** self.growth(mode)

    def along(self, lengths, direction: str, share: float) -> list[dict]:
        """Points of all lengths; repeats take at most `share` seconds of a mode, less where the stage is short of time."""
        points = []
        for index, length in enumerate(lengths):
            fair = 0.5 * self.progress.left() / ((len(lengths) - index) * len(self.modes))
            fresh = self.point(length, direction, min(share, fair))
            points += fresh
            if fresh:
                said = ", ".join(f"{p['method']} {1e3 * p['seconds']:.1f} ms" for p in fresh)
                self.progress.step(f"{direction}, length {length}: {said}")
        return points

    def point(self, length: int, direction: str, share: float) -> list[dict]:
        progress = self.progress
        going, seconds, firsts = {}, {}, {}
        x = None
        for mode in self.modes:
            if self.needed(mode, length, direction) > 0.8 * machine.memory_bytes():
                progress.leave_out(f"time: {named(mode, direction, length)}", NO_MEMORY, length=length)
                continue
            if self.expected(mode, direction, length) > progress.left():
                progress.leave_out(f"time: {named(mode, direction, length)}", OUT_OF_TIME, length=length)
                continue
            x = self.inputs(length) if x is None else x
            going[mode] = self.runner(mode, direction, x)
            firsts[mode], _ = isolate.seconds(going[mode])
            self.last[mode, direction] = (length, firsts[mode])
            # What the first call does once weighs nothing beside seconds.
            seconds[mode] = [firsts[mode]] if firsts[mode] > 1 else []
        for number in range(MOST_ROUNDS):
            for mode, call in going.items():
                own = seconds[mode]
                enough = len(own) >= LEAST_ROUNDS and sum(own) >= share
                late = firsts[mode] > progress.left() and bool(own or number)
                if enough or late or len(own) >= MOST_ROUNDS:
                    continue
                own.append(isolate.seconds(call)[0])
        points = []
        for mode, own in seconds.items():
            if not own:
                own.append(firsts[mode])
            self.last[mode, direction] = (length, min(own))
            points.append(
                {
                    "length": length, "method": mode, "dtype": self.dtype, "direction": direction,
                    "seconds": min(own), "median": statistics.median(own), "rounds": len(own),
                }
            )  # fmt: skip
        return points


def memory(timer: Timer, lengths, direction: str, held) -> list[dict]:
    """A point for each length and mode. `held(mode, direction, length, timeout)` is a call in a process of its own."""
    progress, points = timer.progress, []
    for length in lengths:
        for mode in timer.modes:
            what = f"memory: {named(mode, direction, length)}"
            if timer.needed(mode, length, direction) > 0.8 * machine.memory_bytes():
                progress.leave_out(what, NO_MEMORY, length=length)
            elif 1.2 * timer.expected(mode, direction, length) + 1 > progress.left():
                progress.leave_out(what, OUT_OF_TIME, length=length)
            else:
                try:
                    points.append(held(mode, direction, length, progress.left() + 10))
                except isolate.ChildFailed as failed:
                    progress.leave_out(what, str(failed), length=length)
        own = [f"{p['method']} {p['beside'] / 2**20:.1f} MiB" for p in points if p["length"] == length]
        if own:
            progress.step(f"{direction}, length {length}: beside operands and results " + ", ".join(own))
    return points
