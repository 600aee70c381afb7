"""asv's view of the truth: what every commit has come to, in asv's own files beside the runs.

What a commit has come to is a function of its runs alone, whichever door they came in by, so that a suite run and an
asv run of one commit end in one line of one graph, and the view can be made again at any time. What the runs know
nothing of (asv's own measurements, those of lost runs) is left as it stands.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import NamedTuple, TypeVar

from fp8bench.errors import StoreError
from fp8bench.history.asv_files import AsvFileAbsent, AsvFileBroken, locked, set_aside, settled_read
from fp8bench.history.asv_lists import (
    Definition,
    load_benchmarks,
    load_machine,
    merge_benchmarks,
    merge_machine,
    save_benchmarks,
    save_machine,
)
from fp8bench.history.asv_results import ResultsFile, load_results, save_results
from fp8bench.history.asv_rows import Row, Stats, cell
from fp8bench.history.runs import load_run, run_files
from fp8bench.identity import Identity, from_facts, identify, same_interpreter
from fp8bench.model import Cell, Point, Run, Series, Status
from fp8bench.points import Followed, followed, merged

T = TypeVar("T")
Figures = tuple[float | None, Stats | None, tuple[float, ...] | None]
NOT_MEASURED: Figures = (math.nan, None, None)
LOCK_SECONDS = 60.0
_HASH = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")


class Place(NamedTuple):
    """Runs of one place make one file of asv's."""

    commit: str
    machine: str
    python: str


@dataclass(frozen=True)
class Told:
    """A run, and what it tells the history."""

    run: Run
    identity: Identity
    content: Followed

    @property
    def commit(self) -> str:
        return str(self.run.environment.get("commit"))

    @property
    def place(self) -> Place:
        return Place(self.commit, str(self.identity.machine["machine"]), self.identity.python)

    def is_of(self, place: Place) -> bool:
        """Whether it was measured there, by whatever name the interpreter was called."""
        if self.place[:2] != place[:2]:
            return False
        return self.place.python == place.python or same_interpreter(self.place.python, place.python)


def results_of(store: Path) -> Path:
    """Where asv looks for results; asv.conf.json says the same."""
    return store / "asv" / "results"


def update_view(run: Run, store: Path) -> str:
    """Bring the view of a run's commit up to date; one sentence on what happened to it.

    Never raises for what is wrong with the store: the run itself is kept, and the view can be made again.
    """
    why = why_not(run)
    if why:
        return f"history: {why}; the run is kept, and asv's view stays as it is"
    told = tell(run)
    if told is None or not told.content.points:
        why = told.content.why if told is not None else "it does not say on which machine it was made"
        return (
            f"history: {why or 'none of its cases is in a declared grid'}; the run is kept, asv's view stays as it is"
        )
    try:
        write_commit(store, told.place)
    except StoreError as error:
        return f"history: {error} The run is kept; `fp8bench history rebuild` makes the view again."
    cells = len({(point.series.split(".")[0], point.cell) for point in told.content.points})
    words = f"history: {cells} {'case' if cells == 1 else 'cases'} of commit {told.commit[:8]} in asv's view"
    if told.content.others:
        words += f"; {told.content.others} outside of the declared grids stay in the run alone"
    return words


def why_not(run: Run) -> str:
    """Why a run's numbers are no commit's; '' if they are."""
    commit = run.environment.get("commit")
    if not isinstance(commit, str) or not _HASH.fullmatch(commit):
        return "this was not measured in a git repository"
    if run.environment.get("dirty") is not False:
        return f"the files differ from commit {commit[:8]}, so that these are not its numbers"
    return ""


def tell(run: Run) -> Told | None:
    """What a run tells the history; None where it does not say where it was made."""
    identity = from_facts(run.environment.facts)
    return None if identity is None else Told(run, identity, followed(run))


def runs_of_commit(store: Path, commit: str) -> list[Run]:
    """The sound runs of a commit's own files, oldest first. Files that cannot be read are left to `history verify`."""
    found = []
    for path in run_files(store):
        if f"-{commit[:8]}-" in path.name:
            try:
                run = load_run(path)
            except StoreError:
                continue
            if run.environment.get("commit") == commit and not why_not(run):
                found.append(run)
    return sorted(found, key=lambda run: run.started)


def write_commit(store: Path, place: Place) -> None:
    """Write the file of one commit, machine and interpreter, and the lists beside it."""
    with locked(store / "asv", LOCK_SECONDS):
        # Under the lock, too: a writer that knew fewer runs must not come after one that knew more.
        told = [one for one in map(tell, runs_of_commit(store, place.commit)) if one is not None]
        told = [one for one in told if one.content.points and one.is_of(place)]
        if not told:
            return
        identity = _settled(results_of(store), told[-1].identity)
        path = results_of(store) / str(identity.machine["machine"]) / identity.file_name(place.commit)
        file = _existing(load_results, path) or ResultsFile(
            place.commit, identity.env_name, _date(told), identity.params, identity.python, {}, {}, {}
        )
        save_results(path, _filled(replace(file, params=identity.params), told))
        _define(results_of(store) / "benchmarks.json", _series(told))


