"""Measures layers of adaptive sparse attention beside the public algorithm on the CPU and writes report/asam.html: `make demo-sparse`."""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from dataclasses import asdict

from . import asam_measure as measure
from . import asam_page, command_line, html, machine
from .progress import OUT_OF_TIME, Progress
from .rounds import FORWARD, GRADIENTS

SCHEMA = 1
LENGTHS = [128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536]
TRAINING_TO, BATCH_LENGTH = 4096, 512
DATA = "asam.json"


def arguments(argv) -> argparse.Namespace:
    form = measure.Form()
    parser = command_line.parser("scripts.demo.asam", __doc__, f"{html.ASAM} and {DATA}")
    parser.add_argument(
        "--lengths", type=command_line.lengths, default=LENGTHS, help=f"positions; training to {TRAINING_TO}"
    )
    parser.add_argument("--dim", type=int, default=form.dim, help="width (default %(default)s)")
    parser.add_argument("--heads", type=int, default=form.heads, help="heads (default %(default)s)")
    parser.add_argument("--batch-length", type=int, default=BATCH_LENGTH, help="where batches are tried")
    parser.add_argument("--most-batch", type=int, default=measure.MOST_BATCH, help="the largest (default %(default)s)")
    parser.add_argument(
        "--limit", type=int, default=2 << 30, help="bytes of the limit under which the longest sequence is tried"
    )
    chosen = parser.parse_args(argv)
    if min(chosen.lengths) < 2 or chosen.batch_length < 2 or chosen.limit < 1 or not chosen.budget > 0:
        parser.error("lengths must be at least 2, limit and budget positive")
    if chosen.heads < 1 or chosen.dim < 1 or chosen.dim % chosen.heads:
        parser.error(f"--dim {chosen.dim}: must be a multiple of --heads {chosen.heads}")
    return chosen


def run(options) -> dict:
    """Measures everything and returns the contents of asam.json."""
    import heddle
    import torch

    torch.set_num_threads(heddle.num_threads())
    form = measure.Form(options.dim, options.heads)
    progress = Progress(options.budget)
    timer = measure.Timer(form, progress)
    training = [s for s in options.lengths if s <= TRAINING_TO]
    report: dict = {
        "schema": SCHEMA,
        "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": machine.describe(),
        "form": asdict(form),
        "settings": {
            "budget_seconds": options.budget,
            "lengths": options.lengths,
            "batch_length": options.batch_length,
            "limit": options.limit,
        },
        "build_seconds": options.build_seconds,
        "agreement": None,
    }
    progress.stage("Original is what the public layer computes", 0.1)
    if progress.left() > 1:
        report["agreement"] = measure.agreement(form)
    else:
        progress.leave_out("how far Original is from the layer of its weights", OUT_OF_TIME)
    progress.stage("Time, forward", 0.40)
    times = timer.along(options.lengths, FORWARD, 4.0)
    progress.stage("Time, training", 0.40)
    times += timer.along(training, GRADIENTS, 4.0)
    progress.stage("Memory, forward", 0.45)
    memory = measure.memory(form, options.lengths, FORWARD, timer)
    progress.stage("Memory, training", 0.35)
    memory += measure.memory(form, training, GRADIENTS, timer)
    progress.stage("Longest sequence that fits", 0.40)
    report["longest"] = measure.longest(form, memory, timer, options.limit)
    progress.stage("Batches", 0.95)
    points = measure.batches(form, options.batch_length, options.most_batch, progress)
    progress.end_stage()
    report |= {"times": times, "memory": memory, "batches": points, "best_batches": measure.best_batches(points)}
    report |= {"left_out": progress.left_out, "stages": progress.stages, "seconds": progress.elapsed()}
    return report


def main(argv=None) -> int:
    options = arguments(argv)
    report = run(options)
    html.write(options.out, {DATA: json.dumps(report, indent=1), html.ASAM: asam_page.page(report)})
    left_out = sum(item["count"] for item in report["left_out"])
    print(
        f"\nDone in {report['seconds']:.0f} s; {left_out} measurements left out or cut short.\n"
        f"Open {options.out / html.ASAM}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
