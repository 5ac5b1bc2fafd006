"""The demo's page on adaptive sparse attention: what it measures on tiny shapes, and what it says of made-up figures."""

import json

import pytest
from report_kit import check_page, measure_here, shown, small_report

pytest.importorskip("torch")

from scripts.demo import asam, asam_page, html  # noqa: E402
from scripts.demo import asam_measure as measure  # noqa: E402
from scripts.demo.progress import OUT_OF_TIME, Progress  # noqa: E402
from scripts.demo.rounds import FORWARD, GRADIENTS  # noqa: E402

FORM = measure.Form(32, 4)
LENGTHS = (128, 256, 512, 1024, 2048)
SPEED = {"original": 6.0, "flash": 2.0, "flash16": 1.0, "local": 1.5}


@pytest.fixture
def timer(tmp_path):
    with open(tmp_path / "out", "w") as out:
        progress = Progress(300.0, out)
        progress.stage("all", 1.0)
        yield measure.Timer(FORM, progress)


def made_up():
    """What asam.run returns."""
    about = small_report()
    points = [
        {"length": s, "method": m, "direction": d, "dtype": measure.DTYPES[m], "batch": 1}
        for d in (FORWARD, GRADIENTS) for m in measure.MODES for s in LENGTHS
    ]  # fmt: skip
    seconds = [1e-3 * SPEED[p["method"]] * (p["length"] / 128) for p in points]
    times = [p | {"seconds": t, "median": 1.5 * t, "rounds": 3} for p, t in zip(points, seconds)]
    memory = [
        p | {"inputs": 1024, "output": 1024, "resident": 1e6, "beside": 1000 * p["length"] + (p["method"] == "original") * 32 * p["length"] ** 2, "resident_how": "VmHWM <so>"}
        for p in points
    ]  # fmt: skip
    batches = [
        {"method": m, "batch": b, "length": 512, "seconds": 1e-3 * max(b, 4) * SPEED[m], "beside": 1e6 * b}
        for m in measure.BATCHED for b in (1, 2, 4, 8)
    ]  # fmt: skip
    return {
        **{key: about[key] for key in ("created", "machine", "build_seconds", "seconds", "stages")},
        "form": {"dim": 512, "heads": 8, "batch": 1},
        "settings": {"budget_seconds": 60.0, "lengths": list(LENGTHS), "batch_length": 512, "limit": 2 << 30},
        "agreement": 7e-8,
        "times": times,
        "memory": memory,
        "longest": [
            {"method": "original", "limit": 2 << 30, "longest": 1000, "inside": {"fits": True, "length": 900, "seconds": 1.0}},
            {"method": "flash", "limit": 2 << 30, "longest": 5000, "beyond": {"fits": False, "length": 6650, "error": "no"}},
        ],
        "batches": batches,
        "best_batches": measure.best_batches(batches),
        "left_out": [],
    }  # fmt: skip


def test_page_is_whole_and_compares_factors_with_what_was_published():
    content = asam_page.page(made_up())
    page, text = check_page(content), shown(content)
    assert "3.00× to 3.00× the speed of the public algorithm, at lengths from 128 to 2048" in text
    assert "7.0·10⁻⁸" in text and "another function than Original" in text and "VmHWM <so>" in text
    assert "7.73 ms2.60 ms2.97×6 ms2 ms3.00×" in text  # there, and here
    assert text.count("holds") >= 5 and "does not hold here" in text  # 16 bits gain at 256
    assert "900: ran, 1 s" in text and "6650: did not fit" in text
    assert sum(tag == "svg" for tag, _ in page.seen) > 3
    assert {"sparse.html", "index.html", "lowbit.html"} == {a["href"] for tag, a in page.seen if tag == "a"}


def test_what_is_left_out_stands_on_top_and_empty_sections_are_gone():
    report = made_up()
    report |= {key: [] for key in ("times", "memory", "longest", "batches", "best_batches")}
    report |= {
        "agreement": None,
        "left_out": [{"stage": "Time", "what": "x", "why": OUT_OF_TIME, "count": 3, "length": 1}],
    }
    text = shown(asam_page.page(report))
    assert "3 measurements were left out or cut short for want of time" in text and "BUDGET=120" in text
    for title in ("The longest sequence", "The best batch", "What is best at each length", "It differs from"):
        assert title not in text, title
    assert text.count("not measured") >= 8  # each claim


def test_the_best_batch_is_the_least_that_is_as_fast():
    best = {row["method"]: row for row in made_up()["best_batches"]}
    assert best["flash"]["batch"] == 4 and best["flash"]["rate"] == pytest.approx(512 / 2e-3)
    assert best["flash"]["twice"] == {"rate": pytest.approx(512 / 2e-3), "beside": 8e6}
    assert measure.best_batches([]) == []


def test_original_is_the_public_layer():
    assert 0 < measure.agreement(FORM, 150) < 1e-6


@pytest.mark.parametrize("direction", [FORWARD, GRADIENTS])
def test_times_and_memory_of_every_layer(timer, direction):
    points = timer.along([64, 96], direction, 0.01)
    assert [(p["length"], p["method"]) for p in points] == [(s, m) for s in (64, 96) for m in measure.MODES]
    assert all(0 < p["seconds"] <= p["median"] and p["dtype"] == measure.DTYPES[p["method"]] for p in points)
    form = measure.Form(64, 8)
    of_scores = 4 * form.heads * 1024**2
    original, flash = (measure._held(form, mode, direction, 1024)["beside"] for mode in ("original", "flash"))
    assert original > 2 * of_scores > 4 * flash  # two softmaxes of all pairs, and none


def test_the_longest_sequence_is_tried_under_the_limit(timer):
    timer.last = {(mode, FORWARD): (64, 1e-4) for mode in measure.MODES}
    per_token = {"original": 0, "flash": 40_000, "flash16": 20_000}
    points = [
        {"length": s, "method": m, "dtype": measure.DTYPES[m], "direction": FORWARD, "inputs": 128 * s, "output": 128 * s,
         "beside": per_token[m] * s + (m == "original") * 4 * 4 * 4 * s**2}
        for m in measure.BATCHED for s in (512, 1024, 2048, 4096)
    ]  # fmt: skip
    found = {e["method"]: e for e in measure.longest(FORM, points, timer, 64 << 20)}
    assert found["original"]["longest"] == pytest.approx(1024, rel=0.02)
    assert found["flash16"]["longest"] > 1.9 * found["flash"]["longest"] > 2500
    assert {"inside", "beyond"} <= set(found["original"])
    big = measure._attempt(FORM, "original", 4096, 64 << 20)
    assert not big["fits"] and measure._attempt(FORM, "flash", 1024, 64 << 20)["fits"]


def test_a_whole_run_writes_page_and_figures(tmp_path, capsys, monkeypatch):
    measure_here(monkeypatch)
    given = [
        "--budget",
        "500",
        "--lengths",
        "32",
        "--dim",
        "32",
        "--heads",
        "4",
        "--batch-length",
        "16",
        "--most-batch",
        "2",
    ]
    assert asam.main([*given, "--out", str(tmp_path), "--build-seconds", "7"]) == 0
    report, printed = json.loads((tmp_path / asam.DATA).read_text()), capsys.readouterr().out
    assert [item["stage"] for item in report["left_out"]] == ["Longest sequence that fits"] * 3, printed
    assert len(report["times"]) == len(report["memory"]) == 8 and len(report["batches"]) == 6
    assert len(report["best_batches"]) == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([asam.DATA, html.ASAM])
    assert "the build before took 7 s" in shown((tmp_path / html.ASAM).read_text())
