"""Forbidden side effects of a workload: printing inside a step, or leaving threads and processes running.

Either would be timed: printing with its step, threads and processes with everything that follows. A thread cannot be
ended, a process can; both are named.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import stat
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8bench.worker.clock import PhaseClock

GRACE_SECONDS = 0.5
_PIECES = 20
# A process that is about to end may first have to wait for a core.
_ENDING_SECONDS = 2.0
_POLL_SECONDS = 0.005
# Helpers that live as long as the process that started them and do nothing unless asked.
_HARMLESS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", "torch/_inductor/compile_worker")


class StepPrinted(RuntimeError):
    """A step wrote to stdout."""


class LeftRunning(RuntimeError):
    """Threads or processes are still running that did not exist before."""


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """Redirects what the body prints to stderr: stdout belongs to the table."""
    with _forks_end_here(), contextlib.redirect_stdout(sys.stderr):
        yield


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """Runs an untimed pass. It may print, to stderr; LeftRunning is raised if it leaves something running."""
    already_running = running()
    with aside():
        yield
    still_there = still_running(running() - already_running)
    if still_there:
        raise LeftRunning(
            f"it left {len(still_there)} running ({', '.join(still_there[:5])}): "
            "they would be timed with later work. Join them."
        )


@contextlib.contextmanager
def silent_step() -> Iterator[None]:
    """Runs steps; raises if one of them printed, or left a thread or a process running."""
    already_running, written = running(), _stdout_size()
    with _forks_end_here(), contextlib.redirect_stdout(io.StringIO()) as printed:
        yield
    lines = printed.getvalue().strip().splitlines()
    past_python = _stdout_size() - written
    if lines or past_python:
        printed_words = repr(lines[0][:60]) if lines else f"{past_python} bytes past Python's own stdout"
        more_lines = f" and {len(lines) - 1} more lines" if len(lines) > 1 else ""
        raise StepPrinted(
            f"a step printed {printed_words}{more_lines}: printing is timed with the step. "
            "Print while preparing, or not at all."
        )
    still_there = still_running(running() - already_running, 0.0)
    if still_there:
        raise LeftRunning(
            f"a step left {len(still_there)} running ({', '.join(still_there[:5])}): "
            "it would be timed with the next one. Join it in the step, or start it while preparing."
        )


def _stdout_size() -> int:
    try:
        status = os.fstat(1)
    except OSError:
        return 0
    return status.st_size if stat.S_ISREG(status.st_mode) else 0


_step_processes: list[int] = []


@contextlib.contextmanager
def _forks_end_here() -> Iterator[None]:
    """Ends a child that the body forks when its step ends, because it would otherwise time steps itself, and fork in
    each."""
    _step_processes.append(os.getpid())
    try:
        yield
    finally:
        if _step_processes.pop() != os.getpid():
            os._exit(0)


def _end_child_after_its_step() -> None:
    if _step_processes:
        PhaseClock.end = lambda *arguments: os._exit(0)  # type: ignore[method-assign]


os.register_at_fork(after_in_child=_end_child_after_its_step)


@dataclass(frozen=True)
class Running:
    """The threads and descendant processes of this process."""

    threads: frozenset[threading.Thread] = frozenset()
    processes: frozenset[int] = frozenset()

    def __sub__(self, earlier: Running) -> Running:
        return Running(self.threads - earlier.threads, self.processes - earlier.processes)


_owns_process = False


def own_this_process() -> None:
    """Called by a worker: only fp8bench and its workloads do anything in its process. Without isolation the process is
    the user's, whose other threads may start processes too."""
    global _owns_process  # noqa: PLW0603 - there is one process, and it is owned from here on
    _owns_process = True


def owns_this_process() -> bool:
    return _owns_process


def running() -> Running:
    thread = None if _owns_process else threading.get_native_id()
    below = () if _childless() else _descendants(os.getpid(), thread)
    return Running(frozenset(threading.enumerate()), frozenset(below))


def still_running(started: Running, grace: float = GRACE_SECONDS) -> list[str]:
    """Returns the names of threads that do not end within `grace` seconds, and of processes, which it then ends.
    torch's own threads do not count."""
    threads = [thread for thread in started.threads if not _is_torchs(thread)]
    for _ in range(_PIECES):  # if the system suspends this process for a while, at most one piece passes
        if threads := [thread for thread in threads if thread.is_alive()]:
            threads[0].join(grace / _PIECES)
    return [thread.name for thread in threads if thread.is_alive()] + _end_processes(started.processes)


@contextlib.contextmanager
def nothing_left_on_error() -> Iterator[None]:
    """If the body raises, ends the processes it has started: no state is kept that could end them later."""
    already_running = running()
    try:
        yield
    except BaseException:
        still_running(running() - already_running, 0.0)
        raise


def _is_torchs(thread: threading.Thread) -> bool:
    # torch's compiler starts tqdm's monitor thread if tqdm is installed; it sleeps.
    modules = str(getattr(getattr(thread, "_target", None), "__module__", "")), type(thread).__module__
    if any(module.startswith(("torch", "tqdm._monitor")) for module in modules):
        return True
    # The pool of inductor waits for more to compile as long as the process lives; its threads have no name of torch.
    compiler = sys.modules.get("torch._inductor.async_compile")
    pool: Any = getattr(getattr(compiler, "AsyncCompile", None), "pool", None)
    return pool is not None and pool.cache_info().currsize > 0 and thread in getattr(pool(), "_threads", ())


def _childless() -> bool:
    """Checks with one system call whether this process has no child; listing them reads a file for each thread."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return True
    return False


def _descendants(pid: int, thread: int | str | None = None) -> Iterator[int]:
    """Yields the processes that a process, or one thread of it, has started, and their descendants; nothing without
    /proc. Some may have ended. Avoids pathlib, which takes five times as long, because this runs around every slot of a
    workload with children."""
    try:
        threads = os.listdir(f"/proc/{pid}/task") if thread is None else (thread,)  # noqa: PTH208
    except OSError:
        return
    for task in threads:
        try:
            with open(f"/proc/{pid}/task/{task}/children", "rb", buffering=0) as file:  # noqa: PTH123
                children = list(map(int, file.readall().split()))
        except OSError:
            continue
        for child in children:
            yield child
            yield from _descendants(child)


def _end_processes(started: Iterable[int]) -> list[str]:
    end = time.monotonic() + _ENDING_SECONDS
    while (remaining := [pid for pid in sorted(started) if _is_busy(pid)]) and time.monotonic() < end:
        time.sleep(_POLL_SECONDS)
    names = [f"process {pid}: {_command_line(pid):.60}" for pid in remaining]
    for pid in remaining:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):  # for example a grandchild, which is not ours
            os.waitpid(pid, 0)
    return names


def _is_busy(pid: int) -> bool:
    """Whether a process runs and is not a harmless helper. One that has just begun has no command line yet."""
    return _runs(pid) and not any(word in _command_line(pid) for word in _HARMLESS)


def _command_line(pid: int) -> str:
    """Returns the program's name without its folder, and its arguments; '' once the process is gone."""
    try:
        program, *arguments = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return ""
    return " ".join([program.rpartition("/")[2], *arguments]).strip()


def _runs(pid: int) -> bool:
    """Whether a process has not ended; a zombie, which only waits to be reaped, has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False
