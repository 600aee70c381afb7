"""Calls that may never come back, and how long to wait for them.

A driver that hangs must not hang the run. Such a call is made on a daemon thread: whoever asked stops waiting, and the
process can end although the thread never does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from fp8bench.samplers.readings import NoReading

# A healthy call takes microseconds, one to a sleeping GPU without persistence mode a second or so.
PATIENCE = 5.0

T = TypeVar("T")


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
    """Why there is no answer, in words."""
    return f"{name} gave no answer for {seconds:g} s"
