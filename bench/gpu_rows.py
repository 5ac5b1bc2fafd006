"""What `make bench-gpu` times of the forward: for each row the contenders' calls, the work of one call, how it is timed and
what its outputs are compared with."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import gpu_peers as peers
import heddle
import sources
import torch
from gpu_reference import Attention, Expected, sampled, sampled_documents

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
FEW_LENGTHS = (1024, 4096, 16384)
HEADS = {64: 32, 96: 16, 128: 16, 192: 8, 256: 8}
MASKS = {"none": False, "causal": True}
SHORT_WORK = 0.05  # TFLOP; what has less takes under 100 us: it is timed in graphs
# Relative limits of differences: e4m3 rounds each probability by up to 2^-4, int8 q and k by up to 1/254 of the largest of a row.
LIMIT, E4M3_LIMIT, INT8_LIMIT, INT4_LIMIT = 0.02, 0.08, 0.05, 0.25


@dataclasses.dataclass
class Row:
    calls: dict[str, Callable]  # "heddle" first, where it has a kernel
    work: float  # of one call, in units
    unit: str = "TFLOP/s"  # "TFLOP/s", "TB/s" (of keys and values read), "calls/s" or "MiB"
    # How it is timed (gpu_timing.py): "queued", "graph", "host", or "memory": not timed, the most that a call had of torch's memory.
    how: str = "queued"
    rotations: int = 1  # distinct inputs that calls(n) takes in turn, for graphs
    limit: float = LIMIT  # of an output's relative distance from the reference, and from the first rival's
    # Of the first output, to which all are held; or of each contender's outputs, where not all compute the same.
    reference: Callable[[], Expected | dict[str, tuple[Expected, ...]]] | None = None
    # Beside the latter, of contenders whose timed outputs have no reference: the difference of a smaller call from its own.
    agreement: Callable[[], dict[str, float]] | None = None
    kernel: str = ""  # Heddle's candidate
    sources: tuple[str, ...] = ()
    absent: dict[str, str] = dataclasses.field(default_factory=dict)  # contender -> why it has no such kernel


def random(*shape, dtype=torch.bfloat16):
    x = torch.randn(*shape, device="cuda", dtype=torch.float32 if dtype == torch.float32 else torch.bfloat16)
    return x.to(dtype)


def operands(batch, length, heads, kv_heads, size, dtype=torch.bfloat16):
    return [random(batch, length, h, size, dtype=dtype) for h in (heads, kv_heads, kv_heads)]


def chosen(q, k, v, backward=False, **options):
    """The name of the candidate that a call gets."""
    found = heddle.explain(q, k, v, backward=backward, **options).chosen
    if found is None:
        raise ValueError("Heddle refuses this call: a row must say that it expects so")
    return found.name


def served(name, backward=False, also=()):
    """What a Row says of the candidate that serves it."""
    return {"kernel": name, "sources": (*sources.attention(name, backward), *also)}


def direction(causal):
    return "bottom_right" if causal else "none"


def forward_work(batch, heads, length, size, causal):
    return 4e-12 * batch * heads * length * length * size / (2 if causal else 1)


def batched(batch, length, heads, kv_heads, size, causal, force=None):
    """Equal lengths, with or without causality; `force`: one of Heddle's candidates, beside FlashAttention-2 alone."""
    q, k, v = operands(batch, length, heads, kv_heads, size)
    mine = {"causal": direction(causal), "force": force}
    options = {"is_causal": causal, "enable_gqa": heads != kv_heads}
    calls = {"heddle": lambda: heddle.attention(q, k, v, **mine)}
    if force is None:
        calls |= peers.fa3_dense(q, k, v, causal=causal) | {"cudnn": peers.sdpa(q, k, v, "cudnn", **options)}
    calls["fa2"] = peers.sdpa(q, k, v, "fa2", **options)
    work = forward_work(batch, heads, length, size, causal)
    how = "graph" if work < SHORT_WORK else "queued"
    return Row(calls, work, how=how, **served(chosen(q, k, v, **mine)))


def window_pairs(length, window):
    return window * length - window * (window - 1) / 2


