"""Charts: lines and dots on logarithmic axes, bars and histograms. Colours come from CSS variables of the page.

Words are HTML; only lines and dots are SVG, with x in percent: a chart fits any width, and text has one size in all.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from html import escape

from markupsafe import Markup

from .units import count_text

HEIGHT = 300  # of the plot, in pixels
WIDE, NARROW = 400, 180  # pixels that the plot surely has in a half of the page, and on a phone or in a third of it
LETTER = 6.8  # pixels, of a tick


@dataclass
class Series:
    """One line: points (x, y), a CSS class for its colour, dashed or not."""

    name: str
    points: list[tuple[float, float]]
    colour: str
    dashed: bool = False
    notes: list[str] = field(default_factory=list)  # more to show at each point
    tops: list[float] = field(default_factory=list)  # y up to which a point's measurements spread


def log_ticks(low: float, high: float, base: float) -> list[float]:
    """At most 7 ticks that are powers of a power of `base`; with base 10 over a short range also 2 and 5 times them."""
    first, last = math.floor(math.log(low, base) + 1e-9), math.ceil(math.log(high, base) - 1e-9)
    if base == 10 and last - first <= 2:
        ticks = [m * 10.0**e for e in range(first, last + 1) for m in (1, 2, 5)]
        return [t for t in ticks if 0.999 * low <= t <= 1.001 * high]
    step = max(1, math.ceil((last - first) / 6))
    return [base**e for e in range(first, last + 1) if e % step == 0 and 0.999 * low <= base**e <= 1.001 * high]


def spread(wanted: list[float], gap: float, high: float) -> list[float]:
    """Moves labels apart: neighbours are at least `gap` away and none is below `high` (y grows downwards)."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    placed, at = list(wanted), -math.inf
    for i in order:
        at = placed[i] = max(placed[i], at + gap)
    at = high
    for i in reversed(order):
        placed[i] = min(placed[i], at)
        at = placed[i] - gap
    return placed


class Log:
    """A logarithmic axis from `low` at position `begin` to `high` at `end`."""

    def __init__(self, low: float, high: float, begin: float, end: float):
        self.low, self.high, self.begin, self.end = low, high, begin, end

    def __call__(self, value: float) -> float:
        value = min(max(value, self.low), self.high)
        if self.low == self.high:
            return (self.begin + self.end) / 2
        return self.begin + (self.end - self.begin) * math.log(value / self.low) / math.log(self.high / self.low)


def _y_axis(ys: list[float], floor: float | None) -> Log:
    low, high = max(min(ys), floor or 0) / 1.25, max(ys) * 1.25
    if high / low < 8:
        middle = math.sqrt(low * high)
        low, high = middle / 2.9, middle * 2.9
    return Log(low, high, HEIGHT, 0)


def labelled(xs: list[float], text, at: Log, width: float, taken=()) -> list[float]:
    """Those of `xs` whose labels fit in `width` pixels beside those of `taken`; powers of two at one distance first."""

    def fits(chosen, x):
        far = [(abs(at(x) - at(other)) / 100 * width, len(text(x)) + len(text(other))) for other in chosen]
        return all(distance >= LETTER * letters / 2 + 5 for distance, letters in far)

    chosen = list(taken)
    powers = [x for x in xs if math.log2(x) % 1 == 0] or xs
    if not chosen:
        for step in range(1, len(powers) + 1):
            chosen = powers[::-1][::step]
            if all(fits([other for other in chosen if other != x], x) for x in chosen):
                break
    for x in (*powers, *xs):
        if x not in chosen and fits(chosen, x):
            chosen.append(x)
    return chosen


@dataclass
class Axis:
    at: Log
    ticks: list[float]
    text: Callable[[float], str]
    label: str = ""


def _frame(name: str, x: Axis, y: Axis, drawn: list[str], beside: str = "", ends: str = "") -> str:
    """A chart of SVG `drawn`; `beside`: HTML names in the plot, `ends`: those in a column at its right."""
    grid = "".join(f'<line class="grid" x1="0" x2="100%" y1="{y.at(t):.1f}" y2="{y.at(t):.1f}"/>' for t in y.ticks)
    notch = f'y1="{HEIGHT}" y2="{HEIGHT + 5}"'
    grid += "".join(f'<line class="notch" x1="{x.at(t):.2f}%" x2="{x.at(t):.2f}%" {notch}/>' for t in x.ticks)
    grid += f'<line class="axis" x1="0" x2="100%" y1="{HEIGHT}" y2="{HEIGHT}"/>'
    always = labelled(x.ticks, x.text, x.at, NARROW)
    shown = labelled(x.ticks, x.text, x.at, WIDE, always)
    x_labels = "".join(
        f'<span class="{"" if t in always else "roomy"}" style="left:{x.at(t):.2f}%">{x.text(t)}</span>'
        for t in x.ticks
        if t in shown
    )
    y_labels = "".join(f'<span style="top:{y.at(t):.1f}px">{y.text(t)}</span>' for t in y.ticks)
    return Markup(
        f'<div class="chart{"" if ends else " alone"}" role="img" aria-label="{escape(name, quote=True)}"><div '
        f'class="ys">{y_labels}</div><div class="plot"><svg width="100%" '
        f'height="{HEIGHT}">{grid}{"".join(drawn)}</svg>{beside}</div><div class="ends">{ends}</div><div '
        f'class="xs">{x_labels}</div><div class="x-name">{escape(x.label)}</div></div>'
    )


