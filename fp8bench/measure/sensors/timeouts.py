"""The time that samplers go by, and calls that may never come back.

A driver that hangs must not hang the run. Such a call is made on a daemon thread: whoever asked stops waiting, and the
process can end although the thread never does. Tests have a clock that only they move.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

from fp8bench.model.readings import NoReading

_LOOK = 0.02


class Clock(Protocol):
    """Seconds, sleeping, and the processor time of the calling thread."""

    def now(self) -> float: ...

    def cpu(self) -> float: ...

    def sleep(self, seconds: float, stop: threading.Event) -> bool:
        """Sleeps, and says whether `stop` was set meanwhile."""

    def wait(self, until: Callable[[], bool]) -> None:
        """Sleeps until something is so."""


class HostClock:
    """The host's monotonic clock."""

    def now(self) -> float:
        return time.perf_counter()

    def cpu(self) -> float:
        return time.thread_time()

    def sleep(self, seconds: float, stop: threading.Event) -> bool:
        return stop.wait(seconds)

    def wait(self, until: Callable[[], bool]) -> None:
        while not until():
            time.sleep(_LOOK)


HOST = HostClock()


# A healthy call takes microseconds, one to a sleeping GPU without persistence mode a second or so.
TIMEOUT = 5.0

T = TypeVar("T")


class NoAnswer(NoReading):
    """A call did not come back in time."""


def within(seconds: float, function: Callable[[], T], name: str) -> T:
    """What `function` returns or which NoReading it raises; NoAnswer if it does neither in that time."""
    returned: list[T] = []
    raised: list[NoReading] = []

    def body() -> None:
        try:
            returned.append(function())
        except NoReading as failure:
            raised.append(failure)

    thread = threading.Thread(target=body, name=name, daemon=True)
    thread.start()
    thread.join(seconds)
    if returned:
        return returned[0]
    if raised:
        raise raised[0]
    raise NoAnswer(silence(name, seconds) if thread.is_alive() else f"{name} ended without an answer")


def silence(name: str, seconds: float) -> str:
    return f"{name} gave no answer for {seconds:g} s"
