"""Numbers as the pages write them."""

from __future__ import annotations

import math


def seconds_text(value: float) -> str:
    for factor, unit in ((86400.0, "days"), (3600.0, "h"), (60.0, "min")):
        if value >= 2 * factor:
            return f"{_short(value / factor)} {unit}"
    for factor, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if value >= factor:
            return f"{_short(value / factor)} {unit}"
    return f"{_short(value / 1e-9)} ns"


def bytes_text(value: float) -> str:
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if value >= 1024**power:
            return f"{_short(value / 1024**power)} {unit}"
    return f"{value:.0f} B"


def count_text(value: float) -> str:
    for factor, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if value >= 10 * factor or (value >= factor and factor > 1e3):
            return f"{_short(value / factor)}{unit}"
    return f"{value:.0f}"


def error_text(value: float) -> str:
    """A relative error: 10⁻⁷, 1.8·10⁻⁷."""
    if not value > 0:
        return "0"
    exponent = math.floor(math.log10(value / 0.995))  # what rounds to ten is written as the next power
    digits = value / 10**exponent
    power = str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"10{power}" if digits < 1.05 else f"{digits:.1f}·10{power}"


def times_text(ratio: float) -> str:
    return f"{ratio:.{2 if ratio < 9.95 else 1 if ratio < 99.5 else 0}f}×"


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 99.5 else f"{value:.3g}"
