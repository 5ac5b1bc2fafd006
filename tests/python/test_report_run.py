"""scripts/demo.sh: what it hands to the demo."""

import os
import shutil
import subprocess

import pytest
from report_kit import ROOT

from scripts.demo import asam, sparse
from scripts.demo.__main__ import arguments


def script(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/bash\n" + text)
    path.chmod(0o755)


@pytest.mark.parametrize("given", [["--budget", "100", "--accuracy", "1e-3"], ["--sparse"]])
def test_the_build_takes_nothing_from_the_budget(tmp_path, given):
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts", ignore=shutil.ignore_patterns("demo", "__pycache__"))
    script(tmp_path / "scripts" / "setup.sh", "")
    script(tmp_path / "bin" / "cmake", "sleep 1")
    script(tmp_path / "bin" / "nvidia-smi", "exit 1")
    script(tmp_path / ".venv" / "bin" / "python", 'echo "$@"')
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    done = subprocess.run(
        [tmp_path / "scripts" / "demo.sh", *given],
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    pages = (
        {"scripts.demo.sparse": sparse, "scripts.demo.asam": asam} if "--sparse" in given else {"scripts.demo": None}
    )
    calls = [line.split()[1:] for line in done.stdout.splitlines()]
    assert [module for module, *_ in calls] == list(pages)
    for (_, *passed), page in zip(calls, pages.values()):
        options = (page.arguments if page else arguments)(passed)
        assert options.budget == (100 if "--budget" in given else 570) and 2 <= options.build_seconds < 60


def test_make_demo_hands_on_accuracy_and_budget():
    asked = subprocess.run(
        # These tests run under `make test`, where make says which folders it enters.
        ["make", "-n", "--no-print-directory", "demo", "BUDGET=30", "ACCURACY=1e-4"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert asked[0] == "scripts/demo.sh"
    options = arguments(asked[1:])
    assert (options.budget, options.accuracy) == (30, 1e-4)
