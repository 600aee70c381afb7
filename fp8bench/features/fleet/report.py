"""What a store has of a fleet, read for a report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path

from fp8bench.errors import RunNotFound, StoreError, UsageError
from fp8bench.features.fleet.alarms import report_of
from fp8bench.features.fleet.machines import FleetReport, Seen, seen_of
from fp8bench.files import is_locked
from fp8bench.model import Run
from fp8bench.model.fleet import CellStatus, FleetPlan
from fp8bench.store.fleet_plans import number_of, plans_of, read_plan, states_of
from fp8bench.store.runs.listing import REFUSED, REMEDY, listing
from fp8bench.store.runs.read import load_head, load_run
from fp8bench.store.verify_machines import samples_of

_OTHERS = "are of no cell of the plan"
_RUNNING = "are still being measured"


def fleet_report(source: Path, store: Path, expected: Collection[str] = ()) -> FleetReport:
    """Of a plan's runs in a store, or, where `source` is a store, of the plans beside its runs, else of all of them."""
    if source.is_dir():
        store, plans = source, plans_of(source)
    else:
        plans = (read_plan(source),)
    seen, left, doubts = _read(store, partial(_is_of_one, plans) if plans else lambda _: True)
    if not seen and not expected:
        what = f"run of the plan {plans[0].id}" if plans else "run"
        why = "; ".join(_counts(left) or doubts[:1])
        found = f"of {store} no run counts ({why.rstrip('.')})" if why else f"{store} has no {what}"
        raise UsageError(f"{found}. Give --store DIR, or a store that `fleet collect` made.")
    del left[REFUSED]  # each is named among the doubts
    return report_of(seen, plans, expected, (*_counts(left), *doubts, *_failed_cells(store, plans)))


def fleet_of(runs: Sequence[Run], store: Path) -> FleetReport | None:
    """Of all runs in a store that are cells of the same plans as some runs; None where these are cells of none."""
    wanted = {run.fleet_plan for run in runs} - {""}
    if not wanted:
        return None
    try:
        plans = tuple(plan for plan in plans_of(store) if plan.id in wanted)
        troubles: tuple[str, ...] = ()
    except UsageError as error:
        plans, troubles = (), (str(error),)
    seen, _, doubts = _read(store, lambda run: run.fleet_plan in wanted)
    return report_of(seen, plans, (), (*troubles, *doubts, *_failed_cells(store, plans)))


def _counts(left: Counter[str]) -> list[str]:
    """Of runs that are left out how many, and why."""
    return [f"{count} run{'s' * (count != 1)}: {why}" for why, count in (+left).items()]


def _is_of_one(plans: Sequence[FleetPlan], run: Run) -> bool:
    return any(number_of(plan, run) is not None for plan in plans)


def _read(store: Path, wanted: Callable[[Run], bool]) -> tuple[list[Seen], Counter[str], list[str]]:
    """Those that are wanted by their headers, how many are left out and why, and what is wrong.

    One run after the other: all of them are more than memory may hold.
    """
    there = listing(store)
    doubts = there.notes(there.refused)
    left = there.left
    seen: list[tuple[Seen, Path, int | None]] = []
    for path in there.files:
        try:
            if not wanted(load_head(path)):
                left[_OTHERS] += 1
                continue
            running, written, run = is_locked(path), path.stat().st_mtime, load_run(path)
        except (StoreError, RunNotFound) as error:
            doubts.append(str(error))
            continue
        except OSError as error:
            doubts.append(f"{path} could not be read ({error.strerror})")
            continue
        doubts += [f"{path}: {trouble}" for trouble in run.troubles]
        if running:
            left[_RUNNING] += 1
        else:
            seen.append((seen_of(run, written), path, samples_of(run)))
    counting, copies = _measured_once(seen)
    return counting, left, [*doubts, *copies]


def _measured_once(seen: Sequence[tuple[Seen, Path, int | None]]) -> tuple[list[Seen], list[str]]:
    """Runs without those of several machines that have the same times to the nanosecond; and what is wrong with these.

    Only one machine can have measured them, and nobody knows which.
    """
    machines: dict[int | None, set[str]] = {}
    files: dict[int | None, list[str]] = {}
    for run, path, samples in seen:
        machines.setdefault(samples, set()).add(run.machine)
        files.setdefault(samples, []).append(str(path))
    copied = [samples for samples, names in machines.items() if samples is not None and len(names) > 1]
    doubts = [
        f"{' and '.join(files[samples])} have the same times to the nanosecond under the machines "
        f"{' and '.join(sorted(machines[samples]))}, so that none of them counts. {REMEDY}"
        for samples in copied
    ]
    return [run for run, _, samples in seen if samples not in copied], doubts


def _failed_cells(store: Path, plans: tuple[FleetPlan, ...]) -> list[str]:
    """Those whose process ended without a run, where the store is the one that they were measured into."""
    return [
        f"cell {state.number} of plan {plan.id} failed{where}: {state.why}"
        for plan in plans for state in states_of(plan, store) if state.status is CellStatus.FAILED
        for where in [f" on {state.attempts[-1].host}" if state.attempts else ""]
    ]  # fmt: skip
