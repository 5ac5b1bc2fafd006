"""The demo's arithmetic on made-up numbers, and its measurements on a tiny real run."""

import io
import math

import numpy as np
import pytest
from report_kit import ERRORS, TIMES, made_up_memory, time_point

from scripts.demo import claims, encode, laws, limits, recommend, sweep, text, units
from scripts.demo.progress import Progress


def test_fit_power_finds_the_exponent_and_says_how_well():
    x = np.array([512, 1024, 2048, 4096])
    exact = laws.fit_power(x, 3.0 * x**2.0)
    assert (
        exact.exponent == pytest.approx(2.0) and exact.constant == pytest.approx(3.0) and exact.r2 == pytest.approx(1.0)
    )
    flat = laws.fit_power(x, [7.0] * 4)
    assert flat.exponent == pytest.approx(0.0, abs=1e-9) and flat.r2 == 1.0
    noisy = laws.fit_power(x, 3.0 * x**2.0 * np.array([1, 3, 0.4, 1.2]))
    assert noisy.r2 < 0.95


@pytest.mark.parametrize(
    "x, y, rule",
    [
        ([1, 2], [0, 1], "positive"),
        ([1, 2], [math.nan, 1], "positive"),
        ([4, 4], [1, 2], "two"),
        ([1, 2], [1], "one length"),
    ],
)
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
    assert nothing["baseline_holds"] is None and nothing["flash_holds"] is None


def test_laws_are_not_judged_on_fewer_than_four_lengths():
    def points(lengths):
        return [time_point("baseline", "float32", s, 1e-9 * s**2.66) for s in lengths]

    assert laws.fit_all(points([512, 1024]), [])[0]["seconds"] is None  # R² would be 1
    assert laws.fit_all(points([256, 512, 1024, 2048]), [])[0]["seconds"] is None  # three of them from 512 on
    fits = laws.fit_all(points([512, 1024, 2048, 4096]), [])
    assert fits[0]["seconds"]["exponent"] == pytest.approx(2.66) and fits[0]["seconds"]["points"] == 4
    few = laws.check_score_buffer(made_up_memory(lengths=(256, 512, 1024, 2048)))
    assert (few["rows"], few["flash_growth"], few["baseline_holds"], few["flash_holds"]) == ([], [], None, None)

    lower = recommend.lower_precision([], 1e-2)
    squares = "Twice the length takes four times the time"
    verdicts = {
        r["claim"]: r["verdict"] for r in claims.check([], few, laws.fit_all(points([512, 1024]), []), {}, lower)
    }
    assert verdicts[squares] == verdicts["At length 2048 the score buffer of one head takes 16 MiB"] == "not measured"
    assert {r["claim"]: r["verdict"] for r in claims.check([], few, fits, {}, lower)}[squares] == "does not hold here"
    batch = [{**time_point("baseline", "float32", 512, 1e-3 * b), "batch": b} for b in (1, 2, 4, 8)]
    grows = "Time grows in proportion to the batch"
    for some, verdict in ((batch, "holds"), (batch[:3], "not measured")):
        assert {r["claim"]: r["verdict"] for r in claims.check([], few, [], {"batch": some}, lower)}[grows] == verdict


def test_methods_are_compared_with_torch_too():
    times = [time_point("flash", "float32", 512, 2.0), time_point("torch", "float32", 512, 3.0)]
    row = laws.compare_methods(times, [])[0]
    assert row["faster_than_torch"] == 1.5 and row["faster"] is None and row["smaller_workspace"] is None
    row = laws.compare_methods([*times, time_point("baseline", "float32", 512, 5.0)], made_up_memory())[0]
    assert (row["faster"], row["faster_than_torch"]) == (2.5, 1.5) and row["smaller_workspace"] > 20
    assert laws.compare_methods(times[:1], []) == []


def test_runs_whose_unchanged_stages_differ_are_found():
    def run(dtype, **stages):
        return {"dtype": dtype, "seconds": 3.0, "stages": {"attention": 1.0, "linear": 1.0, "pooling": 0.01} | stages}

    same = [run("float32"), run("float32", attention=2.5, linear=1.15), run("bfloat16", linear=0.5)]
    assert encode.unequal(same) == []  # attention is what differs, 1.15 is chance, another dtype is other code
    found = encode.unequal([*same, run("float32", linear=1.8, pooling=0.1)])
    assert found == [
        {"stage": "linear", "dtype": "float32", "slow": 3, "quick": 0, "ratio": 1.8}
    ]  # pooling is 3 % of the run
    assert [u["slow"] for u in encode.unequal(same, ("attention",))] == [1]
    assert encode.unequal([]) == []


def chosen(accuracy, times=TIMES, errors=ERRORS):
    return {
        r["length"]: r["chosen"] and (r["chosen"]["method"], r["chosen"]["dtype"])
        for r in recommend.recommend(times, errors, accuracy)
    }


