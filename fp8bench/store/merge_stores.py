"""Merges the store of a second machine into ours, and rebuilds asv's view from the runs.

New runs are copied, and longer ones appended to ours; nothing is rewritten.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from pathlib import Path

from fp8bench.errors import StoreError
from fp8bench.files import append, is_locked, keeping, lock_folder, open_file, read_file, write_whole
from fp8bench.model import Series
from fp8bench.store.acks import merge_acks
from fp8bench.store.asv.view import define, results_of, write_place
from fp8bench.store.commit_runs import by_place, commit_of, files_by_commit, read_runs, series_of_runs
from fp8bench.store.figures.cache import delete_cache
from fp8bench.store.figures.history import read_and_keep
from fp8bench.store.runs.listing import Listing, id_of, is_beginning, listing, machine_folder, run_files
from fp8bench.store.runs.run_file import load_run, lock_run


@dataclass
class Merged:
    """The result of a merge: runs `copied` or appended to ours, the number of the `same` runs and of new
    acknowledgements; sentences on failures, and on things to check (`notes`)."""

    copied: list[Path] = field(default_factory=list)
    extended: list[Path] = field(default_factory=list)
    same: int = 0
    acks: int = 0
    failed: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def find_store(folder: Path, ours: Path) -> Path:
    """Returns the store that a folder is or contains. Raises StoreError if there is none, or if it is our own."""
    try:
        places = (folder, folder / ours.name, folder / ".fp8bench")
        found_store = next((place for place in places if (place / "runs").is_dir()), None)
        if found_store is None:
            problem = "has neither runs nor .fp8bench/runs in it" if folder.is_dir() else "is no directory"
            raise StoreError(
                f"{folder} is not a store: it {problem}. Give another machine's .fp8bench, or its parent folder."
            )
        # Links and .. may lead back into our own store.
        our_folder, their_folder = ours.resolve(), found_store.resolve()
    except OSError as error:
        raise StoreError(f"{folder} cannot be read ({error.strerror}).") from None
    if their_folder == our_folder or our_folder in their_folder.parents:
        raise StoreError(f"{folder} is this store, or lies in it. Give the store of another machine.")
    return found_store


def merge_runs(ours: Path, theirs: Path) -> Merged:
    merged = Merged()
    our_runs, their_runs = listing(ours), listing(theirs)
    by_id = {id_of(path): path for path in (*our_runs.refused, *our_runs.files)}
    merged.failed += [f"{note}." for note in their_runs.notes(their_runs.refused)]
    merged.failed += take_each(their_runs, partial(_take, by_id, ours, merged))
    return merged


def take_each(runs: Listing, take_one: Callable[[Path], None]) -> Iterator[str]:
    """Calls `take_one` on the runs of the merged store, oldest first; yields a sentence on each that it refuses."""
    for path in reversed(runs.files):
        try:
            take_one(path)
        except StoreError as error:
            yield str(error)
        except OSError as error:
            yield f"{path} was not taken ({error.strerror})."


def _take(by_id: Mapping[str, Path], ours: Path, merged: Merged, path: Path) -> None:
    content = _whole(path, merged)
    load_run(path)  # what is not a run file raises
    target = by_id.get(id_of(path)) or ours / "runs" / machine_folder(path) / path.name
    outcome = take(path, content, target)
    if outcome is CopyOutcome.SAME:
        merged.same += 1
    else:
        (merged.copied if outcome is CopyOutcome.NEW else merged.extended).append(target)


class CopyOutcome(Enum):
    """The result of copying a run file; LONGER means that ours was its beginning."""

    NEW = "new"
    SAME = "same"
    LONGER = "longer"


def take(path: Path, content: bytes, target: Path) -> CopyOutcome:
    """Copies a run file to `target`; `content` is all of it or its first lines.

    Under one id the longer file counts if it begins with the other; otherwise this raises StoreError.
    """
    with keeping(target, "Make room, and try again."):
        # 1. A new run is copied.
        if not target.exists():
            write_whole(target, content)
            return CopyOutcome.NEW
        if id_of(target) != id_of(path):
            raise StoreError(f"{path} was not copied: {target} is another run. Rename one of them.")
        # 2. Ours has everything already, or the file continues ours.
        if is_beginning(content, read_file(target)):
            return CopyOutcome.SAME
        if content.startswith(read_file(target)):
            with open_file(target, "ab") as file:  # a kill leaves their first lines, which a later merge completes
                lock_run(file, target)
                stored = read_file(target)
                if content.startswith(stored):
                    append(file, content[len(stored) :])
                    return CopyOutcome.LONGER
    raise StoreError(
        f"run {id_of(path)} has other bytes in {path} than in {target}, which stays as it is: each was resumed alone, "
        "or one was changed. Keep the file that is right, and move the other away."
    )


def _whole(path: Path, merged: Merged) -> bytes:
    """Returns the bytes of one of their files, up to the last whole line where it is still being written."""
    if not is_locked(path):
        return read_file(path)
    merged.notes.append(f"run {path.stem} is still being measured there: merge again when it has ended")
    content = read_file(path)
    return content[: content.rfind(b"\n") + 1]


@dataclass
class Rebuilt:
    """The result of a rebuild: files, the numbers of series and runs in them, and of runs left out, by reason.

    `aside` are broken files under their new names, `failed` sentences on files that could not be made.
    """

    files: list[Path] = field(default_factory=list)
    series: int = 0
    runs: int = 0
    left: Counter[str] = field(default_factory=Counter)
    aside: list[Path] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


def rebuild(store: Path, commits: Collection[str] | None = None) -> Rebuilt:
    """Writes asv's files of all commits, or of those whose first 8 digits are given.

    The order is that of the commits' first runs, because the first one decides the name of a machine's folder. Rows
    that asv alone measured stay.
    """
    # 1. A complete rebuild starts without the cache.
    rebuilt = Rebuilt()
    if commits is None:
        rebuilt.left = listing(store).left
        delete_cache(store)
    # 2. Write the files of each commit.
    series: dict[str, Series] = {}
    for commit, paths in files_by_commit(store).items():
        if commits is not None and commit not in commits:
            continue
        # Reading the runs under the lock prevents that a writer that read fewer runs writes after this one.
        with lock_folder(store / "asv"):
            read = read_and_keep(store, commit, paths)
            for tracked in by_place(read.runs):
                try:
                    rebuilt.files.append(write_place(results_of(store), tracked, rebuilt.aside))
                except (StoreError, OSError) as error:
                    rebuilt.failed.append(str(error))
        rebuilt.left.update(read.left)
        rebuilt.runs += len(read.runs)
        series |= {run.name: run for run in series_of_runs(read.runs)}
    # 3. Define the series as the newest runs do.
    with lock_folder(store / "asv"):
        define(results_of(store), _newest(store, series.values()), rebuilt.aside)
    rebuilt.files, rebuilt.failed = list(dict.fromkeys(rebuilt.files)), list(dict.fromkeys(rebuilt.failed))
    rebuilt.series = len(series)
    return rebuilt


def _newest(store: Path, series: Iterable[Series]) -> list[Series]:
    """Returns the series as the newest run of each workload defines them; asv goes by one definition only."""
    suites = {metric.workload for metric in series}
    newest: dict[str, Series] = {}
    for path in run_files(store):
        defined = {metric.workload for metric in newest.values()}
        if suites <= defined:
            break
        tracked = read_runs([path]).runs
        newest |= {run.name: run for run in series_of_runs(tracked) if run.workload in suites - defined}
    return list(newest.values())


def join(store: Path, theirs: Path) -> tuple[Merged, Rebuilt]:
    """Takes in `other`, which is only read, and updates asv's view for its runs."""
    with lock_folder(store / "asv"):
        merged = merge_runs(store, theirs)
        try:
            merged.acks = merge_acks(store, theirs)
        except (StoreError, OSError) as error:
            merged.failed.append(str(error))
    return merged, rebuild(store, {commit_of(path) for path in (*merged.copied, *merged.extended)})
