"""Writes where others are faster than Heddle on a GPU: docs/performance.md's table, README's, which is shorter, and what
FlashAttention-3 is beside each kernel of decoding on that kernel's page.

  python scripts/slower_table.py [--check]

Of bench/results/nvidia-*.json, by the ratios of gpu_table.py: what a caller gets, so without rows of a kernel that was asked
for by name.
"""

import re

from bench_results import ROOT, marked, merged, noted, read, run, said, span
from gpu_table import CALLS, NAMES, TITLES, by_gpu, rival, sorted_by_kind, words
from marked_block import table, update

BEHIND = 0.995  # a ratio that is shown as less than 1
BY_NAME = re.compile(r"\bsm\d0 ")
# Kind of row -> what of a row's name tells it from the others of its line. Kinds without a rival are not here.
PLACES = {
    "forward": r"S\d+",
    "gradients": r"S\d+",
    "decoding": r"B\d.*",
    "calls": r"[SM]\d+$",
    "linear": r"M\d+",
    "nsa": r"S?\d+$",
    "blocks": r"S\d+$",
}


# Page of a kernel of decoding -> the kernels whose rows it has.
DECODING = {"sm90_attention_decode": ("sm90_decode", "sm90"), "sm80_attention_decode": ("sm80_decode",)}


def line_of(kind, row):
    """(what a row's line is called, what of the row's name is left)."""
    name, place = row["name"], re.search(PLACES[kind], row["name"])
    if kind == "calls":
        return CALLS[re.sub(rf" {PLACES[kind]}", "", name)], place[0]
    family = re.sub(rf"^nsa |^linear |^block sparse | ?\b{PLACES[kind]},?", "", name).strip()
    return words("" if family == "decode" else family), place[0] if place else ""


def raced(rows):
    """kind -> [(row, best rival, ratio)] of the rows in which others were raced with what a caller gets."""
    out = {}
    for kind, some in sorted_by_kind(rows).items():
        found = [(row, *rival(row)) for row in some if not BY_NAME.search(row["name"])]
        if kept := [one for one in found if one[1] is not None]:
            out[kind] = kept
    return out


def where(group, behind):
    """The places of these rows of a line, in words."""
    if len(group) == 1:
        return group[0][3]
    return "everywhere" if len(behind) == len(group) else ", ".join(place for *_, place in behind)


def slower(rows):
    """A line for each family that has a row in which somebody is faster."""
    lines = [["others are faster", "rows", "Heddle's rate over theirs", "where", "who"]]
    for kind, some in raced(rows).items():
        families = {}
        for row, best, ratio in some:
            family, place = line_of(kind, row)
            families.setdefault(family, []).append((row, best, ratio, place))
        for family, group in families.items():
            if behind := [one for one in group if one[2] < BEHIND]:
                name = f"{TITLES[kind]}: {family}" if family else TITLES[kind]
                lines.append([
                    marked(name, [row for row, *_ in group]), f"{len(behind)} of {len(group)}",
                    span([ratio for _, _, ratio, _ in behind], "{:.2f}"), where(group, behind),
                    ", ".join(sorted({NAMES[best] for _, best, *_ in behind})),
                ])  # fmt: skip
    return table(lines)


def beside_fa3(files, kernels):
    """What FlashAttention-3 is beside these kernels of decoding, of the newest GPU on which it was raced with them; nothing if
    there is none."""
    raced_on = {
        gpu: [
            (row, row["rates"]["heddle"] / row["rates"]["fa3"])
            for row in sorted_by_kind(merged(found))["decoding"]
            if row.get("kernel") in kernels and row["rates"].keys() >= {"heddle", "fa3"}
        ]
        for gpu, found in by_gpu(files).items()
    }
    gpu = next((gpu for gpu in reversed(raced_on) if raced_on[gpu]), None)
    if gpu is None:
        return ""
    some = raced_on[gpu]
    behind = [(row, ratio) for row, ratio in some if ratio < BEHIND]
    ahead = [ratio for _, ratio in some if ratio >= BEHIND]
    told = (
        f"On an {gpu} FlashAttention-3, raced in the same run, is faster in {len(behind)} of {said(len(some), 'row')}"
    )
    told += f"; in the others Heddle has {span(ahead, '{:.2f}')} times its rate." if ahead else "."
    lines = [["FlashAttention-3 is faster", "Heddle's rate over its"]]
    for row, ratio in sorted(behind, key=lambda one: one[1]):
        name = row["name"] if row["kernel"] == kernels[0] else f"{row['name']}, which `{row['kernel']}` gets"
        lines.append([marked(name.removeprefix("decode "), [row]), f"{ratio:.2f}"])
    return noted(f"{told}\n\n{table(lines)}" if behind else told)


def in_short(files):
    """A table of the newest GPU: of each kind, how many rows others are faster in, and by how much at most. A dagger where one
    of these rows is old."""
    gpu, found = list(by_gpu(files).items())[-1]
    lines = [[f"On an {gpu}", "others are faster in", "Heddle's rate at the least"]]
    for kind, some in raced(merged(found)).items():
        if behind := [(ratio, best) for _, best, ratio in some if ratio < BEHIND]:
            least, best = min(behind)
            name = marked(TITLES[kind].lower(), [row for row, *_ in some])
            lines.append([name, f"{len(behind)} of {len(some)} rows", f"{least:.2f} of {NAMES[best]}'s"])
    return noted(table(lines))


def write(check):
    files = read("nvidia-*.json")
    tables = (f"On an {gpu}:\n\n{slower(merged(found))}" for gpu, found in by_gpu(files).items())
    page = update(ROOT / "docs/performance.md", "slower gpu", noted("\n\n".join(tables)), check=check)
    decoding = [
        update(ROOT / f"docs/kernels/{name}.md", "beside fa3", beside_fa3(files, kernels), check=check)
        for name, kernels in DECODING.items()
    ]
    return update(ROOT / "README.md", "slower", in_short(files), check=check) and page and all(decoding)


if __name__ == "__main__":
    run(__doc__, write)
