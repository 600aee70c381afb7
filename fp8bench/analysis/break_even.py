"""From which size on a precision pays: the ratios of several sizes in, stretches and crossings with intervals out.

Between two measured sizes the logarithm of the speed-up runs straight over the logarithm of the size, within a band:
the intervals of both points, and as much as a curve that bends there as it does at its neighbours may lie beside the
straight line. Where it leaps, every size in between may be the place. A size belongs to a crossing's interval if the
band there holds 1, so that the interval holds the true crossing at least as often as a point's interval its ratio.
Nothing is said of sizes beyond those measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import NamedTuple

import numpy as np

from fp8bench.analysis.stats import Floats
from fp8bench.analysis.verdicts import BAND
from fp8bench.model import Interval

# Fewer sizes are a list, and no curve.
LEAST_SIZES = 3
# Places between two measured sizes at which the band is looked at.
_STEPS = 64
# A step between two sizes that is so many times those beside it is a leap.
_LEAP = 3.0


class SizedRatio(NamedTuple):
    """At one size, the time over that of what it is held against."""

    size: int
    ratio: Interval

    @property
    def within_noise(self) -> bool:
        """Whether this size alone cannot be told to pay or to cost."""
        return self.ratio.low <= 1 + BAND and self.ratio.high >= 1 - BAND


class SizeStretch(NamedTuple):
    """Sizes over which it pays, costs, or cannot be told (None)."""

    pays: bool | None
    first: float
    last: float


class Crossing(NamedTuple):
    """Where it begins to pay, or ends to; the true place lies between `low` and `high`."""

    size: float
    low: float
    high: float
    begins: bool


@dataclass(frozen=True)
class BreakEven:
    """Stretches from the smallest measured size to the largest, the crossings between them, and sizes within noise.

    `level` is that of the intervals; 0 where some are the range of a few rounds.
    """

    stretches: tuple[SizeStretch, ...]
    crossings: tuple[Crossing, ...]
    within_noise: tuple[int, ...]
    level: float


def break_even(points: Sequence[SizedRatio]) -> BreakEven | None:
    """Where it pays; None of fewer than three sizes. Each size once, all ratios above 0."""
    ordered = sorted(points)
    if len(ordered) < LEAST_SIZES:
        return None
    places, low, middle, high = _band(ordered)
    signs = np.where(low > 0, 1, np.where(high < 0, -1, 0))
    runs = [[place for place, _ in run] for _, run in groupby(enumerate(signs.tolist()), key=lambda pair: pair[1])]
    stretches = tuple(
        SizeStretch(None if signs[run[0]] == 0 else bool(signs[run[0]] > 0), places[run[0]], places[run[-1]])
        for run in runs
    )
    sure = [run for run in runs if signs[run[0]]]
    crossings = tuple(
        Crossing(_zero(places, middle, one[-1], other[0]), places[one[-1]], places[other[0]], bool(signs[other[0]] > 0))
        for one, other in pairwise(sure)
        if signs[one[0]] != signs[other[0]]
    )
    noise = tuple(one.size for one in ordered if one.within_noise)
    return BreakEven(stretches, crossings, noise, min(one.ratio.level for one in ordered))


def _band(ordered: Sequence[SizedRatio]) -> tuple[list[float], Floats, Floats, Floats]:
    """Sizes, and over them the lower end, the middle and the upper end of the logarithm of the speed-up."""
    known = np.log([one.size for one in ordered])
    at = np.concatenate([np.linspace(*ends, _STEPS, endpoint=False) for ends in pairwise(known)] + [known[-1:]])
    speeds = [one.ratio.inverse for one in ordered]
    middle, low, high = (
        np.interp(at, known, np.log(values))
        for values in zip(*((speed.point, speed.low, speed.high) for speed in speeds), strict=True)
    )
    beside = _beside(known, np.log([speed.point for speed in speeds])) + BAND
    sizes = [float(value) for value in np.exp(at)]
    sizes[::_STEPS] = [float(one.size) for one in ordered]
    return sizes, low - beside, middle, high + beside


def _beside(known: Floats, values: Floats) -> Floats:
    """How far from a straight line a curve may lie between two points: as much as if it bends there as at either.

    Where it leaps, its way is unknown: a library that chose another kernel may have done so anywhere in between.
    """
    widths, steps = np.diff(known), np.diff(values)
    bends = np.abs(2 * np.diff(steps / widths) / (widths[:-1] + widths[1:]))
    bend = np.maximum(np.append(bends[0], bends), np.append(bends, bends[-1]))
    sides = np.pad(np.abs(steps), 1)
    leaps = np.abs(steps) > _LEAP * np.maximum(sides[:-2], sides[2:])
    share = np.arange(_STEPS) / _STEPS
    smooth = np.outer(bend * widths**2 / 2, share * (1 - share))
    found: Floats = np.append(np.where(leaps[:, None] & (share > 0), np.abs(steps)[:, None], smooth).ravel(), 0.0)
    return found


def _zero(places: Sequence[float], middle: Floats, first: int, last: int) -> float:
    """Where the middle goes through 0 between two places; of several times the middle one."""
    turns = [at for at in range(first, last) if (middle[at] > 0) != (middle[at + 1] > 0)]
    at = turns[len(turns) // 2]
    share = middle[at] / (middle[at] - middle[at + 1])
    return math.exp((1 - share) * math.log(places[at]) + share * math.log(places[at + 1]))
