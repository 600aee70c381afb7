"""Judges the unacknowledged steps in a store's history, on the newest run's machine.

Suspects are duelled with the last commit that had the old level, if the repository has it; otherwise they are
re-measured, and must be nearer to the new level than to the old one.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby, islice
from pathlib import Path

from fp8bench.analysis.metric import unit_of_series
from fp8bench.analysis.steps.change_points import newest_levels
from fp8bench.analysis.steps.changes import Change, ChangeState, Found, case_of
from fp8bench.errors import EXIT_BASELINE, EXIT_FAILED, StoreError
from fp8bench.features.gate.judging import Key, SecondLook, join_looks, key_of
from fp8bench.features.gate.power import Newest
from fp8bench.features.gate.stored_runs import (
    GateSource,
    Pool,
    duel_with,
    failed_case,
    remeasure_cases,
    unmeasured_cases,
)
from fp8bench.jobs.history import all_changes, existing_store, read_history
from fp8bench.jobs.observer import JobObserver
from fp8bench.model import Cell, Comparison, Direction, Evidence, Interval, Run, Status, Trend
from fp8bench.model.specs import COUNTS, PER, RELATIVE
from fp8bench.pipeline import AGAIN
from fp8bench.report.panels import together
from fp8bench.store.asv.identity import from_facts
from fp8bench.store.commit_runs import find_commit
from fp8bench.store.figures.lines import History, Line
from fp8bench.store.points import cell_of, points_of_run
from fp8bench.store.runs.listing import run_files
from fp8bench.store.runs.run_file import load_run

# At most this many run files are searched for those of the newest commit and the one before it.
_MOST_LOOKED_AT = 200
_DERIVED = frozenset(name for name, _ in PER.values())


def compare_history(path: Path, observer: JobObserver) -> GateSource:
    # 1. Without a run of the current commit there is nothing to judge: silence would look like a pass.
    store = existing_store(path, observer)
    newest = next(_runs(store), None)
    title = f"the history in {path}"
    if newest is None:
        return GateSource(title, problem=f"the store {store} has no runs yet.", code=EXIT_FAILED)
    title = f"{title}, up to run {newest.id}"
    if all(record.status is Status.SKIPPED for record in newest.records):
        return GateSource(title, problem=f"no case of run {newest.id} came to a number.", code=EXIT_FAILED)
    head, commit = find_commit("HEAD", Path()), newest.environment.get("commit")
    if head is not None and isinstance(commit, str) and commit != head and find_commit(commit, Path()) is not None:
        return GateSource(
            title,
            problem=f"the newest run is of commit {commit[:8]}, and nothing was measured since of {head[:8]}, which is "
            "here.",
            code=EXIT_FAILED,
        )
    # 2. Find steps of series, and failures that are new tonight.
    history = read_history(store, observer)
    series = tuple(_newest_of_series(history, newest))
    steps = all_changes(history, store, observer)
    tonight, night_before = _latest_nights(newest, store)
    failures = (*_failures(tonight, night_before), *unmeasured_cases(tonight, Evidence.HISTORY))
    if not steps.looked_at and not failures and not any(change.alarms for change in steps.changes):
        reason = "; ".join(f"{count} series: {words}" for words, count in steps.left.items()) or "there is no series"
        return GateSource(
            title, problem=f"there is nothing to compare with: {reason}.", code=EXIT_BASELINE, newest=series
        )
    # 3. Each step is a suspect until it was confirmed.
    changes = _judgeable(steps, newest, history)
    pool: Pool = {}

    def confirm(suspects: Sequence[Comparison]) -> SecondLook:
        return _look_again([changes[key_of(suspect)] for suspect in suspects], tonight, store, observer, pool)

    comparisons = (*failures, *(change.comparison for change in changes.values()))
    # 4. Mention acknowledged steps and series too short to search, without failing.
    acknowledged = sum(change.is_worse and change.state is ChangeState.ACKNOWLEDGED for change in steps.changes)
    notes = [f"{acknowledged} acknowledged: `fp8bench history regressions --all` lists them"] if acknowledged else []
    notes += [f"{count} series not looked at: {reason}" for reason, count in steps.left.items()]
    every = tuple(_as_comparison(line.trend) for line in history.lines)
    budget = newest.request.budget
    return GateSource(title, comparisons, confirm, tuple(notes), newest=series, unchanged=every, budget=budget)


def _runs(store: Path) -> Iterator[Run]:
    for path in islice(run_files(store), _MOST_LOOKED_AT):
        try:
            run = load_run(path)
        except StoreError:
            continue
        if run.origin != AGAIN:
            yield run


def _latest_nights(newest: Run, store: Path) -> tuple[list[Run], list[Run]]:
    """Returns the newest run with others of its commit, and those of the commit before, newest first: suites may have
    separate runs."""
    place = from_facts(newest.environment.facts)

    def is_here(run: Run) -> bool:
        candidate = from_facts(run.environment.facts)
        return place is None or (candidate is not None and candidate.home.is_same(place.home))

    by_commit = groupby(filter(is_here, _runs(store)), lambda run: run.environment.get("commit"))
    (_, *same_commit), *earlier = (list(runs) for _, runs in islice(by_commit, 2))
    clean = all(run.environment.get("dirty") is False for run in (newest, *same_commit))
    return [newest, *(same_commit if clean else ())], earlier[0] if earlier else []


def _failures(tonight: Sequence[Run], night_before: Sequence[Run]) -> Iterator[Comparison]:
    # The newest of several runs of a night takes precedence.
    before, newest = (
        {record.case.id: record for run in reversed(night) for record in run.records}
        for night in (night_before, tonight)
    )
    for case, record in newest.items():
        if record.status is Status.FAILED and not (case in before and before[case].status is Status.FAILED):
            yield failed_case(case, record.case.workload, Evidence.HISTORY, f"failed: {record.reason}")


def _judgeable(steps: Found, newest: Run, history: History) -> dict[Key, Change]:
    """Returns the open changes on the newest run's machine; if a series has two, the one that is worse, or else the
    larger. A time is left out if its ratio to the reference has a series, because it also shows how fast the machine
    was; a time per FLOP is covered by the time."""
    place = from_facts(newest.environment.facts)
    open_changes = [
        change
        for change in steps.changes
        if change.state is ChangeState.OPEN
        and change.trend.series.metric not in _DERIVED
        and (place is None or history.is_of(change.trend, place))
    ]
    relative = _with_relative(history)
    judged = (change for change in open_changes if not _has_relative(change.trend, relative))
    return {key_of(change.comparison): change for change in sorted(judged, key=_weight)}


def _weight(change: Change) -> tuple[bool, float]:
    return change.is_worse, change.size


def _newest_of_series(history: History, newest: Run) -> Iterator[Newest]:
    compared = ((line.trend, line.comparable) for line in _lines_of(history, newest))
    latest = [(trend, max(every, key=lambda part: part.places[-1]).values) for trend, every in compared if every]
    finite = [(trend, values[abs(values) < math.inf]) for trend, values in latest]
    positive = [(trend, values) for trend, values in finite if len(values) and values.min() > 0]
    relative = _with_relative(history)
    judged = [pair for pair in positive if not _has_relative(pair[0], relative)]
    for (trend, values), level in zip(judged, newest_levels([values for _, values in judged]), strict=True):
        value = float(values[-level.length :].mean() if level is not None else values.mean())
        yield Newest(replace(_as_comparison(trend), before=value, after=value), level)


def _as_comparison(trend: Trend) -> Comparison:
    series = trend.series
    unit = unit_of_series(series)
    return Comparison(case_of(trend), series.workload, series.metric, unit, Direction.SAME, Evidence.HISTORY)


def _lines_of(history: History, newest: Run) -> list[Line]:
    """Returns the series of the newest run's machine that the run has continued; all of them, if it is not in any
    history. Counts are left out: any change of them is detected."""
    place, commit = from_facts(newest.environment.facts), newest.environment.get("commit")
    mine: dict[tuple[object, str], bool] = {}
    lines = []
    for line in history.lines:
        where = (line.trend.machine.get("machine"), line.trend.python)
        if where not in mine:
            mine[where] = place is None or history.is_of(line.trend, place)
        if mine[where] and line.trend.series.metric not in _DERIVED and line.trend.series.metric not in COUNTS:
            lines.append(line)
    return [line for line in lines if line.ending.last.commit == commit] or lines


def _has_relative(trend: Trend, relative: set[tuple[object, ...]]) -> bool:
    return trend.series.unit == "seconds" and _place(trend) in relative


def _place(trend: Trend) -> tuple[object, ...]:
    return trend.series.workload, trend.cell, trend.machine.get("machine"), trend.python


def _with_relative(history: History) -> set[tuple[object, ...]]:
    """Returns the places that have a series of times relative to the reference's."""
    lines = [line for line in history.lines if line.trend.series.metric == RELATIVE]
    return {_place(line.trend) for line in lines if line.comparable}


