"""What docs/nsa.md says of the claims of sharing, from bench/results/nsa-claims-*.json of bench/nsa_claims.py.

scripts/measured_table.py writes it; each file has a section. A figure that a file lacks is an error, and not an empty cell.
"""

from collections.abc import Callable
from dataclasses import dataclass

from bench_results import marked
from bench_results import said as counted_words
from marked_block import table

NONE = "No figures yet: `python bench/nsa_claims.py`, on a CPU that does nothing else, writes them."
NOTHING = "–"
PRESETS = ("seed", "seed_4_3")
PARTS = ("even", "odd")
SLACK = {"times": 0.05, "less": 0.03}  # claims have one digit behind the point, or say "about"
UNCHANGED = {"times": 1.0, "less": 0.0}
CHANGED = {"times": ("slower", "faster"), "less": ("costs more", "saves, too")}  # where nothing was to change
MODES = {"forward": "forward", "training": "forward and backward"}
PATHS = {
    "kernels": "`parallel_nsa`",
    "naive": "`naive_nsa_with_compression`",
    "naive_nsa": "`naive_nsa`",
    "naive_nsa_compression": "`naive_nsa_compression`",
}
Figure = Callable[[dict, str], float]  # of a row of the file and a variant


@dataclass(frozen=True)
class Claim:
    """words: the seed's. kind: "times" as fast (or as little work), or "less", a share of plain NSA's. low, high: what is
    claimed. figures: where it can be had, of "counted", "kernels" and "naive". about: what holds without a measurement."""

    words: str
    kind: str
    low: float
    high: float
    figures: dict[str, Figure]
    about: str


def flops(passes: tuple[str, ...], steps: tuple[str, ...] = (), part: str = "all") -> Figure:
    """FLOP counted; steps: all if none are named."""

    def figure(row: dict, variant: str) -> float:
        found = row["counted"][variant]["flops"]
        return sum(parts[part] for name in passes for step, parts in found[name].items() if not steps or step in steps)

    return figure


def moved(kind: str, passes: tuple[str, ...] = ("forward",), part: str = "all") -> Figure:
    """Bytes counted; kind: "bytes_each_row" or "bytes_once"."""
    return lambda row, variant: sum(
        parts[part] for name in passes for parts in row["counted"][variant][kind][name].values()
    )


def kept(part: str = "all") -> Figure:
    return lambda row, variant: row["counted"][variant]["kept"][part]


def of_path(path: str, kind: str, mode: str) -> Figure:
    """kind: "median_seconds" or "peak"."""
    return lambda row, variant: row["measured"][path][variant][kind][mode]


def of_call(path: str, kind: str) -> Figure:
    """kind: "products", FLOP forward, or "kept", bytes that autograd keeps."""
    return lambda row, variant: row["measured"][path][variant][kind]


def both(kind: str, mode: str) -> dict[str, Figure]:
    return {path: of_path(path, kind, mode) for path in ("kernels", "naive")}


