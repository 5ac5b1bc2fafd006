"""Time: what is left of the budget, what was left out for it, and lines that show how far the run is."""

from __future__ import annotations

import sys
import time

OUT_OF_TIME = "out of time"
NO_MEMORY = "it does not fit in the memory that is free"


class Progress:
    """Prints stages and steps, shares the budget (seconds) among the stages, and records what did not fit."""

    def __init__(self, budget: float, out=None):
        self.budget = budget
        self.begun = time.monotonic()
        self.left_out: list[dict] = []
        self.stages: list[dict] = []
        self._out = out or sys.stdout
        self._deadline = self.begun + budget

    def elapsed(self) -> float:
        return time.monotonic() - self.begun

    def stage(self, name: str, share: float) -> None:
        """Begins a stage that may take `share` (0..1) of what is left of the budget."""
        self.end_stage()
        left = max(0.0, self.budget - self.elapsed())
        self._deadline = time.monotonic() + share * left
        self.stages.append({"name": name, "seconds": None, "allowed": share * left, "_begun": time.monotonic()})
        self._print(f"\n[{self.elapsed():5.0f} s] {name}")

    def end_stage(self) -> None:
        if self.stages and self.stages[-1]["seconds"] is None:
            self.stages[-1]["seconds"] = time.monotonic() - self.stages[-1].pop("_begun")

    def left(self) -> float:
        """Seconds left of this stage."""
        return self._deadline - time.monotonic()

    def step(self, text: str) -> None:
        self._print(f"  {text}")

    def leave_out(self, what: str, why: str, count: int = 1, length: int | None = None) -> None:
        """Says and records that `count` measurements were left out or cut short; `length`: the sequences' where it is one."""
        stage = self.stages[-1]["name"] if self.stages else ""
        self.left_out.append({"stage": stage, "what": what, "why": why, "count": count, "length": length})
        self._print(f"  left out: {what}: {why}")

    def _print(self, text: str) -> None:
        print(text, file=self._out, flush=True)
