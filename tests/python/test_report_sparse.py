"""The demo's page on native sparse attention: what it measures on tiny shapes, and what it says of made-up figures."""

import json
import math
import subprocess

import pytest
from report_kit import ROOT, check_page, measure_here, shown, small_report

pytest.importorskip("torch")

from scripts.demo import html, laws, rounds, sparse, sparse_gpu, sparse_page  # noqa: E402
from scripts.demo import sparse_measure as measure  # noqa: E402
from scripts.demo.progress import NO_MEMORY, OUT_OF_TIME, Progress  # noqa: E402

FORM = measure.Form(4, 2, 16, 2, 16, 32)
SPEED = {"dense": 8.0, "nsa": 4.0, "seed": 2.5, "seed_4_3": 2.0, "fast": 3.2}
LENGTHS = (1024, 2048, 4096, 8192)


@pytest.fixture
def timer(tmp_path):
    with open(tmp_path / "out", "w") as out:
        progress = Progress(300.0, out)
        progress.stage("all", 1.0)
        yield measure.Timer(FORM, progress)


def time_of(mode, length):
    return 1e-3 * SPEED[mode] * (length / 1024) ** (2 if mode == "dense" else 1)


def made_up():
    """What sparse.run returns."""
    about = small_report()
    kinds = [(m, d, s) for d in (measure.FORWARD, measure.GRADIENTS) for m in measure.MODES for s in LENGTHS]
    same = {"dtype": "float32"}
    times = [
        {"length": s, "method": m, "direction": d, "seconds": time_of(m, s), "median": 1.5 * time_of(m, s), "rounds": 3} | same
        for m, d, s in kinds
    ]  # fmt: skip
    memory = [
        {
            "length": s, "method": m, "direction": d, "inputs": 4096 * s, "results": 2048 * s, "beside": 1024 * s * i,
            "resident": 1024 * s * i + 2048 * s, "resident_how": "VmHWM <so>",
        } | same
        for i, (m, d, s) in enumerate(kinds)
    ]  # fmt: skip
    fits = laws.fit_all(times[:20], [p | {"workspace": p["beside"]} for p in memory[:20]])
    return {
        **{key: about[key] for key in ("created", "machine", "build_seconds", "seconds", "stages")},
        "form": {"heads": 32, "kv_heads": 8, "head_size": 128, "blocks": 16, "block_size": 64, "window": 512},
        "settings": {"budget_seconds": 60.0, "lengths": list(LENGTHS)},
        "times": times,
        "memory": memory,
        "laws": {measure.FORWARD: fits, measure.GRADIENTS: fits},
        "changes": [
            {"length": s, "kind": k, "method": m, "change": 0.25 if m != "fast" else 0.0}
            for s in LENGTHS for k in measure.KINDS for m in measure.SHARING
        ],
        "recall": [
            {"length": 1024, "kind": k, "stride": 2, "rows": 128, "similarity": 0.5, "overlap": 0.9, "own_mass": 0.81, "anchor_mass": 0.75}
            for k in measure.KINDS
        ],
        "rounding": [{"length": 1024, "method": m, "error": 2e-7} for m in measure.MODES],
        "gpu": [],
        "left_out": [],
    }  # fmt: skip


def gpu_file(folder, rows, gpu="A <GPU>", name="nvidia-a.json", date="2026-01-02T03:04:05+00:00"):
    (folder / name).write_text(json.dumps({"conditions": {"gpu": gpu, "date": date}, "rows": rows}))


def gpu_row(name, unit="calls/s", **ms):
    figures = (
        {"rates": ms} if unit == "MiB" else {"milliseconds": {n: [x, x, 9 * x] for n, x in ms.items()}, "rates": {}}
    )
    return {"name": name, "unit": unit, "kernel": "nsa", "absent": {"fla": "it is <not> there"}} | figures


