"""Writes the figures of every commit into the files that asv reads, in the store next to the folder of runs.

The figures of a commit are computed from its runs, whether fp8bench or asv started them. So the results of fp8bench
and asv form one line in asv's graph, and asv's files can be rebuilt at any time. Rows that do not come from a run,
such as those of other asv benchmarks, are kept.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from fp8bench.errors import AsvFileError, Fp8benchError, StoreError
from fp8bench.files import LOCK_SECONDS, PARTIAL_FILE_SUFFIX, lock_folder
from fp8bench.model import Cell, Point, Run, Series, Status
from fp8bench.model.run import BENCH
from fp8bench.store.asv.files import (
    ResultsFile,
    load_asv_machine,
    load_benchmarks,
    load_file_if_present,
    load_results,
    merge_asv_machine,
    merge_benchmarks,
    save_benchmarks,
    save_machine,
    save_results,
)
from fp8bench.store.asv.identity import AsvIdentity, find_machine_identity, resolve_interpreter
from fp8bench.store.asv.rows import (
    NOT_MEASURED,
    AsvRow,
    RowFigures,
    import_asv_statistics,
    index_figures_by_params,
    make_row,
    summarize_samples,
)
from fp8bench.store.commit_runs import (
    OUTSIDE_REPOSITORY,
    TrackedRun,
    collect_series,
    explain_outside_history,
    merge_commit_points,
    read_runs_of_commit,
    track_run,
)

# After this many seconds, an unfinished file counts as abandoned, because its writer was killed.
_ABANDONED_FILE_SECONDS = 3600.0


def remove_abandoned_files(folder: Path) -> None:
    """Removes unfinished files whose writers were killed."""
    for path in folder.glob(f".*{PARTIAL_FILE_SUFFIX}"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _ABANDONED_FILE_SECONDS:
                path.unlink()


def asv_results_folder(store: Path) -> Path:
    """Returns the folder that asv.conf.json names for results."""
    return store / "asv" / "results"


def update_view(run: Run, store: Path, timeout: float = LOCK_SECONDS) -> str:
    """Updates asv's files for the commit of a run, and returns a sentence that reports the result or an error. Returns
    '' for a run of `bench`, and for a run outside a repository if the store has no history and --grid was not given.

    Waits at most `timeout` seconds for other writers. Does not raise errors of the store, because the run is already
    stored and asv's files can be rebuilt.
    """
    # 1. Skip a run that adds nothing to the history.
    if run.request.suite == BENCH:
        return ""
    reason = explain_outside_history(run)
    if reason == OUTSIDE_REPOSITORY and not run.request.grid and not asv_results_folder(store).is_dir():
        return ""
    tracked = track_run(run) if not reason else None
    if tracked is None or not tracked.content.points:
        no_machine_reason = "it names no machine, or one whose name cannot be a folder"
        reason = reason or (tracked.content.why if tracked is not None else no_machine_reason)
        reason = reason or "the history does not track its cases (--grid measures those that it tracks)"
        return f"history: {reason}; the run is stored, but adds nothing to the history"
    # 2. Write asv's files. The run is already stored, so failures are only reported.
    try:
        renamed_files = write_commit(store, tracked, timeout)
    except Fp8benchError as error:
        return f"history: {error} The run is stored; `fp8bench history rebuild` rebuilds the view."
    except OSError as error:
        return (
            f"history: asv's view could not be written ({error}). The run is stored; `fp8bench history rebuild` "
            "rebuilds the view."
        )
    # 3. Count the cases, and name the files that were renamed.
    # A case has a series for each metric. The names of these series begin with the suite.
    num_cases = len({(point.series.split(".")[0], point.cell) for point in tracked.content.points})
    sentences = [
        f"history: {num_cases} {'case' if num_cases == 1 else 'cases'} of commit {tracked.commit[:8]} in the history"
    ]
    sentences += [
        f"{path.name.rpartition('.broken-')[0]} was broken and written again; the old file is {path.name}"
        for path in renamed_files
    ]
    if tracked.content.untracked_cases:
        verb = "stays" if tracked.content.untracked_cases == 1 else "stay"
        sentences.append(f"{tracked.content.untracked_cases} that the history does not track {verb} only in the run")
    return "; ".join(sentences)


def write_commit(store: Path, new_run: TrackedRun, timeout: float = LOCK_SECONDS) -> list[Path]:
    """Writes asv's results file for the commit, machine and interpreter of a run, and updates benchmarks.json and
    machine.json. Returns the new paths of broken files that were renamed.

    Raises StoreError if the store does not have the run.
    """
    with lock_folder(store / "asv", timeout):
        # Read the runs while holding the lock. Otherwise a writer that read fewer runs could write after this one.
        run_home = new_run.identity.home
        runs = [
            run for run in read_runs_of_commit(store, new_run.commit) if run.identity.home.is_same_interpreter(run_home)
        ]
        tracked_runs = [run for run in runs if run.content.points]
        if all(run.run.id != new_run.run.id for run in tracked_runs):
            raise StoreError(f"the run {new_run.run.id} was not found in {store}, so it is not in asv's view.")
        renamed_files: list[Path] = []
        write_interpreter_results(asv_results_folder(store), tracked_runs, renamed_files)
        return renamed_files


def write_interpreter_results(results: Path, tracked: Sequence[TrackedRun], renamed_files: list[Path]) -> Path:
    """Writes asv's results file for runs of one commit, machine and interpreter, and updates benchmarks.json and
    machine.json. The runs must be sorted oldest first, and the caller must hold the lock.

    In a new file, the oldest run names the machine and interpreter, so that rebuilding gives the same file. The new
    paths of renamed broken files are added to `renamed_files`.
    """
    import_asv_statistics()  # if this import fails, asv's files must stay unchanged
    commit = tracked[0].commit
    identity = _update_stored_identity(results, tracked[0].identity, renamed_files)
    path = results / str(identity.machine["machine"]) / identity.file_name(commit)
    # Define the series before writing rows: asv hides rows without a definition, and this process may be killed
    # between the two steps.
    define_series(results, collect_series(tracked), renamed_files)
    file = load_file_if_present(load_results, path, renamed_files)
    if file is None:
        file = ResultsFile(commit, identity.env_name, 0, identity.params, identity.python, {}, {}, {})
    if not commit.startswith(file.commit_hash):
        raise AsvFileError(f"{path} has the results of a different commit, {file.commit_hash}. Move it away.")
    # The newest run that has the date of the commit determines it, unless the file already has a date.
    commit_dates = [run.run.environment.get("commit_date") for run in reversed(tracked)]
    date = file.date or next((number for number in commit_dates if type(number) is int), 0)
    save_results(path, fill_asv_rows(replace(file, params=identity.params, date=date), tracked))
    for folder in (results, path.parent):
        remove_abandoned_files(folder)
    return path


def _update_stored_identity(results: Path, identity: AsvIdentity, renamed_files: list[Path]) -> AsvIdentity:
    """Updates machine.json, and returns the identity under which the machine's results are already stored.

    asv begins a new line in its graphs if the path of the interpreter or a fact of the machine changes. A change from
    bin/python to bin/python3 or an update of the kernel should not begin a new line, so the stored identity is used.
    The user's entry in ~/.asv-machine.json takes precedence.
    """
    # 1. Load the machine's entry from its results folder, if there is one.
    folder = results / str(identity.machine["machine"])
    folder_entry = load_file_if_present(load_asv_machine, folder / "machine.json", renamed_files) or {}
    if folder_entry and folder_entry["machine"] != folder.name:
        raise AsvFileError(
            f"{folder / 'machine.json'} names the machine {folder_entry['machine']!r:.80}, but its folder is "
            f"{folder.name!r:.80}: asv ignores that folder. Make both names equal."
        )
    # 2. Update the machine's entry. If the run is from this machine, use the machine's current facts.
    current_identity = find_machine_identity(folder_entry or identity.machine)
    is_current_machine = current_identity.machine["machine"] == identity.machine["machine"]
    machine = current_identity.machine if is_current_machine else folder_entry or identity.machine
    merged_machine_entry = merge_asv_machine(folder_entry, machine)
    if merged_machine_entry != folder_entry:
        save_machine(folder / "machine.json", merged_machine_entry)
    # Sort the facts, so that rebuilding gives the same file. Leave out lists, which cannot be parameters of a series.
    sorted_machine_facts = sorted((machine if is_current_machine else merged_machine_entry).items())
    scalar_facts = {
        key: value for key, value in sorted_machine_facts if value is None or isinstance(value, int | float | str)
    }
    return AsvIdentity(scalar_facts, _find_stored_python(folder, identity), identity.interpreter)


def _find_stored_python(folder: Path, identity: AsvIdentity) -> str:
    """Returns the path of the interpreter in the newest results of the machine, so that asv continues the same line in
    its graph.
    """
    newest_files = sorted(folder.glob("*-existing-py*.json"), key=_file_modification_time, reverse=True)
    # Read one file of each environment: all files of an environment name the interpreter by the same path.
    for path in {path.name.partition("-")[2]: path for path in reversed(newest_files)}.values():
        with contextlib.suppress(StoreError):
            stored_python_path = load_results(path).python
            if stored_python_path == identity.python or resolve_interpreter(stored_python_path) == identity.interpreter:
                return stored_python_path
    return identity.python


def _file_modification_time(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # the file was deleted after it was listed
        return 0.0


def define_series(results: Path, series: Iterable[Series], renamed_files: list[Path]) -> None:
    path = results / "benchmarks.json"
    asv_benchmarks = load_file_if_present(load_benchmarks, path, renamed_files) or {}
    merged_benchmarks = merge_benchmarks(asv_benchmarks, series)
    if merged_benchmarks != asv_benchmarks:
        save_benchmarks(path, merged_benchmarks)


def fill_asv_rows(file: ResultsFile, tracked: Sequence[TrackedRun]) -> ResultsFile:
    """Returns the results file with a new row for each series of the runs. Rows of other series are kept."""
    points = merge_commit_points(tracked)
    rows = dict(file.rows)
    for metric_series in collect_series(tracked):
        cells = {cell: point for (name, cell), point in points.items() if name == metric_series.name}
        if cells:
            rows[metric_series.name] = _make_row(
                metric_series, cells, tracked[-1].started_at, rows.get(metric_series.name)
            )
    return replace(file, rows=rows)


def _make_row(series: Series, points: Mapping[Cell, Point], started_at: int, previous_row: AsvRow | None) -> AsvRow:
    """Returns the asv row of a series. A cell (combination of parameters) has the figures of its point, otherwise those
    of a previous row with the same version. A cell with neither counts as not measured.

    Samples are stored only if the previous row has some (asv was asked to record them), because the runs have all
    samples.
    """
    version = next(iter(points.values())).version
    if previous_row is not None and previous_row.version != version:
        previous_row = None
    has_previous_samples = previous_row is not None and any(previous_row.samples)
    figures = index_figures_by_params(previous_row) if previous_row is not None else {}
    new_figures_by_cell = {
        tuple(map(repr, cell)): _make_figures(point, has_previous_samples) for cell, point in points.items()
    }
    params = tuple(tuple(map(repr, values)) for values in series.params)
    duration = previous_row.duration if previous_row is not None else None
    return make_row(params, version, figures | new_figures_by_cell, started_at, duration)


def _make_figures(point: Point, keeps_samples: bool) -> RowFigures:
    if point.samples and all(map(math.isfinite, point.samples)):
        value, stats = summarize_samples(point.samples)
        return value, stats, point.samples if keeps_samples else None
    # asv treats NaN as not measured. Infinite figures are stored like failures, because asv's search for regressions
    # would run out of memory on them.
    return (None, None, None) if point.samples or point.status is Status.FAILED else NOT_MEASURED
