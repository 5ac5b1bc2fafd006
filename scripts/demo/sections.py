"""Sections of the first page: what to use, the longest sequence, and the conditions.

Each takes the whole report and returns what its template shows, or None where nothing was measured.
"""

from __future__ import annotations

from . import sweep
from .parts import kind_text
from .recommend import TIE
from .units import bytes_text, count_text, error_text, seconds_text, times_text


def recommendation(report: dict) -> dict | None:
    rows = report["recommendation"]["rows"]
    if not rows:
        return None
    torch = {
        p["length"]: p["seconds"]
        for p in report["sweep"]["length"]
        if (p["method"], p["dtype"]) == ("torch", "float32")
    }
    refused = [
        f"{kind_text(c['method'], c['dtype'])} at {r['length']}"
        for r in rows
        for c in r["refused"]
        if c["error"] is not None
    ]
    return {
        "picks": [_pick(row, torch.get(row["length"])) for row in rows],
        "refused": refused,
        "lower": _lower_precision(report["recommendation"]["lower_precision"]),
        **_missing(report),
    }


def _pick(row: dict, torch: float | None) -> dict:
    chosen = row["chosen"]
    if not chosen:
        known = any(c["error"] is not None for c in row["candidates"])
        why = "nothing measured is that accurate" if known else "errors were not measured"
        return {"method": "", "length": row["length"], "how": "none", "why": [why]}
    plain = next((c for c in row["candidates"] if (c["method"], c["dtype"]) == ("baseline", "float32")), None)
    said = [seconds_text(chosen["seconds"])]
    said += [f"{times_text(torch / chosen['seconds'])} torch fp32"] if torch else []
    said += [f"{times_text(plain['seconds'] / chosen['seconds'])} baseline fp32"] if plain and plain != chosen else []
    return {
        "method": chosen["method"],
        "length": row["length"],
        "how": kind_text(chosen["method"], chosen["dtype"]),
        "why": [*said, "error " + error_text(chosen["error"])],
    }


def _missing(report: dict) -> dict:
    """Which lengths are missing, and why, and where the list ends if it ends before them."""
    measured = {row["length"] for row in report["recommendation"]["rows"]}
    missing = [s for s in report["settings"]["lengths"] if s not in measured]
    left = [item for item in report["left_out"] if item["stage"] == sweep.STAGE and item["length"] in missing]
    last = max(measured)
    return {
        "missing": missing,
        "why_missing": "; ".join(dict.fromkeys(item["why"] for item in left)) or "not measured",
        "ends_at": last if max(missing, default=0) > last else None,
    }


def _lower_precision(lower: dict) -> dict | None:
    tried = lower["lengths"]
    if not tried:
        return None
    paying = [str(t["length"]) for t in tried if t["pays"]]
    return {
        "up_to": lower["up_to"],
        "answer": "Yes." if lower["worth_it"] else f"At length {' and '.join(paying)} only." if paying else "No.",
        "said": [f"{times_text(t['faster'])} at length {t['length']} (error {_error(t['error'])})" for t in tried],
        "tie": TIE,
    }


def _error(value) -> str:
    return "not measured" if value is None else error_text(value)


def limits(report: dict) -> dict | None:
    found = report["limits"]
    if not found:
        return None
    rows, tried = [], []
    for e in found:
        m, kind = e["model"], kind_text(e["method"], e["dtype"])
        needs = f"{m['per_token']:.0f} B·S" + (f" + {m['per_pair']:.2f} B·S²" if m["per_pair"] else "")
        took = [_time(e["whole_call_seconds"]), _time(e["free_call_seconds"])]
        was = "yes, below" if "inside" in e else "no"
        rows.append(
            [kind, needs, count_text(e["longest_in_limit"]), took[0], was, count_text(e["longest_in_free"]), took[1]]
        )
        tried += [
            {
                "kind": kind,
                "expected": e[where]["fits"] == (where == "inside"),
                "whole": _time(e["whole_call_seconds"]),
                **e[where],
            }
            for where in ("inside", "beyond")
            if where in e
        ]
    return {
        "limit": bytes_text(found[0]["limit"]),
        "free": bytes_text(found[0]["free"]),
        "rows": rows,
        "tried": tried,
    }


def _time(seconds: float | None) -> str:
    return "not timed" if seconds is None else seconds_text(seconds)


def facts(report: dict) -> dict[str, str]:
    """Of this run's machine."""
    m = report["machine"]
    versions = {"heddle": m["heddle"], **m["versions"]}
    return {
        "processor": f"{m['processor']}, {m['processors']} usable, {m['threads']} threads",
        "CPU target": m["cpu_target"],
        "memory": f"{bytes_text(m['memory_bytes'])}, {bytes_text(m['memory_available_bytes'])} free at the start",
        "system": f"{m['system']}, Linux {m['kernel']}",
        "commit": f"{m['commit'] or 'unknown'}{' with uncommitted changes' if m['commit_changed'] else ''}",
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items() if version),
    }
