"""Commands that measure several runs: the sessions of a request, a standard case that shows how much runs of this
machine differ, and the cells of a fleet plan. A cell is a part of the plan that one machine measures.
"""

from __future__ import annotations

import math
import os
import secrets
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from fp8bench import __version__
from fp8bench.analysis.findings import findings
from fp8bench.errors import StoreError, UsageError
from fp8bench.files import LOCK_FILE_NAME, lock_folder
from fp8bench.jobs.observer import JobObserver
from fp8bench.measure.handle import ProcessWorker
from fp8bench.model import DeviceFacts, Interval, Plan, Request, Run
from fp8bench.model.raw import Settings
from fp8bench.model.run import FleetPlan
from fp8bench.model.stopping import LEAST_ROUNDS
from fp8bench.pipeline import execute, now, resume
from fp8bench.plan.cells import list_plan_cells
from fp8bench.protocols import Observer
from fp8bench.store.fleet_plans import check_cell, get_cell_folder, iterate_plan_runs
from fp8bench.store.reruns import store_ratios
from fp8bench.store.runs.run_file import check_store, find_incomplete_groups, load_run
from fp8bench.units import clock, percent

_WAITING_UPDATE_SECONDS = 1.0


def execute_sessions(
    request: Request, store: Path, observer: Observer, command: str, sessions: int, pause: float
) -> Run:
    """Measures the request in several runs (sessions), and stores each of them. Returns the last run. Its intervals
    cover the ratios of all sessions. `pause` is the number of seconds between two runs. If the user interrupts,
    returns the last run that exists.
    """
    earlier_ratios_by_case: dict[str, tuple[Interval, ...]] = {}
    for number in range(sessions):
        name = f"session {number + 1} of {sessions}"
        run = execute(request, store, observer, command, note=name, sessions={**earlier_ratios_by_case})
        if not run.finished or number + 1 == sessions:
            break
        if not _wait_between_sessions(run, pause, observer, number + 2, sessions):
            break
        # Remove what earlier sessions and runs add to the intervals, to get the ratio of this session alone.
        records = [replace(record, sessions=(), reruns=None) for record in run.records]
        # Keep the ratios of disturbed sessions too. Otherwise, the intervals would be too narrow on a busy machine.
        for case, finding in findings(replace(run, records=tuple(records))).items():
            if finding.ratio is not None:
                earlier_ratios_by_case[case] = (*earlier_ratios_by_case.get(case, ()), finding.ratio)
    return run


def _wait_between_sessions(run: Run, pause: float, observer: Observer, number: int, sessions: int) -> bool:
    end = time.monotonic() + pause
    case = run.plan.groups[0].cases[0].case
    try:
        while (remaining := end - time.monotonic()) > 0:
            observer.working(
                case, f"session {number} of {sessions} begins in {clock(remaining)}", 1 - remaining / pause
            )
            time.sleep(min(_WAITING_UPDATE_SECONDS, remaining))
    except KeyboardInterrupt:
        return False
    return True


# The number of runs of the standard case: enough to compute a spread, and short enough to wait for.
_STANDARD_CASE_RUNS = 6
_STANDARD_CASE_AXES = (("shape", ("512x512x512",)), ("product", ("forward",)))


def measure_standard_case(store: Path, observer: JobObserver) -> Iterator[str]:
    """Measures a standard case several times on each device, in fresh processes, to find how much the ratio of two
    precisions differs from run to run.

    The differences between these runs are stored, and widen the intervals of later runs.
    """
    # 1. Find the devices. First check that the ratios can be stored.
    check_store(store)
    with ProcessWorker(Settings()) as worker:
        usable_device_keys = [device_facts.key for device_facts in worker.probe() if not device_facts.unusable]
    for device in usable_device_keys:
        # 2. Measure the case in several runs. The runs are temporary, and only their ratios are stored.
        request = Request(
            "gemm", ("fp32", "bf16"), (device,), axes=_STANDARD_CASE_AXES, rounds=LEAST_ROUNDS, energy=False, tape=False
        )
        log_ratios: list[float] = []
        with tempfile.TemporaryDirectory() as folder, observer.measuring() as watching:
            for number in range(_STANDARD_CASE_RUNS):
                run = execute(
                    request,
                    Path(folder),
                    watching,
                    "fp8bench doctor --calibrate",
                    note=f"a standard case, run {number + 1} of {_STANDARD_CASE_RUNS}",
                )
                if not run.finished:
                    break
                store_ratios(run.records, run, store)
                ratios = (finding.ratio for finding in findings(run).values())
                log_ratios += [math.log(ratio.point) for ratio in ratios if ratio is not None]
        # 3. Describe how much the ratios differ.
        yield f"difference between runs on {device}"
        if len(log_ratios) < 2:
            yield "  unknown: the standard case, a 512x512x512 GEMM in fp32 and bf16, gave fewer than two ratios"
            continue
        largest_difference = math.exp(max(log_ratios) - min(log_ratios)) - 1
        spread = math.expm1(statistics.stdev(log_ratios))
        yield (
            f"  the speed-up of bf16 over fp32 for a 512x512x512 GEMM, in {len(log_ratios)} fresh processes, differs "
            f"by at most {percent(largest_difference, 2)}, with a standard deviation of {percent(spread, 2)}; stored, "
            "because it widens the intervals of later runs"
        )


FLEET_RUN_ORIGIN = "fleet"


def make_fleet_plan(request: Request, plan: Plan, facts: Sequence[DeviceFacts], command: str) -> FleetPlan:
    fleet_cells = list_plan_cells(plan, facts)
    if not fleet_cells:
        raise UsageError("nothing would be measured on this machine, so there is no cell. See --dry-run.")
    return FleetPlan(secrets.token_hex(4), now(), command, request, fleet_cells, __version__)


def measure_cell(plan: FleetPlan, number: int, store: Path, observer: Observer, command: str) -> tuple[bool, Run]:
    """Measures a cell (a part of a fleet plan). Returns whether the cell was measured now, and the cell's run. A
    finished cell is not measured again.

    An interrupted run is resumed if machine and software are the same. Otherwise the cell is measured from the start.
    """
    check_cell(plan, number)
    cell_name = plan.name_of(number)
    with exclusive_lock(get_cell_folder(plan, number, store), f"cell {cell_name} into {store}"):
        started_cell_runs = [head for place, head in iterate_plan_runs(plan, store) if place == number]
        finished_run = next((run for head in started_cell_runs if (run := load_run(Path(head.path))).finished), None)
        if finished_run is not None and not find_incomplete_groups(finished_run):
            return False, finished_run
        for head in started_cell_runs:
            try:
                return resume(Path(head.path), store, observer, command)
            except UsageError:
                continue  # this run was started on a different machine, or with different software
        return True, execute(
            plan.request, store, observer, command, FLEET_RUN_ORIGIN, cell=(cell_name, plan.cells[number])
        )


@contextmanager
def exclusive_lock(folder: Path, subject: str) -> Iterator[None]:
    """Holds the lock of a folder. Raises UsageError if another process holds it."""
    with ExitStack() as stack:
        try:
            stack.enter_context(lock_folder(folder, 0))
        except StoreError:
            # Without access to the lock file, the store is the problem, and not another process.
            if not os.access(folder / LOCK_FILE_NAME, os.W_OK):
                raise
            raise UsageError(f"another process is already measuring {subject}") from None
        yield
