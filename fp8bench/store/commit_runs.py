"""Reads the runs of a store by commit, and explains why some runs add nothing to the history.

Commits are read one at a time, because the samples of a store do not fit into memory, but those of one commit do. The
second half of the module finds the runs that an argument of the user selects: an id, a file, a commit or a store.
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
from fp8bench.files import is_not_folder
from fp8bench.model import Cell, Plan, Point, Run, Series
from fp8bench.store.asv.identity import AsvIdentity, parse_machine_identity
from fp8bench.store.points import RunHistoryPoints, extract_history_points, merge_points
from fp8bench.store.runs.listing import (
    RunFileListing,
    find_run,
    list_distinct_runs,
    listing,
    make_search_error,
    run_files,
)
from fp8bench.store.runs.run_file import load_header, load_run_with_lines

NO_REPOSITORY_REASON = "not measured in a git repository"
OUTSIDE_REPOSITORY = f"this was {NO_REPOSITORY_REASON}"
DIRTY_FILES = "the files differed from their commit"
INVALID_COMMIT_OR_START = "their commit or start is not valid"
UNNAMED_MACHINE = "they do not name their machine"
NO_TRACKED_CASE = "the history tracks none of their cases"
MISNAMED_RUN_FILES_REASON = "their files are named for another commit; `fp8bench history verify` names them"
DAMAGED_LINES = "some of their lines are damaged and were left out; `fp8bench history verify` names them"
UNREADABLE_FILE = "they cannot be read; `fp8bench history verify` says why"
_COMMIT_HASH_PATTERN = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")
_RUN_FILE_STEM_PATTERN = re.compile(r".*-([0-9a-f]{8}|nocommit)-[^-]*")


@dataclass(frozen=True)
class TrackedRun:
    """A run and the points that it adds to the history. If the run was read from a file, it has no records."""

    run: Run
    identity: AsvIdentity
    content: RunHistoryPoints

    @property
    def commit(self) -> str:
        return str(self.run.environment.get("commit"))

    @property
    def sort_key(self) -> tuple[float, str]:
        """The start of the run in seconds since 1970, by the clock of its machine, and its id. Runs are sorted by
        these.
        """
        return parse_time(self.run.started).timestamp(), self.run.id

    @property
    def started_at(self) -> int:
        """The start of the run in ms since 1970, as in asv's rows."""
        return int(self.sort_key[0] * 1000)


class CommitRuns(NamedTuple):
    """The tracked runs of one commit, oldest first. Also has the reasons why other runs of the commit were left out,
    and the suites of all runs of the commit.
    """

    runs: tuple[TrackedRun, ...]
    skipped_run_reasons: tuple[str, ...]
    suites: frozenset[str] = frozenset()


def find_commit_prefix(path: Path) -> str:
    """Returns the first 8 digits of the commit of a run file, from the file's name or header. Returns 'nocommit' for
    a run without a commit.
    """
    file_name_match = _RUN_FILE_STEM_PATTERN.fullmatch(path.stem)
    if file_name_match is not None:
        return file_name_match[1]
    header = _load_run_header_or_none(path)
    commit = header.environment.get("commit") if header is not None else None
    return str(commit)[:8] if commit else "nocommit"


def list_files_by_commit(store: Path) -> dict[str, list[Path]]:
    """Returns the run files of a store by commit, one file for each run, oldest first. Commits are in the order of
    their first runs.
    """
    return group_files_by_commit(run_files(store))


def group_files_by_commit(files: Iterable[Path]) -> dict[str, list[Path]]:
    """Groups run files by commit. The files must be sorted newest first. The groups are in the same order as those of
    list_files_by_commit.
    """
    files_by_commit: dict[str, list[Path]] = {}
    for path in reversed(list(files)):
        files_by_commit.setdefault(find_commit_prefix(path), []).append(path)
    return files_by_commit


def read_runs(paths: Sequence[Path]) -> CommitRuns:
    runs = []
    run_exclusion_reasons = []
    suites: set[str] = set()
    for path in paths:
        tracked_run, reason, names = _read_run(path)
        suites |= names
        if reason:
            run_exclusion_reasons.append(reason)
        if tracked_run is not None:
            runs.append(tracked_run)
    return CommitRuns(
        tuple(sorted(runs, key=lambda run: run.sort_key)), tuple(run_exclusion_reasons), frozenset(suites)
    )


def read_runs_of_commit(store: Path, commit: str) -> list[TrackedRun]:
    """Returns the tracked runs of a commit, oldest first. Unreadable files are left out."""
    commit_runs = read_runs(list_files_by_commit(store).get(commit[:8], ()))
    return [tracked_run for tracked_run in commit_runs.runs if tracked_run.commit == commit]


def _read_run(path: Path) -> tuple[TrackedRun | None, str, frozenset[str]]:
    """Reads a run file. Returns the run with its points for the history (None if it has none), why cases are missing
    from the history ('' if none is), and the suites of the run's cases.
    """
    try:
        run, file_lines = load_run_with_lines(path)
    except (StoreError, OSError):
        return None, UNREADABLE_FILE, frozenset()
    tracked_run, reason = extract_tracked_run(run, path)
    # The lost lines may have contained the missing cases.
    if file_lines.has_lost_line and (tracked_run is not None or reason == NO_TRACKED_CASE):
        reason = DAMAGED_LINES
    return tracked_run, reason, frozenset(record.case.workload for record in run.records)


