"""The history of a store, opened: figures of all commits from their files, and from the runs where there is none."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from fp8bench.course import Courses
from fp8bench.history.environments import Renamings, load_renamings
from fp8bench.index.figure_files import (
    CommitFigures,
    Fingerprints,
    Newer,
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
    opening = _Opening(store, load_renamings(store))
    files = files_by_commit(store)
    found = {commit: opening.load(commit, paths) for commit, paths in files.items()}
    missing = [commit for commit, one in found.items() if not isinstance(one, CommitFigures)]
    read = sum(len(files[commit]) for commit in missing)
    if read:
        warn(read)
    for commit in missing:
        found[commit] = opening.make(commit, files[commit], keep=found[commit] is not Newer)
    if missing:
        sweep(store, files)
    known = [one for one in found.values() if isinstance(one, CommitFigures)]
    left: Counter[str] = Counter()
    for one in known:
        left.update(one.left)
    tables = tuple(table for one in known for table in one.tables)
    runs, commits = sum(one.runs for one in known), sum(one.runs > 0 for one in known)
    return History(tables, runs, commits, left, read, opening.troubles())


def keep_figures(store: Path, run: Path) -> None:
    """Write down what the commit of a run comes to, so that its runs need not be read later. Never raises for that."""
    with contextlib.suppress(OSError):
        commit = commit_of(run)
        opening = _Opening(store, load_renamings(store))
        paths = files_by_commit(store).get(commit, [])
        if paths and opening.load(commit, paths) in (Stale, Torn, OSError):
            opening.make(commit, paths, keep=True)


def hear_and_keep(store: Path, commit: str, paths: Sequence[Path]) -> Heard:
    """Read the runs of a commit, and write down what they come to, whatever was written down before."""
    opening = _Opening(store, load_renamings(store))
    return opening.hear(commit, paths, keep=True)[0]


@dataclass
class _Opening:
    """What is the same for all commits of a store that is being opened, and what went wrong on the way."""

    store: Path
    renamings: Renamings
    known: Fingerprints = field(default_factory=Fingerprints)
    torn: list[str] = field(default_factory=list)
    newer: list[str] = field(default_factory=list)
    unkept: list[str] = field(default_factory=list)

    def load(self, commit: str, paths: Sequence[Path]) -> CommitFigures | type[Exception]:
        """What the file of a commit says, or what is the matter with it."""
        path = figures_file(self.store, commit)
        try:
            return load_figures(path, self.store, paths, self.renamings, self.known)
        except Torn:
            self.torn.append(path.name)
            return Torn
        except Newer:
            self.newer.append(path.name)
            return Newer
        except Stale:
            return Stale
        except OSError:
            return OSError

    def make(self, commit: str, paths: Sequence[Path], keep: bool) -> CommitFigures:
        """What the runs of a commit come to, read from them; written down if it shall be and can be."""
        return self.hear(commit, paths, keep)[1]

    def hear(self, commit: str, paths: Sequence[Path], keep: bool) -> tuple[Heard, CommitFigures]:
        """The same, with what was read."""
        before = stamps(self.store, paths) if keep else None
        heard = hear(paths)
        figures = figures_heard(heard)
        if before is not None and are_unchanged(self.store, before):
            try:
                save_figures(figures_file(self.store, commit), figures, heard, before, self.known)
            except OSError as error:
                self.unkept += [error.strerror or str(error)] * len(paths)
        return heard, figures

    def troubles(self) -> tuple[str, ...]:
        """Sentences for a person."""
        folder = figures_file(self.store, "x").parent
        found = []
        if self.torn:
            found.append(f"{_some(self.torn)} in {folder} had become unreadable and was made anew from the runs")
        if self.newer:
            found.append(
                f"{_some(self.newer)} in {folder} is a newer fp8bench's and was left alone; the runs were read"
            )
        if len(self.unkept) > _WORTH_KEEPING:
            found.append(
                f"what {len(self.unkept)} runs come to could not be kept in {folder} ({self.unkept[0]}): the next "
                "command reads them again"
            )
        return tuple(found)


def _some(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
