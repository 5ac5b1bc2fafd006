"""Encoding and decoding of weights, and linear layers by cuBLASLt over them: rows of `make bench-gpu`."""

from __future__ import annotations

import functools

import heddle
import sources
import torch
import torch.nn.functional as functional
from gpu_linear_rows import E4M3_LIMIT, FORMATS, LIMIT, SHAPES, drawn, served
from gpu_reference import Expected
from gpu_rows import Row, random

lowbit = heddle.lowbit
SAMPLED = 64  # rows of weights that the CPU encodes or decodes too


def encode(n, k, format, rule="plain", global_scale=None):
    """As a Python program feels it: a call waits for what it reads back, so that the GPU cannot be kept busy."""
    weights = drawn(n, k, torch.bfloat16)
    found = lowbit.quantize(weights, format, rule=rule, global_scale=global_scale)
    call = lambda: lowbit.quantize(weights, format, rule=rule, global_scale=global_scale).codes

    def reference():
        # The CPU's codes, to the bit.
        shared = None if found.global_scale is None else found.global_scale.item()
        expected = lowbit.quantize(weights[:SAMPLED].cpu(), format, rule=rule, global_scale=shared).codes
        return Expected(lambda codes: codes[:SAMPLED].cpu().view(torch.uint8), expected.view(torch.uint8))

    work = (weights.nbytes + found.nbytes) * 1e-12
    return Row({"heddle": call}, work, "TB/s", "host", limit=0.0, reference=reference, kernel="encode",
               sources=(*sources.LOWBIT_GPU, *sources.PYTHON))  # fmt: skip


def rows_of(matrix, count):
    """The first rows of a quantised matrix, on the CPU."""
    cut = lambda x: None if x is None else x[:count].cpu()
    shared = None if matrix.global_scale is None else matrix.global_scale.cpu()
    return lowbit.QuantizedTensor(
        matrix.format, (count, matrix.shape[1]), cut(matrix.codes), cut(matrix.scales), cut(matrix.zeros), shared
    )


def decode(n, k, format):
    quantized = lowbit.quantize(drawn(n, k, torch.bfloat16), format)
    reference = lambda: Expected(lambda w: w[:SAMPLED].cpu(), rows_of(quantized, SAMPLED).dequantize(torch.bfloat16))
    work = (quantized.nbytes + 2 * n * k) * 1e-12
    how = "graph" if n * k <= 8192 * 8192 else "queued"  # under 100 us or not
    return Row({"heddle": lambda: quantized.dequantize(torch.bfloat16)}, work, "TB/s", how, limit=0.0, reference=reference,
               kernel="decode", sources=sources.LOWBIT_GPU)  # fmt: skip


@functools.lru_cache(maxsize=1)
def packed(n, k, format, order):
    quantized = lowbit.quantize(drawn(n, k, torch.bfloat16), format)
    kept = order == "fragments16"
    return lowbit.pack(quantized, device="cuda", order=order, keep_16bit=kept), quantized.dequantize(torch.bfloat16)


def forward(n, k, m, format, order):
    """By cuBLASLt: of weights kept in 16 bits, decoded in front, or with x rounded to 8 bits (W8A8)."""
    weights, plain = packed(n, k, format, order)
    x, int8_x = random(m, k), format == "int8_row"
    mine = {"int8_x": int8_x, "force": "cublaslt" if format != "fp8_row" and not int8_x else "cublaslt_w8a8"}
    calls = {
        "heddle": lambda: lowbit.linear(x, weights, **mine),
        "cublas": lambda: functional.linear(x, plain),
    }
    limit = E4M3_LIMIT if format == "fp8_row" else LIMIT
    # Graphs hold the host's part apart from calls of microseconds; those of milliseconds need none.
    how = "graph" if m < 4096 else "queued"
    return Row(calls, 2e-12 * m * n * k, "TFLOP/s", how, limit=limit, **served(x, weights, **mine))


def gradient(n, k, m, keep):
    weights, plain = packed(n, k, "nvfp4", "fragments16")
    if not keep:
        weights = lowbit.PackedTensor(weights.format, weights.shape, False, weights.data, weights.order)
    x = random(m, k).requires_grad_()
    dy = random(m, n)
    outputs = {"heddle": lowbit.linear(x, weights), "cublas": functional.linear(x, plain)}
    call = lambda name: lambda: torch.autograd.grad(outputs[name], x, dy, retain_graph=True)[0]
    return Row(
        {name: call(name) for name in outputs},
        2e-12 * m * n * k,
        "TFLOP/s",
        kernel="cublaslt",
        sources=sources.linear("cublaslt"),
    )


def rows():
    out = {}
    for n, k in SHAPES:
        out[f"encode nvfp4 {n}x{k}"] = functools.partial(encode, n, k, "nvfp4")
        out[f"encode nvfp4 {n}x{k} given scale"] = functools.partial(encode, n, k, "nvfp4", "plain", 1e-4)
        out[f"decode nvfp4 {n}x{k}"] = functools.partial(decode, n, k, "nvfp4")
        for m in (64, 256, 1024, 4096):
            out[f"linear kept nvfp4 {n}x{k} M{m}"] = functools.partial(forward, n, k, m, "nvfp4", "fragments16")
            out[f"linear decoded nf4 {n}x{k} M{m}"] = functools.partial(forward, n, k, m, "nf4", "matrix")
            out[f"linear w8a8 int8 {n}x{k} M{m}"] = functools.partial(forward, n, k, m, "int8_row", "matrix")
            out[f"linear w8a8 fp8 {n}x{k} M{m}"] = functools.partial(forward, n, k, m, "fp8_row", "matrix8")
        for keep in (True, False):
            out[f"linear dx nvfp4 {n}x{k} M4096{' kept' if keep else ''}"] = functools.partial(
                gradient, n, k, 4096, keep
            )
    for format in FORMATS[1:]:
        out[f"encode {format} 8192x8192"] = functools.partial(encode, 8192, 8192, format)
        out[f"decode {format} 8192x8192"] = functools.partial(decode, 8192, 8192, format)
    for format, rule in (
        ("nvfp4", "four_six"),
        ("nvfp4", "mse"),
        ("nf4", "mse"),
        ("int4_g128", "mse"),
        ("int8_row", "mse"),
    ):
        out[f"encode {format} {rule} 8192x8192"] = functools.partial(encode, 8192, 8192, format, rule)
    return out
