"""Writes docs/speed.svg, README's picture of speed over length, and the table under it, from the results of `make bench-gpu`.

  python scripts/speed_chart.py [--check]

Attention in bfloat16 at head size 128 under a causal mask, forward and gradients: each contender of the newest bench/results/nvidia-*.json
that took every length. A dagger says that the sources of a kernel are others now than those that were measured.
"""

import re
import sys

from bench_results import DAGGER, ROOT, merged, read, run, span, stale
from marked_block import table, update

sys.path.insert(0, str(ROOT / "examples" / "train"))
import chart  # noqa: E402

PICTURE = ROOT / "docs" / "speed.svg"
CONTENDERS = {"heddle": "Heddle", "fa3": "FA3", "cudnn": "cuDNN", "fa2": "FA2"}
FULL = {"fa3": "FlashAttention-3", "cudnn": "cuDNN", "fa2": "FlashAttention-2"}
PASSES = {"forward": "forward", "gradients": "backward"}  # what the picture says, and how the rows' names begin


def chosen(files):
    """forward and gradients -> [(length, row)], shortest first, of files [(name, content)]."""
    rows, out = merged(files), {}
    for words, name in PASSES.items():
        kind = re.compile(rf"{name} D128 causal S(\d+)")
        out[words] = sorted((int(match[1]), row) for row in rows.values() if (match := kind.fullmatch(row["name"])))
    if not any(out.values()):
        raise ValueError("no row is of attention at head size 128 under a causal mask")
    return out


def took_all(found, contender):
    """Whether the contender was in each of these rows, and there are some."""
    return bool(found) and all(contender in row["rates"] for _, row in found)


def shown(chosen_rows):
    """The GPU, with a dagger where sources are others now."""
    used = [row for found in chosen_rows.values() for _, row in found]
    return used[0]["conditions"]["gpu"] + (DAGGER if stale(used) else "")


def drawn(files):
    """The picture of these files."""
    rows = chosen(files)
    series = {
        f"{short} {words}": [(length, row["rates"][contender]) for length, row in found]
        for words, found in rows.items()
        for contender, short in CONTENDERS.items()
        if took_all(found, contender)
    }
    return chart.lines(
        f"Attention on one {shown(rows)}: bfloat16, D 128, causal", "keys and queries of a sequence", "TFLOP/s", series, doubling=True, decades=False, right=180)  # fmt: skip


def told(files):
    """What stands under the picture: Heddle's rate over each rival's, from the least to the largest, of which shape, and when it
    was measured. What a dagger is stands once in README, under slower_table.py's rows, among which these are."""
    rows = chosen(files)
    conditions = next(row for found in rows.values() for _, row in found)["conditions"]
    rivals = [who for who in FULL if any(took_all(found, who) for found in rows.values())]
    lines = [
        ["Heddle's rate over that of", *(f"{FULL[who]} ({CONTENDERS[who]})".replace(" (cuDNN)", "") for who in rivals)]
    ]
    for words, found in rows.items():
        ratios = {
            who: [row["rates"]["heddle"] / row["rates"][who] for _, row in found]
            for who in rivals
            if took_all(found, who)
        }
        lines.append([words, *(span(ratios[who], "{:.2f}") if who in ratios else "" for who in rivals)])
    lengths = [length for found in rows.values() for length, _ in found]
    return (
        f"{table(lines)}\n\nAttention in bfloat16 at head size 128 under a causal mask alone, {min(lengths)} to {max(lengths)} keys: one "
        f"{shown(rows)}, {conditions['date'][:10]}, all in one run. Other shapes are in [every table](docs/performance.md)."
    )


def write(check):
    files = read("nvidia-*.json")[-1:]
    new = drawn(files)
    if not check:
        PICTURE.write_text(new, encoding="utf-8")
    caption = update(ROOT / "README.md", "speed", told(files), check=check)
    return PICTURE.exists() and PICTURE.read_text(encoding="utf-8") == new and caption


if __name__ == "__main__":
    run(__doc__, write)
