"""Measurements of several runs: sessions, the standard case of a machine, and the cells of a plan."""

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
from fp8bench.files import LOCK, lock_folder
from fp8bench.jobs.observer import JobObserver
from fp8bench.measure.handle import ProcessWorker
from fp8bench.model import DeviceFacts, Interval, Plan, Request, Run
from fp8bench.model.raw import Settings
from fp8bench.model.run import FleetPlan
from fp8bench.model.stopping import LEAST_ROUNDS
from fp8bench.pipeline import execute, now, resume
from fp8bench.plan.cells import cells_of
from fp8bench.protocols import Observer
from fp8bench.store.fleet_plans import check_cell, folder_of, runs_of
from fp8bench.store.reruns import add_reruns
from fp8bench.store.runs.run_file import check_store, load_run, missing_groups
from fp8bench.units import clock, percent

_WAIT_SHOWN_EVERY = 1.0


def execute_sessions(
    request: Request, store: Path, observer: Observer, command: str, sessions: int, apart: float
) -> Run:
    """Measures the request in several runs, each stored; returns the last, whose intervals span all of them.

    `apart` is the pause between runs in seconds. An interrupt ends it with the last existing run.
    """
    known: dict[str, tuple[Interval, ...]] = {}
    for number in range(sessions):
        run = execute(request, store, observer, command, note=f"session {number + 1} of {sessions}", sessions=known)
        if not run.finished or number + 1 == sessions or not _wait(run, apart, observer, number + 2, sessions):
            break
        alone = replace(run, records=tuple(replace(record, sessions=(), reruns=None) for record in run.records))
        ratios = ((case, finding.ratio) for case, finding in findings(alone).items())
        # Ranges count, too: leaving out disturbed sessions would make the span too narrow on a busy machine.
        known = known | {case: (*known.get(case, ()), ratio) for case, ratio in ratios if ratio is not None}
    return run


def _wait(run: Run, apart: float, observer: Observer, number: int, sessions: int) -> bool:
    until, case = time.monotonic() + apart, run.plan.groups[0].cases[0].case
    try:
        while (remaining := until - time.monotonic()) > 0:
            observer.working(
                case, f"session {number} of {sessions} begins in {clock(remaining)}", 1 - remaining / apart
            )
            time.sleep(min(_WAIT_SHOWN_EVERY, remaining))
    except KeyboardInterrupt:
        return False
    return True


# More runs than the comparisons that show a spread need, but few enough to wait for.
_STANDARD_RUNS = 6
_STANDARD_AXES = (("shape", ("512x512x512",)), ("product", ("forward",)))


def standard_runs(store: Path, observer: JobObserver) -> Iterator[str]:
    """Measures a standard case in fresh processes on each device, and how much these runs differ.

    The differences are stored, for the intervals of later runs.
    """
    check_store(store)
    with ProcessWorker(Settings()) as worker:
        keys = [device_facts.key for device_facts in worker.probe() if not device_facts.unusable]
    for device in keys:
        request = Request(
            "gemm", ("fp32", "bf16"), (device,), axes=_STANDARD_AXES, rounds=LEAST_ROUNDS, energy=False, tape=False
        )
        logs: list[float] = []
        with tempfile.TemporaryDirectory() as folder, observer.measuring() as watching:
            for number in range(_STANDARD_RUNS):
                run = execute(
                    request,
                    Path(folder),
                    watching,
                    "fp8bench doctor --calibrate",
                    note=f"a standard case, run {number + 1} of {_STANDARD_RUNS}",
                )
                if not run.finished:
                    break
                add_reruns(run.records, run, store)
                ratios = (finding.ratio for finding in findings(run).values())
                logs += [math.log(ratio.point) for ratio in ratios if ratio is not None]
        yield f"how far runs lie apart on {device}"
        if len(logs) < 2:
            yield "  not known: the standard case, a product of 512 in fp32 and bf16, gave no two ratios"
            continue
        apart, spread = math.exp(max(logs) - min(logs)) - 1, math.expm1(statistics.stdev(logs))
        yield (
            f"  a product of 512, bf16 over fp32, in {len(logs)} fresh processes: {percent(apart, 2)} at most, a "
            f"standard deviation of {percent(spread, 2)}; kept for the intervals of later runs, and each run adds to it"
        )


ORIGIN = "fleet"


def cut_into_cells(request: Request, plan: Plan, facts: Sequence[DeviceFacts], command: str) -> FleetPlan:
    cells = cells_of(plan, facts)
    if not cells:
        raise UsageError("nothing would be measured on this machine, so there is no cell. See --dry-run.")
    return FleetPlan(secrets.token_hex(4), now(), command, request, cells, __version__)


def measure_cell(plan: FleetPlan, number: int, store: Path, observer: Observer, command: str) -> tuple[bool, Run]:
    """Returns the run of a cell, and whether it was measured now: a finished one is not measured again.

    A run that was cut off is resumed on the same machine and software, otherwise measured from the start.
    """
    check_cell(plan, number)
    name = plan.name_of(number)
    with exclusively(folder_of(plan, number, store), f"cell {name} into {store}"):
        begun = [head for place, head in runs_of(plan, store) if place == number]
        whole = next((run for head in begun if (run := load_run(Path(head.path))).finished), None)
        if whole is not None and not missing_groups(whole):
            return False, whole
        for head in begun:
            try:
                return resume(Path(head.path), store, observer, command)
            except UsageError:
                continue  # it was begun elsewhere, or with other software
        return True, execute(plan.request, store, observer, command, ORIGIN, cell=(name, plan.cells[number]))


@contextmanager
def exclusively(folder: Path, what: str) -> Iterator[None]:
    """Holds the folder's lock; raises UsageError if another process has it."""
    with ExitStack() as stack:
        try:
            stack.enter_context(lock_folder(folder, 0))
        except StoreError:
            if not os.access(folder / LOCK, os.W_OK):
                raise
            raise UsageError(f"another process is measuring {what}, which is left to it") from None
        yield
