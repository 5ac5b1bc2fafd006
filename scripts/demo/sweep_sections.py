"""Sections of the first page on attention alone: against length, the laws it keeps, and one extent at a time."""

from __future__ import annotations

from dataclasses import dataclass, replace

from . import charts
from .charts import Series
from .laws import FIT_FROM, LEAST_LENGTHS
from .parts import DTYPE, NOTHING, Cell, kind_text, rounds_text, spread_text, verdict
from .units import bytes_text, count_text, error_text, seconds_text, times_text


@dataclass
class Curves:
    """A chart, and its figures in a fold below it."""

    title: str
    chart: str  # "" if nothing was measured
    fold: str
    head: list[str]
    rows: list[list]
    left: int = 1


def _kinds(points: list[dict]) -> list[tuple[str, str]]:
    return list(dict.fromkeys((p["method"], p["dtype"]) for p in points))


def _series(points: list[dict], x: str, y: str, note=None) -> list[Series]:
    found = []
    for method, dtype in _kinds(points):
        own = sorted((p for p in points if (p["method"], p["dtype"]) == (method, dtype) and p[y]), key=lambda p: p[x])
        tops = [p["median"] for p in own] if y == "seconds" else []
        notes = [note(p) for p in own] if note else []
        found.append(
            Series(
                kind_text(method, dtype), [(p[x], p[y]) for p in own], f"c-{method}", dtype != "float32", notes, tops
            )
        )
    return found


def _rounds(point: dict) -> str:
    return f"{rounds_text(point['median'], point['rounds'])}\n{point['gflops']:.0f} GFLOP/s"


def _pivot(points: list[dict], row: str, value: str, head: str) -> tuple[list[str], list[list]]:
    """A line for each value of `row`, a column for each kind; the least is marked, and times have their median."""
    kinds, rows = _kinds(points), []
    for at in sorted({p[row] for p in points}):
        own = {(p["method"], p["dtype"]): p for p in points if p[row] == at}
        least = min(p[value] for p in own.values())
        cells = [replace(_value(own[k], value), best=own[k][value] == least) if k in own else NOTHING for k in kinds]
        rows.append([count_text(at), *cells])
    return [head, *(kind_text(*k) for k in kinds)], rows


def _value(point: dict, value: str) -> Cell:
    if value != "seconds":
        return Cell(bytes_text(point[value]))
    return Cell(seconds_text(point["seconds"]), rounds_text(point["median"], point["rounds"]))


def length(report: dict) -> dict:
    points = report["sweep"]["length"]
    workspace, resident = _memory(report)
    return {
        "time": _time(points),
        "spread": spread_text(points),
        "workspace": workspace,
        "resident": resident,
        "errors": _errors(report["errors"]),
        "has_law": bool(report["laws"]["score_buffer"]["rows"]),
        "ratios": _ratios(report),
        "laws": _laws(report),
    }


def _time(points: list[dict]) -> Curves:
    chart = charts.lines(
        "Time of one call against length", _series(points, "length", "seconds", _rounds), "length", seconds_text
    )
    return Curves("Time of one call", chart, "Times", *_pivot(points, "length", "seconds", "length"))


def _memory(report: dict) -> tuple[Curves, Curves]:
    memory = report["memory"]
    buffer = [r for r in report["laws"]["score_buffer"]["rows"] if r["dtype"] == "float32"]
    law = Series("4·B·H·S²", [(r["length"], r["law"]) for r in buffer], "c-law", True)
    workspace = _series(memory, "length", "workspace", lambda p: f"resident +{bytes_text(p['resident'])}")
    chart = charts.lines("Workspace against length", [law, *workspace], "length", bytes_text, base=2)
    resident = charts.lines(
        "Resident growth against length",
        _series(memory, "length", "resident"),
        "length",
        bytes_text,
        base=2,
        floor=4096,
    )
    rows = [
        [
            count_text(p["length"]), kind_text(p["method"], p["dtype"]), bytes_text(p["inputs"]),
            bytes_text(p["output"]), bytes_text(p["workspace"]),
            bytes_text(p["output"] + p["workspace"]), bytes_text(p["resident"]),
        ]
        for p in memory
    ]  # fmt: skip
    head = ["length", "method", "q, k, v", "output", "workspace", "allocated", "resident"]
    return (
        Curves("Workspace", chart, "Workspace", *_pivot(memory, "length", "workspace", "length")),
        Curves("Resident growth", resident, "Memory, allocated and resident", head, rows, 2),
    )


