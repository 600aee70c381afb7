"""Estimators against scipy, against naive loops, and against known answers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from fp8bench import stats
from fp8bench.stats import Floats


def naive_walsh(values: Floats) -> list[float]:
    """All averages of pairs, each value with itself included."""
    return sorted((values[i] + values[j]) / 2 for i in range(len(values)) for j in range(i, len(values)))


def naive_minima(samples: Floats, draws: list[list[int]]) -> list[float]:
    """The bootstrap as one would write it down: resample the rounds, take each segment's minimum, add them up."""
    totals = []
    for drawn in draws:
        total = 0.0
        for segment in range(samples.shape[1]):
            total += min(samples[round_, segment] for round_ in drawn)
        totals.append(total)
    return totals


def presence(draws: list[list[int]], rounds: int) -> np.ndarray:
    present = np.zeros((len(draws), rounds), dtype=bool)
    for row, drawn in enumerate(draws):
        present[row, drawn] = True
    return present


def noisy(rng: np.random.Generator, best: float, *shape: int) -> Floats:
    """Times as a shared machine gives them: noise only adds."""
    return best * (1 + rng.exponential(0.1, shape))


@pytest.mark.parametrize("p", [1e-12, 1e-6, 0.001, 0.005, 0.025, 0.1, 0.3, 0.5, 0.7, 0.975, 0.995, 0.999999])
def test_normal_quantile_is_scipy_s(p: float) -> None:
    """Over everything a level could ask for."""
    assert stats.normal_quantile(p) == pytest.approx(scipy.stats.norm.ppf(p), rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("p", [0.0, 1.0, -0.1, 1.1, math.nan])
def test_normal_quantile_refuses_what_is_no_probability(p: float) -> None:
    """With the value in the sentence."""
    with pytest.raises(ValueError, match="0 < p < 1"):
        stats.normal_quantile(p)


@pytest.mark.parametrize("n", [1, 2, 10, 17, 40])
def test_hodges_lehmann_takes_its_point_and_bounds_from_the_walsh_averages(n: int) -> None:
    """The point is their median; bounds, where there are any, lie as far from both ends."""
    values = np.random.default_rng(n).normal(size=n)
    averages = naive_walsh(values)
    point, low, high = stats.hodges_lehmann(values, 0.99)
    assert point == float(np.median(averages))
    if n >= 10:
        assert averages.index(low) == len(averages) - 1 - averages.index(high)


@pytest.mark.parametrize("level", [0.9, 0.99])
@pytest.mark.parametrize("n", [12, 20, 30])
def test_hodges_lehmann_inverts_the_signed_rank_test(n: int, level: float) -> None:
    """A centre just outside the interval is rejected by scipy's exact test; one a rank or two inside is not."""
    values = np.random.default_rng(n).normal(0.3, size=n)
    averages = naive_walsh(values)
    _, low, high = stats.hodges_lehmann(values, level)

    def p_value(centre: float) -> float:
        return float(scipy.stats.wilcoxon(values - centre, method="exact").pvalue)

    rank = averages.index(low)
    outside = (averages[rank - 1] + low) / 2, (averages[-rank] + high) / 2
    inside = (averages[rank + 1] + averages[rank + 2]) / 2, (averages[-rank - 2] + averages[-rank - 3]) / 2
    assert all(p_value(centre) <= 1 - level for centre in outside)
    assert all(p_value(centre) > (1 - level) * 0.9 for centre in inside)


@pytest.mark.parametrize("n", [1, 2, 5, 9])
def test_too_few_values_have_no_bounds(n: int) -> None:
    """They are infinite rather than a guess; ten values are enough at 99%."""
    point, low, high = stats.hodges_lehmann(np.arange(n, dtype=float), 0.99)
    assert (point, low, high) == ((n - 1) / 2, -math.inf, math.inf)
    assert math.isfinite(stats.hodges_lehmann(np.arange(10.0), 0.99)[1])


def test_a_wider_level_needs_more_values() -> None:
    """What is enough for 90% is not for 99.8%."""
    values = np.arange(10.0)
    assert math.isfinite(stats.hodges_lehmann(values, 0.9)[1])
    assert stats.hodges_lehmann(values, 0.998)[1] == -math.inf


def test_many_values_are_thinned_evenly() -> None:
    """Of 1000 values 400 are used, first and last among them; the answer hardly moves."""
    values = np.random.default_rng(0).normal(5.0, 1.0, 1000)
    chosen = values[np.linspace(0, 999, 400).astype(int)]
    assert stats.hodges_lehmann(values, 0.99) == stats.hodges_lehmann(chosen, 0.99)
    assert stats.hodges_lehmann(values, 0.99)[0] == pytest.approx(values.mean(), abs=0.15)


def test_paired_ratio_of_a_constant_factor_is_exact() -> None:
    """However the pairs themselves go up and down."""
    reference = np.array([1.0, 4.0, 2.0, 8.0] * 5)
    found = stats.paired_ratio(reference * 2, [reference])
    assert found.point == pytest.approx(2.0, rel=1e-14)
    assert found.low == pytest.approx(2.0, rel=1e-14) and found.high == pytest.approx(2.0, rel=1e-14)
    assert found.level == 0.99


def test_paired_ratio_takes_the_median_of_averaged_log_ratios() -> None:
    """Known by hand: ratios 1, 1, 1 and 16 average pairwise to 1 six times and to 4 thrice, and 16 once."""
    found = stats.paired_ratio(np.array([1.0, 1.0, 1.0, 16.0]), [np.ones(4)])
    assert found.point == pytest.approx(1.0)
    assert (found.low, found.high) == (0.0, math.inf)
    assert found.half_width == math.inf


def test_several_references_count_by_their_geometric_mean() -> None:
    """References of 1 and 4 are a reference of 2, for either estimator."""
    case, one = np.full((12, 1), 6.0), np.full((12, 1), 1.0)
    paired = stats.paired_ratio(case[:, 0], [one[:, 0], one[:, 0] * 4])
    for found in (paired, stats.segment_ratio(case, [one, one * 4])):
        assert [found.low, found.point, found.high] == pytest.approx([3.0, 3.0, 3.0], rel=1e-14)


@pytest.mark.parametrize("factor", [1e-9, 1e9])
def test_wide_ratios_stay_finite(factor: float) -> None:
    """Nanoseconds against seconds."""
    reference = noisy(np.random.default_rng(1), 1.0, 20)
    paired = stats.paired_ratio(reference * factor, [reference])
    by_segment = stats.segment_ratio(reference[:, None] * factor, [reference[:, None]])
    for found in (paired, by_segment):
        assert found.point == pytest.approx(factor)
        assert 0 < found.low <= found.point <= found.high < math.inf


@pytest.mark.parametrize("level", [0.9, 0.99])
def test_paired_ratio_covers_as_often_as_it_says(level: float) -> None:
    """300 simulated groups of 16 rounds, with noise on both sides."""
    rng = np.random.default_rng(2)
    covered = 0
    for _ in range(300):
        shared = rng.normal(0, 0.3, 16)
        case = np.exp(math.log(1.05) + shared + rng.normal(0, 0.05, 16))
        found = stats.paired_ratio(case, [np.exp(shared + rng.normal(0, 0.05, 16))], level)
        covered += found.low <= 1.05 <= found.high
    assert level - 0.03 <= covered / 300 <= level + 0.06


@pytest.mark.parametrize(("rounds", "segments"), [(1, 1), (5, 3), (24, 2), (25, 2), (60, 3)])
def test_resampled_minima_are_the_naive_bootstrap_s_bit_for_bit(rounds: int, segments: int) -> None:
    """The same draws, the same sums in the same order."""
    rng = np.random.default_rng(rounds)
    samples = noisy(rng, 1e-3, rounds, segments)
    draws = rng.integers(0, rounds, (50, rounds)).tolist()
    found = stats._resampled_minima(samples, presence(draws, rounds))
    assert found.tolist() == naive_minima(samples, draws)


def test_resamples_that_miss_all_of_the_fastest_rounds_are_still_right() -> None:
    """The short cut looks at the 24 fastest; here they are never drawn, or only the last of them is."""
    rng = np.random.default_rng(3)
    samples = noisy(rng, 1.0, 40, 2)
    ranking = np.argsort(samples[:, 0])
    draws = [[int(ranking[30])], [int(ranking[24])] * 3, [int(ranking[23])], ranking[24:].tolist(), [int(ranking[39])]]
    found = stats._resampled_minima(samples, presence(draws, 40))
    assert found.tolist() == naive_minima(samples, draws)


def test_equal_values_do_not_disturb_the_minima() -> None:
    """Ties are drawn or missed as one."""
    samples = np.array([[1.0], [1.0], [2.0], [2.0], [3.0]])
    draws = [[2, 4], [1, 3], [4], [3, 3]]
    assert stats._resampled_minima(samples, presence(draws, 5)).tolist() == [2.0, 1.0, 3.0, 2.0]


def test_segment_ratio_is_the_naive_bootstrap_s() -> None:
    """Point and bounds, from the same draws for case and reference."""
    rng = np.random.default_rng(4)
    case, one, other = (noisy(rng, best, 12, 3) for best in (1.1, 1.0, 1.0))
    found = stats.segment_ratio(case, [one, other], 0.99, seed=7)
    draws = np.random.default_rng(7).integers(0, 12, (stats.BOOTSTRAPS, 12)).tolist()
    cases, ones, others = (np.log(naive_minima(samples, draws)) for samples in (case, one, other))
    low, high = np.quantile(cases - (ones + others) / 2, [0.005, 0.995])
    sums = [samples.min(axis=0).sum() for samples in (case, one, other)]
    point = math.log(sums[0]) - (math.log(sums[1]) + math.log(sums[2])) / 2
    assert math.log(found.point) == pytest.approx(point, abs=1e-12)
    assert math.log(found.low) == pytest.approx(min(low, point), abs=1e-12)
    assert math.log(found.high) == pytest.approx(max(high, point), abs=1e-12)


def test_segment_ratio_adds_the_best_of_each_segment() -> None:
    """No single round was best in both segments, yet the sum of the best is 3."""
    case = np.array([[1.0, 9.0], [9.0, 2.0]])
    reference = np.array([[1.0, 2.0], [5.0, 5.0]])
    assert stats.segment_ratio(case, [reference]).point == pytest.approx(1.0, rel=1e-14)
    assert stats.best_by_segment(case).tolist() == [1.0, 2.0]


def test_segment_ratio_allows_each_arm_its_own_segments() -> None:
    """A case that casts has more cells than a reference that does not."""
    found = stats.segment_ratio(np.full((8, 3), 2.0), [np.full((8, 2), 1.0)])
    assert found.point == pytest.approx(3.0) and found.low == pytest.approx(3.0)


def test_the_point_lies_in_the_interval_even_where_no_resample_reaches_it() -> None:
    """Each segment was fast in a round of its own: all twelve are never drawn together."""
    found = stats.segment_ratio(2 - np.eye(12), [np.ones((12, 12))])
    assert found.low == found.point == pytest.approx(1.0)
    assert found.high > 1.2


@given(st.integers(0, 1000))
def test_segment_ratio_is_deterministic_and_holds_its_point(seed: int) -> None:
    """Judging the same samples twice gives the same verdict."""
    rng = np.random.default_rng(seed)
    case, reference = noisy(rng, 1.0, 10, 1), noisy(rng, 1.0, 10, 1)
    found = stats.segment_ratio(case, [reference])
    assert found == stats.segment_ratio(case, [reference])
    assert found.low <= found.point <= found.high


def test_segment_ratio_rarely_misses_a_truth_that_noise_only_adds_to() -> None:
    """100 simulated groups of 32 rounds of 20 segments, at 99%."""
    rng = np.random.default_rng(5)
    covered = 0
    for _ in range(100):
        case, one, other = (noisy(rng, best, 32, 20) for best in (1.03, 1.0, 1.0))
        found = stats.segment_ratio(case, [one, other])
        covered += found.low <= 1.03 <= found.high
    assert covered >= 97


def test_rank_correlation_is_spearman_s() -> None:
    """Ties included: they share their mean rank instead of counting as a rise."""
    rng = np.random.default_rng(6)
    for values in (rng.normal(size=30), rng.integers(0, 4, 30).astype(float), np.array([1.0] * 9 + [2.0])):
        expected = scipy.stats.spearmanr(values, np.arange(len(values))).statistic
        assert stats.rank_correlation(values) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("values", "expected"),
    [([], 0.0), ([1.0, 2.0], 0.0), ([5.0] * 20, 0.0), ([1.0, 2.0, 3.0], 1.0), ([3.0, 2.0, 1.0], -1.0)],
)
def test_rank_correlation_of_little_or_nothing_is_zero(values: list[float], expected: float) -> None:
    """Fewer than three values and constants say nothing; monotone ones everything."""
    assert stats.rank_correlation(np.array(values)) == pytest.approx(expected, abs=1e-15)