def windowed(length, heads, size, window):
    q, k, v = operands(1, length, heads, heads, size)
    starts = torch.tensor([0, length], dtype=torch.int32, device="cuda")
    packed = [x[0] for x in (q, k, v)]
    mine = {"causal": "bottom_right", "window": (window - 1, -1)}
    flash = peers.fa2_packed(*packed, starts, length, True, (window - 1, 0))
    calls = {"heddle": lambda: heddle.attention(q, k, v, **mine)}
    calls |= peers.fa3_dense(q, k, v, causal=True, window=(window - 1, 0)) | {"fa2": lambda: flash()[None]}
    work = 4e-12 * heads * size * window_pairs(length, window)
    reference = lambda: sampled(Attention(q, k, v, causal=True, left=window - 1))  # noqa: E731
    return Row(calls, work, reference=reference, **served(chosen(q, k, v, **mine)))


def spread_lengths(total):
    """Lengths from 128 to 8192 tokens, spread evenly on a log scale, and the starts of such documents when packed."""
    generator = torch.Generator().manual_seed(0)
    lengths = []
    while sum(lengths) < total:
        lengths.append(min(int(2 ** (7 + 6 * torch.rand(1, generator=generator).item())), total - sum(lengths)))
    return lengths, torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device="cuda")


def packed_options(starts, longest, causal):
    return {
        "causal": direction(causal),
        "cu_seqlens_q": starts,
        "cu_seqlens_k": starts,
        "max_seqlen_q": longest,
        "max_seqlen_k": longest,
    }


def documents(total, heads, kv_heads, size, causal):
    lengths, starts = spread_lengths(total)
    longest = max(lengths)
    q, k, v = (x[0] for x in operands(1, total, heads, kv_heads, size))
    mine = packed_options(starts, longest, causal)
    calls = {"heddle": lambda: heddle.attention(q, k, v, **mine)}
    calls |= peers.fa3_packed(q, k, v, starts, longest, causal) | {
        "fa2": peers.fa2_packed(q, k, v, starts, longest, causal)
    }
    work = 4e-12 * heads * size * sum(n * n for n in lengths) / (2 if causal else 1)
    reference = lambda: sampled_documents(q, k, v, starts.tolist(), causal)  # noqa: E731
    return Row(calls, work, reference=reference, **served(chosen(q, k, v, **mine)))


OPTIONS = (
    "softcap",
    "alibi",
    "bias",
    "shared_bias",
    "key_bias",
    "mask",
    "key_mask",
    "padding",
    "shared_bias_key_mask",
    "sink",
)


def option(name, size, length=8192, batch=2):
    """Score options. Of the contenders torch's memory-efficient kernel and cuDNN take a bias or a mask, FlashAttention has none."""
    heads = HEADS[size]
    q, k, v = operands(batch, length, heads, heads, size)
    shape = {
        "bias": (1, heads, length, length), "shared_bias": (1, 1, length, length), "key_bias": (batch, 1, 1, length),
        "mask": (1, heads, length, length), "key_mask": (batch, 1, 1, length), "padding": (batch, 1, 1, length),
    }  # fmt: skip
    made = {
        "softcap": lambda: {"softcap": 30.0},
        "alibi": lambda: {"alibi_slopes": torch.rand(heads, device="cuda")},
        "sink": lambda: {"sink": torch.randn(heads, device="cuda")},
        "padding": lambda: {"mask": (torch.arange(length, device="cuda") < length - 700).expand(shape["padding"])},
        "shared_bias_key_mask": lambda: {"bias": random(*shape["shared_bias"]), "mask": torch.rand(shape["key_mask"], device="cuda") < 0.9},
    }  # fmt: skip
    made |= {n: lambda n=n: {"bias": random(*shape[n])} for n in ("bias", "shared_bias", "key_bias")}
    made |= {n: lambda n=n: {"mask": torch.rand(shape[n], device="cuda") < 0.9} for n in ("mask", "key_mask")}
    mine = made[name]()
    calls = {"heddle": lambda: heddle.attention(q, k, v, **mine)}
    if len(mine) == 1 and not mine.keys().isdisjoint(("bias", "mask")):
        scores = next(iter(mine.values())).expand(batch, heads, length, length)
        calls |= {rival: peers.sdpa(q, k, v, rival, attn_mask=scores) for rival in ("efficient", "cudnn")}
    reference = lambda: sampled(Attention(q, k, v, **mine))  # noqa: E731
    return Row(
        calls, forward_work(batch, heads, length, size, False), reference=reference, **served(chosen(q, k, v, **mine))
    )


