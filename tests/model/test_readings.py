"""Values, and reasons in their place."""

from __future__ import annotations

import math

import pytest

from fp8bench.model.readings import NoReading, Reading, Unavailable, attempt, first_of, grown, positive


def failing(reason: str) -> Reading:
    raise NoReading(reason)


def test_a_failure_becomes_its_reason() -> None:
    assert attempt(lambda: Reading(3.0, "W", "sensor")) == Reading(3.0, "W", "sensor")
    assert attempt(lambda: failing("it is broken")) == Unavailable("it is broken")


def test_the_first_way_that_works_counts() -> None:
    """If none does, all their reasons stand, each of them once."""
    assert first_of(lambda: failing("no"), lambda: Reading(1, "B", "second")).source == "second"
    with pytest.raises(NoReading, match=r"^no; never$"):
        first_of(lambda: failing("no"), lambda: failing("never"), lambda: failing("no"))


@pytest.mark.parametrize("value", [0, 0.0, -1.0, math.nan, math.inf])
def test_what_cannot_be_is_no_reading(value: float) -> None:
    """A device that says 0 W does not know."""
    with pytest.raises(NoReading, match=r"the sensor said .* W, which cannot be"):
        positive(value, "W", "the sensor")


def test_counters_grow_or_say_why_not() -> None:
    """A count of 0 is a count; one that went back is none."""
    before = {
        "same": Reading(5, "s", "a"), "more": Reading(5, "s", "b"), "back": Reading(5, "s", "c"),
        "gone": Reading(5, "s", "d"), "came": Unavailable("not yet"),
    }  # fmt: skip
    after = {
        "same": Reading(5, "s", "a"), "more": Reading(7, "s", "b"), "back": Reading(4, "s", "c"),
        "gone": Unavailable("lost"), "came": Reading(1, "s", "e"), "new": Reading(1, "s", "f"),
    }  # fmt: skip
    assert grown(before, after) == {
        "same": Reading(0, "s", "a"),
        "more": Reading(2, "s", "b"),
        "back": Unavailable("c went back from 5 to 4 s"),
        "gone": Unavailable("lost"),
        "came": Unavailable("not yet"),
        "new": Unavailable("it was not read before"),
    }
