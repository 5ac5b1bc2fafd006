"""What `make bench-gpu` times of decoding: few queries a sequence over caches that lie outside of the L2 cache, in CUDA graphs."""

from __future__ import annotations

import functools

import gpu_peers as peers
import heddle
import sources
import torch
from gpu_reference import Attention, sampled
from gpu_rows import INT4_LIMIT, LIMIT, Row, chosen, operands, random, served

ROTATED_BYTES = 256 << 20  # of inputs, several times the L2 cache


def copies(each: int) -> int:
    """So many inputs that what a call reads was not read for ROTATED_BYTES."""
    return max(1, -(-ROTATED_BYTES // each))


def queries_and_caches(batch, heads, kv_heads, length, size, cache, rows):
    """Some inputs that take turns, and the bytes of keys and values that a call reads."""
    each = 2 * batch * kv_heads * length * size * torch.empty((), dtype=cache).element_size()
    made = []
    for _ in range(copies(each)):
        _, k, v = operands(batch, length, 1, kv_heads, size, cache)
        made.append((random(batch, rows, heads, size), k, v))
    return made, each


def decode(batch, heads, kv_heads, length, cache=torch.bfloat16, rows=1, force=None, size=128, scales=None):
    """scales: None, or "key": one for each key and kv head, those of a head side by side."""
    inputs, each = queries_and_caches(batch, heads, kv_heads, length, size, cache, rows)
    scaled = {}
    if scales == "key":
        scaled = {
            n: torch.rand(batch, kv_heads, length, device="cuda").add_(0.5).transpose(1, 2)
            for n in ("k_scale", "v_scale")
        }
    mine = {"causal": "bottom_right", "force": force, **scaled}
    calls = {"heddle": lambda n=0: heddle.attention(*inputs[n % len(inputs)], **mine)}
    if cache == torch.bfloat16:
        calls |= peers.fa3_cached(inputs, torch.full((batch,), length, dtype=torch.int32, device="cuda"))
    if cache == torch.bfloat16 and rows == 1:
        for name in ("cudnn", "fa2"):
            each_input = [peers.sdpa(*x, name, enable_gqa=True) for x in inputs]
            calls[name] = peers.Chosen(name, lambda n=0, turns=each_input: turns[n % len(turns)]())
    reference = lambda: sampled(Attention(*inputs[0], causal=True, **scaled))  # noqa: E731
    about = served(chosen(*inputs[0], **mine))
    return Row(calls, 1e-12 * each, "TB/s", "graph", len(inputs), LIMIT, reference, **about)


def paged(batch, heads, kv_heads, length, page, size=128):
    inputs, each = queries_and_caches(batch, heads, kv_heads, length, size, torch.bfloat16, 1)
    order = torch.randperm(batch * length // page, device="cuda", dtype=torch.int32).reshape(batch, -1)
    in_pages = [(q, *(x.reshape(-1, page, kv_heads, size) for x in caches)) for q, *caches in inputs]
    mine = {"causal": "bottom_right", "page_table": order}
    calls = {"heddle": lambda n=0: heddle.attention(*in_pages[n % len(in_pages)], **mine)}
    calls |= peers.fa3_cached(in_pages, torch.full((batch,), length, dtype=torch.int32, device="cuda"), order)

    def reference():
        q, k, v = in_pages[0]
        return sampled(
            Attention(q, *(x[order.long()].reshape(batch, length, kv_heads, size) for x in (k, v)), causal=True)
        )

    return Row(
        calls, 1e-12 * each, "TB/s", "graph", len(inputs), LIMIT, reference, **served(chosen(*in_pages[0], **mine))
    )


def decode_int4(batch, heads, kv_heads, length, size=128):
    """Caches in 4 bits; the reference reads what was put into them, so that the difference is quantisation's too."""
    blocks = heddle.Int4Cache.blocks_of(length)
    each = batch * kv_heads * (blocks * heddle.Int4Cache.block_bytes(size) + (length - 64 * blocks) * 4 * size)
    caches, first = [], None
    for _ in range(copies(each)):
        cache = heddle.Int4Cache.empty(batch, length, kv_heads, size, device="cuda")
        k, v = operands(batch, length, 1, kv_heads, size)[1:]
        cache.append(k, v, torch.zeros(batch, dtype=torch.int32, device="cuda"))
        caches.append((random(batch, 1, heads, size), cache))
        first = first or (caches[0][0], k, v)
    seqlens = torch.full((batch,), length, dtype=torch.int32, device="cuda")

    def mine(n=0):
        q, cache = caches[n % len(caches)]
        return cache.attention(q, seqlens)

    reference = lambda: sampled(Attention(*first, causal=True))  # noqa: E731
    about = served("sm80_decode", also=sources.INT4_CACHE)
    return Row({"heddle": mine}, 1e-12 * each, "TB/s", "graph", len(caches), INT4_LIMIT, reference, **about)


def rows():
    """name -> maker of a Row."""
    out = {}
    one = [(1, 32, 8, n) for n in (1024, 4096, 8192, 32768)]
    for shape in (*one, (16, 32, 8, 8192), (64, 32, 8, 8192), (128, 64, 8, 4096), (8, 64, 8, 32768)):
        batch, heads, kv_heads, length = shape
        out[f"decode B{batch} {heads}/{kv_heads} {length}"] = functools.partial(decode, *shape)
    for page in (1, 16, 64, 256):
        out[f"decode B64 32/8 8192, pages of {page}"] = functools.partial(paged, 64, 32, 8, 8192, page)
    for shape in ((16, 32, 8, 32768), (64, 64, 8, 8192), (32, 32, 32, 4096)):
        batch, heads, kv_heads, length = shape
        out[f"decode B{batch} {heads}/{kv_heads} {length}, pages of 64"] = functools.partial(paged, *shape, 64)
    plain = functools.partial(decode, 64, 32, 8, 8192)
    e4m3 = functools.partial(plain, cache=torch.float8_e4m3fn)
    out["decode B64 32/8 8192, e4m3"] = e4m3
    out["decode B64 32/8 8192, e4m3 scaled by key"] = functools.partial(e4m3, scales="key")
    out["decode B64 32/8 8192, 4 bits"] = functools.partial(decode_int4, 64, 32, 8, 8192)
    for queries in (4, 16):
        out[f"decode B64 32/8 8192, {queries} rows"] = functools.partial(plain, rows=queries)
    for heads, queries in ((32, 8), (32, 16), (64, 16)):  # 32, 64 and 128 rows of a kv head, whatever the estimate says
        out[f"sm90 decode B64 {heads}/8 8192, {queries} rows"] = functools.partial(
            decode, 64, heads, 8, 8192, rows=queries, force="sm90_decode"
        )
    for batch in (1, 64):
        out[f"sm80 decode B{batch} 32/8 8192"] = functools.partial(decode, batch, 32, 8, 8192, force="sm80_decode")
    return out
