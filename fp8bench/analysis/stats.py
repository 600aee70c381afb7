"""Estimators and intervals: numpy in, numbers out.

How much slower is B than A, both measured in the same rounds? The best case of an arm is the sum over its segments of
the mean of the fastest quarter of the rounds. The ratio of two best cases gets its interval from a bootstrap over
rounds, the same rounds for both. It uses the fast end on purpose: on a shared machine noise almost only adds. Almost,
because a processor that raises its clock for a moment makes a few slots faster than all others. The three fastest
rounds may then all be of that moment (5% off, for identical code); a quarter of the rounds is not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from fp8bench.model import Interval

Floats = NDArray[np.float64]
Counts = NDArray[np.float32]

BOOTSTRAPS = 2000
# Bootstrapping a minimum gives too narrow an interval: a resample's minimum is never below the sample's.
_FEWEST = 3
_SHARE = 4
# A resample almost always finds enough fast rounds among this many square roots of rounds beyond the fastest.
_SPARE = 6.0


@dataclass(frozen=True)
class Resampled:
    """The logarithm of an arm's seconds (best case or mean), and that of each resample."""

    point: float
    resampled: Floats

    @property
    def error(self) -> float:
        """The standard error of the logarithm within the run."""
        return float(self.resampled.std())


def fastest_of(rounds: int) -> int:
    """Returns how many rounds form the best case: a quarter, but at least three if there are that many."""
    return min(rounds, max(_FEWEST, rounds // _SHARE))


def best_by_segment(samples: Floats) -> Floats:
    """Returns the mean of the fastest rounds of each segment; `samples` is (rounds, segments), in seconds."""
    fastest = fastest_of(len(samples))
    best: Floats = np.partition(samples, fastest - 1, axis=0)[:fastest].mean(axis=0)
    return best


def best_steps(steps: Floats) -> Floats:
    """Returns the mean segments of the fastest quarter of the steps; `steps` is (steps, segments), in seconds."""
    order = np.argsort(steps.sum(axis=1), kind="stable")[: fastest_of(len(steps))]
    best: Floats = steps[order].mean(axis=0)
    return best


def mean_case(rounds: Floats) -> Resampled:
    """Returns the mean of an arm's rounds, in seconds; it draws the same rounds as the best case."""
    resampled = np.log(rounds @ _draws(len(rounds)) / len(rounds))
    return Resampled(math.log(rounds.mean()), resampled)


def best_case(samples: Floats) -> Resampled:
    """Returns the best case of one arm. Arms with equal numbers of rounds draw the same rounds."""
    return _best_case(np.ascontiguousarray(samples, dtype=np.float64).tobytes(), samples.shape)


@lru_cache(maxsize=32)
def _best_case(raw: bytes, shape: tuple[int, ...]) -> Resampled:
    """Cached, because a reference is compared with every case of its group."""
    samples = np.frombuffer(raw).reshape(shape)
    resampled = np.log(_resample_segments(raw, shape).sum(axis=0))
    resampled.setflags(write=False)
    return Resampled(math.log(best_by_segment(samples).sum()), resampled)


@lru_cache(maxsize=4)
def _draws(rounds: int) -> Counts:
    """Returns how often each resample (column) draws each round (row). Seeded, so that results are repeatable."""
    draws = np.random.default_rng(0).multinomial(rounds, np.full(rounds, 1 / rounds), BOOTSTRAPS)
    return np.ascontiguousarray(draws.T, dtype=np.float32)


def ratio(case: Resampled, references: Sequence[Resampled], level: float = 0.99) -> Interval:
    """Returns the ratio of an arm's figure to that of its references, with percentiles of the resamples.

    Several entries of one reference count by their geometric mean: pooling their rounds would give the reference more
    rounds to be fast in, and so a bias.
    """
    point = case.point - float(np.mean([reference.point for reference in references]))
    logs = case.resampled - np.mean([reference.resampled for reference in references], axis=0)
    tail = (1 - level) / 2
    low, high = np.quantile(logs, [tail, 1 - tail])
    return Interval(math.exp(point), math.exp(min(low, point)), math.exp(max(high, point)), level)


def extent(ratio: Interval, rounds: Sequence[Floats]) -> Interval:
    """Returns a ratio with the range over rounds instead of an interval; `rounds` are seconds of the arm and its
    references.

    The range is widened to include the point: the fastest calls of the arms need not be from one round.
    """
    arm, *references = np.log(rounds)
    logs = arm - np.mean(references, axis=0)
    low, high = (math.exp(bound) for bound in (logs.min(), logs.max()))
    return Interval(ratio.point, min(low, ratio.point), max(high, ratio.point), 0.0)


def resample_segments(samples: Floats) -> Floats:
    """Returns the mean of the fastest rounds of each segment in every resample: (segments, resamples), in seconds."""
    return _resample_segments(np.ascontiguousarray(samples, dtype=np.float64).tobytes(), samples.shape)


@lru_cache(maxsize=8)
def _resample_segments(raw: bytes, shape: tuple[int, ...]) -> Floats:
    """Cached, because an arm's speed-up and each of its phases need it, on the terminal and on the page."""
    samples = np.frombuffer(raw).reshape(shape)
    fastest = fastest_of(len(samples))
    # How often each resample (column) draws each round (row).
    draws = _draws(len(samples))
    segments = np.array([_fastest_sums(segment, draws, fastest) for segment in samples.T]) / fastest
    segments.setflags(write=False)
    return segments


def resample_fastest_steps(steps: Floats) -> Floats:
    """Like resample_segments, but picks the fastest whole steps, the same for all segments."""
    fastest = fastest_of(len(steps))
    ranking = np.argsort(steps.sum(axis=1), kind="stable")
    taken = np.minimum(_draws(len(steps))[ranking].cumsum(axis=0), fastest)
    return np.array([_sum_by_counts(segment[ranking], taken) for segment in steps.T]) / fastest


def _fastest_sums(seconds: Floats, draws: Counts, fastest: int) -> Floats:
    """Returns for each resample the sum of one segment's fastest rounds.

    These are the first drawn ones in sorted order, so checking a few is enough; if not, all are checked.
    """
    looked_at = fastest + math.ceil(_SPARE * math.sqrt(fastest))
    ranking = np.argsort(seconds, kind="stable")
    values = seconds[ranking]
    few = ranking[:looked_at]
    taken = np.minimum(draws[few].cumsum(axis=0), fastest)
    sums = _sum_by_counts(values[:looked_at], taken)
    short = taken[-1] < fastest
    if short.any():
        all_taken = np.minimum(draws[np.ix_(ranking, np.flatnonzero(short))].cumsum(axis=0), fastest)
        sums[short] = _sum_by_counts(values, all_taken)
    return sums


def _sum_by_counts(values: Floats, taken: Counts) -> Floats:
    """Sums values weighted by the increments of the running counts; summation by parts avoids differences of counts."""
    steps = values.copy()
    steps[:-1] -= values[1:]
    sums: Floats = steps @ taken
    return sums


def spread(values: Floats) -> float:
    low, middle, high = np.quantile(values, [0.25, 0.5, 0.75])
    return float((high - low) / middle) if middle > 0 else 0.0


def rank_correlation(values: Floats) -> float:
    """Returns Spearman's correlation of the values with their position (ties share their mean rank); 0 for fewer than 3
    values or a constant."""
    n = len(values)
    if n < 3 or float(np.ptp(values)) == 0:
        return 0.0
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[place]
    return float(np.corrcoef(ranks, np.arange(n))[0, 1])


def best_split(ordered: Floats) -> tuple[float, int]:
    """Returns the best split of sorted values into two clusters: the share of variance explained, and the size of the
    lower cluster.

    Two modes explain 90% with at least a fifth on each side; one cluster with a tail explains less or leaves a sliver.
    (0, 0) for too few values.
    """
    n = len(ordered)
    mean = ordered.mean() if n else 0.0
    total = float(((ordered - mean) ** 2).sum())
    if n < 8 or total == 0:
        return 0.0, 0
    sums = np.cumsum(ordered)[:-1]
    below = np.arange(1, n)
    above = n - below
    between = (sums / below - mean) ** 2 * below + ((ordered.sum() - sums) / above - mean) ** 2 * above
    best = int(between.argmax())
    return float(between[best] / total), best + 1
