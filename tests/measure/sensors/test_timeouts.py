"""Calls that come back, fail, or never come back."""

from __future__ import annotations

import threading

import pytest

from fp8bench.measure.sensors.driver_library import NoAnswer, within
from fp8bench.model.readings import NoReading


def test_a_call_gives_its_value_or_what_it_raises() -> None:
    assert within(30.0, lambda: 0, "it") == 0
    assert within(30.0, lambda: None, "it") is None

    def fail() -> None:
        raise NoReading("it is broken")

    with pytest.raises(NoReading, match="it is broken"):
        within(30.0, fail, "it")


def test_a_call_that_hangs_is_left_behind() -> None:
    release = threading.Event()
    with pytest.raises(NoAnswer, match=r"^the driver gave no answer for 0\.05 s$"):
        within(0.05, lambda: release.wait(60), "the driver")
    (left,) = [thread for thread in threading.enumerate() if thread.name == "the driver"]
    assert left.daemon
    release.set()
    left.join(30)
