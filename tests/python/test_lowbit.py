"""heddle.lowbit: formats against their definitions written out in numpy, errors against published figures, refusals."""

import math
import random

import heddle
import numpy as np
import pytest
import torch
from heddle import lowbit

FORMATS = (*lowbit.FORMATS, "nf4_b128", "fp4_bnb_b32")


def weights(rows=8, columns=256, seed=0):
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)


def nibbles(codes, high_first=False):
    """[N, K / 2] bytes to [N, K] codes."""
    pair = (codes >> 4, codes & 15) if high_first else (codes & 15, codes >> 4)
    return np.stack(pair, -1).reshape(codes.shape[0], -1).astype(np.int64)


def e4m3(bits):
    return torch.from_numpy(bits).view(torch.float8_e4m3fn).float().numpy()


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
FP4_BNB = np.array([0, 0.0625, 8, 12, 4, 6, 2, 3], np.float32) / np.float32(12)
NF4 = np.array(
    [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
     -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
     0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0], np.float32
)  # fmt: skip


def by_definition(q):
    """What a quantised matrix stands for, from docs/formats.md, in numpy."""
    if q.format == "nvfp4":
        scale = e4m3(q.scales) * q.global_scale
        return E2M1[nibbles(q.codes)] * np.repeat(scale, 16, 1)
    if q.format == "mxfp4":
        return E2M1[nibbles(q.codes)] * np.repeat(np.exp2(q.scales.astype(np.float32) - 127), 32, 1)
    if q.format == "e2m1_row":
        return E2M1[nibbles(q.codes, high_first=True)[:, : q.shape[1]]] * q.scales
    group = q.shape[1] // q.scales.shape[1]
    scale = np.repeat(q.scales.astype(np.float32), group, 1)
    if q.format.startswith("nf4"):
        return NF4[nibbles(q.codes)] * scale
    if q.format.startswith("fp4_bnb"):
        return np.concatenate([FP4_BNB, -FP4_BNB])[nibbles(q.codes)] * scale
    if q.format.startswith("int4"):
        zero = 8 if q.zeros is None else np.repeat(q.zeros.astype(np.float32), group, 1)
        return (nibbles(q.codes) - zero).astype(np.float32) * scale
    return (q.codes.astype(np.float32) if q.format == "int8_row" else e4m3(q.codes)) * scale


@pytest.mark.parametrize("format", FORMATS)
def test_decodes_as_its_definition_says(format):
    q = lowbit.quantize(weights(), format, rule="mse")
    assert np.array_equal(q.dequantize(), by_definition(q))
    assert np.array_equal(q.dequantize(np.float16), by_definition(q).astype(np.float16))


@pytest.mark.parametrize("format", FORMATS)
def test_torch_and_numpy_give_the_same_bytes(format):
    w = weights()
    q, t = lowbit.quantize(w, format), lowbit.quantize(torch.from_numpy(w).requires_grad_(), format)
    for name in ("codes", "scales", "zeros", "global_scale"):
        mine, theirs = getattr(q, name), getattr(t, name)
        assert (mine is None) == (theirs is None)
        if mine is not None:
            theirs = theirs.view(torch.uint8) if theirs.dtype is torch.float8_e4m3fn else theirs
            assert np.array_equal(mine, theirs.numpy()) and mine.dtype == theirs.numpy().dtype
    assert t.nbytes == q.nbytes and t.bits_per_weight == q.bits_per_weight
    assert torch.equal(t.dequantize(torch.bfloat16), t.dequantize().to(torch.bfloat16))
    sqnr, torch_sqnr = q.error(w), t.error(torch.from_numpy(w))
    assert sqnr.sqnr == torch_sqnr.sqnr and sqnr.max_at == torch_sqnr.max_at
    assert np.array_equal(sqnr.row_max, torch_sqnr.row_max.numpy())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dtypes_and_strides_of_weights(dtype):
    w = torch.from_numpy(weights(32, 64)).to(dtype)
    expected = lowbit.quantize(w.float().contiguous(), "nvfp4", rule="four_six")
    for view in (w, w.t().contiguous().t(), torch.stack([w, w], -1)[..., 0]):
        found = lowbit.quantize(view, "nvfp4", rule="four_six")
        assert torch.equal(found.codes, expected.codes) and torch.equal(found.dequantize(), expected.dequantize())


def test_error_report():
    w = weights(16, 512)
    q = lowbit.quantize(w, "int4_g64_zp")
    d = np.abs(q.dequantize().astype(np.float64) - w)
    e = q.error(w)
    assert math.isclose(e.sqnr, 10 * math.log10((w.astype(np.float64) ** 2).sum() / (d**2).sum()), rel_tol=1e-9)
    assert math.isclose(e.mean, d.mean(), rel_tol=1e-9) and e.max == d.max() and d[e.max_at] == d.max()
    assert np.array_equal(e.row_max, d.max(1).astype(np.float32)) and e.row_sqnr.shape == (16,)


