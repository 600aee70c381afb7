"""The ratio of two sides that were measured at different times, with an interval that knows it.

Where a side has several runs, how far they lie apart is in the interval: noise within a run says nothing about the next
run's clocks, memory layout and neighbours. Where each side has one run, nobody knows that spread: the interval is of
the noise within the runs, there is no p-value, and nothing below 10% is called better or worse.
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
# What one stored number against another may say: their runs were made at different times.
ALONE = 0.10


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
        """Whether each side has one run only."""
        return self.p_value is None


def across(before: Sequence[Estimate], after: Sequence[Estimate], level: float = FINAL_LEVEL) -> Difference:
    """Hold the mean of one side's runs against that of the other's."""
    point = fmean(one.log for one in after) - fmean(one.log for one in before)
    within = math.sqrt(sum(_mean_variance(side) for side in (before, after)))
    freedom = len(before) + len(after) - 2
    if not freedom:
        reach = NormalDist().inv_cdf((1 + level) / 2) * within
        return Difference(_interval(point, reach, level), None)
    between = math.sqrt(_pooled_variance(before, after) * (1 / len(before) + 1 / len(after)))
    # Few runs may agree by chance, and are never surer than each of them is.
    error = max(between, within)
    statistic = abs(point) / error if error else math.inf if point else 0.0
    return Difference(_interval(point, quantile(level, freedom) * error, level), p_value(statistic, freedom))


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


def _interval(point: float, reach: float, level: float) -> Interval:
    return Interval(_exp(point), _exp(point - reach), _exp(point + reach), level)


def _exp(value: float) -> float:
    return math.exp(min(value, 700.0))


def _mean_variance(side: Sequence[Estimate]) -> float:
    return sum(one.error**2 for one in side) / len(side) ** 2


def _pooled_variance(before: Sequence[Estimate], after: Sequence[Estimate]) -> float:
    total = 0.0
    for side in (before, after):
        mean = fmean(one.log for one in side)
        total += sum((one.log - mean) ** 2 for one in side)
    return total / (len(before) + len(after) - 2)
