"""bench/ranks_gpu.py without GPUs: timing over ranks that are made up, rows, budget, the report, the table; and a small rehearsal."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("torch without torch.distributed", allow_module_level=True)

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "scripts")]
import gpu_ranks_rows as rows  # noqa: E402
import gpu_ranks_timing as timing  # noqa: E402
import gpu_timing  # noqa: E402
import ranks_gpu  # noqa: E402
import ranks_table  # noqa: E402
from test_bench_timing import Device  # noqa: E402


class Pair:
    """What timing needs of a World of two ranks; the other one answers by `other`, of what this one says."""

    size = 2
    rehearsal = False

    def __init__(self, rank=0, other=lambda said: said):
        self.rank, self.other, self.depth, self.meetings = rank, other, 0, 0

    def gathered(self, value):
        both = [value, self.other(value)]
        return both if self.rank == 0 else both[::-1]

    def barrier(self):
        self.meetings += 1


def gpu():
    device = Device()
    device.meet = lambda: device.work(1e-6)
    return device


def contender(device, name, seconds, **options):
    how = {key: options.pop(key) for key in ("host", "waits") if key in options}
    return timing.Contender(device.contender(name, seconds, **how).call, **options)


class TestTiming:
    @pytest.mark.parametrize("milliseconds, calls, count", [(0.1, 1, 10), (5.0, 1, 4), (50.0, 1, 3), (300.0, 1, 1), (2.0, 20, 10)])  # fmt: skip
    def test_as_many_calls_in_a_row_as_make_a_sample(self, milliseconds, calls, count):
        assert timing.in_a_row(milliseconds, calls) == count

    def test_the_slowest_rank_counts(self):
        def slower(said):  # tuples of times, of which the last is a call's
            return (*said[:-1], 3 * said[-1]) if isinstance(said, tuple) and len(said) == 3 else said

        device = gpu()
        raced = timing.race({"ranks": contender(device, "r", 2e-3)}, Pair(other=slower), device)
        assert raced["milliseconds"]["ranks"] == [pytest.approx(6.0, rel=1e-2)] * gpu_timing.ROUNDS
        assert raced["timed"] == {"ranks": "queued"} and timing.medians(raced)["ranks"] == pytest.approx(6.0, rel=1e-2)

    def test_what_one_gpu_does_alone_the_other_only_waits_for(self):
        device = gpu()
        # What rank 0 says: seconds of its host and milliseconds of a call, twice; then, of each round, that its host was ahead, and both.
        said = iter([(1e-5, 4.0)] * 2 + [(0.0, 1e-5, 4.0)] * gpu_timing.ROUNDS)
        raced = timing.race({"one": contender(device, "never", 1.0, alone=True)}, Pair(1, lambda _: next(said)), device)
        assert device.log == [] and raced["milliseconds"]["one"] == [4.0] * gpu_timing.ROUNDS

    def test_all_begin_behind_one_meeting(self):
        device, world = gpu(), Pair()
        order = []
        device.meet = lambda: order.append("meet")
        call = contender(device, "c", 1e-3)
        inner = call.call
        call.call = lambda: (order.append("call"), inner())
        timing.race({"": call}, world, device)
        assert order.count("meet") == gpu_timing.ROUNDS
        assert order[-timing.MOST - 1 :] == ["meet"] + ["call"] * timing.MOST
        alone = []
        device.meet = lambda: alone.append("meet")
        timing.race({"": contender(device, "c", 1e-3, alone=True)}, world, device)
        assert alone == []

    def test_a_call_that_waits_for_its_gpu_is_timed_as_the_host_feels_it(self):
        device = gpu()
        waiting = {"w": contender(device, "w", 1e-3, host=1e-4, waits=True), "q": contender(device, "q", 1e-3)}
        raced = timing.race(waiting, Pair(), device)
        assert raced["timed"] == {"w": "host", "q": "queued"}
        assert raced["milliseconds"]["w"] == [pytest.approx(1.1, rel=0.02)] * gpu_timing.ROUNDS

    def test_a_long_call_is_a_sample_by_itself(self):
        device = gpu()
        raced = timing.race({"long": contender(device, "l", 2.0)}, Pair(), device)
        assert raced["calls"] == {"long": 1} and len(device.log) == 1 + gpu_timing.ROUNDS

    def test_rounds_alternate(self):
        device = gpu()
        timing.race({name: contender(device, name, 2.0) for name in "ab"}, Pair(), device)
        assert "".join(device.log) == "ab" + "abbaab"


class TestTogether:
    def test_what_one_rank_finds_all_hear(self):
        assert timing.together(Pair(), lambda: 5) == 5
        with pytest.raises(timing.Failed, match="rank 1: it is too large") as failed:
            timing.together(Pair(other=lambda said: ("it is too large", True)), lambda: 5)
        assert not failed.value.everywhere

    def test_what_fails_on_all_leaves_nobody_waiting(self):
        with pytest.raises(timing.Failed, match="^ZeroDivisionError: division by zero$") as failed:
            timing.together(Pair(), lambda: 1 / 0)
        assert failed.value.everywhere
        with pytest.raises(timing.Failed) as alone:
            timing.together(Pair(other=lambda said: (None, True)), lambda: 1 / 0, alone=True)
        assert alone.value.everywhere

    def test_an_inner_failure_of_one_rank_stays_one(self):
        def inner():
            raise timing.Failed("rank 1: lost", False)

        with pytest.raises(timing.Failed, match="rank 1: lost") as failed:
            timing.together(Pair(), inner)
        assert not failed.value.everywhere

    def test_the_others_call_nothing_of_the_first_rank(self):
        assert timing.together(Pair(1), lambda: 1 / 0, alone=True) is None


class TestComparing:
    def test_no_rows_hide_behind_others(self):
        expected = torch.ones(1, 4 * rows.CHUNK, 1, 2)
        mine = expected.clone()
        mine[:, -rows.CHUNK :] *= 1.5
        assert rows.worst(mine, expected, 1) == pytest.approx(0.5)
        assert rows.differences((expected, mine), (expected, expected), 1) == pytest.approx(0.5)

    def test_a_nan_stays_one(self):
        expected = torch.ones(1, 3 * rows.CHUNK, 2)
        mine = expected.clone()
        mine[0, 5, 1] = math.nan
        assert math.isnan(rows.differences((mine, 2 * expected), (expected, expected), 1))
        checks = rows.Checks(PairOf(mine), (expected,), 1)
        assert not checks.passes("ring", lambda: (mine,)) and "by nan" in checks.wrong["ring"]

    def test_others_that_differ_or_fail_are_absent_and_heddles_wrong(self):
        expected = torch.ones(1, 8, 2)
        checks = rows.Checks(PairOf(None), (expected,), 1)
        assert checks.passes("gather", lambda: (expected * 1.01,))
        assert not checks.passes("ring", lambda: (expected * 1.1,))
        assert not checks.passes("torch", lambda: 1 / 0, own=False)
        told = checks.told()
        assert told["difference"] == {"gather": pytest.approx(0.01, rel=1e-3)}
        assert told["wrong_contenders"].keys() == {"ring"} and told["absent"]["torch"].startswith("ZeroDivisionError")


class PairOf(Pair):
    """Rank 0 of two, which says what rank 1 would."""

    def __init__(self, _):
        super().__init__()

    def of_first(self, value):
        return value


def test_documents_are_as_long_as_they_are_said_to_be():
    shortest, longest, total = rows.DOCUMENTS
    found = rows.lengths()
    assert sum(found) == total and found == rows.lengths()
    assert all(shortest <= n <= longest for n in found[:-1]) and max(found) > 16 * shortest > 2 * min(found)


def test_torch_is_beside_the_fastest_of_heddle():
    rates = {
        "heddle gather": 900.0,
        "heddle ring": 1000.0,
        "torch cudnn allgather": 400.0,
        "torch cudnn alltoall": 500.0,
    }
    assert rows.compared({"rates": rates})["ratio"] == 2.0
    assert "ratio" not in rows.compared({"rates": {"heddle gather": 900.0}})


class TestRows:
    def test_the_longest_come_last_and_all_have_a_table(self):
        known = ranks_gpu.known()
        assert list(known)[-1] == "scaling forward and backward S512k"
        assert {row.said["group"] for row in known.values()} == set(ranks_table.MADE)
        assert "scaling forward S128k" in known and len(known) == 31

    def test_rows_are_chosen_by_words(self):
        known = ranks_gpu.known()
        links = ranks_gpu.chosen(known, "link|memory", {"link 8 MB"})
        assert list(links) == [
            "link 16 B",
            "link 64 MB",
            "link 512 MB",
            *(f"memory forward and backward S{n}" for n in ("128k", "512k")),
        ]

    def test_no_row_is_begun_that_would_take_longer_than_is_left(self):
        now = [100.0]
        budget = ranks_gpu.Budget(30, lambda: now[0])
        row = rows.Row(20, None, {})
        assert budget.allows(row)
        now[0] += 11
        assert not budget.allows(row) and budget.left == 19


class TestReport:
    def test_what_was_measured_outlives_the_processes(self, tmp_path):
        path = tmp_path / "deep" / "r.json"
        report = ranks_gpu.Report(path)
        report.add({"name": "a", "wrong_contenders": {"ring": "it is NaN"}}, {"gpu": "G"})
        report.begin("b")
        read = json.loads(path.read_text())
        assert read["running"] == "b" and [row["name"] for row in read["rows"]] == ["a"]
        assert read["wrong"] == [{"name": "a, ring", "wrong": "it is NaN"}]
        resumed = ranks_gpu.Report(path, resumed=True)
        assert resumed.died("they died") == "b" and resumed.died("again") is None
        read = json.loads(path.read_text())
        assert "running" not in read and read["wrong"][-1] == {"name": "b", "wrong": "they died"}
        assert ranks_gpu.Report(path, resumed=True).names() == {"a", "a, ring", "b"}
        assert ranks_gpu.Report(path).names() == set()

    def supervised(self, monkeypatch, path, *turns):
        """The status, and what the processes of each turn were given, of which there is one: it leaves a report and ends."""
        given, left = [], iter(turns)
        ends = "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text(sys.argv[2]); sys.exit(int(sys.argv[3]))"

        def start(arguments, ranks):
            given.append(arguments)
            content, status = next(left)
            return [subprocess.Popen([sys.executable, "-c", ends, path, json.dumps(content), str(status)])]

        monkeypatch.setattr(ranks_gpu, "start", start)
        options = ranks_gpu.parsed(["--out", str(path), "--seconds", "1000", "--filter", "x"])
        return ranks_gpu.supervise(options), given

    def test_processes_that_die_of_a_row_have_successors(self, monkeypatch, tmp_path):
        path = tmp_path / "r.json"
        dying = {"conditions": {}, "rows": [{"name": "a"}], "wrong": [], "running": "b"}
        lost = {"conditions": {}, "rows": [{"name": "a"}], "wrong": [{"name": "c", "wrong": "rank 1: lost"}]}
        seen, died = [], ranks_gpu.Report.died

        def watched(report, words):
            seen.append(died(report, words))
            return seen[-1]

        monkeypatch.setattr(ranks_gpu.Report, "died", watched)
        status, given = self.supervised(monkeypatch, path, (dying, 134), (lost, ranks_gpu.AGAIN), (lost, 1))
        assert status == 1 and seen == ["b", None]
        assert ["--resume" in arguments for arguments in given] == [False, True, True]
        assert all(float(arguments[arguments.index("--seconds") + 1]) < 1000 for arguments in given)

    def test_processes_that_die_before_any_row_have_none(self, monkeypatch, tmp_path, capsys):
        none = {"conditions": {}, "rows": [], "wrong": []}
        status, given = self.supervised(monkeypatch, tmp_path / "r.json", (none, ranks_gpu.BROKEN))
        assert status == 2 and len(given) == 1 and "before any row" in capsys.readouterr().err

    def test_a_row_is_one_line_with_what_is_missing_below(self):
        row = {
            "name": "scaling", "unit": "TFLOP/s", "rates": {"one GPU": 650.0, "ring": 1290.0}, "efficiency": {"ring": 0.991},
            "milliseconds": {"one GPU": [2.0, 2.0, 2.0], "ring": [1.01, 1.0, 1.02]}, "timed": {"ring": "host"}, "absent": {"torch": "no such operator"},
        }  # fmt: skip
        line, missing = ranks_gpu.shown(row).split("\n")
        assert "ring 1290 (1.01 ms) T1/PTp 0.991" in line and "as the host felt it: ring" in line
        assert missing.strip() == "without torch: no such operator"
        assert "WRONG: it differs" in ranks_gpu.shown({"name": "x", "wrong": "it differs"})

    def test_the_link_is_read_off_the_topology(self):
        told = "\t\x1b[4mGPU0\tGPU1\tCPU Affinity\x1b[0m\nGPU0\t X \tNV18\t0-15\nGPU1\tNV18\t X \t0-15\n"
        assert ranks_gpu.link_of_topology(told) == "NV18" and ranks_gpu.link_of_topology("") == "unknown"


CONDITIONS = {
    "ranks": 2, "gpu": "G", "link": "NV18", "driver": "1", "torch": "2", "nccl": "2.3", "commit": "abcdef0123", "date": "2026-01-01",
}  # fmt: skip


def measured(group, **more):
    times = more.pop("times", {})
    return {"name": group, "group": group, "pass": "forward", "length": 131072, "heads": 32, "kv_heads": 8, "batch": 64, "kernel": "", "sources": {},
            "milliseconds": {name: [value] * 3 for name, value in times.items()}, "timed": dict.fromkeys(times, "queued"), "absent": {}} | more  # fmt: skip


class TestTable:
    def section(self, *some, **conditions):
        return ranks_table.section("ranks-g.json", {"conditions": CONDITIONS | conditions, "rows": list(some)})

    def test_scaling(self):
        row = measured(
            "scaling", times={"one GPU": 200.0, "ring": 101.2}, efficiency={"ring": 0.988}, difference={"ring": 0.003}
        )
        told = self.section(row)
        assert "**2 x G**, link NV18" in told and "commit abcdef0, 2026-01-01" in told and "by 0.003" in told
        assert "| rows of 32 / 8 heads, causal | one GPU, ms | `ring`, ms |" in told
        assert "| 128k, forward | 200 | 101 (0.988) |" in told
        row["timed"]["ring"] = "host"
        assert "| 101 (0.988) (host) |" in self.section(row)

    def test_torch_beside_heddle_and_why_it_is_not_there(self):
        times = {"heddle gather": 5.0, "heddle ring": 4.0, "torch cudnn alltoall": 9.0}
        why = {"torch cudnn allgather": "no such operator", "torch fa2 alltoall": "not asked"}
        row = measured("torch", times=times, absent=why, ratio=2.25)
        told = self.section(row, row | {"length": 65536})
        assert "| 128k, 32 / 8, forward | 4, `ring` | none | 9, cudnn | 2.25 |" in told
        assert told.count("Without a figure") == 1
        assert told.endswith("\n\n- Without a figure, torch cudnn allgather: no such operator")
        told = self.section(measured("torch", times={"heddle ring": 4.0}, absent={"torch": "no such module"}))
        assert "| none | none | – |\n\n- Without a figure, torch: no such module" in told

    def test_the_other_tables(self):
        documents = measured(
            "documents", times={"one GPU": 10.0, "balanced needed": 5.1}, efficiency={"balanced needed": 0.98},
            auto={"balanced": "needed"}, documents=40,
        )  # fmt: skip
        decode = measured("decode", times={"ranks": 0.05, "part": 0.03, "one GPU": 0.06}, added_us=20.0, captured=False)
        training = measured(
            "training", rates={"one GPU": 1000.0, "ranks": 1900.0}, efficiency={"ranks": 0.95}, auto="ring"
        )
        link = measured("link", times={"exchange": 0.02}, message="8 MB", bytes=8_000_000, rates={"exchange": 400.0})
        told = self.section(
            documents, decode, training, link, measured("memory", rates={"one GPU": 20480.0, "ring": 11264.0})
        )
        for line in (
            "| 40 of 128k tokens, `balanced`, forward | 10 | 5.1 (0.980) |",
            "| 128k, B 64, 32 / 8 heads, without a graph | 50.0 | 30.0 | 20.0 | 60.0 |",
            "| 128k tokens, bf16, `ring` | 1000 | 1900 | 0.950 |", "| 8 MB | 20.0 | 400 | – | – |",
            "| 128k rows, 32 / 8 heads, forward | 20.0 | 11.0 |",
        ):  # fmt: skip
            assert line in told

    def test_rows_age(self):
        row = measured("scaling", times={"one GPU": 2.0}, kernel="sm90", sources={"src/cuda/common/*.*": "0" * 12})
        assert "128k, forward †" in self.section(row)

    def test_what_no_table_takes_is_an_error_and_so_is_a_rehearsal(self):
        with pytest.raises(ValueError, match="no table takes the rows of other"):
            self.section(measured("other"))
        with pytest.raises(ValueError, match="ranks-g.json is a rehearsal"):
            self.section(rehearsal="small")

    def test_without_a_file_the_page_says_so(self):
        assert ranks_table.written([]) == ranks_table.NONE


def test_a_rehearsal_runs_rows_over_two_processes(tmp_path):
    out = tmp_path / "ranks-rehearsal.json"
    command = [sys.executable, ROOT / "bench/ranks_gpu.py", "--device", "cpu", "--out", out]
    run = subprocess.run(
        [*command, "--filter", "scaling forward and backward S16k|decode B64 32/8 8k"], capture_output=True, text=True, timeout=120
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    found = json.loads(out.read_text())
    assert {row["group"] for row in found["rows"]} == {"decode", "scaling"}
    for row in found["rows"]:
        assert row["difference"] and max(row["difference"].values()) <= row["limit"]
        assert all(len(times) == gpu_timing.ROUNDS for times in row["milliseconds"].values())
    assert found["wrong"] == [] and "says anything about a GPU" in found["conditions"]["rehearsal"]
    with pytest.raises(ValueError, match="is a rehearsal"):
        ranks_table.section(out.name, found)
