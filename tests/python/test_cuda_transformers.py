"""Models of transformers on Heddle on a GPU: in 16 bits as near to float32 as transformers' own eager attention, in float32 the
same tokens; the kernel folder; layers in 4 bits."""

import copy
import importlib.util

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

import heddle.hosts.transformers
import heddle.nn
import transformers
from heddle import _heddle
from heddle.hosts.transformers import HeddleConfig, write_kernel_folder
from transformers import CompileConfig
from transformers_kit import DECODERS, ENCODER_DECODERS, ENCODERS, attending, make, padded, tokens

if not torch.cuda.is_available():
    pytest.skip("torch sees no GPU here", allow_module_level=True)
if not _heddle.cuda_built():
    pytest.skip("this build of heddle has no GPU kernels", allow_module_level=True)

heddle.hosts.transformers.register()


def inputs_of(family, where, rows=3, length=37):
    mask = None if where is None else padded(rows, length, where)
    inputs = dict(input_ids=tokens(rows, length), attention_mask=mask)
    if family in ENCODER_DECODERS:
        inputs["decoder_input_ids"] = tokens(rows, 11, 1)
    counted = None if mask is None or family in ENCODER_DECODERS else mask.bool().cuda()
    return {name: x if x is None else x.cuda() for name, x in inputs.items()}, counted


def results(model, inputs, counted, attention):
    """Logits of the rows that count, and the embedding's gradient, in doubles."""
    with attending(model, attention):
        logits = model(**inputs, use_cache=False).logits if model.can_generate() else model(**inputs).logits
    logits = logits if counted is None else logits[counted]
    weight = model.get_input_embeddings().weight
    (gradient,) = torch.autograd.grad(logits.float().square().mean(), [weight])
    return logits.detach().double(), gradient.double()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("where", [None, "left", "right"])
@pytest.mark.parametrize("family", [*DECODERS, *ENCODERS, *ENCODER_DECODERS])
def test_logits_and_gradients(family, where, dtype):
    model = make(family).cuda().to(dtype)
    inputs, counted = inputs_of(family, where)
    exact = results(copy.deepcopy(model).float(), inputs, counted, "eager")
    theirs, ours = (results(model, inputs, counted, name) for name in ("eager", "heddle"))
    for expected, eager, found in zip(exact, theirs, ours):
        allowed = 2 * (eager - expected).norm() + 1e-3 * expected.norm()
        assert (found - expected).norm() <= allowed


@pytest.mark.parametrize("how", [{}, dict(cache_implementation="static"), dict(num_beams=2)], ids=str)
@pytest.mark.parametrize("where", [None, "left"])
@pytest.mark.parametrize("family", [*DECODERS, *ENCODER_DECODERS])
def test_generates_the_same_tokens(family, where, how):
    model = make(family).cuda()
    inputs, _ = inputs_of(family, where)
    inputs.pop("decoder_input_ids", None)
    options = dict(max_new_tokens=8, do_sample=False, pad_token_id=0, **how)
    expected = model.generate(**inputs, **options)
    with attending(model, "heddle"):
        assert torch.equal(model.generate(**inputs, **options), expected)


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_generates_compiled_over_a_static_cache(family):
    """In CUDA graphs, as torch.compile makes them."""
    model = make(family).cuda()
    inputs, _ = inputs_of(family, None)
    options = dict(max_new_tokens=6, do_sample=False, pad_token_id=0, cache_implementation="static")
    expected = model.generate(**inputs, **options, disable_compile=True)
    torch._dynamo.reset()
    with attending(model, "heddle"):
        found = model.generate(
            **inputs, **options, compile_config=CompileConfig(fullgraph=True, mode="reduce-overhead")
        )
    assert torch.equal(found, expected)


def test_packed_documents_do_not_see_one_another():
    model, ids = make("llama").cuda(), tokens(1, 11).cuda()
    position_ids = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 0, 1]], device="cuda")
    with torch.no_grad():
        apart = torch.cat([model(part, use_cache=False).logits for part in (ids[:, :4], ids[:, 4:9], ids[:, 9:])], 1)
        with attending(model, "heddle"):
            found = model(ids, position_ids=position_ids, use_cache=False).logits
    assert (found - apart).abs().max() <= 2e-5 * apart.abs().max()


def test_the_kernel_folder(tmp_path):
    folder = write_kernel_folder(tmp_path / "heddle-flash")
    spec = importlib.util.spec_from_file_location("of_folder", folder / "build" / "torch-cuda" / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    q, k, v = (torch.randn(2, n, h, 64, device="cuda", dtype=torch.bfloat16) for n, h in ((50, 4), (70, 2), (70, 2)))
    exact = heddle.attention(*(x.double().float().cpu() for x in (q, k, v)), causal="bottom_right")
    found = module.flash_attn_func(q, k, v, causal=True)
    found = found[0] if isinstance(found, tuple) else found
    assert (found.cpu().float() - exact).norm() <= 0.01 * exact.norm()


@pytest.mark.parametrize("format", ["nvfp4", "int4_g32", "int8_row"])
def test_layers_in_a_format_are_loaded_onto_the_gpu(tmp_path, format):
    floats = make("llama", intermediate_size=64).to(torch.bfloat16)
    floats.save_pretrained(tmp_path / "floats")
    load = transformers.AutoModelForCausalLM.from_pretrained
    how = dict(dtype=torch.bfloat16)
    if importlib.util.find_spec("accelerate"):
        how["device_map"] = "cuda"
    model = load(
        tmp_path / "floats", quantization_config=HeddleConfig(format), attn_implementation="heddle", **how
    ).cuda()
    layers = [x for x in model.modules() if isinstance(x, heddle.nn.Linear)]
    assert layers and all(x.format == format and x.packed.is_cuda for x in layers)
    ids = tokens(2, 9).cuda()
    with torch.no_grad():
        expected = model(ids).logits
        reference = copy.deepcopy(floats).cuda()
        for name, layer in model.named_modules():
            if isinstance(layer, heddle.nn.Linear):
                reference.get_submodule(name).weight.data.copy_(layer.dequantized())
        with attending(reference, "heddle"):
            wanted = reference(ids).logits
        assert (expected - wanted).float().norm() <= 0.02 * wanted.float().norm()
        model.save_pretrained(tmp_path / "low")
        again = load(tmp_path / "low", attn_implementation="heddle", **how).cuda()
        assert torch.equal(again(ids).logits, expected)
