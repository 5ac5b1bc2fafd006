"""The section on the encoder with both methods."""

from __future__ import annotations

from html import escape

from . import charts, encode
from .parts import card, disturbed, grid, kind_text, rounds_text, section, table
from .units import bytes_text, count_text, error_text, seconds_text

STAGES = ["embedding", "attention", "linear", "norm_and_activation", "pooling"]


def encoder(report: dict) -> str:
    about, runs = report["text"], report["encoder"]
    if not runs:
        return ""
    saved = 1 - about["tokens"] / about["padded_tokens"]
    sub = (
        f"all-MiniLM-L6-v2 over {about['bytes'] / 1e3:.0f} kB of {escape(about['source'])}, cut into {about['pieces']} "
        f"pieces of one or more paragraphs: {count_text(about['tokens'])} tokens, packed end to end. Padding batches "
        f"of 32 to their longest piece would make {count_text(about['padded_tokens'])} tokens: packing saves "
        f"{100 * saved:.0f} %."
    )
    if runs[0]["tokens"] < about["tokens"]:
        sub += f" Time sufficed for the first {count_text(runs[0]['tokens'])} of these tokens; all figures are of them."
    lengths = f"The longest has {about['longest']} tokens, the median {about['median']:.0f}."
    return section(
        "A real encoder on real text",
        sub,
        disturbed(encode.unequal(runs), lambda i: _name(runs[i])),
        grid(
            2,
            _speed(runs),
            _memory(runs),
            _stages(runs),
            card(
                "Lengths of the pieces", lengths, charts.histogram("Lengths", about["histogram"], "tokens in a piece")
            ),
        ),
        _figures(runs),
    )


def _name(run: dict) -> str:
    return kind_text(run["method"], run["dtype"])


def _bars(name: str, runs: list[dict], key: str, text, note) -> str:
    rows = [(_name(r), r[key], f"c-{r['method']}", r["dtype"] != "float32") for r in runs]
    return charts.bars(name, rows, text, [note(r) for r in runs])


def _speed(runs: list[dict]) -> str:
    def note(run):
        return rounds_text(run["tokens"] / run["median"], run["rounds"], count_text)

    drawn = _bars("Speed", runs, "tokens_per_second", lambda v: f"{count_text(v)} tokens/s", note)
    return card(
        "Speed", "Whole encoder: embeddings, attention, feed-forward, pooling. The best of up to three rounds.", drawn
    )


def _memory(runs: list[dict]) -> str:
    def note(run):
        return f"workspace {bytes_text(run['workspace'])}, weights {bytes_text(run['weight_bytes'])}"

    return card(
        "Peak memory while encoding",
        "Growth of resident memory, weights already loaded.",
        _bars("Peak memory", runs, "resident", bytes_text, note),
    )


def _stages(runs: list[dict]) -> str:
    parts = [(_name(r), [(s.replace("_", " "), r["stages"].get(s, 0.0)) for s in STAGES]) for r in runs]
    keys = "".join(f'<span><i class="swatch part-{i}"></i>{s.replace("_", " ")}</span>' for i, s in enumerate(STAGES))
    drawn = f'<div class="legend">{keys}</div>' + charts.stacked("Stages", parts, seconds_text)
    return card(
        "Where the time goes", "The best round, all calls together. Only attention differs between the methods.", drawn
    )


def _figures(runs: list[dict]) -> str:
    head = ["", "time", "median", "rounds", "tokens/s", "weights", "workspace", "resident growth"]
    rows = [
        [
            _name(r), seconds_text(r["seconds"]), seconds_text(r["median"]), str(r["rounds"]),
            count_text(r["tokens_per_second"]), bytes_text(r["weight_bytes"]), bytes_text(r["workspace"]),
            bytes_text(r["resident"]), f"{r['golden']['cosine_least']:.7f}",
            error_text(r["golden"]["largest_error"]), f"{r['against']['cosine_least']:.7f}",
        ]
        for r in runs
    ]  # fmt: skip
    return card(
        "The encoder in figures",
        "The reference: embeddings of 64 pieces by transformers and torch in fp32, kept with the tests. Of them the "
        "least cosine and the largest difference of an element; the last column compares the embeddings of the text "
        "itself with those of baseline fp32.",
        table([*head, "cosine to the reference", "difference from it", "cosine to baseline fp32"], rows),
        True,
    )
