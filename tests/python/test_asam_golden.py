"""heddle.nn's layers of adaptive sparse attention compute what their C++ twin is held to (tests/data/golden_asam.safetensors)."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
pytest.importorskip("heddle")
torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors")

from scripts import make_golden_asam as golden  # noqa: E402


@pytest.fixture(scope="module")
def held():
    with safetensors.safe_open(golden.GOLDEN, "pt") as file:
        return file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def test_cases(held):
    assert {name: json.loads(text) for name, text in held[0].items()} == {
        name: {**golden.COMMON, **case} for name, case in golden.CASES.items()
    }


@pytest.mark.parametrize("name", golden.CASES)
def test_layers(held, name):
    tensors = held[1]
    weights = {key.removeprefix("weights/"): value for key, value in tensors.items() if key.startswith("weights/")}
    found = golden.run(golden.CASES[name], weights, tensors["x"])
    assert {f"{name}/{part}" for part in found} == {key for key in tensors if key.startswith(f"{name}/")}
    for part, value in found.items():
        torch.testing.assert_close(value, tensors[f"{name}/{part}"], rtol=2e-5, atol=2e-6)
