"""The page on low-bit weights: the encoder format by format, one layer, and reported figures."""

from __future__ import annotations

from html import escape

from . import charts, encode
from .charts import Series
from .parts import NOTHING, card, claims_table, disturbed, grid, left_out_card, rounds_text, section, table, tiles
from .reported import KEPT, NEAR, claims
from .units import bytes_text, count_text, seconds_text, times_text

GOOD = 0.99  # mean cosine of embeddings that the title asks for
WORDS = (
    "<dl class='words'><dt>encoder</dt><dd>all-MiniLM-L6-v2 on real text: a model of six layers that makes one vector, the embedding, of each "
    "piece of text.</dd><dt>format</dt><dd>How the weights of linear layers are stored: nvfp4, mxfp4, nf4, fp4 and int4 in about 4 bits each, "
    "int8 and fp8 in 8, as <code>docs/formats.md</code> describes them; <code>:mse</code> marks scales that were searched for the least "
    "squared error. float32 is the encoder as it comes.</dd>"
    "<dt>piece</dt><dd>One or more paragraphs of the text.</dd>"
    "<dt>cosine</dt><dd>Of a piece's embedding and the one in float32: 1 is the same direction.</dd></dl>"
)


def _runs(report: dict) -> list[dict]:
    return report["lowbit"]["policies"]


def _base(report: dict) -> dict | None:
    return next((r for r in _runs(report) if r["name"] == "float32"), None)


def _label(run: dict) -> str:
    return f"formats chosen for {100 * run['allowed']:g} % error" if "allowed" in run else run["name"]


def _saved(run: dict, base: dict) -> float:
    return 1 - run["linear_bytes"] / base["linear_bytes"]


def _speed(run: dict, base: dict) -> str:
    return times_text(run["pieces_per_second"] / base["pieces_per_second"])


def _rules(run: dict) -> str:
    """Which layers have which format; of many patterns how many have each."""
    rules = run["rules"]
    if not rules:
        return "as in the file"
    if len(rules) <= 3:
        return "<br>".join(f"<code>{escape(pattern)}</code> {escape(format)}" for pattern, format in rules.items())
    formats = list(rules.values())
    return ", ".join(f"{formats.count(format)} × {escape(format)}" for format in dict.fromkeys(formats))


def header(report: dict, said: str) -> str:
    """`said`: HTML on when this was measured and what was left out."""
    base, runs, layers = _base(report), _runs(report), report["lowbit"]["study"].get("layer", [])
    title, figures = "Low-bit weights, measured here", []
    if base:
        small = min((r for r in runs if r["cosine"]["cosine_mean"] >= GOOD), key=lambda r: r["linear_bytes"])
        if small is not base:
            title = (
                f"With {escape(_label(small))}, the encoder's linear layers take <em>{100 * _saved(small, base):.0f} % fewer bytes</em> at "
                f"<em>{_speed(small, base)} the speed of float32</em>, and embeddings keep a mean cosine of "
                f"<em>{small['cosine']['cosine_mean']:.4f}</em>"
            )
            near = small["retrieval"]
            figures.append((f"{100 * near['overlap_mean']:.1f} %", f"of each piece's {near['neighbours']} nearest pieces stay the same with {_label(small)}"))
        figures += [_bytes_tile(runs, base), _speed_tile(runs, base)]
    best = next((e for e in layers if (e["format"], e["rule"]) == ("nvfp4", "mse")), None)
    if best:
        figures.append((f"{best['kept']:.1f} %", "of one layer's output is kept by nvfp4 with searched scales"))
    return f"<header><h1>{title}</h1>{said}{WORDS}{tiles(figures)}</header>"


def _bytes_tile(runs: list[dict], base: dict) -> tuple[str, str]:
    tiny = min(runs, key=lambda r: r["linear_bytes"])
    return (
        times_text(base["linear_bytes"] / tiny["linear_bytes"]),
        f"fewer bytes of linear layers with {_label(tiny)}, the smallest, at a mean cosine of {tiny['cosine']['cosine_mean']:.3f} and "
        f"{_speed(tiny, base)} the speed of float32",
    )


