"""The demo's arithmetic on made-up numbers, its measurements on a tiny real run, and its page."""

import io
import json
import math
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from scripts.demo import charts, claims, html, laws, limits, lowbit, lowbit_page, recommend, sweep, text  # noqa: E402
from scripts.demo.progress import Progress  # noqa: E402


def test_fit_power_finds_the_exponent_and_says_how_well():
    x = np.array([512, 1024, 2048, 4096])
    exact = laws.fit_power(x, 3.0 * x**2.0)
    assert exact.exponent == pytest.approx(2.0) and exact.constant == pytest.approx(3.0) and exact.r2 == pytest.approx(1.0)
    flat = laws.fit_power(x, [7.0] * 4)
    assert flat.exponent == pytest.approx(0.0, abs=1e-9) and flat.r2 == 1.0
    noisy = laws.fit_power(x, 3.0 * x**2.0 * np.array([1, 3, 0.4, 1.2]))
    assert noisy.r2 < 0.95


@pytest.mark.parametrize("x, y, rule", [([1, 2], [0, 1], "positive"), ([1, 2], [math.nan, 1], "positive"), ([4, 4], [1, 2], "two"), ([1, 2], [1], "one length")])
def test_fit_power_refuses(x, y, rule):
    with pytest.raises(ValueError, match=rule):
        laws.fit_power(x, y)


def test_score_buffer_is_a_mebibyte_at_512():
    assert laws.score_buffer_bytes(1, 1, 512, 512) == 2**20
    assert laws.score_buffer_bytes(1, 1, 2048, 2048) == 2**24


def memory_point(method, length, workspace, dtype="float32"):
    tensor = 4 * 64 * length
    return {"batch": 1, "heads": 1, "length": length, "head_size": 64, "method": method, "dtype": dtype, "inputs": 3 * tensor,
            "output": tensor, "workspace": workspace, "resident": workspace + tensor, "resident_how": "VmHWM"}


def made_up_memory(baseline=lambda s: 4 * s * s + 1000, flash=lambda s: 50_000):
    return [memory_point(m, s, f(s)) for s in (256, 512, 1024, 2048) for m, f in (("baseline", baseline), ("flash", flash))]


def test_laws_hold_and_can_fail():
    good = laws.check_score_buffer(made_up_memory())
    assert good["baseline_holds"] and good["flash_holds"] and good["rows"][0]["scratch"] == pytest.approx(1000)
    assert not laws.check_score_buffer(made_up_memory(baseline=lambda s: 8 * s * s))["baseline_holds"]
    assert not laws.check_score_buffer(made_up_memory(baseline=lambda s: 3.9 * s * s))["baseline_holds"]
    assert not laws.check_score_buffer(made_up_memory(flash=lambda s: s * s))["flash_holds"]
    nothing = laws.check_score_buffer([])
    assert not nothing["baseline_holds"] and not nothing["flash_holds"]


def time_point(method, dtype, length, seconds, heads=8):
    return {"batch": 1, "heads": heads, "length": length, "head_size": 64, "method": method, "dtype": dtype, "seconds": seconds,
            "median": seconds, "rounds": 3, "gflops": 1.0}


TIMES = [
    time_point("flash", "float32", 128, 1.00e-3), time_point("flash", "bfloat16", 128, 0.97e-3), time_point("baseline", "float32", 128, 0.50e-3),
    time_point("flash", "float32", 512, 4e-3), time_point("flash", "bfloat16", 512, 2e-3), time_point("baseline", "float32", 512, 9e-3),
]
ERRORS = [
    {"length": s, "method": m, "dtype": d, "total": e}
    for s in (128, 512) for m, d, e in (("flash", "float32", 1e-7), ("flash", "bfloat16", 5e-3), ("baseline", "float32", 2e-7))
]


def chosen(accuracy, times=TIMES, errors=ERRORS):
    return {r["length"]: r["chosen"] and (r["chosen"]["method"], r["chosen"]["dtype"]) for r in recommend.recommend(times, errors, accuracy)}


