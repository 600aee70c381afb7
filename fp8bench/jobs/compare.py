"""Compares two runs, commits or stores, figure by figure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fp8bench.analysis.compare.compare import ComparedSides, compare
from fp8bench.analysis.compare.sides import ComparisonSide, collect_hardware_facts, make_comparison_side, name_machines
from fp8bench.analysis.findings import findings
from fp8bench.errors import StoreError, UsageError
from fp8bench.jobs.observer import JobObserver
from fp8bench.model import Run
from fp8bench.report.words.naming import many
from fp8bench.store.commit_runs import ChosenRuns, find_runs
from fp8bench.store.runs.listing import list_distinct_runs
from fp8bench.store.runs.run_file import load_run


def compare_named_sides(old_name: str, new_name: str, store: Path, observer: JobObserver) -> ComparedSides:
    # Find the files of both sides before reading any, so that a missing file is reported for the right side.
    chosen_runs_by_side = [find_runs(name, store) for name in (old_name, new_name)]
    old, new = (read_runs(chosen, observer) for chosen in chosen_runs_by_side)
    return compare_runs(old_name, old, new_name, new, observer)


def compare_runs(
    old_name: str, old: Sequence[Run], new_name: str, new: Sequence[Run], observer: JobObserver
) -> ComparedSides:
    """Compares the runs of two named sides. If a side has runs of several machines, compares only one machine that both
    sides have. Raises UsageError if they have no machine in common then, or if a run is on both sides.
    """
    # Refuse different files with the same run id. Then refuse a run that is on both sides.
    list_distinct_runs(Path(run.path) for run in (*old, *new)).raise_for_refused_files()
    common_run_ids = {run.id for run in old} & {run.id for run in new}
    if common_run_ids:
        raise UsageError(
            f"{old_name!r:.80} and {new_name!r:.80} have the run {min(common_run_ids)} in common. Give two sides of "
            "different runs."
        )
    # If both sides have several machines in common, choose the machine with the newest run of the new side.
    old_machines, new_machines = (dict.fromkeys(map(collect_hardware_facts, side)) for side in (old, new))
    if len(old_machines) > 1 or len(new_machines) > 1:
        comparable_runs = [run for run in new if collect_hardware_facts(run) in old_machines]
        if not comparable_runs:
            machine_texts = [" and ".join(name_machines(machines)) for machines in (old_machines, new_machines)]
            raise UsageError(
                f"{old_name!r:.80} was measured on {machine_texts[0]}, and {new_name!r:.80} on {machine_texts[1]}: "
                "runs of several machines are not combined. Give the runs of one by their ids, with commas (`fp8bench "
                "history list --runs`)."
            )
        machine = collect_hardware_facts(max(comparable_runs, key=lambda run: run.started))
        machines_of_excluded_runs = [
            collect_hardware_facts(run) for run in (*old, *new) if collect_hardware_facts(run) != machine
        ]
        name, *excluded_names = name_machines([machine, *machines_of_excluded_runs])
        observer.note(
            f"comparing only runs of {name}, and leaving out {many(len(machines_of_excluded_runs), 'run')} of "
            f"{' and '.join(excluded_names)}. Name runs by their ids to compare runs of other machines"
        )
        old = [run for run in old if collect_hardware_facts(run) == machine]
        new = [run for run in new if collect_hardware_facts(run) == machine]
    return compare(_make_comparison_side(old_name, old), _make_comparison_side(new_name, new))


def _make_comparison_side(name: str, runs: Sequence[Run]) -> ComparisonSide:
    return make_comparison_side(name, [(run, findings(run)) for run in runs])


def read_runs(chosen: ChosenRuns, observer: JobObserver) -> list[Run]:
    """Reads the chosen runs. Notes unreadable runs, and raises StoreError if no run can be read."""
    runs = []
    for note in chosen.notes:
        observer.note(note)
    for path in chosen.files:
        try:
            runs.append(load_run(path))
        except StoreError as error:
            # A single run that cannot be read leaves nothing to compare.
            if len(chosen.files) == 1:
                raise
            observer.note(f"left out: {error}")
    if not runs:
        raise StoreError(f"none of {len(chosen.files)} runs can be read. `fp8bench history verify` says why.")
    return runs
