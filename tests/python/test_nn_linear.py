"""heddle.nn.Linear: against torch on its weights, its state, what it refuses."""

import copy
import hashlib
import io

import heddle
import pytest
import torch
from heddle import lowbit, nn
from heddle.lowbit.packed import PACKED_BY
from nn_kit import relative, tensor
from torch.nn import functional as F


def text(name):
    return torch.tensor(list(name.encode()), dtype=torch.uint8)


@pytest.mark.parametrize("activation", lowbit.ACTIVATIONS)
@pytest.mark.parametrize("format", [None, "nvfp4", "int8_row"])
def test_linear_is_torch_s_on_its_weights(format, activation):
    source = torch.nn.Linear(64, 48)
    layer = nn.Linear.from_linear(source, format, activation=activation)
    x = tensor(2, 5, 64)
    z = F.linear(x, layer.dequantized(), source.bias)
    expected = {
        "none": lambda z: z, "relu": F.relu, "gelu_erf": F.gelu, "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
        "silu": F.silu, "swiglu": lambda z: F.silu(z[..., ::2]) * z[..., 1::2],
    }[activation](z)  # fmt: skip
    residual = tensor(*expected.shape, seed=1)
    norm = torch.nn.LayerNorm(64)
    with torch.no_grad():
        norm.weight.copy_(tensor(64, seed=2))
        norm.bias.copy_(tensor(64, seed=3))
        assert (layer(x) - expected).abs().max() < 2e-5
        assert (layer(x, residual=residual) - expected - residual).abs().max() < 2e-5
        assert (layer(x, norm=norm) - layer(norm(x))).abs().max() < 2e-5
        assert torch.equal(layer(x[None, None]), layer(x)[None, None])  # five dimensions
    assert f"format={format or 'float32'}" in repr(layer)
    assert (layer.weight is None) == (format is not None) and layer.bias is source.bias


@pytest.mark.parametrize("kind", ["layer", "layer_no_bias", "rms", "rms_eps", "plain", "other"])
def test_linear_with_any_norm(kind):
    norm = {
        "layer": torch.nn.LayerNorm(64, eps=1e-3),
        "layer_no_bias": torch.nn.LayerNorm(64, bias=False),
        "rms": torch.nn.RMSNorm(64),
        "rms_eps": torch.nn.RMSNorm(64, eps=1e-2),
        "plain": torch.nn.LayerNorm(64, elementwise_affine=False),
        "other": torch.nn.Tanh(),
    }[kind]
    layer = nn.Linear.from_linear(torch.nn.Linear(64, 32), "mxfp4")
    x = tensor(3, 64, seed=4) + 1
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.copy_(tensor(64, seed=5))
        assert (layer(x, norm=norm) - layer(norm(x))).abs().max() < 2e-5


def test_linear_trains_what_is_not_frozen():
    norm, layer = torch.nn.RMSNorm(64), nn.Linear.from_linear(torch.nn.Linear(64, 32), "nvfp4", activation="silu")
    x = tensor(7, 64).requires_grad_()
    residual = tensor(7, 32, seed=1).requires_grad_()
    y = layer(x, norm=norm, residual=residual)
    found = torch.autograd.grad(y.sum(), (x, layer.bias, norm.weight, residual))
    z = F.silu(F.linear(norm(x), layer.dequantized(), layer.bias)) + residual
    for a, b in zip(found, torch.autograd.grad(z.sum(), (x, layer.bias, norm.weight, residual))):
        assert (a - b).abs().max() < 1e-4
    assert [name for name, _ in layer.named_parameters()] == ["bias"]


def adapted(layer, x, down, up):
    return layer(x) + x @ down @ up


def test_an_adapter_over_a_frozen_layer_learns():
    layer = nn.Linear.from_linear(torch.nn.Linear(64, 64), "nvfp4")
    layer.requires_grad_(False)
    below = tensor(64, 64, seed=3).div(8).requires_grad_()  # a layer under it, which only dx reaches
    down, up = tensor(64, 4).requires_grad_(), torch.zeros(4, 64, requires_grad=True)
    x, target = tensor(128, 64, seed=1), tensor(128, 64, seed=2)
    optimiser = torch.optim.Adam([below, down, up], lr=0.02)
    losses = []
    for _ in range(40):
        optimiser.zero_grad()
        loss = (adapted(layer, x @ below, down, up) - target).square().mean()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("format", lowbit.FORMATS)