def test_sizes_and_words():
    q = lowbit.quantize(weights(256, 1024), "nvfp4", rule="mse")
    assert q.nbytes == 256 * (512 + 64) + 4 and repr(q) == "QuantizedTensor(nvfp4, [256, 1024], 4.500 bits per weight)"
    assert lowbit.quantize(np.zeros((0, 32), np.float32), "mxfp4").dequantize().shape == (0, 32)


def seed_metric(w, x, approximated):
    """1 - mean |dy| / mean |y| of a layer with GELU, in percent: how the early study measured "accuracy"."""
    y = torch.nn.functional.gelu(x @ w.T)
    return 100 * (1 - (torch.nn.functional.gelu(x @ approximated.T) - y).abs().mean() / y.abs().mean()).item()


def test_the_figure_of_the_early_study_and_what_beats_it():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1024, 768, generator=generator)
    w = (2 * torch.rand(3072, 768, generator=generator) - 1) / math.sqrt(768)
    figures = {
        (format, rule): seed_metric(w, x, lowbit.quantize(w, format, rule=rule).dequantize())
        for format, rule in (("e2m1_row", "plain"), ("nvfp4", "plain"), ("nvfp4", "mse"), ("int8_row", "plain"))
    }
    assert abs(figures["e2m1_row", "plain"] - 88.69) <= 0.1
    assert abs(figures["nvfp4", "plain"] - 89.54) <= 0.2
    assert figures["nvfp4", "mse"] >= 91.5
    assert figures["int8_row", "plain"] >= 99


def study_encode(w):
    """Codes and scale as the early study defines them, in torch."""
    scale = (w.abs().amax(-1, keepdim=True) / 6).clamp(min=1e-8)
    table = torch.tensor(lowbit.FP4Codec.FP4_TABLE)
    codes = ((w / scale)[..., None] - table).abs().argmin(-1)
    codes = torch.nn.functional.pad(codes, (0, codes.shape[-1] % 2))
    return (codes[..., ::2] << 4 | codes[..., 1::2]).to(torch.uint8).view(torch.int8), scale[..., 0]


@pytest.mark.parametrize("shape", [(64, 96), (3, 5, 33), (7,), (4, 1), (2, 0)])
def test_fp4_codec_is_the_early_study_s(shape):
    w = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    if w.numel() > 4:
        w.view(-1)[:3] = torch.tensor([0.0, -0.0, -1e-5])
    packed, scale = lowbit.FP4Codec.encode(w)
    if w.numel():
        expected, expected_scale = study_encode(w)
        assert torch.equal(packed, expected) and torch.equal(scale, expected_scale)
    back = lowbit.FP4Codec.decode(packed, scale, w.shape[-1])
    assert back.shape == w.shape and bool(((back - w).abs() <= scale[..., None] * 1.0001).all())


def test_fp4_codec_ties_go_to_the_lower_entry():
    ties = torch.tensor([[6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -0.75, -1.25, -5.0]])
    packed, scale = lowbit.FP4Codec.encode(ties)
    assert torch.equal(packed, study_encode(ties)[0]) and scale.item() == 1
    assert lowbit.FP4Codec.decode(packed, scale, 12).tolist() == [[6, 0, 0.5, 1, 1.5, 2, 3, 4, 0, -0.5, -1, -4]]


def test_importance_lowers_the_output_error():
    """Inputs whose columns differ in size: weighing with E[x_k^2] makes the layer's output better."""
    generator = torch.Generator().manual_seed(1)
    size = torch.exp(torch.randn(256, generator=generator))
    x = torch.randn(2048, 256, generator=generator) * size
    w = torch.randn(128, 256, generator=generator)
    importance = (x**2).mean(0)
    for format in ("nvfp4", "int4_g64", "nf4"):
        error = [
            ((x @ (lowbit.quantize(w, format, rule="mse", importance=h).dequantize() - w).T) ** 2).mean()
            for h in (None, importance)
        ]
        assert error[1] < 0.95 * error[0], format


def test_matrices_that_share_a_global_scale():
    q, k = weights(8, 64, 1), weights(8, 64, 2) * 3
    both = lowbit.quantize(np.concatenate([q, k]), "nvfp4")
    parts = [lowbit.quantize(w, "nvfp4", global_scale=float(both.global_scale[0])) for w in (q, k)]
    assert np.array_equal(both.codes, np.concatenate([p.codes for p in parts]))
    assert np.array_equal(both.scales, np.concatenate([p.scales for p in parts]))


def test_made_by_hand_of_a_checkpoint_s_tensors():
    q = lowbit.quantize(torch.from_numpy(weights()), "mxfp4")
    again = lowbit.QuantizedTensor("mxfp4", q.shape, q.codes, q.scales.view(torch.float8_e8m0fnu))
    assert torch.equal(again.dequantize(), q.dequantize())


