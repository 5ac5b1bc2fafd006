"""Writes docs/formats.md's table of what quantisation costs: `PYTHONPATH=build/release/python python scripts/lowbit_table.py`.

Signal to noise of 512 x 4096 weights drawn alone from three distributions, and the error of a layer's output as an early
study of FP4 layers measured it. With --check nothing is written; the exit status is 1 if the table is not current.
"""

import math

import numpy as np
from bench_results import ROOT, run
from heddle import lowbit
from marked_block import table, update

ROWS = [
    ("e2m1_row", "plain"), ("e2m1_row", "mse"),
    ("mxfp4", "floor"), ("mxfp4", "round_up"), ("mxfp4", "even"), ("mxfp4", "mse"),
    ("nvfp4", "plain"), ("nvfp4", "four_six"), ("nvfp4", "mse"),
    ("int4_g128", "plain"), ("int4_g128", "mse"), ("int4_g64", "mse"), ("int4_g32", "plain"), ("int4_g32", "mse"),
    ("int4_g128_zp", "plain"), ("int4_g128_zp", "mse"), ("int4_g64_zp", "mse"), ("int4_g32_zp", "mse"),
    ("nf4", "plain"), ("nf4", "mse"), ("nf4_b128", "mse"), ("fp4_bnb", "plain"), ("fp4_bnb", "mse"),
    ("fp8_row", "plain"), ("fp8_row", "mse"), ("int8_row", "plain"), ("int8_row", "mse"),
]  # fmt: skip


def gelu(y):
    return y * 0.5 * (1 + np.vectorize(math.erf, otypes=[np.float64])(y / math.sqrt(2)))


class Layer:
    """y = gelu(x W^T), 768 to 3072; W uniform as torch.nn.Linear begins, or normal with the same variance."""

    def __init__(self, random, normal):
        bound = 1 / math.sqrt(768)
        self.x = random.standard_normal((64, 768)).astype(np.float32)
        shape = (3072, 768)
        w = random.standard_normal(shape) * bound / math.sqrt(3) if normal else random.uniform(-bound, bound, shape)
        self.w = w.astype(np.float32)
        self.y = gelu(self.x @ self.w.T)

    def kept(self, format, rule):
        """1 - mean |dy| / mean |y|, in percent."""
        found = gelu(self.x @ lowbit.quantize(self.w, format, rule=rule).dequantize().T)
        return 100 * (1 - np.abs(found - self.y).mean() / np.abs(self.y).mean())


def written():
    random = np.random.default_rng(0)
    shape = (512, 4096)
    draws = [random.standard_normal(shape), random.standard_t(5, shape), random.uniform(-1, 1, shape)]
    draws = [w.astype(np.float32) for w in draws]
    layers = [Layer(random, normal=False), Layer(random, normal=True)]
    rows = [
        [
            "format",
            "rule",
            "bits per weight",
            "normal",
            "Student t, ν = 5",
            "uniform",
            "layer, uniform",
            "layer, normal",
        ]
    ]
    for format, rule in ROWS:
        matrices = [lowbit.quantize(w, format, rule=rule) for w in draws]
        cells = [f"{q.error(w).sqnr:.1f}" for q, w in zip(matrices, draws)]
        cells += [f"{layer.kept(format, rule):.2f}" for layer in layers]
        rows.append([f"`{format}`", rule, f"{matrices[0].bits_per_weight:.3f}", *cells])
    return table(rows)


def write(check):
    return update(ROOT / "docs/formats.md", "quality", written(), check=check)


if __name__ == "__main__":
    run(__doc__, write)
