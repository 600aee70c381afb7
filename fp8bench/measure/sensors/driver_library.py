"""A driver's library in this process: loaded and initialised while anyone uses it, left alone once it has hung."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ClassVar, TypeVar

from fp8bench.measure.sensors.timeouts import TIMEOUT, NoAnswer, within
from fp8bench.model.readings import NoReading

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
        """Shuts it down after the last user, if it still answers."""
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
