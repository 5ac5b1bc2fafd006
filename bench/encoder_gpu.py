"""The encoder on a GPU, format by format, over the demo's text; figures go to bench/results/encoder-<gpu>.json.

    python bench/encoder_gpu.py prepare FOLDER   # where tokenizer, model and the CPU's encoder are: text, embeddings, model
    python bench/encoder_gpu.py run FOLDER       # where the GPU is

FOLDER then has text.npz and a model whose word embeddings are zero for words that the text has not: it packs smaller, and
loads to as many bytes. Without FOLDER, `run` does both.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from bench import gpu_conditions, sources  # noqa: E402
from scripts.demo import encode, gpu, text  # noqa: E402

TEXT_BYTES = 200_000  # as the demo has it
WORDS = "embeddings.word_embeddings.weight"


def prepare(folder: Path) -> None:
    import heddle
    from safetensors.numpy import load_file, save_file

    packed, about = encode.prepare(TEXT_BYTES)
    source = encode.model_folder()
    encoder = heddle.Encoder(source)
    exact = np.concatenate([encoder.encode(b.token_ids, b.cu_seqlens) for b in packed.batches(encode.BATCH_TOKENS)])
    weights = load_file(source / "model.safetensors")
    unused = np.ones(len(weights[WORDS]), bool)
    unused[packed.token_ids] = False
    weights[WORDS] = np.where(unused[:, None], np.float32(0), weights[WORDS])
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors")
    shutil.copy(source / "config.json", folder)
    np.savez(
        folder / "text.npz",
        token_ids=packed.token_ids,
        cu_seqlens=packed.cu_seqlens,
        exact=exact,
        about=json.dumps(about),
    )
    print(f"{len(packed)} pieces, {packed.cu_seqlens[-1]} tokens in {folder}")


def run(folder: Path, out: Path | None) -> None:
    import torch

    if why := gpu.absence():
        sys.exit(f"encoder_gpu.py: {why}")
    held = np.load(folder / "text.npz")
    packed = text.Packed(held["token_ids"], held["cu_seqlens"])
    found = gpu.measure(str(folder), packed, held["exact"], step=lambda line: print(line, flush=True))
    found["conditions"]["commit"] = gpu_conditions.commit()
    measured = sources.digests(sources.ENCODER_GPU)
    for row in found["rows"]:
        row["sources"] = measured
    found["text"] = json.loads(str(held["about"]))
    name = torch.cuda.get_device_name().lower().replace(" ", "-")
    path = out or ROOT / "bench" / "results" / f"encoder-{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n")
    print(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["prepare", "run"])
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--out", type=Path, help="another file for the figures")
    chosen = parser.parse_args()
    if chosen.what == "prepare":
        if chosen.folder is None:
            parser.error("prepare needs a folder")
        prepare(chosen.folder)
    elif chosen.folder is not None:
        run(chosen.folder, chosen.out)
    else:
        with tempfile.TemporaryDirectory() as folder:
            prepare(Path(folder))
            run(Path(folder), chosen.out)


if __name__ == "__main__":
    main()
