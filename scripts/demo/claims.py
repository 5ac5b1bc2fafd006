"""What is often said about fast attention, beside what was measured here."""

from __future__ import annotations

from .laws import LEAST_LENGTHS
from .recommend import TIE
from .units import times_text

CLAIMED_FASTER = {128: 2.0, 512: 5.0, 2048: 15.0, 4096: 40.0}
SLACK = 0.8  # of a claimed factor is enough: such factors are quoted as round numbers


def _ratio(rows: list[dict], length: int, key: str) -> float | None:
    return next((r[key] for r in rows if r["length"] == length and r["dtype"] == "float32"), None)


def _growth(points: list[dict], axis: str) -> dict | None:
    own = sorted((p[axis], p["seconds"]) for p in points if (p["method"], p["dtype"]) == ("baseline", "float32"))
    if len(own) < LEAST_LENGTHS:
        return None
    (first, short), (last, long) = own[0], own[-1]
    return {"times": last / first, "slower": long / short}


def check(ratios: list[dict], score_buffer: dict, fits: list[dict], axes: dict, lower: dict) -> list[dict]:
    """Rows as row() makes them.

    `ratios`: laws.compare_methods of the one-head length sweep; `axes`: points of the batch, heads and head-size
    sweeps; `lower`: recommend.lower_precision.
    """
    return _faster(ratios) + _buffers(score_buffer) + _growths(fits, axes) + _precision(lower)


def _faster(ratios: list[dict]) -> list[dict]:
    found = {length: _ratio(ratios, length, "faster") for length in CLAIMED_FASTER}
    return [
        row(
            f"At length {length}, flash is about {claimed:.0f}× faster",
            found[length] and f"{times_text(found[length])} (one head, fp32)",
            f"at least {times_text(SLACK * claimed)}, {SLACK:g} of it",
            found[length] and found[length] >= SLACK * claimed,
        )
        for length, claimed in CLAIMED_FASTER.items()
    ]


def _buffers(score_buffer: dict) -> list[dict]:
    at = {r["length"]: r for r in score_buffer["rows"] if r["dtype"] == "float32"}
    rows = []
    for length, mebi in ((512, 1), (2048, 16)):
        r = at.get(length)
        said = r and f"{r['scores'] / 2**20:.3f} MiB, beside {r['scratch'] / 2**20:.2f} MiB of scratch of any length"
        claim = f"At length {length} the score buffer of one head takes {mebi} MiB"
        rows.append(row(claim, said, "within 1 % of it", r and abs(r["scores"] / (mebi * 2**20) - 1) <= 0.01))
    return rows


def _growths(fits: list[dict], axes: dict) -> list[dict]:
    base = next((f["seconds"] for f in fits if (f["method"], f["dtype"]) == ("baseline", "float32")), None)
    rows = [
        row(
            "Twice the length takes four times the time",
            base
            and f"{times_text(2 ** base['exponent'])} (exponent {base['exponent']:.2f}, R² {base['r2']:.4f}, "
            f"{base['points']} lengths)",
            f"{times_text(2**1.8)} to {times_text(2**2.2)}: an exponent of 1.8 to 2.2",
            base and 1.8 <= base["exponent"] <= 2.2,
        )
    ]
    for axis, words in (
        ("batch", "Time grows in proportion to the batch"),
        ("heads", "Time grows in proportion to the heads"),
    ):
        grown = _growth(axes.get(axis, []), axis)
        rows.append(
            row(
                words,
                grown and f"{times_text(grown['slower'])} the time for {grown['times']:.0f} times the {axis}",
                "0.8 to 1.25 of it, from the least to the most",
                grown and 0.8 <= grown["slower"] / grown["times"] <= 1.25,
            )
        )
    return rows


def _precision(lower: dict) -> list[dict]:
    tried = lower["lengths"]
    return [
        row(
            f"A lower precision does not pay at lengths up to {lower['up_to']}",
            tried and "bf16 over fp32: " + ", ".join(f"{times_text(t['faster'])} at {t['length']}" for t in tried),
            f"no more than {times_text(TIE)}, or less accurate than allowed, at one of them",
            tried and not lower["worth_it"],
        )
    ]


def row(claim: str, measured, holds_if: str, holds) -> dict:
    """{claim, measured, holds_if, verdict}: 'holds', 'does not hold here' or, without `measured`, 'not measured'."""
    verdict = "not measured" if not measured else "holds" if holds else "does not hold here"
    return {"claim": claim, "measured": measured or "not measured", "holds_if": holds_if, "verdict": verdict}
