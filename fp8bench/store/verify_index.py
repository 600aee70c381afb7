"""Whether what is kept beside the runs, to be found soon, says what the runs say; and what was archived of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from fp8bench.files import unsealed
from fp8bench.model import Fault
from fp8bench.store.commit_runs import CommitRuns, TrackedRun
from fp8bench.store.compacted.archive import is_whole
from fp8bench.store.compacted.manifest import ArchivedFile, Unreadable, archive_of, load_manifest
from fp8bench.store.index.figure_files import (
    CommitFigures,
    Fingerprints,
    Unfit,
    figures_file,
    figures_of_runs,
    load_figures,
)
from fp8bench.store.index.found_steps import Memory

_AGAIN = "Delete it: the next command makes it again from the runs"


def check_figures(store: Path, commit: str, paths: Sequence[Path], runs: Sequence[TrackedRun]) -> Iterator[Fault]:
    """The figures of a commit: they are what its runs come to, or are made again before they are used."""
    path = figures_file(store, commit)
    if not path.is_file():
        return
    found = load_figures(store, commit, paths, Fingerprints())
    if found is Unfit.TORN:
        yield Fault(str(path), "it is not what was written", _AGAIN)
    elif isinstance(found, CommitFigures):
        made = figures_of_runs(CommitRuns(tuple(sorted(runs, key=lambda one: one.order)), ()))
        if _said(made) != _said(found):
            yield Fault(str(path), "it says otherwise than the runs that it was made of", _AGAIN)


def _said(figures: CommitFigures) -> list[tuple[bytes, bytes]]:
    return sorted((one.layout, one.rows.tobytes()) for one in figures.tables)


def check_steps(store: Path) -> Iterator[Fault]:
    """What was found in the series."""
    path = Memory(store).path
    try:
        unsealed(json.loads(path.read_bytes()))
    except FileNotFoundError:
        return
    except (OSError, ValueError, TypeError, RecursionError) as error:
        yield Fault(str(path), f"it is not what was written ({str(error)[:80]})", _AGAIN)


def archived_files(store: Path) -> dict[str, ArchivedFile]:
    """The files in archives that are what was written, by their names in the store."""
    try:
        archives = load_manifest(store).archives
        whole = [one for name, one in archives.items() if is_whole(archive_of(store, name), one.size, one.digest)]
    except (OSError, Unreadable):
        return {}
    return {file.path: file for one in whole for file in one.files}
