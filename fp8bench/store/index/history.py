"""Opens the history of a store: figures of all commits from the index, and from runs that are not in it."""

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
from enum import Enum
from functools import cached_property, partial
from multiprocessing import get_all_start_methods, get_context
from pathlib import Path
from typing import TypeVar
from zlib import crc32

from fp8bench.errors import StoreError
from fp8bench.model import Ending, Trend
from fp8bench.store.asv.identity import Identity
from fp8bench.store.commit_runs import CommitRuns, commit_of
from fp8bench.store.compacted.manifest import lacking_files, stands_alone
from fp8bench.store.index.figure_files import (
    CommitFigures,
    Fingerprints,
    Stamp,
    are_known,
    as_they_are,
    figures_of_runs,
    read_stamped,
)
from fp8bench.store.index.points_file import AT_ONCE, Index, Kept, points_file
from fp8bench.store.index.tables import (
    FigureTable,
    Line,
    MeasuredPlaces,
    TrendLines,
    home_of,
    lines_of,
    names_in,
    table_of,
)
from fp8bench.store.runs.listing import Listing, each_once, index_of, stamps_of

Job = TypeVar("Job")
Result = TypeVar("Result")
_MOST = 16  # processes: more would wait for one disk
_LEAST_JOBS = 20  # for a process: fewer are done before it has started
_MOST_AT_ONCE = 25  # jobs that a process is given at a time


