"""All runs of a store, a commit at a time: what they tell the history, and why the others tell nothing.

A store holds more samples than fit into memory; those of one commit do. Also which runs a word means: an id, a file, a
commit, a whole store; and which commits git knows.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from fp8bench.errors import Fp8benchError, RunNotFound, StoreError
from fp8bench.model import Cell, Plan, Point, Run, Series
from fp8bench.store.asv.identity import Identity, from_facts
from fp8bench.store.points import RunPoints, followed, merged
from fp8bench.store.runs.listing import Listing, each_once, find_run, index_of, listing, run_files, without_runs
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
# Of as many run files this process remembers what they tell.
_MOST_REMEMBERED = 1000
_NAMED_FOR = re.compile(r".*-([0-9a-f]{8}|nocommit)-[^-]*")


@dataclass(frozen=True)
class TrackedRun:
    """A run, and what it tells the history. Of one that was read from its file for that, only the header is kept."""

    run: Run
    identity: Identity
    content: RunPoints

    @property
    def commit(self) -> str:
        return str(self.run.environment.get("commit"))

    @property
    def order(self) -> tuple[float, str]:
        """When it began, in seconds since 1970, as the clock of its machine had it; the id, where two began at once."""
        return moment_of(self.run.started).timestamp(), self.run.id

    @property
    def started_at(self) -> int:
        """When it began, as rows of asv's say it: in ms since 1970."""
        return int(self.order[0] * 1000)


class CommitRuns(NamedTuple):
    """What the runs of one commit tell, oldest first, why others tell nothing, and the suites they were asked about."""

    runs: tuple[TrackedRun, ...]
    left: tuple[str, ...]
    suites: frozenset[str] = frozenset()


def commit_of(path: Path) -> str:
    """The beginning of the commit that a run file is of, which its name says; 'nocommit' for one that is of none."""
    named = _NAMED_FOR.fullmatch(path.stem)
    if named is not None:
        return named[1]
    try:
        commit = load_head(path).environment.get("commit")
    except StoreError:
        return "nocommit"
    return str(commit)[:8] if commit else "nocommit"


def files_by_commit(store: Path) -> dict[str, list[Path]]:
    """A file for each run of each commit, oldest first; the commits in the order of their first runs."""
    return by_commit(run_files(store))


def by_commit(files: Iterable[Path]) -> dict[str, list[Path]]:
    """The same of run files, newest first."""
    commits: dict[str, list[Path]] = {}
    for path in reversed(list(files)):
        commits.setdefault(commit_of(path), []).append(path)
    return commits


def read_runs(
    paths: Sequence[Path], keep: bool = False, content_of: Callable[[Path], bytes] | None = None
) -> CommitRuns:
    """Read the runs of one commit. With `keep` what they say is remembered, which fits into memory; `content_of` reads
    a file for who wants to see it, too."""
    kept: list[TrackedRun] = []
    left: list[str] = []
    suites: set[str] = set()
    for path in paths:
        tracked, why, names = _read(path, keep, content_of)
        suites |= names
        left += [why] if why else []
        if tracked is not None:
            kept.append(tracked)
    return CommitRuns(tuple(sorted(kept, key=lambda run: run.order)), tuple(left), frozenset(suites))


def runs_of_commit(store: Path, commit: str) -> list[TrackedRun]:
    """What the runs of a commit tell, oldest first. Files that cannot be read are left out."""
    read = read_runs(files_by_commit(store).get(commit[:8], ()), keep=True)
    return [tracked for tracked in read.runs if tracked.commit == commit]


# What files say that did not change since.
_remembered: dict[Path, tuple[tuple[int, ...], TrackedRun, frozenset[str]]] = {}


