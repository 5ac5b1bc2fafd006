"""Writes docs/performance.md's tables of GPU figures from the results of `make bench-gpu`, and docs/numerics.md's of lengths.

  python scripts/gpu_table.py [--check]

The files are bench/results/nvidia-*.json (see bench_results.py). The page's summary has a line for each kind of row, then
every row has one, those that came out wrong too; a row that no table takes is an error. Ratios are found here, of contenders raced in the row's own run.
Where others are faster is slower_table.py's.
"""

import re
import statistics

from bench_results import ROOT, marked, merged, noted, read, run, said, span, told_wrong
from marked_block import table, update

OWN = ("heddle", "baseline", "f32", "tf32", "sm80", "sm90", "default", "deterministic", "dense")  # Heddle itself
NAMES = {"cudnn": "cuDNN", "fa2": "FlashAttention-2", "fa3": "FlashAttention-3", "efficient": "memory-efficient", "math": "torch unfused", "cublas": "cuBLAS bf16",
         "int4pack": "torch int4", "bitsandbytes": "bitsandbytes", "baseline": "`baseline_cuda`", "f32": "float32", "tf32": "tf32", "sm80": "`sm80`", "sm90": "`sm90`", "default": "default", "dense": "Heddle, dense", "fla": "flash-linear-attention", "flashinfer": "FlashInfer", "block_sparse_attn": "block_sparse_attn",
         "deterministic": "deterministic", "heddle": "Heddle"}  # fmt: skip
# In the names of rows, and what the tables say for them.
WORDS = [
    (r"^backward ", ""), (r"^forward ", ""), (r"^option (\w+).*", lambda m: f"score option: {m[1].replace('_', ' ')}, D 64 to 256"),
    (r"head size 96, (\w+)", r"D96 \1"), (r"\bgqa (\S+)", r"grouped heads \1,"), (r"^window (\d+)", r"window of \1,"),
    (r"^documents( \S+/\S+)?", r"packed documents of 128 to 8192\1,"), (r"^sm80 (D\d)", r"the Ampere kernel on this chip, \1"),
    (r"^fp8 ", "e4m3 operands, "), (r"^int8_qk ", "q and k in 8 bits, "), (r"^float32 f32", "float32, three tf32 products,"),
    (r"^float32 tf32", "float32, precision tf32,"), (r"^deterministic ", "deterministic, "), (r"D(\d+) none", r"D \1, no mask"),
    (r"D(\d+) causal", r"D \1, causal"), (r"\bD(\d+)", r"D \1"),
]  # fmt: skip
KINDS = {  # of rows; the first that matches takes a row
    "nsa": lambda row: row["name"].startswith("nsa "),
    "blocks": lambda row: row["name"].startswith("block sparse "),
    "memory": lambda row: row["unit"] == "MiB",
    "calls": lambda row: re.match(r"(python|short|unfused|half|linear python)\b", row["name"]),
    "linear": lambda row: row["name"].startswith("linear "),
    "gradients": lambda row: row["unit"] == "TFLOP/s" and row["name"].startswith("backward "),
    "forward": lambda row: row["unit"] == "TFLOP/s",
    "decoding": lambda row: row["unit"] == "TB/s" and re.match(r"(\w+ )?decode B\d", row["name"]),
    "coding": lambda row: row["unit"] == "TB/s" and re.match(r"(en|de)code \w+", row["name"]),
}


def words(family):
    for pattern, replacement in WORDS:
        family = re.sub(pattern, replacement, family)
    return family


def rates(row):
    """contender -> rate, of those that were in the row's own run."""
    return {name: rate for name, rate in row["rates"].items() if not name.endswith("_stored")}


def rival(row):
    """The fastest of the others, and Heddle's rate over its; (None, None) where there is none or no kernel of Heddle's."""
    found = rates(row)
    others = {name: rate for name, rate in found.items() if name not in OWN}
    if not others or "heddle" not in found or row["unit"] == "MiB":
        return None, None
    best = max(others, key=others.get)
    return best, found["heddle"] / others[best]


def microseconds(row):
    """contender -> microseconds of a call."""
    return {name: 1000 * statistics.median(times) for name, times in row["milliseconds"].items()}


# The tables, in the order of the pages.
TITLES = {
    "forward": "Forward", "gradients": "Gradients", "decoding": "Decoding", "calls": "Short calls", "memory": "Memory", "linear": "Linear layers",
    "coding": "Weights to a format and from it", "nsa": "Native sparse attention", "blocks": "Lists of key blocks",
}  # fmt: skip


