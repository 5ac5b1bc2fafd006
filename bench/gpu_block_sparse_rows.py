"""What `make bench-gpu` times of attention over lists that whole tiles of rows share (docs/sparse.md): forward and backward at
several shares of kept blocks, beside dense attention and others' kernels over the same blocks.

Rates are of the kept blocks' work, for all: dense attention computes more, so its rate says how many times as fast the lists
make it. Of the outputs, sampled rows and the gradients of some keys are compared with attention over the kept keys in float64.
"""

from __future__ import annotations

import functools

import gpu_peers as peers
import heddle
import sources
import torch
from gpu_backward_rows import WORK, gradients, weight_of
from gpu_branches import Dense, Tiles
from gpu_nsa_reference import of_branch, sampled_keys
from gpu_rows import Row, operands

HEADS, ROWS = 16, 128  # ROWS share a list
KEPT = (10, 20, 50, 100)  # percent
LENGTHS = (16384, 65536)
# Of a sampled row's norm, in bf16: P, dS and results are each rounded.
LIMIT, GRADIENT_LIMIT = 0.01, 0.02


def drawn(length, heads, block, kept):
    """Lists [1, N, heads, n], ascending, each of so many blocks drawn at random."""
    lists, blocks = length // ROWS, length // block
    n = max(1, round(blocks * kept / 100))
    scores = torch.rand(1, lists, heads, blocks, device="cuda", generator=torch.Generator("cuda").manual_seed(5))
    return scores.topk(n, dim=-1).indices.sort(dim=-1).values.int()


def mine(x, lists, block, **options):
    return heddle.sparse_attention(*x, lists, block_size=block, query_rows=ROWS, **options)


def others(x, lists, block):
    """contender -> a call over the same blocks."""
    return peers.flashinfer_blocks(*x, lists, ROWS, block) | peers.mit_blocks(*x, lists, ROWS, block)


def expected(x, lists, block, backward):
    """Of o, or of dq, dk and dv, over these lists, or over all keys."""
    q, k, v = (y.detach() for y in x)
    if lists is None:
        make = lambda b, h: Dense(k[b, :, h], v[b, :, h], causal=False)  # noqa: E731
    else:
        make = lambda b, h: Tiles(k[b, :, h], v[b, :, h], lists[b, :, h], block, ROWS)  # noqa: E731
    weight = weight_of(q.shape, q.dtype) if backward else None
    return of_branch(q, k, v, make, weight, sampled_keys(k.shape[1], block, k.device))


def blocks(length, size, block, kept, backward=False):
    x = operands(1, length, HEADS, HEADS, size)
    if backward:
        x = [y.requires_grad_() for y in x]
    lists = drawn(length, HEADS, block, kept)
    calls = {
        "heddle": lambda: mine(x, lists, block),
        "dense": lambda: heddle.attention(*x),
        **others(x, lists, block),
        **peers.fa3_dense(*x),
    }
    absent = {}
    if backward:
        timed = {}
        for name, call in calls.items():
            try:
                timed[name] = gradients(call, x)
            except Exception as error:  # others may have no gradients
                if name in ("heddle", "dense"):
                    raise
                absent[name] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        calls = timed
    found = heddle.explain_sparse_attention(*x, lists, block_size=block, query_rows=ROWS, backward=backward).chosen
    pairs = lists.numel() * ROWS * block

    def reference():
        over_lists, over_all = (expected(x, named, block, backward) for named in (lists, None))
        return {name: over_all if name in ("dense", "fa3") else over_lists for name in calls}

    return Row(
        calls,
        work=4e-12 * size * pairs * (WORK if backward else 1),
        reference=reference,
        limit=GRADIENT_LIMIT if backward else LIMIT,
        kernel=found.name,
        sources=sources.BLOCK_SPARSE_GPU,
        absent=absent,
    )


def rows():
    """name -> maker of a Row."""
    out = {}
    for name, backward in (("", False), (" gradients", True)):
        for size, block in ((128, 128), (128, 64), (64, 128)):
            for length in LENGTHS:
                if size == 64 and length != LENGTHS[0]:
                    continue
                for kept in KEPT:
                    row = functools.partial(blocks, length, size, block, kept, backward)
                    out[f"block sparse{name} D{size} blocks of {block}, {kept} % S{length}"] = row
    return out
