"""What asv gets to read: the grid of a workload, measured once, with what its commit has come to before."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from fp8bench.errors import Fp8benchError, NotKept
from fp8bench.model import Cell, Point, Request, Run, Status
from fp8bench.pipeline import execute
from fp8bench.points import followed, merged
from fp8bench.protocols import Observer
from fp8bench.view import Told, tell, told_of_commit, why_not

# What became of a cell: ("samples", numbers), ("failed", reason) or ("none", reason).
Outcome = tuple[str, object]


def measured_by_asv(
    request: Request, store: Path, root: Path, observer: Observer, alone: bool = False
) -> dict[str, dict[Cell, Outcome]]:
    """Measure a workload's grid for asv, keep the run, and say what its commit has come to, by series and cell.

    A case that fails now is failed, whatever was measured before. `alone` leaves other runs out: of a commit's samples
    asv has them already, and would have them twice.
    """
    try:
        run = execute(request, store, observer, "asv run", origin="asv", folder=root)
    except NotKept as error:
        run = cast(Run, error.run)
    if not run.finished and not run.troubles:
        raise KeyboardInterrupt
    own = followed(run)
    if not own.points:
        why = own.why or "; ".join(run.troubles).rstrip(".") or "none of its cases was begun"
        raise Fp8benchError(f"asv gets no figures of the suite {request.suite}: {why}.")
    company = [] if alone else _company(run, store)
    points = [point for one in company for point in one.content.points] + list(own.points)
    outcomes: dict[str, dict[Cell, Outcome]] = {series.name: {} for series in own.series}
    for (name, cell), point in merged(points).items():
        outcomes.setdefault(name, {})[cell] = _outcome(point)
    for point in own.points:
        if point.status is Status.FAILED:
            outcomes[point.series][point.cell] = _outcome(point)
    return outcomes


def _company(run: Run, store: Path) -> list[Told]:
    """The other runs of the same commit, machine and interpreter."""
    told = tell(run)
    if told is None or why_not(run):
        return []
    return [one for one in told_of_commit(store, told.commit) if one.run.id != run.id and one.is_of(told.place)]


def _outcome(point: Point) -> Outcome:
    if point.samples:
        return "samples", list(point.samples)
    return ("failed" if point.status is Status.FAILED else "none"), point.reason
