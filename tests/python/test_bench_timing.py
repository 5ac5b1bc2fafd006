"""bench/gpu_timing.py on a device that is made up: how long the GPU sleeps, how many calls run, in which order."""

import contextlib
import sys
import types
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
import gpu_timing as timing  # noqa: E402


class Device:
    """A GPU that takes what is queued in order, and a host that needs `host` seconds to queue a call."""

    def __init__(self):
        self.now = 0.0  # of the host
        self.free = 0.0  # when the GPU is through with what is queued
        self.pauses, self.log = [], []

    def host_seconds(self):
        return self.now

    def pause(self, seconds):
        self.pauses.append(seconds)
        self.now += seconds

    def synchronize(self):
        self.now = max(self.now, self.free)

    def sleep(self, seconds):
        self.work(seconds)

    def work(self, seconds):
        self.free = max(self.free, self.now) + seconds

    def event(self):
        device = self

        class Event:
            def record(self):
                self.at = max(device.free, device.now)

            def query(self):
                return device.now >= self.at

            def elapsed_time(self, end):
                return 1e3 * (end.at - self.at)

        return Event()

    def contender(self, name, gpu, host=5e-6, waits=False, calls=1):
        def call():
            self.log.append(name)
            self.now += host
            self.work(gpu)
            if waits:
                self.synchronize()

        return timing.Contender(call, calls)


@pytest.mark.parametrize(
    "milliseconds, count", [(0.001, 40), (0.5, 40), (1.0, 20), (5.0, 4), (6.5, 4), (10.0, 3), (500.0, 3), (0.0, 40)]
)
def test_as_many_calls_in_a_row_as_make_a_sample(milliseconds, count):
    assert timing.in_a_row(milliseconds) == count


def test_graphs_do_not_fill_the_stream():
    assert timing.in_a_row(0.1, 20) == timing.QUEUED // 20 < timing.in_a_row(0.1)
    assert timing.in_a_row(0.1, 1000) == timing.FEWEST


def test_the_gpu_sleeps_longer_than_the_host_needs():
    assert timing.sleep_seconds(50e-6, 40) == pytest.approx(timing.MARGIN * 40 * 50e-6)
    assert timing.sleep_seconds(1e-9, 3) == timing.LEAST_SLEEP


def test_what_counts_is_the_gpu_time_whatever_the_host_needs():
    device = Device()
    # The host is five times as slow as the GPU: timed one by one, a call would take 100 us.
    found, calls = timing.race(
        {"slow host": device.contender("a", 20e-6, host=100e-6), "fast host": device.contender("b", 20e-6)}, device
    )
    for times in found.values():
        assert times == [pytest.approx(0.02, rel=1e-6)] * timing.ROUNDS
    assert calls == {"slow host": 40, "fast host": 40}


def test_a_graph_counts_its_calls():
    device = Device()
    found, calls = timing.race({"graph": device.contender("g", 200e-6, calls=20)}, device)
    assert found["graph"] == [pytest.approx(0.01)] * 3 and calls["graph"] == timing.QUEUED


def test_a_sleep_that_was_too_short_is_taken_again_longer():
    device = Device()
    slept = []
    device.sleep = lambda seconds: (slept.append(seconds), device.work(seconds))
    # The host is quick at first, which is when it is measured, and slow then.
    begun = 12
    host = iter([1e-6] * begun)

    def call():
        device.now += next(host, 100e-6)
        device.work(20e-6)

    found, _ = timing.race({"": timing.Contender(call)}, device)
    assert all(times == pytest.approx(0.02) for times in found[""])
    assert any(b > 10 * a for a, b in zip(slept, slept[1:]))


def test_a_call_that_waits_for_the_gpu_is_refused():
    device = Device()
    with pytest.raises(timing.TimingError, match="the call waits for the GPU"):
        timing.race({"": device.contender("w", 20e-6, waits=True)}, device)


def test_rounds_alternate_with_a_pause_before_each():
    device = Device()
    order = []
    prepared = {
        name: timing.Contender(device.contender(name, 1e-3).call, 1, lambda name=name: order.append(name))
        for name in "ab"
    }
    timing.race(prepared, device)
    assert "".join(order[2:]) == "abbaab"  # the first two: when each is tried
    assert device.pauses == [timing.PAUSE] * 6 == [0.04] * 6


def test_the_host_feels_both_parts():
    device = Device()
    found, _ = timing.host_milliseconds(
        {"call": device.contender("c", 1e-6, host=20e-6), "waits": device.contender("w", 30e-6, 20e-6, waits=True)},
        device,
    )
    assert found["call"] == [pytest.approx(0.02, rel=0.01)] * 3
    assert found["waits"] == [pytest.approx(0.05, rel=0.01)] * 3


def test_spread_is_of_the_median():
    assert timing.spread([1.0, 2.0, 4.0]) == 1.5


def test_the_method_says_what_is_done():
    for value in (timing.FEWEST, timing.MOST, timing.ROUNDS, round(1000 * timing.PAUSE)):
        assert str(value) in timing.METHOD


@pytest.mark.parametrize("own", [True, False])
def test_a_graph_is_captured_on_the_calls_own_stream(own, monkeypatch):
    """So that what autograd puts there is in it."""
    torch = pytest.importorskip("torch")
    asked, replayed = [], []

    class Stream:
        def wait_stream(self, other):
            pass

    def call():
        asked.append("call")

    if own:
        call.stream = Stream()
    stand_ins = {
        "Stream": Stream, "current_stream": Stream, "synchronize": lambda: None,
        "stream": lambda stream: asked.append(stream) or contextlib.nullcontext(),
        "graph": lambda graph, stream: asked.append(stream) or contextlib.nullcontext(),
        "CUDAGraph": lambda: types.SimpleNamespace(replay=lambda: replayed.append(1)),
    }  # fmt: skip
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    contender = timing.graph(call, 1)
    warm, *_, captured = [each for each in asked if each != "call"]
    assert captured is (call.stream if own else None) and (warm is captured) is own
    assert contender.calls == 20 and asked.count("call") == 21
    contender.call()
    assert replayed == [1]