ATTENTION, COMPRESSION = ("selected", "window"), ("pooling", "compressed", "selection")
FORWARD, TRAINING = ("forward",), ("forward", "backward")
CLAIMS = (
    Claim(
        "`naive_nsa`: 17.2 to 8.6 GFLOP, −50 %", "less", 0.5, 0.5,
        {"counted": flops(FORWARD, ATTENTION), "naive": of_call("naive_nsa", "products")},
        "17.2 G are multiply-adds (34.4 GFLOP) of rows that all have 16 full blocks; early rows have fewer keys. Our naive "
        "function multiplies with every key up to the row and masks what is not listed, so it does more in both.",
    ),
    Claim(
        "odd rows of `naive_nsa`: no FLOP, copies alone", "less", 1.0, 1.0, {"counted": flops(FORWARD, ATTENTION, "odd")},
        "In the whole `seed` keeps the compressed branch of odd rows, see below.",
    ),
    Claim(
        "`naive_nsa_compression`: 2.1 GFLOP, unchanged", "less", 0.0, 0.0,
        {"counted": flops(FORWARD, COMPRESSION), "naive": of_call("naive_nsa_compression", "products")},
        "By these shapes it is at most 1.1 GFLOP: q·k̄ and p·v̄ of 32 blocks. Counted are our kernels, which do not choose the lists that "
        "odd rows would throw away; the proposer's text chooses them.",
    ),
    Claim(
        "`naive_nsa`: 1.8 to 1.9 times as fast", "times", 1.8, 1.9,
        {"counted": flops(FORWARD, ATTENTION), "naive": of_path("naive_nsa", "median_seconds", "forward")}, "",
    ),
    Claim(
        "`naive_nsa_compression`: as fast", "times", 1.0, 1.0,
        {"counted": flops(FORWARD, COMPRESSION), "naive": of_path("naive_nsa_compression", "median_seconds", "forward")}, "",
    ),
    Claim(
        "the whole, and inference: 1.8 to 1.9 times as fast", "times", 1.8, 1.9,
        {"counted": flops(FORWARD), **both("median_seconds", "forward")},
        "The claim is the selected branch's; what stays for every row is in the whole, too.",
    ),
    Claim(
        "training: 1.7 to 1.8 times as fast", "times", 1.7, 1.8,
        {"counted": flops(TRAINING), **both("median_seconds", "training")}, "",
    ),
    Claim(
        "`naive_nsa`: 200 to 120 MB, −40 %", "less", 0.4, 0.4, {"naive": of_path("naive_nsa", "peak", "forward")},
        "The megabytes are those of a loop that gathers keys. Ours takes 64 rows at a time, however many there are, and that "
        "does not shrink.",
    ),
    Claim(
        "`naive_nsa_compression`: 50 MB, unchanged", "less", 0.0, 0.0, {"naive": of_path("naive_nsa_compression", "peak", "forward")}, "",
    ),
    Claim(
        "the whole: 250 to 170 MB, −32 %", "less", 0.32, 0.32, both("peak", "forward"),
        "The result has all rows, whatever is shared.",
    ),
    Claim("inference: −35 % memory", "less", 0.35, 0.35, both("peak", "forward"), "The same measurement as the whole's."),
    Claim("training: −30 % memory", "less", 0.3, 0.3, both("peak", "training"), "The peak, gradients of all operands in it."),
    Claim(
        "the same, of what is kept for the backward", "less", 0.3, 0.3,
        {"counted": kept(), "kernels": of_call("kernels", "kept"), "naive": of_call("naive", "kept")},
        "Operands are in it, which no sharing makes smaller but q's rows that nothing reads.",
    ),
    Claim(
        "memory access: −30 to −40 %, keys read by each row for itself", "less", 0.3, 0.4, {"counted": moved("bytes_each_row")},
        "So a loop over rows reads them, which is what the claim is about.",
    ),
    Claim(
        "the same, each tensor read once", "less", 0.3, 0.4, {"counted": moved("bytes_once")},
        "The least there is: half the rows still read nearly all keys between them.",
    ),
)  # fmt: skip


def change(claim: Claim, figure: Figure, row: dict, preset: str) -> float:
    plain, shared = figure(row, "plain"), figure(row, preset)
    return plain / shared if claim.kind == "times" else 1 - shared / plain


def as_text(kind: str, value: float) -> str:
    """ "1.85", or "−32 %" of 0.32 less."""
    if kind == "times":
        return f"{value:.2f}"
    percent = round(100 * value)
    return "0 %" if percent == 0 else f"{'−' if percent > 0 else '+'}{abs(percent)} %"


def against(claim: Claim, value: float) -> str:
    slack = SLACK[claim.kind]
    unchanged = claim.low == claim.high == UNCHANGED[claim.kind]
    if value < claim.low - slack:
        return CHANGED[claim.kind][0] if unchanged else "short of it"
    if value > claim.high + slack:
        return CHANGED[claim.kind][1] if unchanged else "beyond it"
    return "as claimed"


def verdict(claim: Claim, changes: dict[str, list[float]]) -> str:
    """ "Counted: as claimed; kernels: short of it (`seed_4_3`: as claimed)." """
    parts = []
    for source, values in changes.items():
        words = [against(claim, value) for value in values]
        second = "" if words[1] == words[0] else f" (`{PRESETS[1]}`: {words[1]})"
        parts.append(f"{source}: {words[0]}{second}")
    text = "; ".join(parts)
    return text[0].upper() + text[1:] + "."


def cell(claim: Claim, figure: Figure, row: dict) -> str:
    """ "1.21 / 1.45", or "−50 % / −50 % of 30.1 GFLOP"."""
    text = " / ".join(as_text(claim.kind, change(claim, figure, row, preset)) for preset in PRESETS)
    if claim.kind == "times":
        return text
    unit, size = ("GFLOP", 1e9) if "FLOP" in claim.words else ("MB", 1e6)
    return f"{text} of {in_digits(figure(row, 'plain') / size)} {unit}"


def in_digits(value: float) -> str:
    """Three digits at least: "0.52", "34.1", "1234"."""
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}"


def claims(row: dict, explained: bool) -> str:
    """A line for each claim that the row's paths can be held against. explained: with what holds without measurement."""
    out = [["claim", "counted", "by kernels", "by the naive functions", "where it is right"]]
    for claim in CLAIMS:
        changes = {s: [change(claim, f, row, preset) for preset in PRESETS] for s, f in claim.figures.items()}
        cells = {source: cell(claim, figure, row) for source, figure in claim.figures.items()}
        said = verdict(claim, changes) + (f" {claim.about}" if explained and claim.about else "")
        out.append(
            [marked(claim.words, [row]), *(cells.get(s, NOTHING) for s in ("counted", "kernels", "naive")), said]
        )
    return table(out)


