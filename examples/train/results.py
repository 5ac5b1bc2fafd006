"""The JSON file that runs are collected in, and the conditions that they were taken under."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import pathlib
import platform
import subprocess

import heddle
import torch


def commit():
    if "HEDDLE_COMMIT" in os.environ:
        return os.environ["HEDDLE_COMMIT"]
    here = pathlib.Path(__file__).resolve().parent
    with contextlib.suppress(OSError):  # there may be no git
        done = subprocess.run(["git", "-C", str(here), "rev-parse", "HEAD"], capture_output=True, text=True)
        if done.returncode == 0:
            return done.stdout.strip()
    return "unknown"


def conditions(corpus):
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "heddle": heddle.__version__,
        "commit": commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "text": str(corpus),
    }


def read(path):
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"conditions": {}, "runs": [], "lengths": []}


def add(path, kind, found, corpus):
    """Adds runs, by their names, to the file's list `kind`."""
    report = read(path)
    names = {run["name"] for run in found}
    report[kind] = [run for run in report[kind] if run["name"] not in names] + found
    report["conditions"] = conditions(corpus)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
