"""Threads and instruction sets of the CPU's kernels. heddle is their public name."""

from __future__ import annotations

from . import _heddle


def num_threads() -> int:
    """Threads of operations on the CPU: what ``set_num_threads`` asked for, else HEDDLE_NUM_THREADS, else the processors that
    this process may run on.

    Raises:
      RuntimeError: HEDDLE_NUM_THREADS is no number from 1 to 4096, or the system starts no more threads.
    """
    return _heddle.num_threads()


def set_num_threads(threads: int) -> None:
    """Asks for so many threads, from the next operation on. Not beside an operation that runs.

    Raises:
      ValueError: threads is not from 1 to 4096.
    """
    _heddle.set_num_threads(threads)


def cpu_target() -> str:
    """The instruction set that the CPU's kernels run with: "sse4", "avx2", "avx512", "avx512_bf16", "neon" or, in builds for
    tests, "emu128". The best one that this processor has, or what ``set_cpu_target`` or HEDDLE_CPU_TARGET names.

    Raises:
      RuntimeError: HEDDLE_CPU_TARGET names one that is unknown, not built or not supported here.
    """
    return _heddle.cpu_target()


def cpu_targets() -> list[str]:
    """All instruction sets that this build has and this processor can run, best first."""
    return _heddle.cpu_targets()


def set_cpu_target(name: str) -> None:
    """Names the instruction set for later calls, as HEDDLE_CPU_TARGET does; "" goes back to the default choice.

    Raises:
      RuntimeError: one that is unknown, not built or not supported here.
    """
    _heddle.set_cpu_target(name)
