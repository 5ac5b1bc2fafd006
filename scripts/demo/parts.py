"""What sections of the pages are made of: cells of tables, and words on noise and on what was left out."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from markupsafe import Markup

from .progress import NO_MEMORY, OUT_OF_TIME
from .units import count_text, seconds_text, times_text

DTYPE = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


@dataclass
class Cell:
    """A cell of a table with more than text: a note below it, a look of its own (a CSS class), a mark."""

    text: str
    note: str = ""
    look: str = ""
    best: bool = False

    def __html__(self) -> Markup:
        said = Markup('<span class="{}">{}</span>').format(self.look, self.text) if self.look else self.text
        return Markup("{}<small>{}</small>").format(said, self.note) if self.note else Markup("{}").format(said)


NOTHING = Cell("–", look="none")


def figure(number: str, unit: str) -> Markup:
    """A tile's figure with a small unit behind it."""
    return Markup("{} <small>{}</small>").format(number, unit)


def kind_text(method: str, dtype: str) -> str:
    return f"{method} {DTYPE[dtype]}"


def verdict(holds: bool | None) -> str:
    return {True: "holds", False: "does not hold here", None: "not measured"}[holds]


def rounds_text(median: float, rounds: int, text=seconds_text) -> str:
    """What stands beside the least of several rounds, so that their spread is seen."""
    return "1 round" if rounds == 1 else f"median {text(median)} of {rounds} rounds"


def spread_text(points: list[dict]) -> str:
    """A sentence on how far the medians of points are above their least times; "" without points of several rounds."""
    spreads = [(p["median"] / p["seconds"], p) for p in points if p["rounds"] > 1]
    if not spreads:
        return ""
    most, worst = max(spreads, key=lambda pair: pair[0])
    return (
        "How noisy this machine was: the median round took "
        f"{times_text(statistics.median(ratio for ratio, _ in spreads))} the least at a typical point, "
        f"{times_text(most)} at the worst ({kind_text(worst['method'], worst['dtype'])} at "
        f"{count_text(worst['length'])}, {worst['rounds']} rounds)."
    )


def disturbed(unequal: list[dict], name) -> str:
    """Runs whose unchanged parts differ, and by how much; `unequal` as encode.unequal finds them, `name(index)`."""
    pairs: dict = {}
    for u in unequal:
        pairs.setdefault((u["slow"], u["quick"]), []).append(f"{u['stage'].replace('_', ' ')} {times_text(u['ratio'])}")
    said = [f"with {name(slow)} than with {name(quick)} ({', '.join(took)})" for (slow, quick), took in pairs.items()]
    return "; ".join(said)


def missing(items: list[dict], budget: float) -> dict | None:
    """How much is missing, and why: `reasons` are pairs of a count and "time", "memory" or "other"."""
    if not items:
        return None
    counts: dict[str, int] = {}
    for item in items:
        counts[item["why"]] = counts.get(item["why"], 0) + item["count"]
    total = sum(counts.values())
    known = {OUT_OF_TIME: "time", NO_MEMORY: "memory"}
    reasons = [(counts.pop(why), word) for why, word in known.items() if why in counts]
    reasons += [(sum(counts.values()), "other")] if counts else []
    return {"total": total, "reasons": reasons, "budget": budget}


def by_reason(items: list[dict]) -> list[tuple[str, str, list[str]]]:
    """What was left out, for each stage and reason."""
    found: dict = {}
    for item in items:
        found.setdefault((item["stage"], item["why"]), []).append(item["what"])
    return [(stage, why, what) for (stage, why), what in found.items()]


def stages(report: dict, whole: str | Cell = "measuring, in all") -> list[list]:
    """Rows on where the time of a run went."""
    rows = [[s["name"], f"{s['seconds']:.0f} s", f"{s['allowed']:.0f} s"] for s in report["stages"]]
    rows.append([whole, f"{report['seconds']:.0f} s", f"{report['settings']['budget_seconds']:.0f} s"])
    if report["build_seconds"] is not None:
        rows.append(["building, before it", f"{report['build_seconds']:.0f} s", "not counted"])
    return rows
