"""Writes the accuracy tables of docs/numerics.md from bench/results/accuracy-*.json, and makes those files.

What the page says of the rule's own trial comes from bench/results/rule-seeds.json, which tests/unit/kit_faults_test.cc writes,
if it is there. An accuracy file keeps, of what `heddle check --json` printed, the largest error of any case for each pass,
candidate, dtype, target and tensor, as a share of what the accuracy rule allows it. Measure on the machine whose files are to be renewed, e.g.

    build/release/cli/heddle check --json --all-targets > cpu.json
    scripts/test_neon.sh    # writes build/neon/results.0.json and results.1.json
    scripts/numerics_table.py --keep cpu cpu.json build/neon/results.?.json

and for a GPU `heddle check --json --device cuda`, with --precision tf32 and int8_qk too. What is kept names commit, date and the
sources it is of; tables of older sources have a dagger. HEDDLE_COMMIT: the commit, where it is not the tree's. Without arguments the tables are
written from the files that are there; with --check nothing is written, and the exit status is 1 if they are not current.
"""

import argparse
import json
import sys
from pathlib import Path

from bench_results import DAGGER, RESULTS, ROOT, noted
from marked_block import table, update

# Of bench/, which bench_results has put on the path.
import gpu_conditions  # isort: skip
import sources  # isort: skip

TARGETS = ["avx512_bf16", "avx512", "avx2", "sse4", "neon", "emu128"]
DTYPES = {
    "f32": "float32",
    "bf16": "bfloat16",
    "f16": "float16",
    "e4m3": "float8_e4m3fn",
    "f32_tf32": "float32, tf32",
    "bf16_int8_qk": "bfloat16, int8_qk",
    "f16_int8_qk": "float16, int8_qk",
}
KEY = ("pass", "candidate", "dtype", "target", "tensor")


def dtype_of(case: str) -> str:
    return next(name for suffix, name in reversed(DTYPES.items()) if case.endswith("_" + suffix))


def measured_on(results: list[dict]) -> tuple[str, ...]:
    """The sources of the candidates: a GPU's targets are not the CPU's."""
    return sources.CPU_ATTENTION if all(r["target"] in TARGETS for r in results) else sources.ATTENTION_GPU


def kept(results: list[dict]) -> dict:
    """What a file holds of results as `heddle check --json` prints them."""
    rows: dict[tuple, dict] = {}
    for result in results:
        if not result["passed"]:
            raise SystemExit(f"{result['case']} failed on {result['target']}: {result['message']}")
        for name, tensor in result["tensors"].items():
            key = (result["pass"], result["candidate"], dtype_of(result["case"]), result["target"], name)
            row = rows.setdefault(key, {**dict(zip(KEY, key)), "cases": 0, "share": 0.0, "closest": result["case"]})
            row["cases"] += 1
            share = tensor["error"] / tensor["bound"] if tensor["bound"] > 0 else 0.0
            if share > row["share"]:
                row["share"], row["closest"] = round(share, 4), result["case"]
    return {
        "commit": gpu_conditions.commit(),
        "date": gpu_conditions.now(),
        "sources": sources.digests(measured_on(results)),
        "cases": len({r["case"] for r in results}),
        "checks": len(results),
        "rows": [rows[key] for key in sorted(rows)],
    }


def ordered(names: set[str], order: list[str]) -> list[str]:
    return sorted(names, key=lambda name: (order.index(name) if name in order else len(order), name))


def of_file(found: dict) -> str:
    """The table of one file: a row for each pass, candidate and dtype, a column for each target."""
    worst: dict[tuple, dict[str, float]] = {}
    for row in found["rows"]:
        shares = worst.setdefault((row["pass"], row["candidate"], row["dtype"]), {})
        shares[row["target"]] = max(shares.get(row["target"], 0.0), row["share"])
    targets = ordered({t for shares in worst.values() for t in shares}, TARGETS)
    lines = [["", "dtype", *(f"`{t}`" if t in TARGETS else t for t in targets)]]
    names = list(DTYPES.values())
    for which, candidate, dtype in sorted(worst, key=lambda k: (k[0] != "forward", k[1], names.index(k[2]))):
        shares = worst[which, candidate, dtype]
        cells = [f"{100 * shares[t]:.0f} %" if t in shares else "–" for t in targets]
        lines.append([f"{which}, `{candidate}`", dtype, *cells])
    when = f"commit {found['commit'][:7]}, {found['date'][:10]}" + ("" if sources.current(found) else DAGGER)
    return table(lines) + f"\n\n{found['cases']} cases, {found['checks']} checks; {when}."


def written() -> str:
    files = sorted(RESULTS.glob("accuracy-*.json"))
    if not files:
        raise SystemExit(f"no accuracy-*.json in {RESULTS}")
    return noted("\n\n".join(of_file(json.loads(file.read_text(encoding="utf-8"))) for file in files))


def of_seeds(file: Path) -> str:
    """What came of the rule's own trial; nothing if nobody kept it."""
    if not file.exists():
        return ""
    found = json.loads(file.read_text(encoding="utf-8"))
    came = f"none was refused, and the closest came to {100 * found['closest']:.0f} % of its bound"
    if found["refused"]:
        came = f"{found['refused']} results were refused, the farthest at {100 * found['closest']:.0f} % of its bound"
    return (
        f"With {found['seeds']} seeds, {found['cases']} cases and {found['tensors']} tensors on `{found['target']}` (commit {found['commit'][:7]}, {found['date'][:10]}), {came}. "
        f"Left out were the {found['large']} cases with more than {found['multiplications']:.0f} multiplications, and the {found['e4m3']} in e4m3, which the CPU does not multiply."
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit status 1 if the tables are not current"
    )
    parser.add_argument(
        "--keep", nargs="+", metavar=("NAME", "RESULTS"), help="make accuracy-NAME.json of these results first"
    )
    arguments = parser.parse_args()
    if arguments.keep:
        if arguments.check or len(arguments.keep) < 2:
            parser.error("--keep takes a name and files of results, and goes without --check")
        name, *paths = arguments.keep
        results = [r for path in paths for r in json.loads(Path(path).read_text(encoding="utf-8"))["results"]]
        text = json.dumps(kept(results), indent=1).replace("\n   ", " ").replace("\n  }", "}")
        (RESULTS / f"accuracy-{name}.json").write_text(text + "\n", encoding="utf-8")
    page = ROOT / "docs/numerics.md"
    blocks = {"accuracy": written(), "seeds": of_seeds(RESULTS / "rule-seeds.json")}
    updated = [update(page, name, block, check=arguments.check) for name, block in blocks.items()]
    current = all(updated)
    if not current:
        print(
            "docs/numerics.md: it is not what bench/results/{accuracy-*,rule-seeds}.json say; run scripts/numerics_table.py",
            file=sys.stderr,
        )
    return 0 if current else 1


if __name__ == "__main__":
    sys.exit(main())
