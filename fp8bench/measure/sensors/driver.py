"""Readings of a device besides its energy, through the library of its driver.

The library is initialised while anyone uses it, and left alone once it has hung. A hanging driver must not hang the
run: calls are made on a daemon thread, so that the caller can stop waiting, and the process can end although the thread
never does.
"""

from __future__ import annotations

import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, ClassVar, Protocol, TypeVar

from fp8bench.model.readings import NoReading, Read, Reading, Readings, Unavailable

_LOOK = 0.02


class Clock(Protocol):
    """Seconds, sleeping, and the processor time of the calling thread; tests have one that only they move."""

    def now(self) -> float: ...

    def cpu(self) -> float: ...

    def sleep(self, seconds: float, stop: threading.Event) -> bool: ...

    def wait(self, until: Callable[[], bool]) -> None: ...


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


class NoAnswer(NoReading):
    """A call did not come back in time."""


def within(seconds: float, function: Callable[[], T], name: str) -> T:
    """Returns or raises what `function` does; NoAnswer if it does neither within `seconds`."""
    returned: list[T] = []
    raised: list[NoReading] = []

    def body() -> None:
        try:
            returned.append(function())
        except NoReading as failure:
            raised.append(failure)

    thread = threading.Thread(target=body, name=name, daemon=True)
    thread.start()
    ended = has_ended(thread, seconds)
    if returned:
        return returned[0]
    if raised:
        raise raised[0]
    raise NoAnswer(f"{name} ended without an answer" if ended else silence(name, seconds))


def has_ended(thread: threading.Thread, seconds: float) -> bool:
    """Waits up to `seconds` for a thread to end; returns whether it has.

    In two halves: where this process is stopped for longer than that, only one of them is lost.
    """
    thread.join(seconds / 2)
    thread.join(seconds / 2)
    return not thread.is_alive()


def silence(name: str, seconds: float) -> str:
    return f"{name} gave no answer for {seconds:g} s"


T = TypeVar("T")


# Calls a function of the library for one device: its name, then the arguments behind the handle.
Ask = Callable[..., Any]

Way = Callable[[Ask], Reading]


class About(Enum):
    """The subject of a value: the driver, the whole device, or a part of it (a MIG instance)."""

    SYSTEM = auto()
    DEVICE = auto()
    PART = auto()


@dataclass(frozen=True)
class Query:
    """A named value, and how it is read."""

    name: str
    read: Way
    about: About = About.DEVICE


@dataclass(frozen=True)
class Queries:
    """All that a library is asked: constant facts, the present state, what changes within seconds, limits that held
    clocks back."""

    facts: tuple[Query, ...]
    state: tuple[Query, ...]
    changing: tuple[Query, ...]
    violations: tuple[Query, ...]
    process_memory: Callable[[int], Query]
    others: Callable[[int], Query]


class Looks(ABC):
    """Readings of a device besides its energy; each value is a reading or the reason for a missing one."""

    queries: Queries
    # How many parts the device is split into, which share its power and clocks; 0 where it is whole.
    shared_by: int = 0
    # Whether it reports neither clocks nor temperatures.
    silent: ClassVar[bool] = False

    def facts(self) -> Readings:
        """Constants of a run: name, driver, limits, modes."""
        return self._read(self.queries.facts)

    def power_limit(self) -> Read:
        facts = self._read(tuple(query for query in self.queries.facts if query.name == "power_cap"))
        return facts.get("power_cap", Unavailable("no power limit is known here"))

    def state(self) -> Readings:
        return self._read(self.queries.state)

    def violations(self) -> Readings:
        """For how long each limit has held the clocks back; `readings.grown` gives the time in between."""
        return self._read(self.queries.violations)

    def process_memory(self, pid: int | None = None) -> Read:
        """The bytes that a process, this one by default, holds on the device, its context included."""
        query = self.queries.process_memory(os.getpid() if pid is None else pid)
        return self._read((query,))[query.name]

    def others(self, pid: int) -> Read:
        """How many processes but `pid` work there."""
        query = self.queries.others(pid)
        return self._read((query,))[query.name]

    def glance(self) -> Readings:
        """State that may change every second: clocks, temperature, throttle reasons."""
        return self._read(self.queries.changing)

    def changing(self) -> Readings:
        """Like `glance`, but read in the calling thread, which must be one that may hang."""
        return self._read(self.queries.changing)

    def close(self) -> None: ...

    @abstractmethod
    def _read(self, queries: tuple[Query, ...]) -> Readings: ...
