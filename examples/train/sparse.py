"""Native sparse attention against dense attention in training: loss curves, tokens per second, memory.

  python examples/train/sparse.py --out train.json
  python examples/train/sparse.py --device cpu --context 512 --layers 2 --batch 1 --steps 10 --precision fp32
  python examples/train/sparse.py --attention nsa --heads 16 --kv-heads 1 --head-size 128 --context 16384 --keep trained.pt

The same seed and the same batches; 8 heads over 2 key/value heads. Models with native sparse attention have a projection
more, to the gates of its branches. Blocks, lists and window are model.SPARSE's. What --keep leaves, `make bench-gpu` can
time (bench/attention_bench_gpu.py --tensors): lists of rows that have learnt overlap, and those of random numbers do not.
"""

from __future__ import annotations

import argparse
import pathlib

import results
import torch
from data import gather
from train import PRECISIONS, Settings, train

from model import DENSE, GATED, Shape


def keep_operands(path, number):
    """Saves what the attention of layer `number` gets of the first sequence of a batch, [1, S, heads, D] and [1, S, heads]."""

    def after(trainer, inputs, targets):
        kept, block = {}, trainer.model.blocks[number]
        attention = block.attention

        def keep(*operands):
            names = ("q", "k", "v", "g_cmp", "g_slc", "g_swa")
            kept.update((name, x[:1].clone()) for name, x in zip(names, operands, strict=False))
            return attention(*operands)

        block.attention = keep
        trainer.loss(inputs, targets)
        block.attention = attention
        torch.save(kept, path)

    return after


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attention", nargs="+", choices=[*DENSE, *GATED], default=["heddle", *GATED])
    parser.add_argument("--precision", choices=PRECISIONS, default="bf16")
    for name, value in (
        ("context", 8192),
        ("batch", 2),
        ("layers", 6),
        ("heads", 8),
        ("kv-heads", 2),
        ("head-size", 64),
        ("steps", 300),
    ):
        parser.add_argument(f"--{name}", type=int, default=value, help=f"default {value}")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--keep", type=pathlib.Path, help="a file for q, k, v and gates of the last run's --layer")
    parser.add_argument("--layer", type=int, default=-1, help="default -1, the last")
    parser.add_argument("--out", type=pathlib.Path, help="a JSON file of runs, for report.py")
    given = parser.parse_args(arguments)
    corpus = gather()
    shape = Shape(given.layers, given.heads, given.head_size, given.context, given.kv_heads)
    for attention in given.attention:
        settings = Settings(attention, given.precision, False, given.device, shape, given.batch, given.steps)
        after = keep_operands(given.keep, given.layer) if given.keep and attention == given.attention[-1] else None
        run = train(settings, corpus, after=after)
        memory = "" if run["peak_mib"] is None else f", {run['peak_mib']:.0f} MiB"
        print(
            f"{run['name']:16} loss {run['losses'][0]:.4f} to {run['losses'][-1]:.4f}, "
            f"validation {run['validation_loss']:.4f}; {run['tokens_per_second']:.0f} tokens/s{memory}",
            flush=True,
        )
        if given.out:
            results.add(given.out, "sparse", [run], corpus)


if __name__ == "__main__":
    main()
