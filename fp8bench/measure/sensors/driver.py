"""Reads the state of a device, other than its energy, through the library of its driver.

A driver that hangs must not hang the run. So calls run on a daemon thread: the caller can stop waiting, and the
process can end although the thread never returns. The library is not called again once it has hung.
"""

from __future__ import annotations

import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, ClassVar, TypeVar

from fp8bench.model.readings import NoReading, Read, Reading, Readings, Unavailable

_POLL_SECONDS = 0.02


class Clock:
    """The host's monotonic clock. Tests have a clock that they advance themselves."""

    def now(self) -> float:
        return time.perf_counter()

    def cpu(self) -> float:
        """Returns the processor time of the calling thread."""
        return time.thread_time()

    def sleep(self, seconds: float, stop: threading.Event) -> bool:
        return stop.wait(seconds)

    def wait(self, until: Callable[[], bool]) -> None:
        while not until():
            time.sleep(_POLL_SECONDS)


HOST_CLOCK = Clock()


# The most seconds for a call. A normal call takes microseconds. A call to a sleeping GPU without persistence mode
# takes about a second.
CALL_TIMEOUT = 5.0


class NoAnswer(NoReading):
    """A call to the driver did not return in time."""


def call_within(seconds: float, function: Callable[[], T], name: str) -> T:
    """Calls `function` in a thread: returns its result or raises its NoReading. Raises NoAnswer after `seconds`."""
    returned: list[T] = []
    raised: list[NoReading] = []

    def run_function() -> None:
        try:
            returned.append(function())
        except NoReading as failure:
            raised.append(failure)

    thread = threading.Thread(target=run_function, name=name, daemon=True)
    thread.start()
    has_thread_ended = has_ended(thread, seconds)
    if returned:
        return returned[0]
    if raised:
        raise raised[0]
    raise NoAnswer(f"{name} ended without an answer" if has_thread_ended else describe_silence(name, seconds))


def has_ended(thread: threading.Thread, seconds: float) -> bool:
    """Waits up to `seconds` for a thread to end, and returns whether it has ended. The time is divided into two equal
    waits. If this process is suspended for a while, only one of them is lost.
    """
    thread.join(seconds / 2)
    thread.join(seconds / 2)
    return not thread.is_alive()


def describe_silence(name: str, seconds: float) -> str:
    return f"{name} gave no answer for {seconds:g} s"


T = TypeVar("T")


# Calls a library function for one device. The arguments are the function's name, then those after the device's
# handle.
AskLibrary = Callable[..., Any]

ReadValue = Callable[[AskLibrary], Reading]


class About(Enum):
    """The object of a value: the driver, the whole device, or a part of the device (a MIG instance)."""

    SYSTEM = auto()
    DEVICE = auto()
    PART = auto()


@dataclass(frozen=True)
class Query:
    """A named value of a device, and the function that reads it."""

    name: str
    read: ReadValue
    about: About = About.DEVICE


@dataclass(frozen=True)
class Queries:
    """All queries of a library: constant facts, present state, values that change within seconds, and throttling
    times.
    """

    facts: tuple[Query, ...]
    state: tuple[Query, ...]
    changing: tuple[Query, ...]
    violations: tuple[Query, ...]
    process_memory: Callable[[int], Query]
    others: Callable[[int], Query]


class DeviceReader(ABC):
    """Reads the values of a device other than its energy. Each value is a reading, or the reason why it is missing."""

    queries: Queries
    # The number of parts that the device is split into (MIG), which share power and clocks; 0 if it is not split.
    shared_by: int = 0
    # True if the device reports neither clocks nor temperatures.
    silent: ClassVar[bool] = False

    def facts(self) -> Readings:
        """Reads what is constant during a run: name, driver, limits, modes."""
        return self._read(self.queries.facts)

    def power_limit(self) -> Read:
        facts = self._read(tuple(query for query in self.queries.facts if query.name == "power_cap"))
        return facts.get("power_cap", Unavailable("the device reports no power limit"))

    def state(self) -> Readings:
        return self._read(self.queries.state)

    def read_violations(self) -> Readings:
        """Reads for how many seconds each limit has throttled the clocks since some fixed time. The caller takes the
        difference of two such readings by `readings.grown`.
        """
        return self._read(self.queries.violations)

    def process_memory(self, pid: int | None = None) -> Read:
        """Reads the bytes that a process (by default this one) holds on the device, its context included."""
        query = self.queries.process_memory(os.getpid() if pid is None else pid)
        return self._read((query,))[query.name]

    def count_other_processes(self, pid: int) -> Read:
        """Reads how many processes other than `pid` use the device."""
        query = self.queries.others(pid)
        return self._read((query,))[query.name]

    def read_changing_state(self) -> Readings:
        """Reads the state that may change every second: clocks, temperature, throttle reasons."""
        return self._read(self.queries.changing)

    def read_in_this_thread(self) -> Readings:
        """Reads the same values as `read_changing_state`, but in the calling thread, which may then hang."""
        return self._read(self.queries.changing)

    def close(self) -> None: ...

    @abstractmethod
    def _read(self, queries: tuple[Query, ...]) -> Readings: ...
