"""The page on native sparse attention, from the contents of sparse.json."""

from __future__ import annotations

from html import escape

from . import charts, html
from .charts import Series
from .parts import NOTHING, card, details, grid, left_out_card, left_out_line, section, spread_text, table, tiles, words
from .sparse_measure import ALIKE, EXACT_ROWS, FORWARD, GRADIENTS, MODES, SHARING
from .units import bytes_text, count_text, error_text, seconds_text, times_text

SPARSE = "sparse.html"
PAGES = {SPARSE: "sparse attention"} | html.PAGES
NAMES = {"dense": "dense", "nsa": "NSA", "seed": "seed", "seed_4_3": "seed_4_3", "fast": "fast"}
COLOURS = {"dense": "c-baseline", "nsa": "c-flash", "seed": "c-p2", "seed_4_3": "c-p3", "fast": "c-p0"}
TITLES = {FORWARD: "Forward", GRADIENTS: "Forward and gradients"}
CONTENDERS = {  # of GPU rows: name, colour
    "heddle": ("Heddle NSA", "c-flash"),
    "fla": ("fla NSA", "c-p2"),
    "dense": ("Heddle dense", "c-baseline"),
    "fa3": ("FlashAttention-3 dense", "c-torch"),
    "default": ("Heddle NSA without sharing", "c-p3"),
}
KINDS = {
    "random": "random normals",
    "alike": f"neighbours alike (each position is {ALIKE} times the one before and a fresh normal)",
}
LEAST_CHANGE = 1e-3  # that charts show


def page(report: dict) -> str:
    """The whole document; `report` as sparse.run returns it. A section without a measurement is left out."""
    body = [
        _header(report),
        *(_costs(report, direction) for direction in (FORWARD, GRADIENTS)),
        _changes(report),
        _recall(report),
        _rounding(report),
        _gpu(report),
        _conditions(report),
    ]
    return html.document(f"Heddle: native sparse attention on {escape(report['machine']['processor'])}", body)


def _header(report: dict) -> str:
    form = report["form"]
    left_out = left_out_line(report["left_out"], report["settings"]["budget_seconds"], "make demo-sparse")
    said = html.measured(report, "this page") + left_out
    said += (
        "<p class='lede'><b>Native sparse attention is another function than dense attention</b>, made for models that are "
        "trained with it: how far its results are from dense ones is no error, and no such figure stands here. "
        "Errors below are of rounding; what sharing changes is measured against NSA without sharing. "
        "What a model loses, no figure on this page says.</p>"
    )
    said += words(
        {
            "dense": "<code>heddle.attention</code> under a causal mask.",
            "NSA": f"<code>heddle.nsa.parallel_nsa</code>: three gated branches: pooled blocks, {form['blocks']} chosen blocks of "
            f"{form['block_size']} keys, and a window of {form['window']}.",
            "seed, seed_4_3": "NSA in which odd rows copy even ones' gated output: in the chosen blocks and the window, or "
            "in all three branches.",
            "fast": f"NSA in which each {max(1, 64 // (form['heads'] // form['kv_heads']))} rows share the chosen blocks and nothing else.",
            "shapes": f"float32, batch 1, {form['heads']} query heads over {form['kv_heads']} key/value heads, head size "
            f"{form['head_size']}.",
        }
    )
    return f"<header>{html.brand(report, SPARSE, PAGES)}<h1>{_title(report)}</h1>{said}{tiles(list(_tiles(report)))}</header>"


def _at(points: list[dict], direction: str) -> dict:
    """length -> mode -> point."""
    found: dict[int, dict] = {}
    for p in points:
        if p["direction"] == direction:
            found.setdefault(p["length"], {})[p["method"]] = p
    return found


def _longest(points: list[dict], direction: str) -> tuple[int, dict] | None:
    """The longest length at which both dense attention and NSA were measured."""
    both = {length: modes for length, modes in _at(points, direction).items() if {"dense", "nsa"} <= set(modes)}
    return max(both.items(), key=lambda pair: pair[0]) if both else None


