"""bench/nsa_claims.py: what it counts, against loops over pairs; and its file, as scripts/nsa_table.py shows it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "scripts")]
import nsa_claims  # noqa: E402
import nsa_table  # noqa: E402

CASE = nsa_claims.Case(T=70, H=4, Hkv=2, D=8, blocks=3, block=16, window=20)


def met_by(branch, lists, t, h):
    """Keys that row t of query head h meets."""
    if branch == "cmp":
        return sum(16 * c + 15 <= t for c in range(70 // 16))
    if branch == "swa":
        return sum(t - 20 < j <= t for j in range(70))
    listed = set(lists[0, t, h // 2].tolist())
    return sum(j // 16 in listed for j in range(t + 1))


@pytest.mark.parametrize("form", nsa_claims.FORMS)
def test_counts_are_those_of_a_loop(form):
    lists = nsa_claims.chosen(CASE)
    assert lists.shape == (1, 70, 2, 3) and (lists[0, :16, :, 1:] == -1).all()
    found = nsa_claims.counted(CASE, form, nsa_claims.pairs(CASE, lists))
    copied = {"plain": (), "seed": ("slc", "swa"), "seed_4_3": ("cmp", "slc", "swa")}[form]
    for branch in ("cmp", "slc", "swa"):
        for name, rows in (("all", range(70)), ("even", range(0, 70, 2)), ("odd", range(1, 70, 2))):
            flops = traffic = 0
            for t in rows:
                computes = t % 2 == 0 or branch not in copied
                traffic += 2 * 4 * 8 * 4  # q, or an anchor's output, and an output: 4 heads, 8 numbers, 4 bytes
                for h in range(4):
                    keys = met_by(branch, lists, t, h) if computes else 0
                    flops += keys * 2 * (8 + 8)
                    traffic += keys * (8 + 8) * 4 if h % 2 == 0 else 0  # once for each key/value head
            assert found[branch][f"flops {name}"] == flops, (branch, name)
            assert found[branch][f"bytes {name}"] == traffic, (branch, name)


def test_odd_rows_alone_are_other_rows():
    found = nsa_claims.errors(CASE, nsa_claims.chosen(CASE))
    for form in ("seed", "seed_4_3"):
        assert found[form]["even"] == 0 and found[form]["odd"] > 0.1


def test_the_file_and_its_table(tmp_path, monkeypatch):
    out = tmp_path / "nsa-claims-here.json"
    quick = [sys.executable, str(ROOT / "bench" / "nsa_claims.py"), "--quick", "--out", str(out)]
    subprocess.run(quick, check=True, capture_output=True, timeout=300)
    rows = json.loads(out.read_text())["rows"]
    assert [row["name"] for row in rows] == ["window 0", "window 64"]
    for row in rows:
        assert set(row["seconds"]) == {f"{f} {s}" for f in nsa_claims.FUNCTIONS for s in nsa_claims.STAGES}
        assert all(seconds > 0 for of in row["seconds"].values() for seconds in of.values())
        assert all(set(of) == set(nsa_claims.FORMS) for of in row["bytes"].values())
    read = nsa_table.read
    monkeypatch.setattr(nsa_table, "read", lambda pattern: read(pattern, tmp_path))
    block = nsa_table.block()
    assert "| products of compression | 2.1 G, the same |" in block and "†" not in block
    assert "counted, no window | counted, window 64" in block
    rows[0]["sources"]["src/problem/pool.h"] = "of another tree"
    out.write_text(json.dumps({**json.loads(out.read_text()), "rows": rows}))
    assert "† measured on older sources" in nsa_table.block()


def test_without_a_file_the_page_says_so(tmp_path, monkeypatch):
    read = nsa_table.read
    monkeypatch.setattr(nsa_table, "read", lambda pattern: read(pattern, tmp_path))
    assert nsa_table.block() == "Not measured yet."


def test_shares():
    assert nsa_table.saved(0, 0) == "–"
    assert nsa_table.saved(100, 100.4) == "the same"
    assert nsa_table.saved(100, 60) == "−40 %" and nsa_table.saved(100, 150) == "+50 %"