def _speed_tile(runs: list[dict], base: dict) -> tuple[str, str]:
    fast = max(runs, key=lambda r: r["pieces_per_second"])
    low = [r for r in runs if r["rules"]]
    said = f"with {_label(fast)}, the fastest here"
    said += f"; float32 reaches {base['pieces_per_second']:.1f}" if fast is not base else ""
    if low and fast not in low:
        best = max(low, key=lambda r: r["pieces_per_second"])
        said += f"; the fastest with low-bit weights is {_label(best)} with {best['pieces_per_second']:.1f}"
    return f"{fast['pieces_per_second']:.1f} <small>pieces/s</small>", said


def formats(report: dict) -> str:
    runs, base = _runs(report), _base(report)
    if not base:
        return ""
    chosen = next((r for r in runs if "allowed" in r), None)
    said = (
        f" The last was chosen by measured sensitivity for an error of {100 * chosen['allowed']:g} %: {100 * chosen['sample_error']:.2f} % on "
        f"{chosen['sample']} sample pieces, {100 * chosen['error']:.2f} % on all of these; choosing took {seconds_text(chosen['choosing_seconds'])}."
        if chosen
        else ""
    )
    return section(
        "The encoder, format by format",
        f"all-MiniLM-L6-v2 over {base['pieces']} pieces of real text, {count_text(base['tokens'])} tokens. Linear layers are quantised on load "
        "and multiplied as they are packed; embeddings and norms stay. Activations are bfloat16, and float32 with the float32 weights and the "
        f"chosen formats. What is compared is each piece's embedding with that in float32.{said}",
        disturbed(encode.unequal(runs, ("attention",)), lambda i: _label(runs[i])),
        grid(2, *_bars(runs)),
        _costs(runs, base),
        _near(runs, base),
        grid(2, _trade(runs), _which(runs)),
    )


def _colour(run: dict) -> str:
    return "c-baseline" if run["name"] in ("float32", "bfloat16") else "c-flash"


def _bars(runs: list[dict]) -> tuple[str, str]:
    def drawn(name, key, text, note):
        rows = [(_label(r), r[key], _colour(r), len(r["formats"]) > 1) for r in runs]
        return charts.bars(name, rows, text, [note(r) for r in runs])

    def rounds(run):
        return rounds_text(run["pieces"] / run["median"], run["rounds"], lambda v: f"{v:.1f}")

    def share(run):
        return f"linear layers {bytes_text(run['linear_bytes'])} of {bytes_text(run['weight_bytes'])} weights"

    return (
        card("Speed", "The best of up to three passes over the text.", drawn("Speed", "pieces_per_second", lambda v: f"{v:.1f} pieces/s", rounds)),
        card("Peak memory while encoding", "Resident growth of a fresh process: weights, workspace and results.", drawn("Peak memory", "peak", bytes_text, share)),
    )


def _costs(runs: list[dict], base: dict) -> str:
    head = ["", "linear layers", "saved", "all weights", "resident loaded", "peak loading", "peak encoding", "pieces/s", "over float32"]
    rows = [
        [
            escape(_label(r)), bytes_text(r["linear_bytes"]), f"{100 * _saved(r, base):.0f} %", bytes_text(r["weight_bytes"]),
            bytes_text(r["held"]), bytes_text(r["loading"]), bytes_text(r["peak"]), f"{r['pieces_per_second']:.1f}", _speed(r, base),
        ]
        for r in runs
    ]  # fmt: skip
    return card("What they cost", "Linear layers as packed, with biases. Resident growth of a fresh process.", table(head, rows), True)


def _near(runs: list[dict], base: dict) -> str:
    most = base["retrieval"]["neighbours"]
    head = ["", "mean cosine", "worst", "error", f"top {most}", "worst", "nearest", "Spearman", "worst"]
    rows = [
        [
            escape(_label(r)), f"{r['cosine']['cosine_mean']:.5f}", f"{r['cosine']['cosine_least']:.5f}", f"{100 * r['error']:.2f} %",
            f"{100 * r['retrieval']['overlap_mean']:.1f} %", f"{100 * r['retrieval']['overlap_least']:.1f} %",
            f"{100 * r['retrieval']['nearest_same']:.1f} %", f"{r['retrieval']['spearman_mean']:.4f}", f"{r['retrieval']['spearman_least']:.4f}",
        ]
        for r in runs
    ]  # fmt: skip
    return card(
        "What they keep",
        f"Each piece in turn is a query over the others: top {most} is how much of its nearest {most} stays the same, nearest how often the "
        "first does, Spearman the correlation of the whole ranking. The error is √(Σ|e − f|² / Σ|f|²) over embeddings, f in float32.",
        table(head, rows),
        True,
    )