def _title(report: dict) -> str:
    far = _longest(report["times"], FORWARD)
    if not far:
        return "Native sparse attention, measured here"
    length, modes = far
    ratio = modes["dense"]["seconds"] / modes["nsa"]["seconds"]
    return f"At length {count_text(length)}, native sparse attention has <em>{times_text(ratio)} the speed</em> of dense attention"


def _tiles(report: dict):
    for direction in (FORWARD, GRADIENTS):
        far = _longest(report["times"], direction)
        if far:
            length, modes = far
            fastest = min((m for m in modes if m != "dense"), key=lambda m: modes[m]["seconds"])
            ratio = modes["dense"]["seconds"] / modes[fastest]["seconds"]
            yield (
                times_text(ratio),
                f"the speed of dense attention with {NAMES[fastest]}, the fastest, {TITLES[direction].lower()}, at length "
                f"{count_text(length)}" + ("; what sharing changes stands below" if fastest in SHARING else ""),
            )
    far = _longest(report["memory"], FORWARD)
    if far:
        length, modes = far
        yield (
            bytes_text(modes["nsa"]["beside"]),
            f"beside operands and result is what NSA has in memory, forward, at length {count_text(length)}; dense attention "
            f"has {bytes_text(modes['dense']['beside'])}",
        )


def _line(points: list[dict], key: str, direction: str, note) -> list[Series]:
    found = []
    for mode in MODES:
        own = sorted(
            (p for p in points if (p["method"], p["direction"]) == (mode, direction) and p[key]),
            key=lambda p: p["length"],
        )
        tops = [p["median"] for p in own] if key == "seconds" else []
        found.append(
            Series(
                NAMES[mode], [(p["length"], p[key]) for p in own], COLOURS[mode], False, [note(p) for p in own], tops
            )
        )
    return found


def _costs(report: dict, direction: str) -> str:
    """Time and memory against length."""
    times, memory = report["times"], report["memory"]
    title = TITLES[direction]
    time_chart = charts.lines(
        f"{title}: seconds against length",
        _line(times, "seconds", direction, lambda p: f"least of {p['rounds']}, median {seconds_text(p['median'])}"),
        "length",
        seconds_text,
    )
    memory_chart = charts.lines(
        f"{title}: bytes beside operands and results against length",
        _line(
            memory,
            "beside",
            direction,
            lambda p: f"operands {bytes_text(p['inputs'])}, results {bytes_text(p['results'])}",
        ),
        "length",
        bytes_text,
        base=2,
    )
    gates = " NSA's gradients are of the gates, too." if direction == GRADIENTS else ""
    own = [p for p in times if p["direction"] == direction]
    return section(
        title,
        spread_text(own),
        grid(
            2,
            card(
                "Time",
                "Least of several rounds, the modes in turn; a whisker reaches to the median." + gates,
                time_chart,
            ),
            card(
                "Memory",
                "By which a call's resident memory grew at its peak, less the results: kernels' workspaces, the branches' "
                "outputs, copies of torch"
                + (", and what is kept for the gradients." if direction == GRADIENTS else "."),
                memory_chart,
            ),
        ),
        _table(own, "seconds", "Time", seconds_text, "dense"),
        _table([p for p in memory if p["direction"] == direction], "beside", "Memory", bytes_text, "nsa"),
        details("How they grow", _laws(report["laws"][direction])),
    )


def _table(points: list[dict], key: str, name: str, text, beside: str) -> str:
    """The modes' figures, and how many times that of the mode `beside` each is, but for dense attention's."""
    rows = []
    for length in sorted({p["length"] for p in points}):
        own = {p["method"]: p[key] for p in points if p["length"] == length}
        base = own.get(beside)
        rows.append(
            [count_text(length)]
            + [
                NOTHING
                if mode not in own
                else text(own[mode])
                + (
                    f"<small>{times_text(own[mode] / base)} of {NAMES[beside]}</small>"
                    if base and mode not in ("dense", beside)
                    else ""
                )
                for mode in MODES
            ]
        )
    return details(f"{name} in figures", table(["length", *NAMES.values()], rows))