W = weights()
MATRIX = lowbit.quantize(W, "nvfp4")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: lowbit.quantize(W, "fp4"), r"\[lowbit\] format is 'fp4': it must be one of nvfp4, mxfp4"),
        (lambda: lowbit.quantize(W, "nf4_b48"), "format is 'nf4_b48'"),
        (lambda: lowbit.quantize(W, "nvfp4", rule="best"), r"\[lowbit\] rule is 'best': it must be one of plain"),
        (lambda: lowbit.quantize(W, "nvfp4", rule="even"), "rule is even, which nvfp4 does not have"),
        (lambda: lowbit.quantize(W[0], "nvfp4"), r"weights has 1 dimensions: it must be \[N, K\]"),
        (
            lambda: lowbit.quantize(W[:, :200], "nvfp4"),
            "K is 200: nvfp4 needs a multiple of its group, 16; the next is 208",
        ),
        (lambda: lowbit.quantize(W.astype(np.float64), "nvfp4"), "weights is float64: it must be float32"),
        (lambda: lowbit.quantize(W.astype(np.int32), "nvfp4"), "weights is int32: it must be float32"),
        (lambda: lowbit.quantize(np.where(W == W[3, 7], np.nan, W), "nvfp4"), r"weights\[3, 7\] is nan|float64"),
        (
            lambda: lowbit.quantize(W, "nvfp4", importance=np.ones(256, np.float32)),
            "importance is given and rule is plain",
        ),
        (lambda: lowbit.quantize(W, "nvfp4", rule="mse", importance=np.ones(5, np.float32)), r"importance is \[5\]"),
        (lambda: lowbit.quantize(W, "nf4", global_scale=1.0), "global_scale is given and nf4 has none"),
        (lambda: lowbit.quantize(W, "nvfp4", global_scale=0.0), "global_scale is 0.0: it must be positive"),
        (lambda: lowbit.quantize(W, "nvfp4", global_scale=float("nan")), "global_scale is nan"),
        (lambda: lowbit.dequantize(MATRIX, np.float64), "out is float64"),
        (
            lambda: lowbit.QuantizedTensor("nvfp4", (8, 128), *MATRIX._parts()[3:]).dequantize(),
            r"matrix.codes is \[8, 128\]",
        ),
        (lambda: lowbit.QuantizedTensor("mxfp4", (8, 256), *MATRIX._parts()[3:]).dequantize(), "matrix.scales is"),
        (lambda: MATRIX.error(W[:4]), r"matrix is \[8, 256\] and weights is \[4, 256\]"),
        (lambda: lowbit.FP4Codec.encode(torch.tensor([math.inf])), r"weights\[0, 0\] is inf"),
        (lambda: lowbit.FP4Codec.encode(torch.zeros(2, dtype=torch.int64)), "weights is int64"),
    ],
)
def test_refusals(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_no_arrays():
    for call in (lambda: lowbit.quantize([[1.0]], "nvfp4"), lambda: lowbit.quantize(None), lambda: MATRIX.error(3)):
        with pytest.raises(TypeError, match="it must be a numpy array or a torch tensor"):
            call()
    with pytest.raises(TypeError, match="must be a torch tensor"):
        lowbit.FP4Codec.encode(np.zeros(3))


def test_arguments_at_random():
    """Whatever comes, it works or is refused with ValueError or TypeError."""
    pick = random.Random(5)
    arrays = [W, W.T, W[:, ::2], W[::-1], W[:0], W[:, :0], W[0], W[None], W.astype(np.float16), W.astype(np.int8), None, 3,
              "x", torch.from_numpy(W), torch.from_numpy(W).bfloat16(), torch.zeros(2, 32, dtype=torch.uint8),
              torch.ones(256), np.ones(256, np.float32), MATRIX.codes, MATRIX.scales, MATRIX.global_scale,
              np.frombuffer(W.tobytes(), np.float32).reshape(W.shape)]  # fmt: skip
    words = [*lowbit.FORMATS, "", "nf4_b", "plain", "mse", "four_six", None, 5]
    done = 0
    for _ in range(2000):
        a = lambda: W if pick.random() < 0.6 else pick.choice(arrays)  # noqa: E731
        try:
            if pick.random() < 0.5:
                rule = pick.choice(["plain", "mse"] * 9 + words)
                scale = pick.choice([*[None] * 12, 1.0, -1.0, math.nan, "1", 1e300])
                importance = None if pick.random() < 0.7 else a()
                lowbit.quantize(a(), pick.choice(words), rule=rule, importance=importance, global_scale=scale)
            else:
                shape = pick.choice([*[(8, 256)] * 6, (8, 0), (-1, 4), (8,), (2**40, 16), (2**70, 1), "ab"])
                tensors = [MATRIX.codes, MATRIX.scales, None, MATRIX.global_scale]
                tensors = [x if pick.random() < 0.9 else a() for x in tensors]
                q = lowbit.QuantizedTensor(pick.choice(["nvfp4"] * 9 + words), shape, *tensors)
                q.dequantize() if pick.random() < 0.5 else q.error(W)
            done += 1
        except (ValueError, TypeError):
            pass
    assert done > 100


def test_the_package_names_it():
    assert heddle.lowbit is lowbit and "lowbit" in heddle.__all__
