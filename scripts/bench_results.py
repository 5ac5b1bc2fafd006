"""Reads what benchmarks wrote into bench/results, for the scripts that make tables of it.

Files of a kind are read oldest first (by their conditions' date, then by name); a row of a later file replaces one of the
same name. A row whose sources are not those of the tree now, or that does not say which it measured, gets a dagger.
"""

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "bench"))
import sources  # noqa: E402
from marked_block import table  # noqa: E402

RESULTS = ROOT / "bench" / "results"
DAGGER = " †"
NOTE = "† measured on older sources of this kernel."


def read(pattern, folder=RESULTS):
    """[(file name, content)] of the files that match, oldest first."""
    found = [(path.name, json.loads(path.read_text(encoding="utf-8"))) for path in sorted(folder.glob(pattern))]
    return sorted(found, key=lambda named: (named[1]["conditions"]["date"], named[0]))


def stale(rows):
    """Whether any of these rows, or what stands for them, is not of the tree's sources."""
    return not all(sources.current(row) for row in rows)


def marked(words, rows):
    return words + DAGGER if stale(rows) else words


def noted(text):
    """Text with the line that says what a dagger is, if it has one."""
    return f"{text}\n\n{NOTE}" if DAGGER in text else text


def merged(files):
    """name -> row, with its `file` and the `conditions` of its run, of one GPU's files."""
    rows = {}
    for file, content in files:
        inputs = content.get("inputs", [content["conditions"]])
        for row in content.get("wrong", []):
            rows.pop(row["name"], None)
        for row in content["rows"]:
            rows[row["name"]] = row | {"file": file, "conditions": inputs[row.get("input", 0)]}
    return rows


def wrong(files):
    """name -> why, of rows that came out wrong where they were measured last."""
    found = {}
    for _, content in files:
        found |= {row["name"]: row["wrong"] for row in content.get("wrong", [])}
        for row in content["rows"]:
            found.pop(row["name"], None)
    return found


def told_wrong(files, start=""):
    """A line for each of those whose names begin so, behind what stands above; nothing if there are none."""
    lines = [
        [name, " ".join(why.removeprefix("Wrong: ").split()).replace("|", "/")[:300]]
        for name, why in wrong(files).items()
        if name.startswith(start)
    ]
    return "\n\n" + table([["wrong, and so without a figure", "why"], *lines]) if lines else ""


def span(values, form):
    """ "12" or "12 to 34"."""
    low, high = form.format(min(values)), form.format(max(values))
    return low if low == high else f"{low} to {high}"


def said(count, words):
    """ "1 row", "3 rows"."""
    return f"{count} {words}{'' if count == 1 else 's'}"


def run(description, write):
    """A script's main(): write(check) updates its blocks and returns whether they were current; see marked_block.update."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a table is not current")
    if not write(parser.parse_args().check):
        name = Path(sys.argv[0]).name
        sys.exit(f"{name}: a page is not what its figures say: run scripts/{name}")
