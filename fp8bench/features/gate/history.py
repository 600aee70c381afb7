"""Judges the steps (changes of level) in a store's history that nobody has acknowledged, on the machine of the newest
run.

A step is suspected until a second measurement confirms it. If the repository has the last commit before the step, the
current code is measured in a duel with that commit. Otherwise the suspected case is measured again. The step is
confirmed if the new value is nearer to the new level than to the old one.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, groupby, islice
from operator import attrgetter
from pathlib import Path

from fp8bench.analysis.metric import get_series_unit
from fp8bench.analysis.steps.change_points import find_newest_levels
from fp8bench.analysis.steps.changes import ChangeSearchResult, ChangeState, TrendChange, format_trend_case
from fp8bench.errors import EXIT_BASELINE, EXIT_FAILED, StoreError
from fp8bench.features.gate.judging import FigureKey, SecondMeasurement, case_and_metric, join_second_looks
from fp8bench.features.gate.power import SeriesState
from fp8bench.features.gate.stored_runs import (
    GateSource,
    SuspectRemeasurer,
    find_unmeasured_cases,
    make_failed_comparison,
)
from fp8bench.jobs.history import check_store_exists, find_all_changes, read_history
from fp8bench.jobs.observer import JobObserver
from fp8bench.model import Comparison, Direction, Evidence, Interval, Record, Run, Status, Trend
from fp8bench.model.specs import COUNTS, RELATIVE_TIME, TIME_PER_WORK
from fp8bench.pipeline import REMEASURED_ORIGIN
from fp8bench.report.panels import together
from fp8bench.store.asv.identity import parse_machine_identity
from fp8bench.store.commit_runs import find_commit
from fp8bench.store.figures.lines import History, Line
from fp8bench.store.points import extract_history_points, find_grid_cell_of_case
from fp8bench.store.runs.listing import run_files
from fp8bench.store.runs.run_file import load_run

# The most run files that are read to find the runs of the newest commit and of the commit before it.
_MAX_RUN_FILES = 200
_DERIVED_METRICS = frozenset(name for name, _ in TIME_PER_WORK.values())


def compare_history(path: Path, observer: JobObserver) -> GateSource:
    # 1. Without a run of the current commit there is nothing to judge. Silence would look like success.
    store = check_store_exists(path, observer)
    newest_run = next(_load_newest_runs(store), None)
    title = f"the history in {path}"
    if newest_run is None:
        return GateSource(title, problem=f"the store {store} has no runs yet.", code=EXIT_FAILED)
    title = f"{title}, up to run {newest_run.id}"
    if all(record.status is Status.SKIPPED for record in newest_run.records):
        return GateSource(title, problem=f"no case of run {newest_run.id} was measured.", code=EXIT_FAILED)
    head_commit = find_commit("HEAD", Path())
    commit = newest_run.environment.get("commit")
    if (
        head_commit is not None
        and isinstance(commit, str)
        and commit != head_commit
        and find_commit(commit, Path()) is not None
    ):
        return GateSource(
            title,
            problem=f"the newest run is of commit {commit[:8]}. Measure the current commit, {head_commit[:8]}, first.",
            code=EXIT_FAILED,
        )
    # 2. Find change points in series, and cases that fail now but did not fail at the commit before.
    history = read_history(store, observer)
    current_series_states = tuple(_yield_current_series_states(history, newest_run))
    series_changes = find_all_changes(history, store, observer)
    current_runs, previous_runs = _load_two_newest_commits(newest_run, store)
    failures = (
        *_find_new_failures(current_runs, previous_runs),
        *find_unmeasured_cases(current_runs, Evidence.HISTORY),
    )
    if (
        not series_changes.searched_trend_count
        and not failures
        and not any(change.alarms for change in series_changes.changes)
    ):
        reason = (
            "; ".join(f"{count} series: {words}" for words, count in series_changes.skip_count_by_reason.items())
            or "the history has no series"
        )
        return GateSource(
            title,
            problem=f"there is nothing to compare with: {reason}.",
            code=EXIT_BASELINE,
            series_states=current_series_states,
        )
    # 3. Measure each suspected change a second time, to confirm it.
    changes = _select_judged_changes(series_changes, newest_run, history)
    suspect_remeasurer = SuspectRemeasurer(store, observer)

    def confirm(suspects: Sequence[Comparison]) -> SecondMeasurement:
        suspected_changes = [changes[case_and_metric(suspect)] for suspect in suspects]
        return _remeasure_suspect_changes(suspected_changes, current_runs, suspect_remeasurer)

    comparisons = (*failures, *(change.comparison for change in changes.values()))
    # 4. Mention acknowledged changes, and series that are too short to search for changes. The gate does not fail for
    # them.
    acknowledged_count = sum(
        change.is_worse and change.state is ChangeState.ACKNOWLEDGED for change in series_changes.changes
    )
    notes = (
        [f"{acknowledged_count} acknowledged: `fp8bench history regressions --all` lists them"]
        if acknowledged_count
        else []
    )
    notes += [
        f"{count} series not looked at: {reason}" for reason, count in series_changes.skip_count_by_reason.items()
    ]
    blank_comparisons = tuple(_make_unchanged_comparison(line.trend) for line in history.lines)
    budget_seconds = newest_run.request.budget
    return GateSource(
        title,
        comparisons,
        confirm,
        tuple(notes),
        series_states=current_series_states,
        unchanged_figures=blank_comparisons,
        budget=budget_seconds,
    )


def _load_newest_runs(store: Path) -> Iterator[Run]:
    for path in islice(run_files(store), _MAX_RUN_FILES):
        try:
            run = load_run(path)
        except StoreError:
            continue
        # A run that only measured suspects again lacks most cases of its suite.
        if run.origin != REMEASURED_ORIGIN:
            yield run


def _load_two_newest_commits(newest_run: Run, store: Path) -> tuple[list[Run], list[Run]]:
    """Returns all runs of two commits, newest first: the commit of the newest run, and the commit before it. Each
    suite of a commit may have a separate run.
    """
    newest_identity = parse_machine_identity(newest_run.environment.facts)

    def is_same_machine(run: Run) -> bool:
        run_identity = parse_machine_identity(run.environment.facts)
        return newest_identity is None or (
            run_identity is not None and run_identity.home.is_same_interpreter(newest_identity.home)
        )

    runs_by_commit = groupby(
        filter(is_same_machine, _load_newest_runs(store)), lambda run: run.environment.get("commit")
    )
    (_, *same_commit), *earlier_commit_runs = (list(runs) for _, runs in islice(runs_by_commit, 2))
    # With uncommitted changes, runs of the same commit may be of different code.
    are_worktrees_clean = all(run.environment.get("dirty") is False for run in (newest_run, *same_commit))
    previous_runs = earlier_commit_runs[0] if earlier_commit_runs else []
    return [newest_run, *(same_commit if are_worktrees_clean else ())], previous_runs


def _find_new_failures(current_runs: Sequence[Run], previous_runs: Sequence[Run]) -> Iterator[Comparison]:
    previous_records_by_case = _records_by_case(previous_runs)
    for case, record in _records_by_case(current_runs).items():
        if record.status is Status.FAILED and not (
            case in previous_records_by_case and previous_records_by_case[case].status is Status.FAILED
        ):
            yield make_failed_comparison(case, record.case.workload, Evidence.HISTORY, f"failed: {record.reason}")


def _records_by_case(runs: Sequence[Run]) -> dict[str, Record]:
    """Returns the newest record of each case from the runs of one commit."""
    records: dict[str, Record] = {}
    # The newest run comes first, so store its records last.
    for run in reversed(runs):
        records |= {record.case.id: record for record in run.records}
    return records


def _select_judged_changes(
    found_steps: ChangeSearchResult, newest_run: Run, history: History
) -> dict[FigureKey, TrendChange]:
    """Returns the unacknowledged changes on the newest run's machine, at most one for each series. If a series has
    several, a worsening takes precedence, then the larger change.

    A time is left out if the history also has its ratio to the reference, which depends less on how fast the machine
    was. A time per FLOP is left out because the time itself is judged.
    """
    newest_run_identity = parse_machine_identity(newest_run.environment.facts)
    open_changes = [
        change
        for change in found_steps.changes
        if change.state is ChangeState.OPEN
        and change.trend.series.metric not in _DERIVED_METRICS
        and (newest_run_identity is None or history.is_trend_of(change.trend, newest_run_identity))
    ]
    series_with_ratio = _find_cases_with_time_ratio(history)
    judged_changes = (change for change in open_changes if not _is_judged_by_ratio(change.trend, series_with_ratio))
    return {
        # Sorted by precedence: a later change of the same series replaces an earlier one.
        case_and_metric(change.comparison): change
        for change in sorted(judged_changes, key=attrgetter("is_worse", "size"))
    }


def _yield_current_series_states(history: History, newest_run: Run) -> Iterator[SeriesState]:
    trends_and_pieces = ((line.trend, line.comparable) for line in _select_newest_series(history, newest_run))
    values_since_step = [
        (trend, max(parts, key=lambda part: part.places[-1]).values) for trend, parts in trends_and_pieces if parts
    ]
    # The noise of a series is that of its logarithms, so its values must be finite and positive.
    finite_series = [(trend, values[abs(values) < math.inf]) for trend, values in values_since_step]
    positive_series = [(trend, values) for trend, values in finite_series if len(values) and values.min() > 0]
    series_with_ratio = _find_cases_with_time_ratio(history)
    judged_series = [pair for pair in positive_series if not _is_judged_by_ratio(pair[0], series_with_ratio)]
    for (trend, values), level in zip(
        judged_series, find_newest_levels([values for _, values in judged_series]), strict=True
    ):
        newest_mean_value = float(values[-level.length :].mean() if level is not None else values.mean())
        yield SeriesState(
            replace(_make_unchanged_comparison(trend), before=newest_mean_value, after=newest_mean_value), level
        )


def _make_unchanged_comparison(trend: Trend) -> Comparison:
    metric_series = trend.series
    unit = get_series_unit(metric_series)
    return Comparison(
        format_trend_case(trend), metric_series.workload, metric_series.metric, unit, Direction.SAME, Evidence.HISTORY
    )


def _select_newest_series(history: History, newest_run: Run) -> list[Line]:
    """Returns the series to which the newest run added a value on its machine. If the run is not in the history,
    returns all series of the machine. Series of counts are left out, because any change of a count is detected.
    """
    newest_run_identity = parse_machine_identity(newest_run.environment.facts)
    commit = newest_run.environment.get("commit")
    is_same_machine = {}
    lines = []
    for line in history.lines:
        machine = (line.trend.machine.get("machine"), line.trend.python)
        if machine not in is_same_machine:
            is_same_machine[machine] = newest_run_identity is None or history.is_trend_of(
                line.trend, newest_run_identity
            )
        if (
            is_same_machine[machine]
            and line.trend.series.metric not in _DERIVED_METRICS
            and line.trend.series.metric not in COUNTS
        ):
            lines.append(line)
    return [line for line in lines if line.ending.last.commit == commit] or lines


def _is_judged_by_ratio(trend: Trend, series_with_ratio: set[tuple[object, ...]]) -> bool:
    return trend.series.unit == "seconds" and _make_case_key(trend) in series_with_ratio


def _make_case_key(trend: Trend) -> tuple[object, ...]:
    return trend.series.workload, trend.cell, trend.machine.get("machine"), trend.python


def _find_cases_with_time_ratio(history: History) -> set[tuple[object, ...]]:
    """Returns the keys of the cases whose time relative to the reference has a series in the history."""
    lines = [line for line in history.lines if line.trend.series.metric == RELATIVE_TIME]
    return {_make_case_key(line.trend) for line in lines if line.comparable}


def _remeasure_suspect_changes(
    suspects: Sequence[TrendChange], current_runs: Sequence[Run], remeasurer: SuspectRemeasurer
) -> SecondMeasurement:
    """Measures each suspected change again. The request is that of the newest run that contains the case."""
    second_measurements: list[SecondMeasurement] = []
    remaining_suspects = list(suspects)
    for run in current_runs:
        case_by_cell = {
            (record.case.workload, find_grid_cell_of_case(record.case, run)): record.case.id
            for record in reversed(run.records)
        }
        matched_suspects = []
        unmatched_suspects = []
        for suspect in remaining_suspects:
            case = case_by_cell.get((suspect.trend.series.workload, suspect.trend.cell))
            if case is None:
                unmatched_suspects.append(suspect)
            else:
                matched_suspects.append((suspect, case))
        second_measurements += _duel_or_remeasure_suspects(matched_suspects, run, remeasurer)
        remaining_suspects = unmatched_suspects
    if remaining_suspects:
        second_measurements.append(SecondMeasurement({}, refused=f"run {current_runs[0].id} does not have the case"))
    return join_second_looks(second_measurements)


def _duel_or_remeasure_suspects(
    suspects: Sequence[tuple[TrendChange, str]], run: Run, remeasurer: SuspectRemeasurer
) -> Iterator[SecondMeasurement]:
    """Measures each suspected change in a duel with the last commit before the change. If no duel is possible,
    measures the case again. `suspects` are pairs of a change and the id of its case in the run.
    """
    # 1. Run one duel for all suspects with the same commit, because building a commit takes most of the time.
    suspects_without_duel = []
    suspects_by_commit = together((change.comparison.since, (change, case)) for change, case in suspects)
    for since, group in suspects_by_commit.items():
        renamed_suspects = [replace(change.comparison, case=case) for change, case in group]
        second_measurement = remeasurer.duel_with_commit(since, run.request, renamed_suspects)
        if second_measurement is None or second_measurement.refused:
            suspects_without_duel += group
            continue
        figures = {}
        for change, case in group:
            step = change.comparison
            figure = second_measurement.comparisons.get((case, step.metric))
            if figure is not None:
                figures[case_and_metric(step)] = replace(figure, case=step.case)
        yield replace(second_measurement, comparisons=figures)
    # 2. If a commit can no longer be built, measure its suspects again without a duel, and compare with stored values.
    if not suspects_without_duel:
        return
    rerun, refusal = remeasurer.measure_cases(run, {case for _, case in suspects_without_duel})
    if rerun is None:
        yield SecondMeasurement({}, refused=refusal)
        return
    figures = {}
    for change, _ in suspects_without_duel:
        figure = _compare_with_change(change, rerun)
        if figure is not None:
            figures[case_and_metric(change.comparison)] = figure
    yield SecondMeasurement(figures, f"measured again in run {rerun.id}")


def _compare_with_change(change: TrendChange, run: Run) -> Comparison | None:
    trend = change.trend
    step = change.comparison
    # 1. Collect the new run's values of the series that changed.
    series_version = trend.series.name, trend.cell, change.version
    points = [
        point
        for point in extract_history_points(run).points
        if (point.series, point.cell, point.version) == series_version
    ]
    values = list(chain.from_iterable(point.samples for point in points))
    if points and points[0].status is Status.FAILED:
        return replace(step, direction=Direction.NONE, failed=True, why=points[0].reason)
    if not values or step.before is None or step.after is None:
        return None
    new_value = statistics.median(values)
    # 2. NaN and infinity have no ratio to other values. If the new value is not finite, the change is confirmed.
    if not (math.isfinite(step.after) and math.isfinite(new_value)):
        direction = Direction.SAME if math.isfinite(new_value) else Direction.WORSE
        return replace(step, direction=direction, after=new_value)
    # A level of 0 has no logarithm.
    if not step.before or not step.after:
        return None
    # 3. Check whether the logarithm of the new value is nearer to the level after the change than to the one before.
    is_nearer_to_new_level = new_value > math.sqrt(step.before * step.after)
    measured_ratio = new_value / step.before
    return replace(
        step,
        direction=Direction.WORSE if is_nearer_to_new_level else Direction.SAME,
        after=new_value,
        ratio=Interval(measured_ratio, measured_ratio, measured_ratio, 0.0),
        p_value=None,
    )
