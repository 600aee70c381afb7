"""Finds steps in series with one value per commit: where the level changed, by how much, and with which confidence.

Series are searched in logarithms, so that a step is a ratio. Many series are searched at once. Single outliers are
replaced by the median of their neighbours. Then each series is cut into pieces of constant level. The cuts minimise a
cost, to which each cut adds a price, so that flat series are rarely cut.

The price is in units of the series' own noise. The noise is first estimated from differences of neighbours, then from
the residuals around the levels of the pieces, increased for autocorrelation. reports/asv_cpu_202611 shows how often the
found steps are right.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fp8bench.analysis.stats import FloatArray
from fp8bench.model import Interval

# A level has at least this many values, so that one or two outliers are not a level. The first level of a series needs
# more.
MIN_LEVEL_LENGTH = 3
MIN_FIRST_LEVEL_LENGTH = 8
# The price of a second cut is added for a level with fewer values than this.
MIN_SETTLED_LEVEL_LENGTH = 8

Counts = NDArray[np.intp]


class SeriesBatch(NamedTuple):
    """Several series as rows of a table. `lengths` has the length of each series. Values beyond this length are
    ignored.
    """

    values: FloatArray
    lengths: Counts


def find_series_cuts(batch: SeriesBatch, length_price: float) -> list[list[int]]:
    """Returns where each series is cut: the first index of every piece except the first piece.

    Dynamic programming finds the cuts with the lowest cost. The cost is the sum of squares around the means of the
    pieces, plus 1 per cut, plus `length_price` times the logarithm of each piece's length. A short level costs 1 more.
    Callers divide the values by the price of a cut, which has the unit of the values. The 1 is this price, squared.

    The logarithms make a cut in the middle of a piece more expensive than a cut near its end: of all pairs of lengths
    with the same sum, two equal lengths have the largest sum of logarithms. This is intended, because noise finds many
    places to cut in the middle of a long series, but few near the end, where new steps are.

    The search goes from left to right, because the best cuts before a cut do not depend on the values after it.
    """
    series_count, longest_length = batch.values.shape
    rows = np.arange(series_count)
    # These three arrays begin with the longest pieces: index i stands for pieces with (longest_length - i) values. So a
    # slice of them has the order of pieces that begin later and later, and all end at the same index.
    series_piece_lengths = np.arange(longest_length, 0, -1)
    length_prices, weights = length_price * np.log(series_piece_lengths / MIN_LEVEL_LENGTH), -1.0 / series_piece_lengths
    running_sums = np.zeros((series_count, longest_length + 1))
    # Subtract the first value of each series before summing, so that no digits are lost.
    (batch.values - batch.values[:, :1]).cumsum(axis=1, out=running_sums[:, 1:])
    # The lowest cost of the first n values, for each n. It excludes the sum of their squares, which does not depend on
    # the cuts.
    lowest_cost_by_end = np.full((series_count, longest_length + 1), np.inf)
    lowest_cost_by_end[:, 0] = 0.0
    last_cut, last_cut_of_whole_series = np.zeros((2, series_count, longest_length + 1), dtype=np.intp)
    distinct_series_lengths = set(batch.lengths.tolist())
    for end in range(MIN_LEVEL_LENGTH, longest_length + 1):
        # The last piece before `end` begins at 0 or later. Its length is between `end` and MIN_LEVEL_LENGTH.
        begin_slice = slice(end - MIN_LEVEL_LENGTH + 1)
        length_slice = slice(longest_length - end, longest_length - MIN_LEVEL_LENGTH + 1)
        # A piece's sum of squares around its mean is its sum of squares minus (its sum)^2 / length.
        negative_piece_sums = running_sums[:, begin_slice] - running_sums[:, end : end + 1]
        cost_by_piece_begin = np.square(negative_piece_sums, out=negative_piece_sums)
        cost_by_piece_begin *= weights[length_slice]
        cost_by_piece_begin += length_prices[length_slice]
        cost_by_piece_begin += lowest_cost_by_end[:, begin_slice]
        if end in distinct_series_lengths:
            # Unlike earlier levels, the last level of a series has no additional price if it is short.
            last_cut_of_whole_series[:, end] = cost_by_piece_begin.argmin(axis=1)
        if end >= MIN_FIRST_LEVEL_LENGTH:
            # Levels that begin here or later are short. The first level begins at 0 and has no additional price.
            first_short_level_begin = max(end - MIN_SETTLED_LEVEL_LENGTH + 1, 1)
            cost_by_piece_begin[:, first_short_level_begin:] += 1.0
            last_cut[:, end] = cost_by_piece_begin.argmin(axis=1)
            lowest_cost_by_end[:, end] = cost_by_piece_begin[rows, last_cut[:, end]] + 1.0
    last_cut_by_row = last_cut_of_whole_series[rows, batch.lengths].tolist()
    return [_trace_cut_positions(row, cut) for row, cut in zip(last_cut, last_cut_by_row, strict=True)]


def _trace_cut_positions(last_cut: Counts, position: int) -> list[int]:
    cut_positions = []
    while position > 0:
        cut_positions.append(position)
        position = int(last_cut[position])
    return cut_positions[::-1]


# For Gaussian values with standard deviation 1, the median of their magnitudes.
_MEDIAN_OF_GAUSSIAN = 0.6745
# Differences are clipped at this many standard deviations, so that steps and outliers do not count as noise.
_OUTLIER_CLIP_DEVIATIONS = 3.0
# If more than half of the values equal their neighbours, the median difference is 0. Then the noise is estimated from
# this share of the differences, the smallest ones.
_SHARE_OF_SMALLEST_DIFFERENCES = 0.9
# The smallest noise of a series, as a logarithm. Values have six digits, and smaller differences do not matter.
MIN_NOISE = 1e-5
_NEIGHBOURS_PER_SIDE = 2
# A value is an outlier if it is this many standard deviations from the median of five: itself and its neighbours.
_OUTLIER_LIMIT_IN_DEVIATIONS = 4.0
# Up to this number divided by sqrt(n), a correlation of neighbours counts as chance. Of 20 series without
# autocorrelation, one has a larger correlation.
_CHANCE_CORRELATION_FACTOR = 1.3
_MAX_NEIGHBOUR_CORRELATION = 0.7


def estimate_noise(batch: SeriesBatch) -> FloatArray:
    """Returns the noise of each series, estimated from the differences of neighbouring values. In these differences,
    levels and trends cancel.
    """
    counts = batch.lengths - 1
    neighbour_differences = np.abs(np.diff(batch.values, axis=1))
    # Differences beyond the end of a series are sorted to the end of its row, where the median does not read them.
    neighbour_differences[np.arange(neighbour_differences.shape[1]) >= counts[:, None]] = np.inf
    neighbour_differences.sort(axis=1)
    row_indices = np.arange(len(neighbour_differences))
    median_differences = (
        neighbour_differences[row_indices, (counts - 1) // 2] + neighbour_differences[row_indices, counts // 2]
    ) / 2
    squared_differences = np.where(np.isfinite(neighbour_differences), neighbour_differences, 0.0) ** 2
    trimmed_count = (counts * _SHARE_OF_SMALLEST_DIFFERENCES).astype(np.intp)
    trimmed_mean_square = squared_differences.cumsum(axis=1)[row_indices, trimmed_count - 1] / trimmed_count
    preliminary_noise = np.maximum(median_differences / _MEDIAN_OF_GAUSSIAN, np.sqrt(trimmed_mean_square))
    difference_clipping_limit = _OUTLIER_CLIP_DEVIATIONS * np.maximum(preliminary_noise, MIN_NOISE)[:, None]
    mean_clipped_square_changes = np.minimum(squared_differences, difference_clipping_limit**2).sum(axis=1) / counts
    # A difference of two values has twice the variance of one value.
    noise: FloatArray = np.maximum(np.sqrt(mean_clipped_square_changes / 2), MIN_NOISE)
    return noise


def replace_outliers(batch: SeriesBatch, noise: FloatArray) -> SeriesBatch:
    """Replaces each outlier by the median of five values: itself and its neighbours, two on each side.

    For the first two values of a series, the five values are the first five, and for the last two values the last five.
    So three values of a new level at the end are not replaced.
    """
    window_centre_indices = np.clip(
        np.arange(batch.values.shape[1]), _NEIGHBOURS_PER_SIDE, batch.lengths[:, None] - 1 - _NEIGHBOURS_PER_SIDE
    )
    window_values = [
        np.take_along_axis(batch.values, window_centre_indices + offset, axis=1)
        for offset in range(-_NEIGHBOURS_PER_SIDE, _NEIGHBOURS_PER_SIDE + 1)
    ]
    window_medians = np.sort(window_values, axis=0)[_NEIGHBOURS_PER_SIDE]
    is_outlier = np.abs(batch.values - window_medians) > _OUTLIER_LIMIT_IN_DEVIATIONS * noise[:, None]
    return SeriesBatch(np.where(is_outlier, window_medians, batch.values), batch.lengths)


def autocorrelation_factor(residuals: FloatArray, pieces: int) -> float:
    """Returns the factor by which autocorrelation increases the variance of means: (1 + r) / (1 - r), or 1.

    r is the correlation of neighbours, and the factor is 1 if r may be chance. Subtracting the mean of each piece
    hides some of the correlation, so that part is added back.
    """
    residual_sum_of_squares = float(residuals @ residuals)
    if residual_sum_of_squares == 0:
        return 1.0
    neighbour_correlation = float(residuals[1:] @ residuals[:-1]) / residual_sum_of_squares + pieces / len(residuals)
    if neighbour_correlation <= _CHANCE_CORRELATION_FACTOR / math.sqrt(len(residuals)):
        return 1.0
    neighbour_correlation = min(neighbour_correlation, _MAX_NEIGHBOUR_CORRELATION)
    return (1 + neighbour_correlation) / (1 - neighbour_correlation)


# The values of a series. They are positive, in the order of their commits, and have no gaps.
SeriesValues = Sequence[float] | FloatArray

# A series with fewer values cannot have a step.
MIN_SERIES_LENGTH = MIN_FIRST_LEVEL_LENGTH + MIN_LEVEL_LENGTH
# The price of a cut in the final search: a single value must deviate by this many standard deviations to justify a cut.
# Like _FIRST_CUT_PRICE and _LENGTH_PRICE, this number was chosen by experiments (`suites/change_points.py` of commit
# 3e6cdca3).
FINAL_CUT_PRICE = 3.35
# The share of flat series of Gaussian noise in which the search finds a step.
FALSE_POSITIVE_STEP_SHARE = 0.005
_FIRST_CUT_PRICE = 3.0
_LENGTH_PRICE = 2.0
# The last step of a series must not depend on a single value. Without the most distant value of the last level, the
# mean of this level must still differ from the previous level by this many standard errors.
_FIRM_STEP_STANDARD_ERRORS = 2.1
# If the most distant of three values is dropped, their mean moves by this many standard deviations on average.
_FURTHEST_VALUE_SHIFT = 0.42
# The deviation of a step, in standard errors, is multiplied by this factor before it is converted to a p-value, because
# noise and index of the step are estimated from the same series. With this factor, the p-values of flat series of 15 to
# 300 values are correct.
_P_VALUE_DEVIATION_FACTOR = 0.8
# The commit that caused a step is before the reported range of commits with this probability, and after the range with
# the same probability.
_STEP_OUTSIDE_PROBABILITY = 0.03
# The interval of a step's ratio: its confidence level, and its half-width in standard errors.
_STEP_INTERVAL_LEVEL = 0.99
_HALF_WIDTH_STANDARD_ERRORS = 2.576
# The number of series in a batch, chosen so that the tables fit into a processor's cache.
_BATCH_SIZE = 256


@dataclass(frozen=True)
class Step:
    """A change of level in a series.

    The new level most likely begins at index `at`. `low` is the last index that certainly has the old level. `high`
    is the first index that certainly has the new level. `p_value` is the probability that a flat series of the same
    length has a step at least as clear by chance. `error` is the standard error of the ratio's logarithm, without
    outliers.
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
        """The new level over the old level, with a 99% interval. Above 1 is worse."""
        log_ratio = math.log(self.after / self.before)
        half_width = _HALF_WIDTH_STANDARD_ERRORS * self.error
        return Interval(
            math.exp(log_ratio),
            math.exp(log_ratio - half_width),
            math.exp(log_ratio + half_width),
            _STEP_INTERVAL_LEVEL,
        )


