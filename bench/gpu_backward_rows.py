"""What `make bench-gpu` times of gradients: as gpu_rows.py, whose rows are of the forward. FLOP: 2.5 times the forward's."""

from __future__ import annotations

import functools

import gpu_peers as peers
import heddle
import sources
import torch
import torch.nn.functional as functional
from gpu_rows import (
    FEW_LENGTHS,
    HEADS,
    LENGTHS,
    MASKS,
    Row,
    chosen,
    direction,
    forward_work,
    lengths_rows,
    packed_options,
    served,
    spread_lengths,
    window_pairs,
)
from gpu_rows import operands as tensors

WORK = 2.5  # times the forward's


def operands(*shape, dtype=torch.bfloat16):
    return [x.requires_grad_() for x in tensors(*shape, dtype)]


def weight_of(shape, dtype):
    """What outputs of gradients() are multiplied with and summed: the same again for a shape."""
    return torch.randn(shape, generator=torch.Generator("cuda").manual_seed(3), device="cuda").to(dtype)


def gradients(forward, leaves):
    """A call of the backward alone: the forward runs once, here."""
    peers.prepare(forward)()
    out = forward()
    weight = weight_of(out.shape, out.dtype)
    return peers.through(forward, lambda: torch.autograd.grad(out, leaves, weight, retain_graph=True))


class Captured:
    """gradients() for a graph: autograd runs them on the stream of their forward, so that is the one to capture."""

    def __init__(self, forward, leaves):
        self.stream = torch.cuda.Stream()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            self.call = gradients(forward, leaves)
        torch.cuda.synchronize()

    def __call__(self):
        return self.call()


def both(forward, leaves):
    """Forward and backward, through autograd."""
    peers.prepare(forward)()
    weight = torch.ones_like(forward())
    return peers.through(forward, lambda: torch.autograd.grad(forward(), leaves, weight))


def each(forwards, make):
    """contender -> make(forward), and why those are absent that cannot run: others have fewer gradients than forwards."""
    calls, absent = {}, {}
    for name, forward in forwards.items():
        try:
            calls[name] = make(forward)
        except (RuntimeError, NotImplementedError) as error:
            if name not in peers.NAMES:
                raise
            absent[name] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
    return {"calls": calls, "absent": absent}


def attention(leaves, **options):
    return lambda: heddle.attention(*leaves, **options)


def backward_row(forwards, leaves, work, **options):
    """A Row of the gradients of `forwards`; options: of Heddle's call."""
    made = each(forwards, lambda forward: gradients(forward, leaves))
    return Row(work=WORK * work, **made, **served(chosen(*leaves, backward=True, **options), backward=True))


def batched(batch, length, heads, kv_heads, size, causal, force=None):
    """Rows that all contenders have. `force`: one of Heddle's candidates, beside FlashAttention-2 alone."""
    leaves = operands(batch, length, heads, kv_heads, size)
    mine = {"causal": direction(causal), "force": force}
    shared = {"is_causal": causal, "enable_gqa": heads != kv_heads}
    forwards = {"heddle": attention(leaves, **mine)}
    if force is None:
        forwards |= peers.fa3_dense(*leaves, causal=causal) | {"cudnn": peers.sdpa(*leaves, "cudnn", **shared)}
    forwards["fa2"] = peers.sdpa(*leaves, "fa2", **shared)
    return backward_row(forwards, leaves, forward_work(batch, heads, length, size, causal), **mine)


def windowed(length, heads, size, window):
    leaves = operands(1, length, heads, heads, size)
    starts = torch.tensor([0, length], dtype=torch.int32, device="cuda")
    mine = {"causal": "bottom_right", "window": (window - 1, -1)}
    forwards = {
        "heddle": attention(leaves, **mine),
        **peers.fa3_dense(*leaves, causal=True, window=(window - 1, 0)),
        "fa2": lambda: peers.fa2_packed(*(x[0] for x in leaves), starts, length, True, (window - 1, 0))()[None],
    }
    return backward_row(forwards, leaves, 4e-12 * heads * size * window_pairs(length, window), **mine)


def documents(total, heads, kv_heads, size, causal):
    lengths, starts = spread_lengths(total)
    longest = max(lengths)
    leaves = [x[0].detach().requires_grad_() for x in tensors(1, total, heads, kv_heads, size)]
    mine = packed_options(starts, longest, causal)
    forwards = {
        "heddle": attention(leaves, **mine),
        **peers.fa3_packed(*leaves, starts, longest, causal),
        "fa2": peers.fa2_packed(*leaves, starts, longest, causal),
    }
    return backward_row(
        forwards, leaves, 4e-12 * heads * size * sum(n * n for n in lengths) / (2 if causal else 1), **mine
    )