def _laws(fits: list[dict]) -> str:
    rows = [
        [NAMES[f["method"]]]
        + [f"T^{f[key]['exponent']:.2f}" if f[key] else NOTHING for key in ("seconds", "workspace")]
        for f in fits
        if f["seconds"] or f["workspace"]
    ]
    return table(["mode", "time grows as", "memory beside grows as"], rows)


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _changes(report: dict) -> str:
    points = report["changes"]
    drawn = []
    for kind, said in KINDS.items():
        series = [
            Series(
                NAMES[mode],
                [(p["length"], p["change"]) for p in points if (p["kind"], p["method"]) == (kind, mode)],
                COLOURS[mode],
            )
            for mode in SHARING
        ]
        chart = charts.lines(f"What sharing changes, {said}", series, "length", _percent, floor=LEAST_CHANGE)
        drawn.append(card(said[0].upper() + said[1:], "", chart))
    return section(
        "What sharing changes",
        "‖y − y<sub>NSA</sub>‖ / ‖y<sub>NSA</sub>‖ over all rows of the same tensors, anchors included, which share with nobody "
        "and do not change. No tensors of a model: on random normals a row and its neighbour have nothing in common, the worst "
        "case of copying; the second kind is made so that neighbours resemble each other. Values here change along "
        "as queries do. Where the list has room for every block, shared lists change nothing; what is below "
        f"{_percent(LEAST_CHANGE)} is drawn there. A model's own layers are asked with <code>heddle.nsa.sharing_report</code>.",
        grid(2, *drawn),
    )


def _recall(report: dict) -> str:
    rows = [
        [
            count_text(p["length"]), KINDS[p["kind"]], f"{p['similarity']:.2f}", f"{100 * p['overlap']:.1f} %",
            f"{100 * p['own_mass']:.1f} %", f"{100 * p['anchor_mass']:.1f} %",
        ]
        for p in report["recall"]
    ]  # fmt: skip
    if not rows:
        return ""
    first = report["recall"][0]
    return section(
        "How much of dense attention's mass the chosen blocks have",
        f"Means over heads and {first['rows']} rows that are no anchors, with a query stride of {first['stride']}: of "
        "dense attention's probability, what lies on the blocks that a row chose for itself, and on its anchor's. "
        "It describes these tensors, and is no measure of quality.",
        card(
            "heddle.nsa.sharing_report",
            "",
            table(
                ["length", "tensors", "cosine of q and its anchor's", "own blocks in the anchor's list", "mass on the own list", "mass on the anchor's"],
                rows,
                2,
            ),
            True,
        ),
    )  # fmt: skip


def _rounding(report: dict) -> str:
    points = report["rounding"]
    lengths = sorted({p["length"] for p in points})
    found = {(p["method"], p["length"]): p["error"] for p in points}
    rows = [
        [NAMES[mode]] + [error_text(found[mode, s]) if (mode, s) in found else NOTHING for s in lengths]
        for mode in MODES
        if any((mode, s) in found for s in lengths)
    ]
    return section(
        "Rounding errors",
        f"Relative (Frobenius), on random normals. Dense: against float64 on {EXACT_ROWS} rows of all heads. NSA and its ways "
        "of sharing: each against the naive function of the same meaning in float64, on all rows of one key/value head, at "
        "short lengths, since that function is slow; a block that was chosen otherwise for the scores' rounding would count "
        "as error.",
        card("Against float64", "", table(["", *map(count_text, lengths)], rows), True),
    )


def _gpu(report: dict) -> str:
    title, rows = "On GPUs", report["gpu"]
    if not rows:
        return (
            f"<h2>{title}</h2><p class='sub'>Not measured: no result file of a GPU in <code>bench/results</code> has rows of "
            "native sparse attention. <code>make bench-gpu</code> writes them.</p>"
        )
    sections = []
    for gpu in dict.fromkeys(row["gpu"] for row in rows):
        own = [row for row in rows if row["gpu"] == gpu]
        files = ", ".join(
            f"<code>{escape(file)}</code> ({escape(date)})"
            for file, date in dict.fromkeys((row["file"], row["date"][:10]) for row in own)
        )
        older = " † measured on older sources." if any(row["older"] for row in own) else ""
        sections.append(
            section(
                f"{title}: {escape(gpu)}",
                f"Not measured by this page: rows of bench/results: {files}. bfloat16, head size 128. Backward rows are of "
                f"gradients alone, without the forward.{older}",
                grid(2, *_gpu_charts(own)),
                details("Every row", _gpu_table(own)),
            )
        )
    return "".join(sections)