def test_recommendation_keeps_to_the_accuracy():
    assert chosen(1e-2) == {128: ("baseline", "float32"), 512: ("flash", "bfloat16")}
    assert chosen(1e-4) == {128: ("baseline", "float32"), 512: ("flash", "float32")}
    assert chosen(1e-9) == {128: None, 512: None}
    refused = recommend.recommend(TIMES, ERRORS, 1e-4)[1]["refused"]
    assert [(c["method"], c["dtype"]) for c in refused] == [("flash", "bfloat16")]
    with pytest.raises(ValueError, match="greater than 0"):
        recommend.recommend(TIMES, ERRORS, 0.0)


def test_recommendation_has_no_row_where_flash_was_not_timed():
    rest = [*TIMES, time_point("baseline", "float32", 4096, 3.0), time_point("flash", "float32", 4096, 1.0)]
    errors = [*ERRORS, *({**ERRORS[0], "length": 4096, "method": m} for m in ("flash", "baseline"))]
    assert set(chosen(1e-2, rest, errors)) == {128, 512}
    without_baseline = [*rest[:-2], *(time_point("flash", d, 4096, 1.0) for d in ("float32", "bfloat16"))]
    assert chosen(1e-2, without_baseline, errors)[4096] == ("flash", "float32")


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
    with pytest.raises(ValueError, match="0 lengths from 512 on were measured; 4 are needed"):
        limits.model(points, "flash", "bfloat16")
    few = made_up_memory(baseline=lambda s: 4 * s * s + 10**6, lengths=(128, 256, 512))  # scratch hides the square
    with pytest.raises(ValueError, match="1 lengths from 512 on"):
        limits.model(few, "baseline", "float32")


def test_best_batch_is_the_smallest_that_is_as_good():
    points = [
        {**time_point("flash", "float32", 128, t), "batch": b} for b, t in ((1, 1.0), (2, 1.2), (4, 2.2), (8, 4.3))
    ]
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
    assert verdict["At length 2048 the score buffer of one head takes 16 MiB"] == "holds"
    assert verdict["A lower precision does not pay at lengths up to 256"] == "does not hold here"


def test_every_claim_says_when_it_holds():
    rows = claims.check([], laws.check_score_buffer([]), [], {}, recommend.lower_precision([], 1e-2))
    assert all(r["holds_if"] for r in rows)
    said = {r["claim"]: r["holds_if"] for r in rows}
    assert said["At length 4096, flash is about 40× faster"] == "at least 32.0×, 0.8 of it"
    assert said["Twice the length takes four times the time"] == "3.48× to 4.59×: an exponent of 1.8 to 2.2"


def test_progress_records_what_is_left_out():
    out = io.StringIO()
    progress = Progress(10.0, out)
    progress.stage("first", 0.5)
    assert 4.0 < progress.left() <= 5.0
    progress.leave_out("a point", "out of time", 3, 512)
    progress.end_stage()
    assert progress.left_out == [{"stage": "first", "what": "a point", "why": "out of time", "count": 3, "length": 512}]
    assert "a point" in out.getvalue()
    assert progress.stages[0]["seconds"] is not None


def test_text_is_real_and_long_enough():
    documents = text.collect(200_000)
    assert sum(len(content.encode()) for _, content in documents) >= 200_000
    assert text.paragraphs("one\n  two\n\n***\n\nthree\n") == ["one two", "three"]
    assert sum(len(content.encode()) for _, content in text.collect(5_000_000)) >= 5_000_000


@pytest.mark.parametrize(
    "value, said",
    [
        (86400 * 12, "12 days"),
        (7200 * 2, "4 h"),
        (600, "10 min"),
        (119, "119 s"),
        (1.5, "1.5 s"),
        (2.5e-3, "2.5 ms"),
        (123e-6, "123 µs"),
        (4e-9, "4 ns"),
    ],
)
def test_seconds_text(value, said):
    assert units.seconds_text(value) == said


@pytest.mark.parametrize("value, said", [(512, "512 B"), (2**20, "1 MiB"), (3 * 2**29, "1.5 GiB")])
def test_bytes_text(value, said):
    assert units.bytes_text(value) == said


@pytest.mark.parametrize(
    "value, said",
    [(1e-7, "10⁻⁷"), (1.84e-7, "1.8·10⁻⁷"), (9.97e-3, "10⁻²"), (9.4e-3, "9.4·10⁻³"), (0.0, "0"), (1.02e-3, "10⁻³")],
)
def test_error_text(value, said):
    assert units.error_text(value) == said


def test_a_tiny_real_run(tmp_path):
    pytest.importorskip("heddle")
    pytest.importorskip("torch")
    from scripts.demo import memory
    from scripts.demo.__main__ import KINDS

    progress = Progress(60.0, io.StringIO())
    progress.stage("all", 1.0)
    points = memory.sweep([512, 640, 768, 1024], KINDS, 1, 64, progress)
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
