"""q, k and v as models have them on real text, of every layer: of the encoder that scripts/setup.sh installs, and of the language
model of examples/train, which is trained for it."""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib
import sys
from typing import Any

import torch

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "examples" / "train"), str(ROOT)]
LEAST_BYTES = 200_000  # of text, of which the encoder's pieces are taken
PARTS = ("query", "key", "value")  # of BERT's attention, in the order of q, k, v


@dataclasses.dataclass(frozen=True)
class Operands:
    """What the attention of a layer was given, float32 [B, S, H, D], and out [B, S, H, D], which the model made of it."""

    layer: int
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    causal: str  # as heddle.attention takes it


def pieces(count: int, tokens: int) -> torch.Tensor:
    """int64 [count, tokens]: pieces of real text that are so long, from all over it."""
    from scripts.demo import encode, text

    blocks = [text.paragraphs(content) for _, content in text.collect(LEAST_BYTES)]
    found = text.tokenise(blocks, encode.model_folder() / "tokenizer.json", tokens, tokens)
    whole = [piece for piece in found if len(piece) == tokens]
    if len(whole) < count:
        raise ValueError(f"the text has {len(whole)} pieces of {tokens} tokens: {count} are wanted")
    return torch.tensor([whole[n * len(whole) // count] for n in range(count)])


def encoder(ids: torch.Tensor) -> tuple[list[Operands], dict[str, Any]]:
    """Of all-MiniLM-L6-v2 on sequences of one length, ids [B, S]; and what there is to say about them."""
    import transformers

    from scripts.demo import encode

    # Eager: every layer's attention is then the formula, in float32.
    model = transformers.AutoModel.from_pretrained(
        encode.model_folder(), attn_implementation="eager", dtype=torch.float32
    ).eval()
    made: dict[tuple[int, str], torch.Tensor] = {}

    def keep(layer: int, part: str):
        def hook(module, given, found):
            made[layer, part] = found[0] if isinstance(found, tuple) else found

        return hook

    for layer, block in enumerate(model.encoder.layer):
        attention = block.attention.self
        for part in PARTS:
            getattr(attention, part).register_forward_hook(keep(layer, part))
        attention.register_forward_hook(keep(layer, "out"))
    with torch.no_grad():
        model(input_ids=ids)
    heads = model.config.num_attention_heads
    layers = [
        Operands(layer, *(made[layer, part].unflatten(2, (heads, -1)) for part in (*PARTS, "out")), causal="none")
        for layer in range(model.config.num_hidden_layers)
    ]
    about = {
        "transformers": transformers.__version__,
        "tokens_sha256": hashlib.sha256(ids.numpy().tobytes()).hexdigest()[:12],
    }
    return layers, about


def language_model(
    layers: int,
    heads: int,
    context: int,
    batch: int,
    steps: int,
    rate: float = 6e-4,
    precision: str = "fp32",
    files: int | None = None,
    log_every: int = 0,
) -> tuple[list[Operands], dict[str, Any]]:
    """Of the byte model of examples/train, trained here on the CPU, and then on `batch` pieces of text that it has not seen, in
    float32; and what there is to say about its training. files: of the text only so many, for tests."""
    from data import gather
    from train import Settings, train

    from model import Shape

    kept: list[Operands] = []

    def capture(trainer, inputs, targets):
        blocks = trainer.model.blocks
        attention = blocks[0].attention

        def keep(q, k, v):
            out = attention(q, k, v)
            kept.append(Operands(len(kept), *(x.contiguous() for x in (q, k, v, out)), causal="bottom_right"))
            return out

        for block in blocks:
            block.attention = keep
        trainer.model(inputs)

    corpus = gather(files)
    settings = Settings(
        precision=precision,
        device="cpu",
        shape=Shape(layers, heads, context=context),
        batch=batch,
        steps=steps,
        rate=rate,
    )
    run = train(settings, corpus, log_every, after=capture)
    about = {"text": str(corpus), "first_loss": run["losses"][0]}
    return kept, about | {
        name: run[name] for name in ("steps", "batch", "precision", "rate", "seed", "validation_loss")
    }


def save(path: pathlib.Path, layers: list[Operands], about: dict[str, Any]) -> None:
    torch.save({"layers": [dataclasses.asdict(x) for x in layers], "about": about}, path)


def load(path: pathlib.Path) -> tuple[list[Operands], dict[str, Any]]:
    held = torch.load(path)
    return [Operands(**x) for x in held["layers"]], held["about"]
