"""Writes README's table of GPU figures from the results of `make bench-gpu`.

  python scripts/gpu_table.py bench/results/nvidia-h200.json
  python scripts/gpu_table.py bench/results/nvidia-h200.json bench/results/nvidia-h200-*.json   # rows measured later
"""

import argparse
import json
import statistics
from pathlib import Path

from marked_block import table, update

ROOT = Path(__file__).resolve().parent.parent
# Words, and the names of the rows that they stand for begin so.
GROUPS = [
    *((f"forward, D {d}, {words}", f"forward D{d} {name} ") for d in (64, 128, 256) for words, name in (("no mask", "none"), ("causal", "causal"))),
    ("grouped heads 64/8, D 128, causal, 4k to 16k", "gqa "),
    ("window of 1024, D 128, S 16384", "window "),
    ("packed documents of 128 to 8192, D 128", "documents "),
    ("e4m3 operands, D 128, no mask, 2k to 16k", "fp8 D128 none S"),
    ("e4m3 operands, D 64, no mask, 2k to 16k", "fp8 D64 none S"),
    ("e4m3 operands, D 128, no mask, scales by token", "fp8 D128 none S8192, scales by tokens"),
    *((f"the Ampere kernel on this chip, D {d}", f"sm80 D{d} ") for d in (64, 128, 256)),
    ("float32, three tf32 products, D 128", "float32 f32"),
    ("float32, precision tf32, D 128", "float32 tf32"),
    *((f"score option at D 128, S 8192: {name.replace('_', ' ')}", f"option {name} D128") for name in
      ("softcap", "alibi", "bias", "mask", "key_bias", "key_mask", "padding", "sink")),
]  # fmt: skip
DECODE = ["decode B1 32/8 1024", "decode B1 32/8 4096", "decode B1 32/8 32768", "decode B16 32/8 8192", "decode B64 32/8 8192",
          "decode B128 64/8 4096", "decode B64 32/8 8192, pages of 16", "decode B64 32/8 8192, pages of 1",
          "decode B64 32/8 8192, e4m3", "decode B64 32/8 8192, 16 rows"]  # fmt: skip
GRADIENTS = [
    *((f"D {d}, {words}", f"backward D{d} {name} ") for d in (64, 128, 256) for words, name in (("no mask", "none"), ("causal", "causal"))),
    *((f"D 96, {words}, S 4096", f"backward head size 96, {name} ") for words, name in (("no mask", "none"), ("causal", "causal"))),
    ("grouped heads 64/8, D 128, causal, 4k to 16k", "backward gqa "),
    ("window of 1024, D 128, S 16384", "backward window "),
    ("packed documents of 128 to 8192, D 128", "backward documents "),
    *((f"the Ampere kernel on this chip, D {d}", f"backward sm80 D{d} ") for d in (64, 128, 256)),
    ("float32, three tf32 products, D 128", "backward float32 f32"),
    ("float32, precision tf32, D 128", "backward float32 tf32"),
    *((f"deterministic, D {d}, causal, S 4096", f"backward deterministic D{d} ") for d in (64, 128, 256)),
    ("deterministic, grouped heads 64/8, D 128, causal, S 4096", "backward deterministic gqa "),
]  # fmt: skip

LINEAR = [*((f"nvfp4, {n} x 8192", f"linear w4a16 nvfp4 {n}x8192") for n in (8192, 28672)),
          *((f"mxfp4 times x in e4m3, {n} x 8192", f"linear w4a8 mxfp4 {n}x8192") for n in (8192, 28672))]  # fmt: skip
ROWS_OF_X = (1, 8, 16, 32, 64, 128, 256, 1024, 4096)


def span(values, form):
    low, high = form.format(min(values)), form.format(max(values))
    return low if low == high else f"{low} to {high}"


def rates(rows):
    plain = next(row for row in rows if row["name"] == "forward D128 none S8192")["rates"]["heddle"]
    lines = [["", "rows", "TFLOP/s", "times the best rival", "median", "rivals"]]
    for words, begin in GROUPS:
        group = [row for row in rows if row["name"].startswith(begin) and ("," in begin or "," not in row["name"])]
        ratios = [row["ratio"] for row in group if "ratio" in row]
        rivals = ", ".join(sorted({row["rival"].removesuffix("_stored") for row in group if "rival" in row}))
        beside = span(ratios, "{:.2f}") if ratios else f"{group[0]['rates']['heddle'] / plain:.2f} of plain" if "option" in begin else "none"
        lines.append([words, str(len(group)), span([row["rates"]["heddle"] for row in group], "{:.0f}"), beside,
                      f"{statistics.median(ratios):.2f}" if ratios else "", rivals])  # fmt: skip
    return table(lines)


