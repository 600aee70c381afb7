"""What a workload may not do beside its work: print inside a step, or leave threads and processes that run on.

Either would be timed: printing with the step it happens in, the others with everything that comes after.
"""

from __future__ import annotations

import contextlib
import io
import os
import stat
import sys
from collections.abc import Iterator

from fp8bench.worker.beside import running, still_running
from fp8bench.worker.clock import PhaseClock


class StepPrinted(RuntimeError):
    """A step wrote to stdout."""


class LeftRunning(RuntimeError):
    """Threads or processes run on that were not there before."""


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """What the body prints goes to stderr: stdout belongs to the table."""
    with _one_process(), contextlib.redirect_stdout(sys.stderr):
        yield


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """A pass that is not timed: it may print, to stderr; raises if it leaves something that runs on beside what is."""
    before = running()
    with aside():
        yield
    left = still_running(running() - before)
    if left:
        raise LeftRunning(
            f"it left {len(left)} running ({', '.join(left[:5])}): they are timed with what comes next. Join them."
        )


@contextlib.contextmanager
def silent_step() -> Iterator[None]:
    """Steps run in the body; raises if one printed, or left a thread or a process that was not there before."""
    before, written = running(), _written()
    with _one_process(), contextlib.redirect_stdout(io.StringIO()) as printed:
        yield
    lines = printed.getvalue().strip().splitlines()
    past_python = _written() - written
    if lines or past_python:
        what = repr(lines[0][:60]) if lines else f"{past_python} bytes past Python's own stdout"
        more = f" and {len(lines) - 1} more lines" if len(lines) > 1 else ""
        raise StepPrinted(
            f"a step printed {what}{more}: printing is timed with the step. Print while preparing, or not at all."
        )
    left = still_running(running() - before, 0.0)
    if left:
        raise LeftRunning(
            f"a step left {len(left)} running ({', '.join(left[:5])}): what outlives its step is timed with the next "
            "one. Join it in the step, or start it while preparing."
        )


def _written() -> int:
    """Bytes that went to the process's stdout, where that is a file (in the worker it is)."""
    try:
        status = os.fstat(1)
    except OSError:
        return 0
    return status.st_size if stat.S_ISREG(status.st_mode) else 0


_inside: list[int] = []


@contextlib.contextmanager
def _one_process() -> Iterator[None]:
    """The child of a fork in the body ends at the end of its step: it would time steps of its own, and fork in each."""
    _inside.append(os.getpid())
    try:
        yield
    finally:
        if _inside.pop() != os.getpid():
            os._exit(0)


def _forked() -> None:
    if _inside:
        PhaseClock.end = lambda *arguments: os._exit(0)  # type: ignore[method-assign]


os.register_at_fork(after_in_child=_forked)
