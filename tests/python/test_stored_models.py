"""Checkpoints that others read too, as models of transformers in one call: their layers stay in their formats."""

import copy
import json

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

import heddle.nn
import safetensors.torch as safetensors_torch
import transformers
from heddle import lowbit
from heddle.hosts.transformers import HeddleConfig, load_quantized, quantize_model, register
from transformers_kit import make, tokens

register()


def low(model):
    return {name: found for name, found in model.named_modules() if isinstance(found, heddle.nn.Linear)}


def in_memory(floats, folder):
    """The model in floats with the layers that the folder has, put in by hand."""
    model = copy.deepcopy(floats)
    for name, stored in lowbit.layers(folder).items():
        matrix, layer = lowbit.load(folder, name, framework="torch"), model.get_submodule(name)
        assert stored.format == matrix.format
        model.set_submodule(name, heddle.nn.Linear.from_quantized(matrix, layer.bias))
    return model


def same(loaded, wanted, **inputs):
    with torch.no_grad():
        expected = wanted(**inputs).logits
        assert torch.equal(loaded(**inputs).logits, expected) and expected.isfinite().all() and expected.any()


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    model = make("llama", hidden_size=64, intermediate_size=128, tie_word_embeddings=True)
    model.save_pretrained(folder, max_shard_size="60KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    return model, folder


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "int4_g32", "int4_g64_zp", "int8_row", "fp8_row", "nf4"])
def test_a_written_folder_generates_as_the_same_layers_in_memory(llama, tmp_path, format):
    floats, folder = llama
    report = lowbit.quantize_checkpoint(folder, tmp_path / "small", format=format)
    model = load_quantized(tmp_path / "small", dtype=torch.float32, attn_implementation="heddle")
    assert type(model) is transformers.LlamaForCausalLM and not model.training
    assert low(model).keys() == report.layers.keys() and {layer.format for layer in low(model).values()} == {format}
    assert model.lm_head.weight is model.model.embed_tokens.weight
    wanted = in_memory(floats, tmp_path / "small")
    wanted.set_attn_implementation("heddle")
    ids = tokens(2, 9)
    same(model, wanted, input_ids=ids)
    how = dict(max_new_tokens=6, do_sample=False, attention_mask=torch.ones_like(ids), pad_token_id=0)
    assert torch.equal(model.generate(ids, **how), wanted.generate(ids, **how))
    with torch.no_grad():
        assert (model(ids).logits - floats(ids).logits).abs().max() > 1e-3


def test_it_is_saved_and_loaded_as_any_other(llama, tmp_path):
    _, folder = llama
    mixed = {"*.o_proj": "int8_row", "*.0.mlp.*": "16bit"}
    lowbit.quantize_checkpoint(folder, tmp_path / "small", layers=mixed)
    model = load_quantized(tmp_path / "small")
    assert {layer.format for layer in low(model).values()} == {"nvfp4", "int8_row"}
    model.save_pretrained(tmp_path / "own")
    own = json.loads((tmp_path / "own" / "config.json").read_text())["quantization_config"]
    assert own["quant_method"] == "heddle" and own["layers"] == {name: x.format for name, x in low(model).items()}
    for again in (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "own"),
        load_quantized(tmp_path / "own"),
    ):
        assert type(again.hf_quantizer) is type(model.hf_quantizer)
        a, b = again.state_dict(), model.state_dict()
        assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    floats = model.dequantize()
    assert not low(floats) and not hasattr(floats.config, "quantization_config")


def test_an_encoder_with_biases_and_another_head(tmp_path):
    floats = make("bert", hidden_size=64, intermediate_size=128)
    with torch.no_grad():
        for name, x in floats.named_parameters():
            if name.endswith(".bias"):
                x.normal_()
    floats.save_pretrained(tmp_path / "floats")
    lowbit.quantize_checkpoint(tmp_path / "floats", tmp_path / "small", format="nf4")
    model = load_quantized(
        tmp_path / "small", transformers.AutoModelForMaskedLM, dtype=torch.float32, attn_implementation="eager"
    )
    ids = tokens(2, 9)
    same(model, in_memory(floats, tmp_path / "small"), input_ids=ids)
    base = load_quantized(tmp_path / "small", transformers.AutoModel, dtype=torch.float32, attn_implementation="eager")
    assert low(base).keys() == {name.removeprefix("bert.") for name in low(model)}
    with torch.no_grad():
        assert torch.equal(base(ids).last_hidden_state, model.bert(ids).last_hidden_state)


