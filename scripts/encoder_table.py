"""Writes the table of docs/encoder.md from the figures of bench/encoder_gpu.py.

  python scripts/encoder_table.py [--check]

The files are bench/results/encoder-*.json (see bench_results.py); each has a section.
"""

from bench_results import ROOT, marked, noted, read, run
from marked_block import table, update

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
            marked(f"`{row['name']}`" if len(row["formats"]) == 1 else row["name"], [row]), row["dtype"], mib(row["linear_bytes"]), mib(row["weight_bytes"]), mib(row["peak"]),
            f"{row['tokens_per_second'][small] / 1e6:.2f}", f"{row['tokens_per_second'][large] / 1e6:.2f}", f"{row['alone_seconds'] * 1e6:.0f}",
            f"{row['cosine']['cosine_mean']:.5f}", f"{row['cosine']['cosine_least']:.5f}", f"{100 * row['retrieval']['overlap_mean']:.1f} %",
            f"{row['retrieval']['spearman_mean']:.4f}",
        ]
        for row in rows
    ]  # fmt: skip
    about = found["conditions"]
    said = f"{about['gpu']}, driver {about['driver']}, torch {about['torch']}, {about['date'][:10]}, commit {about['commit'][:7]}: {rows[0]['pieces']} pieces, {rows[0]['tokens']} tokens."
    return table([head, *body]) + "\n\n" + said


def write(check):
    block = noted("\n\n".join(lines(content) for _, content in read("encoder-*.json"))) or NONE
    return update(ROOT / "docs" / "encoder.md", "gpu", block, check=check)


if __name__ == "__main__":
    run(__doc__, write)
