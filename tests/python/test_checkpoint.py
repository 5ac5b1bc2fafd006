"""heddle.lowbit.load against the formulas by which each producer undoes its own layout, written out in numpy over files
that `safetensors` writes."""

import json

import numpy as np
import pytest
import torch
from heddle import lowbit, nn

save_file = pytest.importorskip("safetensors.numpy").save_file
save_torch = pytest.importorskip("safetensors.torch").save_file

N, K, GROUP = 24, 256, 64
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
FP4_BNB = np.array([0, 0.0625, 8, 12, 4, 6, 2, 3, 0, -0.0625, -8, -12, -4, -6, -2, -3], np.float32) / np.float32(12)
NF4 = np.array(
    [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
     -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
     0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0], np.float32
)  # fmt: skip
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@pytest.fixture
def rng():
    return np.random.default_rng(7)


def random_codes(rng, *shape):
    return rng.integers(0, 16, shape, dtype=np.uint8)


def low_first(codes):
    return codes[..., 0::2] | codes[..., 1::2] << 4


def words(codes, axis, order=range(8)):
    """Eight codes along an axis to an int32, the one at order[p] in nibble p."""
    parts = np.moveaxis(codes, axis, -1).astype(np.uint32)
    parts = parts.reshape(*parts.shape[:-1], -1, 8)
    packed = sum(parts[..., o] << np.uint32(4 * p) for p, o in enumerate(order))
    return np.ascontiguousarray(np.moveaxis(packed.astype(np.uint32), -1, axis)).view(np.int32)


