"""The low-bit page beside its sections on formats and on a GPU: its head, one linear layer, reported figures."""

from __future__ import annotations

from .formats_section import base_of, label, runs_of, saved, speed
from .parts import figure
from .reported import KEPT, NEAR, claims
from .units import times_text

GOOD = 0.99  # mean cosine of embeddings that the title asks for


def page(report: dict) -> dict:
    base, runs, layers = base_of(report), runs_of(report), report["lowbit"]["study"].get("layer", [])
    best, figures = None, []
    if base:
        small = min((r for r in runs if r["cosine"]["cosine_mean"] >= GOOD), key=lambda r: r["linear_bytes"])
        if small is not base:
            best = {
                "label": label(small),
                "saved": f"{100 * saved(small, base):.0f} %",
                "speed": speed(small, base),
                "cosine": f"{small['cosine']['cosine_mean']:.4f}",
            }
            near = small["retrieval"]
            figures.append(
                (
                    f"{100 * near['overlap_mean']:.1f} %",
                    f"of each piece's {near['neighbours']} nearest pieces stay the same with {label(small)}",
                )
            )
        figures += [_bytes_tile(runs, base), _speed_tile(runs, base)]
    searched = next((e for e in layers if (e["format"], e["rule"]) == ("nvfp4", "mse")), None)
    if searched:
        figures.append((f"{searched['kept']:.1f} %", "of one layer's output is kept by nvfp4 with searched scales"))
    rows = claims(report["lowbit"]["study"])
    return {
        "best": best,
        "tiles_of_page": figures,
        "layers": [e | {"near": e["study"] and abs(e["kept"] - e["study"]) <= NEAR} for e in layers],
        "kept": KEPT,
        "near": NEAR,
        "reported": [] if all(row["verdict"] == "not measured" for row in rows) else rows,
        "resident_how": runs[0]["resident_how"] if runs else "VmHWM",
    }


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
    return figure(f"{fast['pieces_per_second']:.1f}", "pieces/s"), said
