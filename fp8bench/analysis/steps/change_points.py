"""Steps in a series of values, one a commit: where the level changed, by how much, and how sure that is.

A series is looked at in logarithms, so that a step is a ratio. Bad nights give way to what is around them; then the
series is cut into pieces of one level each, at a price a cut that flat series rarely pay. The price is in units of the
series' own noise: from differences of neighbours at first, then from what is left around the pieces, with a longer
memory counted as more noise. `suites/change_points.py` measures how often that is right.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from fp8bench.analysis.stats import Floats
from fp8bench.analysis.steps.levels import (
    LEAST,
    LEAST_FIRST,
    LEAST_SPREAD,
    SETTLED,
    Batch,
    memory,
    partition,
    spreads,
    without_bad_nights,
)
from fp8bench.model import Interval

# Values above 0 in the order of their commits, without gaps.
Values = Sequence[float] | Floats

# A series shorter than this has room for no step.
LEAST_VALUES = LEAST_FIRST + LEAST
# How many deviations of one value a cut is worth, at the last look and at the first, and what the logarithm of a
# piece's length costs, in squares of them. `python -m suites.change_points --calibrate` shows what they bring.
DEVIATIONS = 3.35
# What share of flat series has a step for chance alone, with noise that is Gaussian.
BY_CHANCE = 0.005
_FIRST_DEVIATIONS = 3.0
_BY_LENGTH = 2.0
# So many errors of theirs the values of the last level lie from the one before on average, the furthest of them aside.
_FIRM = 2.1
# By so many deviations the mean of the last values is lower without the furthest of three, on average.
_FURTHEST = 0.42
# The chance that a flat series is cut somewhere goes down with the evidence as if deviations were so much smaller: its
# noise is told from itself, and the place was chosen. Counted from 15 values to 300.
_WORTH = 0.8
# The step lies before its range with this chance, and after it with the same.
_TAIL = 0.03
# Gaussian deviations to either side for this level.
_LEVEL = 0.99
_REACH = 2.576
# Series a batch: their tables stay in a processor's cache.
_AT_ONCE = 256


@dataclass(frozen=True)
class Step:
    """A change of level.

    Values have the new level from index `at` on, most likely. `low` is the last value that surely has the old one and
    `high` the first that surely has the new one: the step lies between them. `p_value` is the chance that a flat
    series of that length shows such a step or a clearer one anywhere. `error` is the standard error of the ratio's
    logarithm, bad nights left out.
    """

    at: int
    low: int
    high: int
    before: float
    after: float
    p_value: float
    error: float

    @property
    def ratio(self) -> Interval:
        """The level after it over that before it, with a 99% interval: above 1 is worse."""
        log = math.log(self.after / self.before)
        reach = _REACH * self.error
        return Interval(math.exp(log), math.exp(log - reach), math.exp(log + reach), _LEVEL)


def steps_of_many(series: Sequence[Values], deviations: float = DEVIATIONS) -> list[tuple[Step, ...]]:
    """The steps of each series, in order; much faster than one by one.

    `deviations` are what a cut is worth: with fewer of them more is found, and more that is none.
    """
    found: list[tuple[Step, ...]] = [()] * len(series)
    arrays = [np.asarray(one, dtype=np.float64) for one in series]
    for array in arrays:
        if not (np.isfinite(array).all() and (array > 0).all()):
            raise ValueError("a value is not above 0, or not finite: its logarithm says nothing of a level")
    long_enough = [number for number, array in enumerate(arrays) if len(array) >= LEAST_VALUES]
    long_enough.sort(key=lambda number: len(arrays[number]))
    for begin in range(0, len(long_enough), _AT_ONCE):
        chosen = long_enough[begin : begin + _AT_ONCE]
        for number, steps in zip(chosen, _look(_table([arrays[number] for number in chosen]), deviations), strict=True):
            found[number] = steps
    return found


class PieceLevel(NamedTuple):
    """The newest level of a series: how far a value lies from it, by so many degrees of freedom, and its length."""

    noise: float
    freedom: int
    length: int

    def longer(self, values: int) -> PieceLevel:
        """The same with so many more values that belong to it."""
        return self._replace(freedom=self.freedom + values, length=self.length + values)


def newest_levels(series: Sequence[Values]) -> list[PieceLevel | None]:
    """What is known of the newest level of each series; None for one that is too short for a step."""
    return [
        _newest_level(np.asarray(values, dtype=np.float64), steps) if len(values) >= LEAST_VALUES else None
        for values, steps in zip(series, steps_of_many(series), strict=True)
    ]


def _newest_level(values: Floats, steps: Sequence[Step]) -> PieceLevel:
    batch = _table([values])
    cuts = [step.at for step in steps]
    noise, freedom = _noise(without_bad_nights(batch, spreads(batch)).values[0], cuts)
    return PieceLevel(noise, freedom, len(values) - (cuts[-1] if cuts else 0))


def least_step(level: PieceLevel, chance: float) -> tuple[float, float]:
    """The least step that is found by the last values of a level, if these belong to another, and its standard error.

    Its p-value is no more than `chance`. It is a logarithm, as cuts, firm steps and p-values have it.
    """
    after, before = LEAST, level.length - LEAST
    if before < LEAST:
        return math.inf, math.inf
    each = 1 / before + 1 / after
    lengths = math.log(before / LEAST) - math.log((before + after) / LEAST)
    price = 1 + (before < SETTLED) + _BY_LENGTH / DEVIATIONS**2 * lengths
    cut = _t_of(DEVIATIONS, level.freedom) * math.sqrt(price * each)
    firm = _FIRM * math.sqrt(1 / (after - 1) + 1 / before) + _FURTHEST
    evidence = (NormalDist().inv_cdf(1 - chance / 2) / _WORTH) ** 2 + _BY_LENGTH * lengths
    sure = _t_of(math.sqrt(max(evidence, 0.0)), level.freedom) * math.sqrt(each)
    return level.noise * max(cut, firm, sure), level.noise * math.sqrt(each)


def _table(series: Sequence[Floats]) -> Batch:
    lengths = np.array([len(one) for one in series], dtype=np.intp)
    values = np.zeros((len(series), int(lengths.max())))
    for row, one in zip(values, series, strict=True):
        row[: len(one)] = np.log(one)
    return Batch(values, lengths)


def _look(batch: Batch, deviations: float) -> list[tuple[Step, ...]]:
    """First by the spread of differences and then, where that finds anything, by what is left around the pieces."""
    spread = spreads(batch)
    clean = without_bad_nights(batch, spread)
    units = _FIRST_DEVIATIONS * spread
    rough = partition(Batch(clean.values / units[:, None], clean.lengths), _BY_LENGTH / _FIRST_DEVIATIONS**2)
    found: list[tuple[Step, ...]] = [()] * len(rough)
    stepped = np.flatnonzero([bool(cuts) for cuts in rough])
    if not len(stepped):
        return found
    some = Batch(clean.values[stepped], clean.lengths[stepped])
    rows = [row[:length] for row, length in zip(some.values, some.lengths, strict=True)]
    units = np.array([_unit(row, rough[number], deviations) for row, number in zip(rows, stepped, strict=True)])
    cuts = partition(Batch(some.values / units[:, None], some.lengths), _BY_LENGTH / deviations**2)
    for number, row, places in zip(stepped, rows, cuts, strict=True):
        found[number] = tuple(_steps(row, _firm(row, places)))
    return found


def _unit(row: Floats, cuts: Sequence[int], deviations: float) -> float:
    """How far one value stands out that is worth a cut: the noise, times a quantile like Student's."""
    noise, freedom = _noise(row, cuts)
    return noise * _t_of(deviations, freedom)