def _dot(x: float, y: float, tip: str, hollow: bool) -> str:
    """x in percent, y in pixels."""
    tip = escape(tip, quote=True)
    return (
        f'<g class="point" data-tip="{tip}"><title>{tip}</title><circle class="hit" cx="{x:.2f}%" cy="{y:.1f}" r="12"/>'
        f'<circle class="dot{" hollow" if hollow else ""}" cx="{x:.2f}%" cy="{y:.1f}" r="4"/></g>'
    )


def _line(s: Series, end: float, x_axis: Axis, y_axis: Axis) -> str:
    places = [(x_axis.at(x), y_axis.at(y)) for x, y in s.points]
    path = " ".join(f"{10 * x:.1f},{y:.1f}" for x, y in places)
    dash = ' stroke-dasharray="6 5"' if s.dashed else ""
    parts = [
        f'<g class="series {s.colour}"><svg width="100%" height="{HEIGHT}" viewBox="0 0 1000 {HEIGHT}" '
        f'preserveAspectRatio="none"><polyline points="{path}"{dash} vector-effect="non-scaling-stroke"/></svg>'
    ]
    for (x, y), top in zip(places, s.tops):
        if y - y_axis.at(top) > 1:
            parts.append(f'<line class="whisker" x1="{x:.2f}%" x2="{x:.2f}%" y1="{y:.1f}" y2="{y_axis.at(top):.1f}"/>')
    x_end, y_end = places[-1]
    if x_end < 99:
        parts.append(f'<line class="lead" x1="{x_end:.2f}%" y1="{y_end:.1f}" x2="100%" y2="{end:.1f}"/>')
    elif abs(end - y_end) > 3:
        parts.append(f'<svg x="100%"><line class="lead" x1="0" y1="{y_end:.1f}" x2="9" y2="{end:.1f}"/></svg>')
    for i, (x, y) in enumerate(places):
        parts.append(_dot(x, y, _tip(s, i, x_axis, y_axis), s.dashed))
    return "".join(parts) + "</g>"


def _tip(s: Series, i: int, x_axis: Axis, y_axis: Axis) -> str:
    x, y = s.points[i]
    return "\n".join([s.name, f"{x_axis.label}: {x_axis.text(x)}", y_axis.text(y), *s.notes[i : i + 1]])


def lines(name: str, series: list[Series], x_label: str, y_text, base: float = 10, floor: float | None = None) -> str:
    """A line chart with both axes logarithmic, names at the lines' ends; "" without a point.

    y_text formats values of y; `base` is that of the y ticks; y below `floor` is drawn there.
    """
    series = [s for s in series if s.points]
    if not series:
        return ""
    xs = sorted({x for s in series for x, _ in s.points})
    y_at = _y_axis([y for s in series for y in (*(y for _, y in s.points), *s.tops) if y > 0], floor)
    x_axis = Axis(Log(xs[0], xs[-1], 0, 100), xs, count_text, x_label)
    y_axis = Axis(y_at, log_ticks(y_at.low, y_at.high, base), y_text)
    ends = spread([y_at(s.points[-1][1]) for s in series], 17, HEIGHT - 6)
    drawn = [_line(s, end, x_axis, y_axis) for s, end in zip(series, ends)]
    names = "".join(
        f'<span class="{s.colour}" style="top:{end:.1f}px">{escape(s.name)}</span>' for s, end in zip(series, ends)
    )
    return _frame(name, x_axis, y_axis, drawn, ends=names)