def test_recommendation_keeps_to_the_accuracy():
    assert chosen(1e-2) == {128: ("baseline", "float32"), 512: ("flash", "bfloat16")}
    assert chosen(1e-4) == {128: ("baseline", "float32"), 512: ("flash", "float32")}
    assert chosen(1e-9) == {128: None, 512: None}
    refused = recommend.recommend(TIMES, ERRORS, 1e-4)[1]["refused"]
    assert [(c["method"], c["dtype"]) for c in refused] == [("flash", "bfloat16")]
    with pytest.raises(ValueError, match="greater than 0"):
        recommend.recommend(TIMES, ERRORS, 0.0)


def test_recommendation_takes_the_more_accurate_of_two_that_tie():
    tie = [time_point("flash", "float32", 128, 1.03e-3), time_point("flash", "bfloat16", 128, 1.0e-3)]
    assert chosen(1e-2, tie) == {128: ("flash", "float32")}
    apart = [time_point("flash", "float32", 128, 1.06e-3), time_point("flash", "bfloat16", 128, 1.0e-3)]
    assert chosen(1e-2, apart) == {128: ("flash", "bfloat16")}


def test_recommendation_never_takes_nan_or_an_unmeasured_error():
    spoilt = [{**e, "total": math.nan} if e["dtype"] == "bfloat16" else e for e in ERRORS]
    assert chosen(1e-2, errors=spoilt)[512] == ("flash", "float32")
    assert chosen(1e-2, errors=[]) == {128: None, 512: None}


def test_lower_precision_compares_the_best_of_each_dtype():
    answer = recommend.lower_precision(recommend.recommend(TIMES, ERRORS, 1e-2), 1e-2)
    assert [s["length"] for s in answer["lengths"]] == [128] and answer["worth_it"] is False  # 0.97 ms against 0.50 ms
    fast = [time_point("flash", "float32", 128, 2e-3), time_point("flash", "bfloat16", 128, 1e-3)]
    assert recommend.lower_precision(recommend.recommend(fast, ERRORS, 1e-2), 1e-2)["worth_it"] is True
    assert recommend.lower_precision(recommend.recommend(fast, ERRORS, 1e-4), 1e-4)["worth_it"] is False
    assert recommend.lower_precision([], 1e-2)["worth_it"] is None


def test_longest_sequence_inverts_the_bytes():
    points = made_up_memory()
    base = limits.model(points, "baseline", "float32")
    assert base["per_pair"] == pytest.approx(4.0, rel=1e-3) and base["per_token"] == pytest.approx(1024, rel=0.01)
    flash = limits.model(points, "flash", "float32")
    assert flash["per_pair"] == 0 and flash["constant"] == pytest.approx(50_000)
    for m in (base, flash):
        for limit in (2**24, 2**31):
            s = limits.longest(m, limit)
            assert m["constant"] + m["per_token"] * s + m["per_pair"] * s * s <= limit * (1 + 1e-9)
            assert m["constant"] + m["per_token"] * (s + 2) + m["per_pair"] * (s + 2) ** 2 > limit
    assert limits.longest(flash, 100) == 0
    with pytest.raises(ValueError, match="two are needed"):
        limits.model(points, "flash", "bfloat16")


def test_best_batch_is_the_smallest_that_is_as_good():
    points = [{**time_point("flash", "float32", 128, t), "batch": b} for b, t in ((1, 1.0), (2, 1.2), (4, 2.2), (8, 4.3))]
    row = sweep.choose_batch(points)[0]
    assert row["batch"] == 4 and row["gain_over_batch_1"] == pytest.approx(4 / 2.2) and row["largest_tried"] == 8
    assert [s[0] for s in sweep.batch_shapes([128], 8, 64, 1000)] == [1, 2, 4]


def test_claims_are_judged_by_the_figures():
    ratios = [{"length": 4096, "dtype": "float32", "faster": 45.0}, {"length": 128, "dtype": "float32", "faster": 1.1}]
    lower = {"lengths": [{"length": 128, "faster": 1.5, "error": 1e-3}], "worth_it": True, "up_to": 256}
    rows = claims.check(ratios, laws.check_score_buffer(made_up_memory()), [], {}, lower)
    verdict = {r["claim"]: r["verdict"] for r in rows}
    assert verdict["At length 4096, flash is about 40× faster"] == "holds"
    assert verdict["At length 128, flash is about 2× faster"] == "does not hold here"
    assert verdict["At length 512, flash is about 5× faster"] == "not measured"
    assert verdict["At length 2048 the score buffer of one head takes 16 MB"] == "holds"
    assert verdict["A lower precision does not pay at lengths up to 256"] == "does not hold here"