def narrow(batch, length, heads, size, causal, scaling):
    """e4m3 operands, without scales or with scales by head or token; FlashAttention-3 alone has them too, but by token."""
    q, k, v = operands(batch, length, heads, heads, size, torch.float8_e4m3fn)
    shape = {"none": None, "heads": (batch, 1, heads), "tokens": (batch, length, heads)}[scaling]
    names = ("q_scale", "k_scale", "v_scale")
    scales = {} if shape is None else {n: torch.rand(shape, device="cuda") + 0.5 for n in names}
    descales = {n.replace("scale", "descale"): x[:, 0].contiguous() for n, x in scales.items()}
    mine = {"causal": direction(causal), **scales}
    rivals = peers.fa3_dense(q, k, v, causal=causal, **descales) if scaling != "tokens" else {}
    reference = lambda: sampled(Attention(q, k, v, causal=causal, **scales))  # noqa: E731
    work = forward_work(batch, heads, length, size, causal)
    found = heddle.explain(q, k, v, **mine)
    if found.chosen is None:
        why = next(one.reason for one in found if one.name == "sm90_fp8")
        return Row(rivals, work, limit=E4M3_LIMIT, reference=reference, absent={"heddle": why})
    calls = {"heddle": lambda: heddle.attention(q, k, v, **mine)} | rivals
    return Row(calls, work, limit=E4M3_LIMIT, reference=reference, **served(found.chosen.name))


