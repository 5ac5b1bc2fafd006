"""The section of the low-bit page on the encoder, format by format."""

from __future__ import annotations

from html import escape

from . import charts, encode
from .charts import Series
from .parts import card, disturbed, grid, rounds_text, section, table
from .units import bytes_text, count_text, seconds_text, times_text


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


def formats(report: dict) -> str:
    runs, base = runs_of(report), base_of(report)
    if not base:
        return ""
    chosen = next((r for r in runs if "allowed" in r), None)
    said = (
        f" The last was chosen by measured sensitivity for an error of {100 * chosen['allowed']:g} %: "
        f"{100 * chosen['sample_error']:.2f} % on {chosen['sample']} sample pieces, {100 * chosen['error']:.2f} % on "
        f"all of these; choosing took {seconds_text(chosen['choosing_seconds'])}."
        if chosen
        else ""
    )
    return section(
        "The encoder, format by format",
        f"all-MiniLM-L6-v2 over {base['pieces']} pieces of real text, {count_text(base['tokens'])} tokens. Linear "
        "layers are quantised on load and multiplied as they are packed; embeddings and norms stay. Activations are "
        "bfloat16, and float32 with the float32 weights and the chosen formats. What is compared is each piece's "
        f"embedding with that in float32.{said}",
        disturbed(encode.unequal(runs, ("attention",)), lambda i: label(runs[i])),
        grid(2, *_bars(runs)),
        _costs(runs, base),
        _near(runs, base),
        grid(2, _trade(runs), _which(runs)),
    )


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
        card(
            "Speed",
            "The best of up to three passes over the text.",
            drawn("Speed", "pieces_per_second", lambda v: f"{v:.1f} pieces/s", rounds),
        ),
        card(
            "Peak memory while encoding",
            "Resident growth of a fresh process: weights, workspace and results.",
            drawn("Peak memory", "peak", bytes_text, share),
        ),
    )


def _costs(runs: list[dict], base: dict) -> str:
    head = [
        "",
        "linear layers",
        "saved",
        "all weights",
        "resident loaded",
        "peak loading",
        "peak encoding",
        "pieces/s",
        "over float32",
    ]
    rows = [
        [
            escape(label(r)), bytes_text(r["linear_bytes"]), f"{100 * saved(r, base):.0f} %",
            bytes_text(r["weight_bytes"]), bytes_text(r["held"]), bytes_text(r["loading"]), bytes_text(r["peak"]),
            f"{r['pieces_per_second']:.1f}", speed(r, base),
        ]
        for r in runs
    ]  # fmt: skip
    return card(
        "What they cost",
        "Linear layers as packed, with biases. Resident growth of a fresh process.",
        table(head, rows),
        True,
    )


def _near(runs: list[dict], base: dict) -> str:
    most = base["retrieval"]["neighbours"]
    head = ["", "mean cosine", "worst", "error", f"top {most}", "worst", "nearest", "Spearman", "worst"]
    rows = [
        [
            escape(label(r)), f"{r['cosine']['cosine_mean']:.5f}", f"{r['cosine']['cosine_least']:.5f}",
            f"{100 * r['error']:.2f} %",
            f"{100 * r['retrieval']['overlap_mean']:.1f} %", f"{100 * r['retrieval']['overlap_least']:.1f} %",
            f"{100 * r['retrieval']['nearest_same']:.1f} %", f"{r['retrieval']['spearman_mean']:.4f}",
            f"{r['retrieval']['spearman_least']:.4f}",
        ]
        for r in runs
    ]  # fmt: skip
    return card(
        "What they keep",
        f"Each piece in turn is a query over the others: top {most} is how much of its nearest {most} stays the same, "
        "nearest how often the first does, Spearman the correlation of the whole ranking. The error is √(Σ|e − f|² / "
        "Σ|f|²) over embeddings, f in float32.",
        table(head, rows),
        True,
    )


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
    chart = charts.dots(
        "Error against bytes", series, "bytes of linear layers", lambda v: f"{100 * v:.3g} %", bytes_text
    )
    return card(
        "What bytes buy",
        "The error of the embeddings against the bytes of linear layers. Both axes are logarithmic.",
        chart,
    )


def _which(runs: list[dict]) -> str:
    rows = [[escape(r["name"]), _rules(r), r["dtype"]] for r in runs]
    return card(
        "Which layers have which format",
        "The first pattern that matches a layer's name decides.",
        table(["", "layers", "activations"], rows, 3),
    )


def _rules(run: dict) -> str:
    """Which layers have which format; of many patterns how many have each."""
    rules = run["rules"]
    if not rules:
        return "as in the file"
    if len(rules) <= 3:
        return "<br>".join(f"<code>{escape(pattern)}</code> {escape(format)}" for pattern, format in rules.items())
    formats = list(rules.values())
    return ", ".join(f"{formats.count(format)} × {escape(format)}" for format in dict.fromkeys(formats))
