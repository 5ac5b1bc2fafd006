"""The section of the low-bit page on a GPU: measured here, or the repository's figures."""

from __future__ import annotations

from . import charts
from .units import bytes_text, seconds_text


def gpu(report: dict) -> dict | None:
    found = report["lowbit"].get("gpu")
    if not found or (not found["rows"] and found["here"]):
        return None
    said = {"here": found["here"], "why": found.get("why"), "source": found.get("source"), "runs": found["rows"]}
    if not found["rows"]:
        return said
    runs = found["rows"]
    small, large = runs[0]["tokens_per_second"]  # the most tokens of a call, as keys
    return said | {
        "conditions": found["conditions"],
        "base": next(r for r in runs if not r["rules"]),
        "slower": _slower(runs, large),
        "small": small,
        "large": large,
        "speed": _speed(runs, large),
        "figures": [
            [
                r["name"], r["dtype"], bytes_text(r["linear_bytes"]), bytes_text(r["weight_bytes"]),
                bytes_text(r["peak"]), *(f"{r['tokens_per_second'][tokens] / 1e6:.2f} M" for tokens in (small, large)),
                seconds_text(r["alone_seconds"]),
                f"{r['cosine']['cosine_mean']:.5f}", f"{r['cosine']['cosine_least']:.5f}", f"{100 * r['error']:.2f} %",
                f"{100 * r['retrieval']['overlap_mean']:.1f} %", f"{r['retrieval']['spearman_mean']:.4f}",
            ]
            for r in runs
        ],
    }  # fmt: skip


def _slower(runs: list[dict], large: str) -> dict | None:
    """By how much low-bit formats are slower than 16 bits, and what they save; None where they are not."""
    plain, low = [r for r in runs if not r["rules"]], [r for r in runs if r["rules"]]
    best, fast = (max(r["tokens_per_second"][large] for r in group) if group else 0 for group in (plain, low))
    if not low or fast > best:
        return None
    saved = sorted(100 * (1 - r["linear_bytes"] / plain[0]["linear_bytes"]) for r in low)
    return {"saved": saved, "ratio": fast / best}


def _speed(runs: list[dict], large: str) -> str:
    rows = [
        (
            r["name"],
            r["tokens_per_second"][large] / 1e6,
            "c-baseline" if not r["rules"] else "c-flash",
            len(r["formats"]) > 1,
        )
        for r in runs
    ]
    return charts.bars("Speed on the GPU", rows, lambda v: f"{v:.2f} M tokens/s")