def dots(name: str, series: list[Series], x_label: str, y_text, x_text) -> str:
    """One dot for each series, both axes logarithmic; names beside the dots, with leaders; "" without a dot."""
    if not series:
        return ""
    xs = [s.points[0][0] for s in series]
    x_at, y_at = Log(min(xs) / 1.06, max(xs) * 1.06, 0, 100), _y_axis([s.points[0][1] for s in series], None)
    x_axis = Axis(x_at, log_ticks(x_at.low, x_at.high, 2), x_text, x_label)
    y_axis = Axis(y_at, log_ticks(y_at.low, y_at.high, 10), y_text)
    drawn, names = [], ""
    for group in _neighbours(series, x_at):
        places = [(x_at(s.points[0][0]), y_at(s.points[0][1])) for s in group]
        before = places[-1][0] > 60  # there is no room behind it
        stop = places[0][0] - 2.5 if before else places[-1][0] + 2.5
        side = f"right:{100 - stop:.2f}%" if before else f"left:{stop:.2f}%"
        for s, (x, y), label in zip(group, places, spread([y for _, y in places], 17, HEIGHT - 8)):
            leader = f'<line class="lead" x1="{x:.2f}%" y1="{y:.1f}" x2="{stop:.2f}%" y2="{label:.1f}"/>'
            drawn.append(f'<g class="series {s.colour}">{leader}{_dot(x, y, _tip(s, 0, x_axis, y_axis), s.dashed)}</g>')
            names += f'<span class="beside {s.colour}" style="top:{label:.1f}px;{side}">{escape(s.name)}</span>'
    return _frame(name, x_axis, y_axis, drawn, beside=names)


def _neighbours(series: list[Series], x_at: Log) -> list[list[Series]]:
    """Dots whose names would meet: each is less than a seventh of the axis away from the next one."""
    groups: list[list[Series]] = []
    for s in sorted(series, key=lambda s: s.points[0][0]):
        near = groups and x_at(s.points[0][0]) - x_at(groups[-1][-1].points[0][0]) < 14
        groups[-1].append(s) if near else groups.append([s])
    return groups


def bars(name: str, rows: list[tuple[str, float, str, bool]], text, note=None) -> str:
    """Horizontal bars from zero: rows (label, value, CSS class, light).

    `text` formats the value beside the bar; `note` has more to say of each.
    """
    most = max((value for _, value, _, _ in rows), default=0) or 1
    drawn = [
        _bar(
            label,
            note[i] if note else "",
            f'<i class="{colour}{" light" if light else ""}"{_width(value / most)}></i>',
            text(value),
        )
        for i, (label, value, colour, light) in enumerate(rows)
    ]
    return _bars(name, drawn)


def stacked(name: str, rows: list[tuple[str, list[tuple[str, float]]]], text) -> str:
    """Horizontal stacked bars: rows (label, [(part, value)]); parts are coloured part-0, part-1, ..."""
    most = max((sum(value for _, value in parts) for _, parts in rows), default=0) or 1
    drawn = []
    for label, pieces in rows:
        total = sum(value for _, value in pieces)
        tips = [f"{label}, {part}: {text(value)} ({100 * value / (total or 1):.0f} %)" for part, value in pieces]
        parts = "".join(
            f'<i class="part-{j}"{_width(value / most)} title="{escape(tip, quote=True)}"></i>'
            for j, ((_, value), tip) in enumerate(zip(pieces, tips))
        )
        drawn.append(_bar(label, "", parts, text(total)))
    return _bars(name, drawn)


def _width(share: float) -> str:
    return f' style="width:calc({max(share, 0.004):.4f} * (100% - 9em))"'


def _bar(label: str, note: str, drawn: str, value: str) -> str:
    soft = f'<span class="soft"> · {escape(note)}</span>' if note else ""
    return (
        f'<div class="bar"><div class="bar-name">{escape(label)}{soft}</div><div '
        f'class="bar-line">{drawn}<b>{escape(value)}</b></div></div>'
    )


def _bars(name: str, drawn: list[str]) -> str:
    if not drawn:
        return ""
    return Markup(f'<div class="bars" role="img" aria-label="{escape(name, quote=True)}">{"".join(drawn)}</div>')


def histogram(name: str, bins: list[list[int]], x_label: str) -> str:
    """Upright bars: bins [lower edge, count]."""
    if not bins:
        return ""
    most = max(count for _, count in bins) or 1
    width = bins[1][0] - bins[0][0] if len(bins) > 1 else 1
    drawn = "".join(
        f'<i style="height:{100 * count / most:.1f}%" title="{low} to {low + width - 1} tokens: {count} pieces"></i>'
        for low, count in bins
    )
    ticks = "".join(
        f'<span style="left:{100 * i / len(bins):.2f}%">{low}</span>' for i, (low, _) in enumerate(bins) if i % 4 == 0
    )
    return Markup(
        f'<div class="histogram" role="img" aria-label="{escape(name, quote=True)}"><div class="columns">{drawn}</div>'
        f'<div class="xs">{ticks}</div><div class="x-name">{escape(x_label)}</div></div>'
    )
