"""The demo's charts: where words and lines are, whatever the chart's width."""

import re

import numpy as np
from report_kit import Page

from scripts.demo import charts, units
from scripts.demo.charts import Log, Series


def drawn(content):
    page = Page()
    page.feed(content)
    return page


def line(name, points, **more):
    return Series(name, points, "c-flash", **more)


def test_ticks_and_labels_stay_apart():
    assert charts.log_ticks(1e-6, 1.0, 10)[0] == 1e-6 and len(charts.log_ticks(1e-9, 1e9, 10)) <= 7
    assert all(t in (2, 5, 10, 20, 50) for t in charts.log_ticks(2, 50, 10))
    placed = charts.spread([100.0, 101.0, 99.0, 300.0], 16, 300)
    assert placed[2] < placed[0] < placed[1] < placed[3] <= 300 and min(np.diff(sorted(placed))) >= 16


def test_powers_of_two_are_labelled_before_what_is_between_them():
    lengths = [128, 192, 256, 512, 1024, 2048, 4096, 8192]
    at = Log(128, 8192, 0, 100)
    narrow = charts.labelled(lengths, units.count_text, at, 180)
    assert set(narrow) <= set(lengths) - {192} and {8192, 2048, 512} <= set(narrow)
    wide = charts.labelled(lengths, units.count_text, at, 400, narrow)
    assert set(lengths) - {192} <= set(wide)
    ends = sorted((at(x) / 100 * 180, len(units.count_text(x))) for x in narrow)
    assert all(b - a >= 6 * (m + n) / 2 for (a, m), (b, n) in zip(ends, ends[1:]))
    assert charts.labelled([5, 7], str, Log(5, 7, 0, 100), 400) == [7, 5]  # no power of two


def test_no_word_is_drawn_in_svg_and_x_are_in_percent():
    content = charts.lines(
        "t", [line("a", [(1, 1), (8, 10)]), line("b", [(1, 2), (4, 30)])], "batch", units.seconds_text
    )
    content += charts.dots("t", [line("a", [(8, 1)]), line("b", [(9, 2)])], "bytes", str, units.bytes_text)
    content += charts.bars("t", [("a", 2.0, "c-flash", False)], str) + charts.stacked("t", [("a", [("x", 1.0)])], str)
    content += charts.histogram("t", [[0, 1], [32, 4]], "tokens")
    page = drawn(content)
    assert "text" not in [tag for tag, _ in page.seen]
    boxes = [a["viewbox"] for tag, a in page.seen if tag == "svg" and "viewbox" in a]
    assert boxes == ["0 0 1000 300"] * 2  # of the lines alone, whose width is no matter
    assert all(
        a[k] in ("0", "9") or a[k].endswith("%")
        for tag, a in page.seen
        if tag in ("line", "circle")
        for k in ("x1", "x2", "cx")
        if k in a
    )


def test_names_that_are_far_have_leaders_and_spreads_have_strokes():
    kept = charts.lines("t", [line("a", [(1, 1), (8, 10)])], "batch", units.seconds_text)
    assert 'class="lead"' not in kept and 'class="whisker"' not in kept
    ends_early = charts.lines(
        "t", [line("a", [(1, 1), (8, 10)]), line("b", [(1, 20), (4, 300)])], "batch", units.seconds_text
    )
    assert ends_early.count('class="lead"') == 1
    meet = charts.lines(
        "t", [line("a", [(1, 1), (8, 100)]), line("b", [(1, 1), (8, 101)])], "batch", units.seconds_text
    )
    assert meet.count('class="lead"') >= 1
    noisy = charts.lines("t", [line("a", [(1, 1), (8, 10)], tops=[1, 25])], "batch", units.seconds_text)
    assert noisy.count('class="whisker"') == 1


def test_names_of_dots_stand_beside_them():
    content = charts.dots(
        "t",
        [line("low", [(5e6, 0.3)]), line("near", [(5.1e6, 0.3)]), line("far", [(4e7, 0.01)])],
        "bytes",
        str,
        units.bytes_text,
    )
    page = drawn(content)
    styles = [a["style"] for tag, a in page.seen if tag == "span" and "beside" in a.get("class", "")]
    assert len(styles) == 3 and content.count('class="lead"') == 3
    lefts = [float(re.search(r"left:([\d.]+)%", s)[1]) for s in styles[:2]]
    assert lefts[0] == lefts[1] < 12 and "right:" in styles[2]  # far is at the right edge: its name is before it
    tops = [float(re.search(r"top:([\d.]+)px", s)[1]) for s in styles[:2]]
    assert abs(tops[0] - tops[1]) >= 17


def test_charts_of_nothing_are_empty():
    assert (
        charts.lines("t", [line("a", [])], "x", str)
        == charts.dots("t", [], "x", str, str)
        == charts.bars("t", [], str)
        == ""
    )
    assert charts.histogram("t", [], "x") == ""


def test_names_and_tips_are_escaped():
    content = charts.lines("<t>", [line("<a>", [(1, 1), (8, 10)], notes=["<n>", "&"])], "<x>", units.seconds_text)
    assert not {"a", "t", "n", "x"} & {tag for tag, _ in drawn(content).seen}
