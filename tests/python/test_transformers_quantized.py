"""Models of transformers with linear layers in 4 and 8 bits: which layers, what they compute, saved and loaded again."""

import copy
import json
import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

import heddle.hosts.transformers
import heddle.nn
import transformers
from heddle import lowbit
from heddle.hosts.transformers import HeddleConfig, quantize_model
from transformers.quantizers import auto
from transformers_kit import ENCODER_DECODERS, attending, make, tokens

heddle.hosts.transformers.register()

_WIDE = {"intermediate_size": 64}
#: family -> (what differs from the kit's, its layers in a format, those that stay).
FAMILIES = {
    "llama": ({**_WIDE, "tie_word_embeddings": True}, 14, ["lm_head"]),
    "qwen3": (_WIDE, 14, ["lm_head"]),
    "gemma3": (_WIDE, 14, ["lm_head"]),
    "gpt_oss": (_WIDE, 8, ["lm_head"]),
    "deepseek_v3": (dict(_WIDE, q_lora_rank=16, kv_lora_rank=16, v_head_dim=16), 16, ["lm_head"]),
    "bert": (_WIDE, 12, ["cls.predictions.transform.dense", "cls.predictions.decoder"]),
    "modernbert": (_WIDE, 12, ["head.dense", "decoder"]),
    "bart": (dict(encoder_ffn_dim=64, decoder_ffn_dim=64), 16, ["lm_head"]),
    "t5": (dict(d_ff=64), 16, ["lm_head"]),
}
_AUTO = {"bert": "MaskedLM", "modernbert": "MaskedLM", "bart": "Seq2SeqLM", "t5": "Seq2SeqLM"}


def family_of(name):
    return make(name, **FAMILIES[name][0])


def auto_class(name):
    return getattr(transformers, f"AutoModelFor{_AUTO.get(name, 'CausalLM')}")


def inputs_of(name, rows=2):
    inputs = {"input_ids": tokens(rows, 9)}
    if name in ENCODER_DECODERS:
        inputs["decoder_input_ids"] = tokens(rows, 5, 1)
    return inputs


@torch.no_grad()
def logits_of(model, name):
    return model(**inputs_of(name)).logits.float()


def low(model):
    return {name: found for name, found in model.named_modules() if isinstance(found, heddle.nn.Linear)}


def same_state(a, b):
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_computes_what_its_weights_say(name):
    floats = family_of(name)
    model = quantize_model(copy.deepcopy(floats), "nvfp4")
    layers = low(model)
    assert len(layers) == FAMILIES[name][1] and list(heddle.nn.linear_layers(model)) == FAMILIES[name][2]
    reference = copy.deepcopy(floats)
    for each, layer in layers.items():
        reference.get_submodule(each).weight.data.copy_(layer.dequantized())
    own = "eager" if name == "gpt_oss" else "sdpa"  # sinks
    before, generated = logits_of(floats, name), []
    for attention in ("heddle", own):
        with attending(model, attention), attending(reference, attention):
            found, wanted = logits_of(model, name), logits_of(reference, name)
            assert not ((found - wanted).abs().max() > 2e-5 * wanted.abs().max())
            assert 0.003 < ((found - before).norm() / before.norm()).item() < 1.5
            if model.can_generate():
                ids = inputs_of(name)["input_ids"]
                how = dict(max_new_tokens=5, do_sample=False, attention_mask=torch.ones_like(ids), pad_token_id=0)
                generated = [each.generate(ids, **how) for each in (model, reference)]
                assert torch.equal(*generated)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "gpt_oss", "bert", "t5"])
