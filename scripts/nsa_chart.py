"""Writes docs/nsa.md's table and pictures of native sparse attention on a GPU, from the results of `make bench-gpu`.

  python scripts/nsa_chart.py [--check]

Time against length, forward and gradients, and memory, of the newest bench/results/nvidia-*.json that has such rows:
docs/nsa-{forward,gradients,memory}.svg. A dagger says that the sources of a kernel are others now than those that were measured.
"""

import re
import statistics
import sys

from bench_results import DAGGER, ROOT, merged, noted, read, run, span, stale, told_wrong
from marked_block import table, update

sys.path.insert(0, str(ROOT / "examples" / "train"))
import chart  # noqa: E402

LENGTHS = (8192, 16384, 32768, 65536)
PASSES = {"forward": "forward", "gradients": "backward"}  # what the page says, and the rows' names
PICTURES = (*PASSES, "memory")
# What the table says, and how the rows' names begin.
FORMS = {
    "64 / 4 heads": "nsa 64/4",
    "32 / 8 heads": "nsa 32/8",
    "64 / 4 heads, window 512": "nsa 64/4 window 512",
    "the same, `fast`": "nsa 64/4 window 512 fast",
    "the same, `seed`": "nsa 64/4 window 512 seed",
}
# Lines of the pictures: name, form, contender. Names with the same first word have one colour.
LINES = (
    ("dense FA3", "64/4", "fa3"),
    ("fla", "64/4", "fla"),
    ("sparse", "64/4", "heddle"),
    ("window 512", "64/4 window 512", "heddle"),
    ("window, fast", "64/4 window 512 fast", "heddle"),
    ("window, seed", "64/4 window 512 seed", "heddle"),
)
MEMORY_LINES = (("dense FA3", "64/4 window 512", "fa3"), ("fla", "64/4 window 512", "fla"), *LINES[3:])
DECODING = (
    "nsa decode B16 64/4 65536",
    "nsa decode B16 32/8 65536",
    "nsa decode B1 64/4 65536",
    "nsa decode B1 32/8 65536",
)
MEMORY = ("forward and backward", "forward")
HEADS = ("64/4", "32/8")
CLAIMED = {"seed": "1.8 to 1.9 times, and 1.7 to 1.8 in training", "seed_4_3": "the same", "fast": None}


def milliseconds(row, contender):
    return statistics.median(row["milliseconds"][contender])


def chosen(files):
    """name -> row of the newest file that has rows of native sparse attention."""
    for file in reversed(files):
        rows = {name: row for name, row in merged([file]).items() if name.startswith("nsa ")}
        if rows:
            return rows
    raise ValueError("no row is of native sparse attention")


def points_of(rows, lines, name, value):
    """name of a line -> its points. name: a row's, of a form and a length."""
    series = {}
    for line, form, contender in lines:
        found = ((length, rows.get(name(form, length))) for length in LENGTHS)
        points = [
            (length, y) for length, row in found if row and (y := value(row, contender)) is not None
        ]  # fmt: skip
        if len(points) > 1:
            series[line] = points
    return series


def times_of(rows, words):
    return points_of(
        rows,
        LINES,
        lambda form, length: f"nsa {form} {PASSES[words]} S{length}",
        lambda row, contender: milliseconds(row, contender) if contender in row["milliseconds"] else None,
    )


def memory_of(rows):
    """In GiB."""
    return points_of(
        rows,
        MEMORY_LINES,
        lambda form, length: f"nsa memory of forward and backward {form} S{length}",
        lambda row, contender: row["rates"][contender] / 1024 if contender in row["rates"] else None,
    )


def drawn(rows, picture):
    gpu = next(iter(rows.values()))["conditions"]["gpu"] + (DAGGER if stale(rows.values()) else "")
    where = f"64 / 4 heads, D 128, on one {gpu}"
    if picture == "memory":
        title, unit = f"Native sparse attention, memory of forward and gradients, {where}", "GiB"
    else:
        title, unit = f"Native sparse attention, {picture}, {where}", "ms"
    series = memory_of(rows) if picture == "memory" else times_of(rows, picture)
    return chart.lines(title, "positions", unit, series, doubling=True) if series else None


def ratio(rows, name, rival):
    """Heddle's rate over the rival's in a row, as a cell."""
    row = rows.get(name)
    if row is None or rival not in row["milliseconds"]:
        return "–"
    return f"{milliseconds(row, rival) / milliseconds(row, 'heddle'):.2f}" + (DAGGER if stale([row]) else "")


def ratios(rows, form, rival):
    """Of each direction at every length that is there, in words; "" without any."""
    found = {
        direction: [
            f"{cell} at {n}" for n in LENGTHS if (cell := ratio(rows, f"{form} {name} S{n}", rival)) != "–"
        ]
        for direction, name in PASSES.items()
    }  # fmt: skip
    return "; ".join(f"{direction} {', '.join(cells)}" for direction, cells in found.items() if cells)


def of_sharing(rows):
    """Each preset beside the same call without sharing, in the same row, and what its proposer claims."""
    parts = []
    for preset, claim in CLAIMED.items():
        if found := ratios(rows, f"nsa 64/4 window 512 {preset}", "default"):
            parts.append(f"`{preset}` {found}" + (f" (claimed: {claim})" if claim else ""))
    if parts:
        yield f"Sharing, 64 / 4 heads, window 512, times the rate without: {'. '.join(parts)}."
    if found := ratios(rows, "nsa 64/4 fast", "fla"):
        yield f"`fast` without a window, times flash-linear-attention's rate, which shares nothing: {found}."


