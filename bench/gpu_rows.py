"""What `make bench-gpu` times: for each row the contenders' calls, the work of one call, and how it is timed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import heddle
import torch
import torch.nn.functional as functional
from torch.nn.attention import SDPBackend, sdpa_kernel

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
ROTATED_BYTES = 256 << 20  # of inputs, several times the L2 cache


@dataclasses.dataclass
class Row:
    calls: dict[str, Callable]
    work: float  # of one call, in units
    unit: str = "TFLOP/s"  # "TFLOP/s", "TB/s" (of keys and values read), "calls/s" or "MiB"
    # "events": one call between two events; "queued": the same while the host is ahead; "graph": many in a CUDA graph;
    # "host": as Python sees it; "memory": not timed, the most that a call had of torch's memory
    how: str = "events"
    rotations: int = 1  # distinct inputs that calls(n) takes in turn, for graphs
    tolerance: float = 0.02  # of a contender's output from Heddle's, relative


def random(*shape, dtype=torch.bfloat16):
    x = torch.randn(*shape, device="cuda", dtype=torch.float32 if dtype == torch.float32 else torch.bfloat16)
    return x.to(dtype)


def sdpa(q, k, v, backend, **options):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))

    def call():
        with sdpa_kernel(backend):
            return functional.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2)

    return call


def batched(batch, length, heads, kv_heads, size, causal, force=None):
    """Rows that all contenders have: equal lengths, with or without causality."""
    q, k, v = random(batch, length, heads, size), random(batch, length, kv_heads, size), random(batch, length, kv_heads, size)
    options = {"is_causal": causal, "enable_gqa": heads != kv_heads}
    calls = {
        "heddle": lambda: heddle.attention(q, k, v, causal="bottom_right" if causal else "none", force=force),
        "cudnn": sdpa(q, k, v, SDPBackend.CUDNN_ATTENTION, **options),
        "fa2": sdpa(q, k, v, SDPBackend.FLASH_ATTENTION, **options),
    }
    if force is not None:
        del calls["cudnn"]
    return Row(calls, 4e-12 * batch * heads * length * length * size / (2 if causal else 1))


def windowed(length, heads, size, window):
    q, k, v = random(1, length, heads, size), random(1, length, heads, size), random(1, length, heads, size)
    lengths = torch.tensor([0, length], dtype=torch.int32, device="cuda")
    packed = [x[0] for x in (q, k, v)]
    calls = {
        "heddle": lambda: heddle.attention(q, k, v, causal="bottom_right", window=(window - 1, -1)),
        "fa2": lambda: torch.ops.aten._flash_attention_forward(
            *packed, lengths, lengths, length, length, 0.0, True, False, window_size_left=window - 1, window_size_right=0
        )[0][None],
    }
    return Row(calls, 4e-12 * heads * size * (window * length - window * (window - 1) / 2))


def spread_lengths(total):
    """Lengths from 128 to 8192 tokens, spread evenly on a log scale, and the starts of such documents when packed."""
    generator = torch.Generator().manual_seed(0)
    lengths = []
    while sum(lengths) < total:
        lengths.append(min(int(2 ** (7 + 6 * torch.rand(1, generator=generator).item())), total - sum(lengths)))
    return lengths, torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device="cuda")


def documents(total, heads, size, causal):
    lengths, starts = spread_lengths(total)
    longest = max(lengths)
    q, k, v = random(total, heads, size), random(total, heads, size), random(total, heads, size)
    calls = {
        "heddle": lambda: heddle.attention(
            q, k, v, causal="bottom_right" if causal else "none", cu_seqlens_q=starts, cu_seqlens_k=starts,
            max_seqlen_q=longest, max_seqlen_k=longest
        ),
        "fa2": lambda: torch.ops.aten._flash_attention_forward(
            q, k, v, starts, starts, longest, longest, 0.0, causal, False
        )[0],
    }
    return Row(calls, 4e-12 * heads * size * sum(n * n for n in lengths) / (2 if causal else 1))


OPTIONS = ("softcap", "alibi", "bias", "shared_bias", "key_bias", "mask", "key_mask", "padding", "shared_bias_key_mask", "sink")


def option(name, size, length=8192, batch=2):
    """Score options, which no contender in torch has: only Heddle's own rate."""
    heads = 2048 // size
    q, k, v = (random(batch, length, heads, size) for _ in range(3))
    open_keys = torch.arange(length, device="cuda") < length - 700
    options = {
        "softcap": lambda: {"softcap": 30.0},
        "alibi": lambda: {"alibi_slopes": torch.rand(heads, device="cuda")},
        "bias": lambda: {"bias": random(1, heads, length, length)},
        "shared_bias": lambda: {"bias": random(1, 1, length, length)},
        "key_bias": lambda: {"bias": random(batch, 1, 1, length)},
        "mask": lambda: {"mask": torch.rand(1, heads, length, length, device="cuda") < 0.9},
        "key_mask": lambda: {"mask": torch.rand(batch, 1, 1, length, device="cuda") < 0.9},
        "padding": lambda: {"mask": open_keys.expand(batch, 1, 1, length)},
        "shared_bias_key_mask": lambda: {
            "bias": random(1, 1, length, length), "mask": torch.rand(batch, 1, 1, length, device="cuda") < 0.9
        },
        "sink": lambda: {"sink": torch.randn(heads, device="cuda")},
    }
    chosen = options[name]()
    return Row({"heddle": lambda: heddle.attention(q, k, v, **chosen)}, 4e-12 * batch * heads * length * length * size)


