"""Linear layers of 4096 x 4096 weights, torch's and Heddle's over packed weights, call by call in turn in one process.

PYTHONPATH=build/release/python python bench/linear_bench.py [--threads 2] [--seconds 2] [--format nvfp4 int8_row] [--out FILE]

Several weights take turns, so that they come from memory. Prints the least and the median time of a call in ms: on a
machine that others use too, the least is the one to compare. --out: the figures and their conditions, as JSON.
"""

import argparse
import json
import pathlib
import statistics
import time

import heddle
import torch
from attention_bench import conditions
from heddle import lowbit

EXTENT, MATRICES = 4096, 4


def calls_of(format, packed, plain, x):
    """What takes turns: name to a call with the number of a matrix."""
    calls = {}
    for dtype in plain:
        name = str(dtype).removeprefix("torch.")
        calls[f"torch {name}"] = lambda i, d=dtype: torch.nn.functional.linear(x[d], plain[d][i])
        calls[f"heddle {name}"] = lambda i, d=dtype: lowbit.linear(x[d], packed[i])
    if format in ("nvfp4", "mxfp4", "e2m1_row", "int8_row") or format.startswith("int4"):
        calls["heddle bfloat16, int8_x"] = lambda i: lowbit.linear(x[torch.bfloat16], packed[i], int8_x=True)
    return calls


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--format", nargs="*", default=["nvfp4"])
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 32, 128])
    parser.add_argument("--out", type=pathlib.Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    heddle.set_num_threads(options.threads)
    report = {"conditions": conditions(options.threads), "rows": []}
    weights = torch.randn(EXTENT, EXTENT) / 50
    plain = {dtype: [weights.to(dtype).clone() for _ in range(MATRICES)] for dtype in (torch.float32, torch.bfloat16)}
    for format in options.format:
        packed = [lowbit.pack(lowbit.quantize(weights, format)) for _ in range(MATRICES)]
        print(f"{format}, {options.threads} threads, {heddle.cpu_target()}: least / median ms")
        for rows in options.rows:
            calls = calls_of(format, packed, plain, {dtype: torch.randn(rows, EXTENT).to(dtype) for dtype in plain})
            times = {name: [] for name in calls}
            end, turn = time.perf_counter() + options.seconds, 0
            with torch.no_grad():
                while turn < 5 or time.perf_counter() < end:
                    for name, call in calls.items():
                        start = time.perf_counter()
                        call(turn % MATRICES)
                        times[name].append(1e3 * (time.perf_counter() - start))
                    turn += 1
            for name, t in times.items():
                print(f"{rows:4} rows  {name:24} {min(t):8.3f} {statistics.median(t):8.3f}", flush=True)
            found = {name: {"least": min(t), "median": statistics.median(t)} for name, t in times.items()}
            report["rows"].append({"format": format, "extent": EXTENT, "rows": rows, "calls": turn, "milliseconds": found})
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
