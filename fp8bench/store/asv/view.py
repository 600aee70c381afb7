"""asv's view: the figures of every commit, in asv's own files next to the runs.

They are a function of the commit's runs, whether these came from `suite` or from asv, so both are one line of one
graph, and the view can be written again at any time. Rows that no run explains (asv's own measurements, those of lost
runs) stay.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from fp8bench.errors import AsvFileError, Fp8benchError, StoreError
from fp8bench.files import LOCK_SECONDS, PARTIAL, lock_folder
from fp8bench.model import Cell, Point, Run, Series, Status
from fp8bench.store.asv.files import (
    ResultsFile,
    existing,
    load_benchmarks,
    load_machine,
    load_results,
    merge_benchmarks,
    merge_machine,
    save_benchmarks,
    save_machine,
    save_results,
)
from fp8bench.store.asv.identity import Identity, identify, resolve_interpreter
from fp8bench.store.asv.rows import (
    NOT_MEASURED,
    AsvRow,
    Figures,
    asv_statistics,
    by_combination,
    cell,
    row_of,
)
from fp8bench.store.commit_runs import (
    TrackedRun,
    commit_points,
    runs_of_commit,
    series_of_runs,
    tracked_run,
    why_outside_history,
)

# No writer takes this long for a file: it was killed.
_LEFT_SECONDS = 3600.0


def sweep(folder: Path) -> None:
    """Removes unfinished files of killed writers."""
    for path in folder.glob(f".*{PARTIAL}"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _LEFT_SECONDS:
                path.unlink()


def results_of(store: Path) -> Path:
    """asv.conf.json names the same folder."""
    return store / "asv" / "results"


def update_view(run: Run, store: Path, timeout: float = LOCK_SECONDS) -> str:
    """Updates the view of a run's commit, and returns a sentence on what happened.

    It waits `timeout` seconds for other writers. Faults of the store are returned and not raised, because the run is
    stored and the view can be written again.
    """
    # 1. A run that adds nothing to the history changes nothing.
    reason = why_outside_history(run)
    tracked = tracked_run(run) if not reason else None
    if tracked is None or not tracked.content.points:
        nameless = "it does not say on which machine, or by a name that is no folder's"
        reason = reason or (tracked.content.why if tracked is not None else nameless)
        reason = reason or "none of its cases is in a declared grid"
        return f"history: {reason}; the run is kept, and asv's view stays as it is"
    # 2. The run is stored, so a failure to write the view is only reported.
    try:
        aside = write_commit(store, tracked, timeout)
    except Fp8benchError as error:
        return f"history: {error} The run is kept; `fp8bench history rebuild` makes the view again."
    except OSError as error:
        return (
            f"history: asv's view could not be written ({error}). The run is kept; `fp8bench history rebuild` makes it."
        )
    # 3. Count the cases, and name files that were set aside.
    cells = len({(point.series.split(".")[0], point.cell) for point in tracked.content.points})
    words = [f"history: {cells} {'case' if cells == 1 else 'cases'} of commit {tracked.commit[:8]} in asv's view"]
    words += [
        f"{path.name.rpartition('.broken-')[0]} was broken and made anew, the old one is {path.name}" for path in aside
    ]
    if tracked.content.others:
        stay = "stays" if tracked.content.others == 1 else "stay"
        words.append(f"{tracked.content.others} outside of the declared grids {stay} in the run alone")
    return "; ".join(words)


def write_commit(store: Path, new_run: TrackedRun, timeout: float = LOCK_SECONDS) -> list[Path]:
    """Writes the file of a run's commit, machine and interpreter, and asv's lists; returns files that were set aside.

    Raises StoreError if the run would not be in it.
    """
    with lock_folder(store / "asv", timeout):
        # Reading the runs under the lock prevents that a writer that read fewer runs writes after this one.
        home = new_run.identity.home
        runs = [run for run in runs_of_commit(store, new_run.commit) if run.identity.home.is_same(home)]
        tracked = [run for run in runs if run.content.points]
        if all(run.run.id != new_run.run.id for run in tracked):
            raise StoreError(f"the run {new_run.run.id} was not found in {store}, so it is not in asv's view.")
        aside: list[Path] = []
        write_place(results_of(store), tracked, aside)
        return aside


def write_place(results: Path, tracked: Sequence[TrackedRun], aside: list[Path]) -> Path:
    """Writes the file of runs of one place, oldest first, and asv's lists. The caller holds the lock.

    In a new file the oldest run names machine and interpreter, so that a rebuilt view is the same. Broken files are
    added to `aside` under their new names.
    """
    asv_statistics()  # before anything is written, so that a failed import leaves the view unchanged
    commit = tracked[0].commit
    identity = _settle_identity(results, tracked[0].identity, aside)
    path = results / str(identity.machine["machine"]) / identity.file_name(commit)
    # Before the rows: asv hides rows without a definition, and a kill may come in between.
    define(results, series_of_runs(tracked), aside)
    file = existing(load_results, path, aside) or nothing_of(commit, identity)
    if not commit.startswith(file.commit_hash):
        raise AsvFileError(f"{path} holds the results of another commit, {file.commit_hash}. Move it away.")
    dates = [run.run.environment.get("commit_date") for run in reversed(tracked)]
    date = file.date or next((number for number in dates if type(number) is int), 0)
    save_results(path, fill_rows(replace(file, params=identity.params, date=date), tracked))
    for folder in (results, path.parent):
        sweep(folder)
    return path


def _settle_identity(results: Path, identity: Identity, aside: list[Path]) -> Identity:
    """Updates machine.json, and returns the identity under which the machine's results are here already.

    bin/python and bin/python3 are one interpreter, and a new kernel makes no new machine, but asv would draw a second
    line. The user's entry for asv counts most.
    """
    # 1. The entry that the folder has already.
    folder = results / str(identity.machine["machine"])
    entry = existing(load_machine, folder / "machine.json", aside) or {}
    if entry and entry["machine"] != folder.name:
        raise AsvFileError(
            f"{folder / 'machine.json'} is of machine {entry['machine']!r:.80}, and its folder of {folder.name!r:.80}: "
            "asv shows nothing of that folder. Make them equal."
        )
    # 2. Update it: on this machine by its current facts, else by those of the run.
    stored = identify(entry or identity.machine)
    is_stored = stored.machine["machine"] == identity.machine["machine"]
    machine = stored.machine if is_stored else entry or identity.machine
    brought_up = merge_machine(entry, machine)
    if brought_up != entry:
        save_machine(folder / "machine.json", brought_up)
    # Sorted, so that a view made again is the same. Lists that somebody wrote down cannot be parameters of a series.
    sorted_facts = sorted((machine if is_stored else brought_up).items())
    plain = {key: value for key, value in sorted_facts if value is None or isinstance(value, int | float | str)}
    return Identity(plain, _settled_python(folder, identity), identity.interpreter)


def _settled_python(folder: Path, identity: Identity) -> str:
    """Returns the name of the interpreter that the newest of the machine's results use."""
    newest = sorted(folder.glob("*-existing-py*.json"), key=_modified_at, reverse=True)
    # One file of each environment is enough: those of its other commits have the same name in them.
    for path in {path.name.partition("-")[2]: path for path in reversed(newest)}.values():
        with contextlib.suppress(StoreError):
            named = load_results(path).python
            if named == identity.python or resolve_interpreter(named) == identity.interpreter:
                return named
    return identity.python


