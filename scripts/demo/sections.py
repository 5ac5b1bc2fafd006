"""Sections of the first page: what to use, the longest sequence, claims and conditions.

Each takes the whole report and returns HTML, or nothing where nothing was measured.
"""

from __future__ import annotations

from html import escape

from . import sweep
from .parts import card, claims_table, grid, kind_text, left_out_card, section, table
from .recommend import TIE
from .units import bytes_text, count_text, error_text, seconds_text, times_text


def recommendation(report: dict) -> str:
    rows, settings, shape = report["recommendation"]["rows"], report["settings"], report["sweep"]["shape"]
    if not rows:
        return ""
    torch = {
        p["length"]: p["seconds"]
        for p in report["sweep"]["length"]
        if (p["method"], p["dtype"]) == ("torch", "float32")
    }
    picks = "".join(_pick(row, torch.get(row["length"])) for row in rows)
    refused = [
        f"{kind_text(c['method'], c['dtype'])} at {r['length']}"
        for r in rows
        for c in r["refused"]
        if c["error"] is not None
    ]
    ruled = f"<p class='sub'>Faster, but not accurate enough: {escape(', '.join(refused))}.</p>" if refused else ""
    return section(
        "What to use at each length",
        "The fastest of Heddle's methods and dtypes whose relative error is at most "
        f"{error_text(settings['accuracy'])} (set it with <code>make demo ACCURACY=…</code>); within 5 % of time, the "
        f"more accurate one. Batch 1, {shape['heads']} heads, head size {shape['head_size']}.",
        f'<div class="picks">{picks}</div>',
        ruled,
        _ends(report),
        _lower_precision(report["recommendation"]["lower_precision"]),
    )


def _pick(row: dict, torch: float | None) -> str:
    chosen = row["chosen"]
    if not chosen:
        known = any(c["error"] is not None for c in row["candidates"])
        why = "nothing measured is that accurate" if known else "errors were not measured"
        return (
            f'<div class="pick"><div class="len">length {count_text(row["length"])}</div><div '
            f'class="how">none</div><div class="why">{why}</div></div>'
        )
    plain = next((c for c in row["candidates"] if (c["method"], c["dtype"]) == ("baseline", "float32")), None)
    said = [seconds_text(chosen["seconds"])]
    said += [f"{times_text(torch / chosen['seconds'])} torch fp32"] if torch else []
    said += [f"{times_text(plain['seconds'] / chosen['seconds'])} baseline fp32"] if plain and plain != chosen else []
    return (
        f'<div class="pick {chosen["method"]}"><div class="len">length {count_text(row["length"])}</div>'
        f'<div class="how">{kind_text(chosen["method"], chosen["dtype"])}</div>'
        f'<div class="why">{"<br>".join([*said, "error " + error_text(chosen["error"])])}</div></div>'
    )


def _ends(report: dict) -> str:
    """Says which lengths are missing, and why."""
    measured = {row["length"] for row in report["recommendation"]["rows"]}
    missing = [s for s in report["settings"]["lengths"] if s not in measured]
    if not missing:
        return ""
    left = [item for item in report["left_out"] if item["stage"] == sweep.STAGE and item["length"] in missing]
    why = "; ".join(dict.fromkeys(item["why"] for item in left)) or "not measured"
    last = max(measured)
    beyond = f"The list ends at length {count_text(last)}. " if max(missing) > last else ""
    return f"<p class='sub'>{beyond}Not measured: {', '.join(count_text(s) for s in missing)} ({escape(why)}).</p>"


def _lower_precision(lower: dict) -> str:
    tried = lower["lengths"]
    if not tried:
        return ""
    paying = [str(t["length"]) for t in tried if t["pays"]]
    answer = "Yes." if lower["worth_it"] else f"At length {' and '.join(paying)} only." if paying else "No."
    said = ", ".join(f"{times_text(t['faster'])} at length {t['length']} (error {_error(t['error'])})" for t in tried)
    return (
        f'<div class="answer"><b>Is bf16 worth it at lengths up to {lower["up_to"]}?</b> {answer} Its speed over fp32, '
        "the faster method of "
        f"each: {said}. It counts as worth it above {times_text(TIE)} and within the accuracy.</div>"
    )


def _error(value) -> str:
    return "not measured" if value is None else error_text(value)


