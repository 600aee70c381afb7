"""Steps in a series of values, one a commit: where the level changed, by how much, and how surely.

Series are searched in logarithms, so that a step is a ratio, and many at once. Single outliers (bad nights) are
replaced by their surroundings. Then each series is cut into pieces of one level, at a price for each cut that flat
series rarely pay. The price is in units of the series' own noise: first of differences of neighbours, then of the
residuals around the pieces, where autocorrelation counts as more noise. reports/asv_cpu_202611 shows how often that is
right.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fp8bench.analysis.stats import Floats
from fp8bench.model import Interval

# The least length of a level, so that a bad night or two is not one; the first level needs more values before a step.
LEAST = 3
LEAST_FIRST = 8
# A level with fewer values than this costs as much as another cut.
SETTLED = 8

Counts = NDArray[np.intp]


@dataclass(frozen=True)
class Batch:
    """Series as rows of a table, each of the length in `lengths`; values beyond its end do not count."""

    values: Floats
    lengths: Counts

    @property
    def inside(self) -> NDArray[np.bool_]:
        rows: NDArray[np.bool_] = np.arange(self.values.shape[1]) < self.lengths[:, None]
        return rows


def partition(batch: Batch, by_length: float) -> list[list[int]]:
    """Returns where each series is cut: the first index of every piece but the first one.

    Dynamic programming finds the cuts with the least sum of squares around the means of the pieces, plus 1 per cut and,
    for each piece, `by_length` times the logarithm of its length: the best way to cut the first t values contains a
    best way to cut fewer. Pieces are priced by length because noise has many places to cut in the middle of a long
    series, and few near its end, where new steps are. Short levels cost 1 more.
    """
    series, most = batch.values.shape
    rows = np.arange(series)
    # Indexed by (longest series - length of the piece).
    prices, weights = by_length * np.log(np.arange(most, 0, -1) / LEAST), -1.0 / np.arange(most, 0, -1)
    sums = np.zeros((series, most + 1))
    (batch.values - batch.values[:, :1]).cumsum(axis=1, out=sums[:, 1:])  # a common level would cost digits
    # The least cost of the first s values, without the sum of their squares, which is the same for all cuts.
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
            cost[:, end] = total[rows, last[:, end]] + 1.0
    ends_of_rows = last_before_end[rows, batch.lengths].tolist()
    return [_trace_cuts(row, cut) for row, cut in zip(last, ends_of_rows, strict=True)]


def _trace_cuts(last: Counts, cut: int) -> list[int]:
    cuts = []
    while cut > 0:
        cuts.append(cut)
        cut = int(last[cut])
    return cuts[::-1]


# The median of |x| for Gaussian values of spread 1.
_MEDIAN = 0.6745
# Differences are clipped at this many spreads, so that steps and bad nights do not count as noise.
_MOST = 3.0
# If more than half of the values equal their neighbours, the median is 0; then the noise comes from this share of the
# smallest differences.
_TRIMMED_SHARE = 0.9
# In log units: series have six digits, and nothing that matters is smaller.
LEAST_SPREAD = 1e-5
_AROUND = 2
# A value this many spreads from the median of five, itself and its neighbours, is a bad night.
_BAD = 4.0
# In units of 1/sqrt(n): without memory one series in twenty has a larger correlation.
_CHANCE = 1.3
_MOST_CORRELATION = 0.7


def spreads(batch: Batch) -> Floats:
    """Returns the noise of each series, from the differences of neighbours, where levels and trends cancel."""
    counts = batch.lengths - 1
    steps = np.where(batch.inside[:, 1:], np.abs(np.diff(batch.values, axis=1)), np.inf)
    steps.sort(axis=1)
    row = np.arange(len(steps))
    middle = (steps[row, (counts - 1) // 2] + steps[row, counts // 2]) / 2
    squares = np.where(np.isfinite(steps), steps, 0.0) ** 2
    smallest = (counts * _TRIMMED_SHARE).astype(np.intp)
    trimmed = squares.cumsum(axis=1)[row, smallest - 1] / smallest
    rough = np.maximum(np.maximum(middle / _MEDIAN, np.sqrt(trimmed)), LEAST_SPREAD)
    clipped = np.minimum(squares, (_MOST * rough[:, None]) ** 2).sum(axis=1) / counts
    spread: Floats = np.maximum(np.sqrt(clipped / 2), LEAST_SPREAD)
    return spread


def without_bad_nights(batch: Batch, spread: Floats) -> Batch:
    """Replaces outliers by the median of their neighbours.

    At either end that is the median of the outermost five, so that three values of a new level are enough to be kept.
    """
    centre = np.clip(np.arange(batch.values.shape[1]), _AROUND, batch.lengths[:, None] - 1 - _AROUND)
    around = [np.take_along_axis(batch.values, centre + by, axis=1) for by in range(-_AROUND, _AROUND + 1)]
    middle = np.sort(around, axis=0)[_AROUND]
    bad = np.abs(batch.values - middle) > _BAD * spread[:, None]
    return Batch(np.where(bad, middle, batch.values), batch.lengths)


def memory(residuals: Floats, pieces: int) -> float:
    """Returns how much more means of many values vary than without autocorrelation: 1, or (1 + r) / (1 - r).

    r is the correlation of neighbours, if it is more than chance would give. The mean of a piece follows its values,
    which hides some of it; that is added back.
    """
    total = float(residuals @ residuals)
    if total == 0:
        return 1.0
    correlation = float(residuals[1:] @ residuals[:-1]) / total + pieces / len(residuals)
    if correlation <= _CHANCE / math.sqrt(len(residuals)):
        return 1.0
    correlation = min(correlation, _MOST_CORRELATION)
    return (1 + correlation) / (1 - correlation)


# Values above 0 in the order of their commits, without gaps.
Values = Sequence[float] | Floats

# A shorter series has no room for a step.
LEAST_VALUES = LEAST_FIRST + LEAST
# The price of a cut in deviations of one value, at the last and at the first search, and that of the logarithm of a
# piece's length, in squares of deviations. Chosen by trials (`suites/change_points.py` of commit 3e6cdca3).
DEVIATIONS = 3.35
# The share of flat Gaussian series that have a step by chance.
BY_CHANCE = 0.005
_FIRST_DEVIATIONS = 3.0
_BY_LENGTH = 2.0
# Without its furthest value, the mean of the last level must be this many standard errors from the level before it.
_FIRM = 2.1
# Dropping the furthest of three values lowers their mean by this many deviations on average.
_FURTHEST = 0.42
# Since the noise is estimated from the series and the place was chosen, a flat series is cut somewhere as often as if
# deviations were smaller by this factor. Counted for 15 to 300 values.
_WORTH = 0.8
# The chance that the true step precedes its range, and the same chance for following it.
_TAIL = 0.03
# Gaussian deviations to either side for this level.
_LEVEL = 0.99
_REACH = 2.576
# Series per batch: their tables fit into a processor's cache.
_AT_ONCE = 256


@dataclass(frozen=True)
class Step:
    """A change of level.

    The new level most likely begins at index `at`. `low` is the last value that certainly has the old level and `high`
    the first that certainly has the new one. `p_value` is the chance that a flat series of that length shows such a
    step or a clearer one anywhere. `error` is the standard error of the ratio's logarithm, without bad nights.
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
        """The new level over the old one, with a 99% interval: above 1 is worse."""
        log = math.log(self.after / self.before)
        reach = _REACH * self.error
        return Interval(math.exp(log), math.exp(log - reach), math.exp(log + reach), _LEVEL)


