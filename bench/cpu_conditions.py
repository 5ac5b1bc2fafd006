"""Under which conditions something was measured on a CPU, of which kind it is, and how to hold it to fewer instructions."""

from __future__ import annotations

import datetime
import os
import pathlib
import platform
import re
import sys

import gpu_conditions

HELD = "HEDDLE_BENCH_TARGET"  # set in the process that hold() starts

#: --target -> what holds Heddle, torch with oneDNN and MKL, and OpenBLAS to it, and what torch then says of itself.
TARGETS = {
    "avx2": ({"HEDDLE_CPU_TARGET": "avx2", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2",
              "MKL_ENABLE_INSTRUCTIONS": "AVX2", "OPENBLAS_CORETYPE": "Haswell"}, "AVX2"),
    "avx512": ({"HEDDLE_CPU_TARGET": "avx512", "ATEN_CPU_CAPABILITY": "avx512", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
                "MKL_ENABLE_INSTRUCTIONS": "AVX512", "OPENBLAS_CORETYPE": "SkylakeX"}, "AVX512"),
}  # fmt: skip


def hold(target: str | None) -> None:
    """Starts this program again with everybody held to `target`, as on a processor that has no more; nothing for None.

    Libraries read what they may use when they are loaded, so that it must stand in the environment before.
    """
    if target is None or os.environ.get(HELD) == target:
        return
    if target not in TARGETS:
        raise ValueError(f"--target is {target!r}: it must be one of {', '.join(TARGETS)}")
    os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | TARGETS[target][0] | {HELD: target})


def check_held() -> None:
    """Stops the program if torch or Heddle took more than hold() left them."""
    import heddle
    import torch

    target = os.environ.get(HELD)
    if target is None:
        return
    found = heddle.cpu_target(), torch.backends.cpu.get_cpu_capability()
    if found != (target, TARGETS[target][1]):
        sys.exit(f"--target is {target}: heddle runs {found[0]} and torch {found[1]}")


def cpu_model() -> str:
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def simd_class(target: str, flags: str, held: bool) -> str:
    """Of what processor figures speak: "amx" where torch has AMX to itself, otherwise the target that Heddle runs."""
    return "amx" if not held and "amx_tile" in flags.split() else target


def file_name(kind: str, model: str, simd: str, held: bool) -> str:
    """ "cpu-amd-epyc-avx512_bf16.json"; "cpu-amd-epyc-held-to-avx2.json" where a wider processor was held to it."""
    words = re.sub(r"[^a-z0-9]+", "-", model.lower()).strip("-")
    return f"{kind}-{words}-{'held-to-' if held else ''}{simd}.json"


def conditions(threads: int) -> dict:
    import heddle
    import torch

    flags = next(
        (line for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")), ""
    )
    held = HELD in os.environ
    here = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": gpu_conditions.commit(),
        "cpu": cpu_model(),
        "simd": simd_class(heddle.cpu_target(), flags, held),
        "held": held,
        "processors": len(os.sched_getaffinity(0)),
        "load_average_before": os.getloadavg()[0],
        "system": platform.platform(),
        "threads": threads,
        "heddle": heddle.__version__,
        "heddle_target": heddle.cpu_target(),
        "torch": torch.__version__,
        "torch_capability": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
    }
    governor = pathlib.Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
    if governor.exists():
        here["governor"] = governor.read_text().strip()
    return here
