"""The result of reading a sensor or counter: a value with its unit and source, or the reason why it is missing. An
unknown value is never 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fp8bench.model import Scalar


@dataclass(frozen=True)
class Reading:
    """A value, its unit ('J', 'W', 's', 'B', 'Hz', 'degC', 'share', 'mask', '' for a text), and its source."""

    value: Scalar
    unit: str
    source: str

    @property
    def number(self) -> float:
        """The value as a number. A reading whose value is a text has no number."""
        assert not isinstance(self.value, str), f"{self.value!r} is not a quantity"
        return float(self.value)


@dataclass(frozen=True)
class UnavailableReading:
    """The reason why a reading is missing, as a text that can follow 'unavailable: '."""

    reason: str


ReadingOrUnavailable = Reading | UnavailableReading
Readings = Mapping[str, ReadingOrUnavailable]


class NoReading(Exception):
    """Raised by the functions that read a sensor if it has no value. `try_reading` turns it into an UnavailableReading.

    `code` is the status code of the driver, if it returned one.
    """

    def __init__(self, reason: str, code: int | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.code = code


def try_reading(read: Callable[[], Reading]) -> ReadingOrUnavailable:
    """Returns a reading, or UnavailableReading if `read` raises NoReading."""
    try:
        return read()
    except NoReading as failure:
        return UnavailableReading(failure.reason)


def describe_missing_readings(*reading_sets: Readings) -> list[str]:
    """Returns why readings are missing, one text per reason with the names of the readings: 'ecc, mig: not
    supported'.
    """
    names: dict[str, dict[str, None]] = {}
    for readings in reading_sets:
        for name, read in readings.items():
            if isinstance(read, UnavailableReading):
                names.setdefault(read.reason, {})[name] = None
    return [f"{', '.join(names_with_reason)}: {reason}" for reason, names_with_reason in names.items()]


def read_first_available(*read_functions: Callable[[], Reading]) -> Reading:
    """Returns the reading of the first function that succeeds. If all fail, raises NoReading with all reasons."""
    reasons = []
    for read in read_functions:
        try:
            return read()
        except NoReading as failure:
            reasons.append(failure.reason)
    raise NoReading("; ".join(dict.fromkeys(reasons)))


def require_positive(value: float, unit: str, source: str) -> Reading:
    """Returns a reading of a quantity that is always above 0, such as power, a clock or a size. Raises NoReading for
    zero, negative or infinite values and NaN.
    """
    if not math.isfinite(value) or value <= 0:
        raise NoReading(f"{source} reported {value} {unit}, which is impossible")
    return Reading(value, unit, source)


def subtract_counters(earlier: Readings, later: Readings) -> Readings:
    """Returns how much each counter in `later` grew since `earlier`."""
    return {
        name: _compute_counter_growth(earlier.get(name, UnavailableReading("it was not read before")), later[name])
        for name in later
    }


def _compute_counter_growth(earlier: ReadingOrUnavailable, later: ReadingOrUnavailable) -> ReadingOrUnavailable:
    if isinstance(earlier, UnavailableReading):
        return earlier
    if isinstance(later, UnavailableReading):
        return later
    # A counter that is smaller than before was reset, so its growth is unknown.
    if later.number < earlier.number:
        return UnavailableReading(f"{later.source} went back from {earlier.value} to {later.value} {later.unit}")
    return Reading(later.number - earlier.number, later.unit, later.source)
