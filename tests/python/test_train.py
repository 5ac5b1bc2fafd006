"""examples/train, small, on the CPU: the loss falls, and Heddle's attention trains as torch's does."""

import dataclasses
import json
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

TRAIN = Path(__file__).resolve().parents[2] / "examples" / "train"
sys.path.insert(0, str(TRAIN))

import chart  # noqa: E402
import data  # noqa: E402
import lengths  # noqa: E402
import report  # noqa: E402
import sparse  # noqa: E402
import train  # noqa: E402

import model  # noqa: E402
from model import Model, Shape  # noqa: E402

# At this rate the attention decides: without dk the loss would be off by 0.3, with v 1 % too large by 0.006.
SMALL = train.Settings(
    device="cpu", shape=Shape(layers=2, heads=2, head_size=32, context=128), batch=2, steps=24, rate=4e-3
)


@pytest.fixture(scope="module")
def corpus():
    return data.gather(limit=60)


def run(corpus, **changes):
    return train.train(dataclasses.replace(SMALL, **changes), corpus)


def test_positions_are_those_of_the_bytes():
    torch.manual_seed(0)
    small, text = Model(Shape(2, 2, 16, 32), "torch"), torch.randint(0, 256, (1, 32))
    with torch.no_grad():
        assert torch.equal(small(text), small(text, torch.arange(32)))
        assert not torch.allclose(small(text), small(text, torch.arange(32).flip(0)), atol=1e-3)


@pytest.mark.parametrize("precision, tolerance", [("fp32", 5e-4), ("bf16", 3e-2)])
def test_learns_as_torch_does(corpus, precision, tolerance):
    ours, theirs, unfused = (
        run(corpus, attention=name, precision=precision)["losses"] for name in ("heddle", "torch", "math")
    )
    assert ours[0] > 5 and ours[-1] < ours[0] - 2  # from chance, ln 256 = 5.5
    assert max(abs(x - y) for x, y in zip(ours, theirs)) <= tolerance
    assert max(abs(x - y) for x, y in zip(unfused, theirs)) <= tolerance  # what two programs of torch keep to, as well


GROUPED = dataclasses.replace(SMALL.shape, kv_heads=1)


@pytest.fixture(scope="module")
def dense(corpus):
    return run(corpus, attention="heddle", shape=GROUPED)["losses"]


@pytest.mark.parametrize("attention", model.GATED)
def test_sparse_attention_learns(corpus, dense, attention, monkeypatch):
    monkeypatch.setattr(model, "SPARSE", {"block_counts": 3, "block_size": 16, "window_size": 24})
    ours = run(corpus, attention=attention, shape=GROUPED)["losses"]
    assert ours[0] > 5 and abs(ours[-1] - dense[-1]) < 0.3
    assert max(abs(x - y) for x, y in zip(ours, dense)) > 1e-3  # another computation


def test_scaled_float16(corpus):
    found = run(corpus, precision="fp16", steps=6)
    assert found["scale"] > 0 and found["losses"][-1] < found["losses"][0]


def test_checkpointing_and_repeats_change_nothing(corpus):
    once = run(corpus, steps=4)["losses"]
    assert run(corpus, steps=4)["losses"] == once
    assert run(corpus, steps=4, checkpointing=True)["losses"] == once
    assert run(corpus, steps=4, seed=2)["losses"] != once


def test_model_is_causal():
    torch.manual_seed(0)
    model = Model(SMALL.shape)
    text = torch.randint(256, (1, 40))
    other = text.clone()
    other[:, 25:] = 7
    assert torch.equal(model(text)[:, :25], model(other)[:, :25]) and not torch.equal(
        model(text)[:, 25], model(other)[:, 25]
    )


