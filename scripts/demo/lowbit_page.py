"""The low-bit page: its head, one linear layer, reported figures and conditions."""

from __future__ import annotations

from html import escape

from .formats_section import base_of, label, runs_of, saved, speed
from .parts import NOTHING, card, claims_table, left_out_card, section, table, tiles, words
from .reported import KEPT, NEAR, claims
from .units import times_text

GOOD = 0.99  # mean cosine of embeddings that the title asks for
WORDS = {
    "encoder": "all-MiniLM-L6-v2 on real text: six layers that make one vector, the embedding, of each piece.",
    "piece": "One or more paragraphs of the text.",
    "format": "How the weights of linear layers are stored: nvfp4, mxfp4, nf4, fp4 and int4 in about 4 bits each, int8 "
    "and fp8 in 8, as <code>docs/formats.md</code> describes them; <code>:mse</code> marks scales that were searched "
    "for the least squared error. float32 is the encoder as it comes.",
    "cosine": "Of a piece's embedding and the one in float32: 1 is the same direction.",
}


def header(report: dict, said: str) -> str:
    """`said`: HTML on when this was measured and what was left out."""
    base, runs, layers = base_of(report), runs_of(report), report["lowbit"]["study"].get("layer", [])
    title, figures = "Low-bit weights, measured here", []
    if base:
        small = min((r for r in runs if r["cosine"]["cosine_mean"] >= GOOD), key=lambda r: r["linear_bytes"])
        if small is not base:
            title = (
                f"With {escape(label(small))}, the encoder's linear layers take <em>{100 * saved(small, base):.0f} % "
                f"fewer bytes</em> at <em>{speed(small, base)} the speed of float32</em>, and embeddings keep a mean "
                f"cosine of <em>{small['cosine']['cosine_mean']:.4f}</em>"
            )
            near = small["retrieval"]
            figures.append(
                (
                    f"{100 * near['overlap_mean']:.1f} %",
                    f"of each piece's {near['neighbours']} nearest pieces stay the same with {label(small)}",
                )
            )
        figures += [_bytes_tile(runs, base), _speed_tile(runs, base)]
    best = next((e for e in layers if (e["format"], e["rule"]) == ("nvfp4", "mse")), None)
    if best:
        figures.append((f"{best['kept']:.1f} %", "of one layer's output is kept by nvfp4 with searched scales"))
    return f"<header><h1>{title}</h1>{said}{words(WORDS)}{tiles(figures)}</header>"


def _bytes_tile(runs: list[dict], base: dict) -> tuple[str, str]:
    tiny = min(runs, key=lambda r: r["linear_bytes"])
    return (
        times_text(base["linear_bytes"] / tiny["linear_bytes"]),
        f"fewer bytes of linear layers with {label(tiny)}, the smallest, at a mean cosine of "
        f"{tiny['cosine']['cosine_mean']:.3f} and {speed(tiny, base)} the speed of float32",
    )


def _speed_tile(runs: list[dict], base: dict) -> tuple[str, str]:
    fast = max(runs, key=lambda r: r["pieces_per_second"])
    low = [r for r in runs if r["rules"]]
    said = f"with {label(fast)}, the fastest here"
    said += f"; float32 reaches {base['pieces_per_second']:.1f}" if fast is not base else ""
    if low and fast not in low:
        best = max(low, key=lambda r: r["pieces_per_second"])
        said += f"; the fastest with low-bit weights is {label(best)} with {best['pieces_per_second']:.1f}"
    return f"{fast['pieces_per_second']:.1f} <small>pieces/s</small>", said


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
            "1 − mean |Δy| / mean |y|: 64 normal rows of 768, weights uniform in ±1/√768 as torch.nn.Linear begins, "
            "3072 outputs, products in float32. Mean of four draws and their range. Uniform weights flatter formats "
            f"with equal steps. What was reported for such a layer ({KEPT} %) counts as reproduced within {NEAR} %.",
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
        "Figures that were reported for FP4 layers and tiled attention on a GPU, repeated here with the same shapes: "
        "bytes and accuracy carry over, speed need not. The original compared a block in training, with dropout, to "
        "one without; here both sides run the same mode. <code>FP4Codec</code> and <code>FusedFP4Linear</code> "
        "(docs/nn.md) keep that study's names, so that its programs run.",
        card("Reported figures, repeated", "", claims_table(rows), True),
    )


def conditions(report: dict, left_out: list[dict]) -> str:
    """`left_out`: what of it is this page's."""
    how = runs_of(report)[0]["resident_how"] if runs_of(report) else "VmHWM"
    return (
        section(
            "Conditions",
            "",
            card(
                "How it was measured",
                "",
                '<ul class="plain"><li>Every format runs in a process of its own, which loads the model and encodes '
                "the text. Resident loaded is "
                "what loading left, peak loading its most, which includes the mapped file and float32 copies of one "
                f"matrix and of the embeddings.</li><li>Peaks are from {escape(how)}.</li><li>Times are the least of "
                "several passes, one format after another: on a machine that others use, differences of a tenth mean "
                "little.</li></ul>",
                True,
            ),
            left_out_card(left_out),
        )
        + "<footer>All figures are in <code>report.json</code> beside this page.</footer>"
    )
