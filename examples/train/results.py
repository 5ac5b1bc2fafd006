"""The JSON file that runs are collected in, and the conditions that they were taken under."""

from __future__ import annotations

import datetime
import json
import platform
import sys
from pathlib import Path

import heddle
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from bench import gpu_conditions, sources  # noqa: E402


def conditions(corpus):
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "heddle": heddle.__version__,
        "commit": gpu_conditions.commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "text": str(corpus),
    }


def read(path):
    """Lists of runs by kind: "runs" of train.py, "lengths" of lengths.py, "sparse" of sparse.py."""
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return {"conditions": {}, "runs": [], "lengths": [], "sparse": []} | found


def add(path, kind, found, corpus):
    """Adds runs, by their names, to the file's list `kind`."""
    report = read(path)
    names = {run["name"] for run in found}
    measured = sources.digests(sources.TRAINING)
    found = [run | {"sources": measured} for run in found]
    report[kind] = [run for run in report[kind] if run["name"] not in names] + found
    report["conditions"] = conditions(corpus)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
