"""Finds changes in the trends of a history: commits where a figure stepped up or down and stayed there.

A trend is searched for steps among figures of complete measurements that have the same conditions and the same version
of the measured work. The range of commits of a step may also contain commits without a comparable figure. For exact
counts, every difference is a certain step. A figure that becomes or stops being finite, like an error that becomes NaN,
is also a certain step.
"""

from __future__ import annotations

import itertools
import math
import secrets
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import chain

import numpy as np

from fp8bench.analysis.metric import get_series_unit
from fp8bench.analysis.stats import FloatArray
from fp8bench.analysis.steps.change_points import MIN_SERIES_LENGTH, Counts, Step, find_level_steps
from fp8bench.analysis.verdicts import UNEVEN_RATIO
from fp8bench.model import Ack, Comparison, Conditions, Direction, Evidence, Figure, Label, Trend
from fp8bench.model.specs import COUNTS, MEAN_TIME, RELATIVE_MEAN_TIME, RELATIVE_TIME, TIME, find_metric_spec

TOO_FEW_COMMITS = f"fewer than {MIN_SERIES_LENGTH} commits measured under the same conditions: too few to show a step"
TOO_FEW_COUNTED_COMMITS = "fewer than 2 commits counted under the same conditions: too few to show a step"
TOO_FEW_COMMITS_SINCE_CHANGE = (
    f"fewer than {MIN_SERIES_LENGTH} commits were measured since their conditions or version changed: too few to "
    "show a step after that"
)
NEGATIVE_VALUES_REASON = "values below 0, which have no meaningful ratio"
_NON_FINITE_CHANGE_REASON = "a change from or to a number that is not finite has no ratio"
# A zero is replaced by this share of the smallest positive value, because steps are searched in logarithms.
_ZERO_REPLACEMENT_FACTOR = 0.5


_TIME_METRIC_BY_MEAN_METRIC: Mapping[str, str] = {MEAN_TIME: TIME, RELATIVE_MEAN_TIME: RELATIVE_TIME}
FindSeriesSteps = Callable[[Sequence[FloatArray]], list[tuple[Step, ...]]]


class ChangeState(StrEnum):
    """The state of a change. Only changes in the state OPEN raise an alarm, and only if they are worse or concern
    exact counts.
    """

    OPEN = "open"
    ACKNOWLEDGED = "acknowledged"
    # The fastest calls changed, but the mean of all calls changed in the other direction between the same commits.
    CONTRADICTED = "contradicted"
    # A later step of the trend undid at least half of this change, or an exact count returned to an earlier value.
    REVERTED = "reverted"
    # These figures are of an older version of the work or of the method of measuring, so newer figures are not
    # comparable with them.
    OLD_VERSION = "old version"


@dataclass(frozen=True)
class TrendChange:
    """A step of a trend, as a comparison of the level after it with the level before it.

    The step is after the commit `comparison.since` and no later than `comparison.until`. `first_commit` is the most
    likely first commit with the new level. That range has `commit_count` commits, and `unmeasured_count` of them have
    no comparable figure. `error` is the standard error of the ratio's logarithm. `current` is True if the newest figure
    was measured under the same conditions. `ack` is set if the state is ACKNOWLEDGED.
    """

    trend: Trend
    comparison: Comparison
    first_commit: str
    commit_count: int
    unmeasured_count: int
    error: float
    version: str
    current: bool
    state: ChangeState = ChangeState.OPEN
    ack: Ack | None = None

    @property
    def is_worse(self) -> bool:
        return self.comparison.direction is Direction.WORSE

    @property
    def is_counted(self) -> bool:
        """Whether an exact count changed, such as FLOPs. Then the step does more or less work."""
        return self.trend.series.metric in COUNTS

    @property
    def alarms(self) -> bool:
        return (self.is_worse or self.is_counted) and self.state is ChangeState.OPEN

    @property
    def size(self) -> float:
        """The absolute logarithm of the ratio. It is infinite for a change from or to 0."""
        return math.inf if self.comparison.ratio is None else abs(math.log(self.comparison.ratio.point))


@dataclass(frozen=True)
class ChangeSearchResult:
    """All changes, the worst first, the number of searched trends, and the number of skipped trends for each reason.

    Trends of exact counts are counted separately (`exact_count_trends`), because they have no noise.
    """

    changes: tuple[TrendChange, ...]
    searched_trend_count: int
    skip_count_by_reason: Counter[str]
    exact_count_trends: int = 0


