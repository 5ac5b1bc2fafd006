"""Checkpoints quantised, read back here and by the code of those whose layouts they have."""

import copy
import json

import numpy as np
import pytest
import torch
from heddle import lowbit, nn

safetensors_torch = pytest.importorskip("safetensors.torch")

LAYERS = ["model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj", "model.layers.1.mlp.down_proj"]
FORMATS = ["nvfp4", "mxfp4", "int4_g32", "int4_g128", "int4_g64_zp", "int8_row", "fp8_row"]
N, K = 24, 256


@pytest.fixture
def model(tmp_path):
    """A folder of a model in two files, and its tensors."""
    generator = torch.Generator().manual_seed(5)
    tensors = {f"{name}.weight": torch.randn(N, K, generator=generator).bfloat16() for name in LAYERS}
    tensors["model.embed_tokens.weight"] = torch.randn(40, K, generator=generator).bfloat16()
    tensors["model.norm.weight"] = torch.randn(K, generator=generator).bfloat16()
    folder = tmp_path / "model"
    folder.mkdir()
    files = {"model-1.safetensors": LAYERS[:2], "model-2.safetensors": [LAYERS[2], "model.embed_tokens", "model.norm"]}
    weight_map = {}
    for file, names in files.items():
        held = {f"{name}.weight": tensors[f"{name}.weight"] for name in names}
        safetensors_torch.save_file(held, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(held, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "torch_dtype": "bfloat16"}))
    (folder / "tokenizer.json").write_text("{}")
    return folder, tensors


def read(folder):
    """All tensors of the files that the index names, and config.json."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    held = {}
    for file in set(index["weight_map"].values()):
        held |= safetensors_torch.load_file(folder / file)
    assert set(held) == set(index["weight_map"])
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in held.values())
    return held, json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("format", [*FORMATS, "nf4", "fp4_bnb"])
def test_reads_back_to_the_bit(model, tmp_path, format):
    folder, tensors = model
    report = lowbit.quantize_checkpoint(folder, tmp_path / "out", format=format, rule="plain")
    assert list(report.layers) == sorted(LAYERS) and report.kept == ["model.embed_tokens"]
    held, config = read(tmp_path / "out")
    assert torch.equal(held["model.embed_tokens.weight"], tensors["model.embed_tokens.weight"])
    assert config["quantization_config"] == report.quantization_config and config["model_type"] == "llama"
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    for name, layer in report.layers.items():
        weights = tensors[f"{name}.weight"]
        wanted = lowbit.quantize(weights, format, rule="plain", global_scale=layer.global_scale or None)
        found = lowbit.load(tmp_path / "out", name, framework="torch")
        assert found.format == wanted.format and torch.equal(found.codes, wanted.codes)
        assert torch.equal(found.scales.view(torch.uint8), wanted.scales.view(torch.uint8))
        assert torch.equal(found.dequantize(), wanted.dequantize())
        error = wanted.error(weights)
        assert (layer.sqnr, layer.mean, layer.max, layer.max_at) == (error.sqnr, error.mean, error.max, error.max_at)
        assert layer.shape == (N, K) and layer.bytes_before == 2 * N * K
        mine = [t.nbytes for tensor, t in held.items() if tensor.startswith(name + ".")]
        assert layer.bytes_after == sum(mine) < 0.6 * layer.bytes_before
    assert (report.layers[LAYERS[0]].global_scale == report.layers[LAYERS[1]].global_scale) is True


@pytest.mark.parametrize("format", FORMATS)
def test_compressed_tensors_decodes_the_same_weights(model, tmp_path, format):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    folder, _ = model
    lowbit.quantize_checkpoint(folder, tmp_path / "out", format=format)
    held, config = read(tmp_path / "out")
    parsed = QuantizationConfig.model_validate(config["quantization_config"])
    scheme = parsed.config_groups["group_0"]
    compressor = BaseCompressor.get_value_from_registry(scheme.format)
    for name in LAYERS:
        layer = {tensor[len(name) + 1 :]: t for tensor, t in held.items() if tensor.startswith(name + ".")}
        found = compressor.decompress(layer, scheme)["weight"]
        mine = lowbit.load(tmp_path / "out", name, framework="torch").dequantize()
        # It decodes into bfloat16 (4 bits of floating point) or into the dtype of the scales, rounding once.
        assert torch.equal(found, mine.to(found.dtype))


@pytest.mark.parametrize("format", ["nf4", "nf4_b128", "fp4_bnb"])
def test_bitsandbytes_decodes_the_same_weights(model, tmp_path, format):
    functional = pytest.importorskip("bitsandbytes.functional")
    folder, _ = model
    lowbit.quantize_checkpoint(folder, tmp_path / "out", format=format)
    held, _ = read(tmp_path / "out")
    for name in LAYERS:
        prefix = f"{name}.weight."
        parts = {tensor[len(prefix) :]: t for tensor, t in held.items() if tensor.startswith(prefix)}
        state = functional.QuantState.from_dict(parts, device=torch.device("cpu"))
        found = functional.dequantize_4bit(held[f"{name}.weight"], state)
        mine = lowbit.load(tmp_path / "out", name, framework="torch").dequantize()
        assert found.dtype == torch.bfloat16 and torch.equal(found, mine.bfloat16())


@pytest.mark.parametrize(("format", "dtype"), [("int8_row", torch.float32), ("nvfp4", torch.bfloat16)])
def test_transformers_loads_the_model(tmp_path, format, dtype):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("compressed_tensors")
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "vocab_size": 100,
    }
    exact = transformers.BertModel(transformers.BertConfig(**sizes, initializer_range=0.3)).eval()
    exact.save_pretrained(tmp_path / "model")
    report = lowbit.quantize_checkpoint(tmp_path / "model", tmp_path / "out", format=format)
    assert len(report.layers) == 12 and set(report.kept) >= {"pooler.dense"}
    loaded = transformers.AutoModel.from_pretrained(tmp_path / "out", dtype=dtype).eval()
    mine = copy.deepcopy(exact)
    for name in report.layers:
        weights = lowbit.load(tmp_path / "out", name, framework="torch").dequantize()
        mine.get_submodule(name).weight.data.copy_(weights)
    mine.to(dtype)
    ids = torch.arange(40).reshape(2, 20)
    with torch.no_grad():
        found, wanted, before = (m(ids).last_hidden_state.float() for m in (loaded, mine, exact))
    assert torch.equal(found, wanted)
    assert (0.001 if format == "int8_row" else 0.03) < ((found - before).norm() / before.norm()).item() < 0.5


@pytest.mark.parametrize("folds", [False, True])
def test_importance_and_scales_of_a_calibration(tmp_path, folds):
    """As docs/quantize.md has it: of a model of transformers, whose layers have the checkpoint's names."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "vocab_size": 100,
    }
    model = transformers.BertModel(transformers.BertConfig(**sizes, initializer_range=0.3)).eval()
    with torch.no_grad():
        model.embeddings.LayerNorm.weight[::9] = 20
    attention = "encoder.layer.0.attention"
    layers = {name: "nvfp4" for name in nn.linear_layers(model) if lowbit.linear_layer(name)}
    options = {"groups": [(f"{attention}.self.value", [f"{attention}.output.dense"])]} if folds else {"steps": 0}
    before = copy.deepcopy(model)
    report = nn.calibrate(model, [torch.arange(40).reshape(2, 20)], layers, **options)
    model.save_pretrained(tmp_path / "model")
    values = [m.get_submodule(f"{attention}.self.value").weight for m in (model, before)]
    assert folds != torch.equal(*values)
    written = lowbit.quantize_checkpoint(tmp_path / "model", tmp_path / "out", importance=report.importance)
    assert set(written.layers) == set(report.layers) == set(layers) and len(layers) == 6
    assert f"{attention}.self.query" in report.importance
    for name, layer in written.layers.items():
        weights, importance = model.get_submodule(name).weight, report.importance.get(name)
        wanted = lowbit.quantize(
            weights.detach(), "nvfp4", rule="mse", importance=importance, global_scale=layer.global_scale
        )
        assert torch.equal(lowbit.load(tmp_path / "out", name, framework="torch").codes, wanted.codes)
    assert report.layers[f"{attention}.self.query"].error < 0.9 * report.layers[f"{attention}.self.query"].plain_error