def spread(work: Callable[[Job], Result], jobs: Sequence[Job]) -> Iterator[Result]:
    """Yields what `work` makes of each job, in order, in forked processes if there are many jobs.

    Forks know the suites that were imported here. A process that has loaded torch is not forked, because its threads
    may hold locks; then, or if a fork fails, the work is done here.
    """
    processes, done = min(_processors(), _MOST, 2 * len(jobs) // _LEAST_JOBS), 0
    if processes > 1 and "torch" not in sys.modules and "fork" in get_all_start_methods():
        try:
            with warnings.catch_warnings():
                # It warns of the threads of numpy's linear algebra, which the forks do not use.
                warnings.simplefilter("ignore", DeprecationWarning)
                pool = ProcessPoolExecutor(processes, get_context("fork"), _start_fork, (os.getpid(),))
                try:
                    for result in pool.map(work, jobs, chunksize=min(_MOST_AT_ONCE, len(jobs) // _LEAST_JOBS)):
                        done += 1
                        yield result
                finally:
                    pool.shutdown(cancel_futures=True)
        except (BrokenProcessPool, OSError):  # not enough memory, for example
            pass
    yield from map(work, jobs[done:])


def _start_fork(parent: int) -> None:
    """Ignores Ctrl-C, since the parent ends its forks, and has the system kill this fork with the parent: each fork
    holds the pipe open on which the others would wait for ever."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        import ctypes

        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before prctl
        os._exit(1)


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


Figures = CommitFigures[FigureTable]
_RESTORES = "`fp8bench store restore` writes"
_MOST_ROWS = 1_000_000  # that are in memory at a time where not all are needed together
# From so many runs on it takes long to read them again, so that a failure to keep their figures is reported.
_WORTH_KEEPING = 20


@dataclass(frozen=True)
class History:
    """The figures of a store, how many runs and commits they are of, and how many runs were left out, by reason.

    `troubles` are sentences on run files that were refused, and on files that could not be used. `read` counts the runs
    that had to be read.
    """

    places: MeasuredPlaces
    runs: int
    commits: int
    left: Counter[str]
    read: int
    troubles: tuple[str, ...]

    @cached_property
    def names(self) -> list[str]:
        """The names of the trends, sorted; several places may have trends of one name."""
        names: set[str] = set()
        for some in self._portions(lambda _: True):
            names |= names_in(self.places, some)
        return sorted(names)

    @cached_property
    def lines(self) -> TrendLines:
        return lines_of(self.places, lambda _: True)

    def trends(self, wanted: Callable[[str], bool]) -> tuple[Trend, ...]:
        """Returns the trends whose name is wanted."""
        lines = lines_of(self.places, wanted)
        return tuple(map(lines.trend, lines.lines))

    def is_of(self, trend: Trend, identity: Identity) -> bool:
        """Whether a trend is of this machine and interpreter, whatever path the interpreter was called by."""
        home = home_of(identity.home, list(self.places.homes))
        return (home.machine, home.python) == (trend.machine.get("machine"), trend.python)

    def endings(self, wanted: Callable[[str], bool]) -> list[Ending]:
        """Returns how the trends end whose name is wanted, without their figures."""
        endings: list[tuple[Line, Ending]] = []
        for some in self._portions(wanted):
            lines = lines_of(self.places, some)
            endings += [(line, lines.ending(line)) for line in lines.lines]
        return [ending for _, ending in sorted(endings, key=lambda pair: pair[0].order)]

    def _portions(self, wanted: Callable[[str], bool]) -> Iterator[Callable[[str], bool]]:
        """Divides what is wanted into portions whose rows fit into memory together."""
        portions = -(-self.places.count // _MOST_ROWS)
        if portions < 2:
            yield wanted
        for portion in range(portions) if portions > 1 else ():
            yield partial(_is_in_portion, wanted, portion, portions)


def _is_in_portion(wanted: Callable[[str], bool], portion: int, portions: int, name: str) -> bool:
    return crc32(name.encode()) % portions == portion and wanted(name)


def open_history(store: Path, observe: Callable[[int, int], None]) -> History:
    """`observe` is told how many of the runs that must be read were read, and first that none was."""
    index, files, known = Index.opened(store), stamps_of(store), Fingerprints()
    troubles, there, read = [], Listing(()), 0
    compacted = index_of(store).exists()
    if compacted and files and (lacking := lacking_files(store, files)):
        are = "a run file that was compacted is" if lacking == 1 else f"{lacking} run files that were compacted are"
        troubles.append(f"{are} not in {store}: {_RESTORES} what lacks, `fp8bench store compact` forgets it")
    if compacted and not files and stands_alone(store, index):
        commits = index.in_order()
        troubles.append(f"{store} has no runs: figures are those that were compacted. {_RESTORES} the runs")
    elif files and index.stamps() == files and index.are_known(known):
        commits = index.in_order()
    else:
        there, names = by_commit(index, files)
        commits, torn = list(names), index.torn
        read, unkept = _update_index(index, names, files, known, observe)
        troubles += [*there.notes(there.refused), *_troubles(index, torn, read, unkept)]
    runs, told, left = index.told(commits)
    return History(index.places(commits), runs, told, left + there.left, read, tuple(troubles))


def by_commit(index: Index, files: Mapping[str, tuple[int, int]]) -> tuple[Listing, dict[str, list[str]]]:
    """Returns the listing of run files, and their names by commit, oldest first, in the order of the commits' first
    runs.

    Only files that the index does not know as they are now are opened.
    """
    known, names = index.known(files), {index.store / name: name for name in files}
    there = each_once(names, {path: known[name][0] for path, name in names.items() if name in known})
    commits: dict[str, list[str]] = {}
    for path in reversed(there.files):
        name = names[path]
        commits.setdefault(known[name][1] if name in known else commit_of(path), []).append(name)
    return there, commits


class Fit(Enum):
    """Whether the index has what the runs of a commit come to."""

    CURRENT = "it is"
    STALE = "the runs or the suites are others, or it is not there"
    RICHER = "it is of suites that are not known here, and whoever imports them will want it"


def fit(
    index: Index, commit: str, names: Sequence[str], files: Mapping[str, tuple[int, int]], known: Fingerprints
) -> tuple[Fit, list[Stamp]]:
    """Returns the fit of a commit, and its stamps with today's dates where only dates have changed."""
    sources = index.sources(commit)
    current = {source.name: (source.size, source.changed_ns) for source in sources}
    restamped: list[Stamp] = []
    if current != {name: files[name] for name in names}:
        with contextlib.suppress(OSError):
            paths = [index.store / name for name in names] if sources else []
            restamped = as_they_are(index.store, paths, sources) or []
        if not restamped:
            return Fit.STALE, []
    if are_known(index.suites(commit), known):
        return Fit.CURRENT, restamped
    return Fit.RICHER if are_known(index.suites(commit), known, richer=True) else Fit.STALE, []


def _update_index(
    index: Index,
    names_by_commit: Mapping[str, Sequence[str]],
    files: Mapping[str, tuple[int, int]],
    known: Fingerprints,
    observe: Callable[[int, int], None],
) -> tuple[int, tuple[int, str]]:
    """Updates the index. Returns how many runs were read, and of how many the index could not be written, and why."""
    fits = {commit: fit(index, commit, names, files, known) for commit, names in names_by_commit.items()}
    restamped = [
        (commit, index.figures(commit)._replace(sources=tuple(sources)))
        for commit, (_, sources) in fits.items() if sources
    ]  # fmt: skip
    if restamped:
        index.keep(restamped)
    jobs = [(commit, names_by_commit[commit]) for commit, (fit, _) in fits.items() if fit is not Fit.CURRENT]
    runs, read, unkept, why = sum(len(names) for _, names in jobs), 0, 0, ""
    if jobs:
        observe(0, runs)
    aside: list[Kept] = []
    waiting: list[Kept] = []
    for number, (commit, figures, stable) in enumerate(spread(partial(_read, index.store, known), jobs), 1):
        (waiting if stable and fits[commit][0] is Fit.STALE else aside).append((commit, figures))
        read += len(names_by_commit[commit])
        if len(waiting) >= AT_ONCE or number == len(jobs):
            if waiting and (reason := index.keep(waiting)):
                unkept, why = unkept + sum(len(names_by_commit[commit]) for commit, _ in waiting), reason
            waiting = []
            observe(read, runs)
    if aside:
        index.keep(aside, beside=True)
    return runs, (unkept, why)


def _read(store: Path, known: Fingerprints, job: tuple[str, Sequence[str]]) -> tuple[str, Figures, bool]:
    """Returns the commit, its figures, and whether its runs stayed unchanged; it may run in another process."""
    commit, names = job
    read, sources = read_stamped(store, [store / name for name in names])
    return commit, figures_of_runs(read, sources or (), known, table_of), sources is not None


def keep_figures(store: Path, run: Path) -> None:
    """Updates the index for the commit of a run, so that later commands need not read its runs. Never raises."""
    with contextlib.suppress(OSError, StoreError):
        commit, known = commit_of(run), Fingerprints()
        index, files = Index.opened(store), stamps_of(store)
        names = by_commit(index, files)[1].get(commit, [])
        if names and fit(index, commit, names, files, known)[0] is Fit.STALE:
            read_and_keep(index, commit, [store / name for name in names], known)


def read_and_keep(index: Index, commit: str, paths: Sequence[Path], known: Fingerprints) -> CommitRuns:
    """Reads the runs of a commit, and writes its figures into the index, whatever is there."""
    read, sources = read_stamped(index.store, paths)
    if sources:
        index.keep([(commit, figures_of_runs(read, sources, known, table_of))])
    return read


def _troubles(index: Index, torn: bool, read: int, unkept: tuple[int, str]) -> Iterator[str]:
    path = points_file(index.store)
    if torn and read:
        yield f"{path.name} in {path.parent} had become unreadable and was made anew from the runs"
    if index.newer:
        yield f"{path.name} in {path.parent} is a newer fp8bench's and was left alone; the runs were read"
    if unkept[0] > _WORTH_KEEPING:
        runs, why = unkept
        yield f"what {runs} runs come to could not be kept in {path.parent} ({why}): the next command reads them again"
