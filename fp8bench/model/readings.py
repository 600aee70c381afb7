"""Values of samplers: a reading with its unit and source, or the reason for a missing reading. An unknown value is
never 0.
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
        """The value of a quantity as a number. A text has none."""
        assert not isinstance(self.value, str), f"{self.value!r} is not a quantity"
        return float(self.value)


@dataclass(frozen=True)
class Unavailable:
    """The reason for a missing value, as a text that can follow 'unavailable: '."""

    reason: str


Read = Reading | Unavailable
Readings = Mapping[str, Read]


class NoReading(Exception):
    """Raised inside samplers if there is no value. Callers outside get an Unavailable instead.

    `code` is the status of the driver, if it gave one.
    """

    def __init__(self, reason: str, code: int | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.code = code


def attempt(read: Callable[[], Reading]) -> Read:
    """Returns a reading, or Unavailable if `read` raises NoReading."""
    try:
        return read()
    except NoReading as failure:
        return Unavailable(failure.reason)


def reasons_of(*several: Readings) -> list[str]:
    """Returns why values are missing. Names with the same reason are joined, such as 'ecc, mig: not supported'."""
    names: dict[str, dict[str, None]] = {}
    for readings in several:
        for name, read in readings.items():
            if isinstance(read, Unavailable):
                names.setdefault(read.reason, {})[name] = None
    return [f"{', '.join(missing)}: {reason}" for reason, missing in names.items()]


def first_of(*reads: Callable[[], Reading]) -> Reading:
    """Returns the result of the first function that succeeds. Raises NoReading with all reasons if none does."""
    reasons = []
    for read in reads:
        try:
            return read()
        except NoReading as failure:
            reasons.append(failure.reason)
    raise NoReading("; ".join(dict.fromkeys(reasons)))


def positive(value: float, unit: str, source: str) -> Reading:
    """Returns a reading of a quantity that is always above 0, such as power, a clock or a size. Raises NoReading for
    zero, negative or infinite values and NaN.
    """
    if not math.isfinite(value) or value <= 0:
        raise NoReading(f"{source} reported {value} {unit}, which is impossible")
    return Reading(value, unit, source)


def grown(earlier: Readings, later: Readings) -> Readings:
    """Returns how much counters grew between two readings, for all names in `later`."""
    return {
        name: _subtract_readings(earlier.get(name, Unavailable("it was not read before")), later[name])
        for name in later
    }


def _subtract_readings(earlier: Read, later: Read) -> Read:
    if isinstance(earlier, Unavailable):
        return earlier
    if isinstance(later, Unavailable):
        return later
    # A counter with a smaller value than before was reset, so its growth is unknown.
    if later.number < earlier.number:
        return Unavailable(f"{later.source} went back from {earlier.value} to {later.value} {later.unit}")
    return Reading(later.number - earlier.number, later.unit, later.source)
