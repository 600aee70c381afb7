"""Measures all cases of a workload's grid for asv, and adds earlier results of the same commit."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from fp8bench.errors import Fp8benchError, NotKept
from fp8bench.jobs.after_run import add_to_history
from fp8bench.model import Cell, Point, Request, Run, Status
from fp8bench.pipeline import execute
from fp8bench.protocols import Observer
from fp8bench.store.commit_runs import explain_outside_history, find_commit, read_runs_of_commit, track_run
from fp8bench.store.points import extract_history_points, merge_points

# The outcome of a case is ("samples", numbers), ("failed", reason), or ("none", reason) if the case was not measured.
CellOutcome = tuple[str, object]


def measure_for_asv(
    request: Request, store: Path, root: Path, observer: Observer, asv_commit: str = ""
) -> dict[str, dict[Cell, CellOutcome]]:
    """Measures all cases of a workload's grid for asv, and stores the run. Returns outcomes by series (an asv
    benchmark) and cell (its parameter values). The outcomes are those of `asv_commit`, the commit under which asv saves
    results. If asv saves none (''), they are those of the run's commit.

    If the run measured a commit other than `asv_commit`, the outcomes come from stored runs of `asv_commit`. A case
    that was measured now, but has no stored results, then counts as failed. Otherwise, a case that fails in this run
    counts as failed, even if an earlier run has results of it.
    """
    # 1. Measure, and store the run.
    try:
        run = execute(request, store, observer, "asv run", origin="asv", folder=root)
        add_to_history(run, store, view=False)  # asv itself writes the files that it shows
    except NotKept as error:
        # The store failed during the run, but asv needs only what was measured.
        run = cast(Run, error.run)
    if not run.finished and not run.troubles:
        raise KeyboardInterrupt
    measured_run_points = extract_history_points(run)
    if not measured_run_points.points:
        reason = measured_run_points.why or "; ".join(run.troubles).rstrip(".") or "none of its cases was begun"
        raise Fp8benchError(f"asv cannot track the suite {request.suite}: {reason}.")
    # 2. Combine this run's points (one per series, cell and commit) with those of earlier runs of the same commit. If
    # this run measured a different commit, use only stored points.
    commit = (find_commit(asv_commit, root) if asv_commit else None) or str(run.environment.get("commit"))
    mismatch_reason = _explain_other_commit(commit, run) if asv_commit else ""
    points = (
        _list_points_of_other_runs(run, store, commit) if mismatch_reason or not explain_outside_history(run) else []
    )
    if not mismatch_reason:
        points += measured_run_points.points
    outcomes: dict[str, dict[Cell, CellOutcome]] = {
        metric_series.name: {} for metric_series in measured_run_points.series
    }
    for (name, cell), point in merge_points(points, measured_run_points.series).items():
        outcomes.setdefault(name, {})[cell] = _make_point_outcome(point)
    # 3. Mark cases without results as failed.
    for point in measured_run_points.points:
        if mismatch_reason:
            point_outcome = ("failed", mismatch_reason) if point.samples else _make_point_outcome(point)
            outcomes[point.series].setdefault(point.cell, point_outcome)
        elif point.status is Status.FAILED:
            outcomes[point.series][point.cell] = _make_point_outcome(point)
    return outcomes


def _list_points_of_other_runs(run: Run, store: Path, commit: str) -> list[Point]:
    """Returns the points (measured values) of other runs of the commit, if they have the same machine and interpreter
    as `run`. Leaves out series of which `run` has a different version.
    """
    tracked_run = track_run(run)
    if tracked_run is None:
        return []
    versions = {(point.series, point.version) for point in tracked_run.content.points}
    points: list[Point] = []
    for earlier in read_runs_of_commit(store, commit):
        if earlier.run.id != run.id and earlier.identity.home.is_same_interpreter(tracked_run.identity.home):
            points += [point for point in earlier.content.points if (point.series, point.version) in versions]
    return points


def _explain_other_commit(commit: str, run: Run) -> str:
    current_commit = run.environment.get("commit")
    if isinstance(current_commit, str) and current_commit != commit:
        reason = f"asv saves results as commit {commit[:8]}, but commit {current_commit[:8]} is checked out"
        return f"{reason}: give --set-commit-hash that"
    return explain_outside_history(run)


def _make_point_outcome(point: Point) -> CellOutcome:
    if point.samples:
        return "samples", list(point.samples)
    return ("failed" if point.status is Status.FAILED else "none"), point.reason
