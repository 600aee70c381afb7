"""Finds the features, which are the folders in fp8bench/features. No other code names a feature.

A feature is a command or a group of commands that the core of fp8bench does not need. The docstring of its package is
the help of the command. Modules with fixed names extend the core: `command` adds a command line, `kind` adds a kind of
result that is stored and shown, `section` adds a section to the reports of runs, and `glossary` explains names in
`fp8bench list`.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

_FOLDER = Path(__file__).parent / "features"


@cache
def list_features() -> tuple[str, ...]:
    """Returns the sorted names of all features, or () if the folder of features is missing."""
    return tuple(sorted(path.parent.name for path in _FOLDER.glob("*/__init__.py")))


def read_feature_help(name: str) -> str:
    sentence = (importlib.import_module(f"fp8bench.features.{name}").__doc__ or "").partition("\n")[0]
    return sentence[:1].lower() + sentence[1:].rstrip(".")


def import_feature_modules(part: str) -> Iterator[ModuleType]:
    """Imports and yields the module named `part` of each feature that has such a module."""
    for name in list_features():
        if (_FOLDER / name / f"{part}.py").is_file():
            yield importlib.import_module(f"fp8bench.features.{name}.{part}")
