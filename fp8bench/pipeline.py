"""The whole flow of a run: request -> device facts -> plan -> measurements -> history -> run.

Analysis and reports start from the returned Run, or from its stored file. This module prints nothing.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from fp8bench import __version__
from fp8bench.analysis.verdicts import find_fastest, is_decided
from fp8bench.errors import NotKept, StoreError, UsageError, WorkerError, WorkerFault, as_usage
from fp8bench.files import check_folder
from fp8bench.measure.arm import Quantisers
from fp8bench.measure.capacity import CapacityRule
from fp8bench.measure.ceilings import measure_ceilings
from fp8bench.measure.environment import describe_load, gather
from fp8bench.measure.group import GroupMeasurement, Method
from fp8bench.measure.handle import (
    START_SECONDS,
    CountingWorker,
    LocalWorker,
    ProcessWorker,
    Worker,
    claim_process,
    counting_worker,
    start_workers_early,
)
from fp8bench.measure.interrupts import hold_back_interrupts, ignore_interrupts
from fp8bench.measure.limits import Limits
from fp8bench.measure.passes import make_trace_folder
from fp8bench.measure.ranks.worker import RanksWorker
from fp8bench.measure.sensors.device_state import read_device_settings
from fp8bench.measure.sensors.meter import Meters
from fp8bench.measure.windows import window_rule_for
from fp8bench.model import Ceilings, DeviceFacts, Group, Interval, Measurement, Plan, Record, Request, Resumption, Run
from fp8bench.model.raw import Settings
from fp8bench.model.request import NVTX, PROFILERS
from fp8bench.model.run import BENCH, Cell
from fp8bench.model.stopping import is_brisk, rule_for
from fp8bench.model.words import MEASURING_CEILINGS
from fp8bench.plan.cells import make_cell, restrict_to_cell
from fp8bench.plan.corpus import Corpus
from fp8bench.plan.make import has_reference_added, make_plan, settings_with_batch_search, with_batch
from fp8bench.plan.resolve import Switches, resolve
from fp8bench.plan.resumable import find_difference, refuse_changed_conditions, refuse_lost_header, refuse_missing_files
from fp8bench.protocols import Observer
from fp8bench.registry import workloads
from fp8bench.store.ceilings import find_or_measure_ceilings
from fp8bench.store.reruns import add_rerun_spreads, store_ratios
from fp8bench.store.runs.listing import add_stored_scales, list_running_stems, store_of
from fp8bench.store.runs.run_file import RunWriter, check_store, find_incomplete_groups, load_run, reopen_run, start_run

Sessions = Mapping[str, tuple[Interval, ...]]
# The origin of a run in which the gate measures selected cases of an earlier run again.
REMEASURED_ORIGIN = "gate"


def execute(
    request: Request,
    store: Path,
    observer: Observer,
    command: str,
    origin: str = "suite",
    folder: Path | None = None,
    note: str = "",
    cell: tuple[str, Cell] | None = None,
    sessions: Sessions = MappingProxyType({}),
    begun: Sequence[ProcessWorker] = (),
    meanwhile: Callable[[], object] = lambda: None,
) -> Run:
    """Plans, measures and stores a run. Every group of cases is stored before the next one starts.

    `origin` is the command that made the request. The run records the commit of the repository that contains
    `folder`, by default the working directory. `note` is stored with the run. `cell` is a part of a fleet's plan with
    its name. If it is given, only the group of this cell is measured. `sessions` holds for each case the ratios that
    earlier sessions of the same request measured. `begun` are workers from `start_workers_early`, and `meanwhile` is
    called while they import torch.

    An interrupt (Ctrl-C) ends the run early: finished work is stored and returned, with `finished` False. If the
    store fails during the run, raises NotKept, which holds the run.
    """
    # 1. Refuse requests that cannot be measured, before any worker starts.
    start = time.monotonic()
    request = add_stored_scales(request, store)
    with _prepare_run(request, store, begun=begun) as ready, Meters(request.energy) as meters:
        meanwhile()
        run = replace(_open_run(request, ready, meters, command, folder), origin=origin)
        if cell is not None:
            run = replace(run, plan=restrict_to_cell(run.plan, cell[1]), cell=cell[0])
        # 2. Show the plan and store the header before the first group.
        observer.planned(run.plan)
        writer = start_run(run, store)
        for text in filter(None, (note, *run.notes)):
            writer.note(text)
        run = replace(run, path=str(writer.path))
        # 3. Measure all groups of the plan.
        return _measure_groups(run, run.plan.groups, store, writer, ready, meters, observer, start, sessions)


def resume(path: Path, store: Path, observer: Observer, command: str) -> tuple[bool, Run]:
    """Measures the missing groups of an interrupted run. Returns whether there were any, and the run, which is again
    unfinished after another interrupt. `store` is used if the run's file is not in a store.
    """
    start = time.monotonic()
    run = load_run(path)
    # Refuse a damaged file first, because resuming would append to it.
    refuse_lost_header(run)
    groups = find_incomplete_groups(run)
    if run.finished and not groups:
        return False, run
    refuse_missing_files(run)
    store = store_of(path) or store
    with _prepare_run(run.request, store) as ready, Meters(run.request.energy) as meters:
        # Check that machine, versions and environment are the same: a run must not mix different conditions.
        facts = ready.timing.probe()
        environment = gather(ready.timing.software(), __version__, run.request.threads, _list_user_code(run.request))
        plan = make_plan(run.request, facts, ready.text, has_reference_added(run.plan))
        plan = restrict_to_cell(plan, make_cell(run.plan.groups[0])) if run.cell else plan
        refuse_changed_conditions(run, plan, facts, environment)
        observer.planned(replace(run.plan, groups=groups))
        writer = reopen_run(path, Resumption(now(), command, environment))
        run = load_run(path)  # load the run again: this leaves out the records of interrupted groups
        return True, _measure_groups(run, find_incomplete_groups(run), store, writer, ready, meters, observer, start)


def measure_again(run: Run, cases: Collection[str], store: Path, observer: Observer, command: str) -> Run:
    """Measures again all groups of a run that contain one of `cases`, in a fresh process. Returns a separate run in
    `store`.

    Raises UsageError if the conditions differ from those of the run, for example another machine, commit or torch.
    """
    start = time.monotonic()
    refuse_lost_header(run)
    refuse_missing_files(run)
    request = replace(run.request, trace=None, isolation=True)
    with _prepare_run(request, store) as ready, Meters(request.energy) as meters:
        new_run = _open_run(request, ready, meters, command, None, has_reference_added(run.plan))
        repeated = replace(new_run, origin=REMEASURED_ORIGIN)
        difference = find_difference(run, repeated.plan, repeated.devices, repeated.environment)
        if difference:
            raise UsageError(
                f"the run {run.id} was measured under other conditions: {difference}. Measure under its conditions."
            )
        groups = tuple(group for group in repeated.plan if any(planned.case.id in cases for planned in group.cases))
        repeated = replace(repeated, plan=replace(repeated.plan, groups=groups))
        observer.planned(repeated.plan)
        writer = start_run(repeated, store)
        repeated = replace(repeated, path=str(writer.path))
        return _measure_groups(repeated, groups, store, writer, ready, meters, observer, start)


def plan_only(request: Request, store: Path) -> tuple[Plan, tuple[DeviceFacts, ...]]:
    """Returns the plan of a run, and the devices of this machine. Measures nothing."""
    request = add_stored_scales(request, store)
    with _prepare_run(request, store, write=False) as ready:
        facts = ready.timing.probe()
    return make_plan(request, facts, ready.text), facts


def _measure_groups(
    run: Run,
    groups: Sequence[Group],
    store: Path,
    writer: RunWriter,
    ready: RunResources,
    meters: Meters,
    observer: Observer,
    start: float,
    sessions: Sessions = MappingProxyType({}),
) -> Run:
    """Measures the groups one by one. Each group is stored before the next one begins."""
    worker = ready.timing
    noted_runs: set[str] = set()
    measured: list[Record] = []
    quantisers = Quantisers(ready.switches.why_eager)
    errors: dict[str, tuple[Measurement, ...]] = {}
    lost: dict[str, str] = {}
    try:
        ready.wait_for_second()
        ceilings = _get_ceilings(run, groups, store, ready, observer)
        for index, group in enumerate(groups):
            # Note other runs on this machine as soon as they appear, because two runs disturb each other.
            for stem in sorted(set(list_running_stems(writer.path)) - noted_runs):
                writer.note(f"run {stem} was measured at the same time ({describe_load()}): each disturbs the other")
                noted_runs.add(stem)
            budget = budget_share(run.request.budget, start, len(groups) - index)
            untimed = _choose_counting_worker(run, group, worker if group is groups[-1] else None, ready.untimed)
            records = _measure_group(
                group, run, budget, ready, meters, observer, quantisers, ceilings, lost, errors, untimed
            )
            # Differences between earlier runs of the same cases widen the intervals. This run becomes one of the
            # earlier runs afterwards.
            with_earlier = add_rerun_spreads(records, run, store)
            measured += [replace(record, sessions=sessions.get(record.case.id, ())) for record in with_earlier]
            with hold_back_interrupts():
                writer.append(measured[-len(group.cases) :])
            for record in measured[-len(group.cases) :]:
                observer.finished(record)
            store_ratios(records, run, store)
        writer.finish("finished")
    except KeyboardInterrupt:
        with (
            ignore_interrupts(),
            contextlib.suppress(StoreError),
        ):  # a run whose file has no end line also counts as unfinished
            writer.finish("interrupted")
    except StoreError as error:
        raise NotKept(str(error), replace(run, records=(*run.records, *measured), troubles=(str(error),))) from None
    finally:
        writer.close()
    with ignore_interrupts():
        return load_run(writer.path)


def _get_ceilings(
    run: Run, groups: Sequence[Group], store: Path, ready: RunResources, observer: Observer
) -> dict[str, Ceilings]:
    """Returns the ceilings (highest measured rates) of each device for this run's number of threads. They are read
    from the store or measured now. Devices for which neither is possible are left out.
    """
    if run.request.ranks is not None:  # the ranks run in several processes, which would share a rate
        return {}
    first_cases = {
        case.case.device: case.case for group in reversed(groups) for case in reversed(group.cases) if case.runs
    }

    def measure(device: DeviceFacts) -> Ceilings:
        observer.working(first_cases[device.key], MEASURING_CEILINGS, 0.0)
        return measure_ceilings(ready.timing, device)

    by_device = {}
    for device in (device_facts for device_facts in run.devices if device_facts.key in first_cases):
        measure_now = partial(measure, device) if ready.switches.ceilings else None
        try:
            ceilings = find_or_measure_ceilings(store, run.environment, device, measure_now)
        except WorkerError:  # continue without a ceiling, in a fresh worker
            ready.timing.restart()
            continue
        if ceilings is not None:
            by_device[device.key] = ceilings
    return by_device


class RunResources(NamedTuple):
    """The text, the switches and the workers of a run.

    `timing` is the worker that times steps, and `untimed` runs the untimed passes. `counting` counts allocations, if
    that was requested. `second` is the same worker as `untimed`, if it may run while the timing worker works.
    """

    corpus: Corpus | None
    switches: Switches
    timing: Worker
    untimed: Worker
    counting: CountingWorker | None
    second: Worker | None

    @property
    def text(self) -> str | None:
        return self.corpus.identity if self.corpus else None

    def wait_for_second(self) -> None:
        """Waits until the second worker has imported torch, so that its import does not disturb the timing."""
        if self.second is not None:
            with contextlib.suppress(WorkerError):  # the next request to the worker reports the reason
                self.second.within(START_SECONDS).versions(())


@contextmanager
def _prepare_run(
    request: Request, store: Path, write: bool = True, begun: Sequence[ProcessWorker] = ()
) -> Iterator[RunResources]:
    """Refuses impossible requests, then starts the workers, unless `begun` already holds them. During the body, no
    other run measures in this process.
    """
    with ExitStack() as stack:
        stack.enter_context(claim_process(request.isolation))
        resolved = resolve(request, os.environ)
        if write:
            if request.trace in PROFILERS:
                raise UsageError(
                    f"{request.trace} has to be started around this process, which `fp8bench suite` does. Elsewhere, "
                    f"start your script or command under {request.trace} and give --trace {NVTX} (trace={NVTX!r})."
                )
            if request.trace not in (None, NVTX):
                check_folder("--trace", Path(request.trace))
            check_store(store)  # create a new store before the corpus is written into it
        corpus = resolved.corpus(store, write)
        # Start the workers now. They import torch, which takes seconds, while this process continues.
        if not begun and write:
            begun = stack.enter_context(start_workers_early(request, resolved.switches.second))
        timing, untimed = (
            stack.enter_context(worker_for(request, corpus, worker)) for worker in (*begun, None, None)[:2]
        )
        needs_counters = request.counters and write
        counting_allocations = (
            stack.enter_context(counting_worker(worker_settings(request, corpus))) if needs_counters else None
        )
        yield RunResources(
            corpus, resolved.switches, timing, untimed, counting_allocations, untimed if len(begun) > 1 else None
        )


def worker_settings(request: Request, corpus: Corpus | None) -> Settings:
    return Settings(request.threads, request.seed, request.imports, corpus.path if corpus else None)


@contextmanager
def worker_for(request: Request, corpus: Corpus | None, begun: ProcessWorker | None = None) -> Iterator[Worker]:
    """Yields the worker for a request, and closes it at the end. `begun` is a worker that was started earlier."""
    settings = worker_settings(request, corpus)
    if begun is not None:
        worker: Worker = begun
        begun.settings = settings
    elif request.ranks is not None:
        worker = RanksWorker(settings, request.ranks)
    else:
        worker = ProcessWorker(settings) if request.isolation else LocalWorker(settings)
    try:
        yield worker
    finally:
        with ignore_interrupts():
            worker.close()


def _list_user_code(request: Request) -> tuple[str, ...]:
    """Returns the modules and files whose code a run measures: imported ones, and those of callables."""
    callables = (request.reference or "", *request.dtypes) if request.suite == BENCH else ()
    files = (name.rpartition(":")[0] for name in callables)
    return (*request.imports, *dict.fromkeys(file for file in files if file.endswith(".py")))


def _open_run(
    request: Request, ready: RunResources, meters: Meters, command: str, folder: Path | None, compares: bool = True
) -> Run:
    """Returns a run with its header. Only the overheads of measuring have been measured by then."""
    worker = ready.timing
    facts = worker.probe()
    plan = make_plan(request, facts, ready.text, compares)
    remarks = examine(plan, facts, worker, Limits(request.case_timeout))
    used_devices = {planned.case.device for group in plan for planned in group.cases if planned.runs}
    ready.wait_for_second()
    environment = gather(worker.software(), __version__, request.threads, _list_user_code(request), folder=folder)
    for fact in facts:
        # Leave out settings of devices that the run does not use: they would make equal runs look different.
        if fact.key in used_devices:
            environment = environment.also(read_device_settings(fact, meters.of(fact)))
    return Run(
        id=secrets.token_hex(4),
        started=now(),
        command=command,
        request=request,
        plan=plan,
        environment=environment,
        devices=facts,
        overheads=tuple(
            (fact.key, worker.within(START_SECONDS).overheads(fact)) for fact in facts if fact.key in used_devices
        ),
        notes=tuple(dict.fromkeys(remarks)),
    )


def examine(plan: Plan, facts: Sequence[DeviceFacts], worker: Worker, limits: Limits) -> list[str]:
    """Checks the cases for problems that only a worker can detect, before anything is stored. Raises UsageError for
    impossible cases, and returns remarks on the other cases.
    """
    devices, remarks = {fact.key: fact for fact in facts}, list[str]()
    for planned in (case for group in plan for case in group.cases if case.runs):
        if workloads.get(planned.case.workload).examined:
            try:
                remarks += worker.within(limits.for_untimed_pass(planned.work)).examine(
                    planned.case, devices[planned.case.device]
                )
            except WorkerFault as fault:
                if fault.out_of_memory:
                    raise UsageError(
                        f"{planned.case.id} cannot be measured: not enough memory for it and a copy ({fault}). "
                        "Choose a smaller one."
                    ) from None
                raise as_usage(fault) from None
    return remarks


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _choose_counting_worker(
    run: Run, group: Group, free_worker: Worker | None, untimed_worker: Worker
) -> Worker | None:
    """Returns the worker that counts the operators of a group, or None if this run does not count them. Usually it is
    the untimed worker. After the last group it may be the timing worker, which is then free (`free_worker`).
    """
    if run.origin == REMEASURED_ORIGIN or run.request.ranks is not None:
        return None  # the earlier run already counted the operators of these cases
    is_compiled = run.request.shares or any(case.work.setup_seconds for case in group.cases)
    is_brisk_run = is_brisk(run.request.brisk, run.request.budget, len(run.plan.groups))
    on_gpu = any(not case.case.device.startswith("cpu") for case in group.cases)
    return untimed_worker if free_worker is None or is_compiled or (is_brisk_run and on_gpu) else free_worker


def budget_share(budget: float | None, start: float, remaining_parts: int) -> float | None:
    """Returns the seconds for each of `remaining_parts`: an equal part of what is left of the budget. The budget
    started at `start`.
    """
    return None if budget is None else max(0.0, budget - (time.monotonic() - start)) / remaining_parts


def _measure_group(
    group: Group,
    run: Run,
    budget: float | None,
    ready: RunResources,
    meters: Meters,
    observer: Observer,
    quantisers: Quantisers,
    ceilings: Mapping[str, Ceilings],
    lost: dict[str, str],
    errors: dict[str, tuple[Measurement, ...]],
    untimed: Worker | None,
) -> tuple[Record, ...]:
    request, facts, switches = (
        run.request,
        {device_facts.key: device_facts for device_facts in run.devices},
        ready.switches,
    )
    is_brisk_run = is_brisk(request.brisk, request.budget, len(run.plan.groups))
    window_rule = window_rule_for(request, len(run.plan.groups)) if request.ranks is None else None
    if not workloads.get(group.cases[0].case.workload).fused:
        window_rule, quantisers = None, Quantisers("the suite is about numbers, and compiles none")
    device = next((facts[planned.case.device] for planned in group.cases if planned.runs), None)
    searches_batch = request.memory_limit is not None and group.setting in settings_with_batch_search(run.plan)
    method = Method(
        rule=rule_for(request.quick, request.rounds, budget, is_brisk_run),
        judge=is_decided,
        seed=request.seed,
        limits=Limits(request.case_timeout),
        quantisers=quantisers,
        windows=window_rule,
        capacity=CapacityRule(request.memory_limit or None, with_batch) if searches_batch else None,
        traces=make_trace_folder(run),
        ceilings=ceilings,
        warm_up_seconds=switches.warm_up_seconds,
        lost=lost,
        choose=None if request.quick or is_brisk_run or request.budget is not None else find_fastest,
        tapes=switches.tapes,
        tapes_apart=switches.tapes_apart,
        looks_again=request.tape or not request.quick,
        shares=request.shares,
        brisk=is_brisk_run,
        errors=errors,
    )
    meter = meters.of(device) if device is not None else None
    second_worker = ready.second if device is not None and not device.accelerated else None
    return GroupMeasurement(
        group, facts, ready.timing, observer, method, meter, untimed, ready.counting, second_worker
    ).run()
