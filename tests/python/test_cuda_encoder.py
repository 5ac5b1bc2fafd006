"""heddle.Encoder on a GPU, on a small random BERT, against the same model in torch and on the CPU."""

import json
import struct

import heddle
import numpy as np
import pytest
import torch
from heddle import _heddle

if not torch.cuda.is_available():
    pytest.skip("torch sees no GPU here", allow_module_level=True)
if not _heddle.cuda_built():
    pytest.skip("this build of heddle has no GPU kernels", allow_module_level=True)

HIDDEN, HEADS, WIDE, LAYERS, EPS = 128, 4, 256, 2, 1e-6
LENGTHS = [17, 1, 0, 40, 33]
UNIT = {"bfloat16": 2**-8, "float16": 2**-11}


def model_weights():
    random = torch.Generator().manual_seed(1)
    found = {}

    def add(name, *shape, mean=0.0, deviation=1.0):
        found[name] = torch.randn(shape, generator=random) * deviation + mean

    def add_norm(name):
        add(name + ".weight", HIDDEN, mean=1, deviation=0.2)
        add(name + ".bias", HIDDEN, deviation=0.2)

    for name, rows in (("word", 60), ("position", 64), ("token_type", 2)):
        add(f"embeddings.{name}_embeddings.weight", rows, HIDDEN, deviation=0.7)
    add_norm("embeddings.LayerNorm")
    for i in range(LAYERS):
        layer = f"encoder.layer.{i}."
        for name, out, inside in (
            *((f"attention.self.{part}", HIDDEN, HIDDEN) for part in ("query", "key", "value")),
            ("attention.output.dense", HIDDEN, HIDDEN),
            ("intermediate.dense", WIDE, HIDDEN),
            ("output.dense", HIDDEN, WIDE),
        ):
            add(layer + name + ".weight", out, inside, deviation=inside**-0.5)
            add(layer + name + ".bias", out, deviation=0.2)
        add_norm(layer + "attention.output.LayerNorm")
        add_norm(layer + "output.LayerNorm")
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """(folder, weights)."""
    folder, weights = tmp_path_factory.mktemp("bert"), model_weights()
    header, data = {}, b""
    for name, x in weights.items():
        bytes_ = x.numpy().tobytes()
        header[name] = {"dtype": "F32", "shape": list(x.shape), "data_offsets": [len(data), len(data) + len(bytes_)]}
        data += bytes_
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    config = dict(
        model_type="bert", hidden_act="gelu", hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        intermediate_size=WIDE, vocab_size=60, max_position_embeddings=64, type_vocab_size=2, layer_norm_eps=EPS,
    )  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder, weights


def packed(lengths=LENGTHS):
    ids = np.random.default_rng(0).integers(0, 60, sum(lengths), np.int32)
    return ids, np.cumsum([0, *lengths]).astype(np.int32)


