"""What one attention call allocates and what becomes resident, each measured in a process of its own."""

from __future__ import annotations

from . import isolate
from .progress import NO_MEMORY, OUT_OF_TIME

SIZES = {"float32": 4, "bfloat16": 2}


def inputs(batch: int, heads: int, length: int, head_size: int, dtype: str, seed: int = 0):
    """q, k, v: normal torch tensors [B, S, H, D] of this dtype."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    shape = (batch, length, heads, head_size)
    return [torch.randn(shape, generator=generator).to(getattr(torch, dtype)) for _ in range(3)]


def _attend_once(shape: tuple, method: str, dtype: str) -> dict:
    import heddle

    isolate.fresh_pages()
    batch, heads, length, head_size = shape
    # Code pages, threads and their stacks become resident at the first call; they are not what is asked for.
    heddle.attention(*inputs(1, heads, 16, head_size, dtype), method=method)
    q, k, v = inputs(batch, heads, length, head_size, dtype)
    with isolate.Residence() as residence:
        o = heddle.attention(q, k, v, method=method)
    return {
        "batch": batch,
        "heads": heads,
        "length": length,
        "head_size": head_size,
        "method": method,
        "dtype": dtype,
        "inputs": sum(x.numel() * x.element_size() for x in (q, k, v)),
        "output": o.numel() * o.element_size(),
        "workspace": heddle.explain(q, k, v, method=method).chosen.workspace,
        "resident": residence.grown,
        "resident_how": residence.how,
    }


def measure(shape: tuple, method: str, dtype: str, timeout: float = 120.0) -> dict:
    """Bytes of one forward call at shape (B, H, S, D): inputs, output, workspace (as allocated) and resident growth at the peak.

    Resident growth covers output and workspace; the inputs are resident before. Raises isolate.ChildFailed.
    """
    return isolate.call(_attend_once, tuple(shape), method, dtype, timeout=timeout)


def needed(shape: tuple, method: str, dtype: str) -> int:
    """Bytes that a call needs at most, to decide whether to try it: tensors, scores in fp32 and what making the inputs takes."""
    batch, heads, length, head_size = shape
    tensor = batch * heads * length * head_size
    scores = 4 * batch * heads * length * length if method == "baseline" else 0
    return 4 * tensor * SIZES[dtype] + 2 * 4 * tensor + scores


def sweep(lengths, kinds, heads: int, head_size: int, progress) -> list[dict]:
    """Memory points for every length and (method, dtype) of `kinds`, batch 1; what does not fit is left out with the reason."""
    from . import machine

    points = []
    for length in lengths:
        for method, dtype in kinds:
            what = f"memory of {method} {dtype} at length {length}"
            shape = (1, heads, length, head_size)
            if needed(shape, method, dtype) > 0.8 * machine.memory_bytes():
                progress.leave_out(what, NO_MEMORY, length=length)
                continue
            if progress.left() <= 0:
                progress.leave_out(what, OUT_OF_TIME, length=length)
                continue
            points.append(measure(shape, method, dtype))
        own = [f"{p['method']} {p['dtype']} {p['workspace'] / 2**20:.2f} MiB" for p in points if p["length"] == length]
        progress.step(f"length {length:5d}: workspace " + ", ".join(own))
    return points
