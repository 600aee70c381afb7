"""Computes the ratio of two sides that were measured at different times. The interval of the ratio includes differences
between runs.

Runs differ in clocks, memory layout and other programs. Noise within a run does not show these differences. With eight
runs or more, the spread between runs is known and is part of the interval. With fewer runs, the interval contains the
ratio of every new run to every old run. There is then no p-value, and a change below 10% is neither better nor worse.

This module also compares exact values, such as memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from statistics import NormalDist, fmean, median, stdev
from typing import NamedTuple

from fp8bench.analysis.verdicts import FINAL_LEVEL, SAME_BAND
from fp8bench.model import Direction, Interval, Noise
from fp8bench.model.specs import BAND
from fp8bench.units import percent

# The smallest change that a comparison of few runs can show, because those runs were measured at different times.
MIN_VISIBLE_FEW_RUNS_CHANGE = 0.10
# Limits for evaluating the continued fraction of Student's distribution.
_MIN_FRACTION_MAGNITUDE = 1e-300
_CONVERGENCE_TOLERANCE = 1e-15
_MAX_FRACTION_ITERATIONS = 1000
# With at least this many degrees of freedom, the spread between runs counts as known. With fewer, the spread is a
# guess, and Student's t makes the interval far too wide.
MIN_DEGREES_OF_FREEDOM = 6
# Exact values are equal whenever the same code runs. They may still differ by this share, because stored numbers have
# few digits.
STORED_DIGITS_TOLERANCE = 1e-6


@dataclass(frozen=True)
class Estimate:
    """The logarithm of a run's figure, with its standard error within the run. An exact figure has error 0."""

    log: float
    error: float


@dataclass(frozen=True)
class RunDifference:
    """The ratio of the new side to the old side, with its interval. `p_value` is None if the spread between runs is
    unknown.
    """

    ratio: Interval
    p_value: float | None
    noise: Noise

    @property
    def is_spread_unknown(self) -> bool:
        return self.p_value is None


def compare_runs(old: Sequence[Estimate], new: Sequence[Estimate], extra: Sequence[Estimate] = ()) -> RunDifference:
    """Compares the mean over the runs of the new side with that of the old side. The `extra` runs only show how much
    runs of the same code differ.
    """
    mean_log_ratio = _mean_log(new) - _mean_log(old)
    error_within_runs = math.sqrt(_variance_of_mean(old) + _variance_of_mean(new))
    # The mean of each side is estimated from its runs, which costs one degree of freedom.
    degrees_of_freedom = sum(max(0, len(side) - 1) for side in (old, new, extra))
    if degrees_of_freedom < MIN_DEGREES_OF_FREEDOM:
        # 1. With few runs, the interval spans the ratios of all pairs of an old and a new run, each widened by the
        # noise within the runs.
        normal_quantile = NormalDist().inv_cdf((1 + FINAL_LEVEL) / 2)
        low, high = math.inf, -math.inf
        for old_run, new_run in product(old, new):
            pair_log_ratio = new_run.log - old_run.log
            half_width = normal_quantile * math.hypot(new_run.error, old_run.error)
            low, high = min(low, pair_log_ratio - half_width), max(high, pair_log_ratio + half_width)
        return RunDifference(
            _to_ratio_interval(mean_log_ratio, low, high), None, Noise(error_within_runs, 0, len(old), len(new))
        )
    # 2. With enough runs, use the spread between them and Student's t. The error is at least the error within runs,
    # because runs may agree by chance.
    squared_log_deviations = [
        *_squared_log_deviations(old),
        *_squared_log_deviations(new),
        *_squared_log_deviations(extra),
    ]
    pooled_variance = sum(squared_log_deviations) / degrees_of_freedom
    error_between_runs = math.sqrt(pooled_variance * (1 / len(old) + 1 / len(new)))
    error = max(error_between_runs, error_within_runs)
    if error:
        t_statistic = abs(mean_log_ratio) / error
    else:
        t_statistic = math.inf if mean_log_ratio else 0.0
    half_width = student_quantile(FINAL_LEVEL, degrees_of_freedom) * error
    noise = Noise(error, degrees_of_freedom, len(old), len(new))
    return RunDifference(
        _to_ratio_interval(mean_log_ratio, mean_log_ratio - half_width, mean_log_ratio + half_width),
        p_value(t_statistic, degrees_of_freedom),
        noise,
    )


def geometric_mean(side: Sequence[Estimate]) -> float:
    return math.exp(_mean_log(side))


def _mean_log(side: Sequence[Estimate]) -> float:
    return fmean(estimate.log for estimate in side)


def _variance_of_mean(side: Sequence[Estimate]) -> float:
    return sum(estimate.error**2 for estimate in side) / len(side) ** 2


def _squared_log_deviations(side: Sequence[Estimate]) -> list[float]:
    mean = _mean_log(side) if side else 0.0
    return [(estimate.log - mean) ** 2 for estimate in side]


def judge_difference(difference: RunDifference) -> tuple[Direction, str]:
    """Returns whether a change is better, worse, the same or UNSURE. Also returns the reason if it is UNSURE."""
    ratio = difference.ratio
    min_ratio_change = MIN_VISIBLE_FEW_RUNS_CHANGE if difference.is_spread_unknown else BAND
    if ratio.low > 1 and ratio.point > 1 + min_ratio_change:
        return Direction.WORSE, ""
    if ratio.high < 1 and ratio.point < 1 / (1 + min_ratio_change):
        return Direction.BETTER, ""
    if difference.is_spread_unknown:
        return Direction.UNSURE, (
            f"fewer than {MIN_DEGREES_OF_FREEDOM + 2} runs in all do not show how much runs differ; no change below "
            f"{percent(MIN_VISIBLE_FEW_RUNS_CHANGE, 0)} is judged: measure more runs, or duel"
        )
    if ratio.low > 1 - SAME_BAND and ratio.high < 1 + SAME_BAND:
        return Direction.SAME, ""
    return Direction.UNSURE, "runs of one side differ too much; measure more runs, or duel"


