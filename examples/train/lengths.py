"""Tokens per second and memory of training steps over the length of the text, in fp32 and in mixed precision.

  python examples/train/lengths.py --out train.json
  python examples/train/lengths.py --device cpu --lengths 128 256 --tokens 512 --layers 2 --steps 4

Each step has the same number of tokens, in fewer and longer pieces.
"""

from __future__ import annotations

import argparse
import pathlib

import results
import torch
from data import gather
from train import PRECISIONS, Settings, train

from model import Shape


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 256, 512, 1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--attention", nargs="+", default=["heddle", "torch"])
    parser.add_argument("--tokens", type=int, default=16384, help="of a step (default 16384)")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20, help="of each run, half of them timed (default 20)")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=pathlib.Path, help="a JSON file of runs, for report.py")
    given = parser.parse_args(arguments)
    corpus = gather()
    for length in given.lengths:
        for precision in PRECISIONS:
            for attention in given.attention:
                shape = Shape(given.layers, given.heads, context=length)
                run = train(
                    Settings(attention, precision, False, given.device, shape, given.tokens // length, given.steps),
                    corpus,
                )
                run["name"] += f" S{length}"
                memory = "" if run["peak_mib"] is None else f", {run['peak_mib']:.0f} MiB"
                print(f"{run['name']:22} {run['tokens_per_second']:.0f} tokens/s{memory}", flush=True)
                if given.out:
                    results.add(given.out, "lengths", [run], corpus)


if __name__ == "__main__":
    main()