def test_rules_and_importance(model, tmp_path):
    folder, tensors = model
    importance = {LAYERS[2]: np.linspace(0, 9, K, dtype=np.float32)}
    report = lowbit.quantize_checkpoint(
        folder,
        tmp_path / "out",
        format="int4_g64",
        layers=[("*q_proj", "int8_row:plain")],
        keep="*k_proj",
        importance=importance,
    )
    found = {name: (layer.format, layer.rule) for name, layer in report.layers.items()}
    assert found == {LAYERS[0]: ("int8_row", "plain"), LAYERS[2]: ("int4_g64", "mse")}
    assert report.kept == ["model.embed_tokens", LAYERS[1]]
    wanted = lowbit.quantize(
        tensors[f"{LAYERS[2]}.weight"], "int4_g64", rule="mse", importance=torch.from_numpy(importance[LAYERS[2]])
    )
    assert torch.equal(lowbit.load(tmp_path / "out", LAYERS[2], framework="torch").codes, wanted.codes)
    assert lowbit.linear_layer(LAYERS[0]) and not lowbit.linear_layer("lm_head")
    with pytest.raises(ValueError, match=r"down_proj.weight': importance"):
        lowbit.quantize_checkpoint(folder, tmp_path / "bad", importance={LAYERS[2]: np.ones(3, np.float32)})


def test_what_progress_raises_ends_the_work(model, tmp_path):
    folder, _ = model
    seen = []

    def progress(tensor, format, done, total, layers_done, layers_total):
        seen.append(tensor)
        if layers_done == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lowbit.quantize_checkpoint(folder, tmp_path / "out", progress=progress)
    assert len(seen) > 1 and sorted(p.name for p in tmp_path.iterdir()) == ["model"]