def test_page_is_whole_and_says_that_dense_attention_is_another_function():
    report = made_up()
    content = sparse_page.page(report)
    page = check_page(content)
    text = "".join(page.text)
    assert "At length 8.19 k" in text or "At length 8192" in text
    assert "has 16.0× the speed of dense" in text and "32.0×the speed of" in text  # 8·64 ms against 4·8 ms, 2·8 ms
    assert "another function than dense attention" in text and "is no error" in text
    assert "VmHWM <so>" in text and "T^2.00" in text and "81.0 %" in text and "2.0·10⁻⁷" in text
    assert {a["href"] for tag, a in page.seen if tag == "a"} == {html.INDEX, html.LOWBIT, html.ASAM}
    assert sum(tag == "svg" for tag, _ in page.seen) > 6
    json.dumps(report, allow_nan=False)


def test_what_is_left_out_stands_on_top_in_one_line():
    report = made_up()
    report["left_out"] = [{"stage": "time", "what": "x <y>", "why": OUT_OF_TIME, "count": 3, "length": 16384}]
    top = shown(sparse_page.page(report)).split("Forward")[0]
    assert "3 measurements were left out or cut short for want of time" in top
    assert "make demo-sparse BUDGET=120" in top
    assert "left out" not in shown(sparse_page.page(made_up()))


def test_page_of_a_run_that_measured_nothing_has_no_empty_cards():
    report = made_up()
    report |= {key: [] for key in ("times", "memory", "changes", "recall", "rounding")}
    report["laws"] = {direction: laws.fit_all([], []) for direction in (measure.FORWARD, measure.GRADIENTS)}
    text = shown(sparse_page.page(report))
    for title in ("What sharing changes", "Rounding errors", "How they grow", "dense attention's mass"):
        assert title not in text.split("Conditions")[0].split("says.", 1)[1], title
    assert "Native sparse attention, measured here" in text and "Conditions" in text


def test_gpu_figures_are_the_files_or_none(tmp_path):
    report = made_up()
    assert "On GPUsNot measured: no result file" in shown(sparse_page.page(report))
    gpu_file(tmp_path, [gpu_row("forward D64 none S512", heddle=1.0)])
    assert sparse_gpu.read(tmp_path) == []

    rows = [
        gpu_row(f"nsa 64/4 window 512 forward S{s}", heddle=s / 1e4, fla=s / 5e3, dense=s / 1e3) for s in (8192, 16384)
    ]
    rows += [
        gpu_row("nsa 64/4 window 512 fast forward S8192", heddle=0.5, default=0.8),
        gpu_row("nsa decode B1 64/4 65536", heddle=0.1),
    ]
    rows += [gpu_row("nsa memory of forward and backward 64/4 S65536", "MiB", heddle=1024.0)]
    gpu_file(tmp_path, rows)
    gpu_file(
        tmp_path,
        [gpu_row("nsa decode B1 64/4 65536", heddle=0.3)],
        name="nvidia-b.json",
        date="2026-02-02T03:04:05+00:00",
    )
    report["gpu"] = sparse_gpu.read(tmp_path)
    assert len(report["gpu"]) == 5 and report["gpu"][0]["length"] == 8192
    content = sparse_page.page(report)
    text = shown(content)
    assert "On GPUs: A <GPU>" in text and "Not measured by this page" in text and "Every row" in text
    for said in (
        "Forward, 64/4 heads, window 512",
        "fla NSA 1.64 ms",
        "Heddle fast",
        "300 µs",
        "1 GiB",
        "nvidia-b.json (2026-02-02)",
        "it is <not> there",
    ):
        assert said in text, said
    assert "100 µs" not in text.split("On GPUs")[1]  # the newer file's row replaces the older's


