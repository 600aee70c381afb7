"""Opens a store, finds changes in its history, acknowledges changes, and removes files that are not needed any more."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path

from fp8bench.analysis.steps.change_points import find_level_steps
from fp8bench.analysis.steps.changes import (
    ChangeSearchResult,
    ChangeState,
    SeriesStretch,
    TrendChange,
    apply_acknowledgements,
    find_changes_in_stretches,
    find_trend_changes,
    make_acknowledgement,
)
from fp8bench.errors import StoreError, UsageError
from fp8bench.files import convert_write_errors, lock, open_file
from fp8bench.jobs.kinds import kinds
from fp8bench.jobs.observer import JobObserver
from fp8bench.model import Ack, Trend
from fp8bench.model.specs import COUNTS
from fp8bench.store.acks import AckWithdrawal, append_acks, get_acks_path, load_acks
from fp8bench.store.asv.identity import resolve_interpreter
from fp8bench.store.figures.history import open_store_history
from fp8bench.store.figures.lines import History
from fp8bench.store.runs.listing import list_all_files, list_unreadable_folders

# If more runs than this are read, a note announces it, because it takes a while.
_MANY_RUNS = 200
_WILDCARD = "*"


def check_store_exists(path: Path, observer: JobObserver, reading: bool = False) -> Path:
    """Returns the path if it is a store. Notes folders that cannot be read. With `reading`, also notes that reading
    takes a while.
    """
    try:
        problem = "is not a store: it has no folder `runs` or `asv`" if path.exists() else "does not exist"
        if any((path / name).is_dir() for name in ("runs", "asv", "trainings", "ceilings")):
            problem = ""
            count = len(list_all_files(path)) if reading else 0
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
    if problem:
        raise StoreError(
            f"the store {path} {problem}. Give --store DIR, or create one with: fp8bench suite gemm --grid."
        )
    for folder in list_unreadable_folders(path):
        observer.note(f"{folder} cannot be read, so its runs are left out")
    if reading and count > _MANY_RUNS:
        observer.note(f"reading {count} runs")
    return path


def read_history(store: Path, observer: JobObserver) -> History:
    """Reads the history of a store. Notes problems with files, and that reading takes a while if there are
    many runs.
    """

    def report_reading(done: int, count: int) -> None:
        if count > _MANY_RUNS and not done:
            observer.note(f"reading {count} runs")

    history = open_store_history(store, report_reading)
    for trouble in history.troubles:
        observer.note(trouble)
    return history


def prune_store(store: Path, remove: bool) -> list[tuple[str, int]]:
    """Returns a description and the size in bytes of each part of a store that is neither needed nor in use. With
    `remove`, also deletes these parts. Raises StoreError.
    """
    removable_store_parts = []
    for part in chain.from_iterable(result_kind.spare(store) for result_kind in kinds()):
        with ExitStack() as locks:
            if part.lock is not None:
                # Processes that use the files lock this file. If it is missing, none does.
                with suppress(OSError):
                    file = locks.enter_context(open_file(part.lock, most=None))
                    if not lock(file, 0):
                        continue
            removable_store_parts.append((part.what, sum(map(_count_file_bytes, part.paths))))
            for path in part.paths if remove else ():
                with convert_write_errors(path, "You can delete it yourself."):
                    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    return removable_store_parts


def _count_file_bytes(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.lstat().st_size for file in files if file.is_file())


def find_all_changes(history: History, store: Path, observer: JobObserver) -> ChangeSearchResult:
    """Returns the changes of all trends, including those that are acknowledged."""
    changes = find_changes_in_stretches(list_trend_stretches(history), find_level_steps)
    return apply_acknowledgements(changes, load_matching_acks(store, changes, observer))


def list_trend_stretches(history: History) -> Iterator[list[SeriesStretch]]:
    """Yields, for each trend (the figures of a series, commit by commit), its stretches: figures that can be compared
    with each other. A trend is read only when one of its stretches needs it.
    """
    for line in history.lines:
        is_count = line.trend.series.metric in COUNTS
        yield [SeriesStretch(line.make_trend, places, values, is_count) for places, values in line.comparable]


def load_matching_acks(store: Path, changes: ChangeSearchResult, observer: JobObserver) -> list[Ack]:
    """Returns the store's acknowledgements of changes. Different paths may lead to the same Python interpreter. An
    acknowledgement gets the path by which `changes` name its interpreter.
    """
    stored_acknowledgements = load_acks(store)
    for trouble in stored_acknowledgements.troubles:
        observer.note(f"{get_acks_path(store)}: {trouble}")
    # Reversed, so that the first change determines the name of its interpreter.
    names_by_interpreter = {
        resolve_interpreter(change.trend.python): change.trend.python for change in reversed(changes.changes)
    }
    acks = []
    for ack in stored_acknowledgements.acks:
        name = ack.python
        if name not in names_by_interpreter.values():
            name = names_by_interpreter.get(resolve_interpreter(name), name)
        acks.append(replace(ack, python=name))
    return acks


def find_series(word: str, history: History) -> str:
    """Returns the only series whose name equals or contains a word. Raises UsageError if no series or several match."""
    names = [name for name in history.names if word.lower() in name.lower()]
    # A name may be a part of other names, so prefer an equal name.
    equal_series_names = [name for name in names if name.lower() == word.lower()]
    if len(equal_series_names or names) == 1:
        return (equal_series_names or names)[0]
    if names:
        matching_names_text = "".join(f"\n  {name}" for name in names)
        raise UsageError(f"{word!r:.80} matches {len(names)} series. Give more of the name:{matching_names_text}")
    excluded_runs_text = (
        f" Not in the history: {'; '.join(history.skipped_run_reasons)}." if history.skipped_run_reasons else ""
    )
    raise UsageError(
        f"no series has {word!r:.80} in its name.{excluded_runs_text} `fp8bench history list` names them all."
    )


def acknowledge_changes(
    series: str, store: Path, observer: JobObserver, because: str | None = None, undo: bool = False
) -> list[tuple[str, str, str]]:
    """Acknowledges the open changes of a series. With `undo`, withdraws all acknowledgements of the series instead.

    Returns, for each of these changes, the name of the trend and the commits around the change.
    """
    if undo and because is not None:
        raise UsageError("--because acknowledges a change, and --undo withdraws that. Leave one out.")
    matching_trends = _find_trends(read_history(store, observer), series)
    changes = find_trend_changes(matching_trends)
    stored_acknowledgements = load_matching_acks(store, changes, observer)
    time_text = datetime.now(UTC).isoformat(timespec="seconds")
    if undo:
        names = {(trend.series.name, trend.cell): trend.name for trend in matching_trends}
        withdrawn_acks = [ack for ack in stored_acknowledgements if (ack.series, ack.cell) in names]
        if not withdrawn_acks:
            raise UsageError(f"{series!r:.80} has no acknowledged changes.")
        append_acks(store, [AckWithdrawal(ack.id, time_text) for ack in withdrawn_acks])
        return [(names[ack.series, ack.cell], ack.since, ack.until) for ack in withdrawn_acks]
    changes_to_acknowledge = _choose_open_changes(series, apply_acknowledgements(changes, stored_acknowledgements))
    append_acks(store, [make_acknowledgement(change, time_text, because or "") for change in changes_to_acknowledge])
    return [(change.trend.name, change.comparison.since, change.comparison.until) for change in changes_to_acknowledge]


def _choose_open_changes(series: str, search: ChangeSearchResult) -> list[TrendChange]:
    """Returns the open changes (not acknowledged) for the worse, or all open changes if none is for the worse. Raises
    UsageError without open changes.
    """
    open_changes = [change for change in search.changes if change.state is ChangeState.OPEN]
    if not open_changes:
        reason = ""
        if any(change.state is ChangeState.ACKNOWLEDGED for change in search.changes):
            reason = " Its changes are already acknowledged."
        elif search.skip_count_by_reason and not search.searched_trend_count:
            reason = f" Not searched: {'; '.join(search.skip_count_by_reason)}."
        raise UsageError(f"{series!r:.80} has no open changes.{reason}")
    return [change for change in open_changes if change.is_worse] or open_changes


def _find_trends(history: History, series: str) -> Sequence[Trend]:
    """Returns the trends of the only series whose name matches. If the given name is a pattern with stars, returns
    the trends of all series that match.
    """
    if _WILDCARD in series:
        pattern = re.compile(".*".join(map(re.escape, series.lower().split(_WILDCARD))))
        matching_trends = history.trends(lambda name: pattern.fullmatch(name.lower()) is not None)
    else:
        matching_trends = history.trends(find_series(series, history).__eq__)
    if not matching_trends:
        raise UsageError(f"no series is called {series!r:.80}. `fp8bench history list` names them all.")
    return matching_trends
