"""What `history` and `store` do with a store: open it, find what changed, acknowledge, prune."""

from __future__ import annotations

import difflib
import re
import shutil
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

from fp8bench.analysis.steps.change_points import steps_of_many
from fp8bench.analysis.steps.changes import (
    Change,
    ChangeState,
    Found,
    Stretch,
    ack_of,
    acknowledged,
    changes_of,
    find_changes,
)
from fp8bench.analysis.tapes import what_changed
from fp8bench.errors import StoreError, UsageError
from fp8bench.files import keeping, lock, open_file
from fp8bench.jobs.kinds import kinds
from fp8bench.jobs.observer import JobObserver
from fp8bench.model import Ack, Cell, Tape, Trend
from fp8bench.model.specs import COUNTS
from fp8bench.store.acks import Undo, acks_of, append_acks, load_acks
from fp8bench.store.asv.identity import Identity, resolved
from fp8bench.store.commit_runs import files_by_commit, tracked_run
from fp8bench.store.figures.history import open_history
from fp8bench.store.figures.lines import History
from fp8bench.store.points import cell_of
from fp8bench.store.runs.listing import all_files, closed_folders
from fp8bench.store.runs.run_file import load_run

# Reading more runs than this takes a while, and is announced.
_MANY_RUNS = 200
_MOST_NAMED = 20
_ANY = "*"


def existing_store(path: Path, observer: JobObserver, reading: bool = False) -> Path:
    """The path, if a store lies there. Notes what may not be read and, with `reading`, that reading takes a while."""
    try:
        what = "is no store: it has neither runs nor asv in it" if path.exists() else "is not there"
        if any((path / name).is_dir() for name in ("runs", "asv", "trainings", "ceilings")):
            what, count = "", len(all_files(path)) if reading else 0
    except OSError as error:
        what = f"cannot be read ({error.strerror})"
    if what:
        raise StoreError(f"the store {path} {what}. Give --store DIR, or begin one with: fp8bench suite gemm --grid.")
    for folder in closed_folders(path):
        observer.note(f"{folder} may not be read, so that its runs are left out")
    if reading and count > _MANY_RUNS:
        observer.note(f"reading {count} runs")
    return path


def read_history(store: Path, observer: JobObserver) -> History:
    """The history of a store; notes progress where reading takes a while, and what was wrong with its files."""
    told = 0

    def progress(done: int, count: int) -> None:
        """Notes before reading many, and after each tenth of them."""
        nonlocal told
        if count > _MANY_RUNS and done >= told:
            observer.note(f"read {done} of {count} runs" if done else f"reading {count} runs")
            told = done + count // 10

    history = open_history(store, progress)
    for trouble in history.troubles:
        observer.note(trouble)
    return history


def prune_store(store: Path, remove: bool) -> list[tuple[str, int]]:
    """What nobody needs and nobody is using, with its bytes; removed with `remove`. Raises StoreError."""
    parts = [part for kind in kinds() for part in kind.spare(store)]
    removable = []
    for part in parts:
        with ExitStack() as locked_meanwhile:
            if part.lock is not None:
                with suppress(OSError):
                    file = locked_meanwhile.enter_context(open_file(part.lock, most=None))
                    if not lock(file, 0):
                        continue
            inside = (file for path in part.paths for file in (path.rglob("*") if path.is_dir() else [path]))
            removable.append((part.what, sum(file.lstat().st_size for file in inside if file.is_file())))
            for path in part.paths if remove else ():
                with keeping(path, "It may be removed by hand."):
                    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    return removable


def all_changes(history: History, store: Path, observer: JobObserver) -> Found:
    """The changes of all trends, acknowledged ones too; changed counts name the operators that changed."""
    changes = changes_of(stretches(history), steps_of_many)
    return with_operators(acknowledged(changes, kept_acks(store, changes, observer)), store, history)


def stretches(history: History) -> Iterator[list[Stretch]]:
    """Each trend's comparable figures; a trend is read only when a stretch is used."""
    for line in history.lines:
        counted = line.trend.series.metric in COUNTS
        yield [Stretch(line.whole_trend, places, values, counted) for places, values in line.comparable]


def kept_acks(store: Path, changes: Found, observer: JobObserver) -> list[Ack]:
    """The store's acknowledgements, with interpreters named as they are in `changes`."""
    loaded = load_acks(store)
    for trouble in loaded.troubles:
        observer.note(f"{acks_of(store)}: {trouble}")
    named = {resolved(change.trend.python): change.trend.python for change in reversed(changes.changes)}

    def name_of(python: str) -> str:
        return python if python in named.values() else named.get(resolved(python), python)

    return [replace(ack, python=name_of(ack.python)) for ack in loaded.acks]


def series_meant(word: str, history: History, store: Path) -> str:
    """The one series whose name is the word, or contains it."""
    names = [name for name in history.names if word.lower() in name.lower()]
    exact = [name for name in names if name.lower() == word.lower()]
    if len(exact or names) == 1:
        return (exact or names)[0]
    if names:
        more = f"\n  and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
        some = "".join(f"\n  {name}" for name in names[:_MOST_NAMED])
        raise UsageError(f"{word!r:.80} fits {len(names)} series. Give more of the name of one:{some}{more}")
    raise UsageError(f"no series has {word!r:.80} in its name.{_nearest(word, store, history.names, history.left)}")


