"""What asv gets to read: the grid of a workload, measured once, with what its commit has come to before."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from fp8bench.errors import Fp8benchError, NotKept
from fp8bench.history.asv_files import AsvFileError
from fp8bench.history.asv_results import load_results
from fp8bench.model import Cell, Point, Request, Run, Status
from fp8bench.pipeline import execute
from fp8bench.points import followed, merged
from fp8bench.protocols import Observer
from fp8bench.view import Told, results_of, tell, told_of_commit, why_not

# What became of a cell: ("samples", numbers), ("failed", reason) or ("none", reason).
Outcome = tuple[str, object]


def measured_by_asv(
    request: Request, store: Path, root: Path, observer: Observer, appending: bool = False
) -> dict[str, dict[Cell, Outcome]]:
    """Measure a workload's grid for asv, keep the run, and say what its commit has come to, by series and cell.

    A case that fails now is failed, whatever was measured before. Where asv is `appending` samples to those it has, it
    is not given them again.
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
    told = tell(run)
    known = _recorded(store, told) if appending and told is not None else frozenset()
    company = _company(told, store) if told is not None else []
    points = [point for one in company for point in one.content.points if point.series not in known]
    points += own.points
    outcomes: dict[str, dict[Cell, Outcome]] = {series.name: {} for series in own.series}
    for (name, cell), point in merged(points).items():
        outcomes.setdefault(name, {})[cell] = _outcome(point)
    for point in own.points:
        if point.status is Status.FAILED:
            outcomes[point.series][point.cell] = _outcome(point)
    return outcomes


def _company(told: Told, store: Path) -> list[Told]:
    """The other runs of the same commit, machine and interpreter."""
    if why_not(told.run):
        return []
    return [one for one in told_of_commit(store, told.commit) if one.run.id != told.run.id and one.is_of(told.place)]


def _recorded(store: Path, told: Told) -> frozenset[str]:
    """The series whose samples asv has, beside the statistics: it was asked to record them."""
    path = results_of(store) / told.place.machine / told.identity.file_name(told.commit)
    try:
        rows = load_results(path).rows
    except AsvFileError:  # there is none yet, or asv cannot read it either
        return frozenset()
    return frozenset(name for name, row in rows.items() if any(row.samples))


def _outcome(point: Point) -> Outcome:
    if point.samples:
        return "samples", list(point.samples)
    return ("failed" if point.status is Status.FAILED else "none"), point.reason
