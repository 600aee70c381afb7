"""NVML in this process: loaded and initialised while anyone uses it, and left alone once it has hung.

Its error codes are put into words here and nowhere else.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from fp8bench.measure.sensors.timeouts import TIMEOUT, NoAnswer, within
from fp8bench.model.readings import NoReading

NOT_SUPPORTED = 3
NOT_FOUND = 6
FUNCTION_NOT_FOUND = 13

REASONS: dict[int, str] = {
    1: "NVML is not initialised",
    2: "NVML refused the arguments",
    3: "this device or its driver does not support it",
    4: "this user has no permission",
    5: "NVML was already initialised",
    6: "NVML found no such thing",
    7: "NVML needed more room for its answer",
    8: "the GPU's external power is not connected",
    9: "the NVIDIA driver is not loaded",
    10: "NVML's own time ran out",
    11: "the GPU's interrupts do not work",
    12: "there is no NVML library (libnvidia-ml.so.1): no NVIDIA driver here",
    13: "this driver's NVML lacks the function: it is older than nvidia-ml-py",
    14: "the GPU's infoROM is corrupted",
    15: "the GPU is lost: it fell off the bus or cannot be reached",
    16: "the GPU must be reset first",
    17: "the operating system or a container blocks it",
    18: "NVML and the driver are of different versions: restart after the update",
    19: "the GPU is in use",
    20: "NVML ran out of memory",
    21: "NVML has no data",
    22: "a virtual GPU's ECC is not supported",
    23: "the GPU has no resources left for it",
    24: "this clock is not supported",
    25: "NVML does not know this version of the structure",
    26: "this driver's NVML has given the function up",
    27: "the GPU is not ready yet",
    28: "NVML finds no GPU",
    29: "the GPU is in a state that does not allow it",
    30: "this kind of reset is not supported",
    999: "an internal driver error",
}


def reason(code: int) -> str:
    """Why a call failed, with the code, so that it can be looked up."""
    return f"{REASONS.get(code, 'an error that fp8bench does not know')} (NVML error {code})"


T = TypeVar("T")
_NAME = "NVML"


class Library:
    """NVML's functions by name, failures as NoReading.

    `hung` says why nothing is asked any more: a driver that has swallowed one call may hold a lock that the next one
    waits for, so one call without an answer is the last.
    """

    def __init__(self, timeout: float = TIMEOUT) -> None:
        self.timeout = timeout
        self.hung = ""
        self._module: Any = None
        self._users = 0
        self._lock = threading.Lock()

    def open(self) -> None:
        """Initialises NVML for the first user; raises NoReading where there is none."""
        with self._lock:
            if not self._users:
                self.bounded(self._initialise)
            self._users += 1

    def close(self) -> None:
        """Shuts NVML down after the last user, if it still answers."""
        with self._lock:
            self._users -= 1
            if not self._users:
                with suppress(NoReading):
                    self.bounded(lambda: self.call("nvmlShutdown"))

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

    def bounded(self, function: Callable[[], T]) -> T:
        """Something that calls NVML, waited for no longer than the timeout; raises NoReading where it fails."""
        if self.hung:
            raise NoReading(self.hung)
        try:
            return within(self.timeout, function, _NAME)
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
