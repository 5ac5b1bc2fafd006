"""Heddle against others' kernels on this GPU, in one run: what `make bench-gpu` runs.

cuDNN, FlashAttention-2, cuBLAS and a product of 4-bit weights come with torch; FlashAttention-3 is raced where
`flash_attn_interface` can be imported, bitsandbytes where it can, and where one cannot its figures are missing and the
conditions say why. How everything is timed: gpu_timing.py. Every row's outputs are compared first, with a reference or a
contender; a row that differs by more than its limit is kept as wrong, without a time, and the run ends with status 1. The
figures go to bench/results/<gpu>.json with the conditions they were taken under; merge.py joins several.

  python bench/attention_bench_gpu.py --filter D128 --shard 0/2
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import re
import statistics
import sys
import time

import gpu_backward_rows
import gpu_block_sparse_rows
import gpu_conditions
import gpu_decode_rows
import gpu_linear_rows
import gpu_lowbit_rows
import gpu_nsa_part_rows
import gpu_nsa_rows
import gpu_peers as peers
import gpu_rows
import gpu_timing as timing
import sources
import torch
from gpu_reference import distance

OWN = (
    "heddle",
    "baseline",
    "f32",
    "tf32",
    "sm80",
    "sm90",
    "default",
    "deterministic",
    "dense",
)  # not rivals: Heddle itself


class Wrong(Exception):
    """A row whose outputs are not what they should be: it has no time."""


def alone(call) -> float:
    """Milliseconds of a call behind a sleeping GPU, with nobody to race against."""
    return statistics.median(timing.race({"": timing.Contender(call)})[0][""])


def gemm_tflops():
    """What the machine reaches in the same minute: a bf16 product of 8192 cubed."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    return 2 * 8192**3 / alone(lambda: a @ a) / 1e9


def copy_tbs():
    """The same of a copy of 2 GiB."""
    a = torch.empty(1 << 31, device="cuda", dtype=torch.uint8)
    b = torch.empty_like(a)
    return 2 * a.numel() / alone(lambda: b.copy_(a)) / 1e9


def outputs_of(row) -> dict[str, tuple]:
    """contender -> its outputs. A rival that has no such kernel goes from `calls` to `absent`; Heddle's error is the row's."""
    outputs = {}
    for name, call in list(row.calls.items()):
        try:
            peers.prepare(call)()
            found = call()
            torch.cuda.synchronize()
        except (RuntimeError, ValueError, TypeError, NotImplementedError, AssertionError) as error:
            words = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            if name in OWN:
                raise Wrong(f"{name} failed: {words}") from error
            row.absent[name] = words
            del row.calls[name]
            continue
        outputs[name] = found if isinstance(found, tuple) else (found,)
    return outputs


def from_references(row, outputs, references) -> dict[str, float]:
    """contender -> largest relative distance of its outputs from what its own reference, or else the row's agreement, says; NaN
    where any of an output is not finite."""
    found = {} if row.agreement is None else row.agreement()
    for name, expected in references.items():
        if name in outputs:
            found[name] = worst((each.worst(x) for each, x in zip(expected, outputs[name], strict=True)), row.limit)
    for name, tensors in outputs.items():
        if not all(x.isfinite().all() for x in tensors if x.is_floating_point()):
            found[name] = math.nan
    if unseen := outputs.keys() - found.keys():
        raise Wrong(f"{', '.join(sorted(unseen))}: compared with nothing")
    return {name: found[name] for name in outputs}


def worst(values, limit) -> float:
    """The largest, or one that is not within the limit: a NaN must stay one, which max() would not see to."""
    values = list(values)
    return next((value for value in values if not value <= limit), max(values))


def compared(row, outputs) -> dict[str, float]:
    """contender -> largest relative distance of an output from the reference's and from the first rival's."""
    found = {}
    if row.reference is not None:
        expected = row.reference()
        if isinstance(expected, dict):
            return from_references(row, outputs, expected)
        found = {name: expected.worst(tensors[0]) for name, tensors in outputs.items()}
    rival = next((name for name in outputs if name not in OWN), None)
    if rival is None and not found:
        raise Wrong("there is neither a reference nor another contender to compare with")
    for name in outputs if rival is not None and found.get(rival, 0.0) <= row.limit else ():
        pairs = zip(outputs[name], outputs[rival], strict=True)
        values = [found.get(name, 0.0), *(distance(mine, other) for mine, other in pairs)]
        if name != rival:
            found[name] = worst(values, row.limit)
    return found


