"""What asv gets to read: the grid of a workload, measured once, with what its commit has come to before."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from fp8bench.errors import NotKept
from fp8bench.model import Cell, Point, Request, Run, Status
from fp8bench.pipeline import execute
from fp8bench.points import followed, merged
from fp8bench.protocols import Observer
from fp8bench.view import runs_of_commit, tell, why_not

# What became of a cell: ("samples", numbers), ("failed", reason) or ("none", reason).
Outcome = tuple[str, object]


def measured_by_asv(request: Request, store: Path, root: Path, observer: Observer) -> dict[str, dict[Cell, Outcome]]:
    """Measure a workload's grid for asv, keep the run, and say what its commit has come to, by series and cell.

    A case that fails now is failed, whatever was measured before.
    """
    try:
        run = execute(request, store, observer, "asv run", origin="asv", folder=root)
    except NotKept as error:
        run = cast(Run, error.run)
    if not run.finished and not run.troubles:
        raise KeyboardInterrupt
    own = followed(run)
    points = [point for one in _company(run, store) for point in followed(one).points] + list(own.points)
    outcomes: dict[str, dict[Cell, Outcome]] = {series.name: {} for series in own.series}
    for (name, cell), point in merged(points).items():
        outcomes.setdefault(name, {})[cell] = _outcome(point)
    for point in own.points:
        if point.status is Status.FAILED:
            outcomes[point.series][point.cell] = _outcome(point)
    return outcomes


def _company(run: Run, store: Path) -> list[Run]:
    """The other runs of the same commit, machine and interpreter."""
    told = tell(run)
    if told is None or why_not(run):
        return []
    others = [tell(one) for one in runs_of_commit(store, told.commit) if one.id != run.id]
    return [one.run for one in others if one is not None and one.is_of(told.place)]


def _outcome(point: Point) -> Outcome:
    if point.samples:
        return "samples", list(point.samples)
    return ("failed" if point.status is Status.FAILED else "none"), point.reason