def limits(report: dict) -> str:
    found = report["limits"]
    if not found:
        return ""
    limit, free = bytes_text(found[0]["limit"]), bytes_text(found[0]["free"])
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
            f"<li><b>{kind}</b>: {_attempted(e, e[where], where)}</li>" for where in ("inside", "beyond") if where in e
        ]
    head = [
        "",
        "bytes",
        f"longest in {limit}",
        "a call would take",
        "tried",
        f"longest in the {free} free here",
        "a call would take",
    ]
    return section(
        "The longest sequence that fits",
        "One head, whole call: q, k, v, output and workspace. Lengths are computed from the measured bytes per token "
        f"and times extrapolated from the longest that was timed. Those of {limit} were tried in a process that may "
        "have no more; those of the memory that is free were not.",
        card("Computed", "", table(head, rows), True),
        card(
            f"Tried under a limit of {limit}",
            "3 % less than the computed length must run, 10 % more must fail.",
            f'<ul class="plain">{"".join(tried)}</ul>' if tried else "",
            True,
        ),
    )


def _time(seconds: float | None) -> str:
    return "not timed" if seconds is None else seconds_text(seconds)


def _attempted(entry: dict, result: dict, where: str) -> str:
    expected = result["fits"] == (where == "inside")
    word = f'<span class="{"yes" if expected else "no"}">{"runs" if result["fits"] else "fails"}</span>'
    tokens = f"{count_text(result['length'])} tokens: {word}"
    if not result["fits"]:
        return f"{tokens} <span class='none'>({escape(result['error'])})</span>"
    rows = result["rows"]
    if rows == result["length"]:
        return (
            f"{tokens}, the whole call in {seconds_text(result['seconds'])}; last row within "
            f"{error_text(result['error'])} of float64"
        )
    return (
        f"{tokens}: all tensors and the whole call's workspace allocated and written; of the queries only the last "
        f"{rows} were run, over all keys, in {seconds_text(result['seconds'])} (a whole call would take about "
        f"{_time(entry['whole_call_seconds'])}); last row within {error_text(result['error'])} of float64"
    )


def claims(report: dict) -> str:
    return section(
        "Claims, held against measurements",
        "What is often said of fast attention. The factors of speed are usually quoted from a GPU, against a kernel "
        "that reads one element at a time. Here both methods use the same vector code and threads, so what is left is "
        "the cost of the score matrix itself.",
        card("Often said of fast attention", "", claims_table(report["claims"]), True),
    )


def conditions(report: dict, left_out: list[dict]) -> str:
    """`left_out`: what of it is this page's."""
    m = report["machine"]
    versions = {"heddle": m["heddle"], **m["versions"]}
    facts = {
        "processor": f"{m['processor']}, {m['processors']} usable, {m['threads']} threads",
        "CPU target": m["cpu_target"],
        "memory": f"{bytes_text(m['memory_bytes'])}, {bytes_text(m['memory_available_bytes'])} free at the start",
        "system": f"{m['system']}, Linux {m['kernel']}",
        "commit": f"{m['commit'] or 'unknown'}{' with uncommitted changes' if m['commit_changed'] else ''}",
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items() if version),
    }
    how = report["memory"][0]["resident_how"] if report["memory"] else "VmHWM"
    return (
        section(
            "Conditions",
            "",
            grid(
                2,
                card(
                    "This run",
                    "",
                    "<dl>" + "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in facts.items()) + "</dl>",
                ),
                card(
                    "How it was measured",
                    "",
                    '<ul class="plain">'
                    "<li>Times are the least of several rounds; in every round each method runs once, so that all "
                    "meet the same noise. Operands are normal random numbers.</li><li>Every memory figure comes from "
                    f"a process of its own: workspace as the library answers, resident growth from {escape(how)}, "
                    "after a small call that brings code and threads in.</li><li>Errors are taken over 64 query rows "
                    "spread over the sequence, all heads, against float64.</li></ul>",
                ),
            ),
            _stage_times(report),
            left_out_card(left_out),
        )
        + "<footer>All figures are in <code>report.json</code> beside this page.</footer>"
    )


def _stage_times(report: dict) -> str:
    rows = [[escape(s["name"]), f"{s['seconds']:.0f} s", f"{s['allowed']:.0f} s"] for s in report["stages"]]
    rows.append(
        ["<b>measuring, in all</b>", f"{report['seconds']:.0f} s", f"{report['settings']['budget_seconds']:.0f} s"]
    )
    if report["build_seconds"] is not None:
        rows.append(["building, before it", f"{report['build_seconds']:.0f} s", "not counted"])
    return card("Where the time of this run went", "", table(["stage", "took", "allowed"], rows), True)
