"""Measures a workload's grid for asv, and adds what its commit has come to before."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from fp8bench.errors import Fp8benchError, NotKept
from fp8bench.jobs.after_run import into_history
from fp8bench.model import Cell, Point, Request, Run, Status
from fp8bench.pipeline import execute
from fp8bench.protocols import Observer
from fp8bench.store.commit_runs import commit_named, runs_of_commit, tracked_run, why_untracked
from fp8bench.store.points import followed, merged

# ("samples", numbers), ("failed", reason) or ("none", reason).
Outcome = tuple[str, object]


def measured_by_asv(
    request: Request, store: Path, root: Path, observer: Observer, saved_as: str = ""
) -> dict[str, dict[Cell, Outcome]]:
    """Measures a workload's grid, keeps the run, and returns outcomes of its commit by series and cell.

    `saved_as` is the commit under which asv saves results, '' for none: results of other commits are replaced by what
    that commit has come to, or reported as failures. A case that fails now is failed, whatever was measured before.
    """
    try:
        run = execute(request, store, observer, "asv run", origin="asv", folder=root)
        into_history(run, store, view=False)  # asv writes its own
    except NotKept as error:
        run = cast(Run, error.run)
    if not run.finished and not run.troubles:
        raise KeyboardInterrupt
    own = followed(run)
    if not own.points:
        why = own.why or "; ".join(run.troubles).rstrip(".") or "none of its cases was begun"
        raise Fp8benchError(f"asv gets no figures of the suite {request.suite}: {why}.")
    named = commit_named(saved_as, root) if saved_as else None
    commit = named or str(run.environment.get("commit"))
    why = _not_of(commit, run) if saved_as else ""
    others = _others(run, store, commit) if why or not why_untracked(run) else []
    outcomes: dict[str, dict[Cell, Outcome]] = {series.name: {} for series in own.series}
    for (name, cell), point in merged(others if why else [*others, *own.points], own.series).items():
        outcomes.setdefault(name, {})[cell] = _outcome(point)
    for point in own.points:
        if why:
            outcome = ("failed", why) if point.samples else _outcome(point)
            outcomes[point.series].setdefault(point.cell, outcome)
        elif point.status is Status.FAILED:
            outcomes[point.series][point.cell] = _outcome(point)
    return outcomes


def _others(run: Run, store: Path, commit: str) -> list[Point]:
    """Points of the commit's other runs on the same machine, interpreter and versions."""
    tracked = tracked_run(run)
    if tracked is None:
        return []
    home = tracked.identity.home
    others = (other for other in runs_of_commit(store, commit) if other.run.id != run.id)
    company = [other for other in others if other.identity.home.is_same(home)]
    versions = {(point.series, point.version) for point in tracked.content.points}
    return [point for other in company for point in other.content.points if (point.series, point.version) in versions]


def _not_of(commit: str, run: Run) -> str:
    here = run.environment.get("commit")
    if isinstance(here, str) and here != commit:
        return f"asv saves it as commit {commit[:8]}, and commit {here[:8]} is checked out: give --set-commit-hash that"
    return why_untracked(run)


def _outcome(point: Point) -> Outcome:
    if point.samples:
        return "samples", list(point.samples)
    return ("failed" if point.status is Status.FAILED else "none"), point.reason
