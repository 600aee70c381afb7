"""The work of `history` and `store`: open a store, find changes, acknowledge them, prune."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path

from fp8bench.analysis.steps.change_points import steps_of_many
from fp8bench.analysis.steps.changes import (
    Change,
    ChangeState,
    Found,
    Stretch,
    ack_of,
    apply_acks,
    changes_of,
    find_changes,
)
from fp8bench.errors import StoreError, UsageError
from fp8bench.files import keeping, lock, open_file
from fp8bench.jobs.kinds import kinds
from fp8bench.jobs.observer import JobObserver
from fp8bench.model import Ack, Trend
from fp8bench.model.specs import COUNTS
from fp8bench.store.acks import Undo, acks_of, append_acks, load_acks
from fp8bench.store.asv.identity import resolve_interpreter
from fp8bench.store.figures.history import open_history
from fp8bench.store.figures.lines import History
from fp8bench.store.runs.listing import all_files, closed_folders

# Reading more runs than this takes a while, and is announced.
_MANY_RUNS = 200
_ANY = "*"


def existing_store(path: Path, observer: JobObserver, reading: bool = False) -> Path:
    """Returns the path if it is a store. Notes folders that cannot be read and, with `reading`, that reading takes a
    while."""
    try:
        problem = "is no store: it has neither runs nor asv in it" if path.exists() else "is not there"
        if any((path / name).is_dir() for name in ("runs", "asv", "trainings", "ceilings")):
            problem, count = "", len(all_files(path)) if reading else 0
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
    if problem:
        raise StoreError(
            f"the store {path} {problem}. Give --store DIR, or begin one with: fp8bench suite gemm --grid."
        )
    for folder in closed_folders(path):
        observer.note(f"{folder} may not be read, so that its runs are left out")
    if reading and count > _MANY_RUNS:
        observer.note(f"reading {count} runs")
    return path


def read_history(store: Path, observer: JobObserver) -> History:
    """Reads the history of a store; notes that reading takes a while, and problems with its files."""

    def progress(done: int, count: int) -> None:
        if count > _MANY_RUNS and not done:
            observer.note(f"reading {count} runs")

    history = open_history(store, progress)
    for trouble in history.troubles:
        observer.note(trouble)
    return history


def prune_store(store: Path, remove: bool) -> list[tuple[str, int]]:
    """Returns unneeded and unused parts with their bytes, and with `remove` deletes them. Raises StoreError."""
    removable = []
    for part in chain.from_iterable(kind.spare(store) for kind in kinds()):
        with ExitStack() as locks:
            if part.lock is not None:
                with suppress(OSError):
                    file = locks.enter_context(open_file(part.lock, most=None))
                    if not lock(file, 0):
                        continue
            removable.append((part.what, sum(map(_count_bytes, part.paths))))
            for path in part.paths if remove else ():
                with keeping(path, "It may be removed by hand."):
                    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    return removable


def _count_bytes(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.lstat().st_size for file in files if file.is_file())


def all_changes(history: History, store: Path, observer: JobObserver) -> Found:
    """Returns the changes of all trends, including acknowledged ones."""
    changes = changes_of(stretches(history), steps_of_many)
    return apply_acks(changes, kept_acks(store, changes, observer))


def stretches(history: History) -> Iterator[list[Stretch]]:
    """Yields each trend's comparable figures; a trend is read only when a stretch is used."""
    for line in history.lines:
        counted = line.trend.series.metric in COUNTS
        yield [Stretch(line.whole_trend, places, values, counted) for places, values in line.comparable]


def kept_acks(store: Path, changes: Found, observer: JobObserver) -> list[Ack]:
    """Returns the store's acknowledgements, naming interpreters like `changes` does."""
    loaded = load_acks(store)
    for trouble in loaded.troubles:
        observer.note(f"{acks_of(store)}: {trouble}")
    named = {resolve_interpreter(change.trend.python): change.trend.python for change in reversed(changes.changes)}

    def name_of(python: str) -> str:
        return python if python in named.values() else named.get(resolve_interpreter(python), python)

    return [replace(ack, python=name_of(ack.python)) for ack in loaded.acks]


def series_meant(word: str, history: History) -> str:
    """Returns the only series whose name equals or contains the word."""
    names = [name for name in history.names if word.lower() in name.lower()]
    exact = [name for name in names if name.lower() == word.lower()]
    if len(exact or names) == 1:
        return (exact or names)[0]
    if names:
        listed = "".join(f"\n  {name}" for name in names)
        raise UsageError(f"{word!r:.80} fits {len(names)} series. Give more of the name of one:{listed}")
    excluded = f" Not in it: {'; '.join(history.left)}." if history.left else ""
    raise UsageError(f"no series has {word!r:.80} in its name.{excluded} `fp8bench history list` names them all.")


def acknowledge(
    series: str, store: Path, observer: JobObserver, because: str | None = None, undo: bool = False
) -> list[tuple[str, str, str]]:
    """Acknowledges the open changes of a series or, with `undo`, withdraws all its acknowledgements.

    Returns each trend's name and the commits around the change.
    """
    if undo and because is not None:
        raise UsageError("--because acknowledges a change, and --undo withdraws that. Leave one out.")
    trends = _trends(read_history(store, observer), series)
    changes = find_changes(trends)
    acks = kept_acks(store, changes, observer)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    if undo:
        undone = _undone(series, trends, acks)
        append_acks(store, [Undo(ack.id, now) for ack, _ in undone])
        return [(name, ack.since, ack.until) for ack, name in undone]
    chosen = _choose_open(series, apply_acks(changes, acks))
    append_acks(store, [ack_of(change, now, because or "") for change in chosen])
    return [(change.trend.name, change.comparison.since, change.comparison.until) for change in chosen]


def _undone(word: str, trends: Sequence[Trend], acks: Sequence[Ack]) -> list[tuple[Ack, str]]:
    """Returns the acknowledgements of trends, each with the name of its trend."""
    names = {(trend.series.name, trend.cell): trend.name for trend in trends}
    undone = [(ack, names[ack.series, ack.cell]) for ack in acks if (ack.series, ack.cell) in names]
    if not undone:
        raise UsageError(f"{word!r:.80} has no acknowledged changes.")
    return undone


def _choose_open(word: str, search: Found) -> list[Change]:
    """Returns the open changes for the worse, or all open ones if none is worse."""
    open_changes = [change for change in search.changes if change.state is ChangeState.OPEN]
    if not open_changes:
        reason = ""
        if any(change.state is ChangeState.ACKNOWLEDGED for change in search.changes):
            reason = " What it has is acknowledged already."
        elif search.left and not search.looked_at:
            reason = f" Not looked at: {'; '.join(search.left)}."
        raise UsageError(f"{word!r:.80} has no open changes.{reason}")
    return [change for change in open_changes if change.is_worse] or open_changes


def _trends(history: History, word: str) -> Sequence[Trend]:
    """Returns the trends of the only series that the word names, or of all that match a pattern with stars."""
    if _ANY in word:
        pattern = re.compile(".*".join(map(re.escape, word.lower().split(_ANY))))
        trends = history.trends(lambda name: pattern.fullmatch(name.lower()) is not None)
    else:
        trends = history.trends(series_meant(word, history).__eq__)
    if not trends:
        raise UsageError(f"no series is called {word!r:.80}. `fp8bench history list` names them all.")
    return trends
