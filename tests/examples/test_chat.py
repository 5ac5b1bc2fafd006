"""examples/chat: Heddle's attention says what eager attention does, over both caches, from turn to turn."""

import json
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
CHAT = Path(__file__).resolve().parents[2] / "examples" / "chat"
sys.path.insert(0, str(CHAT))

import byte_tokenizer  # noqa: E402
import chat as example  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


def conversation(format=None, **settings):
    model, tokenizer = example.load(None, torch.float32, seed=0)
    if format:
        assert len(example.quantize(model, format)) == 28 and "format=" not in str(model.lm_head)
    return example.Chat(model, tokenizer, tokens=12, **settings)


@pytest.mark.parametrize("cache, format", [("dynamic", None), ("static", None), ("dynamic", "nvfp4")])
def test_greedy_tokens_are_those_of_eager_attention(cache, format):
    chat = conversation(cache=cache, format=format, context=128)
    ours, theirs = chat.compare("warp?")
    assert ours == theirs and len(set(ours)) > 3 and chat.answer("warp?") == (ours, 0)
    # The second answer is over what the first left in the cache, unless that has marks, which its text has not.
    held = len(chat.held) if max(ours[:-1]) < byte_tokenizer.BYTES else 0
    again, theirs = chat.compare("and weft?")
    assert again == theirs and chat.answer("and weft?") == (again, held)
    assert held or format
    assert chat.model.config._attn_implementation == "heddle"
    with pytest.raises(ValueError, match="has 1.. tokens and an answer may have 12: .* at most the context, 128"):
        chat.prompt("x" * 100)


def test_compare_fails_where_attention_differs(monkeypatch, capsys):
    from transformers import AttentionInterface

    original = example.heddle.hosts.transformers.register

    def wrong():
        original()
        attend = AttentionInterface._global_mapping["heddle"]
        monkeypatch.setitem(
            AttentionInterface._global_mapping,
            "heddle",
            lambda module, query, *rest, **more: attend(module, -query, *rest, **more),
        )

    monkeypatch.setattr(example.heddle.hosts.transformers, "register", wrong)
    with pytest.raises(SystemExit, match="chat.py: token .* by Heddle's attention and .* by eager's"):
        example.main(["--prompt", "hello", "--tokens", "8", "--compare"])


def test_text_that_becomes_other_ids_is_read_anew(monkeypatch):
    chat = conversation()
    chat.answer("one")
    chat.messages[-1]["content"] = "something else"
    ours, _ = chat.compare("two")
    assert chat.answer("two") == (ours, 0)


def test_bytes_come_back():
    tokenizer = byte_tokenizer.ByteTokenizer()
    noise = bytes(range(256))
    text = tokenizer.decode([*noise, byte_tokenizer.END])
    ids = tokenizer.apply_chat_template([{"role": "user", "content": text}])["input_ids"][0].tolist()
    assert bytes(ids[2:-2]) == noise


def test_streams_what_a_terminal_may_show(capsys):
    printer = example.Printer(byte_tokenizer.ByteTokenizer(), skip_prompt=True)
    printer.put(torch.tensor([[1, 2]]))
    for byte in "é ".encode():
        printer.put(torch.tensor([byte]))
    assert capsys.readouterr().out == "é "  # before the end
    for byte in b"a\x1b[2J\xff\n":
        printer.put(torch.tensor([byte]))
    printer.end()
    assert capsys.readouterr().out.rstrip("\n") == "a\N{REPLACEMENT CHARACTER}[2J\N{REPLACEMENT CHARACTER}"


def test_takes_a_folder_and_says_what_it_does(tmp_path, capsys):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    model = example.random_model(3)
    model.save_pretrained(tmp_path)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    plain = Tokenizer(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>")
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] + ':' + m['content'] + '|' }}{% endfor %}"
    tokenizer.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "llama"

    small = ["--prompt", "hello", "--tokens", "6", "--cache", "static", "--context", "64"]
    example.main([*small, "--model", str(tmp_path), "--quantize", "int8_row", "--compare"])
    shown = capsys.readouterr()
    assert "28 linear layers in int8_row\n6 tokens, the same by eager attention\n6 tokens, " in shown.err
    assert "0 of 11 of the prompt were in the cache" in shown.err and shown.out.strip()
    for wrong, sentence in (
        (["--compare", "--dtype", "bfloat16"], "--compare is about the likeliest tokens in float32"),
        (["--tokens", "0"], "--tokens is 0: it must be at least 1"),
        (["--model", "nowhere/at/all"], "--model is 'nowhere/at/all': there is no such folder"),
        (["--quantize", "nvfp5"], "--quantize: [Policy] format is 'nvfp5': it must be one of"),
    ):
        with pytest.raises(SystemExit):
            example.main([*small, *wrong])
        assert sentence in capsys.readouterr().err
