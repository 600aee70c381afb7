"""The history of a store, opened: figures of all commits from their files, and from the runs where there is none."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import cached_property, partial
from multiprocessing import get_all_start_methods, get_context
from pathlib import Path
from typing import TypeVar

from fp8bench.errors import StoreError
from fp8bench.model import Ending, Trend
from fp8bench.store.asv.identity import Home, Identity
from fp8bench.store.commit_runs import CommitRuns, by_commit, commit_of, files_by_commit, read_runs
from fp8bench.store.index.figure_files import (
    CommitFigures,
    Fingerprints,
    Unfit,
    are_unchanged,
    figures_file,
    figures_of_runs,
    load_figures,
    save_figures,
    stamps,
    sweep,
)
from fp8bench.store.index.lines import Lines, lines_of, names_in
from fp8bench.store.index.tables import Table, Trends, home_of
from fp8bench.store.interpreters import load_renamings
from fp8bench.store.runs.listing import listing

Job = TypeVar("Job")
Result = TypeVar("Result")
# More would wait for one disk.
_MOST = 16
# Less is done sooner than other processes are there.
_LEAST_JOBS = 20


def spread(work: Callable[[Job], Result], jobs: Sequence[Job]) -> list[Result]:
    """What `work` makes of each job, in order; in this process where the jobs are few, or others cannot be had.

    The others are forks, which know the suites that were imported here. A process that has loaded torch is not forked:
    its threads may hold locks.
    """
    processes = min(_processors(), _MOST, 2 * len(jobs) // _LEAST_JOBS)
    if processes < 2 or "torch" in sys.modules or "fork" not in get_all_start_methods():
        return list(map(work, jobs))
    try:
        with warnings.catch_warnings():
            # Of threads in a process that is forked: those of numpy's linear algebra, which is not called for this.
            warnings.simplefilter("ignore", DeprecationWarning)
            # Ctrl-C goes to all processes of a terminal, and this one's parent ends it.
            pool = ProcessPoolExecutor(processes, get_context("fork"), signal.signal, (signal.SIGINT, signal.SIG_IGN))
            try:
                return list(pool.map(work, jobs))
            finally:
                pool.shutdown(cancel_futures=True)
    except (BrokenProcessPool, OSError):  # no memory for so many, say
        return list(map(work, jobs))


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# So many runs take long enough to be sorry that what they come to could not be kept.
_WORTH_KEEPING = 20


@dataclass(frozen=True)
class History:
    """What a store holds, of how many runs and commits; how many runs were left out, and why.

    `troubles` are sentences on run files that were refused, and on files of figures.
    `read` is how many runs had to be read.
    """

    tables: tuple[Table, ...]
    runs: int
    commits: int
    left: Counter[str]
    read: int
    troubles: tuple[str, ...]

    @cached_property
    def names(self) -> list[str]:
        """What the trends are called, sorted; one name may be that of several places."""
        return names_in(self.tables)

    @cached_property
    def lines(self) -> Lines:
        """All trends as rows."""
        return lines_of(self.tables, lambda _: True)

    def trends(self, wanted: Callable[[str], bool]) -> Trends:
        """The trends whose name is wanted, as they are when every run is read."""
        lines = lines_of(self.tables, wanted)
        return Trends(tuple(map(lines.trend, lines.lines)), self.runs, self.commits, self.left)

    def is_of(self, trend: Trend, identity: Identity) -> bool:
        """Whether a trend goes on where an identity is of, by whatever name its interpreter was called."""
        homes: list[Home] = []
        for table in self.tables:
            home_of(table.home, homes)
        home = home_of(identity.home, homes)
        return (home.machine, home.python) == (trend.machine.get("machine"), trend.python)

    def endings(self, wanted: Callable[[str], bool]) -> list[Ending]:
        """How the trends end whose name is wanted; they have no figures."""
        lines = lines_of(self.tables, wanted)
        return [lines.ending(line) for line in lines.lines]


def open_history(store: Path, warn: Callable[[int], None]) -> History:
    """Open it. `warn` is told how many runs must be read, before they are."""
    there = listing(store)
    files = by_commit(there.files)
    renamings, known = load_renamings(store), Fingerprints()
    found = {commit: load_figures(store, commit, paths, renamings, known) for commit, paths in files.items()}
    missing = {commit: one for commit, one in found.items() if isinstance(one, Unfit)}
    read = sum(len(files[commit]) for commit in missing)
    if missing:
        warn(read)
    jobs = [(commit, files[commit], why not in (Unfit.NEWER, Unfit.RICHER)) for commit, why in missing.items()]
    made = dict(zip(missing, spread(partial(_figures, store, known), jobs), strict=True))
    if missing:
        sweep(store, files)
    figures = [made[commit][0] if isinstance(one, Unfit) else one for commit, one in found.items()]
    left = there.left
    for one in figures:
        left.update(one.left)
    tables = tuple(table for one in figures for table in one.tables)
    runs, commits = sum(one.runs for one in figures), sum(one.runs > 0 for one in figures)
    troubles = (*there.notes(there.refused), *_troubles(store, missing, made, files))
    return History(tables, runs, commits, left, read, troubles)


def keep_figures(store: Path, run: Path) -> None:
    """Write down what the commit of a run comes to, so that its runs need not be read later. Never raises for that."""
    with contextlib.suppress(OSError, StoreError):
        commit, known = commit_of(run), Fingerprints()
        paths = files_by_commit(store).get(commit, [])
        found = load_figures(store, commit, paths, load_renamings(store), known)
        if paths and found in (Unfit.STALE, Unfit.TORN, Unfit.ABSENT):
            read_and_keep(store, commit, paths, known)


def _figures(store: Path, known: Fingerprints, job: tuple[str, Sequence[Path], bool]) -> tuple[CommitFigures, str]:
    """What the runs of a commit come to, for another process: what they tell stays in the one that reads them."""
    commit, paths, keep = job
    _, figures, unkept = read_and_keep(store, commit, paths, known, keep)
    return figures, unkept


def read_and_keep(
    store: Path, commit: str, paths: Sequence[Path], known: Fingerprints, keep: bool = True
) -> tuple[CommitRuns, CommitFigures, str]:
    """Read the runs of a commit, and write down what they come to, whatever was written down before.

    Returns what they tell, what they come to, and why that could not be written down, '' if it was.
    """
    before = stamps(store, paths) if keep else None
    read = read_runs(paths)
    figures, unkept = figures_of_runs(read), ""
    if before is not None and are_unchanged(store, before):
        try:
            save_figures(figures_file(store, commit), figures, read, before, known)
        except OSError as error:
            unkept = error.strerror or str(error)
    return read, figures, unkept


def _troubles(
    store: Path,
    missing: Mapping[str, Unfit],
    made: Mapping[str, tuple[CommitFigures, str]],
    files: Mapping[str, Sequence[Path]],
) -> Iterator[str]:
    """Sentences for a person."""
    folder = figures_file(store, "").parent
    torn, newer = ([figures_file(store, commit).name for commit in missing if missing[commit] is why]
                   for why in (Unfit.TORN, Unfit.NEWER))  # fmt: skip
    if torn:
        yield f"{_some(torn)} in {folder} had become unreadable and was made anew from the runs"
    if newer:
        yield f"{_some(newer)} in {folder} is a newer fp8bench's and was left alone; the runs were read"
    unkept = [commit for commit, (_, why) in made.items() if why]
    runs = sum(len(files[commit]) for commit in unkept)
    if runs > _WORTH_KEEPING:
        yield (
            f"what {runs} runs come to could not be kept in {folder} ({made[unkept[0]][1]}): the next command "
            "reads them again"
        )


def _some(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