def find_level_steps(series: Sequence[SeriesValues]) -> list[tuple[Step, ...]]:
    """Returns for each series its steps (changes of the level), in the order of its values. Searching all series
    together is much faster than searching them one by one.
    """
    series_arrays = [np.asarray(values, dtype=np.float64) for values in series]
    for array in series_arrays:
        if not (np.isfinite(array).all() and (array > 0).all()):
            raise ValueError("values must be positive and finite, because steps are searched in logarithms")
    # Search series of similar length together, because a batch is padded to its longest series.
    searchable_series_indices = [
        number for number, array in enumerate(series_arrays) if len(array) >= MIN_SERIES_LENGTH
    ]
    searchable_series_indices.sort(key=lambda number: len(series_arrays[number]))
    steps_by_series: list[tuple[Step, ...]] = [()] * len(series)
    for batch_begin in range(0, len(searchable_series_indices), _BATCH_SIZE):
        batch_indices = searchable_series_indices[batch_begin : batch_begin + _BATCH_SIZE]
        batch = _make_batch([series_arrays[number] for number in batch_indices])
        for number, steps in zip(batch_indices, _find_batch_steps(batch), strict=True):
            steps_by_series[number] = steps
    return steps_by_series


class PieceLevel(NamedTuple):
    """The newest level of a series: the noise of its values, the degrees of freedom of this noise, and the length of
    the level.
    """

    noise: float
    freedom: int
    length: int


