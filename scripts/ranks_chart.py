"""Writes docs/many_ranks.md's tables and pictures of attention over up to 1,024 GPUs, from what plans predict. Nothing is measured.

  python scripts/ranks_chart.py [--check]

Shares of time that GPUs spend on products, one GPU's time over P times that of P: docs/many-ranks-{growing,fixed}.svg. Beside them the
model is held to figures that others published.
"""

import functools
import sys

import heddle.distributed as hd
from bench_results import ROOT, run
from marked_block import table, update

sys.path.insert(0, str(ROOT / "examples" / "train"))
import chart  # noqa: E402

PAGE = ROOT / "docs" / "many_ranks.md"
RANKS = tuple(2**n for n in range(1, 11))
SCHEMES = ("gather", "ring", "needed", "ulysses", "2d")
SHAPE = {"heads": 64, "kv_heads": 8, "head_size": 128, "causal": "top_left"}
COSTS = hd.Costs(ranks_per_host=8)
PASSES = ("forward", "backward")
GROWING, FIXED = 8192, 1 << 20  # rows of a GPU, and of all
MEASURED_RANKS = (8, 16, 32, 64)
# TFLOP/s of a GPU at 8, 16, 32 and 64 of them, H100, bfloat16, 64 query and 8 key/value heads of 128, causal, 8192 rows a GPU: the
# plots of MagiAttention's documentation (version 1.1), read off. Heads for rows, both (USP), and keys that are needed (all-to-all).
PUBLISHED = {
    ("ulysses", "forward"): (602, 557, 580, 587),
    ("ulysses", "backward"): (582, 560, 573, 585),
    ("2d", "forward"): (593, 590, 594, 586),
    ("2d", "backward"): (572, 570, 575, 571),
    ("needed", "forward"): (610, 587, 577, 571),
    ("needed", "backward"): (502, 510, 500, 496),
}


@functools.cache
def predicted(scheme, ranks, rows, costs=COSTS):
    """Seconds forward and backward; None where a scheme is one of the others."""
    plan = made(ranks, rows, costs)
    if scheme == "2d" and not 1 < plan.ulysses < ranks:
        return None
    cost = plan.cost(scheme)
    return {"forward": cost.forward_seconds, "backward": cost.backward_seconds}


@functools.cache
def made(ranks, rows, costs):
    return hd.plan(rows, ranks, **SHAPE, costs=costs, ulysses=min(8, ranks))


def operations(rows, of_pass):
    """Of all ranks: two products forward, five backward, of half of the square of rows."""
    return SHAPE["heads"] * rows * (rows + 1) / 2 * SHAPE["head_size"] * 2 * (2 if of_pass == "forward" else 5)


def products(rows, ranks, of_pass, costs=COSTS):
    """Seconds that they take on `ranks` GPUs that do nothing else."""
    rate = costs.forward_flops if of_pass == "forward" else costs.backward_flops
    return operations(rows, of_pass) / ranks / rate


def share(scheme, ranks, rows):
    """Of both passes' time what products alone would take."""
    seconds = predicted(scheme, ranks, rows)
    if seconds is None:
        return None
    return sum(products(rows, ranks, of_pass) for of_pass in PASSES) / sum(seconds.values())


def drawn(title, rows_of):
    series = {}
    for scheme in SCHEMES:
        points = [(ranks, value) for ranks in RANKS if (value := share(scheme, ranks, rows_of(ranks))) is not None]
        series[scheme] = [(ranks, 100 * value) for ranks, value in points]
    return chart.lines(title, "GPUs, 8 to a host", "% of the time in products", series, doubling=True, decades=False)


def shares(rows_of):
    lines = [["GPUs", "rows in all", *SCHEMES]]
    for ranks in RANKS:
        if ranks not in (2, 8, 64, 256, 1024):
            continue
        values = [share(scheme, ranks, rows_of(ranks)) for scheme in SCHEMES]
        best = max(value for value in values if value is not None)
        cells = ["–" if v is None else f"**{v:.3f}**" if v == best else f"{v:.3f}" for v in values]
        lines.append([f"{ranks:,}", f"{rows_of(ranks):,}", *cells])
    return table(lines)


def fitted(scheme, of_pass, rate):
    """Costs with which the scheme has the rate (TFLOP/s of a GPU) at the fewest GPUs: what the kernel itself is taken to have."""
    ranks = MEASURED_RANKS[0]
    rows, field = GROWING * ranks, f"{of_pass}_flops"
    wanted = operations(rows, of_pass) / ranks / (rate * 1e12)
    alone = products(rows, ranks, of_pass)
    # Groups of all ranks there are: heads for rows alone.
    beside = predicted("ulysses" if scheme == "2d" else scheme, ranks, rows)[of_pass] - alone
    return COSTS._replace(**{field: getattr(COSTS, field) * alone / (wanted - beside)})


def held_to_published():
    lines = [["", "", *(f"{ranks} GPUs" for ranks in MEASURED_RANKS[1:])]]
    for (scheme, of_pass), rates in PUBLISHED.items():
        costs = fitted(scheme, of_pass, rates[0])
        cells = []
        for ranks, rate in zip(MEASURED_RANKS[1:], rates[1:]):
            rows = GROWING * ranks
            ours = operations(rows, of_pass) / ranks / predicted(scheme, ranks, rows, costs)[of_pass] / 1e12
            cells.append(f"{rate / rates[0]:.2f} / {ours / rates[0]:.2f}")
        lines.append([f"`{scheme}`", of_pass, *cells])
    return table(lines)


def write(check):
    growing, fixed = (lambda ranks: GROWING * ranks), (lambda ranks: FIXED)
    pictures = {
        "growing": drawn(f"Predicted: {GROWING:,} rows to each GPU, causal, 64 / 8 heads of 128", growing),
        "fixed": drawn(f"Predicted: {FIXED:,} rows in all, causal, 64 / 8 heads of 128", fixed),
    }
    current = True
    for name, picture in pictures.items():
        file = ROOT / "docs" / f"many-ranks-{name}.svg"
        current &= file.is_file() and file.read_text(encoding="utf-8") == picture
        if not check:
            file.write_text(picture, encoding="utf-8")
    blocks = {"growing": shares(growing), "fixed": shares(fixed), "published": held_to_published()}
    for name, block in blocks.items():
        current &= update(PAGE, f"many ranks {name}", block, check=check)
    return current or not check


if __name__ == "__main__":
    run(__doc__, write)
