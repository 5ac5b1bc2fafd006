"""The longest sequence that fits in a given memory: computed from measured bytes, then tried under a real limit."""

from __future__ import annotations

import math

from . import isolate
from .laws import FIT_FROM, LEAST_LENGTHS
from .progress import OUT_OF_TIME

WHOLE_CALL_SECONDS = 20.0  # a call expected to take longer is tried with its last query rows only


def model(points: list[dict], method: str, dtype: str) -> dict:
    """bytes(S) = constant + per_token * S + per_pair * S^2 of a whole call (q, k, v, o and workspace), B = H = 1.

    From the measured workspaces at the two longest lengths and the tensors' sizes. The square term is taken for the baseline only
    where the workspace really grew with the square; else growth counts as linear. ValueError with fewer than LEAST_LENGTHS lengths
    from FIT_FROM on: below them scratch of any length hides the growth.
    """
    own = sorted((p["length"], p) for p in points if (p["method"], p["dtype"]) == (method, dtype))
    judged = sum(length >= FIT_FROM for length, _ in own)
    if judged < LEAST_LENGTHS:
        raise ValueError(f"{judged} lengths from {FIT_FROM} on were measured; {LEAST_LENGTHS} are needed")
    (short, small), (long, large) = own[-2], own[-1]
    tensors = (large["inputs"] + large["output"]) / long
    grown = large["workspace"] - small["workspace"]
    squared = (
        grown / (long**2 - short**2)
        if math.log(max(large["workspace"], 1) / max(small["workspace"], 1), long / short) > 1.5
        else 0.0
    )
    linear = 0.0 if squared else grown / (long - short)
    constant = large["workspace"] - squared * long**2 - linear * long
    return {"constant": max(0.0, constant), "per_token": tensors + max(0.0, linear), "per_pair": squared}


def longest(bytes_model: dict, limit: int) -> int:
    """The largest S with bytes(S) <= limit; 0 if not even one token fits."""
    room = limit - bytes_model["constant"]
    if room <= 0:
        return 0
    a, b = bytes_model["per_pair"], bytes_model["per_token"]
    # The form of the quadratic formula that stays exact when a is 0 or small.
    return int(2 * room / (b + math.sqrt(b * b + 4 * a * room)))


def rows_like_the_whole(length: int, head_size: int, method: str, dtype: str) -> int:
    """The fewest query rows, from 128 in powers of two, that need no more workspace than all of them.

    With fewer the keys are split among the threads, which is another schedule than the whole call's.
    """
    import heddle

    def workspace(rows: int) -> int:
        keys = (1, length, 1, head_size)
        return heddle.explain((1, rows, 1, head_size), keys, keys, dtype=dtype, method=method).chosen.workspace

    rows, whole = 128, workspace(length)
    while rows < length and workspace(rows) > whole:
        rows *= 2
    return min(rows, length)


def _attempt(length: int, head_size: int, method: str, dtype: str, limit: int, whole: bool) -> dict:
    """Allocates q, k, v, o and the whole call's workspace under the limit and runs all rows, or a few of the last ones."""
    import heddle
    import numpy as np
    import torch

    isolate.fresh_pages()
    torch.set_num_threads(1)  # its threads' stacks would count as well
    kind = getattr(torch, dtype)
    rows = length if whole else rows_like_the_whole(length, head_size, method, dtype)
    warm = torch.zeros(1, 16, 1, head_size, dtype=kind)
    heddle.attention(warm, warm, warm, method=method)
    try:
        with isolate.limited_data(limit):
            # Filled in slices: a normal tensor made whole in fp32 and then converted would need more than the call itself.
            q, k, v = (torch.empty(1, length, 1, head_size, dtype=kind) for _ in range(3))
            generator = torch.Generator().manual_seed(1)
            for tensor in (q, k, v):
                for begin in range(0, length, 8192):
                    part = tensor[:, begin : begin + 8192]
                    part.copy_(torch.randn(part.shape, generator=generator))
            if rows >= length:
                seconds, o = isolate.seconds(lambda: heddle.attention(q, k, v, method=method))
            else:
                o_whole = torch.ones(1, length, 1, head_size, dtype=kind)
                scratch = np.ones(heddle.explain(q, k, v, method=method).chosen.workspace, dtype=np.uint8)
                tail = q[:, length - rows :]
                seconds, o = isolate.seconds(lambda: heddle.attention(tail, k, v, method=method))
                del o_whole, scratch
    except (MemoryError, RuntimeError) as error:
        return {"fits": False, "length": length, "error": f"{type(error).__name__}: {error}"[:200]}
    # The check is no part of what has to fit.
    return {
        "fits": True,
        "length": length,
        "rows": min(rows, length),
        "seconds": seconds,
        "error": _row_error(q, k, v, o),
    }


