"""What a store has of a fleet, read for a report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from pathlib import Path

from fp8bench.analysis.fleet.found import FleetReport
from fp8bench.analysis.fleet.report import report_of
from fp8bench.analysis.fleet.seen import Seen, seen_of
from fp8bench.errors import RunNotFound, StoreError, UsageError
from fp8bench.files import is_locked
from fp8bench.model.fleet import CellStatus, FleetPlan
from fp8bench.store.fleet_plans import number_of, plans_of, read_plan, states_of
from fp8bench.store.runs.listing import COPIED, listing
from fp8bench.store.runs.read import load_run

_OTHERS = "are of no cell of the plan"
_RUNNING = "are still being measured"


def fleet_report(source: Path, store: Path, expected: Collection[str] = ()) -> FleetReport:
    """Of a plan's runs in a store, or, where `source` is a store, of the plans beside its runs, else of all of them."""
    if source.is_dir():
        store, plans = source, plans_of(source)
    else:
        plans = (read_plan(source),)
    seen, excluded = _read(store, plans)
    if not seen and not expected:
        what = f"the plan {plans[0].id}" if plans else "any run"
        raise UsageError(f"{store} has no run of {what}. Give --store DIR, or a store that `fleet collect` made.")
    return report_of(seen, plans, expected, (*excluded, *_failed_cells(store, plans)))


def _read(store: Path, plans: tuple[FleetPlan, ...]) -> tuple[list[Seen], list[str]]:
    """One run after the other: all of them are more than memory may hold."""
    there = listing(store)
    sentences = there.notes(there.refused)
    left = Counter({COPIED: len(there.copies)})
    seen = []
    for path in there.files:
        try:
            running, written, run = is_locked(path), path.stat().st_mtime, load_run(path)
        except (StoreError, RunNotFound) as error:
            sentences.append(str(error))
            continue
        except OSError as error:
            sentences.append(f"{path} could not be read ({error.strerror})")
            continue
        sentences += [f"{path}: {trouble}" for trouble in run.troubles]
        numbers = {plan.id: number_of(plan, run) for plan in plans}
        if running or (plans and all(number is None for number in numbers.values())):
            left[_RUNNING if running else _OTHERS] += 1
            continue
        seen.append(seen_of(run, written))
    return seen, [*(f"{count} runs: {why}" for why, count in (+left).items()), *sentences]


def _failed_cells(store: Path, plans: tuple[FleetPlan, ...]) -> list[str]:
    """Those whose process ended without a run, where the store is the one that they were measured into."""
    return [
        f"cell {state.number} of plan {plan.id} failed{where}: {state.why}"
        for plan in plans for state in states_of(plan, store) if state.status is CellStatus.FAILED
        for where in [f" on {state.attempts[-1].host}" if state.attempts else ""]
    ]  # fmt: skip
