"""Measures what is claimed of sharing in native sparse attention: odd rows that copy even ones (the presets seed and seed_4_3).

PYTHONPATH=build/release/python python bench/nsa_claims.py [--threads 2] [--seconds 6] [--quick] [--out FILE]

Plain NSA and both presets take turns, call by call, in one process, on the CPU: parallel_nsa (kernels) and the naive functions,
forward alone (without gradients, as in inference) and forward with backward (as in training). Beside times, which are medians:

  counted   FLOP, bytes moved and bytes kept, exactly, from shapes, causality and lists (nsa_counts.py)
  products  FLOP of the matrix products that the naive functions really do forward, by torch.utils.flop_counter
  kept      bytes of the storages that autograd keeps, operands among them, by saved_tensors_hooks
  peak      most bytes of torch's CPU allocator above what was there before the call, by torch.profiler's memory events;
            what Heddle's kernels take for themselves (scratch of threads) is not in it
  error     relative RMS difference of the output from plain NSA's, of even and of odd rows, on random normals

The figures and their conditions go to --out, or to bench/results/nsa-claims-<model>-<SIMD class>.json. With --quick shapes are
tiny, and without --out nothing is written.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable

import cpu_conditions
import heddle.nsa
import nsa_counts
import sources
import torch
from nsa_counts import Case
from torch.utils.flop_counter import FlopCounterMode

FULL = {"rows": 2048, "heads": 32, "kv_heads": 8, "head_size": 128, "block": 64, "slots": 16}
QUICK = {"rows": 100, "heads": 4, "kv_heads": 2, "head_size": 16, "block": 16, "slots": 3}
WINDOWS = {False: (0, 512), True: (0, 24)}  # by whether shapes are tiny
PRESETS = ("seed", "seed_4_3")
LONG = {False: 65536, True: 1000}
LEAST_ROUNDS, MOST_ROUNDS = 3, 9
PAUSE = 0.005  # s: threads of the call before spin for a few milliseconds, which the next must not pay for
PATHS = {
    "kernels": ("forward", "training"),
    "naive": ("forward", "training"),
    "naive_nsa": ("forward",),
    "naive_nsa_compression": ("forward",),
}
Operands = dict[str, torch.Tensor]


def variants(case: Case) -> dict[str, dict]:
    """Name -> the arguments of sharing."""
    presets = heddle.nsa.presets(case.heads // case.kv_heads)
    return {"plain": {}, **{name: dict(presets[name]) for name in PRESETS}}


def operands(case: Case, dtype: torch.dtype) -> Operands:
    """q, k, v of random normals [1, T, heads, D]; gates float32 [1, T, HQ] from a sigmoid; what the result is multiplied with."""
    generator = torch.Generator().manual_seed(2502)
    normal = lambda *shape: torch.randn(1, case.rows, *shape, generator=generator)  # noqa: E731
    q, d_o = normal(case.heads, case.head_size), normal(case.heads, case.head_size)
    k, v = normal(case.kv_heads, case.head_size), normal(case.kv_heads, case.head_size)
    gates = {name: torch.sigmoid(normal(case.heads)) for name in ("g_cmp", "g_slc", "g_swa")}
    return {name: x.to(dtype) for name, x in (("q", q), ("k", k), ("v", v), ("d_o", d_o))} | gates


def chosen_lists(case: Case, x: Operands) -> torch.Tensor:
    """The lists that parallel_nsa takes, int32 [1, T, H, S]: those of plain NSA, of which shared rows use the anchors'."""
    return heddle.nsa.select_blocks(x["q"], heddle.nsa.pool_keys(x["k"], case.block), case.slots, block_size=case.block)


