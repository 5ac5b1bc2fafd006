"""examples/classify: both encoders learn kinds of text, and the adaptive one attends less."""

import re
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "classify"))

import classify  # noqa: E402
import texts  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def small_texts(monkeypatch, tmp_path):
    """Two kinds that every machine has: Python's own sources, and made-up columns of numbers."""
    for n in range(20):
        rows = (" ".join(str((i * 37 + n * j) % 1000) for j in range(12)) for i in range(40))
        (tmp_path / f"{n:02}.txt").write_text("\n".join(rows))
    kinds = {"Python sources": texts.KINDS["Python sources"], "numbers": [(str(tmp_path), "*.txt")]}
    monkeypatch.setattr(texts, "KINDS", kinds)


def test_it_learns(small_texts, capsys):
    classify.main(["--context", "500", "--steps", "12", "--batch", "4", "--files", "20"])
    printed = capsys.readouterr().out
    assert "32 texts to train on, 8 to test on, of 500 bytes: Python sources, numbers" in printed
    rows = re.findall(r"^(dense|adaptive|local, no gate)\s+(\S+) -> (\S+)\s+(\S+)%\s+(\S+)%", printed, re.MULTILINE)
    assert [row[0] for row in rows] == ["dense", "adaptive", "local, no gate"]
    for _, first, last, right, _ in rows:
        assert float(last) < float(first) and float(right) > 60
    assert float(rows[0][4]) == 100 and float(rows[2][4]) < 50


def test_pieces_are_of_whole_files(small_texts):
    kinds, train, test = texts.gather(100_000, 20)
    assert kinds == ["Python sources", "numbers"] and len(train.y) == 4 * len(test.y) == 32
    path = texts.files("numbers", 20)[0]
    content = path.read_bytes()
    first = train.y.tolist().index(1)
    piece = bytes(train.x[first, : train.lengths[first]].tolist())
    assert piece == content[len(content) // 4 :] and not train.x[first, train.lengths[first] :].any()


def test_a_kind_alone_is_refused(monkeypatch):
    monkeypatch.setattr(texts, "KINDS", {"none": [("/nowhere", "*")]})
    with pytest.raises(SystemExit, match="two are needed"):
        texts.gather(100)
    with pytest.raises(SystemExit):
        classify.main(["--steps", "0"])
