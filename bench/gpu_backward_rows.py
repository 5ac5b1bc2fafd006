"""What `make bench-gpu` times of gradients: as gpu_rows.py, whose rows are of the forward. FLOP: 2.5 times the forward's."""

from __future__ import annotations

import functools

import heddle
import torch
import torch.nn.functional as functional
from gpu_rows import LENGTHS, Row, random, sdpa, spread_lengths
from torch.nn.attention import SDPBackend

WORK = 2.5 * 4e-12  # TFLOP for each pair, head and unit of the head size


def operands(batch, length, heads, kv_heads, size):
    shapes = (batch, length, heads, size), (batch, length, kv_heads, size), (batch, length, kv_heads, size)
    return [random(*shape).requires_grad_() for shape in shapes]


def gradients(forward, leaves):
    """A call of the backward alone: the forward runs once, here."""
    out = forward()
    weight = torch.randn(out.shape, generator=torch.Generator("cuda").manual_seed(3), device="cuda").to(out.dtype)
    return lambda: torch.autograd.grad(out, leaves, weight, retain_graph=True)


def both(forward, leaves):
    """Forward and backward, through autograd."""
    weight = torch.ones_like(forward())
    return lambda: torch.autograd.grad(forward(), leaves, weight)


def attention(leaves, **options):
    return lambda: heddle.attention(*leaves, **options)


def batched(batch, length, heads, kv_heads, size, causal, force=None):
    """Rows that all contenders have. `force`: one of Heddle's candidates, beside FlashAttention-2 alone."""
    leaves = operands(batch, length, heads, kv_heads, size)
    shared = {"is_causal": causal, "enable_gqa": heads != kv_heads}
    forwards = {
        "heddle": attention(leaves, causal="bottom_right" if causal else "none", force=force),
        "cudnn": sdpa(*leaves, SDPBackend.CUDNN_ATTENTION, **shared),
        "fa2": sdpa(*leaves, SDPBackend.FLASH_ATTENTION, **shared),
    }
    if force is not None:
        del forwards["cudnn"]
    calls = {name: gradients(forward, leaves) for name, forward in forwards.items()}
    return Row(calls, WORK * batch * heads * length * length * size / (2 if causal else 1), how="queued")


def windowed(length, heads, size, window):
    leaves = operands(1, length, heads, heads, size)
    lengths = torch.tensor([0, length], dtype=torch.int32, device="cuda")
    forwards = {
        "heddle": attention(leaves, causal="bottom_right", window=(window - 1, -1)),
        "fa2": lambda: torch.ops.aten._flash_attention_forward(
            *(x[0] for x in leaves), lengths, lengths, length, length, 0.0, True, False,
            window_size_left=window - 1, window_size_right=0,
        )[0][None],
    }  # fmt: skip
    calls = {name: gradients(forward, leaves) for name, forward in forwards.items()}
    return Row(calls, WORK * heads * size * (window * length - window * (window - 1) / 2), how="queued")


def documents(total, heads, size, causal):
    lengths, starts = spread_lengths(total)
    longest = max(lengths)
    leaves = [random(total, heads, size).requires_grad_() for _ in range(3)]
    packed = dict(cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=longest, max_seqlen_k=longest)
    forwards = {
        "heddle": attention(leaves, causal="bottom_right" if causal else "none", **packed),
        "fa2": lambda: torch.ops.aten._flash_attention_forward(
            *leaves, starts, starts, longest, longest, 0.0, causal, False
        )[0],
    }  # fmt: skip
    calls = {name: gradients(forward, leaves) for name, forward in forwards.items()}
    return Row(calls, WORK * heads * size * sum(n * n for n in lengths) / (2 if causal else 1), how="queued")


def deterministic(batch, length, heads, kv_heads, size):
    """What bits that repeat cost."""
    leaves = operands(batch, length, heads, kv_heads, size)
    calls = {
        name: gradients(attention(leaves, causal="bottom_right", deterministic=mode), leaves)
        for name, mode in (("heddle", True), ("default", False))
    }
    return Row(calls, WORK * batch * heads * length * length * size / 2, how="queued")


