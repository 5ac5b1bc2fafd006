"""Heddle against the kernels in torch (cuDNN, FlashAttention-2) on this GPU, in one run: what `make bench-gpu` runs.

Each sample is one call between two CUDA events; for each contender, the median of 20 after 5 that are not counted. Short
calls and decoding run in CUDA graphs of at least 20 calls, caches taken in turn so that they come from memory; Python's calls
are timed from Python. Gradients are taken by torch.autograd.grad of a forward that ran before, queued behind a pause of the GPU so
that the host's part does not count. Contenders follow each other in alternating order, with a pause before each, so that all start on an
equally cool chip. Outputs are compared first. FlashAttention-3 is not in torch: its stored figures (peers_h200.json) are
scaled by the rate of a matrix product measured here and there. The figures go to bench/results/<gpu>.json with the conditions
they were taken under.

  python bench/attention_bench_gpu.py --filter D128 --shard 0/2
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import time

import gpu_backward_rows
import gpu_linear_rows
import gpu_lowbit_rows
import gpu_rows
import torch

HERE = pathlib.Path(__file__).resolve().parent
PAUSE = 0.06
ROUNDS = 2
OWN = ("heddle", "baseline", "f32", "tf32", "default", "deterministic")  # not rivals: Heddle itself
HEAD_START = 500_000  # cycles that the GPU waits, longer than Python takes to put a call on the stream


def median_ms(call, samples=20, warm=5, queued=False):
    for _ in range(warm):
        call()
    times = []
    for _ in range(samples):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        if queued:
            torch.cuda._sleep(HEAD_START)
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def graph_ms(call, rotations):
    count = max(20, rotations)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for n in range(rotations):
            call(n) if rotations > 1 else call()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for n in range(count):
            call(n % rotations) if rotations > 1 else call()
    return median_ms(graph.replay, 7, 2) / count


def host_ms(call, count=300):
    for _ in range(50):
        call()
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(count):
            call()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - begin) / count)
    return statistics.median(times)


def milliseconds(row, call):
    if row.how == "graph":
        return graph_ms(call, row.rotations)
    return host_ms(call) if row.how == "host" else median_ms(call, queued=row.how == "queued")


# What the machine reaches in the same minute: a bf16 product of 8192 cubed, in TFLOP/s, or a copy of 2 GiB, in TB/s.
def gemm_tflops():
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    time.sleep(4 * PAUSE)
    return 2 * 8192**3 / median_ms(lambda: a @ a) / 1e9


def copy_tbs():
    a = torch.empty(1 << 31, device="cuda", dtype=torch.uint8)
    b = torch.empty_like(a)
    return 2 * a.numel() / median_ms(lambda: b.copy_(a), 9, 2) / 1e9


def stored_fa3(name, gemm):
    match = re.fullmatch(r"(forward|backward) D(\d+) (none|causal) S(\d+)", name)
    peers = json.loads((HERE / "peers_h200.json").read_text(encoding="utf-8"))
    if not match or "H200" not in torch.cuda.get_device_name() or match[2] not in peers[match[1]]:
        return None
    figure = peers[match[1]][match[2]][match[3]][peers["lengths"].index(int(match[4]))]
    return figure * gemm / peers["gemm_tflops"]


def difference(row):
    """Largest relative distance of a contender's output, or of a gradient, from Heddle's."""
    calls = row.calls
    outputs = {name: call() for name, call in calls.items()}
    each = {name: out if isinstance(out, tuple) else (out,) for name, out in outputs.items()}
    worst = 0.0
    for name, tensors in each.items():
        for mine, other in zip(each["heddle"], tensors, strict=True):
            distance = ((other.float() - mine.float()).norm() / mine.float().norm()).item()
            if not distance <= row.tolerance:
                raise SystemExit(f"the outputs of heddle and {name} differ by {distance}")
            worst = max(worst, distance)
    return worst


def peak_mib(call):
    """The most memory that torch had given out during a call, beyond what was given before."""
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def measure_memory(name, row):
    mib = {contender: peak_mib(call) for contender, call in row.calls.items()}
    return {"name": name, "unit": row.unit, "timed": row.how, "rates": mib}


def measure(name, make):
    row = make()
    if row.how == "memory":
        return measure_memory(name, row)
    distance = difference(row)
    times = {contender: [] for contender in row.calls}
    for turn in range(ROUNDS):
        for contender in list(row.calls) if turn % 2 == 0 else list(row.calls)[::-1]:
            time.sleep(PAUSE)
            times[contender].append(milliseconds(row, row.calls[contender]))
    rates = {contender: 1e3 * row.work / statistics.mean(each) for contender, each in times.items()}
    out = {"name": name, "unit": row.unit, "timed": row.how, "milliseconds": times, "rates": rates, "difference": distance}
    if row.unit == "TFLOP/s":
        out["gemm_tflops"] = gemm_tflops()
    elif row.unit == "TB/s":
        out["copy_tbs"] = copy_tbs()
    peers = {contender: rate for contender, rate in rates.items() if contender not in OWN}
    if row.unit == "TFLOP/s" and (fa3 := stored_fa3(name, out["gemm_tflops"])) is not None:
        peers["fa3_stored"] = rates["fa3_stored"] = fa3
    if peers:
        out["rival"] = max(peers, key=peers.get)
        out["ratio"] = rates["heddle"] / peers[out["rival"]]
    return out


def show(row):
    """One line: rates in the row's unit (calls: microseconds), what the machine reaches, and the ratio to the best rival."""
    calls = row["unit"] == "calls/s"
    digits = 1 if calls else 2 if row["unit"] == "TB/s" else 0
    rates = "  ".join(f"{name} {1e6 / rate if calls else rate:6.{digits}f}" for name, rate in row["rates"].items())
    if row["unit"] == "TB/s":
        rates += f"  ({1e3 * statistics.mean(row['milliseconds']['heddle']):.1f} us)"
    beside = "".join(f"  {label} {row[key]:.{n}f}" for key, label, n in (("gemm_tflops", "gemm", 0), ("copy_tbs", "copy", 2)) if key in row)
    ratio = f"{row['ratio']:.2f} of {row['rival']}" if "ratio" in row else ""
    print(f"{row['name']:34} {rates} {'us' if calls else row['unit']}{beside}  {ratio}", flush=True)


