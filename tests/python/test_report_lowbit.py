"""The report's page on low-bit formats, and what it is made of, on made-up numbers; the study's layer for real."""

import json

import numpy as np
import pytest
from report_kit import check_page, shown, small_lowbit, small_report

from scripts.demo import html, lowbit, reported, text


def test_low_bit_page_is_whole_and_finds_the_smallest_that_is_good():
    report = small_report()
    page = check_page(html.lowbit(report))
    text = "".join(page.text)
    # 9 of 40 MB, 10.045 pieces a second of 10, cosine 0.99899
    assert (
        "With formats chosen for 5 % error, the encoder's linear layers take 78 % fewer bytes at 1.00× the speed of float32, and embeddings "
        "keep a mean cosine of 0.9990"
    ) in text
    assert "8.00×" in text and "the encoder with <x>" in text and "<nvfp4>" in text and "a & b" not in text
    assert "4.00 % on 3 sample pieces" in text and "reproduced" in text
    assert [a["href"] for tag, a in page.seen if tag == "a"] == [html.INDEX, "#left-out"]
    assert [a["href"] for tag, a in check_page(html.page(report)).seen if tag == "a"] == [html.LOWBIT, "#left-out"]


def test_low_bit_page_says_on_top_what_was_left_out_of_it():
    report = small_report()
    assert "1 measurement was left out or cut short" in shown(html.lowbit(report)).split("format by format")[0]
    assert "2 measurements were left out" in shown(html.page(report))
    report["left_out"] = [
        {"stage": stage, "what": "x", "why": "late", "count": 1, "length": None} for stage in lowbit.STAGES
    ]
    assert "3 measurements were left out" in shown(html.lowbit(report)) and "left out" not in shown(html.page(report))


def test_tiles_say_each_thing_once():
    report = small_report()
    runs = {run["name"]: run for run in report["lowbit"]["policies"]}
    for name, rate in (("float32", 19.0), ("nvfp4", 10.0), ("int8_row", 12.5), ("chosen", 11.0)):
        runs[name]["pieces_per_second"] = rate
    text = shown(html.lowbit(report))
    assert "19.0 pieces/swith float32, the fastest here; the fastest with low-bit weights is int8_row with 12.5" in text
    assert "float32 reaches" not in text and "78 % fewer bytes at 0.58× the speed of float32" in text
    assert "nearest pieces stay the same with formats chosen for 5 % error" in text
    assert "at a mean cosine of 0.980 and 0.53× the speed of float32" in text  # the tile of the smallest
    runs["int8_row"]["pieces_per_second"] = 25.0
    text = shown(html.lowbit(report))
    assert (
        "25.0 pieces/swith int8_row, the fastest here; float32 reaches 19.0" in text
        and "the fastest with low-bit" not in text
    )


def test_passes_that_met_a_busy_machine_are_flagged():
    report = small_report()
    assert "not equally free" not in shown(html.lowbit(report))
    report["lowbit"]["policies"][1]["stages"]["attention"] = 0.6
    assert "took longer with nvfp4 than with float32 (attention 1.50×)" in shown(html.lowbit(report))


def test_low_bit_page_says_whose_the_figures_of_a_gpu_are():
    report = small_report()
    text = shown(html.lowbit(report))
    assert (
        "Not measured here: no <GPU> here. Figures of bench/results/x.json, measured 2026-01-02, on an A <GPU>" in text
    )
    assert "5.25 M" in text and "4.00 M" in text and "Rounds & waits." in text
    found = report["lowbit"]["gpu"]
    found["here"] = True
    text = shown(html.lowbit(report))
    assert "Measured here, on an A <GPU>" in text and "x.json" not in text
    found["rows"] = []
    assert "The same on a GPU" not in shown(html.lowbit(report))


def test_the_gpu_s_part_says_what_slower_formats_are_for():
    report = small_report()
    plain, low = report["lowbit"]["gpu"]["rows"]
    low["tokens_per_second"] = {"8192": 3e6, "65536": 4.2e6}
    text = shown(html.lowbit(report))
    assert (
        "Why use formats that are slower than 16 bits? For memory: they take 75 to 75 % off" in text
        and "at up to 0.80× the speed" in text
    )
    low["tokens_per_second"] = {"8192": 5e6, "65536": 6e6}
    assert "Why use formats" not in shown(html.lowbit(report))


