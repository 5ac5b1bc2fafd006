"""Encoding and decoding of weights, and linear layers by cuBLASLt over them: rows of `make bench-gpu`."""

from __future__ import annotations

import functools

import heddle
import torch
import torch.nn.functional as functional
from gpu_linear_rows import SHAPES
from gpu_rows import Row, random

lowbit = heddle.lowbit


def drawn(n, k, dtype=torch.bfloat16):
    return torch.randn(n, k, device="cuda", generator=torch.Generator(device="cuda").manual_seed(1)).mul_(k**-0.5).to(dtype)


def encode(n, k, format, rule="plain", global_scale=None):
    """With the wait for what is read back."""
    weights = drawn(n, k)
    call = lambda: lowbit.quantize(weights, format, rule=rule, global_scale=global_scale).codes
    moved = weights.nbytes + lowbit.quantize(weights, format).nbytes
    return Row({"heddle": call}, moved * 1e-12, "TB/s")


def decode(n, k, format):
    quantized = lowbit.quantize(drawn(n, k), format)
    return Row({"heddle": lambda: quantized.dequantize(torch.bfloat16)}, (quantized.nbytes + 2 * n * k) * 1e-12, "TB/s")


@functools.lru_cache(maxsize=1)
def packed(n, k, format, order):
    quantized = lowbit.quantize(drawn(n, k), format)
    kept = order == "fragments16"
    return lowbit.pack(quantized, device="cuda", order=order, keep_16bit=kept), quantized.dequantize(torch.bfloat16)


def forward(n, k, m, format, order):
    weights, plain = packed(n, k, format, order)
    x, int8_x = random(m, k), format == "int8_row"
    force = "cublaslt" if format != "fp8_row" and not int8_x else "cublaslt_w8a8"
    calls = {
        "heddle": lambda: lowbit.linear(x, weights, int8_x=int8_x, force=force),
        "cublas": lambda: functional.linear(x, plain),
    }
    return Row(calls, 2e-12 * m * n * k, "TFLOP/s", "graph", tolerance=0.04 if format == "fp8_row" else 0.02)


def gradient(n, k, m, keep):
    weights, plain = packed(n, k, "nvfp4", "fragments16")
    if not keep:
        weights = lowbit.PackedTensor(weights.format, weights.shape, False, weights.data, weights.order)
    x = random(m, k).requires_grad_()
    dy = random(m, n)
    outputs = {"heddle": lowbit.linear(x, weights), "cublas": functional.linear(x, plain)}
    call = lambda name: lambda: torch.autograd.grad(outputs[name], x, dy, retain_graph=True)[0]
    return Row({name: call(name) for name in outputs}, 2e-12 * m * n * k, "TFLOP/s", "queued")


def rows():
    out = {}
    for n, k in SHAPES:
        out[f"encode nvfp4 {n}x{k}"] = functools.partial(encode, n, k, "nvfp4")
        out[f"encode nvfp4 {n}x{k} given scale"] = functools.partial(encode, n, k, "nvfp4", "plain", 1e-4)
        out[f"decode nvfp4 {n}x{k}"] = functools.partial(decode, n, k, "nvfp4")
        for m in (256, 1024, 4096):
            out[f"linear kept nvfp4 {n}x{k} M{m}"] = functools.partial(forward, n, k, m, "nvfp4", "fragments16")
            out[f"linear decoded nf4 {n}x{k} M{m}"] = functools.partial(forward, n, k, m, "nf4", "matrix")
            out[f"linear w8a8 int8 {n}x{k} M{m}"] = functools.partial(forward, n, k, m, "int8_row", "matrix")
            out[f"linear w8a8 fp8 {n}x{k} M{m}"] = functools.partial(forward, n, k, m, "fp8_row", "matrix8")
        for keep in (True, False):
            out[f"linear dx nvfp4 {n}x{k} M4096{' kept' if keep else ''}"] = functools.partial(gradient, n, k, 4096, keep)
    for format in ("mxfp4", "nf4", "fp4_bnb", "int4_g128", "int4_g128_zp", "e2m1_row", "int8_row", "fp8_row"):
        out[f"encode {format} 8192x8192"] = functools.partial(encode, 8192, 8192, format)
        out[f"decode {format} 8192x8192"] = functools.partial(decode, 8192, 8192, format)
    for format, rule in (("nvfp4", "four_six"), ("nvfp4", "mse"), ("nf4", "mse"), ("int4_g128", "mse"), ("int8_row", "mse")):
        out[f"encode {format} {rule} 8192x8192"] = functools.partial(encode, 8192, 8192, format, rule)
    return out
