"""Under which conditions something was measured on a GPU: what a results file says of itself. As a program: the commit."""

from __future__ import annotations

import datetime
import functools
import os
import pathlib
import subprocess

HERE = pathlib.Path(__file__).resolve().parent


def commit() -> str:
    """HEDDLE_COMMIT, or what scripts/stage.sh left in a stage, or the tree's with "+" where it has changes, or "unknown"."""
    if "HEDDLE_COMMIT" in os.environ:
        return os.environ["HEDDLE_COMMIT"]
    staged = HERE.parent / "commit"
    if staged.exists():
        return staged.read_text(encoding="utf-8").strip()
    try:
        asked = [
            subprocess.run(["git", "-C", str(HERE), *words], capture_output=True, text=True, check=True).stdout.strip()
            for words in (("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
        ]
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return asked[0] + ("+" if asked[1] else "")


def now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


@functools.cache
def query(fields: str) -> str:
    """What nvidia-smi says of the GPU that this process runs on, the first of those that it may see."""
    which = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    out = subprocess.run(
        ["nvidia-smi", f"--id={which}", f"--query-gpu={fields}", "--format=csv,noheader"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return out.stdout.strip().split("\n")[0]


def conditions(method: str) -> dict:
    """Of a run of torch's and Heddle's kernels; contenders: who was raced, absent: who was not, and why."""
    import gpu_peers
    import torch

    clocks, maximum, power, driver = query("clocks.sm,clocks.max.sm,power.limit,driver_version").split(", ")
    return {
        "gpu": torch.cuda.get_device_name(), "driver": driver, "sm_clock": clocks, "sm_clock_maximum": maximum,
        "power_limit": power, "torch": torch.__version__, "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(),
        "contenders": gpu_peers.contenders(), "absent": gpu_peers.absent(), "commit": commit(), "date": now(), "method": method,
    }  # fmt: skip


if __name__ == "__main__":
    print(commit())
