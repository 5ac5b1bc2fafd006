"""Charts as inline SVG: lines on logarithmic axes, bars and histograms. Colours come from CSS variables of the page."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from html import escape

WIDTH, HEIGHT = 560, 380
LEFT, RIGHT, TOP, BOTTOM = 66, 128, 14, 46


@dataclass
class Series:
    """One line: points (x, y), a CSS class for its colour, dashed or not."""

    name: str
    points: list[tuple[float, float]]
    colour: str
    dashed: bool = False
    label: str | None = None  # at the line's end; None: its name
    notes: list[str] = field(default_factory=list)  # more to show at each point


def seconds_text(value: float) -> str:
    if value >= 120:
        return f"{_short(value / 3600)} h" if value >= 7200 else f"{_short(value / 60)} min"
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
    return f"{value:,.0f}".replace(",", "\u202f")


def error_text(value: float) -> str:
    if not value > 0:
        return "0"
    exponent = math.floor(math.log10(value) + 1e-9)
    digits = value / 10**exponent
    power = str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"10{power}" if abs(digits - 1) < 0.005 else f"{digits:.1f}·10{power}"


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 99.5 else f"{value:.3g}"


def log_ticks(low: float, high: float, base: float) -> list[float]:
    """At most 7 ticks that are powers of a power of `base`; with base 10 over a short range also 2 and 5 times them."""
    first, last = math.floor(math.log(low, base) + 1e-9), math.ceil(math.log(high, base) - 1e-9)
    if base == 10 and last - first <= 2:
        ticks = [m * 10.0**e for e in range(first, last + 1) for m in (1, 2, 5)]
        return [t for t in ticks if 0.999 * low <= t <= 1.001 * high]
    step = max(1, math.ceil((last - first) / 6))
    return [base**e for e in range(first, last + 1) if e % step == 0 and 0.999 * low <= base**e <= 1.001 * high]


def _spread(wanted: list[float], gap: float, high: float) -> list[float]:
    """Moves labels apart so that neighbours, in order, are at least `gap` away and none is below `high` (y grows downwards)."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    placed, at = list(wanted), -math.inf
    for i in order:
        at = placed[i] = max(placed[i], at + gap)
    at = high
    for i in reversed(order):
        placed[i] = min(placed[i], at)
        at = placed[i] - gap
    return placed


def lines(name: str, series: list[Series], x_label: str, y_text, base: float = 10, x_text=count_text, floor: float | None = None) -> str:
    """A line chart with both axes logarithmic. y_text formats values of y; `base` of the y ticks; y below `floor` is drawn there."""
    series = [s for s in series if s.points]
    if not series:
        return '<p class="empty">Nothing was measured here.</p>'
    xs = sorted({x for s in series for x, _ in s.points})
    ys = [y for s in series for _, y in s.points if y > 0]
    low, high = min(ys), max(ys)
    if floor:
        low = max(low, floor)
    low, high = low / 1.25, high * 1.25
    if high / low < 8:
        middle = math.sqrt(low * high)
        low, high = middle / 2.9, middle * 2.9
    x0, x1 = math.log(xs[0]), math.log(xs[-1]) if len(xs) > 1 else math.log(xs[0]) + 1
    plot_w, plot_h = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def px(x):
        return LEFT + plot_w * (math.log(x) - x0) / (x1 - x0)

    def py(y):
        y = min(max(y, low), high)
        return TOP + plot_h * (math.log(high) - math.log(y)) / (math.log(high) - math.log(low))

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(name, quote=True)}">']
    for tick in log_ticks(low, high, base):
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{py(tick):.1f}" y2="{py(tick):.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 8}" y="{py(tick) + 4:.1f}" text-anchor="end">{y_text(tick)}</text>')
    last_end = -math.inf
    for x in xs:
        parts.append(f'<line class="notch" x1="{px(x):.1f}" x2="{px(x):.1f}" y1="{HEIGHT - BOTTOM}" y2="{HEIGHT - BOTTOM + 5}"/>')
        label = x_text(x)
        half = 4.4 * len(label)
        if px(x) - half > last_end + 4:
            parts.append(f'<text class="tick" x="{px(x):.1f}" y="{HEIGHT - BOTTOM + 19}" text-anchor="middle">{label}</text>')
            last_end = px(x) + half
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{HEIGHT - BOTTOM}" y2="{HEIGHT - BOTTOM}"/>')
    parts.append(f'<text class="axis-name" x="{LEFT + plot_w / 2:.1f}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x_label)}</text>')
    ends = _spread([py(s.points[-1][1]) for s in series], 18, HEIGHT - BOTTOM - 2)
    for s, end in zip(series, ends):
        path = " ".join(f"{px(x):.1f},{py(y):.1f}" for x, y in s.points)
        dash = ' stroke-dasharray="6 5"' if s.dashed else ""
        parts.append(f'<g class="series {s.colour}"><polyline points="{path}"{dash}/>')
        for i, (x, y) in enumerate(s.points):
            note = f"\n{s.notes[i]}" if i < len(s.notes) and s.notes[i] else ""
            tip = escape(f"{s.name}\n{x_label}: {x_text(x)}\n{y_text(y)}{note}", quote=True)
            parts.append(
                f'<g class="point" data-tip="{tip}"><title>{tip}</title><circle class="hit" cx="{px(x):.1f}" cy="{py(y):.1f}" r="12"/>'
                f'<circle class="dot{" hollow" if s.dashed else ""}" cx="{px(x):.1f}" cy="{py(y):.1f}" r="4"/></g>'
            )
        x_end, y_end = px(s.points[-1][0]), py(s.points[-1][1])
        if abs(end - y_end) > 3:
            parts.append(f'<line class="lead" x1="{x_end + 6:.1f}" y1="{y_end:.1f}" x2="{WIDTH - RIGHT + 11}" y2="{end:.1f}"/>')
        parts.append(f'<text class="name" x="{WIDTH - RIGHT + 14}" y="{end + 4:.1f}">{escape(s.label or s.name)}</text></g>')
    return "".join(parts) + "</svg>"


