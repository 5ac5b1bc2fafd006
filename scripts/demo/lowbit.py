"""The encoder with low-bit layers on real text, one linear layer, and what a study of FP4 layers reported (docs/nn.md names it)."""

from __future__ import annotations

import math
import statistics
import time

import numpy as np

from . import encode, isolate, memory, text
from .progress import OUT_OF_TIME
from .reported import KEPT

STAGES = ("The encoder with low-bit layers", "The same on a GPU", "Reported figures of FP4 layers, repeated")

NEIGHBOURS = 10  # of a piece, that retrieval is judged by
ERROR = 0.05  # of the embeddings, that precisions are chosen for
SAMPLE = 3  # pieces that they are chosen on
TRIED = ["nvfp4:mse", "int8_row"]  # beside float32
CHOSEN = "chosen"

# (name, dtype of activations, rules by layer). With bfloat16 activations products run in pairs where the processor has them.
POLICIES: list[tuple[str, str, dict[str, str]]] = [
    ("float32", "float32", {}),
    ("bfloat16", "bfloat16", {}),
    ("int8_row", "bfloat16", {"*": "int8_row"}),
    ("fp8_row", "bfloat16", {"*": "fp8_row:mse"}),
    ("int4_g32_zp", "bfloat16", {"*": "int4_g32_zp:mse"}),
    ("nvfp4", "bfloat16", {"*": "nvfp4:mse"}),
    ("nf4", "bfloat16", {"*": "nf4:mse"}),
    ("fp4_bnb", "bfloat16", {"*": "fp4_bnb:mse"}),
    ("int4_g64", "bfloat16", {"*": "int4_g64:mse"}),
    ("int4_g128", "bfloat16", {"*": "int4_g128:mse"}),
    ("mxfp4", "bfloat16", {"*": "mxfp4:mse"}),
    ("e2m1_row", "bfloat16", {"*": "e2m1_row"}),
    ("nvfp4 + int8", "bfloat16", {"*.attention.*": "nvfp4:mse", "*": "int8_row"}),
    ("nvfp4 + bf16", "bfloat16", {"*.layer.0.*": "bfloat16", "*.layer.5.*": "bfloat16", "*": "nvfp4:mse"}),
]


def retrieval(found: np.ndarray, wanted: np.ndarray, neighbours: int = NEIGHBOURS) -> dict:
    """Each piece as a query over all others, by cosine: how much of its nearest `neighbours` is the same (mean and least of 0..1),
    how often the nearest is, and Spearman's correlation of the whole ranking (mean and least). Embeddings [pieces, hidden]."""
    if found.shape != wanted.shape or len(found) < 3:
        raise ValueError(
            f"[retrieval] found {found.shape} and wanted {wanted.shape} must have one shape and three pieces"
        )
    count = len(found)
    most = min(neighbours, count - 1)

    def order(embeddings):
        unit = embeddings.astype(np.float64)
        unit /= np.linalg.norm(unit, axis=1, keepdims=True)
        scores = unit @ unit.T
        np.fill_diagonal(scores, -np.inf)  # itself is last, and left out
        return np.argsort(-scores, axis=1, kind="stable")[:, :-1]

    ours, theirs = order(found), order(wanted)
    overlap = np.array([len(set(a[:most]) & set(b[:most])) / most for a, b in zip(ours, theirs)])
    rank = np.zeros((2, count, count))
    for which, ordered in enumerate((ours, theirs)):
        np.put_along_axis(rank[which], ordered, np.arange(count - 1.0)[None], axis=1)
    squares = ((rank[0] - rank[1]) ** 2).sum(1)
    n = count - 1
    spearman = 1 - 6 * squares / (n * (n * n - 1)) if n > 1 else np.ones(count)
    return {
        "neighbours": most,
        "overlap_mean": float(overlap.mean()),
        "overlap_least": float(overlap.min()),
        "nearest_same": float((ours[:, 0] == theirs[:, 0]).mean()),
        "spearman_mean": float(spearman.mean()),
        "spearman_least": float(spearman.min()),
    }


def kept(found: np.ndarray, wanted: np.ndarray) -> dict:
    """What embeddings keep of others: their cosine, retrieval, and the error of all of them."""
    difference = found.astype(np.float64) - wanted
    return {
        "cosine": encode.compare(found, wanted),
        "retrieval": retrieval(found, wanted),
        "error": float(np.linalg.norm(difference) / np.linalg.norm(wanted)),
    }


