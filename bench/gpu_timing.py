"""How long a call takes on a GPU: one way of timing for every benchmark.

The GPU sleeps first, for as long as the host needs to queue what follows; then 3 to 40 calls in a row run between two
events. That the host was ahead is checked, not hoped for: the first event must not have passed when the last is queued.
Calls under 100 us are captured in CUDA graphs, which is another `Contender.calls` and the same timing. Contenders have
three rounds each, in alternating order, with a pause before each, so that all start on an equally cool chip; what counts
is the median, and the spread is kept. What the host feels (a call that waits for the GPU, or a Python call as such) is
timed by `host_milliseconds` and named so wherever it is shown.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable

ROUNDS = 3
PAUSE = 0.04  # seconds before each round
FEWEST, MOST = 3, 40  # calls in a row
QUEUED = 400  # launches of graphs in a row: a stream takes no more than some hundreds before the host must wait
SAMPLE_MS = 20.0  # what the calls in a row shall take together
HOST_SECONDS = 0.05  # what a round of host_milliseconds shall take
WARM_CALLS, WARM_SECONDS = 50, 0.2  # before host_milliseconds counts
MARGIN = 2.0  # the GPU sleeps that many times as long as the host is expected to need,
LEAST_SLEEP = 200e-6  # and at least so many seconds
TRIES = 4  # each with at least twice the sleep of the one before

METHOD = (
    f"The GPU sleeps until the host has queued everything, which is checked; then {FEWEST} to {MOST} calls in a row run between two events. "
    f"Each contender has {ROUNDS} rounds in alternating order with a pause of {1000 * PAUSE:.0f} ms before each; the figure is their median, "
    "the spread (largest less least, over the median) is kept. Rows timed as 'graph' are replays of CUDA graphs of at least 20 calls, whose "
    "inputs take turns so that they come from memory; rows timed as 'host' are what Python waits for, launch included. Outputs are compared first."
)


class TimingError(RuntimeError):
    """A call that cannot be timed behind a sleeping GPU."""


class Cuda:
    """What timing needs of torch; tests have another."""

    def __init__(self):
        import torch

        self._cuda = torch.cuda
        self._cycles_per_second = None

    host_seconds = staticmethod(time.perf_counter)
    pause = staticmethod(time.sleep)

    def synchronize(self):
        self._cuda.synchronize()

    def event(self):
        return self._cuda.Event(enable_timing=True)

    def sleep(self, seconds: float):
        """Queues a kernel that does nothing for so long. torch counts cycles, whose rate is measured once."""
        if self._cycles_per_second is None:
            cycles = 20_000_000
            self._cuda._sleep(cycles)
            begin, end = self.event(), self.event()
            begin.record()
            self._cuda._sleep(cycles)
            end.record()
            self.synchronize()
            self._cycles_per_second = 1000 * cycles / begin.elapsed_time(end)
        self._cuda._sleep(math.ceil(seconds * self._cycles_per_second))


@dataclasses.dataclass
class Contender:
    """call(): queues `calls` calls (a graph's replay: many) on the current stream. prepare(): what is set before it is timed."""

    call: Callable
    calls: int = 1
    prepare: Callable = lambda: None


def in_a_row(milliseconds: float, calls: int = 1) -> int:
    """How many times what takes so long, and is a graph of so many calls, is queued between two events."""
    return max(FEWEST, min(MOST, QUEUED // calls, math.ceil(SAMPLE_MS / max(milliseconds, 1e-6))))


def sleep_seconds(host_seconds: float, count: int) -> float:
    """How long the GPU sleeps while the host, which needs so long for a call, queues `count` of them."""
    return max(LEAST_SLEEP, MARGIN * host_seconds * count)


def spread(times: list[float]) -> float:
    """Largest less least, over the median."""
    return (max(times) - min(times)) / statistics.median(times)


def _sample(device, call, count, host_seconds):
    """Milliseconds of one call. Raises TimingError if the host never gets ahead: then the call itself waits for the GPU."""
    sleep = sleep_seconds(host_seconds, count)
    for _ in range(TRIES):
        device.synchronize()
        begin, end = device.event(), device.event()
        device.sleep(sleep)
        begin.record()
        begun = device.host_seconds()
        for _ in range(count):
            call()
        end.record()
        ahead, queued = not begin.query(), device.host_seconds() - begun
        device.synchronize()
        if ahead:
            return begin.elapsed_time(end) / count
        sleep = max(2 * sleep, MARGIN * queued)
    raise TimingError(
        f"the host needed {queued:.3g} s to queue {count} calls, however long the GPU slept: the call waits for the GPU"
    )


class _Timed:
    """A contender with what its rounds need to know of it: found once, by calls that are not counted."""

    def __init__(self, contender, device):
        self.contender, self.device = contender, device
        contender.prepare()
        for _ in range(3):
            contender.call()
        device.synchronize()
        begun = device.host_seconds()
        for _ in range(FEWEST):
            contender.call()
        self.host_seconds = (device.host_seconds() - begun) / FEWEST
        device.synchronize()
        self.count = in_a_row(_sample(device, contender.call, FEWEST, self.host_seconds), contender.calls)

    def round(self):
        self.contender.prepare()
        self.contender.call()  # not counted: wakes what slept through the pause
        return _sample(self.device, self.contender.call, self.count, self.host_seconds) / self.contender.calls


def _rounds(timed: dict, device) -> dict[str, list[float]]:
    times = {name: [] for name in timed}
    for turn in range(ROUNDS):
        for name in list(timed) if turn % 2 == 0 else list(timed)[::-1]:
            device.pause(PAUSE)
            times[name].append(timed[name].round())
    return times


def race(contenders: dict[str, Contender], device=None) -> tuple[dict[str, list[float]], dict[str, int]]:
    """name -> milliseconds of one call, a figure for each round; and name -> calls that a round had in a row."""
    device = device or Cuda()
    timed = {name: _Timed(contender, device) for name, contender in contenders.items()}
    return _rounds(timed, device), {name: each.count * each.contender.calls for name, each in timed.items()}


class _Felt:
    """A contender as the host feels it: calls one after another, then one wait for the GPU."""

    def __init__(self, contender, device):
        self.contender, self.device = contender, device
        contender.prepare()
        begun = device.host_seconds()
        for _ in range(WARM_CALLS):
            contender.call()
            if device.host_seconds() - begun > WARM_SECONDS:
                break
        self.count = 1
        seconds = self.round() / 1e3
        self.count = max(FEWEST, min(1000, math.ceil(HOST_SECONDS / max(seconds, 1e-9))))

    def round(self):
        self.contender.prepare()
        self.contender.call()
        self.device.synchronize()
        begun = self.device.host_seconds()
        for _ in range(self.count):
            self.contender.call()
        self.device.synchronize()
        return 1e3 * (self.device.host_seconds() - begun) / self.count


def host_milliseconds(contenders: dict[str, Contender], device=None) -> tuple[dict[str, list[float]], dict[str, int]]:
    """As race(), of what a Python program waits for: the host's part counts."""
    device = device or Cuda()
    timed = {name: _Felt(contender, device) for name, contender in contenders.items()}
    return _rounds(timed, device), {name: each.count for name, each in timed.items()}


def graph(call: Callable, rotations: int, prepare: Callable = lambda: None) -> Contender:
    """A graph of at least 20 calls, call(n) of inputs that take turns; rotations: 1 if call takes nothing. It is captured on the
    call's own stream, where it has one."""
    import torch

    one = call if rotations > 1 else lambda n: call()
    count = rotations * math.ceil(20 / rotations)
    prepare()
    own = getattr(call, "stream", None)
    stream = own or torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for n in range(min(rotations, 3)):
            one(n)
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured, stream=own):
        for n in range(count):
            one(n % rotations)

    def replay(inputs=call):  # which the graph reads, and nobody else may hold
        captured.replay()

    return Contender(replay, count)
