"""heddle.nn on a GPU: layers of any shape and rounding, blocks, policies and calibration, against the CPU and float64."""

import copy

import pytest
import torch
from heddle import _heddle, lowbit, nn
from nn_kit import outliers, relative, tensor

if not torch.cuda.is_available():
    pytest.skip("torch sees no GPU here", allow_module_level=True)
if not _heddle.cuda_built():
    pytest.skip("this build of heddle has no GPU kernels", allow_module_level=True)
HOPPER = torch.cuda.get_device_capability()[0] == 9

UNIT = {torch.bfloat16: 2**-8, torch.float16: 2**-11}


def close(found, exact, factor=2.0):
    error = (found.double() - exact).abs().max() / exact.abs().max()
    assert error <= factor * UNIT[found.dtype], error


# Linear


@pytest.mark.parametrize("dtype", UNIT)
@pytest.mark.parametrize(("outputs", "inputs"), [(10, 64), (33, 77), (24, 60)])
def test_layers_of_any_shape(outputs, inputs, dtype):
    """Rows that are no whole vectors of 16 bytes: order matrix."""
    formats = ["e2m1_row", "int8_row", "fp8_row"] + (["nvfp4", "nf4", "int4_g32_zp"] if inputs == 64 else [])
    for format in formats:
        layer = nn.Linear.from_linear(torch.nn.Linear(inputs, outputs), format).to(dtype).cuda()
        norm = torch.nn.LayerNorm(inputs, device="cuda", dtype=dtype)
        torch.nn.init.normal_(norm.bias)
        x = tensor(9, inputs, dtype=dtype).cuda().requires_grad_()
        residual = tensor(9, outputs, seed=1, dtype=dtype).cuda()
        weights, bias = layer.dequantized().double(), layer.bias.double()
        with torch.no_grad():
            close(layer(x, residual=residual), x.double() @ weights.T + bias + residual.double())
            close(layer(x, norm=norm), norm(x).double() @ weights.T + bias, 4)
        dy = tensor(9, outputs, seed=2, dtype=dtype).cuda()
        layer(x).backward(dy)
        close(x.grad, dy.double() @ weights, 4)
        assert layer._packed_order == "matrix"


def test_gates_and_ups_of_any_number():
    layer = nn.Linear.from_linear(torch.nn.Linear(64, 20), "nvfp4", activation="swiglu").bfloat16().cuda()
    x = tensor(5, 64, dtype=torch.bfloat16).cuda()
    z = x.double() @ layer.dequantized().double().T + layer.bias.double()
    with torch.no_grad():
        close(layer(x), torch.nn.functional.silu(z[:, ::2]) * z[:, 1::2])
    assert layer._packed_order == "matrix"


@pytest.mark.parametrize("keep_16bit", [False, True])
@pytest.mark.parametrize(("format", "outputs"), [("nvfp4", 96), ("int4_g128", 96), ("int8_row", 10)])
def test_packed_alone(format, outputs, keep_16bit):
    layer = nn.Linear.from_linear(torch.nn.Linear(256, outputs), format, keep_16bit=keep_16bit).bfloat16()
    x = tensor(7, 256, dtype=torch.bfloat16).cuda().requires_grad_()
    on_cpu = layer(x.detach().cpu())
    layer.cuda()
    y = layer(x)
    dx = torch.autograd.grad(y.sum(), x)[0]
    beside = 2 * outputs * 256 if keep_16bit else 0
    assert layer.held_bytes == layer.weight_bytes + layer.packed.nbytes + beside
    assert layer.drop_plain() is layer
    assert layer.weight_bytes == layer.packed.nbytes == layer.held_bytes
    assert torch.equal(layer(x), y) and torch.equal(torch.autograd.grad(layer(x).sum(), x)[0], dx)
    assert layer.held_bytes == layer.packed.nbytes + beside
    state = {name: t.cpu() for name, t in layer.state_dict().items()}
    for first in ("cuda", "cpu"):  # loaded there
        other = nn.Linear(256, outputs, device=first, dtype=torch.bfloat16)
        other.load_state_dict(state)
        assert other.packed.device.type == first
        with torch.no_grad():
            assert relative(other.cuda()(x), y) < 0.005
    layer.cpu()
    with pytest.raises(ValueError, match="on a CPU and its packed weights are for GPUs, and plain storage was dropped"):
        layer(x.detach().cpu())
    with torch.no_grad():
        assert torch.equal(layer.cuda()(x), y)
        whole = nn.Linear.from_linear(torch.nn.Linear(256, outputs), format).bfloat16()
        layer.load_state_dict(whole.state_dict())  # plain storage again, on the layer's device
        assert layer.codes.is_cuda
        assert relative(layer(x).cpu(), whole(x.cpu())) < 0.01 < relative(y.cpu(), whole(x.cpu()))
        assert relative(y.cpu(), on_cpu) < 0.01


