"""Linear layers of 4096 x 4096 weights, torch's and Heddle's over packed weights, call by call in turn in one process.

PYTHONPATH=build/release/python python bench/linear_bench.py [--threads 2] [--seconds 2] [--format nvfp4]

Several weights take turns, so that they come from memory. Prints the least and the median time of a call in ms: on a
machine that others use too, the least is the one to compare.
"""

import argparse
import statistics
import time

import heddle
import torch
from heddle import lowbit

EXTENT, MATRICES = 4096, 4


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--format", default="nvfp4")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 32, 128])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    heddle.set_num_threads(options.threads)
    weights = torch.randn(EXTENT, EXTENT) / 50
    packed = [lowbit.pack(lowbit.quantize(weights, options.format)) for _ in range(MATRICES)]
    plain = {dtype: [weights.to(dtype).clone() for _ in range(MATRICES)] for dtype in (torch.float32, torch.bfloat16)}

    print(f"{options.format}, {options.threads} threads, {heddle.cpu_target()}: least / median ms")
    for rows in options.rows:
        x = {dtype: torch.randn(rows, EXTENT).to(dtype) for dtype in plain}
        calls = {}
        for dtype in plain:
            name = str(dtype).removeprefix("torch.")
            calls[f"torch {name}"] = lambda i, d=dtype: torch.nn.functional.linear(x[d], plain[d][i])
            calls[f"heddle {name}"] = lambda i, d=dtype: lowbit.linear(x[d], packed[i])
        if options.format in ("nvfp4", "mxfp4", "e2m1_row") or options.format.startswith("int4"):
            calls["heddle bfloat16, int8_x"] = lambda i: lowbit.linear(x[torch.bfloat16], packed[i], int8_x=True)
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


if __name__ == "__main__":
    main()