def _settled(results: Path, identity: Identity) -> Identity:
    """The identity under which the machine's results lie here already; its machine.json is brought up to date.

    bin/python and bin/python3 are one interpreter, and a new kernel makes no new machine: asv would draw a second
    line. What the user told asv about this machine counts most.
    """
    folder = results / str(identity.machine["machine"])
    known = _existing(load_machine, folder / "machine.json") or {}
    here = identify(known)
    is_here = here.machine["machine"] == identity.machine["machine"]
    machine = here.machine if is_here else known or identity.machine
    brought_up = merge_machine(known, machine)
    if brought_up != known:
        save_machine(folder / "machine.json", brought_up)
    return Identity(machine, _settled_python(folder, identity.python))


def _settled_python(folder: Path, python: str) -> str:
    """The name of an interpreter that the latest of the machine's results go by."""
    latest = sorted(folder.glob("*-existing-py*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in latest:
        with contextlib.suppress(StoreError):
            named = load_results(path).python
            if named == python or same_interpreter(named, python):
                return named
    return python


def _existing(load: Callable[[Path], T], path: Path) -> T | None:
    """What stands in a file of asv's. One that is broken for good is set aside and counts as absent."""
    try:
        return settled_read(load, path)
    except AsvFileAbsent:
        return None
    except AsvFileBroken:
        set_aside(path)
        return None


def _define(path: Path, series: Iterable[Series]) -> None:
    """Make the series known to asv, beside what it knows."""
    known = _existing(load_benchmarks, path) or {}
    new = merge_benchmarks(known, map(_definition, series))
    if new != known:
        save_benchmarks(path, new)


def _definition(series: Series) -> Definition:
    return Definition(
        series.name, series.unit, _texts(series), series.param_names, series.version, code="", timeout=60.0
    )  # fmt: skip


def _texts(series: Series) -> tuple[tuple[str, ...], ...]:
    """Parameters as asv writes them."""
    return tuple(tuple(map(repr, values)) for values in series.params)


def _date(told: Sequence[Told]) -> int:
    """The author's date of the commit, in ms since 1970, as asv has it."""
    known = [one.run.environment.get("commit_date") for one in told]
    return next((value for value in reversed(known) if isinstance(value, int)), 0)


def _series(told: Sequence[Told]) -> list[Series]:
    """The series of all runs, each once, the newest definition of it."""
    return list({one.name: one for each in told for one in each.content.series}.values())


def _filled(file: ResultsFile, told: Sequence[Told]) -> ResultsFile:
    """The file with a row for every series; other rows stay."""
    points = merged([point for one in told for point in one.content.points])
    started = int(datetime.fromisoformat(told[-1].run.started).timestamp() * 1000)
    rows = dict(file.rows)
    for series in _series(told):
        own = {cell: point for (name, cell), point in points.items() if name == series.name}
        if own:
            rows[series.name] = _row(series, own, started, rows.get(series.name))
    return replace(file, rows=rows)


def _row(series: Series, points: Mapping[Cell, Point], started: int, before: Row | None) -> Row:
    """One row: a point where there is one, what stood there before where there is none, else not measured.

    Samples stand in the file only where asv was asked to record them: the runs have them all.
    """
    version = next(iter(points.values())).version
    if before is not None and before.version != version:
        before = None
    recorded = before is not None and any(before.samples)
    known = _by_texts(before) if before is not None else {}
    cells = [
        _figures(points[cell], recorded) if cell in points else known.get(texts, NOT_MEASURED)
        for cell, texts in zip(itertools.product(*series.params), itertools.product(*_texts(series)), strict=True)
    ]
    values, stats, samples = zip(*cells, strict=True)
    duration = before.duration if before is not None else None
    return Row(_texts(series), version, values, stats, samples, started, duration)


def _by_texts(row: Row) -> dict[tuple[str, ...], Figures]:
    """What a row says of each combination, by its parameters: a grid may have changed since."""
    figures = zip(row.values, row.stats, row.samples, strict=True)
    return dict(zip(itertools.product(*row.params), figures, strict=True))


def _figures(point: Point, recorded: bool) -> Figures:
    """Value, statistics and samples of a point, as asv has them."""
    if point.samples:
        value, stats = cell(point.samples)
        return value, stats, point.samples if recorded else None
    return (None, None, None) if point.status is Status.FAILED else NOT_MEASURED
