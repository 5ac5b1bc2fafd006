"""The report as pages that need nothing else: templates/*.html, filled from the contents of report.json."""

from __future__ import annotations

import os
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from . import encode, encoder_section, formats_section, gpu_section, lowbit_page, sections, sweep_sections, units
from .lowbit import STAGES
from .parts import NOTHING, by_reason, figure, kind_text, missing, stages
from .units import count_text, error_text, seconds_text, times_text

HERE = Path(__file__).parent
INDEX, LOWBIT, SPARSE, ASAM = "index.html", "lowbit.html", "sparse.html", "asam.html"
PAGES = {INDEX: "attention", LOWBIT: "low-bit weights"}
SPARSE_PAGES = {SPARSE: "sparse attention", ASAM: "adaptive sparse attention"} | PAGES

TEMPLATES = Environment(
    loader=FileSystemLoader(HERE / "templates"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
for _name in ("bytes_text", "count_text", "error_text", "seconds_text", "times_text"):
    TEMPLATES.filters[_name] = getattr(units, _name)


def write(folder: Path, files: dict[str, str]) -> None:
    """Files of a folder by their names, each replaced whole."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        fresh = folder / (name + ".new")
        fresh.write_text(content, encoding="utf-8")
        os.replace(fresh, folder / name)


def document(name: str, subject: str, report: dict, pages: dict[str, str] = PAGES, **more) -> str:
    """The page of a template. `subject` is of its title; `pages` are those that it leads to, itself among them."""
    return TEMPLATES.get_template(name).render(
        subject=subject,
        report=report,
        here=name,
        pages=pages,
        style=Markup((HERE / "page.css").read_text()),
        script=Markup((HERE / "page.js").read_text()),
        nothing=NOTHING,
        **more,
    )


def page(report: dict) -> str:
    """The whole document; `report` as __main__.run returns it. A section without a measurement is left out."""
    left_out = [item for item in report["left_out"] if item["stage"] not in STAGES]
    return document(
        INDEX,
        "attention",
        report,
        title=_title(report),
        tiles_of_page=list(_tiles(report)),
        missing=missing(left_out, report["settings"]["budget_seconds"]),
        left_out=by_reason(left_out),
        recommendation=sections.recommendation(report),
        length=sweep_sections.length(report),
        encoder=encoder_section.encoder(report),
        limits=sections.limits(report),
        axes=sweep_sections.axes(report),
        facts=sections.facts(report),
        stages=stages(report, Markup("<b>measuring, in all</b>")),
        resident_how=report["memory"][0]["resident_how"] if report["memory"] else "VmHWM",
    )


def lowbit(report: dict) -> str:
    """The page on low-bit weights, beside the first."""
    left_out = [item for item in report["left_out"] if item["stage"] in STAGES]
    return document(
        LOWBIT,
        "low-bit weights",
        report,
        missing=missing(left_out, report["settings"]["budget_seconds"]),
        left_out=by_reason(left_out),
        formats=formats_section.formats(report),
        gpu=gpu_section.gpu(report),
        **lowbit_page.page(report),
    )


def _title(report: dict) -> dict | None:
    """Flash beside torch and the baseline at the longest length with all three, else with what there is."""
    ratios = [r for r in report["ratios"] if r["dtype"] == "float32"]
    far = max(ratios, key=lambda r: (bool(r["faster"]) + bool(r["faster_than_torch"]), r["length"]), default=None)
    if not far:
        return None
    rivals = {"torch": far["faster_than_torch"], "our own baseline": far["faster"]}
    return {
        "length": far["length"],
        "rivals": [(rival, ratio) for rival, ratio in rivals.items() if ratio],
        "smaller": far["smaller_workspace"] if far["faster"] else None,
    }


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
            figure(count_text(flash["longest_in_free"]), "tokens"),
            f"of one head would fit in this machine's free memory with flash{other}. Computed, not tried{took}",
        )
    if report["encoder"]:
        best = max(report["encoder"], key=lambda r: r["tokens_per_second"])
        doubt = "; the machine was not equally free in its runs, see below" if encode.unequal(report["encoder"]) else ""
        yield (
            figure(count_text(best["tokens_per_second"]), "tokens/s"),
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
