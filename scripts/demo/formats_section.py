"""The section of the low-bit page on the encoder, format by format."""

from __future__ import annotations

from . import charts, encode
from .charts import Series
from .parts import disturbed, rounds_text
from .units import bytes_text, times_text


def runs_of(report: dict) -> list[dict]:
    return report["lowbit"]["policies"]


def base_of(report: dict) -> dict | None:
    return next((r for r in runs_of(report) if r["name"] == "float32"), None)


def label(run: dict) -> str:
    return f"formats chosen for {100 * run['allowed']:g} % error" if "allowed" in run else run["name"]


def saved(run: dict, base: dict) -> float:
    return 1 - run["linear_bytes"] / base["linear_bytes"]


def speed(run: dict, base: dict) -> str:
    return times_text(run["pieces_per_second"] / base["pieces_per_second"])


def formats(report: dict) -> dict | None:
    runs, base = runs_of(report), base_of(report)
    if not base:
        return None
    speeds, peaks = _bars(runs)
    return {
        "base": base,
        "chosen": next((r for r in runs if "allowed" in r), None),
        "runs": runs,
        "disturbed": disturbed(encode.unequal(runs, ("attention",)), lambda i: label(runs[i])),
        "speed": speeds,
        "memory": peaks,
        "costs": _costs(runs, base),
        "near": _near(runs),
        "trade": _trade(runs),
    }


def _colour(run: dict) -> str:
    return "c-baseline" if run["name"] in ("float32", "bfloat16") else "c-flash"


def _bars(runs: list[dict]) -> tuple[str, str]:
    def drawn(name, key, text, note):
        rows = [(label(r), r[key], _colour(r), len(r["formats"]) > 1) for r in runs]
        return charts.bars(name, rows, text, [note(r) for r in runs])

    def rounds(run):
        return rounds_text(run["pieces"] / run["median"], run["rounds"], lambda v: f"{v:.1f}")

    def share(run):
        return f"linear layers {bytes_text(run['linear_bytes'])} of {bytes_text(run['weight_bytes'])} weights"

    return (
        drawn("Speed", "pieces_per_second", lambda v: f"{v:.1f} pieces/s", rounds),
        drawn("Peak memory", "peak", bytes_text, share),
    )


def _costs(runs: list[dict], base: dict) -> list[list[str]]:
    return [
        [
            label(r), bytes_text(r["linear_bytes"]), f"{100 * saved(r, base):.0f} %",
            bytes_text(r["weight_bytes"]), bytes_text(r["held"]), bytes_text(r["loading"]), bytes_text(r["peak"]),
            f"{r['pieces_per_second']:.1f}", speed(r, base),
        ]
        for r in runs
    ]  # fmt: skip


def _near(runs: list[dict]) -> list[list[str]]:
    return [
        [
            label(r), f"{r['cosine']['cosine_mean']:.5f}", f"{r['cosine']['cosine_least']:.5f}",
            f"{100 * r['error']:.2f} %",
            f"{100 * r['retrieval']['overlap_mean']:.1f} %", f"{100 * r['retrieval']['overlap_least']:.1f} %",
            f"{100 * r['retrieval']['nearest_same']:.1f} %", f"{r['retrieval']['spearman_mean']:.4f}",
            f"{r['retrieval']['spearman_least']:.4f}",
        ]
        for r in runs
    ]  # fmt: skip


def _trade(runs: list[dict]) -> str:
    series = [
        Series(
            r["name"],
            [(r["linear_bytes"], r["error"])],
            _colour(r),
            len(r["formats"]) > 1,
            [f"mean cosine {r['cosine']['cosine_mean']:.5f}"],
        )
        for r in runs
        if r["error"] > 0
    ]
    if len(series) < 2:
        return ""
    return charts.dots(
        "Error against bytes", series, "bytes of linear layers", lambda v: f"{100 * v:.3g} %", bytes_text
    )