def long_words(row: dict) -> str:
    """Of the claim that longer sequences gain more."""
    long, rows, each = row["counted_long"], [], []
    for preset in PRESETS:
        here, there = (
            flops(FORWARD)(row, "plain") / flops(FORWARD)(row, preset),
            long["flops"]["plain"] / long["flops"][preset],
        )
        word = "the same" if abs(there - here) < SLACK["times"] else "more" if there > here else "less"
        rows.append(f"{there:.2f} times fewer with `{preset}`, {here:.2f} at {row['rows']} rows: {word}")
        each.append(word)
    right = "right" if set(each) == {"more"} else "not right here" if "more" not in each else "right in part"
    return (
        f"**Longer sequences gain more** is {right}: counted for {long['rows']} rows, forward FLOP are "
        f"{'; '.join(rows)}. The compressed branch grows with the square of the length."
    )


def apart(row: dict) -> str:
    """Even and odd rows of each variant."""
    variants = ("plain", *PRESETS)
    head = ["", *(f"{'plain' if name == 'plain' else f'`{name}`'}, {part} rows" for name in variants for part in PARTS)]
    lines: list[tuple[str, Callable[[str], Figure], float]] = [
        (f"{step}, GFLOP forward", lambda part, step=step: flops(FORWARD, (step,), part), 1e9)
        for step in ("compressed", "selection", "selected", *(["window"] if row["window"] else []))
    ]
    lines += [
        ("all steps, GFLOP forward", lambda part: flops(FORWARD, (), part), 1e9),
        ("GFLOP backward", lambda part: flops(("backward",), (), part), 1e9),
        ("MB moved forward, keys by each row", lambda part: moved("bytes_each_row", FORWARD, part), 1e6),
        ("MB moved forward, each tensor once", lambda part: moved("bytes_once", FORWARD, part), 1e6),
        ("MB moved backward, keys by each row", lambda part: moved("bytes_each_row", ("backward",), part), 1e6),
        ("MB moved backward, each tensor once", lambda part: moved("bytes_once", ("backward",), part), 1e6),
        ("MB kept for the backward", kept, 1e6),
    ]
    body = [
        [words, *(f"{in_digits(figure(part)(row, name) / unit)}" for name in variants for part in PARTS)]
        for words, figure, unit in lines
    ]
    for path in ("kernels", "naive"):
        errors = [row["measured"][path][name]["error"][part] for name in PRESETS for part in PARTS]
        body.append([f"difference from plain, {PATHS[path]}", "", "", *(f"{error:.2g}" for error in errors)])
    return table([head, *body])


def medians(rows: list[dict]) -> str:
    """Medians and peaks of every path and mode."""
    out = [["", "dtype", "window", "plain, ms", *(f"`{p}`, ms" for p in PRESETS), "plain, peak MB", *(f"`{p}`, MB" for p in PRESETS)]]  # fmt: skip
    for row in rows:
        for path, found in row["measured"].items():
            for mode in found["plain"]["median_seconds"]:
                each = [found[name] for name in ("plain", *PRESETS)]
                out.append([
                    f"{PATHS[path]}, {MODES[mode]}", row["dtype"], str(row["window"]),
                    *(f"{1e3 * x['median_seconds'][mode]:.1f}" for x in each), *(f"{x['peak'][mode] / 1e6:.1f}" for x in each),
                ])  # fmt: skip
    return table(out)


def shape_words(row: dict) -> str:
    window = f"window {row['window']}" if row["window"] else "no window"
    return (
        f"B 1, T {row['rows']}, {row['heads']} / {row['kv_heads']} heads, D {row['head_size']}, {row['slots']} blocks of {row['block']}, "
        f"{window}, {row['dtype']}"
    )  # fmt: skip


def section(content: dict) -> str:
    c, rows = content["conditions"], content["rows"]
    about = (
        f"**{c['cpu']}**, `{c['simd']}`: {counted_words(c['threads'], 'thread')}, torch {c['torch']}, commit {c['commit'][:7]}, {c['date'][:10]}; "
        "random normals, medians of calls in turn. Cells are `seed` / `seed_4_3`."
    )
    parts = [about]
    full = [row for row in rows if "naive" in row["measured"]]
    for number, row in enumerate(full):
        parts += [
            f"{shape_words(row)}:",
            claims(row, explained=number == 0),
            long_words(row),
            "Even and odd rows:",
            apart(row),
        ]
    return "\n\n".join([*parts, "Medians and peaks:", medians(rows)])


def written(files: list[tuple[str, dict]]) -> str:
    """The block of docs/nsa.md, from [(file name, content)]; files without a figure are refused by name."""
    sections = []
    for name, content in files:
        try:
            sections.append(section(content))
        except KeyError as missing:
            raise ValueError(f"{name} has no figure {missing}: measure again by bench/nsa_claims.py") from missing
        if not any("naive" in row["measured"] for row in content["rows"]):
            raise ValueError(f"{name} has no row of the naive functions: measure again by bench/nsa_claims.py")
    return "\n\n".join(sections) or NONE
