"""The page on low-bit weights: the encoder's policies, one layer, and an early study's claims."""

from __future__ import annotations

from html import escape

from . import charts
from .charts import Series, bytes_text, count_text, seconds_text
from .sections import NOTHING, card, table, times_text

GOOD = 0.99  # mean cosine of embeddings that the title asks for


def _policies(report: dict) -> list[dict]:
    return report["lowbit"]["policies"]


def _base(report: dict) -> dict | None:
    return next((r for r in _policies(report) if r["name"] == "float32"), None)


def _label(run: dict) -> str:
    return f"formats chosen for {100 * run['allowed']:g} % error" if "allowed" in run else run["name"]


def _saved(run: dict, base: dict) -> float:
    return 1 - run["linear_bytes"] / base["linear_bytes"]


def _rules(run: dict) -> str:
    """What a policy says; of a long one how many of its patterns have each format."""
    rules = run["rules"]
    if not rules:
        return "as in the file"
    if len(rules) <= 3:
        return "<br>".join(f"<code>{escape(pattern)}</code> {escape(format)}" for pattern, format in rules.items())
    formats = list(rules.values())
    return ", ".join(f"{formats.count(format)} × {escape(format)}" for format in dict.fromkeys(formats))


def header(report: dict) -> str:
    base, runs, layers = _base(report), _policies(report), report["lowbit"]["study"].get("layer", [])
    title = "Low-bit weights, measured here"
    tiles = []
    if base:
        good = [r for r in runs if r["cosine"]["cosine_mean"] >= GOOD]
        small = min(good, key=lambda r: r["linear_bytes"])
        if small is not base:
            title = (
                f"With {escape(_label(small))}, the encoder's linear layers take <em>{100 * _saved(small, base):.0f} % fewer bytes</em> "
                f"and embeddings keep a mean cosine of <em>{small['cosine']['cosine_mean']:.4f}</em>"
            )
            tiles.append((f"{100 * small['retrieval']['overlap_mean']:.1f} %", f"of each piece's nearest {small['retrieval']['neighbours']} stay the same then"))
        tiny = min(runs, key=lambda r: r["linear_bytes"])
        tiles.append((times_text(base["linear_bytes"] / tiny["linear_bytes"]), f"fewer bytes of linear layers with {_label(tiny)}, at a mean cosine of {tiny['cosine']['cosine_mean']:.3f}"))
        fast = max(runs, key=lambda r: r["pieces_per_second"])
        tiles.append((f"{fast['pieces_per_second']:.1f} <small>pieces/s</small>", f"with {_label(fast)}; float32 {base['pieces_per_second']:.1f}"))
    best = next((e for e in layers if (e["format"], e["rule"]) == ("nvfp4", "mse")), None)
    if best:
        tiles.append((f"{best['kept']:.1f} %", "of a layer's output kept by nvfp4 with searched scales, where an early study kept 88.7 %"))
    m = report["machine"]
    drawn = "".join(f'<div class="tile"><div class="figure">{figure}</div><div class="what">{escape(what)}</div></div>' for figure, what in tiles)
    return (
        f"<header><h1>{title}</h1>"
        f'<p class="lede">all-MiniLM-L6-v2 on real text and one linear layer, on {escape(m["processor"])}, {m["threads"]} threads, {escape(m["cpu_target"])} kernels.</p>'
        f'<div class="tiles">{drawn}</div></header>'
    )


