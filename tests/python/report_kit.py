"""What the tests of the demo's report share: made-up figures, and a reader of its pages."""

import math
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from scripts.demo import claims, html, isolate, laws, limits, lowbit, recommend, sweep  # noqa: E402


def memory_point(method, length, workspace, dtype="float32"):
    tensor = 4 * 64 * length
    return {
        "batch": 1,
        "heads": 1,
        "length": length,
        "head_size": 64,
        "method": method,
        "dtype": dtype,
        "inputs": 3 * tensor,
        "output": tensor,
        "workspace": workspace,
        "resident": workspace + tensor,
        "resident_how": "VmHWM",
    }


def made_up_memory(baseline=lambda s: 4 * s * s + 1000, flash=lambda s: 50_000, lengths=(256, 512, 1024, 2048, 4096)):
    return [memory_point(m, s, f(s)) for s in lengths for m, f in (("baseline", baseline), ("flash", flash))]


def time_point(method, dtype, length, seconds, heads=8, median=None, rounds=3):
    return {
        "batch": 1,
        "heads": heads,
        "length": length,
        "head_size": 64,
        "method": method,
        "dtype": dtype,
        "seconds": seconds,
        "median": median or 1.25 * seconds,
        "rounds": rounds,
        "gflops": 1.0,
    }


TIMES = [
    time_point("flash", "float32", 128, 1.00e-3),
    time_point("flash", "bfloat16", 128, 0.97e-3),
    time_point("baseline", "float32", 128, 0.50e-3),
    time_point("flash", "float32", 512, 4e-3),
    time_point("flash", "bfloat16", 512, 2e-3),
    time_point("baseline", "float32", 512, 9e-3),
]
ERRORS = [
    {"length": s, "method": m, "dtype": d, "total": e}
    for s in (128, 512)
    for m, d, e in (("flash", "float32", 1e-7), ("flash", "bfloat16", 5e-3), ("baseline", "float32", 2e-7))
]


class Page(HTMLParser):
    """Checks that tags nest, and collects what the page shows: tags with attributes, and text."""

    VOID = {"meta", "br", "line", "rect", "circle", "polyline", "path"}

    def __init__(self):
        super().__init__()
        self.open, self.seen, self.text = [], [], []

    def handle_starttag(self, tag, attributes):
        self.seen.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.seen.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data):
        if self.open[-1:] not in (["style"], ["script"]) and (data.strip() or "\n" not in data):
            self.text.append(re.sub(r"\s+", " ", data))


def check_page(content):
    page = Page()
    page.feed(content)
    assert page.open == []
    anchors = {"#" + attributes["id"] for _, attributes in page.seen if "id" in attributes}
    for tag, attributes in page.seen:
        assert "src" not in attributes and attributes.get("href", html.INDEX) in {*html.SPARSE_PAGES, *anchors}, (
            f"<{tag}> reaches outside the report"
        )
        assert tag != "text", "SVG text grows and shrinks with its chart"
    assert "http" not in re.sub(r"https?://www\.w3\.org\S*", "", content)
    drawn = [
        float(n.rstrip("%"))
        for tag, a in page.seen
        if tag in ("circle", "rect", "line")
        for n in (a.get(k, "0") for k in ("cx", "cy", "x", "y", "x1", "y1"))
        if n
    ]
    assert all(math.isfinite(n) for n in drawn)
    assert "nan" not in " ".join(page.text).lower().split()
    assert (
        "Nothing was measured" not in content
        and "<tbody></tbody>" not in content
        and '<ul class="plain"></ul>' not in content
    )
    return page


def measure_here(monkeypatch):
    """One measurement goes to a process of its own, as all do outside the tests; the others stay in this one."""
    apart = iter([isolate.call])

    def here(function, *arguments, timeout):
        return function(*arguments)

    monkeypatch.setattr(isolate, "call", lambda *call, timeout: next(apart, here)(*call, timeout=timeout))


def shown(content):
    """The text of a page that passes check_page."""
    return "".join(check_page(content).text)


def small_lowbit():
    """What lowbit.policies and lowbit.study return, made up."""

    def policy(name, linear, error, **more):
        cosine = {"cosine_mean": 1 - error**2 / 2, "cosine_least": 1 - error**2, "largest_error": error}
        near = {
            "neighbours": 10,
            "overlap_mean": 1 - error,
            "overlap_least": 0.5,
            "nearest_same": 1 - error,
            "spearman_mean": 0.99,
            "spearman_least": 0.9,
        }
        return {"name": name, "dtype": "bfloat16", "rules": {"*": f"<{name}>"} if error else {}, "load_seconds": 0.1, "seconds": 2.0, "median": 2.5, "rounds": 2,
                "stages": {"attention": 0.4, "linear": 1.0 + error}, "pieces_per_second": 10 + error, "weight_bytes": linear + 10**7, "linear_bytes": linear, "held": linear, "loading": 10**8, "peak": 10**8,
                "resident_how": "VmHWM", "formats": [name], "pieces": 4, "tokens": 900, "cosine": cosine, "retrieval": near, "error": error, **more}  # fmt: skip

    chosen = {"allowed": 0.05, "sample_error": 0.04, "sample": 3, "choosing_seconds": 9.0}
    layers = [{"format": f, "rule": r, "bits": 4.5, "kept": k, "range": 0.1, "study": s}
              for f, r, k, s in (("e2m1_row", "plain", 88.7, 88.69), ("nvfp4", "mse", 91.9, None), ("int8_row", "plain", 99.6, None))]  # fmt: skip
    speed = {
        "rows": 4096,
        "torch": 0.2,
        "fp4": 0.15,
        "few": 64,
        "product": 0.002,
        "svd": 1.0,
        "float_bytes": 4 * 10**6,
        "plain_bytes": 505_000,
        "packed_bytes": 510_000,
    }
    block = {
        "batch": 4,
        "length": 1024,
        "hidden": 768,
        "torch": {"seconds": 1.0, "kept": 100.0},
        "float32": {"seconds": 0.95, "kept": 100.0},
        "e2m1_row": {"seconds": 0.9, "kept": 97.0},
        "nvfp4": {"seconds": 0.9, "kept": 98.0},
    }
    attention = {"batch": 4, "heads": 8, "length": 2048, "head_size": 64, "baseline": 6 * 10**8, "flash": 7 * 10**7}
    on_gpu = [policy(name, linear, error) | {"tokens_per_second": {"8192": 4e6, "65536": 5.25e6}, "alone_seconds": 4e-4} for name, linear, error in
              (("bfloat16", 2 * 10**7, 0.0), ("nvfp4", 5 * 10**6, 0.2))]  # fmt: skip
    about = {"gpu": "A <GPU>", "date": "2026-01-02T03:04:05+00:00", "method": "Rounds & waits."}
    return {"gpu": {"here": False, "why": "no <GPU> here", "source": "bench/results/x.json", "conditions": about, "rows": on_gpu},
            "policies": [policy("float32", 4 * 10**7, 0.0), policy("nvfp4", 5 * 10**6, 0.2), policy("int8_row", 10**7, 0.03), policy("chosen", 9 * 10**6, 0.045, **chosen)],
            "study": {"layer": layers, "speed": speed, "block": block, "attention": attention}}  # fmt: skip


