"""The heddle command, run as its users run it. HEDDLE_CLI names the binary."""

import json
import os
import subprocess

import pytest

CLI = os.environ.get("HEDDLE_CLI")
needs_command = pytest.mark.skipif(not CLI, reason="HEDDLE_CLI does not name the built binary")


def run(*arguments, code=0, **environment):
    """Runs the command; returns its standard output, or its standard error if it should fail."""
    done = subprocess.run(
        [CLI, *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=300,
    )
    assert done.returncode == code, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout if code in (0, 1) else done.stderr


def run_json(*arguments, **environment):
    return json.loads(run(*arguments, "--json", **environment))
