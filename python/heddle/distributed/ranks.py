"""How ranks reach each other: exchanges over a group of torch.distributed, with words for what went wrong."""

from __future__ import annotations

import copy
import time
import weakref
import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from .plan import Plan


def name_of(group: dist.ProcessGroup | None) -> str:
    """What operators of torch know a group by; of the default one it is empty, so that it may be made anew."""
    return "" if group is None else str(group.group_name)


def group_of(name: str) -> dist.ProcessGroup | None:
    resolve: Callable[[str], dist.ProcessGroup] = dist.distributed_c10d._resolve_process_group  # type: ignore[assignment]
    return resolve(name) if name else None


def on_device_of(x: torch.Tensor) -> AbstractContextManager[object]:
    """Its GPU as the current one, whose current stream is waited for and put work on."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def all_gather_of_torch() -> Callable[..., Any]:
    """Into one tensor; by its newer name where there is one, as the older then warns."""
    found: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return found


class Transfer:
    """Exchanges on their way. Behind wait() what was to come is there and what was sent may be changed: of tensors on a GPU for what is
    put on the current stream from then on. With a timeout it returns when that is so."""

    def __init__(self, ranks: Ranks, works: Sequence[tuple[Any, str]], what: str, held: Any) -> None:
        self._ranks = ranks
        self._works = works
        self._what = what
        self._held = held  # sent memory, until it has gone

    def wait(self) -> None:
        limit = self._ranks.timeout
        end = time.monotonic() + (0 if limit is None else limit.total_seconds())  # of all of it
        on_gpu = any(x.is_cuda for out, _, into, _ in self._held or () for x in (out, into))
        for work, whom in self._works:
            try:
                if limit is None:
                    work.wait()
                elif on_gpu:
                    _await_stream(work, end)
                else:
                    work.wait(timedelta(seconds=max(end - time.monotonic(), 1e-3)))
            except RuntimeError as error:
                raise self._ranks.lost(self._what, whom, error) from error
        self._held = None


def _await_stream(work: Any, end: float) -> None:
    """Looks until the exchange has ended on its stream, which for a rank that is gone it may never do."""
    while not work.is_completed():
        if time.monotonic() > end:
            raise RuntimeError("it has not ended")
        time.sleep(20e-6)
    work.wait(timedelta(seconds=max(end - time.monotonic(), 1e-3)))  # has ended; an error of NCCL's is told


class Ranks:
    """The ranks of a group, one of which this process is. Every rank makes the same calls in the same order."""

    def __init__(
        self, operation: str, plan: Plan | None, group: dist.ProcessGroup | None, timeout: float | None
    ) -> None:
        self.operation = operation
        self._of_plan = "" if plan is None else f", plan {plan.digest}"
        self.timeout = None if timeout is None else timedelta(seconds=timeout)
        if timeout is not None and not timeout > 0:
            raise ValueError(
                f"[{operation}] timeout is {timeout}: it must be above 0 seconds, or None for the group's own"
            )
        self.group: dist.ProcessGroup | None = None
        self.rank, self.size = 0, 1
        self._members: Sequence[int] = (0,)  # of the group, by its ranks
        if group is not None or (dist.is_available() and dist.is_initialized()):
            self.group = dist.group.WORLD if group is None else group
            self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
            if self.rank < 0:
                raise ValueError(f"[{operation}] this process is not in the group")
        elif plan is not None and plan.ranks > 1:
            raise ValueError(
                f"[{operation}] the plan is for {plan.ranks} ranks and torch.distributed has no process group: call "
                "init_process_group, or give a group"
            )
        if plan is not None and self.size != plan.ranks:
            raise ValueError(f"[{operation}] the plan is for {plan.ranks} ranks and the group has {self.size}")
        self._members = range(self.size)

    def subset(self, members: Sequence[int]) -> Ranks:
        """Some of these ranks, this one among them, as ranks 0, 1 ... of their own. Errors name them as they are here."""
        out = copy.copy(self)
        out.rank, out.size, out._members = members.index(self.rank), len(members), members
        return out

    def start(self, moves: Sequence[tuple[torch.Tensor, int, torch.Tensor, int]], what: str) -> Transfer:
        """Starts moves (out, to, in, from) of contiguous tensors; what is empty is not sent. Exchanges between two ranks keep their
        order."""
        ops, whom = [], []
        for out, to, into, source in moves:
            for function, x, peer, word in ((dist.isend, out, to, "to"), (dist.irecv, into, source, "from")):
                if x.numel() > 0:
                    ops.append(dist.P2POp(function, x.view(torch.uint8), self._global(peer), self.group))
                    whom.append(f"{word} rank {self._members[peer]}")
        if not ops:
            return Transfer(self, (), what, None)
        self._refuse_captured(ops[0].tensor, what)
        try:
            works = dist.batch_isend_irecv(ops)
        except RuntimeError as error:
            raise self.lost(what, ", ".join(dict.fromkeys(whom)), error) from error
        # A backend that joins them gives one work for all.
        told = whom if len(works) == len(whom) else [", ".join(dict.fromkeys(whom))] * len(works)
        return Transfer(self, tuple(zip(works, told)), what, moves)

    def all_gather(self, part: torch.Tensor, lengths: Sequence[int], what: str) -> list[torch.Tensor]:
        """Every rank's part, of one dtype and one dimension, of these lengths."""
        parts = [part if r == self.rank else part.new_empty(length) for r, length in enumerate(lengths)]
        self.start([(part, r, parts[r], r) for r in self._others()], what).wait()
        return parts

    def fill(self, parts: torch.Tensor, what: str) -> None:
        """Every rank's part at its place in parts [size, ...], contiguous, where this one's lies already. Of the whole group. Over NCCL it
        is one collective; without a timeout it runs on the current stream."""
        if self.backend(parts.device) != "nccl" or parts.numel() == 0:
            self.start([(parts[self.rank], r, parts[r], r) for r in self._others()], what).wait()
            return
        self._refuse_captured(parts, what)
        own, limited = parts[self.rank], self.timeout is not None
        whom = ", ".join(f"from rank {r}" for r in self._others())
        try:
            work = all_gather_of_torch()(parts.view(-1), own.view(-1), self.group, async_op=limited)
        except RuntimeError as error:
            raise self.lost(what, whom, error) from error
        if limited:
            Transfer(self, ((work, whom),), what, ((own, self.rank, parts, self.rank),)).wait()

    def all_to_all(self, parts: Sequence[torch.Tensor], lengths: Sequence[int], what: str) -> list[torch.Tensor]:
        """What every rank has for this one, of one dtype and one dimension, of these lengths. parts: what this one has for each."""
        came = [parts[r] if r == self.rank else parts[r].new_empty(length) for r, length in enumerate(lengths)]
        self.start([(parts[r], r, came[r], r) for r in self._others()], what).wait()
        return came

    def reduce_scatter(self, parts: Sequence[torch.Tensor], what: str) -> torch.Tensor:
        """Of what every rank has for this one, rank 0's part + rank 1's + ..., in this order whatever comes first; parts of 16 bits are
        summed in float32 and rounded once."""
        own = parts[self.rank]
        came = self.all_to_all([part.flatten() for part in parts], [own.numel()] * self.size, what)
        total = came[0].to(torch.promote_types(own.dtype, torch.float32), copy=True)
        for share in came[1:]:
            total += share
        return total.to(own.dtype).view_as(own)

    def all_reduce(self, x: torch.Tensor, what: str) -> torch.Tensor:
        """Rank 0's x + rank 1's + ..., in this order, the same bits on every rank."""
        flat = x.contiguous().flatten()
        total = torch.zeros_like(flat)
        for share in self.all_gather(flat, [flat.numel()] * self.size, what):
            total += share
        return total.view_as(x)

    def serve(self, device: torch.device) -> None:
        """Raises unless the group carries tensors of the device. Of a GPU's gloo has some collectives, and no sends."""
        if self.group is None or self.size == 1:
            return
        backend = self.backend(device)
        if backend == "none" or (backend == "gloo" and device.type == "cuda"):
            raise ValueError(
                f"[{self.operation}] tensors are on {device}, which the group does not carry (its backend for them: {backend}): the CPU needs "
                '"gloo" and GPUs "nccl" of init_process_group or new_group, both "cpu:gloo,cuda:nccl"'
            )

    def agree(
        self,
        words: dict[str, int],
        shown: dict[str, Callable[[int], object]],
        device: torch.device | None = None,
        room: Callable[[], int] | None = None,
    ) -> int:
        """Compares with all ranks what this group has not compared yet; every rank raises where they differ. shown: what errors make
        of a number that says nothing itself. device: of the tensors that are to be exchanged; None: the CPU. Returns the largest room() of
        all ranks, which is asked when the words are compared; 0 where one is 0 or is not given."""
        if self.group is None:
            return 0
        device = device or torch.device("cpu")
        known = _agreed.setdefault(self.group, {})
        operation, own = zlib.crc32(self.operation.encode()), tuple(words.values())
        key = (device.type, operation, own)
        if key in known:
            return 0 if room is None else known[key]
        self.serve(device)
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"[{self.operation}] the call is captured in a graph and ranks have not compared it: make it once before"
            )
        of_rank = self.compared(
            self.operation, [*own, *[0] * (_NUMBERS - 1 - len(own)), 0 if room is None else room()], device
        )
        for rank, theirs in enumerate(of_rank):
            for name, first, here in zip(words, of_rank[0], theirs):
                if first != here:
                    show = shown.get(name, int)
                    raise ValueError(
                        f"[{self.operation}] ranks do not agree: {name} is {show(first)} on rank 0 and {show(here)} on rank {rank}"
                    )
        rooms = [theirs[-1] for theirs in of_rank]
        known[key] = max(rooms) if all(rooms) else 0
        return known[key]

    def compared(self, about: str, numbers: Sequence[int], device: torch.device) -> list[list[int]]:
        """Those of all ranks, _NUMBERS at most. As many go for every operation, with its own number in front: a rank that is at another one
        is told of, and not waited for.

        Raises:
          ValueError: on every rank, such a rank.
        """
        assert len(numbers) <= _NUMBERS
        padded = [zlib.crc32(about.encode()), *numbers, *[0] * (_NUMBERS - len(numbers))]
        own = torch.tensor(padded, dtype=torch.int64, device=device)
        of_rank = [each.tolist() for each in self.all_gather(own, [len(padded)] * self.size, "plans compared")]
        for rank, (operation, *_) in enumerate(of_rank):
            if operation != of_rank[0][0]:
                raise ValueError(
                    f"[{self.operation}] ranks do not agree: rank {rank} is at another operation than rank 0"
                )
        return [theirs[1:] for theirs in of_rank]

    def seconds(self, device: torch.device) -> float:
        """That the group has a rank wait."""
        assert self.group is not None
        limit: timedelta = self.group._get_backend(device).options._timeout
        return limit.total_seconds()

    def lost(self, what: str, whom: str, error: Exception) -> RuntimeError:
        within = "" if self.timeout is None else f", within {self.timeout.total_seconds():g} s"
        rank = self._members[self.rank]
        return RuntimeError(f"[{self.operation}] {what}: rank {rank} {whom}{within}{self._of_plan}: {error}")

    def _refuse_captured(self, x: torch.Tensor, what: str) -> None:
        if self.timeout is not None and x.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"[{self.operation}] {what}: the stream is captured and timeout is {self.timeout.total_seconds():g}: the host would wait for "
                "what does not run yet"
            )

    def backend(self, device: torch.device) -> str:
        if self.group is None or self.size == 1:
            return "none"
        try:
            return str(self.group._get_backend(device).name())
        except RuntimeError:
            return "none"

    def _others(self) -> list[int]:
        """Nearest first, so that not all ranks send to the same one at once."""
        return [(self.rank + distance) % self.size for distance in range(1, self.size)]

    def _global(self, rank: int) -> int:
        assert self.group is not None
        return dist.get_global_rank(self.group, self._members[rank])


#: What the ranks of each group have found to be the same.
_agreed: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[str, int, tuple[int, ...]], int]] = (
    weakref.WeakKeyDictionary()
)
_NUMBERS = 24  # of what is compared