def textbook(weights, ids, offsets):
    """The last layer's rows in float64."""
    w = {name: x.double() for name, x in weights.items()}
    functional = torch.nn.functional

    def linear(x, name):
        return functional.linear(x, w[name + ".weight"], w[name + ".bias"])

    def norm(x, name):
        return functional.layer_norm(x, (HIDDEN,), w[name + ".weight"], w[name + ".bias"], EPS)

    rows = []
    for begin, end in zip(offsets[:-1], offsets[1:]):
        x = (
            w["embeddings.word_embeddings.weight"][ids[begin:end]]
            + w["embeddings.position_embeddings.weight"][: end - begin]
        )
        x = norm(x + w["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm")
        for i in range(LAYERS):
            layer = f"encoder.layer.{i}."
            q, k, v = (
                linear(x, f"{layer}attention.self.{part}").view(-1, HEADS, HIDDEN // HEADS).transpose(0, 1)
                for part in ("query", "key", "value")
            )
            context = functional.scaled_dot_product_attention(q, k, v).transpose(0, 1).reshape(-1, HIDDEN)
            x = norm(x + linear(context, layer + "attention.output.dense"), layer + "attention.output.LayerNorm")
            wide = functional.gelu(linear(x, layer + "intermediate.dense"))
            x = norm(x + linear(wide, layer + "output.dense"), layer + "output.LayerNorm")
        rows.append(x)
    return rows


@pytest.mark.parametrize("dtype", UNIT)
def test_matches_the_textbook(model, dtype):
    folder, weights = model
    encoder = heddle.Encoder(folder, device="cuda", dtype=dtype)
    assert encoder.device == "cuda:0" and {layer.format for layer in encoder.layers} == {dtype}
    embeddings, states = encoder.encode(*packed(), return_hidden_states=True)
    assert embeddings.is_cuda and states.is_cuda and embeddings.dtype == torch.float32 and encoder.times == {}
    rows = textbook(weights, *packed())
    exact = torch.cat(rows)
    # Some 12 roundings on the way, of values that norms bring back to the order of 1.
    assert (states.cpu() - exact).abs().max() < 12 * UNIT[dtype] * exact.abs().max()
    means = torch.nn.functional.normalize(
        torch.stack([x.mean(0) if len(x) else torch.zeros(HIDDEN).double() for x in rows]), dim=-1
    )
    assert (embeddings.cpu() - means).abs().max() < 12 * UNIT[dtype] * means.abs().max()
    assert not embeddings[2].any()
    raw = encoder.encode(*packed(), normalize=False)
    torch.testing.assert_close(torch.nn.functional.normalize(raw, dim=-1), embeddings, atol=1e-6, rtol=0)


@pytest.mark.parametrize("format", ["nvfp4", "int8_row", "int4_g64", "nf4", "fp8_row"])
def test_low_bit_layers_are_the_cpus(model, format):
    """The same codes, so that what is left is rounding."""
    gpu = heddle.Encoder(model[0], device="cuda", dtype="bfloat16", layers=format)
    cpu = heddle.Encoder(model[0], dtype="bfloat16", layers=format)
    assert [(x.name, x.format, x.shape) for x in gpu.layers] == [(x.name, x.format, x.shape) for x in cpu.layers]
    found, wanted = gpu.encode(*packed()).cpu().numpy(), cpu.encode(*packed())
    there = np.diff(packed()[1]) > 0
    assert (found * wanted).sum(1)[there].min() > 0.9995


def test_results_where_the_caller_wants_them(model):
    encoder = heddle.Encoder(model[0], device="cuda", dtype="bfloat16")
    wanted, rows = encoder.encode(*packed(), return_hidden_states=True)
    out, states = torch.empty_like(wanted), torch.empty_like(rows)
    before = out._version
    found = encoder.encode(*packed(), return_hidden_states=True, out=out, hidden_states_out=states)
    assert found[0] is out and found[1] is states and out._version > before
    assert out.equal(wanted) and states.equal(rows)
    for given, error, words in [
        (np.empty(wanted.shape, np.float32), TypeError, "out is a ndarray: it must be a torch tensor"),
        (out.cpu(), ValueError, "out is on cpu: it must be on cuda:0, as the encoder is"),
        (out[1:], ValueError, "it must be float32"),
        (out.clone().requires_grad_(), ValueError, "out requires a gradient"),
    ]:
        with pytest.raises(error, match=words):
            encoder.encode(*packed(), out=given)


def test_streams_and_workspace(model):
    encoder = heddle.Encoder(model[0], device="cuda:0", dtype="bfloat16")
    wanted = encoder.encode(*packed())
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        found = [encoder.encode(*packed()) for _ in range(3)]
    stream.synchronize()
    assert all(torch.equal(one, wanted) for one in found)
    assert encoder.workspace(91, 5, 40) >= 91 * (5 * HIDDEN) * 2
    assert encoder.encode(torch.from_numpy(packed()[0]), torch.from_numpy(packed()[1])).equal(wanted)


def test_errors(model):
    folder = model[0]
    encoder = heddle.Encoder(folder, device="cuda", dtype="bfloat16")
    ids, offsets = packed()
    with pytest.raises(ValueError, match="token_ids holds 60 at 3: ids are from 0 to 59"):
        encoder.encode(np.where(np.arange(ids.size) == 3, 60, ids).astype(np.int32), offsets)
    with pytest.raises(ValueError, match="token_ids is on a GPU: it must be on the CPU"):
        encoder.encode(torch.from_numpy(ids).cuda(), offsets)
    with pytest.raises(ValueError, match="cu_seqlens"):
        encoder.encode(ids, offsets[:-1])
    with pytest.raises(ValueError, match="dtype is float32: on a GPU it must be float16 or bfloat16"):
        heddle.Encoder(folder, device="cuda")
    with pytest.raises(ValueError, match="asks for float32: on a GPU products are in dtype"):
        heddle.Encoder(folder, device="cuda", dtype="float16", layers={"*.key": "float32"})
    with pytest.raises(ValueError, match="device is 'meta': it must be 'cpu', 'cuda' or 'cuda:N'"):
        heddle.Encoder(folder, device="meta", dtype="float16")
