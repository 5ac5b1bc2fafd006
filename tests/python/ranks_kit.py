"""What is counted of exchanges between ranks, and how calls are made to go in parts or late."""

import contextlib

import torch
from heddle.distributed import keys
from heddle.distributed.ranks import Ranks


class Counted:
    """Counts what this process sends over a group, but for what is compared."""

    def __init__(self):
        self.sent = 0
        self._start = Ranks.start

    def __enter__(self):
        def start(ranks, moves, what):
            moves = list(moves)
            if what not in ("plans compared", "gradient of the sink summed"):
                self.sent += sum(out.numel() * out.element_size() for out, *_ in moves)
            return self._start(ranks, moves, what)

        Ranks.start = start
        return self

    def __exit__(self, *_):
        Ranks.start = self._start


@contextlib.contextmanager
def heads_in_parts(one_by_one):
    """Whether calls as small as these take key heads one after the other, as large ones do."""
    before = keys._LEAST_WORK
    if one_by_one:
        keys._LEAST_WORK = 1e-9
    try:
        yield
    finally:
        keys._LEAST_WORK = before


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
