"""Quantised and packed weights copied, pickled and read by torch.load(weights_only=True); states of quantised modules."""

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from heddle import lowbit, nn
from heddle.lowbit import packed
from nn_kit import tensor

FORMATS = ("nvfp4", "int4_g32_zp", "fp8_row")


def saved_and_loaded(thing, **how):
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, **how)


def made(format, library):
    weights = tensor(48, 64)
    return lowbit.quantize(weights if library == "torch" else weights.numpy(), format)


def product(weights, library):
    x = tensor(3, 64, seed=1)
    return np.asarray(lowbit.linear(x if library == "torch" else x.numpy(), weights))


@pytest.mark.parametrize("library", ["torch", "numpy"])
@pytest.mark.parametrize("format", FORMATS)
def test_a_copy_is_the_same_weights(format, library):
    matrix = made(format, library)
    weights = lowbit.pack(matrix)
    wanted = product(weights, library)
    for copied in (copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))):
        again = copied(matrix)
        assert np.array_equal(np.asarray(again.dequantize()), np.asarray(matrix.dequantize()))
        for _ in range(4):  # whose memory begins anywhere
            other = copied(weights)
            assert other.data is not weights.data and other.error == weights.error
            assert np.array_equal(product(other, library), wanted) and wanted.any()


@pytest.mark.parametrize("format", FORMATS)
def test_torch_load_of_weights_alone(format):
    matrix = made(format, "torch")
    weights = lowbit.pack(matrix)
    found = saved_and_loaded({"matrix": matrix, "packed": weights}, weights_only=True)
    assert torch.equal(found["matrix"].dequantize(), matrix.dequantize())
    assert found["packed"].error == weights.error and np.array_equal(
        product(found["packed"], "torch"), product(weights, "torch")
    )
    with pytest.raises(pickle.UnpicklingError, match="Unsupported global"):  # modules are code, as all of torch's are
        saved_and_loaded(nn.Linear(64, 32, format=format), weights_only=True)


def test_what_is_loaded_is_checked_when_it_is_used():
    matrix = made("nvfp4", "torch")
    short = saved_and_loaded(
        lowbit.QuantizedTensor("nvfp4", (4800, 64), matrix.codes, matrix.scales, None, matrix.global_scale),
        weights_only=True,
    )
    with pytest.raises(ValueError, match=r"matrix.codes is \[48, 32\]: it must be \[4800, 32\]"):
        short.dequantize()
    weights = lowbit.pack(matrix)
    large = saved_and_loaded(lowbit.PackedTensor("nvfp4", (4800, 64), False, weights.data), weights_only=True)
    with pytest.raises(ValueError, match=r"weights.data is \[1792\]: it must be \[172864\]"):
        product(large, "torch")


def test_packed_weights_of_another_version(monkeypatch):
    weights = lowbit.pack(made("nvfp4", "torch"))
    layer = nn.Linear.from_linear(torch.nn.Linear(64, 32), "nvfp4")
    alone = copy.deepcopy(layer).drop_plain()
    x = tensor(3, 64)
    with torch.no_grad():
        wanted = layer(x)
    monkeypatch.setattr(packed, "PACKED_BY", "0.0.1, layout 0")
    monkeypatch.setattr(nn.weights, "PACKED_BY", "0.0.1, layout 0")
    old = pickle.dumps(weights), pickle.dumps(layer), pickle.dumps(alone)
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"packed by Heddle 0\.0\.1, layout 0, this is .*: pickle the QuantizedTensor"):
        pickle.loads(old[0])
    found = pickle.loads(old[1])
    assert found.packed is None
    with torch.no_grad():
        assert torch.equal(found(x), wanted)
    with pytest.raises(ValueError, match="packed by Heddle 0.0.1.*plain storage was dropped"):
        pickle.loads(old[2])
    with torch.no_grad():
        for same in (pickle.loads(pickle.dumps(layer)), pickle.loads(pickle.dumps(alone))):
            assert torch.equal(same.packed, layer.packed) and torch.equal(same(x), wanted)


class Model(torch.nn.Module):
    def __init__(self, device=None):
        super().__init__()
        self.up = torch.nn.Linear(64, 96, device=device)
        self.own = nn.Linear(96, 64, bias=False, device=device)
        self.norm = torch.nn.LayerNorm(64, device=device)
        self.again = torch.nn.ModuleList([self.up])

    def forward(self, x):
        return self.norm(self.own(self.up(x).relu())) + self.again[0](x)[:, :64]


@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_state_into_a_model_in_floats(device, dropped):
    model = nn.quantize_model(Model(), {"up": "nvfp4", "own": "int8_row"}).eval()
    if dropped:
        model.up.drop_plain()
    state = saved_and_loaded(model.state_dict(), weights_only=True)
    other = nn.load_quantized(Model(device).eval(), state)
    x = tensor(5, 64, seed=2)
    with torch.no_grad():
        assert torch.equal(other(x), model(x)) and other.again[0] is other.up
    assert (other.up.format, other.own.format) == ("nvfp4", "int8_row")
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in state.items())
    # A state in which `up` is in floats leaves it torch's.
    part = nn.quantize_model(Model(), {"own": "mxfp4"}).state_dict()
    assert type(nn.load_quantized(Model(), part).up) is torch.nn.Linear


def test_states_that_are_refused():
    state = nn.quantize_model(Model(), "nvfp4").state_dict()
    model = Model()
    with pytest.raises(ValueError, match="state has no layer in a format: load_state_dict takes states in floats"):
        nn.load_quantized(model, Model().state_dict())
    stray = {f"gone.{name.removeprefix('up.')}" if name.startswith("up.") else name: x for name, x in state.items()}
    with pytest.raises(
        ValueError, match="state has 'gone' in a format, where the module has no linear layer: names are"
    ):
        nn.load_quantized(model, stray)
    assert type(model.up) is torch.nn.Linear and model.own.format is None
    with pytest.raises(RuntimeError, match="Missing key.*norm.weight"):
        nn.load_quantized(model, {name: x for name, x in state.items() if name != "norm.weight"})
    with pytest.raises(ValueError, match="module is a torch.nn.Linear, which cannot be replaced in itself"):
        nn.load_quantized(torch.nn.Linear(64, 96), nn.quantize_model(torch.nn.Linear(64, 96), "nvfp4").state_dict())


def test_report_of_what_stayed():
    model = nn.quantize_model(Model(), {"up": "nvfp4+int8_x"})
    model.table = torch.nn.Embedding(10, 64)
    model.head = torch.nn.Linear(64, 10, bias=False)
    model.head.weight = model.table.weight
    model.experts = torch.nn.Parameter(torch.zeros(2, 4, 64))
    report = nn.weights_report(model)
    assert report.layers == {"up": nn.StoredWeight("nvfp4+int8_x", (96, 64), model.up.weight_bytes)}
    assert report.floats == {
        "experts": nn.StoredWeight("Model", (2, 4, 64), 2048),
        "own.weight": nn.StoredWeight("Linear", (64, 96), 4 * 64 * 96),
        "table.weight": nn.StoredWeight("Embedding", (10, 64), 2560, ("head.weight",)),
    }
    lines = str(report).splitlines()
    assert "nvfp4+int8_x" in lines[0] and "in floats" not in lines[0]
    assert any("Embedding in floats, shared with head.weight" in line for line in lines)
    assert lines[-1].startswith("1 layers in ") and "3 weights in floats in " in lines[-1]