def policies(report: dict) -> str:
    runs, base = _policies(report), _base(report)
    title = "<h2>The encoder, format by format</h2>"
    if not base:
        return title + '<p class="empty">No policy was measured here.</p>'
    sub = (
        f"<p class='sub'>{base['pieces']} pieces, {count_text(base['tokens'])} tokens. Linear layers are quantised on load and multiplied as they are packed; embeddings and norms stay. "
        "Activations are bfloat16, and float32 in the first and the chosen policy. What is compared is each piece's embedding with that of the first.</p>"
    )
    floats = ("float32", "bfloat16")
    colour = {r["name"]: "c-baseline" if r["name"] in floats else "c-flash" for r in runs}
    mixed = {r["name"]: len(r["formats"]) > 1 for r in runs}
    speed = charts.bars("Speed", [(_label(r), r["pieces_per_second"], colour[r["name"]], mixed[r["name"]]) for r in runs], lambda v: f"{v:.1f} pieces/s")
    peak = charts.bars(
        "Peak memory", [(_label(r), r["peak"], colour[r["name"]], mixed[r["name"]]) for r in runs], bytes_text,
        [f"linear layers {bytes_text(r['linear_bytes'])} of {bytes_text(r['weight_bytes'])} weights" for r in runs],
    )
    low = [r for r in runs if r["error"] > 0]
    points = [Series(r["name"], [(r["linear_bytes"], r["error"])], colour[r["name"]], mixed[r["name"]], notes=[f"mean cosine {r['cosine']['cosine_mean']:.5f}"]) for r in low]
    trade = charts.lines("Error against bytes", points, "bytes of linear layers", lambda v: f"{100 * v:.3g} %", x_text=bytes_text) if len(low) > 1 else ""
    cost = [
        [
            escape(_label(r)), bytes_text(r["linear_bytes"]), f"{100 * _saved(r, base):.0f} %", bytes_text(r["weight_bytes"]), bytes_text(r["held"]),
            bytes_text(r["loading"]), bytes_text(r["peak"]), f"{r['pieces_per_second']:.1f}", times_text(r["pieces_per_second"] / base["pieces_per_second"]),
        ]
        for r in runs
    ]
    cost_head = ["", "linear layers", "saved", "all weights", "resident loaded", "peak loading", "peak encoding", "pieces/s", "over float32"]
    near = [
        [
            escape(_label(r)), f"{r['cosine']['cosine_mean']:.5f}", f"{r['cosine']['cosine_least']:.5f}", f"{100 * r['error']:.2f} %",
            f"{100 * r['retrieval']['overlap_mean']:.1f} %", f"{100 * r['retrieval']['overlap_least']:.0f} %", f"{100 * r['retrieval']['nearest_same']:.1f} %",
            f"{r['retrieval']['spearman_mean']:.4f}", f"{r['retrieval']['spearman_least']:.4f}",
        ]
        for r in runs
    ]
    most = base["retrieval"]["neighbours"]
    near_head = ["", "mean cosine", "worst", "error", f"top {most}", "worst", "nearest", "Spearman", "worst"]
    rules = [[escape(r["name"]), _rules(r), r["dtype"]] for r in runs]
    chosen = next((r for r in runs if "allowed" in r), None)
    said = (
        f" The last was chosen by measured sensitivity for an error of {100 * chosen['allowed']:g} %: {100 * chosen['sample_error']:.2f} % on {chosen['sample']} sample pieces, "
        f"{100 * chosen['error']:.2f} % on all of these; choosing took {chosen['choosing_seconds']:.0f} s."
        if chosen
        else ""
    )
    return (
        title + sub + '<div class="grid2">'
        + card("Speed", "Least of up to three passes over the text.", speed)
        + card("Peak memory while encoding", "Resident growth of a fresh process: weights, workspace and results.", peak)
        + "</div>"
        + card("What they cost", "Linear layers as packed, with biases. Resident growth of a fresh process.", table(cost_head, cost), True)
        + card(
            "What they keep",
            f"Each piece in turn is a query over the others: top {most} is how much of its nearest {most} stays the same, nearest how often the first does, Spearman the correlation of the whole ranking." + said,
            table(near_head, near),
            True,
        )
        + '<div class="grid2">'
        + (card("What bytes buy", "The error is √(Σ|e − f|² / Σ|f|²) over embeddings. Both axes are logarithmic.", trade) if trade else "")
        + card("What each policy says", "The first pattern that matches a layer's name decides.", table(["", "rules", "activations"], rules, 3))
        + "</div>"
    )


