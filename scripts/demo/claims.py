"""What is often said about fast attention, beside what was measured here."""

from __future__ import annotations

CLAIMED_FASTER = {128: 2.0, 512: 5.0, 2048: 15.0, 4096: 40.0}


def _ratio(rows: list[dict], length: int, key: str) -> float | None:
    return next((r[key] for r in rows if r["length"] == length and r["dtype"] == "float32"), None)


def _growth(points: list[dict], axis: str) -> dict | None:
    own = sorted((p[axis], p["seconds"]) for p in points if (p["method"], p["dtype"]) == ("baseline", "float32"))
    if len(own) < 2:
        return None
    (first, short), (last, long) = own[0], own[-1]
    return {"times": last / first, "slower": long / short}


def check(ratios: list[dict], score_buffer: dict, fits: list[dict], axes: dict, lower: dict) -> list[dict]:
    """Rows {claim, measured, verdict}; verdict is 'holds', 'does not hold here' or 'not measured'.

    `ratios`: laws.compare_methods of the one-head length sweep; `axes`: points of the batch, heads and head-size sweeps;
    `lower`: recommend.lower_precision.
    """
    rows = []
    for length, claimed in CLAIMED_FASTER.items():
        faster = _ratio(ratios, length, "faster")
        rows.append(
            _row(
                f"At length {length}, flash is about {claimed:.0f}× faster",
                faster and f"{faster:.2f}× (one head, fp32, against a baseline as well vectorised and threaded)",
                faster and faster >= 0.8 * claimed,
            )
        )
    at = {r["length"]: r for r in score_buffer["rows"] if r["dtype"] == "float32"}
    for length, mebi in ((512, 1), (2048, 16)):
        rows.append(
            _row(
                f"At length {length} the score buffer of one head takes {mebi} MB",
                length in at and f"{at[length]['scores'] / 2**20:.3f} MiB, beside {at[length]['scratch'] / 2**20:.2f} MiB of scratch of any length",
                length in at and abs(at[length]["scores"] / (mebi * 2**20) - 1) <= 0.01,
            )
        )
    base = next((f["seconds"] for f in fits if (f["method"], f["dtype"]) == ("baseline", "float32")), None)
    rows.append(
        _row(
            "Twice the length takes four times the time",
            base and f"×{2 ** base['exponent']:.2f} (exponent {base['exponent']:.2f}, R² {base['r2']:.4f})",
            base and 1.8 <= base["exponent"] <= 2.2,
        )
    )
    for axis, words in (("batch", "Time grows in proportion to the batch"), ("heads", "Time grows in proportion to the heads")):
        grown = _growth(axes.get(axis, []), axis)
        rows.append(
            _row(
                words,
                grown and f"×{grown['slower']:.1f} time for ×{grown['times']:.0f} {axis}",
                grown and 0.8 <= grown["slower"] / grown["times"] <= 1.25,
            )
        )
    tried = lower["lengths"]
    rows.append(
        _row(
            f"A lower precision does not pay at lengths up to {lower['up_to']}",
            tried and "; ".join(f"bf16 is {t['faster']:.2f}× as fast at {t['length']}" for t in tried),
            tried and not lower["worth_it"],
        )
    )
    return rows


def _row(claim: str, measured, holds) -> dict:
    if not measured:
        return {"claim": claim, "measured": "not measured", "verdict": "not measured"}
    return {"claim": claim, "measured": measured, "verdict": "holds" if holds else "does not hold here"}
