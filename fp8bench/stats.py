"""Estimators and intervals: numpy in, numbers out.

Two estimators of "how much slower is B than A", both for arms measured in the same rounds:

- `paired_ratio`: short operations. One value a slot (its fastest call), log-ratios by round, Hodges-Lehmann point,
  interval from the Walsh averages (the inverted signed-rank test).
- `segment_ratio`: long steps. The sum over segments of the minimum over rounds, for each arm, bootstrapped over
  rounds with the same rounds for both.

Both look at the fast end on purpose: on a shared machine noise almost only adds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fp8bench.model import Interval

Floats = NDArray[np.float64]

BOOTSTRAPS = 2000
_WALSH_CAP = 400


def normal_quantile(p: float) -> float:
    """The standard normal quantile (Hastings' rational form, then three Newton steps; error below 1e-12)."""
    if not 0 < p < 1:
        raise ValueError(f"a quantile needs 0 < p < 1, got {p}")
    if p > 0.5:
        return -normal_quantile(1 - p)
    t = math.sqrt(-2 * math.log(p))
    x = -(t - (2.515517 + 0.802853 * t + 0.010328 * t * t) / (1 + 1.432788 * t + 0.189269 * t * t + 0.001308 * t**3))
    for _ in range(3):
        error = 0.5 * math.erfc(-x / math.sqrt(2)) - p
        x -= error * math.sqrt(2 * math.pi) * math.exp(x * x / 2)
    return x


def hodges_lehmann(values: Floats, level: float) -> tuple[float, float, float]:
    """Point, low and high of the centre of `values` (symmetric about it), by Walsh averages.

    The ranks are the normal approximation's, which gives a 99% interval from 10 values on: with fewer the bounds are
    infinite. More than 400 values are thinned evenly, since the number of averages grows with the square.
    """
    if len(values) > _WALSH_CAP:
        values = values[np.linspace(0, len(values) - 1, _WALSH_CAP).astype(int)]
    n = len(values)
    rows, columns = np.triu_indices(n)
    averages = np.sort((values[rows] + values[columns]) / 2)
    point = float(np.median(averages))
    mean = n * (n + 1) / 4
    deviation = math.sqrt(n * (n + 1) * (2 * n + 1) / 24)
    tail = (1 - level) / 2
    rank = math.floor(mean + normal_quantile(tail) * deviation)
    # The least tail probability of the signed-rank test is 2**-n: below that no average bounds the centre.
    if rank < 1 or 0.5**n > tail:
        return point, -math.inf, math.inf
    return point, float(averages[rank - 1]), float(averages[-rank])


def paired_ratio(case: Floats, references: Sequence[Floats], level: float = 0.99) -> Interval:
    """Ratio case / reference of positive values paired by position.

    Several references of the same thing count by their geometric mean: two entries of the reference in the rounds
    make its share of the interval narrower, and average over their luck with memory layout.
    """
    reference = np.mean([np.log(one) for one in references], axis=0)
    point, low, high = hodges_lehmann(np.log(case) - reference, level)
    return Interval(math.exp(point), math.exp(low), math.exp(high) if high < 700 else math.inf, level)


def best_by_segment(samples: Floats) -> Floats:
    """The minimum of each segment over rounds; `samples` is (rounds, segments)."""
    least: Floats = samples.min(axis=0)
    return least


def segment_ratio(case: Floats, references: Sequence[Floats], level: float = 0.99, seed: int = 0) -> Interval:
    """Ratio of the sums of segment minima; rows are rounds, the same in all, columns the arm's own segments.

    Several references count by the geometric mean of their sums: pooling their rounds instead would give the
    reference more rounds to find a minimum in, and so a bias. A bootstrap of a minimum is not textbook-clean (a
    resample's minimum is never below the sample's); in a ratio the bias cancels, and the self-test's false-alarm
    rate is what licenses it.
    """
    rounds = len(case)
    draws = np.random.default_rng(seed).integers(0, rounds, (BOOTSTRAPS, rounds))
    present = np.zeros((BOOTSTRAPS, rounds), dtype=bool)
    np.put_along_axis(present, draws, True, axis=1)
    logs = np.log(_resampled_minima(case, present))
    logs -= np.mean([np.log(_resampled_minima(one, present)) for one in references], axis=0)
    point = math.log(best_by_segment(case).sum())
    point -= float(np.mean([math.log(best_by_segment(one).sum()) for one in references]))
    tail = (1 - level) / 2
    low, high = np.quantile(logs, [tail, 1 - tail])
    return Interval(math.exp(point), math.exp(min(low, point)), math.exp(max(high, point)), level)


def _resampled_minima(samples: Floats, present: NDArray[np.bool_]) -> Floats:
    """For each resample, the sum over segments of the least value among the rounds present.

    A resample's minimum is the first of the sorted values whose round was drawn, so it is enough to look at the
    fastest few rounds of each segment instead of all.
    """
    rounds, segments = samples.shape
    order = np.argsort(samples, axis=0, kind="stable")
    total = np.zeros(len(present))
    for segment in range(segments):
        ranking = order[:, segment]
        first = present[:, ranking[: min(rounds, 24)]].argmax(axis=1)
        missed = ~present[np.arange(len(present)), ranking[first]]
        if missed.any():
            first[missed] = present[np.ix_(missed, ranking)].argmax(axis=1)
        total += samples[ranking[first], segment]
    return total


def spread(values: Floats) -> float:
    """Relative distance between the quartiles: (q75 - q25) / median."""
    low, middle, high = np.quantile(values, [0.25, 0.5, 0.75])
    return float((high - low) / middle) if middle > 0 else 0.0


def rank_correlation(values: Floats) -> float:
    """Spearman's correlation of the values with their position (ties share their mean rank).

    0 for fewer than 3 values or a constant.
    """
    n = len(values)
    if n < 3 or float(np.ptp(values)) == 0:
        return 0.0
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[place]
    return float(np.corrcoef(ranks, np.arange(n))[0, 1])


def split_gap(values: Floats) -> tuple[float, float]:
    """The best split of values into two clusters: (share of variance it explains, share in the smaller cluster).

    A split that explains 90% with at least a fifth on each side is what two modes look like; one cluster with a tail
    explains less or leaves a sliver.
    """
    ordered = np.sort(values)
    n = len(ordered)
    total = float(((ordered - ordered.mean()) ** 2).sum())
    if n < 8 or total == 0:
        return 0.0, 0.0
    sums = np.cumsum(ordered)[:-1]
    left = np.arange(1, n)
    right = n - left
    mean = ordered.mean()
    between = (sums / left - mean) ** 2 * left + ((ordered.sum() - sums) / right - mean) ** 2 * right
    best = int(between.argmax())
    return float(between[best] / total), min(best + 1, n - best - 1) / n
