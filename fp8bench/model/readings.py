"""Values of samplers: a reading with unit and source, or the reason for its absence. An unknown value is never 0."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fp8bench.model import Scalar


@dataclass(frozen=True)
class Reading:
    """A value in its unit ('J', 'W', 's', 'B', 'Hz', 'degC', 'share', 'mask', '' for words), and where it comes
    from."""

    value: Scalar
    unit: str
    source: str

    @property
    def number(self) -> float:
        """The value of a quantity; words have none."""
        assert not isinstance(self.value, str), f"{self.value!r} is no quantity"
        return float(self.value)


@dataclass(frozen=True)
class Unavailable:
    """The reason for a missing value, in words that can follow 'unavailable: '."""

    reason: str


Read = Reading | Unavailable
Readings = Mapping[str, Read]


class NoReading(Exception):
    """Raised inside the samplers without a value; callers from outside get an Unavailable.

    `code` is the driver's status, where it gave one.
    """

    def __init__(self, reason: str, code: int | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.code = code


def attempt(read: Callable[[], Reading]) -> Read:
    try:
        return read()
    except NoReading as failure:
        return Unavailable(failure.reason)


def reasons_of(*several: Readings) -> list[str]:
    """Why values are missing, by reason: 'ecc, mig: not supported'."""
    names: dict[str, dict[str, None]] = {}
    for readings in several:
        for name, read in readings.items():
            if isinstance(read, Unavailable):
                names.setdefault(read.reason, {})[name] = None
    return [f"{', '.join(missing)}: {reason}" for reason, missing in names.items()]


def first_of(*reads: Callable[[], Reading]) -> Reading:
    """The first of several functions that works; raises NoReading with all their reasons if none does."""
    reasons = []
    for read in reads:
        try:
            return read()
        except NoReading as failure:
            reasons.append(failure.reason)
    raise NoReading("; ".join(dict.fromkeys(reasons)))


def positive(value: float, unit: str, source: str) -> Reading:
    """A reading of what is never 0 where it is known: power, a clock, a size. Raises NoReading for other values."""
    if not math.isfinite(value) or value <= 0:
        raise NoReading(f"{source} said {value} {unit}, which cannot be")
    return Reading(value, unit, source)


def grown(earlier: Readings, later: Readings) -> Readings:
    """Returns the growth of counters from one reading to a later one, for all names in `later`."""
    return {name: _growth(earlier.get(name, Unavailable("it was not read before")), later[name]) for name in later}


def _growth(earlier: Read, later: Read) -> Read:
    if isinstance(earlier, Unavailable):
        return earlier
    if isinstance(later, Unavailable):
        return later
    # A counter that went back was reset, and the growth since is unknown.
    if later.number < earlier.number:
        return Unavailable(f"{later.source} went back from {earlier.value} to {later.value} {later.unit}")
    return Reading(later.number - earlier.number, later.unit, later.source)
