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
from functools import cached_property
from multiprocessing import get_all_start_methods, get_context
from pathlib import Path
from typing import NamedTuple, TypeVar

from fp8bench.model import Ending, Trend
from fp8bench.store.asv.identity import Identity
from fp8bench.store.commit_runs import CommitRuns, commit_of, files_by_commit, read_runs
from fp8bench.store.index.figure_files import (
    CommitFigures,
    Fingerprints,
    Newer,
    Richer,
    Stale,
    Torn,
    are_unchanged,
    figures_file,
    figures_of_runs,
    load_figures,
    save_figures,
    stamps,
    sweep,
)
from fp8bench.store.index.lines import Lines, lines_of, names_in
from fp8bench.store.index.tables import Home, Table, Trends, home_of
from fp8bench.store.interpreters import Renamings, load_renamings

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

    `troubles` are sentences on files of figures that did not serve. `read` is how many runs had to be read.
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
        home = home_of(Home(str(identity.machine["machine"]), identity.python, identity.interpreter), homes)
        return (home.machine, home.python) == (trend.machine.get("machine"), trend.python)

    def endings(self, wanted: Callable[[str], bool]) -> list[Ending]:
        """How the trends end whose name is wanted; they have no figures."""
        lines = lines_of(self.tables, wanted)
        return [lines.ending(line) for line in lines.lines]


def open_history(store: Path, warn: Callable[[int], None]) -> History:
    """Open it. `warn` is told how many runs must be read, before they are."""
    files = files_by_commit(store)
    renamings, known = load_renamings(store), Fingerprints()
    found = {commit: _loaded(store, commit, paths, renamings, known) for commit, paths in files.items()}
    missing = {commit: one for commit, one in found.items() if not isinstance(one, CommitFigures)}
    read = sum(len(files[commit]) for commit in missing)
    if missing:
        warn(read)
    jobs = [
        _Job(store, commit, tuple(files[commit]), why not in (Newer, Richer), known) for commit, why in missing.items()
    ]
    made = dict(zip(missing, spread(_figures, jobs), strict=True))
    if missing:
        sweep(store, files)
    figures = [one if isinstance(one, CommitFigures) else made[commit].figures for commit, one in found.items()]
    left: Counter[str] = Counter()
    for one in figures:
        left.update(one.left)
    tables = tuple(table for one in figures for table in one.tables)
    runs, commits = sum(one.runs for one in figures), sum(one.runs > 0 for one in figures)
    return History(tables, runs, commits, left, read, tuple(_troubles(store, missing, made, files)))


def keep_figures(store: Path, run: Path) -> None:
    """Write down what the commit of a run comes to, so that its runs need not be read later. Never raises for that."""
    with contextlib.suppress(OSError):
        commit, known = commit_of(run), Fingerprints()
        paths = files_by_commit(store).get(commit, [])
        if paths and _loaded(store, commit, paths, load_renamings(store), known) in (Stale, Torn, OSError):
            _read_runs(_Job(store, commit, tuple(paths), True, known))


def read_and_keep(store: Path, commit: str, paths: Sequence[Path]) -> CommitRuns:
    """Read the runs of a commit, and write down what they come to, whatever was written down before."""
    return _read_runs(_Job(store, commit, tuple(paths), True, Fingerprints()))[0]


class _Job(NamedTuple):
    """A commit whose runs are to be read, and whether what they come to is to be written down."""

    store: Path
    commit: str
    paths: tuple[Path, ...]
    keep: bool
    known: Fingerprints


class _Made(NamedTuple):
    """What the runs of a commit come to, and why it could not be written down; '' where nobody is to know."""

    figures: CommitFigures
    unkept: str


def _loaded(
    store: Path, commit: str, paths: Sequence[Path], renamings: Renamings, known: Fingerprints
) -> CommitFigures | type[Exception]:
    """What the file of a commit says, or what is the matter with it."""
    try:
        return load_figures(figures_file(store, commit), store, paths, renamings, known)
    except (Stale, Torn, Newer, Richer) as error:
        return type(error)
    except OSError:
        return OSError


def _figures(job: _Job) -> _Made:
    return _read_runs(job)[1]


def _read_runs(job: _Job) -> tuple[CommitRuns, _Made]:
    """What the runs of a commit tell, and what they come to."""
    before = stamps(job.store, job.paths) if job.keep else None
    read = read_runs(job.paths)
    figures = figures_of_runs(read)
    if before is None or not are_unchanged(job.store, before):
        return read, _Made(figures, "")
    try:
        save_figures(figures_file(job.store, job.commit), figures, read, before, job.known)
    except OSError as error:
        return read, _Made(figures, error.strerror or str(error))
    return read, _Made(figures, "")


def _troubles(
    store: Path, missing: Mapping[str, object], made: Mapping[str, _Made], files: Mapping[str, Sequence[Path]]
) -> Iterator[str]:
    """Sentences for a person."""
    folder = figures_file(store, "").parent
    torn, newer = ([figures_file(store, commit).name for commit in missing if missing[commit] is why]
                   for why in (Torn, Newer))  # fmt: skip
    if torn:
        yield f"{_some(torn)} in {folder} had become unreadable and was made anew from the runs"
    if newer:
        yield f"{_some(newer)} in {folder} is a newer fp8bench's and was left alone; the runs were read"
    unkept = [commit for commit, one in made.items() if one.unkept]
    runs = sum(len(files[commit]) for commit in unkept)
    if runs > _WORTH_KEEPING:
        yield (
            f"what {runs} runs come to could not be kept in {folder} ({made[unkept[0]].unkept}): the next command "
            "reads them again"
        )


def _some(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
