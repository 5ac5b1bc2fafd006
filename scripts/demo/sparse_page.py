"""The page on native sparse attention, from the contents of sparse.json."""

from __future__ import annotations

from . import charts, html
from .charts import Series
from .parts import NOTHING, Cell, by_reason, missing, spread_text, stages
from .sparse_measure import ALIKE, EXACT_ROWS, FORWARD, GRADIENTS, MODES, SHARING
from .units import bytes_text, count_text, error_text, seconds_text, times_text

NAMES = {"dense": "dense", "nsa": "NSA", "seed": "seed", "seed_4_3": "seed_4_3", "fast": "fast"}
COLOURS = {"dense": "c-baseline", "nsa": "c-flash", "seed": "c-p2", "seed_4_3": "c-p3", "fast": "c-p0"}
TITLES = {FORWARD: "Forward", GRADIENTS: "Forward and gradients"}
CONTENDERS = {  # of GPU rows: name, colour
    "heddle": ("Heddle NSA", "c-flash"),
    "fla": ("fla NSA", "c-p2"),
    "dense": ("Heddle dense", "c-baseline"),
    "fa3": ("FlashAttention-3 dense", "c-torch"),
    "default": ("Heddle NSA without sharing", "c-p3"),
}
KINDS = {
    "random": "random normals",
    "alike": f"neighbours alike (each position is {ALIKE} times the one before and a fresh normal)",
}
LEAST_CHANGE = 1e-3  # that charts show


