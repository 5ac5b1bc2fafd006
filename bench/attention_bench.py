"""Heddle against torch on this CPU, in one run: what `make bench` runs.

For each row of shapes.json, Heddle and torch are called in turn (the order changes every time), after a warm-up and a
comparison of their results. Reported are the medians, their ratio, and whether the row's goal is met. The figures go to
bench/results/cpu-<model>-<SIMD class>.json with the conditions they were taken under: what holds of one kind of processor
need not hold of another. --target avx2 holds Heddle and its rivals to AVX2, as a processor would that has no more.

  python bench/attention_bench.py --quick
  python bench/attention_bench.py --filter decode --seconds 3
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import sys
import time

import contenders
import cpu_conditions
import heddle
import sources
import torch

HERE = pathlib.Path(__file__).resolve().parent
# Samples shorter than this are made of several calls, so that clock and scheduler matter little.
SHORTEST_SAMPLE = 0.004
# torch's OpenMP threads spin for a few milliseconds after each call; whoever is next must not pay for that.
PAUSE = 0.005
# A processor that slept through the pause may take milliseconds to wake. Calls shorter than this are preceded by one that is
# not counted, for either contender: in a model, calls follow each other.
WAKING = 0.05


def sample(call, calls):
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - begin) / calls


def measure(calls, seconds):
    """Times the calls in turn. Returns name -> list of seconds, index by index from the same turn."""
    repeats, shorter = {}, {}
    for name, call in calls.items():
        sample(call, 1)
        once = sample(call, 1)
        repeats[name] = max(1, round(SHORTEST_SAMPLE / once))
        shorter[name] = once < WAKING
    times = {name: [] for name in calls}
    end = time.perf_counter() + seconds
    turn = 0
    while turn < 5 or time.perf_counter() < end:
        order = list(calls) if turn % 2 == 0 else list(calls)[::-1]
        for name in order:
            time.sleep(PAUSE)
            if shorter[name]:
                calls[name]()
            times[name].append(sample(calls[name], repeats[name]))
        turn += 1
    return times


class Wrong(Exception):
    """Somebody computes something else: the row has no time."""


def difference(row, calls, to_common):
    """The largest of Heddle's output from anybody's, of the largest value, and its limit. Where the others compute something else,
    what a row has as its reference is asked, which is not timed. Raises Wrong beyond the limit."""
    asked = calls if row.reference is None else {"heddle": calls["heddle"], "torch": row.reference()}
    outputs = {name: to_common.get(name, lambda x: x)(call()).float() for name, call in asked.items()}
    ours = outputs.pop("heddle")
    limit = row.limit() if row.limit else 1e-4 if row.dtype == "f32" else 0.04
    found = {name: ((ours - theirs).abs().max() / theirs.abs().max()).item() for name, theirs in outputs.items()}
    for name, value in found.items():
        if not value <= limit:
            raise Wrong(f"heddle and {name} differ by {value:.2g} of the largest value, the limit is {limit}")
    return max(found.values()), limit


def run_row(row, seconds):
    calls, to_common = row.calls()
    worst, limit = difference(row, calls, to_common)
    times = measure(calls, seconds)
    medians = {name: statistics.median(t) for name, t in times.items()}
    ours = medians["heddle"]
    others = {name: t for name, t in medians.items() if name != "heddle"}
    rival = row.rival or min(others, key=others.get)
    if row.rate:
        paired = [(row.flops / a) / (calls["sgemm"].flops / b) for a, b in zip(times["heddle"], times["sgemm"])]
        ratio = (row.flops / ours) / (calls["sgemm"].flops / medians["sgemm"])
    else:
        paired = [b / a for a, b in zip(times["heddle"], times[rival])]
        ratio = others[rival] / ours
    quartiles = statistics.quantiles(paired, n=4)
    return {
        "group": row.group, "name": row.name, "shape": row.shape, "dtype": row.dtype, "turns": len(paired),
        "median_seconds": medians, "rival": rival, "ratio": ratio, "ratio_quartiles": [quartiles[0], quartiles[2]],
        "heddle_gflops": row.flops / ours / 1e9, "goal": row.goal, "met": ratio >= row.goal,
        "difference": worst, "limit": limit, "sources": sources.digests(row.sources), **row.notes(),
    }  # fmt: skip


def text_row(result):
    ours, theirs = result["median_seconds"]["heddle"], result["median_seconds"][result["rival"]]
    low, high = result["ratio_quartiles"]
    others = [
        f"{name} {seconds / ours:.2f}"
        for name, seconds in result["median_seconds"].items()
        if name not in ("heddle", result["rival"])
    ]
    return [
        result["name"], f"{ours * 1e3:.3f}", f"{theirs * 1e3:.3f}", result["rival"], f"{result['ratio']:.2f}",
        f"{low:.2f}..{high:.2f}", f"{result['goal']:.2f}", "met" if result["met"] else "MISSED",
        f"{result['heddle_gflops']:.0f}", ", ".join(others),
    ]  # fmt: skip


HEADS = ["row", "heddle ms", "rival ms", "rival", "ratio", "quartiles", "goal", "", "GFLOP/s", "also"]
WIDTHS = [62, 10, 10, 17, 6, 11, 5, 6, 7, 0]


def print_line(cells):
    left = {0, 3, 7, 9}
    print("  ".join(c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(cells, WIDTHS))).rstrip(),
          flush=True)  # fmt: skip


def selected_rows(arguments):
    rows = []
    for group in json.loads((HERE / "shapes.json").read_text())["groups"]:
        for dtype in group["dtypes"]:
            for shape in group["quick" if arguments.quick else "shapes"]:
                rows.append(contenders.make_row(group, shape, dtype, arguments.threads))
    rows = [row for row in rows if all(word in row.name for word in arguments.filter)]
    if not rows:
        sys.exit(f"no row's name contains all of {arguments.filter}")
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the few rows that each group names as quick")
    parser.add_argument("--filter", action="append", default=[], help="only rows whose name contains this; repeatable")
    parser.add_argument("--seconds", type=float, default=2.0, help="time for each row (at least 5 turns; default 2)")
    parser.add_argument("--threads", type=int, default=2, help="of Heddle, torch and OpenBLAS (default 2)")
    parser.add_argument("--target", choices=list(cpu_conditions.TARGETS), help="hold everybody to these instructions")
    parser.add_argument("--out", type=pathlib.Path, help="where the JSON goes (default: bench/results/cpu-<model>-<SIMD class>.json; "
                        "with --quick or --filter none)")  # fmt: skip
    arguments = parser.parse_args()
    cpu_conditions.hold(arguments.target)
    cpu_conditions.check_held()
    torch.set_num_threads(arguments.threads)
    heddle.set_num_threads(arguments.threads)

    report = {"wrong": [], "conditions": cpu_conditions.conditions(arguments.threads), "rows": []}
    here = report["conditions"]
    print(f"{here['cpu']}, {arguments.threads} threads; heddle {here['heddle']} ({here['heddle_target']}), torch "
          f"{here['torch']} ({here['torch_capability']}); commit {here['commit'][:10]}; "
          f"load {here['load_average_before']:.1f}\n")  # fmt: skip
    out = arguments.out
    if out is None and not arguments.quick and not arguments.filter:
        out = HERE / "results" / cpu_conditions.file_name("cpu", here["cpu"], here["simd"], here["held"])
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
    print_line(HEADS)
    for row in selected_rows(arguments):
        try:
            result = run_row(row, arguments.seconds)
        except Exception as error:  # one row that fails does not cost the others
            words = str(error) if isinstance(error, Wrong) else f"{type(error).__name__}: {error}"
            report["wrong"].append({"name": row.name, "wrong": words})
            print(f"{row.name}  WRONG: {words}", flush=True)
        else:
            report["rows"].append(result)
            print_line(text_row(result))
        here["load_average_after"] = os.getloadavg()[0]
        if out is not None:  # after each row, too: what was measured is not lost with what comes after
            out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    met = sum(result["met"] for result in report["rows"])
    print(f"\n{met} of {len(report['rows'])} goals met")
    if out is not None:
        print(f"written to {out}")
    if report["wrong"]:
        sys.exit(f"{len(report['wrong'])} rows are wrong: {', '.join(row['name'] for row in report['wrong'])}")


if __name__ == "__main__":
    main()
