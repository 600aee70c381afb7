"""The history of a store, opened: figures of all commits from its index, and from the runs where they are not in it."""

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
# More would wait for one disk.
_MOST = 16
# Less is done sooner than other processes are there.
_LEAST_JOBS = 20
# A process is handed so many jobs at once.
_MOST_AT_ONCE = 25


def spread(work: Callable[[Job], Result], jobs: Sequence[Job]) -> Iterator[Result]:
    """What `work` makes of each job, in order; in this process where the jobs are few, or others cannot be had.

    The others are forks, which know the suites that were imported here. A process that has loaded torch is not forked:
    its threads may hold locks.
    """
    processes, done = min(_processors(), _MOST, 2 * len(jobs) // _LEAST_JOBS), 0
    if processes > 1 and "torch" not in sys.modules and "fork" in get_all_start_methods():
        try:
            with warnings.catch_warnings():
                # Of threads in a process that is forked: those of numpy's linear algebra, which is not called for this.
                warnings.simplefilter("ignore", DeprecationWarning)
                pool = ProcessPoolExecutor(processes, get_context("fork"), _begin_beside, (os.getpid(),))
                try:
                    for result in pool.map(work, jobs, chunksize=min(_MOST_AT_ONCE, len(jobs) // _LEAST_JOBS)):
                        done += 1
                        yield result
                finally:
                    pool.shutdown(cancel_futures=True)
        except (BrokenProcessPool, OSError):  # no memory for so many, say
            pass
    yield from map(work, jobs[done:])


def _begin_beside(parent: int) -> None:
    """Ctrl-C goes to all processes of a terminal, and this one's parent ends it; so does the system, where that is
    killed: each fork holds the pipe open on which the others would wait for ever."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        import ctypes

        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended before it was asked
        os._exit(1)


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


Figures = CommitFigures[FigureTable]
_RESTORES = "`fp8bench store restore` writes"
# So many rows are held at a time by whoever can do without the others.
_MOST_ROWS = 1_000_000
# So many runs take long enough to be sorry that what they come to could not be kept.
_WORTH_KEEPING = 20


@dataclass(frozen=True)
class History:
    """What a store holds, of how many runs and commits; how many runs were left out, and why.

    `troubles` are sentences on run files that were refused, and on files that did not serve. `read` is how many runs
    had to be read.
    """

    places: MeasuredPlaces
    runs: int
    commits: int
    left: Counter[str]
    read: int
    troubles: tuple[str, ...]

    @cached_property
    def names(self) -> list[str]:
        """What the trends are called, sorted; one name may be that of several places."""
        names: set[str] = set()
        for some in self._portions(lambda _: True):
            names |= names_in(self.places, some)
        return sorted(names)

    @cached_property
    def lines(self) -> TrendLines:
        return lines_of(self.places, lambda _: True)

    def trends(self, wanted: Callable[[str], bool]) -> tuple[Trend, ...]:
        """The trends whose name is wanted, as they are when every run is read."""
        lines = lines_of(self.places, wanted)
        return tuple(map(lines.trend, lines.lines))

    def is_of(self, trend: Trend, identity: Identity) -> bool:
        """Whether a trend goes on where an identity is of, by whatever name its interpreter was called."""
        home = home_of(identity.home, list(self.places.homes))
        return (home.machine, home.python) == (trend.machine.get("machine"), trend.python)

    def endings(self, wanted: Callable[[str], bool]) -> list[Ending]:
        """How the trends end whose name is wanted; they have no figures."""
        endings: list[tuple[Line, Ending]] = []
        for some in self._portions(wanted):
            lines = lines_of(self.places, some)
            endings += [(line, lines.ending(line)) for line in lines.lines]
        return [ending for _, ending in sorted(endings, key=lambda pair: pair[0].order)]

    def _portions(self, wanted: Callable[[str], bool]) -> Iterator[Callable[[str], bool]]:
        """What is wanted in portions whose rows fit into memory together, where they would not otherwise."""
        portions = -(-self.places.count // _MOST_ROWS)
        if portions < 2:
            yield wanted
        for portion in range(portions) if portions > 1 else ():
            yield partial(_is_in_portion, wanted, portion, portions)


def _is_in_portion(wanted: Callable[[str], bool], portion: int, portions: int, name: str) -> bool:
    return crc32(name.encode()) % portions == portion and wanted(name)


def open_history(store: Path, observe: Callable[[int, int], None]) -> History:
    """Open it. `observe` is told how many of how many runs that must be read were read, before the first one, too."""
    index, files, known = Index.opened(store), stamps_of(store), Fingerprints()
    troubles, there, read = [], Listing(()), 0
    compacted = index_of(store).exists()
    if compacted and not files and stands_alone(store, index):
        commits = index.in_order()
        troubles.append(f"{store} has no runs: figures are those that were compacted. {_RESTORES} the runs")
    elif files and index.stamps() == files and index.are_known(known):
        commits = index.in_order()
    else:
        if compacted and (lacking := lacking_files(store, files)):
            are = "a run file that was compacted is" if lacking == 1 else f"{lacking} run files that were compacted are"
            troubles.append(f"{are} not in {store}: {_RESTORES} what lacks, `fp8bench store compact` forgets it")
        there, names = by_commit(index, files)
        commits, torn = list(names), index.torn
        read, unkept = _brought_up_to_date(index, names, files, known, observe)
        troubles += [*there.notes(there.refused), *_troubles(index, torn, read, unkept)]
    runs, told, left = index.told(commits)
    return History(index.places(commits), runs, told, left + there.left, read, tuple(troubles))


def by_commit(index: Index, files: Mapping[str, tuple[int, int]]) -> tuple[Listing, dict[str, list[str]]]:
    """Which run files count, and the names of those of each commit, oldest first; the commits in the order of their
    first runs. Only files that came since or have changed are opened."""
    known, names = index.known(files), {index.store / name: name for name in files}
    there = each_once(names, {path: known[name][0] for path, name in names.items() if name in known})
    commits: dict[str, list[str]] = {}
    for path in reversed(there.files):
        name = names[path]
        commits.setdefault(known[name][1] if name in known else commit_of(path), []).append(name)
    return there, commits


class Fit(Enum):
    """Whether what the index says of a commit is what its runs come to."""

    CURRENT = "it is"
    STALE = "the runs or the suites are others, or it is not there"
    RICHER = "it is of suites that are not known here, and whoever imports them will want it"


def fit(
    index: Index, commit: str, names: Sequence[str], files: Mapping[str, tuple[int, int]], known: Fingerprints
) -> tuple[Fit, list[Stamp]]:
    """And where only dates have changed, the stamps with those of today."""
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


def _brought_up_to_date(
    index: Index,
    names_by_commit: Mapping[str, Sequence[str]],
    files: Mapping[str, tuple[int, int]],
    known: Fingerprints,
    observe: Callable[[int, int], None],
) -> tuple[int, tuple[int, str]]:
    """Have the index say what the runs say. Returns how many were read, and of how many it could not be written down,
    and why."""
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
    beside: list[Kept] = []
    waiting: list[Kept] = []
    for number, (commit, figures, stable) in enumerate(spread(partial(_read, index.store, known), jobs), 1):
        (waiting if stable and fits[commit][0] is Fit.STALE else beside).append((commit, figures))
        read += len(names_by_commit[commit])
        if len(waiting) >= AT_ONCE or number == len(jobs):
            if waiting and (reason := index.keep(waiting)):
                unkept, why = unkept + sum(len(names_by_commit[commit]) for commit, _ in waiting), reason
            waiting = []
            observe(read, runs)
    if beside:
        index.keep(beside, beside=True)
    return runs, (unkept, why)


def _read(store: Path, known: Fingerprints, job: tuple[str, Sequence[str]]) -> tuple[str, Figures, bool]:
    """What the runs of a commit come to, and whether they stayed as they were, for another process: what they tell
    stays in the one that reads them."""
    commit, names = job
    read, sources = read_stamped(store, [store / name for name in names])
    return commit, figures_of_runs(read, sources or (), known, table_of), sources is not None


def keep_figures(store: Path, run: Path) -> None:
    """Write down what the commit of a run comes to, so that its runs need not be read later. Never raises for that."""
    with contextlib.suppress(OSError, StoreError):
        commit, known = commit_of(run), Fingerprints()
        index, files = Index.opened(store), stamps_of(store)
        names = by_commit(index, files)[1].get(commit, [])
        if names and fit(index, commit, names, files, known)[0] is Fit.STALE:
            read_and_keep(index, commit, [store / name for name in names], known)


def read_and_keep(index: Index, commit: str, paths: Sequence[Path], known: Fingerprints) -> CommitRuns:
    """Read the runs of a commit, and write down what they come to, whatever was written down before."""
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
