"""Writes the tables of docs/ladder.md from the results of bench/ladder_gpu.py and of `make bench-gpu`.

  python scripts/ladder_tables.py [--check]

The files are bench/results/ladder-*.json and nvidia-*.json (see bench_results.py); of several GPUs each has a section.
"""

from bench_results import ROOT, marked, merged, noted, read, run
from gpu_table import by_gpu, microseconds
from marked_block import table, update

PAGE = ROOT / "docs" / "ladder.md"
PROMISED = {128: 2, 512: 5, 2048: 15, 4096: 40}


def times(results):
    rows = [
        [
            "rung",
            "S",
            "no mask, ms",
            "TFLOP/s",
            "times the last",
            "causal, ms",
            "TFLOP/s",
            "error, share of what is allowed",
        ]
    ]
    by = {(r["rung"], r["S"], r["causal"]): r for r in results["rungs"]}
    for length in sorted({r["S"] for r in results["rungs"]}):
        last = None
        for name in sorted({r["rung"] for r in results["rungs"]}):
            plain, causal = by[name, length, 0], by[name, length, 1]
            gain = "" if last is None else f"{last / plain['ms']:.2f}"
            worst = max(r["error"] / r["allowed"] for r in (plain, causal))
            rows.append(
                [
                    marked(f"`{name}`", [results]),
                    str(length),
                    f"{plain['ms']:.3f}",
                    f"{plain['tflops']:.0f}" if plain["tflops"] >= 10 else f"{plain['tflops']:.2f}",
                    gain,
                    f"{causal['ms']:.3f}",
                    f"{causal['tflops']:.0f}" if causal["tflops"] >= 10 else f"{causal['tflops']:.2f}",
                    f"{100 * worst:.0f} %",
                ]
            )
            last = plain["ms"]
    c = results["conditions"]
    return f"{c['gpu']}, {c['date'][:10]}, commit {c['commit'][:7]}.\n\n" + table(rows)


def counters(results):
    if not results["counters"]:
        return "Not read yet."
    rows = [
        [
            "rung",
            "registers",
            "occupancy",
            "compute",
            "tensor pipe",
            "FMA pipe",
            "issue slots",
            "memory",
            "L2",
            "DRAM",
            "sectors a load",
            "bank conflicts",
            "threads an instruction",
        ]
    ]
    for name, c in sorted(results["counters"].items()):
        rate = lambda n, d, c=c: c[n] / c[d] if c[d] else 0.0
        rows.append(
            [
                f"`{name}`",
                f"{c['registers']:.0f}",
                *(
                    f"{c[key]:.1f} %"
                    for key in ("occupancy", "compute", "tensor", "fma", "issue", "memory", "l2", "dram")
                ),
                f"{rate('sectors', 'requests'):.1f}" if c["requests"] else "none",
                f"{100 * rate('conflicts', 'wavefronts'):.1f} %",
                f"{c['threads']:.1f}",
            ]
        )
    return table(rows)


def unfused(rows):
    lines = [
        [
            "S",
            "fused, µs",
            "`baseline_cuda`, µs",
            "torch math, µs",
            "promised",
            "`baseline_cuda` / fused",
            "torch math / fused",
        ]
    ]
    taken = [row for row in rows.values() if row["name"].startswith("unfused S")]
    for row in taken:
        length, us = int(row["name"].split("S")[1]), microseconds(row)
        lines.append([marked(str(length), [row]), *(f"{us[name]:.1f}" for name in ("heddle", "baseline", "math")), str(PROMISED.get(length, "")),
                      f"{us['baseline'] / us['heddle']:.1f}", f"{us['math'] / us['heddle']:.1f}"])  # fmt: skip
    c = taken[0]["conditions"]
    return f"{c['gpu']}, {c['date'][:10]}, commit {c['commit'][:7]}, B = 1, H = 8, D = 64, CUDA graphs.\n\n" + table(
        lines
    )


def write(check):
    ladders = [content for _, content in read("ladder-*.json")]
    benches = [merged(files) for files in by_gpu(read("nvidia-*.json")).values()]
    blocks = {
        "times": [times(found) for found in ladders],
        "counters": [counters(found) for found in ladders],
        "unfused": [unfused(rows) for rows in benches],
    }
    current = [update(PAGE, name, noted("\n\n".join(parts)), check=check) for name, parts in blocks.items()]
    return all(current)


if __name__ == "__main__":
    run(__doc__, write)
