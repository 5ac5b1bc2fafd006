"""examples/adapters: adapters learn through weights in 4 bits, which keep every bit."""

import copy
import re
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path[:0] = [str(EXAMPLES / "adapters"), str(EXAMPLES / "train")]

import adapters  # noqa: E402
import data  # noqa: E402
import heddle.nn  # noqa: E402

from model import Model, Shape  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(adapters, "SHAPE", Shape(layers=1, heads=2, head_size=32, context=64))
    torch.manual_seed(0)
    return Model(adapters.SHAPE)


@pytest.mark.parametrize("format", ["nvfp4", "nf4", "int4_g32"])
def test_only_adapters_change(small, format):
    model = adapters.adapt(small, format, rank=4)
    layers = [module for module in model.modules() if isinstance(module, heddle.nn.Linear)]
    assert [layer.format for layer in layers] == [format] * 4
    assert {name.rsplit(".", 1)[1] for name, x in model.named_parameters() if x.requires_grad} == {"a", "b"}
    text = data.gather(limit=20).train
    inputs, targets = data.batch(text, 2, 64, torch.Generator().manual_seed(3))
    state, before = copy.deepcopy(model.state_dict()), adapters.digest(model)
    begun = adapters.loss_of(model, inputs, targets)
    losses, optimizer = adapters.train(model, text, steps=12, rate=1e-2, seed=1, batch=2)
    assert adapters.loss_of(model, inputs, targets) < begun - 0.2
    changed = {
        name
        for name, x in model.state_dict().items()
        if isinstance(x, torch.Tensor) and not torch.equal(x, state[name])
    }
    assert changed == {name for name, x in model.named_parameters() if x.requires_grad}
    assert adapters.digest(model) == before
    memory = adapters.bytes_of(model, optimizer)
    count = sum(x.numel() for x in adapters.trainable(model))
    assert memory["gradients"] == 4 * count and 8 * count <= memory["optimizer"] <= 8 * count + 64
    assert memory["weights"] == sum(layer.held_bytes for layer in layers) + sum(x.nbytes for x in model.parameters())
    assert sum(layer.held_bytes for layer in layers) < 0.7 * sum(
        layer.in_features * layer.out_features for layer in layers
    )


def test_the_hash_sees_one_bit(small):
    model = adapters.adapt(small, "nvfp4", rank=2)
    before = adapters.digest(model)
    packed = next(module for module in model.modules() if isinstance(module, heddle.nn.Linear)).packed
    packed.view(torch.uint8).view(-1)[100] ^= 1
    assert adapters.digest(model) != before
    packed.view(torch.uint8).view(-1)[100] ^= 1
    assert adapters.digest(model) == before
    adapters.trainable(model)[0].data += 1
    assert adapters.digest(model) == before


def test_gradients_of_adapters_are_those_over_the_weights_as_stored():
    """An adapter in front of the layer in 4 bits and one beside it, against torch over what the layer stands for."""
    torch.manual_seed(1)
    layer = heddle.nn.Linear.from_linear(torch.nn.Linear(64, 32, bias=False), "nvfp4")
    plain = torch.nn.Linear(64, 32, bias=False)
    plain.weight = torch.nn.Parameter(layer.dequantized(), requires_grad=False)
    x, direction = torch.randn(5, 64), torch.randn(5, 32)
    found = []
    for base in (layer, plain):
        torch.manual_seed(2)
        below, above = adapters.Adapted(torch.nn.Linear(64, 64), 3), adapters.Adapted(base, 3)
        for adapted in (below, above):
            adapted.b.data.normal_()
        (above(below(x)) * direction).sum().backward()
        found.append((below.a.grad, below.b.grad, above.a.grad, above.b.grad))
    for ours, theirs in zip(*found):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-4) and ours.abs().max() > 0.1


def test_the_whole_of_it(monkeypatch, capsys):
    if not data.LICENCES.is_dir():
        pytest.skip(f"{data.LICENCES} is not there")
    monkeypatch.setattr(adapters, "SHAPE", Shape(layers=1, heads=2, head_size=32, context=64))
    adapters.main(["--pretrain", "30", "--steps", "15", "--rank", "4"])
    out = capsys.readouterr().out
    rows = re.findall(r"^(.{24}) +(\d+) +([\d.]+) -> ([\d.]+) +(\d+) +(\d+) +(\d+)$", out, re.M)
    assert [row[0].strip() for row in rows] == ["all weights, float32", "adapters over nvfp4"]
    full, adapted = ([float(x) for x in row[1:]] for row in rows)
    assert full[2] < full[1] and adapted[2] < adapted[1]
    assert all(4 * small < large for small, large in zip((adapted[0], *adapted[4:]), (full[0], *full[4:])))
    assert adapted[3] < full[3] and re.search(r"sha256 [0-9a-f]{16}, the same$", out, re.M)


def test_changed_weights_are_found(monkeypatch):
    if not data.LICENCES.is_dir():
        pytest.skip(f"{data.LICENCES} is not there")
    monkeypatch.setattr(adapters, "SHAPE", Shape(layers=1, heads=2, head_size=32, context=64))
    train = adapters.train

    def careless(model, *arguments, **options):
        found = train(model, *arguments, **options)
        model.last.weight.data[0] += 1e-6
        return found

    monkeypatch.setattr(adapters, "train", careless)
    with pytest.raises(SystemExit, match="fine-tuning changed frozen weights"):
        adapters.main(["--pretrain", "10", "--steps", "5"])
