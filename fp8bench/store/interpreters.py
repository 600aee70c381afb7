"""Interpreters that count as others: a virtual environment that moved goes on in the line that it began.

The truth says under which path a run was measured, and is not rewritten. `<store>/environments.json` says which paths
count as which: {"counts_as": {OLD: NEW, ...}, "version": 1}.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from fp8bench.errors import AsvFileAbsent, AsvFileError, AsvFileOfOtherVersion, StoreError, UsageError
from fp8bench.files import Damaged, sealed, unsealed
from fp8bench.store.asv.files import existing, read_object, settled_read, write_object
from fp8bench.store.asv.identity import Identity, from_facts, named_by_asv, resolved
from fp8bench.store.asv.results import ResultsFile, load_results, merge_files, results_files, save_results
from fp8bench.store.runs.listing import run_files
from fp8bench.store.runs.read import load_head

VERSION = 1
_KEY = "counts_as"
_INDENT = 2


@dataclass(frozen=True)
class Renamings:
    """`names` leads from a path to the one it counts as, in one step. `trouble` says why a file's were not taken."""

    names: Mapping[str, str] = field(default_factory=dict)
    trouble: str = ""

    def name(self, python: str) -> str:
        """What an interpreter counts as: itself, mostly."""
        return self.names.get(python, python)

    def applied(self, identity: Identity) -> Identity:
        """An identity under the interpreter that its own counts as."""
        python = self.name(identity.python)
        return identity if python == identity.python else Identity(identity.machine, python, resolved(python))

    def adding(self, old: str, new: str) -> Renamings:
        """Also `old` counts as `new` from now on, and with it all that counted as `old`.

        The latest word holds: whatever `new` counted as before, it now stands for itself.
        """
        names = {key: value for key, value in self.names.items() if key != new} | {old: new}
        return Renamings({key: _end(key, names) for key in names})


def environments_of(store: Path) -> Path:
    """Where a store keeps its renamings."""
    return store / "environments.json"


def load_renamings(store: Path) -> Renamings:
    """A store's renamings: none without the file. One that is no such file renames nothing, and `trouble` says so."""
    path = environments_of(store)
    try:
        content = unsealed(read_object(path, VERSION))
    except Damaged as error:
        return _none(f"{path} is broken: {error} (one that was changed on purpose has no 'sum')")
    except AsvFileAbsent:
        return Renamings()
    except AsvFileOfOtherVersion:
        return _none(f"{path} is of a version that this fp8bench does not know")
    except AsvFileError as error:
        return _none(str(error).rstrip("."))
    names = content.get(_KEY)
    if not isinstance(names, dict) or not all(isinstance(one, str) and one for pair in names.items() for one in pair):
        return _none(f"{path} is broken: its {_KEY!r} is no object of paths")
    circle = next((key for key in names if _end(key, names) == key), None)
    if circle is not None:
        return _none(f"{path} is broken: {circle!r:.200} counts as itself in the end")
    return Renamings({key: _end(key, names) for key in names})


def save_renamings(store: Path, renamings: Renamings) -> None:
    """Write them in one step."""
    said = sealed({_KEY: dict(sorted(renamings.names.items()))})
    write_object(environments_of(store), {**said, "version": VERSION}, _INDENT)


def _none(why: str) -> Renamings:
    return Renamings(trouble=f"{why}, so that no interpreter counts as another.")


def _end(python: str, names: Mapping[str, str]) -> str:
    """Where a path leads in the end; itself if it leads in a circle."""
    seen = {python}
    name = names[python]
    while name in names:
        if name in seen:
            return python
        seen.add(name)
        name = names[name]
    return name


_KIND = "existing-py"


def interpreters_of_runs(store: Path) -> dict[Path, str]:
    """The interpreter that each run was measured under, whatever it counts as."""
    found: dict[Path, str] = {}
    for path in run_files(store):
        with contextlib.suppress(StoreError):
            identity = from_facts(load_head(path).environment.facts)
            if identity is not None:
                found[path] = identity.python
    return found


def interpreters_of_results(results: Path) -> set[str]:
    """Every interpreter that asv's files name."""
    return {file.python for _, file in _files(results)}


def renamed(renamings: Renamings, pairs: Iterable[tuple[str, str]], known: Iterable[str]) -> Renamings:
    """Also OLD counts as NEW from now on, for each pair in turn.

    Raises UsageError for an OLD that nothing was measured under, and for one that counts as another already.
    """
    if renamings.trouble:
        raise StoreError(f"{renamings.trouble} Fix it, or move it away, and try again.")
    names = list(dict.fromkeys((*known, *renamings.names.values())))
    for old_word, new_word in pairs:
        given = f"--rename-env {old_word}={new_word}"
        old = _among(old_word, names)
        if old is None:
            listed = "".join(f"\n  {name}" for name in names) or " none"
            raise UsageError(f"{given}: nothing was measured under {old_word!r:.200}. Known are:{listed}")
        new = _named(new_word, names, given)
        if renamings.name(new) != old:  # else the two change places
            new = renamings.name(new)
        counted = renamings.name(old)
        if old == new:
            raise UsageError(f"{given}: both are {old}. Give two different interpreters.")
        if counted not in (old, new):
            raise UsageError(f"{given}: {old} counts as {counted} already, which goes on as another by {counted}=NEW.")
        if counted != new:
            renamings = renamings.adding(old, new)
        names.append(new)  # which the next pair may lead on from
    return renamings


def fold(results: Path, renamings: Renamings) -> tuple[list[Path], list[str]]:
    """Put asv's files of interpreters that count as others into those of the others; for holders of the lock.

    Returns the files that have more now, and sentences on those that could not be folded. A file goes only after the
    one that holds its rows is written.
    """
    written: list[Path] = []
    failed: list[str] = []
    for path, file in _files(results):
        python = renamings.name(file.python)
        if python == file.python:
            continue
        identity = Identity(file.params, python)
        target = path.with_name(identity.file_name(file.commit_hash))
        moved = replace(file, python=python, env_name=identity.env_name, params={**file.params, "python": python})
        try:
            here = existing(load_results, target, [])
            save_results(target, moved if here is None else merge_files(here, moved))
            path.unlink()
        except (AsvFileError, OSError) as error:
            failed.append(f"{path} was not folded into {target.name} ({error}).")
            continue
        written.append(target)
    return written, failed


def _files(results: Path) -> list[tuple[Path, ResultsFile]]:
    """asv's files of interpreters that were there already, as far as they can be read."""
    found = []
    for path in results_files(results, "*/*.json"):
        with contextlib.suppress(AsvFileError):
            file = settled_read(load_results, path)
            if file.env_name.startswith(_KIND):
                found.append((path, file))
    return found


def _named(word: str, names: Sequence[str], given: str) -> str:
    """The interpreter that is meant, which may be one that nothing was measured under yet."""
    found = _among(word, names)
    if found is not None:
        return found
    if word.startswith(_KIND) or not (Path(word).is_absolute() or Path(word).is_file()):
        raise UsageError(f"{given}: {word!r:.200} is no path, and nothing was measured under it. Give a whole path.")
    return named_by_asv(word)


def _among(word: str, names: Sequence[str]) -> str | None:
    exact = [name for name in names if word in (name, Identity({}, name).env_name)]
    return next(iter([*exact, *(name for name in names if resolved(word) == resolved(name))]), None)
