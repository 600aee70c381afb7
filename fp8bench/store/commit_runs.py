"""The runs of a store by commit: what they add to the history, and why other runs add nothing.

The samples of a store do not fit into memory, those of one commit do, so commits are read one at a time. The second
half finds the runs that a word means: an id, a file, a commit, another store.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from fp8bench.errors import Fp8benchError, RunNotFound, StoreError
from fp8bench.files import is_no_folder
from fp8bench.model import Cell, Plan, Point, Run, Series
from fp8bench.store.asv.identity import Identity, from_facts
from fp8bench.store.points import RunPoints, merge_points, points_of_run
from fp8bench.store.runs.listing import Listing, each_once, find_run, listing, run_files
from fp8bench.store.runs.run_file import load_head, load_sheet

NO_REPOSITORY = "not measured in a git repository"
DIRTY = "the files differed from their commit"
NO_COMMIT = "their commit or their start is none"
NO_MACHINE = "they do not say on which machine they were made"
NO_CASE = "none of their cases is in a declared grid"
MISNAMED = "their files are named for another commit; `fp8bench history verify` names them"
DAMAGED = "lines of them are damaged and were left out; `fp8bench history verify` names them"
UNREADABLE = "they cannot be read; `fp8bench history verify` says why"
_HASH = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")
_NAMED_FOR = re.compile(r".*-([0-9a-f]{8}|nocommit)-[^-]*")


@dataclass(frozen=True)
class TrackedRun:
    """A run and what it adds to the history. One that was read from a file has its header only."""

    run: Run
    identity: Identity
    content: RunPoints

    @property
    def commit(self) -> str:
        return str(self.run.environment.get("commit"))

    @property
    def order(self) -> tuple[float, str]:
        """Its start in seconds since 1970, by the clock of its machine, then its id."""
        return moment_of(self.run.started).timestamp(), self.run.id

    @property
    def started_at(self) -> int:
        """Its start in ms since 1970, as in asv's rows."""
        return int(self.order[0] * 1000)


class CommitRuns(NamedTuple):
    """The runs of one commit, oldest first, why other runs of it were left out, and the suites they have cases of."""

    runs: tuple[TrackedRun, ...]
    left: tuple[str, ...]
    suites: frozenset[str] = frozenset()


def commit_of(path: Path) -> str:
    """Returns the first 8 digits of a run file's commit, from its name; 'nocommit' if it has none."""
    named = _NAMED_FOR.fullmatch(path.stem)
    if named is not None:
        return named[1]
    head = _load_head(path)
    commit = head.environment.get("commit") if head is not None else None
    return str(commit)[:8] if commit else "nocommit"


def files_by_commit(store: Path) -> dict[str, list[Path]]:
    """Returns one file for each run, oldest first, by commit, in the order of the commits' first runs."""
    return by_commit(run_files(store))


def by_commit(files: Iterable[Path]) -> dict[str, list[Path]]:
    """Like files_by_commit, from run files that are sorted newest first."""
    commits: dict[str, list[Path]] = {}
    for path in reversed(list(files)):
        commits.setdefault(commit_of(path), []).append(path)
    return commits


def read_runs(paths: Sequence[Path]) -> CommitRuns:
    runs = []
    reasons = []
    suites: set[str] = set()
    for path in paths:
        tracked, reason, names = _read_run(path)
        suites |= names
        if reason:
            reasons.append(reason)
        if tracked is not None:
            runs.append(tracked)
    return CommitRuns(tuple(sorted(runs, key=lambda run: run.order)), tuple(reasons), frozenset(suites))


def runs_of_commit(store: Path, commit: str) -> list[TrackedRun]:
    """Returns what the runs of a commit add to the history, oldest first, without unreadable files."""
    read = read_runs(files_by_commit(store).get(commit[:8], ()))
    return [tracked for tracked in read.runs if tracked.commit == commit]