def _look_again(
    suspects: Sequence[Change], tonight: Sequence[Run], store: Path, observer: JobObserver, pool: Pool
) -> SecondLook:
    """Re-measures each suspect with the request of the newest run that has its case."""
    looks: list[SecondLook] = []
    remaining = list(suspects)
    for run in tonight:
        cases = {(record.case.workload, cell_of(record.case, run)): record.case.id for record in reversed(run.records)}
        matching = [(suspect, cases[_cell(suspect)]) for suspect in remaining if _cell(suspect) in cases]
        remaining = [suspect for suspect in remaining if _cell(suspect) not in cases]
        looks += _looks_of(matching, run, store, observer, pool)
    if remaining:
        looks.append(SecondLook({}, refused=f"run {tonight[0].id} does not have the case"))
    return join_looks(looks)


def _cell(suspect: Change) -> tuple[str, Cell | None]:
    return suspect.trend.series.workload, suspect.trend.cell


def _looks_of(
    suspects: Sequence[tuple[Change, str]], run: Run, store: Path, observer: JobObserver, pool: Pool
) -> Iterator[SecondLook]:
    """Duels each suspect, by its case in the run, with the commit before its step; re-measures it if that fails."""
    # 1. One duel for all suspects of a commit, because building takes most of the time.
    alone: list[tuple[Change, str]] = []
    by_commit = together((change.comparison.since, (change, case)) for change, case in suspects)
    for since, some in by_commit.items():
        named = [replace(change.comparison, case=case) for change, case in some]
        look = duel_with(since, run.request, store, named, observer, pool)
        if look is None or look.refused:
            alone += some
            continue
        figures = {
            key_of(change.comparison): look.comparisons.get((case, change.comparison.metric)) for change, case in some
        }
        named_again = {key: replace(figure, case=key[0]) for key, figure in figures.items() if figure}
        yield replace(look, comparisons=named_again)
    # 2. Commits that cannot be built any more are re-measured here, against their history.
    if not alone:
        return
    rerun, refused = remeasure_cases(run, {case for _, case in alone}, store, observer)
    if rerun is None:
        yield SecondLook({}, refused=refused)
        return
    values = {key_of(change.comparison): _new_value(change, rerun) for change, _ in alone}
    yield SecondLook({key: value for key, value in values.items() if value}, f"measured again in run {rerun.id}")


def _new_value(change: Change, run: Run) -> Comparison | None:
    trend, step = change.trend, change.comparison
    # 1. The new run's points of the same series, if it has any.
    place = trend.series.name, trend.cell, change.version
    points = [point for point in points_of_run(run).points if (point.series, point.cell, point.version) == place]
    values = [sample for point in points for sample in point.samples]
    if points and points[0].status is Status.FAILED:
        return replace(step, direction=Direction.NONE, failed=True, why=points[0].reason)
    if not values or step.before is None or step.after is None:
        return None
    value = statistics.median(values)
    # 2. If a ratio is meaningless, NaN or infinity again is as bad as before.
    if not (math.isfinite(step.after) and math.isfinite(value)):
        direction = Direction.SAME if math.isfinite(value) else Direction.WORSE
        return replace(step, direction=direction, after=value)
    if not step.before or not step.after:
        return None
    # 3. Check whether it is nearer to the value after the step, in logarithms, which suit a ratio.
    nearer = value > math.sqrt(step.before * step.after)
    ratio = value / step.before
    return replace(
        step,
        direction=Direction.WORSE if nearer else Direction.SAME,
        after=value,
        ratio=Interval(ratio, ratio, ratio, 0.0),
        p_value=None,
    )