def test_progress_records_what_is_left_out():
    out = io.StringIO()
    progress = Progress(10.0, out)
    progress.stage("first", 0.5)
    assert 4.0 < progress.left() <= 5.0
    progress.leave_out("a point", "out of time")
    progress.end_stage()
    assert progress.left_out == [{"stage": "first", "what": "a point", "why": "out of time"}] and "a point" in out.getvalue()
    assert progress.stages[0]["seconds"] is not None


def test_text_is_real_and_long_enough():
    documents = text.collect(200_000)
    assert sum(len(content.encode()) for _, content in documents) >= 200_000
    assert text.paragraphs("one\n  two\n\n***\n\nthree\n") == ["one two", "three"]
    assert sum(len(content.encode()) for _, content in text.collect(5_000_000)) >= 5_000_000


@pytest.mark.parametrize("value, said", [(7200 * 2, "4 h"), (600, "10 min"), (1.5, "1.5 s"), (2.5e-3, "2.5 ms"), (123e-6, "123 µs"), (4e-9, "4 ns")])
def test_seconds_text(value, said):
    assert charts.seconds_text(value) == said


@pytest.mark.parametrize("value, said", [(512, "512 B"), (2**20, "1 MiB"), (3 * 2**29, "1.5 GiB")])
def test_bytes_text(value, said):
    assert charts.bytes_text(value) == said


def test_ticks_and_labels_stay_apart():
    assert charts.log_ticks(1e-6, 1.0, 10)[0] == 1e-6 and len(charts.log_ticks(1e-9, 1e9, 10)) <= 7
    assert all(t in (2, 5, 10, 20, 50) for t in charts.log_ticks(2, 50, 10))
    placed = charts._spread([100.0, 101.0, 99.0, 300.0], 16, 300)
    assert placed[2] < placed[0] < placed[1] < placed[3] <= 300 and min(np.diff(sorted(placed))) >= 16


class Page(HTMLParser):
    """Checks that tags nest, and collects what the page shows."""

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
        self.text.append(data)


def check_page(content):
    page = Page()
    page.feed(content)
    assert page.open == []
    for tag, attributes in page.seen:
        assert "src" not in attributes and attributes.get("href", html.INDEX) in html.PAGES, f"<{tag}> reaches outside the report"
    assert "http" not in re.sub(r"https?://www\.w3\.org\S*", "", content)
    drawn = [float(n) for tag, a in page.seen if tag in ("circle", "rect", "line") for n in (a.get(k, "0") for k in ("cx", "cy", "x", "y", "x1", "y1")) if n]
    assert all(math.isfinite(n) for n in drawn)
    assert "nan" not in " ".join(page.text).lower().split()
    return page


