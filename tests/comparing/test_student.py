"""Student's t against scipy's."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fp8bench.comparing.student import p_value, quantile


@given(st.floats(-60, 60), st.sampled_from([1.0, 2.0, 3.0, 4.0, 7.0, 18.0, 58.0, 1e4]))
def test_p_value(statistic: float, freedom: float) -> None:
    """Both tails together."""
    assert p_value(statistic, freedom) == pytest.approx(2 * stats.t.sf(abs(statistic), freedom), rel=1e-6, abs=1e-14)


@pytest.mark.parametrize("freedom", [1, 2, 3, 5, 10, 100])
@pytest.mark.parametrize("level", [0.5, 0.95, 0.99, 0.999])
def test_quantile(level: float, freedom: float) -> None:
    """What holds the share `level` between it and its negative."""
    assert quantile(level, freedom) == pytest.approx(stats.t.ppf((1 + level) / 2, freedom), rel=1e-6)


def test_the_ends() -> None:
    """No difference has p = 1, an infinite one none."""
    assert p_value(0.0, 3) == pytest.approx(1.0) and p_value(math.inf, 3) == 0.0
