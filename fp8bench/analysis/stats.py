"""Estimators and intervals of times from numpy arrays.

The best case of a workload is computed for each segment of its step: the mean of the segment's fastest quarter of the
rounds. The sum over all segments is the best case. The ratio of two best cases gets its interval from a bootstrap
that draws the same rounds for both of them.

The fastest rounds are used because noise on a shared machine almost always adds time. An exception is a processor
that raises its clock for a moment, which makes a few slots faster. The three fastest rounds may then all be from that
moment, which makes identical code differ by 5%. A quarter of all rounds is too many for that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from fp8bench.model import Interval

FloatArray = NDArray[np.float64]
Counts = NDArray[np.float32]

RESAMPLE_COUNT = 2000
# A best-case time is the mean of at least this many rounds, unless fewer were measured. The bootstrap interval of a
# minimum would be too narrow, because no resample has a lower minimum than the sample.
_MIN_FASTEST_ROUNDS = 3
_FASTEST_ROUNDS_DIVISOR = 4
# First search only the fastest rounds: as many as a resample needs, plus this many times the square root of that
# number. Almost every resample drew enough of these rounds.
_EXTRA_FAST_ROUNDS_FACTOR = 6.0


@dataclass(frozen=True)
class ResampledLogSeconds:
    """The logarithm of a workload's seconds (best case or mean), and the same logarithm in each bootstrap resample."""

    point: float
    resampled_values: FloatArray

    @property
    def error(self) -> float:
        """The standard error of the logarithm, from noise within the run."""
        return float(self.resampled_values.std())


