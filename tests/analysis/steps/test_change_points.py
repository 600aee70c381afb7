"""Steps are found where they were planted, and nowhere else."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fp8bench.analysis.stats import FloatArray
from fp8bench.analysis.steps.change_points import MIN_SERIES_LENGTH, SeriesValues, Step, find_level_steps
from tests.counts import for_each


def noisy(seed: int, series: int, count: int = 60) -> FloatArray:
    found: FloatArray = np.exp(0.02 * np.random.default_rng(seed).normal(size=(series, count)))
    return found


def steps_of(values: SeriesValues) -> tuple[Step, ...]:
    return find_level_steps([values])[0]


def test_a_step_of_5_percent_is_found_soon() -> None:
    for after, least in ((3, 0.5), (5, 0.85)):
        series = noisy(after, 400)
        series[:, -after:] *= 1.05
        hits = [
            any(abs(step.at - (60 - after)) <= 3 and step.after > step.before for step in steps)
            for steps in many(series)
        ]
        assert np.mean(hits) >= least


def many(series: FloatArray) -> list[tuple[Step, ...]]:
    return find_level_steps(list(series))


def test_flat_series_rarely_have_steps_and_p_values_are_not_too_small() -> None:
    # The expected share is at most 1%; 25 of 1,000 is beyond chance.
    assert sum(bool(steps) for steps in many(noisy(0, 1000))) < 25
    # Of 3,000 flat series, the share with a step matches the stated probability, within chance.
    least = np.array([min((step.p_value for step in steps), default=1.0) for steps in many(noisy(13, 3000))])
    for chance, most in ((0.01, 45), (0.002, 15), (0.0005, 8)):
        assert np.sum(least <= chance) <= most


def test_a_p_value_is_that_of_students_t_less_what_the_lengths_of_two_levels_cost() -> None:
    # The residuals of both levels alternate, which only makes the noise smaller: no correction for autocorrelation.
    before, after = 40, 20
    logs = np.where(np.arange(before + after) % 2, -0.01, 0.01)
    logs[before:] += 0.02
    (step,) = steps_of(np.exp(logs).tolist())
    assert step.at == before
    # 1. Compute t of the difference between both means, and a Gaussian deviation that is as rare.
    freedom = before + after - 2
    noise = math.sqrt((before + after) * 0.01**2 / freedom)
    t = 0.02 / (noise * math.sqrt(1 / before + 1 / after))
    deviation = stats.norm.isf(stats.t.sf(t, freedom))
    # 2. Subtract the price of two levels' lengths over one level's, in units of the shortest level.
    price = 2.0 * (math.log(before / 3) + math.log(after / 3) - math.log((before + after) / 3))
    discounted = 0.8 * math.sqrt(deviation**2 - price)
    assert step.p_value == pytest.approx(2 * stats.norm.sf(discounted), rel=0.02)


def test_searching_series_one_by_one_gives_the_same_steps() -> None:
    series = [
        row[: 8 + number] * np.where(np.arange(8 + number) < 9, 1, 1.3) for number, row in enumerate(noisy(1, 50))
    ]
    assert find_level_steps(series) == [steps_of(one) for one in series]


@for_each("values", [[], [1.0], [1.0] * (MIN_SERIES_LENGTH - 1), [1.0] * 200])
def test_these_series_have_no_step(values: list[float]) -> None:
    assert steps_of(values) == ()


@for_each("wrong", [0.0, -1.0, float("nan"), float("inf")])
def test_values_without_a_logarithm_are_refused(wrong: float) -> None:
    with pytest.raises(ValueError, match="positive and finite"):
        steps_of([1.0] * 20 + [wrong])


def test_a_step_has_its_place_size_and_certainty_in_both_directions() -> None:
    values = noisy(3, 1, 80)[0]
    values[50:] *= 1.2
    (step,) = steps_of(values)
    assert step.low < 50 <= step.high and step.high - step.low <= 3 and step.low < step.at <= step.high
    assert step.before == pytest.approx(1.0, abs=0.02) and step.after == pytest.approx(1.2, abs=0.02)
    assert step.ratio.low < 1.2 < step.ratio.high and step.ratio.high / step.ratio.low < 1.05
    assert step.ratio.point == pytest.approx(step.after / step.before) and step.p_value < 1e-9
    values = np.repeat([1.0, 1.1, 1.05, 0.9], 20) * noisy(5, 1, 80)[0] ** 0.5
    steps = steps_of(values)
    assert len(steps) == 4 - 1 and all(abs(one.at - place) <= 2 for one, place in zip(steps, (20, 40, 60), strict=True))
    assert [step.after > step.before for step in steps] == [True, False, False]
    assert all(one.after == other.before for one, other in itertools.pairwise(steps))


def test_ranges_contain_the_true_index() -> None:
    series = noisy(4, 300)
    series[:, 50:] *= 1.05
    found = [steps[0] for steps in many(series) if len(steps) == 1]
    assert len(found) > 250 and np.mean([one.low < 50 <= one.high for one in found]) >= 0.9


@for_each("place", [0, 20, 45, 57, 58, 59])
@for_each("factor", [0.5, 1.3, 10.0])
def test_a_single_outlier_is_not_a_step(place: int, factor: float) -> None:
    series = noisy(6, 300)
    series[:, place] *= factor
    assert sum(bool(steps) for steps in many(series)) < 15


def test_two_outliers_are_not_a_level_and_hide_no_step() -> None:
    series = noisy(7, 300)
    series[:, 30:32] *= 1.5
    assert sum(bool(steps) for steps in many(series)) < 15
    series[:, 57:] *= 1.2
    assert sum(any(step.at == 57 for step in steps) for steps in many(series)) > 290
    series = noisy(8, 300)
    series[:, 50:] *= 1.1
    series[:, 54] *= 3
    assert sum(any(abs(step.at - 50) <= 3 for step in steps) for steps in many(series)) > 290
    series = noisy(9, 300)
    series[:, 20:26] *= 1.2
    series[:, 45:] *= 1.05
    assert sum(any(abs(step.at - 45) <= 4 for step in steps) for steps in many(series)) > 270


def test_exact_figures_step_by_any_amount() -> None:
    values = np.repeat([1.0, 1.001, 1.0005, 3e7, 1e-9], 10)
    assert [(one.low, one.at, one.high) for one in steps_of(values)] == [(n - 1, n, n) for n in (10, 20, 30, 40)]
    values[15] = 7.0
    assert [one.at for one in steps_of(values)] == [10, 20, 30, 40]
    assert steps_of([1.0, 1.01] * 30) == ()
    rounded = np.round(np.random.default_rng(10).normal(100, 0.7, (500, 60)))
    assert sum(bool(steps) for steps in many(rounded)) < 15


def noise_of(kind: str, random: np.random.Generator, shape: tuple[int, int] = (500, 60)) -> FloatArray:
    if kind == "heavy tails":
        return random.standard_t(3, size=shape) / 3**0.5
    if kind == "bad nights":
        return random.normal(size=shape) + (random.random(shape) < 0.05) * random.exponential(8, size=shape)
    if kind == "one-sided":
        return random.exponential(size=shape)
    noise = random.normal(size=shape)
    for night in range(1, shape[1]):
        noise[:, night] = 0.3 * noise[:, night - 1] + (1 - 0.3**2) ** 0.5 * noise[:, night]
    return noise


@for_each("kind", ["heavy tails", "bad nights", "one-sided", "a memory"])
def test_noise_of_other_kinds(kind: str) -> None:
    series = np.exp(0.02 * noise_of(kind, np.random.default_rng(11)))
    assert sum(bool(steps) for steps in many(series)) < 40
    series[:, 55:] *= 1.1
    assert sum(any(abs(step.at - 55) <= 3 for step in steps) for steps in many(series)) > 450


@given(st.lists(st.floats(1e-9, 1e9), max_size=40))
def test_any_values_give_valid_steps(values: list[float]) -> None:
    steps = steps_of(values)
    places = [step.at for step in steps]
    assert places == sorted(set(places))
    for one in steps:
        assert 0 <= one.low < one.at <= one.high < len(values) and 0 <= one.p_value <= 1


@for_each("unit", [1e-9, 3.0, 1e12])
def test_the_unit_does_not_change_the_steps(unit: float) -> None:
    series = noisy(12, 50)
    series[:, 40:] *= 1.1
    places = [[step.at for step in steps] for steps in many(series)]
    assert any(places) and [[step.at for step in steps] for steps in many(series * unit)] == places
