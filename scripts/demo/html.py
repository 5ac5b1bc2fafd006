"""The report as pages that need nothing else: text, tables and charts from the contents of report.json."""

from __future__ import annotations

from html import escape
from pathlib import Path

from . import encode, encoder_section, formats_section, gpu_section, lowbit_page, sections, sweep_sections
from .lowbit import STAGES
from .parts import kind_text, left_out_line, tiles, words
from .units import bytes_text, count_text, error_text, seconds_text, times_text

HERE = Path(__file__).parent
LOGO = (
    '<svg viewBox="0 0 34 34" aria-hidden="true"><rect width="34" height="34" rx="8" fill="var(--flash)"/>'
    '<g stroke="#fff" stroke-width="2.2" stroke-linecap="round"><path d="M9 7v20M17 7v20M25 7v20" opacity=".95"/>'
    '<path d="M6 13h6M14 21h6M22 13h6" stroke-width="3.4"/></g></svg>'
)
INDEX, LOWBIT = "index.html", "lowbit.html"
PAGES = {INDEX: "attention", LOWBIT: "low-bit weights"}


def page(report: dict) -> str:
    """The whole document; `report` as __main__.run returns it. A section without a measurement is left out."""
    left_out = [item for item in report["left_out"] if item["stage"] not in STAGES]
    body = [
        header(report, left_out),
        sections.recommendation(report),
        sweep_sections.length(report),
        encoder_section.encoder(report),
        sections.limits(report),
        sweep_sections.axes(report),
        sections.claims(report),
        sections.conditions(report, left_out),
    ]
    return document(f"Heddle: attention on {escape(report['machine']['processor'])}", body)


def lowbit(report: dict) -> str:
    """The page on low-bit weights, beside the first."""
    left_out = [item for item in report["left_out"] if item["stage"] in STAGES]
    said = measured(report) + left_out_line(left_out, report["settings"]["budget_seconds"])
    body = [
        brand(report, LOWBIT),
        lowbit_page.header(report, said),
        formats_section.formats(report),
        gpu_section.gpu(report),
        lowbit_page.layer(report),
        lowbit_page.reported(report),
        lowbit_page.conditions(report, left_out),
    ]
    return document(f"Heddle: low-bit weights on {escape(report['machine']['processor'])}", body)


