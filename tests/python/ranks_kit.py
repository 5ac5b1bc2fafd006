"""What is counted of exchanges between ranks, and how calls are made to go in parts or late."""

import contextlib
import sys

import torch
import torch.distributed as dist
from heddle.distributed import copies
from heddle.distributed.peers import Peers
from heddle.distributed.ranks import Ranks

_MOST_NUMBERS = 1 + 4 * 2 * copies._MOST_COPIES


class PeersOverGloo(Peers):
    """Memory of a process that others write, without GPUs: what is pushed is sent, and comes when it is awaited; until then it is NaN."""

    def __init__(self, rank, ranks, size):
        self.rank, self.ranks, self.size = rank, ranks, size
        self._memory = torch.empty(size, dtype=torch.uint8)
        self._of_ranks = {rank: self._memory}  # as they were when ranks met, if they are read
        self._sent = []

    def begin(self):
        self._memory.fill_(255)
        self.meet()

    def begin_turn(self):
        self.begin()
        return self.size // 2 // 256 * 256

    def end(self):
        while self._sent:
            work, _ = self._sent.pop()
            work.wait()

    def meet(self):
        if len(self._of_ranks) == 1:
            dist.barrier()
        else:
            dist.all_gather([self._of_ranks[r] for r in range(self.ranks)], self._memory.clone())

    def room(self, offset, shape, dtype, rank=None):
        memory = self._of_ranks.setdefault(self.rank if rank is None else rank, torch.empty_like(self._memory))
        size = torch.Size(shape).numel() * dtype.itemsize
        assert offset + size <= self.size, (offset, shape, self.size)
        return memory[offset : offset + size].view(dtype).view(*shape)

    def push(self, moves, kind, flag):
        of_ranks = {}
        for x, to, offset, pitch in moves:
            assert x.numel() > 0 and x[0].is_contiguous()
            of_ranks.setdefault(to, []).append(
                (x.contiguous().view(torch.uint8).flatten().clone(), offset, pitch, len(x))
            )
        for to, parts in of_ranks.items():
            where = torch.zeros(_MOST_NUMBERS, dtype=torch.int64)
            numbers = [len(parts), *(n for x, *of_rows in parts for n in (len(x), *of_rows))]
            where[: len(numbers)] = torch.tensor(numbers)
            for x in (where, *(x for x, *_ in parts)):
                self._sent.append((dist.isend(x, to, tag=self._channel(kind, flag)), x))

    def await_from(self, rank, kind, flag):
        tag = self._channel(kind, flag)
        where = torch.zeros(_MOST_NUMBERS, dtype=torch.int64)
        dist.recv(where, rank, tag=tag)
        for n in range(int(where[0])):
            size, offset, pitch, rows = where[1 + 4 * n : 5 + 4 * n].tolist()
            dist.recv(came := torch.empty(size, dtype=torch.uint8), rank, tag=tag)
            end = offset + (rows - 1) * pitch + size // rows
            assert end <= self.size, (end, self.size)
            self._memory[offset:end].as_strided((rows, size // rows), (pitch, 1)).copy_(came.view(rows, -1))

    def pushed(self):
        return None


@contextlib.contextmanager
def copies_over_gloo(wanted):
    """Calls without a timeout go as they do where GPUs' copy engines carry what is sent."""
    # Functions have the modules' names.
    modules = [sys.modules[f"heddle.distributed.{name}"] for name in ("attention", "decode")] if wanted else []
    before = [(module, module.reach_each_other, module.peers_of) for module in modules]
    for module in modules:
        module.reach_each_other = lambda ranks, device: ranks.size > 1
        module.peers_of = lambda ranks, device, size: PeersOverGloo(ranks.rank, ranks.size, size)
    try:
        yield
    finally:
        for module, reach_each_other, peers_of in before:
            module.reach_each_other, module.peers_of = reach_each_other, peers_of


class Counted:
    """Counts what this process sends over a group, or writes for others, but for what is compared."""

    def __init__(self):
        self.sent = 0
        self._start = Ranks.start
        self._pushes = [(kind, kind.push) for kind in (Peers, PeersOverGloo)]

    def __enter__(self):
        def start(ranks, moves, what):
            moves = list(moves)
            if what not in ("plans compared", "gradient of the sink summed"):
                self.sent += sum(out.numel() * out.element_size() for out, *_ in moves)
            return self._start(ranks, moves, what)

        Ranks.start = start
        for kind, push in self._pushes:

            def pushed(peers, moves, *where, push=push):
                self.sent += sum(x.numel() * x.element_size() for x, *_ in moves)
                return push(peers, moves, *where)

            kind.push = pushed
        return self

    def __exit__(self, *_):
        Ranks.start = self._start
        for kind, push in self._pushes:
            kind.push = push


@contextlib.contextmanager
def chunked_at_once(wanted):
    """Chunked calls by copies have room for keys of all heads, as those have whose parts hide what is exchanged."""
    before = copies.parts_for_memory, copies._PART_WORK, copies._LINK
    if wanted:
        copies.parts_for_memory, copies._PART_WORK, copies._LINK = lambda *_: 1.0, 1e-9, 1.0
    try:
        yield
    finally:
        copies.parts_for_memory, copies._PART_WORK, copies._LINK = before


class Late:
    """A transfer that is not begun before it is waited for, or the next one is; until then what is to come is NaN."""

    def __init__(self, start, moves):
        self._start, self._begun = start, None
        for _, _, into, _ in moves:
            into.fill_(torch.nan)

    def begin(self):
        self._begun = self._begun or self._start()

    def wait(self):
        self.begin()
        self._begun.wait()


@contextlib.contextmanager
def rest_late(wanted):
    """Of keys that are sent in two exchanges the second is late."""
    start, late, firsts = Ranks.start, [], [0]

    def started(ranks, moves, what):
        if what in ("keys gathered", "needed keys sent"):
            firsts[0] += 1
            if firsts[0] % 2 == 0:
                late.append(Late(lambda: start(ranks, moves, what), moves))
                return late[-1]
        while late:
            late.pop().begin()
        return start(ranks, moves, what)

    if wanted:
        Ranks.start = started
    try:
        yield
    finally:
        Ranks.start = start