def sorted_by_kind(rows):
    """kind -> rows. A row of no kind is an error: no figure goes unshown."""
    out = {kind: [] for kind in TITLES}
    for row in rows.values():
        kind = next((kind for kind, takes in KINDS.items() if takes(row)), None)
        if kind is None:
            raise ValueError(f"no table takes row {row['name']!r}")
        out[kind].append(row)
    return out


def families(rows, pattern):
    """What is left of a row's name without `pattern` -> its rows."""
    out = {}
    for row in rows:
        name = re.sub(r"^(option \w+) .*", r"\1", row["name"])
        out.setdefault(re.sub(pattern, "", name), []).append(row)
    return out


def beside_own(group, known):
    """Where nobody else has such a kernel: how Heddle's rate compares with its own of a plainer call."""
    pairs = []
    for row in group:
        found = rates(row)
        plain = known.get(re.sub(r"option \w+ (D\d+)", r"forward \1 none", row["name"]))
        if "heddle" not in found:
            continue
        if "default" in found:
            pairs.append(("the default", found["heddle"] / found["default"]))
        elif row["name"].startswith("option ") and plain is not None:
            pairs.append(("plain", found["heddle"] / rates(plain)["heddle"]))
    return f"{span([ratio for _, ratio in pairs], '{:.2f}')} of {pairs[0][0]}" if pairs else "none"


def flops(rows, head, known):
    """A line for each family of rows in TFLOP/s."""
    lines = [[head, "rows", "TFLOP/s", "times the best rival", "median", "rivals"]]
    for family, group in families(rows, r" S\d+(?=$|,)").items():
        ratios = [ratio for row in group if (ratio := rival(row)[1]) is not None]
        own = [rates(row)["heddle"] for row in group if "heddle" in rates(row)]
        beside = span(ratios, "{:.2f}") if ratios else beside_own(group, known)
        lines.append([
            marked(words(family), group), str(len(group)), span(own, "{:.0f}") if own else "no kernel", beside,
            f"{statistics.median(ratios):.2f}" if ratios else "", ", ".join(sorted({NAMES[best] for row in group if (best := rival(row)[0])})),
        ])  # fmt: skip
    return table(lines)


def decoding(rows):
    lines = [
        [
            "decoding, bfloat16 caches and one query where nothing else is said, D 128",
            "µs",
            "TB/s of keys and values",
            "best rival, µs",
            "times it",
        ]
    ]
    for row in rows:
        us, (best, ratio) = microseconds(row), rival(row)
        beside = [f"{NAMES[best]} {us[best]:.1f}", f"{ratio:.2f}"] if best else ["none", ""]
        lines.append(
            [
                marked(re.sub(r"^decode ", "", row["name"]), [row]),
                f"{us['heddle']:.1f}",
                f"{rates(row)['heddle']:.2f}",
                *beside,
            ]
        )
    return table(lines)


def rows_of_x(row):
    return int(re.search(r" M(\d+)", row["name"])[1])


def linear(rows):
    """Families over the rows of x; a cell is Heddle's µs and how many times as fast as the best rival it is."""
    columns = sorted({rows_of_x(row) for row in rows})
    lines = [["linear layers, N x K: µs (times the best rival)", *(f"M {m}" for m in columns)]]
    for family, group in families(rows, r" M\d+| linear|^linear ").items():
        by_m = {rows_of_x(row): row for row in group}
        cells = ["" if (row := by_m.get(m)) is None else cell(row) for m in columns]
        lines.append([marked(family, group), *cells])
    return table(lines)


def cell(row):
    us, (_, ratio) = microseconds(row)["heddle"], rival(row)
    return short(us) + ("" if ratio is None else f" ({ratio:.2f})")


def coding(rows):
    lines = [
        [
            "weights to a format, with the wait for what is read back, and from it",
            "rows",
            "TB/s of weights read and written",
        ]
    ]
    for family, group in families(rows, r" \d+x\d+").items():
        lines.append([marked(family, group), str(len(group)), span([rates(row)["heddle"] for row in group], "{:.2f}")])
    return table(lines)


CALLS = {
    "python call": "a Python call at B 1, H 4, D 64, launch included", "python forward and backward": "forward and backward through autograd, the same, launches included",
    "short call": "the same call in a CUDA graph", "unfused": "B 1, H 8, D 64 in a CUDA graph", "half": "B 1, H 8, D 64 in a CUDA graph, and what float32 takes",
    **{f"short D128 {mask} B{batch}": f"B {batch}, H 16, D 128, {words} in a CUDA graph, and each of Heddle's kernels"
       for mask, words in (("none", "no mask,"), ("causal", "causal,")) for batch in (1, 8)},
    "linear python 4096x4096": "a Python call of a layer in nvfp4, launch included",
}  # fmt: skip