def narrow(batch, length, heads, size, causal, scaling):
    """e4m3 operands: no contender in torch has them."""
    q, k, v = (random(batch, length, heads, size, dtype=torch.float8_e4m3fn) for _ in range(3))
    shape = {"none": None, "heads": (batch, 1, heads), "tokens": (batch, length, heads)}[scaling]
    scales = {} if shape is None else {n: torch.rand(shape, device="cuda") + 0.5 for n in ("q_scale", "k_scale", "v_scale")}
    call = lambda: heddle.attention(q, k, v, causal="bottom_right" if causal else "none", **scales)
    return Row({"heddle": call}, 4e-12 * batch * heads * length * length * size / (2 if causal else 1))


def single(length, precision, batch=2, heads=16, size=128):
    """float32: torch's memory-efficient kernel, which multiplies in tf32 where torch is allowed to."""
    q, k, v = (random(batch, length, heads, size, dtype=torch.float32) for _ in range(3))

    def efficient():
        torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
        out = peer()
        torch.backends.cuda.matmul.allow_tf32 = False
        return out

    peer = sdpa(q, k, v, SDPBackend.EFFICIENT_ATTENTION)
    calls = {"heddle": lambda: heddle.attention(q, k, v, precision=precision), "efficient": efficient}
    return Row(calls, 4e-12 * batch * heads * length * length * size)


def unfused(length, batch=1, heads=8, size=64):
    """What fusing gains: torch's math kernel writes the scores."""
    q, k, v = (random(batch, length, heads, size) for _ in range(3))
    calls = {"heddle": lambda: heddle.attention(q, k, v), "math": sdpa(q, k, v, SDPBackend.MATH)}
    calls["baseline"] = lambda: heddle.attention(q, k, v, method="baseline")
    return Row(calls, 1, "calls/s", "graph")


def half(length, batch=1, heads=8, size=64):
    """What 16 bits gain over float32."""
    q, k, v = (random(batch, length, heads, size) for _ in range(3))
    wide = [x.float() for x in (q, k, v)]
    calls = {
        "heddle": lambda: heddle.attention(q, k, v),
        "f32": lambda: heddle.attention(*wide),
        "tf32": lambda: heddle.attention(*wide, precision="tf32"),
    }
    return Row(calls, 1, "calls/s", "graph")


def python_call(length):
    """What a Python user waits for a short call, launch included."""
    q, k, v = (random(1, length, 4, 64) for _ in range(3))
    calls = {"heddle": lambda: heddle.attention(q, k, v)}
    for name, backend in (("cudnn", SDPBackend.CUDNN_ATTENTION), ("fa2", SDPBackend.FLASH_ATTENTION)):
        calls[name] = sdpa(q, k, v, backend)
    return Row(calls, 1, "calls/s", "host")


