"""The store of another machine taken in, interpreters that count as others, and the view of what changed made anew."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fp8bench.errors import StoreError
from fp8bench.history.acks import merge_acks
from fp8bench.history.asv_files import locked
from fp8bench.history.asv_merging import Taken, merge_folders
from fp8bench.history.environments import Renamings, load_renamings, save_renamings
from fp8bench.history.merging import Merged, merge_runs
from fp8bench.rebuilding import Rebuilt, rebuild
from fp8bench.renaming import fold, interpreters_of_results, interpreters_of_runs, renamed
from fp8bench.telling import commit_of
from fp8bench.view import LOCK_SECONDS, results_of


@dataclass(frozen=True)
class Joined:
    """What was done: runs, asv's files, acknowledgements, what counts as what from now on, files that were folded, and
    the view.
    """

    runs: Merged
    taken: Taken
    acks: int
    renamed: dict[str, str]
    folded: tuple[Path, ...]
    view: Rebuilt
    failed: tuple[str, ...]


def join(store: Path, other: Path | None, pairs: Sequence[tuple[str, str]]) -> Joined:
    """Take in `other`, which is only read, and let interpreters count as others, OLD as NEW for each pair.

    What is wrong with a pair is said before anything is changed.
    """
    known = set(interpreters_of_runs(store).values()) | interpreters_of_results(results_of(store))
    if other is not None:
        known |= set(interpreters_of_runs(other).values()) | interpreters_of_results(results_of(other))
    with locked(store / "asv", LOCK_SECONDS):
        before = load_renamings(store)
        adopted, failed = _adopted(before, load_renamings(other)) if other is not None else (before, ())
        after = renamed(adopted, pairs, sorted(known)) if pairs else adopted
        if after != before:
            save_renamings(store, after)
        runs = merge_runs(store, other) if other is not None else Merged()
        taken = merge_folders(results_of(store), results_of(other)) if other is not None else Taken()
        acks, untaken = _acks(store, other) if other is not None else (0, ())
        folded, unfolded = fold(results_of(store), after)
    changed = {one for one in known if before.name(one) != after.name(one)}
    commits = {commit_of(path) for path in runs.changed}
    if changed:
        commits |= {commit_of(path) for path, python in interpreters_of_runs(store).items() if python in changed}
    view = rebuild(store, commits)
    anew = {one: after.name(one) for one in sorted(changed) if after.name(one) != one}
    everything = (*failed, *runs.failed, *taken.failed, *untaken, *unfolded, *view.failed)
    return Joined(runs, taken, acks, anew, tuple(folded), view, everything)


def _acks(store: Path, other: Path) -> tuple[int, tuple[str, ...]]:
    """How many acknowledgements were new here, and why they cannot be taken."""
    try:
        return merge_acks(store, other), ()
    except StoreError as error:
        return 0, (str(error),)


def _adopted(ours: Renamings, theirs: Renamings) -> tuple[Renamings, tuple[str, ...]]:
    """What counts as another there does so here, where nothing else is said here; and why it cannot."""
    if ours.trouble or theirs.trouble:
        return ours, tuple(filter(None, (ours.trouble, theirs.trouble)))
    new = ours
    for old, name in theirs.names.items():
        if old not in new.names and new.name(name) != old:
            new = new.adding(old, new.name(name))
    return new, ()