def deterministic(batch, length, heads, kv_heads, size):
    """What bits that repeat cost; "default": Heddle's gradients whose bits may change."""
    leaves = operands(batch, length, heads, kv_heads, size)
    mine = {"causal": "bottom_right", "deterministic": True}
    fa3 = peers.fa3_dense(*leaves, causal=True, deterministic=True)
    # Asked for them, FlashAttention-3 ends the process.
    absent = {"fa3": "it has no deterministic gradients at head size 256"} if fa3 and size == 256 else {}
    forwards = {
        "heddle": attention(leaves, **mine),
        **({} if absent else fa3),
        "default": attention(leaves, **(mine | {"deterministic": False})),
        # Another's gradients, for the comparison; torch's own promise no bits.
        "cudnn": peers.sdpa(*leaves, "cudnn", is_causal=True, enable_gqa=heads != kv_heads),
    }
    row = backward_row(forwards, leaves, forward_work(batch, heads, length, size, True), **mine)
    row.absent |= absent
    return row


def single(length, precision, batch=2, heads=16, size=128):
    """float32: torch's memory-efficient kernel, which multiplies in tf32 where torch is allowed to."""
    leaves = operands(batch, length, heads, heads, size, dtype=torch.float32)
    mine = {"precision": precision}
    forwards = {"heddle": attention(leaves, **mine), "efficient": peers.sdpa(*leaves, "efficient", precision == "tf32")}
    return backward_row(forwards, leaves, forward_work(batch, heads, length, size, False), **mine)


def python_call(length):
    """What a Python user waits for forward and backward of a short call, launches included: drop-in for drop-in."""
    leaves = [x.transpose(1, 2).contiguous().detach().requires_grad_() for x in tensors(1, length, 4, 4, 64)]
    forwards = {"heddle": lambda: heddle.sdpa(*leaves)}
    for name, call in peers.fa3_dense(*(x.transpose(1, 2) for x in leaves)).items():
        forwards[name] = lambda call=call: call().transpose(1, 2)
    forwards |= {
        name: peers.Chosen(name, lambda: functional.scaled_dot_product_attention(*leaves)) for name in ("cudnn", "fa2")
    }
    made = each(forwards, lambda forward: both(forward, leaves))
    rows = [x.detach().transpose(1, 2) for x in leaves]
    kernels = [sources.attention(chosen(*rows, backward=backward), backward) for backward in (False, True)]
    return Row(work=1, unit="calls/s", how="host", **made, sources=(*kernels[0], *kernels[1], *sources.PYTHON))


def memory(length, heads=8, size=64):
    """Peak memory of forward and backward, beside the computation that stores the scores."""
    leaves = operands(1, length, heads, heads, size)
    mine = {"causal": "bottom_right"}
    forwards = {
        "heddle": attention(leaves, **mine),
        "deterministic": attention(leaves, **mine, deterministic=True),
        "fa2": peers.sdpa(*leaves, "fa2", is_causal=True),
        "math": peers.sdpa(*leaves, "math", is_causal=True),
    }
    made = each(forwards, lambda forward: both(forward, leaves))
    return Row(
        work=1, unit="MiB", how="memory", **made, **served(chosen(*leaves, backward=True, **mine), backward=True)
    )


def equal_heads(force=None):
    return lambda b, n, h, d, causal: batched(b, n, h, h, d, causal, force)


def rows():
    """name -> maker of a Row."""
    out = lengths_rows("backward", (64, 128, 256), LENGTHS, equal_heads())
    out |= lengths_rows("backward", (96, 192), FEW_LENGTHS, equal_heads())
    for length in LENGTHS[3:]:
        out[f"backward gqa 64/8 D128 causal S{length}"] = functools.partial(batched, 1, length, 64, 8, 128, True)
    out["backward gqa 32/1 D128 causal S4096"] = functools.partial(batched, 4, 4096, 32, 1, 128, True)
    for window in (256, 1024, 4096):
        out[f"backward window {window} D128 causal S16384"] = functools.partial(windowed, 16384, 16, 128, window)
    for mask, causal in MASKS.items():
        out[f"backward documents D128 {mask}"] = functools.partial(documents, 32768, 16, 16, 128, causal)
        out[f"backward documents 32/8 D128 {mask}"] = functools.partial(documents, 32768, 32, 8, 128, causal)
    out |= lengths_rows("backward sm80", (64, 128, 256), (512, 2048, 8192), equal_heads("sm80"))
    for size in (64, 128, 256):
        for length in (4096, 16384):
            name = f"backward deterministic D{size} causal S{length}"
            out[name] = functools.partial(deterministic, 16384 // length, length, HEADS[size], HEADS[size], size)
    out["backward deterministic gqa 64/8 D128 causal S4096"] = functools.partial(deterministic, 1, 4096, 64, 8, 128)
    for precision in ("f32", "tf32"):
        out[f"backward float32 {precision} D128 S4096"] = functools.partial(single, 4096, precision)
    for length in (128, 256, 512, 1024):
        out[f"python forward and backward S{length}"] = functools.partial(python_call, length)
    out["memory of forward and backward S16384"] = functools.partial(memory, 16384)
    return out
