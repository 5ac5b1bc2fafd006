"""Writes the tables of examples/train/README.md and its charts from the file that train.py and lengths.py have written.

  python examples/train/report.py bench/results/train-nvidia-h200.json

The distance of two loss curves is the root mean square of their difference, step by step. Two programs of one computation
drift apart as their roundings do; how far is seen among torch's own runs of a precision (kernel and unfused, with and
without checkpointing), and Heddle's distance from torch's kernel stands beside the largest of those.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import chart
import results

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "scripts"))

from marked_block import table, update  # noqa: E402

from model import DENSE  # noqa: E402

SMOOTHED = 10  # steps: every step has another batch, whose difficulty is the same for all curves


def distance(one, other):
    return (sum((x - y) ** 2 for x, y in zip(one, other, strict=True)) / len(one)) ** 0.5


def smooth(losses):
    """(step, mean loss of the steps around it)."""
    return [
        (end, sum(losses[end - SMOOTHED : end]) / SMOOTHED)
        for end in range(SMOOTHED, len(losses) + 1, max(1, SMOOTHED // 2))
    ]


def by_kind(runs):
    """(precision, checkpointing) -> attention -> run."""
    kinds = {}
    for run in runs:
        kinds.setdefault((run["precision"], run["checkpointing"]), {})[run["attention"]] = run
    return kinds


def noise(runs, theirs):
    """The largest distance of torch's other runs of the same precision from `theirs`; None if there are none."""
    others = [
        run
        for run in runs
        if run["attention"] != "heddle" and run["precision"] == theirs["precision"] and run is not theirs
    ]
    return max((distance(run["losses"], theirs["losses"]) for run in others), default=None)


def comparison(runs):
    rows = [["", "validation loss, Heddle", "torch", "distance of the loss curves", "of torch's own", "tokens/s, Heddle", "torch",
             "ratio", "peak MiB, Heddle", "torch", "unfused"]]  # fmt: skip
    number = lambda value, digits=0: "" if value is None else f"{value:.{digits}f}"
    for (precision, checkpointing), found in by_kind(runs).items():
        if not {"heddle", "torch"} <= found.keys():
            continue
        ours, theirs, math = found["heddle"], found["torch"], found.get("math")
        of_torch = noise(runs, theirs)
        rows.append([
            precision + (", checkpointing" if checkpointing else ""), number(ours["validation_loss"], 4),
            number(theirs["validation_loss"], 4), f"{distance(ours['losses'], theirs['losses']):.1e}",
            "" if of_torch is None else f"{of_torch:.1e}", number(ours["tokens_per_second"]),
            number(theirs["tokens_per_second"]), f"{ours['tokens_per_second'] / theirs['tokens_per_second']:.2f}",
            number(ours["peak_mib"]), number(theirs["peak_mib"]), number(math and math["peak_mib"]),
        ])  # fmt: skip
    return table(rows)


def by_length(runs):
    speed = {(run["attention"], run["precision"], run["context"]): run["tokens_per_second"] for run in runs}
    wanted = [(attention, precision) for attention in ("heddle", "torch") for precision in ("fp32", "bf16", "fp16")]
    lengths = [n for n in sorted({run["context"] for run in runs}) if all((*each, n) in speed for each in wanted)]
    rows = [["S", "fp32, tokens/s", "bf16", "fp16", "bf16 / fp32", "fp16 / fp32", "torch, fp32", "bf16", "fp16", "Heddle / torch, fp32", "bf16",
             "fp16"]]  # fmt: skip
    for length in lengths:
        ours, theirs = (
            [speed[attention, precision, length] for precision in ("fp32", "bf16", "fp16")]
            for attention in ("heddle", "torch")
        )
        rows.append([
            str(length), *(f"{x:.0f}" for x in ours), f"{ours[1] / ours[0]:.2f}", f"{ours[2] / ours[0]:.2f}", *(f"{x:.0f}" for x in theirs),
            *(f"{x / y:.2f}" for x, y in zip(ours, theirs)),
        ])  # fmt: skip
    return table(rows)


def against_dense(runs):
    """Of each run what it has of the first, dense one's rate."""
    dense = next(run for run in runs if run["attention"] in DENSE)
    rows = [["attention", "validation loss", "more than dense", "tokens/s", "ratio", "peak MiB"]]
    for run in runs:
        rows.append([
            run["attention"], f"{run['validation_loss']:.4f}", f"{run['validation_loss'] - dense['validation_loss']:+.4f}",
            f"{run['tokens_per_second']:.0f}", f"{run['tokens_per_second'] / dense['tokens_per_second']:.2f}",
            "" if run["peak_mib"] is None else f"{run['peak_mib']:.0f}",
        ])  # fmt: skip
    one = dense
    what = (
        f"{one['layers']} layers, {one['heads']} heads over {one['kv_heads']} key/value heads of {one['head_size']}, context "
        f"{one['context']}, {one['batch']} pieces a step, {one['steps']} steps, {one['precision']}.\n\n"
    )
    return what + table(rows)


def where(report):
    c = report["conditions"]
    return f"{c['gpu'] or 'CPU'}, torch {c['torch']}, commit {c['commit'][:10]}, {c['date'][:10]}; {c['text']}.\n\n"


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument(
        "--page", type=Path, default=HERE / "README.md", help="the page with the marked blocks; charts go beside it"
    )
    given = parser.parse_args(arguments)
    report = results.read(given.results)
    if report["runs"]:
        curves = {
            run["name"]: smooth(run["losses"])
            for run in report["runs"]
            if not run["checkpointing"] and run["attention"] != "math"
        }
        svg = chart.lines(
            "Training loss, means of 10 steps", "step", "nats per byte", {n: line for n, line in curves.items() if line}
        )
        (given.page.parent / "loss.svg").write_text(svg, encoding="utf-8")
        update(
            given.page,
            "runs",
            where(report) + comparison(report["runs"]) + "\n\n![Training loss](loss.svg)",
            check=False,
        )
    if report["lengths"]:
        lines = {}
        for run in report["lengths"]:
            lines.setdefault(f"{run['precision']} {run['attention']}", []).append(
                (run["context"], run["tokens_per_second"])
            )
        svg = chart.lines("Training steps over the length of the text", "context", "tokens/s", lines, doubling=True)
        (given.page.parent / "lengths.svg").write_text(svg, encoding="utf-8")
        block = (
            where(report)
            + by_length(report["lengths"])
            + "\n\n![Tokens per second over the length of the text](lengths.svg)"
        )
        update(given.page, "lengths", block, check=False)
    if report["sparse"]:
        curves = {run["attention"]: smooth(run["losses"]) for run in report["sparse"]}
        svg = chart.lines("Training loss, means of 10 steps", "step", "nats per byte", curves)
        (given.page.parent / "sparse.svg").write_text(svg, encoding="utf-8")
        block = where(report) + against_dense(report["sparse"]) + "\n\n![Training loss, dense and sparse](sparse.svg)"
        update(given.page, "sparse", block, check=False)


if __name__ == "__main__":
    main()
