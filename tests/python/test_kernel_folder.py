"""Heddle as a kernel of the Hub's format: the folder, its functions, and transformers with it where the package kernels is."""

import importlib.util
import inspect
import json

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

import heddle
from heddle.hosts.transformers import write_kernel_folder
from transformers import GenerationConfig
from transformers.utils.import_utils import is_kernels_available
from transformers_kit import attending, make, padded, tokens

_FUNCTIONS = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]


@pytest.fixture
def folder(tmp_path):
    return write_kernel_folder(tmp_path / "new" / "heddle-flash")


def _module(folder, backend):
    path = folder / "build" / f"torch-{backend}" / "__init__.py"
    spec = importlib.util.spec_from_file_location("written_by_heddle", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_what_is_written(folder, backend):
    module = _module(folder, backend)
    assert sorted(module.__all__) == _FUNCTIONS
    for name in _FUNCTIONS:  # who loads such a kernel passes what its signature has, and drops the rest without a word
        parameters = inspect.signature(getattr(module, name)).parameters
        assert {"softmax_scale", "causal", "window_size", "softcap", "s_aux"} <= parameters.keys()
        assert name == "flash_attn_with_kvcache" or {"dropout_p", "deterministic"} <= parameters.keys()
        assert name == "flash_attn_func" or "block_table" in parameters
    metadata = json.loads((folder / "build" / f"torch-{backend}" / "metadata.json").read_text())
    assert metadata["name"] == "heddle-flash" and metadata["backend"] == {"type": backend}


def test_a_folder_that_holds_something_is_refused(folder):
    with pytest.raises(ValueError, match="which holds files: give a new or an empty folder"):
        write_kernel_folder(folder)


def _same(found, expected):
    assert not ((found - expected).abs().max() > 1e-5)


def test_functions(folder):
    module = _module(folder, "cpu")
    torch.manual_seed(2)
    q, k, v = torch.randn(2, 5, 4, 8), torch.randn(2, 7, 2, 8), torch.randn(2, 7, 2, 8)
    sink = torch.randn(4, dtype=torch.bfloat16)
    options = dict(causal=True, window_size=(3, 3), softcap=2.0, s_aux=sink)
    expected = heddle.attention(q, k, v, causal="bottom_right", window=(3, 3), softcap=2.0, sink=sink.float())
    _same(module.flash_attn_func(q, k, v, **options), expected)

    starts_q, starts_k = (torch.tensor([0, n, 2 * n], dtype=torch.int32) for n in (5, 7))
    lengths = dict(cu_seqlens_q=starts_q, cu_seqlens_k=starts_k, max_seqlen_q=torch.tensor(5), max_seqlen_k=7)
    packed = module.flash_attn_varlen_func(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), **lengths, **options)
    _same(packed.view_as(expected), expected)

    table = torch.tensor([[0], [1]], dtype=torch.int32)
    paged = module.flash_attn_varlen_func(q.flatten(0, 1), k, v, block_table=table, **lengths, **options)
    _same(paged.view_as(expected), expected)

    cache_k, cache_v = k.clone(), v.clone()
    cache_k[:, 6], cache_v[:, 6] = 0, 0
    found = module.flash_attn_with_kvcache(
        q[:, -1:],
        cache_k,
        cache_v,
        k[:, 6:],
        v[:, 6:],
        cache_seqlens=torch.tensor([6, 6], dtype=torch.int32),
        **options,
    )
    _same(found, expected[:, -1:])
    assert torch.equal(cache_k, k) and torch.equal(cache_v, v)


def test_sinks_have_gradients(folder):
    module = _module(folder, "cpu")
    sink = torch.zeros(4, requires_grad=True)
    q = torch.randn(1, 5, 4, 8)
    module.flash_attn_func(q, q, q, s_aux=sink).square().sum().backward()
    assert sink.grad.abs().min() > 0


@pytest.fixture
def by_the_hub(folder, monkeypatch):
    """The name by which transformers finds the folder."""
    if not is_kernels_available():
        pytest.skip("the package kernels, in a version that this transformers takes, is not installed")
    import kernels.load

    monkeypatch.setenv("LOCAL_KERNELS", f"heddle/heddle-flash={folder}")
    kernels.load._parse_local_kernel_overrides.cache_clear()
    return "heddle/heddle-flash"


@pytest.mark.parametrize("family", ["llama", "gemma2"])  # families with sinks take kernels of a list of their own only
@pytest.mark.parametrize("where", [None, "left", "right"])
def test_transformers_loads_it(by_the_hub, family, where):
    model = make(family)
    ids = tokens(3, 11)
    mask = None if where is None else padded(3, 11, where)
    counted = torch.ones(3, 11, dtype=torch.bool) if mask is None else mask.bool()
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).logits
        model.set_attn_implementation(by_the_hub, allow_all_kernels=True)
        found = model(ids, attention_mask=mask).logits
    assert not ((found - expected)[counted].abs().max() > 2e-5 * expected.abs().max())


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_continuous_batching_takes_it(by_the_hub, family):
    model = make(family)
    prompts = [tokens(1, 9), tokens(1, 5, 1)]
    options = dict(max_new_tokens=5, do_sample=False, pad_token_id=0)
    expected = [model.generate(prompt, **options)[0, prompt.shape[1] :].tolist() for prompt in prompts]
    model.set_attn_implementation(by_the_hub, allow_all_kernels=True)
    config = GenerationConfig(**options, eos_token_id=-1)
    found = model.generate_batch([prompt[0].tolist() for prompt in prompts], generation_config=config)
    assert sorted(x.generated_tokens for x in found.values()) == sorted(expected)


def test_continuous_batching_refuses_the_registered_function():
    """Which docs/hosts.md says; were it otherwise, the folder would not be needed."""
    heddle.hosts.transformers.register()
    model = make("llama")
    with attending(model, "heddle"), pytest.raises(ValueError, match="not supported for continuous batching"):
        model.generate_batch([[3, 4, 5]], generation_config=GenerationConfig(max_new_tokens=2, eos_token_id=-1))