def test_state_of_a_layer(format):
    layer = nn.Linear.from_linear(torch.nn.Linear(256, 40), format)
    x = tensor(3, 256)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert all(t.dtype == torch.uint8 for name, t in state.items() if name != "bias") and "packed" not in state
    for other in (nn.Linear(256, 40, format=format), nn.Linear(256, 40), nn.Linear(256, 40, format="mxfp4")):
        other.load_state_dict(state)
        with torch.no_grad():
            assert other.format == format and torch.equal(other(x), layer(x))
            assert not torch.equal(layer(x), torch.zeros(3, 40))
    with torch.no_grad():
        for twin in (copy.deepcopy(layer), copy.deepcopy(layer).bfloat16().float()):
            twin.bias.copy_(layer.bias)
            assert torch.equal(twin(x), layer(x)) and torch.equal(twin.dequantized(), layer.dequantized())
        assert layer.bfloat16()(x.bfloat16()).dtype == torch.bfloat16
    assert layer.weight_bytes == layer.quantized().nbytes < 256 * 40 * 1.1
    assert layer.held_bytes == layer.weight_bytes + layer.packed.nbytes


def test_a_state_that_is_not_the_layer_s():
    state = nn.Linear.from_linear(torch.nn.Linear(64, 32), "nvfp4").state_dict()
    with pytest.raises(RuntimeError, match=r"a state of nvfp4 for \[16, 64\]"):
        nn.Linear(64, 16).load_state_dict(state)
    for broken in ({"codes": None}, {"codes": state["codes"][:, :-1]}, {"format_name": torch.tensor(list(b"nv"))}):
        wrong = {k: v for k, v in (state | broken).items() if v is not None}
        layer = nn.Linear(64, 32)
        with pytest.raises(RuntimeError, match="a state of"):
            layer.load_state_dict(wrong)
        assert layer.format is None and layer.weight is not None  # as it was
    with pytest.raises(RuntimeError, match="Missing key.*weight"):
        nn.Linear(64, 32).load_state_dict({"bias": torch.zeros(32)})


def test_packed_alone():
    layer = nn.Linear.from_linear(torch.nn.Linear(64, 32), "nvfp4")
    x, whole = tensor(3, 64), layer.state_dict()
    with torch.no_grad():
        y = layer(x)
        assert torch.equal(layer.drop_plain()(x), y)
    state = layer.state_dict()
    assert set(state) == {"bias", "format_name", "packed", "packed_by", "packed_as"}
    assert layer.held_bytes == layer.weight_bytes == state["packed"].nbytes
    other = nn.Linear(64, 32)
    other.load_state_dict(state)
    with torch.no_grad():
        assert torch.equal(other(x), y) and torch.equal(copy.deepcopy(other)(x), y)
    for call in (other.dequantized, other.quantized, other.drop_plain):
        with pytest.raises(ValueError, match="plain storage was dropped"):
            call()
    other.load_state_dict(whole)
    with torch.no_grad():
        assert torch.equal(other(x), y) and other.quantized().format == "nvfp4"
    for wrong, match in [
        ({"packed_by": text("0.0.1")}, "packed by Heddle 0.0.1, this is"),
        (
            {"packed_by": text(heddle._heddle.version())},
            r"packed by Heddle [\d.]+, this is [\d.]+, layout \d+: save plain storage instead",
        ),
        ({"packed_as": text("rows16 gated")}, "packed for swiglu, and the layer's activation is 'none'"),
        ({"packed_as": text("rows17")}, "order is 'rows17'"),
        ({"packed": state["packed"][1:]}, r"packed weights are \[\d+\]: they must be"),
    ]:
        layer = nn.Linear(64, 32)
        with pytest.raises(RuntimeError, match=match):
            layer.load_state_dict(state | wrong)
        assert layer.format is None and layer.weight is not None  # as it was


LAYOUT = {
    "rows16": {
        "nvfp4": "3f473a80406fe5d2",
        "mxfp4": "c03034e1c6126c62",
        "e2m1_row": "85da2b4bfafa0c8f",
        "nf4": "ff322debd26215a3",
        "fp4_bnb": "aaf036e11b12ac14",
        "int4_g32": "08ff37ce2e2aec83",
        "int4_g64": "80a70634ac48a844",
        "int4_g128": "56dd8a5bc9120679",
        "int4_g32_zp": "202d2c5fad874030",
        "int4_g64_zp": "514143232364334d",
        "int4_g128_zp": "63d3f0bcc865dcce",
        "int8_row": "6d488f898e7be707",
        "fp8_row": "70f976c7db3f6b6b",
    },
    "fragments16": {
        "nvfp4": "134c60bfebd83aa2",
        "mxfp4": "706a306fd2fbe533",
        "e2m1_row": "06e5f894723b8d84",
        "nf4": "ca24923bd21ca12e",
        "fp4_bnb": "3d1b6a014ea3dab1",
        "int4_g32": "7aed656fa8e6ecee",
        "int4_g64": "a8c9d6147dcce946",
        "int4_g128": "7b4568846986c931",
        "int4_g32_zp": "2e238e6f6c78d4f8",
        "int4_g64_zp": "1efe1aae8f2a053b",
        "int4_g128_zp": "1d1d5c8a6cfb216c",
        "int8_row": "222bc25c656d4f3d",
        "fp8_row": "49e356b957c77352",
    },
    "fragments8": {
        "nvfp4": "2030ece063b61de9",
        "mxfp4": "aba1178ab84bdc34",
        "e2m1_row": "39171a9a1a9f675a",
    },
}


