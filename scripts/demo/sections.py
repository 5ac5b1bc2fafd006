"""The sections of the page. Each takes the whole report and returns HTML."""

from __future__ import annotations

from html import escape

from . import charts
from .charts import Series, bytes_text, count_text, error_text, seconds_text

DTYPE = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
STAGES = ["embedding", "attention", "linear", "norm_and_activation", "pooling"]
NOTHING = '<span class="none">–</span>'


def times_text(ratio: float) -> str:
    digits = 2 if ratio < 9.95 else 1 if ratio < 99.5 else 0
    return f"{ratio:,.{digits}f}×".replace(",", "\u202f")


def kind_text(method: str, dtype: str) -> str:
    return f"{method} {DTYPE[dtype]}"


def table(head: list[str], rows: list[list[str]], left: int = 1) -> str:
    """Cells are HTML; the first `left` columns are aligned left."""
    cells = "".join(f'<th class="{"l" if i < left else ""}">{cell}</th>' for i, cell in enumerate(head))
    lines = "".join("<tr>" + "".join(_cell(i, cell, left) for i, cell in enumerate(row)) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{cells}</tr></thead><tbody>{lines}</tbody></table></div>'


def _cell(index: int, cell: str, left: int) -> str:
    best = cell.startswith("!")
    classes = " ".join(name for name, on in (("l", index < left), ("best", best)) if on)
    return f'<td class="{classes}">{cell[best:]}</td>'


def card(title: str, sub: str, body: str, wide: bool = False) -> str:
    return f'<div class="card{" wide" if wide else ""}"><h3>{title}</h3><p class="sub">{sub}</p>{body}</div>'


def legend(torch: bool = False, law: bool = False) -> str:
    kinds = [(m, d) for m in ("flash", "baseline") + (("torch",) if torch else ()) for d in ("float32", "bfloat16")]
    entries = [f'<span><i class="c-{m}{" dash" if d != "float32" else ""}"></i>{kind_text(m, d)}</span>' for m, d in kinds]
    if law:
        entries.append('<span><i class="c-law dash"></i>the law 4·B·H·S²</span>')
    return f'<div class="legend">{"".join(entries)}</div>'


def _series(points: list[dict], x: str, y: str, note=None) -> list[Series]:
    kinds = list(dict.fromkeys((p["method"], p["dtype"]) for p in points))
    found = []
    for method, dtype in kinds:
        own = sorted((p for p in points if (p["method"], p["dtype"]) == (method, dtype) and p[y]), key=lambda p: p[x])
        found.append(
            Series(
                kind_text(method, dtype),
                [(p[x], p[y]) for p in own],
                f"c-{method}",
                dtype != "float32",
                notes=[note(p) for p in own] if note else [],
            )
        )
    return found


def _pivot(points: list[dict], row: str, value, kinds: list[tuple[str, str]], head: str, best: bool = True) -> str:
    """A table with one line for each value of `row` and one column for each kind; the least value is marked."""
    rows = []
    for at in sorted({p[row] for p in points}):
        own = {(p["method"], p["dtype"]): p for p in points if p[row] == at}
        least = min((p[value] for p in own.values()), default=None)
        formatted = {"seconds": seconds_text}.get(value, bytes_text)
        cells = [
            (("!" if best and own[k][value] == least else "") + formatted(own[k][value])) if k in own else NOTHING for k in kinds
        ]
        rows.append([count_text(at), *cells])
    return table([head, *(kind_text(*k) for k in kinds)], rows)


def recommendation(report: dict) -> str:
    rows, accuracy = report["recommendation"]["rows"], report["settings"]["accuracy"]
    picks = []
    for row in rows:
        chosen = row["chosen"]
        if not chosen:
            picks.append(f'<div class="pick"><div class="len">length {row["length"]}</div><div class="how">none</div><div class="why">nothing measured is that accurate</div></div>')
            continue
        others = [c for c in row["candidates"] if (c["method"], c["dtype"]) == ("baseline", "float32")]
        gain = f"{times_text(others[0]['seconds'] / chosen['seconds'])} baseline fp32<br>" if others and others[0] != chosen else ""
        picks.append(
            f'<div class="pick {chosen["method"]}"><div class="len">length {row["length"]}</div><div class="how">{kind_text(chosen["method"], chosen["dtype"])}</div>'
            f'<div class="why">{seconds_text(chosen["seconds"])}<br>{gain}error {error_text(chosen["error"])}</div></div>'
        )
    lower = report["recommendation"]["lower_precision"]
    said = "; ".join(f"{times_text(t['faster'])} as fast as fp32 at length {t['length']} (error {_error(t['error'])})" for t in lower["lengths"])
    verdict = {True: "Yes, here it is.", False: "No, not at every such length.", None: "It was not measured."}[lower["worth_it"]]
    refused = [f"{kind_text(c['method'], c['dtype'])} at {r['length']}" for r in rows for c in r["refused"]]
    ruled = f"<p class='sub'>Faster, but not accurate enough: {escape(', '.join(refused))}.</p>" if refused else ""
    return (
        f"<h2>What to use at each length</h2><p class='sub'>The fastest method and dtype measured here whose relative error is at most "
        f"{error_text(accuracy)} (set it with <code>make demo ACCURACY=…</code>); within 5 % of time, the more accurate one. "
        f"Batch 1, {report['sweep']['shape']['heads']} heads, head size {report['sweep']['shape']['head_size']}.</p>"
        f'<div class="picks">{"".join(picks)}</div>{ruled}'
        f'<div class="answer"><b>Is a lower precision worth it below {lower["up_to"]}?</b> {verdict} bf16 is {said or "not measured"}.</div>'
    )


def _error(value) -> str:
    return "not measured" if value is None else error_text(value)


def length(report: dict) -> str:
    points, memory, errors = report["sweep"]["length"], report["memory"], report["errors"]
    shape = report["sweep"]["shape"]
    kinds = list(dict.fromkeys((p["method"], p["dtype"]) for p in points))
    held = list(dict.fromkeys((p["method"], p["dtype"]) for p in memory))
    time_chart = charts.lines(
        "Time of one call against length", _series(points, "length", "seconds", lambda p: f"{p['gflops']:.0f} GFLOP/s"), "length", seconds_text
    )
    workspace = _series(memory, "length", "workspace", lambda p: f"resident +{bytes_text(p['resident'])}")
    buffer = [r for r in report["laws"]["score_buffer"]["rows"] if r["dtype"] == "float32"]
    law = Series("4·B·H·S²", [(r["length"], r["law"]) for r in buffer], "c-law", True, "4·B·H·S²")
    memory_chart = charts.lines("Workspace against length", [law, *workspace], "length", bytes_text, base=2)
    resident_chart = charts.lines("Resident growth against length", _series(memory, "length", "resident"), "length", bytes_text, base=2, floor=4096)
    error_chart = charts.lines(
        "Relative error against length", _series(errors, "length", "own", lambda p: f"plain torch: {error_text(p['plain'])}"), "length", error_text
    )
    memory_rows = [
        [
            count_text(p["length"]), kind_text(p["method"], p["dtype"]), bytes_text(p["inputs"]), bytes_text(p["output"]), bytes_text(p["workspace"]),
            bytes_text(p["output"] + p["workspace"]), bytes_text(p["resident"]),
        ]
        for p in memory
    ]
    error_rows = [
        [
            count_text(e["length"]), kind_text(e["method"], e["dtype"]), error_text(e["own"]), error_text(e["plain"]), f"{e['own'] / e['plain']:.2f}",
            error_text(e["largest"]), error_text(e["total"]),
        ]
        for e in errors
    ]
    ratio_of = {(r["length"], r["dtype"]): r for r in report["ratios"]}
    dtypes = list(dict.fromkeys(r["dtype"] for r in report["ratios"]))
    keys = (("faster", "faster"), ("smaller_workspace", "less workspace"), ("smaller_resident", "less resident"))
    ratio_rows = [
        [count_text(s), *(_ratio(ratio_of.get((s, d)), key) for key, _ in keys for d in dtypes)] for s in sorted({s for s, _ in ratio_of})
    ]
    ratio_head = ["length", *(f"{words}, {DTYPE[d]}" for _, words in keys for d in dtypes)]
    return (
        "<h2>Against length</h2>"
        f"<p class='sub'>Batch 1, {shape['heads']} heads, head size {shape['head_size']} for time and error; one head for memory. Both axes are logarithmic, so a power law is a straight line.</p>"
        + legend(torch=True, law=True)
        + '<div class="grid2">'
        + card("Time of one call", "Least of several rounds, all methods in turn in every round.", time_chart + _details("Times", _pivot(points, "length", "seconds", kinds, "length")))
        + card("Workspace", "Scratch that a call allocates besides its tensors.", memory_chart + _details("Workspace", _pivot(memory, "length", "workspace", held, "length")))
        + card("Resident growth", "By how much the process's peak rose during the call: output and workspace.", resident_chart + _details("Memory, allocated and resident", table(["length", "method", "q, k, v", "output", "workspace", "allocated", "resident"], memory_rows, 2)))
        + card("Error", "Against a float64 computation on the same operands, relative (Frobenius).", error_chart + _details("Errors, beside plain torch in the same dtype", table(["length", "method", "error", "plain torch", "ratio", "largest element", "with rounding of q, k, v"], error_rows, 2)))
        + "</div>"
        + card("How many times faster and smaller flash is", f"Time with {shape['heads']} heads, memory with one.", table(ratio_head, ratio_rows), True)
        + _laws(report)
    )


def _ratio(row: dict | None, key: str) -> str:
    return times_text(row[key]) if row and row[key] else NOTHING


def _details(name: str, body: str) -> str:
    return f"<details><summary>{name}</summary>{body}</details>"


def _laws(report: dict) -> str:
    checked = report["laws"]["score_buffer"]
    rows = []
    for fit, alone in zip(report["laws"]["fits"], report["laws"]["fits_one_head"]):
        rows.append([kind_text(fit["method"], fit["dtype"]), *(_fit(f) for f in (fit["seconds"], alone["seconds"], fit["workspace"], fit["resident"]))])
    growth = "; ".join(
        f"{times_text(g['workspace_ratio'])} in {DTYPE[g['dtype']]} while the length grows {times_text(g['length_ratio'])}" for g in checked["flash_growth"]
    )
    buffer = [
        [count_text(r["length"]), DTYPE[r["dtype"]], bytes_text(r["law"]), bytes_text(r["scores"]), f"{r['ratio']:.3f}", bytes_text(r["scratch"]), bytes_text(r["workspace"])] for r in checked["rows"]
    ]
    return card(
        "The laws",
        "Exponents of the length, fitted on logarithms over lengths from 512. 2 means that twice the length takes four times as much.",
        table(["", "time", "time, one head", "workspace", "resident"], rows)
        + f"<p style='font-size:14.5px;margin:14px 0 6px'>The baseline's score buffer is 4·B·H·S² bytes: {_verdict(checked['baseline_holds'])}. "
        f"Flash's workspace does not grow as S²: {_verdict(checked['flash_holds'])}{' (' + growth + ')' if growth else ''}.</p>"
        + _details("The score buffer, law and measured", table(["length", "dtype", "4·B·H·S²", "scores", "ratio", "scratch", "workspace"], buffer, 2)),
        True,
    )


def _fit(fit: dict | None) -> str:
    return NOTHING if not fit else f"{fit['exponent']:.2f} <span class='none'>R² {fit['r2']:.3f}</span>"


def _verdict(holds: bool) -> str:
    return '<span class="yes">holds</span>' if holds else '<span class="no">does not hold here</span>'


def encoder(report: dict) -> str:
    about, runs = report["text"], report["encoder"]
    saved = 1 - about["tokens"] / about["padded_tokens"]
    title = "<h2>A real encoder on real text</h2>"
    sub = (
        f"<p class='sub'>all-MiniLM-L6-v2 over {about['bytes'] / 1e3:.0f} kB of {escape(about['source'])}: {about['pieces']} pieces, {count_text(about['tokens'])} tokens, "
        f"packed end to end. Padding batches of 32 to their longest piece would make {count_text(about['padded_tokens'])} tokens: packing saves {100 * saved:.0f} %.</p>"
    )
    if not runs:
        return title + sub + '<p class="empty">No run finished.</p>'
    if runs[0]["tokens"] < about["tokens"]:
        sub += f"<p class='sub'>Time sufficed for the first {count_text(runs[0]['tokens'])} of these tokens; all figures below are of them.</p>"
    speed = charts.bars("Speed", [(kind_text(r["method"], r["dtype"]), r["tokens_per_second"], f"c-{r['method']}", r["dtype"] != "float32") for r in runs], lambda v: f"{count_text(v)} tokens/s")
    held = charts.bars(
        "Peak memory", [(kind_text(r["method"], r["dtype"]), r["resident"], f"c-{r['method']}", r["dtype"] != "float32") for r in runs], bytes_text,
        [f"workspace {bytes_text(r['workspace'])}, weights {bytes_text(r['weight_bytes'])}" for r in runs],
    )
    parts = [(kind_text(r["method"], r["dtype"]), [(s.replace("_", " "), r["stages"].get(s, 0.0)) for s in STAGES]) for r in runs]
    keys = "".join(f'<span><i class="swatch part-{i}"></i>{s.replace("_", " ")}</span>' for i, s in enumerate(STAGES))
    rows = [
        [
            kind_text(r["method"], r["dtype"]), f"{r['seconds']:.2f} s", count_text(r["tokens_per_second"]), bytes_text(r["weight_bytes"]), bytes_text(r["workspace"]),
            bytes_text(r["resident"]), f"{r['golden']['cosine_least']:.7f}", error_text(r["golden"]["largest_error"]),
            f"{r['against']['cosine_least']:.7f}",
        ]
        for r in runs
    ]
    head = ["", "time", "tokens/s", "weights", "workspace", "resident growth", "cosine to golden", "error to golden", "cosine to baseline fp32"]
    return (
        title + sub + '<div class="grid2">'
        + card("Speed", "Whole encoder: embeddings, attention, feed-forward, pooling.", speed)
        + card("Peak memory while encoding", "Resident growth during the run, weights already loaded.", held)
        + card("Where the time goes", "Best round, all calls together.", f'<div class="legend">{keys}</div>' + charts.stacked("Stages", parts, seconds_text))
        + card("Lengths of the pieces", f"Paragraphs; the longest has {about['longest']} tokens, the median {about['median']:.0f}.", charts.histogram("Lengths", about["histogram"], "tokens in a piece"))
        + "</div>"
        + card("The encoder in figures", "Golden: embeddings of 64 pieces by transformers and torch in fp32, kept with the tests; the least cosine and the largest element error. The last column compares the embeddings of the text itself.", table(head, rows), True)
    )


def limits(report: dict) -> str:
    rows, tried = [], []
    for e in report["limits"]:
        m = e["model"]
        needs = f"{m['per_token']:.0f} B·S" + (f" + {m['per_pair']:.2f} B·S²" if m["per_pair"] else "")
        rows.append([kind_text(e["method"], e["dtype"]), needs, count_text(e["longest_in_limit"]), count_text(e["longest_in_free"]), seconds_text(e["whole_call_seconds"])])
        for where in ("inside", "beyond"):
            if where in e:
                tried.append([kind_text(e["method"], e["dtype"]), _attempted(e, e[where], where)])
    if not rows:
        return "<h2>The longest sequence that fits</h2><p class='empty'>Nothing was measured here.</p>"
    limit, free = report["limits"][0]["limit"], report["limits"][0]["free"]
    attempts = "".join(f'<li style="margin-bottom:4px"><b>{kind}</b>: {what}</li>' for kind, what in tried)
    return (
        "<h2>The longest sequence that fits</h2><p class='sub'>One head, whole call: q, k, v, output and workspace, from the measured bytes per token. "
        "Then tried in a process that may have no more than the limit.</p>"
        + card("Computed", "", table(["", "bytes", f"longest in {bytes_text(limit)}", f"longest in the {bytes_text(free)} free here", f"time of a whole call in {bytes_text(limit)} (extrapolated)"], rows), True)
        + card(f"Tried under a limit of {bytes_text(limit)}", "3 % less than the computed length must run, 10 % more must fail.", f'<ul class="plain">{attempts}</ul>', True)
    )


def _attempted(entry: dict, result: dict, where: str) -> str:
    expected = result["fits"] == (where == "inside")
    word = f'<span class="{"yes" if expected else "no"}">{"runs" if result["fits"] else "fails"}</span>'
    tokens = f"{count_text(result['length'])} tokens: {word}"
    if not result["fits"]:
        return f"{tokens} <span class='none'>({escape(result['error'])})</span>"
    rows = result["rows"]
    if rows == result["length"]:
        return f"{tokens}, the whole call in {seconds_text(result['seconds'])}; last row within {error_text(result['error'])} of float64"
    return (
        f"{tokens}: all tensors and the whole call's workspace allocated and written; of the queries only the last {rows} were run, over all keys, "
        f"in {seconds_text(result['seconds'])} (a whole call would take about {seconds_text(entry['whole_call_seconds'])}); last row within {error_text(result['error'])} of float64"
    )


def axes(report: dict) -> str:
    found, shape = report["sweep"], report["sweep"]["shape"]
    base = f"length {shape['middle']}"
    names = (("batch", "Batch", f"{shape['heads']} heads, {base}"), ("heads", "Heads", f"batch 1, {base}"), ("head_size", "Head size", f"{shape['heads']} heads, {base}"))
    cards = []
    for key, title, sub in names:
        points = found[key]
        kinds = list(dict.fromkeys((p["method"], p["dtype"]) for p in points))
        chart = charts.lines(title, _series(points, key, "seconds"), title.lower(), seconds_text)
        cards.append(card(title, sub, chart + _details("Times", _pivot(points, key, "seconds", kinds, title.lower()))))
    rows = [
        [count_text(b["length"]), kind_text(b["method"], b["dtype"]), str(b["batch"]), f"{count_text(b['tokens_per_second'])}", times_text(b["gain_over_batch_1"]), str(b["largest_tried"])]
        for b in found["best_batch"]
    ]
    rate = [{**p, "rate": p["batch"] * p["length"] / p["seconds"]} for p in found["batches"] if (p["method"], p["dtype"]) == ("flash", "float32")]
    throughput = [Series(f"length {s}", [(p["batch"], p["rate"]) for p in rate if p["length"] == s], "c-flash") for s in sorted({p["length"] for p in rate})]
    chart = charts.lines("Tokens per second against batch, flash fp32", throughput, "batch", lambda v: count_text(v) + "/s")
    head = ["length", "method", "best batch", "tokens/s", "over batch 1", "largest tried"]
    return (
        "<h2>One thing at a time</h2>"
        f"<p class='sub'>From {shape['heads']} heads, {base}, head size {shape['head_size']}, one extent changes.</p>"
        + legend() + f'<div class="grid3">{"".join(cards)}</div>'
        + '<div class="grid2" style="margin-top:18px">'
        + card("Tokens per second against batch", "flash fp32; one line a length.", chart)
        + card("Best batch size", "The smallest batch within 3 % of the most tokens per second.", table(head, rows, 2))
        + "</div>"
    )


def claims(report: dict) -> str:
    look = {"holds": "yes", "does not hold here": "no", "not measured": "none"}
    rows = "".join(
        f'<tr><td class="l text">{escape(c["claim"])}</td><td class="l text">{escape(c["measured"])}</td><td class="l"><span class="{look[c["verdict"]]}">{c["verdict"]}</span></td></tr>'
        for c in report["claims"]
    )
    body = f'<div class="scroll"><table><thead><tr><th class="l">claim</th><th class="l">measured here</th><th class="l">verdict</th></tr></thead><tbody>{rows}</tbody></table></div>'
    return "<h2>Claims, held against measurements</h2>" + card(
        "Often said of fast attention",
        "The factors of speed are usually quoted from a GPU, against a kernel that reads one element at a time. Here both methods use the same vector code and threads, so what is left is the cost of the score matrix itself.",
        body,
        True,
    )


def conditions(report: dict) -> str:
    m = report["machine"]
    facts = [
        ("processor", f"{m['processor']}, {m['processors']} usable, {m['threads']} threads"),
        ("CPU target", m["cpu_target"]),
        ("memory", f"{bytes_text(m['memory_bytes'])}, {bytes_text(m['memory_available_bytes'])} free at the start"),
        ("system", f"{m['system']}, Linux {m['kernel']}"),
        ("commit", f"{m['commit'] or 'unknown'}{' with uncommitted changes' if m['commit_changed'] else ''}"),
        ("versions", ", ".join(f"{name} {version}" for name, version in {"heddle": m["heddle"], **m["versions"]}.items() if version)),
        ("time", ", ".join(f"{s['name']} {s['seconds']:.0f} s" for s in report["stages"])),
    ]
    by_reason: dict = {}
    for item in report["left_out"]:
        by_reason.setdefault((item["stage"], item["why"]), []).append(item["what"])
    left = "".join(
        f"<li>{escape(stage)}: {escape(why)}: " + (escape(what[0]) if len(what) == 1 else _details(f"{len(what)} measurements", escape("; ".join(what)))) + "</li>"
        for (stage, why), what in by_reason.items()
    ) or "<li>Nothing.</li>"
    how = report["memory"][0]["resident_how"] if report["memory"] else "VmHWM"
    return (
        "<h2>Conditions</h2><div class='grid2'>"
        + card("This run", "", "<dl>" + "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in facts) + "</dl>")
        + card(
            "How it was measured",
            "",
            '<ul class="plain">'
            "<li>Times are the least of several rounds; in every round each method runs once, so that all meet the same noise. Operands are normal random numbers.</li>"
            f"<li>Every memory figure comes from a process of its own: workspace as the library answers, resident growth from {escape(how)}, after a small call that brings code and threads in.</li>"
            "<li>The baseline holds the whole score matrix in memory and is otherwise built from the same vectorised loops, threads and dtypes as flash.</li>"
            "<li>Errors are taken over 64 query rows spread over the sequence, all heads, against float64.</li></ul>",
        )
        + "</div>"
        + card("Left out", "Measurements that did not fit in time or memory.", f'<ul class="plain">{left}</ul>', True)
        + "<footer>All figures are in <code>report.json</code> beside this page.</footer>"
    )