def calls(rows):
    """Short calls, in µs; what Python waits for is named so."""
    lines = [["short calls, µs", "length or rows", "Heddle", "others", "times the best rival"]]
    for family, group in families(rows, r" [SM]\d+$").items():
        for row in group:
            us = microseconds(row)
            others = ", ".join(f"{NAMES[name]} {value:.1f}" for name, value in us.items() if name != "heddle")
            ratio = rival(row)[1]
            lines.append(
                [
                    marked(CALLS[family], [row]),
                    row["name"].rsplit(" ", 1)[1],
                    f"{us['heddle']:.1f}",
                    others,
                    "" if ratio is None else f"{ratio:.2f}",
                ]
            )
    return table(lines)


def by_length(rows, family):
    """S -> the row `family S...`, shortest first."""
    found = ((re.fullmatch(rf"{family} S(\d+)", name), row) for name, row in rows.items())
    return dict(sorted((int(match[1]), row) for match, row in found if match))


def lengths(rows):
    """One call at growing lengths, unfused and in each precision; nothing of a GPU without such rows."""
    unfused, half = by_length(rows, "unfused"), by_length(rows, "half")
    if not unfused or unfused.keys() != half.keys():
        return ""
    lines = [["S", "bfloat16", 'float32, `precision="tf32"`', "float32", "unfused (torch math)", "unfused / bfloat16"]]
    took, over = {"bfloat16": [], "unfused": []}, {"f32": [], "tf32": []}
    for length, row in unfused.items():
        us, other = microseconds(row), microseconds(half[length])
        took["bfloat16"].append(us["heddle"])
        took["unfused"].append(us["math"])
        for name, ratios in over.items():
            ratios.append(other[name] / other["heddle"])
        cells = (us["heddle"], other["tf32"], other["f32"], us["math"])
        lines.append([marked(str(length), [row, half[length]]), *map(short, cells), f"{us['math'] / us['heddle']:.1f}"])
    python = by_length(rows, "python call")
    waited = [microseconds(row)["heddle"] for row in python.values()]
    return "\n".join([
        table(lines), "",
        f"- bfloat16 is {span(over['f32'], '{:.1f}')} times as fast as float32 with its own precision and {span(over['tf32'], '{:.1f}')} times as fast as one tf32 product, both within the rows `half`.",
        *(f"- A doubled length, {name}: {', '.join(f'×{b / a:.1f}' for a, b in zip(us, us[1:]))}." for name, us in took.items()),
        *([marked(f"- A call from Python (H 4, {min(python)} to {max(python)} keys, launch included): {span(waited, '{:.1f}')} µs", python.values())] if python else []),
    ])  # fmt: skip


def short(us):
    return f"{us:.{int(us < 100)}f}"


def memory(rows):
    lines = [["peak memory, MiB", "B 1, H 8, D 64, causal"]]
    for row in rows:
        lines.append(
            [marked(row["name"], [row]), ", ".join(f"{NAMES[name]} {value:.0f}" for name, value in rates(row).items())]
        )
    return table(lines)


def nsa(rows):
    """Milliseconds of a call, or the most memory that it had."""
    lines = [["native sparse attention, D 128, 16 blocks of 64", "Heddle", "others", "times its own dense attention"]]
    for row in rows:
        found = rates(row) if row["unit"] == "MiB" else {name: us / 1000 for name, us in microseconds(row).items()}
        unit, own = ("MiB" if row["unit"] == "MiB" else "ms"), found.get("heddle")
        shown = {name: f"{value:.0f}" if unit == "MiB" else f"{value:.3g}" for name, value in found.items()}
        lines.append(
            [
                marked(re.sub(r"^nsa ", "", row["name"]), [row]),
                f"{shown['heddle']} {unit}" if own else "no kernel",
                ", ".join(f"{NAMES[name]} {value}" for name, value in shown.items() if name != "heddle"),
                f"{found['dense'] / own:.2f}" if own and "dense" in found else "",
            ]
        )
    return table(lines)


def blocks(rows):
    """A line for each kind of blocks and length: of each share that is kept, Heddle's rate and its time beside dense attention's."""
    kept = sorted({share_kept(row) for row in rows})
    lines = [
        [
            "lists of 128 rows, H 16: TFLOP/s of what is kept (times as fast as Heddle's dense attention)",
            *(f"{share} % kept" for share in kept),
        ]
    ]
    for family, group in families(rows, r"^block sparse |,? \d+ %").items():
        by_share = {share_kept(row): rates(row) for row in group}
        cells = [
            ""
            if (found := by_share.get(share)) is None
            else f"{found['heddle']:.0f} ({found['heddle'] / found['dense']:.2f})"
            for share in kept
        ]
        lines.append([marked(words(family), group), *cells])
    return table(lines)