def test_quantised_on_load_saved_and_loaded(name, dtype, tmp_path):
    family_of(name).save_pretrained(tmp_path / "floats", max_shard_size="20KB")
    assert len(list((tmp_path / "floats").glob("model-*.safetensors"))) > 1
    load = auto_class(name).from_pretrained
    model = load(tmp_path / "floats", quantization_config=HeddleConfig("nvfp4"), dtype=dtype)
    afterwards = quantize_model(load(tmp_path / "floats", dtype=dtype), "nvfp4")
    assert same_state(model, afterwards) and len(low(model)) == FAMILIES[name][1]
    model.save_pretrained(tmp_path / "small", max_shard_size="5KB")
    assert len(list((tmp_path / "small").glob("model-*.safetensors"))) > 1
    found = json.loads((tmp_path / "small" / "config.json").read_text())["quantization_config"]
    assert (found["quant_method"], found["format"]) == ("heddle", "nvfp4")
    assert found["layers"] == dict.fromkeys(low(model), "nvfp4")
    for attention in ("heddle", None):
        again = load(tmp_path / "small", dtype=dtype, attn_implementation=attention)
        assert same_state(again, model) and not again.training
        with attending(model, again.config._attn_implementation):
            wanted = logits_of(model, name)
            assert torch.equal(logits_of(again, name), wanted) and wanted.any()
    assert all(layer.packed is not None and layer.weight is None for layer in low(again).values())
    # And once more, from what was loaded.
    again.save_pretrained(tmp_path / "again")
    assert same_state(load(tmp_path / "again", dtype=dtype), model)


def test_precisions_by_policy(tmp_path):
    floats = family_of("qwen3")
    floats.save_pretrained(tmp_path / "floats")
    config = HeddleConfig(
        "int4_g32",
        policy={"lm_head": "int8_row", "*.o_proj": "16bit", "*.0.*.v_proj": "float32", "*.k_proj": "nvfp4+int8_x"},
        modules_to_not_convert=["model.layers.1.mlp"],
        scale_rule="plain",
    )
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(tmp_path / "floats", quantization_config=config)
    formats = {name.removeprefix("model.layers."): layer for name, layer in low(model).items()}
    wanted = {"lm_head": "int8_row"} | {f"0.mlp.{which}_proj": "int4_g32" for which in ("gate", "up", "down")}
    for i in "01":
        wanted |= {f"{i}.self_attn.{which}_proj": "int4_g32" for which in ("qv" if i == "1" else "q")}
        wanted |= {f"{i}.self_attn.o_proj": None, f"{i}.self_attn.k_proj": "nvfp4"}
    assert {name: layer.format for name, layer in formats.items()} == wanted
    assert formats["0.self_attn.o_proj"].weight.dtype == torch.bfloat16 and formats["0.self_attn.k_proj"].int8_x
    plain = lowbit.quantize(floats.model.layers[0].mlp.up_proj.weight.detach(), "int4_g32", rule="plain")
    assert torch.equal(formats["0.mlp.up_proj"].codes, plain.codes)
    model.save_pretrained(tmp_path / "small")
    again = load(tmp_path / "small")
    assert same_state(again, model) and torch.equal(logits_of(again, "qwen3"), logits_of(model, "qwen3"))
    assert low(again)["model.layers.0.self_attn.k_proj"].int8_x
    assert again.config.quantization_config.to_dict() == model.config.quantization_config.to_dict()
    assert config.layers is None  # the caller's is not touched


def test_experts_stay_and_come_back(tmp_path):
    """Mixtral's files have an expert each, which transformers stacks on load and takes apart again on saving."""
    sizes = dict(vocab_size=61, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4)
    kind = transformers.MixtralConfig(
        **sizes, num_key_value_heads=2, num_local_experts=2, num_experts_per_tok=1, pad_token_id=0, eos_token_id=None
    )
    torch.manual_seed(0)
    transformers.MixtralForCausalLM(kind).save_pretrained(tmp_path / "floats")
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(tmp_path / "floats", quantization_config=HeddleConfig("nvfp4"))
    assert sorted(low(model)) == [f"model.layers.0.self_attn.{which}_proj" for which in "koqv"]
    report = heddle.nn.weights_report(model)
    assert report.floats["model.layers.0.mlp.experts.gate_up_proj"].what == "MixtralExperts"
    model.save_pretrained(tmp_path / "small")
    again = load(tmp_path / "small")
    assert same_state(again, model) and torch.equal(logits_of(again, "mixtral"), logits_of(model, "mixtral"))


