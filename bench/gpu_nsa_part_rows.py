"""What `make bench-gpu` times of the parts of native sparse attention: each step as parallel_nsa calls it, forward and backward.
Sampled rows of each part's output, and gradients of some of its keys, are compared with float64."""

from __future__ import annotations

import functools

import heddle
import heddle.nsa
import torch
from gpu_backward_rows import Captured, gradients, weight_of
from gpu_branches import Listed, Pooled, Window
from gpu_nsa_reference import CHOSEN_LIMIT, Choice, first_of, of_branch, sampled_keys
from gpu_nsa_rows import BLOCK, BLOCKS, GRADIENT_LIMIT, HEADS, LIMIT, SIZE, WINDOW, leaves, operands, row
from gpu_reference import Expected, places
from gpu_rows import random

# Rows of all heads; of no more, compressed branch and gated sum take under 100 us, and are timed in graphs.
FEW = 8192 * 32
PARTS = ("pooled keys", "compressed", "selection", "selected", "window")


def part(length, heads, kv_heads, name, direction):
    """One step of the operation, as parallel_nsa calls it."""
    x = operands(1, length, heads, kv_heads)
    if direction == "backward":
        x = leaves(x)
    q, k, v = x[:3]
    with torch.no_grad():
        k_pooled, v_pooled = (heddle.nsa.pool_keys(y, BLOCK) for y in (k, v))
        compressed = {"causal": "top_left", "key_offset": BLOCK - 1, "key_step": BLOCK, "return_lse": True}
        lse = heddle.attention(q, k_pooled, v_pooled, **compressed)[1]
        lists = heddle.nsa.select_blocks(q, k_pooled, BLOCKS, lse=lse, block_size=BLOCK)
    if direction == "backward":
        k_pooled, v_pooled = leaves((k_pooled, v_pooled))
    pair = lambda b, h: (k.detach()[b, :, h], v.detach()[b, :, h])  # noqa: E731
    pooled = lambda b, h: Pooled(k_pooled.detach()[b, :, h], v_pooled.detach()[b, :, h], BLOCK, pooled=True)  # noqa: E731
    call, of, branch = {
        "pooled keys": (lambda: heddle.nsa.pool_keys(k, BLOCK), [k], None),
        "compressed": (
            lambda: heddle.attention(q, k_pooled, v_pooled, **compressed)[0],
            [q, k_pooled, v_pooled],
            pooled,
        ),
        "selection": (
            lambda: heddle.nsa.select_blocks(q, k_pooled, BLOCKS, lse=lse, block_size=BLOCK),
            None,
            None,
        ),
        "selected": (
            lambda: heddle.sparse_attention(q, k, v, lists, block_size=BLOCK, causal="bottom_right"),
            [q, k, v],
            lambda b, h: Listed(*pair(b, h), lists[b, :, h], BLOCK),
        ),
        "window": (
            lambda: heddle.attention(q, k, v, causal="bottom_right", window=(WINDOW - 1, None)),
            [q, k, v],
            lambda b, h: Window(*pair(b, h), WINDOW),
        ),
    }[name]

    def expected():
        if name == "selection":
            return (Choice(q, k_pooled, BLOCK, pooled=True),)
        if name == "pooled keys":
            return expected_pooled(k.detach(), direction == "backward")
        over = of[1].detach()
        keys = (
            torch.arange(over.shape[1], device=q.device) if branch is pooled else sampled_keys(length, BLOCK, q.device)
        )
        weight = weight_of(q.shape, q.dtype) if direction == "backward" else None
        first = first_of(length, BLOCK) if direction == "backward" or branch is pooled else 0
        return of_branch(q.detach(), over, of[2].detach(), branch, weight, keys, first)

    if direction == "backward":
        call = (Captured if name == "pooled keys" else gradients)(call, of)
    graph = name == "pooled keys" or direction == "forward" and name == "compressed" and length * heads <= FEW
    limit = CHOSEN_LIMIT if name == "selection" else GRADIENT_LIMIT if direction == "backward" else LIMIT
    how = "graph" if graph else "queued"
    return row({"heddle": call}, lambda: {"heddle": expected()}, how=how, limit=limit, absent={"fla": "a part"})


def expected_pooled(k, backward):
    """All of the means of blocks of k, or of the gradient of k."""
    if not backward:
        return (Expected(lambda x: x.flatten(0, 2), k.double().unflatten(1, (-1, BLOCK)).mean(2).flatten(0, 2)),)
    batch, length, heads, size = k.shape
    weight = weight_of((batch, length // BLOCK, heads, size), k.dtype).double() / BLOCK
    return (Expected(lambda x: x.flatten(0, 2), weight.repeat_interleave(BLOCK, 1).flatten(0, 2)),)


def expected_gates(os, scale, backward):
    """Some rows of the gated sum, or of the gradients of the branches and of their gates."""
    os, scale = ([y.detach() for y in each] for each in (os, scale))
    batch, length, heads = scale[0].shape
    b, t, _ = (list(each) for each in zip(*places(batch, length, 1, 16)))
    of_rows = lambda x: x[b, t].double()  # noqa: E731
    if not backward:
        return (Expected(lambda x: x[b, t].flatten(0, 1), sum(of_rows(g)[..., None] * of_rows(o) for o, g in zip(os, scale)).flatten(0, 1)),)  # fmt: skip
    weight = of_rows(weight_of(os[0].shape, os[0].dtype))
    of_os = (Expected(lambda x: x[b, t].flatten(0, 1), (of_rows(g)[..., None] * weight).flatten(0, 1)) for g in scale)
    return (*of_os, *(Expected(lambda x: x[b, t], (of_rows(o) * weight).sum(-1)) for o in os))


def gates(length, heads, kv_heads, direction):
    """The gated sum of three branches."""
    os = [random(1, length, heads, SIZE) for _ in range(3)]
    scale = [torch.rand(1, length, heads, device="cuda") for _ in range(3)]
    if direction == "backward":
        os, scale = leaves(os), leaves(scale)
    call = lambda: torch.ops.heddle.gate_branches(os, scale)  # noqa: E731
    if direction == "backward":
        call = gradients(call, [*os, *scale])
    expected = lambda: {"heddle": expected_gates(os, scale, direction == "backward")}  # noqa: E731
    how = "graph" if direction == "forward" and length * heads <= FEW else "queued"
    return row({"heddle": call}, expected, how=how, absent={"fla": "a part"})


def rows():
    """name -> maker of a Row."""
    out = {}
    for heads, kv_heads in HEADS:
        for direction in ("forward", "backward"):
            for length in (8192, 65536):
                for name in PARTS:
                    if name == "selection" and direction == "backward":
                        continue
                    title = f"nsa part {name} {heads}/{kv_heads} {direction} S{length}"
                    out[title] = functools.partial(part, length, heads, kv_heads, name, direction)
                title = f"nsa part gates {heads}/{kv_heads} {direction} S{length}"
                out[title] = functools.partial(gates, length, heads, kv_heads, direction)
    return out