def spread(scales, columns=K):
    return np.repeat(scales.astype(np.float32), columns // scales.shape[1], 1)


def e4m3(rng, *shape):
    """Bits of scales, and their values."""
    bits = rng.integers(0, 0x7F, shape, dtype=np.uint8)
    return bits, torch.from_numpy(bits).view(torch.float8_e4m3fn).float().numpy()


def check(path, name, wanted, format, layout, **options):
    layer = lowbit.layout_of(path, name, gptq_version=options.get("gptq_version"))
    assert (layer.layout, layer.format, layer.refusal) == (layout, format, "") and layer.reason
    listed = lowbit.layers(path, gptq_version=options.get("gptq_version"))
    assert list(listed) == [name] and listed[name].shape == wanted.shape == layer.shape
    q = lowbit.load(path, name, **options)
    assert np.array_equal(q.dequantize(), wanted.astype(np.float32))
    t = lowbit.load(path, name, framework="torch", **options)
    assert torch.equal(t.dequantize(), torch.from_numpy(q.dequantize()))
    return q


@pytest.mark.parametrize("names", [("a.mlp1_weight", "."), ("a.gate_up_proj", "_"), ("a.down_proj", "_")])
def test_gpt_oss(tmp_path, rng, names):
    (name, dot), experts = names, 3
    codes, scales = random_codes(rng, experts, N, K), rng.integers(100, 150, (experts, N, K // 32), dtype=np.uint8)
    blocks = low_first(codes).reshape(experts, N, K // 32, 16)
    file = tmp_path / "m.safetensors"
    save_file({f"{name}{dot}blocks": blocks, f"{name}{dot}scales": scales}, file)
    for expert in range(experts):
        # As the model's own code does: a table look-up of the low and of the high nibbles, then ldexp.
        wanted = np.empty((N, K // 32, 32), np.float32)
        exponent = scales[expert].astype(np.int32)[..., None] - 127
        wanted[..., 0::2] = np.ldexp(E2M1[blocks[expert] & 15], exponent)
        wanted[..., 1::2] = np.ldexp(E2M1[blocks[expert] >> 4], exponent)
        check(file, name, wanted.reshape(N, K), "mxfp4", "gpt_oss_mxfp4", expert=expert)
    layer = lowbit.layout_of(file, name)
    assert layer.experts == experts and layer.gate_up_interleaved == ("down" not in name)
    with pytest.raises(ValueError, match="expert is None: layer .* has 3 of them"):
        lowbit.load(file, name)
    with pytest.raises(ValueError, match="expert is 3: layer .* has 3 of them"):
        lowbit.load(file, name, expert=3)


@pytest.mark.parametrize("divided", [False, True])
def test_nvfp4(tmp_path, rng, divided):
    codes, (bits, scales) = random_codes(rng, N, K), e4m3(rng, N, K // 16)
    tensors = {"l.weight_packed" if divided else "l.weight": torch.from_numpy(low_first(codes))}
    tensors["l.weight_scale"] = torch.from_numpy(bits).view(torch.float8_e4m3fn)
    tensors["l.input_scale"] = torch.tensor(1.0)
    file = tmp_path / "m.safetensors"
    if divided:
        divisor = np.float32(448 * 6 / 3.7)
        tensors["l.weight_global_scale"] = torch.tensor([divisor])
        save_torch(tensors, file)
        q = check(
            file, "l", E2M1[codes] * spread(scales * (np.float32(1) / divisor)), "nvfp4", "compressed_tensors_nvfp4"
        )
        theirs = E2M1[codes] * spread(scales / divisor)  # one rounding apart
        assert np.all(np.abs(q.dequantize() - theirs) <= np.abs(theirs) * 2.0**-22)
    else:
        tensors["l.weight_scale_2"] = torch.tensor(0.0013)
        save_torch(tensors, file)
        wanted = E2M1[codes] * spread(scales * np.float32(0.0013))
        check(file, "l", wanted, "nvfp4", "modelopt_nvfp4")


def test_compressed_tensors_mxfp4(tmp_path, rng):
    codes, scales = random_codes(rng, N, K), rng.integers(100, 150, (N, K // 32), dtype=np.uint8)
    file = tmp_path / "m.safetensors"
    save_file({"l.weight_packed": low_first(codes), "l.weight_scale": scales}, file)
    wanted = E2M1[codes] * spread(np.exp2(scales.astype(np.float32) - 127))
    check(file, "l", wanted, "mxfp4", "compressed_tensors_mxfp4")


@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rule", ["symmetric", "zero_points", "channel", "g_idx"])
def test_compressed_tensors_int4(tmp_path, rng, scale_dtype, rule):
    rows = 21  # zero points do not fill the last word
    values = rng.integers(-8, 8, (rows, K))
    groups = 1 if rule == "channel" else K // GROUP
    scales = torch.from_numpy(rng.uniform(0.001, 0.1, (rows, groups))).to(scale_dtype)
    tensors = {
        "l.weight_packed": torch.from_numpy(words((values + 8).astype(np.uint8), 1)),
        "l.weight_scale": scales,
        "l.weight_shape": torch.tensor([rows, K]),
    }
    zeros = np.zeros((rows, groups), np.int64)
    if rule in ("zero_points", "g_idx"):
        zeros = rng.integers(-8, 8, (rows, groups))
        padded = np.concatenate([zeros + 8, np.zeros((24 - rows, groups), np.int64)]).astype(np.uint8)
        tensors["l.weight_zero_point"] = torch.from_numpy(words(padded, 0))
    group_of = rng.permutation(np.arange(K) // (K // groups)) if rule == "g_idx" else np.arange(K) // (K // groups)
    if rule == "g_idx":
        tensors["l.weight_g_idx"] = torch.from_numpy(group_of.astype(np.int32))
    file = tmp_path / "m.safetensors"
    save_torch(tensors, file)
    wanted = (values - zeros[:, group_of]).astype(np.float32) * scales.float().numpy()[:, group_of]
    format = "int4_g128" if rule == "channel" else "int4_g64" if rule == "symmetric" else "int4_g64_zp"
    options = {}
    if rule == "g_idx":
        with pytest.raises(ValueError, match=r"do not lie together \(g_idx\)"):
            lowbit.load(file, "l")
        wanted, options = wanted[:, lowbit.layout_of(file, "l").column_order], {"reorder_columns": True}
    check(file, "l", wanted, format, "compressed_tensors_int4", **options)


@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("type", ["nf4", "fp4"])
def test_bitsandbytes(tmp_path, rng, type, nested, block):
    codes, table = random_codes(rng, N * K), NF4 if type == "nf4" else FP4_BNB
    blocks = N * K // block
    state = {"quant_type": type, "blocksize": block, "dtype": "bfloat16", "shape": [N, K]}
    prefix = "m.q_proj.weight"
    tensors = {prefix: (codes[0::2] << 4 | codes[1::2])[:, None], f"{prefix}.quant_map": table}
    if nested:
        quantised = rng.integers(0, 256, blocks, dtype=np.uint8)
        map256 = np.sort(rng.uniform(-1, 1, 256)).astype(np.float32)
        second = rng.uniform(0.1, 0.3, -(-blocks // 32)).astype(np.float32)
        tensors |= {f"{prefix}.absmax": quantised, f"{prefix}.nested_absmax": second}
        tensors[f"{prefix}.nested_quant_map"] = map256
        state |= {"nested_blocksize": 32, "nested_dtype": "float32", "nested_offset": 0.0724}
        absmax = map256[quantised] * np.repeat(second, 32)[:blocks] + np.float32(0.0724)
    else:
        absmax = rng.uniform(0.01, 0.3, blocks).astype(np.float32)
        tensors[f"{prefix}.absmax"] = absmax
    text = json.dumps(state).encode()
    tensors[f"{prefix}.quant_state.bitsandbytes__{type}"] = np.frombuffer(text, np.uint8)
    file = tmp_path / "m.safetensors"
    save_file(tensors, file)
    wanted = (table[codes] * np.repeat(absmax, block)).reshape(N, K)  # blocks over the flattened matrix
    format = ("nf4" if type == "nf4" else "fp4_bnb") + ("" if block == 64 else f"_b{block}")
    check(file, "m.q_proj", wanted, format, "bitsandbytes")


def gptq_tensors(rng, version, act_order=False):
    codes, zeros = random_codes(rng, K, N), rng.integers(1, 16, (K // GROUP, N), dtype=np.uint8)
    scales = rng.uniform(0.001, 0.1, (K // GROUP, N)).astype(np.float16)
    group_of = (rng.permutation(K) if act_order else np.arange(K)) // GROUP
    tensors = {
        "l.qweight": words(codes, 0),
        "l.qzeros": words(zeros - (2 - version), 1),
        "l.scales": scales,
        "l.g_idx": group_of.astype(np.int32),
    }
    weights = scales.astype(np.float32)[group_of] * (codes.astype(np.float32) - zeros[group_of])  # [K, N]
    return tensors, np.ascontiguousarray(weights.T)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("act_order", [False, True])
def test_gptq(tmp_path, rng, version, act_order):
    tensors, wanted = gptq_tensors(rng, version, act_order)
    file = tmp_path / "m.safetensors"
    save_file(tensors, file)
    with pytest.raises(ValueError, match="nothing says which this is: give the version"):
        lowbit.load(file, "l", reorder_columns=True)
    assert "give the version" in lowbit.layers(file)["l"].refusal
    options = {"gptq_version": version, "reorder_columns": act_order}
    layer = lowbit.layout_of(file, "l", gptq_version=version)
    if act_order:
        order = layer.column_order
        assert np.array_equal(order, np.argsort(tensors["l.g_idx"], kind="stable"))
        q = check(file, "l", wanted[:, order], "int4_g64_zp", "gptq", **options)
        x = rng.standard_normal((3, K))
        assert np.allclose(x[:, order] @ q.dequantize().T, x @ wanted.T)
        matrix = lowbit.load(file, "l", framework="torch", **options)
        linear = nn.Linear.from_quantized(matrix, column_order=order)
        assert np.array_equal(linear.dequantized().numpy(), wanted)
        assert np.allclose(linear(torch.from_numpy(x).float()).numpy(), x @ wanted.T, atol=1e-4)
    else:
        assert layer.column_order is None
        check(file, "l", wanted, "int4_g64_zp", "gptq", **options)


def test_version_of_gptq_from_the_configuration(tmp_path, rng):
    for version, format in ((1, "gptq"), (2, "gptq_v2")):
        tensors, wanted = gptq_tensors(rng, version)
        save_file(tensors, tmp_path / "m.safetensors")
        config = {"quantization_config": {"quant_method": "gptq", "checkpoint_format": format}}
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert np.array_equal(lowbit.load(tmp_path, "l").dequantize(), wanted)


def test_awq(tmp_path, rng):
    codes, zeros = random_codes(rng, K, N), random_codes(rng, K // GROUP, N)
    scales = rng.uniform(0.001, 0.1, (K // GROUP, N)).astype(np.float16)
    file = tmp_path / "m.safetensors"
    tensors = {"l.qweight": words(codes, 1, AWQ_ORDER), "l.qzeros": words(zeros, 1, AWQ_ORDER), "l.scales": scales}
    save_file(tensors, file)
    group_of = np.arange(K) // GROUP
    weights = (codes.astype(np.float32) - zeros[group_of]) * scales.astype(np.float32)[group_of]
    check(file, "l", weights.T, "int4_g64_zp", "awq")


def test_shards(tmp_path, rng):
    tensors, wanted = gptq_tensors(rng, 2)
    paths = [str(tmp_path / f"{i}.safetensors") for i in range(2)]
    save_file({"l.qweight": tensors.pop("l.qweight")}, paths[0])
    save_file(tensors, paths[1])
    for paths_or_folder in (paths, tuple(reversed(paths)), tmp_path):
        assert np.array_equal(lowbit.load(paths_or_folder, "l", gptq_version=2).dequantize(), wanted)
    with pytest.raises(ValueError, match="tensor 'l.qzeros' is missing: layer 'l' needs it beside 'l.qweight'"):
        lowbit.load(paths[0], "l")


def test_what_is_refused_names_tensor_value_and_rule(tmp_path, rng):
    file = tmp_path / "m.safetensors"
    tensors, _ = gptq_tensors(rng, 1)
    tensors["l.qzeros"][2, 1] = -1  # 15 everywhere
    save_file(tensors, file)
    wanted = r"m.safetensors: tensor 'l.qzeros', row 8, group 2, is stored as 15, a zero point of 16"
    with pytest.raises(ValueError, match=wanted):
        lowbit.load(file, "l", gptq_version=1)
    lowbit.load(file, "l", gptq_version=2)
    with pytest.raises(ValueError, match="gptq_version is 3"):
        lowbit.load(file, "l", gptq_version=3)
    with pytest.raises(ValueError, match="framework is 'jax'"):
        lowbit.load(file, "l", framework="jax")
    with pytest.raises(ValueError, match="no layer 'other'"):
        lowbit.load(file, "other")
    for call in (lowbit.layers, lambda paths: lowbit.load(paths, "l"), lambda paths: lowbit.layout_of(paths, "l")):
        for path in (tmp_path / "absent.safetensors", "org/model", [file, "org/model"]):
            with pytest.raises(
                FileNotFoundError, match=r"\[checkpoint\] paths is '.*', which is not there: .*hub are not downl"
            ):
                call(path)
    with pytest.raises(ValueError, match="no path is given"):
        lowbit.layers([])

    prefix, state = "l.weight", {"quant_type": "nf4", "blocksize": 128, "shape": [4, 192]}
    save_file(
        {
            prefix: np.zeros((384, 1), np.uint8),
            f"{prefix}.absmax": np.zeros(6, np.float32),
            f"{prefix}.quant_map": NF4,
            f"{prefix}.quant_state.bitsandbytes__nf4": np.frombuffer(json.dumps(state).encode(), np.uint8),
        },
        file,
    )
    layer = lowbit.layers(file)["l"]
    assert layer.format is None and "K is 192 and blocksize 128: blocks that go on" in layer.refusal
