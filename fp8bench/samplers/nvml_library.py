"""NVML in this process: loaded and initialised while anyone uses it, and left alone once it has hung."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from fp8bench.samplers.nvml_errors import reason
from fp8bench.samplers.patience import PATIENCE, NoAnswer, within
from fp8bench.samplers.readings import NoReading

T = TypeVar("T")
_NAME = "NVML"


class Library:
    """NVML's functions by name, failures as NoReading.

    `hung` says why nothing is asked any more: a driver that has swallowed one call may hold a lock that the next one
    waits for, so one call without an answer is the last.
    """

    def __init__(self, patience: float = PATIENCE) -> None:
        self.patience = patience
        self.hung = ""
        self._module: Any = None
        self._users = 0
        self._lock = threading.Lock()

    def open(self) -> None:
        """Initialises NVML for the first user; raises NoReading where there is none."""
        with self._lock:
            if not self._users:
                self.patient(self._initialise)
            self._users += 1

    def close(self) -> None:
        """Shuts NVML down after the last user, if it still answers."""
        with self._lock:
            self._users -= 1
            if not self._users:
                with suppress(NoReading):
                    self.patient(lambda: self.call("nvmlShutdown"))

    def call(self, function: str, *arguments: Any) -> Any:
        """What pynvml's function returns. It may hang: only for a thread that nobody waits for without end."""
        if self.hung:
            raise NoReading(self.hung)
        named = getattr(self._module, function, None)
        if named is None:
            raise NoReading(f"the installed nvidia-ml-py has no {function}: it is too old")
        try:
            return named(*arguments)
        except self._module.NVMLError as error:
            raise NoReading(reason(error.value), error.value) from error
        except UnicodeDecodeError as error:
            raise NoReading(f"{function} answered with what is no text") from error

    def patient(self, function: Callable[[], T]) -> T:
        """Something that calls NVML, waited for as long as patience lasts; raises NoReading where it fails."""
        if self.hung:
            raise NoReading(self.hung)
        try:
            return within(self.patience, function, _NAME)
        except NoAnswer as failure:
            self.give_up(failure.reason)
            raise NoReading(self.hung) from failure

    def give_up(self, why: str) -> None:
        """Nothing is asked any more."""
        self.hung = self.hung or f"{why}, and is left alone since"

    def _initialise(self) -> None:
        try:
            import pynvml
        except ImportError as error:
            raise NoReading("the package nvidia-ml-py is not installed") from error
        self._module = pynvml
        self.call("nvmlInitWithFlags", 0)


LIBRARY = Library()