def test_a_copy_for_each_dtype():
    layer = nn.Linear.from_linear(torch.nn.Linear(64, 32), "nvfp4", keep_16bit=True).cuda()
    x = tensor(3, 64).cuda()
    with torch.no_grad():
        first = layer(x.bfloat16())
        copies = dict(layer._kept)
        layer(x.half())
        assert torch.equal(layer(x.bfloat16()), first)
    assert (
        list(layer._kept) == [torch.bfloat16, torch.float16] and layer._kept[torch.bfloat16] is copies[torch.bfloat16]
    )


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "e2m1_row", "fp8_row"])
def test_x_in_e4m3(format):
    if format != "fp8_row" and not HOPPER:
        pytest.skip("x in 8 bits by E2M1 weights is for Hopper")
    base = torch.nn.Linear(256, 96)
    layer = nn.Linear.from_linear(base, format, fp8_x=True, activation="silu").bfloat16()
    x = tensor(70, 256, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="fp8_x is set and the layer is on a CPU"):
        layer(x)
    layer, x = layer.cuda(), x.cuda()
    with torch.no_grad():
        y = layer(x)
        packed = lowbit.pack(layer.quantized(), device="cuda", fp8_x=True)
        assert layer._packed_order == packed.order
        assert torch.equal(y, lowbit.linear(x, packed, bias=layer.bias, activation="silu"))
        plain = nn.Linear.from_linear(base, format, activation="silu").bfloat16().cuda()
        assert 1e-3 < relative(y, plain(x)) < 0.05  # of x's rounding
        state = layer.drop_plain().state_dict()
        assert torch.equal(layer(x), y)
    with pytest.raises(RuntimeError, match="and fp8_x is False"):
        plain.load_state_dict(state)


def test_x_in_int8():
    x = tensor(70, 256, dtype=torch.bfloat16)
    layer = nn.quantize_model(torch.nn.Sequential(torch.nn.Linear(256, 96)), "int8_row+int8_x").bfloat16()
    with torch.no_grad():
        expected = layer(x)
        assert relative(layer.cuda()(x.cuda()).cpu(), expected) < 0.005
    layer = nn.quantize_model(torch.nn.Sequential(torch.nn.Linear(256, 96)), "nvfp4+int8_x").bfloat16().cuda()
    with pytest.raises(
        ValueError, match="int8_x is set and the weights are nvfp4, on a GPU: there it is for int8_row, and fp8_x"
    ):
        layer(x.cuda())


def test_columns_in_another_order():
    order = torch.randperm(256, generator=torch.Generator().manual_seed(1))
    layer = nn.Linear.from_quantized(lowbit.quantize(tensor(96, 256)[:, order], "int4_g64_zp"), column_order=order)
    norm, x = torch.nn.LayerNorm(256, bias=False).bfloat16(), tensor(9, 256, dtype=torch.bfloat16)
    torch.nn.init.normal_(norm.weight)
    with torch.no_grad():
        expected = layer(x, norm=norm)
        layer, norm = layer.cuda(), norm.cuda()
        assert layer.column_order.is_cuda
        assert relative(layer(x.cuda(), norm=norm).cpu(), expected) < 0.01
        close(layer(x.cuda()), x.cuda().double() @ layer.dequantized().double().T)


# Blocks, policies, calibration

MIXED = {"qkv": "int8_row", "out": "nf4", "up": "nvfp4", "down": "16bit"}


def block(**options):
    torch.manual_seed(3)
    made = {"kv_heads": 2, "norm": "rms_norm", "activation": "swiglu", "causal": "bottom_right"} | options
    found = nn.TransformerBlock(128, 4, 256, **made)
    with torch.no_grad():
        found.norm1.weight.copy_(1 + 0.2 * tensor(128, seed=1))
        found.norm2.weight.copy_(1 + 0.2 * tensor(128, seed=2))
    return found.bfloat16().eval()