def _gpu_charts(rows: list[dict]) -> list[str]:
    """Time against length: a chart for each form and direction, ways of sharing in it."""
    whole = [row for row in rows if "form" in row and row["unit"] == "ms"]
    drawn = []
    for form, direction in dict.fromkeys((row["form"], row["direction"]) for row in whole):
        own = [row for row in whole if (row["form"], row["direction"]) == (form, direction)]
        points: dict[tuple[str, str], list] = {}
        for row in sorted(own, key=lambda row: row["length"]):
            for contender, ms in row["figures"].items():
                if row["preset"] and contender == "heddle":
                    kind = (f"Heddle {row['preset']}", COLOURS[row["preset"]])
                elif row["preset"] or contender not in CONTENDERS:  # the plain row has it
                    continue
                else:
                    kind = CONTENDERS[contender]
                points.setdefault(kind, []).append((row["length"], ms / 1e3))
        series = [Series(name, found, colour) for (name, colour), found in points.items()]
        chart = charts.lines(f"{form}, {direction}: time against length", series, "length", seconds_text)
        drawn.append(card(f"{direction.capitalize()}, {escape(form)}", "", chart))
    return drawn


def _gpu_table(rows: list[dict]) -> str:
    listed = []
    for row in rows:
        own = row["figures"].get("heddle")
        others = [
            f"{escape(CONTENDERS.get(name, (name, ''))[0])} {_figure(value, row['unit'])}"
            for name, value in row["figures"].items()
            if name != "heddle"
        ]
        others += [
            f"{escape(CONTENDERS.get(name, (name, ''))[0])}: {escape(why)}" for name, why in row["absent"].items()
        ]
        listed.append(
            [
                escape(row["name"]) + (" †" if row["older"] else ""),
                _figure(own, row["unit"]) if own is not None else NOTHING,
                "<br>".join(others) or NOTHING,
            ]
        )
    return table(["row", "Heddle", "others"], listed, 3, text=True)


def _figure(value: float, unit: str) -> str:
    return bytes_text(value * 2**20) if unit == "MiB" else seconds_text(value / 1e3)


def _conditions(report: dict) -> str:
    how = next((p["resident_how"] for p in report["memory"]), "VmHWM")
    stages = [[escape(s["name"]), f"{s['seconds']:.0f} s", f"{s['allowed']:.0f} s"] for s in report["stages"]]
    stages.append(["measuring, in all", f"{report['seconds']:.0f} s", f"{report['settings']['budget_seconds']:.0f} s"])
    if report["build_seconds"] is not None:
        stages.append(["building, before it", f"{report['build_seconds']:.0f} s", "not counted"])
    return (
        section(
            "Conditions",
            "",
            card(
                "How it was measured",
                "",
                '<ul class="plain"><li>Memory: every point is one call in a process of its own, after a call of two rows; '
                f"peaks are from {escape(how)}, less what was resident before the call, and less the result or, with "
                "gradients, the result and all gradients. The gradient that comes in is an operand. Large "
                "allocations do not use pages again that an earlier one "
                "left.</li><li>Times are of the least round: on a machine that others use, differences of a tenth mean "
                "little.</li><li>Gates are sigmoids of normals.</li></ul>",
                True,
            ),
            card("Where the time went", "", table(["stage", "took", "was allowed"], stages), True),
            left_out_card(report["left_out"]),
        )
        + f"<footer>All figures are in <code>sparse.json</code> beside this page. <a href='{html.INDEX}'>Dense attention</a> "
        f"and <a href='{html.LOWBIT}'>low-bit weights</a> have pages of their own, which <code>make demo</code> writes.</footer>"
    )
