"""Ratios from `compare_runs`: within one run, across several runs, and their error rate."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy
from hypothesis import given
from hypothesis import strategies as st

from fp8bench.analysis.compare.interval import (
    Estimate,
    compare_exact_values,
    compare_runs,
    judge_difference,
    p_value,
    student_quantile,
)
from fp8bench.model import Direction
from tests.counts import for_each


def side(*values: float, error: float = 1e-4) -> list[Estimate]:
    return [Estimate(math.log(value), error) for value in values]


def test_one_run_each_has_no_p_value_and_shows_no_change_below_ten_percent() -> None:
    difference = compare_runs(side(1.0), side(1.09))
    assert difference.is_spread_unknown and difference.p_value is None
    assert difference.ratio.point == pytest.approx(1.09) and difference.ratio.low > 1.08
    assert judge_difference(difference)[0] is Direction.UNSURE
    assert judge_difference(compare_runs(side(1.0), side(1.12)))[0] is Direction.WORSE
    assert judge_difference(compare_runs(side(1.12), side(1.0)))[0] is Direction.BETTER
    assert judge_difference(compare_runs(side(1.0), side(1.0)))[0] is Direction.UNSURE
    assert judge_difference(compare_runs(side(1.0, error=0.06), side(1.12, error=0.06)))[0] is Direction.UNSURE


def test_several_runs_are_compared_by_their_spread() -> None:
    before, after = (1.00, 1.02, 0.99, 1.01), (1.05, 1.06, 1.08, 1.04)
    difference = compare_runs(side(*before), side(*after))
    expected = scipy.stats.ttest_ind(np.log(after), np.log(before))
    assert difference.p_value == pytest.approx(expected.pvalue, rel=1e-6)
    interval = expected.confidence_interval(0.99)
    assert (difference.ratio.low, difference.ratio.high) == pytest.approx(tuple(np.exp(interval)), rel=1e-6)
    assert judge_difference(difference)[0] is Direction.WORSE
    # Four runs with one value each: zero spread between runs, but not within them.
    difference = compare_runs(side(*[1.0] * 4, error=0.03), side(*[1.03] * 4, error=0.03))
    assert difference.ratio.low < 1 < difference.ratio.high and difference.p_value is not None
    assert difference.p_value > 0.05
    tight = [1.0, 1.001, 0.999, 1.0]
    assert judge_difference(compare_runs(side(*tight), side(*tight)))[0] is Direction.SAME
    where, why = judge_difference(compare_runs(side(0.9, 1.1, 1.0, 1.05), side(1.0, 1.1, 0.95, 1.0)))
    assert where is Direction.UNSURE and "differ too much" in why


def test_few_runs_are_compared_pair_by_pair() -> None:
    # Fewer than eight runs: 1.2 against 1.0 and 1.05 gives an interval from 1.14 to 1.2.
    difference = compare_runs(side(1.0, 1.05, error=0.0), side(1.2, error=0.0))
    assert difference.is_spread_unknown
    assert (difference.ratio.low, difference.ratio.high) == (pytest.approx(1.2 / 1.05), pytest.approx(1.2))
    assert judge_difference(difference)[0] is Direction.WORSE
    assert judge_difference(compare_runs(side(1.0, 1.05), side(1.04, 1.12)))[0] is Direction.UNSURE
    assert judge_difference(compare_runs(side(1.0), side(2.9, 3.1)))[0] is Direction.WORSE
    before, after, beside = (1.00, 1.02, 0.99, 1.01), (1.05,), (2.0, 2.04, 1.97, 2.02)
    difference = compare_runs(side(*before), side(*after), side(*beside))
    groups = [np.log(one) for one in (before, beside)]
    pooled = sum(((group - group.mean()) ** 2).sum() for group in groups) / 6
    statistic = (np.log(1.05) - groups[0].mean()) / math.sqrt(pooled * (1 / 4 + 1))
    assert difference.p_value == pytest.approx(2 * scipy.stats.t.sf(statistic, 6), rel=1e-6)
    assert compare_runs(side(*before), side(*after)).is_spread_unknown


@given(st.floats(-60, 60), st.sampled_from([1.0, 2.0, 3.0, 4.0, 7.0, 18.0, 58.0, 1e4]))
def test_p_value(statistic: float, freedom: float) -> None:
    assert p_value(statistic, freedom) == pytest.approx(
        2 * scipy.stats.t.sf(abs(statistic), freedom), rel=1e-6, abs=1e-14
    )


@for_each("freedom", [1, 2, 3, 5, 10, 100])
@for_each("level", [0.5, 0.95, 0.99, 0.999])
def test_quantile(level: float, freedom: float) -> None:
    assert student_quantile(level, freedom) == pytest.approx(scipy.stats.t.ppf((1 + level) / 2, freedom), rel=1e-6)
    assert p_value(0.0, freedom) == pytest.approx(1.0) and p_value(math.inf, freedom) == 0.0


def test_varying_values_have_the_ratio_that_is_shown() -> None:
    said = compare_exact_values((1.0, 1.0, 4.0), (1.1, 1.1, 1.1))
    assert said.ratio.point < 1
    assert said.after / said.before == pytest.approx(said.ratio.point)
    assert compare_exact_values((2.0,), (3.0, 3.0))[1:3] == (2.0, 3.0)
