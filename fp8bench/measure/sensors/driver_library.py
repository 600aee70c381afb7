"""A driver's library in this process: loaded and initialised while anyone uses it, left alone once it has hung.

A driver that hangs must not hang the run. A call of it is made on a daemon thread: whoever asked stops waiting, and the
process can end although the thread never does. Samplers go by a clock; tests have one that only they move.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ClassVar, Protocol, TypeVar

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


T = TypeVar("T")


class DriverLibrary(ABC):
    """A library's functions by name, failures as NoReading.

    `hung` says why nothing is asked any more: a driver that has swallowed one call may hold a lock that the next one
    waits for, so one call without an answer is the last.
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
    def load(self) -> Any:
        """The package that calls the library; raises NoReading where there is none."""

    @abstractmethod
    def begin(self) -> None:
        """Initialise the library."""

    @abstractmethod
    def failure(self, error: Exception) -> NoReading | None:
        """What an exception of the package's says; None for one of somebody else's."""

    def open(self) -> None:
        """Initialises it for the first user; raises NoReading where there is none."""
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
        """What the package's function returns. It may hang: only for a thread that nobody waits for without end."""
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
        """Something that calls the library, waited for no longer than the timeout; raises NoReading where it fails."""
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