def extract_tracked_run(run: Run, path: Path) -> tuple[TrackedRun | None, str]:
    """Returns a run with its points for the history, or None if it has none. Also returns why cases are missing from
    the history ('' if none is).
    """
    commit = run.environment.get("commit")
    if not isinstance(commit, str):
        unknown_commit_reason = run.environment.get("commit_unknown")
        return (
            None,
            f"git named no commit ({unknown_commit_reason!s:.200})" if unknown_commit_reason else NO_REPOSITORY_REASON,
        )
    if run.environment.get("dirty") is not False:
        return None, DIRTY_FILES
    if explain_outside_history(run):
        return None, INVALID_COMMIT_OR_START
    # Runs of a commit are found by their file names, so later commands would not find this run.
    if find_commit_prefix(path) != commit[:8]:
        return None, MISNAMED_RUN_FILES_REASON
    try:
        tracked_run = track_run(run)
    except Fp8benchError as error:
        return None, str(error).rstrip(".")
    if tracked_run is None:
        return None, UNNAMED_MACHINE
    if not tracked_run.content.points:
        return None, tracked_run.content.why or NO_TRACKED_CASE
    # Drop the records, so that all runs of a commit fit into memory.
    return replace(tracked_run, run=replace(run, records=(), plan=Plan(()))), tracked_run.content.why


def explain_outside_history(run: Run) -> str:
    """Returns why the figures of a run belong to no commit. Returns '' if they belong to a commit."""
    commit = run.environment.get("commit")
    if not isinstance(commit, str) or not _COMMIT_HASH_PATTERN.fullmatch(commit):
        unknown_commit_reason = run.environment.get("commit_unknown")
        if unknown_commit_reason:
            return f"git names no commit here ({unknown_commit_reason!s:.200})"
        return OUTSIDE_REPOSITORY
    is_dirty = run.environment.get("dirty")
    if is_dirty is not False:
        difference = "differ" if is_dirty else "may differ (git does not report it)"
        return f"the files {difference} from commit {commit[:8]}, so these are not its numbers"
    try:
        parse_time(run.started).timestamp()
    except (ValueError, OverflowError):
        return f"its start, {run.started!r:.40}, is not a time"
    return ""


def track_run(run: Run) -> TrackedRun | None:
    run_identity = parse_machine_identity(run.environment.facts)
    return None if run_identity is None else TrackedRun(run, run_identity, extract_history_points(run))


def group_by_interpreter(tracked: Iterable[TrackedRun]) -> list[tuple[TrackedRun, ...]]:
    """Groups runs by commit, machine and interpreter, regardless of the path by which the interpreter was called."""
    groups: list[list[TrackedRun]] = []
    for run in tracked:
        for members in groups:
            if run.commit == members[0].commit and run.identity.home.is_same_interpreter(members[0].identity.home):
                members.append(run)
                break
        else:
            groups.append([run])
    return [tuple(members) for members in groups]


def collect_series(tracked: Sequence[TrackedRun]) -> list[Series]:
    """Returns the series of some runs. If several runs have the same series, the last of these runs defines it."""
    series_by_name: dict[str, Series] = {}
    for run in tracked:
        series_by_name |= {metric_series.name: metric_series for metric_series in run.content.series}
    return list(series_by_name.values())


def merge_commit_points(tracked: Sequence[TrackedRun]) -> dict[tuple[str, Cell], Point]:
    """Returns the merged points of runs by series and cell. The runs must come from one machine and interpreter, and be
    sorted oldest first.
    """
    points = chain.from_iterable(run.content.points for run in tracked)
    return merge_points(list(points), collect_series(tracked))


def parse_time(text: str) -> datetime:
    """Parses a time. Without a time zone it is UTC. Raises ValueError."""
    parsed_time = datetime.fromisoformat(text)
    return parsed_time if parsed_time.tzinfo is not None else parsed_time.replace(tzinfo=UTC)


def find_commit(word: str, folder: Path) -> str | None:
    """Returns the commit that git finds for a word in the repository around a folder, or None."""
    # The word comes from the user. With --end-of-options, git does not read it as an option.
    command = ["git", "rev-parse", "--verify", "--quiet", "--end-of-options", f"{word}^{{commit}}"]
    try:
        result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() or None if result.returncode == 0 else None


_COMMIT_PREFIX_PATTERN = re.compile(r"[0-9a-f]{4,40}")
# An argument of the user that only git can resolve, such as HEAD~1.
_REVISION_PATTERN = re.compile(r"HEAD|.+[~^]")


class ChosenRuns(NamedTuple):
    """The run files that the user's words stand for, one file for each run. `notes` are sentences about files that
    were left out.
    """

    files: Sequence[Path]
    notes: Sequence[str] = ()


