"""What every page of the demo is asked for."""

from __future__ import annotations

import argparse
from pathlib import Path

from . import machine


def parser(module: str, about: str | None, files: str) -> argparse.ArgumentParser:
    """With --budget, --build-seconds and --out; `files` are what is written there."""
    made = argparse.ArgumentParser(prog=f"python -m {module}", description=about)
    made.add_argument(
        "--budget",
        type=float,
        default=570.0,
        help="seconds to measure for; what does not fit is left out and said (default %(default)s)",
    )
    made.add_argument(
        "--build-seconds",
        type=float,
        help="how long the build before took, to be said on the pages; no part of the budget",
    )
    made.add_argument("--out", type=Path, default=machine.ROOT / "report", help=f"folder of {files} (default: report)")
    return made


def lengths(text: str) -> list[int]:
    return sorted(int(x) for x in text.split(","))
