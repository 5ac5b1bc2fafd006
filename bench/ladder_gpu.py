"""The figures of docs/ladder.md on this GPU: each rung's time, its counters by Nsight Compute, and fused against unfused attention.

Runs in the tree, after a build, and in the folder that scripts/stage.sh makes; scripts/ladder_tables.py writes the page from
the results. A part that cannot be measured here (no ncu, no torch) is left out, and said.

  PYTHONPATH=build/release/python python bench/ladder_gpu.py ladder.json
"""

from __future__ import annotations

import argparse
import csv
import datetime
import json
import math
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
LENGTH, TOTAL, PAUSE = 4096, 16384, 0.08
LINE = re.compile(r"S +(\d+) +causal (\d) +([\d.]+) ms +([\d.]+) TFLOP/s +error (\S+), allowed (\S+): (\w+)")
METRICS = {
    "registers": "launch__registers_per_thread",
    "occupancy": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "compute": "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "memory": "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed",
    "dram": "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    "l2": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "tensor": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "fma": "sm__pipe_fma_cycles_active.avg.pct_of_peak_sustained_active",
    "issue": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "sectors": "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",
    "requests": "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum",
    "conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",
    "wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",
    "threads": "smsp__thread_inst_executed_per_inst_executed.ratio",
}


def rungs():
    for place in (HERE.parent / "examples/ladder", HERE.parent / "build/release/examples/ladder"):
        found = sorted(path for path in place.glob("[1-9]_*") if not path.suffix)
        if found:
            return found
    sys.exit("ladder_gpu.py: there is no ladder: build the release preset, or run in build/stage")


def climb(rung, length, causal):
    done = subprocess.run([rung, str(length), str(causal)], capture_output=True, text=True, timeout=60)
    line = LINE.search(done.stdout)
    if done.returncode != 0 or line is None:
        sys.exit(f"ladder_gpu.py: {rung.name} failed: {done.stdout}{done.stderr}")
    return {"rung": rung.name, "S": length, "causal": causal, "ms": float(line[3]), "tflops": float(line[4]),
            "error": float(line[5]), "allowed": float(line[6])}


def counters(rung):
    """One launch after the warm-up; the first rung on one sequence, since it is replayed for every group of counters."""
    batch = 1 if rung.name.startswith("1") else TOTAL // LENGTH
    done = subprocess.run(
        ["ncu", "--clock-control", "none", "--metrics", ",".join(METRICS.values()), "--page", "raw", "--csv", "-k",
         "regex:" + rung.name.split("_", 1)[1], "-s", "1", "-c", "1", rung, str(LENGTH), "0", str(batch)],
        capture_output=True, text=True, timeout=120)
    rows = list(csv.reader(line for line in done.stdout.splitlines() if line.startswith('"')))
    if len(rows) < 3:
        print(f"no counters of {rung.name}: {done.stdout[-400:]}{done.stderr[-400:]}", file=sys.stderr)
        return None
    found = dict(zip(rows[0], rows[2]))
    return {name: float(found[metric].replace(",", "")) for name, metric in METRICS.items()}


def graph_ms(torch, call, data):
    """Median time of one call, from a graph of several over inputs in turn, so that short calls are not all launches."""
    call(*data[0])
    torch.cuda.synchronize()
    begin = time.perf_counter()
    call(*data[1])
    torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    count = max(1, min(24, int(1e-3 / seconds)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for n in range(count):
            call(*data[n % len(data)])
    graph.replay()
    torch.cuda.synchronize()
    time.sleep(PAUSE)
    samples = []
    for _ in range(20 if seconds < 5e-3 else 3):
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        graph.replay()
        last.record()
        torch.cuda.synchronize()
        samples.append(first.elapsed_time(last) / count)
    return statistics.median(samples)


def unfused(torch, heddle, batch, heads, length, size):
    """bfloat16, no mask: the fused kernel that heddle.attention chooses beside methods that keep the score matrix."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def math_sdpa(q, k, v):
        with sdpa_kernel(SDPBackend.MATH):
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)

    def three_steps(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return (torch.softmax((q @ k.transpose(-1, -2)) / math.sqrt(size), -1) @ v).transpose(1, 2)

    calls = {
        "fused": heddle.attention,
        "baseline_cuda": lambda q, k, v: heddle.attention(q, k, v, method="baseline"),
        "torch_math": math_sdpa,
        "torch_steps": three_steps,
    }
    data = [[torch.randn(batch, length, heads, size, device="cuda", dtype=torch.bfloat16) for _ in range(3)] for _ in range(3)]
    expected = calls["torch_math"](*data[0]).float()
    row = {"B": batch, "H": heads, "S": length, "D": size}
    for name, call in calls.items():
        error = (call(*data[0]).float() - expected).abs().max().item()
        if not error < 0.05:
            sys.exit(f"ladder_gpu.py: {name} differs by {error} at {row}")
        row[name] = graph_ms(torch, call, data)
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=pathlib.Path)
    parser.add_argument("--lengths", type=int, nargs="*", default=[LENGTH])
    output = (arguments := parser.parse_args()).output
    gpu = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"], capture_output=True,
                         text=True, check=True).stdout.split("\n")[0]
    results = {"conditions": {"gpu": gpu, "date": datetime.date.today().isoformat()}, "rungs": [], "counters": {}, "unfused": []}
    found = rungs()
    for length in arguments.lengths:
        for causal in (0, 1):
            results["rungs"] += [climb(rung, length, causal) for rung in found]
    if shutil.which("ncu"):
        results["counters"] = {rung.name: values for rung in found if (values := counters(rung))}
    else:
        print("there is no ncu: no counters", file=sys.stderr)
    output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    try:
        import heddle
        import torch
    except ImportError as error:
        print(f"{error}: no comparison with unfused attention", file=sys.stderr)
    else:
        results["conditions"]["torch"] = torch.__version__
        for size, heads in ((64, 1), (64, 32), (128, 16)):
            for length in (128, 512, 2048, 4096):
                results["unfused"].append(unfused(torch, heddle, 1 if heads == 1 else TOTAL // length, heads, length, size))
    output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {output}")


if __name__ == "__main__":
    main()