def _errors(errors: list[dict]) -> Curves:
    series = _series(errors, "length", "own", lambda p: f"plain torch: {error_text(p['plain'])}")
    chart = charts.lines("Relative error against length", series, "length", error_text)
    rows = [
        [
            count_text(e["length"]), kind_text(e["method"], e["dtype"]), error_text(e["own"]), error_text(e["plain"]),
            times_text(e["own"] / e["plain"]) if e["plain"] else NOTHING, error_text(e["largest"]),
            error_text(e["total"]),
        ]
        for e in errors
    ]  # fmt: skip
    head = ["length", "method", "error", "plain torch", "ratio", "largest element", "with rounding of q, k, v"]
    return Curves("Error", chart, "Errors, beside plain torch in the same dtype", head, rows, 2)


def _ratios(report: dict) -> dict:
    ratio_of = {(r["length"], r["dtype"]): r for r in report["ratios"]}
    dtypes = [d for d in DTYPE if any(r["dtype"] == d for r in report["ratios"])]
    keys = {
        "faster_than_torch": "speed over torch",
        "faster": "over the baseline",
        "smaller_workspace": "less workspace",
        "smaller_resident": "less resident",
    }
    rows = [
        [count_text(s), *(_ratio(ratio_of.get((s, d)), key) for key in keys for d in dtypes)]
        for s in sorted({s for s, _ in ratio_of})
    ]
    head = ["length", *(f"{words}, {DTYPE[d]}" for words in keys.values() for d in dtypes)]
    return {"head": head, "rows": rows}


def _ratio(row: dict | None, key: str) -> str | Cell:
    return times_text(row[key]) if row and row[key] else NOTHING


def _laws(report: dict) -> dict:
    checked = report["laws"]["score_buffer"]
    rows = [
        [
            kind_text(fit["method"], fit["dtype"]),
            *(_fit(f) for f in (fit["seconds"], alone["seconds"], fit["workspace"], fit["resident"])),
        ]
        for fit, alone in zip(report["laws"]["fits"], report["laws"]["fits_one_head"])
    ]
    growth = "; ".join(
        f"{times_text(g['workspace_ratio'])} in {DTYPE[g['dtype']]} while the length grows "
        f"{times_text(g['length_ratio'])}"
        for g in checked["flash_growth"]
    )
    buffer = [
        [
            count_text(r["length"]), DTYPE[r["dtype"]], bytes_text(r["law"]), bytes_text(r["scores"]),
            f"{r['ratio']:.3f}",
            bytes_text(r["scratch"]), bytes_text(r["workspace"]),
        ]
        for r in checked["rows"]
    ]  # fmt: skip
    return {
        "fit_from": FIT_FROM,
        "least_lengths": LEAST_LENGTHS,
        "rows": rows,
        "baseline": verdict(checked["baseline_holds"]),
        "flash": verdict(checked["flash_holds"]),
        "growth": growth,
        "buffer": buffer,
    }


def _fit(fit: dict | None) -> Cell:
    if not fit:
        return Cell("not measured", look="none")
    return Cell(f"{fit['exponent']:.2f}", f"R² {fit['r2']:.3f}, {fit['points']} lengths")


def axes(report: dict) -> dict:
    found = report["sweep"]
    curves = {}
    for key, title in {"batch": "Batch", "heads": "Heads", "head_size": "Head size"}.items():
        chart = charts.lines(title, _series(found[key], key, "seconds", _rounds), title.lower(), seconds_text)
        curves[key] = Curves(title, chart, "Times", *_pivot(found[key], key, "seconds", title.lower()))
    return curves | {"throughput": _throughput(found["batches"]), "best_batches": _best_batches(found["best_batch"])}


def _throughput(batches: list[dict]) -> str:
    flash = [p for p in batches if (p["method"], p["dtype"]) == ("flash", "float32")]
    series = [
        Series(
            f"length {s}",
            [(p["batch"], p["batch"] * p["length"] / p["seconds"]) for p in flash if p["length"] == s],
            "c-flash",
        )
        for s in sorted({p["length"] for p in flash})
    ]
    return charts.lines("Tokens per second against batch, flash fp32", series, "batch", lambda v: count_text(v) + "/s")


def _best_batches(best: list[dict]) -> list[list[str]]:
    return [
        [
            count_text(b["length"]), kind_text(b["method"], b["dtype"]), str(b["batch"]),
            count_text(b["tokens_per_second"]),
            times_text(b["gain_over_batch_1"]), str(b["largest_tried"]),
        ]
        for b in best
    ]  # fmt: skip
