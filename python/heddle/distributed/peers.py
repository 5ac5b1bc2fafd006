"""Memory of a rank that the other ranks of its host write and read: torch's symmetric memory.

What is written goes by copy engines, on a stream of its own: no multiprocessor takes part in it, so a rank that waits for another one
slows nothing down, and what is sent is hidden behind products however far the other rank has come.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from .. import _heddle
from .ranks import Ranks

#: "nccl": nothing goes by copy engines. Ranks that do not say the same use NCCL, too.
VARIABLE = "HEDDLE_RANKS_EXCHANGE"

#: What is awaited from another rank: keys of its first piece, the other keys, gradients.
FIRST, REST, GRADIENTS = range(3)
SLOTS = 2  # of what comes by turns
FLAGS = 4  # of each kind
#: Rows, each dense, the rank that they go to, the byte there of the first one, and the bytes from one to the next.
Move = tuple[torch.Tensor, int, int, int]


def reach_each_other(ranks: Ranks, device: torch.device) -> bool:
    """Whether the ranks of a group have their GPUs in one host, and reach each other's memory; the same on all of them. It is found out
    once, by an exchange."""
    if ranks.group is None or ranks.size == 1 or device.type != "cuda" or ranks.backend(device) != "nccl":
        return False
    found = _served.get(ranks.group)
    if found is None:
        if torch.cuda.is_current_stream_capturing():
            return False  # nothing has been compared, and what compares refuses
        of_rank = ranks.compared("places of ranks", [_host(), device.index, int(_able(device)), int(_known())], device)
        hosts, places, able, known = zip(*(each[:4] for each in of_rank))
        if not all(known):
            raise ValueError(f"[{ranks.operation}] {VARIABLE} on rank {known.index(0)}: it must be nccl, or not be set")
        found = all(able) and len(set(hosts)) == 1 and len(set(places)) == ranks.size
        found = found and all(
            place < torch.cuda.device_count() and torch.cuda.can_device_access_peer(device.index, place)
            for place in places
            if place != device.index
        )
        # Of two GPUs one may reach the other and not be reached.
        found = all(each[0] for each in ranks.compared("places of ranks", [int(found)], device))
        _served[ranks.group] = found
    if found:
        _require_device_of(ranks, device)
    return found


def _require_device_of(ranks: Ranks, device: torch.device) -> None:
    """What a group has found out, and keeps, is of one GPU."""
    assert ranks.group is not None
    first = _devices.setdefault(ranks.group, device)
    if first != device:
        raise ValueError(
            f"[{ranks.operation}] tensors are on {device}, and those of this group's first call were on {first}"
        )


def _known() -> bool:
    return os.environ.get(VARIABLE, "") in ("", "nccl")


def _able(device: torch.device) -> bool:
    if os.environ.get(VARIABLE, "") != "":
        return False
    try:
        from torch._C._distributed_c10d import _SymmetricMemory as memory  # noqa: N813
        from torch.distributed import _symmetric_memory as symmetric
    except ImportError:
        return False
    calls = ("get_buffer", "get_signal_pad", "barrier", "put_signal", "wait_signal")
    if not hasattr(symmetric, "rendezvous") or not all(hasattr(memory, name) for name in calls):
        return False
    # Memory of NVSHMEM, which a program may have chosen, has no such flags.
    backend = getattr(symmetric, "get_backend", None)
    return backend is None or backend(device) in (None, "CUDA")


def _host() -> int:
    """A number of the host, and of what of it this process sees: handles of memory go through its files and its process ids."""
    import hashlib

    seen = [os.uname().nodename]
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            seen.append(file.read())
        seen += [os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net", "mnt")]
    except OSError:
        pass
    return int.from_bytes(hashlib.sha256("\n".join(seen).encode()).digest()[:7], "big")


def peers_of(ranks: Ranks, device: torch.device, size: int) -> Peers:
    """Those of a group, with room for at least so many bytes, the same number on all ranks, all of which call this. The room is kept for
    the next call."""
    assert ranks.group is not None
    kept = _kept.get(ranks.group)
    if kept is None or kept.size < size:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"[{ranks.operation}] the call is captured in a graph and there is no memory for it between the ranks: make it once before"
            )
        torch.cuda.synchronize(device)  # others may still write to, or read, the memory that goes
        grown = 0 if kept is None else kept.size // 4 * 5  # so that calls of many lengths do not each make it anew
        with torch.inference_mode(False), torch.cuda.device(device):  # what is made here is written to by any call
            fresh = Peers(ranks, device, max(size, grown, 1 << 21))
        if kept is not None:
            fresh.behind = kept if kept.captured else kept.behind  # a graph has its addresses
        _kept[ranks.group] = kept = fresh
    return kept


class Peers:
    """All ranks make the same calls in the same order, but for what they push and await, which must belong together."""

    def __init__(self, ranks: Ranks, device: torch.device, size: int) -> None:
        from torch.distributed import _symmetric_memory as symmetric

        assert ranks.group is not None
        self.rank, self.ranks, self.size = ranks.rank, ranks.size, size
        self.captured = False
        self.behind: Peers | None = None
        self._timeout = int(1e3 * ranks.seconds(device))  # of a kernel that waits
        try:
            self._buffer = symmetric.empty(size, dtype=torch.uint8, device=device)
            self._handle: Any = symmetric.rendezvous(self._buffer, ranks.group.group_name)
        except RuntimeError as error:
            raise RuntimeError(
                f"[{ranks.operation}] memory that all ranks reach, {size} bytes on {device}: {error}; with {VARIABLE}=nccl there is none, and "
                "NCCL carries what is exchanged"
            ) from error
        self._memory = [self._handle.get_buffer(r, (size,), torch.uint8) for r in range(self.ranks)]
        flags = (1 + 3 * FLAGS) * self.ranks
        self._flags = [self._handle.get_signal_pad(r, (flags,), torch.uint32) for r in range(self.ranks)]
        self._one = torch.ones(1, dtype=torch.int32, device=device).view(torch.uint32)
        self._stream = torch.cuda.Stream(device)
        self._pushing = self._open = False  # since begin(), and until end()
        self._turn, self._capture = 0, 0
        self._last: torch.cuda.Event | None = None
        self._check_flags(device)

    def _check_flags(self, device: torch.device) -> None:
        """That a flag is where torch's own kernels have it: push() writes it without one of them."""
        self.meet()
        for r in self.others():
            self._handle.put_signal(r, self._channel(FIRST, 0), self._timeout)
        self.meet()
        torch.cuda.synchronize(device)
        own = self._flags[self.rank].view(torch.int32).tolist()
        expected = [0] * len(own)
        for r in self.others():
            expected[self._channel(FIRST, 0) * self.ranks + r] = 1
        for r in self.others():
            self._handle.wait_signal(r, self._channel(FIRST, 0), self._timeout)
        # Another rank may already be at its next meeting, which the first channel is for.
        if own[self.ranks :] != expected[self.ranks :]:
            raise RuntimeError(f"this torch {torch.__version__} has signals elsewhere; set {VARIABLE}=nccl")

    def others(self) -> list[int]:
        """Nearest first, so that not all ranks send to the same one at once."""
        return [(self.rank + distance) % self.ranks for distance in range(1, self.ranks)]

    @staticmethod
    def _channel(kind: int, flag: int) -> int:
        return 1 + FLAGS * kind + flag

    def begin(self) -> None:
        """Of a call on the current stream, which may be another than that of the call before. All that was before it on any rank is done."""
        if torch.cuda.is_current_stream_capturing():
            self.captured = True
        elif self._last is not None:
            torch.cuda.current_stream().wait_event(self._last)
        if self._open:
            self._forget()
        self._open = True
        self.meet()

    def _forget(self) -> None:
        """What the call before, which raised on all ranks, has left: flags that nobody awaited."""
        if self._pushing:
            torch.cuda.current_stream().wait_stream(self._stream)
        self.meet()
        self._flags[self.rank].view(torch.int32)[self.ranks :].zero_()
        self.meet()

    def begin_turn(self) -> int:
        """begin() of a call whose ranks read each other's memory behind one meet(), and nothing else. Returns from which byte on this rank may
        write, half of its memory at most: no other reads there any more, as it was at the other half in the call before, and all have
        met since. What graphs did between calls is not known here: with graphs, calls outside of them and the first in each meet."""
        capture = _heddle.capture_id(torch.cuda.current_stream().cuda_stream)
        self._turn ^= 1
        if self._open or capture != self._capture or (self.captured and capture == 0):
            self._capture = capture
            self.begin()
        elif capture == 0 and self._last is not None:
            torch.cuda.current_stream().wait_event(self._last)
        self._open = True
        return self._turn * (self.size // 2 // 256 * 256)

    def end(self) -> None:
        """Behind it, what was pushed may be changed."""
        if self._pushing:
            torch.cuda.current_stream().wait_stream(self._stream)
        self._pushing = self._open = False
        if not torch.cuda.is_current_stream_capturing():
            self._last = torch.cuda.Event()
            self._last.record()

    def meet(self) -> None:
        """What follows on the current stream runs when all ranks' streams are here, and what was before is done on all of them."""
        self._handle.barrier(0, self._timeout)

    def room(self, offset: int, shape: Sequence[int], dtype: torch.dtype, rank: int | None = None) -> torch.Tensor:
        """This rank's memory from a byte on, or another's."""
        memory = self._memory[self.rank if rank is None else rank]
        size = torch.Size(shape).numel() * dtype.itemsize
        return memory[offset : offset + size].view(dtype).view(*shape)

    def push(self, moves: Sequence[Move], kind: int, flag: int) -> None:
        """Writes into the memory of ranks, behind what is on the current stream. Of each rank that has any, await_from() there ends when
        they have come. They are to be kept until end()."""
        self._pushing = True
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for x, to, offset, pitch in moves:
                width = x[0].numel() * x.element_size()
                if x.is_contiguous() and pitch == width:
                    self.room(offset, x.shape, x.dtype, to).copy_(x)
                    continue
                assert offset + (len(x) - 1) * pitch + width <= self.size
                place = self._memory[to].data_ptr() + offset
                _heddle.copy_rows(
                    place, pitch, x.data_ptr(), x.stride(0) * x.element_size(), width, len(x), self._stream.cuda_stream
                )
            for to in dict.fromkeys(to for _, to, _, _ in moves):
                at = self._channel(kind, flag) * self.ranks + self.rank
                self._flags[to][at : at + 1].copy_(self._one)

    def await_from(self, rank: int, kind: int, flag: int) -> None:
        """What follows on the current stream has what that rank pushed."""
        self._handle.wait_signal(rank, self._channel(kind, flag), self._timeout)

    def pushed(self) -> torch.cuda.Event | None:
        """When what was pushed until now has been read; None: nothing was."""
        if not self._pushing:
            return None
        event = torch.cuda.Event()
        event.record(self._stream)
        return event


def kept_memory(group: dist.ProcessGroup | None = None) -> int:
    """Bytes of this rank's GPU that are kept between calls of ``attention`` and ``decode``, for the other ranks of the group to write to
    and to read; outside of what torch's allocator counts. 0 where exchanges go over NCCL or gloo. None: the default group."""
    found = _kept.get(_group(group))
    total = 0
    while found is not None:
        total, found = total + found.size, found.behind
    return total


def release_memory(group: dist.ProcessGroup | None = None) -> None:
    """Gives that memory back; every rank calls it, and the next call makes it anew. Graphs that were captured with it must not be run
    again."""
    if (found := _kept.pop(_group(group), None)) is not None:
        torch.cuda.synchronize()  # the last call may have been on another stream
        found.meet()
        torch.cuda.synchronize()


def _group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    return dist.distributed_c10d._get_default_group() if group is None else group


_devices: weakref.WeakKeyDictionary[dist.ProcessGroup, torch.device] = weakref.WeakKeyDictionary()
_served: weakref.WeakKeyDictionary[dist.ProcessGroup, bool] = weakref.WeakKeyDictionary()
_kept: weakref.WeakKeyDictionary[dist.ProcessGroup, Peers] = weakref.WeakKeyDictionary()
