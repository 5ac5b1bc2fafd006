"""Native sparse attention on GPUs, from the result files of `make bench-gpu`: rows whose name or family begins with nsa."""

from __future__ import annotations

import re
import statistics
from pathlib import Path

from .. import bench_results

# The whole operation: heads, window, way of sharing, direction and length.
WHOLE = re.compile(r"nsa (\d+/\d+)(?: window (\d+))?(?: (seed_4_3|seed|fast))? (forward|backward) S(\d+)")


def read(folder: Path = bench_results.RESULTS) -> list[dict]:
    """A row each: GPU, name, date, file, figures of each contender in ms or MiB, older (measured on older sources); where the name says
    them, form, preset, direction and length. Newer files replace rows of older ones, GPU by GPU."""
    gpus: dict[str, list] = {}
    for file, content in bench_results.read("nvidia-*.json", folder):
        gpus.setdefault(content["conditions"]["gpu"], []).append((file, content))
    return [
        _row(gpu, row)
        for gpu, files in gpus.items()
        for row in bench_results.merged(files).values()
        if row["name"].startswith("nsa ") or row.get("family", "").startswith("nsa")
    ]


def _row(gpu: str, row: dict) -> dict:
    mib = row["unit"] == "MiB"
    figures = row["rates"] if mib else {name: statistics.median(ms) for name, ms in row["milliseconds"].items()}
    found = {
        "gpu": gpu,
        "name": row["name"],
        "file": row["file"],
        "date": row["conditions"]["date"],
        "unit": "MiB" if mib else "ms",
        "figures": figures,
        "absent": row.get("absent", {}),
        "older": bench_results.stale([row]),
    }
    whole = WHOLE.fullmatch(row["name"])
    if whole:
        heads, window, preset, direction, length = whole.groups()
        found |= {
            "form": f"{heads} heads, window {window}" if window else f"{heads} heads, no window",
            "preset": preset,
            "direction": direction,
            "length": int(length),
        }
    return found