def small_lowbit():
    """What lowbit.policies and lowbit.study return, made up."""
    def policy(name, linear, error, **more):
        cosine = {"cosine_mean": 1 - error**2 / 2, "cosine_least": 1 - error**2, "largest_error": error}
        near = {"neighbours": 10, "overlap_mean": 1 - error, "overlap_least": 0.5, "nearest_same": 1 - error, "spearman_mean": 0.99, "spearman_least": 0.9}
        return {"name": name, "dtype": "bfloat16", "rules": {"*": f"<{name}>"} if error else {}, "load_seconds": 0.1, "seconds": 2.0, "rounds": 2,
                "pieces_per_second": 10 + error, "weight_bytes": linear + 10**7, "linear_bytes": linear, "held": linear, "loading": 10**8, "peak": 10**8,
                "resident_how": "VmHWM", "formats": [name], "pieces": 4, "tokens": 900, "cosine": cosine, "retrieval": near, "error": error, **more}  # fmt: skip

    chosen = {"allowed": 0.05, "sample_error": 0.04, "sample": 3, "choosing_seconds": 9.0}
    layers = [{"format": f, "rule": r, "bits": 4.5, "kept": k, "range": 0.1, "study": s}
              for f, r, k, s in (("e2m1_row", "plain", 88.7, 88.69), ("nvfp4", "mse", 91.9, None), ("int8_row", "plain", 99.6, None))]  # fmt: skip
    speed = {"rows": 4096, "torch": 0.2, "fp4": 0.15, "few": 64, "product": 0.002, "svd": 1.0, "float_bytes": 4 * 10**6, "plain_bytes": 505_000, "packed_bytes": 510_000}
    block = {"batch": 4, "length": 1024, "hidden": 768, "torch": {"seconds": 1.0, "kept": 100.0}, "float32": {"seconds": 0.95, "kept": 100.0}, "e2m1_row": {"seconds": 0.9, "kept": 97.0}, "nvfp4": {"seconds": 0.9, "kept": 98.0}}
    attention = {"batch": 4, "heads": 8, "length": 2048, "head_size": 64, "baseline": 6 * 10**8, "flash": 7 * 10**7}
    on_gpu = [policy(name, linear, error) | {"tokens_per_second": {"8192": 4e6, "65536": 5.25e6}, "alone_seconds": 4e-4} for name, linear, error in
              (("bfloat16", 2 * 10**7, 0.0), ("nvfp4", 5 * 10**6, 0.2))]  # fmt: skip
    about = {"gpu": "A <GPU>", "date": "2026-01-02T03:04:05+00:00", "method": "Rounds & waits."}
    return {"gpu": {"here": False, "why": "no <GPU> here", "source": "bench/results/x.json", "conditions": about, "rows": on_gpu},
            "policies": [policy("float32", 4 * 10**7, 0.0), policy("nvfp4", 5 * 10**6, 0.2), policy("int8_row", 10**7, 0.03), policy("chosen", 9 * 10**6, 0.045, **chosen)],
            "study": {"layer": layers, "speed": speed, "block": block, "attention": attention}}  # fmt: skip


def small_report():
    times = TIMES + [time_point("baseline", "float32", 1024, 0.04), time_point("flash", "float32", 1024, 0.016)]
    memory, rows = made_up_memory(), recommend.recommend(TIMES, ERRORS, 1e-2)
    lower = recommend.lower_precision(rows, 1e-2)
    buffer = laws.check_score_buffer(memory)
    fits = laws.fit_all(times, memory)
    golden = {"cosine_least": 1.0, "cosine_mean": 1.0, "largest_error": 1e-7}
    run = {"method": "flash", "dtype": "float32", "seconds": 2.0, "rounds": 2, "tokens_per_second": 5e4, "tokens": 450, "load_seconds": 0.1, "calls": 3,
           "stages": {"embedding": 0.1, "attention": 0.5, "linear": 1.2, "norm_and_activation": 0.1, "pooling": 0.1}, "weight_bytes": 9 << 23,
           "workspace": 1 << 26, "resident": 1 << 26, "resident_how": "VmHWM", "golden": golden, "against": golden}
    model = limits.model(memory, "flash", "float32")
    limit = {"method": "flash", "dtype": "float32", "model": model, "limit": 2**31, "free": 2**33, "longest_in_limit": limits.longest(model, 2**31),
             "longest_in_free": limits.longest(model, 2**33), "whole_call_seconds": 4000.0,
             "inside": {"fits": True, "length": 2_000_000, "rows": 64, "seconds": 0.3, "error": 1e-6},
             "beyond": {"fits": False, "length": 2_300_000, "error": "MemoryError: <no & more>"}}
    return {
        "schema": 1, "created": "2026-01-02T03:04:05+00:00", "seconds": 12.0,
        "machine": {"processor": "A <processor> & more", "processors": 2, "threads": 2, "cpu_target": "avx2", "memory_bytes": 2**34,
                    "memory_available_bytes": 2**33, "system": "Debian", "kernel": "6", "commit": "0123456789ab", "commit_changed": False,
                    "heddle": "0.1.0", "versions": {"python": "3.11", "torch": None}},
        "settings": {"accuracy": 1e-2, "budget_seconds": 60.0, "lengths": [128, 512]},
        "text": {"documents": 2, "bytes": 237_000, "source": "licences", "pieces": 4, "tokens": 900, "longest": 300, "median": 200.0,
                 "tokenise_seconds": 0.1, "padded_tokens": 1200, "histogram": [[0, 1], [32, 3]]},
        "encoder": [run], "memory": memory, "errors": [{**e, "own": e["total"], "plain": e["total"], "largest": e["total"], "rows": 64} for e in ERRORS],
        "sweep": {"shape": {"batch": 1, "heads": 8, "head_size": 64, "middle": 512}, "length": times, "one_head": times, "batch": times[3:4], "heads": [],
                  "head_size": times[3:6], "batches": times[:2], "best_batch": sweep.choose_batch(times[:2])},
        "limits": [limit], "laws": {"fits": fits, "fits_one_head": fits, "score_buffer": buffer},
        "ratios": laws.compare_methods(times, memory), "ratios_one_head": laws.compare_methods(times, memory),
        "recommendation": {"rows": rows, "lower_precision": lower}, "claims": claims.check([], buffer, fits, {}, lower),
        "lowbit": small_lowbit(),
        "left_out": [{"stage": "time", "what": "a & b", "why": "out of <time>"}, {"stage": "The encoder with low-bit layers", "what": "policy <x>", "why": "late"}], "stages": [{"name": "time", "seconds": 3.0, "allowed": 4.0}],
    }


