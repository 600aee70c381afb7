"""Measures a run from request to result: request -> device facts -> plan -> measurements -> stored run.

Analysis and reports start from the returned Run, or from its stored file. This module prints nothing.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from fp8bench import __version__
from fp8bench.analysis.verdicts import find_fastest_candidate, is_case_decided
from fp8bench.errors import NotKept, StoreError, UsageError, WorkerError, WorkerFault, to_original_error
from fp8bench.files import check_folder
from fp8bench.measure.arm import QuantiserCompilation
from fp8bench.measure.capacity import CapacitySearchRule
from fp8bench.measure.ceilings import measure_ceilings
from fp8bench.measure.environment import describe_current_load, gather
from fp8bench.measure.group import GroupMeasurement, MeasurementMethod
from fp8bench.measure.handle import (
    START_SECONDS,
    CountingWorker,
    LocalWorker,
    ProcessWorker,
    Worker,
    open_counting_worker,
    register_process_run,
    start_workers_early,
)
from fp8bench.measure.interrupts import hold_back_interrupts, ignore_interrupts
from fp8bench.measure.limits import RequestTimeLimits
from fp8bench.measure.passes import make_trace_folder
from fp8bench.measure.ranks.worker import RanksWorker
from fp8bench.measure.sensors.device_state import read_device_settings
from fp8bench.measure.sensors.meter import Meters
from fp8bench.measure.windows import make_window_rule
from fp8bench.model import Case, Ceilings, DeviceFacts, Group, Interval, Plan, Record, Request, Resumption, Run
from fp8bench.model.raw import Settings
from fp8bench.model.request import NVTX, PROFILERS
from fp8bench.model.run import BENCH, Cell
from fp8bench.model.stopping import is_run_brisk, make_stopping_rule
from fp8bench.model.words import MEASURING_CEILINGS
from fp8bench.plan.cells import make_fleet_cell, restrict_to_cell
from fp8bench.plan.corpus import Corpus
from fp8bench.plan.make import has_added_reference, make_plan, replace_batch_size, settings_with_batch_search
from fp8bench.plan.resolve import EnvironmentSwitches, resolve_request
from fp8bench.plan.resumable import (
    find_condition_difference,
    refuse_changed_conditions,
    refuse_missing_user_files,
    refuse_run_without_header,
)
from fp8bench.protocols import Observer, SilentObserver
from fp8bench.registry import workloads
from fp8bench.store.ceilings import find_or_measure_ceilings
from fp8bench.store.reruns import add_rerun_spreads, store_ratios
from fp8bench.store.runs.listing import add_scales_from_run, find_store_of_run, list_running_file_stems
from fp8bench.store.runs.run_file import RunWriter, check_store, find_incomplete_groups, load_run, reopen_run, start_run

Sessions = Mapping[str, tuple[Interval, ...]]
NO_SESSIONS: Sessions = MappingProxyType({})
# The `origin` of a run in which the gate measures selected cases of an earlier run again.
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
    sessions: Sessions = NO_SESSIONS,
    begun: Sequence[ProcessWorker] = (),
    meanwhile: Callable[[], object] = lambda: None,
) -> Run:
    """Plans, measures and stores a run. Every group of cases is stored before the next group starts.

    `origin` is the command that made the request. The run records the commit of the repository around `folder`, by
    default the working directory. `note` is stored with the run. If `cell` is given, the name and content of a cell of
    a fleet's plan, only the group of this cell is measured. `sessions` has the ratios that earlier sessions of the same
    request measured, by case. `begun` are workers from `start_workers_early`, and `meanwhile` is called while they
    import torch.

    An interrupt (Ctrl-C) ends the run early: finished work is stored and returned, with `finished` False. If the
    store cannot be written during the run, raises NotKept, which has the run.
    """
    # 1. Refuse a request that cannot be measured, before any worker starts. Then make the plan.
    request = add_scales_from_run(request, store)
    with _prepare_run(request, store, observer, begun=begun) as resources:
        meanwhile()
        run = replace(_make_empty_run(request, resources, command, folder), origin=origin)
        if cell is not None:
            run = replace(run, plan=restrict_to_cell(run.plan, cell[1]), cell=cell[0])
        # 2. Measure all groups of the plan.
        return _measure_new_run(run, resources, filter(None, (note, *run.notes)), sessions)


def resume(path: Path, store: Path, observer: Observer, command: str) -> tuple[bool, Run]:
    """Measures the missing groups of an interrupted run. Returns whether it was incomplete, and the run, which may be
    interrupted again. `store` is used only if the run's file is not in a store.
    """
    run = load_run(path)
    # Refuse a damaged file first, because resuming would append to it.
    refuse_run_without_header(run)
    groups = find_incomplete_groups(run)
    if run.finished and not groups:
        return False, run
    refuse_missing_user_files(run)
    store = find_store_of_run(path) or store
    with _prepare_run(run.request, store, observer) as resources:
        # Check that machine, versions and environment are unchanged: a run must not mix different conditions.
        facts = resources.timing.probe()
        environment = gather(
            resources.timing.software(), __version__, run.request.threads, _list_user_code(run.request)
        )
        plan = make_plan(run.request, facts, resources.text, has_added_reference(run.plan))
        plan = restrict_to_cell(plan, make_fleet_cell(run.plan.groups[0])) if run.cell else plan
        refuse_changed_conditions(run, plan, facts, environment)
        observer.planned(replace(run.plan, groups=groups))
        writer = reopen_run(path, Resumption(now(), command, environment))
        run = load_run(path)  # drops the records of incomplete groups, which are measured again
        return True, _measure_groups(run, find_incomplete_groups(run), writer, resources)


def measure_again(run: Run, cases: Collection[str], store: Path, observer: Observer, command: str) -> Run:
    """Measures again all groups of a run that contain one of `cases`, in a fresh process. Returns a new run, which is
    stored in `store`.

    Raises UsageError if the conditions differ from those of the earlier run: for example, another machine, commit or
    version of torch.
    """
    refuse_run_without_header(run)
    refuse_missing_user_files(run)
    request = replace(run.request, trace=None, isolation=True)
    with _prepare_run(request, store, observer) as resources:
        repeated_run = replace(
            _make_empty_run(request, resources, command, None, has_added_reference(run.plan)), origin=REMEASURED_ORIGIN
        )
        difference = find_condition_difference(run, repeated_run.plan, repeated_run.devices, repeated_run.environment)
        if difference:
            raise UsageError(
                f"the run {run.id} was measured under other conditions: {difference}. Measure under its conditions."
            )
        groups = tuple(group for group in repeated_run.plan if any(planned.case.id in cases for planned in group.cases))
        return _measure_new_run(replace(repeated_run, plan=replace(repeated_run.plan, groups=groups)), resources)


def plan_only(request: Request, store: Path) -> tuple[Plan, tuple[DeviceFacts, ...]]:
    """Returns the plan that a run of the request would have, and the devices of this machine. Measures nothing."""
    request = add_scales_from_run(request, store)
    with _prepare_run(request, store, SilentObserver(), write=False) as resources:
        facts = resources.timing.probe()
    return make_plan(request, facts, resources.text), facts


def _measure_new_run(
    run: Run, resources: RunResources, notes: Iterable[str] = (), sessions: Sessions = NO_SESSIONS
) -> Run:
    """Reports the plan to the observer, stores the header of the run and measures all groups."""
    resources.observer.planned(run.plan)
    writer = start_run(run, resources.store)
    for text in notes:
        writer.note(text)
    return _measure_groups(replace(run, path=str(writer.path)), run.plan.groups, writer, resources, sessions)


def _measure_groups(
    run: Run, groups: Sequence[Group], writer: RunWriter, resources: RunResources, sessions: Sessions = NO_SESSIONS
) -> Run:
    """Measures the groups one after the other, each of which is stored before the next one begins. Returns the run."""
    noted_run_stems: set[str] = set()
    measured_records: list[Record] = []
    try:
        resources.wait_for_second_worker()
        method = _choose_group_method(run, groups, resources)
        for index, group in enumerate(groups):
            # Note other runs that measure into this store at the same time, because two runs disturb each other.
            for stem in sorted(set(list_running_file_stems(writer.path)) - noted_run_stems):
                writer.note(
                    f"run {stem} was measured at the same time ({describe_current_load()}): each disturbs the other"
                )
                noted_run_stems.add(stem)
            group_budget_seconds = divide_budget(run.request.budget, resources.start, len(groups) - index)
            untimed_worker = _choose_operator_count_worker(
                run, group, method.brisk, resources, is_last=group is groups[-1]
            )
            records = _measure_group(group, run, method, group_budget_seconds, resources, untimed_worker)
            # Widen intervals by the differences between earlier runs of the same cases. This run is added below.
            records_with_spread = add_rerun_spreads(records, run, resources.store)
            finished_records = [
                replace(record, sessions=sessions.get(record.case.id, ())) for record in records_with_spread
            ]
            measured_records += finished_records
            with hold_back_interrupts():
                writer.append(finished_records)
            for record in finished_records:
                resources.observer.finished(record)
            store_ratios(records, run, resources.store)
        writer.finish("finished")
    except KeyboardInterrupt:
        with (
            ignore_interrupts(),
            contextlib.suppress(StoreError),
        ):  # if the end cannot be written, the run counts as unfinished anyway
            writer.finish("interrupted")
    except StoreError as error:
        raise NotKept(
            str(error), replace(run, records=(*run.records, *measured_records), troubles=(str(error),))
        ) from None
    finally:
        writer.close()
    with ignore_interrupts():
        return load_run(writer.path)


def _get_rate_ceilings(run: Run, groups: Sequence[Group], resources: RunResources) -> dict[str, Ceilings]:
    """Returns the ceilings (highest measured rates) by device, for this run's number of threads. They are read from the
    store or measured now. A device for which neither is possible is left out.
    """
    if run.request.ranks is not None:  # all ranks together share the rate that one process would measure
        return {}
    first_case_by_device = {case.device: case for case in reversed(_list_running_cases(groups))}

    def measure(device: DeviceFacts) -> Ceilings:
        resources.observer.working(first_case_by_device[device.key], MEASURING_CEILINGS, 0.0)
        return measure_ceilings(resources.timing, device)

    ceilings_by_device = {}
    for device in run.devices:
        if device.key not in first_case_by_device:
            continue
        try:
            ceilings = find_or_measure_ceilings(
                resources.store,
                run.environment,
                device,
                partial(measure, device) if resources.switches.ceilings else None,
            )
        except WorkerError:  # the run needs no ceilings, so continue without them in a fresh worker
            resources.timing.restart()
            continue
        if ceilings is not None:
            ceilings_by_device[device.key] = ceilings
    return ceilings_by_device


def _list_running_cases(groups: Iterable[Group]) -> list[Case]:
    """Returns the cases of the groups that will be measured, without the cases that the plan skips."""
    return [planned.case for group in groups for planned in group.cases if planned.runs]


class RunResources(NamedTuple):
    """The resources of a run while it is measured: the store, the switches, the text that suites read, the energy
    meters and the workers. `start` is the time at which the run began.

    `timing` is the worker that times steps, and `untimed_pass_worker` the worker that runs untimed passes.
    `counting` is a worker that counts allocations, if this was requested. `second` is `untimed_pass_worker` if that
    worker may run while `timing` works; otherwise it is None.
    """

    store: Path
    observer: Observer
    start: float
    corpus: Corpus | None
    switches: EnvironmentSwitches
    meters: Meters
    timing: Worker
    untimed_pass_worker: Worker
    counting: CountingWorker | None
    second: Worker | None

    @property
    def text(self) -> str | None:
        return self.corpus.identity if self.corpus else None

    def wait_for_second_worker(self) -> None:
        """Waits until the second worker has imported torch, because the import would disturb the timing."""
        if self.second is not None:
            with contextlib.suppress(WorkerError):  # if the worker has failed, its next request reports it
                self.second.with_time_limit(START_SECONDS).versions(())


@contextmanager
def _prepare_run(
    request: Request, store: Path, observer: Observer, write: bool = True, begun: Sequence[ProcessWorker] = ()
) -> Iterator[RunResources]:
    """A context with the resources for a run. Refuses an impossible request, then starts the workers (or uses those in
    `begun`). No other run can measure in this process inside the context.
    """
    start = time.monotonic()
    with ExitStack() as stack:
        stack.enter_context(register_process_run(request.isolation))
        resolved_request = resolve_request(request, os.environ)
        if write:
            if request.trace in PROFILERS:
                raise UsageError(
                    f"{request.trace} must start this process, as `fp8bench suite` does. Elsewhere, "
                    f"start your script or command under {request.trace} and give --trace {NVTX} (trace={NVTX!r})."
                )
            if request.trace not in (None, NVTX):
                check_folder("--trace", Path(request.trace))
            check_store(store)  # also creates the store, because the corpus is written into it
        corpus = resolved_request.corpus(store, write)
        # Start the workers now: they import torch, which takes seconds, while this process continues.
        if not begun and write:
            begun = stack.enter_context(start_workers_early(request, resolved_request.switches.second))
        timing, untimed = (
            stack.enter_context(open_worker(request, corpus, worker)) for worker in (*begun, None, None)[:2]
        )
        counting = None
        if request.counters and write:
            counting = stack.enter_context(open_counting_worker(worker_settings(request, corpus)))
        device_meters = stack.enter_context(Meters(request.energy))
        second = untimed if len(begun) > 1 else None
        yield RunResources(
            store, observer, start, corpus, resolved_request.switches, device_meters, timing, untimed, counting, second
        )


def worker_settings(request: Request, corpus: Corpus | None) -> Settings:
    return Settings(request.threads, request.seed, request.imports, corpus.path if corpus else None)


@contextmanager
def open_worker(request: Request, corpus: Corpus | None, begun: ProcessWorker | None = None) -> Iterator[Worker]:
    """Opens a context with the worker for a request (`begun`, if given), and closes the worker at the end."""
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
    """Returns the modules and files with a user's code that a run uses: those of --import, and in `bench` the files of
    the compared callables.
    """
    callables = (request.reference or "", *request.dtypes) if request.suite == BENCH else ()
    user_files = (name.rpartition(":")[0] for name in callables)
    return (*request.imports, *dict.fromkeys(file for file in user_files if file.endswith(".py")))


def _make_empty_run(
    request: Request, resources: RunResources, command: str, folder: Path | None, compares: bool = True
) -> Run:
    """Returns a new run without records: its plan (`compares` as in make_plan), environment and timing overheads."""
    worker = resources.timing
    facts = worker.probe()
    plan = make_plan(request, facts, resources.text, compares)
    remarks = examine(plan, facts, worker, RequestTimeLimits(request.case_timeout))
    used_devices = {case.device for case in _list_running_cases(plan)}
    resources.wait_for_second_worker()
    environment = gather(worker.software(), __version__, request.threads, _list_user_code(request), folder=folder)
    for fact in facts:
        # Record the settings of used devices only: those of other devices would make equal runs look different.
        if fact.key in used_devices:
            environment = environment.also(read_device_settings(fact, resources.meters.of(fact)))
    return Run(
        id=secrets.token_hex(4),
        started=now(),
        command=command,
        request=request,
        plan=plan,
        environment=environment,
        devices=facts,
        overheads=tuple(
            (fact.key, worker.with_time_limit(START_SECONDS).overheads(fact))
            for fact in facts
            if fact.key in used_devices
        ),
        notes=tuple(dict.fromkeys(remarks)),
    )


def examine(plan: Plan, facts: Sequence[DeviceFacts], worker: Worker, limits: RequestTimeLimits) -> list[str]:
    """Checks the cases for problems that only a worker can detect, before anything is stored. Raises UsageError for an
    impossible case, and returns remarks on the other cases.
    """
    devices, remarks = {fact.key: fact for fact in facts}, list[str]()
    for planned in (case for group in plan for case in group.cases if case.runs):
        if workloads.get(planned.case.workload).examined:
            try:
                remarks += worker.with_time_limit(limits.for_untimed_pass(planned.work)).examine(
                    planned.case, devices[planned.case.device]
                )
            except WorkerFault as fault:
                if fault.out_of_memory:
                    raise UsageError(
                        f"{planned.case.id} cannot be measured: not enough memory for it and a copy ({fault}). "
                        "Choose a smaller one."
                    ) from None
                raise to_original_error(fault) from None
    return remarks


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _choose_operator_count_worker(
    run: Run, group: Group, is_brisk_run: bool, resources: RunResources, is_last: bool
) -> Worker | None:
    """Returns the worker that counts the operators of a group's steps, or None if this run does not count them. Usually
    it is the untimed worker. For the last group it may be the timing worker, which has nothing to time afterwards.
    """
    if run.origin == REMEASURED_ORIGIN or run.request.ranks is not None:
        return None  # the earlier run already has the counts, or there are several ranks, which cannot count
    is_compiled = run.request.shares or any(case.work.setup_seconds for case in group.cases)
    is_any_case_on_gpu = any(not case.case.device.startswith("cpu") for case in group.cases)
    return (
        resources.timing
        if is_last and not is_compiled and not (is_brisk_run and is_any_case_on_gpu)
        else resources.untimed_pass_worker
    )


def divide_budget(budget: float | None, start: float, remaining_parts: int) -> float | None:
    """Returns the seconds for each of the remaining parts of a run: an equal share of the time that remains of the
    budget since `start`. Returns None without a budget.
    """
    return None if budget is None else max(0.0, budget - (time.monotonic() - start)) / remaining_parts


def _choose_group_method(run: Run, groups: Sequence[Group], resources: RunResources) -> MeasurementMethod:
    """Returns how all groups of a run are measured by default. `_measure_group` adapts the method to single groups."""
    request, switches = run.request, resources.switches
    is_brisk_run = is_run_brisk(request.brisk, request.budget, len(run.plan.groups))
    return MeasurementMethod(
        rule=make_stopping_rule(request.quick, request.rounds, request.budget, is_brisk_run),
        judge=is_case_decided,
        seed=request.seed,
        limits=RequestTimeLimits(request.case_timeout),
        quantisers=QuantiserCompilation(switches.why_eager),
        windows=make_window_rule(request, len(run.plan.groups)) if request.ranks is None else None,
        trace_folder=make_trace_folder(run),
        ceilings=_get_rate_ceilings(run, groups, resources),
        warm_up_seconds=switches.warm_up_seconds,
        choose_fastest=None if request.quick or is_brisk_run or request.budget is not None else find_fastest_candidate,
        tapes=switches.tapes,
        tapes_apart=switches.tapes_apart,
        checks_late_steps=request.tape or not request.quick,
        shares=request.shares,
        brisk=is_brisk_run,
    )


def _measure_group(
    group: Group,
    run: Run,
    method: MeasurementMethod,
    budget: float | None,
    resources: RunResources,
    untimed: Worker | None,
) -> tuple[Record, ...]:
    """Measures one group within `budget` seconds. `untimed` is the worker that counts the operators of its steps."""
    # 1. Adapt the method to this group: its budget, its suite, and the search for the largest batch.
    request, facts = run.request, {device.key: device for device in run.devices}
    method = replace(method, rule=make_stopping_rule(request.quick, request.rounds, budget, method.brisk))
    if not workloads.get(group.cases[0].case.workload).fused:
        eager_quantisers = QuantiserCompilation("the suite is about numbers, and compiles none")
        method = replace(method, windows=None, quantisers=eager_quantisers)
    if request.memory_limit is not None and group.setting in settings_with_batch_search(run.plan):
        method = replace(method, capacity=CapacitySearchRule(request.memory_limit or None, replace_batch_size))
    # 2. Measure the group on its device. Only on a CPU may a second worker run untimed passes at the same time.
    device = next((facts[case.device] for case in _list_running_cases([group])), None)
    meter = resources.meters.of(device) if device is not None else None
    second_worker = resources.second if device is not None and not device.accelerated else None
    return GroupMeasurement(
        group, facts, resources.timing, resources.observer, method, meter, untimed, resources.counting, second_worker
    ).run()