def single(length, precision, batch=2, heads=16, size=128):
    """float32: torch's memory-efficient kernel, which multiplies in tf32 where torch is allowed to."""
    leaves = [random(batch, length, heads, size, dtype=torch.float32).requires_grad_() for _ in range(3)]
    peer = gradients(sdpa(*leaves, SDPBackend.EFFICIENT_ATTENTION), leaves)

    def efficient():
        torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
        out = peer()
        torch.backends.cuda.matmul.allow_tf32 = False
        return out

    calls = {"heddle": gradients(attention(leaves, precision=precision), leaves), "efficient": efficient}
    return Row(calls, WORK * batch * heads * length * length * size, how="queued")


def only(backend, leaves):
    """torch's attention with one back end, chosen with less ado than sdpa_kernel(), which a short call would notice."""
    flags = torch.backends.cuda

    def call():
        flags.enable_cudnn_sdp(backend == "cudnn")
        flags.enable_flash_sdp(backend == "fa2")
        flags.enable_mem_efficient_sdp(False)
        flags.enable_math_sdp(False)
        return functional.scaled_dot_product_attention(*leaves)

    return call


def python_call(length):
    """What a Python user waits for forward and backward of a short call, launches included: drop-in for drop-in."""
    leaves = [random(1, 4, length, 64).requires_grad_() for _ in range(3)]
    calls = {"heddle": both(lambda: heddle.sdpa(*leaves), leaves)}
    calls |= {name: both(only(name, leaves), leaves) for name in ("cudnn", "fa2")}
    return Row(calls, 1, "calls/s", "host")


def memory(length, heads=8, size=64):
    """Peak memory of forward and backward, beside the computation that stores the scores."""
    leaves = operands(1, length, heads, heads, size)
    calls = {
        "heddle": both(attention(leaves, causal="bottom_right"), leaves),
        "deterministic": both(attention(leaves, causal="bottom_right", deterministic=True), leaves),
        "fa2": both(sdpa(*leaves, SDPBackend.FLASH_ATTENTION, is_causal=True), leaves),
        "math": both(sdpa(*leaves, SDPBackend.MATH, is_causal=True), leaves),
    }
    return Row(calls, 1, "MiB", "memory")


def rows():
    """name -> maker of a Row."""
    out = {}
    for size in (64, 128, 256):
        for causal in (False, True):
            for length in LENGTHS:
                name = f"backward D{size} {'causal' if causal else 'none'} S{length}"
                out[name] = functools.partial(batched, 16384 // length, length, 2048 // size, 2048 // size, size, causal)
    for causal in (False, True):
        name = f"backward head size 96, {'causal' if causal else 'none'} S4096"
        out[name] = functools.partial(batched, 4, 4096, 16, 16, 96, causal)
    for length in LENGTHS[3:]:
        out[f"backward gqa 64/8 D128 causal S{length}"] = functools.partial(batched, 1, length, 64, 8, 128, True)
    out["backward window 1024 D128 causal S16384"] = functools.partial(windowed, 16384, 16, 128, 1024)
    for causal in (False, True):
        out[f"backward documents D128 {'causal' if causal else 'none'}"] = functools.partial(documents, 32768, 16, 128, causal)
    for size in (64, 128, 256):
        for causal in (False, True):
            for length in (512, 2048, 8192):
                name = f"backward sm80 D{size} {'causal' if causal else 'none'} S{length}"
                heads = 2048 // size
                out[name] = functools.partial(batched, 16384 // length, length, heads, heads, size, causal, "sm80")
    for size in (64, 128, 256):
        out[f"backward deterministic D{size} causal S4096"] = functools.partial(deterministic, 4, 4096, 2048 // size, 2048 // size, size)
    out["backward deterministic gqa 64/8 D128 causal S4096"] = functools.partial(deterministic, 1, 4096, 64, 8, 128)
    for precision in ("f32", "tf32"):
        out[f"backward float32 {precision} D128 S4096"] = functools.partial(single, 4096, precision)
    for length in (128, 256, 512, 1024):
        out[f"python forward and backward S{length}"] = functools.partial(python_call, length)
    out["memory of forward and backward S16384"] = functools.partial(memory, 16384)
    return out