def find_newest_levels(series: Sequence[SeriesValues]) -> list[PieceLevel | None]:
    """Returns the newest level of each series, or None for a series that is too short for a step."""
    newest_piece_levels: list[PieceLevel | None] = []
    for values, steps in zip(series, find_level_steps(series), strict=True):
        if len(values) < MIN_SERIES_LENGTH:
            newest_piece_levels.append(None)
            continue
        batch = _make_batch([np.asarray(values, dtype=np.float64)])
        row = replace_outliers(batch, estimate_noise(batch)).values[0]
        level_start_indices = [0, *(step.at for step in steps)]
        noise, degrees_of_freedom = _estimate_residual_noise(row, level_start_indices[1:])
        newest_piece_levels.append(PieceLevel(noise, degrees_of_freedom, len(values) - level_start_indices[-1]))
    return newest_piece_levels


def smallest_visible_step(level: PieceLevel, chance: float) -> tuple[float, float]:
    """Returns the logarithm of the smallest step (change of level) that would be found if the last MIN_LEVEL_LENGTH
    values of the newest level were after it. Also returns the standard error of this logarithm.

    Such a step is worth the price of a cut, is still found without the most distant value after it, and has a p-value
    of at most `chance`.
    """
    new_value_count = MIN_LEVEL_LENGTH
    old_value_count = level.length - new_value_count
    if old_value_count < MIN_LEVEL_LENGTH:
        return math.inf, math.inf
    step_variance_factor = 1 / old_value_count + 1 / new_value_count
    log_length_increase = _compute_log_length_increase(old_value_count, new_value_count)
    # 1. Compute how large a step must be so that a cut lowers the sum of squares by more than the cut's price. As in
    # find_series_cuts, this price is 1, plus 1 for a short level, plus the price of lengths. It is a multiple of the
    # squared FINAL_CUT_PRICE.
    short_level_price = 1 if old_value_count < MIN_SETTLED_LEVEL_LENGTH else 0
    total_cut_price = 1 + short_level_price + _LENGTH_PRICE / FINAL_CUT_PRICE**2 * log_length_increase
    step_worth_a_cut = _to_student_t(FINAL_CUT_PRICE, level.freedom) * math.sqrt(total_cut_price * step_variance_factor)
    # 2. Compute how large a step must be to be found without the most distant value after it.
    robust_step = (
        _FIRM_STEP_STANDARD_ERRORS * math.sqrt(1 / (new_value_count - 1) + 1 / old_value_count) + _FURTHEST_VALUE_SHIFT
    )
    # 3. Compute how large a step must be to have a p-value of at most `chance`. This inverts how _make_level_steps
    # computes p-values.
    unpenalised_deviations = NormalDist().inv_cdf(1 - chance / 2) / _P_VALUE_DEVIATION_FACTOR
    squared_gaussian_deviations = unpenalised_deviations**2 + _LENGTH_PRICE * log_length_increase
    step_error = math.sqrt(step_variance_factor)
    significant_step = _to_student_t(math.sqrt(max(squared_gaussian_deviations, 0.0)), level.freedom) * step_error
    return level.noise * max(step_worth_a_cut, robust_step, significant_step), level.noise * step_error


