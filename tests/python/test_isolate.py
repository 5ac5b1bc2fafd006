"""The demo's measurements in processes of their own: what they see, and how failures are told apart."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.demo import isolate  # noqa: E402


def _grow(size):
    with isolate.Residence() as residence:
        held = np.ones(size, dtype=np.uint8)
    return residence.grown, int(held[-1])


def _raise():
    raise KeyError("what happened")


def _allocate_under(limit, size):
    with isolate.limited_data(limit):
        return int(np.ones(size, dtype=np.uint8)[0])


def _die():
    import os

    os._exit(3)


def test_residence_sees_what_is_touched_in_a_process_of_its_own():
    size = 64 << 20
    grown, _ = isolate.call(_grow, size)
    assert size <= grown < size + (4 << 20)
    assert isolate.call(_grow, 1 << 20)[0] < 8 << 20  # nothing is left of the call before


def test_isolated_failures_are_told_apart():
    with pytest.raises(isolate.ChildFailed, match="what happened") as raised:
        isolate.call(_raise)
    assert raised.value.kind == "KeyError"
    with pytest.raises(isolate.ChildFailed, match="status 3"):
        isolate.call(_die)


def test_the_limit_on_memory_is_real():
    assert isolate.call(_allocate_under, 100 << 20, 80 << 20) == 1
    with pytest.raises(isolate.ChildFailed) as raised:
        isolate.call(_allocate_under, 100 << 20, 120 << 20)
    assert "MemoryError" in raised.value.kind