def page(report: dict) -> str:
    """The whole document; `report` as sparse.run returns it. A section without a measurement is left out."""
    form = report["form"]
    return html.document(
        html.SPARSE,
        "native sparse attention",
        report,
        html.SPARSE_PAGES,
        title=_title(report),
        tiles_of_page=list(_tiles(report)),
        missing=missing(report["left_out"], report["settings"]["budget_seconds"]),
        left_out=by_reason(report["left_out"]),
        shared_rows=max(1, 64 // (form["heads"] // form["kv_heads"])),
        modes=list(NAMES.values()),
        costs=[_costs(report, direction) for direction in (FORWARD, GRADIENTS)],
        changes=_changes(report["changes"]),
        least_change=_percent(LEAST_CHANGE),
        recall=_recall(report["recall"]),
        exact_rows=EXACT_ROWS,
        rounding=_rounding(report["rounding"]),
        gpus=[_gpu(report["gpu"], gpu) for gpu in dict.fromkeys(row["gpu"] for row in report["gpu"])],
        stages=stages(report),
        resident_how=next((p["resident_how"] for p in report["memory"]), "VmHWM"),
    )


def _at(points: list[dict], direction: str) -> dict:
    """length -> mode -> point."""
    found: dict[int, dict] = {}
    for p in points:
        if p["direction"] == direction:
            found.setdefault(p["length"], {})[p["method"]] = p
    return found


def _longest(points: list[dict], direction: str) -> tuple[int, dict] | None:
    """The longest length at which both dense attention and NSA were measured."""
    both = {length: modes for length, modes in _at(points, direction).items() if {"dense", "nsa"} <= set(modes)}
    return max(both.items(), key=lambda pair: pair[0]) if both else None


def _title(report: dict) -> dict | None:
    far = _longest(report["times"], FORWARD)
    if not far:
        return None
    length, modes = far
    return {"length": length, "ratio": modes["dense"]["seconds"] / modes["nsa"]["seconds"]}


def _tiles(report: dict):
    for direction in (FORWARD, GRADIENTS):
        far = _longest(report["times"], direction)
        if far:
            length, modes = far
            fastest = min((m for m in modes if m != "dense"), key=lambda m: modes[m]["seconds"])
            ratio = modes["dense"]["seconds"] / modes[fastest]["seconds"]
            yield (
                times_text(ratio),
                f"the speed of dense attention with {NAMES[fastest]}, the fastest, {TITLES[direction].lower()}, at length "
                f"{count_text(length)}" + ("; what sharing changes stands below" if fastest in SHARING else ""),
            )
    far = _longest(report["memory"], FORWARD)
    if far:
        length, modes = far
        yield (
            bytes_text(modes["nsa"]["beside"]),
            f"beside operands and result is what NSA has in memory, forward, at length {count_text(length)}; dense attention "
            f"has {bytes_text(modes['dense']['beside'])}",
        )


def _line(points: list[dict], key: str, direction: str, note) -> list[Series]:
    found = []
    for mode in MODES:
        own = sorted(
            (p for p in points if (p["method"], p["direction"]) == (mode, direction) and p[key]),
            key=lambda p: p["length"],
        )
        tops = [p["median"] for p in own] if key == "seconds" else []
        found.append(
            Series(
                NAMES[mode], [(p["length"], p[key]) for p in own], COLOURS[mode], False, [note(p) for p in own], tops
            )
        )
    return found


def _costs(report: dict, direction: str) -> dict:
    """Time and memory against length."""
    title = TITLES[direction]
    times, memory = ([p for p in report[what] if p["direction"] == direction] for what in ("times", "memory"))
    return {
        "title": title,
        "gradients": direction == GRADIENTS,
        "spread": spread_text(times),
        "time": charts.lines(
            f"{title}: seconds against length",
            _line(times, "seconds", direction, lambda p: f"least of {p['rounds']}, median {seconds_text(p['median'])}"),
            "length",
            seconds_text,
        ),
        "memory": charts.lines(
            f"{title}: bytes beside operands and results against length",
            _line(
                memory,
                "beside",
                direction,
                lambda p: f"operands {bytes_text(p['inputs'])}, results {bytes_text(p['results'])}",
            ),
            "length",
            bytes_text,
            base=2,
        ),
        "times": _rows(times, "seconds", seconds_text, "dense"),
        "bytes": _rows(memory, "beside", bytes_text, "nsa"),
        "laws": _laws(report["laws"][direction]),
    }


def _rows(points: list[dict], key: str, text, beside: str) -> list[list]:
    """The modes' figures, and how many times that of the mode `beside` each is, but for dense attention's."""
    rows = []
    for length in sorted({p["length"] for p in points}):
        own = {p["method"]: p[key] for p in points if p["length"] == length}
        base = own.get(beside)
        cells = []
        for mode in MODES:
            note = ""
            if mode in own and base and mode not in ("dense", beside):
                note = f"{times_text(own[mode] / base)} of {NAMES[beside]}"
            cells.append(Cell(text(own[mode]), note) if mode in own else NOTHING)
        rows.append([count_text(length), *cells])
    return rows


def _laws(fits: list[dict]) -> list[list]:
    return [
        [NAMES[f["method"]]]
        + [f"T^{f[key]['exponent']:.2f}" if f[key] else NOTHING for key in ("seconds", "workspace")]
        for f in fits
        if f["seconds"] or f["workspace"]
    ]


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _changes(points: list[dict]) -> list[tuple[str, str]]:
    """Kinds of tensors, and a chart of each."""
    drawn = []
    for kind, said in KINDS.items():
        series = [
            Series(
                NAMES[mode],
                [(p["length"], p["change"]) for p in points if (p["kind"], p["method"]) == (kind, mode)],
                COLOURS[mode],
            )
            for mode in SHARING
        ]
        chart = charts.lines(f"What sharing changes, {said}", series, "length", _percent, floor=LEAST_CHANGE)
        drawn.append((said, chart))
    return drawn


def _recall(points: list[dict]) -> list[list[str]]:
    return [
        [
            count_text(p["length"]), KINDS[p["kind"]], f"{p['similarity']:.2f}", f"{100 * p['overlap']:.1f} %",
            f"{100 * p['own_mass']:.1f} %", f"{100 * p['anchor_mass']:.1f} %",
        ]
        for p in points
    ]  # fmt: skip


def _rounding(points: list[dict]) -> dict:
    lengths = sorted({p["length"] for p in points})
    found = {(p["method"], p["length"]): p["error"] for p in points}
    rows = [
        [NAMES[mode]] + [error_text(found[mode, s]) if (mode, s) in found else NOTHING for s in lengths]
        for mode in MODES
        if any((mode, s) in found for s in lengths)
    ]
    return {"lengths": [count_text(s) for s in lengths], "rows": rows}


def _gpu(rows: list[dict], gpu: str) -> dict:
    own = [row for row in rows if row["gpu"] == gpu]
    return {
        "name": gpu,
        "files": list(dict.fromkeys((row["file"], row["date"][:10]) for row in own)),
        "older": any(row["older"] for row in own),
        "charts": _gpu_charts(own),
        "rows": [_gpu_row(row) for row in own],
    }


def _gpu_charts(rows: list[dict]) -> list[tuple[str, str]]:
    """Time against length: a chart for each form and direction, ways of sharing in it."""
    whole = [row for row in rows if "form" in row and row["unit"] == "ms"]
    drawn = []
    for form, direction in dict.fromkeys((row["form"], row["direction"]) for row in whole):
        own = [row for row in whole if (row["form"], row["direction"]) == (form, direction)]
        points: dict[tuple[str, str], list] = {}
        for row in sorted(own, key=lambda row: row["length"]):
            for contender, ms in row["figures"].items():
                if row["preset"] and contender == "heddle":
                    kind = (f"Heddle {row['preset']}", COLOURS[row["preset"]])
                elif row["preset"] or contender not in CONTENDERS:  # the plain row has it
                    continue
                else:
                    kind = CONTENDERS[contender]
                points.setdefault(kind, []).append((row["length"], ms / 1e3))
        series = [Series(name, found, colour) for (name, colour), found in points.items()]
        chart = charts.lines(f"{form}, {direction}: time against length", series, "length", seconds_text)
        drawn.append((f"{direction.capitalize()}, {form}", chart))
    return drawn


def _gpu_row(row: dict) -> dict:
    own = row["figures"].get("heddle")
    others = [
        f"{CONTENDERS.get(name, (name, ''))[0]} {_figure(value, row['unit'])}"
        for name, value in row["figures"].items()
        if name != "heddle"
    ]
    others += [f"{CONTENDERS.get(name, (name, ''))[0]}: {why}" for name, why in row["absent"].items()]
    return {
        "name": row["name"] + (" †" if row["older"] else ""),
        "heddle": _figure(own, row["unit"]) if own is not None else NOTHING,
        "others": others,
    }


def _figure(value: float, unit: str) -> str:
    return bytes_text(value * 2**20) if unit == "MiB" else seconds_text(value / 1e3)