def _make_batch(series: Sequence[FloatArray]) -> SeriesBatch:
    """Returns the logarithms of the series as rows of a table."""
    lengths = np.array([len(values) for values in series], dtype=np.intp)
    table = np.zeros((len(series), int(lengths.max())))
    for row, values in zip(table, series, strict=True):
        row[: len(values)] = np.log(values)
    return SeriesBatch(table, lengths)


def _find_batch_steps(batch: SeriesBatch) -> list[tuple[Step, ...]]:
    """Returns the steps (changes of level) of each series in a batch."""
    # 1. Search for cuts at a price proportional to the noise.
    noise = estimate_noise(batch)
    values, lengths = replace_outliers(batch, noise).values, batch.lengths
    first_cut_prices = _FIRST_CUT_PRICE * noise
    preliminary_cuts_by_row = find_series_cuts(
        SeriesBatch(values / first_cut_prices[:, None], lengths), _LENGTH_PRICE / _FIRST_CUT_PRICE**2
    )
    steps: list[tuple[Step, ...]] = [()] * len(preliminary_cuts_by_row)
    cut_row_indices = [row_index for row_index, cuts in enumerate(preliminary_cuts_by_row) if cuts]
    if not cut_row_indices:
        return steps
    # 2. In the series with cuts, search again at a price proportional to the noise around their levels. The factor is a
    # value of Student's t, because this noise is only an estimate.
    values, lengths = values[cut_row_indices], lengths[cut_row_indices]
    rows = [row[:length] for row, length in zip(values, lengths, strict=True)]
    row_cut_prices = []
    for row_index, row in zip(cut_row_indices, rows, strict=True):
        residual_noise, degrees_of_freedom = _estimate_residual_noise(row, preliminary_cuts_by_row[row_index])
        row_cut_prices.append(residual_noise * _to_student_t(FINAL_CUT_PRICE, degrees_of_freedom))
    final_cuts = find_series_cuts(
        SeriesBatch(values / np.array(row_cut_prices)[:, None], lengths), _LENGTH_PRICE / FINAL_CUT_PRICE**2
    )
    for row_index, row, cuts in zip(cut_row_indices, rows, final_cuts, strict=True):
        steps[row_index] = tuple(_make_level_steps(row, _drop_weak_last_cut(row, cuts)))
    return steps


