"""An interpreter counts as another from now on: the store keeps its word, asv's files of the old one are folded in."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from fp8bench.errors import AsvFileError, StoreError, UsageError
from fp8bench.history.asv_files import settled_read
from fp8bench.history.asv_merging import merge_files, standing
from fp8bench.history.asv_results import ResultsFile, load_results, save_results
from fp8bench.history.environments import Renamings
from fp8bench.history.runs import load_head, run_files
from fp8bench.identity import Identity, from_facts, named_by_asv, same_interpreter

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
        raise StoreError(f"{renamings.trouble} Mend it, or move it away, and try again.")
    names = list(dict.fromkeys((*known, *renamings.names.values())))
    for old_word, new_word in pairs:
        given = f"--rename-env {old_word}={new_word}"
        old, new = _known(old_word, names, given), _named(new_word, names, given)
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
            here = standing(target)
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
    for path in sorted(results.glob("*/*.json")):
        if path.name != "machine.json":
            with contextlib.suppress(AsvFileError):
                file = settled_read(load_results, path)
                if file.env_name.startswith(_KIND):
                    found.append((path, file))
    return found


def _known(word: str, names: Sequence[str], given: str) -> str:
    """The interpreter that was measured under and is meant: by its path, another name of its file, or asv's name."""
    found = _among(word, names)
    if found is None:
        listed = "".join(f"\n  {name}" for name in names) or " none"
        raise UsageError(f"{given}: nothing was measured under {word!r:.200}. Known are:{listed}")
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
    return next(iter([*exact, *(name for name in names if same_interpreter(word, name))]), None)