def _read_run(path: Path) -> tuple[TrackedRun | None, str, frozenset[str]]:
    """Returns what a run adds to the history, why that is nothing or not all, and the suites that it has cases of."""
    try:
        run, sheet = load_sheet(path)
    except (StoreError, OSError):
        return None, UNREADABLE, frozenset()
    tracked, reason = check_run(run, path)
    if sheet.lost and (tracked is not None or reason == NO_CASE):
        reason = DAMAGED
    return tracked, reason, frozenset(record.case.workload for record in run.records)


def _header(tracked: TrackedRun) -> TrackedRun:
    """Drops the records, so that the runs of a commit need not fit into memory together."""
    return replace(tracked, run=replace(tracked.run, records=(), plan=Plan(())))


def check_run(run: Run, path: Path) -> tuple[TrackedRun | None, str]:
    """Returns what a run adds to the history, if anything, and why that is nothing or not all."""
    commit = run.environment.get("commit")
    if not isinstance(commit, str):
        unknown = run.environment.get("commit_unknown")
        return None, f"git named no commit ({unknown!s:.200})" if unknown else NO_REPOSITORY
    if run.environment.get("dirty") is not False:
        return None, DIRTY
    if why_outside_history(run):
        return None, NO_COMMIT
    if commit_of(path) != commit[:8]:
        return None, MISNAMED
    try:
        tracked = tracked_run(run)
    except Fp8benchError as error:
        return None, str(error).rstrip(".")
    if tracked is None:
        return None, NO_MACHINE
    if not tracked.content.points:
        return None, tracked.content.why or NO_CASE
    return _header(tracked), tracked.content.why


def why_outside_history(run: Run) -> str:
    """Returns why a run's figures belong to no commit; '' if they do."""
    commit = run.environment.get("commit")
    if not isinstance(commit, str) or not _HASH.fullmatch(commit):
        unknown = run.environment.get("commit_unknown")
        if unknown:
            return f"git names no commit here ({unknown!s:.200})"
        return "this was not measured in a git repository"
    dirty = run.environment.get("dirty")
    if dirty is not False:
        differ = "differ" if dirty else "may differ (git does not say)"
        return f"the files {differ} from commit {commit[:8]}, so that these are not its numbers"
    try:
        moment_of(run.started).timestamp()
    except (ValueError, OverflowError):
        return f"its start, {run.started!r:.40}, is no time"
    return ""


def tracked_run(run: Run) -> TrackedRun | None:
    identity = from_facts(run.environment.facts)
    return None if identity is None else TrackedRun(run, identity, points_of_run(run))


def by_place(tracked: Iterable[TrackedRun]) -> list[tuple[TrackedRun, ...]]:
    """Groups runs by commit, machine and interpreter, whatever path the interpreter was called by."""
    places: list[list[TrackedRun]] = []
    for run in tracked:
        for members in places:
            if run.commit == members[0].commit and run.identity.home.is_same(members[0].identity.home):
                members.append(run)
                break
        else:
            places.append([run])
    return [tuple(members) for members in places]


def series_of_runs(tracked: Sequence[TrackedRun]) -> list[Series]:
    """Returns each series once, as the last run defines it."""
    by_name: dict[str, Series] = {}
    for run in tracked:
        by_name |= {series.name: series for series in run.content.series}
    return list(by_name.values())


def commit_points(tracked: Sequence[TrackedRun]) -> dict[tuple[str, Cell], Point]:
    """Combines the points of runs of one place, oldest first, by series and cell."""
    points = chain.from_iterable(run.content.points for run in tracked)
    return merge_points(list(points), series_of_runs(tracked))


def moment_of(text: str) -> datetime:
    """Reads a time, which is UTC if it names no zone. Raises ValueError."""
    moment = datetime.fromisoformat(text)
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


def find_commit(word: str, folder: Path) -> str | None:
    """Returns the commit that git finds for a word in a folder's repository; None if it finds none."""
    command = ["git", "rev-parse", "--verify", "--quiet", "--end-of-options", f"{word}^{{commit}}"]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


_COMMIT = re.compile(r"[0-9a-f]{4,40}")


class ChosenRuns(NamedTuple):
    """The run files that a word means, one for each run, and sentences on files that do not count."""

    files: Sequence[Path]
    notes: Sequence[str] = ()


