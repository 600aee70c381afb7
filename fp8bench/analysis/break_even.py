"""Finds from which size on a low precision is faster, from speed-ups that were measured at several sizes.

Between two measured sizes, the logarithm of the speed-up is interpolated linearly over the logarithm of the size, with
a lower and an upper bound. The bounds contain the confidence intervals at both sizes. They are widened by how far the
curve may deviate from a straight line, which is estimated from its bends at the neighbouring sizes. If the speed-up
leaps between two sizes, the leap may be anywhere between them. The interval of a crossing contains every size at which
the bounds include a speed-up of 1. Sizes outside the measured range are not judged.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import NamedTuple

import numpy as np

from fp8bench.analysis.stats import FloatArray
from fp8bench.analysis.verdicts import VERDICT_BAND, best_ratio, find_common_rounds
from fp8bench.model import Finding, Interval, Params, Record

# The number of sizes at which a precision must be measured before its break-even sizes are computed.
MIN_SWEEP_SIZES = 3
# The number of points at which the bounds are interpolated between two measured sizes.
_POINTS_PER_SIZE_GAP = 64
# The speed-up leaps between two neighbouring sizes if it changes there by this many times as much as between the next
# sizes on either side.
_SPEEDUP_LEAP_RATIO = 3.0


class TimeRatioAtSize(NamedTuple):
    """The ratio of a precision's time to the time of the case that it is compared with, at one size."""

    size: int
    ratio: Interval

    @property
    def within_noise(self) -> bool:
        return self.ratio.low <= 1 + VERDICT_BAND and self.ratio.high >= 1 - VERDICT_BAND


class SizeRange(NamedTuple):
    """A range of sizes. In this range a precision is faster (`is_faster` is True) or slower (False), or neither is
    certain (None).
    """

    is_faster: bool | None
    first_size: float
    last_size: float


class BreakEvenCrossing(NamedTuple):
    """The size at which a precision becomes faster (`becomes_faster`) or stops being faster. `low` and `high` bound the
    true size.
    """

    size: float
    low: float
    high: float
    becomes_faster: bool


@dataclass(frozen=True)
class BreakEven:
    """Where a precision is faster. `stretches` are ranges of sizes that cover all sizes from the smallest to the
    largest measured one. `crossings` are the sizes at which the precision becomes faster or slower. `within_noise`
    are the measured sizes whose speed-up is within noise.

    `level` is the confidence level of the intervals. It is 0 if any interval is only the range of a few rounds.
    """

    stretches: tuple[SizeRange, ...]
    crossings: tuple[BreakEvenCrossing, ...]
    within_noise: tuple[int, ...]
    level: float


def break_even(points: Sequence[TimeRatioAtSize]) -> BreakEven | None:
    """Returns the ranges of sizes in which a precision is faster or slower, and the sizes at which this changes.
    Returns None for fewer than three sizes. Sizes must be distinct and ratios positive.
    """
    sorted_points = sorted(points)
    if len(sorted_points) < MIN_SWEEP_SIZES:
        return None
    # 1. Cut the sizes into stretches in which the precision is faster (1), slower (-1) or uncertain (0).
    grid_sizes, lower_log_speedups, log_speedups, upper_log_speedups = _interpolate_bounds(sorted_points)
    speedup_signs = np.where(lower_log_speedups > 0, 1, np.where(upper_log_speedups < 0, -1, 0)).tolist()
    size_stretches: list[SizeRange] = []
    speedup_crossings: list[BreakEvenCrossing] = []
    last_certain_index: int | None = None
    first_index = 0
    for sign, same_signs in groupby(speedup_signs):
        last_index = first_index + len(list(same_signs)) - 1
        size_stretches.append(SizeRange(sign > 0 if sign else None, grid_sizes[first_index], grid_sizes[last_index]))
        # 2. A crossing is between a certainly faster and a certainly slower stretch.
        if sign and last_certain_index is not None and speedup_signs[last_certain_index] != sign:
            crossing_size = _find_crossing_size(grid_sizes, log_speedups, last_certain_index, first_index)
            speedup_crossings.append(
                BreakEvenCrossing(crossing_size, grid_sizes[last_certain_index], grid_sizes[first_index], sign > 0)
            )
        if sign:
            last_certain_index = last_index
        first_index = last_index + 1
    sizes_within_noise = tuple(sized_ratio.size for sized_ratio in sorted_points if sized_ratio.within_noise)
    return BreakEven(
        tuple(size_stretches),
        tuple(speedup_crossings),
        sizes_within_noise,
        min(sized_ratio.ratio.level for sized_ratio in sorted_points),
    )


