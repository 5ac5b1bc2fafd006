"""The demo's arithmetic on made-up numbers, its measurements on a tiny real run, and its page."""

import io
import json
import math

import numpy as np
import pytest
from report_kit import ERRORS, TIMES, check_page, made_up_memory, small_report, time_point
from scripts.demo import charts, claims, html, laws, limits, recommend, sweep, text
from scripts.demo.progress import Progress


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


def test_laws_hold_and_can_fail():
    good = laws.check_score_buffer(made_up_memory())
    assert good["baseline_holds"] and good["flash_holds"] and good["rows"][0]["scratch"] == pytest.approx(1000)
    assert not laws.check_score_buffer(made_up_memory(baseline=lambda s: 8 * s * s))["baseline_holds"]
    assert not laws.check_score_buffer(made_up_memory(baseline=lambda s: 3.9 * s * s))["baseline_holds"]
    assert not laws.check_score_buffer(made_up_memory(flash=lambda s: s * s))["flash_holds"]
    nothing = laws.check_score_buffer([])
    assert not nothing["baseline_holds"] and not nothing["flash_holds"]


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


def test_page_is_whole_and_escapes_what_it_is_given():
    report = small_report()
    page = check_page(html.page(report))
    shown = "".join(page.text)
    assert "A <processor> & more" in shown and "out of <time>" in shown and "<processor>" not in [tag for tag, _ in page.seen]
    assert "first 450 of these tokens" in shown and "last 64 were run" in shown and "2.50×" in shown  # 0.04 s against 0.016 s
    assert sum(tag == "svg" for tag, _ in page.seen) >= 10
    json.dumps(report, allow_nan=False)


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
