"""Makes one results file of several: shards of a run, or a run and rows measured again.

  python bench/merge.py --shards bench/results/nvidia-h200.json shard0.json shard1.json

With --shards the rows come in the order in which one run would have them, from each file in turn.
A row of a later file replaces one of the same name; one that came out wrong there takes it away. Files that were not
measured alike (another GPU, driver, library or method) are refused, and a row that would lose a contender. Each row says by
`input` whose conditions it has. --only TEXT takes of the files behind the first the rows whose names contain it (a|b: either).
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from pathlib import Path

#: What must be the same in all files; what differs otherwise (date, clock, commit) stays in `inputs`.
ALIKE = ("gpu", "driver", "power_limit", "torch", "cuda", "cudnn", "method",
         "cpu", "simd", "held", "threads", "torch_capability")  # fmt: skip


class Unlike(ValueError):
    """Results that do not belong into one file."""


def in_turn(results: list[dict]) -> list[str]:
    """The names of all rows, one of each file and again."""
    each = [[row["name"] for row in result["rows"]] for result in results]
    return [name for names in itertools.zip_longest(*each) for name in names if name is not None]


def merged(results: list[dict], names: list[str], shards: bool = False) -> dict:
    """One results file's content of several; `names` say which is meant when something is wrong."""
    first = results[0]["conditions"]
    for result, name in zip(results, names, strict=True):
        for key in ALIKE:
            if result["conditions"].get(key) != first.get(key):
                raise Unlike(
                    f"{name}: {key} is {result['conditions'].get(key)!r}, and {first.get(key)!r} in {names[0]}"
                )
        if more := set(result["conditions"].get("contenders", ())) - set(first.get("contenders", ())):
            raise Unlike(f"{name}: {', '.join(sorted(more))} raced in it, and not in {names[0]}")
    rows, wrong, inputs = {}, {}, []
    for result in results:
        # A file that was merged before brings its inputs along.
        own = result.get("inputs", [result["conditions"]])
        for kind, into, other in (("rows", rows, wrong), ("wrong", wrong, rows)):
            for row in result.get(kind, []):
                lost = set(rows.get(row["name"], {}).get("rates", ())) - set(row.get("rates", ()))
                if kind == "rows" and lost:
                    raise Unlike(f"{row['name']}: {', '.join(sorted(lost))} did not race in a later file")
                other.pop(row["name"], None)
                into[row["name"]] = row | {"input": len(inputs) + row.get("input", 0)}
        inputs += own
    if shards:
        place = {name: n for n, name in enumerate(in_turn(results))}
        rows = dict(sorted(rows.items(), key=lambda item: place[item[0]]))
    # Conditions that no row is left of go.
    used = sorted({row["input"] for row in (*rows.values(), *wrong.values())})
    for row in (*rows.values(), *wrong.values()):
        row["input"] = used.index(row["input"])
    inputs = [inputs[n] for n in used] or inputs[-1:]
    latest = max(inputs, key=lambda conditions: conditions["date"])
    # A later file may have raced fewer, where its rows have no others.
    shared = {key: first[key] for key in ("contenders", "absent") if key in first}
    out = {"conditions": latest | shared, "inputs": inputs, "rows": list(rows.values())}
    return out | ({"wrong": list(wrong.values())} if wrong else {})


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", action="store_true", help="the files are the shards of one run, in their order")
    parser.add_argument("--only", help="rows of the files behind the first whose names contain this (a|b: either)")
    parser.add_argument("out", type=Path)
    parser.add_argument("inputs", type=Path, nargs="+")
    given = parser.parse_args()
    results = [json.loads(path.read_text(encoding="utf-8")) for path in given.inputs]
    for result in results[1:] if given.only else ():
        for kind in ("rows", "wrong"):
            some = [row for row in result.get(kind, ()) if any(part in row["name"] for part in given.only.split("|"))]
            result[kind] = some
    try:
        result = merged(
            results,
            [path.name for path in given.inputs],
            given.shards,
        )
    except Unlike as unlike:
        sys.exit(f"merge.py: {unlike}")
    given.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"{given.out}: {len(result['rows'])} rows of {len(given.inputs)} files, {len(result.get('wrong', []))} wrong")


if __name__ == "__main__":
    main()
