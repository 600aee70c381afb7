"""All runs of a store, a commit at a time: what they tell the history, and why the others tell nothing.

A store holds more samples than fit into memory; those of one commit do.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from fp8bench.errors import Fp8benchError, StoreError
from fp8bench.model import Plan, Run, Series
from fp8bench.store.asv.identity import Identity, from_facts
from fp8bench.store.points import RunPoints, followed
from fp8bench.store.runs.listing import run_files
from fp8bench.store.runs.read import load_head, load_sheet

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
    found: dict[str, list[Path]] = {}
    for path in reversed(list(files)):
        found.setdefault(commit_of(path), []).append(path)
    return found


def read_runs(paths: Sequence[Path], keep: bool = False) -> CommitRuns:
    """Read the runs of one commit. With `keep` what they say is remembered, which fits into memory."""
    kept: list[TrackedRun] = []
    left: list[str] = []
    suites: set[str] = set()
    for path in paths:
        tracked, why, names = _read(path, keep)
        suites |= names
        left += [why] if why else []
        if tracked is not None:
            kept.append(tracked)
    return CommitRuns(tuple(sorted(kept, key=lambda one: one.order)), tuple(left), frozenset(suites))


def runs_of_commit(store: Path, commit: str) -> list[TrackedRun]:
    """What the runs of a commit tell, oldest first. Files that cannot be read are left out."""
    read = read_runs(files_by_commit(store).get(commit[:8], ()), keep=True)
    return [tracked for tracked in read.runs if tracked.commit == commit]


# What files say that did not change since.
_remembered: dict[Path, tuple[tuple[int, ...], TrackedRun, frozenset[str]]] = {}


def _read(path: Path, keep: bool) -> tuple[TrackedRun | None, str, frozenset[str]]:
    """What the run in a file tells, why that is nothing or not everything, and the suites that it has cases of."""
    try:
        known = _remembered.get(path)
        if known is not None and known[0] == _stamp(path):
            return known[1], "", known[2]
        stamp = _stamp(path)
        run, sheet = load_sheet(path)
    except (StoreError, OSError):
        return None, UNREADABLE, frozenset()
    tracked, why = checked_run(run, path)
    why = DAMAGED if sheet.lost and tracked is not None else why
    names = frozenset(record.case.workload for record in run.records)
    if keep and tracked is not None and not why:  # a suite that is not known may be, later
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
    """What a run tells the history; None where it does not say where it was made."""
    identity = from_facts(run.environment.facts)
    return None if identity is None else TrackedRun(run, identity, followed(run))


def by_place(tracked: Iterable[TrackedRun]) -> list[tuple[TrackedRun, ...]]:
    """Those of one commit, machine and interpreter together, by whatever name the interpreter was called."""
    places: list[list[TrackedRun]] = []
    for one in tracked:
        for members in places:
            if one.commit == members[0].commit and one.identity.home.is_same(members[0].identity.home):
                members.append(one)
                break
        else:
            places.append([one])
    return [tuple(members) for members in places]


def series_of_runs(tracked: Sequence[TrackedRun]) -> list[Series]:
    """The series of all runs, each once, the newest definition of it."""
    return list({one.name: one for each in tracked for one in each.content.series}.values())


def moment_of(text: str) -> datetime:
    """A moment; what names no zone is in UTC. Raises ValueError for what is no time."""
    found = datetime.fromisoformat(text)
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)