def test_gptq_with_columns_in_another_order(llama, tmp_path):
    """As a quantiser of another house writes it, by hand: codes of 4 bits, eight in a word, and a group for each column."""
    floats, folder = llama
    name, (rows, columns) = "model.layers.1.mlp.up_proj", (128, 64)
    state = {key: x.contiguous() for key, x in floats.state_dict().items() if key != "lm_head.weight"}
    del state[f"{name}.weight"]
    generator = torch.Generator().manual_seed(3)
    codes = torch.randint(16, (columns, rows), generator=generator)
    group_of = torch.randperm(columns, generator=generator) // 32

    def words(x, axis):
        parts = x.unflatten(axis, (-1, 8)).movedim(axis + 1, 0)
        return sum(part << 4 * i for i, part in enumerate(parts)).to(torch.int32)

    scales = torch.rand(2, rows, generator=generator).half() / 30
    state |= {f"{name}.qweight": words(codes, 0), f"{name}.g_idx": group_of.int(), f"{name}.scales": scales}
    state[f"{name}.qzeros"] = words(torch.full((2, rows), 7), 1)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 32,
        "checkpoint_format": "gptq_v2",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    safetensors_torch.save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = load_quantized(tmp_path, dtype=torch.float32)
    weights = (codes - 7) * scales.float()[group_of]
    assert torch.equal(model.get_submodule(name).dequantized(), weights.T)
    wanted = copy.deepcopy(floats)
    wanted.get_submodule(name).weight.data.copy_(weights.T)
    with torch.no_grad():
        found, expected = (each(tokens(2, 9)).logits for each in (model, wanted))
    assert not ((found - expected).abs().max() > 2e-5 * expected.abs().max())


def test_what_is_refused(llama, tmp_path):
    floats, folder = llama
    lowbit.quantize_checkpoint(folder, tmp_path / "small", format="int8_row")
    name = "model.layers.0.self_attn.q_proj"

    def changed(to, edit, **config):
        (tmp_path / to).mkdir()
        found = json.loads((tmp_path / "small" / "config.json").read_text()) | config
        (tmp_path / to / "config.json").write_text(json.dumps(found))
        state = {}
        for file in (tmp_path / "small").glob("*.safetensors"):
            state |= safetensors_torch.load_file(file)
        edit(state)
        safetensors_torch.save_file(state, tmp_path / to / "model.safetensors", metadata={"format": "pt"})
        return tmp_path / to

    def codes_alone(state):
        for part in ("packed", "scale", "shape"):
            state.pop(f"{name}.weight_{part}")
        state[f"{name}.weight"] = torch.ones(64, 64, dtype=torch.int8)

    for match, call in [
        ("has no quantization_config: from_pretrained with", lambda: load_quantized(folder)),
        ("quantization_config is given: the checkpoint says", lambda: load_quantized(tmp_path / "small", quantization_config=HeddleConfig())),
        (r"layer 'model\.layers\.0\.mlp\.\w+' is \[(128, 64|64, 128)\], and the model's is", lambda: load_quantized(changed("wide", lambda _: None, intermediate_size=96))),
        (f"layer '{name}' has a weight of I8 in a layout", lambda: load_quantized(changed("codes", codes_alone))),
        ("the checkpoint has no layer in a format that LlamaForCausalLM has", lambda: load_quantized(changed("none", lambda state: [state.pop(key) for key in list(state) if "_proj" in key]))),
        (r"layer 'model.layers.0.self_attn.\w+': the checkpoint lacks bias", lambda: load_quantized(changed("bias", lambda _: None, attention_bias=True))),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=match):
            call()


def test_experts_that_transformers_stacks_are_refused(tmp_path):
    sizes = dict(vocab_size=61, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4)
    kind = transformers.MixtralConfig(
        **sizes, num_key_value_heads=2, num_local_experts=2, num_experts_per_tok=1, pad_token_id=0, eos_token_id=None
    )
    torch.manual_seed(0)
    transformers.MixtralForCausalLM(kind).save_pretrained(tmp_path / "floats")
    lowbit.quantize_checkpoint(tmp_path / "floats", tmp_path / "all")
    with pytest.raises(
        ValueError, match=r"experts\.0\.w1' is nvfp4, and MixtralForCausalLM has its experts in one param"
    ):
        load_quantized(tmp_path / "all")
    report = lowbit.quantize_checkpoint(tmp_path / "floats", tmp_path / "some", keep="*.experts.*")
    model = load_quantized(tmp_path / "some", dtype=torch.float32)
    assert low(model).keys() == report.layers.keys() and len(report.layers) == 4
    ids = tokens(2, 9)
    floats = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "floats")
    same(model, in_memory(floats, tmp_path / "some"), input_ids=ids)
    assert quantize_model(floats, "nvfp4").hf_quantizer.quantization_config.layers.keys() == report.layers.keys()