@dataclass(frozen=True)
class SeriesStretch:
    """Figures of a trend that can be compared with each other.

    `indices` are their positions in the trend, and `values` may be infinite or NaN. `read` returns the whole trend.
    `is_counted` is True for exact counts.
    """

    read: Callable[[], Trend]
    indices: Counts
    values: FloatArray
    is_counted: bool = False

    def drop_nonfinite(self) -> SeriesStretch:
        is_finite = np.isfinite(self.values)
        return replace(self, indices=self.indices[is_finite], values=self.values[is_finite])


def find_trend_changes(trends: Iterable[Trend]) -> ChangeSearchResult:
    """Searches all trends together and returns their changes. Acknowledgements are not applied."""
    return find_changes_in_stretches((_split_trend_into_stretches(trend) for trend in trends), find_level_steps)


def find_changes_in_stretches(
    stretches: Iterable[Sequence[SeriesStretch]], search: FindSeriesSteps
) -> ChangeSearchResult:
    """Returns the changes of trends. Each item of `stretches` has the comparable figures of one trend. `search` finds
    steps (changes of level) in series. Only trends with changes are read completely.
    """
    skipped_trend_counts: Counter[str] = Counter()
    searchable_stretches: list[SeriesStretch] = []
    changes: list[TrendChange] = []
    searched_trend_counts = [0, 0]
    # 1. Choose the stretches that are long enough to have steps, and collect the reasons for skipping the others.
    for trend_stretches in stretches:
        finiteness_changes = list(chain.from_iterable(map(_find_changes_of_finiteness, trend_stretches)))
        changes += finiteness_changes
        is_counted = any(stretch.is_counted for stretch in trend_stretches)
        stretches_of_finite_figures = [stretch.drop_nonfinite() for stretch in trend_stretches]
        # Counts have no noise, so two of them show a change.
        long_enough_stretches = [
            stretch
            for stretch in stretches_of_finite_figures
            if len(stretch.values) >= (2 if stretch.is_counted else MIN_SERIES_LENGTH)
        ]
        nonnegative_stretches = [stretch for stretch in long_enough_stretches if stretch.values.min() >= 0]
        searchable_stretches += nonnegative_stretches
        searched_trend_counts[is_counted] += bool(nonnegative_stretches or finiteness_changes)
        if not nonnegative_stretches and not finiteness_changes:
            too_few_commits_reason = TOO_FEW_COUNTED_COMMITS if is_counted else TOO_FEW_COMMITS
            skipped_trend_counts[NEGATIVE_VALUES_REASON if long_enough_stretches else too_few_commits_reason] += 1
        elif (
            nonnegative_stretches
            and not is_counted
            and len(max(stretches_of_finite_figures, key=_get_last_stretch_index).values) < MIN_SERIES_LENGTH
        ):
            skipped_trend_counts[TOO_FEW_COMMITS_SINCE_CHANGE] += 1
    # 2. Find the steps of all timed stretches together, and of exact counts one by one.
    timed_stretches = [stretch for stretch in searchable_stretches if not stretch.is_counted]
    stretches_of_exact_counts = [stretch for stretch in searchable_stretches if stretch.is_counted]
    steps = search([_replace_zero_values(stretch.values) for stretch in timed_stretches])
    steps += [_list_value_changes(_replace_zero_values(stretch.values)) for stretch in stretches_of_exact_counts]
    step_changes: list[TrendChange] = []
    for stretch, stretch_steps in zip([*timed_stretches, *stretches_of_exact_counts], steps, strict=True):
        step_changes += _make_changes(stretch, stretch_steps)
    changes += _check_changes_against_means(step_changes)
    return ChangeSearchResult(
        tuple(sorted(changes, key=severity_sort_key)),
        searched_trend_counts[0],
        skipped_trend_counts,
        searched_trend_counts[1],
    )


def _get_last_stretch_index(stretch: SeriesStretch) -> int:
    return int(stretch.indices[-1]) if len(stretch.indices) else -1


def _list_value_changes(values: FloatArray) -> tuple[Step, ...]:
    indices = (np.flatnonzero(np.diff(values)) + 1).tolist()
    return tuple(
        Step(index, index - 1, index, float(values[index - 1]), float(values[index]), 0.0, 0.0) for index in indices
    )