def gpu(report: dict) -> str:
    """The same formats on a GPU: measured here, or the repository's figures, and then the page says so."""
    found = report["lowbit"].get("gpu")
    title = "<h2>The same on a GPU</h2>"
    if not found or not found["rows"]:
        why = f": {escape(found['why'])}, and the repository has no {escape(found['source'])}" if found and not found["here"] else ""
        return title + f'<p class="empty">Nothing was measured on a GPU{why}.</p>'
    runs, about = found["rows"], found["conditions"]
    base = next(r for r in runs if not r["rules"])
    where = "Measured here" if found["here"] else f"<b>Not measured here</b>: {escape(found['why'])}. Figures of <code>{escape(found['source'])}</code>, measured {escape(about['date'][:10])}"
    sub = (
        f"<p class='sub'>{where}, on an {escape(about['gpu'])}. {base['pieces']} pieces, {count_text(base['tokens'])} tokens; activations in 16 bits. "
        "What is compared is each piece's embedding with the CPU's in float32.</p>"
    )
    small, large = base["tokens_per_second"]
    colour = {r["name"]: "c-baseline" if len(r["formats"]) == 1 and not r["rules"] else "c-flash" for r in runs}
    mixed = {r["name"]: len(r["formats"]) > 1 for r in runs}
    speed = charts.bars("Speed on the GPU", [(r["name"], r["tokens_per_second"][large] / 1e6, colour[r["name"]], mixed[r["name"]]) for r in runs], lambda v: f"{v:.2f} M tokens/s")
    rows = [
        [
            escape(r["name"]), r["dtype"], bytes_text(r["linear_bytes"]), bytes_text(r["weight_bytes"]), bytes_text(r["peak"]),
            *(f"{r['tokens_per_second'][tokens] / 1e6:.2f} M" for tokens in (small, large)), seconds_text(r["alone_seconds"]),
            f"{r['cosine']['cosine_mean']:.5f}", f"{r['cosine']['cosine_least']:.5f}", f"{100 * r['error']:.2f} %",
            f"{100 * r['retrieval']['overlap_mean']:.1f} %", f"{r['retrieval']['spearman_mean']:.4f}",
        ]
        for r in runs
    ]
    head = ["", "activations", "linear layers", "all weights", "peak", f"tokens/s by {count_text(int(small))}", f"by {count_text(int(large))}", "a piece", "mean cosine", "worst", "error", f"top {base['retrieval']['neighbours']}", "Spearman"]
    return title + sub + card("Speed", f"Calls of at most {count_text(int(large))} tokens.", speed) + card("What they cost and keep there", escape(about["method"]), table(head, rows, 2), True)


def layer(report: dict) -> str:
    found = report["lowbit"]["study"].get("layer")
    title = "<h2>One linear layer</h2>"
    if not found:
        return title + '<p class="empty">Nothing was measured here.</p>'
    rows = [
        [
            f"<code>{e['format']}</code> {e['rule']}", f"{e['bits']:.3f}", f"{e['kept']:.2f} %", f"{e['range']:.2f}",
            f"{e['study']:.2f} %, {_within(e['kept'], e['study'])}" if e["study"] else NOTHING,
        ]
        for e in found
    ]
    return title + card(
        "How much of gelu(x Wᵀ) is kept",
        "1 − mean |Δy| / mean |y|: 64 normal rows of 768, weights uniform in ±1/√768 as torch.nn.Linear begins, 3072 outputs, products in float32. Mean of four draws and their range. "
        "Uniform weights flatter formats with equal steps.",
        table(["format and rule", "bits per weight", "kept", "range", "the study"], rows),
        True,
    )


def _within(kept: float, claimed: float) -> str:
    near = abs(kept - claimed) <= 0.1
    return f'<span class="{"yes" if near else "no"}">{"reproduced" if near else "not reproduced"}</span>'


