"""Runs one Transformer layer in float32 on the CPU, whose linear layers are oneDNN's, with numpy alone, and prints "runs", or the
refusal where oneDNN cannot be loaded. Attention must work either way.

A script of its own: whether oneDNN can be loaded is settled once in a process. scripts/test_wheel.sh runs it, too.
"""

import json
import pathlib
import sys
import tempfile

import heddle
import numpy as np

HIDDEN, INTERMEDIATE, WORDS = 32, 64, 20


def write_model(folder):
    """A BERT of one layer, in safetensors' format as its specification has it."""
    shapes = {
        "embeddings.word_embeddings.weight": (WORDS, HIDDEN),
        "embeddings.position_embeddings.weight": (16, HIDDEN),
        "embeddings.token_type_embeddings.weight": (2, HIDDEN),
    }
    linear = {f"attention.self.{name}": (HIDDEN, HIDDEN) for name in ("query", "key", "value")}
    linear |= {
        "attention.output.dense": (HIDDEN, HIDDEN),
        "intermediate.dense": (INTERMEDIATE, HIDDEN),
        "output.dense": (HIDDEN, INTERMEDIATE),
    }
    for name, (out, width) in linear.items():
        shapes |= {f"encoder.layer.0.{name}.weight": (out, width), f"encoder.layer.0.{name}.bias": (out,)}
    for name in ("embeddings", "encoder.layer.0.attention.output", "encoder.layer.0.output"):
        shapes |= {f"{name}.LayerNorm.{part}": (HIDDEN,) for part in ("weight", "bias")}
    rng, header, data = np.random.default_rng(1), {}, b""
    for name, shape in shapes.items():
        values = (0.2 * rng.standard_normal(shape, dtype=np.float32)).tobytes()
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [len(data), len(data) + len(values)]}
        data += values
    words = json.dumps(header).encode()
    words += b" " * (-len(words) % 8)  # so that the data is aligned
    (folder / "model.safetensors").write_bytes(len(words).to_bytes(8, "little") + words + data)
    config = dict(
        model_type="bert", vocab_size=WORDS, hidden_size=HIDDEN, num_hidden_layers=1, num_attention_heads=2, hidden_act="gelu",
        intermediate_size=INTERMEDIATE, max_position_embeddings=16, type_vocab_size=2, layer_norm_eps=1e-12,
    )  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


def main():
    q = np.ones((1, 4, 2, 8), np.float32)
    assert heddle.attention(q, q, q, causal="top_left").sum() == q.size
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        write_model(folder)
        try:
            encoder = heddle.Encoder(folder)
        except RuntimeError as refusal:
            print(refusal)
            return
        _, states = encoder.encode(
            np.array([3, 7, 1, 3, 7], np.int32), np.array([0, 3, 5], np.int32), return_hidden_states=True
        )
    assert states.shape == (5, HIDDEN) and np.isfinite(states).all() and abs(states[0] - states[1]).max() > 0.1
    print("runs")


if __name__ == "__main__":
    sys.exit(main())