def commit():
    if "HEDDLE_COMMIT" in os.environ:
        return os.environ["HEDDLE_COMMIT"]
    with contextlib.suppress(OSError):
        out = subprocess.run(["git", "-C", str(HERE), "rev-parse", "HEAD"], capture_output=True, text=True)
        if out.returncode == 0:
            return out.stdout.strip()
    return "unknown"


def conditions():
    clocks, maximum, power, driver = query("clocks.sm,clocks.max.sm,power.limit,driver_version").split(", ")
    return {
        "gpu": torch.cuda.get_device_name(), "driver": driver, "sm_clock": clocks, "sm_clock_maximum": maximum,
        "power_limit": power, "torch": torch.__version__, "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(),
        "commit": commit(), "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "method": " ".join(__doc__.split("\n\n")[1].split()),
    }  # fmt: skip


@functools.cache
def query(fields):
    out = subprocess.run(["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"], capture_output=True, text=True)
    return out.stdout.strip().split("\n")[0]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--filter", default="", help="only rows whose name contains this; a|b: those with a, then those with b")
    parser.add_argument("--shard", default="0/1", help="i/n: the i-th of n parts, i from 0")
    parser.add_argument("--out", type=pathlib.Path, help="the results file (default: bench/results/<gpu>.json)")
    arguments = parser.parse_args()
    index, count = (int(part) for part in arguments.shard.split("/"))
    if not torch.cuda.is_available():
        sys.exit("attention_bench_gpu.py: torch sees no GPU")
    torch.manual_seed(1)
    known = gpu_rows.rows() | gpu_backward_rows.rows() | gpu_linear_rows.rows() | gpu_lowbit_rows.rows()
    chosen = {name: known[name] for part in arguments.filter.split("|") for name in known if part in name}
    gpu = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()).strip("-")
    out = arguments.out or HERE / "results" / f"{gpu}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    results = []
    for name, make in list(chosen.items())[index::count]:
        row = measure(name, make)
        results.append(row)
        show(row)
        # After each row: what was measured is not lost with what comes after.
        out.write_text(json.dumps({"conditions": conditions(), "rows": results}, indent=1) + "\n", encoding="utf-8")
        torch.cuda.empty_cache()
    for direction in ("forward", "backward"):
        ratios = [row["ratio"] for row in results if re.match(rf"{direction} D\d", row["name"])]
        if ratios:
            print(f"{direction}: ratios {min(ratios):.2f} to {max(ratios):.2f}, median {statistics.median(ratios):.2f}")
    print("written to", out)


if __name__ == "__main__":
    main()