class FigureChange(NamedTuple):
    """The change of a figure from `before` to `after`. `ratio` is None if either value is 0 or not finite. `p_value`
    is None for exact values.
    """

    direction: Direction
    before: float
    after: float
    ratio: Interval | None = None
    p_value: float | None = None
    why: str = ""
    noise: Noise | None = None


def compare_exact_values(
    old: Sequence[float], new: Sequence[float], *, rounding: float = STORED_DIGITS_TOLERANCE
) -> FigureChange:
    """Compares values like memory and errors, which are equal whenever the same code runs. A relative difference of
    more than `rounding` is a change. If the values of one side vary, both sides are compared like noisy values.
    """
    # 1. NaN is worse than any number.
    has_nan = [any(map(math.isnan, side)) for side in (old, new)]
    old_value = math.nan if has_nan[0] else median(old)
    new_value = math.nan if has_nan[1] else median(new)
    if all(has_nan):
        return FigureChange(Direction.NONE, old_value, new_value, why="the figure is NaN on both sides")
    if any(has_nan):
        direction = Direction.WORSE if has_nan[1] else Direction.BETTER
        return FigureChange(direction, old_value, new_value, why="the figure is NaN on one side")
    # 2. Compare zero and infinite values without a ratio, because they have none.
    if old_value == new_value and not 0 < old_value < math.inf:
        return FigureChange(Direction.SAME, old_value, new_value)
    direction = Direction.WORSE if new_value > old_value else Direction.BETTER
    if not (0 < old_value < math.inf and 0 < new_value < math.inf):
        reason = "a change from or to zero or infinity has no ratio"
        return FigureChange(direction, old_value, new_value, why=reason)
    # 3. If an exact value differs between runs of one side, treat both sides as noisy.
    values_vary = any(max(side) > min(side) * (1 + STORED_DIGITS_TOLERANCE) for side in (old, new))
    if values_vary and all(0 < value < math.inf for value in (*old, *new)):
        old_estimates = [Estimate(math.log(value), 0.0) for value in old]
        new_estimates = [Estimate(math.log(value), 0.0) for value in new]
        difference = compare_runs(old_estimates, new_estimates)
        direction, reason = judge_difference(difference)
        old_value, new_value = geometric_mean(old_estimates), geometric_mean(new_estimates)
        return FigureChange(
            direction, old_value, new_value, difference.ratio, difference.p_value, reason, difference.noise
        )
    ratio = new_value / old_value
    if abs(ratio - 1) <= rounding:
        direction = Direction.SAME
    return FigureChange(direction, old_value, new_value, Interval(ratio, ratio, ratio, 1.0))


def mean_with_half_width(values: Sequence[float]) -> tuple[float, float]:
    """Returns the mean of at least two values, and the half-width of the mean's interval by Student's t."""
    return fmean(values), student_quantile(FINAL_LEVEL, len(values) - 1) * stdev(values) / math.sqrt(len(values))


def _to_ratio_interval(*logs: float) -> Interval:
    """Makes an interval from the logarithms of its point, its low end and its high end. They are clipped, because
    math.exp overflows for large numbers.
    """
    point, low, high = (math.exp(min(log, 700.0)) for log in logs)
    return Interval(point, low, high, FINAL_LEVEL)


def p_value(statistic: float, freedom: float) -> float:
    """Returns the probability that Student's t with these degrees of freedom is at least this far from 0."""
    if math.isinf(statistic):
        return 0.0
    return _incomplete_beta(freedom / 2, 0.5, freedom / (freedom + statistic * statistic))


@lru_cache(maxsize=2048)
def student_quantile(level: float, freedom: float) -> float:
    """Returns the number that the magnitude of Student's t exceeds with probability 1 - `level`.

    An example is 12.7 for 95% and 1 degree of freedom.
    """
    # Double the upper bound until it exceeds the quantile, then bisect.
    low, high = 0.0, 1.0
    while p_value(high, freedom) > 1 - level:
        high *= 2
    while high - low > 1e-10 * high:
        midpoint = (low + high) / 2
        low, high = (midpoint, high) if p_value(midpoint, freedom) > 1 - level else (low, midpoint)
    return high


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """Returns the regularised incomplete beta function, using its continued fraction where that converges fast."""
    if x <= 0 or x >= 1:
        return 0.0 if x <= 0 else 1.0
    # The continued fraction converges slowly for large x, so use the symmetry of the function.
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(b, a, 1 - x)
    log_beta_prefactor = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    return math.exp(log_beta_prefactor) * _evaluate_continued_fraction(a, b, x) / a


def _evaluate_continued_fraction(a: float, b: float, x: float) -> float:
    """Evaluates the fraction 1 / (1 + d1 / (1 + d2 / ...)) of the incomplete beta function by Lentz's method."""
    c, d = 1.0, 1 / _avoid_zero(1 - (a + b) * x / (a + 1))
    value = d
    for m in range(1, _MAX_FRACTION_ITERATIONS):
        even_numbered_term = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd_numbered_term = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even_numbered_term, odd_numbered_term):
            d = 1 / _avoid_zero(1 + term * d)
            c = _avoid_zero(1 + term / c)
            value *= c * d
        if abs(c * d - 1) < _CONVERGENCE_TOLERANCE:
            break
    return value


def _avoid_zero(value: float) -> float:
    # Lentz's method divides by these values.
    return value if abs(value) > _MIN_FRACTION_MAGNITUDE else _MIN_FRACTION_MAGNITUDE
