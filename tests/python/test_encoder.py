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
    with pytest.raises(RuntimeError, match="config.json"):
        heddle.Encoder(tmp_path)