def test_errors(model, tmp_path):
    folder, _ = model
    with pytest.raises(ValueError, match="no multiple of 512"):
        lowbit.quantize_checkpoint(folder, tmp_path / "out", format="nf4_b512")
    with pytest.raises(ValueError, match="decides over no layer"):
        lowbit.quantize_checkpoint(folder, tmp_path / "out", keep="nothing")
    for path in (folder / "gone", "org/model"):
        with pytest.raises(
            FileNotFoundError, match=r"\[quantize_checkpoint\] input is .* which is not there: .*not downloaded"
        ):
            lowbit.quantize_checkpoint(path, tmp_path / "out")
    columns = np.ones(K, np.float32)
    with pytest.raises(
        ValueError, match="importance has 'model.layers.0.typo', which is no layer of .*: its names are"
    ):
        lowbit.quantize_checkpoint(
            folder, tmp_path / "out", importance={LAYERS[0]: columns, "model.layers.0.typo": columns}
        )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]
    lowbit.quantize_checkpoint(folder, tmp_path / "out")
    with pytest.raises(ValueError, match="must be a new folder"):
        lowbit.quantize_checkpoint(folder, tmp_path / "out")
    with pytest.raises(ValueError, match="quantised already"):
        lowbit.quantize_checkpoint(tmp_path / "out", tmp_path / "again")


def test_experts_in_one_tensor_are_copied_and_told(tmp_path):
    experts = torch.randn(2, 8, K).bfloat16()
    safetensors_torch.save_file(
        {f"{LAYERS[0]}.weight": torch.randn(N, K), "model.layers.0.experts.down": experts}, tmp_path / "m.safetensors"
    )
    report = lowbit.quantize_checkpoint(tmp_path / "m.safetensors", tmp_path / "out")
    assert list(report.layers) == LAYERS[:1]
    assert report.copied_3d == [("model.layers.0.experts.down", "m.safetensors", (2, 8, K), 2 * 8 * K * 2)]
    held = safetensors_torch.load_file(tmp_path / "out" / report.files[0])
    assert torch.equal(held["model.layers.0.experts.down"], experts)


def test_a_cached_model_of_sentence_transformers_comes_out_whole(tmp_path):
    """As huggingface_hub keeps it: every file a link into blobs/, the modules' too. "2_Normalize" is an empty folder."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "vocab_size": 100,
    }
    plain = tmp_path / "plain"
    transformers.BertModel(transformers.BertConfig(**sizes)).save_pretrained(plain)
    modules = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    listed = [{"path": path, "type": f"sentence_transformers.models.{name}"} for path, name in modules.items()]
    (plain / "modules.json").write_text(json.dumps(listed))
    (plain / "1_Pooling").mkdir()
    (plain / "1_Pooling" / "config.json").write_text(
        json.dumps({"word_embedding_dimension": 64, "pooling_mode_mean_tokens": True})
    )
    for name in (
        "config_sentence_transformers.json",
        "sentence_bert_config.json",
        "tokenizer.json",
        "vocab.txt",
        "README.md",
    ):
        (plain / name).write_text(f"{name}\n")

    repository = tmp_path / "hub" / "models--org--name"
    snapshot, blobs = repository / "snapshots" / "0f5e1d", repository / "blobs"
    blobs.mkdir(parents=True)
    files = sorted(path.relative_to(plain) for path in plain.rglob("*") if path.is_file())
    for number, name in enumerate(files):
        (plain / name).rename(blobs / f"{number:064x}")
        (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / name).symlink_to("../" * (1 + len(name.parts)) + f"blobs/{number:064x}")
    (snapshot / "2_Normalize").mkdir()
    before = sorted(tmp_path.rglob("*"))

    report = lowbit.quantize_checkpoint(snapshot, tmp_path / "out", format="int8_row")
    out = tmp_path / "out"
    assert sorted(report.files) == [str(name) for name in files]
    assert sorted(str(path.relative_to(out)) for path in out.rglob("*")) == sorted(
        [*report.files, "1_Pooling", "2_Normalize"]
    )
    assert not any(path.is_symlink() for path in out.rglob("*"))
    assert sorted(path for path in tmp_path.rglob("*") if out not in (path, *path.parents)) == before
    for name in files:
        if str(name) not in ("config.json", "model.safetensors"):
            assert (out / name).read_bytes() == (snapshot / name).read_bytes()
    for module in json.loads((out / "modules.json").read_text()):
        assert (out / module["path"]).is_dir()
    loaded = transformers.AutoModel.from_pretrained(out)
    with torch.no_grad():
        assert loaded(torch.arange(40).reshape(2, 20)).last_hidden_state.isfinite().all()


def test_folders_that_lead_elsewhere(model, tmp_path):
    folder, _ = model
    (folder / "1_Pooling").symlink_to(tmp_path)
    with pytest.raises(ValueError, match="1_Pooling is a link to a folder"):
        lowbit.quantize_checkpoint(folder, tmp_path / "out")
    (folder / "1_Pooling").unlink()
    (folder / "config.json").write_text('{"labels":' + "[" * 300_000 + "]" * 300_000 + "}")
    with pytest.raises(ValueError, match="config.json nests arrays and objects more than 64 deep"):
        lowbit.quantize_checkpoint(folder, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]
