"""Kinds of stored results that features add, and tables of them, from each feature's module `kind`.

`show`, `report`, `history list --runs` and `--log` use these kinds.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from fp8bench.feature_list import feature_parts
from fp8bench.files import is_no_folder
from fp8bench.report.data.loggers import LoggedScalar, LogSource
from fp8bench.report.data.plain import Rows
from fp8bench.report.elements import Page
from fp8bench.store.kept_lines import fitting
from fp8bench.store.runs.listing import listing

K = TypeVar("K")


class View(NamedTuple):
    """How a result is shown: a page for people, a value and rows for programs."""

    page: Callable[[], Page]
    value: Callable[[], Any] = dict
    rows: Callable[[], Rows] = lambda: ((), ())


@dataclass(frozen=True)
class KeptTable:
    """A table of a run, selected by an option of `show`."""

    name: str
    help: str
    view: Callable[[Any, Path], View]


class SparePart(NamedTuple):
    """Files and folders that can be removed together. `lock` is a file that is locked while they are in use."""

    paths: Sequence[Path]
    what: str
    lock: Path | None = None


class Kind(ABC, Generic[K]):
    """A kind of stored result.

    `pattern` matches its files in a store: one name in folders `<utc>-<...>-<id>`, or files named like that; '' if no
    file holds it. `refused` are options of `show` that it does not accept.
    """

    name: ClassVar[str]
    holds: ClassVar[type]
    pattern: ClassVar[str]
    refused: ClassVar[tuple[str, ...]] = ()

    def files(self, store: Path) -> list[Path]:
        """Returns the files, newest first."""
        paths = store.glob(self.pattern) if self.pattern else ()
        return [path for path in sorted(paths, reverse=True) if path.is_file()]

    def find(self, word: str, store: Path) -> Path | None:
        """Returns the file that a word means: a path, a folder, an id, a name, or the beginning of one; None if none or
        several match."""
        last = Path(self.pattern).name
        with contextlib.suppress(OSError, ValueError):
            for path in (Path(word), Path(word) / last):
                if is_no_folder(path) and (path.name == last or path.resolve().match(self.pattern)):
                    return path
        paths = fitting(word, {path: self.names(path) for path in self.files(store)})
        return paths[0] if len(paths) == 1 else None

    def newest(self, store: Path) -> Path | None:
        """Returns the newest file for 'last', unless that cannot mean this kind; its final name begins with its start
        time."""
        return None

    def names(self, path: Path) -> tuple[str, str]:
        """Returns its id, and the name of its folder or file, which ends with the id."""
        name = path.stem if "*" in Path(self.pattern).name else path.parent.name
        return name.rpartition("-")[2], name

    def join(self, words: Sequence[str], store: Path) -> K | None:
        """Returns results side by side as one; None if some word means a different kind, or this kind shows results one
        by one."""
        return None

    @abstractmethod
    def load(self, path: Path) -> K:
        """Loads a file; raises StoreError for other kinds of files."""

    @abstractmethod
    def view(self, kept: K) -> View:
        """Returns what `show` prints."""

    def whole_view(self, kept: K) -> View:
        """Returns what `show --all` prints."""
        return self.view(kept)

    def lines(self, store: Path) -> Iterator[Callable[[], str]]:
        """Yields functions for the lines of `history list --runs`, newest first; they raise StoreError for damaged
        files."""
        yield from ()

    def spare(self, store: Path) -> Iterator[SparePart]:
        """Yields what is not needed to read stored results."""
        yield from ()

    def report(self, kept: K) -> View | None:
        return None

    def log_source(self, kept: K) -> LogSource | None:
        """Returns the source of scalars for --log; None if this kind has none."""
        return None

    def scalars(self, kept: K) -> Iterator[LoggedScalar]:
        yield from ()


def kinds() -> list[Kind[Any]]:
    return [kind for module in feature_parts("kind") for kind in getattr(module, "KINDS", ())]


def join_results(words: Sequence[str], store: Path) -> tuple[Kind[Any], Any] | None:
    """Returns the results that words mean as one of their kind; None if they cannot be shown side by side."""
    for kind in kinds():
        if (result := kind.join(words, store)) is not None:
            return kind, result
    return None


def meant_by(word: str, store: Path, only_runs: bool = False) -> list[tuple[Kind[Any], Path]]:
    """Returns the results other than runs that a word means. 'last' is the result that began last, of any kind."""
    if word != "last":
        paths = [(kind, kind.find(word, store)) for kind in kinds()]
        return [(kind, path) for kind, path in paths if path is not None]
    if only_runs:
        return []
    candidates = [(kind, kind.newest(store)) for kind in kinds()]
    newest = [(kind, path) for kind, path in candidates if path is not None]
    newest.sort(key=lambda pair: pair[0].names(pair[1])[-1], reverse=True)
    try:
        run = listing(store).newest if newest else None
    except (OSError, ValueError):
        return []  # the search for the run explains why
    return [(kind, path) for kind, path in newest[:1] if run is None or kind.names(path)[-1] > run.name]
