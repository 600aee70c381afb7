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
from fp8bench.store.compacted.reading import Compacted, open_compacted
from fp8bench.store.index.figure_files import (
    CommitFigures,
    Fingerprints,
    Unfit,
    figures_file,
    figures_of_runs,
    load_figures,
    names_of,
    read_stamped,
    save_figures,
    sweep,
)
from fp8bench.store.index.tables import FigureTable, Line, TrendLines, home_of, lines_of, names_in, table_of
from fp8bench.store.runs.listing import Listing, listing

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


# So many rows of what was compacted are held at a time by whoever can do without the others.
_MOST_ROWS = 1_000_000
# So many runs take long enough to be sorry that what they come to could not be kept.
_WORTH_KEEPING = 20


@dataclass(frozen=True)
class History:
    """What a store holds, of how many runs and commits; how many runs were left out, and why.

    `sources` are tables, and numbers of places that were `compacted`, in the order of the commits' first runs.
    `troubles` are sentences on run files that were refused, and on files that did not serve. `read` is how many runs
    had to be read.
    """

    sources: tuple[FigureTable | int, ...]
    compacted: Compacted | None
    runs: int
    commits: int
    left: Counter[str]
    read: int
    troubles: tuple[str, ...]

    @cached_property
    def names(self) -> list[str]:
        """What the trends are called, sorted; one name may be that of several places."""
        names = names_in(source for source in self.sources if isinstance(source, FigureTable))
        return sorted(names | self.compacted.names(self._places) if self.compacted is not None else names)

    @cached_property
    def lines(self) -> TrendLines:
        return self._lines(lambda _: True)

    def trends(self, wanted: Callable[[str], bool]) -> tuple[Trend, ...]:
        """The trends whose name is wanted, as they are when every run is read."""
        lines = self._lines(wanted)
        return tuple(map(lines.trend, lines.lines))

    def is_of(self, trend: Trend, identity: Identity) -> bool:
        """Whether a trend goes on where an identity is of, by whatever name its interpreter was called."""
        home = home_of(identity.home, list(self._homes))
        return (home.machine, home.python) == (trend.machine.get("machine"), trend.python)

    def endings(self, wanted: Callable[[str], bool]) -> list[Ending]:
        """How the trends end whose name is wanted; they have no figures."""
        found: list[tuple[Line, Ending]] = []
        for some in self._portions(wanted):
            lines = self._lines(some)
            found += [(line, lines.ending(line)) for line in lines.lines]
        return [ending for _, ending in sorted(found, key=lambda pair: pair[0].order)]

    @cached_property
    def _places(self) -> list[int]:
        return [source for source in self.sources if isinstance(source, int)]

    @cached_property
    def _homes(self) -> tuple[Home, ...]:
        homes: list[Home] = []
        own = (
            source.home if isinstance(source, FigureTable) else self._compacted.home(source) for source in self.sources
        )
        for home in dict.fromkeys(own):
            home_of(home, homes)
        return tuple(homes)

    @property
    def _compacted(self) -> Compacted:
        assert self.compacted is not None
        return self.compacted

    def _portions(self, wanted: Callable[[str], bool]) -> Iterator[Callable[[str], bool]]:
        """What is wanted in portions whose rows fit into memory together, where they would not otherwise."""
        rows = self.compacted.rows(self._places) if self.compacted is not None else 0
        portions = -(-rows // _MOST_ROWS)
        if portions < 2:
            yield wanted
            return
        names = [name for name in self.names if wanted(name)]
        for portion in range(portions):
            yield frozenset(names[portion::portions]).__contains__

    def _lines(self, wanted: Callable[[str], bool]) -> TrendLines:
        kept = self.compacted.tables(self._places, wanted) if self.compacted is not None else {}
        tables = [source if isinstance(source, FigureTable) else kept.get(source) for source in self.sources]
        return lines_of([table for table in tables if table is not None], wanted, self._homes)


def open_history(store: Path, warn: Callable[[int], None]) -> History:
    """Open it. `warn` is told how many runs must be read, before they are."""
    compacted, unfit = open_compacted(store)
    there, files = _files(store, compacted)
    known = Fingerprints()
    found = {
        commit: (compacted and compacted.unit(commit, paths, known))
        or load_figures(store, commit, [store / path for path in paths], known)
        for commit, paths in files.items()
    }
    missing = {commit: one for commit, one in found.items() if isinstance(one, Unfit)}
    read = sum(len(files[commit]) for commit in missing)
    if missing:
        warn(read)
    jobs = [
        (commit, [store / path for path in files[commit]], why not in (Unfit.NEWER, Unfit.RICHER))
        for commit, why in missing.items()
    ]
    made = dict(zip(missing, spread(partial(_figures, store, known), jobs), strict=True))
    if missing:
        sweep(store, files)
    figures = [made[commit][0] if isinstance(one, Unfit) else one for commit, one in found.items()]
    left = there.left
    for figure in figures:
        left.update(figure.left)
    sources = tuple(source for figure in figures for source in figure.places)
    runs, commits = sum(figure.runs for figure in figures), sum(figure.runs > 0 for figure in figures)
    troubles = (*unfit, *there.notes(there.refused), *_troubles(store, missing, made, files))
    return History(sources, compacted, runs, commits, left, read, troubles)


def _files(store: Path, compacted: Compacted | None) -> tuple[Listing, dict[str, list[str]]]:
    """The runs of a store, and the names of those of each commit, oldest first. No file is opened where nothing has
    come since all were compacted."""
    if compacted is not None and compacted.is_complete:
        return compacted.manifest.listing(store), dict(compacted.manifest.order)
    there = listing(store)
    return there, {commit: names_of(store, paths) for commit, paths in by_commit(there.files).items()}


def keep_figures(store: Path, run: Path) -> None:
    """Write down what the commit of a run comes to, so that its runs need not be read later. Never raises for that."""
    with contextlib.suppress(OSError, StoreError):
        commit, known = commit_of(run), Fingerprints()
        paths = files_by_commit(store).get(commit, [])
        found = load_figures(store, commit, paths, known)
        if paths and found in (Unfit.STALE, Unfit.TORN, Unfit.ABSENT):
            read_and_keep(store, commit, paths, known)


def _figures(
    store: Path, known: Fingerprints, job: tuple[str, Sequence[Path], bool]
) -> tuple[CommitFigures[FigureTable], str]:
    """What the runs of a commit come to, for another process: what they tell stays in the one that reads them."""
    commit, paths, keep = job
    _, figures, unkept = read_and_keep(store, commit, paths, known, keep)
    return figures, unkept


def read_and_keep(
    store: Path, commit: str, paths: Sequence[Path], known: Fingerprints, keep: bool = True
) -> tuple[CommitRuns, CommitFigures[FigureTable], str]:
    """Read the runs of a commit, and write down what they come to, whatever was written down before.

    Returns what they tell, what they come to, and why that could not be written down, '' if it was.
    """
    read, sources = read_stamped(store, paths) if keep else (read_runs(paths), None)
    figures, unkept = figures_of_runs(read, sources or (), known, table_of), ""
    if sources is not None:
        try:
            save_figures(figures_file(store, commit), figures)
        except OSError as error:
            unkept = error.strerror or str(error)
    return read, figures, unkept


def _troubles(
    store: Path,
    missing: Mapping[str, Unfit],
    made: Mapping[str, tuple[CommitFigures[FigureTable], str]],
    files: Mapping[str, Sequence[str]],
) -> Iterator[str]:
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
