"""What a store keeps beside runs, and tables of what is kept: each feature's module `kind` says what it adds.

`show`, `report`, `history list --runs` and the exporters walk what is found here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from fp8bench.feature_list import feature_parts
from fp8bench.report.data.plain import Rows
from fp8bench.report.elements import Page
from fp8bench.store.runs.listing import listing

K = TypeVar("K")
# What tables are of that are of no other kind.
RUN = "run"


class View(NamedTuple):
    """What is shown of something: a page for people, and for programs a value and rows."""

    page: Callable[[], Page]
    value: Callable[[], Any] = dict
    rows: Callable[[], Rows] = lambda: ((), ())


@dataclass(frozen=True)
class KeptTable:
    """A table of a run, or of a kind by its name: `show` has an option for it.

    The option has a value where `metavar` names one. A table without `rows` is no CSV.
    """

    name: str
    help: str
    view: Callable[[Any, str, Path], View]
    of: str = RUN
    metavar: str = ""
    rows: bool = True


class SparePart(NamedTuple):
    """Files and folders that may go together, what they are, and what is no longer possible without them; `lock` is a
    file that whoever needs them has locked."""

    paths: Sequence[Path]
    what: str
    lock: Path | None = None


@dataclass(frozen=True)
class Exports:
    """What writes something for TensorBoard into a folder, and what sends it, with files, to a project of wandb."""

    write: Callable[[Path], Sequence[Path]]
    send: Callable[[str, Sequence[Path]], None]


class Kind(ABC, Generic[K]):
    """A kind of thing that is kept. `refused` are the options of `show` that do not go with it."""

    name: ClassVar[str]
    holds: ClassVar[type]
    refused: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def find(self, word: str, store: Path) -> Path | None:
        """What a word means: a path, an id or the beginning of one."""

    def newest(self, store: Path) -> Path | None:
        """What 'last' means, where it may mean one of these; its last name begins with when it started."""
        return None

    @abstractmethod
    def names(self, path: Path) -> tuple[str, ...]:
        """The names of what lies there: its id, and that of its file."""

    @abstractmethod
    def load(self, path: Path) -> K:
        """Read it. Raises StoreError where it is none."""

    @abstractmethod
    def view(self, kept: K) -> View:
        """What `show` prints."""

    def lines(self, store: Path) -> Iterator[Callable[[], str]]:
        """What makes its line in the list of what is kept, newest first; raises StoreError for what is damaged."""
        yield from ()

    def spare(self, store: Path) -> Iterator[SparePart]:
        """What nobody needs to read what is kept."""
        yield from ()

    def report(self, kept: K) -> View | None:
        """Its report's page and table."""
        return None

    def exports(self, kept: K) -> Exports | None:
        return None


def kinds() -> list[Kind[Any]]:
    return [kind for module in feature_parts("kind") for kind in getattr(module, "KINDS", ())]


def meant_by(word: str, store: Path, of: Collection[str] = ()) -> list[tuple[Kind[Any], Path]]:
    """What a word means that is no run; 'last' is what began last, whatever that is, or with `of` one of these."""
    if word != "last":
        return [(kind, path) for kind in kinds() if (path := kind.find(word, store)) is not None]
    wanted = [kind for kind in kinds() if not of or kind.name in of]
    newest = [(kind, path) for kind in wanted if (path := kind.newest(store)) is not None]
    newest.sort(key=lambda pair: pair[0].names(pair[1])[-1], reverse=True)
    try:
        run = listing(store).newest if newest and (not of or RUN in of) else None
    except (OSError, ValueError):
        return []  # who looks for the run says why
    return [(kind, path) for kind, path in newest[:1] if run is None or kind.names(path)[-1] > run.name]


def feature_tables() -> list[KeptTable]:
    return [table for module in feature_parts("kind") for table in getattr(module, "TABLES", ())]
