"""torch's linear layers of the same sizes as heddle_linear_bench: ms a call, several weights taking turns.

python bench/linear_bench.py [--threads 2] [--seconds 1]
"""

import argparse
import statistics
import time

import torch

EXTENT, MATRICES = 4096, 4


def milliseconds(layers, x, seconds):
    times, turn, end = [], 0, time.perf_counter() + seconds
    for layer in layers:
        torch.nn.functional.linear(x, layer)
    while len(times) < 5 or time.perf_counter() < end:
        start = time.perf_counter()
        torch.nn.functional.linear(x, layers[turn % len(layers)])
        times.append(1e3 * (time.perf_counter() - start))
        turn += 1
    return statistics.median(times)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 2, 4, 8, 16, 32, 64, 128, 512])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for dtype in (torch.float32, torch.bfloat16):
        layers = [torch.randn(EXTENT, EXTENT).div_(50).to(dtype) for _ in range(MATRICES)]
        for rows in options.rows:
            x = torch.randn(rows, EXTENT).to(dtype)
            with torch.no_grad():
                print(f"{dtype} {rows:4} {milliseconds(layers, x, options.seconds):8.3f} ms", flush=True)


if __name__ == "__main__":
    main()
