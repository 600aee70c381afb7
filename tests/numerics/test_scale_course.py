"""Drift and lag of scales."""

from __future__ import annotations

import math

import pytest

from fp8bench.formats.grids import E4M3
from fp8bench.numerics.figures import scale_course


def test_a_current_scale_does_not_lag() -> None:
    """It uses the format to its largest value at each step, and drifts as the data do."""
    amaxes = [1.0, 4.0, 2.0, 2.0]
    course = scale_course([448 / one for one in amaxes], amaxes, E4M3)
    assert course.drift == (2.0, 1.0, 0.0) and course.lag == (0.0, 0.0, 0.0, 0.0)
    assert (course.most_drift, course.most_lag) == (2.0, 0.0)


def test_a_scale_of_the_step_before_lags() -> None:
    """Twice too large means an octave of overflow, a quarter means two octaves that lie idle."""
    course = scale_course([448.0, 448.0, 224.0], [1.0, 2.0, 0.5], E4M3)
    assert course.lag == (0.0, 1.0, -2.0) and course.drift == (0.0, 1.0)
    assert (course.most_drift, course.most_lag) == (1.0, 1.0)


def test_what_never_overflows_has_a_negative_lag() -> None:
    """A margin of an octave is one."""
    course = scale_course([224.0, 224.0], [1.0, 0.5], E4M3)
    assert course.lag == (-1.0, -2.0) and course.most_lag == -1.0


def test_what_has_no_logarithm_is_left_out() -> None:
    """An amax of 0, and scales that are none."""
    course = scale_course([1.0, 0.0, math.inf, 1.0], [0.0, 1.0, 1.0, 448.0], E4M3)
    assert course.drift == () and course.lag == (0.0,)


@pytest.mark.parametrize("scales", [[], [2.0]])
def test_a_course_of_at_most_one_step_has_no_drift(scales: list[float]) -> None:
    """And of none, no lag."""
    course = scale_course(scales, [448.0] * len(scales), E4M3)
    assert course.most_drift == 0 and course.most_lag == len(scales)


def test_steps_must_agree() -> None:
    with pytest.raises(ValueError, match="2 scales cannot be those of 1 steps"):
        scale_course([1.0, 1.0], [1.0], E4M3)
