"""Fits a line to the decode times of an arm over context lengths, and finds the context at which the lines of two
arms cross. Lines and crossings have intervals from resampled rounds.

The time at a context is the best case of its rounds, as everywhere in fp8bench. All arms were measured in the same
rounds, so a resample draws the same rounds for all arms. Each context is resampled separately. Resamples of few
rounds vary too little, so their spread is widened, as Student's t widens the interval of a mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fp8bench.analysis.stats import FloatArray, resample_best_case
from fp8bench.features.infer.values import MIN_LINE_CONTEXTS, ContextCrossing, TokenTimeLine
from fp8bench.model import Interval

# An interval with confidence LEVEL spans the middle part _RESAMPLED_SHARE of the resamples. In simulated sweeps of 10
# rounds or more, such intervals contain the true value in 95 of 100 cases.
LEVEL, _RESAMPLED_SHARE = 0.95, 0.99
_INTERVAL_QUANTILES = ((1 - _RESAMPLED_SHARE) / 2, (1 + _RESAMPLED_SHARE) / 2)
# The number of contexts at which two lines are compared.
_COMPARED_CONTEXT_COUNT = 256
# If an arm reads whole pages, its time jumps at page boundaries, away from a line. Intervals are widened by this many
# times the range of these distances. In simulated sweeps with any page size, the widened intervals contained every
# context at which the faster arm changes in 9 of 10 cases. With powers of two, they did so in all cases.
_STEP_RANGE_FACTOR = 2.0


@dataclass(frozen=True)
class FittedLine:
    """A fitted line: `point` has the coefficients a and b, and `resampled_coefficients` those of each resample
    (resamples, 2).

    `line_excess_seconds` has the seconds by which the time at each measured context exceeds the line. `largest_error`
    is the largest such distance, relative to the time. `resampled_seconds` has the seconds of each resample at the
    measured contexts.
    """

    point: FloatArray
    resampled_coefficients: FloatArray
    largest_error: float
    line_excess_seconds: FloatArray
    resampled_seconds: FloatArray

    @property
    def line(self) -> TokenTimeLine:
        low, high = np.quantile(self.resampled_coefficients, _INTERVAL_QUANTILES, axis=0)
        point_and_bounds = np.stack((self.point, low, high), 1).tolist()
        a, b = (Interval(point, lower, upper, LEVEL) for point, lower, upper in point_and_bounds)
        return TokenTimeLine(a, b, self.largest_error)

    def at(self, context_lengths: FloatArray) -> FloatArray:
        """Returns the seconds of each resample at these contexts: (resamples, contexts)."""
        seconds: FloatArray = self.resampled_coefficients[:, :1] + self.resampled_coefficients[:, 1:] * context_lengths
        return seconds


def fastest(samples: Sequence[float]) -> float:
    """Returns the best-case seconds of some rounds. Lines are fitted to the same statistic, so a printed time fits the
    printed line.
    """
    return math.exp(resample_best_case(np.array(samples, dtype=np.float64)[:, None]).point)


def fit_line(rounds: Mapping[int, Sequence[float]]) -> FittedLine | None:
    """Fits a line to seconds over contexts by least squares of relative errors. Returns None for fewer than
    MIN_LINE_CONTEXTS contexts.
    """
    if len(rounds) < MIN_LINE_CONTEXTS:
        return None
    contexts, points, logs = np.array(sorted(rounds)), [], []
    for seed, context in enumerate(contexts):
        samples = np.array(rounds[context], dtype=np.float64)
        best_case = resample_best_case(samples[:, None])
        # Shuffle the resamples of each context separately, but equally for all arms, which were measured in the same
        # rounds.
        shuffled_best_cases = np.random.default_rng(seed).permutation(best_case.resampled_values)
        points.append(best_case.point)
        logs.append(best_case.point + compute_spread_widening(len(samples)) * (shuffled_best_cases - best_case.point))
    seconds = np.exp(np.array(points))
    # Dividing by the times makes errors relative.
    design_matrix = np.stack((1 / seconds, contexts / seconds), 1)
    least_squares_matrix = np.linalg.pinv(design_matrix) / seconds
    point = least_squares_matrix @ seconds
    residual_seconds = seconds - (point[0] + point[1] * contexts)
    largest_error = float((np.abs(residual_seconds) / seconds).max())
    measured_seconds = np.exp(np.array(logs)).T
    return FittedLine(
        point, measured_seconds @ least_squares_matrix.T, largest_error, residual_seconds, measured_seconds
    )


def compute_spread_widening(rounds: int) -> float:
    """Returns the factor by which the spread of resamples must be widened for this number of rounds."""
    freedom = max(1, rounds - 1)
    # this approximation is accurate to 1% from 2 degrees of freedom on
    student_t = 1.96 + 2.37 / freedom + 2.8 / freedom**2 + 5.6 / freedom**3
    # Widen the normal distribution's quantile, 1.96, to that of Student's t. The square root corrects that resamples of
    # few values vary too little. The last factor, from a simulation, corrects that the fastest of few rounds are slower
    # than the fastest of many.
    return student_t / 1.96 * math.sqrt(rounds / freedom) * (1 + 6 / rounds)


def find_context_crossing(arm: FittedLine, reference: FittedLine, contexts: Sequence[int]) -> ContextCrossing:
    """Returns the context length at which the arm's line crosses the reference's line, between the shortest and the
    longest measured context.

    The interval contains every context at which resamples do not agree which arm is faster. It also contains contexts
    at which the lines differ by less than the height of a step: the times of an arm that reads its cache in whole pages
    rise in steps, which a line cannot show.
    """
    measured_context_lengths = np.array(sorted(contexts))
    shortest, longest = int(measured_context_lengths[0]), int(measured_context_lengths[-1])
    grid = np.geomspace(shortest, longest, _COMPARED_CONTEXT_COUNT)
    step_seconds = _estimate_step_seconds(arm, reference, measured_context_lengths, grid)
    certain_speed_signs = _compute_certain_speed_signs(arm.at(grid) - reference.at(grid), step_seconds)
    measured_speed_signs = _compute_certain_speed_signs(arm.resampled_seconds - reference.resampled_seconds, 0.0)
    first, last = (
        bool(certain_speed_signs[end] > 0)
        # A line is ignored at an end where the measured times contradict it.
        if certain_speed_signs[end] and measured_speed_signs[end] != -certain_speed_signs[end]
        else None
        for end in (0, -1)
    )
    faster_at_ends = first, last
    if None in faster_at_ends or first == last:
        return ContextCrossing(None, shortest, longest, faster_at_ends)
    a, b = arm.point - reference.point
    crossing = float(min(max(-a / b, shortest), longest))
    # Two lines cross once. The interval begins at the last grid context where the arm that is faster at the shortest
    # context certainly wins. It ends at the first one where the arm that is faster at the longest context does.
    start, end = (
        grid[certain_speed_signs == certain_speed_signs[0]][-1],
        grid[certain_speed_signs == certain_speed_signs[-1]][0],
    )
    lower_bound, upper_bound = min(float(start), crossing), max(float(end), crossing)
    # If a measured context outside the interval contradicts the lines, the interval is widened to include this
    # context.
    contradicting_contexts = measured_context_lengths[
        ((measured_context_lengths < lower_bound) & (measured_speed_signs == certain_speed_signs[-1]))
        | ((measured_context_lengths > upper_bound) & (measured_speed_signs == certain_speed_signs[0]))
    ]
    crossing_bound_candidates = [lower_bound, upper_bound, *map(float, contradicting_contexts)]
    return ContextCrossing(
        crossing,
        min(crossing_bound_candidates),
        max(crossing_bound_candidates),
        faster_at_ends,
        tuple(map(int, contradicting_contexts)),
    )


def _compute_certain_speed_signs(differences: FloatArray, margin: FloatArray | float) -> Any:
    """Returns for each context 1 if the arm is certainly faster by more than the margin, -1 if it is certainly slower
    by more than the margin, else 0.

    `differences` are the seconds of the arm minus those of the reference (resamples, contexts).
    """
    low, high = np.quantile(differences, _INTERVAL_QUANTILES, axis=0)
    return np.where(high + margin < 0, 1, np.where(low - margin > 0, -1, 0))


def _estimate_step_seconds(
    arm: FittedLine, reference: FittedLine, measured_contexts: Any, grid: FloatArray
) -> FloatArray:
    """Returns for each context of `grid` the largest error of the difference between the lines, in seconds. Lines have
    such errors because times rise in steps.
    """
    expected_seconds = reference.point[0] + reference.point[1] * measured_contexts
    relative_line_distances = (arm.line_excess_seconds - reference.line_excess_seconds) / expected_seconds
    seconds_at_largest_distance = expected_seconds[np.abs(relative_line_distances).argmax()]
    # Assume that jumps at shorter contexts are as high as where the largest distance was measured.
    reference_seconds = np.maximum(seconds_at_largest_distance, reference.point[0] + reference.point[1] * grid)
    # The factor is needed because few contexts are just before or after a jump, where times are furthest from the line.
    measured_jump_seconds: FloatArray = _STEP_RANGE_FACTOR * np.ptp(relative_line_distances) * reference_seconds
    # Pages whose length divides all measured contexts leave no trace in the times, because all contexts fill their last
    # page. The longest such page is the greatest common divisor, and its last page may have all tokens but one unused.
    unmeasured_jump_seconds = (math.gcd(*map(int, measured_contexts)) - 1) * float(
        max(arm.point[1], reference.point[1], 0.0)
    )
    return measured_jump_seconds + unmeasured_jump_seconds