def output(path: str, case: Case, x: Operands, lists: torch.Tensor, options: dict) -> torch.Tensor:
    """One call of a path, [1, T, HQ, D]."""
    q, k, v, g_cmp, g_slc, g_swa = (x[name] for name in ("q", "k", "v", "g_cmp", "g_slc", "g_swa"))
    sizes = {"block_counts": case.slots, "block_size": case.block}
    window = {"window_size": case.window}
    if path == "kernels":
        return heddle.nsa.parallel_nsa(q, k, v, g_cmp, g_slc, g_swa, **sizes, **window, **options)
    if path == "naive":
        return heddle.nsa.naive_nsa_with_compression(q, k, v, g_cmp, g_slc, g_swa, **sizes, **window, **options)
    if path == "naive_nsa":
        return heddle.nsa.naive_nsa(q, k, v, g_slc, g_swa, lists, **sizes, **window, **options)
    return heddle.nsa.naive_nsa_compression(q, k, v, g_cmp, **sizes, **options)[1]


def call_of(path: str, mode: str, case: Case, x: Operands, lists: torch.Tensor, options: dict) -> Callable[[], tuple]:
    """A call without arguments; it returns all that it made, so that this lives until the call has ended."""
    if mode == "forward":

        def forward():
            with torch.no_grad():
                return (output(path, case, x, lists, options),)

        return forward
    leaves = {name: value.detach().requires_grad_() for name, value in x.items() if name != "d_o"}

    def training():
        o = output(path, case, leaves, lists, options)
        return o, *torch.autograd.grad(o, list(leaves.values()), x["d_o"], allow_unused=True)

    return training


def seconds_in_turn(calls: dict[str, Callable[[], tuple]], budget: float) -> dict[str, list[float]]:
    """Seconds of each call, one after the other in turn: LEAST_ROUNDS rounds, and up to MOST_ROUNDS while budget [s] lasts.
    Each was called before."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    begun = time.perf_counter()
    for number in range(MOST_ROUNDS):
        if number >= LEAST_ROUNDS and time.perf_counter() - begun > budget:
            break
        for name, call in calls.items():
            time.sleep(PAUSE)
            start = time.perf_counter()
            call()
            found[name].append(time.perf_counter() - start)
    return found


def peak_bytes(call: Callable[[], tuple]) -> int:
    """The most that torch's CPU allocator held above what it held before; the call's results are freed behind it."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        made = call()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    del made
    return peak


def kept_bytes(case: Case, path: str, x: Operands, lists: torch.Tensor, options: dict) -> int:
    """Of the storages that autograd keeps for the backward of a call, each once."""
    storages = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage
        return tensor

    leaves = {name: value.detach().requires_grad_() for name, value in x.items() if name != "d_o"}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        o = output(path, case, leaves, lists, options)
    total = sum(storage.nbytes() for storage in storages.values())
    del o
    return total


def products(call: Callable[[], tuple]) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def relative_rms(found: torch.Tensor, expected: torch.Tensor) -> dict[str, float]:
    """Of even and of odd rows of [1, T, HQ, D]."""
    parts = {"even": slice(0, None, 2), "odd": slice(1, None, 2)}
    return {
        name: ((found[:, rows].double() - expected[:, rows].double()).norm() / expected[:, rows].double().norm()).item()
        for name, rows in parts.items()
    }


def counted(case: Case, lists: torch.Tensor, options: dict) -> dict:
    sharing = nsa_counts.strides(options)
    return {
        "flops": nsa_counts.flops(case, sharing, lists[0]),
        "bytes_each_row": nsa_counts.moved(case, sharing, lists[0], each_row=True),
        "bytes_once": nsa_counts.moved(case, sharing, lists[0], each_row=False),
        "kept": nsa_counts.kept(case, sharing, lists[0]),
    }