def _read(
    path: Path, keep: bool, content_of: Callable[[Path], bytes] | None
) -> tuple[TrackedRun | None, str, frozenset[str]]:
    """What the run in a file tells, why that is nothing or not everything, and the suites that it has cases of."""
    try:
        content = content_of(path) if content_of is not None else None
        stamp, known = _stamp(path), _remembered.get(path)
        if known is not None and known[0] == stamp:
            return known[1], "", known[2]
        run, sheet = load_sheet(path, content)
    except (StoreError, OSError):
        return None, UNREADABLE, frozenset()
    tracked, why = checked_run(run, path)
    why = DAMAGED if sheet.lost and tracked is not None else why
    names = frozenset(record.case.workload for record in run.records)
    if keep and content is None and tracked is not None and not why:  # a suite that is not known may be, later
        _remember(path, stamp, tracked, names)
    return tracked, why, names


def remembered(run: Run) -> TrackedRun | None:
    """What a run tells that was just read from its file, which then need not be read again."""
    tracked = tracked_run(run)
    with contextlib.suppress(OSError):
        if tracked is not None and run.path and tracked.content.points and not tracked.content.why:
            names = frozenset(record.case.workload for record in run.records)
            _remember(Path(run.path), _stamp(Path(run.path)), _header(tracked), names)
    return tracked


def _remember(path: Path, stamp: tuple[int, ...], tracked: TrackedRun, names: frozenset[str]) -> None:
    if len(_remembered) >= _MOST_REMEMBERED:
        _remembered.clear()
    _remembered[path] = (stamp, tracked, names)


def _stamp(path: Path) -> tuple[int, ...]:
    status = path.stat()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _header(tracked: TrackedRun) -> TrackedRun:
    """Without the records: points are made of samples at once, so that a commit's runs need not all fit into memory."""
    return replace(tracked, run=replace(tracked.run, records=(), plan=Plan(())))


def checked_run(run: Run, path: Path) -> tuple[TrackedRun | None, str]:
    """What a run tells, if anything, and why it tells nothing or not everything. Its records are let go."""
    commit = run.environment.get("commit")
    if not isinstance(commit, str):
        why = run.environment.get("commit_unknown")
        return None, f"git named no commit ({why!s:.200})" if why else NO_REPOSITORY
    if run.environment.get("dirty") is not False:
        return None, DIRTY
    if why_not(run):
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


def why_not(run: Run) -> str:
    """Why a run's numbers are no commit's; '' if they are."""
    commit = run.environment.get("commit")
    if not isinstance(commit, str) or not _HASH.fullmatch(commit):
        why = run.environment.get("commit_unknown")
        return f"git names no commit here ({why!s:.200})" if why else "this was not measured in a git repository"
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
    return None if identity is None else TrackedRun(run, identity, followed(run))


def by_place(tracked: Iterable[TrackedRun]) -> list[tuple[TrackedRun, ...]]:
    """Those of one commit, machine and interpreter together, by whatever name the interpreter was called."""
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
    return list({series.name: series for each in tracked for series in each.content.series}.values())


def commit_points(tracked: Sequence[TrackedRun]) -> dict[tuple[str, Cell], Point]:
    """What runs of one commit, machine and interpreter come to, oldest first, by series and cell."""
    return merged([point for run in tracked for point in run.content.points], series_of_runs(tracked))


def moment_of(text: str) -> datetime:
    """A moment; what names no zone is in UTC. Raises ValueError for what is no time."""
    moment = datetime.fromisoformat(text)
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


