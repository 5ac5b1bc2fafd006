"""Writes docs/performance.md's figures of CPUs from the results of `make bench` and bench/linear_bench.py, docs/nsa.md's claims
beside measurement from those of bench/nsa_claims.py (nsa_claims_table.py), and docs/adaptive.md's models from those of
bench/adaptive_models.py (adaptive_models_table.py).

  python scripts/measured_table.py [--check]

Each file bench/results/cpu-*.json is a section of its own: what one kind of processor does says nothing about another.
The page's summary has, for each kind of call, the slowest and the fastest row; then comes every row.
"""

import adaptive_models_table
import nsa_claims_table
from bench_results import ROOT, marked, noted, read, run, said, told_wrong
from marked_block import table, update

WORDS = {
    "forward": "forward, no mask",
    "causal": "forward, causal",
    "encoder": "forward, packed documents, D 32",
    "backward": "backward, no mask",
    "backward_causal": "backward, causal",
    "decode": "decode, 1 query, 4k to 32k keys, groups of 4",
    "sparse": "forward over lists of 16 blocks of 64 keys, D 128, against Heddle's dense causal",
    "sparse_backward": "its gradients, against Heddle's dense causal",
    "adaptive_none": "with a tolerance of 0.01, hardly a block of which is replaced, against Heddle's dense",
    "adaptive_most": "with a tolerance at which about 70 % of the blocks are replaced, against Heddle's dense",
    "nsa": "native sparse attention, no window, 8192 keys, 16 blocks of 64, D 128, against Heddle's dense causal",
    "nsa_backward": "its gradients, against Heddle's dense causal",
    "sgemm": "forward, D 128, against OpenBLAS sgemm",
}


def title(conditions):
    """The kind of processor, and whether it was held to fewer instructions than it has."""
    simd = conditions.get("simd", conditions["heddle_target"])
    held = (
        f", held to `{simd}` on both sides, as a processor would run it that has no more"
        if conditions.get("held")
        else ""
    )
    return f"{conditions['cpu']}, `{simd}`{held}"


def runs(content):
    """Which rows are of which commit and day: of one run, or of several that were merged."""
    inputs = content.get("inputs", [content["conditions"]])
    rows = [sum(row.get("input", 0) == number for row in content["rows"]) for number in range(len(inputs))]
    shown = lambda n: f" ({said(n, 'row')})" if len(inputs) > 1 else ""  # noqa: E731
    each = (f"commit {c['commit'][:7]}, {c['date'][:10]}{shown(n)}, " for c, n in zip(inputs, rows))
    return "".join(each)


def about(name, content):
    c = content["conditions"]
    return (f"**{title(c)}**: {c['threads']} threads, Heddle's target `{c['heddle_target']}`, torch {c['torch']} ({c['torch_capability']}), on the same machine in the same run, calls in turn, medians; "
            f"{runs(content)}{said(len(content['rows']), 'row')} in [`{name}`](../bench/results/{name}).")  # fmt: skip


def attention(rows):
    """The slowest and the fastest row of each kind, and how many goals were met."""
    unknown = {row["group"] for row in rows} - set(WORDS)
    if unknown:
        raise ValueError(f"no line takes the rows of {', '.join(sorted(unknown))}")
    out = [["", "dtype", "rows", "times as fast", "median", "Heddle, GFLOP/s", "goals met"]]
    for group, words in WORDS.items():
        for dtype in ("f32", "bf16"):
            chosen = [row for row in rows if row["group"] == group and row["dtype"] == dtype]
            if not chosen:
                continue
            ratios = sorted(row["ratio"] for row in chosen)
            speeds = sorted(row["heddle_gflops"] for row in chosen)
            out.append([
                marked(words, chosen), dtype, str(len(chosen)), f"{ratios[0]:.2f} to {ratios[-1]:.2f}", f"{ratios[len(ratios) // 2]:.2f}",
                f"{speeds[0]:.0f} to {speeds[-1]:.0f}", f"{sum(row['met'] for row in chosen)} of {len(chosen)}",
            ])  # fmt: skip
    return table(out)


def linear(rows):
    """Linear layers: medians in ms of every contender."""
    names = list(dict.fromkeys(name for row in rows for name in row["milliseconds"]))
    out = [["linear layer, median ms", "rows of x", *names]]
    for row in rows:
        cells = [f"{row['milliseconds'][name]['median']:.2f}" if name in row["milliseconds"] else "" for name in names]
        out.append([marked(f"`{row['format']}`, {row['extent']} x {row['extent']}", [row]), str(row["rows"]), *cells])
    return table(out)


def short(rows):
    return linear(rows) if "format" in rows[0] else attention(rows)


def replaced(row):
    """Of attention with a tolerance, what was replaced."""
    return f", tol {row['tol']:.2g}: {100 * row['replaced']:.0f} % replaced" if "replaced" in row else ""


def every(rows):
    if "format" in rows[0]:
        return linear(rows)
    out = [["row", "medians, ms", "rival", "times as fast", "quartiles", "goal", "Heddle, GFLOP/s"]]
    for row in rows:
        each = ", ".join(f"{name} {1e3 * seconds:.2f}" for name, seconds in row["median_seconds"].items())
        low, high = row["ratio_quartiles"]
        goal = f"{row['goal']:.2f}" + ("" if row["met"] else ", missed")
        out.append(
            [
                marked(row["name"] + replaced(row), [row]),
                each,
                row["rival"],
                f"{row['ratio']:.2f}",
                f"{low:.2f} to {high:.2f}",
                goal,
                f"{row['heddle_gflops']:.0f}",
            ]
        )
    return table(out)


def written(files, make):
    parts = (
        f"{about(name, content)}\n\n{make(content['rows'])}{told_wrong([(name, content)])}" for name, content in files
    )
    return noted("\n\n".join(parts))


def write(check):
    files, page = read("cpu-*.json"), ROOT / "docs/performance.md"
    claims = noted(nsa_claims_table.written(read("nsa-claims-*.json")))
    models, adaptive = read("adaptive-models-*.json"), ROOT / "docs/adaptive.md"
    current = [
        update(page, "measured", written(files, short), check=check),
        update(page, "cpu rows", written(files, every), check=check),
        update(ROOT / "docs/nsa.md", "nsa claims", claims, check=check),
        update(adaptive, "models", noted(adaptive_models_table.written(models)), check=check),
        update(adaptive, "skipped", adaptive_models_table.written_skips(models), check=check),
    ]
    return all(current)


if __name__ == "__main__":
    run(__doc__, write)