def _check_changes_against_means(changes: Sequence[TrendChange]) -> Iterator[TrendChange]:
    """Yields the changes, without those of the mean over all calls that repeat a change of the fastest calls.

    If mean and fastest calls of a case changed in different directions, or by clearly different amounts, both changes
    are yielded and marked.
    """
    repeated_ids = set[int]()
    opposite_change_by_change_id: dict[int, TrendChange] = {}
    changes_of_mean_times = [change for change in changes if change.trend.series.metric in _TIME_METRIC_BY_MEAN_METRIC]
    for mean_change, fastest_change in itertools.product(changes_of_mean_times, changes):
        if not _may_share_cause(mean_change, fastest_change):
            continue
        if mean_change.is_worse is fastest_change.is_worse and abs(
            mean_change.size - fastest_change.size
        ) <= math.log1p(UNEVEN_RATIO):
            repeated_ids.add(id(mean_change))
        else:
            opposite_change_by_change_id[id(mean_change)] = fastest_change
            opposite_change_by_change_id[id(fastest_change)] = mean_change
    for change in changes:
        if id(change) not in repeated_ids:
            yield (
                _mark_uneven_change(change, opposite_change_by_change_id[id(change)])
                if id(change) in opposite_change_by_change_id
                else change
            )


def _may_share_cause(mean_change: TrendChange, fastest_change: TrendChange) -> bool:
    """Returns whether a change of the mean and a change of the fastest calls concern the same case and may have the
    same cause: a commit in both ranges.
    """
    if fastest_change.trend.series.metric != _TIME_METRIC_BY_MEAN_METRIC[mean_change.trend.series.metric]:
        return False
    if fastest_change.state is not mean_change.state or _get_case_identity(mean_change) != _get_case_identity(
        fastest_change
    ):
        return False
    index_of_commit = {figure.commit: index for index, figure in enumerate(mean_change.trend.figures)}
    since_commit_indices = [
        index_of_commit.get(change.comparison.since, -1) for change in (mean_change, fastest_change)
    ]
    return max(since_commit_indices) < min(
        index_of_commit.get(change.comparison.until, -1) for change in (mean_change, fastest_change)
    )


def _get_case_identity(change: TrendChange) -> tuple[object, ...]:
    return change.trend.series.workload, change.trend.cell, change.trend.machine.get("machine"), change.trend.python


def _mark_uneven_change(change: TrendChange, opposite_change: TrendChange) -> TrendChange:
    is_mean_metric = change.trend.series.metric in _TIME_METRIC_BY_MEAN_METRIC
    comparison = replace(
        change.comparison,
        labels=(*change.comparison.labels, Label.UNEVEN),
        why="the fastest calls and the mean over all calls did not step in the same way",
    )
    keeps_change_state = (
        is_mean_metric or change.state is not ChangeState.OPEN or change.is_worse is opposite_change.is_worse
    )
    return replace(
        change, comparison=comparison, state=change.state if keeps_change_state else ChangeState.CONTRADICTED
    )


def _split_trend_into_stretches(trend: Trend) -> list[SeriesStretch]:
    """Splits a trend into stretches of comparable figures, which have the same version of the measured work and the
    same conditions.
    """
    values: dict[tuple[str, Conditions], dict[int, float]] = {}
    for index, figure in enumerate(trend.figures):
        if (value := _get_comparable_figure_value(figure)) is not None:
            values.setdefault((figure.version, figure.under), {})[index] = value
    is_count_metric = trend.series.metric in COUNTS
    return [
        SeriesStretch(lambda: trend, np.array([*value_by_index]), np.array([*value_by_index.values()]), is_count_metric)
        for value_by_index in values.values()
    ]


def _get_comparable_figure_value(figure: Figure) -> float | None:
    return None if figure.hasty else figure.value


def _replace_zero_values(values: FloatArray) -> FloatArray:
    """Replaces zeros by a small positive value, because steps are searched in logarithms."""
    positive_values = values[values > 0]
    if len(positive_values) == len(values):
        return values
    return np.where(
        values > 0,
        values,
        _ZERO_REPLACEMENT_FACTOR * positive_values.min() if len(positive_values) else _ZERO_REPLACEMENT_FACTOR,
    )


def _make_changes(stretch: SeriesStretch, steps: Sequence[Step]) -> Iterator[TrendChange]:
    if not steps:
        return
    stretch_levels = _compute_stretch_levels(stretch.values, steps)
    min_log_change = math.log1p(find_metric_spec(stretch.read().series.metric).least_change)
    for step_index, step in enumerate(steps):
        if abs(math.log(step.after / step.before)) < min_log_change:
            continue
        change = _make_change(stretch, step, stretch_levels[step_index], stretch_levels[step_index + 1])
        yield replace(
            change, state=_determine_change_state(change, stretch_levels[:step_index], stretch_levels[step_index + 2 :])
        )