def small_report():
    times = TIMES + [
        time_point(m, "float32", 1024, t, median=2 * t)
        for m, t in (("baseline", 0.04), ("flash", 0.016), ("torch", 0.02))
    ]
    memory, rows = made_up_memory(), recommend.recommend(TIMES, ERRORS, 1e-2)
    lower = recommend.lower_precision(rows, 1e-2)
    buffer = laws.check_score_buffer(memory)
    fits = laws.fit_all(times, memory)
    golden = {"cosine_least": 1.0, "cosine_mean": 1.0, "largest_error": 1.8e-7}
    run = {
        "method": "flash",
        "dtype": "float32",
        "seconds": 2.0,
        "median": 2.5,
        "rounds": 2,
        "tokens_per_second": 5e4,
        "tokens": 450,
        "load_seconds": 0.1,
        "calls": 3,
        "stages": {"embedding": 0.1, "attention": 0.5, "linear": 1.2, "norm_and_activation": 0.1, "pooling": 0.1},
        "weight_bytes": 9 << 23,
        "workspace": 1 << 26,
        "resident": 1 << 26,
        "resident_how": "VmHWM",
        "golden": golden,
        "against": golden,
    }
    model = limits.model(memory, "flash", "float32")
    limit = {
        "method": "flash",
        "dtype": "float32",
        "model": model,
        "limit": 2**31,
        "free": 2**33,
        "longest_in_limit": limits.longest(model, 2**31),
        "longest_in_free": limits.longest(model, 2**33),
        "whole_call_seconds": 4000.0,
        "free_call_seconds": 64000.0,
        "inside": {"fits": True, "length": 2_000_000, "rows": 64, "seconds": 0.3, "error": 1e-6},
        "beyond": {"fits": False, "length": 2_300_000, "error": "MemoryError: <no & more>"},
    }
    return {
        "schema": 1,
        "created": "2026-01-02T03:04:05+00:00",
        "seconds": 12.0,
        "machine": {
            "processor": "A <processor> & more",
            "processors": 2,
            "threads": 2,
            "cpu_target": "avx2",
            "memory_bytes": 2**34,
            "memory_available_bytes": 2**33,
            "system": "Debian",
            "kernel": "6",
            "commit": "0123456789ab",
            "commit_changed": False,
            "heddle": "0.1.0",
            "versions": {"python": "3.11", "torch": None},
        },
        "settings": {"accuracy": 1e-2, "budget_seconds": 60.0, "lengths": [128, 512]},
        "build_seconds": 95.0,
        "text": {
            "documents": 2,
            "bytes": 237_000,
            "source": "licences",
            "pieces": 4,
            "tokens": 900,
            "longest": 300,
            "median": 200.0,
            "tokenise_seconds": 0.1,
            "padded_tokens": 1200,
            "histogram": [[0, 1], [32, 3]],
        },
        "encoder": [run | {"method": "baseline", "tokens_per_second": 4e4, "seconds": 2.5}, run],
        "memory": memory,
        "errors": [{**e, "own": e["total"], "plain": e["total"], "largest": e["total"], "rows": 64} for e in ERRORS],
        "sweep": {
            "shape": {"batch": 1, "heads": 8, "head_size": 64, "middle": 512},
            "length": times,
            "one_head": times,
            "batch": times[3:4],
            "heads": [],
            "head_size": times[3:6],
            "batches": times[:2],
            "best_batch": sweep.choose_batch(times[:2]),
        },
        "limits": [limit],
        "laws": {"fits": fits, "fits_one_head": fits, "score_buffer": buffer},
        "ratios": laws.compare_methods(times, memory),
        "ratios_one_head": laws.compare_methods(times, memory),
        "recommendation": {"rows": rows, "lower_precision": lower},
        "claims": claims.check([], buffer, fits, {}, lower),
        "lowbit": small_lowbit(),
        "left_out": [
            {"stage": "time", "what": "a & b", "why": "out of <time>", "count": 2, "length": None},
            {"stage": lowbit.STAGES[0], "what": "the encoder with <x>", "why": "late", "count": 1, "length": None},
        ],
        "stages": [{"name": "time & more", "seconds": 3.0, "allowed": 4.0}],
    }