def of_fla(rows):
    against = "; ".join(
        f"{direction} " + ", ".join(ratio(rows, f"nsa 64/4 {name} S{n}", "fla") for n in LENGTHS)
        for direction, name in PASSES.items()
    )
    yield f"Against flash-linear-attention's kernels, 64 / 4 heads without a window, the same: {against}."
    if found := ratios(rows, "nsa 64/4 window 512", "fla"):
        yield f"Against them with a window of 512, which FlashAttention-3 computes for them: {found}."


def of_memory(rows, what):
    found = "; ".join(
        f"{heads} {row['rates']['heddle'] / 1024:.1f} GiB"
        + "".join(
            f", {who} {row['rates'][key] / 1024:.1f}"
            for key, who in (("fla", "flash-linear-attention"), ("fa3", "FlashAttention-3"))
            if key in row["rates"]
        )
        for heads in HEADS
        if (row := rows.get(f"nsa memory of {what} {heads} S65536"))
    )
    return f"Memory of {what} at 65536 positions, beside operands: {found}." if found else ""


def of_errors(rows):
    """The forward's distance from float64 at each length, by form."""
    parts = []
    for words, form in FORMS.items():
        found = [
            f"{row['difference']['heddle']:.1e}"
            for length in LENGTHS
            if (row := rows.get(f"{form} forward S{length}")) and not stale([row]) and "heddle" in row["difference"]
        ]
        if len(found) == len(LENGTHS):
            parts.append(f"{words} {', '.join(found)}")
    at = ", ".join(map(str, LENGTHS))
    return (
        f"The forward's distance from what torch computes in float64, of its size, at {at}: {'; '.join(parts)}."
        if parts
        else ""
    )


def of_trained(rows):
    """What rows over a trained model's operands say, if there are such (bench/attention_bench_gpu.py --tensors)."""
    found = {}
    for name in rows:
        if match := re.match(r"nsa trained (\d+)/(\d+) (?:window (\d+) )?(forward|backward) S(\d+)$", name):
            heads, kv_heads, window, direction, length = match.groups()
            found.setdefault((heads, kv_heads, length), {})[window, direction] = name
    words = ""
    for (heads, kv_heads, length), of in found.items():
        each = "; ".join(
            f"{'gradients' if direction == 'backward' else direction}{f', window {window}' if window else ''} "
            + " and ".join(
                f"{ratio(rows, name, rival)} of {who}'s"
                for rival, who in (("fla", "flash-linear-attention"), ("fa3", "FlashAttention-3"))
                if rival in rows[name]["milliseconds"]
            )
            for (window, direction), name in of.items()
        )
        words += f"On what a trained model's last layer gets ({heads} / {kv_heads} heads, {length} positions), whose lists overlap, Heddle's rate is {each}. "
    return words


def told(files):
    rows = chosen(files)
    conditions = [row["conditions"] for row in rows.values()]
    cells = [["times FlashAttention-3's rate, at", *(str(length) for length in LENGTHS), "positions"]]
    for words, form in FORMS.items():
        for direction, name in PASSES.items():
            cells.append([f"{words}, {direction}", *(ratio(rows, f"{form} {name} S{n}", "fa3") for n in LENGTHS), ""])
    steps = ", ".join(
        f"{name.split()[2]} {name.split()[3]} {milliseconds(row, 'heddle') * 1000:.0f} µs ({ratio(rows, name, 'fa3')})"
        for name in DECODING
        if (row := rows.get(name))
    )
    differences = [max(row["difference"].values()) for row in rows.values() if row.get("difference")]
    limits = [row["limit"] for row in rows.values() if "limit" in row]
    lines = [
        *of_fla(rows),
        *of_sharing(rows),
        of_trained(rows),
        f"A step of decoding with a window of 512 over 65536 keys, in graphs, B sequences (times FlashAttention-3's dense rate): {steps}.",
        *(of_memory(rows, what) for what in MEMORY),
        of_errors(rows),
        f"Results differ from what torch computes in float64 by {span(differences, '{:.1e}')} of their size, no row by more than its limit{', ' + span(limits, '{:g}') if limits else ''}.",
    ]
    return noted(
        f"{conditions[0]['gpu']}, {span([c['date'][:10] for c in conditions], '{}')}, bfloat16, D 128, 16 blocks of 64, random normals, whose lists hardly overlap.\n\n"
        + table(cells)
        + "\n\n"
        + "\n".join(f"- {line.strip()}" for line in lines if line)
        + told_wrong(files, "nsa ")
        + "\n\n"
        + "\n\n".join(
            f"![{'Memory' if picture == 'memory' else f'Time, {picture},'} against length, of native sparse and dense attention](nsa-{picture}.svg)"
            for picture in PICTURES
            if drawn(rows, picture) is not None
        )
    )


def write(check):
    files, current = read("nvidia-*.json"), True
    rows = chosen(files)
    for name in PICTURES:
        picture, new = ROOT / "docs" / f"nsa-{name}.svg", drawn(rows, name)
        if not check:
            picture.unlink(missing_ok=True)
            if new is not None:
                picture.write_text(new, encoding="utf-8")
        current = current and (picture.read_text(encoding="utf-8") if picture.exists() else None) == new
    return update(ROOT / "docs" / "nsa.md", "nsa on a gpu", told(files), check=check) and current


if __name__ == "__main__":
    run(__doc__, write)