def count_fastest_rounds(rounds: int) -> int:
    """Returns how many of these rounds form the best case: a quarter, but at least three, or all if there are fewer
    than three.
    """
    return min(rounds, max(_MIN_FASTEST_ROUNDS, rounds // _FASTEST_ROUNDS_DIVISOR))


def find_best_by_segment(samples: FloatArray) -> FloatArray:
    """Returns for each segment (a part of a step) the mean of its fastest rounds. `samples` has seconds with shape
    (rounds, segments).
    """
    fastest_round_count = count_fastest_rounds(len(samples))
    best_seconds: FloatArray = np.partition(samples, fastest_round_count - 1, axis=0)[:fastest_round_count].mean(axis=0)
    return best_seconds


def average_fastest_steps(steps: FloatArray) -> FloatArray:
    """Returns for each segment the mean over the fastest quarter of the steps. `steps` has seconds with shape (steps,
    segments).
    """
    fastest_step_indices = np.argsort(steps.sum(axis=1), kind="stable")[: count_fastest_rounds(len(steps))]
    best_seconds: FloatArray = steps[fastest_step_indices].mean(axis=0)
    return best_seconds


def resample_mean(rounds: FloatArray) -> ResampledLogSeconds:
    """Returns the logarithm of the mean seconds over rounds, and the same logarithm for each bootstrap resample. The
    resamples draw the same rounds as those of the best case.
    """
    log_resampled_means = np.log(rounds @ _draw_resamples(len(rounds)) / len(rounds))
    return ResampledLogSeconds(math.log(rounds.mean()), log_resampled_means)


def resample_best_case(samples: FloatArray) -> ResampledLogSeconds:
    """Returns the logarithm of the best case in seconds, and the same logarithm for each bootstrap resample. Samples
    with equally many rounds are resampled with the same rounds.
    """
    return ResampledLogSeconds(
        math.log(find_best_by_segment(samples).sum()), np.log(resample_segments(samples).sum(axis=0))
    )


@lru_cache(maxsize=4)
def _draw_resamples(rounds: int) -> Counts:
    """Returns how often each resample (column) draws each round (row). The seed is fixed, so that results are
    repeatable.
    """
    round_draw_counts = np.random.default_rng(0).multinomial(rounds, np.full(rounds, 1 / rounds), RESAMPLE_COUNT)
    return np.ascontiguousarray(round_draw_counts.T, dtype=np.float32)


def ratio(case: ResampledLogSeconds, references: Sequence[ResampledLogSeconds], level: float = 0.99) -> Interval:
    """Returns the ratio of a case's time to that of its references. Its interval is made of percentiles of the
    bootstrap resamples.

    If one reference has several timings, their geometric mean is used. Pooling their rounds would bias it, because the
    fastest of more rounds are faster.
    """
    point = case.point - float(np.mean([reference.point for reference in references]))
    resampled_log_ratios = case.resampled_values - np.mean(
        [reference.resampled_values for reference in references], axis=0
    )
    tail_probability = (1 - level) / 2
    low, high = np.quantile(resampled_log_ratios, [tail_probability, 1 - tail_probability])
    return Interval(math.exp(point), math.exp(min(low, point)), math.exp(max(high, point)), level)


def replace_interval_by_range(ratio: Interval, rounds: Sequence[FloatArray]) -> Interval:
    """Replaces the interval of a ratio by the lowest and highest ratio of any round. `rounds` has the seconds of the
    case in each round, then those of its references.

    The range is widened to include the ratio itself, because the fastest calls of the case and of its references may be
    from different rounds.
    """
    case_logs, *reference_logs = np.log(rounds)
    logs = case_logs - np.mean(reference_logs, axis=0)
    low, high = (math.exp(log_limit) for log_limit in (logs.min(), logs.max()))
    return Interval(ratio.point, min(low, ratio.point), max(high, ratio.point), 0.0)


def resample_segments(samples: FloatArray) -> FloatArray:
    """Returns the mean seconds of the fastest rounds of each segment (a part of a step), for every bootstrap resample.
    The shape is (segments, resamples).
    """
    # The cache needs hashable arguments: bytes and a shape instead of an array.
    return _resample_segments(np.ascontiguousarray(samples, dtype=np.float64).tobytes(), samples.shape)


@lru_cache(maxsize=8)
def _resample_segments(raw: bytes, shape: tuple[int, ...]) -> FloatArray:
    """Does the work of resample_segments. It is cached, because a reference is compared with every case of its group,
    and because the terminal and the page need it for the speed-up and for each phase.
    """
    samples = np.frombuffer(raw).reshape(shape)
    fastest_round_count = count_fastest_rounds(len(samples))
    round_draw_counts = _draw_resamples(len(samples))
    segments = (
        np.array([_sum_fastest_rounds(segment, round_draw_counts, fastest_round_count) for segment in samples.T])
        / fastest_round_count
    )
    # The cache returns the same array to several callers, which must not change it.
    segments.setflags(write=False)
    return segments


def resample_fastest_steps(steps: FloatArray) -> FloatArray:
    """Returns the mean seconds of each segment (a part of a step) over the fastest whole steps, for every bootstrap
    resample. The shape is (segments, resamples).
    """
    fastest_round_count = count_fastest_rounds(len(steps))
    step_ranking = np.argsort(steps.sum(axis=1), kind="stable")
    cumulative_draw_counts = np.minimum(_draw_resamples(len(steps))[step_ranking].cumsum(axis=0), fastest_round_count)
    return (
        np.array([_sum_by_running_counts(segment[step_ranking], cumulative_draw_counts) for segment in steps.T])
        / fastest_round_count
    )


def _sum_fastest_rounds(seconds: FloatArray, draws: Counts, fastest: int) -> FloatArray:
    """Returns for each bootstrap resample the sum of the fastest rounds of one segment (a part of a step).

    Rounds are sorted by time, and at first only the fastest ones are searched. Resamples that did not draw enough of
    these are searched completely.
    """
    checked_round_count = fastest + math.ceil(_EXTRA_FAST_ROUNDS_FACTOR * math.sqrt(fastest))
    round_order_by_seconds = np.argsort(seconds, kind="stable")
    values = seconds[round_order_by_seconds]
    checked_rounds = round_order_by_seconds[:checked_round_count]
    cumulative_draw_counts = np.minimum(draws[checked_rounds].cumsum(axis=0), fastest)
    sums = _sum_by_running_counts(values[:checked_round_count], cumulative_draw_counts)
    is_draw_incomplete = cumulative_draw_counts[-1] < fastest
    if is_draw_incomplete.any():
        capped_draw_counts = np.minimum(
            draws[np.ix_(round_order_by_seconds, np.flatnonzero(is_draw_incomplete))].cumsum(axis=0), fastest
        )
        sums[is_draw_incomplete] = _sum_by_running_counts(values, capped_draw_counts)
    return sums


def _sum_by_running_counts(values: FloatArray, running_counts: Counts) -> FloatArray:
    """Returns the sum of the values, each multiplied by its count. `running_counts` are the cumulative sums of the
    counts (summation by parts).
    """
    differences = values.copy()
    differences[:-1] -= values[1:]
    sums: FloatArray = differences @ running_counts
    return sums


def relative_quartile_spread(values: FloatArray) -> float:
    lower_quartile, median_value, upper_quartile = np.quantile(values, [0.25, 0.5, 0.75])
    return float((upper_quartile - lower_quartile) / median_value) if median_value > 0 else 0.0


def correlate_ranks(values: FloatArray) -> float:
    """Returns Spearman's rank correlation of the values with their position.

    Equal values share their mean rank. Returns 0 for fewer than three values and for constant values.
    """
    count = len(values)
    if count < 3 or float(np.ptp(values)) == 0:
        return 0.0
    _, group_index, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[group_index]
    return float(np.corrcoef(ranks, np.arange(count))[0, 1])


def split_into_two_clusters(sorted_values: FloatArray) -> tuple[float, int]:
    """Splits sorted values into the two clusters that explain most of the variance. Returns the explained share of the
    variance, and the size of the lower cluster. Returns (0, 0) for fewer than eight values.

    Values with two modes give two clusters that explain 90%, each with at least a fifth of the values. Values in one
    cluster with a tail give clusters that explain less, or a cluster with few values.
    """
    n = len(sorted_values)
    mean_of_all_values = sorted_values.mean() if n else 0.0
    total_sum_of_squares = float(((sorted_values - mean_of_all_values) ** 2).sum())
    if n < 8 or total_sum_of_squares == 0:
        return 0.0, 0
    lower_cluster_sums = np.cumsum(sorted_values)[:-1]
    lower_cluster_sizes = np.arange(1, n)
    upper_cluster_sizes = n - lower_cluster_sizes
    explained_sum_of_squares = (
        lower_cluster_sums / lower_cluster_sizes - mean_of_all_values
    ) ** 2 * lower_cluster_sizes + (
        (sorted_values.sum() - lower_cluster_sums) / upper_cluster_sizes - mean_of_all_values
    ) ** 2 * upper_cluster_sizes
    best_split_index = int(explained_sum_of_squares.argmax())
    return float(explained_sum_of_squares[best_split_index] / total_sum_of_squares), best_split_index + 1