def bars(name: str, rows: list[tuple[str, float, str, bool]], text, note=None) -> str:
    """Horizontal bars from zero: rows (label, value, CSS class, dashed); `text` formats the value written beside the bar."""
    step, top = 46, 6
    height = top + step * len(rows)
    most = max((value for _, value, _, _ in rows), default=0) or 1
    room = WIDTH - 130
    parts = [f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(name, quote=True)}">']
    for i, (label, value, colour, light) in enumerate(rows):
        y = top + step * i
        width = max(2.0, room * value / most)
        extra = f" · {note[i]}" if note and note[i] else ""
        parts.append(f'<text class="bar-name" x="0" y="{y + 12}">{escape(label)}<tspan class="soft">{escape(extra)}</tspan></text>')
        parts.append(
            f'<rect class="bar {colour}{" light" if light else ""}" x="0.75" y="{y + 18}" width="{width:.1f}" height="16" rx="3">'
            f"<title>{escape(label)}: {escape(text(value))}{escape(extra)}</title></rect>"
        )
        parts.append(f'<text class="bar-value" x="{width + 8:.1f}" y="{y + 31}">{escape(text(value))}</text>')
    return "".join(parts) + "</svg>"


def stacked(name: str, rows: list[tuple[str, list[tuple[str, float]]]], text) -> str:
    """Horizontal stacked bars: rows (label, [(part, value)]); parts are coloured part-0, part-1, ..."""
    step, top = 46, 6
    height = top + step * len(rows)
    most = max((sum(value for _, value in parts) for _, parts in rows), default=0) or 1
    room = WIDTH - 70
    out = [f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(name, quote=True)}">']
    for i, (label, pieces) in enumerate(rows):
        y, x = top + step * i, 0.0
        total = sum(value for _, value in pieces)
        out.append(f'<text class="bar-name" x="0" y="{y + 12}">{escape(label)}</text>')
        for j, (part, value) in enumerate(pieces):
            width = room * value / most
            tip = f"{label}, {part}: {text(value)} ({100 * value / total:.0f} %)"
            out.append(f'<rect class="part part-{j}" x="{x:.1f}" y="{y + 18}" width="{max(width - 1.5, 0.5):.1f}" height="16" rx="2"><title>{escape(tip)}</title></rect>')
            x += width
        out.append(f'<text class="bar-value" x="{x + 7:.1f}" y="{y + 31}">{escape(text(total))}</text>')
    return "".join(out) + "</svg>"


def histogram(name: str, bins: list[list[int]], x_label: str) -> str:
    """Upright bars: bins [lower edge, count]."""
    height, bottom = 170, 40
    most = max((count for _, count in bins), default=0) or 1
    step = WIDTH / max(len(bins), 1)
    width = bins[1][0] - bins[0][0] if len(bins) > 1 else 1
    parts = [f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(name, quote=True)}">']
    for i, (low, count) in enumerate(bins):
        h = (height - bottom - 12) * count / most
        tip = f"{low} to {low + width - 1} tokens: {count} pieces"
        parts.append(
            f'<rect class="bar plain" x="{i * step + 1.5:.1f}" y="{height - bottom - h:.1f}" width="{step - 3:.1f}" height="{h:.1f}" rx="2">'
            f"<title>{tip}</title></rect>"
        )
        if i % 4 == 0:
            parts.append(f'<text class="tick" x="{i * step + 1.5:.1f}" y="{height - bottom + 17}">{low}</text>')
    parts.append(f'<line class="axis" x1="0" x2="{WIDTH}" y1="{height - bottom}" y2="{height - bottom}"/>')
    parts.append(f'<text class="axis-name" x="{WIDTH / 2}" y="{height - 5}" text-anchor="middle">{escape(x_label)}</text>')
    return "".join(parts) + "</svg>"
