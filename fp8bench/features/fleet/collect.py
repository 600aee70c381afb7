"""Copies the runs of several machines' stores into one store, sorted by machine and month.

A file is copied byte for byte under its original name: it is written to a temporary file, which is then renamed. An
existing copy changes only if the interrupted run was resumed since. Then the file still begins with the copy, and the
new lines are appended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from fp8bench.errors import StoreError
from fp8bench.files import PARTIAL_FILE_SUFFIX, convert_write_errors, is_locked, lock_folder, make_store, read_file
from fp8bench.model.run import FleetPlan
from fp8bench.store.fleet_plans import find_cell_number, store_plan
from fp8bench.store.merge_stores import RunCopyOutcome, copy_run, copy_store_runs, find_store
from fp8bench.store.runs.listing import find_run_id, listing, name_collected_run_folder
from fp8bench.store.runs.run_file import folder_name, load_run

_STILL_RUNNING_TEXT = "still being measured: collect again after they end"
_UNPLANNED_RUN_REASON = "not of any cell of the plan"
_RUN_COPIES_TEXT = "copies of runs that were already taken"


@dataclass
class CollectionCounts:
    """The numbers of files in a collection.

    `taken_count_by_machine` counts new and extended files by machine. `unchanged_file_count` counts files that were
    already copied. `excluded_count_by_reason` counts files that were left out intentionally, by reason. `failures` has
    a sentence for each faulty file.
    """

    taken_count_by_machine: Counter[str] = field(default_factory=Counter)
    unchanged_file_count: int = 0
    excluded_count_by_reason: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)


def collect_runs(plan: FleetPlan | None, folders: Sequence[Path], out: Path) -> CollectionCounts:
    """Copies runs from the stores in `folders` into `out`: the runs of the plan's cells, or all runs if the plan is
    None.
    """
    collected, stores = CollectionCounts(), dict[Path, None]()
    for folder in folders:
        try:
            stores[find_store(folder, out).resolve()] = None
        except StoreError as error:  # continue with the other stores
            collected.failures.append(str(error))
    with convert_write_errors(f"the store {out}", "Choose another --store DIR."):
        make_store(out)
        with lock_folder(out):
            if plan is not None:
                store_plan(plan, out)
            targets = {find_run_id(path): path for path in listing(out).all_files}
            for store in stores:
                _collect_store_runs(store, plan, out, targets, collected)
            run_listing = listing(out)
            collected.failures += [f"{note}." for note in run_listing.notes(run_listing.refused)]
    return collected


def _collect_store_runs(
    store: Path, plan: FleetPlan | None, out: Path, targets: dict[str, Path], collected: CollectionCounts
) -> None:
    run_listing = listing(store)
    collected.failures += [f"{note}." for note in run_listing.notes(run_listing.refused)]
    collected.excluded_count_by_reason[_RUN_COPIES_TEXT] += len(run_listing.copies)
    collected.failures += list(_describe_foreign_files(store, set(run_listing.all_files)))
    if not run_listing.all_files:
        collected.failures.append(f"{store} has no runs: nothing was copied from its machine.")
    collected.failures += copy_store_runs(run_listing, partial(_copy_run, plan, out, targets, collected))


def _describe_foreign_files(store: Path, runs: set[Path]) -> Iterator[str]:
    for path in sorted((store / "runs").rglob("*")):
        if path not in runs and path.is_file():
            problem = "is not a run file, or is in a wrong folder"
            if path.name.endswith(PARTIAL_FILE_SUFFIX):
                problem = "is a leftover of a run that never started"
            yield f"{path} {problem}. It was not taken."


def _copy_run(
    plan: FleetPlan | None, out: Path, targets: dict[str, Path], collected: CollectionCounts, path: Path
) -> None:
    is_running, content, run = is_locked(path), read_file(path), load_run(path)
    if not run.started:
        raise StoreError(f"{path} was not copied: {run.troubles[0]}, so its machine is unknown.")
    if plan is not None and find_cell_number(plan, run.cell) is None:
        collected.excluded_count_by_reason[_UNPLANNED_RUN_REASON] += 1
        return
    if is_running:
        collected.excluded_count_by_reason[_STILL_RUNNING_TEXT] += 1
        return
    target = targets.get(run.id) or out / "runs" / name_collected_run_folder(run) / path.name
    copy_outcome = copy_run(path, content, target)
    targets[run.id] = target
    if copy_outcome is RunCopyOutcome.SAME:
        collected.unchanged_file_count += 1
    else:
        collected.taken_count_by_machine[folder_name(run)] += 1
