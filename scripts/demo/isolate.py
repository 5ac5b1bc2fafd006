"""Calls in processes of their own, so that what one measurement leaves in memory does not hide what the next one takes."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import resource
import time

_context = None


class ChildFailed(RuntimeError):
    """The process ended with an exception (`kind` is its class name) or was killed (`kind` is 'killed')."""

    def __init__(self, kind: str, message: str):
        super().__init__(f"{kind}: {message}")
        self.kind = kind


def _serve(pipe, function, arguments) -> None:
    try:
        pipe.send((True, function(*arguments)))
    except BaseException as error:  # it is the parent that reports
        pipe.send((False, (type(error).__name__, str(error))))
    finally:
        pipe.close()


def call(function, *arguments, timeout: float = 300.0):
    """function(*arguments), run in a fresh process; both must pickle. Raises ChildFailed.

    The process is forked from a server that has imported torch and heddle and called neither: every measurement begins from the same
    state, without a second of imports.
    """
    global _context
    if _context is None:
        _context = multiprocessing.get_context("forkserver")
        _context.set_forkserver_preload(["numpy", "torch", "heddle"])
    ours, theirs = _context.Pipe(duplex=False)
    process = _context.Process(target=_serve, args=(theirs, function, arguments), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(timeout):
            raise ChildFailed("killed", f"no answer within {timeout:.0f} s")
        done, answer = ours.recv()
    except EOFError:
        process.join()
        raise ChildFailed("killed", f"the process ended with status {process.exitcode}") from None
    finally:
        if process.is_alive():
            process.join(0.2)
        if process.is_alive():
            process.kill()
        process.join()
        ours.close()
    if not done:
        raise ChildFailed(*answer)
    return answer


def _status(key: str) -> int:
    with open("/proc/self/status", encoding="ascii") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":"))


def fresh_pages() -> None:
    """From now on every allocation of 64 KiB or more is a mapping of its own: none finds pages that an earlier one left resident."""
    libc = ctypes.CDLL(None)
    trim_threshold, mmap_threshold = -1, -3  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD of glibc's malloc.h
    if not (libc.mallopt(mmap_threshold, 64 << 10) and libc.mallopt(trim_threshold, 64 << 10)):
        raise RuntimeError("mallopt refused the thresholds")
    libc.malloc_trim(0)


class Residence:
    """Bytes by which this process's resident memory grew at its peak inside a `with`: `.grown`, `.how` it was read."""

    def __enter__(self) -> Residence:
        try:
            with open("/proc/self/clear_refs", "w", encoding="ascii") as refs:
                refs.write("5")  # sets VmHWM back to VmRSS
            self.how = "VmHWM, set back before the call"
        except OSError:
            self.how = "VmHWM of a fresh process"
        self._before = _status("VmRSS")
        return self

    def __exit__(self, *_) -> None:
        self.grown = max(0, _status("VmHWM") - self._before)


@contextlib.contextmanager
def limited_data(extra: int):
    """Inside, this process may have at most `extra` more bytes of private writable memory (RLIMIT_DATA: heap and anonymous maps)."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (_status("VmData") + extra, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def seconds(function) -> tuple[float, object]:
    """(wall seconds, result) of one call."""
    begun = time.perf_counter()
    result = function()
    return time.perf_counter() - begun, result
