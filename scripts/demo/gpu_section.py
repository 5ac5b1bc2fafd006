"""The section of the low-bit page on a GPU: measured here, or the repository's figures, and then it says so."""

from __future__ import annotations

from html import escape

from . import charts
from .parts import card, section, table
from .units import bytes_text, count_text, seconds_text, times_text

TITLE = "The same on a GPU"


def gpu(report: dict) -> str:
    found = report["lowbit"].get("gpu")
    if not found or not found["rows"]:
        if not found or found["here"]:
            return ""
        return (
            f"<h2>{TITLE}</h2><p class='sub'>Not measured: {escape(found['why'])}, and the repository has no "
            f"{escape(found['source'])}.</p>"
        )
    runs, about = found["rows"], found["conditions"]
    base = next(r for r in runs if not r["rules"])
    where = "Measured here"
    if not found["here"]:
        source = f"<code>{escape(found['source'])}</code>, measured {escape(about['date'][:10])}"
        where = f"<b>Not measured here</b>: {escape(found['why'])}. Figures of {source}"
    sub = (
        f"{where}, on an {escape(about['gpu'])}. {base['pieces']} pieces, {count_text(base['tokens'])} tokens; "
        "activations in 16 bits. What is compared is each piece's embedding with the CPU's in float32."
    )
    return section(TITLE, sub, _why(runs), _speed(runs), _figures(runs, about))


def _sizes(runs: list[dict]) -> tuple[str, str]:
    """The smaller and the larger most tokens of a call, as keys."""
    small, large = runs[0]["tokens_per_second"]
    return small, large


def _why(runs: list[dict]) -> str:
    """What low-bit formats are for where they are slower than 16 bits."""
    plain, low = [r for r in runs if not r["rules"]], [r for r in runs if r["rules"]]
    _, large = _sizes(runs)
    best, fast = (max(r["tokens_per_second"][large] for r in group) if group else 0 for group in (plain, low))
    if not low or fast > best:
        return ""
    saved = sorted(100 * (1 - r["linear_bytes"] / plain[0]["linear_bytes"]) for r in low)
    return (
        '<div class="answer"><b>Why use formats that are slower than 16 bits?</b> For memory: they take '
        f"{saved[0]:.0f} to {saved[-1]:.0f} % off "
        f"the linear layers' bytes, at up to {times_text(fast / best)} the speed. Thousands of tokens at once, as "
        "here, are bound by arithmetic, which every format does in 16 bits, and decoding comes on top. Time is saved "
        "where few rows meet large matrices and bytes are the bound, as in generating text token by token: docs/performance.md's "
        "table of linear layers on a GPU has those figures.</div>"
    )


def _speed(runs: list[dict]) -> str:
    _, large = _sizes(runs)
    rows = [
        (
            r["name"],
            r["tokens_per_second"][large] / 1e6,
            "c-baseline" if not r["rules"] else "c-flash",
            len(r["formats"]) > 1,
        )
        for r in runs
    ]
    drawn = charts.bars("Speed on the GPU", rows, lambda v: f"{v:.2f} M tokens/s")
    return card("Speed on the GPU", f"Calls of at most {large} tokens.", drawn, True)


def _figures(runs: list[dict], about: dict) -> str:
    small, large = _sizes(runs)
    rows = [
        [
            escape(r["name"]), r["dtype"], bytes_text(r["linear_bytes"]), bytes_text(r["weight_bytes"]),
            bytes_text(r["peak"]), *(f"{r['tokens_per_second'][tokens] / 1e6:.2f} M" for tokens in (small, large)),
            seconds_text(r["alone_seconds"]),
            f"{r['cosine']['cosine_mean']:.5f}", f"{r['cosine']['cosine_least']:.5f}", f"{100 * r['error']:.2f} %",
            f"{100 * r['retrieval']['overlap_mean']:.1f} %", f"{r['retrieval']['spearman_mean']:.4f}",
        ]
        for r in runs
    ]  # fmt: skip
    head = [
        "", "activations", "linear layers", "all weights", "peak", f"tokens/s by {small}", f"by {large}",
        "a piece", "mean cosine", "worst", "error", f"top {runs[0]['retrieval']['neighbours']}", "Spearman",
    ]  # fmt: skip
    return card("What they cost and keep there", escape(about["method"]), table(head, rows, 2), True)
