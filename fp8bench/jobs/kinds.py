"""Kinds of stored results that features add, and tables of such results. Each feature defines its kinds in its module
`kind`.

`show`, `report`, `history list --runs` and `--log` use these kinds.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from fp8bench.feature_list import import_feature_modules
from fp8bench.files import is_not_folder
from fp8bench.report.data.loggers import LoggedScalar, LogSource
from fp8bench.report.data.plain import PlainRows
from fp8bench.report.elements import Page
from fp8bench.store.kept_lines import find_files_by_name
from fp8bench.store.runs.listing import listing

K = TypeVar("K")


class ResultView(NamedTuple):
    """How a result is shown: as a page for people, and as a value or rows for programs."""

    page: Callable[[], Page]
    value: Callable[[], Any] = dict
    rows: Callable[[], PlainRows] = lambda: ((), ())


@dataclass(frozen=True)
class RunTableOption:
    """A table of a run that an option of `fp8bench show` selects."""

    name: str
    help: str
    view: Callable[[Any, Path], ResultView]


class RemovableFiles(NamedTuple):
    """Files and folders that can be removed together. Processes lock the file `lock` while they use them."""

    paths: Sequence[Path]
    what: str
    lock: Path | None = None


class ResultKind(ABC, Generic[K]):
    """A kind of stored result, such as a training.

    `pattern` matches the files of this kind in a store; '' if the kind has no files. Each result has either a folder
    `<utc>-<...>-<id>` with a file of a fixed name, or a file that is itself named `<utc>-<...>-<id>`. `refused` are
    options of `fp8bench show` that the kind does not support.
    """

    name: ClassVar[str]
    holds: ClassVar[type]
    pattern: ClassVar[str]
    refused: ClassVar[tuple[str, ...]] = ()

    def files(self, store: Path) -> list[Path]:
        """Returns the files of this kind, newest first."""
        paths = store.glob(self.pattern) if self.pattern else ()
        return [path for path in sorted(paths, reverse=True) if path.is_file()]

    def find(self, word: str, store: Path) -> Path | None:
        """Returns the file of a result that the user names by a path, folder, id or name, or by the beginning of an id
        or name. Returns None if no file matches, or if several do.
        """
        file_name = Path(self.pattern).name
        # The word may be impossible as a path, for example too long.
        with contextlib.suppress(OSError, ValueError):
            for path in (Path(word), Path(word) / file_name):
                if is_not_folder(path) and (path.name == file_name or path.resolve().match(self.pattern)):
                    return path
        paths = find_files_by_name(word, {path: self.names(path) for path in self.files(store)})
        return paths[0] if len(paths) == 1 else None

    def newest(self, store: Path) -> Path | None:
        """Returns the file of the newest result; None if 'last' on the command line cannot mean a result of this kind.
        File names begin with the start time.
        """
        return None

    def names(self, path: Path) -> tuple[str, str]:
        """Returns two names of the result that a file holds: its id, and the longer name of its folder or file, which
        ends with the id.
        """
        name = path.stem if "*" in Path(self.pattern).name else path.parent.name
        return name.rpartition("-")[2], name

    def join(self, words: Sequence[str], store: Path) -> K | None:
        """Returns one result that combines the named stored results. Returns None if this kind cannot combine results,
        or if one of them is of a different kind.
        """
        return None

    @abstractmethod
    def load(self, path: Path) -> K:
        """Loads a file. Raises StoreError if it is not of this kind."""

    @abstractmethod
    def view(self, kept: K) -> ResultView:
        """Returns what `fp8bench show` prints."""

    def make_complete_view(self, kept: K) -> ResultView:
        """Returns what `fp8bench show --all` prints."""
        return self.view(kept)

    def lines(self, store: Path) -> Iterator[Callable[[], str]]:
        """Yields a function for each result, newest first. The function returns the result's line for `history list
        --runs`, and raises StoreError if the file is damaged.
        """
        yield from ()

    def spare(self, store: Path) -> Iterator[RemovableFiles]:
        """Yields files that are not needed to read stored results."""
        yield from ()

    def report(self, kept: K) -> ResultView | None:
        return None

    def log_source(self, kept: K) -> LogSource | None:
        """Returns the title and configuration that --log stores with the result's scalars; None if this kind has no
        scalars.
        """
        return None

    def scalars(self, kept: K) -> Iterator[LoggedScalar]:
        """Yields the scalars of a loaded result, for --log."""
        yield from ()


def kinds() -> list[ResultKind[Any]]:
    return list(chain.from_iterable(getattr(module, "KINDS", ()) for module in import_feature_modules("kind")))


def join_results(names: Sequence[str], store: Path) -> tuple[ResultKind[Any], Any] | None:
    """Combines the stored results that `names` refer to. Returns their kind and the combined result; None if they
    cannot be combined.
    """
    for result_kind in kinds():
        if (result := result_kind.join(names, store)) is not None:
            return result_kind, result
    return None


def find_results(name: str, store: Path, only_runs: bool = False) -> list[tuple[ResultKind[Any], Path]]:
    """Returns the results that a word means, except runs. 'last' means the result of any kind that was started last."""
    is_last_result_requested = name == "last"
    results = []
    for result_kind in kinds():
        path = result_kind.newest(store) if is_last_result_requested else result_kind.find(name, store)
        if path is not None:
            results.append((result_kind, path))
    if not is_last_result_requested or not results:
        return results
    if only_runs:
        return []
    # Names begin with the start time, so the alphabetically last name is the newest.
    newest_name, result_kind, path = max(
        ((result_kind.names(path)[-1], result_kind, path) for result_kind, path in results), key=itemgetter(0)
    )
    try:
        run = listing(store).newest
    except (OSError, ValueError):
        return []  # the caller then searches for a run, and raises the error if it finds none
    return [(result_kind, path)] if run is None or newest_name > run.name else []
