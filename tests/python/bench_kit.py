"""The GPU benchmark's rows on the CPU, where no time is looked at."""

import contextlib
import sys
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
heddle = pytest.importorskip("heddle")
from torch.overrides import TorchFunctionMode  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
import attention_bench_gpu as bench  # noqa: E402
import gpu_backward_rows  # noqa: E402, F401  this and others without a use are for those who import this
import gpu_block_sparse_rows  # noqa: E402, F401
import gpu_branches  # noqa: E402, F401
import gpu_decode_rows  # noqa: E402
import gpu_lowbit_rows  # noqa: E402, F401
import gpu_nsa_part_rows  # noqa: E402, F401
import gpu_nsa_reference  # noqa: E402, F401
import gpu_nsa_rows  # noqa: E402
import gpu_peers  # noqa: E402, F401
import gpu_reference  # noqa: E402, F401
import gpu_rows  # noqa: E402
import gpu_timing  # noqa: E402
import sources  # noqa: E402


class OnTheCpu(TorchFunctionMode):
    """What asks for a GPU gets the CPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


class Clock:
    """A device that is the CPU: calls are over when they return."""

    host_seconds = staticmethod(time.perf_counter)

    def pause(self, seconds):
        pass

    synchronize = lambda self: None
    sleep = pause

    class event:
        def record(self):
            self.at = time.perf_counter()

        def query(self):
            return False

        def elapsed_time(self, end):
            return 1e3 * max(end.at - self.at, 1e-9)


class Stream:
    def wait_stream(self, other):
        pass


class OfAnyDevice(type):
    made = torch.Generator

    def __call__(cls, device="cpu"):
        return cls.made()


class Generator(metaclass=OfAnyDevice):
    """torch.Generator, of the CPU whatever was asked for. A class: torch imports parts of itself late, and annotates with it."""


@pytest.fixture(autouse=True)
def cpu(monkeypatch):
    monkeypatch.setattr(torch, "Generator", Generator)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(gpu_timing, "Cuda", Clock)
    monkeypatch.setattr(gpu_timing, "SAMPLE_MS", 0.01)
    monkeypatch.setattr(gpu_timing, "HOST_SECONDS", 1e-6)
    monkeypatch.setattr(gpu_timing, "WARM_CALLS", 1)
    monkeypatch.setattr(
        gpu_timing,
        "graph",
        lambda call, rotations, prepare: gpu_timing.Contender((lambda: call(0)) if rotations > 1 else call, 1, prepare),
    )
    monkeypatch.setattr(gpu_decode_rows, "ROTATED_BYTES", 1 << 16)
    monkeypatch.setattr(gpu_nsa_rows, "CHECKED", 192)
    for name, stand_in in (("Stream", Stream), ("current_stream", Stream), ("stream", contextlib.nullcontext)):
        monkeypatch.setattr(torch.cuda, name, stand_in)
    for name in ("gemm_tflops", "copy_tbs"):
        monkeypatch.setattr(bench, name, lambda: 1.0)
    for backward in (False, True):
        monkeypatch.setitem(sources.ATTENTION, ("cpu", backward), ("src/cpu/attention*",))
    flags = {
        name: getattr(torch.backends.cuda, f"{name}_sdp_enabled")()
        for name in ("flash", "mem_efficient", "math", "cudnn")
    }
    with OnTheCpu():
        yield
    for name, value in flags.items():  # rows choose back ends for good
        getattr(torch.backends.cuda, f"enable_{name}_sdp")(value)


def made(calls, **more):
    return lambda: gpu_rows.Row(calls, 1.0, "calls/s", **more)
