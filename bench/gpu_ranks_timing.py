"""How long a call of several ranks takes, each on a GPU of its own: gpu_timing.py's way, in which the slowest rank counts.

Each rank's GPU sleeps while its host queues the calls. Behind the sleep all GPUs meet in one exchange of a few bytes, and only
then do events count: what is timed begins everywhere at once, however the hosts' clocks run. What a rank finds about itself
(that its host was ahead, how many calls make a sample) is decided with all others, so that all queue the same calls.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import gpu_timing as timing

LONG_MS = 300.0  # a call of so many milliseconds is a sample by itself
MOST = 10  # calls in a row: each may be dozens of launches, of which a stream takes about a thousand before the host must wait
GRAPH_CALLS = 20  # of a captured graph
EXCHANGE_SECONDS, CONTROL_SECONDS = 60, 150  # until a rank counts as lost, on GPUs and between hosts

METHOD = (
    f"Two processes, a GPU each. Each GPU sleeps until its host has queued everything, which is checked; behind the sleep the GPUs meet in one exchange, "
    f"then up to {MOST} calls in a row (one, where it takes {LONG_MS:.0f} ms or more) run between two events; the slowest rank's time counts. Each contender has "
    f"{timing.ROUNDS} rounds in alternating order with a pause of {1000 * timing.PAUSE:.0f} ms and a barrier before each; the figure is their median, the spread (largest less "
    "least, over the median) is kept. One GPU alone: rank 0, in the same rounds, while the other does nothing. Contenders timed as 'host' waited for their GPU: theirs "
    f"is what Python waits for. Graphs are of {GRAPH_CALLS} calls. Outputs are compared first, with those of one GPU."
)
REHEARSAL = "A rehearsal on CPUs with small sizes: no duration in it says anything about a GPU."


class Failed(Exception):
    """What went wrong on some ranks, raised on all. everywhere: on each of them, so that none waits for another."""

    def __init__(self, words: str, everywhere: bool) -> None:
        super().__init__(words)
        self.everywhere = everywhere


class OutOfStep(BaseException):
    """Ranks that answer different questions: nothing that this process could do would be right."""


def in_words(error: BaseException) -> str:
    return (f"{type(error).__name__}: {error}".splitlines() or [""])[0][:300]


class World:
    """The ranks of this run, of which this process is one, and a group beside the GPUs' by which hosts talk."""

    def __init__(self, device: str) -> None:
        import torch
        import torch.distributed as dist

        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.rehearsal = device == "cpu"
        if self.rehearsal:
            self.device = torch.device("cpu")
            dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=EXCHANGE_SECONDS))
        else:
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", self.rank)))
            torch.cuda.set_device(self.device)
            dist.init_process_group("nccl", timeout=datetime.timedelta(seconds=EXCHANGE_SECONDS))
        self._control = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=CONTROL_SECONDS))
        self._dist = dist
        self.depth = 0  # of together()

    def gathered(self, value: Any) -> list:
        """What each rank says."""
        out: list = [None] * self.size
        self._dist.all_gather_object(out, (self.depth, value), group=self._control)
        if len({depth for depth, _ in out}) > 1:
            raise OutOfStep("one rank has left what another is still at")
        return [said for _, said in out]

    def barrier(self) -> None:
        """Hosts meet; GPUs are not asked."""
        self.gathered(None)

    def of_first(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        return self.gathered(value)[0]

    def scaled(self, size: int) -> int:
        """A length or a number of elements; in a rehearsal a small one."""
        return max(16, size // 1024) if self.rehearsal else size

    def close(self) -> None:
        self._dist.destroy_process_group()


def together(world, call: Callable, alone: bool = False) -> Any:
    """call() on every rank (alone: on rank 0), and what it returned. Where it raises on any, Failed is raised on all."""
    value, error, everywhere = None, None, True
    if not alone or world.rank == 0:
        world.depth += 1
        try:
            value = call()
        except Failed as failed:
            error, everywhere = str(failed), failed.everywhere
        except Exception as raised:  # whatever it is: the others must hear of it
            error = in_words(raised)
        world.depth -= 1
    said = world.gathered((error, everywhere))
    errors = [error for error, _ in said]
    if any(errors):
        everywhere = all(certain for _, certain in said) and (alone or all(errors))
        told = [f"rank {rank}: {words}" for rank, words in enumerate(errors) if words]
        raise Failed(errors[0] if len(set(errors)) == 1 else "; ".join(told), everywhere)
    return value


class Gpu(timing.Cuda):
    """What timing needs of torch, with a meeting of all GPUs."""

    def __init__(self, world) -> None:
        import torch

        super().__init__()
        self._token = torch.zeros(1, device=world.device)
        self._dist = world._dist
        self.meet()  # the first makes the connections
        self.synchronize()

    def meet(self) -> None:
        self._dist.all_reduce(self._token)


class Host:
    """The same without a GPU, for rehearsals: nothing is queued, and events are the host's clock."""

    host_seconds = staticmethod(time.perf_counter)
    pause = staticmethod(lambda seconds: None)
    sleep = staticmethod(lambda seconds: None)
    synchronize = staticmethod(lambda: None)
    meet = staticmethod(lambda: None)

    class _Event:
        def record(self) -> None:
            self.at = time.perf_counter()

        def query(self) -> bool:
            return False

        def elapsed_time(self, end) -> float:
            return 1e3 * (end.at - self.at)

    event = _Event


def clock_of(world):
    return Host() if world.rehearsal else Gpu(world)


@dataclasses.dataclass
class Contender:
    """As gpu_timing.Contender. alone: rank 0 calls it, and the others wait. how: "host" is what Python waits for. most: calls in a
    row."""

    call: Callable
    calls: int = 1
    prepare: Callable = lambda: None
    alone: bool = False
    how: str = "queued"
    most: int = MOST


def in_a_row(milliseconds: float, calls: int = 1, most: int = MOST) -> int:
    """How many times what takes so long, and is a graph of so many calls, is queued between two events."""
    return 1 if milliseconds >= LONG_MS else min(most, timing.in_a_row(milliseconds, calls))


class _Timed:
    """A contender with what its rounds need to know, which is the same on all ranks. It has been called before."""

    def __init__(self, contender: Contender, world, device) -> None:
        self.contender, self.world, self.device = contender, world, device
        self.how = contender.how
        self.takes_part = world.rank == 0 or not contender.alone
        self.host_seconds, took = self._once()
        self.count = 1
        if took < LONG_MS:
            self.host_seconds, took = self._once()  # the first may have made memory and connections
        self.count = in_a_row(took, contender.calls, contender.most)
        self.long = took >= LONG_MS

    def _slowest(self, *values: float) -> tuple[float, ...]:
        """Of each value the largest of the ranks that take part."""
        of_ranks = [found for found in self.world.gathered(values if self.takes_part else None) if found is not None]
        return tuple(max(each) for each in zip(*of_ranks))

    def _once(self) -> tuple[float, float]:
        """Seconds of the host for one call, and milliseconds until it is through."""
        queued = waited = 0.0
        self.world.barrier()
        if self.takes_part:
            self.contender.prepare()
            self.device.synchronize()
            begun = self.device.host_seconds()
            self.contender.call()
            queued = self.device.host_seconds() - begun
            self.device.synchronize()
            waited = 1e3 * (self.device.host_seconds() - begun)
        return self._slowest(queued, waited)

    def _queued(self) -> float | None:
        """Milliseconds of a call; None: a host did not get ahead of its GPU."""
        sleep = timing.sleep_seconds(self.host_seconds, self.count)
        count = self.count
        for _ in range(1 if self.long else timing.TRIES):
            ahead, queued, took = True, 0.0, 0.0
            self.device.synchronize()
            self.world.barrier()
            if self.takes_part:
                begin, end = self.device.event(), self.device.event()
                self.device.sleep(sleep)
                if not self.contender.alone:
                    self.device.meet()
                begin.record()
                begun = self.device.host_seconds()
                for _ in range(count):
                    self.contender.call()
                end.record()
                ahead, queued = not begin.query(), self.device.host_seconds() - begun
                self.device.synchronize()
                took = begin.elapsed_time(end) / count
            behind, queued, took = self._slowest(float(not ahead), queued, took)
            if not behind:
                return took
            # Fewer calls, too: a stream that is full makes the host wait however long the GPU sleeps.
            count, sleep = max(1, count // 2), max(2 * sleep, timing.MARGIN * queued)
        return None

    def _felt(self) -> float:
        self.device.synchronize()
        self.world.barrier()
        took = 0.0
        if self.takes_part:
            begun = self.device.host_seconds()
            for _ in range(self.count):
                self.contender.call()
            self.device.synchronize()
            took = 1e3 * (self.device.host_seconds() - begun) / self.count
        return self._slowest(took)[0]

    def round(self) -> float:
        if self.takes_part:
            self.contender.prepare()
            if not self.long:
                self.contender.call()  # not counted: wakes what slept through the pause
        found = self._queued() if self.how == "queued" else None
        if found is None:
            self.how, found = "host", self._felt()
        return found / self.contender.calls


def race(contenders: dict[str, Contender], world, device=None) -> dict[str, dict]:
    """What a row says of each: milliseconds of one call, a figure for each round; calls of a round; how they were timed."""
    device = device or clock_of(world)
    timed = {name: _Timed(contender, world, device) for name, contender in contenders.items()}
    times: dict[str, list[float]] = {name: [] for name in timed}
    for turn in range(timing.ROUNDS):
        for name in list(timed) if turn % 2 == 0 else list(timed)[::-1]:
            device.pause(timing.PAUSE)
            before = timed[name].how
            times[name].append(timed[name].round())
            if timed[name].how != before:
                times[name] = times[name][-1:]  # rounds that were timed otherwise are not beside these
    return {
        "milliseconds": times,
        "calls": {name: each.count * each.contender.calls for name, each in timed.items()},
        "timed": {name: each.how for name, each in timed.items()},
        "spread": {name: timing.spread(each) for name, each in times.items()},
    }


def medians(raced: dict) -> dict[str, float]:
    return {name: statistics.median(times) for name, times in raced["milliseconds"].items()}


def graph(call: Callable, world, alone: bool = False) -> Contender:
    """A graph of GRAPH_CALLS calls; every rank captures its own. In a rehearsal the calls themselves."""
    if alone and world.rank:
        return Contender(call, GRAPH_CALLS, alone=True)
    if world.rehearsal:
        return Contender(lambda: [call() for _ in range(GRAPH_CALLS)], GRAPH_CALLS, alone=alone)
    import torch

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    # Threads that watch over exchanges ask for events meanwhile, which a capture of the whole process would not survive.
    with torch.cuda.graph(captured, capture_error_mode="thread_local"):
        for _ in range(GRAPH_CALLS):
            call()

    def replay(inputs=call):  # which the graph reads, and nobody else may hold
        captured.replay()

    return Contender(replay, GRAPH_CALLS, alone=alone)


def rate(work: float, milliseconds: float) -> float:
    """Units of work a second."""
    return math.inf if milliseconds == 0 else 1e3 * work / milliseconds