def test_page_is_whole_and_escapes_what_it_is_given():
    report = small_report()
    page = check_page(html.page(report))
    shown = "".join(page.text)
    assert "A <processor> & more" in shown and "out of <time>" in shown and "<processor>" not in [tag for tag, _ in page.seen]
    assert "first 450 of these tokens" in shown and "last 64 were run" in shown and "2.50×" in shown  # 0.04 s against 0.016 s
    assert sum(tag == "svg" for tag, _ in page.seen) >= 10
    json.dumps(report, allow_nan=False)


def test_low_bit_page_is_whole_and_finds_the_smallest_that_is_good():
    report = small_report()
    page = check_page(html.lowbit(report))
    shown = "".join(page.text)
    assert "With formats chosen for 5 % error, the encoder's linear layers take 78 % fewer bytes" in shown  # 9 of 40 MB, cosine 0.99899
    assert "8.00×" in shown and "policy <x>" in shown and "<nvfp4>" in shown and "a & b" not in shown
    assert "4.00 % on 3 sample pieces" in shown and "reproduced" in shown
    assert [a["href"] for tag, a in page.seen if tag == "a"] == [html.INDEX]
    assert [a["href"] for tag, a in check_page(html.page(report)).seen if tag == "a"] == [html.LOWBIT]


def test_low_bit_page_says_whose_the_figures_of_a_gpu_are():
    report = small_report()
    shown = "".join(check_page(html.lowbit(report)).text)
    assert "Not measured here: no <GPU> here. Figures of bench/results/x.json, measured 2026-01-02, on an A <GPU>" in shown
    assert "5.25 M" in shown and "4.00 M" in shown and "Rounds & waits." in shown
    found = report["lowbit"]["gpu"]
    found["here"] = True
    shown = "".join(check_page(html.lowbit(report)).text)
    assert "Measured here, on an A <GPU>" in shown and "x.json" not in shown
    found["rows"] = []
    assert "Nothing was measured on a GPU" in "".join(check_page(html.lowbit(report)).text)


def test_figures_of_a_gpu_come_from_the_repository_where_there_is_none(monkeypatch, tmp_path):
    from scripts.demo import gpu

    report = small_report()
    kept = tmp_path / "figures.json"
    monkeypatch.setattr(gpu, "absence", lambda: "no GPU, in this test")
    monkeypatch.setattr(gpu, "FIGURES", kept)
    found = report["lowbit"]["gpu"] = gpu.policies(None, None)
    shown = "".join(check_page(html.lowbit(report)).text)
    assert "Nothing was measured on a GPU: no GPU, in this test, and the repository has no bench/results/figures.json" in shown

    figures = {key: small_lowbit()["gpu"][key] for key in ("conditions", "rows")}
    kept.write_text(json.dumps(figures))
    found = report["lowbit"]["gpu"] = gpu.policies(None, None)
    assert not found["here"] and found["rows"] == figures["rows"]
    shown = "".join(check_page(html.lowbit(report)).text)
    assert "Not measured here: no GPU, in this test. Figures of bench/results/figures.json" in shown
    json.dumps(report, allow_nan=False)


