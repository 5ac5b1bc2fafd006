"""Figures on their way into pages: what tables show, mark and refuse."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "scripts")]
import bench_results  # noqa: E402
import cpu_conditions  # noqa: E402
import gpu_table  # noqa: E402
import marked_block  # noqa: E402
import measured_table  # noqa: E402
import nsa_chart  # noqa: E402
import numerics_table  # noqa: E402
import slower_table  # noqa: E402
import sources  # noqa: E402
import speed_chart  # noqa: E402


def raced(name, unit="TFLOP/s", **rates):
    rates = rates or {"heddle": 600.0, "cudnn": 500.0}
    times = {contender: [1000 / rate] for contender, rate in rates.items()}
    return {"name": name, "unit": unit, "timed": "queued", "rates": rates, "milliseconds": times, "difference": 0.001}


class TestGpuTables:
    def test_ratios_are_of_contenders_in_the_same_run(self):
        one = raced("forward D64 none S512", heddle=600.0, cudnn=500.0, fa2=300.0, fa3_stored=900.0)
        assert gpu_table.rival(one) == ("cudnn", 1.2)
        assert "900" not in gpu_table.every({one["name"]: one})
        assert gpu_table.rival(raced("x", heddle=2.0, baseline=9.0)) == (None, None)  # Heddle itself is no rival
        assert gpu_table.rival(raced("x", fa3=2.0)) == (None, None)

    def test_a_row_without_a_kernel_of_heddles_says_so(self):
        one = raced("fp8 D256 none S2048", fa3=1172.0) | {"absent": {"heddle": "head sizes to 128"}}
        assert "no kernel" in gpu_table.tables({one["name"]: one})
        assert "no Heddle: head sizes to 128" in gpu_table.every({one["name"]: one})

    def test_bad_rows_are_shown(self):
        rows = {
            r["name"]: r
            for r in (
                raced("linear nf4 4096x4096 M256", "calls/s", heddle=100.0, cublas=270.0),
                raced("linear nf4 4096x4096 M1", "calls/s", heddle=3.0, cublas=2.0),
            )
        }
        shown = gpu_table.tables(rows)
        assert "| nf4 4096x4096 † | 333333 (1.50) | 10000 (0.37) |" in shown and "M 1 | M 256" in shown

    def test_lists_of_key_blocks(self):
        rows = {
            f"block sparse{way} D128 blocks of 64, {kept} % S16384": raced(
                f"block sparse{way} D128 blocks of 64, {kept} % S16384",
                heddle=500.0,
                dense=500.0 * kept / 100,
                fa3=50.0,
            )
            for way in ("", " gradients")
            for kept in (10, 100)
        }
        shown = gpu_table.tables(rows)
        assert "| 10 % kept | 100 % kept |" in shown
        assert "| gradients D 128 blocks of 64 S16384 † | 500 (10.00) | 500 (1.00) |" in shown, shown

    def test_where_others_are_faster(self):
        rows = {
            r["name"]: r
            for r in (
                raced("forward D64 none S512", heddle=90.0, cudnn=100.0),
                raced("forward D64 none S1024", heddle=99.7, fa3=100.0),  # shown as 1.00
                raced("forward D128 none S512", heddle=101.0, fa3=100.0),
                raced("decode B1 32/8 1024", "TB/s", heddle=3.0, cudnn=4.0),
                raced("sm80 decode B1 32/8 1024", "TB/s", heddle=1.0, cudnn=4.0),  # asked for by name
                raced("linear decoded nf4 4096x4096 M64", heddle=1.0, cublas=4.0),
                raced("linear decoded nf4 4096x4096 M256", heddle=2.0, cublas=4.0),
                raced("nsa 64/4 forward S8192", "calls/s", heddle=1.0, dense=9.0, fa3=2.0),
                raced("short D128 none B8 S512", "calls/s", heddle=4.0, sm80=9.0, cudnn=5.0),
                raced("backward documents D128 causal", heddle=1.0, fa3=2.0),
            )
        }
        rows["backward documents D128 causal"]["sources"] = sources.digests(("src/cuda/common/*.*",))
        lines = slower_table.slower(rows).splitlines()[2:]
        assert lines == [
            "| Forward: D 64, no mask † | 1 of 2 | 0.90 | S512 | cuDNN |",
            "| Gradients: packed documents of 128 to 8192, D 128, causal | 1 of 1 | 0.50 |  | FlashAttention-3 |",
            "| Decoding † | 1 of 1 | 0.75 | B1 32/8 1024 | cuDNN |",
            f"| Short calls: {gpu_table.CALLS['short D128 none B8']} † | 1 of 1 | 0.80 | S512 | cuDNN |",
            "| Linear layers: decoded nf4 4096x4096 † | 2 of 2 | 0.25 to 0.50 | everywhere | cuBLAS bf16 |",
            "| Native sparse attention: 64/4 forward † | 1 of 1 | 0.50 | S8192 | FlashAttention-3 |",
        ]
        conditions = {"gpu": "G", "date": "2026-01-01"}
        told = slower_table.in_short([("a.json", {"conditions": conditions, "rows": list(rows.values())})])
        assert told.splitlines() == [
            "| On an G | others are faster in | Heddle's rate at the least |",
            "| --- | --- | --- |",
            "| forward † | 1 of 3 rows | 0.90 of cuDNN's |",
            "| gradients | 1 of 1 rows | 0.50 of FlashAttention-3's |",
            "| decoding † | 1 of 1 rows | 0.75 of cuDNN's |",
            "| short calls † | 1 of 1 rows | 0.80 of cuDNN's |",
            "| linear layers † | 2 of 2 rows | 0.25 of cuBLAS bf16's |",
            "| native sparse attention † | 1 of 1 rows | 0.50 of FlashAttention-3's |",
            "",
            "† measured on older sources of this kernel.",
        ]

    def test_decoding_beside_flash_attention_3(self):
        conditions = {"gpu": "G", "date": "2026-01-01"}
        rows = [
            raced("decode B64 32/8 8192, pages of 1", "TB/s", heddle=2.0, fa3=4.0) | {"kernel": "sm90_decode"},
            raced("decode B64 32/8 8192, 16 rows", "TB/s", heddle=3.96, fa3=4.0, cudnn=9.0) | {"kernel": "sm90"},
            raced("sm90 decode B64 32/8 8192, 16 rows", "TB/s", heddle=1.0, fa3=4.0) | {"kernel": "sm90_decode"},
            raced("decode B1 32/8 8192", "TB/s", heddle=8.0, fa3=4.0) | {"kernel": "sm90_decode"},
            raced("decode B1 32/8 1024", "TB/s", heddle=3.99, fa3=4.0) | {"kernel": "sm90_decode"},  # shown as 1.00
            raced("decode B1 32/8 4096", "TB/s", heddle=1.0, cudnn=4.0) | {"kernel": "sm90_decode"},
            raced("sm80 decode B1 32/8 8192", "TB/s", heddle=5.0, fa3=4.0) | {"kernel": "sm80_decode"},
        ]
        files = [("a.json", {"conditions": conditions, "rows": rows})]
        assert slower_table.beside_fa3(files, ("sm90_decode", "sm90")).splitlines()[:7] == [
            "On an G FlashAttention-3, raced in the same run, is faster in 3 of 5 rows; in the others Heddle has 1.00 to 2.00 times its rate.",
            "",
            "| FlashAttention-3 is faster | Heddle's rate over its |",
            "| --- | --- |",
            "| sm90 decode B64 32/8 8192, 16 rows † | 0.25 |",
            "| B64 32/8 8192, pages of 1 † | 0.50 |",
            "| B64 32/8 8192, 16 rows, which `sm90` gets † | 0.99 |",
        ]
        told = "On an G FlashAttention-3, raced in the same run, is faster in 0 of 1 row; in the others Heddle has 1.25 times its rate."
        assert slower_table.beside_fa3(files, ("sm80_decode",)) == told
        assert slower_table.beside_fa3(files, ("sm70_decode",)) == ""

    def test_lengths_set_each_precision_beside_its_own_run(self):
        rows = {
            r["name"]: r
            for r in (
                raced("unfused S256", "calls/s", heddle=100.0, math=10.0),
                raced("unfused S128", "calls/s", heddle=200.0, math=40.0),
                raced("half S128", "calls/s", heddle=160.0, f32=40.0, tf32=80.0),
                raced("half S256", "calls/s", heddle=100.0, f32=20.0, tf32=50.0),
                raced("python call S512", "calls/s", heddle=50.0),
            )
        }
        shown = gpu_table.lengths(rows)
        assert (
            "| 128 † | 5000 | 12500 | 25000 | 25000 | 5.0 |\n| 256 † | 10000 | 20000 | 50000 | 100000 | 10.0 |" in shown
        )
        assert "is 4.0 to 5.0 times" in shown and "and 2.0 times as fast" in shown
        assert "bfloat16: ×2.0." in shown and "unfused: ×4.0." in shown and ": 20000.0 µs †" in shown
        del rows["half S256"]
        assert gpu_table.lengths(rows) == ""

    def test_a_row_that_no_table_takes_is_an_error(self):
        with pytest.raises(ValueError, match="no table takes row 'sorting S512'"):
            gpu_table.tables({"sorting S512": raced("sorting S512", "GB/s")})

    @pytest.mark.parametrize("family, words", [
        ("forward D64 none", "D 64, no mask"), ("backward D128 causal", "D 128, causal"), ("backward head size 96, none", "D 96, no mask"),
        ("gqa 64/8 D128 causal", "grouped heads 64/8, D 128, causal"), ("backward deterministic gqa 64/8 D128 causal", "deterministic, grouped heads 64/8, D 128, causal"),
        ("documents 32/8 D128 none", "packed documents of 128 to 8192 32/8, D 128, no mask"), ("option shared_bias", "score option: shared bias, D 64 to 256"),
        ("fp8 D128 none, scales by heads", "e4m3 operands, D 128, no mask, scales by heads"),
    ])  # fmt: skip
    def test_words(self, family, words):
        assert gpu_table.words(family) == words

    def test_each_row_is_counted_in_the_file_that_it_is_of(self):
        alike = {"gpu": "G", "driver": "1", "cuda": "13", "torch": "2", "commit": "c" * 40, "date": "2026-01-01"}
        files = [
            (name, {"conditions": alike, "rows": [raced(f"forward D64 none S{s}") for s in lengths]})
            for name, lengths in (("a", (512, 1024)), ("b", (512,)))
        ]
        shown = gpu_table.written(files, gpu_table.tables)
        assert "[`a`](../bench/results/a) (1 row," in shown and "[`b`](../bench/results/b) (1 row," in shown

    def test_wrong_rows_stand_in_the_summary_and_among_every_row(self):
        alike = {"gpu": "G", "driver": "1", "cuda": "13", "torch": "2", "commit": "c" * 40, "date": "2026-01-01"}
        content = {"conditions": alike, "rows": [raced("forward D64 none S512")]}
        content |= {"wrong": [{"name": "nsa 1/1 forward S1", "wrong": "Wrong: differs by 1, the limit is 0"}]}
        for make in (gpu_table.tables, gpu_table.every):
            assert "\n| nsa 1/1 forward S1 | differs by 1, the limit is 0 |" in gpu_table.written(
                [("f", content)], make
            )

    def test_pages_say_when_flash_attention_3_is_missing(self):
        conditions = {"gpu": "G", "driver": "1", "cuda": "13", "torch": "2", "commit": "c" * 40, "date": "2026-01-01"}
        files = [("f.json", {"conditions": conditions, "rows": [raced("forward D64 none S512")]})]
        assert "FlashAttention-3 is not in these runs" in gpu_table.written(files, gpu_table.tables)
        files[0][1]["rows"][0]["rates"]["fa3"] = 700.0
        assert "FlashAttention-3 was raced in the same run" in gpu_table.written(files, gpu_table.tables)

    def test_committed_rows_and_those_that_would_be_measured_have_their_tables(self):
        torch = pytest.importorskip("torch")
        import attention_bench_gpu

        names = attention_bench_gpu.known()
        committed = bench_results.merged(bench_results.read("nvidia-*.json"))
        gpu_table.sorted_by_kind(committed)
        assert torch and len(names) > 700
        for name in names:  # units are known only where a GPU makes the row; those of a kind are alike
            units = ("TFLOP/s", "TB/s", "calls/s", "MiB")
            assert any(kind(raced(name, unit)) for unit in units for kind in gpu_table.KINDS.values()), name


class TestCpuTables:
    def test_the_kind_of_processor_is_named(self):
        assert cpu_conditions.simd_class("avx512_bf16", "flags: avx512f amx_tile", False) == "amx"
        assert cpu_conditions.simd_class("avx2", "flags: avx512f amx_tile", True) == "avx2"
        assert cpu_conditions.simd_class("avx512_bf16", "flags: avx512f amx_tiles", False) == "avx512_bf16"
        assert cpu_conditions.file_name("cpu", "AMD EPYC", "avx512_bf16", False) == "cpu-amd-epyc-avx512_bf16.json"
        assert cpu_conditions.file_name("cpu", "AMD EPYC 9B14", "avx2", True) == "cpu-amd-epyc-9b14-held-to-avx2.json"
        about = {"cpu": "AMD EPYC", "heddle_target": "avx2", "simd": "avx2", "held": True}
        assert measured_table.title(about).startswith("AMD EPYC, `avx2`, held to `avx2` on both sides")
        assert measured_table.title({"cpu": "AMD EPYC", "heddle_target": "avx2"}) == "AMD EPYC, `avx2`"

    def test_each_file_is_a_section(self):
        sections = measured_table.written(bench_results.read("cpu-*.json"), measured_table.short)
        assert sections.count("Heddle's target") == len(list((ROOT / "bench/results").glob("cpu-*.json")))

    def test_rows_of_an_unknown_group_are_an_error(self):
        with pytest.raises(ValueError, match="no line takes the rows of sorting"):
            measured_table.attention([{"group": "sorting", "dtype": "f32"}])

    def test_rows_with_a_tolerance_say_what_was_replaced(self):
        row = {
            "group": "adaptive_most", "name": "adaptive_most T2048 H8 D64 f32", "dtype": "f32", "ratio": 1.4, "ratio_quartiles": [1.3, 1.5],
            "heddle_gflops": 100.0, "goal": 1.3, "met": True, "median_seconds": {"heddle": 0.01, "heddle dense": 0.014},
            "rival": "heddle dense", "tol": 0.031, "replaced": 0.712,
        }  # fmt: skip
        assert "adaptive_most T2048 H8 D64 f32, tol 0.031: 71 % replaced" in measured_table.every([row])
        summary = measured_table.attention([row])
        assert "about 70 % of the blocks are replaced" in summary and "| 1 of 1 |" in summary

    def test_every_group_that_would_be_measured_has_a_line(self):
        groups = json.loads((ROOT / "bench/shapes.json").read_text(encoding="utf-8"))["groups"]
        assert {group["name"] for group in groups} == set(measured_table.WORDS)

    def test_holding_to_a_target_starts_again_with_all_libraries_held(self, monkeypatch):
        started = []
        monkeypatch.setattr(os, "execve", lambda program, arguments, environment: started.append(environment))
        monkeypatch.delenv(cpu_conditions.HELD, raising=False)
        cpu_conditions.hold(None)
        assert started == []
        cpu_conditions.hold("avx2")
        assert {k: started[0][k] for k in ("HEDDLE_CPU_TARGET", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA")} == {
            "HEDDLE_CPU_TARGET": "avx2", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}  # fmt: skip
        monkeypatch.setenv(cpu_conditions.HELD, "avx2")
        cpu_conditions.hold("avx2")
        assert len(started) == 1
        with pytest.raises(ValueError, match="--target is 'mmx'"):
            cpu_conditions.hold("mmx")


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """The tree as far as the tables need it."""
    there = tmp_path_factory.mktemp("tree")
    for folder in ("bench", "docs", "scripts", "src", "python", "examples"):
        shutil.copytree(ROOT / folder, there / folder, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    shutil.copy(ROOT / "README.md", there)
    return there


@pytest.mark.parametrize("script, blocks", [
    ("gpu_table", [("docs/performance.md", "measured gpu"), ("docs/performance.md", "gpu rows"), ("docs/numerics.md", "lengths")]),
    ("measured_table", [("docs/performance.md", "measured"), ("docs/performance.md", "cpu rows"), ("docs/nsa.md", "nsa claims"), ("docs/adaptive.md", "models"), ("docs/adaptive.md", "skipped")]),
    ("speed_chart", [("README.md", "speed")]), ("ladder_tables", [("docs/ladder.md", "unfused"), ("docs/ladder.md", "times")]),
    ("encoder_table", [("docs/encoder.md", "gpu")]), ("nsa_chart", [("docs/nsa.md", "nsa on a gpu")]),
    ("ranks_table", [("docs/distributed.md", "ranks on gpus")]),
    ("slower_table", [("docs/kernels/sm90_attention_decode.md", "beside fa3"), ("docs/kernels/sm80_attention_decode.md", "beside fa3")]),
])  # fmt: skip
def test_a_page_that_was_changed_by_hand_fails_the_check(copy, script, blocks):
    run = lambda *more: subprocess.run(
        [sys.executable, copy / "scripts" / f"{script}.py", *more], capture_output=True, text=True
    )
    right = {page: (ROOT / page).read_text(encoding="utf-8") for page, _ in blocks}
    for page, block in blocks:
        (copy / page).write_text(marked_block.replaced(right[page], block, "better figures"), encoding="utf-8")
        failed = run("--check")
        assert failed.returncode == 1 and f"run scripts/{script}.py" in failed.stderr
        assert "better figures" in (copy / page).read_text(encoding="utf-8")  # a check writes nothing
        (copy / page).write_text(right[page], encoding="utf-8")
    for page, block in blocks:
        changed = marked_block.replaced((copy / page).read_text(encoding="utf-8"), block, "better figures")
        (copy / page).write_text(changed, encoding="utf-8")
    assert run().returncode == 0
    assert {page: (copy / page).read_text(encoding="utf-8") for page in right} == right


def test_the_page_quotes_the_rules_own_trial_if_it_was_kept(tmp_path):
    assert numerics_table.of_seeds(tmp_path / "none.json") == ""
    assert marked_block.replaced("<!-- begin x -->\nold\n<!-- end x -->", "x", "") == "<!-- begin x -->\n<!-- end x -->"
    outcome = {"commit": "0123456789", "date": "2026-01-02T03:04:05+00:00", "target": "avx2", "seeds": 9, "cases": 5}
    outcome |= {"tensors": 70, "multiplications": 200000, "large": 3, "e4m3": 4, "refused": 0, "closest": 0.871}
    for refused, came in ((0, "none was refused, and the closest came to 87 %"), (2, "2 results were refused")):
        (tmp_path / "seeds.json").write_text(json.dumps(outcome | {"refused": refused}))
        said = numerics_table.of_seeds(tmp_path / "seeds.json")
        assert came in said and "9 seeds, 5 cases and 70 tensors on `avx2` (commit 0123456, 2026-01-02)" in said
        assert "the 3 cases with more than 200000 multiplications, and the 4 in e4m3" in said


class TestNativeSparseAttention:
    def told(self, *rows, wrong=()):
        conditions = {"gpu": "G", "date": "2026-01-01"}
        rows = [row | {"difference": {"heddle": 0.001}} for row in rows]
        return nsa_chart.told([("nvidia-g.json", {"conditions": conditions, "rows": rows, "wrong": wrong})])

    def test_wrong_rows_are_told_and_limits_are_those_of_the_rows(self):
        rows = [
            raced(f"nsa 64/4 {way} S8192", heddle=1.0) | {"limit": limit}
            for way, limit in (("forward", 0.01), ("backward", 0.02))
        ]
        wrong = [
            {"name": name, "wrong": "Wrong: differs"} for name in ("nsa 64/4 forward S65536", "forward D64 none S512")
        ]
        told = self.told(*rows, wrong=wrong)
        assert (
            "no row by more than its limit, 0.01 to 0.02." in told and "| nsa 64/4 forward S65536 | differs |" in told
        )
        assert "D64" not in told

    def test_sharing_is_beside_its_default_and_its_claim(self):
        told = self.told(
            raced("nsa 64/4 window 512 seed forward S8192", "calls/s", heddle=3.0, default=2.0, fa3=1.0),
            raced("nsa 64/4 window 512 seed_4_3 forward S65536", "calls/s", heddle=7.0, default=4.0),
            raced("nsa 64/4 fast forward S65536", "calls/s", heddle=6.0, fla=2.0, default=3.0),
        )
        assert "`seed` forward 1.50 † at 8192 (claimed: 1.8 to 1.9 times" in told
        assert "`seed_4_3` forward 1.75 † at 65536 (claimed: the same)" in told
        assert "which shares nothing: forward 3.00 † at 65536." in told and "window of 512, which" not in told

    def test_memory_and_the_window_of_flash_linear_attention(self):
        memory = {"rates": {"heddle": 2048.0, "fla": 1024.0, "fa3": 512.0}, "unit": "MiB"}
        told = self.told(
            raced("nsa 64/4 window 512 forward S8192", "calls/s", heddle=3.0, fla=2.0, fa3=1.0),
            raced("nsa memory of forward 64/4 S65536", heddle=1.0) | memory,
        )
        assert "of 512, which FlashAttention-3 computes for them: forward 1.50 † at 8192." in told
        words = "Memory of forward at 65536 positions, beside operands: 64/4 2.0 GiB, flash-linear-attention 1.0, "
        assert words + "FlashAttention-3 0.5." in told and "Memory of forward and backward" not in told


class TestSpeedChart:
    CONDITIONS = {"gpu": "G", "driver": "1", "cuda": "13", "torch": "2", "commit": "c" * 40, "date": "2026-01-01"}

    def drawn(self, *rows):
        return speed_chart.drawn([("nvidia-g.json", {"conditions": self.CONDITIONS, "rows": list(rows)})])

    def test_who_took_every_length_has_a_line(self):
        shown = self.drawn(
            raced("forward D128 causal S512", heddle=300.0, fa3=310.0, cudnn=290.0),
            raced("forward D128 causal S1024", heddle=400.0, fa3=420.0),
            raced("backward D128 causal S512", heddle=200.0, cudnn=210.0),
            raced("forward D128 causal S512, scales by heads", heddle=1.0),
        )
        names = re.findall(r">(\w+ (?:forward|gradients))<", shown)
        assert names == ["Heddle forward", "FA3 forward", "Heddle gradients", "cuDNN gradients"]
        assert shown.count("<polyline") == 4 and "one G †:" in shown  # rows that do not say what they measured

    def test_the_table_under_it(self):
        rows = (
            raced("forward D128 causal S512", heddle=300.0, fa3=300.0, cudnn=250.0),
            raced("forward D128 causal S1024", heddle=400.0, fa3=500.0, cudnn=320.0),
            raced("backward D128 causal S512", heddle=200.0, cudnn=100.0),
        )
        assert speed_chart.told(
            [("nvidia-g.json", {"conditions": self.CONDITIONS, "rows": list(rows)})]
        ).splitlines() == [
            "| Heddle's rate over that of | FlashAttention-3 (FA3) | cuDNN |",
            "| --- | --- | --- |",
            "| forward | 0.80 to 1.00 | 1.20 to 1.25 |",
            "| gradients |  | 2.00 |",
            "",
            "Attention in bfloat16 at head size 128 under a causal mask alone, 512 to 1024 keys: one G †, 2026-01-01, all in one run. "
            "Other shapes are in [every table](docs/performance.md).",
        ]

    def test_without_such_rows_there_is_no_picture(self):
        with pytest.raises(ValueError, match="no row is of attention at head size 128 under a causal mask"):
            self.drawn(raced("forward D64 none S512"))

    def test_a_picture_that_was_changed_by_hand_fails_the_check(self, copy):
        check = lambda *more: subprocess.run(
            [sys.executable, copy / "scripts/speed_chart.py", *more], capture_output=True, text=True
        )
        picture = copy / "docs/speed.svg"
        right = picture.read_text(encoding="utf-8")
        assert check("--check").returncode == 0
        picture.write_text(right.replace("Heddle", "Hurdle"), encoding="utf-8")
        failed = check("--check")
        assert failed.returncode == 1 and "run scripts/speed_chart.py" in failed.stderr
        assert "Hurdle" in picture.read_text(encoding="utf-8")
        assert check().returncode == 0 and picture.read_text(encoding="utf-8") == right
