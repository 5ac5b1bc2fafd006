"""Heddle against the kernels in torch (cuDNN, FlashAttention-2) on this GPU, in one run: what `make bench-gpu` runs.

Each sample is one call between two CUDA events; for each contender, the median of 20 after 5 that are not counted. Contenders
follow each other in alternating order, with a pause before each, so that all start on an equally cool chip. Outputs are
compared first. FlashAttention-3 is not in torch: its stored figures (peers_h200.json) are scaled by the rate of a matrix
product measured here and there. The figures go to bench/results/<gpu>.json with the conditions they were taken under.

  python bench/attention_bench_gpu.py --filter D128 --shard 0/2
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import time

import heddle
import torch
import torch.nn.functional as functional
from torch.nn.attention import SDPBackend, sdpa_kernel

HERE = pathlib.Path(__file__).resolve().parent
PAUSE = 0.06
ROUNDS = 2
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)


def median_ms(call, samples=20, warm=5):
    for _ in range(warm):
        call()
    times = []
    for _ in range(samples):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def gemm_tflops():
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    time.sleep(4 * PAUSE)
    return 2 * 8192**3 / median_ms(lambda: a @ a) / 1e9


def random(*shape):
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def sdpa(q, k, v, backend, **options):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))

    def call():
        with sdpa_kernel(backend):
            return functional.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2)

    return call


def batched(batch, length, heads, kv_heads, size, causal):
    """Rows that all contenders have: equal lengths, with or without causality."""
    q, k, v = random(batch, length, heads, size), random(batch, length, kv_heads, size), random(batch, length, kv_heads, size)
    options = {"is_causal": causal, "enable_gqa": heads != kv_heads}
    calls = {
        "heddle": lambda: heddle.attention(q, k, v, causal="bottom_right" if causal else "none"),
        "cudnn": sdpa(q, k, v, SDPBackend.CUDNN_ATTENTION, **options),
        "fa2": sdpa(q, k, v, SDPBackend.FLASH_ATTENTION, **options),
    }
    return calls, 4 * batch * heads * length * length * size / (2 if causal else 1)


def windowed(length, heads, size, window):
    q, k, v = random(1, length, heads, size), random(1, length, heads, size), random(1, length, heads, size)
    lengths = torch.tensor([0, length], dtype=torch.int32, device="cuda")
    packed = [x[0] for x in (q, k, v)]
    calls = {
        "heddle": lambda: heddle.attention(q, k, v, causal="bottom_right", window=(window - 1, -1)),
        "fa2": lambda: torch.ops.aten._flash_attention_forward(
            *packed, lengths, lengths, length, length, 0.0, True, False, window_size_left=window - 1, window_size_right=0
        )[0][None],
    }
    return calls, 4 * heads * size * (window * length - window * (window - 1) / 2)


def documents(total, heads, size, causal):
    """Packed documents of 128 to 8192 tokens, lengths spread evenly on a log scale."""
    generator = torch.Generator().manual_seed(0)
    lengths = []
    while sum(lengths) < total:
        lengths.append(min(int(2 ** (7 + 6 * torch.rand(1, generator=generator).item())), total - sum(lengths)))
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device="cuda")
    longest = max(lengths)
    q, k, v = random(total, heads, size), random(total, heads, size), random(total, heads, size)
    calls = {
        "heddle": lambda: heddle.attention(
            q, k, v, causal="bottom_right" if causal else "none", cu_seqlens_q=starts, cu_seqlens_k=starts,
            max_seqlen_q=longest, max_seqlen_k=longest
        ),
        "fa2": lambda: torch.ops.aten._flash_attention_forward(
            q, k, v, starts, starts, longest, longest, 0.0, causal, False
        )[0],
    }
    return calls, 4 * heads * size * sum(n * n for n in lengths) / (2 if causal else 1)


def option(name, length=8192, batch=2, heads=16, size=128):
    """Score options, which no contender in torch has: only Heddle's own rate."""
    q, k, v = random(batch, length, heads, size), random(batch, length, heads, size), random(batch, length, heads, size)
    options = {
        "softcap": lambda: {"softcap": 30.0},
        "alibi": lambda: {"alibi_slopes": torch.rand(heads, device="cuda")},
        "bias": lambda: {"bias": random(1, heads, length, length)},
        "key_mask": lambda: {"mask": torch.rand(batch, 1, 1, length, device="cuda") < 0.9},
        "sink": lambda: {"sink": torch.randn(heads, device="cuda")},
    }[name]()
    return {"heddle": lambda: heddle.attention(q, k, v, **options)}, 4 * batch * heads * length * length * size


