"""The time that samplers go by; tests have one that only they move."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

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
