"""All runs of a store, a commit at a time: what they tell the history, and why the others tell nothing.

A store holds more samples than fit into memory; those of one commit do.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from fp8bench.errors import Fp8benchError, StoreError
from fp8bench.history.runs import load_head, load_run, run_files
from fp8bench.model import Plan, Run
from fp8bench.view import Told, tell, why_not

NO_REPOSITORY = "not measured in a git repository"
DIRTY = "the files differed from their commit"
NO_COMMIT = "their commit or their start is none"
NO_MACHINE = "they do not say on which machine they were made"
NO_CASE = "none of their cases is in a declared grid"
TWICE = "the same run is there twice"
MISNAMED = "their files are named for another commit; `fp8bench history verify` names them"
UNREADABLE = "they cannot be read; `fp8bench history verify` says why"
_NAMED_FOR = re.compile(r".*-([0-9a-f]{8}|nocommit)-[^-]*")


class Left(NamedTuple):
    """A run file that tells nothing, or not everything."""

    path: Path
    why: str


class Heard(NamedTuple):
    """What the runs of one commit tell, oldest first, what was left out, and the suites they were asked about."""

    told: tuple[Told, ...]
    left: tuple[Left, ...]
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
    """The run files of each commit, oldest first; the commits in the order of their first runs."""
    found: dict[str, list[Path]] = {}
    for path in reversed(list(run_files(store))):
        found.setdefault(commit_of(path), []).append(path)
    return found


def hear(paths: Iterable[Path]) -> Heard:
    """Read the runs of one commit, each once."""
    heard: dict[str, Told] = {}
    left: list[Left] = []
    suites: set[str] = set()
    for path in paths:
        try:
            run = load_run(path)
            suites |= {record.case.workload for record in run.records}
            told, why = hear_run(run, path)
        except StoreError:
            told, why = None, UNREADABLE
        left += [Left(path, why)] if why else []
        known = heard.get(told.run.id) if told is not None else None
        left += [Left(path, TWICE)] if known is not None else []
        if told is not None and (known is None or len(known.content.points) < len(told.content.points)):
            heard[told.run.id] = told
    return Heard(tuple(sorted(heard.values(), key=lambda one: one.order)), tuple(left), frozenset(suites))


def hear_run(run: Run, path: Path) -> tuple[Told | None, str]:
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
        told = tell(run)
    except Fp8benchError as error:
        return None, str(error).rstrip(".")
    if told is None:
        return None, NO_MACHINE
    if not told.content.points:
        return None, told.content.why or NO_CASE
    return replace(told, run=replace(run, records=(), plan=Plan(()))), told.content.why


def by_place(told: Iterable[Told]) -> list[tuple[Told, ...]]:
    """Those of one commit, machine and interpreter together, by whatever name the interpreter was called."""
    places: list[list[Told]] = []
    for one in told:
        home = next((members for members in places if one.is_of(members[0].place)), None)
        if home is None:
            places.append([one])
        else:
            home.append(one)
    return [tuple(members) for members in places]
