"""The ratio of two sides that were measured at different times, with an interval that includes how much runs differ.

The next run may have different clocks, memory layout and neighbours, which noise within a run does not show. With eight
runs or more the spread between runs is known and is part of the interval. With fewer it is unknown: then the interval
holds the ratio of any old run to any new one, it has no p-value, and no change below 10% is called better or worse.
Exact values are also compared here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from statistics import NormalDist, fmean, median, stdev
from typing import NamedTuple

from fp8bench.analysis.verdicts import FINAL_LEVEL, SAME
from fp8bench.model import Direction, Interval, Noise
from fp8bench.model.specs import BAND
from fp8bench.units import percent

# The least change that a few runs can show, because they were measured at different times.
ALONE = 0.10
# Limits for evaluating the continued fraction of Student's distribution.
_TINY = 1e-300
_CLOSE = 1e-15
_MOST_TERMS = 1000
# With fewer degrees of freedom the spread between runs is a guess, and its t interval far too wide.
LEAST_FREEDOM = 6
# Exact values are the same whenever the same code runs, except for the digits that are stored.
ROUNDING = 1e-6


@dataclass(frozen=True)
class Estimate:
    """The logarithm of a run's figure, and its standard error within the run (0: exact)."""

    log: float
    error: float


@dataclass(frozen=True)
class RunDifference:
    """The new side over the old one. `p_value` is None if the spread between runs is unknown."""

    ratio: Interval
    p_value: float | None
    noise: Noise

    @property
    def alone(self) -> bool:
        return self.p_value is None


def compare_runs(old: Sequence[Estimate], new: Sequence[Estimate], extra: Sequence[Estimate] = ()) -> RunDifference:
    """Compares the means of the runs of two sides. `extra` runs only show how much runs differ."""
    point = _mean_log(new) - _mean_log(old)
    within = math.sqrt(_variance_of_mean(old) + _variance_of_mean(new))
    freedom = sum(max(0, len(side) - 1) for side in (old, new, extra))
    if freedom < LEAST_FREEDOM:
        # 1. Too few runs: the interval holds the ratio of any new run to any old one, by the noise within them.
        reach = NormalDist().inv_cdf((1 + FINAL_LEVEL) / 2)
        low, high = math.inf, -math.inf
        for old_run, new_run in product(old, new):
            log, error = new_run.log - old_run.log, reach * math.hypot(new_run.error, old_run.error)
            low, high = min(low, log - error), max(high, log + error)
        return RunDifference(_to_interval(point, low, high), None, Noise(within, 0, len(old), len(new)))
    # 2. Enough runs: the spread between them, by Student's t. Runs that agree by chance are not surer than each is.
    squares = [*_squares_about_mean(old), *_squares_about_mean(new), *_squares_about_mean(extra)]
    pooled = sum(squares) / freedom
    between = math.sqrt(pooled * (1 / len(old) + 1 / len(new)))
    error = max(between, within)
    if error:
        statistic = abs(point) / error
    else:
        statistic = math.inf if point else 0.0
    reach = quantile(FINAL_LEVEL, freedom) * error
    noise = Noise(error, freedom, len(old), len(new))
    return RunDifference(_to_interval(point, point - reach, point + reach), p_value(statistic, freedom), noise)


def _mean_log(side: Sequence[Estimate]) -> float:
    return fmean(estimate.log for estimate in side)


def _variance_of_mean(side: Sequence[Estimate]) -> float:
    return sum(estimate.error**2 for estimate in side) / len(side) ** 2


def _squares_about_mean(side: Sequence[Estimate]) -> list[float]:
    mean = _mean_log(side) if side else 0.0
    return [(estimate.log - mean) ** 2 for estimate in side]


def judge_difference(difference: RunDifference) -> tuple[Direction, str]:
    """Returns the direction, and the reason if it is UNSURE."""
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
    return Direction.UNSURE, "runs of one side differ too much; measure more of them, or duel"


class FigureChange(NamedTuple):
    """The change of a value from `before` to `after`. `ratio` is None if either is 0, `p_value` if values are exact."""

    direction: Direction
    before: float
    after: float
    ratio: Interval | None = None
    p_value: float | None = None
    why: str = ""
    noise: Noise | None = None


def compare_exact_values(old: Sequence[float], new: Sequence[float], *, rounding: float = ROUNDING) -> FigureChange:
    """Compares values that are the same whenever the same code runs, such as memory and errors.

    A value that differs by more than `rounding` has changed. If the values of one side vary, their spread counts.
    """
    # 1. A NaN among the values of a tensor is worse than any number.
    broken = [any(map(math.isnan, side)) for side in (old, new)]
    old_value = math.nan if broken[0] else median(old)
    new_value = math.nan if broken[1] else median(new)
    if all(broken):
        return FigureChange(Direction.NONE, old_value, new_value, why="it is not a number on both sides")
    if any(broken):
        where = Direction.WORSE if broken[1] else Direction.BETTER
        return FigureChange(where, old_value, new_value, why="it is not a number on one side")
    # 2. Neither zero nor infinity has a ratio.
    if old_value == new_value and not 0 < old_value < math.inf:
        return FigureChange(Direction.SAME, old_value, new_value)
    where = Direction.WORSE if new_value > old_value else Direction.BETTER
    if not (0 < old_value < math.inf and 0 < new_value < math.inf):
        reason = "from or to zero, or without bound: it has no ratio"
        return FigureChange(where, old_value, new_value, why=reason)
    # 3. Values that vary are compared like measured ones.
    varies = any(max(side) > min(side) * (1 + ROUNDING) for side in (old, new))
    if varies and all(0 < value < math.inf for value in (*old, *new)):
        old_logs = [Estimate(math.log(value), 0.0) for value in old]
        new_logs = [Estimate(math.log(value), 0.0) for value in new]
        difference = compare_runs(old_logs, new_logs)
        where, reason = judge_difference(difference)
        old_value, new_value = math.exp(_mean_log(old_logs)), math.exp(_mean_log(new_logs))
        return FigureChange(where, old_value, new_value, difference.ratio, difference.p_value, reason, difference.noise)
    ratio = new_value / old_value
    if abs(ratio - 1) <= rounding:
        where = Direction.SAME
    return FigureChange(where, old_value, new_value, Interval(ratio, ratio, ratio, 1.0))


def mean_with_reach(values: Sequence[float]) -> tuple[float, float]:
    """Returns the mean of at least two values, and how far its interval reaches to either side, by Student's t."""
    return fmean(values), quantile(FINAL_LEVEL, len(values) - 1) * stdev(values) / math.sqrt(len(values))


def _to_interval(*logs: float) -> Interval:
    """Makes an interval of the logarithms of its point and ends; math.exp fails beyond a float's range."""
    point, low, high = (math.exp(min(log, 700.0)) for log in logs)
    return Interval(point, low, high, FINAL_LEVEL)


def p_value(statistic: float, freedom: float) -> float:
    """Returns the chance that Student's t, with these degrees of freedom, is at least this far from 0."""
    if math.isinf(statistic):
        return 0.0
    return _incomplete_beta(freedom / 2, 0.5, freedom / (freedom + statistic * statistic))


@lru_cache(maxsize=2048)
def quantile(level: float, freedom: float) -> float:
    """Returns the bound that Student's t does not exceed with the chance `level`: 12.7 for 95% and 1 degree of
    freedom."""
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
