"""The ratio of two sides that were measured at different times, with an interval that includes how much runs differ.

Where the sides have eight runs or more, that spread is in the interval: noise within a run says nothing of the next
run's clocks, memory layout and neighbours. With fewer runs it is unknown: the interval then holds the ratio of any run
of one side to any of the other, there is no p-value, and nothing below 10% is called better or worse. Exact values are
compared here, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist, fmean, median, stdev
from typing import NamedTuple

from fp8bench.analysis.verdicts import FINAL_LEVEL, SAME
from fp8bench.model import Direction, Interval, Noise
from fp8bench.model.specs import BAND
from fp8bench.units import percent

# The least change that a few stored numbers can show, as their runs were made at different times.
ALONE = 0.10
# Limits of the continued fraction of Student's distribution.
_TINY = 1e-300
_CLOSE = 1e-15
_MOST_TERMS = 1000
# With fewer degrees of freedom a spread of runs is a guess, and a t interval of it absurd.
LEAST_FREEDOM = 6
# What neither clock nor sensor measures is the same whenever the same code runs, but for the digits that are kept.
ROUNDING = 1e-6


@dataclass(frozen=True)
class Estimate:
    """A run's value of a figure: its logarithm, and the standard error of that within the run (0: exact)."""

    log: float
    error: float


@dataclass(frozen=True)
class RunDifference:
    """The second side over the first. `p_value` is None where the spread between runs is not known."""

    ratio: Interval
    p_value: float | None
    noise: Noise

    @property
    def alone(self) -> bool:
        return self.p_value is None


def across(before: Sequence[Estimate], after: Sequence[Estimate], beside: Sequence[Estimate] = ()) -> RunDifference:
    """Compares the means of two sides' runs. Runs `beside` them only show how much runs differ."""
    point = fmean(estimate.log for estimate in after) - fmean(estimate.log for estimate in before)
    within = math.sqrt(sum(sum(estimate.error**2 for estimate in side) / len(side) ** 2 for side in (before, after)))
    freedom = sum(max(0, len(side) - 1) for side in (before, after, beside))
    if freedom < LEAST_FREEDOM:
        # From the least that a run of one side over one of the other may be to the most, by the noise within runs.
        sure = NormalDist().inv_cdf((1 + FINAL_LEVEL) / 2)
        pairs = [(new.log - old.log, sure * math.hypot(new.error, old.error)) for new in after for old in before]
        low, high = min(log - error for log, error in pairs), max(log + error for log, error in pairs)
        return RunDifference(_interval(point, low, high), None, Noise(within, 0, len(before), len(after)))
    means = [fmean(estimate.log for estimate in side) if side else 0.0 for side in (before, after, beside)]
    sides = zip((before, after, beside), means, strict=True)
    pooled = sum((estimate.log - mean) ** 2 for side, mean in sides for estimate in side) / freedom
    between = math.sqrt(pooled * (1 / len(before) + 1 / len(after)))
    # Few runs may agree by chance, and are never surer than each of them is.
    error = max(between, within)
    statistic = abs(point) / error if error else math.inf if point else 0.0
    reach = quantile(FINAL_LEVEL, freedom) * error
    noise = Noise(error, freedom, len(before), len(after))
    return RunDifference(_interval(point, point - reach, point + reach), p_value(statistic, freedom), noise)


def direction(difference: RunDifference) -> tuple[Direction, str]:
    ratio = difference.ratio
    band = ALONE if difference.alone else BAND
    if ratio.low > 1 and ratio.point > 1 + band:
        return Direction.WORSE, ""
    if ratio.high < 1 and ratio.point < 1 / (1 + band):
        return Direction.BETTER, ""
    if difference.alone:
        return Direction.UNSURE, (
            f"fewer than {LEAST_FREEDOM + 2} runs in all do not tell how far runs lie apart, and below "
            f"{percent(ALONE, 0)} they say nothing: measure more of them, or duel"
        )
    if ratio.low > 1 - SAME and ratio.high < 1 + SAME:
        return Direction.SAME, ""
    return Direction.UNSURE, "runs of one side differ too much to tell; measure more of them, or duel"


