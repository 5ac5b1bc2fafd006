"""Linear layers on low-bit weights against torch's on bfloat16 ones and on 4 bits: rows of `make bench-gpu`."""

from __future__ import annotations

import functools

import gpu_peers as peers
import heddle
import sources
import torch
import torch.nn.functional as functional
from gpu_decode_rows import copies
from gpu_rows import Row, random

SHAPES = ((4096, 4096), (8192, 8192), (28672, 8192))  # N, K
ROWS_OF_X = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)
FORMATS = ("nvfp4", "mxfp4", "e2m1_row", "int4_g128", "int4_g128_zp", "nf4", "fp4_bnb", "int8_row", "fp8_row")
E4M3_X = ("mxfp4", "nvfp4", "e2m1_row")
LIMIT, E4M3_LIMIT = 0.02, 0.04  # e4m3 rounds each element of x by up to a sixteenth


def drawn(n, k, dtype=torch.float32):
    return (
        torch.randn(n, k, device="cuda", generator=torch.Generator(device="cuda").manual_seed(1))
        .mul_(k**-0.5)
        .to(dtype)
    )


def served(x, weights, also=(), **options):
    """What a Row says of the candidate that a call of heddle.lowbit.linear gets."""
    name = options.get("force") or next(one.name for one in heddle.lowbit.explain(x, weights, **options) if one.chosen)
    return {"kernel": name, "sources": (*sources.linear(name), *also)}


@functools.lru_cache(maxsize=1)
def weights(n, k, format, fp8_x):
    """Packed copies that the L2 cache does not hold together, as many of the same weights in bfloat16, and the rivals' 4 bits."""
    quantized = heddle.lowbit.quantize(drawn(n, k, torch.bfloat16), format)  # as the rivals get them
    packed = heddle.lowbit.pack(quantized, device="cuda", fp8_x=fp8_x)
    plain = quantized.dequantize(torch.bfloat16)
    turns = max(2, copies(packed.nbytes))
    of_packed = [
        heddle.lowbit.PackedTensor(format, (n, k), False, packed.data.clone(), packed.order) for _ in range(turns)
    ]
    rivals = {}
    if format in ("int4_g128", "int4_g128_zp"):
        rivals["int4pack"] = peers.int4pack(quantized, turns)
    kind = {"nf4": "nf4", "fp4_bnb": "fp4"}.get(format)
    if kind and (call := peers.bitsandbytes(drawn(n, k, torch.bfloat16), kind, turns)):
        rivals["bitsandbytes"] = call
    return of_packed, [plain.clone() for _ in range(max(2, copies(2 * n * k)))], rivals


def linear(n, k, m, format, fp8_x=False):
    packed, plain, rivals = weights(n, k, format, fp8_x)
    x = random(m, k)
    calls = {
        "heddle": lambda i=0: heddle.lowbit.linear(x, packed[i % len(packed)]),
        "cublas": lambda i=0: functional.linear(x, plain[i % len(plain)]),
        **{name: lambda i=0, call=call: call(x, i) for name, call in rivals.items()},
    }
    turns = max(len(packed), len(plain))
    return Row(calls, 1, "calls/s", "graph", turns, E4M3_LIMIT if fp8_x else LIMIT, **served(x, packed[0]))


def python_call(n, k, m):
    """What a Python user waits for a layer of few rows, launch included: there the host is the bound."""
    row = linear(n, k, m, "nvfp4")
    row.how, row.rotations, row.sources = "host", 1, (*row.sources, *sources.PYTHON)
    return row


def rows():
    out = {}
    for n, k in SHAPES:
        for format in FORMATS:
            name = "w4a16 nvfp4" if format == "nvfp4" else format
            out |= {f"linear {name} {n}x{k} M{m}": functools.partial(linear, n, k, m, format) for m in ROWS_OF_X}
        for format in E4M3_X:
            out |= {
                f"linear w4a8 {format} {n}x{k} M{m}": functools.partial(linear, n, k, m, format, True)
                for m in ROWS_OF_X
            }
    out["linear python 4096x4096 M1"] = functools.partial(python_call, 4096, 4096, 1)
    return out
