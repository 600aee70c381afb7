"""Computes the mean power of a window from the ticks (changes) of an energy counter, or from readings of a power
sensor.

A counter that changes every 100 ms does not show the energy since its last change. So the difference of two readings
a second apart may be wrong by a tenth. At the instant of a change the counter is exact. Between two changes its
difference is the energy, however the power varied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from fp8bench.model.consumed import MIN_COUNTER_CHANGES, TICK_INTERVALS
from fp8bench.model.readings import NoReading

# The fewest intervals between ticks from which power is computed.
MIN_TICK_INTERVALS = MIN_COUNTER_CHANGES
# A window is precise enough (resolved) below this relative uncertainty.
MAX_UNCERTAINTY = 0.005
# The same limit in a brisk run (one that takes about 10 s per group). It may be larger, because a brisk run checks the
# energy of each case with a second window.
MAX_BRISK_POWER_UNCERTAINTY = 0.01
# The measured part may begin or end at an inner tick whose time is known more precisely. For each second that it loses,
# the time must be at least this many seconds more precise.
_PRECISION_GAIN_PER_SECOND = 0.1


@dataclass(frozen=True, slots=True)
class CounterTick:
    """A change of an energy counter to `joules`. It happened between the times `after` and `seen_at`, in
    seconds.
    """

    after: float
    seen_at: float
    joules: float

    @property
    def time(self) -> float:
        return (self.after + self.seen_at) / 2

    @property
    def time_range(self) -> float:
        return self.seen_at - self.after


@dataclass(frozen=True)
class PowerStretch:
    """The part of a window from which its mean power is computed. `intervals` is the number of intervals between ticks
    of a counter, or between readings of a sensor.

    With a counter, `joules` are exact even if the power varied, and `uncertainty` is the largest relative error of
    `seconds`, and so of `watts`. With a sensor the uncertainty is unknown: None.
    """

    joules: float
    seconds: float
    intervals: int
    uncertainty: float | None = None

    @property
    def watts(self) -> float:
        return self.joules / self.seconds


@dataclass(frozen=True)
class CounterRhythm:
    """How often a counter changes, in seconds: the median time between changes, the largest deviation from it, and
    the longest time.
    """

    period: float
    spread: float
    longest: float


def measure_tick_power(ticks: Sequence[CounterTick]) -> PowerStretch:
    """Computes the power between the first and the last tick, or nearby ticks with more precise times.

    Raises NoReading if there are too few ticks.
    """
    if len(ticks) <= MIN_TICK_INTERVALS:
        intervals = max(0, len(ticks) - 1)
        raise NoReading(f"not measurable: {intervals} {TICK_INTERVALS}, {MIN_TICK_INTERVALS} are needed")
    first_index, last_index = _choose_end_ticks(ticks)
    start, end = ticks[first_index], ticks[last_index]
    # The time of a tick is the middle of its range, so it is wrong by half the range at most.
    seconds = end.time - start.time
    return PowerStretch(
        end.joules - start.joules, seconds, last_index - first_index, (start.time_range + end.time_range) / 2 / seconds
    )


def is_resolved(ticks: Sequence[CounterTick], bound: float = MAX_UNCERTAINTY) -> bool:
    return len(ticks) > MIN_TICK_INTERVALS and (measure_tick_power(ticks).uncertainty or 0.0) <= bound


def measure_counter_rhythm(ticks: Sequence[CounterTick]) -> CounterRhythm:
    """Measures how often a counter changes, from consecutive ticks (changes of the counter)."""
    intervals = [later.time - earlier.time for earlier, later in pairwise(ticks)]
    period = median(intervals)
    return CounterRhythm(period, max(abs(interval - period) for interval in intervals), max(intervals))


def _choose_end_ticks(ticks: Sequence[CounterTick]) -> tuple[int, int]:
    """Returns the indices of the two ticks between which the power is computed. These are the first and the last tick,
    unless the time of a tick between them is known much more precisely.
    """
    start, end = ticks[0].time, ticks[-1].time
    first_tick_index = min(
        range(len(ticks) - MIN_TICK_INTERVALS),
        key=lambda index: ticks[index].time_range + _PRECISION_GAIN_PER_SECOND * (ticks[index].time - start),
    )
    last_index = min(
        range(len(ticks) - 1, first_tick_index + MIN_TICK_INTERVALS - 1, -1),
        key=lambda index: ticks[index].time_range + _PRECISION_GAIN_PER_SECOND * (end - ticks[index].time),
    )
    return first_tick_index, last_index


# Power must be read for at least this many seconds: some sensors measure only a quarter of the time, in several parts.
MIN_SAMPLED_SECONDS = 1.0
MIN_SAMPLES = 11


@dataclass(frozen=True, slots=True)
class PowerSample:
    """A reading of a power sensor in watts, at a time in seconds."""

    time: float
    watts: float


def has_enough_samples(samples: Sequence[PowerSample]) -> bool:
    return len(samples) >= MIN_SAMPLES and samples[-1].time - samples[0].time >= MIN_SAMPLED_SECONDS


def measure_mean_power(samples: Sequence[PowerSample]) -> PowerStretch:
    """Computes the mean power of readings by the trapezoid rule. Raises NoReading if there are too few of them."""
    if not has_enough_samples(samples):
        seconds = samples[-1].time - samples[0].time if samples else 0.0
        raise NoReading(
            f"not measurable: {len(samples)} reading(s) of the power sensor over {seconds:.2g} s, "
            f"{MIN_SAMPLES} over {MIN_SAMPLED_SECONDS:g} s are needed"
        )
    joules = sum(
        (later.time - earlier.time) * (later.watts + earlier.watts) / 2 for earlier, later in pairwise(samples)
    )
    return PowerStretch(joules, samples[-1].time - samples[0].time, len(samples) - 1)
