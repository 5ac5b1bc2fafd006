"""Which method and dtype to use at each length: the fastest measured here whose error is within what the user allows."""

from __future__ import annotations

TIE = 1.05  # times closer than this are noise: the more accurate one wins
SHORT = 256  # the lengths of the question "is a lower precision worth it for short sequences?"


def recommend(times: list[dict], errors: list[dict], accuracy: float) -> list[dict]:
    """One row a length of `times` (points with length, method, dtype, seconds), in order, if flash was timed there in each of its
    dtypes: what is left of a length that there was no time for is no choice.

    `errors` has, for each length, method and dtype, `total`: the relative error against float64 on the unrounded inputs. A
    candidate without a measured error, or with NaN, is not taken. Rows: length, chosen (method, dtype, seconds, error) or None,
    refused (candidates that are faster but too inaccurate), candidates (sorted by time). ValueError if accuracy <= 0.
    """
    if not accuracy > 0:
        raise ValueError(f"[recommend] accuracy {accuracy}: must be greater than 0")
    error_of = {(e["length"], e["method"], e["dtype"]): e["total"] for e in errors}
    rows = []
    flash = {p["dtype"] for p in times if p["method"] == "flash"}
    for length in sorted({p["length"] for p in times}):
        if flash - {p["dtype"] for p in times if (p["method"], p["length"]) == ("flash", length)}:
            continue
        candidates = sorted(
            (
                {
                    "method": p["method"],
                    "dtype": p["dtype"],
                    "seconds": p["seconds"],
                    "error": error_of.get((length, p["method"], p["dtype"])),
                }
                for p in times
                if p["length"] == length
            ),
            key=lambda c: c["seconds"],
        )
        allowed = [c for c in candidates if c["error"] is not None and c["error"] <= accuracy]
        chosen = None
        if allowed:
            within_noise = [c for c in allowed if c["seconds"] <= TIE * allowed[0]["seconds"]]
            chosen = min(within_noise, key=lambda c: c["error"])
        refused = [c for c in candidates if c not in allowed and (chosen is None or c["seconds"] < chosen["seconds"])]
        rows.append({"length": length, "chosen": chosen, "refused": refused, "candidates": candidates})
    return rows


def lower_precision(rows: list[dict], accuracy: float) -> dict:
    """Is bf16 worth it at lengths up to 256? Answers from the best time of each dtype, whatever the method.

    At a length it `pays` if bf16 is faster by more than the noise (TIE) and within the accuracy. `worth_it` is None when no short
    length has both dtypes; else True if it pays at every such length.
    """
    short = []
    for row in rows:
        best = {}
        for candidate in row["candidates"]:
            best.setdefault(candidate["dtype"], candidate)
        if row["length"] <= SHORT and {"float32", "bfloat16"} <= set(best):
            low = best["bfloat16"]
            faster = best["float32"]["seconds"] / low["seconds"]
            within = low["error"] is not None and low["error"] <= accuracy
            pays = faster > TIE and within
            short.append(
                {
                    "length": row["length"],
                    "faster": faster,
                    "error": low["error"],
                    "within_accuracy": within,
                    "pays": pays,
                }
            )
    return {"lengths": short, "worth_it": all(s["pays"] for s in short) if short else None, "up_to": SHORT}