def find_runs(words: str, store: Path) -> ChosenRuns:
    """Returns the run files that `words` select. The words are separated by commas. A word is an id, a file, the stem
    of a file's name, 'last', a commit or another store, which selects the runs of its newest commit.

    Raises RunNotFound if a word selects no run, and StoreError if files with the same id differ.
    """
    files: dict[Path, Path] = {}
    notes: list[str] = []
    for word in words.split(","):
        chosen_runs = _find_runs_by_word(word.strip(), store)
        # Several words may select the same file.
        files |= {path.resolve(): path for path in chosen_runs.files}
        notes += chosen_runs.notes
    distinct_runs = list_distinct_runs(files.values()).raise_for_refused_files()
    return ChosenRuns(distinct_runs.files, [*notes, *distinct_runs.notes(distinct_runs.copies)])


def _find_runs_by_word(word: str, store: Path) -> ChosenRuns:
    if not word:
        raise RunNotFound("an empty word names no run. Give an id, a file, a commit, a store, or 'last'.")
    # 1. Try the word as a store's folder, a run file, or a run's id.
    try:
        if Path(word).is_dir():
            return _find_newest_runs(Path(word))
        is_single_run = word == "last" or Path(word).suffix == ".jsonl" or is_not_folder(Path(word))
        runs = RunFileListing(()) if is_single_run else listing(store)
    except (OSError, ValueError) as error:
        raise make_search_error(word, store, error) from None
    if is_single_run or any(word in (path.stem, path.stem.rpartition("-")[2]) for path in runs.all_files):
        return ChosenRuns([find_run(word, store)])
    # 2. Try the word as the first digits of a measured commit.
    if _COMMIT_PREFIX_PATTERN.fullmatch(word):
        chosen_runs = _find_runs_of_commit(word, runs)
        if chosen_runs.files:
            return chosen_runs
    # 3. Try the word as any name that git knows for a commit, or as the beginning of a run's name.
    commit = find_commit(word, Path())
    if commit is None:
        try:
            return ChosenRuns([find_run(word, store)])
        except RunNotFound as error:
            if _REVISION_PATTERN.match(word):
                raise RunNotFound(f"git has no commit {word!r:.80} here. `git log` lists the commits.") from None
            raise RunNotFound(f"{str(error).rstrip('.')}. Or give a measured commit, or a store's folder.") from None
    chosen_runs = _find_runs_of_commit(commit, runs)
    if not chosen_runs.files:
        raise RunNotFound(
            f"{word!r:.80} is the commit {commit[:12]}, but {store} has no run of it. Measure it, or name another."
        )
    return chosen_runs


def _find_runs_of_commit(commit: str, runs: RunFileListing) -> ChosenRuns:
    """Returns the run files of a commit, oldest first. A run is left out if its source files differed from the
    commit, or if it is unknown whether they did.
    """
    # 1. Find the runs by their headers. File names have only the first 8 digits of the commit.
    candidate_files = [path for path in reversed(runs.all_files) if find_commit_prefix(path).startswith(commit[:8])]
    header_by_path = {}
    for path in candidate_files:
        header = _load_run_header_or_none(path) if runs.is_counted(path) else None
        if header is not None and str(header.environment.get("commit")).startswith(commit):
            header_by_path[path] = header
    # 2. Refuse the first digits of several commits, and a commit whose runs all had changed files.
    matching_commits = sorted({str(header.environment.get("commit")) for header in header_by_path.values()})
    if len(matching_commits) > 1:
        raise RunNotFound(
            f"{len(matching_commits)} commits start with {commit}: "
            f"{', '.join(matching_commits[:4])}. Give more digits of one."
        )
    clean_run_files = [path for path, header in header_by_path.items() if header.environment.get("dirty") is False]
    if header_by_path and not clean_run_files:
        raise RunNotFound(
            f"all runs of {commit[:12]} had files that differed from it, so they are not its runs. "
            "Name them by their ids to compare them anyway."
        )
    # 3. If no run is left, the notes on copies and refused files explain why.
    notes = runs.notes(candidate_files)
    if candidate_files and not clean_run_files and notes:
        raise StoreError(f"no run of {commit[:12]} counts: {'; '.join(notes)}.")
    return ChosenRuns(clean_run_files, notes)


def _load_run_header_or_none(path: Path) -> Run | None:
    try:
        return load_header(path)
    except StoreError:
        return None


def _find_newest_runs(store: Path) -> ChosenRuns:
    """Returns the run files of the newest run's commit. If the newest run has no commit, or its source files may have
    differed from it, returns only the file of this run.
    """
    try:
        runs = listing(store)
    except OSError as error:
        raise RunNotFound(f"the store {store} cannot be read ({error.strerror}).") from None
    if runs.newest is None:
        is_store_folder = (store / "runs").is_dir()
        raise RunNotFound(f"{store} {'has no runs yet' if is_store_folder else 'is not a store: it has no runs'}.")
    newest_file = runs.find_original_run_file(runs.newest)
    header = _load_run_header_or_none(newest_file)
    commit = (
        header.environment.get("commit") if header is not None and header.environment.get("dirty") is False else None
    )
    return _find_runs_of_commit(str(commit), runs) if commit is not None else ChosenRuns([newest_file])
