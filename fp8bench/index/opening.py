"""The history of a store, opened: figures of all commits from their files, and from the runs where there is none."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from fp8bench.course import Courses
from fp8bench.history.environments import Renamings, load_renamings
from fp8bench.index.figure_files import (
    CommitFigures,
    Fingerprints,
    Newer,
    Richer,
    Stale,
    Torn,
    are_unchanged,
    figures_file,
    figures_heard,
    load_figures,
    save_figures,
    stamps,
    sweep,
)
from fp8bench.index.lines import Lines, lines_of, names_in
from fp8bench.index.processes import spread
from fp8bench.index.tables import Table
from fp8bench.model import Ending
from fp8bench.telling import Heard, commit_of, files_by_commit, hear

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
        """What the courses are called, sorted; one name may be that of several places."""
        return names_in(self.tables)

    @cached_property
    def lines(self) -> Lines:
        """All courses as rows."""
        return lines_of(self.tables, lambda _: True)

    def courses(self, wanted: Callable[[str], bool]) -> Courses:
        """The courses whose name is wanted, as `read_courses` has them."""
        lines = lines_of(self.tables, wanted)
        return Courses(tuple(map(lines.course, lines.lines)), self.runs, self.commits, self.left)

    def endings(self, wanted: Callable[[str], bool]) -> list[Ending]:
        """How the courses end whose name is wanted; they have no figures."""
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
            _heard(_Job(store, commit, tuple(paths), True, known))


def hear_and_keep(store: Path, commit: str, paths: Sequence[Path]) -> Heard:
    """Read the runs of a commit, and write down what they come to, whatever was written down before."""
    return _heard(_Job(store, commit, tuple(paths), True, Fingerprints()))[0]


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
    return _heard(job)[1]


def _heard(job: _Job) -> tuple[Heard, _Made]:
    """What the runs of a commit tell, and what they come to."""
    before = stamps(job.store, job.paths) if job.keep else None
    heard = hear(job.paths)
    figures = figures_heard(heard)
    if before is None or not are_unchanged(job.store, before):
        return heard, _Made(figures, "")
    try:
        save_figures(figures_file(job.store, job.commit), figures, heard, before, job.known)
    except OSError as error:
        return heard, _Made(figures, error.strerror or str(error))
    return heard, _Made(figures, "")


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
