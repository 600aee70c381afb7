"""Opens the history of a store: figures of commits from the cache, and from runs that these do not fit."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from fp8bench.errors import StoreError
from fp8bench.store.commit_runs import CommitRuns, by_commit, by_place, commit_of, files_by_commit, read_runs
from fp8bench.store.figures.cache import cache_of, read_values, write_values
from fp8bench.store.figures.lines import History, history_of
from fp8bench.store.figures.tables import FigureTable, Place, table_of
from fp8bench.store.runs.listing import listing
from fp8bench.store.series import fingerprint

_COMMIT, _LAYOUT = "commit", "layout"
_AT_ONCE = 25  # commits that are written together: a kill costs no more
# Reading more runs than this takes long, so that a failure to cache their figures is reported.
_WORTH_CACHING = 20
UNKNOWN = ""  # instead of the digest of a suite that is not imported


class CommitFigures(NamedTuple):
    """The figures of one commit: the number of tracked runs, why other runs are left out, and a table for each place.

    `files` and `grids` are their sources: the run files (name, bytes, last change in ns), and for each suite a
    digest of its grid.
    """

    files: list[list[Any]]
    grids: dict[str, str]
    runs: int
    left: list[str]
    tables: list[FigureTable]


def open_history(store: Path, observe: Callable[[int, int], None]) -> History:
    """Opens the history; `observe` is called with the number of runs read, from 0 on, and the number to read."""
    # 1. List the files before reading any: one that changes meanwhile is read again the next time.
    stored, cached, digest_of = listing(store), _load(store), cache(_digest_of_grid)
    paths = by_commit(stored.files)
    files = {commit: _stamps_of(paths[commit]) for commit in paths}
    # 2. Take the cached figures that fit.
    fitting = {commit: entry for commit, entry in cached.items() if entry.files == files.get(commit)}
    figures = {commit: entry for commit, entry in fitting.items() if not _changed_grids(entry, digest_of)}
    # 3. Read the runs of other commits.
    stale = [commit for commit in paths if commit not in figures]
    runs, done, failure = sum(len(paths[commit]) for commit in stale), 0, ""
    if stale:
        observe(0, runs)
    waiting: dict[str, CommitFigures] = {}
    for commit in stale:
        figures[commit] = _figures_of(read_runs(paths[commit]), files[commit])
        # Figures of a suite that is not imported here stay in the cache: whoever imports it will want them.
        is_poorer = commit in fitting and UNKNOWN in _changed_grids(fitting[commit], digest_of)
        if not is_poorer:
            waiting[commit] = figures[commit]
        if len(waiting) >= _AT_ONCE or commit == stale[-1]:
            failure, waiting = failure or _cache(store, waiting, digest_of), {}
        done += len(paths[commit])
        observe(done, runs)
    # 4. Put the commits together, in the order of their first runs.
    troubles = stored.notes(stored.refused)
    if failure and runs > _WORTH_CACHING:
        troubles.append(f"{cache_of(store)} cannot be written ({failure}): the next command reads {runs} runs again")
    entries = [figures[commit] for commit in paths]
    reasons = Counter(chain.from_iterable(entry.left for entry in entries))
    tables = list(chain.from_iterable(entry.tables for entry in entries))
    counts = sum(entry.runs for entry in entries), sum(entry.runs > 0 for entry in entries)
    return history_of(tables, *counts, reasons + stored.left, runs, troubles)


def _changed_grids(figures: CommitFigures, digest_of: Callable[[str], str]) -> set[str]:
    """Returns the digests of the grids that are others now than when the figures were made."""
    return {digest_of(suite) for suite, digest in figures.grids.items() if digest_of(suite) != digest}


def keep_figures(store: Path, run: Path) -> None:
    """Updates the cache for the commit of a run, so that later commands need not read its runs. Never raises."""
    with contextlib.suppress(OSError, StoreError):
        commit = commit_of(run)
        if paths := files_by_commit(store).get(commit):
            read_and_keep(store, commit, paths)


def read_and_keep(store: Path, commit: str, paths: Sequence[Path]) -> CommitRuns:
    """Reads the runs of a commit, and caches their figures."""
    files = _stamps_of(paths)
    read = read_runs(paths)
    _cache(store, {commit: _figures_of(read, files)}, _digest_of_grid)
    return read


def _stamps_of(paths: Sequence[Path]) -> list[list[Any]]:
    stamps: list[list[Any]] = []
    for path in paths:
        with contextlib.suppress(OSError):  # it has just gone
            status = path.stat()
            stamps.append([f"{path.parent.name}/{path.name}", status.st_size, status.st_mtime_ns])
    return stamps


def _figures_of(read: CommitRuns, files: list[list[Any]]) -> CommitFigures:
    tables = [table_of(members) for members in by_place(read.runs)]
    return CommitFigures(files, dict.fromkeys(read.suites, UNKNOWN), len(read.runs), list(read.left), tables)


def _digest_of_grid(suite: str) -> str:
    """Returns a digest of what decides which cases of a suite are tracked; UNKNOWN where it is not imported."""
    words = fingerprint(suite)
    return _digest(words) if words else UNKNOWN


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _cache(store: Path, commits: Mapping[str, CommitFigures], digest_of: Callable[[str], str]) -> str:
    """Caches the figures of commits; returns why they could not be written, '' if they were."""
    layouts = {table.layout for table in chain.from_iterable(figures.tables for figures in commits.values())}
    digests = {layout: _digest(layout) for layout in layouts}
    values = {(_LAYOUT, digest): layout.encode() for layout, digest in digests.items()}
    for commit, figures in commits.items():
        grids = {suite: digest_of(suite) for suite in figures.grids}
        values[_COMMIT, commit] = _encode(figures._replace(grids=grids), digests)
    return write_values(store, values)


def _encode(figures: CommitFigures, digests: Mapping[str, str]) -> bytes:
    """Returns a line of JSON, and the rows of all tables."""
    *plain, tables = figures
    heads = [(table.place, digests[table.layout], table.facts, len(table.rows)) for table in tables]
    head = json.dumps([*plain, heads], separators=(",", ":")).encode()
    return b"\n".join([head, b"".join(table.rows for table in tables)])


def _load(store: Path) -> dict[str, CommitFigures]:
    layouts = {digest: layout.decode() for digest, layout in read_values(store, _LAYOUT).items()}
    figures = {}
    for commit, value in read_values(store, _COMMIT).items():
        with contextlib.suppress(KeyError):  # another process has thrown the layout away
            figures[commit] = _figures_in(value, layouts)
    return figures


def _figures_in(value: bytes, layouts: Mapping[str, str]) -> CommitFigures:
    begin = value.index(b"\n") + 1
    files, grids, runs, reasons, plain = json.loads(value[:begin])
    tables = []
    for place, layout, facts, size in plain:
        rows = memoryview(value)[begin : begin + size]
        tables.append(FigureTable(Place(*place), layouts[layout], tuple(facts), rows))
        begin += size
    return CommitFigures(files, grids, runs, reasons, tables)
