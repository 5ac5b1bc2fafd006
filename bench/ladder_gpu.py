"""The figures of docs/ladder.md on this GPU: each rung's time, and its counters by Nsight Compute.

Runs in the tree, after a build, and in the folder that scripts/stage.sh makes; scripts/ladder_tables.py writes the page from
the results. Without ncu there are no counters, which is said.

  python bench/ladder_gpu.py ladder.json
"""

from __future__ import annotations

import argparse
import csv
import json
import pathlib
import re
import shutil
import subprocess
import sys

import gpu_conditions
import sources

HERE = pathlib.Path(__file__).resolve().parent
LENGTH, TOTAL = 4096, 16384
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
    return {
        "rung": rung.name,
        "S": length,
        "causal": causal,
        "ms": float(line[3]),
        "tflops": float(line[4]),
        "error": float(line[5]),
        "allowed": float(line[6]),
    }


def counters(rung):
    """One launch after the warm-up; the first rung on one sequence, since it is replayed for every group of counters."""
    batch = 1 if rung.name.startswith("1") else TOTAL // LENGTH
    done = subprocess.run(
        [
            "ncu",
            "--clock-control",
            "none",
            "--metrics",
            ",".join(METRICS.values()),
            "--page",
            "raw",
            "--csv",
            "-k",
            "regex:" + rung.name.split("_", 1)[1],
            "-s",
            "1",
            "-c",
            "1",
            rung,
            str(LENGTH),
            "0",
            str(batch),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    rows = list(csv.reader(line for line in done.stdout.splitlines() if line.startswith('"')))
    if len(rows) < 3:
        print(f"no counters of {rung.name}: {done.stdout[-400:]}{done.stderr[-400:]}", file=sys.stderr)
        return None
    found = dict(zip(rows[0], rows[2]))
    return {name: float(found[metric].replace(",", "")) for name, metric in METRICS.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=pathlib.Path)
    parser.add_argument("--lengths", type=int, nargs="*", default=[LENGTH])
    output = (arguments := parser.parse_args()).output
    conditions = {
        "gpu": gpu_conditions.query("name,driver_version"),
        "date": gpu_conditions.now(),
        "commit": gpu_conditions.commit(),
        "lengths": arguments.lengths,
        "ncu": shutil.which("ncu") is not None,
    }
    results = {"conditions": conditions, "sources": sources.digests(sources.LADDER), "rungs": [], "counters": {}}
    found = rungs()
    for length in arguments.lengths:
        for causal in (0, 1):
            results["rungs"] += [climb(rung, length, causal) for rung in found]
    if shutil.which("ncu"):
        results["counters"] = {rung.name: values for rung in found if (values := counters(rung))}
    else:
        print("there is no ncu: no counters", file=sys.stderr)
    output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {output}")


if __name__ == "__main__":
    main()
