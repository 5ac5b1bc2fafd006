"""Writes tests/data/golden_minilm.safetensors: what transformers and torch compute for fixed pieces of text, in fp32.

Needs transformers beside what the demo needs. The file keeps the pieces' token ids, so the test does not depend on this machine's text.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.numpy import save_file

from scripts.demo import encode, text

PIECES = 64


def choose(packed: text.Packed, count: int) -> text.Packed:
    """`count` pieces spread over the text, cut to lengths from 3 to 512 that favour the short ones."""
    lengths = np.unique(np.concatenate([[3, 4, 5, 7, 8, 9, 511, 512], np.geomspace(10, 448, 2 * count).astype(int)]))
    lengths = lengths[np.linspace(0, len(lengths) - 1, count).round().astype(int)]
    stream = [token for token in packed.token_ids.tolist() if token not in (101, 102)]
    pieces, step = [], len(stream) // count
    for index, length in enumerate(lengths):
        begin = min(index * step, len(stream) - int(length))
        pieces.append([101, *stream[begin : begin + int(length) - 2], 102])
    return text.pack(pieces)


def embed(packed: text.Packed) -> np.ndarray:
    """Mean-pooled, unit-length embeddings f32 [pieces, hidden], each piece alone: no padding, no mask."""
    model = transformers.AutoModel.from_pretrained(
        encode.model_folder(), attn_implementation="eager", dtype=torch.float32
    ).eval()
    rows = []
    with torch.no_grad():
        for i in range(len(packed)):
            ids = torch.from_numpy(packed.select(i, i + 1).token_ids).long()[None]
            hidden = model(input_ids=ids).last_hidden_state[0]
            rows.append(torch.nn.functional.normalize(hidden.mean(0), dim=0).numpy())
    return np.stack(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=encode.GOLDEN)
    out = parser.parse_args().out
    packed = choose(encode.prepare(200_000)[0], PIECES)
    held = {"token_ids": packed.token_ids, "cu_seqlens": packed.cu_seqlens, "embeddings": embed(packed)}
    out.parent.mkdir(parents=True, exist_ok=True)
    about = {
        "model": "all-MiniLM-L6-v2",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "pooling": "mean, unit length",
    }
    save_file(held, out, metadata=about)
    print(f"{out}: {len(packed)} pieces, {len(packed.token_ids)} tokens, {out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