@pytest.mark.parametrize("kept", ["gate_proj", "up_proj"])
def test_weights_that_files_have_in_one(kept, tmp_path):
    """DINOv2's gate and up projection, with a bias each: cut apart on load, joined on saving where they are floats."""
    safetensors = pytest.importorskip("safetensors.torch")
    sizes = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, image_size=28, patch_size=14)
    torch.manual_seed(0)
    model = transformers.Dinov2WithRegistersModel(
        transformers.Dinov2WithRegistersConfig(**sizes, use_swiglu_ffn=True, num_register_tokens=1)
    ).eval()
    model.save_pretrained(tmp_path / "floats")
    assert "encoder.layer.0.mlp.weights_in.weight" in safetensors.load_file(tmp_path / "floats" / "model.safetensors")
    config = HeddleConfig("nvfp4", modules_to_not_convert=[kept, "down_proj"])
    load = transformers.AutoModel.from_pretrained
    loaded = load(tmp_path / "floats", quantization_config=config)
    quantize_model(model, config)
    assert same_state(loaded, model) and [name[-7:] for name in heddle.nn.linear_layers(loaded)] == [
        kept[-7:],
        "wn_proj",
    ]
    for number, each in enumerate((loaded, model)):
        each.save_pretrained(tmp_path / str(number))
        names = safetensors.load_file(tmp_path / str(number) / "model.safetensors").keys()
        assert not any("weights_in" in name for name in names)
        assert same_state(load(tmp_path / str(number)), each)


def test_heads_come_and_go(tmp_path):
    """A folder that one class saved, loaded by another of the family: its new head is drawn, and stays in floats."""
    model = quantize_model(family_of("llama"), "nvfp4")
    model.save_pretrained(tmp_path / "small")
    base = transformers.AutoModel.from_pretrained(tmp_path / "small", attn_implementation="eager")
    ids = tokens(2, 9)
    with torch.no_grad():
        assert torch.equal(base(ids).last_hidden_state, model.model(ids).last_hidden_state)
    base.save_pretrained(tmp_path / "base")
    other = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=3)
    assert type(other.score) is torch.nn.Linear and other.score.weight.std() < 0.1
    assert same_state(other.model, model.model)
    family_of("bert").save_pretrained(tmp_path / "bert")
    config = HeddleConfig("nvfp4", policy={"classifier": "int8_row"})
    found = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "bert", quantization_config=config
    )
    assert type(found.classifier) is torch.nn.Linear and len(low(found)) == 12


def test_without_heddle_it_is_an_error(tmp_path, monkeypatch):
    """transformers alone would draw the weights that it does not find, and go on with a warning."""
    quantize_model(family_of("llama"), "nvfp4").save_pretrained(tmp_path / "small")
    for table in (auto.AUTO_QUANTIZER_MAPPING, auto.AUTO_QUANTIZATION_CONFIG_MAPPING):
        monkeypatch.delitem(table, "heddle")
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "small")


