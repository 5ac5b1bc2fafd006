"""The page on layers of adaptive sparse attention, from the contents of asam.json."""

from __future__ import annotations

from . import charts, claims, html
from .asam_measure import BATCHED, MODES, TIE
from .charts import Series
from .parts import NOTHING, Cell, by_reason, missing, spread_text, stages
from .rounds import FORWARD, GRADIENTS
from .units import bytes_text, count_text, error_text, seconds_text, times_text

NAMES = {"original": "Original", "flash": "Flash", "flash16": "Flash, 16 bits", "local": "local tiles"}
COLOURS = {"original": "c-baseline", "flash": "c-flash", "flash16": "c-p2", "local": "c-p3"}
TITLES = {FORWARD: "Forward", GRADIENTS: "Training: forward and gradients"}
FASTER_THAN_CLAIMED = 2.7  # the least of the factors below

#: Published for an RTX 3060 (12 GB) with torch 2.7.1: milliseconds of Original and Flash, and of training in 32 and in 16 bits.
PUBLISHED_FORWARD = {
    128: (7.73, 2.60),
    256: (11.63, 2.62),
    512: (11.60, 2.59),
    1024: (16.23, 6.01),
    2048: (43.73, 15.04),
}
PUBLISHED_TRAINING = {128: (11.35, 11.18), 256: (9.88, 11.54), 512: (16.45, 14.86), 1024: (41.66, 20.66)}
PUBLISHED_LONGEST = {"original": "about 2048", "flash": "4096 and more", "flash16": "8192 and more"}
PUBLISHED_MEMORY = {
    "original": "about 750 MB",
    "flash": "about 250 MB, estimated",
    "flash16": "about 125 MB, estimated",
}
PUBLISHED_BEST = {128: "Flash", 256: "Flash", 512: "Flash", 1024: "Flash, 16 bits"}


def page(report: dict) -> str:
    """The whole document; `report` as asam.run returns it. A section without a measurement is left out."""
    return html.document(
        html.ASAM,
        "adaptive sparse attention",
        report,
        html.SPARSE_PAGES,
        title=_title(report),
        missing=missing(report["left_out"], report["settings"]["budget_seconds"]),
        left_out=by_reason(report["left_out"]),
        modes=list(NAMES.values()),
        costs=[_costs(report, direction) for direction in (FORWARD, GRADIENTS)],
        published=_published(report),
        claims=_claims(report),
        batches=_batches(report),
        batch_length=report["settings"]["batch_length"],
        tie=f"{100 * (TIE - 1):.0f}",
        longest=_longest(report["longest"]),
        best=_best(report["times"]),
        agreement=error_text(report["agreement"]) if report["agreement"] is not None else None,
        stages=stages(report),
        resident_how=next((p["resident_how"] for p in report["memory"]), "VmHWM"),
    )


def _seconds(points: list[dict], direction: str) -> dict:
    """(mode, length) -> seconds."""
    return {(p["method"], p["length"]): p["seconds"] for p in points if p["direction"] == direction}


def _faster(points: list[dict], direction: str, slow: str, quick: str) -> dict:
    """length -> how many times as fast."""
    found = _seconds(points, direction)
    lengths = sorted({length for _, length in found})
    return {s: found[slow, s] / found[quick, s] for s in lengths if (slow, s) in found and (quick, s) in found}


def _title(report: dict) -> dict | None:
    ratios = _faster(report["times"], FORWARD, "original", "flash")
    if not ratios:
        return None
    return {"least": min(ratios.values()), "most": max(ratios.values()), "short": min(ratios), "long": max(ratios)}


def _costs(report: dict, direction: str) -> dict:
    times, memory = ([p for p in report[what] if p["direction"] == direction] for what in ("times", "memory"))
    return {
        "title": TITLES[direction],
        "spread": spread_text(times),
        "time": _chart(f"{TITLES[direction]}: seconds against length", times, "seconds", seconds_text),
        "memory": _chart(f"{TITLES[direction]}: bytes against length", memory, "beside", bytes_text, 2),
        "times": _rows(times, "seconds", seconds_text),
        "bytes": _rows(memory, "beside", bytes_text),
    }


def _chart(name: str, points: list[dict], key: str, text, base: float = 10) -> str:
    series = []
    for mode in MODES:
        own = sorted((p for p in points if p["method"] == mode and p[key]), key=lambda p: p["length"])
        tops = [p["median"] for p in own] if key == "seconds" else []
        series.append(Series(NAMES[mode], [(p["length"], p[key]) for p in own], COLOURS[mode], tops=tops))
    return charts.lines(name, series, "length", text, base=base)


def _rows(points: list[dict], key: str, text) -> list[list]:
    """The modes' figures, and how many times less than Original's each is."""
    rows = []
    for length in sorted({p["length"] for p in points}):
        own = {p["method"]: p[key] for p in points if p["length"] == length}
        base = own.get("original")
        cells = []
        for mode in MODES:
            note = f"1/{base / own[mode]:.2f}" if mode != "original" and base and own.get(mode) else ""
            cells.append(Cell(text(own[mode]), note) if mode in own else NOTHING)
        rows.append([count_text(length), *cells])
    return rows


