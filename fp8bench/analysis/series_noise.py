"""How much the values of a series differ where nothing has changed, told from the series themselves."""

from __future__ import annotations

import math

import numpy as np

from fp8bench.analysis.partition import Batch
from fp8bench.stats import Floats

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
    middle = np.median(around, axis=0)
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
