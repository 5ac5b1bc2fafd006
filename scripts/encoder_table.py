"""Writes the table of docs/encoder.md from the figures of bench/encoder_gpu.py.

  python scripts/encoder_table.py [--check] [bench/results/encoder-nvidia-h200.json]
"""

import argparse
import json
import sys
from pathlib import Path

from marked_block import table, update

ROOT = Path(__file__).resolve().parent.parent

NONE = "Not measured yet: `python bench/encoder_gpu.py run`, on a machine with a GPU, writes the figures."


def mib(count):
    return f"{count / 2**20:.1f}"


def lines(found):
    rows = found["rows"]
    small, large = rows[0]["tokens_per_second"]
    most = rows[0]["retrieval"]["neighbours"]
    head = ["layers", "activations", "linear layers, MiB", "all weights", "peak", f"M tokens/s, {small} a call", f"{large}", "a piece, µs",
            "mean cosine", "worst", f"top {most}", "Spearman"]  # fmt: skip
    body = [
        [
            f"`{row['name']}`" if len(row["formats"]) == 1 else row["name"], row["dtype"], mib(row["linear_bytes"]), mib(row["weight_bytes"]), mib(row["peak"]),
            f"{row['tokens_per_second'][small] / 1e6:.2f}", f"{row['tokens_per_second'][large] / 1e6:.2f}", f"{row['alone_seconds'] * 1e6:.0f}",
            f"{row['cosine']['cosine_mean']:.5f}", f"{row['cosine']['cosine_least']:.5f}", f"{100 * row['retrieval']['overlap_mean']:.1f} %",
            f"{row['retrieval']['spearman_mean']:.4f}",
        ]
        for row in rows
    ]  # fmt: skip
    about = found["conditions"]
    said = f"{about['gpu']}, driver {about['driver']}, torch {about['torch']}, {about['date'][:10]}, commit {about['commit'][:7]}: {rows[0]['pieces']} pieces, {rows[0]['tokens']} tokens."
    return table([head, *body]) + "\n\n" + said


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figures", type=Path, nargs="?", default=ROOT / "bench" / "results" / "encoder-nvidia-h200.json")
    parser.add_argument("--check", action="store_true", help="only say whether the table is current")
    chosen = parser.parse_args()
    block = lines(json.loads(chosen.figures.read_text())) if chosen.figures.exists() else NONE
    if not update(ROOT / "docs" / "encoder.md", "gpu", block, check=chosen.check):
        sys.exit("docs/encoder.md is not what its figures say: run scripts/encoder_table.py")


if __name__ == "__main__":
    main()