def test_a_folder_that_lacks_something(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    quantize_model(family_of("llama"), "nvfp4").save_pretrained(tmp_path)
    load, file = transformers.AutoModelForCausalLM.from_pretrained, tmp_path / "model.safetensors"
    state, layer = safetensors.load_file(file), "model.layers.1.mlp.up_proj"

    def loads(changes, match):
        changed = {name: x for name, x in {**state, **changes}.items() if x is not None}
        safetensors.save_file(changed, file, metadata={"format": "pt"})
        with pytest.raises(ValueError, match=match):
            load(tmp_path)

    loads({f"{layer}.codes": None}, rf"layer '{layer}': the checkpoint lacks codes")
    loads({f"{layer}.scales": torch.full_like(state[f"{layer}.scales"], 255)}, rf"layer '{layer}': .*must be finite")
    loads({f"{layer}.format_name": torch.tensor(list(b"mxfp4"), dtype=torch.uint8)}, "is mxfp4, and .* says nvfp4")
    safetensors.save_file(state, file, metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["layers"] = {"model.layers.9.mlp.up_proj": "nvfp4"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="has 1 layers, and none of LlamaForCausalLM"):
        load(tmp_path)


def test_float16(tmp_path):
    family_of("t5").save_pretrained(tmp_path / "floats")
    load = transformers.AutoModelForSeq2SeqLM.from_pretrained
    model = load(tmp_path / "floats", quantization_config=HeddleConfig("nvfp4"), dtype=torch.float16)
    stays = [name for name in heddle.nn.linear_layers(model) if name != "lm_head"]
    assert len(stays) == 2 and all(name.endswith(".wo") for name in stays)  # which T5 keeps in float32
    assert model.encoder.block[0].layer[-1].DenseReluDense.wo.weight.dtype == torch.float32
    model.save_pretrained(tmp_path / "small")
    again = load(tmp_path / "small", dtype=torch.float16)
    assert same_state(again, model) and torch.equal(logits_of(again, "t5"), logits_of(model, "t5"))


def test_device_maps(tmp_path):
    model = quantize_model(family_of("llama"), "nvfp4")
    for wrong in ({"": "disk"}, {"model": "cpu", "lm_head": 0}):
        with pytest.raises(ValueError, match="device_map has .*low-bit layers run where they are"):
            model.hf_quantizer.validate_environment(device_map=wrong)
    pytest.importorskip("accelerate")
    model.save_pretrained(tmp_path)
    assert same_state(transformers.AutoModelForCausalLM.from_pretrained(tmp_path, device_map="cpu"), model)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, device_map="auto", max_memory={"cpu": 10**9})
    assert same_state(again, model)


def test_of_a_calibration_compiled_and_with_gradients(tmp_path):
    model = make("qwen3", intermediate_size=64, num_hidden_layers=1)
    layers = [name for name in heddle.nn.linear_layers(model) if lowbit.linear_layer(name)]
    report = heddle.nn.calibrate(model, [tokens(4, 9)], dict.fromkeys(layers, "nvfp4"), steps=0)
    plain = quantize_model(copy.deepcopy(model), "nvfp4")
    quantize_model(model, "nvfp4", importance=report.importance)
    assert not same_state(model, plain)
    model.save_pretrained(tmp_path / "small")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "small", attn_implementation="heddle")
    with attending(model, "heddle"):
        wanted = logits_of(model, "qwen3")
    assert torch.equal(logits_of(again, "qwen3"), wanted)
    compiled = torch.compile(again, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        found = compiled(**inputs_of("qwen3"), use_cache=False).logits
    assert not ((found - wanted).abs().max() > 1e-5 * wanted.abs().max())
    again(**inputs_of("qwen3")).logits.square().sum().backward()
    assert again.model.embed_tokens.weight.grad.abs().max() > 0
    assert not any("self_attn.q_proj.weight" in name for name, _ in again.named_parameters())
    floats = again.dequantize()
    assert not low(floats) and not hasattr(floats.config, "quantization_config")
    assert not ((logits_of(floats, "qwen3") - wanted).abs().max() > 2e-5 * wanted.abs().max())
    twin = copy.deepcopy(model)
    assert twin.hf_quantizer is not model.hf_quantizer and same_state(twin, model)


def test_what_is_refused(tmp_path):
    floats, load = family_of("llama"), transformers.AutoModelForCausalLM.from_pretrained
    floats.save_pretrained(tmp_path / "floats")
    gpt2 = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=61, n_embd=32, n_layer=1, n_head=4, bos_token_id=1, eos_token_id=2)
    )
    for match, call in [
        ("GPT2LMHeadModel has no layer to quantise: .*Conv1D", lambda: quantize_model(gpt2, "nvfp4")),
        ("layer 'lm_head' shares its weight", lambda: quantize_model(floats, HeddleConfig(policy={"lm_head": "nvfp4"}))),
        (r"layer 'model.layers.0.self_attn.q_proj', \[32, 32\]: .*K is 32: int4_g64 .*can leave it", lambda: quantize_model(floats, "int4_g64")),
        ("pattern '.*qproj' matches no layer", lambda: quantize_model(floats, {"*qproj": "nvfp4"})),
        ("has 'downproj', which matches no module", lambda: quantize_model(floats, HeddleConfig(modules_to_not_convert=["downproj"]))),
        ("format is 'nvfp5'", lambda: HeddleConfig("nvfp5")),
        ("format and policy are None", lambda: HeddleConfig(None)),
        ("scale_rule is 'msee': it must be one of plain, ", lambda: HeddleConfig("nvfp4", scale_rule="msee")),
        ("K is 32: int4_g128", lambda: load(tmp_path / "floats", quantization_config=HeddleConfig("int4_g128"))),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=match):
            call()
    assert not low(floats) and not hasattr(floats.config, "quantization_config")
    for match, given in [
        ("format is 5: it must be the name of one", dict(format=5)),
        ("rules is 7: it must be a mapping or pairs", dict(policy=7)),
        ("a pattern is 3: it must be a string", dict(policy={3: "nvfp4"})),
        ("modules_to_not_convert is 5: it must be a list of strings", dict(modules_to_not_convert=5)),
        (r"modules_to_not_convert is \[5\]: it must be a list of strings", dict(modules_to_not_convert=[5])),
        (r"layers is \['a'\]: it must be a mapping", dict(layers=["a"])),
    ]:
        with pytest.raises(TypeError, match=match):
            HeddleConfig(**given)
    with pytest.raises(TypeError, match="model is a Linear: it must be a PreTrainedModel"):
        quantize_model(torch.nn.Linear(32, 32), "nvfp4")
    quantize_model(floats, "nvfp4")
    floats.model.layers[0].mlp.up_proj.drop_plain()
    with pytest.raises(ValueError, match="layer 'model.layers.0.mlp.up_proj' has packed weights alone"):
        floats.save_pretrained(tmp_path / "packed")
    assert not list((tmp_path / "packed").iterdir())
    with torch.no_grad():
        floats = family_of("llama")
        floats.model.layers[0].mlp.up_proj.weight[3, 5] = float("nan")
    floats.save_pretrained(tmp_path / "nan")
    with pytest.raises(RuntimeError, match="CONVERSION"):
        load(tmp_path / "nan", quantization_config=HeddleConfig("nvfp4"))


def test_the_section_of_the_page(tmp_path, monkeypatch, capsys):
    page = Path(__file__).resolve().parents[2] / "docs/hosts.md"
    if not page.is_file():
        pytest.skip("the pages are not beside the tests")
    section = page.read_text(encoding="utf-8").partition("## A transformers model in 4 bits\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    monkeypatch.chdir(tmp_path)
    family_of("llama").save_pretrained("floats")
    names = {"folder": "floats"}
    exec(compile(blocks[0], str(page), "exec"), names)
    first = low(names["model"])
    assert {layer.format for layer in first.values()} == {"nvfp4"} and len(first) == 14
    assert "model.layers.1.mlp.down_proj" in capsys.readouterr().out
    exec(compile(blocks[1], str(page), "exec"), names)
    second = {name.removeprefix("model.layers."): layer.format for name, layer in low(names["model"]).items()}
    assert (second["0.self_attn.o_proj"], second["0.mlp.up_proj"], second["1.mlp.up_proj"]) == (
        "int8_row",
        None,
        "nvfp4",
    )
