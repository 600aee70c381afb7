"""Estimators against naive loops, against scipy, and against known answers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import scipy

from fp8bench.analysis import stats
from fp8bench.analysis.stats import FloatArray
from fp8bench.model import Interval
from tests.counts import for_each, sampled


def naive_best(samples: FloatArray, drawn: Sequence[int]) -> float:
    """The direct form: average each segment's fastest quarter of the drawn rounds, then add up."""
    total, many = 0.0, max(3, len(drawn) // 4)
    for segment in range(samples.shape[1]):
        fastest = sorted(samples[round_, segment] for round_ in drawn)[:many]
        total += sum(fastest) / len(fastest)
    return total


def counts(draws: Sequence[Sequence[int]], rounds: int) -> np.ndarray:
    return np.array([np.bincount(drawn, minlength=rounds) for drawn in draws], dtype=np.float32).T


def noisy(rng: np.random.Generator, best: float, *shape: int) -> FloatArray:
    """Times on a shared machine: noise only adds."""
    return best * (1 + rng.exponential(0.1, shape))


def ratio(case: FloatArray, references: Sequence[FloatArray], level: float = 0.99) -> Interval:
    return stats.ratio(
        stats.resample_best_case(case), [stats.resample_best_case(reference) for reference in references], level
    )


@for_each("factor", [1e-9, 1e9])
def test_wide_ratios_stay_finite(factor: float) -> None:
    reference = noisy(np.random.default_rng(1), 1.0, 20, 1)
    found = ratio(reference * factor, [reference])
    assert found.point == pytest.approx(factor)
    assert 0 < found.low <= found.point <= found.high < math.inf


def resampled_best(samples: stats.FloatArray, draws: stats.Counts) -> stats.FloatArray:
    fastest = stats.count_fastest_rounds(len(samples))
    sums = [stats._sum_fastest_rounds(segment, draws, fastest) for segment in samples.T]
    best: stats.FloatArray = np.sum(sums, axis=0) / fastest
    return best


def test_resamples_that_miss_the_fastest_rounds_are_still_right() -> None:
    rng = np.random.default_rng(3)
    samples = noisy(rng, 1.0, 40, 2)
    ranking = np.argsort(samples[:, 0])
    draws = [
        [int(ranking[30])] * 40,
        [*ranking[30:].tolist()] * 4,
        [int(ranking[28])] * 4 + [int(ranking[35])] * 36,
        [int(ranking[0]), int(ranking[1]), *[int(ranking[39])] * 38],
    ]
    found = resampled_best(samples, counts(draws, 40))
    assert found.tolist() == pytest.approx([naive_best(samples, drawn) for drawn in draws], rel=1e-14)


@for_each("rounds", [1, 2])
def test_fewer_than_three_rounds_all_count(rounds: int) -> None:
    samples = np.arange(1.0, rounds + 1)[:, None]
    found = stats.resample_best_case(samples)
    assert math.exp(found.point) == pytest.approx(samples.mean())
    assert math.exp(found.resampled_values.max()) <= rounds + 1e-12


def test_the_interval_equals_that_of_a_naive_bootstrap() -> None:
    rng = np.random.default_rng(4)
    arms = [noisy(rng, best, 12, 3) for best in (1.1, 1.0, 1.0)]
    drawn = np.random.default_rng(0).multinomial(12, np.full(12, 1 / 12), stats.RESAMPLE_COUNT)
    draws = [np.repeat(np.arange(12), row).tolist() for row in drawn.astype(int)]
    logs = [np.log([naive_best(samples, one) for one in draws]) for samples in arms]
    low, high = np.quantile(logs[0] - (logs[1] + logs[2]) / 2, [0.005, 0.995])
    points = [math.log(naive_best(samples, range(12))) for samples in arms]
    point = points[0] - (points[1] + points[2]) / 2
    found = ratio(arms[0], arms[1:])
    assert math.log(found.point) == pytest.approx(point, abs=1e-12)
    assert math.log(found.low) == pytest.approx(min(low, point), abs=1e-12)
    assert math.log(found.high) == pytest.approx(max(high, point), abs=1e-12)


def test_arms_of_other_segments_and_a_point_that_no_resample_reaches() -> None:
    found = ratio(np.full((8, 3), 2.0), [np.full((8, 2), 1.0)])
    assert found.point == pytest.approx(3.0) and found.low == pytest.approx(3.0)
    # The segments were fast in different rounds, which are never all drawn together.
    samples = np.full((36, 4), 2.0)
    for segment in range(4):
        samples[9 * segment : 9 * segment + 9, segment] = 1.0
    found = ratio(samples, [np.ones((36, 4))])
    assert found.low == found.point == pytest.approx(1.0)
    assert found.high > 1.05


@pytest.mark.parametrize(("segments", "sided"), sampled([1], [(20, 1), (1, 1), (1, 2)]))
def test_the_interval_rarely_misses_the_truth(segments: int, sided: int) -> None:
    rng = np.random.default_rng(5)
    covered = 0
    for _ in range(100):
        if sided == 1:
            arms = [noisy(rng, best, 32, segments) for best in (1.03, 1.0, 1.0)]
        else:
            arms = [best * np.exp(rng.normal(0, 0.03, (32, segments))) for best in (1.03, 1.0, 1.0)]
        found = ratio(arms[0], arms[1:])
        covered += found.low <= 1.03 <= found.high
    assert covered >= 95


def test_rank_correlation_spread_and_split_against_others() -> None:
    rng = np.random.default_rng(6)
    for values in (rng.normal(size=30), rng.integers(0, 4, 30).astype(float), np.array([1.0] * 9 + [2.0])):
        expected = scipy.stats.spearmanr(values, np.arange(len(values))).statistic
        assert stats.correlate_ranks(values) == pytest.approx(expected, abs=1e-12)
    for little in ([], [1.0, 2.0], [5.0] * 20):
        assert stats.correlate_ranks(np.array(little)) == 0.0
    assert stats.relative_quartile_spread(np.array([1.0, 2.0, 3.0, 4.0, 5.0])) == pytest.approx(2 / 3)
    assert stats.relative_quartile_spread(np.zeros(4)) == 0.0
    values = np.sort(np.random.default_rng(8).normal(size=25))
    total = ((values - values.mean()) ** 2).sum()
    within = [((part - part.mean()) ** 2).sum() for at in range(1, 25) for part in (values[:at], values[at:])]
    best = min(range(24), key=lambda at: within[2 * at] + within[2 * at + 1])
    explained = 1 - (within[2 * best] + within[2 * best + 1]) / total
    assert stats.split_into_two_clusters(values) == (pytest.approx(explained), best + 1)


@for_each(
    ("values", "explained", "lesser"),
    [
        ([1.0] * 5 + [2.0] * 5, 1.0, 0.5),
        ([2.0, 1.0] * 4 + [1.0] * 2, 1.0, 0.4),
        ([1.0] * 9 + [2.0], 1.0, 0.1),
        ([1.0] * 12, 0.0, 0.0),
        ([1.0, 2.0] * 3, 0.0, 0.0),
    ],
)
def test_best_split_of_known_clusters(values: list[float], explained: float, lesser: float) -> None:
    share, below = stats.split_into_two_clusters(np.sort(np.array(values)))
    assert share == pytest.approx(explained)
    assert min(below, len(values) - below) == pytest.approx(lesser * len(values))