def share_kept(row):
    return int(re.search(r" (\d+) % ", row["name"])[1])


def tables(rows):
    """The summary: what there is of each kind."""
    found = sorted_by_kind(rows)
    made = {
        "forward": lambda some: flops(some, "forward", rows), "gradients": lambda some: flops(some, "gradients", rows),
        "decoding": decoding, "calls": calls, "memory": memory, "linear": linear, "coding": coding, "nsa": nsa, "blocks": blocks,
    }  # fmt: skip
    return "\n\n".join(made[kind](some) for kind, some in found.items() if some)


def every(rows):
    """A line a row, kind by kind."""
    parts = []
    for kind, group in sorted_by_kind(rows).items():
        lines = [["row", "timed", "unit", "each, in the unit, spread in %", "ratio", "difference"]]
        for row in group:
            unit = "µs" if row["unit"] == "calls/s" else row["unit"]
            value = (
                (lambda rate: f"{1e6 / rate:.1f}")
                if unit == "µs"
                else lambda rate: f"{rate:.2f}" if rate < 10 else f"{rate:.0f}"
            )
            spreads = row.get("spread", {})
            each = ", ".join(
                f"{NAMES[name]} {value(rate)}" + (f" ± {100 * spreads[name]:.0f}" if name in spreads else "")
                for name, rate in rates(row).items()
            )
            missing = "".join(f"; no {NAMES[name]}: {why}" for name, why in row.get("absent", {}).items())
            lines.append(
                [
                    marked(row["name"], [row]),
                    row["timed"],
                    unit,
                    (each + missing).replace("|", "/"),
                    "" if (ratio := rival(row)[1]) is None else f"{ratio:.2f}",
                    difference(row),
                ]
            )
        if group:
            parts.append(f"### {TITLES[kind]}\n\n{table(lines)}")
    return "\n\n".join(parts)


def difference(row):
    """The largest of a row's; of rows that were compared with nothing, nothing."""
    found = row.get("difference")
    worst = max(found.values(), default=None) if isinstance(found, dict) else found
    return (
        f"{worst:.1e} of {row['limit']:g}" if worst is not None and "limit" in row else f"{worst:.1e}" if worst else ""
    )


def about(files, rows):
    """What a GPU's figures are: conditions, files and who was raced."""
    parts, latest = [], files[-1][1]["conditions"]
    for name, content in files:
        conditions = content["conditions"]
        used = sum(row["file"] == name for row in rows.values())
        parts.append(
            f"[`{name}`](../bench/results/{name}) ({said(used, 'row')}, commit {conditions['commit'][:7]}, {conditions['date'][:10]})"
        )
    raced = any("fa3" in row["rates"] for row in rows.values())
    fa3 = "FlashAttention-3 was raced in the same run." if raced else (
        "FlashAttention-3 is not in these runs: the ratios say nothing about it, and at head sizes 64 to 192 it is faster than Heddle, forward and in gradients.")  # fmt: skip
    old = ("" if all(row["timed"] != "events" for row in rows.values()) else " Rows timed as `events` in the files (the forward, most of them) have the host's part "
           "in them, which flatters Heddle at short lengths: they are to be measured again.")  # fmt: skip
    return (f"{latest['gpu']}, driver {latest['driver']}, CUDA {latest['cuda']}, torch {latest['torch']}, bfloat16 where nothing else is said. Method, spread and conditions are in the files: "
            f"{', '.join(parts)}. Rivals are raced in the row's own run: cuDNN, FlashAttention-2, memory-efficient attention and cuBLAS as torch brings them. {fa3}{old}")  # fmt: skip


def by_gpu(files):
    """GPU -> its files."""
    out = {}
    for name, content in files:
        out.setdefault(content["conditions"]["gpu"], []).append((name, content))
    return out


def written(files, make):
    parts = []
    for found in by_gpu(files).values():
        rows = merged(found)
        parts.append(f"{about(found, rows)}\n\n{make(rows)}{told_wrong(found)}")
    return noted("\n\n".join(parts))


def written_lengths(files):
    """The tables of lengths, of each GPU that has the rows."""
    made = ((gpu, lengths(merged(found))) for gpu, found in by_gpu(files).items())
    return noted("\n\n".join(f"{gpu}, µs:\n\n{text}" for gpu, text in made if text))


def write(check):
    files, page = read("nvidia-*.json"), ROOT / "docs/performance.md"
    blocks = [
        (page, "measured gpu", written(files, tables)),
        (page, "gpu rows", written(files, every)),
        (ROOT / "docs/numerics.md", "lengths", written_lengths(files)),
    ]
    current = [update(path, name, text, check=check) for path, name, text in blocks]
    return all(current)


if __name__ == "__main__":
    run(__doc__, write)