def rows():
    """name -> maker of (contenders, FLOP)."""
    out = {}
    for size in (64, 128, 256):
        for causal in (False, True):
            for length in LENGTHS:
                name = f"forward D{size} {'causal' if causal else 'none'} S{length}"
                batch, heads = 16384 // length, 2048 // size
                out[name] = lambda b=batch, n=length, h=heads, d=size, c=causal: batched(b, n, h, h, d, c)
    for length in LENGTHS[3:]:
        out[f"gqa 64/8 D128 causal S{length}"] = lambda n=length: batched(1, n, 64, 8, 128, True)
    out["window 1024 D128 causal S16384"] = lambda: windowed(16384, 16, 128, 1024)
    for causal in (False, True):
        out[f"documents D128 {'causal' if causal else 'none'}"] = lambda c=causal: documents(32768, 16, 128, c)
    for name in ("softcap", "alibi", "bias", "key_mask", "sink"):
        out[f"option {name} D128 S8192"] = lambda n=name: option(n)
    return out


def stored_fa3(name, gemm):
    match = re.fullmatch(r"forward D(\d+) (none|causal) S(\d+)", name)
    peers = json.loads((HERE / "peers_h200.json").read_text(encoding="utf-8"))
    if not match or "H200" not in torch.cuda.get_device_name() or match[1] not in peers["forward"]:
        return None
    figure = peers["forward"][match[1]][match[2]][peers["lengths"].index(int(match[3]))]
    return figure * gemm / peers["gemm_tflops"]


def difference(calls):
    """Largest relative distance of a contender's output from Heddle's."""
    outputs = {name: call() for name, call in calls.items()}
    mine = outputs["heddle"].float()
    worst = 0.0
    for other in outputs.values():
        distance = ((other.float() - mine).norm() / mine.norm()).item()
        if not distance <= 0.02:
            raise SystemExit(f"outputs differ by {distance}")
        worst = max(worst, distance)
    return worst


def measure(name, make):
    calls, flop = make()
    distance = difference(calls)
    times = {contender: [] for contender in calls}
    for turn in range(ROUNDS):
        for contender in list(calls) if turn % 2 == 0 else list(calls)[::-1]:
            time.sleep(PAUSE)
            times[contender].append(median_ms(calls[contender]))
    gemm = gemm_tflops()
    tflops = {contender: flop / statistics.mean(each) / 1e9 for contender, each in times.items()}
    row = {"name": name, "milliseconds": times, "tflops": tflops, "gemm_tflops": gemm, "difference": distance}
    peers = {contender: rate for contender, rate in tflops.items() if contender != "heddle"}
    if (fa3 := stored_fa3(name, gemm)) is not None:
        peers["fa3_stored"] = row["tflops"]["fa3_stored"] = fa3
    if peers:
        row["rival"] = max(peers, key=peers.get)
        row["ratio"] = tflops["heddle"] / peers[row["rival"]]
    return row


def query(fields):
    out = subprocess.run(["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"], capture_output=True, text=True)
    return out.stdout.strip().split("\n")[0]


def commit():
    if "HEDDLE_COMMIT" in os.environ:
        return os.environ["HEDDLE_COMMIT"]
    with contextlib.suppress(OSError):
        out = subprocess.run(["git", "-C", str(HERE), "rev-parse", "HEAD"], capture_output=True, text=True)
        if out.returncode == 0:
            return out.stdout.strip()
    return "unknown"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--filter", default="", help="only rows whose name contains this")
    parser.add_argument("--shard", default="0/1", help="i/n: the i-th of n parts, i from 0")
    parser.add_argument("--out", type=pathlib.Path, help="the results file (default: bench/results/<gpu>.json)")
    arguments = parser.parse_args()
    index, count = (int(part) for part in arguments.shard.split("/"))
    if not torch.cuda.is_available():
        sys.exit("attention_bench_gpu.py: torch sees no GPU")
    torch.manual_seed(1)
    chosen = {name: make for name, make in rows().items() if arguments.filter in name}
    results = []
    for name, make in list(chosen.items())[index::count]:
        row = measure(name, make)
        results.append(row)
        rates = "  ".join(f"{contender} {rate:5.0f}" for contender, rate in row["tflops"].items())
        ratio = f"{row['ratio']:.2f} of {row['rival']}" if "ratio" in row else ""
        print(f"{name:34} {rates}  gemm {row['gemm_tflops']:4.0f}  {ratio}", flush=True)
    ratios = [row["ratio"] for row in results if row["name"].startswith("forward")]
    if ratios:
        print(f"forward: ratios {min(ratios):.2f} to {max(ratios):.2f}, median {statistics.median(ratios):.2f}")
    clocks, maximum, power, driver = query("clocks.sm,clocks.max.sm,power.limit,driver_version").split(", ")
    conditions = {
        "gpu": torch.cuda.get_device_name(), "driver": driver, "sm_clock_after": clocks, "sm_clock_maximum": maximum,
        "power_limit": power, "torch": torch.__version__, "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(),
        "commit": commit(), "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "method": " ".join(__doc__.split("\n\n")[1].split()),
    }  # fmt: skip
    gpu = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()).strip("-")
    out = arguments.out or HERE / "results" / f"{gpu}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"conditions": conditions, "rows": results}, indent=1) + "\n", encoding="utf-8")
    print("written to", out)


if __name__ == "__main__":
    main()
