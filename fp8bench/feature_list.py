"""Finds the features: folders below fp8bench/features, which are not named anywhere else.

A feature is a command, or a family of them, that the rest of fp8bench does not need. Its docstring is the command's
help. Modules with fixed names extend the core: `command` the command line, `kind` what is stored and shown, `section`
the report of runs.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

_FOLDER = Path(__file__).parent / "features"


@cache
def feature_names() -> tuple[str, ...]:
    """Returns all names, sorted; empty if the folder was left out."""
    return tuple(sorted(path.parent.name for path in _FOLDER.glob("*/__init__.py")))


def feature_help(name: str) -> str:
    words = (importlib.import_module(f"fp8bench.features.{name}").__doc__ or "").partition("\n")[0]
    return words[:1].lower() + words[1:].rstrip(".")


def feature_parts(part: str) -> Iterator[ModuleType]:
    """Imports each feature's module of that name, if it has one."""
    for name in feature_names():
        if (_FOLDER / name / f"{part}.py").is_file():
            yield importlib.import_module(f"fp8bench.features.{name}.{part}")