def _find_changes_of_finiteness(stretch: SeriesStretch) -> Iterator[TrendChange]:
    """Yields a change wherever figures change from finite to infinite or NaN, or back."""
    is_finite = np.isfinite(stretch.values)
    for index in (np.flatnonzero(np.diff(is_finite)) + 1).tolist():
        level, new_level = stretch.values[index - 1 : index + 1].tolist()
        # A value that is not finite counts as worse than any number.
        finiteness_levels = (0.0, 1.0) if is_finite[index - 1] else (1.0, 0.0)
        change = _make_change(stretch, Step(index, index - 1, index, *finiteness_levels, 0.0, 0.0), level, new_level)
        state = _determine_change_state(change, (), ())
        if state is ChangeState.OPEN and (is_finite[index:] != is_finite[index]).any():
            state = ChangeState.REVERTED
        yield replace(change, state=state)


def _compute_stretch_levels(values: FloatArray, steps: Sequence[Step]) -> list[float]:
    """Returns the level before the first step, and the level after each step."""
    if values.min() > 0:
        return [steps[0].before, *(step.after for step in steps)]
    stretch_pieces = np.split(values, [step.at for step in steps])
    return [statistics.median(piece.tolist()) for piece in stretch_pieces]


def _make_change(stretch: SeriesStretch, step: Step, level: float, new_level: float) -> TrendChange:
    trend = stretch.read()
    figures = trend.figures
    stretch_figure_indices = stretch.indices.tolist()
    low_index, step_figure_index, high_index = (
        stretch_figure_indices[index] for index in (step.low, step.at, step.high)
    )
    # 1. Compute the ratio of the levels, if both are finite and positive.
    are_levels_finite = math.isfinite(level) and math.isfinite(new_level)
    ratio, reason = None, ""
    if are_levels_finite and level > 0 and new_level > 0:
        ratio = replace(step.ratio, level=1.0) if stretch.is_counted else step.ratio
    else:
        reason = "a change from or to zero has no ratio" if are_levels_finite else _NON_FINITE_CHANGE_REASON
    comparison = Comparison(
        format_trend_case(trend),
        trend.series.workload,
        trend.series.metric,
        get_series_unit(trend.series),
        Direction.WORSE if step.after > step.before else Direction.BETTER,
        Evidence.HISTORY,
        level,
        new_level,
        ratio,
        None if stretch.is_counted or not are_levels_finite else step.p_value,
        why=reason,
        since=figures[low_index].commit,
        until=figures[high_index].commit,
    )
    # 2. Find the commits that may have caused the step, and whether the trend's newest figure is comparable with those
    # around the step.
    possible_step_figure_indices = range(low_index + 1, high_index + 1)
    newest_figure_index = next(
        index for index in reversed(range(len(figures))) if _get_comparable_figure_value(figures[index]) is not None
    )
    return TrendChange(
        trend,
        comparison,
        figures[step_figure_index].commit,
        len(possible_step_figure_indices),
        len(set(possible_step_figure_indices) - set(stretch_figure_indices)),
        step.error,
        figures[step_figure_index].version,
        current=newest_figure_index in stretch_figure_indices,
    )


def format_trend_case(trend: Trend) -> str:
    """Formats the case of a trend like 'gemm[shape=512]@box/bf16', with the machine in place of the device."""
    precision, *values = trend.cell
    params_text = ",".join(f"{name}={value}" for name, value in zip(trend.series.param_names[1:], values, strict=True))
    return f"{trend.series.workload}[{params_text}]@{trend.machine['machine']}/{precision}"


def _determine_change_state(
    change: TrendChange, earlier_levels: Sequence[float], later_levels: Sequence[float]
) -> ChangeState:
    """Returns the state of a change before acknowledgements are applied.

    The change is REVERTED if a later level is nearer to the level before the change than to the level after it. The
    change of an exact count is also REVERTED if the count returned to an earlier level.
    """
    if change.version != change.trend.series.version:
        return ChangeState.OLD_VERSION
    level, new_level = change.comparison.before, change.comparison.after
    assert level is not None and new_level is not None
    # The geometric mean is 0 if a level is 0. Then use the arithmetic mean.
    mean_of_levels = math.sqrt(level * new_level) or (level + new_level) / 2
    is_change_reverted = any(
        later_level < mean_of_levels if change.is_worse else later_level > mean_of_levels
        for later_level in later_levels
    )
    if change.is_counted and not change.is_worse and new_level in earlier_levels:
        is_change_reverted = True
    return ChangeState.REVERTED if is_change_reverted else ChangeState.OPEN