def test_text_is_large_and_the_same_each_time():
    whole = data.gather()
    assert len(whole.train) + len(whole.validation) >= data.LEAST
    assert data.gather().sha256 == whole.sha256
    assert 0.01 < len(whole.validation) / len(whole.train) < 0.2
    generator = torch.Generator().manual_seed(1)
    inputs, targets = data.batch(whole.train, 3, 50, generator)
    assert inputs.shape == targets.shape == (3, 50) and torch.equal(inputs[:, 1:], targets[:, :-1])


def test_learning_rate_rises_and_falls():
    rates = [train.learning_rate(n, train.Settings(steps=100)) for n in range(100)]
    assert max(rates) == pytest.approx(6e-4) and rates[0] < rates[10] < rates[19] and rates[30] > rates[99] > 5e-5


def test_commands_and_their_report(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(data, "files", lambda files=data.files: files()[:60])
    monkeypatch.setattr(data, "LEAST", 10_000)
    out, page = tmp_path / "train.json", tmp_path / "README.md"
    small = ["--device", "cpu", "--layers", "1", "--out", str(out)]
    more = ["--heads", "2", "--head-size", "16", "--context", "64", "--batch", "2", "--steps", "12"]
    train.main([*small, *more, "--attention", "all", "--precision", "fp32", "--checkpointing", "both"])
    told = capsys.readouterr().out
    train.main([*small, *more, "--attention", "both", "--precision", "bf16", "--log-every", "5"])
    steps = re.findall(
        r"^(\w+ bf16) +step (\d+) of 12: loss (\d\.\d{4}), (\d+) tokens/s$", capsys.readouterr().out, re.M
    )
    assert [(name, int(step)) for name, step, _, _ in steps] == [
        (f"{name} bf16", step) for name in ("heddle", "torch") for step in (5, 10, 12)
    ]
    assert all(0 < float(loss) < 7 and int(speed) > 0 for _, _, loss, speed in steps)
    train.main([*small, *more, "--attention", "heddle", "--precision", "bf16", "--log-every", "0"])
    assert "step" not in capsys.readouterr().out
    lengths.main([*small, "--heads", "1", "--lengths", "32", "64", "--tokens", "64", "--steps", "2"])
    assert "tokens/s" in capsys.readouterr().out
    assert told.count("step 10 of 12: loss ") == 6 and told.count(", validation ") == 6
    found = json.loads(out.read_text())
    assert [len(found[kind]) for kind in ("runs", "lengths")] == [8, 12]
    nsa = ["--heads", "4", "--context", "128", "--batch", "1", "--steps", "12", "--precision", "fp32"]
    kept = tmp_path / "trained.pt"
    sparse.main([*small, *nsa, "--attention", "heddle", "nsa", "--keep", str(kept)])
    operands = torch.load(kept, weights_only=True)
    assert {name: x.shape[:3] for name, x in operands.items()} == {
        name: (1, 128, heads) for name, heads in zip(("q", "k", "v", "g_cmp", "g_slc", "g_swa"), (4, 2, 2, 4, 4, 4))
    }
    page.write_text((TRAIN / "README.md").read_text())
    report.main([str(out), "--page", str(page)])
    text = page.read_text()
    assert "| fp32, checkpointing | " in text and "| 64 | " in text and "nan" not in text
    assert "| nsa | " in text and "4 heads over 2 key/value heads" in text
    for name in ("loss", "lengths", "sparse"):
        root = ElementTree.fromstring((tmp_path / f"{name}.svg").read_text())
        assert root.tag.endswith("svg") and "nan" not in ElementTree.tostring(root, "unicode")


def test_chart_marks_what_it_shows():
    svg = chart.lines(
        "t", "x", "y", {"a one": [(128, 10.0), (1024, 80.0)], "a two": [(128, 20.0), (1024, 20.0)]}, doubling=True
    )
    assert svg.count("<polyline") == 2 and ">512<" in svg and ">50<" in svg and ">a two<" in svg
    assert report.distance([1.0, 2.0], [1.0, 4.0]) == pytest.approx(2**0.5)
