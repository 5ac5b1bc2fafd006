"""Writes the tables of docs/ladder.md from the results of bench/ladder_gpu.py and of `make bench-gpu`.

  python scripts/ladder_tables.py bench/results/ladder-nvidia-h200.json bench/results/nvidia-h200.json
"""

import argparse
import json
from pathlib import Path

from marked_block import table, update

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "ladder.md"
PROMISED = {128: 2, 512: 5, 2048: 15, 4096: 40}


def times(results):
    rows = [["rung", "S", "no mask, ms", "TFLOP/s", "times the last", "causal, ms", "TFLOP/s", "error, share of what is allowed"]]
    by = {(r["rung"], r["S"], r["causal"]): r for r in results["rungs"]}
    for length in sorted({r["S"] for r in results["rungs"]}):
        last = None
        for name in sorted({r["rung"] for r in results["rungs"]}):
            plain, causal = by[name, length, 0], by[name, length, 1]
            gain = "" if last is None else f"{last / plain['ms']:.2f}"
            worst = max(r["error"] / r["allowed"] for r in (plain, causal))
            rows.append([f"`{name}`", str(length), f"{plain['ms']:.3f}", f"{plain['tflops']:.0f}" if plain["tflops"] >= 10 else f"{plain['tflops']:.2f}",
                         gain, f"{causal['ms']:.3f}", f"{causal['tflops']:.0f}" if causal["tflops"] >= 10 else f"{causal['tflops']:.2f}",
                         f"{100 * worst:.0f} %"])
            last = plain["ms"]
    return f"{results['conditions']['gpu']}, {results['conditions']['date']}.\n\n" + table(rows)


def counters(results):
    if not results["counters"]:
        return "Not read yet."
    rows = [["rung", "registers", "occupancy", "compute", "tensor pipe", "FMA pipe", "issue slots", "memory", "L2", "DRAM",
             "sectors a load", "bank conflicts", "threads an instruction"]]
    for name, c in sorted(results["counters"].items()):
        rate = lambda n, d: c[n] / c[d] if c[d] else 0.0
        rows.append([f"`{name}`", f"{c['registers']:.0f}", *(f"{c[key]:.1f} %" for key in ("occupancy", "compute", "tensor", "fma", "issue", "memory", "l2", "dram")),
                     f"{rate('sectors', 'requests'):.1f}" if c["requests"] else "none", f"{100 * rate('conflicts', 'wavefronts'):.1f} %", f"{c['threads']:.1f}"])
    return table(rows)


def unfused(results):
    rows = [["S", "fused, µs", "`baseline_cuda`, µs", "torch math, µs", "promised", "`baseline_cuda` / fused", "torch math / fused"]]
    for r in results["rows"]:
        if not r["name"].startswith("unfused S"):
            continue
        length, us = int(r["name"].split("S")[1]), {name: 1e6 / rate for name, rate in r["rates"].items()}
        rows.append([str(length), *(f"{us[name]:.1f}" for name in ("heddle", "baseline", "math")), str(PROMISED.get(length, "")),
                     f"{us['baseline'] / us['heddle']:.1f}", f"{us['math'] / us['heddle']:.1f}"])
    return f"{results['conditions']['gpu']}, {results['conditions']['date'][:10]}, B = 1, H = 8, D = 64, CUDA graphs.\n\n" + table(rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ladder", type=Path)
    parser.add_argument("bench", type=Path)
    arguments = parser.parse_args()
    ladder, bench = (json.loads(path.read_text(encoding="utf-8")) for path in (arguments.ladder, arguments.bench))
    for name, text in (("times", times(ladder)), ("counters", counters(ladder)), ("unfused", unfused(bench))):
        update(PAGE, name, text, check=False)


if __name__ == "__main__":
    main()
