"""The section on the encoder with both methods."""

from __future__ import annotations

from . import charts, encode
from .parts import disturbed, kind_text, rounds_text
from .units import bytes_text, count_text, error_text, seconds_text

STAGES = ["embedding", "attention", "linear", "norm_and_activation", "pooling"]


def encoder(report: dict) -> dict | None:
    runs = report["encoder"]
    if not runs:
        return None
    parts = [(_name(r), [(s.replace("_", " "), r["stages"].get(s, 0.0)) for s in STAGES]) for r in runs]
    return {
        "tokens": runs[0]["tokens"],
        "disturbed": disturbed(encode.unequal(runs), lambda i: _name(runs[i])),
        "speed": _bars("Speed", runs, "tokens_per_second", lambda v: f"{count_text(v)} tokens/s", _rounds),
        "memory": _bars("Peak memory", runs, "resident", bytes_text, _held),
        "stage_names": [s.replace("_", " ") for s in STAGES],
        "stages": charts.stacked("Stages", parts, seconds_text),
        "lengths": charts.histogram("Lengths", report["text"]["histogram"], "tokens in a piece"),
        "rows": [
            [
                _name(r), seconds_text(r["seconds"]), seconds_text(r["median"]), str(r["rounds"]),
                count_text(r["tokens_per_second"]), bytes_text(r["weight_bytes"]), bytes_text(r["workspace"]),
                bytes_text(r["resident"]), f"{r['golden']['cosine_least']:.7f}",
                error_text(r["golden"]["largest_error"]), f"{r['against']['cosine_least']:.7f}",
            ]
            for r in runs
        ],
    }  # fmt: skip


def _name(run: dict) -> str:
    return kind_text(run["method"], run["dtype"])


def _bars(name: str, runs: list[dict], key: str, text, note) -> str:
    rows = [(_name(r), r[key], f"c-{r['method']}", r["dtype"] != "float32") for r in runs]
    return charts.bars(name, rows, text, [note(r) for r in runs])


def _rounds(run: dict) -> str:
    return rounds_text(run["tokens"] / run["median"], run["rounds"], count_text)


def _held(run: dict) -> str:
    return f"workspace {bytes_text(run['workspace'])}, weights {bytes_text(run['weight_bytes'])}"
