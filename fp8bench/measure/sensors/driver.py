"""Reads the state of a device, other than its energy, through the library of its driver.

A driver that hangs must not hang the run. So calls run on a daemon thread: the caller can stop waiting, and the
process can end although the thread never returns. The library is not called again once it has hung.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, TypeVar

from fp8bench.model.readings import NoReading, Reading

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
DRIVER_CALL_TIMEOUT = 5.0


class NoAnswer(NoReading):
    """A call to the driver did not return in time."""


def call_with_timeout(seconds: float, function: Callable[[], T], name: str) -> T:
    """Calls `function` in a thread: returns its result or raises its NoReading. Raises NoAnswer after `seconds`."""
    returned_values: list[T] = []
    raised_errors: list[NoReading] = []

    def run_function() -> None:
        try:
            returned_values.append(function())
        except NoReading as failure:
            raised_errors.append(failure)

    thread = threading.Thread(target=run_function, name=name, daemon=True)
    thread.start()
    has_thread_ended = wait_for_thread_end(thread, seconds)
    if returned_values:
        return returned_values[0]
    if raised_errors:
        raise raised_errors[0]
    raise NoAnswer(f"{name} ended without an answer" if has_thread_ended else describe_driver_silence(name, seconds))


def wait_for_thread_end(thread: threading.Thread, seconds: float) -> bool:
    """Waits up to `seconds` for a thread to end, and returns whether it has ended. The time is divided into two equal
    waits. If this process is suspended for a while, only one of them is lost.
    """
    thread.join(seconds / 2)
    thread.join(seconds / 2)
    return not thread.is_alive()


def describe_driver_silence(name: str, seconds: float) -> str:
    return f"{name} gave no answer for {seconds:g} s"


T = TypeVar("T")


# A function that calls a library function for one device. Its arguments are the name of the library function, and the
# arguments that follow the device's handle.
CallLibraryFunction = Callable[..., Any]

ReadValue = Callable[[CallLibraryFunction], Reading]


class QuerySubject(Enum):
    """The subject of a query: the driver, the whole device, or a part of the device (a MIG instance)."""

    DRIVER = auto()
    DEVICE = auto()
    MIG_INSTANCE = auto()


@dataclass(frozen=True)
class DeviceValueQuery:
    """A named value of a device, and the function that reads it."""

    name: str
    read: ReadValue
    subject: QuerySubject = QuerySubject.DEVICE
