"""Linear layers of 4096 x 4096 weights, torch's and Heddle's over packed weights, call by call in turn in one process.

PYTHONPATH=build/release/python python bench/linear_bench.py [--threads 2] [--seconds 2] [--format nvfp4 int8_row] [--target avx2] [--out FILE]

Several weights take turns, so that they come from memory. A contender's turn is a pause, in which the other's threads go to
sleep, calls that are not counted, till the processors are awake, and some that are, one after another as in a model. Prints
the least and the median time of a call in ms. The figures and their conditions go to --out, or, of all formats and rows, to
bench/results/cpu-linear-<model>-<SIMD class>.json.
"""

import argparse
import itertools
import json
import pathlib
import statistics
import sys
import time

import cpu_conditions
import heddle
import sources
import torch
from attention_bench import PAUSE
from heddle import lowbit

FORMATS = ("nvfp4", "mxfp4", "e2m1_row", "nf4", "fp4_bnb", "int4_g128", "int4_g128_zp", "int8_row", "fp8_row")
ROWS = (1, 8, 32, 128)
EXTENT = 4096
TURNING_BYTES = 128 << 20  # of weights that take turns: more than caches hold
CALLS, WAKING = 8, 0.02  # counted ones of a turn, and seconds of those in front of them


def calls_of(format, packed, plain, x):
    """What takes turns: name to a call, given its number."""
    calls = {}
    for dtype in plain:
        name = str(dtype).removeprefix("torch.")
        calls[f"torch {name}"] = lambda i, d=dtype: torch.nn.functional.linear(x[d], plain[d][i % len(plain[d])])
        calls[f"heddle {name}"] = lambda i, d=dtype: lowbit.linear(x[d], packed[i % len(packed)])
    if format in ("nvfp4", "mxfp4", "e2m1_row", "int8_row") or format.startswith("int4"):
        calls["heddle bfloat16, int8_x"] = lambda i: lowbit.linear(
            x[torch.bfloat16], packed[i % len(packed)], int8_x=True
        )
    return calls


def differences(calls, expected):
    """name of Heddle's call -> relative distance of its output from `expected`, and its limit."""
    limits = {
        "heddle float32": 1e-4,
        "heddle bfloat16": 0.02,
        "heddle bfloat16, int8_x": 0.03,
    }  # x in 8 bits: 1/254 of a row's largest
    return {
        name: [((calls[name](0).float() - expected).norm() / expected.norm()).item(), limit]
        for name, limit in limits.items()
        if name in calls
    }


def timed(calls, seconds):
    """name -> milliseconds of each counted call, contender by contender in turn."""
    times = {name: [] for name in calls}
    turn_of, end, turns = itertools.count(), time.perf_counter() + seconds, 0
    while turns < 3 or time.perf_counter() < end:
        for name, call in calls.items():
            time.sleep(PAUSE)
            awake = time.perf_counter() + WAKING
            while time.perf_counter() < awake:
                call(next(turn_of))
            for _ in range(CALLS):
                start = time.perf_counter()
                call(next(turn_of))
                times[name].append(1e3 * (time.perf_counter() - start))
        turns += 1
    return times


def measure(format, rows, quantized, packed, plain, seconds):
    """The row, or with `wrong` and no times."""
    row = {"name": f"linear {format} {EXTENT}x{EXTENT} M{rows}", "format": format, "extent": EXTENT, "rows": rows}
    x = torch.randn(rows, EXTENT).to(torch.bfloat16)
    calls = calls_of(format, packed, plain, {dtype: x.to(dtype) for dtype in plain})
    row["differences"] = differences(calls, torch.nn.functional.linear(x.float(), quantized.dequantize()))
    wrong = [
        f"{name} differs by {value:.2g}, the limit is {limit}"
        for name, (value, limit) in row["differences"].items()
        if not value <= limit
    ]
    if wrong:
        return row | {"wrong": "; ".join(wrong)}
    times = timed(calls, seconds)
    row["calls"] = len(times["heddle float32"])
    row["milliseconds"] = {name: {"least": min(t), "median": statistics.median(t)} for name, t in times.items()}
    return row | {"sources": sources.digests(sources.CPU_LINEAR)}


def show(row):
    if "wrong" in row:
        print(f"{row['name']}  WRONG: {row['wrong']}", flush=True)
        return
    for name, found in row["milliseconds"].items():
        print(f"{row['rows']:4} rows  {name:24} {found['least']:8.3f} {found['median']:8.3f}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--format", nargs="*", default=FORMATS)
    parser.add_argument("--rows", type=int, nargs="*", default=ROWS)
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--target", choices=list(cpu_conditions.TARGETS), help="hold everybody to these instructions")
    options = parser.parse_args()
    cpu_conditions.hold(options.target)
    cpu_conditions.check_held()
    torch.set_num_threads(options.threads)
    heddle.set_num_threads(options.threads)
    report = {"conditions": cpu_conditions.conditions(options.threads), "rows": [], "wrong": []}
    weights = torch.randn(EXTENT, EXTENT) / 50
    copies = {dtype: TURNING_BYTES // (EXTENT * EXTENT * dtype.itemsize) for dtype in (torch.float32, torch.bfloat16)}
    plain = {dtype: [weights.to(dtype).clone() for _ in range(count)] for dtype, count in copies.items()}
    out, here = options.out, report["conditions"]
    if out is None and options.format is FORMATS and options.rows is ROWS:
        name = cpu_conditions.file_name("cpu-linear", here["cpu"], here["simd"], here["held"])
        out = pathlib.Path(__file__).resolve().parent / "results" / name
    for format in options.format:
        quantized = lowbit.quantize(weights, format)
        packed = [lowbit.pack(quantized)]
        packed += [lowbit.pack(quantized) for _ in range(TURNING_BYTES // packed[0].nbytes)]
        print(f"{format}, {options.threads} threads, {heddle.cpu_target()}: least / median ms")
        for rows in options.rows:
            with torch.no_grad():
                row = measure(format, rows, quantized, packed, plain, options.seconds)
            report["wrong" if "wrong" in row else "rows"].append(row)
            show(row)
            if out is not None:  # after each row: what was measured is not lost with what comes after
                out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if report["wrong"]:
        sys.exit(f"{len(report['wrong'])} rows are wrong")


if __name__ == "__main__":
    main()
