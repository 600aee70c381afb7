"""Copies the runs of several machines' stores into one, as immutable files by machine and month.

A file is copied byte for byte under its original name, written to a temporary file and renamed. It changes only if an
interrupted run was resumed: if the copy is a prefix of the file, the rest is appended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from fp8bench.errors import StoreError
from fp8bench.files import PARTIAL, is_locked, keeping, lock_folder, make_store, read_file
from fp8bench.model.run import FleetPlan
from fp8bench.store.fleet_plans import keep_plan, number_of
from fp8bench.store.merge_stores import CopyOutcome, find_store, take, take_each
from fp8bench.store.runs.listing import collected_folder, id_of, listing
from fp8bench.store.runs.run_file import folder_name, load_run

_RUNNING = "still being measured: collect again when they have ended"
_OTHERS = "of no cell of the plan"
_COPIES = "copies of runs that were taken, or their beginnings"


@dataclass
class Collected:
    """The outcome of a collection: by machine, how many files were `taken` (new or grown), and how many are the `same`.
    `left` counts files that were left out intentionally, by reason; `failed` has a sentence for each faulty file."""

    taken: Counter[str] = field(default_factory=Counter)
    same: int = 0
    left: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)


def collect(plan: FleetPlan | None, folders: Sequence[Path], out: Path) -> Collected:
    """Copies the runs of a plan's cells, or all runs if it is None, out of stores, which are only read."""
    collected, stores = Collected(), dict[Path, None]()
    for folder in folders:
        try:
            stores[find_store(folder, out).resolve()] = None
        except StoreError as error:  # the remaining stores can still be read
            collected.failed.append(str(error))
    with keeping(f"the store {out}", "Choose another --store DIR."):
        make_store(out)
        with lock_folder(out):
            if plan is not None:
                keep_plan(plan, out)
            targets = {id_of(path): path for path in listing(out).everything}
            for store in stores:
                _collect_store(store, plan, out, targets, collected)
            files = listing(out)
            collected.failed += [f"{note}." for note in files.notes(files.refused)]
    return collected


def _collect_store(
    store: Path, plan: FleetPlan | None, out: Path, targets: dict[str, Path], collected: Collected
) -> None:
    files = listing(store)
    collected.failed += [f"{note}." for note in files.notes(files.refused)]
    collected.left[_COPIES] += len(files.copies)
    collected.failed += list(_foreign_files(store, set(files.everything)))
    if not files.everything:
        collected.failed.append(f"{store} has no runs: nothing came of the machine that it belongs to.")
    collected.failed += take_each(files, partial(_take, plan, out, targets, collected))


def _foreign_files(store: Path, runs: set[Path]) -> Iterator[str]:
    for path in sorted((store / "runs").rglob("*")):
        if path not in runs and path.is_file():
            begun = path.name.endswith(PARTIAL)
            description = (
                "is what a run left that never began" if begun else "is not a run file, or lies where none does"
            )
            yield f"{path} {description}. It was not taken."


def _take(plan: FleetPlan | None, out: Path, targets: dict[str, Path], collected: Collected, path: Path) -> None:
    running, content, run = is_locked(path), read_file(path), load_run(path)
    if not run.started:
        raise StoreError(f"{path} was not copied: {run.troubles[0]}, so its machine is unknown.")
    if plan is not None and number_of(plan, run.cell) is None:
        collected.left[_OTHERS] += 1
        return
    if running:
        collected.left[_RUNNING] += 1
        return
    target = targets.get(run.id) or out / "runs" / collected_folder(run) / path.name
    came = take(path, content, target)
    targets[run.id] = target
    if came is CopyOutcome.SAME:
        collected.same += 1
    else:
        collected.taken[folder_name(run)] += 1
