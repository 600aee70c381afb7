"""Reads the history of a store. The figures of a commit come from the cache, or from its runs if the cache is
outdated.
"""

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
from fp8bench.store.commit_runs import (
    CommitRuns,
    find_commit_prefix,
    group_by_interpreter,
    group_files_by_commit,
    list_files_by_commit,
    read_runs,
)
from fp8bench.store.figures.cache import get_figure_cache_path, read_cached_values, write_values
from fp8bench.store.figures.lines import History, make_figure_history
from fp8bench.store.figures.tables import FigureTable, HistoryPlace, make_table
from fp8bench.store.runs.listing import listing
from fp8bench.store.series import fingerprint_grid

_COMMIT_KIND, _LAYOUT_KIND = "commit", "layout"
# The cache is written after this many commits, so a killed process loses at most their figures.
_COMMITS_PER_WRITE = 25
# A failure to write the cache is reported if more runs than this were read, because reading them again is slow.
_MIN_REPORTED_RUNS = 20
UNKNOWN_DIGEST = ""  # stands for the unknown grid of cases of a suite that is not imported


class CommitFigures(NamedTuple):
    """The cached figures of one commit: a table for each interpreter, the number of tracked runs, and the reasons why
    other runs are left out.

    `files` and `grids` show whether the figures are up to date. `files` has the name, size in bytes and modification
    time (in ns) of each run file. `grids` has a digest of each suite's grid: the cases that the history tracks.
    """

    files: list[list[Any]]
    grids: dict[str, str]
    runs: int
    skipped_run_reasons: list[str]
    tables: list[FigureTable]


def open_store_history(store: Path, observe: Callable[[int, int], None]) -> History:
    """Returns the history of a store. `observe` is called with the number of runs that were already read, and the
    number of all runs to read.
    """
    # 1. List the files and their times of change before reading any file. If a file changes later, the next command
    # reads it again.
    run_listing, cached_figures, digest_of = listing(store), _load_cached_figures(store), cache(_suite_grid_digest)
    paths_by_commit = group_files_by_commit(run_listing.files)
    file_stamps_by_commit = {commit: _list_file_stamps(paths_by_commit[commit]) for commit in paths_by_commit}
    # 2. Use the cached figures of commits whose files and grids are unchanged.
    valid_entry_by_commit = {
        commit: entry for commit, entry in cached_figures.items() if entry.files == file_stamps_by_commit.get(commit)
    }
    figures = {
        commit: entry for commit, entry in valid_entry_by_commit.items() if not _find_changed_grids(entry, digest_of)
    }
    # 3. Read the runs of all other commits.
    commits_without_figures = [commit for commit in paths_by_commit if commit not in figures]
    runs, runs_read, failure = sum(len(paths_by_commit[commit]) for commit in commits_without_figures), 0, ""
    if commits_without_figures:
        observe(0, runs)
    uncached_commit_figures: dict[str, CommitFigures] = {}
    for commit in commits_without_figures:
        figures[commit] = _make_commit_figures(read_runs(paths_by_commit[commit]), file_stamps_by_commit[commit])
        # Do not overwrite the cached figures of a suite that is not imported now: a later command may import it.
        lacks_suites = commit in valid_entry_by_commit and UNKNOWN_DIGEST in _find_changed_grids(
            valid_entry_by_commit[commit], digest_of
        )
        if not lacks_suites:
            uncached_commit_figures[commit] = figures[commit]
        if len(uncached_commit_figures) >= _COMMITS_PER_WRITE or commit == commits_without_figures[-1]:
            failure, uncached_commit_figures = failure or _write_to_cache(store, uncached_commit_figures, digest_of), {}
        runs_read += len(paths_by_commit[commit])
        observe(runs_read, runs)
    # 4. Combine the commits in the order of their first runs.
    troubles = run_listing.notes(run_listing.refused)
    if failure and runs > _MIN_REPORTED_RUNS:
        troubles.append(
            f"{get_figure_cache_path(store)} cannot be written ({failure}): the next command reads {runs} runs again"
        )
    entries = [figures[commit] for commit in paths_by_commit]
    reasons = Counter(chain.from_iterable(entry.skipped_run_reasons for entry in entries))
    tables = list(chain.from_iterable(entry.tables for entry in entries))
    counts = sum(entry.runs for entry in entries), sum(entry.runs > 0 for entry in entries)
    return make_figure_history(tables, *counts, reasons + run_listing.skipped_run_reasons, runs, troubles)