def _row_error(q, k, v, o) -> float:
    """Largest error of the last row against float64, keys taken in slices; relative to the row's root mean square."""
    import numpy as np

    query = q[0, -1, 0].double().numpy() / math.sqrt(q.shape[-1])
    total, best, out = 0.0, -np.inf, np.zeros(v.shape[-1])
    for begin in range(0, k.shape[1], 16384):
        scores = k[0, begin : begin + 16384, 0].double().numpy() @ query
        top = max(best, scores.max())
        weight = np.exp(scores - top)
        scale = np.exp(best - top)
        total = total * scale + weight.sum()
        out = out * scale + weight @ v[0, begin : begin + 16384, 0].double().numpy()
        best = top
    out /= total
    return float(np.abs(o[0, -1, 0].double().numpy() - out).max() / np.sqrt((out**2).mean()))


def expected_seconds(times: list[dict], method: str, dtype: str, length: int, head_size: int) -> float | None:
    """Seconds of a whole call (B = H = 1) from the longest measured point, growing with S^2, H and D; None without a point."""
    own = [p for p in times if (p["method"], p["dtype"]) == (method, dtype)]
    if not own:
        return None
    p = max(own, key=lambda p: p["length"])
    return p["seconds"] * (length / p["length"]) ** 2 * head_size / (p["head_size"] * p["heads"] * p["batch"])


def verify(points, times, kinds, head_size: int, limit: int, free: int, progress) -> list[dict]:
    """For each (method, dtype): bytes per token, the longest S in `free` and in `limit` bytes, the seconds that calls of such
    lengths would take (None if nothing was timed), and what happened under the limit. What fits in `free` is computed alone.

    The computed length less 3 % must run; 10 % more must fail. Where a whole call would take longer than WHOLE_CALL_SECONDS every
    tensor and the whole call's workspace are allocated and written, and the last query rows run over all keys (`rows`: how many).
    """
    found = []
    for method, dtype in kinds:
        name = f"longest sequence of {method} {dtype} in {limit / 2**30:.0f} GiB"
        try:
            bytes_model = model(points, method, dtype)
        except ValueError as error:
            progress.leave_out(name, str(error))
            continue
        entry = {
            "method": method,
            "dtype": dtype,
            "model": bytes_model,
            "limit": limit,
            "longest_in_limit": longest(bytes_model, limit),
            "free": free,
            "longest_in_free": longest(bytes_model, free),
        }
        inside, beyond = int(entry["longest_in_limit"] * 0.97), int(entry["longest_in_limit"] * 1.10)
        whole = expected_seconds(times, method, dtype, inside, head_size)
        entry["whole_call_seconds"] = whole
        entry["free_call_seconds"] = expected_seconds(times, method, dtype, entry["longest_in_free"], head_size)
        if free < limit * 1.25:
            progress.leave_out(name, f"only {free / 2**30:.1f} GiB are free, so the limit cannot be tried")
        elif progress.left() <= 0:
            progress.leave_out(name, OUT_OF_TIME)
        else:
            short_enough = whole is not None and whole <= WHOLE_CALL_SECONDS
            entry["inside"] = _try(inside, head_size, method, dtype, limit, short_enough)
            entry["beyond"] = _try(beyond, head_size, method, dtype, limit, short_enough)
            progress.step(
                f"{method} {dtype}: {inside} tokens {_said(entry['inside'])}; {beyond} {_said(entry['beyond'])}"
            )
        found.append(entry)
    return found


def _try(length: int, head_size: int, method: str, dtype: str, limit: int, whole: bool) -> dict:
    try:
        return isolate.call(_attempt, length, head_size, method, dtype, limit, whole, timeout=120.0)
    except isolate.ChildFailed as failure:
        return {"fits": False, "length": length, "error": str(failure)[:200]}


def _said(result: dict) -> str:
    if not result["fits"]:
        return f"fail ({result['error'][:60]})"
    return f"run ({result['rows']} query rows, {result['seconds']:.1f} s)"