def _published(report: dict) -> list[dict]:
    """Tables of what was published beside what was measured."""
    forward, training = (_seconds(report["times"], direction) for direction in (FORWARD, GRADIENTS))
    return [
        {
            "title": "Original and Flash, forward",
            "head": ["length", "Original there", "Flash there", "times", "Original here", "Flash here", "times here"],
            "rows": [_beside(s, ms, forward.get(("original", s)), forward.get(("flash", s))) for s, ms in PUBLISHED_FORWARD.items()],
        },
        {
            "title": "Flash, training in 32 and in 16 bits",
            "head": ["length", "32 bits there", "16 bits there", "times", "32 bits here", "16 bits here", "times here"],
            "rows": [_beside(s, ms, training.get(("flash", s)), training.get(("flash16", s))) for s, ms in PUBLISHED_TRAINING.items()],
        },
    ]  # fmt: skip


def _beside(length: int, published: tuple[float, float], slow: float | None, quick: float | None) -> list:
    there = [f"{ms:.2f} ms" for ms in published] + [times_text(published[0] / published[1])]
    here = [seconds_text(x) if x else NOTHING for x in (slow, quick)]
    return [count_text(length), *there, *here, times_text(slow / quick) if slow and quick else NOTHING]


def _claims(report: dict) -> list[dict]:
    rows = []
    ratios = _faster(report["times"], FORWARD, "original", "flash")
    for length, (slow, quick) in PUBLISHED_FORWARD.items():
        own, claimed = ratios.get(length), slow / quick
        rows.append(
            claims.row(
                f"At length {length}, Flash is {times_text(claimed)} as fast as Original",
                own and times_text(own),
                f"at least {times_text(FASTER_THAN_CLAIMED)}, the least that was published",
                own and own >= FASTER_THAN_CLAIMED,
            )
        )
    halves = _faster(report["times"], GRADIENTS, "flash", "flash16")
    for length, wins in ((256, False), (1024, True)):
        own = halves.get(length)
        rows.append(
            claims.row(
                f"Training in 16 bits {'is twice as fast' if wins else 'gains nothing'} at length {length}",
                own and times_text(own),
                f"at least {times_text(1.6)}" if wins else f"no more than {times_text(1.1)}",
                own and (own >= 1.6 if wins else own <= 1.1),
            )
        )
    longest = {row["method"]: row["longest"] for row in report["longest"]}
    own = longest.get("original") and longest.get("flash") and longest["flash"] / longest["original"]
    rows.append(
        claims.row(
            "Flash takes sequences two to four times as long in the same memory",
            own and times_text(own),
            f"at least {times_text(2)}",
            own and own >= 2,
        )
    )
    return rows


def _batches(report: dict) -> list[list]:
    rows = []
    for row in report["best_batches"]:
        beside, twice = row["beside"], row["twice"]
        rows.append(
            [
                NAMES[row["method"]],
                row["batch"],
                f"{count_text(row['rate'])} tokens/s",
                bytes_text(beside) if beside is not None else NOTHING,
                f"{count_text(twice['rate'])} tokens/s" if twice else NOTHING,
                bytes_text(twice["beside"]) if twice and twice["beside"] is not None else NOTHING,
            ]
        )
    return rows


def _longest(found: list[dict]) -> list[list]:
    def tried(entry: dict, key: str):
        if key not in entry:
            return NOTHING
        said = entry[key]
        return f"{count_text(said['length'])}: " + (
            f"ran, {seconds_text(said['seconds'])}" if said["fits"] else "did not fit"
        )

    return [
        [
            NAMES[e["method"]], count_text(e["longest"]), tried(e, "inside"), tried(e, "beyond"),
            PUBLISHED_LONGEST[e["method"]], PUBLISHED_MEMORY[e["method"]],
        ]
        for e in found
    ]  # fmt: skip


def _best(points: list[dict]) -> list[list]:
    """The fastest of Original, Flash and Flash in 16 bits at each length, forward and in training."""
    rows = []
    for length in sorted({p["length"] for p in points}):
        cells = []
        for direction in (FORWARD, GRADIENTS):
            own = {mode: s for (mode, at), s in _seconds(points, direction).items() if at == length and mode in BATCHED}
            if not own:
                cells.append(NOTHING)
                continue
            best = min(own, key=lambda mode: own[mode])
            over = f"{times_text(own['original'] / own[best])} Original's speed" if "original" in own else ""
            cells.append(Cell(NAMES[best], over))
        published = PUBLISHED_BEST.get(length, PUBLISHED_BEST[1024] if length > 1024 else NOTHING)
        rows.append([count_text(length), *cells, published])
    return rows