@pytest.mark.parametrize("order", LAYOUT)
def test_packed_bytes_are_those_of_the_layout(order):
    """Where this fails, packed bytes mean something else: PACKED_BY needs the next layout number, and this the new sums."""
    weights = ((torch.arange(96 * 256) * 37 % 101 - 50) / 16.0).reshape(96, 256)
    found = {}
    for format in LAYOUT[order]:
        matrix = lowbit.quantize(weights, format)
        packed = torch.empty(heddle._heddle.lowbit_packed_bytes(format, 96, 256, False, order), dtype=torch.uint8)
        heddle._heddle.lowbit_pack(matrix._parts(), False, order, packed)
        found[format] = hashlib.sha256(packed.numpy().tobytes()).hexdigest()[:16]
    assert found == LAYOUT[order]


def test_weights_packed_for_a_gpu_wait_for_one():
    """A state of a layer that dropped plain storage on a GPU, read where there is none."""
    matrix = lowbit.quantize(tensor(32, 64), "nvfp4")
    packed = torch.empty(heddle._heddle.lowbit_packed_bytes("nvfp4", 32, 64, True, "fragments16"), dtype=torch.uint8)
    heddle._heddle.lowbit_pack(matrix._parts(), True, "fragments16", packed)
    state = {
        "format_name": text("nvfp4"), "packed": packed, "packed_by": text(PACKED_BY),
        "packed_as": text("fragments16 gated"),
    }  # fmt: skip
    layer = nn.Linear(64, 32, bias=False, activation="swiglu")
    layer.load_state_dict(state)
    assert layer.format == "nvfp4" and layer.held_bytes == packed.nbytes
    for holder in (layer, copy.deepcopy(layer)):
        with pytest.raises(
            ValueError, match="on a CPU and its packed weights are for GPUs, and plain storage was dropped"
        ):
            holder(tensor(3, 64))
        assert {name: t.tolist() for name, t in holder.state_dict().items()} == {
            n: t.tolist() for n, t in state.items()
        }
    with pytest.raises(RuntimeError, match="packed in order fragments16, and fp8_x is True"):
        nn.Linear(64, 32, bias=False, activation="swiglu", fp8_x=True).load_state_dict(state)
    layer.load_state_dict(nn.Linear.from_quantized(matrix, activation="swiglu").state_dict())
    assert layer(tensor(3, 64)).shape == (3, 16)


def test_linear_from_a_matrix_and_compiled():
    q = lowbit.quantize(tensor(32, 64), "int4_g32")
    layer = nn.Linear.from_quantized(q, tensor(32, seed=1), activation="relu").eval()
    x = tensor(5, 64, seed=2)
    expected = lowbit.linear(x, lowbit.pack(q), activation="relu", bias=tensor(32, seed=1))
    assert torch.equal(layer(x), expected)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), expected)
    grown = x.clone().requires_grad_()
    dx = torch.autograd.grad(compiled(grown).sum(), grown)[0]
    assert torch.equal(dx, torch.autograd.grad(layer(grown).sum(), grown)[0])
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16 and relative(layer(x), expected) < 0.01