def gradients(rows):
    lines = [["gradients", "rows", "TFLOP/s", "times the best rival", "median", "rivals"]]
    for words, begin in GRADIENTS:
        group = [row for row in rows if row["name"].startswith(begin)]
        if not group:  # a run may have left them out
            continue
        ratios = [row["ratio"] for row in group if "ratio" in row]
        rivals = ", ".join(sorted({row["rival"].removesuffix("_stored") for row in group if "rival" in row}))
        own = [row["rates"]["heddle"] / row["rates"]["default"] for row in group if "default" in row["rates"]]
        beside = span(ratios, "{:.2f}") if ratios else f"{span(own, '{:.2f}')} of the default" if own else "none"
        lines.append([words, str(len(group)), span([row["rates"]["heddle"] for row in group], "{:.0f}"), beside,
                      f"{statistics.median(ratios):.2f}" if ratios else "", rivals])  # fmt: skip
    return table(lines) if len(lines) > 1 else ""


def training(rows):
    """Forward and backward as Python sees them, and what they need of memory."""
    known, text = {row["name"]: row for row in rows}, []
    short = {name.split("S")[1]: row for name, row in known.items() if name.startswith("python forward and backward S")}
    for length, row in short.items():
        us = {contender: 1e6 / rate for contender, rate in row["rates"].items()}
        text.append(f"S {length}: {us['heddle']:.0f} µs (FlashAttention-2 {us['fa2']:.0f}, cuDNN {us['cudnn']:.0f})")
    out = f"Forward and backward through autograd at B 1, H 4, D 64, launches included: {'; '.join(text)}." if text else ""
    if (row := known.get("memory of forward and backward S16384")) is not None:
        mib = row["rates"]
        out += (f" Peak memory of both at B 1, H 8, D 64, S 16384, causal: {mib['heddle']:.0f} MiB, deterministic {mib['deterministic']:.0f}, "
                f"FlashAttention-2 {mib['fa2']:.0f}, torch's unfused computation {mib['math']:.0f}.")  # fmt: skip
    return out


def decoding(rows):
    lines = [["one query a sequence, bfloat16, D 128", "µs", "TB/s of keys and values", "cuDNN, µs", "times cuDNN"]]
    known = {row["name"]: row for row in rows}
    for name in DECODE:
        if (row := known.get(name)) is None:  # a run may have left it out
            continue
        us = {contender: 1000 * statistics.mean(times) for contender, times in row["milliseconds"].items()}
        lines.append([name.removeprefix("decode "), f"{us['heddle']:.1f}", f"{row['rates']['heddle']:.2f}",
                      f"{us['cudnn']:.1f}" if "cudnn" in us else "", f"{us['cudnn'] / us['heddle']:.2f}" if "cudnn" in us else ""])  # fmt: skip
    return table(lines)


def linear(rows):
    lines = [["linear layers, µs (times cuBLAS in bfloat16)", *(f"M {m}" for m in ROWS_OF_X)]]
    known = {row["name"]: row for row in rows}
    for words, begin in LINEAR:
        found = [known.get(f"{begin} M{m}") for m in ROWS_OF_X]
        if any(found):
            us = [0.0 if row is None else 1000 * statistics.mean(row["milliseconds"]["heddle"]) for row in found]
            lines.append([words, *("" if row is None else f"{one:.{int(one < 100)}f} ({row['ratio']:.2f})" for one, row in zip(us, found))])
    return table(lines) if len(lines) > 1 else ""


def calls(rows):
    us = {row["name"]: 1e6 / row["rates"]["heddle"] for row in rows if row["name"].startswith("python call")}
    short = [value for name, value in us.items() if int(name.split("S")[1]) <= 512]
    return f"A Python call at B 1, H 4, D 64, S up to 512 takes {span(short, '{:.0f}')} µs, launch included."


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("later", type=Path, nargs="*", help="runs of other commits, whose rows replace those of the same names")
    given = parser.parse_args()
    path, other = given.results, ""
    results = json.loads(path.read_text(encoding="utf-8"))
    c, rows = results["conditions"], results["rows"]
    for later in given.later:
        run = json.loads(later.read_text(encoding="utf-8"))
        names = {row["name"] for row in run["rows"]}
        rows = [row for row in rows if row["name"] not in names] + run["rows"]
        other += f" {len(names)} rows are of commit {run['conditions']['commit']}, {run['conditions']['date'][:10]}: [`{later.name}`](bench/results/{later.name})."
    text = (f"{c['gpu']}, driver {c['driver']}, CUDA {c['cuda']}, torch {c['torch']}, commit {c['commit']}, {c['date'][:10]}, bfloat16 where nothing "
            f"else is said; method and all rows are in [`{path.name}`](bench/results/{path.name}). Rivals: cuDNN and FlashAttention-2 as torch brings "
            f"them, in the same run; FlashAttention-3 from figures measured apart and scaled by a matrix product beside each.{other}\n\n")  # fmt: skip
    parts = [rates(rows), gradients(rows), training(rows), decoding(rows), calls(rows), linear(rows)]
    update(ROOT / "README.md", "measured gpu", text + "\n\n".join(part for part in parts if part), check=False)


if __name__ == "__main__":
    main()
