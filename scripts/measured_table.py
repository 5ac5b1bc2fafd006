"""Writes README's figures from a results file of `make bench`: for each kind of call, the slowest and the fastest row.

  python scripts/measured_table.py bench/results/cpu-amd-epyc.json
"""

import argparse
import json
import sys
from pathlib import Path

from marked_block import table, update

ROOT = Path(__file__).resolve().parent.parent
WORDS = {
    "forward": "forward, no mask",
    "causal": "forward, causal",
    "encoder": "forward, packed documents, D 32",
    "backward": "backward, no mask",
    "backward_causal": "backward, causal",
    "decode": "decode, 1 query, 4k to 32k keys, groups of 4",
    "sgemm": "forward, D 128, against OpenBLAS sgemm",
}


def lines(rows):
    out = [["", "dtype", "rows", "times as fast", "median", "Heddle, GFLOP/s"]]
    for group, words in WORDS.items():
        for dtype in ("f32", "bf16"):
            chosen = [row for row in rows if row["group"] == group and row["dtype"] == dtype]
            if not chosen:
                continue
            ratios = sorted(row["ratio"] for row in chosen)
            rates = sorted(row["heddle_gflops"] for row in chosen)
            out.append([
                words, dtype, str(len(chosen)), f"{ratios[0]:.2f} to {ratios[-1]:.2f}", f"{ratios[len(ratios) // 2]:.2f}",
                f"{rates[0]:.0f} to {rates[-1]:.0f}"
            ])
    return out


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    results = json.loads(parser.parse_args().results.read_text(encoding="utf-8"))
    c = results["conditions"]
    text = (f"Against torch {c['torch']} on the same machine in the same run, calls in turn, medians: {c['cpu']}, {c['threads']} threads,"
            f" target `{c['heddle_target']}`, commit {c['commit'][:10]}, {c['date'][:10]}. Lengths 512 to 8192, head sizes 64 and 128; the rows"
            f" are in [`bench/results`](bench/results).\n\n")
    update(ROOT / "README.md", "measured", text + table(lines(results["rows"])), check=False)


if __name__ == "__main__":
    sys.exit(main())
