"""Interpreters that count as others: a virtual environment that moved goes on in the line that it began.

The truth says under which path a run was measured, and is not rewritten. `<store>/environments.json` says which paths
count as which: {"counts_as": {OLD: NEW, ...}, "version": 1}.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fp8bench.errors import AsvFileAbsent, AsvFileError, AsvFileOfOtherVersion
from fp8bench.history.asv_files import read_object, write_object

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
        content = read_object(path, VERSION)
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
    write_object(environments_of(store), {_KEY: dict(renamings.names), "version": VERSION}, _INDENT)


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
