"""Writes docs/distributed.md's tables of attention over GPUs from the results of bench/ranks_gpu.py.

  python scripts/ranks_table.py [--check]

The files are bench/results/ranks-*.json (see bench_results.py); each kind of machine has a section. Medians and ratios are found
here, of contenders that were raced in the row's own run.
"""

import statistics

from bench_results import ROOT, marked, noted, read, run, said, span, told_wrong
from marked_block import table, update

PAGE = ROOT / "docs" / "distributed.md"
NONE = "Not measured yet: `python bench/ranks_gpu.py`, on a machine with two GPUs, writes the figures."
ONE = "one GPU"  # what bench/ranks_gpu.py calls a contender that runs on the first GPU alone
SCHEMES = ("gather", "ring", "needed", "ulysses", "2d")
NOTHING = "–"


def took(row):
    """contender -> median milliseconds."""
    return {name: statistics.median(times) for name, times in row["milliseconds"].items()}


def ms(value):
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def length(row):
    return f"{row['length'] // 1024}k"


def felt(row, name, words):
    """The words, with a note where a figure is what Python waits for."""
    return f"{words} (host)" if row.get("timed", {}).get(name) == "host" else words


def beside_one(row, name):
    """Milliseconds over ranks, and time on one GPU over as many times the time on them."""
    times = took(row)
    if name not in times:
        return NOTHING
    share = row.get("efficiency", {}).get(name)
    return felt(row, name, ms(times[name]) + ("" if share is None else f" ({share:.3f})"))


def scaling(rows):
    schemes = [scheme for scheme in SCHEMES if any(scheme in row["milliseconds"] for row in rows)]
    lines = [["rows of 32 / 8 heads, causal", f"{ONE}, ms", *(f"`{scheme}`, ms" for scheme in schemes)]]
    for row in sorted(rows, key=lambda row: (row["pass"] != "forward", row["length"])):
        one = took(row).get(ONE)
        cells = [beside_one(row, scheme) for scheme in schemes]
        lines.append([marked(f"{length(row)}, {row['pass']}", [row]), NOTHING if one is None else ms(one), *cells])
    return table(lines)


def theirs(row, rotation):
    """torch's figure of the back end that ran."""
    times = took(row)
    name = next((name for name in times if name.startswith("torch ") and name.endswith(rotation)), None)
    return "none" if name is None else felt(row, name, f"{ms(times[name])}, {name.split()[1]}")


def reasons(rows):
    """Why torch has no figure, each once."""
    found = {}
    for row in rows:
        there = {name.split()[-1] for name in row["milliseconds"] if name.startswith("torch ")}
        found |= {
            f"- Without a figure, {name}: {why}": None
            for name, why in row["absent"].items()
            if name.split()[-1] not in there
        }
    return list(found)


def rivals(rows):
    lines = [
        [
            "rows, heads, causal",
            "Heddle, ms",
            "torch, keys gathered, ms",
            "torch, keys passed round, ms",
            "times as fast",
        ]
    ]
    for row in sorted(rows, key=lambda row: (row["pass"] != "forward", row["length"], -row["heads"], -row["kv_heads"])):
        own = {name: value for name, value in took(row).items() if name.startswith("heddle")}
        best = min(own, key=own.get, default=None)
        lines.append([
            marked(f"{length(row)}, {row['heads']} / {row['kv_heads']}, {row['pass']}", [row]),
            NOTHING if best is None else felt(row, best, f"{ms(own[best])}, `{best.split()[1]}`"),
            theirs(row, "allgather"), theirs(row, "alltoall"), f"{row['ratio']:.2f}" if "ratio" in row else NOTHING,
        ])  # fmt: skip
    return "\n".join([table(lines), *(["", *why] if (why := reasons(rows)) else [])])


def documents(rows):
    raced = {name.split()[-1] for row in rows for name in row["milliseconds"]}
    schemes = [scheme for scheme in SCHEMES if scheme in raced]
    lines = [["packed documents, order", f"{ONE}, ms", *(f"`{scheme}`, ms" for scheme in schemes)]]
    for row in sorted(rows, key=lambda row: row["pass"] != "forward"):
        for order in row["auto"]:
            cells = [beside_one(row, f"{order} {scheme}") for scheme in schemes]
            words = f"{row['documents']} of {length(row)} tokens, `{order}`, {row['pass']}"
            lines.append([marked(words, [row]), ms(took(row)[ONE]), *cells])
    return table(lines)