def int8_qk(length, causal, size=128):
    """q and k in 8 bits, which no contender in torch has: beside Heddle's own kernel in 16 bits and what runs by itself."""
    q, k, v = operands(16384 // length, length, HEADS[size], HEADS[size], size)
    how = direction(causal)
    mine = {"causal": how, "precision": "int8_qk"}
    calls = {
        "heddle": lambda: heddle.attention(q, k, v, **mine),
        "sm80": lambda: heddle.attention(q, k, v, causal=how, force="sm80"),
        "default": lambda: heddle.attention(q, k, v, causal=how),
    }
    work = forward_work(16384 // length, HEADS[size], length, size, causal)
    reference = lambda: sampled(Attention(q, k, v, causal=causal))  # noqa: E731
    return Row(calls, work, limit=INT8_LIMIT, reference=reference, **served(chosen(q, k, v, **mine)))


def single(length, precision, batch=2, heads=16, size=128):
    """float32: torch's memory-efficient kernel, which multiplies in tf32 where torch is allowed to."""
    q, k, v = operands(batch, length, heads, heads, size, torch.float32)
    calls = {
        "heddle": lambda: heddle.attention(q, k, v, precision=precision),
        "efficient": peers.sdpa(q, k, v, "efficient", precision == "tf32"),
    }
    return Row(calls, forward_work(batch, heads, length, size, False), **served(chosen(q, k, v, precision=precision)))


def unfused(length, batch=1, heads=8, size=64):
    """What fusing gains: torch's math kernel writes the scores."""
    q, k, v = operands(batch, length, heads, heads, size)
    calls = {"heddle": lambda: heddle.attention(q, k, v), "math": peers.sdpa(q, k, v, "math")}
    calls["baseline"] = lambda: heddle.attention(q, k, v, method="baseline")
    return Row(calls, 1, "calls/s", "graph", **served(chosen(q, k, v), also=sources.ATTENTION["baseline_cuda", False]))


def half(length, batch=1, heads=8, size=64):
    """What 16 bits gain over float32."""
    q, k, v = operands(batch, length, heads, heads, size)
    wide = [x.float() for x in (q, k, v)]
    calls = {
        "heddle": lambda: heddle.attention(q, k, v),
        "f32": lambda: heddle.attention(*wide),
        "tf32": lambda: heddle.attention(*wide, precision="tf32"),
    }
    reference = lambda: sampled(Attention(q, k, v))  # noqa: E731
    return Row(
        calls,
        1,
        "calls/s",
        "graph",
        reference=reference,
        **served(chosen(q, k, v), also=sources.attention(chosen(*wide))),
    )


def short(length, how):
    """A short call: "graph", what the GPU takes; "host", what a Python user waits for, launch included."""
    q, k, v = operands(1, length, 4, 4, 64)
    calls = {"heddle": lambda: heddle.attention(q, k, v)} | peers.fa3_dense(q, k, v)
    calls |= {name: peers.sdpa(q, k, v, name) for name in ("cudnn", "fa2")}
    return Row(calls, 1, "calls/s", how, **served(chosen(q, k, v), also=sources.PYTHON if how == "host" else ()))


def short_d128(length, batch, causal, heads=16, size=128):
    """What is chosen where the Ampere kernel's smaller tiles fill more of the GPU, beside both kernels."""
    q, k, v = operands(batch, length, heads, heads, size)
    calls = {
        name: lambda force=force: heddle.attention(q, k, v, causal=direction(causal), force=force)
        for name, force in (("heddle", None), ("sm80", "sm80"), ("sm90", "sm90"))
    }
    calls |= peers.fa3_dense(q, k, v, causal=causal)
    calls |= {name: peers.sdpa(q, k, v, name, is_causal=causal) for name in ("cudnn", "fa2")}
    kernels = served(
        chosen(q, k, v, causal=direction(causal)), also=(*sources.attention("sm80"), *sources.attention("sm90"))
    )
    return Row(calls, 1, "calls/s", "graph", **kernels)


def lengths_rows(prefix, sizes, lengths, make):
    """f"{prefix} D{size} {mask} S{length}" -> maker, make(batch, length, heads, size, causal)."""
    return {
        f"{prefix} D{size} {mask} S{length}": functools.partial(
            make, 16384 // length, length, HEADS[size], size, causal
        )
        for size in sizes
        for mask, causal in MASKS.items()
        for length in lengths
    }


def equal_heads(force=None):
    return lambda b, n, h, d, causal: batched(b, n, h, h, d, causal, force)


def plain_rows():
    out = lengths_rows("forward", (64, 128, 256), LENGTHS, equal_heads()) | lengths_rows(
        "forward", (96, 192), FEW_LENGTHS, equal_heads()
    )
    for length in LENGTHS[3:]:
        out[f"gqa 64/8 D128 causal S{length}"] = functools.partial(batched, 1, length, 64, 8, 128, True)
    out["gqa 32/1 D128 causal S4096"] = functools.partial(batched, 4, 4096, 32, 1, 128, True)
    for window in (256, 1024, 4096):
        out[f"window {window} D128 causal S16384"] = functools.partial(windowed, 16384, 16, 128, window)
    for mask, causal in MASKS.items():
        out[f"documents D128 {mask}"] = functools.partial(documents, 32768, 16, 16, 128, causal)
        out[f"documents 32/8 D128 {mask}"] = functools.partial(documents, 32768, 32, 8, 128, causal)
    return out


def rows():
    """name -> maker of a Row."""
    out = plain_rows()
    for size in (64, 128, 256):
        out |= {f"option {name} D{size} S8192": functools.partial(option, name, size) for name in OPTIONS}
    out |= lengths_rows("sm80", (64, 128, 256), (512, 2048, 8192), equal_heads("sm80"))
    out |= lengths_rows(
        "fp8", (64, 128, 256), LENGTHS[2:], lambda b, n, h, d, causal: narrow(b, n, h, d, causal, "none")
    )
    for scaling in ("heads", "tokens"):
        out[f"fp8 D128 none S8192, scales by {scaling}"] = functools.partial(narrow, 2, 8192, 16, 128, False, scaling)
    for mask, causal in MASKS.items():
        out |= {f"int8_qk D128 {mask} S{n}": functools.partial(int8_qk, n, causal) for n in (1024, 2048, 8192)}
    for precision in ("f32", "tf32"):
        out[f"float32 {precision} D128 S4096"] = functools.partial(single, 4096, precision)
    for length in (128, 256, 512, 1024, 2048, 4096):
        out[f"unfused S{length}"] = functools.partial(unfused, length)
        out[f"half S{length}"] = functools.partial(half, length)
    for mask, causal in MASKS.items():
        for batch in (1, 8):
            for length in (128, 256, 512):
                out[f"short D128 {mask} B{batch} S{length}"] = functools.partial(short_d128, length, batch, causal)
    for length in (128, 256, 512, 1024):
        out[f"short call S{length}"] = functools.partial(short, length, "graph")
        out[f"python call S{length}"] = functools.partial(short, length, "host")
    return out