def _find_changed_grids(figures: CommitFigures, digest_of: Callable[[str], str]) -> set[str]:
    """Returns the current digests of the suites whose grids changed since the figures were computed."""
    return {digest_of(suite) for suite, digest in figures.grids.items() if digest_of(suite) != digest}


def cache_commit_figures(store: Path, run: Path) -> None:
    """Updates the cached figures for the commit of a run, so that later commands need not read the commit's runs.
    Ignores errors of the store.
    """
    with contextlib.suppress(OSError, StoreError):
        commit = find_commit_prefix(run)
        if paths := list_files_by_commit(store).get(commit):
            read_and_cache_runs(store, commit, paths)


def read_and_cache_runs(store: Path, commit: str, paths: Sequence[Path]) -> CommitRuns:
    """Reads the runs of a commit, and caches their figures."""
    file_stamps = _list_file_stamps(paths)
    commit_runs = read_runs(paths)
    _write_to_cache(store, {commit: _make_commit_figures(commit_runs, file_stamps)}, _suite_grid_digest)
    return commit_runs


def _list_file_stamps(paths: Sequence[Path]) -> list[list[Any]]:
    file_stamps: list[list[Any]] = []
    for path in paths:
        with contextlib.suppress(OSError):  # the file was deleted after it was listed
            stat_result = path.stat()
            file_stamps.append([f"{path.parent.name}/{path.name}", stat_result.st_size, stat_result.st_mtime_ns])
    return file_stamps


def _make_commit_figures(commit_runs: CommitRuns, files: list[list[Any]]) -> CommitFigures:
    tables = [make_table(members) for members in group_by_interpreter(commit_runs.runs)]
    return CommitFigures(
        files,
        # `_write_to_cache` computes the digests.
        dict.fromkeys(commit_runs.suites, UNKNOWN_DIGEST),
        len(commit_runs.runs),
        list(commit_runs.skipped_run_reasons),
        tables,
    )


def _suite_grid_digest(suite: str) -> str:
    """Returns a digest of everything that determines which cases of a suite the history tracks, or UNKNOWN_DIGEST if
    the suite is not imported.
    """
    grid_fingerprint = fingerprint_grid(suite)
    return _digest_text(grid_fingerprint) if grid_fingerprint else UNKNOWN_DIGEST


def _digest_text(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _write_to_cache(store: Path, commits: Mapping[str, CommitFigures], digest_of: Callable[[str], str]) -> str:
    """Caches the figures of commits. Returns why they could not be written, or '' if they were."""
    # Most commits share their layouts, so store each layout once.
    table_layouts = {table.layout for table in chain.from_iterable(figures.tables for figures in commits.values())}
    digest_by_layout = {layout: _digest_text(layout) for layout in table_layouts}
    values = {(_LAYOUT_KIND, digest): layout.encode() for layout, digest in digest_by_layout.items()}
    for commit, figures in commits.items():
        grid_digest_by_suite = {suite: digest_of(suite) for suite in figures.grids}
        values[_COMMIT_KIND, commit] = _encode_commit_figures(
            figures._replace(grids=grid_digest_by_suite), digest_by_layout
        )
    return write_values(store, values)


def _encode_commit_figures(figures: CommitFigures, digests: Mapping[str, str]) -> bytes:
    """Returns the cached value for a commit: a line of JSON, followed by the rows of all tables."""
    *plain, tables = figures
    table_headers = [(table.place, digests[table.layout], table.facts, len(table.rows)) for table in tables]
    header_line = json.dumps([*plain, table_headers], separators=(",", ":")).encode()
    return b"\n".join([header_line, b"".join(table.rows for table in tables)])


def _load_cached_figures(store: Path) -> dict[str, CommitFigures]:
    layout_by_digest = {digest: layout.decode() for digest, layout in read_cached_values(store, _LAYOUT_KIND).items()}
    figures = {}
    for commit, value in read_cached_values(store, _COMMIT_KIND).items():
        with contextlib.suppress(KeyError):  # skip commits with a layout that another process deleted
            figures[commit] = _decode_commit_figures(value, layout_by_digest)
    return figures


def _decode_commit_figures(value: bytes, layouts: Mapping[str, str]) -> CommitFigures:
    row_start = value.index(b"\n") + 1
    file_stamps, grids, runs, reasons, table_headers = json.loads(value[:row_start])
    tables = []
    for place, layout, facts, size in table_headers:
        rows = memoryview(value)[row_start : row_start + size]
        tables.append(FigureTable(HistoryPlace(*place), layouts[layout], tuple(facts), rows))
        row_start += size
    return CommitFigures(file_stamps, grids, runs, reasons, tables)
