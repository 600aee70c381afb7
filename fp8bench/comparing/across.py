"""The ratio of two sides that were measured at different times, with an interval that knows it.

Where the sides have eight runs or more, how far runs lie apart is in the interval: noise within a run says nothing
about the next run's clocks, memory layout and neighbours. Of fewer, nobody knows that spread: the interval holds what
any run of one side says over any of the other, there is no p-value, and nothing below 10% is called better or worse.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean

from fp8bench.analysis.verdicts import FINAL_LEVEL, SAME
from fp8bench.comparing.student import p_value, quantile
from fp8bench.model import Direction, Interval

# Two builds of one program differ by as much for where their code and data lie.
BAND = 0.01
# What a few stored numbers may say: their runs were made at different times.
ALONE = 0.10
# Degrees of freedom below which a spread of runs is no more than a guess, and a t interval of it absurd.
LEAST_FREEDOM = 6


@dataclass(frozen=True)
class Estimate:
    """What one run says of a figure: its logarithm, and the standard error of that within the run (0: exact)."""

    log: float
    error: float


@dataclass(frozen=True)
class Difference:
    """The second side over the first. `p_value` is None where the spread between runs is not known."""

    ratio: Interval
    p_value: float | None

    @property
    def alone(self) -> bool:
        """Whether there are too few runs to know how far they lie apart."""
        return self.p_value is None


def across(
    before: Sequence[Estimate], after: Sequence[Estimate], beside: Sequence[Estimate] = (), level: float = FINAL_LEVEL
) -> Difference:
    """Hold the mean of one side's runs against that of the other's.

    Runs `beside` them are of neither, and say no more than how far runs lie apart.
    """
    point = fmean(one.log for one in after) - fmean(one.log for one in before)
    within = math.sqrt(sum(_mean_variance(side) for side in (before, after)))
    freedom = sum(max(0, len(side) - 1) for side in (before, after, beside))
    if freedom < LEAST_FREEDOM:
        return Difference(_of_few(before, after, point, level), None)
    pooled = sum(map(_deviations, (before, after, beside))) / freedom
    between = math.sqrt(pooled * (1 / len(before) + 1 / len(after)))
    # Few runs may agree by chance, and are never surer than each of them is.
    error = max(between, within)
    statistic = abs(point) / error if error else math.inf if point else 0.0
    reach = quantile(level, freedom) * error
    return Difference(_interval(point, point - reach, point + reach, level), p_value(statistic, freedom))


def direction(difference: Difference) -> tuple[Direction, str]:
    """Where a figure went, and why that is not known."""
    ratio = difference.ratio
    band = ALONE if difference.alone else BAND
    if ratio.low > 1 and ratio.point > 1 + band:
        return Direction.WORSE, ""
    if ratio.high < 1 and ratio.point < 1 / (1 + band):
        return Direction.BETTER, ""
    if difference.alone:
        return Direction.UNSURE, ""
    if ratio.low > 1 - SAME and ratio.high < 1 + SAME:
        return Direction.SAME, ""
    return Direction.UNSURE, "runs of one side differ too much to tell; measure more of them, or duel"


def _of_few(before: Sequence[Estimate], after: Sequence[Estimate], point: float, level: float) -> Interval:
    """From the least that a run of one side over one of the other may be to the most, by the noise within runs."""
    reach = NormalDist().inv_cdf((1 + level) / 2)
    pairs = [(new.log - old.log, reach * math.hypot(new.error, old.error)) for new in after for old in before]
    return _interval(point, min(log - error for log, error in pairs), max(log + error for log, error in pairs), level)


def _interval(point: float, low: float, high: float, level: float) -> Interval:
    return Interval(_exp(point), _exp(low), _exp(high), level)


def _exp(value: float) -> float:
    return math.exp(min(value, 700.0))


def _mean_variance(side: Sequence[Estimate]) -> float:
    return sum(one.error**2 for one in side) / len(side) ** 2


def _deviations(side: Sequence[Estimate]) -> float:
    """The sum of squares from the mean."""
    mean = fmean(one.log for one in side) if side else 0.0
    return sum((one.log - mean) ** 2 for one in side)