def test_gpu_policies_measure_what_the_page_shows(monkeypatch):
    import heddle
    import torch
    from scripts.demo import gpu

    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 100)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 1100)
    monkeypatch.setattr(gpu, "conditions", lambda: {"gpu": "none"})
    monkeypatch.setattr(gpu, "SECONDS", 0.0)
    monkeypatch.setattr(gpu, "ROUNDS", 1)

    class Encoder:  # embeddings that depend on the first token alone
        layers, weight_bytes = [heddle.EncoderLayer("a", "nvfp4", (2, 2), 7)], 1000

        def __init__(self, folder, device, dtype, layers):
            assert (folder, device) == ("somewhere", "cuda")

        def encode(self, ids, offsets):
            return torch.nn.functional.one_hot(torch.from_numpy(ids[offsets[:-1]]).long(), 8).float()

    monkeypatch.setattr(heddle, "Encoder", Encoder)
    packed = text.Packed(np.arange(6, dtype=np.int32), np.array([0, 1, 3, 6], np.int32))
    found = gpu.measure("somewhere", packed, np.eye(8, dtype=np.float32)[[0, 1, 3]])
    assert [row["name"] for row in found["rows"]] == [name for name, _, _ in gpu.POLICIES]
    row = found["rows"][0]
    assert row["peak"] == 2000 and row["linear_bytes"] == 7 and row["tokens"] == 6 and row["error"] == 0 and row["cosine"]["cosine_least"] == 1
    assert set(row["tokens_per_second"]) == {"8192", "65536"} and row["formats"] == ["nvfp4"] and row["alone_seconds"] > 0
    assert not gpu.measure("somewhere", packed, np.eye(8, dtype=np.float32)[[0, 1, 3]], left=lambda: 0)["rows"]


def test_the_block_is_held_against_torch_s():
    found = lowbit.block(1, 40, 64, 4, 256)
    assert set(found) == {"batch", "length", "hidden", "torch", "float32", "e2m1_row", "nvfp4"}
    assert found["torch"]["kept"] == 100 and 99.99 < found["float32"]["kept"] < 100
    assert 90 < found["e2m1_row"]["kept"] < found["nvfp4"]["kept"] < 99.9
    assert all(found[key]["seconds"] > 0 for key in ("torch", "float32", "e2m1_row", "nvfp4"))


def test_claims_of_the_study_are_judged_by_the_figures():
    report = small_report()
    verdict = [c["verdict"] for c in lowbit_page.claims(report)]
    no, yes = "does not hold here", "holds"
    assert verdict == [yes, no, yes, no, yes, yes]  # 88.7; 1.33x; 87.25 %; 1.11x; 88 %; 500x
    study = report["lowbit"]["study"]
    study["layer"][0]["kept"], study["speed"]["fp4"], study["speed"]["packed_bytes"] = 88.85, 0.05, 600_000
    study["block"]["e2m1_row"]["seconds"], study["attention"]["flash"], study["speed"]["svd"] = 0.7, 5 * 10**8, 0.01
    assert [c["verdict"] for c in lowbit_page.claims(report)] == [no, yes, no, yes, no, no]
    report["lowbit"]["study"] = {}
    assert {c["verdict"] for c in lowbit_page.claims(report)} == {"not measured"}
    assert "Nothing was measured here" in "".join(check_page(html.lowbit(report)).text)


def test_retrieval_compares_rankings():
    random = np.random.default_rng(0)
    wanted = random.standard_normal((40, 16))
    same = lowbit.retrieval(wanted * 3, wanted)  # lengths do not matter
    assert (same["overlap_least"], same["nearest_same"], same["neighbours"]) == (1, 1, 10) and same["spearman_least"] == pytest.approx(1)
    other = lowbit.retrieval(random.standard_normal((40, 16)), wanted)
    assert 0.1 < other["overlap_mean"] < 0.45 and abs(other["spearman_mean"]) < 0.15 and other["nearest_same"] < 0.2
    # Four pieces on a line: from the first one the others are ordered 1, 2, 3; with the last two exchanged 1, 3, 2.
    angle = np.array([0, 0.1, 0.3, 0.7])
    line = np.stack([np.cos(angle), np.sin(angle)], 1)
    swapped = lowbit.retrieval(line[[0, 1, 3, 2]], line, neighbours=2)
    # rankings of both, by hand: [1 2 3], [0 2 3], [1 0 3], [2 1 0] and [1 3 2], [0 3 2], [3 1 0], [1 0 2]
    assert swapped["nearest_same"] == pytest.approx(2 / 4) and swapped["overlap_mean"] == pytest.approx(1 / 2)
    assert swapped["spearman_mean"] == pytest.approx(np.mean([1 - 6 * d / (3 * 8) for d in (2, 2, 6, 6)]))
    with pytest.raises(ValueError, match="three pieces"):
        lowbit.retrieval(line[:2], line[:2])


