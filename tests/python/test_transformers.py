"""Models of transformers on Heddle, held to transformers' own eager attention."""

import inspect
import subprocess
import sys

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

import heddle.hosts.transformers
import transformers
from heddle.hosts.transformers import attention as adapter
from transformers import CompileConfig
from transformers_kit import DECODERS, ENCODER_DECODERS, ENCODERS, attending, make, padded, tokens

heddle.hosts.transformers.register()
heddle.hosts.transformers.register("heddle_boolean", masks="boolean")

#: Of logits and gradients, relative to the largest; float32 sums in another order.
_BOUND = 2e-5


def _close(found, expected, where=None):
    if where is not None:
        found, expected = found[where], expected[where]
    scale = expected.abs().max()
    assert scale > 0 and not ((found - expected).abs().max() > _BOUND * scale)


def _inputs(family, where, rows=3, length=11):
    mask = None if where is None else padded(rows, length, where)
    inputs = dict(input_ids=tokens(rows, length), attention_mask=mask)
    if family in ENCODER_DECODERS:
        inputs["decoder_input_ids"] = tokens(rows, 6, 1)
    rows_that_count = None if mask is None or family in ENCODER_DECODERS else mask.bool()
    return inputs, rows_that_count


@pytest.mark.parametrize("where", [None, "left", "right"])
@pytest.mark.parametrize(
    "family,name",
    [(family, "heddle") for family in (*DECODERS, *ENCODERS, *ENCODER_DECODERS)]
    + [(family, "heddle_boolean") for family in ("gemma2", "gpt_oss", "modernbert")],
)
def test_logits_and_gradients(family, where, name):
    model = make(family)
    inputs, counted = _inputs(family, where)

    def run(attention):
        with attending(model, attention):
            logits = model(**inputs).logits
        counts = logits if counted is None else logits[counted]
        weights = [x for x in model.parameters() if x.requires_grad]
        return logits, torch.autograd.grad(counts.square().sum(), weights, allow_unused=True)

    expected, wanted = run("eager")
    found, gradients = run(name)
    _close(found, expected, counted)
    largest = max(x.abs().max() for x in wanted if x is not None)
    for a, b in zip(gradients, wanted):
        assert (a is None) == (b is None)
        assert a is None or not ((a - b).abs().max() > _BOUND * largest)


@pytest.mark.parametrize(
    "family,changes",
    [
        ("mistral", dict(sliding_window=None)),
        ("gemma2", dict(attn_logit_softcapping=None)),
        ("gemma3", dict(sliding_window=3)),
        ("modernbert", dict(local_attention=4)),
    ],
)
def test_what_a_family_brings_is_seen(family, changes):
    """Had Heddle dropped the family's window or cap, the tests above would notice."""
    inputs, _ = _inputs(family, None)
    with torch.no_grad():
        with_it, without = make(family)(**inputs).logits, make(family, **changes)(**inputs).logits
    assert (with_it - without).abs().max() > 100 * _BOUND * with_it.abs().max()


def test_sinks_are_seen():
    model = make("gpt_oss")
    inputs, _ = _inputs("gpt_oss", None)
    with torch.no_grad(), attending(model, "heddle"):
        before = model(**inputs).logits
        model.model.layers[0].self_attn.sinks.add_(1)
        assert (model(**inputs).logits - before).abs().max() > 100 * _BOUND * before.abs().max()


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "t5"])
def test_under_autocast(family):
    model = make(family)
    inputs, counted = _inputs(family, "left")
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = model(**inputs).logits
        with attending(model, "heddle"):
            found = model(**inputs).logits
    assert found.dtype == expected.dtype
    difference = (found - expected).float() if counted is None else (found - expected)[counted].float()
    assert not (difference.abs().max() > 0.05 * expected.float().abs().max())


