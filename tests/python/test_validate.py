"""Validate mode on the Python side: when errors of earlier calls are asked for, and that it costs nothing otherwise. What a GPU
finds is in test_cuda_validate.py."""

import os
import subprocess
import sys

import heddle
import pytest
import torch
from heddle import _heddle
from heddle.hosts.torch import operators as _torch_ops


class OnGpu:
    """As much of a tensor on a GPU as native() looks at."""

    is_cuda = True

    def get_device(self):
        return 0


@pytest.fixture
def one_gpu(monkeypatch):
    monkeypatch.setattr(_torch_ops, "_current_gpu", lambda: 0)
    monkeypatch.setattr(_torch_ops, "_raw_stream", lambda gpu: 77)
    asked = []

    def raise_bad_index(stream):
        asked.append(stream)
        raise ValueError("[attention_forward] cu_seqlens_q[0] is 1: it must be 0")

    monkeypatch.setattr(_heddle, "raise_bad_index", raise_bad_index)
    return asked


def test_next_call_raises_in_place_of_running(one_gpu, monkeypatch):
    monkeypatch.setattr(_torch_ops, "_validates", True)
    calls = []
    with pytest.raises(ValueError, match=r"cu_seqlens_q\[0\] is 1: it must be 0"):
        _torch_ops.native(lambda *arguments: calls.append(arguments), OnGpu(), 5)
    assert one_gpu == [77] and calls == []


def test_off_asks_nobody(one_gpu, monkeypatch):
    monkeypatch.setattr(_torch_ops, "_validates", False)
    calls = []
    q = OnGpu()
    _torch_ops.native(lambda *arguments: calls.append(arguments), q, 5)
    assert one_gpu == [] and calls == [(q, 5, 77)]


def test_nothing_is_found_where_no_gpu_was_used():
    if torch.cuda.is_initialized():
        pytest.skip("another test has used a GPU")
    assert heddle.check_errors() is None
    assert heddle.check_errors("cuda:0") is None
    assert _heddle.raise_bad_indices(0) is None


def in_environment(value):
    code = "from heddle import _heddle; print(_heddle.validates())"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("HEDDLE_VALIDATE", None)
    if value is not None:
        environment["HEDDLE_VALIDATE"] = value
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("value, wanted", [(None, "False"), ("", "False"), ("0", "False"), ("1", "True")])
def test_environment(value, wanted):
    assert in_environment(value).stdout.strip() == wanted


def test_environment_is_refused():
    assert "HEDDLE_VALIDATE is 'yes': it must be 0 or 1" in in_environment("yes").stderr