def counted_long(case: Case, rows: int) -> dict:
    """variant -> FLOP forward of one key/value head's group with so many rows."""
    long = dataclasses.replace(case, rows=rows, heads=case.heads // case.kv_heads, kv_heads=1)
    lists = nsa_counts.latest_blocks(rows, case.block, case.slots)
    found: dict = {"rows": rows, "flops": {}}
    for name, options in variants(case).items():
        steps = nsa_counts.flops(long, nsa_counts.strides(options), lists)["forward"]
        found["flops"][name] = sum(parts["all"] for parts in steps.values())
    return found


def measured(path: str, case: Case, x: Operands, lists: torch.Tensor, budget: float) -> dict:
    """variant -> figures of one path."""
    found: dict[str, dict] = {name: {"seconds": {}, "median_seconds": {}, "peak": {}} for name in variants(case)}
    for mode in PATHS[path]:
        calls = {name: call_of(path, mode, case, x, lists, options) for name, options in variants(case).items()}
        for name, call in calls.items():  # these are the calls that warm up, too
            found[name]["peak"][mode] = peak_bytes(call)
            if path != "kernels" and mode == "forward":  # kernels are no products that torch sees
                found[name]["products"] = products(call)
        for name, times in seconds_in_turn(calls, budget).items():
            found[name]["seconds"][mode] = times
            found[name]["median_seconds"][mode] = statistics.median(times)
    for name, options in variants(case).items():
        if "training" in PATHS[path]:
            found[name]["kept"] = kept_bytes(case, path, x, lists, options)
    if path in ("kernels", "naive"):
        outputs = {n: call_of(path, "forward", case, x, lists, o)()[0] for n, o in variants(case).items()}
        for name in PRESETS:
            found[name]["error"] = relative_rms(outputs[name], outputs["plain"])
    return found


def row_of(shape: dict, window: int, dtype: torch.dtype, paths: list[str], budget: float, long: int) -> dict:
    """All figures of one window and dtype."""
    case = Case(**shape, window=window, element=dtype.itemsize)
    x = operands(case, dtype)
    lists = chosen_lists(case, x)
    return {
        "name": f"nsa claims {str(dtype).removeprefix('torch.')} window {window}",
        "dtype": str(dtype).removeprefix("torch."),
        **shape,
        "window": window,
        "sources": sources.digests(sources.CPU_NSA),
        "counted": {name: counted(case, lists, options) for name, options in variants(case).items()},
        "counted_long": counted_long(case, long),
        "measured": {path: measured(path, case, x, lists, budget) for path in paths},
    }


def rows(quick: bool, budget: float) -> list[dict]:
    """float32 by kernels and naive functions; bfloat16 by kernels alone, since naive sums are float32 anyway."""
    shape = QUICK if quick else FULL
    found = []
    for window in WINDOWS[quick]:
        for dtype, paths in ((torch.float32, list(PATHS)), (torch.bfloat16, ["kernels"])):
            found.append(row_of(shape, window, dtype, paths, budget, LONG[quick]))
            shown(found[-1])
    return found


def shown(row: dict) -> None:
    print(row["name"])
    for path, found in row["measured"].items():
        for mode, plain in found["plain"]["median_seconds"].items():
            ratios = ", ".join(f"{name} {plain / found[name]['median_seconds'][mode]:.2f}" for name in PRESETS)
            print(f"  {path} {mode}: plain {1e3 * plain:.1f} ms; times as fast: {ratios}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--seconds", type=float, default=6, help="of each path's and mode's rounds, of which there are at least 3"
    )
    parser.add_argument("--quick", action="store_true", help="tiny shapes; figures that say nothing")
    parser.add_argument("--out", type=pathlib.Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    heddle.set_num_threads(arguments.threads)
    about = cpu_conditions.conditions(arguments.threads)
    content = {"conditions": about, "rows": rows(arguments.quick, 0 if arguments.quick else arguments.seconds)}
    out = arguments.out
    if out is None and not arguments.quick:
        name = cpu_conditions.file_name("nsa-claims", about["cpu"], about["simd"], about["held"])
        out = pathlib.Path(__file__).parent / "results" / name
    if out is not None:
        out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