@pytest.mark.parametrize("options", [{}, {"norm": "layer_norm", "activation": "gelu_tanh", "norm_first": False}])
def test_a_mixed_block_is_the_cpu_s(options):
    on_cpu = nn.quantize_model(block(**options), MIXED)
    on_gpu = copy.deepcopy(on_cpu).cuda()
    exact = copy.deepcopy(on_cpu).float()
    x = tensor(2, 50, 128, dtype=torch.bfloat16)
    results = []
    for module, inputs in ((exact, x.float()), (on_cpu, x.clone()), (on_gpu, x.cuda())):
        inputs.requires_grad_()
        y = module(inputs)
        y.backward(torch.sin(torch.arange(y.numel(), device=y.device)).reshape(y.shape).to(y.dtype))
        parameters = [p.grad for p in module.parameters()]
        assert all(gradient is not None for gradient in parameters)
        with torch.no_grad():
            assert relative(module(inputs), y) < 0.01  # without gradients norms are inside the layers
        results.append([t.detach().float().cpu() for t in (y, inputs.grad, *parameters)])
    for name, wanted, cpu, gpu in zip(["y", "dx", *dict(exact.named_parameters())], *results):
        allowed = 2 * relative(cpu, wanted) + 2 * UNIT[torch.bfloat16]
        assert relative(gpu, wanted) <= allowed, (name, relative(gpu, wanted), allowed)


@pytest.mark.parametrize("norm_first", [True, False])
def test_checkpointing_of_a_mixed_block(norm_first):
    """With dropout: the block is computed again with the same one."""
    found = {}
    for checkpointing in (False, True):
        on_gpu = (
            nn.quantize_model(block(norm_first=norm_first, dropout=0.2, checkpointing=checkpointing), MIXED)
            .cuda()
            .train()
        )
        x = tensor(2, 50, 128, dtype=torch.bfloat16).cuda().requires_grad_()
        torch.manual_seed(6)
        y = on_gpu(x)
        y.float().square().sum().backward()
        found[checkpointing] = [y.detach(), x.grad, *(p.grad for p in on_gpu.parameters())]
    assert len(found[True]) > 4
    for a, b in zip(found[False], found[True], strict=True):
        assert a.norm() > 0 and relative(b, a) < 0.01


def test_choose_policy_with_a_head_of_ten_classes():
    torch.manual_seed(7)
    layers = [
        torch.nn.Linear(64, 96),
        torch.nn.ReLU(),
        torch.nn.Linear(96, 96),
        torch.nn.ReLU(),
        torch.nn.Linear(96, 10),
    ]
    model = torch.nn.Sequential(*layers).cuda().bfloat16().eval()
    x = tensor(200, 64, dtype=torch.bfloat16).cuda()
    with torch.no_grad():
        exact = model(x)
        for error in (0.2, 0.06):
            report = nn.choose_policy(model, x, error=error, formats=("nvfp4", "e2m1_row", "int8_row"))
            assert set(report.sensitivity["4"]) == {"nvfp4", "e2m1_row", "int8_row"}
            chosen = nn.quantize_model(copy.deepcopy(model), report.policy)
            assert relative(chosen(x), exact) <= error * 1.01 and abs(relative(chosen(x), exact) - report.error) < 1e-3
            assert 4 < report.bits_per_weight < 16


@pytest.mark.parametrize("policy", ["nvfp4", "int8_row+int8_x", "nvfp4+fp8_x"])
def test_calibrate(policy):
    if "fp8_x" in policy and not HOPPER:
        pytest.skip("x in 8 bits by E2M1 weights is for Hopper")
    with torch.no_grad():
        on_cpu = outliers(block().float())
        on_gpu, plain = copy.deepcopy(on_cpu).cuda(), copy.deepcopy(on_cpu).cuda()
        x = tensor(4, 64, 128, seed=1)
        exact = on_gpu(x.cuda())
        report, of_cpu = nn.calibrate(on_gpu, x.cuda(), policy, steps=10), nn.calibrate(on_cpu, x, policy, steps=10)
        assert relative(on_gpu(x.cuda()), exact) < 1e-3
        for name, layer in report.layers.items():
            assert abs(layer.plain_error / of_cpu.layers[name].plain_error - 1) < 0.05
            assert abs(layer.error / of_cpu.layers[name].error - 1) < 0.1
        nn.quantize_model(on_gpu, policy, importance=report.importance)
        nn.quantize_model(plain, policy)
        errors = [relative(m.bfloat16()(x.cuda().bfloat16()), exact) for m in (on_gpu, plain)]
        assert errors[0] < 0.9 * errors[1] < 0.4, errors
