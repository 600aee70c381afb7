"""Which operators changed where a count stepped: read from the tapes of the runs on both sides of the step."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

from fp8bench.analysis.steps.changes import Change, Found, State
from fp8bench.analysis.tapes import what_changed
from fp8bench.errors import StoreError
from fp8bench.model import Cell, Tape
from fp8bench.store.asv.identity import Identity
from fp8bench.store.commit_runs import files_by_commit, tracked_run
from fp8bench.store.index.history import History
from fp8bench.store.points import cell_of
from fp8bench.store.runs.run_file import load_run

_Tapes = list[tuple[Identity, dict[tuple[str, str, Cell], Tape]]]


def with_operators(found: Found, store: Path, history: History) -> Found:
    """The same, where open changes of counts name the operators that changed. Their figures say how many and no more;
    the runs of the two commits, which say which, are read only for such a change."""

    @cache
    def tapes(commit: str) -> _Tapes:
        return _tapes_of_commit(store, commit)

    def tape_of(change: Change, commit: str) -> Tape | None:
        trend = change.trend
        key = trend.series.workload, change.version, trend.cell
        there = [some[key] for place, some in tapes(commit) if key in some and history.is_of(trend, place)]
        return there[-1] if there else None

    def named(change: Change) -> Change:
        one = change.comparison
        if not change.is_counted or change.state is not State.OPEN:
            return change
        before, after = (tape_of(change, commit) for commit in (one.since, one.until))
        if before is None or after is None:
            return change
        return replace(change, comparison=replace(one, why=what_changed(before, after)))

    return replace(found, changes=tuple(map(named, found.changes)))


def _tapes_of_commit(store: Path, commit: str) -> _Tapes:
    """The tapes of its runs, oldest first, by suite, version and cell, and where each run was made."""
    found: _Tapes = []
    for path in files_by_commit(store).get(commit[:8], ()):
        try:
            run = load_run(path)
        except StoreError:
            continue
        tracked = tracked_run(run)
        if tracked is None or tracked.commit != commit:
            continue
        versions = {(point.series.partition(".")[0], point.cell): point.version for point in tracked.content.points}
        tapes = {}
        for record in run.records:
            cell, name = cell_of(record.case, run), record.case.workload
            if record.tape is not None and cell is not None and (name, cell) in versions:
                tapes[name, versions[name, cell], cell] = record.tape
        found.append((tracked.identity, tapes))
    return found
