"""The time of the library's virtual clock, for samplers: an hour of windows in a second, and the same each time."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

from fp8bench.measure.sensors.driver import Clock
from tests.measure.sensors.nvml.library import State

_HANG = 240.0
_LOOK = 1e-3


class VirtualClock(Clock):
    """A clock that advances only by the sampler thread's sleeping, while another thread waits for an instant.

    Sleeps end up to `lateness` seconds too late, at random by `seed`.
    """

    def __init__(self, state: State, lateness: float = 0.0, seed: int = 0) -> None:
        self._state = state
        self.lateness, self._random = lateness, random.Random(seed)
        self._until: Callable[[], bool] = lambda: True
        self._reached = threading.Event()
        self.cpu_per_sleep = self._cpu = 0.0
        state.is_virtual = 1

    def now(self) -> float:
        return self._state.now_ns * 1e-9

    def cpu(self) -> float:
        """CPU time, as if each sleep used this much."""
        return self._cpu

    def sleep(self, seconds: float, stop: threading.Event) -> bool:
        """Called in the sampler's thread: advances time unless the waited-for condition holds or nothing waits."""
        while self._until():
            self._reached.set()
            if stop.wait(_LOOK):
                return True
        self._cpu += self.cpu_per_sleep
        self._state.now_ns += round((seconds + self.lateness * self._random.random()) * 1e9)
        return stop.is_set()

    def wait(self, until: Callable[[], bool]) -> None:
        """Called in the workload's thread: lets time pass until a condition holds."""
        self._until = until
        deadline = time.monotonic() + _HANG
        while True:
            self._reached.clear()
            if until():
                break
            assert time.monotonic() < deadline, "time stood still"
            self._reached.wait(_LOOK)
        self._until = lambda: True
