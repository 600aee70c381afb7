"""Steps are found where they were planted, and nowhere else; suites/change_points.py counts that in thousands."""

from __future__ import annotations

import numpy as np
import pytest

from fp8bench.analysis.change_points import LEAST_VALUES, Step, steps_of, steps_of_many
from fp8bench.stats import Floats


def noisy(seed: int, series: int, count: int = 60) -> Floats:
    """Flat series with Gaussian noise of 2%."""
    found: Floats = np.exp(0.02 * np.random.default_rng(seed).normal(size=(series, count)))
    return found


def test_a_step_of_5_percent_is_found_soon() -> None:
    """Of 400 series each; the margin is several times what chance makes of 67% and 93%."""
    for after, least in ((3, 0.5), (5, 0.85)):
        series = noisy(after, 400)
        series[:, -after:] *= 1.05
        hits = [
            any(abs(step.at - (60 - after)) <= 3 and step.after > step.before for step in steps)
            for steps in many(series)
        ]
        assert np.mean(hits) >= least


def many(series: Floats) -> list[tuple[Step, ...]]:
    """All rows at once."""
    return steps_of_many(list(series))


def test_flat_series_rarely_alarm() -> None:
    """At most 1% do; of 1,000 series hardly ever 25."""
    assert sum(bool(steps) for steps in many(noisy(0, 1000))) < 25


def test_one_by_one_is_the_same() -> None:
    """Of different lengths too."""
    series = [
        row[: 8 + number] * np.where(np.arange(8 + number) < 9, 1, 1.3) for number, row in enumerate(noisy(1, 50))
    ]
    assert steps_of_many(series) == [steps_of(one) for one in series]


@pytest.mark.parametrize("values", [[], [1.0], [1.0] * (LEAST_VALUES - 1), [1.0] * 200])
def test_what_has_no_step(values: list[float]) -> None:
    """Too short, or all the same."""
    assert steps_of(values) == ()


@pytest.mark.parametrize("wrong", [0.0, -1.0, float("nan"), float("inf")])
def test_what_has_no_logarithm_is_refused(wrong: float) -> None:
    """Rather than giving a level that is none."""
    with pytest.raises(ValueError, match="above 0"):
        steps_of([1.0] * 20 + [wrong])