def test_figures_of_a_gpu_come_from_the_repository_where_there_is_none(monkeypatch, tmp_path):
    from scripts.demo import gpu

    report = small_report()
    kept = tmp_path / "figures.json"
    monkeypatch.setattr(gpu, "absence", lambda: "no GPU, in this test")
    monkeypatch.setattr(gpu, "FIGURES", kept)
    found = report["lowbit"]["gpu"] = gpu.policies(None, None)
    assert "Not measured: no GPU, in this test, and the repository has no bench/results/figures.json" in shown(
        html.lowbit(report)
    )

    figures = {key: small_lowbit()["gpu"][key] for key in ("conditions", "rows")}
    kept.write_text(json.dumps(figures))
    found = report["lowbit"]["gpu"] = gpu.policies(None, None)
    assert not found["here"] and found["rows"] == figures["rows"]
    assert "Not measured here: no GPU, in this test. Figures of bench/results/figures.json" in shown(
        html.lowbit(report)
    )
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
    for name, value in {"HOST_SECONDS": 1e-6, "WARM_CALLS": 1, "PAUSE": 0.0}.items():
        monkeypatch.setattr(gpu.gpu_timing, name, value)

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
    assert (
        row["peak"] == 2000
        and row["linear_bytes"] == 7
        and row["tokens"] == 6
        and row["error"] == 0
        and row["cosine"]["cosine_least"] == 1
    )
    assert (
        set(row["tokens_per_second"]) == {"8192", "65536"} and row["formats"] == ["nvfp4"] and row["alone_seconds"] > 0
    )
    assert not gpu.measure("somewhere", packed, np.eye(8, dtype=np.float32)[[0, 1, 3]], left=lambda: 0)["rows"]


def test_the_block_is_held_against_torch_s():
    found = lowbit.block(1, 40, 64, 4, 256)
    assert set(found) == {"batch", "length", "hidden", "torch", "float32", "e2m1_row", "nvfp4"}
    assert found["torch"]["kept"] == 100 and 99.99 < found["float32"]["kept"] < 100
    assert 90 < found["e2m1_row"]["kept"] < found["nvfp4"]["kept"] < 99.9
    assert all(found[key]["seconds"] > 0 for key in ("torch", "float32", "e2m1_row", "nvfp4"))


def test_reported_figures_are_judged_by_what_is_measured():
    report = small_report()
    study = report["lowbit"]["study"]
    verdict = [c["verdict"] for c in reported.claims(study)]
    no, yes = "does not hold here", "holds"
    assert verdict == [yes, no, yes, no, yes, yes]  # 88.7; 1.33x; 87.25 %; 1.11x; 88 %; 500x
    text = shown(html.lowbit(report))
    assert "at least 2.06×, 0.8 of it" in text and "at least 1.22×, 0.9 of it, and 94.4 %" in text
    study["layer"][0]["kept"], study["speed"]["fp4"], study["speed"]["packed_bytes"] = 88.85, 0.05, 600_000
    study["block"]["e2m1_row"]["seconds"], study["attention"]["flash"], study["speed"]["svd"] = 0.7, 5 * 10**8, 0.01
    assert [c["verdict"] for c in reported.claims(study)] == [no, yes, no, yes, no, no]
    report["lowbit"]["study"] = {}
    assert {c["verdict"] for c in reported.claims({})} == {"not measured"}
    text = shown(html.lowbit(report))
    assert "One linear layer" not in text and "Reported figures" not in text


def test_retrieval_compares_rankings():
    random = np.random.default_rng(0)
    wanted = random.standard_normal((40, 16))
    same = lowbit.retrieval(wanted * 3, wanted)  # lengths do not matter
    assert (same["overlap_least"], same["nearest_same"], same["neighbours"]) == (1, 1, 10) and same[
        "spearman_least"
    ] == pytest.approx(1)
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