@pytest.mark.parametrize("direction", [measure.FORWARD, measure.GRADIENTS])
def test_times_and_memory_of_every_mode(timer, direction):
    points = timer.along([64, 128], direction, 0.01)
    assert [(p["length"], p["method"]) for p in points] == [(s, m) for s in (64, 128) for m in measure.MODES]
    assert all(0 < p["seconds"] <= p["median"] and p["rounds"] >= 2 for p in points)
    form = measure.Form(8, 2, 64)
    held = measure._held(form, "nsa", direction, 1024)
    x = measure.inputs(form, 1024)
    o = 4 * x[0].numel()
    operands, backward = 4 * sum(y.numel() for y in x), direction == measure.GRADIENTS
    assert held["inputs"] == operands + (o if backward else 0)  # do
    assert held["results"] == o + (operands if backward else 0)
    assert o < held["beside"] < 20 * o  # three branches' outputs are summed


def test_what_does_not_fit_is_left_out(timer, monkeypatch):
    monkeypatch.setattr(rounds.machine, "memory_bytes", lambda: 1000)
    assert timer.along([64], measure.FORWARD, 0.01) == []
    assert [item["why"] for item in timer.progress.left_out] == [NO_MEMORY] * 5
    monkeypatch.undo()
    timer.progress.stage("none", 0.0)
    assert timer.along([64], measure.FORWARD, 0.01) == [] and measure.memory(FORM, [64], measure.FORWARD, timer) == []
    assert (
        measure.rounding(FORM, [64], [64], timer)
        == measure.changes(FORM, [64], timer)
        == measure.recall(FORM, [64], timer)
        == []
    )
    assert {item["why"] for item in timer.progress.left_out[5:]} == {OUT_OF_TIME}


def test_errors_are_of_rounding_and_changes_are_of_sharing(timer):
    rounding = measure.rounding(FORM, [256], [256], timer)
    assert [p["method"] for p in rounding] == list(measure.MODES)
    assert all(0 < p["error"] < 1e-5 for p in rounding), rounding
    found = {(p["kind"], p["method"]): p["change"] for p in measure.changes(FORM, [256], timer)}
    assert found["alike", "seed"] < 0.6 * found["random", "seed"] and found["random", "seed"] > 0.3
    assert 0 < found["random", "fast"] < found["random", "seed"]
    recall = measure.recall(FORM, [256], timer, rows=16)
    assert [p["kind"] for p in recall] == list(measure.KINDS) and all(0 < p["own_mass"] < 1 for p in recall)
    assert recall[1]["similarity"] == pytest.approx(measure.ALIKE, abs=0.03)


def test_neighbours_are_as_alike_as_the_page_says():
    q, k, v, *gates = measure.inputs(FORM, 4096, "alike")
    assert all(g.shape == q.shape[:3] and 0 < g.min() and g.max() < 1 for g in gates)
    for x in (q, k, v):
        assert float((x[:, 1:] * x[:, :-1]).mean() / x.square().mean()) == pytest.approx(measure.ALIKE, abs=0.01)
        assert math.isclose(float(x.square().mean()), 1, abs_tol=0.1)


def test_a_whole_run_writes_page_and_figures(tmp_path, capsys, monkeypatch):
    measure_here(monkeypatch)
    given = ["--budget", "120", "--lengths", "64,128", "--heads", "4", "--kv-heads", "2", "--head-size", "16"]
    assert sparse.main([*given, "--out", str(tmp_path), "--build-seconds", "7"]) == 0
    report = json.loads((tmp_path / sparse.DATA).read_text())
    assert report["left_out"] == [], capsys.readouterr().out
    assert len(report["times"]) == len(report["memory"]) == 20 and report["build_seconds"] == 7
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([sparse.DATA, html.SPARSE])
    assert "the build before took 7 s" in shown((tmp_path / html.SPARSE).read_text())


def test_make_demo_sparse_hands_on_its_budget():
    asked = subprocess.run(
        ["make", "-n", "--no-print-directory", "demo-sparse", "BUDGET=30"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    assert asked[:2] == ["scripts/demo.sh", "--sparse"]
    assert sparse.arguments(asked[2:]).budget == 30 and sparse.arguments([]).budget < 600
