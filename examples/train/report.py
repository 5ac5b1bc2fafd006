"""Writes the tables of examples/train/README.md and its charts from the files that train.py, lengths.py and sparse.py have written.

  python examples/train/report.py [--check] [train.json]

Without a file: from bench/results/train-*.json, each table from the newest file that has its runs. --check writes nothing and
fails where page or charts are not current. Runs of older sources than the tree's have a dagger.

The distance of two loss curves is the root mean square of their difference, step by step. Two programs of one computation
drift apart as their roundings do; how far is seen among torch's own runs of a precision (kernel and unfused, with and
without checkpointing), and Heddle's distance from torch's kernel stands beside the largest of those.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import chart

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "scripts"))

import bench_results  # noqa: E402
from bench_results import marked, noted  # noqa: E402
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
            marked(precision + (", checkpointing" if checkpointing else ""), found.values()), number(ours["validation_loss"], 4),
            number(theirs["validation_loss"], 4), f"{distance(ours['losses'], theirs['losses']):.1e}",
            "" if of_torch is None else f"{of_torch:.1e}", number(ours["tokens_per_second"]),
            number(theirs["tokens_per_second"]), f"{ours['tokens_per_second'] / theirs['tokens_per_second']:.2f}",
            number(ours["peak_mib"]), number(theirs["peak_mib"]), number(math and math["peak_mib"]),
        ])  # fmt: skip
    return table(rows)


def by_length(runs):
    speed = {(run["attention"], run["precision"], run["context"]): run["tokens_per_second"] for run in runs}
    of_length = {}
    for run in runs:
        of_length.setdefault(run["context"], []).append(run)
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
            marked(str(length), of_length[length]), *(f"{x:.0f}" for x in ours), f"{ours[1] / ours[0]:.2f}", f"{ours[2] / ours[0]:.2f}", *(f"{x:.0f}" for x in theirs),
            *(f"{x / y:.2f}" for x, y in zip(ours, theirs)),
        ])  # fmt: skip
    return table(rows)


def against_dense(runs):
    """Of each run what it has of the first, dense one's rate."""
    dense = next(run for run in runs if run["attention"] in DENSE)
    rows = [["attention", "validation loss", "more than dense", "tokens/s", "ratio", "peak MiB"]]
    for run in runs:
        rows.append([
            marked(run["attention"], [run]), f"{run['validation_loss']:.4f}", f"{run['validation_loss'] - dense['validation_loss']:+.4f}",
            f"{run['tokens_per_second']:.0f}", f"{run['tokens_per_second'] / dense['tokens_per_second']:.2f}",
            "" if run["peak_mib"] is None else f"{run['peak_mib']:.0f}",
        ])  # fmt: skip
    one = dense
    what = (
        f"{one['layers']} layers, {one['heads']} heads over {one['kv_heads']} key/value heads of {one['head_size']}, context "
        f"{one['context']}, {one['batch']} pieces a step, {one['steps']} steps, {one['precision']}.\n\n"
    )
    return what + table(rows)


def where(c):
    return f"{c['gpu'] or 'CPU'}, torch {c['torch']}, commit {c['commit'][:10]}, {c['date'][:10]}; {c['text']}.\n\n"


def loss_chart(runs, key):
    curves = {run[key]: smooth(run["losses"]) for run in runs}
    return chart.lines(
        "Training loss, means of 10 steps", "step", "nats per byte", {n: line for n, line in curves.items() if line}
    )


def lengths_chart(runs):
    lines = {}
    for run in runs:
        lines.setdefault(f"{run['precision']} {run['attention']}", []).append(
            (run["context"], run["tokens_per_second"])
        )
    return chart.lines("Training steps over the length of the text", "context", "tokens/s", lines, doubling=True)


# Block of the page, and kind of runs -> its table, what its chart shows, the chart and its file.
PARTS = {
    "runs": (
        comparison,
        "Training loss",
        lambda runs: loss_chart([r for r in runs if not r["checkpointing"] and r["attention"] != "math"], "name"),
        "loss.svg",
    ),
    "lengths": (by_length, "Tokens per second over the length of the text", lengths_chart, "lengths.svg"),
    "sparse": (
        against_dense,
        "Training loss, dense and sparse",
        lambda runs: loss_chart(runs, "attention"),
        "sparse.svg",
    ),
}


def write(reports, page, check):
    """Whether page and charts were what the reports say, oldest first; unless `check`, they are made so."""
    current = True
    for kind, (made, words, draw, file) in PARTS.items():
        having = [report for report in reports if report.get(kind)]
        if not having:
            continue
        runs, svg, path = having[-1][kind], draw(having[-1][kind]), page.parent / file
        block = where(having[-1]["conditions"]) + noted(made(runs)) + f"\n\n![{words}]({file})"
        current &= update(page, kind, block, check=check)
        if check:
            current &= path.exists() and path.read_text(encoding="utf-8") == svg
        else:
            path.write_text(svg, encoding="utf-8")
    return current


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="?")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if page or charts are not current")
    parser.add_argument(
        "--page", type=Path, default=HERE / "README.md", help="the page with the marked blocks; charts go beside it"
    )
    given = parser.parse_args(arguments)
    if given.results:
        reports = [json.loads(given.results.read_text(encoding="utf-8"))]
    else:
        reports = [content for _, content in bench_results.read("train-*.json")]
    if not write(reports, given.page, given.check):
        sys.exit("report.py: the page is not what its figures say: run examples/train/report.py")


if __name__ == "__main__":
    main()
