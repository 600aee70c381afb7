"""What machines are named for, in the same words for the same runs."""

from __future__ import annotations

from fp8bench.features.fleet.alarms import of_coverage
from fp8bench.features.fleet.machines import Seen


def seen(machine: str, *whole: str) -> Seen:
    """A run that says nothing but which settings it has."""
    return Seen(machine, machine, "", (), 0.0, None, (), (), True, whole, (), {}, {}, {}, ())


def test_cells_that_are_missing_are_named_in_the_order_of_the_runs() -> None:
    """Not in that of a set, which is another in every process."""
    settings = [f"setting {number}" for number in range(12)]
    ones = [seen("one", *settings), seen("two", *settings), seen("three", settings[0])]
    (alarm,) = of_coverage(ones, ())
    assert alarm.machine == "three"
    assert alarm.words.endswith(f"are missing: {', '.join(settings[1:5])} and 7 more")