def steps_of_many(series: Sequence[Values], deviations: float = DEVIATIONS) -> list[tuple[Step, ...]]:
    """Returns the steps of each series, in order; much faster than searching them one by one.

    `deviations` is the price of a cut: a lower one finds more steps, and more false ones.
    """
    arrays = [np.asarray(values, dtype=np.float64) for values in series]
    for array in arrays:
        if not (np.isfinite(array).all() and (array > 0).all()):
            raise ValueError("a value is not above 0, or not finite: so it has no logarithm")
    # Series of similar length are searched together, because a batch is padded to its longest.
    numbers = [number for number, array in enumerate(arrays) if len(array) >= LEAST_VALUES]
    numbers.sort(key=lambda number: len(arrays[number]))
    steps_by_series: list[tuple[Step, ...]] = [()] * len(series)
    for begin in range(0, len(numbers), _AT_ONCE):
        chosen = numbers[begin : begin + _AT_ONCE]
        batch = _table([arrays[number] for number in chosen])
        for number, steps in zip(chosen, _find_steps(batch, deviations), strict=True):
            steps_by_series[number] = steps
    return steps_by_series


class PieceLevel(NamedTuple):
    """The newest level of a series: the noise of a value around it, its degrees of freedom, and its length."""

    noise: float
    freedom: int
    length: int


