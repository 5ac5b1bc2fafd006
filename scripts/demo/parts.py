"""What the sections of both pages are made of: tables, cards, verdicts, and words on noise and on what was left out."""

from __future__ import annotations

import statistics
from html import escape

from .progress import NO_MEMORY, OUT_OF_TIME
from .units import count_text, seconds_text, times_text

DTYPE = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
NOTHING = '<span class="none">–</span>'
LOOK = {"holds": "yes", "does not hold here": "no", "not measured": "none"}


def kind_text(method: str, dtype: str) -> str:
    return f"{method} {DTYPE[dtype]}"


def table(head: list[str], rows: list[list[str]], left: int = 1, text: bool = False) -> str:
    """Cells are HTML; the first `left` columns are aligned left, with `text` they break lines; "" without rows.

    A cell that begins with ! is marked.
    """
    if not rows:
        return ""
    cells = "".join(f'<th class="{"l" if i < left else ""}">{cell}</th>' for i, cell in enumerate(head))
    lines = "".join(
        "<tr>" + "".join(_cell(i, cell, left, text) for i, cell in enumerate(row)) + "</tr>" for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{cells}</tr></thead><tbody>{lines}</tbody></table></div>'


def _cell(index: int, cell: str, left: int, text: bool) -> str:
    best = cell.startswith("!")
    classes = " ".join(
        name for name, on in (("l", index < left), ("best", best), ("text", text and index < left)) if on
    )
    return f'<td class="{classes}">{cell[best:]}</td>'


def card(title: str, sub: str, body: str, wide: bool = False) -> str:
    """A card, or nothing where there is nothing to put on it."""
    if not body:
        return ""
    said = f'<p class="sub">{sub}</p>' if sub else ""
    return f'<div class="card{" wide" if wide else ""}"><h3>{title}</h3>{said}{body}</div>'


def grid(columns: int, *cards: str) -> str:
    held = "".join(cards)
    return f'<div class="grid{columns}">{held}</div>' if held else ""


def section(title: str, sub: str, *cards: str) -> str:
    """A titled section, or nothing if all its cards are empty."""
    held = "".join(cards)
    said = f"<p class='sub'>{sub}</p>" if sub else ""
    return f"<h2>{title}</h2>{said}{held}" if held else ""


def details(name: str, body: str) -> str:
    return f"<details><summary>{name}</summary>{body}</details>" if body else ""


def words(meanings: dict[str, str]) -> str:
    """The words that a page uses; meanings are HTML."""
    return (
        "<dl class='words'>" + "".join(f"<dt>{word}</dt><dd>{said}</dd>" for word, said in meanings.items()) + "</dl>"
    )


def tiles(figures: list[tuple[str, str]]) -> str:
    """Pairs of a figure (HTML) and what it is (text)."""
    drawn = "".join(
        f'<div class="tile"><div class="figure">{figure}</div><div class="what">{escape(what)}</div></div>'
        for figure, what in figures
    )
    return f'<div class="tiles">{drawn}</div>' if drawn else ""


def verdict(holds: bool | None) -> str:
    word = {True: "holds", False: "does not hold here", None: "not measured"}[holds]
    return f'<span class="{LOOK[word]}">{word}</span>'


def claims_table(rows: list[dict]) -> str:
    """Of rows as claims.row makes them."""
    said = [
        [
            escape(c["claim"]),
            escape(c["measured"]),
            escape(c["holds_if"]),
            f'<span class="{LOOK[c["verdict"]]}">{c["verdict"]}</span>',
        ]
        for c in rows
    ]
    return table(["claim", "measured here", "holds if", "verdict"], said, 4, text=True)


def rounds_text(median: float, rounds: int, text=seconds_text) -> str:
    """What stands beside the least of several rounds, so that their spread is seen."""
    return "1 round" if rounds == 1 else f"median {text(median)} of {rounds} rounds"


def spread_text(points: list[dict]) -> str:
    """A sentence on how far the medians of points are above their least times; "" without points of several rounds."""
    spreads = [(p["median"] / p["seconds"], p) for p in points if p["rounds"] > 1]
    if not spreads:
        return ""
    most, worst = max(spreads, key=lambda pair: pair[0])
    return (
        "How noisy this machine was: the median round took "
        f"{times_text(statistics.median(ratio for ratio, _ in spreads))} the least at a typical point, "
        f"{times_text(most)} at the worst ({kind_text(worst['method'], worst['dtype'])} at "
        f"{count_text(worst['length'])}, {worst['rounds']} rounds)."
    )


def disturbed(unequal: list[dict], name) -> str:
    """The warning above runs whose unchanged parts differ; `unequal` as encode.unequal finds them, `name(index)`."""
    if not unequal:
        return ""
    pairs: dict = {}
    for u in unequal:
        pairs.setdefault((u["slow"], u["quick"]), []).append(f"{u['stage'].replace('_', ' ')} {times_text(u['ratio'])}")
    said = [f"with {name(slow)} than with {name(quick)} ({', '.join(took)})" for (slow, quick), took in pairs.items()]
    return (
        "<p class='notice'><b>The machine was not equally free in all runs</b>: what is the same code took longer "
        f"{escape('; '.join(said))}. Differences of speed between these runs are as much the machine's as "
        "theirs.</p>"
    )


def left_out_line(items: list[dict], budget: float, command: str = "make demo") -> str:
    """One line for the top of a page: how much is missing, why, and what brings it; "" if nothing is."""
    if not items:
        return ""
    counts: dict[str, int] = {}
    for item in items:
        counts[item["why"]] = counts.get(item["why"], 0) + item["count"]
    advice = {
        OUT_OF_TIME: f"for want of time ({budget:.0f} s were allowed; <code>{command} BUDGET={2 * budget:.0f}</code> "
        "allows twice that)",
        NO_MEMORY: "because they need more memory than is free here",
    }
    total = sum(counts.values())
    said = [(counts.pop(why), words) for why, words in advice.items() if why in counts]
    said += [(sum(counts.values()), "for reasons that are listed")] if counts else []
    why = said[0][1] if len(said) == 1 else ", ".join(f"{count_text(count)} {words}" for count, words in said)
    be = "measurement was" if total == 1 else "measurements were"
    return (
        f"<p class='notice'><b>{count_text(total)} {be} left out or cut short</b>{':' if len(said) > 1 else ''} {why}. "
        '<a href="#left-out">See which</a>.</p>'
    )


def left_out_card(items: list[dict]) -> str:
    by_reason: dict = {}
    for item in items:
        by_reason.setdefault((item["stage"], item["why"]), []).append(item["what"])
    listed = "".join(
        f"<li>{escape(stage)}: {escape(why)}: "
        + (escape(what[0]) if len(what) == 1 else details(f"{len(what)} entries", escape("; ".join(what))))
        + "</li>"
        for (stage, why), what in by_reason.items()
    )
    body = f'<ul class="plain">{listed}</ul>'
    return f'<div id="left-out">{card("Left out or cut short", "", body, True)}</div>' if items else ""