def decode(batch, heads, kv_heads, length, page=None, cache=torch.bfloat16, rows=1, force=None, size=128, scales=None):
    """`rows` queries a sequence over a cache that lies outside the L2 cache. scales: None, or "key": one for each key and
    kv head, those of a head side by side."""
    width = torch.empty((), dtype=cache).element_size()
    each = 2 * batch * kv_heads * length * size * width
    rotations = max(1, -(-ROTATED_BYTES // each))
    inputs = []
    for _ in range(rotations):
        k, v = (random(batch, length, kv_heads, size, dtype=cache) for _ in range(2))
        inputs.append((random(batch, rows, heads, size), k, v))
    options = {"causal": "bottom_right", "force": force}
    if scales == "key":
        for name in ("k_scale", "v_scale"):
            options[name] = torch.rand(batch, kv_heads, length, device="cuda").add_(0.5).transpose(1, 2)
    if page is not None:
        order = torch.randperm(batch * length // page, device="cuda", dtype=torch.int32).reshape(batch, -1)
        options["page_table"] = order

    def mine(n=0):
        q, k, v = inputs[n % rotations]
        if page is not None:
            k, v = (x.reshape(-1, page, kv_heads, size) for x in (k, v))
        return heddle.attention(q, k, v, **options)

    calls = {"heddle": mine}
    if page is None and cache == torch.bfloat16 and rows == 1:
        for name, backend in (("cudnn", SDPBackend.CUDNN_ATTENTION), ("fa2", SDPBackend.FLASH_ATTENTION)):
            peers = [sdpa(*x, backend, enable_gqa=True) for x in inputs]
            calls[name] = lambda n=0, peers=peers: peers[n % rotations]()
    return Row(calls, 1e-12 * each, "TB/s", "graph", rotations)


def decode_int4(batch, heads, kv_heads, length, size=128):
    """A query a sequence over caches in 4 bits, which lie outside the L2 cache."""
    caches, read = [], 0
    while read <= ROTATED_BYTES:
        cache = heddle.Int4Cache.empty(batch, length, kv_heads, size, device="cuda")
        seqlens = torch.zeros(batch, dtype=torch.int32, device="cuda")
        cache.append(*(random(batch, length, kv_heads, size) for _ in "kv"), seqlens)
        caches.append((random(batch, 1, heads, size), cache))
        each = batch * kv_heads * (64 * cache.blocks_of(length) * size * 1.125 + (length - 64 * cache.blocks_of(length)) * 4 * size)
        read += each
    seqlens = torch.full((batch,), length, dtype=torch.int32, device="cuda")

    def mine(n=0):
        q, cache = caches[n % len(caches)]
        return cache.attention(q, seqlens)

    return Row({"heddle": mine}, 1e-12 * each, "TB/s", "graph", len(caches))


def rows():
    """name -> maker of (contenders, FLOP)."""
    out = {}
    for size in (64, 128, 256):
        for causal in (False, True):
            for length in LENGTHS:
                name = f"forward D{size} {'causal' if causal else 'none'} S{length}"
                batch, heads = 16384 // length, 2048 // size
                out[name] = lambda b=batch, n=length, h=heads, d=size, c=causal: batched(b, n, h, h, d, c)
    for length in LENGTHS[3:]:
        out[f"gqa 64/8 D128 causal S{length}"] = lambda n=length: batched(1, n, 64, 8, 128, True)
    out["window 1024 D128 causal S16384"] = lambda: windowed(16384, 16, 128, 1024)
    for causal in (False, True):
        out[f"documents D128 {'causal' if causal else 'none'}"] = lambda c=causal: documents(32768, 16, 128, c)
    for size in (64, 128, 256):
        for name in OPTIONS:
            out[f"option {name} D{size} S8192"] = lambda n=name, d=size: option(n, d)
    for size in (64, 128, 256):
        for causal in (False, True):
            for length in (512, 2048, 8192):
                name = f"sm80 D{size} {'causal' if causal else 'none'} S{length}"
                batch, heads = 16384 // length, 2048 // size
                out[name] = lambda b=batch, n=length, h=heads, d=size, c=causal: batched(b, n, h, h, d, c, "sm80")
    for size in (64, 128):
        for causal in (False, True):
            for length in LENGTHS[2:]:
                name = f"fp8 D{size} {'causal' if causal else 'none'} S{length}"
                batch, heads = 16384 // length, 2048 // size
                out[name] = lambda b=batch, n=length, h=heads, d=size, c=causal: narrow(b, n, h, d, c, "none")
    for scaling in ("heads", "tokens"):
        out[f"fp8 D128 none S8192, scales by {scaling}"] = lambda s=scaling: narrow(2, 8192, 16, 128, False, s)
    for precision in ("f32", "tf32"):
        out[f"float32 {precision} D128 S4096"] = lambda p=precision: single(4096, p)
    for length in (1024, 4096, 8192, 32768):
        out[f"decode B1 32/8 {length}"] = lambda n=length: decode(1, 32, 8, n)
    for batch, heads, kv_heads, length in ((16, 32, 8, 8192), (64, 32, 8, 8192), (128, 64, 8, 4096)):
        out[f"decode B{batch} {heads}/{kv_heads} {length}"] = lambda x=(batch, heads, kv_heads, length): decode(*x)
    for page in (1, 16, 64, 256):
        out[f"decode B64 32/8 8192, pages of {page}"] = lambda p=page: decode(64, 32, 8, 8192, p)
    out["decode B64 32/8 8192, e4m3"] = lambda: decode(64, 32, 8, 8192, cache=torch.float8_e4m3fn)
    out["decode B64 32/8 8192, e4m3 scaled by key"] = lambda: decode(
        64, 32, 8, 8192, cache=torch.float8_e4m3fn, scales="key")
    out["decode B64 32/8 8192, 4 bits"] = lambda: decode_int4(64, 32, 8, 8192)
    out["decode B64 32/8 8192, 4 rows"] = lambda: decode(64, 32, 8, 8192, rows=4)
    out["decode B64 32/8 8192, 16 rows"] = lambda: decode(64, 32, 8, 8192, rows=16)
    for heads, queries in ((32, 8), (32, 16), (64, 16)):  # 32, 64 and 128 rows of a kv head, whatever the estimate says
        out[f"sm90 decode B64 {heads}/8 8192, {queries} rows"] = lambda h=heads, n=queries: decode(
            64, h, 8, 8192, rows=n, force="sm90_decode")
    for batch in (1, 64):
        out[f"sm80 decode B{batch} 32/8 8192"] = lambda b=batch: decode(b, 32, 8, 8192, force="sm80_decode")
    for length in (128, 256, 512, 1024, 2048, 4096):
        out[f"unfused S{length}"] = lambda n=length: unfused(n)
        out[f"half S{length}"] = lambda n=length: half(n)
    for length in (128, 256, 512, 1024):
        out[f"python call S{length}"] = lambda n=length: python_call(n)
    return out