class FigureChange(NamedTuple):
    """The change of a value from `before` to `after`. `ratio` is None from or to 0, `p_value` for exact values."""

    direction: Direction
    before: float
    after: float
    ratio: Interval | None = None
    p_value: float | None = None
    why: str = ""
    noise: Noise | None = None


def exact_change(before: Sequence[float], after: Sequence[float], *, rounding: float = ROUNDING) -> FigureChange:
    """Compares values that are the same whenever the same code runs, such as memory and errors.

    A value that differs by more than rounding has changed. If the values of one side vary all the same, their spread
    counts.
    """
    every, old, new = (*before, *after), median(before), median(after)
    broken = [any(map(math.isnan, side)) for side in (before, after)]
    if any(broken):  # a NaN among a tensor's values is further off than any number
        old, new = (math.nan if is_broken else middle for is_broken, middle in zip(broken, (old, new), strict=True))
        where = Direction.NONE if all(broken) else Direction.WORSE if broken[1] else Direction.BETTER
        return FigureChange(where, old, new, why=f"it is no number on {'both sides' if all(broken) else 'one side'}")
    if not (0 < old < math.inf and 0 < new < math.inf):
        if old == new:
            return FigureChange(Direction.SAME, old, new)
        return FigureChange(
            Direction.WORSE if new > old else Direction.BETTER,
            old,
            new,
            why="from or to nothing, or without bound: no ratio says it",
        )
    varies = any(max(side) > min(side) * (1 + ROUNDING) for side in (before, after))
    if varies and all(0 < value < math.inf for value in every):
        old_logs, new_logs = ([Estimate(math.log(value), 0.0) for value in side] for side in (before, after))
        difference = across(old_logs, new_logs)
        where, why = direction(difference)
        old, new = (math.exp(fmean(estimate.log for estimate in side)) for side in (old_logs, new_logs))
        return FigureChange(where, old, new, difference.ratio, difference.p_value, why, difference.noise)
    ratio = new / old
    where = Direction.WORSE if ratio > 1 else Direction.BETTER
    where = Direction.SAME if abs(ratio - 1) <= rounding else where
    return FigureChange(where, old, new, Interval(ratio, ratio, ratio, 1.0))


def mean_of(values: Sequence[float]) -> tuple[float, float]:
    """Returns the mean of at least two values, and how far its interval reaches, by Student's t."""
    return fmean(values), quantile(FINAL_LEVEL, len(values) - 1) * stdev(values) / math.sqrt(len(values))


def _interval(*logs: float) -> Interval:
    """Makes an interval of the logarithms of its point and ends; math.exp fails beyond a float's range."""
    point, low, high = (math.exp(min(log, 700.0)) for log in logs)
    return Interval(point, low, high, FINAL_LEVEL)


def p_value(statistic: float, freedom: float) -> float:
    """Student's t: the chance of a value at least so far from 0, on either side, with so many degrees of freedom."""
    if math.isinf(statistic):
        return 0.0
    return _incomplete_beta(freedom / 2, 0.5, freedom / (freedom + statistic * statistic))


@lru_cache(maxsize=2048)
def quantile(level: float, freedom: float) -> float:
    """Returns how far from 0 the share `level` of values reaches, on both sides together: 12.7 for 95% and 1 degree."""
    low, high = 0.0, 1.0
    while p_value(high, freedom) > 1 - level:
        high *= 2
    while high - low > 1e-10 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if p_value(middle, freedom) > 1 - level else (low, middle)
    return high


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """The regularised incomplete beta function, by its continued fraction where that converges fast."""
    if x <= 0 or x >= 1:
        return 0.0 if x <= 0 else 1.0
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(b, a, 1 - x)
    front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    return math.exp(front) * _fraction(a, b, x) / a


def _fraction(a: float, b: float, x: float) -> float:
    """Evaluates the fraction 1 / (1 + d1 / (1 + d2 / ...)) by Lentz's method."""
    c, d = 1.0, 1 / _not_zero(1 - (a + b) * x / (a + 1))
    value = d
    for m in range(1, _MOST_TERMS):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d = 1 / _not_zero(1 + term * d)
            c = _not_zero(1 + term / c)
            value *= c * d
        if abs(c * d - 1) < _CLOSE:
            break
    return value


def _not_zero(value: float) -> float:
    return value if abs(value) > _TINY else _TINY
