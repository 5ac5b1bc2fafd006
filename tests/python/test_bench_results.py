"""Results on their way into tables: digests of sources, merging of files, what is read of them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "scripts")]
import bench_results  # noqa: E402
import merge  # noqa: E402
import sources  # noqa: E402


@pytest.fixture
def tree(tmp_path):
    for name, text in {"k/a.cu": "one", "k/inner/b.h": "two", "k2/c.cu": "three"}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


class TestSources:
    def test_a_digest_follows_content_and_names(self, tree):
        first = sources.digest("k", tree)
        assert len(first) == 12 and first == sources.digest("k", tree)
        (tree / "k2/c.cu").write_text("other")
        assert sources.digest("k", tree) == first
        (tree / "k/inner/b.h").write_text("twO")
        changed = sources.digest("k", tree)
        (tree / "k/inner/b.h").write_text("two")
        (tree / "k/inner/b.h").rename(tree / "k/inner/c.h")
        assert len({first, changed, sources.digest("k", tree)}) == 3

    def test_bytes_do_not_move_between_files_unseen(self, tree):
        (tree / "k/a.cu").write_text("onetwo")
        (tree / "k/inner/b.h").write_text("")
        moved = sources.digest("k", tree)
        (tree / "k/a.cu").write_text("one")
        (tree / "k/inner/b.h").write_text("two")
        assert moved != sources.digest("k", tree)

    def test_patterns_and_what_python_compiled(self, tree):
        assert sources.files(tree, "k*/*.cu") == [tree / "k/a.cu", tree / "k2/c.cu"]
        before = sources.digest("k", tree)
        (tree / "k/__pycache__").mkdir()
        (tree / "k/__pycache__/x.pyc").write_text("x")
        assert sources.digest("k", tree) == before

    def test_unknown_sources_have_no_digest(self, tree):
        assert sources.digest("k3", tree) is None
        assert sources.digests(("k3", "k"), tree) == {"k": sources.digest("k", tree), "k3": None}

    def test_a_stage_has_the_digests_of_the_tree(self, tree, tmp_path):
        stage = tmp_path / "stage"
        (stage / "k").mkdir(parents=True)
        (stage / "k/a.cu").write_text("what was copied, which is not all")
        (stage / sources.STAGED).write_text(json.dumps({"k": sources.digest("k", tree)}))
        assert sources.digest("k", stage) == sources.digest("k", tree)
        assert sources.digest("k2", stage) is None

    def test_a_row_is_current_as_long_as_its_sources_are(self, tree):
        row = {"name": "r", "sources": sources.digests(("k", "k2"), tree)}
        assert sources.current(row, tree)
        (tree / "k2/c.cu").write_text("faster")
        assert not sources.current(row, tree)
        assert not sources.current({"name": "r"}, tree) and not sources.current({"sources": {}}, tree)
        assert sources.current({"kernel": "", "sources": {}}, tree)  # of others alone
        assert not sources.current({"kernel": "k", "sources": {}}, tree)
        assert not sources.current({"sources": {"k3": None}}, tree)  # absent then and now is not the same

    def test_every_path_that_rows_name_exists(self):
        assert [path for path in sources.known() if not sources.files(ROOT, path)] == []

    def test_a_stage_knows_its_commit(self, tmp_path, monkeypatch):
        import gpu_conditions

        monkeypatch.delenv("HEDDLE_COMMIT", raising=False)
        assert gpu_conditions.commit() != "abc"
        (tmp_path / "bench").mkdir()
        (tmp_path / "commit").write_text("abc\n")
        monkeypatch.setattr(gpu_conditions, "HERE", tmp_path / "bench")
        assert gpu_conditions.commit() == "abc"
        monkeypatch.setenv("HEDDLE_COMMIT", "def")
        assert gpu_conditions.commit() == "def"

    def test_the_digests_of_a_stage_are_written(self, tmp_path):
        subprocess.run([sys.executable, ROOT / "bench/sources.py", "--write", tmp_path / "s.json"], check=True)
        found = json.loads((tmp_path / "s.json").read_text())
        assert sorted(found) == sources.known() and all(len(value) == 12 for value in found.values())


def result(date, rows, wrong=(), **conditions):
    alike = {"gpu": "G", "driver": "1", "torch": "2", "cuda": "13", "method": "m", "commit": date}
    return {"conditions": alike | {"date": date} | conditions, "rows": rows, "wrong": list(wrong)}


def row(name, heddle=2.0, **more):
    return {
        "name": name,
        "unit": "TFLOP/s",
        "timed": "queued",
        "milliseconds": {"heddle": [1.0]},
        "rates": {"heddle": heddle},
        **more,
    }


class TestMerge:
    def test_later_rows_replace_earlier_ones_and_keep_their_conditions(self):
        found = merge.merged([result("1", [row("a"), row("b")]), result("2", [row("b", 3.0), row("c")])], ["x", "y"])
        assert [(r["name"], r["rates"]["heddle"], r["input"]) for r in found["rows"]] == [
            ("a", 2.0, 0),
            ("b", 3.0, 1),
            ("c", 2.0, 1),
        ]
        assert [i["commit"] for i in found["inputs"]] == ["1", "2"] and found["conditions"]["date"] == "2"

    def test_rows_of_shards_come_in_their_runs_order(self):
        shards = [result("1", [row("a"), row("c"), row("e")]), result("2", [row("b"), row("d")])]
        assert [each["name"] for each in merge.merged(shards, ["x", "y"], shards=True)["rows"]] == list("abcde")
        assert [each["name"] for each in merge.merged(shards, ["x", "y"])["rows"]] == list("acebd")

    def test_what_was_merged_can_be_merged_again(self):
        first = merge.merged([result("1", [row("a")]), result("2", [row("b")])], ["x", "y"])
        again = merge.merged([result("0", [row("z")]), first], ["z", "xy"])
        rows = bench_results.merged([("f", again)])
        assert {name: r["conditions"]["commit"] for name, r in rows.items()} == {"z": "0", "a": "1", "b": "2"}

    def test_conditions_without_rows_go(self):
        old = result("1", [row("b"), row("a")])
        found = merge.merged([old, result("2", [row("a")]), result("3", [row("b")])], ["x", "y", "z"])
        assert [i["commit"] for i in found["inputs"]] == ["2", "3"]
        assert [(r["name"], r["input"]) for r in found["rows"]] == [("b", 1), ("a", 0)]  # places are the older file's

    def test_a_row_that_is_wrong_later_is_not_published(self):
        wrong = {"name": "a", "wrong": "differs"}
        found = merge.merged([result("1", [row("a"), row("b")]), result("2", [], [wrong])], ["x", "y"])
        assert [r["name"] for r in found["rows"]] == ["b"] and found["wrong"][0]["name"] == "a"
        mended = merge.merged([found, result("3", [row("a")])], ["x", "y"])
        assert sorted(r["name"] for r in mended["rows"]) == ["a", "b"] and "wrong" not in mended

    @pytest.mark.parametrize("key", ["gpu", "driver", "torch", "method"])
    def test_files_that_were_measured_differently_are_refused(self, key):
        with pytest.raises(merge.Unlike, match=f"y: {key} is 'other'"):
            merge.merged([result("1", []), result("2", [], **{key: "other"})], ["x", "y"])

    def test_from_the_command_line(self, tmp_path):
        for name, rows in (("a", [row("a")]), ("b", [row("b")])):
            (tmp_path / name).write_text(json.dumps(result(name, rows)))
        run = lambda *names: subprocess.run(
            [sys.executable, ROOT / "bench/merge.py", *(tmp_path / n for n in names)], capture_output=True, text=True
        )
        assert run("out", "a", "b").returncode == 0
        assert [r["name"] for r in json.loads((tmp_path / "out").read_text())["rows"]] == ["a", "b"]
        (tmp_path / "b").write_text(json.dumps(result("b", [], gpu="H")))
        refused = run("out2", "a", "b")
        assert refused.returncode == 1 and "gpu is 'H'" in refused.stderr and not (tmp_path / "out2").exists()


class TestReading:
    def test_files_are_read_oldest_first_and_a_later_row_wins(self, tmp_path):
        for name, found in {
            "nvidia-b": result("2", [row("a", 5.0)]),
            "nvidia-a": result("3", [row("a", 7.0)]),
            "nvidia-c": result("1", [row("a", 1.0), row("d")]),
        }.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(found))
        files = bench_results.read("nvidia-*.json", tmp_path)
        assert [name for name, _ in files] == ["nvidia-c.json", "nvidia-b.json", "nvidia-a.json"]
        rows = bench_results.merged(files)
        assert rows["a"]["rates"]["heddle"] == 7.0 and rows["d"]["conditions"]["date"] == "1"

    def test_daggers(self):
        fresh = row("a", sources=sources.digests(("src/cuda/common",)))
        old = row("b", sources={"src/cuda/common": "0" * 12})
        assert bench_results.marked("a", [fresh]) == "a"
        for stale in ([old], [row("c")], [fresh, old]):
            assert bench_results.marked("x", stale) == "x †"
        assert (
            bench_results.noted("x †").endswith("† measured on older sources of this kernel.")
            and bench_results.noted("x") == "x"
        )

    def test_spans(self):
        assert bench_results.span([1.001, 2.5], "{:.2f}") == "1.00 to 2.50"
        assert bench_results.span([1.001, 1.002], "{:.2f}") == "1.00"
        assert bench_results.said(1, "row") == "1 row" and bench_results.said(2, "row") == "2 rows"

    def test_rows_that_are_wrong_are_told_until_they_are_mended(self):
        wrong = {"name": "a", "wrong": "Wrong: the output of heddle differs by 0.08,\nthe limit is 0.03"}
        files = [("f", result("1", [row("a"), row("b")])), ("g", result("2", [row("c")], [wrong]))]
        assert sorted(bench_results.merged(files)) == ["b", "c"]
        told = "| a | the output of heddle differs by 0.08, the limit is 0.03 |"
        assert bench_results.told_wrong(files).splitlines()[2:] == [
            "| wrong, and so without a figure | why |",
            "| --- | --- |",
            told,
        ]
        assert told in bench_results.told_wrong([("fg", merge.merged([content for _, content in files], ["f", "g"]))])
        assert bench_results.told_wrong(files, "b") == "" == bench_results.told_wrong(files[:1])
        assert bench_results.told_wrong([*files, ("h", result("3", [row("a")]))]) == ""