def test_spread_is_the_relative_distance_of_the_quartiles() -> None:
    """By hand: quartiles 2 and 4 about 3."""
    assert stats.spread(np.array([1.0, 2.0, 3.0, 4.0, 5.0])) == pytest.approx(2 / 3)
    assert stats.spread(np.zeros(4)) == 0.0


@pytest.mark.parametrize(
    ("values", "explained", "lesser"),
    [
        ([1.0] * 5 + [2.0] * 5, 1.0, 0.5),
        ([2.0, 1.0] * 4 + [1.0] * 2, 1.0, 0.4),
        ([1.0] * 9 + [2.0], 1.0, 0.1),
        ([1.0] * 12, 0.0, 0.0),
        ([1.0, 2.0] * 3, 0.0, 0.0),
    ],
)
def test_split_gap_of_known_clusters(values: list[float], explained: float, lesser: float) -> None:
    """Two values split cleanly; constants and fewer than eight values do not split."""
    assert stats.split_gap(np.array(values)) == (pytest.approx(explained), pytest.approx(lesser))


def test_split_gap_finds_the_best_of_all_splits() -> None:
    """Against a loop over every split."""
    values = np.sort(np.random.default_rng(8).normal(size=25))
    total = ((values - values.mean()) ** 2).sum()
    within = [((part - part.mean()) ** 2).sum() for at in range(1, 25) for part in (values[:at], values[at:])]
    best = min(range(24), key=lambda at: within[2 * at] + within[2 * at + 1])
    explained = 1 - (within[2 * best] + within[2 * best + 1]) / total
    assert stats.split_gap(values) == (pytest.approx(explained), min(best + 1, 24 - best) / 25)


def test_one_cluster_with_a_tail_is_not_two_modes() -> None:
    """Uniform values split three quarters at best."""
    explained, _ = stats.split_gap(np.linspace(1, 2, 40))
    assert explained == pytest.approx(0.75, abs=0.01)
