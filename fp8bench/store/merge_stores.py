"""Merges the store of a second machine into our store, and rebuilds asv's files from the runs.

New runs are copied. If a run has more lines in the second store, these lines are appended to our file of the run.
Existing lines are never rewritten.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from pathlib import Path

from fp8bench.errors import StoreError
from fp8bench.files import append, convert_write_errors, is_locked, lock_folder, open_file, read_file, write_whole
from fp8bench.model import Series
from fp8bench.store.acks import merge_acks
from fp8bench.store.asv.view import asv_results_folder, define_series, write_interpreter_results
from fp8bench.store.commit_runs import (
    collect_series,
    find_commit_prefix,
    group_by_interpreter,
    list_files_by_commit,
    read_runs,
)
from fp8bench.store.figures.cache import delete_cache
from fp8bench.store.figures.history import read_and_cache_runs
from fp8bench.store.runs.listing import (
    RunFileListing,
    find_run_id,
    is_content_prefix,
    listing,
    machine_folder,
    run_files,
)
from fp8bench.store.runs.run_file import load_run, lock_run


@dataclass
class MergeResult:
    """The result of merging another store into ours. `copied_files` and `extended_paths` are our files of the runs that
    were new, or longer in the other store. `same` is the number of runs that both stores had, and `acks` the number of
    new acknowledgements.

    `failed` are sentences about runs that could not be merged. `notes` are sentences about things that the user should
    check.
    """

    copied_files: list[Path] = field(default_factory=list)
    extended_paths: list[Path] = field(default_factory=list)
    same: int = 0
    acks: int = 0
    failed: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def find_store(folder: Path, our_store: Path) -> Path:
    """Returns the store in a folder, or the folder if it is a store itself. Raises StoreError if the folder contains
    no store, or if that store is our own.
    """
    try:
        candidates = (folder, folder / our_store.name, folder / ".fp8bench")
        store_folder = next((candidate for candidate in candidates if (candidate / "runs").is_dir()), None)
        if store_folder is None:
            problem = "has neither runs nor .fp8bench/runs in it" if folder.is_dir() else "is no directory"
            raise StoreError(
                f"{folder} is not a store: it {problem}. Give another machine's .fp8bench, or its parent folder."
            )
        # Resolve links and '..', which may lead back into our store.
        our_folder, their_folder = our_store.resolve(), store_folder.resolve()
    except OSError as error:
        raise StoreError(f"{folder} cannot be read ({error.strerror}).") from None
    if their_folder == our_folder or our_folder in their_folder.parents:
        raise StoreError(f"{folder} is this store, or inside it. Give the store of another machine.")
    return store_folder


def merge_runs(our_store: Path, their_store: Path) -> MergeResult:
    merge_result = MergeResult()
    our_runs, their_runs = listing(our_store), listing(their_store)
    path_by_id = {find_run_id(path): path for path in (*our_runs.refused, *our_runs.files)}
    merge_result.failed += [f"{note}." for note in their_runs.notes(their_runs.refused)]
    merge_result.failed += copy_store_runs(their_runs, partial(_copy_into_store, path_by_id, our_store, merge_result))
    return merge_result


def copy_store_runs(runs: RunFileListing, copy_one: Callable[[Path], None]) -> Iterator[str]:
    """Calls `copy_one` on each run of a store, oldest first. Yields a sentence for each run that could not be
    copied.
    """
    for path in reversed(runs.files):
        try:
            copy_one(path)
        except StoreError as error:
            yield str(error)
        except OSError as error:
            yield f"{path} was not copied ({error.strerror})."


def _copy_into_store(path_by_id: Mapping[str, Path], our_store: Path, merge_result: MergeResult, path: Path) -> None:
    content = _read_whole_lines(path, merge_result)
    load_run(path)  # raises an error if the file is not a run
    target = path_by_id.get(find_run_id(path)) or our_store / "runs" / machine_folder(path) / path.name
    copy_outcome = copy_run(path, content, target)
    if copy_outcome is RunCopyOutcome.SAME:
        merge_result.same += 1
    else:
        (merge_result.copied_files if copy_outcome is RunCopyOutcome.NEW else merge_result.extended_paths).append(
            target
        )


class RunCopyOutcome(Enum):
    """The result of copying a run file to our store. SAME: we had the file. LONGER: our file had only the first lines
    of the copied file, and was extended.
    """

    NEW = "new"
    SAME = "same"
    LONGER = "longer"


def copy_run(path: Path, content: bytes, target: Path) -> RunCopyOutcome:
    """Copies a run file to `target`. `content` is the whole content of the run file, or its first lines.

    If `target` exists, it must be a file of the same run, and one of the two files must be the beginning of the other.
    Otherwise raises StoreError.
    """
    with convert_write_errors(target, "Make room, and try again."):
        # 1. If our store does not have the file, copy it.
        if not target.exists():
            write_whole(target, content)
            return RunCopyOutcome.NEW
        if find_run_id(target) != find_run_id(path):
            raise StoreError(f"{path} was not copied: {target} is a different run. Rename one of them.")
        # 2. Keep our file if it has all lines. Otherwise append the lines that it lacks.
        if is_content_prefix(content, read_file(target)):
            return RunCopyOutcome.SAME
        if content.startswith(read_file(target)):
            with open_file(target, "ab") as file:  # if the process is killed here, the next merge appends the rest
                lock_run(file, target)
                # Before we had the lock, another process may have appended lines.
                target_content = read_file(target)
                if content.startswith(target_content):
                    append(file, content[len(target_content) :])
                    return RunCopyOutcome.LONGER
    raise StoreError(
        f"run {find_run_id(path)} differs between {path} and {target}, which is unchanged: each was resumed "
        "separately, or one was changed. Keep the correct file, and move the other away."
    )


def _read_whole_lines(path: Path, merge_result: MergeResult) -> bytes:
    """Returns the content of a run file. If a process is still writing the file, returns only its complete lines, and
    adds a note to `merge_result`.
    """
    if not is_locked(path):
        return read_file(path)
    merge_result.notes.append(f"run {path.stem} is still being measured: merge again when it has ended")
    content = read_file(path)
    return content[: content.rfind(b"\n") + 1]


@dataclass
class RebuildResult:
    """The result of rebuilding asv's files: the written files, how many series and runs these files have, and the
    number of runs that were left out, by reason.

    `renamed_files` are the new paths of broken files. `failed` are sentences about files that could not be written.
    """

    files: list[Path] = field(default_factory=list)
    series: int = 0
    runs: int = 0
    skipped_run_reasons: Counter[str] = field(default_factory=Counter)
    renamed_files: list[Path] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


def rebuild_asv_view(store: Path, commits: Collection[str] | None = None) -> RebuildResult:
    """Writes asv's files of all commits, or only of the commits whose first 8 digits are in `commits`.

    Commits are written in the order of their first runs, because asv's files keep the path by which the first run on a
    machine called its interpreter. Rows that asv itself measured are kept.
    """
    # 1. Delete the cache before a complete rebuild.
    rebuild_result = RebuildResult()
    if commits is None:
        rebuild_result.skipped_run_reasons = listing(store).skipped_run_reasons
        delete_cache(store)
    # 2. Write asv's files of each commit.
    series_by_name: dict[str, Series] = {}
    for commit, paths in list_files_by_commit(store).items():
        if commits is not None and commit not in commits:
            continue
        # Read the runs while holding the lock. Otherwise a writer that read fewer runs could write after this one.
        with lock_folder(store / "asv"):
            commit_runs = read_and_cache_runs(store, commit, paths)
            for tracked in group_by_interpreter(commit_runs.runs):
                try:
                    rebuild_result.files.append(
                        write_interpreter_results(asv_results_folder(store), tracked, rebuild_result.renamed_files)
                    )
                except (StoreError, OSError) as error:
                    rebuild_result.failed.append(str(error))
        rebuild_result.skipped_run_reasons.update(commit_runs.skipped_run_reasons)
        rebuild_result.runs += len(commit_runs.runs)
        series_by_name |= {run.name: run for run in collect_series(commit_runs.runs)}
    # 3. Write the definitions of the series, as the newest runs define them.
    with lock_folder(store / "asv"):
        define_series(
            asv_results_folder(store), _find_newest_series(store, series_by_name.values()), rebuild_result.renamed_files
        )
    rebuild_result.files, rebuild_result.failed = (
        list(dict.fromkeys(rebuild_result.files)),
        list(dict.fromkeys(rebuild_result.failed)),
    )
    rebuild_result.series = len(series_by_name)
    return rebuild_result


def _find_newest_series(store: Path, series: Iterable[Series]) -> list[Series]:
    """Returns the definition of each series in the newest run of its suite, because asv accepts only one definition of
    a series.
    """
    suites = {metric.workload for metric in series}
    newest_series: dict[str, Series] = {}
    for path in run_files(store):
        defined_suites = {metric.workload for metric in newest_series.values()}
        if suites <= defined_suites:
            break
        tracked_runs = read_runs([path]).runs
        newest_series |= {
            run.name: run for run in collect_series(tracked_runs) if run.workload in suites - defined_suites
        }
    return list(newest_series.values())


def merge_store(store: Path, their_store: Path) -> tuple[MergeResult, RebuildResult]:
    """Merges the store `their_store` into `store`, and updates asv's files for the merged runs. `their_store` stays
    unchanged.
    """
    with lock_folder(store / "asv"):
        merge_result = merge_runs(store, their_store)
        try:
            merge_result.acks = merge_acks(store, their_store)
        except (StoreError, OSError) as error:
            merge_result.failed.append(str(error))
    return merge_result, rebuild_asv_view(
        store, {find_commit_prefix(path) for path in (*merge_result.copied_files, *merge_result.extended_paths)}
    )