def document(title: str, body: list[str]) -> str:
    """`title` and `body` are HTML."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
        'content="width=device-width, initial-scale=1">'
        f"<title>{title}</title>\n<style>\n{(HERE / 'page.css').read_text()}</style></head>\n"
        f"<body><main>\n{chr(10).join(body)}\n</main><div "
        f'id="tip"></div>\n<script>\n{(HERE / "page.js").read_text()}</script></body></html>\n'
    )


def brand(report: dict, here: str, among: dict[str, str] = PAGES) -> str:
    """Whose page this is, of which commit, and the way to the others."""
    m = report["machine"]
    changed = ", with uncommitted changes" if m["commit_changed"] else ""
    pages = " ".join(
        f"<b>{name}</b>" if page == here else f'<a href="{page}">{name}</a>' for page, name in among.items()
    )
    return (
        f'<div class="brand">{LOGO}<span><b>Heddle {escape(m["heddle"])}</b> · commit '
        f"{escape(m['commit'] or 'unknown')}{changed}</span>"
        f"<nav>{pages}</nav></div>"
    )


def measured(report: dict, pages: str = "both pages") -> str:
    """Where, when and for how long this was measured, for which `pages`."""
    m, build = report["machine"], report["build_seconds"]
    built = f"; the build before took {build:.0f} s, which is not counted" if build is not None else ""
    return (
        f'<p class="lede">{escape(m["processor"])}, {m["threads"]} threads, {escape(m["cpu_target"])} kernels, '
        f"{bytes_text(m['memory_bytes'])} "
        f"of memory. Measured {escape(report['created'][:16].replace('T', ' '))} UTC, in {report['seconds']:.0f} s for "
        f"{pages}{built}.</p>"
    )


def header(report: dict, left_out: list[dict]) -> str:
    """Title, the findings in one sentence, the words that the page uses and four figures."""
    missing = left_out_line(left_out, report["settings"]["budget_seconds"])
    said = measured(report) + missing + _words(report) + tiles(list(_tiles(report)))
    return f"<header>{brand(report, INDEX)}<h1>{_title(report)}</h1>{said}</header>"


def _title(report: dict) -> str:
    """Flash beside torch and the baseline at the longest length with all three, else with what there is."""
    ratios = [r for r in report["ratios"] if r["dtype"] == "float32"]
    far = max(ratios, key=lambda r: (bool(r["faster"]) + bool(r["faster_than_torch"]), r["length"]), default=None)
    if not far:
        return "Attention, measured here"
    rivals = {"torch": far["faster_than_torch"], "our own baseline": far["faster"]}
    speeds = " and ".join(
        f"<em>{times_text(ratio)} the speed of {rival}</em>" for rival, ratio in rivals.items() if ratio
    )
    smaller = far["smaller_workspace"]
    less = (
        f", and needs <em>{times_text(smaller)} less</em> scratch memory than that baseline"
        if smaller and far["faster"]
        else ""
    )
    return f"At length {count_text(far['length'])} in fp32, flash has {speeds}{less}"


def _words(report: dict) -> str:
    torch = report["machine"]["versions"].get("torch")
    version = f" of torch {escape(torch)}" if torch else ""
    return words(
        {
            "flash": "Heddle's attention: it takes the keys in blocks and never holds the matrix of scores.",
            "baseline": "Heddle's own attention with the whole matrix of scores in memory, otherwise on the same "
            "vector code and threads: the difference is what not holding that matrix saves.",
            "torch": f"<code>torch.nn.functional.scaled_dot_product_attention</code>{version}, on as many threads.",
            "fp32, bf16": "float32 and bfloat16: the dtype of q, k, v and the result.",
        }
    )


def _tiles(report: dict):
    yield from _choice_tile(report)
    limit = {(e["method"], e["dtype"]): e for e in report["limits"]}
    flash, base = limit.get(("flash", "float32")), limit.get(("baseline", "float32"))
    if flash:
        took = (
            f"; such a call would take {seconds_text(flash['free_call_seconds'])}" if flash["free_call_seconds"] else ""
        )
        other = f", where the baseline ends at {count_text(base['longest_in_free'])}" if base else ""
        yield (
            f"{count_text(flash['longest_in_free'])} <small>tokens</small>",
            f"of one head would fit in this machine's free memory with flash{other}. Computed, not tried{took}",
        )
    if report["encoder"]:
        best = max(report["encoder"], key=lambda r: r["tokens_per_second"])
        doubt = "; the machine was not equally free in its runs, see below" if encode.unequal(report["encoder"]) else ""
        yield (
            f"{count_text(best['tokens_per_second'])} <small>tokens/s</small>",
            f"through the encoder all-MiniLM-L6-v2 on real text with {kind_text(best['method'], best['dtype'])}{doubt}",
        )
    own = next((r for r in report["encoder"] if (r["method"], r["dtype"]) == ("flash", "float32")), None)
    if own:
        yield (
            error_text(own["golden"]["largest_error"]),
            "is the largest difference of any element of its embeddings from transformers + torch, flash fp32",
        )


def _choice_tile(report: dict):
    """The choice at the longest length at which torch or the baseline was timed, beside them."""
    times = {(p["method"], p["dtype"], p["length"]): p["seconds"] for p in report["sweep"]["length"]}
    for row in reversed(report["recommendation"]["rows"]):
        chosen, length = row["chosen"], row["length"]
        rivals = {rival: times.get((rival, "float32", length)) for rival in ("torch", "baseline")}
        said = [
            (f"{rival} fp32", seconds / chosen["seconds"]) for rival, seconds in rivals.items() if chosen and seconds
        ]
        if said:
            (first, ratio), *others = said
            more = "".join(f", {times_text(other)} that of {rival}" for rival, other in others)
            kind = kind_text(chosen["method"], chosen["dtype"])
            best = f"at length {count_text(length)} with what is best there: {kind}"
            yield times_text(ratio), f"the speed of {first}{more}, {best}"
            return
