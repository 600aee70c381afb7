"""What a workload may not do beside its work: print inside a step, or leave threads that run on.

Either would be timed: printing with the step it happens in, a thread with everything that comes after.
"""

from __future__ import annotations

import contextlib
import io
import os
import stat
import sys
import threading
import time
from collections.abc import Iterator

_GRACE_SECONDS = 0.5


class StepPrinted(RuntimeError):
    """A step wrote to stdout."""


class ThreadsLeft(RuntimeError):
    """Threads run on that were not there before."""


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """What the body prints goes to stderr: stdout belongs to the table."""
    with contextlib.redirect_stdout(sys.stderr):
        yield


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """A pass that is not timed: it may print, to stderr; raises if it leaves threads that run on beside what is."""
    before = threads()
    with aside():
        yield
    left = still_running(threads() - before)
    if left:
        raise ThreadsLeft(
            f"it left {len(left)} running ({', '.join(left[:5])}): they are timed with what comes next. Join them."
        )


@contextlib.contextmanager
def silent_step() -> Iterator[None]:
    """Steps run in the body; raises if one printed, or left a thread that was not there before."""
    before, written = threads(), _written()
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        yield
    lines = printed.getvalue().strip().splitlines()
    past_python = _written() - written
    if lines or past_python:
        what = repr(lines[0][:60]) if lines else f"{past_python} bytes past Python's own stdout"
        more = f" and {len(lines) - 1} more lines" if len(lines) > 1 else ""
        raise StepPrinted(
            f"a step printed {what}{more}: printing is timed with the step. Print while preparing, or not at all."
        )
    left = still_running(threads() - before, 0.0)
    if left:
        raise ThreadsLeft(
            f"a step left {len(left)} running ({', '.join(left[:5])}): threads that outlive their step are timed with "
            "the next one. Join them in the step, or start them while preparing."
        )


def _written() -> int:
    """Bytes that went to the process's stdout, where that is a file (in the worker it is)."""
    try:
        status = os.fstat(1)
    except OSError:
        return 0
    return status.st_size if stat.S_ISREG(status.st_mode) else 0


def threads() -> frozenset[threading.Thread]:
    """The threads that Python knows of."""
    return frozenset(threading.enumerate())


def still_running(started: frozenset[threading.Thread], grace: float = _GRACE_SECONDS) -> list[str]:
    """Names of those threads that do not end within so many seconds; torch's own do not count."""
    end = time.monotonic() + grace
    left = [one for one in started if not _of_torch(one)]
    for one in left:
        one.join(max(0.0, end - time.monotonic()))
    return [one.name for one in left if one.is_alive()]


def _of_torch(thread: threading.Thread) -> bool:
    target = getattr(thread, "_target", None)
    return str(getattr(target, "__module__", "")).startswith("torch") or type(thread).__module__.startswith("torch")
