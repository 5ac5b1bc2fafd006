"""heddle.Encoder on a tiny random BERT, against transformers."""

import json

import heddle
import numpy as np
import pytest
import torch

transformers = pytest.importorskip("transformers")
save_file = pytest.importorskip("safetensors.torch").save_file


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """(folder, the torch model whose files lie there)."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96,
        max_position_embeddings=40, initializer_range=0.3,
    )  # fmt: skip
    bert = transformers.BertModel(config, add_pooling_layer=False).eval()
    folder = tmp_path_factory.mktemp("bert")
    save_file({name: x.contiguous() for name, x in bert.state_dict().items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    return folder, bert


IDS = [[3, 7, 1, 9, 4], [2], list(range(10, 33))]


def packed():
    return np.array(sum(IDS, []), np.int32), np.cumsum([0, *map(len, IDS)]).astype(np.int32)


@pytest.mark.parametrize("method", [None, "baseline"])
def test_embeddings_match_transformers(model, method):
    folder, bert = model
    encoder = heddle.Encoder(folder, method=method)
    embeddings, states = encoder.encode(*packed(), return_hidden_states=True)
    with torch.no_grad():
        expected = [bert(torch.tensor([ids])).last_hidden_state[0] for ids in IDS]
    np.testing.assert_allclose(states, torch.cat(expected).numpy(), atol=2e-4)
    means = torch.nn.functional.normalize(torch.stack([x.mean(0) for x in expected]), dim=-1)
    np.testing.assert_allclose(embeddings, means.numpy(), atol=2e-5)
    raw = encoder.encode(*packed(), normalize=False)
    np.testing.assert_allclose(raw, torch.stack([x.mean(0) for x in expected]).numpy(), atol=2e-4)
    assert encoder.config["hidden"] == 48 and encoder.weight_bytes > 0
    assert set(encoder.times) == {"embedding", "attention", "linear", "norm_and_activation", "pooling"}


def test_bfloat16_is_close(model):
    exact = heddle.Encoder(model[0]).encode(*packed())
    rounded = heddle.Encoder(model[0], dtype="bfloat16").encode(*packed())
    assert (exact * rounded).sum(1).min() > 0.995


def test_errors(model, tmp_path):
    encoder = heddle.Encoder(model[0])
    ids, starts = packed()
    with pytest.raises(ValueError, match="50"):
        encoder.encode(np.where(ids == 9, 50, ids), starts)
    with pytest.raises(ValueError, match="cu_seqlens"):
        encoder.encode(ids, starts[:-1])
    with pytest.raises(ValueError, match="int64"):
        encoder.encode(ids.astype(np.int64), starts)
    with pytest.raises(ValueError, match="dtype is 'int8'"):
        heddle.Encoder(model[0], dtype="int8")
    with pytest.raises(FileNotFoundError, match=r"\[encoder_load\] folder is '.*', which has no config.json"):
        heddle.Encoder(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match="which has no model.safetensors"):
        heddle.Encoder(tmp_path)
    words = r"folder is 'org/model', which is not there: .* names of a hub are not downloaded"
    with pytest.raises(FileNotFoundError, match=r"\[encoder_load\] " + words):
        heddle.Encoder("org/model")
    with pytest.raises(FileNotFoundError, match=r"\[choose_precisions\] " + words):
        heddle.Encoder.choose_precisions("org/model", ids, starts)
    for dtype in ("bf16", torch.bfloat16):
        assert heddle.Encoder(model[0], dtype=dtype).layers[0].format == "bfloat16"


@pytest.fixture(scope="module")
def grouped(tmp_path_factory):
    """A folder of a model whose layers have whole groups of every format."""
    torch.manual_seed(1)
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256,
        max_position_embeddings=40, initializer_range=0.1,
    )  # fmt: skip
    bert = transformers.BertModel(config, add_pooling_layer=False).eval()
    folder = tmp_path_factory.mktemp("grouped")
    save_file({name: x.contiguous() for name, x in bert.state_dict().items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    return folder, bert


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "int4_g64_zp", "int8_row", "fp8_row", "nf4"])
def test_low_bit_layers_are_those_weights(grouped, format, dtype):
    folder, bert = grouped
    encoder = heddle.Encoder(folder, dtype=dtype, layers={"*.0.output.dense": "float32", "*": f"{format}:mse"})
    formats = {layer.name: layer.format for layer in encoder.layers}
    assert (
        formats.pop("encoder.layer.0.output.dense") == "float32"
        and set(formats.values()) == {format}
        and len(formats) == 11
    )
    held = transformers.BertModel(bert.config, add_pooling_layer=False).eval()
    state = {name: x.clone() for name, x in bert.state_dict().items()}
    for name in formats:
        state[f"{name}.weight"] = heddle.lowbit.quantize(state[f"{name}.weight"], format, rule="mse").dequantize()
    held.load_state_dict(state)
    _, states = encoder.encode(*packed(), return_hidden_states=True)
    with torch.no_grad():
        expected = torch.cat([held(torch.tensor([ids])).last_hidden_state[0] for ids in IDS]).numpy()
    error = np.linalg.norm(states - expected) / np.linalg.norm(expected)
    assert error < (2e-5 if dtype == "float32" else 2e-2)
    assert all(layer.packing_error.changed == 0 for layer in encoder.layers)  # the CPU's order keeps every weight
    assert (
        sum(layer.weight_bytes for layer in encoder.layers)
        < encoder.weight_bytes
        < heddle.Encoder(folder, dtype=dtype).weight_bytes
    )


def test_a_quantised_checkpoint_loads_as_it_is(grouped, tmp_path):
    heddle.lowbit.quantize_checkpoint(grouped[0], tmp_path / "out", format="int4_g64", keep="*.1.*")
    encoder = heddle.Encoder(tmp_path / "out")
    assert [layer.format for layer in encoder.layers] == ["int4_g64"] * 6 + ["float32"] * 6
    assert encoder.layers[4].shape == (256, 128)
    same = heddle.Encoder(grouped[0], layers=[("*.1.*", "float32"), ("*", "int4_g64:mse")])
    assert np.array_equal(encoder.encode(*packed()), same.encode(*packed()))
    with pytest.raises(ValueError, match="weights are not quantised twice"):
        heddle.Encoder(tmp_path / "out", layers="nvfp4")


def test_precisions_are_chosen_to_meet_an_error(grouped):
    folder, _ = grouped
    exact = heddle.Encoder(folder)
    choice = heddle.Encoder.choose_precisions(folder, *packed(), error=0.02)
    encoder = heddle.Encoder(folder, layers=choice.layers)
    reference, found = exact.encode(*packed()), encoder.encode(*packed())
    error = np.linalg.norm(found - reference) / np.linalg.norm(reference)
    assert abs(error - choice.error) < 1e-6 and choice.error <= 0.02
    assert encoder.weight_bytes == choice.weight_bytes < exact.weight_bytes
    assert len(choice.trials) == 8 * 4
    looser = heddle.Encoder.choose_precisions(folder, *packed(), error=0.1)
    assert choice.error < looser.error <= 0.1 and looser.weight_bytes < choice.weight_bytes
    whole = heddle.Encoder.choose_precisions(folder, *packed(), error=0, formats=["int8_row"])
    assert set(whole.layers.values()) == {"float32"} and whole.error == 0


def test_errors_of_layers(grouped):
    with pytest.raises(ValueError, match="it must be one of"):
        heddle.Encoder(grouped[0], layers="int3")
    with pytest.raises(ValueError, match="pattern 'x' decides over no layer"):
        heddle.Encoder(grouped[0], layers={"x": "nvfp4"})
    with pytest.raises(ValueError, match=r"query.weight' is \[128, 128\]: K = 128 is no multiple of 256"):
        heddle.Encoder(grouped[0], layers="nf4_b256")
    with pytest.raises(ValueError, match="error is -1"):
        heddle.Encoder.choose_precisions(grouped[0], *packed(), error=-1)


def test_results_where_the_caller_wants_them(model):
    encoder = heddle.Encoder(model[0])
    ids, starts = packed()
    embeddings, states = encoder.encode(ids, starts, return_hidden_states=True)
    out, rows = np.empty_like(embeddings), np.empty_like(states)
    found = encoder.encode(ids, starts, return_hidden_states=True, out=out, hidden_states_out=rows)
    assert found[0] is out and found[1] is rows
    np.testing.assert_array_equal(out, embeddings)
    np.testing.assert_array_equal(rows, states)
    out[:] = 0
    assert encoder.encode(ids, starts, out=out) is out
    np.testing.assert_array_equal(out, embeddings)

    frozen = np.empty_like(embeddings)
    frozen.flags.writeable = False
    both = np.empty((len(ids), 48), np.float32)
    for given, error, words in [
        (dict(out=out[:2]), ValueError, r"out is float32 \[2, 48\]: it must be float32 \[3, 48\]"),
        (dict(out=out.astype(np.float64)), ValueError, r"out is float64 \[3, 48\]: it must be float32"),
        (
            dict(out=np.empty((48, 3), np.float32).T),
            ValueError,
            r"out is float32 \[3, 48\] and not contiguous: it must",
        ),
        (dict(out=frozen), ValueError, "out is read-only"),
        (dict(out=torch.empty(3, 48)), TypeError, "out is a Tensor: it must be a numpy array"),
        (dict(hidden_states_out=rows), ValueError, "hidden_states_out is given and return_hidden_states is False"),
        (
            dict(return_hidden_states=True, hidden_states_out=rows[1:]),
            ValueError,
            r"hidden_states_out is float32 \[28, 48\]: it must be float32 \[29, 48\]",
        ),
        (
            dict(return_hidden_states=True, out=both[:3], hidden_states_out=both),
            ValueError,
            "hidden_states_out shares memory with out",
        ),
    ]:
        with pytest.raises(error, match=rf"\[encode\] {words}"):
            encoder.encode(ids, starts, **given)