@pytest.mark.parametrize("norm", [None, torch.nn.LayerNorm, torch.nn.RMSNorm])
def test_columns_in_another_order(norm):
    """What GPTQ's act-order stores: columns that share a scale do not lie together."""
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    matrix, bias = lowbit.quantize(tensor(32, 64)[:, order], "int4_g32_zp"), tensor(32, seed=1)
    layer = nn.Linear.from_quantized(matrix, bias, column_order=order.numpy().astype("int32"), activation="relu")
    x, norm = tensor(5, 64, seed=2), None if norm is None else norm(64)
    if norm is not None:
        for parameter in norm.parameters():
            torch.nn.init.normal_(parameter)
    weights = torch.empty(32, 64)
    weights[:, order] = matrix.dequantize()
    assert torch.equal(layer.dequantized(), weights) and "columns reordered" in repr(layer)
    grown = x.clone().requires_grad_()
    expected = F.relu(F.linear(grown if norm is None else norm(grown), weights, bias))
    inputs = (grown, *(() if norm is None else norm.parameters()))
    found = torch.autograd.grad(layer(grown, norm=norm).square().sum(), inputs)
    for a, b in zip(found, torch.autograd.grad(expected.square().sum(), inputs)):
        assert relative(a, b) < 1e-5
    with torch.no_grad():
        y = layer(x, norm=norm)
        assert (y - expected).abs().max() < 2e-5
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(x, norm=norm), y)
        assert torch.equal(copy.deepcopy(layer).bfloat16().float().dequantized(), weights)
        states = [layer.state_dict(), copy.deepcopy(layer).drop_plain().state_dict()]
        for state in states:
            other = nn.Linear(64, 32, activation="relu")
            other.load_state_dict(state)
            assert state["column_order"].dtype == torch.int32 and torch.equal(other(x, norm=norm), y)
        other.load_state_dict(nn.Linear.from_quantized(matrix, bias).state_dict())
        assert other.column_order is None
    for state in states:
        with pytest.raises(RuntimeError, match=r"column_order is \[64\]: it must have each of 0 to 63 once"):
            other.load_state_dict(state | {"column_order": order.clamp(max=62)})
    with pytest.raises(ValueError, match=r"column_order is \[63\]"):
        nn.Linear.from_quantized(matrix, column_order=order[1:])
    with pytest.raises(ValueError, match=r"x is \[5, 65\] and weights have 64 columns"):
        layer(tensor(5, 65))


def test_order_for_a_gpu():
    """cuBLASLt's where rows are no whole vectors of 16 bytes, whatever the format."""
    for outputs, inputs, activation, order in [
        (24, 64, "none", "fragments16"), (10, 64, "none", "matrix"), (24, 60, "none", "matrix"),
        (24, 64, "swiglu", "matrix"), (32, 64, "swiglu", "fragments16"),
    ]:  # fmt: skip
        layer = nn.Linear(inputs, outputs, activation=activation).quantize("e2m1_row")
        assert (layer._order(layer.format, cpu=True), layer._order(layer.format, cpu=False)) == ("rows16", order)
    for format, options, order in [
        ("nvfp4", {"fp8_x": True}, "fragments8"), ("fp8_row", {"fp8_x": True}, "matrix8"), ("int8_row", {"int8_x": True}, "matrix"),
    ]:  # fmt: skip
        layer = nn.Linear.from_linear(torch.nn.Linear(64, 32), format, **options)
        assert (layer._order(format, cpu=True), layer._order(format, cpu=False)) == ("rows16", order)
    layer = nn.Linear.from_linear(torch.nn.Linear(64, 32), "nvfp4", int8_x=True)
    with pytest.raises(ValueError, match="int8_x is set and the weights are nvfp4, on a GPU: .* fp8_x for nvfp4"):
        layer._order("nvfp4", cpu=False)


def test_linear_refuses():
    layer = nn.Linear.from_linear(torch.nn.Linear(64, 32), "nvfp4")
    for match, call in [
        ("activation is 'gelu': it must be one of none", lambda: nn.Linear(8, 8, activation="gelu")),
        ("the weights are nvfp4 already", lambda: layer.quantize("mxfp4")),
        ("the weights are floats: quantise them first", lambda: nn.Linear(8, 8).quantized()),
        ("K is 24: nvfp4 needs a multiple of its group", lambda: nn.Linear(24, 8).quantize("nvfp4")),
        (r"x is \[3, 63\] and weights have 64 columns", lambda: layer(tensor(3, 63))),
        ("int8_x and fp8_x are set", lambda: nn.Linear(8, 8, int8_x=True, fp8_x=True)),
        ("keep_16bit and int8_x are set", lambda: nn.Linear(8, 8, int8_x=True, keep_16bit=True)),
        ("keep_16bit and fp8_x are set", lambda: nn.Linear(8, 8, fp8_x=True, keep_16bit=True)),
        (
            r"layer '', \[8, 64\]: .*keep_16bit and int8_x are set",
            lambda: nn.quantize_model(nn.Linear(64, 8, keep_16bit=True), "int8_row+int8_x"),
        ),
        ("fp8_x is set and the format is int8_row", lambda: nn.Linear(8, 8, fp8_x=True).quantize("int8_row")),
        ("int8_x is set and the format is nf4", lambda: nn.Linear(64, 8, format="nf4", int8_x=True)),
        ("fp8_x is set and the layer is on a CPU", nn.Linear(64, 8, format="nvfp4", fp8_x=True).drop_plain),
    ]:
        with pytest.raises(ValueError, match=match):
            call()