def _encode_all(folder: str, dtype: str, rules: dict, packed: text.Packed, most_seconds: float) -> dict:
    import heddle

    isolate.fresh_pages()
    before = isolate._status("VmRSS")
    with isolate.Residence() as loading:
        seconds, encoder = isolate.seconds(lambda: heddle.Encoder(folder, dtype=dtype, layers=rules))
    held = isolate._status("VmRSS") - before
    batches = packed.batches(encode.BATCH_TOKENS)
    rounds, embeddings, running = [], None, None
    begun = time.perf_counter()
    while not rounds or (len(rounds) < 3 and time.perf_counter() - begun + rounds[-1][0] < most_seconds):
        with isolate.Residence() as residence:
            embeddings, taken, stages = encode.one_pass(encoder, batches)
            rounds.append((taken, stages))
        running = running or residence  # only the first round meets memory as a fresh process does
    least, stages = min(rounds, key=lambda r: r[0])
    return {
        "dtype": dtype,
        "load_seconds": seconds,
        "seconds": least,
        "median": statistics.median(taken for taken, _ in rounds),
        "rounds": len(rounds),
        "stages": stages,
        "pieces_per_second": len(packed) / least,
        "weight_bytes": encoder.weight_bytes,
        "linear_bytes": sum(layer.weight_bytes for layer in encoder.layers),
        "held": max(0, held),
        "loading": loading.grown,
        "peak": max(0, held) + running.grown,
        "resident_how": running.how,
        "formats": sorted({layer.format for layer in encoder.layers}),
        "embeddings": embeddings,
    }


def _choose(folder: str, sample: text.Packed) -> tuple[dict, float, float]:
    import heddle

    seconds, choice = isolate.seconds(
        lambda: heddle.Encoder.choose_precisions(
            folder, sample.token_ids, sample.cu_seqlens, error=ERROR, formats=TRIED
        )
    )
    return choice.layers, choice.error, seconds


def policies(packed: text.Packed, tokens_per_second: float, progress) -> list[dict]:
    """Every policy over the text, or over as many of its first pieces as there is time for; each in a process of its own.

    Adds `cosine` and `retrieval` against float32. The last policy is chosen by measured sensitivity.
    """
    folder = str(encode.model_folder())
    runs: list[dict] = []
    choosing = min(0.3 * progress.left(), 60.0)
    tokens = max(1.0, tokens_per_second * (progress.left() - choosing) / (1.3 * (len(POLICIES) + 1)))
    part = packed.select(
        0, min(len(packed), max(32, int(np.searchsorted(packed.cu_seqlens, tokens, side="right")) - 1))
    )
    if len(part) < len(packed):
        progress.leave_out(f"every format on the last {len(packed) - len(part)} of {len(packed)} pieces", OUT_OF_TIME)
    todo: list[tuple[str, str, dict]] = list(POLICIES)
    deadline = time.monotonic() + max(0.0, progress.left())
    base = None
    while todo:
        name, dtype, rules = todo.pop(0)
        share = max(0.0, (deadline - time.monotonic() - (choosing if name != CHOSEN else 0)) / (len(todo) + 2))
        if base is not None and share < 0.3 * runs[0]["seconds"]:
            progress.leave_out(f"the encoder with {name}", OUT_OF_TIME)
        else:
            run = isolate.call(_encode_all, folder, dtype, rules, part, share, timeout=300.0)
            embeddings = run.pop("embeddings")
            base = embeddings if base is None else base
            run |= {"name": name, "rules": rules, "pieces": len(part), "tokens": int(part.cu_seqlens[-1])}
            run |= kept(embeddings, base)
            runs.append(run)
            progress.step(
                f"{name:12s} {run['pieces_per_second']:6.1f} pieces/s, linear layers {run['linear_bytes'] / 2**20:5.1f} MiB, "
                f"cosine {run['cosine']['cosine_mean']:.5f}, top {NEIGHBOURS} {100 * run['retrieval']['overlap_mean']:.1f} %"
            )
        if not todo and name != CHOSEN and base is not None:
            sample = packed.select(0, min(SAMPLE, len(packed)))
            passes = 24 * len(TRIED) + 9  # trials, and whole encoders
            expected = passes * 1.2 * float(sample.cu_seqlens[-1]) / tokens_per_second
            if deadline - time.monotonic() < expected:
                progress.leave_out("the encoder with formats chosen by measured sensitivity", OUT_OF_TIME)
                break
            rules, error, seconds = isolate.call(_choose, folder, sample, timeout=300.0)
            progress.step(f"chosen for an error of {ERROR}: {error:.4f} on {len(sample)} pieces, in {seconds:.0f} s")
            todo.append((CHOSEN, "float32", rules))
    for run in runs:
        if run["name"] == CHOSEN:
            run |= {"allowed": ERROR, "sample_error": error, "sample": len(sample), "choosing_seconds": seconds}
    return runs


def gelu(y: np.ndarray) -> np.ndarray:
    import torch

    return torch.nn.functional.gelu(torch.from_numpy(y)).numpy()


LAYER_FORMATS = [
    ("e2m1_row", "plain"),
    ("mxfp4", "mse"),
    ("nvfp4", "plain"),
    ("nvfp4", "mse"),
    ("int4_g64", "mse"),
    ("fp8_row", "mse"),
    ("int8_row", "plain"),
]
STUDIED = {("e2m1_row", "plain"): KEPT}


