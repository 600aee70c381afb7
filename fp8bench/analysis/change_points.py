"""Steps in a series of values, one a commit: where the level changed, by how much, and how sure that is.

A series is looked at in logarithms, so that a step is a ratio. Bad nights give way to what is around them; then the
series is cut into pieces of one level each, at a price a cut that flat series rarely pay. The price is in units of the
series' own noise: from differences of neighbours at first, then from what is left around the pieces, with a longer
memory counted as more noise. `suites/change_points.py` measures how often that is right, and sets the constants.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from fp8bench.analysis.partition import LEAST, LEAST_FIRST, Batch, partition
from fp8bench.analysis.series_noise import LEAST_SPREAD, memory, spreads, without_bad_nights
from fp8bench.stats import Floats

# A series shorter than this has room for no step.
LEAST_VALUES = LEAST_FIRST + LEAST
# How many deviations of one value a cut is worth: at the first look, and at the last one for 60 values, with what is
# added for every e-fold of these.
_FIRST_PRICE = 3.3
_DEVIATIONS = 3.55
_DEVIATIONS_MORE = 0.1
# Where the sum of squares is less than so many variances above the least one a step may lie, too.
_LIKELY = 6.0
# A flat series of n values has a step with the chance of one value's deviation, times so many values.
_CHANCES = 1.0
_CHANCES_POWER = 0.75
# Series a batch: their tables stay in a processor's cache.
_AT_ONCE = 128


@dataclass(frozen=True)
class Step:
    """A change of level.

    Values have the new level from index `at` on, most likely. `low` is the last value that surely has the old one and
    `high` the first that surely has the new one: the step lies between them. `p_value` is the chance that a flat
    series of that length shows such a step or a clearer one anywhere.
    """

    at: int
    low: int
    high: int
    before: float
    after: float
    p_value: float

    @property
    def ratio(self) -> float:
        """The level after it over that before it: above 1 is worse."""
        return self.after / self.before


def steps_of(values: Sequence[float] | Floats) -> tuple[Step, ...]:
    """The steps of one series, in order: values above 0 in the order of their commits, without gaps."""
    return steps_of_many([np.asarray(values, dtype=np.float64)])[0]


def steps_of_many(series: Sequence[Floats]) -> list[tuple[Step, ...]]:
    """The steps of each series; much faster than one by one."""
    found: list[tuple[Step, ...]] = [()] * len(series)
    for one in series:
        if not (np.isfinite(one).all() and (one > 0).all()):
            raise ValueError("a value is not above 0, or not finite: its logarithm says nothing of a level")
    long_enough = sorted((number for number, one in enumerate(series) if len(one) >= LEAST_VALUES),
                         key=lambda number: len(series[number]))  # fmt: skip
    for begin in range(0, len(long_enough), _AT_ONCE):
        chosen = long_enough[begin : begin + _AT_ONCE]
        for number, steps in zip(chosen, _look(_table([series[number] for number in chosen])), strict=True):
            found[number] = steps
    return found


def _table(series: Sequence[Floats]) -> Batch:
    lengths = np.array([len(one) for one in series], dtype=np.intp)
    values = np.zeros((len(series), int(lengths.max())))
    for row, one in zip(values, series, strict=True):
        row[: len(one)] = np.log(one)
    return Batch(values, lengths)


def _look(batch: Batch) -> list[tuple[Step, ...]]:
    """First by the spread of differences and then, where that finds anything, by what is left around the pieces."""
    spread = spreads(batch)
    clean = without_bad_nights(batch, spread)
    rough = partition(Batch(clean.values / (_FIRST_PRICE * spread)[:, None], clean.lengths))
    found: list[tuple[Step, ...]] = [()] * len(rough)
    stepped = np.flatnonzero([bool(cuts) for cuts in rough])
    if not len(stepped):
        return found
    some = clean.rows(stepped)
    rows = [row[:length] for row, length in zip(some.values, some.lengths, strict=True)]
    prices = np.array([_price(row, rough[number]) for row, number in zip(rows, stepped, strict=True)])
    for number, row, cuts in zip(
        stepped, rows, partition(Batch(some.values / prices[:, None], some.lengths)), strict=True
    ):
        found[number] = tuple(_steps(row, cuts))
    return found


def _price(row: Floats, cuts: Sequence[int]) -> float:
    """How far, in the row's units, a value stands out that is worth a cut: a t-like quantile times the noise."""
    noise, freedom = _noise(row, cuts)
    return noise * _t_of(_deviations(len(row)), freedom)


def _noise(row: Floats, cuts: Sequence[int]) -> tuple[float, int]:
    """The spread around the pieces, more where it has a memory, and its degrees of freedom."""
    pieces = np.split(row, cuts)
    rest = np.concatenate([piece - piece.mean() for piece in pieces])
    freedom = max(len(row) - len(pieces), 1)
    return max(math.sqrt(float(rest @ rest) / freedom * memory(rest, len(pieces))), LEAST_SPREAD), freedom


def _deviations(count: int) -> float:
    """How many Gaussian deviations a cut of a series of so many values takes: more of them, more chances to err."""
    return _DEVIATIONS + _DEVIATIONS_MORE * math.log(count / 60)


def _steps(row: Floats, cuts: Sequence[int]) -> Iterator[Step]:
    noise, freedom = _noise(row, cuts)
    ends = [0, *cuts, len(row)]
    for begin, at, end in zip(ends, ends[1:], ends[2:], strict=False):
        gains = _gains(row[begin:end]) / noise**2
        best = at - begin - 1
        likely = gains >= gains[best] - _LIKELY
        # The likely places around the best one, up to the first unlikely on either side.
        low = best - int(np.argmin(np.append(likely[best::-1], False))) + 1
        high = best + int(np.argmin(np.append(likely[best:], False))) - 1
        deviations = _z_of(math.sqrt(gains[best]), freedom)
        yield Step(
            at, begin + low, begin + high + 1, math.exp(row[begin:at].mean()), math.exp(row[at:end].mean()),
            min(1.0, _CHANCES * len(row) ** _CHANCES_POWER * math.erfc(deviations / math.sqrt(2))),
        )  # fmt: skip


def _gains(values: Floats) -> Floats:
    """By how much each cut of a piece lessens the sum of squares; the first is before the second value."""
    count = len(values)
    first = np.arange(1, count)
    sums = values.cumsum()
    apart = sums[:-1] / first - (sums[-1] - sums[:-1]) / (count - first)
    gains: Floats = apart**2 * first * (count - first) / count
    return gains


def _t_of(deviations: float, freedom: int) -> float:
    """Student's t that is as rare as so many Gaussian deviations (Wallace's approximation)."""
    shrunk = deviations * (8 * freedom + 3) / (8 * freedom + 1)
    return math.sqrt(freedom * math.expm1(shrunk**2 / freedom))


def _z_of(t: float, freedom: int) -> float:
    """The other way round."""
    return math.sqrt(freedom * math.log1p(t**2 / freedom)) * (8 * freedom + 1) / (8 * freedom + 3)
