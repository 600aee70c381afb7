"""Many series at once, cut into pieces of one level each: every cut has its price, and every deviation too."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fp8bench.stats import Floats

# A level is told from a bad night or two by so many values; the first one must be known before it can be left.
LEAST = 3
LEAST_FIRST = 8
# A level that was left again before so many values costs as much as another cut: chance is in no hurry in the middle.
_SETTLED = 8

Counts = NDArray[np.intp]


@dataclass(frozen=True)
class Batch:
    """Series as the rows of a table, each as long as `lengths` says; what is beyond its end does not count."""

    values: Floats
    lengths: Counts

    @property
    def inside(self) -> NDArray[np.bool_]:
        """Which values of the table count."""
        found: NDArray[np.bool_] = np.arange(self.values.shape[1]) < self.lengths[:, None]
        return found

    def rows(self, chosen: Counts) -> Batch:
        """Some of its series."""
        return Batch(self.values[chosen], self.lengths[chosen])


def partition(batch: Batch, by_length: float) -> list[list[int]]:
    """Where each series is cut: the first index of every piece but the first one.

    Of all ways to cut it the one with the least sum of squares around the pieces' means plus 1 a cut and, for each
    piece, `by_length` times the logarithm of its length, found by dynamic programming: the best way to cut the first t
    values contains a best way to cut fewer. By length, because a long series has many places in its middle where chance
    may cut it, and few at its end, where news are. Levels that soon were left again cost 1 more.
    """
    series, most = batch.values.shape
    everyone = np.arange(series)
    prices = by_length * np.log(np.arange(1, most + 1) / LEAST)
    sums = np.zeros((series, most + 1))
    (batch.values - batch.values[:, :1]).cumsum(axis=1, out=sums[:, 1:])  # a common level would cost digits
    # What the first s values cost at best, less the sum of their squares, which all ways to cut share.
    cost = np.full((series, most + 1), np.inf)
    cost[:, 0] = 0.0
    last, last_before_end = np.zeros((2, series, most + 1), dtype=np.intp)
    ends = set(batch.lengths.tolist())
    for end in range(LEAST, most + 1):
        begins = np.arange(end - LEAST + 1)
        total = sums[:, : len(begins)] - sums[:, end : end + 1]
        total *= total
        total *= -1.0 / (end - begins)
        total += prices[end - begins - 1]
        total += cost[:, : len(begins)]
        if end in ends:
            last_before_end[:, end] = total.argmin(axis=1)
        if end >= LEAST_FIRST:
            total[:, max(end - _SETTLED + 1, 1) :] += 1.0
            last[:, end] = total.argmin(axis=1)
            cost[:, end] = total[everyone, last[:, end]] + 1.0
    return [
        _back(row, int(at_end[length]))
        for row, at_end, length in zip(last, last_before_end, batch.lengths, strict=True)
    ]


def _back(last: Counts, cut: int) -> list[int]:
    """The cuts that lead to the last one."""
    cuts = []
    while cut > 0:
        cuts.append(cut)
        cut = int(last[cut])
    return cuts[::-1]