def layer_accuracy(draws: int = 4) -> list[dict]:
    """1 - mean |dy| / mean |y| in percent of gelu(x W^T), 768 to 3072 as the study had it: x normal, W uniform in
    +-1/sqrt(768). Products are those of heddle.lowbit.linear; the mean of several draws, and their range."""
    from heddle import lowbit

    kept: dict = {key: [] for key in LAYER_FORMATS}
    bits = {}
    for seed in range(draws):
        random = np.random.default_rng(seed)
        x = random.standard_normal((64, 768)).astype(np.float32)
        w = random.uniform(-1, 1, (3072, 768)).astype(np.float32) / np.float32(math.sqrt(768))
        y = gelu(x.astype(np.float64) @ w.T)
        for format, rule in LAYER_FORMATS:
            q = lowbit.quantize(w, format, rule=rule)
            found = lowbit.linear(x, lowbit.pack(q), activation="gelu_erf").astype(np.float64)
            kept[format, rule].append(100 * (1 - np.abs(found - y).mean() / np.abs(y).mean()))
            bits[format, rule] = q.bits_per_weight
    return [
        {
            "format": f,
            "rule": r,
            "bits": bits[f, r],
            "kept": float(np.mean(kept[f, r])),
            "range": float(np.ptp(kept[f, r])),
            "study": STUDIED.get((f, r)),
        }
        for f, r in LAYER_FORMATS
    ]


def _least(function, rounds: int = 5, warm: bool = False) -> float:
    if not warm:
        function()
    return min(isolate.seconds(function)[0] for _ in range(rounds))


def layer_speed() -> dict:
    """gelu(x W^T), 4096 rows, 768 to 3072, float32: torch and packed e2m1_row; and W by its singular values before a product."""
    import torch
    from heddle import lowbit

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4096, 768, generator=generator)
    w = (2 * torch.rand(3072, 768, generator=generator) - 1) / math.sqrt(768)
    q = lowbit.quantize(w, "e2m1_row")
    packed = lowbit.pack(q)
    few = x[:64].contiguous()

    def decomposed():
        u, s, vh = torch.linalg.svd(w, full_matrices=False)
        rank = 192
        return (few @ vh[:rank].T * s[:rank]) @ u[:, :rank].T

    with torch.inference_mode():
        plain = _least(lambda: torch.nn.functional.gelu(x @ w.T), 2)
        fp4 = _least(lambda: lowbit.linear(x, packed, activation="gelu_erf"), 2)
        product = _least(lambda: few @ w.T)
        svd = isolate.seconds(decomposed)[0]
    return {"rows": 4096, "torch": plain, "fp4": fp4, "few": 64, "product": product, "svd": svd,
            "float_bytes": w.nbytes, "plain_bytes": q.nbytes, "packed_bytes": packed.nbytes}  # fmt: skip


def block(batch: int = 4, length: int = 1024, hidden: int = 768, heads: int = 12, intermediate: int = 3072) -> dict:
    """torch.nn.TransformerEncoderLayer (norm first, GELU) in float32, and heddle.nn.TransformerBlock with its weights: in float32, and
    with the feed-forward's two layers in e2m1_row and in nvfp4. All in eval mode, without dropout; what is kept is of torch's output."""
    import torch
    from heddle import nn

    torch.manual_seed(2)
    options = {"dropout": 0.1, "activation": "gelu", "norm_first": True, "batch_first": True}
    layer = torch.nn.TransformerEncoderLayer(hidden, heads, intermediate, **options).eval()
    x = torch.randn(batch, length, hidden)
    modules = {"torch": layer, "float32": nn.TransformerBlock.from_torch(layer)}
    for format, rule in (("e2m1_row", "plain"), ("nvfp4", "mse")):
        policy = nn.Policy({"up": format, "down": format}, scale_rule=rule)
        modules[format] = nn.quantize_model(nn.TransformerBlock.from_torch(layer), policy)
    found: dict = {"batch": batch, "length": length, "hidden": hidden}
    base = None
    with torch.inference_mode():
        for key, module in modules.items():
            y = module(x).double()
            base = y if base is None else base
            seconds = _least(lambda module=module: module(x), 2, warm=True)
            found[key] = {"seconds": seconds, "kept": float(100 * (1 - (y - base).abs().mean() / base.abs().mean()))}
    return found


def attention_memory(batch: int = 4, heads: int = 8, length: int = 2048, head_size: int = 64) -> dict:
    """Resident bytes of one call, q, k and v included, with the whole score matrix and with flash; the study's shape."""
    found = {"batch": batch, "heads": heads, "length": length, "head_size": head_size}
    for method in ("baseline", "flash"):
        point = memory.measure((batch, heads, length, head_size), method, "float32")
        found[method] = point["inputs"] + point["resident"]
    return found


WORDS = {
    "layer": "a layer's accuracy",
    "attention": "attention's memory",
    "speed": "a layer's speed",
    "block": "a Transformer block",
}


def study(progress) -> dict:
    """What the study reported, measured here: a part that there is no time for is missing."""
    found = {}
    parts = (("layer", layer_accuracy), ("attention", attention_memory), ("speed", layer_speed), ("block", block))
    for name, measure in parts:
        if progress.left() < 2:
            progress.leave_out(f"the reported figures of {WORDS[name]}", OUT_OF_TIME)
            continue
        found[name] = isolate.call(measure) if name != "attention" else measure()
        progress.step(f"{WORDS[name]}: measured")
    return found