def severity_sort_key(change: TrendChange) -> tuple[object, ...]:
    """Returns a key that sorts open changes first, then changes for the worse, then large changes. Changes of similar
    size stay in the order of their series.
    """
    ordered_change_states = list(ChangeState)
    rounded_change_size = change.size if math.isinf(change.size) else round(change.size, 2)
    return ordered_change_states.index(change.state), not change.is_worse, -rounded_change_size


# In the direction of a change, its new level may exceed the acknowledged level by this share, or by this many standard
# errors.
_ACK_LEVEL_TOLERANCE = 0.02
_ACK_TOLERANCE_STANDARD_ERRORS = 3.0
# A level of zero is replaced by this value, because zero has no logarithm.
_ZERO_LEVEL_REPLACEMENT = 1e-300


def apply_acknowledgements(found_changes: ChangeSearchResult, acks: Sequence[Ack]) -> ChangeSearchResult:
    """Marks open changes that an acknowledgement covers. The newest matching acknowledgement counts."""
    changes = []
    for change in found_changes.changes:
        ack = next((ack for ack in reversed(acks) if ack_covers_change(ack, change)), None)
        is_change_acknowledged = ack is not None and change.state is ChangeState.OPEN
        changes.append(replace(change, state=ChangeState.ACKNOWLEDGED, ack=ack) if is_change_acknowledged else change)
    return replace(found_changes, changes=tuple(sorted(changes, key=severity_sort_key)))


def make_acknowledgement(change: TrendChange, when: str, because: str) -> Ack:
    trend, comparison = change.trend, change.comparison
    assert comparison.before is not None and comparison.after is not None
    return Ack(
        secrets.token_hex(4),
        trend.series.name,
        trend.cell,
        str(trend.machine["machine"]),
        trend.python,
        change.version,
        comparison.direction,
        comparison.since,
        comparison.until,
        comparison.before,
        comparison.after,
        when,
        because,
    )


def ack_covers_change(ack: Ack, change: TrendChange) -> bool:
    """Returns whether an acknowledgement covers this change. Both must have the same trend, the same direction and
    overlapping ranges of commits. The new level must not be further from the old level than the acknowledged level was.
    This also holds for changes for the better.
    """
    trend, comparison = change.trend, change.comparison
    assert comparison.before is not None and comparison.after is not None
    # 1. Require the same trend and direction.
    change_identity = (
        trend.series.name,
        trend.cell,
        trend.machine["machine"],
        trend.python,
        change.version,
        comparison.direction,
    )
    if (ack.series, ack.cell, ack.machine, ack.python, ack.version, ack.direction) != change_identity:
        return False
    # 2. Reject a change that goes beyond the acknowledged level. Also reject a change whose old level is nearer to the
    # acknowledged new level than to the acknowledged old level, because it is a second change.
    direction_sign = 1 if change.is_worse else -1
    tolerance = 0 if change.is_counted else max(_ACK_LEVEL_TOLERANCE, _ACK_TOLERANCE_STANDARD_ERRORS * change.error)
    if direction_sign * (_compute_level_log(comparison.after) - _compute_level_log(ack.after)) > tolerance:
        return False
    if (
        direction_sign
        * (_compute_level_log(comparison.before) - (_compute_level_log(ack.before) + _compute_level_log(ack.after)) / 2)
        > 0
    ):
        return False
    # 3. Require that one commit may have caused both changes: their ranges of commits overlap. If the trend lacks a
    # commit at one end of the acknowledged range, use that end of the change's range.
    index_of_commit = {figure.commit: index for index, figure in enumerate(trend.figures)}
    if ack.since not in index_of_commit and ack.until not in index_of_commit:
        return False
    since_index, until_index = index_of_commit[comparison.since], index_of_commit[comparison.until]
    return max(index_of_commit.get(ack.since, since_index), since_index) < min(
        index_of_commit.get(ack.until, until_index), until_index
    )


def _compute_level_log(level: float) -> float:
    return math.log(max(level, _ZERO_LEVEL_REPLACEMENT))