def differences(row) -> dict[str, float]:
    """What `compared` finds, of those that are within the limit.

    Raises Wrong where an output of Heddle's exceeds it, or there is nothing to compare it with. A rival whose output does is
    taken out of the race, which the row says.
    """
    outputs = outputs_of(row)
    if not outputs:  # Heddle has no such kernel, and who has is not here
        return {}
    found = compared(row, outputs)
    for name, value in list(found.items()):
        if value <= row.limit:
            continue
        if name in OWN:
            raise Wrong(f"the output of {name} differs by {value:.3g}, the limit is {row.limit}")
        row.absent[name] = f"its output differs by {value:.3g}"
        del row.calls[name], found[name]
    return found


def peak_mib(call):
    """The most memory that torch had given out during a call, beyond what was given before."""
    peers.prepare(call)()
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def contenders(row) -> dict[str, timing.Contender]:
    """Ready to be timed; a rival that cannot be captured in a graph is absent."""
    if row.how != "graph":
        return {name: timing.Contender(call, 1, peers.prepare(call)) for name, call in row.calls.items()}
    ready = {}
    for name, call in row.calls.items():
        try:
            ready[name] = timing.graph(call, row.rotations, peers.prepare(call))
        except RuntimeError as error:
            if name in OWN:
                raise Wrong(f"{name} cannot be captured in a graph: {error}") from error
            row.absent[name] = f"cannot be captured in a graph: {error}".splitlines()[0][:300]
    return ready


def rates_of(row, milliseconds):
    return {name: 1e3 * row.work / statistics.median(each) for name, each in milliseconds.items()}


def raced(row) -> tuple[dict, dict]:
    """The times, and calls of a round; a rival that waits for the GPU, and so cannot be timed behind a sleeping one, is absent."""
    race = timing.host_milliseconds if row.how == "host" else timing.race
    ready = contenders(row)
    try:
        return race(ready)
    except timing.TimingError:
        for name in [name for name in ready if name not in OWN]:
            try:
                race({name: ready[name]})
            except timing.TimingError as error:
                row.absent[name] = str(error)
                del ready[name], row.calls[name]
    return race(ready)


def timed(row) -> dict:
    milliseconds, calls = raced(row)
    rates = rates_of(row, milliseconds)
    out = {"milliseconds": milliseconds, "calls": calls, "rates": rates,
           "spread": {name: timing.spread(each) for name, each in milliseconds.items()}}  # fmt: skip
    if row.unit == "TFLOP/s":
        out["gemm_tflops"] = gemm_tflops()
    elif row.unit == "TB/s":
        out["copy_tbs"] = copy_tbs()
    rivals = {name: rate for name, rate in rates.items() if name not in OWN}
    if rivals and "heddle" in rates:
        out["rival"] = max(rivals, key=rivals.get)
        out["ratio"] = rates["heddle"] / rivals[out["rival"]]
    return out


def measure(name, make) -> dict:
    """The row, with its times, or with `wrong` and no times; `seconds` are those of all that was done for it."""
    out, begun = {"name": name}, time.monotonic()
    try:
        row = make()
        out |= {"unit": row.unit, "timed": row.how, "kernel": row.kernel, "sources": sources.digests(row.sources)}
        out |= {"difference": differences(row), "limit": row.limit}
        if row.how == "memory":
            out["rates"] = {contender: peak_mib(call) for contender, call in row.calls.items()}
        else:
            out |= timed(row) if row.calls else {"milliseconds": {}, "rates": {}}
        out["absent"] = row.absent
    except Exception as error:
        # Whatever it is: one bad row does not end a run that costs a machine's time, and nothing of it is published.
        out["wrong"] = f"{type(error).__name__}: {error}"
    return out | {"seconds": round(time.monotonic() - begun, 1)}


def show(row):
    """One line: rates in the row's unit (calls: microseconds), what the machine reaches, and the ratio to the best rival."""
    if "wrong" in row:
        print(f"{row['name']:34} WRONG: {row['wrong']}", flush=True)
        return
    calls = row["unit"] == "calls/s"
    digits = 1 if calls else 2 if row["unit"] == "TB/s" else 0
    rates = "  ".join(f"{name} {1e6 / rate if calls else rate:6.{digits}f}" for name, rate in row["rates"].items())
    if row["unit"] == "TB/s":
        rates += f"  ({1e3 * statistics.median(row['milliseconds']['heddle']):.1f} us)"
    beside = "".join(
        f"  {label} {row[key]:.{n}f}"
        for key, label, n in (("gemm_tflops", "gemm", 0), ("copy_tbs", "copy", 2))
        if key in row
    )
    ratio = f"{row['ratio']:.2f} of {row['rival']}" if "ratio" in row else ""
    missing = f"  without {', '.join(row['absent'])}" if row["absent"] else ""
    print(f"{row['name']:34} {rates} {'us' if calls else row['unit']}{beside}  {ratio}{missing}", flush=True)