def claims(report: dict) -> list[dict]:
    """Rows {claim, measured, verdict} of the study's claims; verdicts as claims.check has them."""
    found = report["lowbit"]["study"]
    kept = {(e["format"], e["rule"]): e["kept"] for e in found.get("layer", [])}
    speed, block, attention = found.get("speed"), found.get("block"), found.get("attention")
    rows = []

    def row(claim, measured, holds):
        verdict = "not measured" if measured is None else "holds" if holds else "does not hold here"
        rows.append({"claim": claim, "measured": measured or "not measured", "verdict": verdict})

    one = kept.get(("e2m1_row", "plain"))
    row("E2M1 with one scale a row keeps 88.69 % of a layer's output", one and f"{one:.2f} %; nvfp4 with searched scales {kept['nvfp4', 'mse']:.2f} %, int8_row {kept['int8_row', 'plain']:.2f} %", one and abs(one - 88.69) <= 0.1)  # fmt: skip
    faster = speed and speed["torch"] / speed["fp4"]
    row(
        "An FP4 layer is 2.57× as fast as torch's in float32",
        speed and f"{times_text(faster)}: {seconds_text(speed['fp4'])} against {seconds_text(speed['torch'])} for {speed['rows']} rows, both warm, in float32. So many rows are bound by arithmetic, which no format of weights saves",
        speed and faster >= 0.8 * 2.57,
    )
    saved = speed and 100 * (1 - speed["packed_bytes"] / speed["float_bytes"])
    row(
        "FP4 weights take 87.5 % less memory",
        speed and f"{saved:.1f} % less than float32 with scales and packing counted; {100 * (1 - 2 * speed['packed_bytes'] / speed['float_bytes']):.1f} % less than 16 bits",
        speed and abs(saved - 87.5) <= 1,
    )
    gain = block and {key: block["torch"]["seconds"] / block[key]["seconds"] for key in ("float32", "e2m1_row", "nvfp4")}
    row(
        "A Transformer block with FP4 feed-forward is 1.36× as fast and keeps 94.5 %",
        block
        and f"{times_text(gain['e2m1_row'])} and {block['e2m1_row']['kept']:.2f} % of torch.nn.TransformerEncoderLayer in eval mode (norm first, float32, {block['batch']} × {block['length']} tokens, hidden {block['hidden']}; e2m1_row); "
        f"nvfp4 {times_text(gain['nvfp4'])} and {block['nvfp4']['kept']:.2f} %, heddle.nn.TransformerBlock in float32 {times_text(gain['float32'])}",
        block and gain["e2m1_row"] >= 0.9 * 1.36 and block["e2m1_row"]["kept"] >= 94.4,
    )
    less = attention and 100 * (1 - attention["flash"] / attention["baseline"])
    row(
        "Tiled attention takes 35.5 % less memory",
        attention and f"{less:.1f} % less: {bytes_text(attention['flash'])} instead of {bytes_text(attention['baseline'])} with the whole score matrix (batch {attention['batch']}, {attention['heads']} heads, length {attention['length']}, head size {attention['head_size']}, q, k and v included)",
        attention and less >= 35.5,
    )
    slower = speed and speed["svd"] / speed["product"]
    row(
        "Taking W apart by singular values at each call is far slower than the product",
        speed and f"{times_text(slower)} the time: {seconds_text(speed['svd'])} against {seconds_text(speed['product'])} for {speed['few']} rows, rank 192 of 768",
        speed and slower > 10,
    )
    return rows


def study(report: dict) -> str:
    look = {"holds": "yes", "does not hold here": "no", "not measured": "none"}
    rows = "".join(
        f'<tr><td class="l text">{escape(c["claim"])}</td><td class="l text">{escape(c["measured"])}</td><td class="l"><span class="{look[c["verdict"]]}">{c["verdict"]}</span></td></tr>'
        for c in claims(report)
    )
    body = f'<div class="scroll"><table><thead><tr><th class="l">claim</th><th class="l">measured here</th><th class="l">verdict</th></tr></thead><tbody>{rows}</tbody></table></div>'
    return "<h2>An early study of FP4 layers, held against measurements</h2>" + card(
        "Its claims",
        "They come from a GPU, and the study's program compared a block in training, with dropout, to one without. Here both sides run the same mode on this processor.",
        body,
        True,
    )


def conditions(report: dict) -> str:
    how = _policies(report)[0]["resident_how"] if _policies(report) else "VmHWM"
    left = [item for item in report["left_out"] if "low-bit" in item["stage"] or "FP4" in item["stage"]]
    missing = "".join(f"<li>{escape(i['what'])}: {escape(i['why'])}</li>" for i in left) or "<li>Nothing was left out.</li>"
    return (
        "<h2>Conditions</h2><div class='grid2'>"
        + card(
            "How it was measured",
            "",
            '<ul class="plain"><li>Every policy runs in a process of its own, which loads the model and encodes the text. '
            "Resident loaded is what loading left, peak loading its most, which includes the mapped file and float32 copies of one matrix and of the embeddings.</li>"
            f"<li>Peaks are from {escape(how)}.</li>"
            "<li>Times are the least of several passes, policies one after another: on a machine that others use, differences of a tenth mean little.</li></ul>",
        )
        + card("Left out", "", f'<ul class="plain">{missing}</ul>')
        + "</div><footer>All figures are in <code>report.json</code> beside this page.</footer>"
    )