def newest_levels(series: Sequence[Values]) -> list[PieceLevel | None]:
    """Returns the newest level of each series; None for one that is too short for a step."""
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
    """Returns the smallest step, as a logarithm, that would be found at the end of a level, and its standard error.

    It must pass the rules for cuts and firm steps, and have a p-value of at most `chance`.
    """
    new_values, old_values = LEAST, level.length - LEAST
    if old_values < LEAST:
        return math.inf, math.inf
    variance = 1 / old_values + 1 / new_values
    lengths = math.log(old_values / LEAST) - math.log((old_values + new_values) / LEAST)
    # 1. The step must pay for its cut.
    price = 1 + (old_values < SETTLED) + _BY_LENGTH / DEVIATIONS**2 * lengths
    cut = _t_of(DEVIATIONS, level.freedom) * math.sqrt(price * variance)
    # 2. It must hold without its furthest value.
    firm = _FIRM * math.sqrt(1 / (new_values - 1) + 1 / old_values) + _FURTHEST
    # 3. Its p-value must be small.
    evidence = (NormalDist().inv_cdf(1 - chance / 2) / _WORTH) ** 2 + _BY_LENGTH * lengths
    sure = _t_of(math.sqrt(max(evidence, 0.0)), level.freedom) * math.sqrt(variance)
    return level.noise * max(cut, firm, sure), level.noise * math.sqrt(variance)


def _table(series: Sequence[Floats]) -> Batch:
    """Returns the logarithms of the series as rows."""
    lengths = np.array([len(values) for values in series], dtype=np.intp)
    table = np.zeros((len(series), int(lengths.max())))
    for row, values in zip(table, series, strict=True):
        row[: len(values)] = np.log(values)
    return Batch(table, lengths)


def _find_steps(batch: Batch, deviations: float) -> list[tuple[Step, ...]]:
    """Searches with the noise of differences; if that finds steps, again with the residuals around the pieces."""
    spread = spreads(batch)
    clean = without_bad_nights(batch, spread)
    units = _FIRST_DEVIATIONS * spread
    rough = partition(Batch(clean.values / units[:, None], clean.lengths), _BY_LENGTH / _FIRST_DEVIATIONS**2)
    steps: list[tuple[Step, ...]] = [()] * len(rough)
    numbers = np.flatnonzero([bool(cuts) for cuts in rough])
    if not len(numbers):
        return steps
    stepped = Batch(clean.values[numbers], clean.lengths[numbers])
    rows = [row[:length] for row, length in zip(stepped.values, stepped.lengths, strict=True)]
    units = np.array([_unit(row, rough[number], deviations) for row, number in zip(rows, numbers, strict=True)])
    cuts = partition(Batch(stepped.values / units[:, None], stepped.lengths), _BY_LENGTH / deviations**2)
    for number, row, places in zip(numbers, rows, cuts, strict=True):
        steps[number] = tuple(_steps(row, _drop_weak_end(row, places)))
    return steps


