"""Compares two runs, commits or stores, figure by figure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fp8bench.analysis.compare.compare import Compared, compare
from fp8bench.analysis.compare.sides import Side, machine_of, machine_words, make_side
from fp8bench.analysis.findings import findings
from fp8bench.errors import StoreError, UsageError
from fp8bench.jobs.observer import JobObserver
from fp8bench.model import Run
from fp8bench.report.words.naming import many
from fp8bench.store.commit_runs import ChosenRuns, find_runs
from fp8bench.store.runs.listing import each_once
from fp8bench.store.runs.run_file import load_run


def compared_sides(old_word: str, new_word: str, store: Path, observer: JobObserver) -> Compared:
    old, new = (read_runs(find_runs(word, store), observer) for word in (old_word, new_word))
    return compared_of(old_word, old, new_word, new, observer)


def compared_of(
    old_word: str, old: Sequence[Run], new_word: str, new: Sequence[Run], observer: JobObserver
) -> Compared:
    """Compares the runs that two words select. Raises UsageError if a run is on both sides."""
    each_once(Path(run.path) for run in (*old, *new)).check_refusals()
    both = {run.id for run in old} & {run.id for run in new}
    if both:
        raise UsageError(
            f"{old_word!r:.80} and {new_word!r:.80} have the run {min(both)} in common. Give two sides of different "
            "runs."
        )
    old, new = _choose_machine(old_word, old, new_word, new, observer)
    return compare(_judge_side(old_word, old), _judge_side(new_word, new))


def _judge_side(word: str, runs: Sequence[Run]) -> Side:
    return make_side(word, [(run, findings(run)) for run in runs])


def read_runs(meant: ChosenRuns, observer: JobObserver) -> list[Run]:
    """Reads the selected runs. Notes unreadable ones, and raises StoreError if no others remain."""
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


def _choose_machine(
    old_word: str, old: Sequence[Run], new_word: str, new: Sequence[Run], observer: JobObserver
) -> tuple[Sequence[Run], Sequence[Run]]:
    """Returns the runs of one machine that both sides have: that of the newest such run of the new side.

    Raises UsageError without such a run. If each side has a single machine, all its runs count.
    """
    old_machines, new_machines = (dict.fromkeys(map(machine_of, side)) for side in (old, new))
    if len(old_machines) == len(new_machines) == 1:
        return old, new
    comparable = [run for run in new if machine_of(run) in old_machines]
    if not comparable:
        places = [" and ".join(machine_words(machines)) for machines in (old_machines, new_machines)]
        raise UsageError(
            f"{old_word!r:.80} was measured on {places[0]}, and {new_word!r:.80} on {places[1]}: runs of several "
            "machines are not put together. Give the runs of one by their ids, with commas (`fp8bench history list "
            "--runs`)."
        )
    machine = machine_of(max(comparable, key=lambda run: run.started))
    excluded = [run for run in (*old, *new) if machine_of(run) != machine]
    name, *excluded_names = machine_words([machine, *map(machine_of, excluded)])
    observer.note(
        f"{many(len(excluded), 'run')} of other machines left out: the rest is of {name}, and they are of "
        f"{' and '.join(excluded_names)}. Name runs by their ids to compare those"
    )
    return [run for run in old if machine_of(run) == machine], [run for run in new if machine_of(run) == machine]