def _generates_the_same(family, where, rows, **how):
    model = make(family)
    inputs, _ = _inputs(family, where, rows)
    inputs.pop("decoder_input_ids", None)
    options = dict(max_new_tokens=8, do_sample=False, pad_token_id=0, **how)
    expected = model.generate(**inputs, **options)
    with attending(model, "heddle"):
        assert torch.equal(model.generate(**inputs, **options), expected)


@pytest.mark.parametrize("how", [{}, dict(cache_implementation="static"), dict(num_beams=2)])
@pytest.mark.parametrize("where", [None, "left"])
@pytest.mark.parametrize("family", [*DECODERS, *ENCODER_DECODERS])
def test_generates_the_same_tokens(family, where, how):
    _generates_the_same(family, where, 3, **how)


@pytest.mark.parametrize("family", DECODERS)
def test_generates_the_same_tokens_by_prompt_lookup(family):
    """Several tokens at a time over a cache."""
    _generates_the_same(family, None, 1, prompt_lookup_num_tokens=2)


@pytest.mark.parametrize("where", [None, "left"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss"])
def test_a_prompt_in_pieces(family, where):
    model = make(family)
    inputs, _ = _inputs(family, where)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    with torch.no_grad():
        expected = model(**inputs).logits
        with attending(model, "heddle"):
            name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"  # 5.23
            cache = {name: transformers.DynamicCache(config=model.config)}
            for piece in (slice(0, 7), slice(7, 10), slice(10, 11)):
                so_far = None if mask is None else mask[:, : piece.stop]
                found = model(ids[:, piece], attention_mask=so_far, **cache).logits
                counted = None if mask is None else mask[:, piece].bool()
                _close(found, expected[:, piece], counted)


# gpt-oss compiled stands for llama, too: its layers alternate between windows and all keys.
@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize(
    "family,compiled", [("llama", False), ("mistral", False), ("gemma2", False), ("gpt_oss", False), ("gpt_oss", True)]
)
def test_packed_documents_do_not_see_one_another(family, compiled, cached):
    model = make(family)
    ids = tokens(1, 11)
    position_ids = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 0, 1]])
    call = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
    with torch.no_grad():
        apart = [model(part, use_cache=False).logits for part in (ids[:, :4], ids[:, 4:9], ids[:, 9:])]
        with attending(model, "heddle"):
            found = call(ids, position_ids=position_ids, use_cache=cached).logits
    _close(found, torch.cat(apart, 1))


def test_packed_documents_by_their_lengths():
    model = make("llama")
    ids = tokens(1, 11)
    starts = torch.tensor([0, 4, 9, 11], dtype=torch.int32)
    lengths = dict(cu_seq_lens_q=starts, cu_seq_lens_k=starts, max_length_q=5, max_length_k=5)
    position_ids = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 0, 1]])
    with torch.no_grad():
        expected = model(ids, position_ids=position_ids, use_cache=False).logits
        with attending(model, "heddle"):
            _close(model(ids, position_ids=position_ids, use_cache=True, **lengths).logits, expected)


@pytest.mark.parametrize("family,where", [("llama", "left"), ("gemma2", None), ("bert", "left")])
def test_compiles_without_breaks(family, where):
    model = make(family, **({} if family == "gemma2" else dict(num_hidden_layers=1)))  # gemma2's layers alternate
    inputs, counted = _inputs(family, where)
    expected = model(**inputs).logits
    with attending(model, "heddle"):
        found = torch.compile(model, fullgraph=True, backend="aot_eager")(**inputs).logits
    _close(found, expected, counted)
    (expected_gradient,) = torch.autograd.grad(expected.square().mean(), [model.get_input_embeddings().weight])
    (gradient,) = torch.autograd.grad(found.square().mean(), [model.get_input_embeddings().weight])
    if counted is None:
        _close(gradient, expected_gradient)


