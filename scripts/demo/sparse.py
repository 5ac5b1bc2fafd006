"""Measures native sparse attention beside dense attention on the CPU and writes report/sparse.html: `make demo-sparse`."""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from dataclasses import asdict

from . import command_line, html, laws, machine, sparse_gpu, sparse_page
from . import sparse_measure as measure
from .progress import Progress

SCHEMA = 1
LENGTHS = [1024, 2048, 4096, 8192, 16384]
GRADIENTS_TO, CHANGES_TO, NAIVE_TO, RECALL_TO = 4096, 8192, 1024, 4096
DATA = "sparse.json"


def arguments(argv) -> argparse.Namespace:
    form = measure.Form()
    parser = command_line.parser("scripts.demo.sparse", __doc__, f"{html.SPARSE} and {DATA}")
    parser.add_argument(
        "--lengths", type=command_line.lengths, default=LENGTHS, help=f"keys and rows; gradients to {GRADIENTS_TO}"
    )
    parser.add_argument("--heads", type=int, default=form.heads, help="query heads (default %(default)s)")
    parser.add_argument("--kv-heads", type=int, default=form.kv_heads, help="key/value heads (default %(default)s)")
    parser.add_argument("--head-size", type=int, default=form.head_size, help="default %(default)s")
    chosen = parser.parse_args(argv)
    if min(chosen.lengths) < 2 or chosen.head_size < 1 or not chosen.budget > 0:
        parser.error("lengths must be at least 2, head size and budget positive")
    if chosen.kv_heads < 1 or chosen.heads < 1 or chosen.heads % chosen.kv_heads:
        parser.error(f"--heads {chosen.heads}: must be a multiple of --kv-heads {chosen.kv_heads}")
    return chosen


def run(options) -> dict:
    """Measures everything and returns the contents of sparse.json."""
    import heddle
    import torch

    torch.set_num_threads(heddle.num_threads())
    form = measure.Form(options.heads, options.kv_heads, options.head_size)
    progress = Progress(options.budget)
    timer = measure.Timer(form, progress)
    short = [s for s in options.lengths if s <= GRADIENTS_TO]
    report: dict = {
        "schema": SCHEMA,
        "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": machine.describe(),
        "form": asdict(form),
        "settings": {"budget_seconds": options.budget, "lengths": options.lengths},
        "build_seconds": options.build_seconds,
    }
    progress.stage("Time, forward", 0.40)
    times = timer.along(options.lengths, measure.FORWARD, 8.0)
    progress.stage("Time, forward and gradients", 0.40)
    times += timer.along(short, measure.GRADIENTS, 8.0)
    progress.stage("Memory, forward", 0.45)
    memory = measure.memory(form, options.lengths, measure.FORWARD, timer)
    progress.stage("Memory, forward and gradients", 0.40)
    memory += measure.memory(form, short, measure.GRADIENTS, timer)
    progress.stage("What sharing changes", 0.45)
    report["changes"] = measure.changes(form, [s for s in options.lengths if s <= CHANGES_TO], timer)
    progress.stage("How much of dense attention's mass is attended", 0.40)
    report["recall"] = measure.recall(form, [s for s in options.lengths if s <= RECALL_TO], timer)
    progress.stage("Rounding errors against float64", 0.95)
    naive = [s for s in options.lengths if s <= NAIVE_TO]
    report["rounding"] = measure.rounding(form, options.lengths, naive, timer)
    progress.end_stage()
    report |= {"times": times, "memory": memory, "gpu": sparse_gpu.read()}
    report["laws"] = {
        direction: laws.fit_all(
            [p for p in times if p["direction"] == direction],
            [p | {"workspace": p["beside"]} for p in memory if p["direction"] == direction],
        )
        for direction in (measure.FORWARD, measure.GRADIENTS)
    }
    report |= {"left_out": progress.left_out, "stages": progress.stages, "seconds": progress.elapsed()}
    return report


def main(argv=None) -> int:
    options = arguments(argv)
    report = run(options)
    html.write(options.out, {DATA: json.dumps(report, indent=1), html.SPARSE: sparse_page.page(report)})
    left_out = sum(item["count"] for item in report["left_out"])
    print(
        f"\nDone in {report['seconds']:.0f} s; {left_out} measurements left out or cut short.\n"
        f"Open {options.out / html.SPARSE}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
