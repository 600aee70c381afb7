"""Two runs, commits or stores held against each other, figure by figure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fp8bench.analysis.compare.compare import Compared, compare
from fp8bench.analysis.compare.sides import machine_of, machine_words, side_of
from fp8bench.analysis.findings import findings
from fp8bench.errors import StoreError, UsageError
from fp8bench.jobs.observer import JobObserver
from fp8bench.model import Run
from fp8bench.report.words.naming import many
from fp8bench.store.commit_runs import ChosenRuns, find_runs
from fp8bench.store.runs.listing import each_once
from fp8bench.store.runs.run_file import load_run


def compared_sides(before: str, after: str, store: Path, observer: JobObserver) -> Compared:
    old, new = (read_runs(find_runs(word, store), observer) for word in (before, after))
    return compared_of(before, old, after, new, observer)


def compared_of(before: str, old: Sequence[Run], after: str, new: Sequence[Run], observer: JobObserver) -> Compared:
    """Compares the runs that two words mean. Raises UsageError if a run is on both sides."""
    each_once(Path(run.path) for run in (*old, *new)).none_refused()
    both = {run.id for run in old} & {run.id for run in new}
    if both:
        raise UsageError(
            f"{before!r:.80} and {after!r:.80} have the run {min(both)} in common. Give two sides of different runs."
        )
    old, new = _on_one_machine(before, old, after, new, observer)
    before_side, after_side = (
        side_of(name, [(run, findings(run)) for run in runs]) for name, runs in ((before, old), (after, new))
    )
    return compare(before_side, after_side)


def read_runs(meant: ChosenRuns, observer: JobObserver) -> list[Run]:
    """The runs that are meant. Notes unreadable ones, and raises StoreError if there are no others."""
    runs, paths = [], meant.files
    for note in meant.notes:
        observer.note(note)
    for path in paths:
        try:
            runs.append(load_run(path))
        except StoreError as error:
            if len(paths) == 1:
                raise
            observer.note(f"left out: {error}")
    if not runs:
        raise StoreError(f"none of {len(paths)} runs can be read. `fp8bench history verify` says why.")
    return runs


def _on_one_machine(
    before: str, old: Sequence[Run], after: str, new: Sequence[Run], observer: JobObserver
) -> tuple[Sequence[Run], Sequence[Run]]:
    """The runs of one machine that both sides have: the newest such of the second side.

    Raises UsageError if there is none, unless each side is of one machine, so that nobody can confuse them.
    """
    of_old, of_new = (dict.fromkeys(map(machine_of, side)) for side in (old, new))
    if len(of_old) == len(of_new) == 1:
        return old, new
    shared = [run for run in new if machine_of(run) in of_old]
    if not shared:
        places = [" and ".join(machine_words(machines)) for machines in (of_old, of_new)]
        raise UsageError(
            f"{before!r:.80} was measured on {places[0]}, and {after!r:.80} on {places[1]}: runs of several machines "
            "are not put together. Give the runs of one by their ids, with commas (`fp8bench history list --runs`)."
        )
    wanted = machine_of(max(shared, key=lambda run: run.started))
    kept = tuple([run for run in side if machine_of(run) == wanted] for side in (old, new))
    left = [run for run in (*old, *new) if machine_of(run) != wanted]
    here, *others = machine_words([wanted, *map(machine_of, left)])
    observer.note(
        f"{many(len(left), 'run')} of other machines left out: the rest is of {here}, and they are of "
        f"{' and '.join(others)}. Name runs by their ids to compare those"
    )
    return kept[0], kept[1]