def _interpolate_bounds(
    sorted_points: Sequence[TimeRatioAtSize],
) -> tuple[list[float], FloatArray, FloatArray, FloatArray]:
    """Returns a grid of sizes, and three arrays for these sizes: the lower bound, the estimate and the upper bound of
    the speed-up's logarithm.
    """
    log_sizes = np.log([sized_ratio.size for sized_ratio in sorted_points])
    size_gap_grids = [
        np.linspace(*neighbours, _POINTS_PER_SIZE_GAP, endpoint=False) for neighbours in pairwise(log_sizes)
    ]
    log_size_grid = np.concatenate([*size_gap_grids, log_sizes[-1:]])
    speedups = [sized_ratio.ratio.inverse for sized_ratio in sorted_points]
    log_speedups = np.log([speedup.point for speedup in speedups])
    lower_log_speedups = np.interp(log_size_grid, log_sizes, np.log([speedup.low for speedup in speedups]))
    upper_log_speedups = np.interp(log_size_grid, log_sizes, np.log([speedup.high for speedup in speedups]))
    # A speed-up that is within the band of a verdict counts as uncertain.
    log_speedup_margins = _estimate_line_deviations(log_sizes, log_speedups) + VERDICT_BAND
    # Use the exact measured sizes instead of exponentials of their logarithms.
    grid_sizes = [float(value) for value in np.exp(log_size_grid)]
    grid_sizes[::_POINTS_PER_SIZE_GAP] = [float(sized_ratio.size) for sized_ratio in sorted_points]
    return (
        grid_sizes,
        lower_log_speedups - log_speedup_margins,
        np.interp(log_size_grid, log_sizes, log_speedups),
        upper_log_speedups + log_speedup_margins,
    )


def _estimate_line_deviations(log_sizes: FloatArray, log_speedups: FloatArray) -> FloatArray:
    """Returns how far the logarithm of the speed-up may deviate from a straight line between two neighbouring sizes.
    The estimate follows from how much the curve bends at both sizes.

    If the speed-up leaps between the two sizes, the deviation is the whole height of the leap, because a library may
    switch kernels at any size in between.
    """
    size_gaps, speedup_steps = np.diff(log_sizes), np.diff(log_speedups)
    speedup_curvatures = np.abs(2 * np.diff(speedup_steps / size_gaps) / (size_gaps[:-1] + size_gaps[1:]))
    # A gap has the larger curvature of its two ends. The first and the last size have none, so their neighbours' is
    # used.
    max_gap_curvatures = np.maximum(
        np.append(speedup_curvatures[0], speedup_curvatures), np.append(speedup_curvatures, speedup_curvatures[-1])
    )
    padded_speedup_steps = np.pad(np.abs(speedup_steps), 1)
    is_speedup_leap = np.abs(speedup_steps) > _SPEEDUP_LEAP_RATIO * np.maximum(
        padded_speedup_steps[:-2], padded_speedup_steps[2:]
    )
    size_gap_fractions = np.arange(_POINTS_PER_SIZE_GAP) / _POINTS_PER_SIZE_GAP
    # A parabola of curvature c and width h deviates from its chord by c * h^2 / 2 * t * (1 - t), with t from 0 to 1.
    curvature_line_deviations = np.outer(
        max_gap_curvatures * size_gaps**2 / 2, size_gap_fractions * (1 - size_gap_fractions)
    )
    # At the measured size itself (fraction 0), the speed-up is known even before a leap.
    line_deviation_by_point = np.where(
        is_speedup_leap[:, None] & (size_gap_fractions > 0), np.abs(speedup_steps)[:, None], curvature_line_deviations
    )
    line_deviations: FloatArray = np.append(line_deviation_by_point.ravel(), 0.0)
    return line_deviations