def _estimate_residual_noise(row: FloatArray, cuts: Sequence[int]) -> tuple[float, int]:
    """Returns the noise of the values around the levels of their pieces, increased for autocorrelation, and the degrees
    of freedom of this noise.
    """
    series_pieces = np.split(row, cuts)
    residuals = np.concatenate([piece - piece.mean() for piece in series_pieces])
    degrees_of_freedom = max(len(row) - len(series_pieces), 1)
    residual_variance = (
        float(residuals @ residuals) / degrees_of_freedom * autocorrelation_factor(residuals, len(series_pieces))
    )
    return max(math.sqrt(residual_variance), MIN_NOISE), degrees_of_freedom


def _drop_weak_last_cut(row: FloatArray, cuts: Sequence[int]) -> Sequence[int]:
    """Drops the last cut of a series if a single value, which may be an outlier, makes the new level look different."""
    if not cuts:
        return cuts
    noise, _ = _estimate_residual_noise(row, cuts)
    level_begin, cut = [0, *cuts][-2:]
    distances_from_level = row[cut:] - row[level_begin:cut].mean()
    # Give the distances the sign of the step, so that the largest one belongs to the most distant value.
    distances_without_furthest = np.sort(distances_from_level * math.copysign(1.0, distances_from_level.mean()))[:-1]
    error = noise * math.sqrt(1 / len(distances_without_furthest) + 1 / (cut - level_begin))
    return cuts if distances_without_furthest.mean() >= _FIRM_STEP_STANDARD_ERRORS * error else cuts[:-1]


