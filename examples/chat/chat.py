"""A chat in the terminal on a transformers model whose attention is Heddle's (README.md)."""

import argparse
import inspect
import sys
import time
from pathlib import Path

import heddle.hosts.transformers
import heddle.lowbit
import heddle.nn
import torch
from byte_tokenizer import BEGIN, END, VOCABULARY, ByteTokenizer
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    StaticCache,
    TextStreamer,
)


def random_model(seed):
    """A small Llama of random weights: it answers noise, by the same code as a trained one."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        bos_token_id=BEGIN,
        eos_token_id=END,
        pad_token_id=END,
        initializer_range=0.1,  # large, so that attention is far from uniform
    )
    return LlamaForCausalLM(config)


def load(folder, dtype, seed):
    """(model, tokenizer), the model's attention Heddle's. folder: None for random weights and bytes."""
    heddle.hosts.transformers.register()
    if folder is None:
        model, tokenizer = random_model(seed).to(dtype), ByteTokenizer()
    else:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model.set_attn_implementation("heddle")  # or from_pretrained(..., attn_implementation="heddle")
    return model.eval(), tokenizer


def quantize(model, format):
    """The linear layers of the blocks, in place; embeddings and the output layer stay, as with `heddle quantize`."""
    layers = [name for name in heddle.nn.linear_layers(model) if heddle.lowbit.linear_layer(name)]
    heddle.nn.quantize_model(model, dict.fromkeys(layers, format))
    return layers


class Printer(TextStreamer):
    """Prints an answer as it comes. What could steer a terminal, or is no character, is shown as U+FFFD."""

    def on_finalized_text(self, text, stream_end=False):
        shown = "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)
        print(shown, end="\n" if stream_end else "", flush=True)


class Chat:
    """A conversation: its messages, and a cache of the keys and values of what the model has read and said."""

    def __init__(self, model, tokenizer, *, cache="dynamic", context=None, tokens=64, temperature=0.0):
        self.model, self.tokenizer, self.kind = model, tokenizer, cache
        self.context = context or model.config.max_position_embeddings
        self.tokens, self.temperature = tokens, temperature
        self.messages = []
        self.cache, self.held = self.new_cache(), []  # held: the ids whose keys are in the cache

    def new_cache(self):
        if self.kind == "static":  # all of its memory at once; shapes that never change
            return StaticCache(config=self.model.config, max_cache_len=self.context)
        return DynamicCache(config=self.model.config)

    def prompt(self, text):
        """Ids [1, n] of the conversation with one question more."""
        asked = [*self.messages, {"role": "user", "content": text}]
        made = self.tokenizer.apply_chat_template(
            asked, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        ids = made["input_ids"].to(self.model.device)
        if ids.shape[1] + self.tokens > self.context:
            raise ValueError(
                f"the conversation has {ids.shape[1]} tokens and an answer may have {self.tokens}: together they must be at "
                f"most the context, {self.context}"
            )
        return ids

    def generate(self, ids, cache, streamer=None):
        """The new ids. Only what the cache does not hold of `ids` is computed."""
        # transformers 5.24 renamed the argument.
        name = "cache" if "cache" in inspect.signature(self.model.forward).parameters else "past_key_values"
        sampling = dict(do_sample=True, temperature=self.temperature) if self.temperature else dict(do_sample=False)
        return self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            **{name: cache},
            streamer=streamer,
            max_new_tokens=self.tokens,
            pad_token_id=self.tokenizer.pad_token_id,
            **sampling,
        )[0, ids.shape[1] :].tolist()

    def answer(self, text, streamer=None):
        """(new ids, how many of the prompt's were in the cache)."""
        ids = self.prompt(text)
        # Text that becomes other ids than those it was made of is read anew.
        if ids[0, : len(self.held)].tolist() != self.held:
            self.cache, self.held = self.new_cache(), []
        cached = len(self.held)
        new = self.generate(ids, self.cache, streamer)
        self.held = [*ids[0].tolist(), *new[:-1]]  # the last was not fed
        said = self.tokenizer.decode(new, skip_special_tokens=True)
        self.messages += [{"role": "user", "content": text}, {"role": "assistant", "content": said}]
        return new, cached

    def compare(self, text):
        """The new ids by Heddle's attention and by transformers' own, each with a cache of its own; nothing is remembered."""
        ids = self.prompt(text)
        ours = self.generate(ids, self.new_cache())
        self.model.set_attn_implementation("eager")
        try:
            theirs = self.generate(ids, self.new_cache())
        finally:
            self.model.set_attn_implementation("heddle")
        return ours, theirs


def questions(given):
    """Those of the command line, else lines of the standard input."""
    yield from given
    while not given:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return
        if line:
            yield line


def options(arguments):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a local folder of a model that chats; without it: random weights over bytes")
    parser.add_argument("--prompt", action="append", default=[], help="a question; several one after the other")
    parser.add_argument("--cache", choices=["dynamic", "static"], default="dynamic")
    parser.add_argument(
        "--context", type=int, help="tokens that a conversation may have; without it: what the model may"
    )
    parser.add_argument("--tokens", type=int, default=64, help="of an answer, at most")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: always the likeliest token")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--quantize", metavar="FORMAT", help="nvfp4, int8_row, ...: of the blocks' linear layers")
    parser.add_argument("--compare", action="store_true", help="check that eager attention says the same")
    parser.add_argument("--seed", type=int, default=0)
    found = parser.parse_args(arguments)
    if found.tokens < 1:
        parser.error(f"--tokens is {found.tokens}: it must be at least 1")
    if found.model is not None and not Path(found.model).is_dir():
        parser.error(f"--model is {found.model!r}: there is no such folder, and nothing is downloaded")
    if found.quantize:
        try:
            heddle.nn.Policy(found.quantize)
        except ValueError as error:
            parser.error(f"--quantize: {error}")
    if found.compare and (found.dtype != "float32" or found.temperature):
        parser.error(
            "--compare is about the likeliest tokens in float32: it takes neither another --dtype nor --temperature"
        )
    return found


def main(arguments=None):
    wanted = options(arguments)
    model, tokenizer = load(wanted.model, getattr(torch, wanted.dtype), wanted.seed)
    if wanted.quantize:
        print(f"{len(quantize(model, wanted.quantize))} linear layers in {wanted.quantize}", file=sys.stderr)
    chat = Chat(
        model,
        tokenizer,
        cache=wanted.cache,
        context=wanted.context,
        tokens=wanted.tokens,
        temperature=wanted.temperature,
    )
    torch.manual_seed(wanted.seed)
    for text in questions(wanted.prompt):
        try:
            if wanted.compare:
                ours, theirs = chat.compare(text)
                if ours != theirs:
                    first = next(i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b)
                    sys.exit(
                        f"chat.py: token {first} is {ours[first]} by Heddle's attention and {theirs[first]} by eager's"
                    )
                print(f"{len(ours)} tokens, the same by eager attention", file=sys.stderr)
            begun = time.perf_counter()
            new, cached = chat.answer(text, Printer(tokenizer, skip_prompt=True, skip_special_tokens=True))
        except ValueError as error:
            sys.exit(f"chat.py: {error}")
        speed = len(new) / (time.perf_counter() - begun)
        read = len(chat.held) - len(new) + 1
        print(
            f"{len(new)} tokens, {speed:.0f} tokens/s; {cached} of {read} of the prompt were in the cache",
            file=sys.stderr,
        )


if __name__ == "__main__":
    main()