def _find_crossing_size(sizes: Sequence[float], log_speedups: FloatArray, first: int, last: int) -> float:
    """Returns the size at which the interpolated speed-up crosses 1. If it crosses several times, returns the middle
    crossing.
    """
    sign_change_indices = [
        index for index in range(first, last) if (log_speedups[index] > 0) != (log_speedups[index + 1] > 0)
    ]
    index = sign_change_indices[len(sign_change_indices) // 2]
    crossing_fraction = log_speedups[index] / (log_speedups[index] - log_speedups[index + 1])
    return math.exp((1 - crossing_fraction) * math.log(sizes[index]) + crossing_fraction * math.log(sizes[index + 1]))


# Lower precisions are compared with bf16 if it was measured, because they would replace bf16.
USUAL_PRECISION = "bf16"
_HIGH_PRECISIONS = frozenset({"fp32", "tf32", "bf16", "fp16"})

JudgedCase = tuple[Record, Finding | None]


@dataclass(frozen=True)
class Sweep:
    """Cases that differ only in one number.

    `axis` is the name of this number, and `fixed_params` are the parameters that all cases share. `indexed_sizes` are
    the values of the number, each with the index of the setting that has this value.
    """

    axis: str
    fixed_params: Params
    indexed_sizes: tuple[tuple[int, int], ...]  # pairs (size, index of its setting)


@dataclass(frozen=True)
class SweptMode:
    """One precision with its ratios at all sizes of a sweep. `base_mode` is the precision that it is compared with.
    `break_even` is None if too few sizes have a ratio.

    `missing_ratios` maps sizes without a ratio to the reason. `doubted_sizes` lists sizes whose ratio has a label that
    casts doubt on it.
    """

    mode: str
    base_mode: str
    points: tuple[TimeRatioAtSize, ...]
    missing_ratios: tuple[tuple[int, str], ...]
    doubted_sizes: tuple[int, ...]
    break_even: BreakEven | None


def find_sweeps(settings: Sequence[Params]) -> list[Sweep]:
    """Returns a sweep for every number that varies over at least three settings while all other parameters are
    equal.
    """
    indices_by_size: dict[tuple[str, Params], dict[int, int]] = {}
    for index, params in enumerate(settings):
        for name, value in params:
            # In Python a bool is an int, but it is not a size.
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                shared_params = tuple(param for param in params if param[0] != name)
                indices_by_size.setdefault((name, shared_params), {})[value] = index
    axis_sweeps = [
        Sweep(axis, shared_params, tuple(sorted(sizes.items())))
        for (axis, shared_params), sizes in indices_by_size.items()
    ]
    return [sweep for sweep in axis_sweeps if len(sweep.indexed_sizes) >= MIN_SWEEP_SIZES]


def iterate_swept_modes(sweep: Sweep, groups: Sequence[Sequence[JudgedCase]]) -> Iterator[SweptMode]:
    """Yields each precision of a sweep with its time ratios. Precisions that are compared with no other precision, such
    as the reference, are left out. `groups` has the cases of each setting; the sweep has the indices of its settings.
    """
    modes: dict[str, None] = {}
    for _, index in sweep.indexed_sizes:
        modes |= dict.fromkeys(record.case.mode for record, _ in groups[index])
    for mode in modes:
        swept_mode = _make_swept_mode(mode, sweep, groups)
        if swept_mode.points or swept_mode.missing_ratios:
            yield swept_mode


def _make_swept_mode(mode: str, sweep: Sweep, groups: Sequence[Sequence[JudgedCase]]) -> SweptMode:
    points, missing_ratio_reasons, doubted_sizes, base_mode = [], [], [], ""
    for size, index in sweep.indexed_sizes:
        case = next((candidate for candidate in groups[index] if candidate[0].case.mode == mode), None)
        base_case = _find_compared_case(case, groups[index]) if case is not None else None
        if case is None or base_case is None or case is base_case:
            continue
        base_mode = base_case[0].case.mode
        ratio = _compute_time_ratio(case, base_case)
        if isinstance(ratio, str):
            missing_ratio_reasons.append((size, ratio))
            continue
        points.append(TimeRatioAtSize(size, ratio))
        if any(finding is not None and finding.doubts(ratio) for _, finding in (case, base_case)):
            doubted_sizes.append(size)
    return SweptMode(
        mode, base_mode, tuple(points), tuple(missing_ratio_reasons), tuple(doubted_sizes), break_even(points)
    )


def _find_compared_case(case: JudgedCase, candidates: Sequence[JudgedCase]) -> JudgedCase | None:
    """Returns the candidate to compare a case with: bf16 if it was timed natively and the case's precision is below
    bf16, otherwise the reference.
    """
    if case[0].case.precision not in _HIGH_PRECISIONS:
        for candidate in candidates:
            if (
                candidate[0].case.mode == USUAL_PRECISION
                and candidate[0].support.is_native
                and candidate[0].timing is not None
            ):
                return candidate
    return next((candidate for candidate in candidates if candidate[0].is_reference), None)


def _compute_time_ratio(case: JudgedCase, base: JudgedCase) -> Interval | str:
    """Returns the time of a case divided by the time of the case that it is compared with (`base`), or the reason why
    this ratio is missing.
    """
    record, finding = case
    base_record, base_finding = base
    if record.support.is_emulated:
        return "emulated on this device, so it has no speed"
    if finding is None or finding.best_seconds is None:
        return record.reason or "not timed"
    hard_labels = finding.hard or (base_finding.hard if base_finding is not None else ())
    if hard_labels:
        return f"labelled {', '.join(hard_labels)}"
    ratio = None
    if base_record.is_reference:
        ratio = finding.ratio
    elif record.timing is not None and base_record.timing is not None:
        timings = [record.timing, base_record.timing]
        # Cases that were measured in different sessions share no rounds, even if their round numbers are equal.
        are_in_same_session = not (record.paired_with or base_record.paired_with)
        if are_in_same_session and (rounds := find_common_rounds(timings)):
            ratio = best_ratio(timings, rounds)
    if ratio is None or not 0 < ratio.low <= ratio.point <= ratio.high < math.inf:
        return f"no rounds in common with {base_record.case.mode}"
    return ratio