def _nearest(word: str, store: Path, names: Collection[str], left: Collection[str]) -> str:
    """A hint behind 'no series': the nearest name, or why runs are `left` out."""
    if not names:
        why = f" Not in it: {'; '.join(left)}." if left else " Begin with: fp8bench suite gemm --grid"
        return f" The store {store} has no series yet.{why}"
    unknown = [why for why in left if "--import" in why]
    if unknown:
        return f" Not in it: {'; '.join(unknown)}."
    short = {name.partition("track_")[2].lower(): name for name in names}
    whole = {name.lower(): name for name in names}
    for known in (whole, short):
        near = difflib.get_close_matches(word.lower(), known, n=1, cutoff=0.5)
        if near:
            return f" Did you mean {known[near[0]]!r}?"
    return " `fp8bench history list` names them all."


def acknowledge(
    series: str, store: Path, observer: JobObserver, because: str | None = None, undo: bool = False
) -> list[tuple[str, str, str]]:
    """Acknowledges the open changes of a series, or with `undo` takes all its acknowledgements back.

    Returns each trend's name and the commits around the change.
    """
    if undo and because is not None:
        raise UsageError("--because says why a change stays, and --undo takes that back. Leave one out.")
    trends = _trends(read_history(store, observer), series, store)
    changes = find_changes(trends)
    acks = kept_acks(store, changes, observer)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    if undo:
        undone = _undone(series, trends, acks)
        append_acks(store, [Undo(ack.id, now) for ack, _ in undone])
        return [(name, ack.since, ack.until) for ack, name in undone]
    chosen = _chosen(series, acknowledged(changes, acks))
    append_acks(store, [ack_of(change, now, because or "") for change in chosen])
    return [(change.trend.name, change.comparison.since, change.comparison.until) for change in chosen]


def _undone(word: str, trends: Sequence[Trend], acks: Sequence[Ack]) -> list[tuple[Ack, str]]:
    """The acknowledgements of trends, each with the name of its trend."""
    names = {(trend.series.name, trend.cell): trend.name for trend in trends}
    undone = [(ack, names[ack.series, ack.cell]) for ack in acks if (ack.series, ack.cell) in names]
    if not undone:
        raise UsageError(f"{word!r:.80} has no acknowledged changes.")
    return undone


def _chosen(word: str, search: Found) -> list[Change]:
    """The open changes for the worse; all open ones where there is none."""
    still = [change for change in search.changes if change.state is ChangeState.OPEN]
    if not still:
        known = [change for change in search.changes if change.state is ChangeState.ACKNOWLEDGED]
        left = f" Not looked at: {'; '.join(search.left)}." if search.left and not search.looked_at else ""
        why = " What it has is acknowledged already." if known else left
        raise UsageError(f"{word!r:.80} has no open changes.{why}")
    return [change for change in still if change.is_worse] or still


def _trends(history: History, word: str, store: Path) -> Sequence[Trend]:
    """The trends of the one series that the word names, or of all that a pattern with stars fits."""
    if _ANY in word:
        pattern = re.compile(".*".join(map(re.escape, word.lower().split(_ANY))))
        trends = history.trends(lambda name: pattern.fullmatch(name.lower()) is not None)
    else:
        trends = history.trends(series_meant(word, history, store).__eq__)
    if not trends:
        raise UsageError(f"no series is called {word!r:.80}. `fp8bench history list` names them all.")
    return trends


_Tapes = list[tuple[Identity, dict[tuple[str, str, Cell], Tape]]]


def with_operators(search: Found, store: Path, history: History) -> Found:
    """Adds to open changes of counts which operators changed.

    Figures only say how many; which ones is read from the runs of the two commits.
    """

    @cache
    def tapes(commit: str) -> _Tapes:
        return _tapes_of_commit(store, commit)

    def tape_of(change: Change, commit: str) -> Tape | None:
        trend = change.trend
        key = trend.series.workload, change.version, trend.cell
        there = [some[key] for place, some in tapes(commit) if key in some and history.is_of(trend, place)]
        return there[-1] if there else None

    def named(change: Change) -> Change:
        comparison = change.comparison
        if not change.is_counted or change.state is not ChangeState.OPEN:
            return change
        before, after = (tape_of(change, commit) for commit in (comparison.since, comparison.until))
        if before is None or after is None:
            return change
        return replace(change, comparison=replace(comparison, why=what_changed(before, after)))

    return replace(search, changes=tuple(map(named, search.changes)))


def _tapes_of_commit(store: Path, commit: str) -> _Tapes:
    """The tapes of a commit's runs, oldest run first, by suite, version and cell, with each run's place."""
    tapes_of_runs: _Tapes = []
    for path in files_by_commit(store).get(commit[:8], ()):
        try:
            run = load_run(path)
        except StoreError:
            continue
        tracked = tracked_run(run)
        if tracked is None or tracked.commit != commit:
            continue
        versions = {(point.series.partition(".")[0], point.cell): point.version for point in tracked.content.points}
        tapes = {}
        for record in run.records:
            cell, name = cell_of(record.case, run), record.case.workload
            if record.tape is not None and cell is not None and (name, cell) in versions:
                tapes[name, versions[name, cell], cell] = record.tape
        tapes_of_runs.append((tracked.identity, tapes))
    return tapes_of_runs