def known() -> dict:
    modules = (
        gpu_rows, gpu_backward_rows, gpu_decode_rows, gpu_linear_rows, gpu_lowbit_rows, gpu_nsa_rows,
        gpu_nsa_part_rows, gpu_block_sparse_rows,
    )  # fmt: skip
    return {name: make for module in modules for name, make in module.rows().items()}


def left_of(rows: dict, files) -> dict:
    """Those of the rows that none of the results files has: a run that time cut off goes on with them."""
    done = {row["name"] for file in files for row in json.loads(file.read_text(encoding="utf-8"))["rows"]}
    return {name: make for name, make in rows.items() if name not in done}


def old_of(files) -> dict[str, float]:
    """Row -> seconds that it may take (0 where no file says), of those that results files, the last that has a row, have with
    sources that are not the tree's, or as wrong."""
    found = {}
    for file in files:
        content = json.loads(file.read_text(encoding="utf-8"))
        found |= {row["name"]: None if sources.current(row) else expected_seconds(row) for row in content["rows"]}
        found |= {row["name"]: expected_seconds(row) for row in content.get("wrong", ())}
    return {name: seconds for name, seconds in found.items() if seconds is not None}


def expected_seconds(row) -> float:
    """What measuring the row took; of a row without `seconds`, the part of it that was timed."""
    calls = row.get("calls", {})
    timed = sum(sum(each) * calls.get(name, 0) for name, each in row.get("milliseconds", {}).items()) / 1e3
    return row.get("seconds", timed)


def part_of(rows: dict, index: int, count: int, seconds: dict[str, float]) -> dict:
    """One of `count` parts of as many rows, and of about as much expected time, as each other: a row, the longest first, goes
    to the part that has least so far."""
    most = math.ceil(len(rows) / count)
    parts: list[list[str]] = [[] for _ in range(count)]
    for name in sorted(rows, key=lambda name: -seconds[name]):
        open_ones = [part for part in parts if len(part) < most]
        min(open_ones, key=lambda part: (sum(seconds[other] for other in part), len(part))).append(name)
    return {name: make for name, make in rows.items() if name in parts[index]}


def summary(results):
    for direction in ("forward", "backward"):
        ratios = [row["ratio"] for row in results if re.match(rf"{direction} D\d", row["name"]) and "ratio" in row]
        if ratios:
            print(f"{direction}: ratios {min(ratios):.2f} to {max(ratios):.2f}, median {statistics.median(ratios):.2f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--filter", default="", help="only rows whose name contains this; a|b: those with a, then those with b"
    )
    parser.add_argument("--shard", default="0/1", help="i/n: the i-th of n parts, i from 0")
    parser.add_argument("--out", type=pathlib.Path, help="the results file (default: bench/results/<gpu>.json)")
    parser.add_argument(
        "--but", type=pathlib.Path, nargs="+", default=[], help="leave out the rows that these results files have"
    )
    parser.add_argument(
        "--old", type=pathlib.Path, nargs="+", default=[],
        help="only the rows that these results files have of other sources than the tree's, or as wrong",
    )  # fmt: skip
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no row is begun after so many")
    parser.add_argument(
        "--tensors", type=pathlib.Path, help="rows of native sparse attention on the q, k, v of this file of torch.save"
    )
    arguments = parser.parse_args()
    gpu_nsa_rows.TENSORS = arguments.tensors
    index, count = (int(part) for part in arguments.shard.split("/"))
    if not torch.cuda.is_available():
        sys.exit("attention_bench_gpu.py: torch sees no GPU")
    torch.manual_seed(1)
    everything, old = left_of(known(), arguments.but), old_of(arguments.old)
    if arguments.old:
        if lost := [name for name in old if name not in known()]:
            print(f"old, and no rows of this program as it was called: {', '.join(lost)}", flush=True)
        everything = {name: make for name, make in everything.items() if name in old}
    chosen = {name: everything[name] for part in arguments.filter.split("|") for name in everything if part in name}
    gpu = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()).strip("-")
    out = arguments.out or gpu_conditions.HERE / "results" / f"{gpu}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    for who, why in peers.absent().items():
        print(f"without {who}: {why}", flush=True)
    results, wrong, begun = [], [], time.monotonic()
    mine = part_of(chosen, index, count, old) if arguments.old else dict(list(chosen.items())[index::count])
    for name, make in mine.items():
        if time.monotonic() - begun > arguments.seconds:
            print(f"out of time before {name}")
            break
        row = measure(name, make)
        (wrong if "wrong" in row else results).append(row)
        show(row)
        # After each row: what was measured is not lost with what comes after.
        report = {"conditions": gpu_conditions.conditions(timing.METHOD), "rows": results, "wrong": wrong}
        out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        torch.cuda.empty_cache()
    summary(results)
    print("written to", out)
    if wrong:
        sys.exit(f"{len(wrong)} rows are wrong: {', '.join(row['name'] for row in wrong)}")


if __name__ == "__main__":
    main()
