"""Merges the store of a second machine into our store, and rebuilds asv's files from the runs.

New runs are copied. If the second store has more lines of a run, these lines are appended to ours. Existing lines are
never rewritten.
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
from fp8bench.store.asv.view import define_series, results_folder, write_interpreter_results
from fp8bench.store.commit_runs import (
    collect_series,
    commit_prefix_of,
    group_by_interpreter,
    list_files_by_commit,
    read_runs,
)
from fp8bench.store.figures.cache import delete_cache
from fp8bench.store.figures.history import read_and_cache
from fp8bench.store.runs.listing import Listing, id_of, is_beginning, listing, machine_folder, run_files
from fp8bench.store.runs.run_file import load_run, lock_run


@dataclass
class Merged:
    """The result of a merge. Has the runs that were copied or extended, and the numbers of equal runs and of new
    acknowledgements.

    `failed` are sentences about runs that could not be merged. `notes` are sentences about things that the user
    should check.
    """

    copied: list[Path] = field(default_factory=list)
    extended: list[Path] = field(default_factory=list)
    same: int = 0
    acks: int = 0
    failed: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def find_store(folder: Path, ours: Path) -> Path:
    """Returns the store in a folder, or the folder if it is a store itself. Raises StoreError if the folder contains
    no store, or if that store is our own.
    """
    try:
        candidates = (folder, folder / ours.name, folder / ".fp8bench")
        found_store = next((place for place in candidates if (place / "runs").is_dir()), None)
        if found_store is None:
            problem = "has neither runs nor .fp8bench/runs in it" if folder.is_dir() else "is no directory"
            raise StoreError(
                f"{folder} is not a store: it {problem}. Give another machine's .fp8bench, or its parent folder."
            )
        # Resolve links and '..', which may lead back into our store.
        our_folder, their_folder = ours.resolve(), found_store.resolve()
    except OSError as error:
        raise StoreError(f"{folder} cannot be read ({error.strerror}).") from None
    if their_folder == our_folder or our_folder in their_folder.parents:
        raise StoreError(f"{folder} is this store, or inside it. Give the store of another machine.")
    return found_store


def merge_runs(ours: Path, theirs: Path) -> Merged:
    merged = Merged()
    our_runs, their_runs = listing(ours), listing(theirs)
    by_id = {id_of(path): path for path in (*our_runs.refused, *our_runs.files)}
    merged.failed += [f"{note}." for note in their_runs.notes(their_runs.refused)]
    merged.failed += copy_each_run(their_runs, partial(_copy_into_store, by_id, ours, merged))
    return merged


def copy_each_run(runs: Listing, copy_one: Callable[[Path], None]) -> Iterator[str]:
    """Calls `copy_one` on the runs of the other store, oldest first. Yields a sentence for each run that `copy_one`
    refuses.
    """
    for path in reversed(runs.files):
        try:
            copy_one(path)
        except StoreError as error:
            yield str(error)
        except OSError as error:
            yield f"{path} was not copied ({error.strerror})."


def _copy_into_store(by_id: Mapping[str, Path], ours: Path, merged: Merged, path: Path) -> None:
    content = _read_whole_lines(path, merged)
    load_run(path)  # raises an error if the file is not a run
    target = by_id.get(id_of(path)) or ours / "runs" / machine_folder(path) / path.name
    copy_outcome = copy_run(path, content, target)
    if copy_outcome is CopyOutcome.SAME:
        merged.same += 1
    else:
        (merged.copied if copy_outcome is CopyOutcome.NEW else merged.extended).append(target)


class CopyOutcome(Enum):
    """The result of copying a run file. LONGER means that our file had only the first lines and was extended."""

    NEW = "new"
    SAME = "same"
    LONGER = "longer"


def copy_run(path: Path, content: bytes, target: Path) -> CopyOutcome:
    """Copies a run file to `target`. `content` is the whole file or its first lines.

    If both files have the same id, the longer one must begin with the shorter one. Otherwise raises StoreError.
    """
    with keeping(target, "Make room, and try again."):
        # 1. Copy a new run.
        if not target.exists():
            write_whole(target, content)
            return CopyOutcome.NEW
        if id_of(target) != id_of(path):
            raise StoreError(f"{path} was not copied: {target} is a different run. Rename one of them.")
        # 2. Keep our file if it has all lines. Otherwise append the lines that it lacks.
        if is_beginning(content, read_file(target)):
            return CopyOutcome.SAME
        if content.startswith(read_file(target)):
            with open_file(target, "ab") as file:  # after a kill, the next merge appends the remaining lines
                lock_run(file, target)
                stored_content = read_file(target)
                if content.startswith(stored_content):
                    append(file, content[len(stored_content) :])
                    return CopyOutcome.LONGER
    raise StoreError(
        f"run {id_of(path)} differs between {path} and {target}, which is unchanged: each was resumed separately, "
        "or one was changed. Keep the correct file, and move the other away."
    )


def _read_whole_lines(path: Path, merged: Merged) -> bytes:
    """Returns the content of a run file of the other store. If a process is still writing the file, the content ends
    with the last whole line.
    """
    if not is_locked(path):
        return read_file(path)
    merged.notes.append(f"run {path.stem} is still being measured: merge again when it has ended")
    content = read_file(path)
    return content[: content.rfind(b"\n") + 1]


@dataclass
class Rebuilt:
    """The result of rebuilding asv's files. Has the written files, the numbers of series and runs in them, and how
    many runs were left out, by reason.

    `aside` are the new paths of broken files. `failed` are sentences about files that could not be written.
    """

    files: list[Path] = field(default_factory=list)
    series: int = 0
    runs: int = 0
    left: Counter[str] = field(default_factory=Counter)
    aside: list[Path] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


def rebuild_asv_view(store: Path, commits: Collection[str] | None = None) -> Rebuilt:
    """Writes asv's files of all commits, or of the commits that begin with these 8 digits.

    Commits are in the order of their first runs, because the first run decides the name of a machine's folder. Rows
    that asv itself measured are kept.
    """
    # 1. Delete the cache before a complete rebuild.
    rebuilt = Rebuilt()
    if commits is None:
        rebuilt.left = listing(store).left
        delete_cache(store)
    # 2. Write the files of each commit.
    series_by_name: dict[str, Series] = {}
    for commit, paths in list_files_by_commit(store).items():
        if commits is not None and commit not in commits:
            continue
        # Read the runs while holding the lock. Otherwise a writer that read fewer runs could write after this one.
        with lock_folder(store / "asv"):
            commit_runs = read_and_cache(store, commit, paths)
            for tracked in group_by_interpreter(commit_runs.runs):
                try:
                    rebuilt.files.append(write_interpreter_results(results_folder(store), tracked, rebuilt.aside))
                except (StoreError, OSError) as error:
                    rebuilt.failed.append(str(error))
        rebuilt.left.update(commit_runs.left)
        rebuilt.runs += len(commit_runs.runs)
        series_by_name |= {run.name: run for run in collect_series(commit_runs.runs)}
    # 3. Define the series as in the newest runs.
    with lock_folder(store / "asv"):
        define_series(results_folder(store), _find_newest_series(store, series_by_name.values()), rebuilt.aside)
    rebuilt.files, rebuilt.failed = list(dict.fromkeys(rebuilt.files)), list(dict.fromkeys(rebuilt.failed))
    rebuilt.series = len(series_by_name)
    return rebuilt


def _find_newest_series(store: Path, series: Iterable[Series]) -> list[Series]:
    """Returns each series as the newest run of its workload defines it, because asv uses only one definition."""
    suites = {metric.workload for metric in series}
    newest_series: dict[str, Series] = {}
    for path in run_files(store):
        defined_suites = {metric.workload for metric in newest_series.values()}
        if suites <= defined_suites:
            break
        tracked = read_runs([path]).runs
        newest_series |= {run.name: run for run in collect_series(tracked) if run.workload in suites - defined_suites}
    return list(newest_series.values())


def merge_store(store: Path, theirs: Path) -> tuple[Merged, Rebuilt]:
    """Merges the store `theirs` into our store, and updates asv's files for its runs. `theirs` stays unchanged."""
    with lock_folder(store / "asv"):
        merge_result = merge_runs(store, theirs)
        try:
            merge_result.acks = merge_acks(store, theirs)
        except (StoreError, OSError) as error:
            merge_result.failed.append(str(error))
    return merge_result, rebuild_asv_view(
        store, {commit_prefix_of(path) for path in (*merge_result.copied, *merge_result.extended)}
    )
