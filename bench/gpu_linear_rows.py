"""Linear layers on low-bit weights against torch's on bfloat16 ones: rows of `make bench-gpu`."""

from __future__ import annotations

import functools

import heddle
import torch
import torch.nn.functional as functional
from gpu_rows import ROTATED_BYTES, Row, random

SHAPES = ((4096, 4096), (8192, 8192), (28672, 8192))  # N, K
FEW, MANY = (1, 8, 16, 32, 64, 128), (256, 512, 1024, 4096)
ANY_GPU = ("int4_g128", "nf4", "int8_row")  # by sm80_linear


@functools.lru_cache(maxsize=1)
def weights(n, k, format, fp8_x):
    """Packed copies that the L2 cache does not hold together, and as many of the same weights in bfloat16."""
    generator = torch.Generator(device="cuda").manual_seed(1)
    drawn = torch.randn(n, k, device="cuda", generator=generator).mul_(k**-0.5)
    quantized = heddle.lowbit.quantize(drawn.cpu(), format)
    packed = heddle.lowbit.pack(quantized, device="cuda", fp8_x=fp8_x)
    plain = quantized.dequantize(torch.bfloat16).cuda()
    copies = max(2, -(-ROTATED_BYTES // packed.nbytes))
    of_packed = [heddle.lowbit.PackedTensor(format, (n, k), False, packed.data.clone(), packed.order) for _ in range(copies)]
    return of_packed, [plain.clone() for _ in range(max(2, -(-ROTATED_BYTES // (2 * n * k))))]


def linear(n, k, m, format, fp8_x=False):
    packed, plain = weights(n, k, format, fp8_x)
    x = random(m, k)
    calls = {
        "heddle": lambda i=0: heddle.lowbit.linear(x, packed[i % len(packed)]),
        "cublas": lambda i=0: functional.linear(x, plain[i % len(plain)]),
    }
    # e4m3 rounds each element of x by up to a sixteenth.
    return Row(calls, 1, "calls/s", "graph", max(len(packed), len(plain)), tolerance=0.04 if fp8_x else 0.02)


def python_call(n, k, m):
    row = linear(n, k, m, "nvfp4")
    row.how, row.rotations = "host", 1
    return row


def rows():
    out = {}
    for n, k in SHAPES:
        for m in (*FEW, *MANY):
            out[f"linear w4a16 nvfp4 {n}x{k} M{m}"] = functools.partial(linear, n, k, m, "nvfp4")
        for format in ANY_GPU if n > 4096 else ():
            for m in (1, 8, 16, 64, 256, 4096):
                out[f"linear {format} {n}x{k} M{m}"] = functools.partial(linear, n, k, m, format)
        for m in (64, 128, *MANY):
            out[f"linear w4a8 mxfp4 {n}x{k} M{m}"] = functools.partial(linear, n, k, m, "mxfp4", True)
        for m in (64, 512, 4096) if n > 4096 else ():
            out[f"linear w4a8 nvfp4 {n}x{k} M{m}"] = functools.partial(linear, n, k, m, "nvfp4", True)
    out["linear python 4096x4096 M1"] = functools.partial(python_call, 4096, 4096, 1)
    return out