def _trade(runs: list[dict]) -> str:
    series = [
        Series(r["name"], [(r["linear_bytes"], r["error"])], _colour(r), len(r["formats"]) > 1, [f"mean cosine {r['cosine']['cosine_mean']:.5f}"])
        for r in runs
        if r["error"] > 0
    ]
    if len(series) < 2:
        return ""
    chart = charts.dots("Error against bytes", series, "bytes of linear layers", lambda v: f"{100 * v:.3g} %", bytes_text)
    return card("What bytes buy", "The error of the embeddings against the bytes of linear layers. Both axes are logarithmic.", chart)


def _which(runs: list[dict]) -> str:
    rows = [[escape(r["name"]), _rules(r), r["dtype"]] for r in runs]
    return card("Which layers have which format", "The first pattern that matches a layer's name decides.", table(["", "layers", "activations"], rows, 3))


def layer(report: dict) -> str:
    rows = [
        [
            f"<code>{e['format']}</code> {e['rule']}", f"{e['bits']:.3f}", f"{e['kept']:.2f} %", f"{e['range']:.2f} %",
            f"{e['study']:.2f} %, {_within(e['kept'], e['study'])}" if e["study"] else NOTHING,
        ]
        for e in report["lowbit"]["study"].get("layer", [])
    ]  # fmt: skip
    return section(
        "One linear layer",
        "",
        card(
            "How much of gelu(x Wᵀ) is kept",
            "1 − mean |Δy| / mean |y|: 64 normal rows of 768, weights uniform in ±1/√768 as torch.nn.Linear begins, 3072 outputs, products in "
            "float32. Mean of four draws and their range. Uniform weights flatter formats with equal steps. "
            f"What was reported for such a layer ({KEPT} %) counts as reproduced within {NEAR} %.",
            table(["format and rule", "bits per weight", "kept", "range", "reported"], rows),
            True,
        ),
    )


def _within(kept: float, claimed: float) -> str:
    near = abs(kept - claimed) <= NEAR
    return f'<span class="{"yes" if near else "no"}">{"reproduced" if near else "not reproduced"}</span>'


def reported(report: dict) -> str:
    rows = claims(report["lowbit"]["study"])
    if all(row["verdict"] == "not measured" for row in rows):
        return ""
    return section(
        "What to expect of 4-bit layers on this processor",
        "Figures that were reported for FP4 layers and tiled attention on a GPU, repeated here with the same shapes: bytes and accuracy "
        "carry over, speed need not. The original compared a block in training, with dropout, to one without; here both sides run the same "
        "mode. <code>FP4Codec</code> and <code>FusedFP4Linear</code> (docs/nn.md) keep that study's names, so that its programs run.",
        card("Reported figures, repeated", "", claims_table(rows), True),
    )


def conditions(report: dict, left_out: list[dict]) -> str:
    """`left_out`: what of it is this page's."""
    how = _runs(report)[0]["resident_how"] if _runs(report) else "VmHWM"
    return (
        section(
            "Conditions",
            "",
            card(
                "How it was measured",
                "",
                '<ul class="plain"><li>Every format runs in a process of its own, which loads the model and encodes the text. Resident loaded is '
                "what loading left, peak loading its most, which includes the mapped file and float32 copies of one matrix and of the "
                f"embeddings.</li><li>Peaks are from {escape(how)}.</li>"
                "<li>Times are the least of several passes, one format after another: on a machine that others use, differences of a tenth "
                "mean little.</li></ul>",
                True,
            ),
            left_out_card(left_out),
        )
        + "<footer>All figures are in <code>report.json</code> beside this page.</footer>"
    )
