"""Measures a workload's grid for asv, and adds the earlier results of its commit."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from fp8bench.errors import Fp8benchError, NotKept
from fp8bench.jobs.after_run import into_history
from fp8bench.model import Cell, Point, Request, Run, Status
from fp8bench.pipeline import execute
from fp8bench.protocols import Observer
from fp8bench.store.commit_runs import find_commit, runs_of_commit, tracked_run, why_outside_history
from fp8bench.store.points import merge_points, points_of_run

# ("samples", numbers), ("failed", reason) or ("none", reason).
Outcome = tuple[str, object]


def measured_by_asv(
    request: Request, store: Path, root: Path, observer: Observer, saved_as: str = ""
) -> dict[str, dict[Cell, Outcome]]:
    """Measures a workload's grid, stores the run, and returns outcomes of its commit by series and cell.

    `saved_as` is the commit under which asv saves results, '' for none: results of other commits are replaced by the
    stored ones of that commit, or reported as failures. A case that fails now counts as failed, regardless of earlier
    results.
    """
    # 1. Measure, and store the run.
    try:
        run = execute(request, store, observer, "asv run", origin="asv", folder=root)
        into_history(run, store, view=False)  # asv writes its own view
    except NotKept as error:
        run = cast(Run, error.run)
    if not run.finished and not run.troubles:
        raise KeyboardInterrupt
    measured = points_of_run(run)
    if not measured.points:
        reason = measured.why or "; ".join(run.troubles).rstrip(".") or "none of its cases was begun"
        raise Fp8benchError(f"asv cannot track the suite {request.suite}: {reason}.")
    # 2. Combine its points with those of the commit's other runs, or replace them if its commit differs.
    commit = (find_commit(saved_as, root) if saved_as else None) or str(run.environment.get("commit"))
    mismatch = _why_other_commit(commit, run) if saved_as else ""
    points = _earlier_points(run, store, commit) if mismatch or not why_outside_history(run) else []
    if not mismatch:
        points += measured.points
    outcomes: dict[str, dict[Cell, Outcome]] = {series.name: {} for series in measured.series}
    for (name, cell), point in merge_points(points, measured.series).items():
        outcomes.setdefault(name, {})[cell] = _outcome(point)
    # 3. Report failures.
    for point in measured.points:
        if mismatch:
            outcome = ("failed", mismatch) if point.samples else _outcome(point)
            outcomes[point.series].setdefault(point.cell, outcome)
        elif point.status is Status.FAILED:
            outcomes[point.series][point.cell] = _outcome(point)
    return outcomes


def _earlier_points(run: Run, store: Path, commit: str) -> list[Point]:
    """Returns points of the commit's other runs on the same machine, interpreter and versions."""
    tracked = tracked_run(run)
    if tracked is None:
        return []
    versions = {(point.series, point.version) for point in tracked.content.points}
    points: list[Point] = []
    for earlier in runs_of_commit(store, commit):
        if earlier.run.id != run.id and earlier.identity.home.is_same(tracked.identity.home):
            points += [point for point in earlier.content.points if (point.series, point.version) in versions]
    return points


def _why_other_commit(commit: str, run: Run) -> str:
    checked_out = run.environment.get("commit")
    if isinstance(checked_out, str) and checked_out != commit:
        return (
            f"asv saves it as commit {commit[:8]}, and commit {checked_out[:8]} is checked out: give "
            "--set-commit-hash that"
        )
    return why_outside_history(run)


def _outcome(point: Point) -> Outcome:
    if point.samples:
        return "samples", list(point.samples)
    return ("failed" if point.status is Status.FAILED else "none"), point.reason
