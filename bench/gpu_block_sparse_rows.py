"""What `make bench-gpu` times of attention over lists that whole tiles of rows share (docs/sparse.md): forward and backward at
several shares of kept blocks, beside dense attention and others' kernels over the same blocks.

Rates are of the kept blocks' work, for all: dense attention computes more, so its rate says how many times as fast the lists
make it. Outputs are compared, on fewer rows, with attention under a mask in float64.
"""

from __future__ import annotations

import functools

import gpu_peers as peers
import heddle
import sources
import torch
from gpu_backward_rows import WORK, gradients
from gpu_reference import distance
from gpu_rows import LIMIT, Row, operands

HEADS, ROWS = 16, 128  # ROWS share a list
KEPT = (10, 20, 50, 100)  # percent
LENGTHS = (16384, 65536)
CHECKED = 2048  # rows and keys of what is compared
GRADIENT_LIMIT = 0.03  # of norms, in bf16: P, dS and results are each rounded


def drawn(length, heads, block, kept):
    """Lists [1, N, heads, n], ascending, each of so many blocks drawn at random."""
    lists, blocks = length // ROWS, length // block
    n = max(1, round(blocks * kept / 100))
    scores = torch.rand(1, lists, heads, blocks, device="cuda", generator=torch.Generator("cuda").manual_seed(5))
    return scores.topk(n, dim=-1).indices.sort(dim=-1).values.int()


def mask_of(lists, block, length):
    """[1, heads, length, length], of few rows."""
    named = torch.zeros(*lists.shape[:3], length // block, device="cuda", dtype=torch.bool)
    named.scatter_(-1, lists.long(), True)
    return named.permute(0, 2, 1, 3).repeat_interleave(ROWS, 2).repeat_interleave(block, 3)


def mine(x, lists, block, **options):
    return heddle.sparse_attention(*x, lists, block_size=block, query_rows=ROWS, **options)


def others(x, lists, block):
    """contender -> a call over the same blocks."""
    return peers.flashinfer_blocks(*x, lists, ROWS, block) | peers.mit_blocks(*x, lists, ROWS, block)


@functools.cache
def agreement(size, block, backward):
    """contender -> its largest distance from attention under the mask in float64."""
    x = [y.requires_grad_(backward) for y in operands(1, CHECKED, 4, 4, size)]
    lists = drawn(CHECKED, 4, block, 20)
    mask = mask_of(lists, block, CHECKED)
    wide = [y.detach().double().requires_grad_(backward) for y in x]
    q, k, v = (y.transpose(1, 2) for y in wide)
    scores = (q @ k.transpose(-1, -2) * size**-0.5).masked_fill(~mask, float("-inf"))
    exact = (scores.softmax(-1) @ v).transpose(1, 2)
    weight = torch.randn_like(exact)
    expected = [exact.detach(), *(torch.autograd.grad(exact, wide, weight) if backward else ())]
    found = {}
    for name, call in {"heddle": lambda: mine(x, lists, block), **others(x, lists, block)}.items():
        try:
            o = call()
            outputs = [o.detach(), *(torch.autograd.grad(o, x, weight.to(o.dtype)) if backward else ())]
        except Exception as error:  # another's, whatever it is: outputs_of() says of the timed call
            if name == "heddle":
                raise
            print(f"{name} over blocks of {block} keys: {type(error).__name__}: {error}"[:300])
            found[name] = float("nan")
            continue
        distances = [distance(a, b) for a, b in zip(outputs, expected, strict=True)]
        found[name] = next((d for d in distances if not d <= GRADIENT_LIMIT), max(distances))
    return found


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
    return Row(
        calls,
        work=4e-12 * size * pairs * (WORK if backward else 1),
        agreement=functools.partial(agreement, size, block, backward),
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
