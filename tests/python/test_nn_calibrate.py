"""heddle.nn.calibrate: what is folded, what it gains, what it leaves alone and refuses."""

import copy
import math

import pytest
import torch
from heddle import nn
from nn_kit import outliers, relative, tensor


@pytest.mark.parametrize(
    ("options", "factor"),
    [({"activation": "swiglu", "norm": "rms_norm", "kv_heads": 2}, 0.8), ({}, 0.6), ({"activation": "relu"}, 0.6)],
)
def test_calibrate_folds_and_lowers_the_error(options, factor):
    torch.manual_seed(0)
    model = torch.nn.Sequential(outliers(nn.TransformerBlock(128, 4, 256, **options)), torch.nn.Linear(128, 32)).eval()
    before, plain = copy.deepcopy(model), copy.deepcopy(model)
    sample = tensor(4, 64, 128, seed=1)
    with torch.no_grad():
        y = model(sample)
        report = nn.calibrate(model, [sample[:2], sample[2:]], "nvfp4")
        assert relative(model(sample), y) < 2e-6
        nn.quantize_model(model, "nvfp4", importance=report.importance)
        nn.quantize_model(plain, "nvfp4")
        assert relative(model(sample), y) < factor * relative(plain(sample), y)
    assert list(report.layers) == ["0.qkv", "0.out", "0.up", "0.down", "1"]
    for name, found in report.layers.items():
        assert found.error <= found.plain_error < 0.15 and name in str(report)
    folded = {name for name, found in report.layers.items() if found.alpha is not None}
    assert folded == {"0.qkv", "0.up"} | (set() if options == {} else {"0.down"})
    for name in ("0.qkv", "0.up"):
        assert report.layers[name].error < 0.5 * report.layers[name].plain_error
    # The report's errors are those of the layers that quantize_model has made.
    with torch.no_grad():
        inputs, scaled = before[0].norm1(sample), model[0].norm1(sample)
        exact, found = inputs @ before[0].qkv.weight.T, scaled @ model[0].qkv.dequantized().T
        assert abs(relative(found, exact) / report.layers["0.qkv"].error - 1) < 1e-3


@pytest.mark.parametrize("options", [{}, {"activation": "swiglu", "norm": "rms_norm", "kv_heads": 2}])
def test_calibrate_where_x_has_8_bits(options):
    """Columns of outliers cost the others of a row their bits; SmoothQuant's scales take them into the weights."""
    torch.manual_seed(0)
    block = outliers(nn.TransformerBlock(128, 4, 256, **options)).eval()
    sample, errors = tensor(4, 64, 128, seed=1), {}
    with torch.no_grad():
        y = block(sample)
        plain = nn.quantize_model(copy.deepcopy(block), "int8_row+int8_x")
        errors[None] = relative(plain(sample), y)
        for methods in (("smoothquant",), ("awq",), ("awq", "smoothquant")):
            found = copy.deepcopy(block)
            report = nn.calibrate(found, [sample[:2], sample[2:]], "int8_row+int8_x", methods=methods)
            scaled = copy.deepcopy(found)
            if methods == ("smoothquant",):  # powers of two
                assert torch.equal(found(sample), y) and not torch.equal(found.qkv.weight, block.qkv.weight)
            nn.quantize_model(found, "int8_row+int8_x", importance=report.importance)
            errors[methods] = relative(found(sample), y)
            for name in ("qkv", "up"):
                layer = report.layers[name]
                assert layer.method in methods and layer.method in str(report) and layer.error < 0.5 * layer.plain_error
            # What the report measured is what the layer's products in integers give.
            exact = block.norm1(sample) @ block.qkv.weight.T + block.qkv.bias if options == {} else None
            if exact is not None:
                error = (found.qkv(sample, norm=scaled.norm1) - exact).norm() / (exact - block.qkv.bias).norm()
                assert abs(error.item() / report.layers["qkv"].error - 1) < 1e-2
    assert all(errors[methods] < 0.5 * errors[None] for methods in errors if methods), errors
    assert 0.02 < errors[None] < 0.2
    # A layer's own option counts where the policy says nothing of x.
    own = copy.deepcopy(block)
    own.qkv.int8_x = True
    report = nn.calibrate(own, sample, {"qkv": "int8_row", "up": "int8_row"}, steps=5)
    assert [found.format for found in report.layers.values()] == ["int8_row+int8_x", "int8_row"]
    assert report.layers["qkv"].plain_error > 3 * report.layers["up"].plain_error


