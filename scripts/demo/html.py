"""The report as pages that need nothing else: text, tables and charts from the contents of report.json."""

from __future__ import annotations

from html import escape
from pathlib import Path

from . import lowbit_page, sections
from .charts import bytes_text, count_text

HERE = Path(__file__).parent
LOGO = (
    '<svg viewBox="0 0 34 34" aria-hidden="true"><rect width="34" height="34" rx="8" fill="var(--flash)"/>'
    '<g stroke="#fff" stroke-width="2.2" stroke-linecap="round"><path d="M9 7v20M17 7v20M25 7v20" opacity=".95"/>'
    '<path d="M6 13h6M14 21h6M22 13h6" stroke-width="3.4"/></g></svg>'
)


def page(report: dict) -> str:
    """The whole document; `report` as __main__.run returns it. Stages that measured nothing say so."""
    body = [
        header(report),
        sections.recommendation(report),
        sections.length(report),
        sections.encoder(report),
        sections.limits(report),
        sections.axes(report),
        sections.claims(report),
        sections.conditions(report),
    ]
    return document(f"Heddle: attention on {escape(report['machine']['processor'])}", body)


def lowbit(report: dict) -> str:
    """The page on low-bit weights, beside the first."""
    body = [brand(report, LOWBIT), lowbit_page.header(report), lowbit_page.policies(report), lowbit_page.gpu(report), lowbit_page.layer(report), lowbit_page.study(report), lowbit_page.conditions(report)]
    return document(f"Heddle: low-bit weights on {escape(report['machine']['processor'])}", body)


def document(title: str, body: list[str]) -> str:
    """`title` and `body` are HTML."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title>\n<style>\n{(HERE / 'page.css').read_text()}</style></head>\n"
        f'<body><main>\n{chr(10).join(body)}\n</main><div id="tip"></div>\n<script>\n{(HERE / "page.js").read_text()}</script></body></html>\n'
    )


INDEX, LOWBIT = "index.html", "lowbit.html"
PAGES = {INDEX: "attention", LOWBIT: "low-bit weights"}


def brand(report: dict, here: str) -> str:
    """Whose page this is, of which commit, and the way to the other one."""
    m = report["machine"]
    changed = ", with uncommitted changes" if m["commit_changed"] else ""
    pages = " ".join(f"<b>{name}</b>" if page == here else f'<a href="{page}">{name}</a>' for page, name in PAGES.items())
    return (
        f'<div class="brand">{LOGO}<span><b>Heddle {escape(m["heddle"])}</b> · commit {escape(m["commit"] or "unknown")}{changed}</span>'
        f"<nav>{pages}</nav></div>"
    )


def header(report: dict) -> str:
    """Title, the findings in one sentence and four figures."""
    m = report["machine"]
    ratios = [r for r in report["ratios"] if r["dtype"] == "float32"]
    far = max(ratios, key=lambda r: r["length"], default=None)
    title = "Attention, measured here"
    if far and far["smaller_workspace"]:
        faster, smaller = far["faster"], far["smaller_workspace"]
        title = (
            f"At length {far['length']}, flash is <em>{_times(faster)} {'faster' if faster >= 1 else 'as fast'}</em> than the full score matrix "
            f"and needs <em>{_times(smaller)} less</em> scratch memory"
        )
        if faster < 1:
            title = f"At length {far['length']}, flash needs <em>{_times(smaller)} less</em> scratch memory, at {_times(faster)} the speed"
    return (
        f"<header>{brand(report, INDEX)}"
        f"<h1>{title}</h1>"
        f'<p class="lede">{escape(m["processor"])}, {m["threads"]} threads, {escape(m["cpu_target"])} kernels, {bytes_text(m["memory_bytes"])} of memory. '
        f"Measured {escape(report['created'][:16].replace('T', ' '))} UTC in {report['seconds']:.0f} seconds.</p>"
        f'<div class="tiles">{"".join(_tiles(report))}</div></header>'
    )


def _tiles(report: dict):
    runs = {(r["method"], r["dtype"]): r for r in report["encoder"]}
    picked = [r for r in report["recommendation"]["rows"] if r["chosen"]]
    if picked:
        row = picked[-1]
        plain = next((c["seconds"] for c in row["candidates"] if (c["method"], c["dtype"]) == ("baseline", "float32")), None)
        if plain:
            kind = sections.kind_text(row["chosen"]["method"], row["chosen"]["dtype"])
            yield _tile(_times(plain / row["chosen"]["seconds"]), f"the speed of the fp32 baseline at length {row['length']} with the choice below: {kind}")
    limit = {(e["method"], e["dtype"]): e for e in report["limits"]}
    if {("flash", "float32"), ("baseline", "float32")} <= set(limit):
        flash, base = limit["flash", "float32"], limit["baseline", "float32"]
        yield _tile(
            f"{count_text(flash['longest_in_free'])} <small>tokens</small>",
            f"are the longest sequence of one head that this machine's free memory holds with flash; {count_text(base['longest_in_free'])} with the baseline",
        )
    if runs:
        best = max(runs.values(), key=lambda r: r["tokens_per_second"])
        yield _tile(
            f"{count_text(best['tokens_per_second'])} <small>tokens/s</small>",
            f"through all-MiniLM-L6-v2 on real text, {best['method']} {sections.DTYPE[best['dtype']]}",
        )
        flash = runs.get(("flash", "float32"))
        if flash:
            yield _tile(
                f"{flash['golden']['largest_error']:.0e}".replace("e-0", "e-"),
                "largest difference of any embedding element from transformers + torch, flash fp32",
            )


def _tile(figure: str, what: str) -> str:
    return f'<div class="tile"><div class="figure">{figure}</div><div class="what">{escape(what)}</div></div>'


def _times(ratio: float) -> str:
    return sections.times_text(ratio)
