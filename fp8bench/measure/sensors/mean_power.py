"""Mean power over a window, from the ticks of an energy counter or from readings of a power sensor.

A counter that changes every 100 ms has no information about the time since its last change, so two reads a second apart
may be wrong by a tenth. But at the instant of a change it is exact: between two changes the energy is the counter's
difference, whatever the power did in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from fp8bench.model.consumed import LEAST_INTERVALS, TICK_INTERVALS
from fp8bench.model.readings import NoReading

# The fewest tick intervals.
INTERVALS = LEAST_INTERVALS
# The largest relative uncertainty of a resolved window.
RESOLVED = 0.005
# The same of a short window, whose twin shows how far windows differ.
RESOLVED_BRISKLY = 0.01
# An end of the stretch moves inwards by a second only for a tick that was seen this many seconds sharper.
_WORTH = 0.1


@dataclass(frozen=True, slots=True)
class Tick:
    """A change of the counter to `joules`, after the time `after` and not later than `seen`, in seconds."""

    after: float
    seen: float
    joules: float

    @property
    def at(self) -> float:
        return (self.after + self.seen) / 2

    @property
    def late(self) -> float:
        return self.seen - self.after


@dataclass(frozen=True)
class PowerStretch:
    """The measured part of a window: `intervals` between the ticks of a counter, or between readings of a sensor.

    With a counter `joules` are exact whatever the power did, and `uncertainty` is the largest relative error of
    `seconds`, and so of `watts`. With a sensor it is None: unknown.
    """

    joules: float
    seconds: float
    intervals: int
    uncertainty: float | None = None

    @property
    def watts(self) -> float:
        return self.joules / self.seconds


@dataclass(frozen=True)
class Rhythm:
    """How often a counter changes, in seconds: the median interval, the largest deviation from it, the longest one."""

    period: float
    spread: float
    longest: float


def slope(ticks: Sequence[Tick]) -> PowerStretch:
    """The power from the first tick to the last, or to nearby ticks that were seen sharper. Raises NoReading."""
    if len(ticks) <= INTERVALS:
        intervals = max(0, len(ticks) - 1)
        raise NoReading(f"not measurable: {intervals} {TICK_INTERVALS}, {INTERVALS} are needed")
    first, last = _ends(ticks)
    start, end = ticks[first], ticks[last]
    seconds = end.at - start.at
    return PowerStretch(end.joules - start.joules, seconds, last - first, (start.late + end.late) / 2 / seconds)


def is_resolved(ticks: Sequence[Tick], bound: float = RESOLVED) -> bool:
    return len(ticks) > INTERVALS and (slope(ticks).uncertainty or 0.0) <= bound


def rhythm(ticks: Sequence[Tick]) -> Rhythm:
    """`ticks` must be gapless."""
    intervals = [later.at - earlier.at for earlier, later in pairwise(ticks)]
    period = median(intervals)
    return Rhythm(period, max(abs(interval - period) for interval in intervals), max(intervals))


def _ends(ticks: Sequence[Tick]) -> tuple[int, int]:
    """The outermost ticks, unless others are sharper by enough to make a shorter stretch better."""
    start, end = ticks[0].at, ticks[-1].at
    first = min(range(len(ticks) - INTERVALS), key=lambda place: ticks[place].late + _WORTH * (ticks[place].at - start))
    last = min(
        range(len(ticks) - 1, first + INTERVALS - 1, -1),
        key=lambda place: ticks[place].late + _WORTH * (end - ticks[place].at),
    )
    return first, last


# Some devices' sensors look a quarter of the time only: a second has several of their looks.
SHORTEST = 1.0
FEWEST = 11


@dataclass(frozen=True, slots=True)
class PowerSample:
    """A reading in watts, at an instant in seconds."""

    at: float
    watts: float


def sufficient(samples: Sequence[PowerSample]) -> bool:
    return len(samples) >= FEWEST and samples[-1].at - samples[0].at >= SHORTEST


def mean_power(samples: Sequence[PowerSample]) -> PowerStretch:
    """Returns the mean power by the trapezoid rule. Raises NoReading if there are too few readings."""
    if not sufficient(samples):
        seconds = samples[-1].at - samples[0].at if samples else 0.0
        raise NoReading(
            f"not measurable: {len(samples)} reading(s) of the power sensor over {seconds:.2g} s, "
            f"{FEWEST} over {SHORTEST:g} s are needed"
        )
    joules = sum((later.at - earlier.at) * (later.watts + earlier.watts) / 2 for earlier, later in pairwise(samples))
    return PowerStretch(joules, samples[-1].at - samples[0].at, len(samples) - 1)