def _unit(row: Floats, cuts: Sequence[int], deviations: float) -> float:
    """Returns how far off a value must be to be worth a cut: the noise times a quantile, as in Student's t."""
    noise, freedom = _noise(row, cuts)
    return noise * _t_of(deviations, freedom)


def _noise(row: Floats, cuts: Sequence[int]) -> tuple[float, int]:
    """Returns the spread around the pieces, enlarged by autocorrelation, and its degrees of freedom."""
    pieces = np.split(row, cuts)
    residuals = np.concatenate([piece - piece.mean() for piece in pieces])
    freedom = max(len(row) - len(pieces), 1)
    variance = float(residuals @ residuals) / freedom * memory(residuals, len(pieces))
    return max(math.sqrt(variance), LEAST_SPREAD), freedom


def _drop_weak_end(row: Floats, cuts: Sequence[int]) -> Sequence[int]:
    """Drops the last cut if its step depends on its furthest value, which may be a bad night."""
    if not cuts:
        return cuts
    noise, _ = _noise(row, cuts)
    begin, cut = [0, *cuts][-2:]
    distances = row[cut:] - row[begin:cut].mean()
    nearest = np.sort(distances * math.copysign(1.0, distances.mean()))[:-1]
    error = noise * math.sqrt(1 / len(nearest) + 1 / (cut - begin))
    return cuts if nearest.mean() >= _FIRM * error else cuts[:-1]


def _steps(row: Floats, cuts: Sequence[int]) -> Iterator[Step]:
    noise, freedom = _noise(row, cuts)
    ends = [0, *cuts, len(row)]
    for begin, at, end in zip(ends, ends[1:], ends[2:], strict=False):
        gains = _gains(row[begin:end]) / noise**2
        low, high = begin + 1 + np.searchsorted(_shares(gains), (_TAIL, 1 - _TAIL))
        lengths = at - begin, end - at
        # Two pieces cost more by length than their union.
        price = sum(math.log(length / LEAST) for length in lengths) - math.log(sum(lengths) / LEAST)
        # Convert to equally rare Gaussian deviations (Wallace's approximation of Student's t).
        gaussian = math.sqrt(freedom * math.log1p(math.sqrt(gains[at - begin - 1]) ** 2 / freedom))
        gaussian = gaussian * (8 * freedom + 1) / (8 * freedom + 3)
        evidence = gaussian**2 - _BY_LENGTH * price
        yield Step(
            at,
            min(int(low), at) - 1,
            max(int(high), at),
            math.exp(row[begin:at].mean()),
            math.exp(row[at:end].mean()),
            math.erfc(_WORTH * math.sqrt(max(evidence, 0.0) / 2)),
            noise * math.sqrt(sum(1 / length for length in lengths)),
        )


def _shares(gains: Floats) -> Floats:
    """Returns the chance that the step is at or before each place, if all places were equally likely beforehand."""
    weights = np.exp((gains - gains.max()) / 2).cumsum()
    shares: Floats = weights / weights[-1]
    return shares


def _gains(values: Floats) -> Floats:
    """Returns how much each cut of a piece reduces the sum of squares; the first cut is before the second value."""
    count = len(values)
    first = np.arange(1, count)
    sums = values.cumsum()
    distance = sums[:-1] / first - (sums[-1] - sums[:-1]) / (count - first)
    gains: Floats = distance**2 * first * (count - first) / count
    return gains


def _t_of(deviations: float, freedom: int) -> float:
    """Returns Student's t that is as rare as this many Gaussian deviations (Wallace's approximation)."""
    shrunk = deviations * (8 * freedom + 3) / (8 * freedom + 1)
    return math.sqrt(freedom * math.expm1(shrunk**2 / freedom))
