"""What can be asked of a device beside its energy, through the library of its driver.

The library is initialised while anyone uses it, and left alone once it has hung. A hanging driver must not hang the
run: calls are made on a daemon thread, so that the caller can stop waiting, and the process can end although the thread
never does.
"""

from __future__ import annotations

import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, ClassVar, Protocol, TypeVar

from fp8bench.model.readings import NoReading, Read, Reading, Readings, Unavailable, attempt

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


class DriverLibrary(ABC):
    """A library's functions by name; failures become NoReading.

    `hung` says why nothing is asked any more: a driver that has swallowed one call may hold a lock that the next one
    waits for, so the first call without an answer is the last one.
    """

    name: ClassVar[str]
    package: ClassVar[str]
    end: ClassVar[str]

    def __init__(self, timeout: float = TIMEOUT) -> None:
        self.timeout = timeout
        self.hung = ""
        self._module: Any = None
        self._users = 0
        self._lock = threading.Lock()

    @abstractmethod
    def load(self) -> Any: ...

    @abstractmethod
    def begin(self) -> None: ...

    @abstractmethod
    def failure(self, error: Exception) -> NoReading | None:
        """Translates an exception of the package; None for other exceptions."""

    def open(self) -> None:
        with self._lock:
            if not self._users:
                self.bounded(self._initialise)
            self._users += 1

    def close(self) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                with suppress(NoReading):
                    self.bounded(lambda: self.call(self.end))

    def call(self, function: str, *arguments: Any) -> Any:
        """Calls the package's function, which may hang: use it within `bounded` or a daemon thread."""
        if self.hung:
            raise NoReading(self.hung)
        named = getattr(self._module, function, None)
        if named is None:
            raise NoReading(f"the installed {self.package} has no {function}: it is too old")
        try:
            return named(*arguments)
        except UnicodeDecodeError as error:
            raise NoReading(f"{function} answered with what is no text") from error
        except Exception as error:
            failure = self.failure(error)
            if failure is None:
                raise
            raise failure from error

    def bounded(self, function: Callable[[], T]) -> T:
        """Runs a function that calls the library, and waits no longer than the timeout. Raises NoReading."""
        if self.hung:
            raise NoReading(self.hung)
        try:
            return within(self.timeout, function, self.name)
        except NoAnswer as failure:
            self.give_up(failure.reason)
            raise NoReading(self.hung) from failure

    def give_up(self, why: str) -> None:
        self.hung = self.hung or f"{why}, and is left alone since"

    def _initialise(self) -> None:
        self._module = self.load()
        self.begin()


# Calls a function of the library for one device: its name, then the arguments behind the handle.
Ask = Callable[..., Any]

Way = Callable[[Ask], Reading]


class About(Enum):
    """What a value describes: the driver, the whole device, or a part of it (a MIG instance) where there is one."""

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
    others: Callable[[int], tuple[Query, ...]]


def others_of(pid: int, processes: Iterable[tuple[int, int]]) -> tuple[int, int | None]:
    """How many of the listed processes are others, and their bytes; None where those are not known.

    In a container a driver may list this process under another number: then one of the listed ones is it, and nobody
    knows which.
    """
    listed = list(processes)
    sizes = [size for number, size in listed if number != pid]
    if sizes and len(sizes) == len(listed):
        return len(sizes) - 1, None
    return len(sizes), sum(sizes) if all(size > 0 for size in sizes) else None


def others_queries(pid: int, listed: Callable[[Ask], tuple[Iterable[tuple[int, int]], str]]) -> tuple[Query, ...]:
    """The queries of `Looks.others`; `listed` returns the processes and the function that named them."""

    def count(ask: Ask) -> Reading:
        processes, source = listed(ask)
        return Reading(others_of(pid, processes)[0], "", source)

    def memory(ask: Ask) -> Reading:
        processes, source = listed(ask)
        size = others_of(pid, processes)[1]
        if size is None:
            raise NoReading("the driver does not report the memory of single processes, or this one by another number")
        return Reading(size, "B", source)

    return Query("others", count, About.PART), Query("others_memory", memory, About.PART)


class Looks(ABC):
    """What can be asked of a device beside its energy; each value is a reading or the reason why there is none."""

    queries: Queries
    # How many parts the device is split into, which share its power and clocks; 0 where it is whole.
    shared_by: int = 0
    # Whether it has nothing to say of clocks and heat.
    silent: ClassVar[bool] = False

    def facts(self) -> Readings:
        """What does not change during a run: name, driver, limits, modes."""
        return self._read(self.queries.facts)

    def power_limit(self) -> Read:
        facts = self._read(tuple(query for query in self.queries.facts if query.name == "power_cap"))
        return facts.get("power_cap", Unavailable("no power limit is known here"))

    def state(self) -> Readings:
        return self._read(self.queries.state)

    def violations(self) -> Readings:
        """For how long each limit has held the clocks back so far; `readings.grown` gives the time in between."""
        return self._read(self.queries.violations)

    def process_memory(self, pid: int | None = None) -> Read:
        """The bytes that a process, this one by default, holds on the device, its context included."""
        query = self.queries.process_memory(os.getpid() if pid is None else pid)
        return self._read((query,))[query.name]

    def others(self, pid: int) -> Readings:
        """How many processes but `pid` work there (`others`), and the bytes they hold (`others_memory`)."""
        return self._read(self.queries.others(pid))

    def glance(self) -> Readings:
        """What may change from one second to the next: clocks, temperature, throttle reasons."""
        return self._read(self.queries.changing)

    def changing(self) -> Readings:
        """Like `glance`, but read in the calling thread, which must be one that may hang."""
        return self._read(self.queries.changing)

    def close(self) -> None: ...

    @abstractmethod
    def _read(self, wanted: tuple[Query, ...]) -> Readings: ...


class DriverDevice(Looks):
    """A device that a driver's library knows by a handle. The library stays initialised until `close`.

    A bundle of calls is waited for no longer than the library's timeout; each value comes or fails by itself.
    """

    def __init__(self, library: DriverLibrary, queries: Queries) -> None:
        """Raises NoReading where the library does not work or does not know the device."""
        self.library, self.queries = library, queries
        library.open()
        try:
            self.handle = library.bounded(self.find_handle)
        except NoReading:
            library.close()
            raise

    @abstractmethod
    def find_handle(self) -> Any:
        """Returns the device's handle. Raises NoReading where it cannot be told which it is."""

    @property
    def part(self) -> Any:
        """The handle of the part of the device that is used; the device's own where it is undivided."""
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
