"""What can be asked of a device beside its energy, by the queries of its driver's library."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, ClassVar

from fp8bench.measure.sensors.driver_library import DriverLibrary
from fp8bench.model.readings import NoReading, Read, Reading, Readings, Unavailable, attempt

# A call of the library about one device: the function's name, then the arguments behind the handle.
Ask = Callable[..., Any]
# How a value is read.
Way = Callable[[Ask], Reading]


class About(Enum):
    """What a value is about: the driver, the whole device, or a part of it (a MIG instance) where there is one."""

    SYSTEM = auto()
    DEVICE = auto()
    PART = auto()


@dataclass(frozen=True)
class Query:
    """One value."""

    name: str
    read: Way
    about: About = About.DEVICE


@dataclass(frozen=True)
class Queries:
    """All that a library is asked: of what stays, of how it is now, of what changes within seconds, of its limits."""

    facts: tuple[Query, ...]
    state: tuple[Query, ...]
    changing: tuple[Query, ...]
    violations: tuple[Query, ...]
    process_memory: Callable[[int], Query]
    others: Callable[[int], tuple[Query, ...]]


def others_of(pid: int, processes: Iterable[tuple[int, int]]) -> tuple[int, int | None]:
    """How many of these are others, and their bytes; None where they are not known, as those of single ones may be.

    In a container a driver may list the process under another number: then one of those that are there is it, and
    nobody knows which.
    """
    listed = list(processes)
    sizes = [size for number, size in listed if number != pid]
    if sizes and len(sizes) == len(listed):
        return len(sizes) - 1, None
    return len(sizes), sum(sizes) if all(size > 0 for size in sizes) else None


def others_queries(pid: int, listed: Callable[[Ask], tuple[Iterable[tuple[int, int]], str]]) -> tuple[Query, ...]:
    """Both of `Looks.others`, from who is listed and by which function."""

    def count(ask: Ask) -> Reading:
        processes, source = listed(ask)
        return Reading(others_of(pid, processes)[0], "", source)

    def memory(ask: Ask) -> Reading:
        processes, source = listed(ask)
        size = others_of(pid, processes)[1]
        if size is None:
            raise NoReading("the driver does not report the memory of single processes, or lists this one otherwise")
        return Reading(size, "B", source)

    return Query("others", count, About.PART), Query("others_memory", memory, About.PART)


class Looks(ABC):
    """What can be asked of a device beside its energy; each value comes, or says why it does not."""

    queries: Queries
    # How many parts the device is split into, which share its power and clocks; 0 where it is whole.
    shared_by: int = 0
    # Whether it has nothing to say of clocks and heat.
    silent: ClassVar[bool] = False

    def facts(self) -> Readings:
        """What does not change while a run lasts: name, driver, limits, modes."""
        return self._read(self.queries.facts)

    def power_limit(self) -> Read:
        told = self._read(tuple(query for query in self.queries.facts if query.name == "power_cap"))
        return told.get("power_cap", Unavailable("nobody here tells a power limit"))

    def state(self) -> Readings:
        """How it is just now: power, clocks, temperature, throttle reasons, use, memory."""
        return self._read(self.queries.state)

    def violations(self) -> Readings:
        """For how long each limit has held the clocks back so far; `readings.grown` gives the time in between."""
        return self._read(self.queries.violations)

    def process_memory(self, pid: int | None = None) -> Read:
        """What a process holds on the device, its context included; this one's by default."""
        query = self.queries.process_memory(os.getpid() if pid is None else pid)
        return self._read((query,))[query.name]

    def others(self, pid: int) -> Readings:
        """How many processes but that one have work there (`others`), and how much they hold (`others_memory`)."""
        return self._read(self.queries.others(pid))

    def glance(self) -> Readings:
        """What may change from one second to the next: clocks, temperature, throttle reasons."""
        return self._read(self.queries.changing)

    def changing(self) -> Readings:
        """The same, read in the calling thread, which must be one that may hang."""
        return self._read(self.queries.changing)

    def close(self) -> None:
        """Lets the device go."""

    @abstractmethod
    def _read(self, wanted: tuple[Query, ...]) -> Readings: ...


class DriverDevice(Looks):
    """A device that a driver's library knows by a handle.

    Every bundle of calls is waited for no longer than the library's timeout, and each value comes or fails by itself.
    The library stays initialised until `close`.
    """

    def __init__(self, library: DriverLibrary, queries: Queries) -> None:
        """Raises NoReading where the library does not work or does not know the device."""
        self.library, self.queries = library, queries
        library.open()
        try:
            self.handle = library.bounded(self.found)
        except NoReading:
            library.close()
            raise

    @abstractmethod
    def found(self) -> Any:
        """The device's handle; raises NoReading where it cannot be said which it is."""

    @property
    def part(self) -> Any:
        """The handle of the part of the device that is used; the device's own where it is all of it."""
        return self.handle

    def close(self) -> None:
        self.library.close()

    def changing(self) -> Readings:
        return {query.name: self._attempt(query) for query in self.queries.changing}

    def ask(self, function: str, *arguments: Any) -> Any:
        return self.library.call(function, self.handle, *arguments)

    def _attempt(self, query: Query) -> Read:
        handles = {About.SYSTEM: (), About.DEVICE: (self.handle,), About.PART: (self.part,)}
        handle = handles[query.about]
        return attempt(lambda: query.read(lambda function, *rest: self.library.call(function, *handle, *rest)))

    def _read(self, wanted: tuple[Query, ...]) -> Readings:
        done: dict[str, Read] = {}

        def body() -> None:
            for query in wanted:
                done[query.name] = self._attempt(query)

        try:
            self.library.bounded(body)
        except NoReading as failure:
            why = Unavailable(failure.reason)
            return {query.name: done.get(query.name, why) for query in wanted}
        return done