def memory(rows):
    names = list(dict.fromkeys(name for row in rows for name in row["rates"]))
    lines = [
        [
            "peak of a GPU, operands and gradients counted, GiB",
            *(name if name == ONE else f"`{name}`" for name in names),
        ]
    ]
    for row in rows:
        cells = [f"{row['rates'][name] / 1024:.1f}" if name in row["rates"] else NOTHING for name in names]
        words = f"{length(row)} rows, {row['heads']} / {row['kv_heads']} heads, {row['pass']}"
        lines.append([marked(words, [row]), *cells])
    return table(lines)


def decoding(rows):
    head = ["decoding, keys in all", "over ranks, µs", "each GPU alone, its keys", "ranks add", "one GPU, all keys"]
    lines = [head]
    for row in sorted(rows, key=lambda row: row["length"]):
        us = {name: 1e3 * value for name, value in took(row).items()}
        captured = "" if row["captured"] else ", without a graph"
        words = f"{length(row)}, B {row['batch']}, {row['heads']} / {row['kv_heads']} heads{captured}"
        cells = [
            felt(row, "ranks", f"{us['ranks']:.1f}"),
            f"{us['part']:.1f}",
            f"{row['added_us']:.1f}",
            f"{us[ONE]:.1f}",
        ]
        lines.append([marked(words, [row]), *cells])
    return table(lines)


def training(rows):
    lines = [["steps of `examples/train`", f"{ONE}, tokens/s", "over ranks, tokens/s", "of the ideal"]]
    for row in rows:
        rates = row["rates"]
        words = f"{length(row)} tokens, bf16, `{row['auto']}`"
        lines.append(
            [marked(words, [row]), f"{rates[ONE]:.0f}", f"{rates['ranks']:.0f}", f"{row['efficiency']['ranks']:.3f}"]
        )
    return table(lines)


def links(rows):
    head = [
        "both ways at once",
        "NCCL, µs",
        "GB/s each way",
        "in a graph, µs",
        "what Python waits for, µs",
        "copy engines, µs",
        "GB/s",
    ]
    lines = [head]
    for row in sorted(rows, key=lambda row: row["bytes"]):
        us = {name: 1e3 * value for name, value in took(row).items()}
        beside = [f"{us[name]:.1f}" if name in us else NOTHING for name in ("in a graph", "what Python waits for")]
        rates = {name: f"{rate:.0f}" for name, rate in row["rates"].items() if row["bytes"] > 1024}
        engines = [f"{us['copy engines']:.1f}" if "copy engines" in us else NOTHING, rates.get("copy engines", NOTHING)]
        lines.append(
            [marked(row["message"], [row]), f"{us['exchange']:.1f}", rates.get("exchange", NOTHING), *beside, *engines]
        )
    return table(lines)


MADE = {
    "scaling": scaling, "torch": rivals, "documents": documents, "memory": memory, "decode": decoding, "training": training,
    "link": links,
}  # fmt: skip


def inputs(content):
    """Commits and days of the runs that the rows are from."""
    every = content.get("inputs", [content["conditions"]])
    return ", ".join(dict.fromkeys(f"commit {c['commit'][:7]}, {c['date'][:10]}" for c in every))


def section(name, content):
    about = content["conditions"]
    if "rehearsal" in about:
        raise ValueError(f"{name} is a rehearsal: it has no figures")
    rows = content["rows"]
    if unknown := {row["group"] for row in rows} - set(MADE):
        raise ValueError(f"no table takes the rows of {', '.join(sorted(unknown))}")
    differences = [max(row["difference"].values()) for row in rows if row.get("difference")]
    checked = (
        f" Outputs and gradients differ from one GPU's by {span(differences, '{:.2g}')}, relative."
        if differences
        else ""
    )
    words = (
        f"**{about['ranks']} x {about['gpu']}**, link {about['link']}, driver {about['driver']}, torch {about['torch']}, NCCL {about['nccl']}, "
        f"{inputs(content)}, {said(len(rows), 'row')} in [`{name}`](../bench/results/{name}).{checked}"
    )
    groups = {group: [row for row in rows if row["group"] == group] for group in MADE}
    tables = (MADE[group](some) for group, some in groups.items() if some)
    return "\n\n".join([words, *tables]) + told_wrong([(name, content)])


def written(files):
    return noted("\n\n".join(section(name, content) for name, content in files)) or NONE


def write(check):
    return update(PAGE, "ranks on gpus", written(read("ranks-*.json")), check=check)


if __name__ == "__main__":
    run(__doc__, write)