def test_generates_compiled_over_a_static_cache():
    model = make("gpt_oss")
    inputs, _ = _inputs("gpt_oss", "left")
    options = dict(max_new_tokens=6, do_sample=False, pad_token_id=0, cache_implementation="static")
    expected = model.generate(**inputs, **options)
    compile_config = CompileConfig(fullgraph=True, backend="aot_eager", mode=None)
    compile_config._compile_all_devices = True
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with attending(model, "heddle"):
        assert torch.equal(model.generate(**inputs, compile_config=compile_config, **options), expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "bert"])
def test_drops_in_training(family):
    options = dict(attention_probs_dropout_prob=0.5, hidden_dropout_prob=0.0)
    model = make(family, **(options if family == "bert" else dict(attention_dropout=0.5))).train()
    inputs, _ = _inputs(family, None)

    def run(seed):
        torch.manual_seed(seed)
        return model(**inputs).logits

    with attending(model, "heddle"):
        once, again, other = run(1), run(1), run(2)
        assert torch.equal(once, again)
        assert (once - other).abs().max() > 1e-3 * once.abs().max()
        once.square().sum().backward()
        assert all(x.grad is None or x.grad.isfinite().all() for x in model.parameters())
        model.eval()
        with torch.no_grad():
            found = model(**inputs).logits
    with torch.no_grad():
        _close(found, model(**inputs).logits)


def test_checkpointed_layers_have_the_same_gradients():
    model = make("llama").train()
    inputs, _ = _inputs("llama", "left")

    def run():
        model.zero_grad()
        model(**inputs, use_cache=False).logits.square().sum().backward()
        return [x.grad.clone() for x in model.parameters()]

    with attending(model, "heddle"):
        expected = run()
        # Before transformers 5.23 it had another name.
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
        for a, b in zip(run(), expected):
            assert torch.equal(a, b)


def test_keys_and_values_are_not_repeated(monkeypatch):
    from heddle import functional

    seen, original = [], functional.attention

    def watch(q, k, v, **options):
        seen.append((q.shape[-2], k.shape[-2], k.data_ptr() == v.data_ptr()))
        return original(q, k, v, **options)

    monkeypatch.setattr(functional, "attention", watch)
    model = make("llama")
    inputs, _ = _inputs("llama", "left")
    with torch.no_grad(), attending(model, "heddle"):
        model(**inputs)
    assert seen == [(4, 2, False)] * 2


def test_probabilities_are_refused():
    model = make("llama")
    with attending(model, "heddle"), pytest.raises(NotImplementedError, match="output_attentions is True"):
        model(tokens(1, 5), output_attentions=True)


def test_positions_are_asked_once_for_all_layers(monkeypatch):
    asked, original = [], adapter.documents_of
    monkeypatch.setattr(adapter, "documents_of", lambda x: asked.append(x) or original(x))
    model = make("llama")
    ids, position_ids = tokens(1, 6), torch.tensor([[0, 1, 2, 0, 1, 2]])
    with torch.no_grad(), attending(model, "heddle"):
        first = model(ids, position_ids=position_ids).logits
        assert len(asked) == 1
        position_ids[0, 3:] += 3  # one document now
        second = model(ids, position_ids=position_ids).logits
        assert len(asked) == 2
    assert (first - second)[:, 3:].abs().max() > 1e-3
    with torch.no_grad():
        _close(second, model(ids).logits)


def test_a_model_is_made_saved_and_loaded_with_it(tmp_path):
    model = make("llama")
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="heddle")
    assert loaded.config._attn_implementation == "heddle"
    with torch.no_grad():
        _close(loaded(tokens(2, 7)).logits, model(tokens(2, 7)).logits)


def _python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_importing_heddle_does_not_import_transformers():
    done = _python("import sys, heddle, heddle.flash_attn; assert 'transformers' not in sys.modules")
    assert done.returncode == 0, done.stderr


def test_says_what_is_missing():
    done = _python("import sys; sys.modules['transformers'] = None; import heddle.hosts.transformers")
    assert "heddle.hosts.transformers needs transformers 5.22 or later, which cannot be imported" in done.stderr