def find_runs(words: str, store: Path) -> ChosenRuns:
    """Returns the runs that a word, or several with commas, means: ids, files, stems, 'last', commits, other stores.

    Another store stands for its newest commit. Raises RunNotFound if a word means nothing, StoreError if files with one
    id differ.
    """
    files: dict[Path, Path] = {}
    notes: list[str] = []
    for word in words.split(","):
        chosen = _find_word(word.strip(), store)
        files |= {path.resolve(): path for path in chosen.files}
        notes += chosen.notes
    distinct = each_once(files.values()).check_refusals()
    return ChosenRuns(distinct.files, [*notes, *distinct.notes(distinct.copies)])


def _find_word(word: str, store: Path) -> ChosenRuns:
    if not word:
        raise RunNotFound("an empty word means no run. Give an id, a file, a commit, a store, or 'last'.")
    # 1. A store's folder, a file, or the id of a run.
    try:
        if Path(word).is_dir():
            return _newest_of(Path(word))
        single = word == "last" or is_no_folder(Path(word))
        runs = Listing(()) if single else listing(store)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise RunNotFound(f"looking for {word!r:.80} in {str(store)!r:.80} failed ({reason}).") from None
    if single or any(word in (path.stem, path.stem.rpartition("-")[2]) for path in runs.everything):
        return ChosenRuns([find_run(word, store)])
    # 2. The digits of a commit that was measured.
    if _COMMIT.fullmatch(word):
        chosen = _runs_of_hash(word, runs)
        if chosen.files:
            return chosen
    # 3. Any other word of git's for a commit, or the beginning of a run's name.
    commit = find_commit(word, Path())
    if commit is None:
        try:
            return ChosenRuns([find_run(word, store)])
        except RunNotFound as error:
            reason = str(error).rstrip(".")
            raise RunNotFound(f"{reason}, or a commit that was measured, or a store's folder.") from None
    chosen = _runs_of_hash(commit, runs)
    if not chosen.files:
        raise RunNotFound(
            f"{word!r:.80} is the commit {commit[:12]}, of which {store} has no run. Measure it, or name another."
        )
    return chosen


def _runs_of_hash(commit: str, runs: Listing) -> ChosenRuns:
    """Returns the runs of a commit, oldest first; a run whose files differed from the commit is not one of them."""
    named = [path for path in reversed(runs.everything) if commit_of(path).startswith(commit[:8])]
    heads = {}
    for path in named:
        head = _load_head(path) if runs.counts(path) else None
        if head is not None and str(head.environment.get("commit")).startswith(commit):
            heads[path] = head
    commits = sorted({str(head.environment.get("commit")) for head in heads.values()})
    if len(commits) > 1:
        raise RunNotFound(f"{commit} begins {len(commits)} commits, {', '.join(commits[:4])}. Give more of one.")
    clean = [path for path, head in heads.items() if head.environment.get("dirty") is False]
    if heads and not clean:
        raise RunNotFound(
            f"all runs of {commit[:12]} were made with files that differed from it, so that they are not its runs. "
            "Name them by their ids to compare them all the same."
        )
    notes = runs.notes(named)
    if named and not clean and notes:
        raise StoreError(f"no run of {commit[:12]} is left: {'; '.join(notes)}.")
    return ChosenRuns(clean, notes)


def _load_head(path: Path) -> Run | None:
    try:
        return load_head(path)
    except StoreError:
        return None


def _newest_of(store: Path) -> ChosenRuns:
    """Returns the runs of the commit that was measured last in a store, or the newest run if it has no commit."""
    try:
        runs = listing(store)
    except OSError as error:
        raise RunNotFound(f"the store {store} cannot be read ({error.strerror}).") from None
    if runs.newest is None:
        is_store = (store / "runs").is_dir()
        raise RunNotFound(f"{store} {'has no runs yet' if is_store else 'is no store: it has no runs'}.")
    newest = runs.that_counts(runs.newest)
    head = _load_head(newest)
    commit = head.environment.get("commit") if head is not None and head.environment.get("dirty") is False else None
    return _runs_of_hash(str(commit), runs) if commit is not None else ChosenRuns([newest])
