"""Writes the accuracy table of docs/numerics.md from what `heddle check --json --all-targets` measured.

Each cell is the largest error of any tensor of any case, as a share of what the accuracy rule allows it; above 100 % is
a failed test. Results that were made elsewhere (another processor, NEON under an emulator) can be added with --from.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from marked_block import table, update

ROOT = Path(__file__).resolve().parent.parent
TARGETS = ["avx512_bf16", "avx512", "avx2", "sse4", "neon", "emu128"]
DTYPES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}


def dtype_of(case: str) -> str:
    suffix = case.rsplit("_", 1)[1]
    return DTYPES.get(suffix, suffix)


def shares(results: list[dict]) -> dict[tuple, dict[str, float]]:
    """{(pass, candidate, dtype): {target: largest error / bound}}"""
    worst: dict[tuple, dict[str, float]] = {}
    for result in results:
        if not result["passed"]:
            raise SystemExit(f"{result['case']} failed on {result['target']}: {result['message']}")
        row = worst.setdefault((result["pass"], result["candidate"], dtype_of(result["case"])), {})
        for tensor in result["tensors"].values():
            share = tensor["error"] / tensor["bound"] if tensor["bound"] > 0 else 0.0
            row[result["target"]] = max(row.get(result["target"], 0.0), share)
    return worst


def written(results: list[dict]) -> str:
    worst = shares(results)
    targets = [t for t in TARGETS if any(t in row for row in worst.values())]
    rows = [["", "dtype", *(f"`{t}`" for t in targets)]]
    for which, candidate in (("forward", "cpu"), ("forward", "cpu_baseline"), ("backward", "cpu")):
        for dtype in DTYPES.values():
            row = worst[which, candidate, dtype]
            cells = [f"{100 * row[t]:.0f} %" if t in row else "not run" for t in targets]
            rows.append([f"{which}, `{candidate}`", dtype, *cells])
    cases = len({r["case"] for r in results})
    return table(rows) + f"\n\n{cases} cases, {len(results)} checks."


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--heddle", default=ROOT / "build/release/cli/heddle", help="the command")
    parser.add_argument("--from", dest="files", nargs="*", default=[], help="more results, as `heddle check --json` prints them")
    arguments = parser.parse_args()
    done = subprocess.run([arguments.heddle, "check", "--json", "--all-targets"], stdout=subprocess.PIPE, text=True)
    results = json.loads(done.stdout)["results"]
    for name in arguments.files:
        results += json.loads(Path(name).read_text(encoding="utf-8"))["results"]
    update(ROOT / "docs/numerics.md", "accuracy", written(results), check=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
