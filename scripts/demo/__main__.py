"""Runs the demo: encoder, low-bit layers, sweeps, limits, recommendation, report."""

from __future__ import annotations

import argparse
import datetime
import json
import sys

from . import claims, command_line, encode, gpu, html, laws, limits, lowbit, machine, memory, recommend, sweep
from .progress import Progress

SCHEMA = 2
LENGTHS = [128, 192, 256, 512, 1024, 2048, 4096, 8192]
TIMED = [
    (method, dtype) for method in ("flash", "torch", "baseline") for dtype in ("float32", "bfloat16")
]  # the baseline, the slowest, last
KINDS = [kind for kind in TIMED if kind[0] != "torch"]


def arguments(argv) -> argparse.Namespace:
    parser = command_line.parser("scripts.demo", __doc__, "index.html, lowbit.html and report.json")
    parser.add_argument(
        "--accuracy",
        type=float,
        default=1e-2,
        help="largest relative error the recommendation allows (default %(default)s)",
    )
    parser.add_argument("--lengths", type=command_line.lengths, default=LENGTHS, help="lengths of the sweep")
    parser.add_argument("--heads", type=int, default=8, help="heads of the sweep (default %(default)s)")
    parser.add_argument("--head-size", type=int, default=64, help="head size of the sweep (default %(default)s)")
    parser.add_argument(
        "--text-bytes", type=int, default=200_000, help="bytes of text to encode, at least (default %(default)s)"
    )
    parser.add_argument(
        "--limit", type=int, default=2 << 30, help="bytes of the limit under which the longest sequence is tried"
    )
    chosen = parser.parse_args(argv)
    if not chosen.accuracy > 0:
        parser.error(f"--accuracy {chosen.accuracy}: must be greater than 0")
    if min(chosen.lengths) < 1 or chosen.heads < 1 or chosen.head_size < 1 or not chosen.budget > 0:
        parser.error("lengths, heads, head size and budget must be positive")
    return chosen


def time_lengths(options, timer: sweep.Timer) -> dict:
    """Time against length, with several heads and with one."""
    heads, head_size = options.heads, options.head_size
    timer.progress.stage(sweep.STAGE, 0.45)
    several = timer.along([(1, heads, s, head_size) for s in options.lengths], TIMED, 0.5)
    timer.progress.stage("The same with one head", 0.20)
    return {"length": several, "one_head": timer.along([(1, 1, s, head_size) for s in options.lengths], KINDS, 0.2)}


def time_axes(options, timer: sweep.Timer) -> dict:
    """Time against batch, heads and head size, one at a time, and the best batch size for each length."""
    heads, head_size = options.heads, options.head_size
    middle = max((s for s in options.lengths if s <= 1024), default=options.lengths[0])
    found: dict = {"shape": {"batch": 1, "heads": heads, "head_size": head_size, "middle": middle}}
    timer.progress.stage("Batch, heads and head size, one at a time", 0.45)
    axes = {
        "batch": [(b, heads, middle, head_size) for b in (1, 2, 4, 8)],
        "heads": [(1, h, middle, head_size) for h in (1, 2, 4, 8, 16, 32)],
        "head_size": [(1, heads, middle, d) for d in (16, 32, 64, 96, 128, 192, 256)],
    }
    for axis, shapes in axes.items():
        found[axis] = timer.along(shapes, KINDS, 0.15)
    timer.progress.stage("Best batch size at each length", 0.95)
    found["batches"] = timer.along(
        sweep.batch_shapes(options.lengths, heads, head_size, max(options.lengths)), KINDS, 0.1
    )
    found["best_batch"] = sweep.choose_batch(found["batches"])
    return found


def run(options) -> dict:
    """Measures everything and returns the report (the contents of report.json)."""
    import heddle
    import torch

    torch.set_num_threads(heddle.num_threads())
    progress = Progress(options.budget)
    report: dict = {
        "schema": SCHEMA,
        "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": machine.describe(),
        "settings": {"accuracy": options.accuracy, "budget_seconds": options.budget, "lengths": options.lengths},
        "build_seconds": options.build_seconds,
    }
    progress.stage("all-MiniLM-L6-v2 on real text", 0.35)
    packed, report["text"] = encode.prepare(options.text_bytes)
    about = report["text"]
    progress.step(
        f"{about['bytes'] / 1e3:.0f} kB of {about['source']}: {about['pieces']} pieces, {about['tokens']} tokens"
    )
    report["encoder"] = encode.run(packed, progress)

    progress.stage(lowbit.STAGES[0], 0.40)
    rate = next(
        (r["tokens_per_second"] for r in report["encoder"] if (r["method"], r["dtype"]) == ("flash", "float32")), 1000.0
    )
    report["lowbit"] = {"policies": lowbit.policies(packed, rate, progress)}
    progress.stage(lowbit.STAGES[1], 0.30)
    report["lowbit"]["gpu"] = gpu.policies(packed, progress)
    progress.stage(lowbit.STAGES[2], 0.15)
    report["lowbit"]["study"] = lowbit.study(progress)

    progress.stage("Memory of one attention call (one head)", 0.15)
    report["memory"] = memory.sweep(options.lengths, KINDS, 1, options.head_size, progress)
    progress.stage("Error against float64", 0.25)
    report["errors"] = sweep.errors(options.lengths, KINDS, options.heads, options.head_size, progress)
    timer = sweep.Timer(progress)
    report["sweep"] = time_lengths(options, timer)
    progress.stage("Longest sequence that fits", 0.50)
    one_head, free = report["sweep"]["one_head"], machine.memory_bytes()
    report["limits"] = limits.verify(
        report["memory"], one_head, KINDS, options.head_size, options.limit, free, progress
    )
    report["sweep"] |= time_axes(options, timer)
    progress.end_stage()

    timed = [p for p in report["sweep"]["length"] if p["method"] != "torch"]
    report["laws"] = {
        "fits": laws.fit_all(timed, report["memory"]),
        "fits_one_head": laws.fit_all(one_head, report["memory"]),
        "score_buffer": laws.check_score_buffer(report["memory"]),
    }
    report["ratios"] = laws.compare_methods(report["sweep"]["length"], report["memory"])
    report["ratios_one_head"] = laws.compare_methods(one_head, report["memory"])
    rows = recommend.recommend(timed, report["errors"], options.accuracy)
    report["recommendation"] = {"rows": rows, "lower_precision": recommend.lower_precision(rows, options.accuracy)}
    report["claims"] = claims.check(
        report["ratios_one_head"],
        report["laws"]["score_buffer"],
        report["laws"]["fits_one_head"],
        report["sweep"],
        report["recommendation"]["lower_precision"],
    )
    report["left_out"] = progress.left_out
    report["stages"] = progress.stages
    report["seconds"] = progress.elapsed()
    return report


def main(argv=None) -> int:
    options = arguments(argv)
    report = run(options)
    pages = {html.INDEX: html.page(report), html.LOWBIT: html.lowbit(report)}
    html.write(options.out, {"report.json": json.dumps(report, indent=1)} | pages)
    left_out = sum(item["count"] for item in report["left_out"])
    print(
        f"\nDone in {report['seconds']:.0f} s; {left_out} measurements left out or cut short.\nOpen {options.out / 'index.html'}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
