"""Computes the smallest slow-down that the gate would detect, from the gate's rules and the noise of this comparison.

The gate measures a suspected slow-down twice, and both measurements (looks) must show it: the logarithm of the measured
ratio must exceed a minimum. The minimum depends on the interval, on the p-value and on the number of figures. Each look
measures the true slow-down plus noise.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from enum import StrEnum
from statistics import NormalDist
from typing import NamedTuple

from fp8bench.analysis import verdicts
from fp8bench.analysis.compare.interval import MIN_VISIBLE_FEW_RUNS_CHANGE, student_quantile
from fp8bench.analysis.steps.change_points import MIN_SERIES_LENGTH, PieceLevel, smallest_visible_step
from fp8bench.features.gate.judging import (
    CONFIRMING_DEVIATIONS,
    DETECTION_PROBABILITY,
    FALSE_SUSPECT_SHARE,
    UNTESTED_OUTCOMES,
    DetectionLimit,
    JudgedFigure,
    has_exact_ratio,
    is_from_few_runs,
    probability_by_chance,
    select_discoveries,
    suggest_decisive_runs,
)
from fp8bench.features.gate.thresholds import FigureThreshold, ThresholdRules, find_threshold
from fp8bench.model import Comparison, Evidence, Noise
from fp8bench.model.specs import BAND, find_metric_spec

# The largest slow-down that is considered: a factor of 1000.
_MAX_LOG_SLOWDOWN = math.log(1000.0)
_STANDARD_NORMAL = NormalDist()


class RemeasurementMethod(StrEnum):
    """How suspects (figures that seem worse) are measured a second time."""

    NONE = "not"
    MEASURED_AGAIN = "measured again"
    DUEL = "in a duel"


class _SlowDownRequirement(NamedTuple):
    """What one look (measurement) needs to show a slow-down: the minimum logarithm of the ratio, and the standard
    deviation of the measured logarithm.
    """

    min_log_ratio: float
    error: float


def _make_slow_down_requirement(
    fixed_log: float, evidence_log: float, error: float, freedom: float
) -> _SlowDownRequirement:
    """Returns the minimum logarithm of the ratio that shows a slow-down in one measurement, with its standard
    deviation. The minimum is the larger of `fixed_log` and `evidence_log`, which is a multiple of the estimated noise.
    An estimate with few degrees of `freedom` is uncertain, so the standard deviation is larger.
    """
    # Student's t has a larger variance than the normal distribution.
    error *= math.sqrt(freedom / (freedom - 2)) if math.isfinite(freedom) else 1.0
    if evidence_log <= fixed_log:
        return _SlowDownRequirement(fixed_log, error)
    return _SlowDownRequirement(evidence_log, math.hypot(error, evidence_log / math.sqrt(freedom)))


def detection_limits(judged: Sequence[JudgedFigure], remeasurement: RemeasurementMethod) -> tuple[DetectionLimit, ...]:
    """Returns the detection limits of all figures that have noise, the least sensitive figure first."""
    p_value_limit = _compute_p_value_limit(judged)
    tested_noisy_figures = [
        figure for figure in judged if _is_tested_figure(figure) and not has_exact_ratio(figure.comparison)
    ]
    return _sort_detection_limits(
        _compute_detection_limit(figure, p_value_limit, remeasurement) for figure in tested_noisy_figures
    )


def _compute_p_value_limit(judged: Sequence[JudgedFigure]) -> float:
    p_values = [
        p_value
        for figure in judged
        if _is_tested_figure(figure) and (p_value := probability_by_chance(figure)) is not None
    ]
    # The limit by the Benjamini-Hochberg procedure if one more figure became a suspect.
    return FALSE_SUSPECT_SHARE * min(
        1.0, (1 + sum(select_discoveries(p_values, FALSE_SUSPECT_SHARE))) / max(1, len(p_values))
    )


def _is_tested_figure(figure: JudgedFigure) -> bool:
    return figure.outcome not in UNTESTED_OUTCOMES and figure.comparison.ratio is not None


def _sort_detection_limits(limits: Iterable[DetectionLimit]) -> tuple[DetectionLimit, ...]:
    def sort_key(limit: DetectionLimit) -> tuple[bool, float]:
        # A threshold of 0 counts as a tiny one, because the limit is divided by it.
        return limit.can_detect_threshold, -math.log1p(limit.smallest) / math.log1p(limit.threshold or 1e-9)

    return tuple(sorted(limits, key=sort_key))


def _compute_detection_limit(
    figure: JudgedFigure, p_limit: float, remeasurement: RemeasurementMethod
) -> DetectionLimit:
    change = figure.comparison
    infinite_detection_limit = DetectionLimit(
        change.case, change.metric, _find_smallest_failing_share(figure.threshold, change.before), math.inf
    )
    if change.noise is None or change.ratio is None or change.ratio.level == 0 or change.ratio.low <= 0:
        return replace(infinite_detection_limit, unknown=change.why or "too few processes for an interval (--sessions)")
    unknown_limit_reason = ""
    if is_from_few_runs(change) and figure.spread is None:
        run_count_suggestion = suggest_decisive_runs(change)
        unknown_limit_reason = (
            f"too few runs, and too few other figures, to estimate the spread between runs; {run_count_suggestion}"
        )
    return replace(
        infinite_detection_limit,
        smallest=_compute_smallest_detectable_change(_make_requirements(figure, p_limit, remeasurement)),
        unknown=unknown_limit_reason,
    )


def _find_smallest_failing_share(threshold: FigureThreshold, baseline: float | None) -> float:
    return max(threshold.relative, threshold.smallest / baseline if baseline else 0.0)


def _compute_smallest_detectable_change(requirements: Sequence[_SlowDownRequirement]) -> float:
    """Returns the smallest slow-down that all measurements detect with the probability `DETECTION_PROBABILITY`. The
    allowed probability of missing it is divided equally among the noisy measurements, which is valid even if they are
    correlated.
    """
    noisy_look_count = sum(requirement.error > 0 for requirement in requirements)
    detection_deviations = _STANDARD_NORMAL.inv_cdf(1 - (1 - DETECTION_PROBABILITY) / max(1, noisy_look_count))
    smallest_log_ratio = max(
        requirement.min_log_ratio + detection_deviations * requirement.error for requirement in requirements
    )
    return math.expm1(max(smallest_log_ratio, 0.0)) if smallest_log_ratio < _MAX_LOG_SLOWDOWN else math.inf


def _make_requirements(
    figure: JudgedFigure, p_limit: float, remeasurement: RemeasurementMethod
) -> list[_SlowDownRequirement]:
    change = figure.comparison
    assert change.noise is not None
    if change.evidence is Evidence.PAIRED:
        # The second duel starts fresh processes on both sides, so it has as much noise as the first duel.
        error = change.noise.error
        min_evidence = math.log1p(verdicts.VERDICT_BAND) + _compute_log_half_width(change)
        evidence = max(min_evidence, error * student_quantile(1 - p_limit, change.noise.freedom))
        min_log_ratios = (evidence, min_evidence) if remeasurement is RemeasurementMethod.DUEL else (evidence,)
        return [
            _make_slow_down_requirement(0.0, min_log_ratio, error, change.noise.freedom)
            for min_log_ratio in min_log_ratios
        ]
    first_evidence, second_look_evidence, error, second_error = (
        _compute_few_runs_limits(figure, p_limit)
        if is_from_few_runs(change)
        else _compute_many_runs_limits(change, p_limit)
    )
    freedom = change.noise.freedom or math.inf
    band_log_ratio = math.log1p(MIN_VISIBLE_FEW_RUNS_CHANGE if is_from_few_runs(change) else BAND)
    if remeasurement is RemeasurementMethod.NONE:  # without a second measurement, the first one decides alone
        return [_make_slow_down_requirement(band_log_ratio, first_evidence, error, freedom)]
    if remeasurement is RemeasurementMethod.DUEL:  # the noise of a duel is negligible compared with that of stored runs
        return [
            _make_slow_down_requirement(0.0, first_evidence, error, freedom),
            _SlowDownRequirement(math.log1p(verdicts.VERDICT_BAND), 0.0),
        ]
    return [
        _make_slow_down_requirement(
            0.0 if is_from_few_runs(change) else band_log_ratio, first_evidence, error, freedom
        ),
        _make_slow_down_requirement(max(band_log_ratio, second_look_evidence), 0.0, second_error, freedom),
    ]


def _compute_few_runs_limits(figure: JudgedFigure, p_limit: float) -> tuple[float, float, float, float]:
    """Returns what the first and the second measurement need, for a comparison of few runs: the logarithms of the ratio
    that each must exceed, then the standard error of each.
    """
    change = figure.comparison
    case_spread = figure.spread
    assert change.noise is not None
    half_width = _compute_log_half_width(change)
    if case_spread is None:
        return half_width, half_width, change.noise.error, _estimate_second_look_error(change.noise.error, change.noise)
    first_look_evidence = case_spread.shift + case_spread.deviation * _STANDARD_NORMAL.inv_cdf(1 - p_limit / 2)
    second_look_error = _estimate_second_look_error(case_spread.deviation, change.noise)
    return (
        max(half_width, first_look_evidence),
        max(half_width, CONFIRMING_DEVIATIONS * case_spread.deviation),
        case_spread.deviation,
        second_look_error,
    )


def _compute_many_runs_limits(change: Comparison, p_limit: float) -> tuple[float, float, float, float]:
    assert change.noise is not None and change.ratio is not None
    error = change.noise.error
    freedom = change.noise.freedom
    level = change.ratio.level
    second_look_error = _estimate_second_look_error(error, change.noise)
    return (
        error * student_quantile(max(level, 1 - p_limit), freedom),
        second_look_error * student_quantile(level, freedom),
        error,
        second_look_error,
    )


def _estimate_second_look_error(error: float, noise: Noise) -> float:
    """Returns the standard error of the second measurement, which compares all runs of the first side with one new run.
    `error` is the standard error of the first measurement.
    """
    first_side_run_share = (1 / noise.before) / (1 / noise.before + 1 / noise.after)
    return error * math.sqrt(first_side_run_share + (1 - first_side_run_share) * noise.after)


def _compute_log_half_width(change: Comparison) -> float:
    assert change.ratio is not None
    return math.log(change.ratio.point / change.ratio.low)


class SeriesState(NamedTuple):
    """The latest level of a series of the history. `comparison` has its mean value on both sides. `level` describes its
    noise; None if the series has too few values to look for steps (changes of level).
    """

    comparison: Comparison
    level: PieceLevel | None


def history_detection_limits(
    series: Sequence[SeriesState], rules: ThresholdRules, changes: int, remeasurement: RemeasurementMethod
) -> tuple[DetectionLimit, ...]:
    """Returns a detection limit for each series: the smallest change of its level that the history would show.
    `changes` is the number of changes that the history shows now.
    """
    p_value_limit = FALSE_SUSPECT_SHARE / (1 + changes)
    limits = []
    for comparison, level in series:
        threshold = find_threshold(comparison, rules)
        if threshold.ignored:
            continue
        infinite_detection_limit = DetectionLimit(
            comparison.case,
            comparison.metric,
            _find_smallest_failing_share(threshold, comparison.before),
            math.inf,
            nights=0,
        )
        # 1. Without a level, the limit is unknown.
        if level is None:
            limits.append(
                replace(
                    infinite_detection_limit, unknown=f"fewer than {MIN_SERIES_LENGTH} nights, too few to detect a step"
                )
            )
            continue
        # 2. Otherwise compute it from the noise of the level.
        look_requirements = _make_step_requirements(
            level, p_value_limit, remeasurement, find_metric_spec(comparison.metric).least_change
        )
        limits.append(
            replace(
                infinite_detection_limit,
                smallest=_compute_smallest_detectable_change(look_requirements),
                nights=level.length,
            )
        )
    return _sort_detection_limits(limits)


def _make_step_requirements(
    level: PieceLevel, p_limit: float, remeasurement: RemeasurementMethod, band: float
) -> list[_SlowDownRequirement]:
    min_log_ratio, error = smallest_visible_step(level, p_limit)
    look_requirements = [_make_slow_down_requirement(math.log1p(band), min_log_ratio, error, level.freedom)]
    if remeasurement is RemeasurementMethod.MEASURED_AGAIN:
        # To confirm a step, the new value must be beyond the midpoint of the old and the new level. Only half of the
        # step is between midpoint and new level, so noise counts twice.
        look_requirements.append(_SlowDownRequirement(0.0, 2 * level.noise))
    if remeasurement is RemeasurementMethod.DUEL:
        look_requirements.append(_SlowDownRequirement(math.log1p(min(verdicts.VERDICT_BAND, band)), 0.0))
    return look_requirements