def commit_named(word: str, folder: Path) -> str | None:
    """The commit that a word means in the repository of a folder ('HEAD', a beginning); None where it means none."""
    command = ["git", "rev-parse", "--verify", "--quiet", "--end-of-options", f"{word}^{{commit}}"]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def gone(commits: Iterable[str], folder: Path) -> frozenset[str]:
    """Those that the repository of a folder does not have; none outside of a repository, or where git is not there."""
    asked = list(dict.fromkeys(commits))
    if not asked:
        return frozenset()
    command = ["git", "cat-file", "--batch-check"]
    try:
        done = subprocess.run(
            command, cwd=folder, input="\n".join(asked) + "\n", capture_output=True, text=True, errors="replace",
            timeout=60, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return frozenset()
    lines = done.stdout.splitlines() if done.returncode == 0 else []
    return frozenset(line.removesuffix(" missing") for line in lines if line.endswith(" missing"))


_COMMIT = re.compile(r"[0-9a-f]{4,40}")


class Meant(NamedTuple):
    """Run files, a run each, and sentences on files that were meant and do not count."""

    files: Sequence[Path]
    notes: Sequence[str] = ()


def runs_meant(words: str, store: Path) -> Meant:
    """The runs that are meant, each once: by one word, or by several with commas between.

    A word is a run (id, file's stem, path, 'last'), a commit (its beginning, or what git calls it), or another store,
    which stands for the newest commit in it. Raises RunNotFound where it means nothing, StoreError where nobody knows
    which of several files is the run.
    """
    meanings = [_of_word(word.strip(), store) for word in words.split(",")]
    named = {path.resolve(): path for meant in meanings for path in meant.files}
    once = each_once(named.values()).none_refused()
    return Meant(once.files, [*(note for meant in meanings for note in meant.notes), *once.notes(once.copies)])


def _of_word(word: str, store: Path) -> Meant:
    if not word:
        raise RunNotFound("an empty word means no run. Give an id, a file, a commit, a store, or 'last'.")
    try:
        if Path(word).is_dir():
            return _newest_of(Path(word))
        single = word == "last" or Path(word).is_file()
        there = Listing(()) if single else listing(store)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise RunNotFound(f"looking for {word!r:.80} in {str(store)!r:.80} failed ({why}).") from None
    if single or any(word in (path.stem, path.stem.rpartition("-")[2]) for path in there.everything):
        return Meant([find_run(word, store)])
    if _COMMIT.fullmatch(word):
        kept = _of_commit(word, there)
        if kept.files:
            return kept
    commit = commit_named(word, Path())
    if commit is None:
        try:
            return Meant([find_run(word, store)])
        except RunNotFound as error:
            why = str(error).rstrip(".")
            raise RunNotFound(f"{why}, or a commit that was measured, or a store's folder.") from None
    kept = _of_commit(commit, there)
    if not kept.files:
        raise RunNotFound(
            f"{word!r:.80} is the commit {commit[:12]}, of which {store} has no run. Measure it, or name another."
        )
    return kept


def _of_commit(commit: str, there: Listing) -> Meant:
    """The runs of a commit, oldest first; those whose files differed from it are of none."""
    named = [path for path in reversed(there.everything) if commit_of(path).startswith(commit[:8])]
    heads = [(path, head) for path in named if there.counts(path) and (head := _head(path)) is not None]
    alike = [(path, head) for path, head in heads if str(head.environment.get("commit")).startswith(commit)]
    clean = [path for path, head in alike if head.environment.get("dirty") is False]
    if alike and not clean:
        raise RunNotFound(
            f"all runs of {commit[:12]} were made with files that differed from it, so that they are not its runs. "
            "Name them by their ids to compare them all the same."
        )
    notes = there.notes(named)
    if named and not clean and notes:
        raise StoreError(f"no run of {commit[:12]} is left: {'; '.join(notes)}.")
    return Meant(clean, notes)


def _head(path: Path) -> Run | None:
    try:
        return load_head(path)
    except StoreError:
        return None


def _newest_of(store: Path) -> Meant:
    """The runs of the commit that was measured last in a store; the newest alone if it is of no commit."""
    try:
        there = listing(store)
    except OSError as error:
        raise RunNotFound(f"the store {store} cannot be read ({error.strerror}).") from None
    if there.newest is None:
        known = (store / "runs").is_dir() or index_of(store).exists()
        raise RunNotFound(f"{store} {without_runs(store) if known else 'is no store: it has no runs'}.")
    newest = there.that_counts(there.newest)
    head = _head(newest)
    commit = head.environment.get("commit") if head is not None and head.environment.get("dirty") is False else None
    return _of_commit(str(commit), there) if commit is not None else Meant([newest])
