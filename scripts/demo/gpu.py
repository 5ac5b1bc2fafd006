"""The encoder on a GPU, format by format, over the text that the page on low-bit weights is about."""

from __future__ import annotations

import datetime
import json
import statistics
import subprocess
import time

import numpy as np

from bench import gpu_timing

from . import encode, lowbit, machine, text
from .progress import OUT_OF_TIME

FIGURES = machine.ROOT / "bench" / "results" / "encoder-nvidia-h200.json"
POLICIES = [("float16", "float16", {}), *lowbit.POLICIES[1:]]
BATCHES = [encode.BATCH_TOKENS, 1 << 16]  # tokens of a call


def absence() -> str:
    """Why nothing can be measured on a GPU here; empty if it can."""
    import torch
    from heddle import _heddle

    if not _heddle.cuda_built():
        return "this Heddle was built without CUDA"
    return "" if torch.cuda.is_available() else "torch sees no GPU here"


def conditions() -> dict:
    import torch

    def asked(what):
        try:
            done = subprocess.run(
                ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader"],
                capture_output=True,
                text=True,
                timeout=20,
                check=True,
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.splitlines()[torch.cuda.current_device()].strip()

    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": asked("driver_version"),
        "sm_clock_maximum": asked("clocks.max.sm"),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "method": f"The whole text in calls of at most {BATCHES[0]} or {BATCHES[1]} tokens, one after another, then one wait for the GPU; a piece alone: one call and its wait. Both as the host "
        f"feels them: the median of {gpu_timing.ROUNDS} rounds, as many passes in each as take {gpu_timing.HOST_SECONDS} s. Peak memory: weights, and the most that workspace and results took beside them.",
    }


def _seconds(call) -> float:
    """Of a call, as the host feels it."""
    times, _ = gpu_timing.host_milliseconds({"": gpu_timing.Contender(call)})
    return statistics.median(times[""]) / 1e3


def _rate(encoder, packed: text.Packed, tokens: int) -> float:
    """Tokens a second."""
    batches = packed.batches(tokens)

    def whole():
        for batch in batches:
            encoder.encode(batch.token_ids, batch.cu_seqlens)

    return float(packed.cu_seqlens[-1]) / _seconds(whole)


def _alone(encoder, packed: text.Packed) -> float:
    """Seconds of a piece of the median length, with the wait for it."""
    import torch

    middle = int(np.argsort(packed.lengths)[len(packed) // 2])
    piece = packed.select(middle, 1 + middle)

    def one():
        encoder.encode(piece.token_ids, piece.cu_seqlens)
        torch.cuda.synchronize()

    return _seconds(one)


def measure(
    folder: str, packed: text.Packed, exact: np.ndarray, left=lambda: float("inf"), step=lambda line: None
) -> dict:
    """Every policy over the text, held against `exact`, the CPU's embeddings in float32 [pieces, hidden]."""
    import heddle
    import torch

    rows = []
    for name, dtype, rules in POLICIES:
        if left() < 5:
            break
        begun = time.perf_counter()
        encoder = heddle.Encoder(folder, device="cuda", dtype=dtype, layers=rules)
        loading = time.perf_counter() - begun
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        embeddings = np.concatenate(
            [encoder.encode(b.token_ids, b.cu_seqlens).cpu().numpy() for b in packed.batches(BATCHES[0])]
        )
        row = {
            "name": name,
            "dtype": dtype,
            "rules": rules,
            "formats": sorted({layer.format for layer in encoder.layers}),
            "pieces": len(packed),
            "tokens": int(packed.cu_seqlens[-1]),
            "load_seconds": loading,
            "weight_bytes": encoder.weight_bytes,
            "linear_bytes": sum(layer.weight_bytes for layer in encoder.layers),
            "peak": encoder.weight_bytes + torch.cuda.max_memory_allocated() - before,
            "tokens_per_second": {str(tokens): _rate(encoder, packed, tokens) for tokens in BATCHES},
            "alone_seconds": _alone(encoder, packed),
            **lowbit.kept(embeddings, exact),
        }
        rows.append(row)
        step(
            f"{name:12s} {row['tokens_per_second'][str(BATCHES[0])] / 1e6:5.2f} M tokens/s, linear layers {row['linear_bytes'] / 2**20:5.1f} MiB, "
            f"cosine {row['cosine']['cosine_mean']:.5f}, top {lowbit.NEIGHBOURS} {100 * row['retrieval']['overlap_mean']:.1f} %"
        )
        del encoder
    return {"conditions": conditions(), "rows": rows}


def _measure_here(folder: str, packed: text.Packed, seconds: float, step) -> dict:
    import heddle

    begun = time.monotonic()
    encoder = heddle.Encoder(folder)
    exact = np.concatenate([encoder.encode(b.token_ids, b.cu_seqlens) for b in packed.batches(encode.BATCH_TOKENS)])
    return measure(folder, packed, exact, lambda: begun + seconds - time.monotonic(), step)


def policies(packed: text.Packed, progress) -> dict:
    """Measured here, or, where there is no GPU, the figures kept in the repository; `here` says which, `why` why not."""
    why = absence()
    if why:
        kept = json.loads(FIGURES.read_text()) if FIGURES.exists() else {"rows": []}
        return {"here": False, "why": why, "source": f"bench/results/{FIGURES.name}", **kept}
    found = _measure_here(str(encode.model_folder()), packed, progress.left(), progress.step)
    for name, _, _ in POLICIES[len(found["rows"]) :]:
        progress.leave_out(f"the encoder with {name} on the GPU", OUT_OF_TIME)
    return {"here": True, **found}