def test_the_study_layer_is_reproduced():
    pytest.importorskip("heddle")
    pytest.importorskip("torch")
    kept = {(e["format"], e["rule"]): e for e in lowbit.layer_accuracy()}
    assert abs(kept["e2m1_row", "plain"]["kept"] - 88.69) <= 0.1
    assert kept["nvfp4", "mse"]["kept"] >= 91.5 and kept["int8_row", "plain"]["kept"] >= 99


def test_page_of_a_run_that_measured_almost_nothing():
    report = small_report()
    for key in ("encoder", "memory", "errors", "limits", "ratios", "ratios_one_head"):
        report[key] = []
    report["sweep"] |= {key: [] for key in ("length", "one_head", "batch", "heads", "head_size", "batches", "best_batch")}
    report["laws"] = {"fits": [], "fits_one_head": [], "score_buffer": laws.check_score_buffer([])}
    report["recommendation"] = {"rows": [], "lower_precision": recommend.lower_precision([], 1e-2)}
    assert "Nothing was measured here" in "".join(check_page(html.page(report)).text)
    report["lowbit"] = {"policies": [], "study": {}}
    assert "No policy was measured here" in "".join(check_page(html.lowbit(report)).text)


def test_a_tiny_real_run(tmp_path):
    pytest.importorskip("heddle")
    pytest.importorskip("torch")
    from scripts.demo import memory
    from scripts.demo.__main__ import KINDS

    progress = Progress(60.0, io.StringIO())
    progress.stage("all", 1.0)
    points = memory.sweep([512, 1024], KINDS, 1, 64, progress)
    assert laws.check_score_buffer(points)["baseline_holds"] and laws.check_score_buffer(points)["flash_holds"], points
    big = {p["method"]: p for p in points if p["length"] == 1024 and p["dtype"] == "float32"}
    # The score matrix of 4 MiB is really written; what flash needs does not come near it.
    assert big["baseline"]["resident"] >= 4 << 20 > 4 * big["flash"]["workspace"], big
    timer = sweep.Timer(progress)
    times = timer.along([(1, 2, 128, 64), (1, 2, 256, 64)], KINDS, 0.02)
    assert len(times) == 8 and all(0 < p["seconds"] <= p["median"] for p in times)
    errors = sweep.errors([128, 256], KINDS, 2, 64, progress)
    for e in errors:
        assert not e["own"] > (2e-6 if e["dtype"] == "float32" else 1e-2), e
        assert not e["own"] > 2 * e["plain"] + 1e-7, e
    assert all(r["chosen"] for r in recommend.recommend(times, errors, 1e-2))
    assert all(r["chosen"]["dtype"] == "float32" for r in recommend.recommend(times, errors, 1e-4))
    assert progress.left_out == []


def test_a_length_beyond_the_limit_fails_and_one_inside_runs():
    pytest.importorskip("heddle")
    pytest.importorskip("torch")
    limit = 64 << 20
    model = {"constant": 0.0, "per_token": 1024.0, "per_pair": 4.0}
    longest = limits.longest(model, limit)
    inside = limits._try(int(longest * 0.9), 64, "baseline", "float32", limit, True)
    assert inside["fits"] and inside["error"] < 1e-5, inside
    beyond = limits._try(int(longest * 1.2), 64, "baseline", "float32", limit, True)
    assert not beyond["fits"] and beyond["error"], beyond
    linear = limits.longest({"constant": 2e6, "per_token": 1024.0, "per_pair": 0.0}, limit)
    some = limits._try(int(linear * 0.9), 64, "flash", "float32", limit, False)
    assert some["fits"] and some["rows"] < some["length"] and some["error"] < 1e-4, some
    assert not limits._try(int(linear * 1.2), 64, "flash", "float32", limit, False)["fits"]
