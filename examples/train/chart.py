"""Line charts as SVG files that stand alone."""

from __future__ import annotations

import math
from html import escape

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 420, 64, 150, 36, 48
COLOURS = ("#1f6feb", "#d1242f", "#1a7f37", "#9a6700", "#8250df", "#57606a")
STYLE = "text{font:13px sans-serif;fill:#57606a}.title{font-size:15px;fill:#1f2328}.grid{stroke:#d0d7de;stroke-width:1}"


def short(value):
    for factor, unit in ((1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.3g}{unit}"
    return f"{value:.3g}"


def linear_ticks(low, high, count=8):
    rough = (high - low) / count or 1.0
    power = 10 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough)
    return [n * step for n in range(math.ceil(low / step), math.floor(high / step) + 1)]


def doubling_ticks(low, high):
    return [2.0**n for n in range(math.ceil(math.log2(low) - 1e-9), math.floor(math.log2(high) + 1e-9) + 1)]


def decade_ticks(low, high):
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [m * 10.0**n for n in decades for m in (1, 2, 5) if low <= m * 10.0**n <= high]


def lines(title, x_name, y_name, series, doubling=False, decades=None, right=RIGHT):
    """An SVG. series: name -> points (x, y); names that share a first word share a colour, and dashes tell them apart.
    doubling: x is logarithmic, with powers of 2 marked. decades: y is; as x, unless it is said. Beside a logarithmic x a linear y
    begins at 0. right: pixels for the names of the series.
    """
    decades = doubling if decades is None else decades
    points = [point for line in series.values() for point in line]
    (x_low, x_high), (y_low, y_high) = ((min(axis), max(axis)) for axis in zip(*points))
    if decades:
        y_low, y_high = y_low / 1.2, y_high * 1.2
    else:
        y_low = 0.0 if doubling else y_low - 0.04 * (y_high - y_low)
    across_scale, up_scale = (math.log2 if logarithmic else float for logarithmic in (doubling, decades))
    across, up = WIDTH - LEFT - right, HEIGHT - TOP - BOTTOM

    def at_x(x):
        return LEFT + across * (across_scale(x) - across_scale(x_low)) / (
            (across_scale(x_high) - across_scale(x_low)) or 1
        )

    def at_y(y):
        return TOP + up * (up_scale(y_high) - up_scale(y)) / ((up_scale(y_high) - up_scale(y_low)) or 1)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">'
    ]
    out.append(f'<style>{STYLE}</style><rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>')
    out.append(f'<text class="title" x="{LEFT}" y="20">{escape(title)}</text>')
    for y in decade_ticks(y_low, y_high) if decades else linear_ticks(y_low, y_high):
        out.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - right}" y1="{at_y(y):.1f}" y2="{at_y(y):.1f}"/>')
        out.append(f'<text x="{LEFT - 8}" y="{at_y(y) + 4:.1f}" text-anchor="end">{short(y)}</text>')
    for x in doubling_ticks(x_low, x_high) if doubling else linear_ticks(x_low, x_high):
        out.append(
            f'<text x="{at_x(x):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{short(x) if not doubling else int(x)}</text>'
        )
    out.append(f'<text x="{LEFT + across / 2:.0f}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x_name)}</text>')
    out.append(
        f'<text x="16" y="{TOP + up / 2:.0f}" text-anchor="middle" transform="rotate(-90 16 {TOP + up / 2:.0f})">{escape(y_name)}</text>'
    )
    firsts = list(dict.fromkeys(name.split()[0] for name in series))
    rests = list(dict.fromkeys(" ".join(name.split()[1:]) for name in series))
    for row, (name, line) in enumerate(series.items()):
        first, *rest = name.split()
        colour = COLOURS[firsts.index(first) % len(COLOURS)]
        dashes = ("", "7 4", "2 3", "9 3 2 3")[rests.index(" ".join(rest)) % 4]
        stroke = f'stroke="{colour}" stroke-width="2" fill="none"' + (f' stroke-dasharray="{dashes}"' if dashes else "")
        path = " ".join(f"{at_x(x):.1f},{at_y(y):.1f}" for x, y in line)
        key = TOP + 12 + 20 * row
        out.append(f'<polyline points="{path}" {stroke}/>')
        out.append(f'<line x1="{WIDTH - right + 12}" x2="{WIDTH - right + 40}" y1="{key}" y2="{key}" {stroke}/>')
        out.append(f'<text x="{WIDTH - right + 46}" y="{key + 4}">{escape(name)}</text>')
    return "\n".join(out) + "\n</svg>\n"
