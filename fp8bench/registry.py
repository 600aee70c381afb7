"""Names to leaves. A leaf registers itself with a decorator; a registry finds leaves by walking a package.

This is the one place that imports leaves. Names starting with an underscore are left out of lists.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import pkgutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Generic, TypeVar

from fp8bench.errors import Fp8benchError, ImportFailed, UnknownName
from fp8bench.protocols import Device, Precision, Workload

T = TypeVar("T")


class Registry(Generic[T]):
    """The leaves of one kind, in the order they were found."""

    def __init__(self, kind: str, package: str) -> None:
        self.kind = kind
        self.package = package
        self._leaves: dict[str, type[T]] = {}
        self._aliases: dict[str, str] = {}
        self._walked = False

    def register(self, name: str, *aliases: str) -> Callable[[type[T]], type[T]]:
        """Class decorator. A name that is taken raises: two leaves of one name would hide each other."""

        def decorate(leaf: type[T]) -> type[T]:
            for word in (name, *aliases):
                holder = self._leaves.get(self._aliases.get(word, word))
                if holder is not None and holder.__qualname__ != leaf.__qualname__:
                    raise Fp8benchError(f"two {self.kind}s are called {word!r}: {holder} and {leaf}. Rename one.")
            self._leaves[name] = leaf
            self._aliases.update(dict.fromkeys(aliases, name))
            return leaf

        return decorate

    def names(self, hidden: bool = False) -> list[str]:
        """Names without aliases."""
        self._walk()
        return [name for name in self._leaves if hidden or not name.startswith("_")]

    def names_in(self, module: str) -> list[str]:
        """The names that one module registered."""
        return [name for name, leaf in self._leaves.items() if leaf.__module__ == module]

    def aliases(self) -> dict[str, str]:
        """Alias to name."""
        self._walk()
        return dict(self._aliases)

    def canonical(self, word: str) -> str:
        """The name behind a name or alias; unknown words raise with the nearest."""
        self._walk()
        name = self._aliases.get(word, word)
        if name not in self._leaves:
            raise UnknownName(self.kind, word, [*self.names(), *self._aliases])
        return name

    def get(self, word: str) -> T:
        """A new instance of the leaf of that name or alias."""
        return self._leaves[self.canonical(word)]()

    def _walk(self) -> None:
        if self._walked:
            return
        self._walked = True
        package = importlib.import_module(self.package)
        for found in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"{self.package}.{found.name}")


workloads: Registry[Workload] = Registry("suite", "fp8bench.workloads")
precisions: Registry[Precision] = Registry("dtype", "fp8bench.precisions")
devices: Registry[Device] = Registry("device", "fp8bench.devices")


def import_user_modules(names: Iterable[str]) -> None:
    """Import modules (or files ending in .py) that register leaves of the user's own."""
    for name in names:
        try:
            _import_file(Path(name)) if name.endswith(".py") else importlib.import_module(name)
        except Exception as error:  # foreign code may raise anything
            raise ImportFailed(
                f"--import {name} failed with {type(error).__name__}: {error}. Expected an importable module or a "
                "Python file that registers workloads, precisions or devices."
            ) from error


def user_module(file: str) -> str:
    """The module name of a user's file: two files of one name in different folders are two modules."""
    path = Path(file).resolve()
    return f"fp8bench_user_{path.stem}_{hashlib.sha256(os.fsencode(path)).hexdigest()[:8]}"


def _import_file(path: Path) -> None:
    path = path.resolve()
    name = user_module(str(path))
    if name in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError(f"no such file: {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
