"""The heddle command, run as its users run it. HEDDLE_CLI names the binary. And what its tests share."""

import json
import os
import pathlib
import subprocess

import numpy as np
import pytest

WITHOUT_CUDA = "this heddle was built without CUDA: build it with HEDDLE_CUDA=ON"

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


def examples(*verb):
    """The lines of a verb's help that show how it is used."""
    text = run(*verb, "--help")
    assert "--json" in text or verb == ("completion",), text
    lines = text.split("\nExamples:\n")[1].splitlines()
    assert 2 <= len(lines) <= 4 and all(line.startswith("  ") for line in lines)
    assert all(f"heddle {' '.join(verb)}" in line or verb == ("explain",) for line in lines), lines
    return [line.strip() for line in lines]


def built_with_cases():
    return "(not in this build)" not in run("--help")


def softmax_attention(q, k, v, *, causal=False, bias=None, mask=None):
    """Plain attention in float64: q [B, Sq, H, D], k and v [B, Sk, Hkv, D]. Returns o and the log-sum-exp."""
    group = q.shape[2] // k.shape[2]
    k, v = (np.repeat(x.astype(np.float64), group, axis=2) for x in (k, v))
    scores = np.einsum("bihd,bjhd->bhij", q.astype(np.float64), k) / np.sqrt(q.shape[-1])
    if bias is not None:
        scores = scores + bias
    if mask is not None:
        scores = np.where(mask, scores, -np.inf)
    if causal:
        scores = np.where(np.tri(*scores.shape[-2:], dtype=bool), scores, -np.inf)
    top = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    o = np.einsum("bhij,bjhd->bihd", weights / total, v)
    return o, (np.log(total) + top)[..., 0]


def save(folder: pathlib.Path, **arrays):
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    return [x for name in arrays for x in (f"--{name}", folder / f"{name}.npy")]
