"""How time and memory grow with the length: power laws fitted to measurements, and the laws they are held against."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import numpy as np

FIT_FROM = 512  # shorter lengths measure the cost of a call, not its growth
LEAST_LENGTHS = 4  # a law is judged on; two points fit any power exactly, three nearly so


@dataclass
class Power:
    """y = constant * x ** exponent, fitted by least squares on logarithms over `points` points."""

    exponent: float
    constant: float
    r2: float
    points: int

    def at(self, x: float) -> float:
        return self.constant * x**self.exponent


def fit_power(x, y) -> Power:
    """Fits y = c * x^e. Needs two different x; x and y must be positive and finite (ValueError otherwise)."""
    x, y = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    if x.shape != y.shape or x.ndim != 1:
        raise ValueError(f"[fit_power] x {x.shape} and y {y.shape} must be lists of one length")
    if not (np.all(np.isfinite(x)) and np.all(np.isfinite(y)) and np.all(x > 0) and np.all(y > 0)):
        raise ValueError("[fit_power] x and y must be positive and finite: a power law has no zeros")
    if len(np.unique(x)) < 2:
        raise ValueError(f"[fit_power] {len(np.unique(x))} different x: an exponent needs two")
    lx, ly = np.log(x), np.log(y)
    dx = lx - lx.mean()
    exponent = float((dx * (ly - ly.mean())).sum() / (dx * dx).sum())
    intercept = float(ly.mean() - exponent * lx.mean())
    residual = float(((ly - intercept - exponent * lx) ** 2).sum())
    spread = float(((ly - ly.mean()) ** 2).sum())
    # A constant y has no spread to explain; a fit without residual is then perfect by definition.
    r2 = 1.0 if spread <= 1e-20 * len(y) else 1.0 - residual / spread
    return Power(exponent, math.exp(intercept), r2, len(x))


def score_buffer_bytes(batch: int, heads: int, queries: int, keys: int) -> int:
    """Bytes of a full fp32 score matrix [B, H, Sq, Sk]."""
    return 4 * batch * heads * queries * keys


def _fit(points: list[dict], key: str) -> dict | None:
    chosen = [p for p in points if p["length"] >= FIT_FROM and p.get(key)]
    if len({p["length"] for p in chosen}) < LEAST_LENGTHS:
        return None
    return asdict(fit_power([p["length"] for p in chosen], [p[key] for p in chosen]))


def fit_all(times: list[dict], memory: list[dict]) -> list[dict]:
    """One entry for each method and dtype: the exponents of time, workspace and resident growth over lengths >= 512.

    None where fewer than LEAST_LENGTHS were measured. `times` are points of the length sweep (seconds), `memory` those of the memory runs (workspace, resident, in bytes).
    """
    kinds = list(dict.fromkeys((p["method"], p["dtype"]) for p in [*times, *memory]))
    return [
        {
            "method": method,
            "dtype": dtype,
            "seconds": _fit([p for p in times if (p["method"], p["dtype"]) == (method, dtype)], "seconds"),
            **{
                key: _fit([p for p in memory if (p["method"], p["dtype"]) == (method, dtype)], key)
                for key in ("workspace", "resident")
            },
        }
        for method, dtype in kinds
    ]


def check_score_buffer(memory: list[dict]) -> dict:
    """Holds the baseline's workspace against 4*B*H*S^2 at every measured length, and flash's growth against S^2.

    The workspace is the score matrix and scratch that does not depend on the length. `scratch` is what the two longest lengths leave
    when their growth with S^2 is taken away; `scores` is the rest at each length, `ratio` its quotient with the law.
    `baseline_holds`: scratch is not negative and every ratio from length 512 on is within 1 % of 1. `flash_holds`: from the shortest
    to the longest length >= 512 its workspace grows less than in proportion to the length, in every dtype. Each is None, and a dtype
    has no rows, where fewer than LEAST_LENGTHS lengths >= 512 were measured.
    """
    rows = []
    for dtype in dict.fromkeys(p["dtype"] for p in memory if p["method"] == "baseline"):
        own = sorted((p for p in memory if (p["method"], p["dtype"]) == ("baseline", dtype)), key=lambda p: p["length"])
        if sum(p["length"] >= FIT_FROM for p in own) < LEAST_LENGTHS:
            continue
        short, long = own[-2], own[-1]
        pairs = [p["length"] ** 2 for p in (short, long)]
        slope = (long["workspace"] - short["workspace"]) / (pairs[1] - pairs[0])
        scratch = long["workspace"] - slope * pairs[1]
        for p in own:
            law = score_buffer_bytes(p["batch"], p["heads"], p["length"], p["length"])
            scores = p["workspace"] - scratch
            rows.append(
                {
                    "length": p["length"],
                    "dtype": dtype,
                    "law": law,
                    "workspace": p["workspace"],
                    "scratch": scratch,
                    "scores": scores,
                    "ratio": scores / law,
                }
            )
    judged = [row for row in rows if row["length"] >= FIT_FROM]
    growth = []
    for dtype in dict.fromkeys(p["dtype"] for p in memory if p["method"] == "flash"):
        own = sorted(
            (p["length"], p["workspace"])
            for p in memory
            if p["method"] == "flash" and p["dtype"] == dtype and p["length"] >= FIT_FROM
        )
        if len(own) >= LEAST_LENGTHS:
            (short, small), (long, large) = own[0], own[-1]
            growth.append(
                {
                    "dtype": dtype,
                    "from": short,
                    "to": long,
                    "length_ratio": long / short,
                    "workspace_ratio": large / max(small, 1),
                }
            )
    return {
        "rows": rows,
        "baseline_holds": all(abs(row["ratio"] - 1) <= 0.01 and row["scratch"] >= 0 for row in judged)
        if judged
        else None,
        "flash_growth": growth,
        "flash_holds": all(g["workspace_ratio"] < g["length_ratio"] for g in growth) if growth else None,
    }


def compare_methods(times: list[dict], memory: list[dict]) -> list[dict]:
    """For each length and dtype that flash was timed at beside another: how many times faster it is than the baseline (`faster`) and
    than torch (`faster_than_torch`), and how many times less than the baseline it allocates and holds.

    None for what was not measured.
    """
    held = {(p["method"], p["dtype"], p["length"]): p for p in memory}
    timed = {(p["method"], p["dtype"], p["length"]): p["seconds"] for p in times}
    rows = []
    for method, dtype, length in timed:
        slow, torch = timed.get(("baseline", dtype, length)), timed.get(("torch", dtype, length))
        if method != "flash" or not (slow or torch):
            continue
        fast = timed[method, dtype, length]
        big, small = held.get(("baseline", dtype, length)), held.get(("flash", dtype, length))
        rows.append(
            {
                "length": length,
                "dtype": dtype,
                "faster": slow and slow / fast,
                "faster_than_torch": torch and torch / fast,
                "smaller_workspace": big["workspace"] / max(small["workspace"], 1) if big and small else None,
                "smaller_resident": big["resident"] / max(small["resident"], 4096) if big and small else None,
            }
        )
    return sorted(rows, key=lambda row: (row["dtype"], row["length"]))