def test_calibrate_with_groups_and_policies():
    torch.manual_seed(0)
    model = torch.nn.ModuleDict(
        {"norm": torch.nn.LayerNorm(64), "a": torch.nn.Linear(64, 32), "b": torch.nn.Linear(64, 32),
         "down": torch.nn.Linear(32, 16), "head": torch.nn.Linear(16, 8)}
    ).eval()  # fmt: skip

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = model

        def forward(self, x):
            x = self.parts["norm"](x)
            return self.parts["head"](self.parts["down"](self.parts["a"](x) * torch.sigmoid(self.parts["b"](x))))

    net = Net().eval()
    with torch.no_grad():
        model["norm"].weight.copy_(torch.exp(tensor(64)))
    x, groups = tensor(100, 64, seed=3), [("parts.norm", ["parts.a", "parts.b"]), ("parts.a", ["parts.down"])]
    policy = nn.Policy({"*.head": "16bit", "*": "int4_g32"})
    with torch.no_grad():
        y = net(x)
        report = nn.calibrate(net, x, policy, groups=groups, rows=50)
        assert relative(net(x), y) < 2e-6
    assert list(report.layers) == ["parts.a", "parts.b", "parts.down"]
    assert report.layers["parts.a"].alpha == report.layers["parts.b"].alpha is not None
    assert report.importance["parts.a"] is report.importance["parts.b"]

    before = copy.deepcopy(net.state_dict())
    for match, options in [
        ("the model has no module 'nix'", {"groups": [("nix", ["parts.a"])]}),
        ("'parts.norm' has no layers behind it", {"groups": [("parts.norm", [])]}),
        ("'parts' is a ModuleDict: it must be a LayerNorm", {"groups": [("parts", ["parts.a"])]}),
        (
            "'parts.head' is no float linear layer that the policy quantises",
            {"groups": [("parts.down", ["parts.head"])]},
        ),
        ("'parts.down' has 32 inputs, the module in front 64 outputs", {"groups": [("parts.norm", ["parts.down"])]}),
        ("it, or one of its layers, is in another group", {"groups": [*groups, ("parts.norm", ["parts.b"])]}),
        ("rows is 0", {"rows": 0}),
    ]:
        with pytest.raises(ValueError, match=match):
            nn.calibrate(net, x, policy, **options)
    for match, call in [
        ("must have one format; found nvfp4, int4_g32",
         lambda: nn.calibrate(net, x, {"*.a": "nvfp4", "*": "int4_g32"}, groups=groups[:1])),
        (r"layer 'parts.a', \[32, 64\]: .*multiple of its group", lambda: nn.calibrate(net, x, "int4_g128")),
        ("training mode", lambda: nn.calibrate(Net(), x, policy)),
        ("quantises no layer", lambda: nn.calibrate(net, x, "16bit")),
        ("methods has 'gptq': they are awq and smoothquant", lambda: nn.calibrate(net, x, policy, methods=["gptq"])),
        (r"layer 'parts.a', \[32, 64\]: an input of the sample is NaN", lambda: nn.calibrate(net, x * math.nan, policy)),
        ("inputs are zero everywhere, or there are none", lambda: nn.calibrate(net, [], policy)),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=match):
            call()
        net.eval()
    assert all(torch.equal(a, b) for a, b in zip(before.values(), net.state_dict().values()))  # nothing was folded


def test_calibrate_leaves_what_is_shared():
    torch.manual_seed(0)
    block = outliers(nn.TransformerBlock(64, 2, 128))
    other = nn.TransformerBlock(64, 2, 128)
    other.norm2 = block.norm2
    model = torch.nn.Sequential(block, other).eval()
    x = tensor(2, 16, 64)
    with torch.no_grad():
        y = model(x)
        report = nn.calibrate(model, x, "nvfp4")
        assert relative(model(x), y) < 2e-6
    assert report.layers["0.up"].alpha is None and report.layers["0.qkv"].alpha is not None
