"""What runs beside the steps: threads, and processes that were started and left behind.

Either is timed with whatever comes after it. A thread cannot be ended; a process is, and both are named.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GRACE_SECONDS = 0.5
# A process that is about to end may wait for a core until it has.
_ENDING_SECONDS = 2.0
_POLL_SECONDS = 0.005
# What runs for as long as the process that has started it, and does nothing unless asked.
_HARMLESS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", "torch/_inductor/compile_worker")


@dataclass(frozen=True)
class Beside:
    """Threads that Python knows of, and processes by their numbers: children, and theirs."""

    threads: frozenset[threading.Thread] = frozenset()
    processes: frozenset[int] = frozenset()

    def __sub__(self, other: Beside) -> Beside:
        return Beside(self.threads - other.threads, self.processes - other.processes)


_everything = False


def everything_is_the_workloads() -> None:
    """Said by a worker of its process. In somebody's own, processes may be those of another thread of theirs."""
    global _everything  # noqa: PLW0603 - the process is one, and what it is for is said once
    _everything = True


def everything_is_known() -> bool:
    """Whether nobody but fp8bench and its workloads does anything in this process."""
    return _everything


def running() -> Beside:
    thread = None if _everything else threading.get_native_id()
    below = () if _childless() else _below(os.getpid(), thread)
    return Beside(frozenset(threading.enumerate()), frozenset(below))


def still_running(started: Beside, grace: float = GRACE_SECONDS) -> list[str]:
    """Names of those that do not end by themselves: threads in so many seconds; processes, which are ended then.

    torch's own do not count.
    """
    end = time.monotonic() + grace
    left = [thread for thread in started.threads if not _of_torch(thread)]
    for thread in left:
        thread.join(max(0.0, end - time.monotonic()))
    return [thread.name for thread in left if thread.is_alive()] + _ended(started.processes)


@contextlib.contextmanager
def none_left_by_a_fault() -> Iterator[None]:
    """If the body raises nobody will hold what it has started: processes end."""
    before = running()
    try:
        yield
    except BaseException:
        still_running(running() - before, 0.0)
        raise


def _of_torch(thread: threading.Thread) -> bool:
    """Also the one that watches progress bars, which torch's compiler starts where tqdm is installed: it sleeps."""
    target = getattr(thread, "_target", None)
    modules = str(getattr(target, "__module__", "")), type(thread).__module__
    return any(module.startswith(("torch", "tqdm._monitor")) for module in modules) or thread in _compilers()


def _compilers() -> Collection[threading.Thread]:
    """Those of inductor's pool: they wait for more to compile as long as the process lives, and bear no name of it."""
    module = sys.modules.get("torch._inductor.async_compile")
    pool: Any = getattr(getattr(module, "AsyncCompile", None), "pool", None)
    return getattr(pool(), "_threads", ()) if pool is not None and pool.cache_info().currsize else ()


def _childless() -> bool:
    """Whether this process has no child, and so nothing below it: one call, for what else takes a file a thread."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return True
    return False


def _below(pid: int, thread: int | None = None) -> Iterator[int]:
    """The processes that one has started, or a thread of it, and theirs, where the system (Linux) tells.

    Of those that have ended some may be among them. Without pathlib: a fifth of the time, and it is asked around
    every slot of a workload that has children.
    """
    try:
        threads = os.listdir(f"/proc/{pid}/task") if thread is None else (thread,)  # noqa: PTH208
    except OSError:
        return
    for task in threads:
        for child in _children(pid, task):
            yield child
            yield from _below(child)


def _children(pid: int, thread: int | str) -> list[int]:
    try:
        with open(f"/proc/{pid}/task/{thread}/children", "rb", buffering=0) as children:  # noqa: PTH123
            return list(map(int, children.readall().split()))
    except OSError:
        return []


def _ended(started: Iterable[int]) -> list[str]:
    end = time.monotonic() + _ENDING_SECONDS
    while (left := [pid for pid in sorted(started) if _goes_on(pid)]) and time.monotonic() < end:
        time.sleep(_POLL_SECONDS)
    names = [f"process {pid}: {_called(pid):.60}" for pid in left]
    for pid in left:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):  # not ours: a child's child, say
            os.waitpid(pid, 0)
    return names


def _goes_on(pid: int) -> bool:
    """Whether it runs, and is none of those that do nothing. One that has just begun has no command line yet."""
    return _runs(pid) and not any(word in _called(pid) for word in _HARMLESS)


def _called(pid: int) -> str:
    """Its command line, the program without its folder; '' once it is gone."""
    try:
        program, *rest = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return ""
    return " ".join([program.rpartition("/")[2], *rest]).strip()


def _runs(pid: int) -> bool:
    """Whether it is there and has not ended; one that waits for somebody to ask how it ended has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False
