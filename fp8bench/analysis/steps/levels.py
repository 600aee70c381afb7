"""Many series at once: how much each differs where nothing has changed, and where it is cut into pieces of one level.

Noise is told from the series themselves. Every cut has its price, and every deviation too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fp8bench.analysis.stats import Floats

# A level is told from a bad night or two by so many values; the first one must be known before it can be left.
LEAST = 3
LEAST_FIRST = 8
# A level that was left again before so many values costs as much as another cut: chance is in no hurry in the middle.
SETTLED = 8

Counts = NDArray[np.intp]


@dataclass(frozen=True)
class Batch:
    """Series as the rows of a table, each as long as `lengths` says; what is beyond its end does not count."""

    values: Floats
    lengths: Counts

    @property
    def inside(self) -> NDArray[np.bool_]:
        found: NDArray[np.bool_] = np.arange(self.values.shape[1]) < self.lengths[:, None]
        return found


def partition(batch: Batch, by_length: float) -> list[list[int]]:
    """Where each series is cut: the first index of every piece but the first one.

    Of all ways to cut it the one with the least sum of squares around the pieces' means plus 1 a cut and, for each
    piece, `by_length` times the logarithm of its length, found by dynamic programming: the best way to cut the first t
    values contains a best way to cut fewer. By length, because a long series has many places in its middle where chance
    may cut it, and few at its end, where news are. Levels that soon were left again cost 1 more.
    """
    series, most = batch.values.shape
    everyone = np.arange(series)
    # By how many values a piece is shorter than all of them, as are these.
    prices, weights = by_length * np.log(np.arange(most, 0, -1) / LEAST), -1.0 / np.arange(most, 0, -1)
    sums = np.zeros((series, most + 1))
    (batch.values - batch.values[:, :1]).cumsum(axis=1, out=sums[:, 1:])  # a common level would cost digits
    # What the first s values cost at best, less the sum of their squares, which all ways to cut share.
    cost = np.full((series, most + 1), np.inf)
    cost[:, 0] = 0.0
    last, last_before_end = np.zeros((2, series, most + 1), dtype=np.intp)
    ends = set(batch.lengths.tolist())
    for end in range(LEAST, most + 1):
        begins, lengths = slice(end - LEAST + 1), slice(most - end, most - LEAST + 1)
        total = sums[:, begins] - sums[:, end : end + 1]
        total *= total
        total *= weights[lengths]
        total += prices[lengths]
        total += cost[:, begins]
        if end in ends:
            last_before_end[:, end] = total.argmin(axis=1)
        if end >= LEAST_FIRST:
            total[:, max(end - SETTLED + 1, 1) :] += 1.0
            last[:, end] = total.argmin(axis=1)
            cost[:, end] = total[everyone, last[:, end]] + 1.0
    return [
        _back(row, int(at_end[length]))
        for row, at_end, length in zip(last, last_before_end, batch.lengths, strict=True)
    ]


def _back(last: Counts, cut: int) -> list[int]:
    cuts = []
    while cut > 0:
        cuts.append(cut)
        cut = int(last[cut])
    return cuts[::-1]


# The median of |x| of Gaussian values of spread 1.
_MEDIAN = 0.6745
# Differences count up to so many spreads of theirs, so that steps and bad nights do not pass for noise.
_MOST = 3.0
# Where more than half of the values equal their neighbours the median says 0; then all but the largest have a say.
_KEPT = 0.9
# In log units: series keep six digits, and nothing that matters is smaller.
LEAST_SPREAD = 1e-5
_AROUND = 2
# A value so many spreads from the median of its five neighbours, itself among them, is a bad night.
_BAD = 4.0
# In units of 1/sqrt(n): without memory one series in twenty shares more.
_CHANCE = 1.3
_MOST_SHARED = 0.7


def spreads(batch: Batch) -> Floats:
    """The spread of each series in its own units, from the differences of neighbours: levels and trends cancel."""
    counts = batch.lengths - 1
    steps = np.where(batch.inside[:, 1:], np.abs(np.diff(batch.values, axis=1)), np.inf)
    steps.sort(axis=1)
    row = np.arange(len(steps))
    middle = (steps[row, (counts - 1) // 2] + steps[row, counts // 2]) / 2
    squares = np.where(np.isfinite(steps), steps, 0.0) ** 2
    kept = (counts * _KEPT).astype(np.intp)
    trimmed = squares.cumsum(axis=1)[row, kept - 1] / kept
    rough = np.maximum(np.maximum(middle / _MEDIAN, np.sqrt(trimmed)), LEAST_SPREAD)
    clipped = np.minimum(squares, (_MOST * rough[:, None]) ** 2).sum(axis=1) / counts
    found: Floats = np.maximum(np.sqrt(clipped / 2), LEAST_SPREAD)
    return found


def without_bad_nights(batch: Batch, spread: Floats) -> Batch:
    """Values that lie far from all around them give way to the median of these.

    At either end it is the median of the five outermost, so that of a new level three values are enough to stay.
    """
    centre = np.clip(np.arange(batch.values.shape[1]), _AROUND, batch.lengths[:, None] - 1 - _AROUND)
    around = [np.take_along_axis(batch.values, centre + by, axis=1) for by in range(-_AROUND, _AROUND + 1)]
    middle = np.sort(around, axis=0)[_AROUND]
    bad = np.abs(batch.values - middle) > _BAD * spread[:, None]
    return Batch(np.where(bad, middle, batch.values), batch.lengths)


def memory(residuals: Floats, pieces: int) -> float:
    """How much more means of many values differ than without memory: 1, or (1 + r) / (1 - r).

    r is what a value shares with the next one, where that is more than chance would give. Every piece's mean follows
    its values, which hides some of it; that is added back.
    """
    total = float(residuals @ residuals)
    if total == 0:
        return 1.0
    shared = float(residuals[1:] @ residuals[:-1]) / total + pieces / len(residuals)
    if shared <= _CHANCE / math.sqrt(len(residuals)):
        return 1.0
    shared = min(shared, _MOST_SHARED)
    return (1 + shared) / (1 - shared)
