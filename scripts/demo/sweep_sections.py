"""Sections of the first page on attention alone: against length, the laws it keeps, and one extent at a time."""

from __future__ import annotations

from . import charts
from .charts import Series
from .laws import FIT_FROM, LEAST_LENGTHS
from .parts import DTYPE, NOTHING, card, details, grid, kind_text, rounds_text, section, spread_text, table, verdict
from .units import bytes_text, count_text, error_text, seconds_text, times_text


def legend(torch: bool = False, law: bool = False) -> str:
    kinds = [(m, d) for m in ("flash", "baseline") + (("torch",) if torch else ()) for d in ("float32", "bfloat16")]
    entries = [
        f'<span><i class="c-{m}{" dash" if d != "float32" else ""}"></i>{kind_text(m, d)}</span>' for m, d in kinds
    ]
    if law:
        entries.append('<span><i class="c-law dash"></i>the law 4·B·H·S²</span>')
    return f'<div class="legend">{"".join(entries)}</div>'


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


def _pivot(points: list[dict], row: str, value: str, head: str) -> str:
    """A line for each value of `row`, a column for each kind; the least is marked, and times have their median."""
    kinds, rows = _kinds(points), []
    for at in sorted({p[row] for p in points}):
        own = {(p["method"], p["dtype"]): p for p in points if p[row] == at}
        least = min(p[value] for p in own.values())
        cells = [
            ("!" if own[k][value] == least else "") + _value(own[k], value) if k in own else NOTHING for k in kinds
        ]
        rows.append([count_text(at), *cells])
    return table([head, *(kind_text(*k) for k in kinds)], rows)


def _value(point: dict, value: str) -> str:
    if value != "seconds":
        return bytes_text(point[value])
    return f"{seconds_text(point['seconds'])}<small>{rounds_text(point['median'], point['rounds'])}</small>"


def length(report: dict) -> str:
    shape, points = report["sweep"]["shape"], report["sweep"]["length"]
    cards = grid(2, _time(points), *_memory(report), _errors(report["errors"]))
    sub = (
        f"Batch 1, {shape['heads']} heads, head size {shape['head_size']} for time and error; one head for memory. "
        "Both axes are logarithmic, so a power law is a straight line."
    )
    keys = legend(torch=True, law=bool(report["laws"]["score_buffer"]["rows"]))
    return section("Against length", sub, cards and keys + cards, _ratios(report), _laws(report))


def _time(points: list[dict]) -> str:
    chart = charts.lines(
        "Time of one call against length", _series(points, "length", "seconds", _rounds), "length", seconds_text
    )
    sub = (
        "The least of several rounds, all methods in turn in every round; a stroke reaches up to the median. "
        + spread_text(points)
    )
    return card(
        "Time of one call", sub, chart and chart + details("Times", _pivot(points, "length", "seconds", "length"))
    )


def _memory(report: dict) -> tuple[str, str]:
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
    held = table(["length", "method", "q, k, v", "output", "workspace", "allocated", "resident"], rows, 2)
    return (
        card(
            "Workspace",
            "Scratch that a call allocates besides its tensors.",
            chart and chart + details("Workspace", _pivot(memory, "length", "workspace", "length")),
        ),
        card(
            "Resident growth",
            "By how much the process's peak rose during the call: output and workspace.",
            resident and resident + details("Memory, allocated and resident", held),
        ),
    )


def _errors(errors: list[dict]) -> str:
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
    return card(
        "Error",
        "Against a float64 computation on the same operands, relative (Frobenius).",
        chart and chart + details("Errors, beside plain torch in the same dtype", table(head, rows, 2)),
    )


def _ratios(report: dict) -> str:
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
    sub = f"Time with {report['sweep']['shape']['heads']} heads, memory with one; less than the baseline."
    return card("How many times faster and smaller flash is", sub, table(head, rows), True)


def _ratio(row: dict | None, key: str) -> str:
    return times_text(row[key]) if row and row[key] else NOTHING


def _laws(report: dict) -> str:
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
    fitted = table(["", "time", "time, one head", "workspace", "resident"], rows)
    return card(
        "The laws",
        f"Exponents of the length, fitted on logarithms over lengths from {FIT_FROM}, at least {LEAST_LENGTHS} of "
        "them. 2 means that twice the length takes four times as much.",
        fitted
        and fitted
        + f"<p class='judged'>The baseline's score buffer is 4·B·H·S² bytes: {verdict(checked['baseline_holds'])} (it "
        "must within 1 % at each of these lengths). Flash's workspace does not grow as S²: "
        f"{verdict(checked['flash_holds'])} (it must grow less than the length "
        f"does{': ' + growth if growth else ''}).</p>"
        + details(
            "The score buffer, law and measured",
            table(["length", "dtype", "4·B·H·S²", "scores", "ratio", "scratch", "workspace"], buffer, 2),
        ),
        True,
    )


def _fit(fit: dict | None) -> str:
    if not fit:
        return '<span class="none">not measured</span>'
    return f"{fit['exponent']:.2f}<small>R² {fit['r2']:.3f}, {fit['points']} lengths</small>"


def axes(report: dict) -> str:
    found, shape = report["sweep"], report["sweep"]["shape"]
    base = f"length {count_text(shape['middle'])}"
    names = {
        "batch": ("Batch", f"{shape['heads']} heads, {base}"),
        "heads": ("Heads", f"batch 1, {base}"),
        "head_size": ("Head size", f"{shape['heads']} heads, {base}"),
    }
    cards = []
    for key, (title, sub) in names.items():
        chart = charts.lines(title, _series(found[key], key, "seconds", _rounds), title.lower(), seconds_text)
        cards.append(
            card(title, sub, chart and chart + details("Times", _pivot(found[key], key, "seconds", title.lower())))
        )
    drawn = grid(3, *cards)
    return section(
        "One thing at a time",
        f"From {shape['heads']} heads, {base}, head size {shape['head_size']}, one extent changes.",
        drawn and legend() + drawn,
        grid(2, *_batches(found)),
    )


def _batches(found: dict) -> tuple[str, str]:
    flash = [p for p in found["batches"] if (p["method"], p["dtype"]) == ("flash", "float32")]
    lengths = sorted({p["length"] for p in flash})
    throughput = [
        Series(
            f"length {s}",
            [(p["batch"], p["batch"] * p["length"] / p["seconds"]) for p in flash if p["length"] == s],
            "c-flash",
        )
        for s in lengths
    ]
    rows = [
        [
            count_text(b["length"]), kind_text(b["method"], b["dtype"]), str(b["batch"]),
            count_text(b["tokens_per_second"]),
            times_text(b["gain_over_batch_1"]), str(b["largest_tried"]),
        ]
        for b in found["best_batch"]
    ]  # fmt: skip
    chart = charts.lines(
        "Tokens per second against batch, flash fp32", throughput, "batch", lambda v: count_text(v) + "/s"
    )
    head = ["length", "method", "best batch", "tokens/s", "over batch 1", "largest tried"]
    return (
        card("Tokens per second against batch", "flash fp32; one line a length.", chart),
        card("Best batch size", "The smallest batch within 3 % of the most tokens per second.", table(head, rows, 2)),
    )