def _modified_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # it has just gone
        return 0.0


def define(results: Path, series: Iterable[Series], aside: list[Path]) -> None:
    path = results / "benchmarks.json"
    benchmarks = existing(load_benchmarks, path, aside) or {}
    merged = merge_benchmarks(benchmarks, series)
    if merged != benchmarks:
        save_benchmarks(path, merged)


def nothing_of(commit: str, identity: Identity) -> ResultsFile:
    return ResultsFile(commit, identity.env_name, 0, identity.params, identity.python, {}, {}, {})


def fill_rows(file: ResultsFile, tracked: Sequence[TrackedRun]) -> ResultsFile:
    """Returns the file with a row for every series; other rows stay."""
    points = commit_points(tracked)
    rows = dict(file.rows)
    for series in series_of_runs(tracked):
        cells = {cell: point for (name, cell), point in points.items() if name == series.name}
        if cells:
            rows[series.name] = _row(series, cells, tracked[-1].started_at, rows.get(series.name))
    return replace(file, rows=rows)


def _row(series: Series, points: Mapping[Cell, Point], started: int, previous: AsvRow | None) -> AsvRow:
    """Returns a row with a point for each cell that has one, else the previous figures, else not measured.

    Samples are in the file only if asv was asked to record them; the runs have them all.
    """
    version = next(iter(points.values())).version
    if previous is not None and previous.version != version:
        previous = None
    recorded = previous is not None and any(previous.samples)
    figures = by_combination(previous) if previous is not None else {}
    new_figures = {tuple(map(repr, cell)): _figures(point, recorded) for cell, point in points.items()}
    params = tuple(tuple(map(repr, values)) for values in series.params)
    duration = previous.duration if previous is not None else None
    return row_of(params, version, figures | new_figures, started, duration)


def _figures(point: Point, recorded: bool) -> Figures:
    if point.samples and all(map(math.isfinite, point.samples)):
        value, stats = cell(point.samples)
        return value, stats, point.samples if recorded else None
    # asv takes NaN for not measured, and its search for steps fills the memory where a figure is infinite.
    return (None, None, None) if point.samples or point.status is Status.FAILED else NOT_MEASURED