def _noise(row: Floats, cuts: Sequence[int]) -> tuple[float, int]:
    """The spread around the pieces, more where it has a memory, and its degrees of freedom."""
    pieces = np.split(row, cuts)
    rest = np.concatenate([piece - piece.mean() for piece in pieces])
    freedom = max(len(row) - len(pieces), 1)
    return max(math.sqrt(float(rest @ rest) / freedom * memory(rest, len(pieces))), LEAST_SPREAD), freedom


def _firm(row: Floats, cuts: Sequence[int]) -> Sequence[int]:
    """The cuts without the last one, if its step hardly shows without its furthest value: that may be a bad night."""
    if not cuts:
        return cuts
    noise, _ = _noise(row, cuts)
    begin, cut = [0, *cuts][-2:]
    apart = row[cut:] - row[begin:cut].mean()
    rest = np.sort(apart * math.copysign(1.0, apart.mean()))[:-1]
    error = noise * math.sqrt(1 / len(rest) + 1 / (cut - begin))
    return cuts if rest.mean() >= _FIRM * error else cuts[:-1]


def _steps(row: Floats, cuts: Sequence[int]) -> Iterator[Step]:
    noise, freedom = _noise(row, cuts)
    ends = [0, *cuts, len(row)]
    for begin, at, end in zip(ends, ends[1:], ends[2:], strict=False):
        gains = _gains(row[begin:end]) / noise**2
        low, high = begin + 1 + np.searchsorted(_shares(gains), (_TAIL, 1 - _TAIL))
        lengths = at - begin, end - at
        # What the lengths of two pieces cost more than that of both together.
        price = sum(math.log(length / LEAST) for length in lengths) - math.log(sum(lengths) / LEAST)
        evidence = _z_of(math.sqrt(gains[at - begin - 1]), freedom) ** 2 - _BY_LENGTH * price
        yield Step(
            at, min(int(low), at) - 1, max(int(high), at), math.exp(row[begin:at].mean()), math.exp(row[at:end].mean()),
            math.erfc(_WORTH * math.sqrt(max(evidence, 0.0) / 2)),
            noise * math.sqrt(sum(1 / length for length in lengths)),
        )  # fmt: skip


def _shares(gains: Floats) -> Floats:
    """How likely the step lies at each place or before it, if it was as likely everywhere before one looked."""
    weights = np.exp((gains - gains.max()) / 2).cumsum()
    shares: Floats = weights / weights[-1]
    return shares


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
    return math.sqrt(freedom * math.log1p(t**2 / freedom)) * (8 * freedom + 1) / (8 * freedom + 3)