def _make_level_steps(row: FloatArray, cuts: Sequence[int]) -> Iterator[Step]:
    noise, degrees_of_freedom = _estimate_residual_noise(row, cuts)
    piece_boundaries = [0, *cuts, len(row)]
    for piece_begin, cut, piece_end in zip(piece_boundaries, piece_boundaries[1:], piece_boundaries[2:], strict=False):
        # Twice the logarithm of each cut's likelihood, compared with no cut. It is also the square of the cut's t
        # statistic.
        doubled_log_likelihoods = _sum_of_squares_reductions(row[piece_begin:piece_end]) / noise**2
        # Proportional to the probability that the new level begins at or before each index, with a uniform prior.
        cumulative_weights = np.exp((doubled_log_likelihoods - doubled_log_likelihoods.max()) / 2).cumsum()
        tail_indices = np.searchsorted(
            cumulative_weights / cumulative_weights[-1], (_STEP_OUTSIDE_PROBABILITY, 1 - _STEP_OUTSIDE_PROBABILITY)
        )
        earliest_cut, latest_cut = piece_begin + 1 + tail_indices
        lengths = cut - piece_begin, piece_end - cut
        # Convert the t statistic of the step to an equally rare number of Gaussian standard deviations (Wallace's
        # approximation).
        t_squared = float(doubled_log_likelihoods[cut - piece_begin - 1])
        gaussian_deviations = math.sqrt(degrees_of_freedom * math.log1p(t_squared / degrees_of_freedom))
        gaussian_deviations = gaussian_deviations * (8 * degrees_of_freedom + 1) / (8 * degrees_of_freedom + 3)
        penalised_squared_deviations = gaussian_deviations**2 - _LENGTH_PRICE * _compute_log_length_increase(*lengths)
        yield Step(
            cut,
            min(int(earliest_cut), cut) - 1,
            max(int(latest_cut), cut),
            math.exp(row[piece_begin:cut].mean()),
            math.exp(row[cut:piece_end].mean()),
            math.erfc(_P_VALUE_DEVIATION_FACTOR * math.sqrt(max(penalised_squared_deviations, 0.0) / 2)),
            noise * math.sqrt(sum(1 / length for length in lengths)),
        )


def _compute_log_length_increase(*lengths: int) -> float:
    """Returns by how much a cut into pieces of these lengths increases the sum of the logarithms of lengths, which is
    part of the cost that find_series_cuts minimises.
    """
    sum_of_logarithms = sum(math.log(length / MIN_LEVEL_LENGTH) for length in lengths)
    return sum_of_logarithms - math.log(sum(lengths) / MIN_LEVEL_LENGTH)


def _sum_of_squares_reductions(values: FloatArray) -> FloatArray:
    """Returns by how much each possible cut of a piece reduces its sum of squared deviations from the mean. The first
    cut is before the second value.
    """
    count = len(values)
    first_piece_lengths = np.arange(1, count)
    running_sums = values.cumsum()
    mean_differences = running_sums[:-1] / first_piece_lengths - (running_sums[-1] - running_sums[:-1]) / (
        count - first_piece_lengths
    )
    sum_of_squares_reductions: FloatArray = (
        mean_differences**2 * first_piece_lengths * (count - first_piece_lengths) / count
    )
    return sum_of_squares_reductions


def _to_student_t(deviations: float, freedom: int) -> float:
    """Returns the value of Student's t that is as rare as a value `deviations` standard deviations from a Gaussian's
    mean (Wallace's approximation).
    """
    scaled_deviations = deviations * (8 * freedom + 3) / (8 * freedom + 1)
    return math.sqrt(freedom * math.expm1(scaled_deviations**2 / freedom))
