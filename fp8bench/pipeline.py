"""The whole flow on one screen: request -> facts -> plan -> measure -> history -> run.

Analysis and reports start from the returned Run, or from its stored file. Nothing here prints.
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
from fp8bench.measure.environment import gather, load_in_words
from fp8bench.measure.group import GroupMeasurement, Method
from fp8bench.measure.handle import (
    START_SECONDS,
    CountingWorker,
    LocalWorker,
    ProcessWorker,
    Worker,
    claim_process,
    counting_worker,
    workers_ahead,
)
from fp8bench.measure.interrupts import hold_back_interrupts, ignore_interrupts
from fp8bench.measure.limits import Limits
from fp8bench.measure.passes import trace_folder
from fp8bench.measure.ranks.worker import RanksWorker
from fp8bench.measure.sensors.device_state import device_state_of
from fp8bench.measure.sensors.meter import Meters
from fp8bench.measure.windows import window_rule_for
from fp8bench.model import Ceilings, DeviceFacts, Group, Interval, Measurement, Plan, Record, Request, Resumption, Run
from fp8bench.model.raw import Settings
from fp8bench.model.request import NVTX, PROFILERS
from fp8bench.model.run import Cell
from fp8bench.model.stopping import is_brisk, rule_for
from fp8bench.model.words import MEASURING_CEILINGS
from fp8bench.plan.cells import cell_of, of_cell
from fp8bench.plan.corpus import Corpus
from fp8bench.plan.make import has_reference_added, make_plan, searched_for_batches, with_batch
from fp8bench.plan.resolve import Switches, resolve
from fp8bench.plan.resumable import foreign, refuse_elsewhere, refuse_foreign, refuse_lost
from fp8bench.protocols import Observer
from fp8bench.registry import workloads
from fp8bench.store.ceilings import current_ceilings
from fp8bench.store.reruns import add_reruns, with_reruns
from fp8bench.store.runs.listing import running_beside, store_of, with_stored_scales
from fp8bench.store.runs.run_file import RunWriter, check_store, load_run, missing_groups, reopen_run, start_run

Sessions = Mapping[str, tuple[Interval, ...]]
# Origin of runs that re-measure selected cases of an earlier run.
AGAIN = "gate"


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
    """Plans, measures and stores. Every group is in the store before the next one starts.

    `origin` is the entry point of the request; `folder` is in the repository whose commit is measured, by default the
    working directory; `note` is stored with the run. With a `cell` and its name in the plan, only that group is
    measured. `sessions` are the ratios by case from earlier sessions. `begun` are the workers of
    `workers_ahead`; `meanwhile` is called while they import torch. An interrupt (Ctrl-C) ends the run early: finished
    work is stored and returned, with `finished` False. Raises NotKept, which holds the run, if the store fails during
    the run.
    """
    # 1. Refuse, before any worker starts, what cannot be measured.
    start = time.monotonic()
    request = with_stored_scales(request, store)
    with _ready(request, store, begun=begun) as ready, Meters(request.energy) as meters:
        meanwhile()
        run = replace(_open_run(request, ready, meters, command, folder), origin=origin)
        if cell is not None:
            run = replace(run, plan=of_cell(run.plan, cell[1]), cell=cell[0])
        # 2. The plan is shown and the header stored before the first group.
        observer.planned(run.plan)
        writer = start_run(run, store)
        for words in filter(None, (note, *run.notes)):
            writer.note(words)
        run = replace(run, path=str(writer.path))
        # 3. Measure what the plan holds.
        return _measure(run, run.plan.groups, store, writer, ready, meters, observer, start, sessions)


def resume(path: Path, store: Path, observer: Observer, command: str) -> tuple[bool, Run]:
    """Measures only what a run lacks; a finished run is returned unchanged, with False.

    `store` is used if the file is not in a store.
    """
    start = time.monotonic()
    run = load_run(path)
    # A file with damage would be continued on top of it, so that is refused first.
    refuse_lost(run)
    groups = missing_groups(run)
    if run.finished and not groups:
        return False, run
    refuse_elsewhere(run)
    store = store_of(path) or store
    with _ready(run.request, store) as ready, Meters(run.request.energy) as meters:
        # Another machine, version or environment would mix two measurements in one run.
        facts = ready.timing.probe()
        environment = gather(ready.timing.software(), __version__, run.request.threads, run.request.imports)
        plan = make_plan(run.request, facts, ready.text, has_reference_added(run.plan))
        plan = of_cell(plan, cell_of(run.plan.groups[0])) if run.cell else plan
        refuse_foreign(run, plan, facts, environment)
        observer.planned(replace(run.plan, groups=groups))
        writer = reopen_run(path, Resumption(now(), command, environment))
        run = load_run(path)  # without the records of groups that were cut off halfway
        return True, _measure(run, missing_groups(run), store, writer, ready, meters, observer, start)


def measure_again(run: Run, cases: Collection[str], store: Path, observer: Observer, command: str) -> Run:
    """Re-measures the groups of a run that contain some cases, in a fresh process, as a separate run in `store`.

    Raises UsageError if new measurements would not belong to the run: another machine, commit or torch.
    """
    start = time.monotonic()
    refuse_lost(run)
    refuse_elsewhere(run)
    request = replace(run.request, trace=None, isolation=True)
    with _ready(request, store) as ready, Meters(request.energy) as meters:
        opened = _open_run(request, ready, meters, command, None, has_reference_added(run.plan))
        repeated = replace(opened, origin=AGAIN)
        differs = foreign(run, repeated.plan, repeated.devices, repeated.environment)
        if differs:
            raise UsageError(
                f"the run {run.id} was measured under other conditions: {differs}. Measure under the same ones."
            )
        groups = tuple(group for group in repeated.plan if any(planned.case.id in cases for planned in group.cases))
        repeated = replace(repeated, plan=replace(repeated.plan, groups=groups))
        observer.planned(repeated.plan)
        writer = start_run(repeated, store)
        repeated = replace(repeated, path=str(writer.path))
        return _measure(repeated, groups, store, writer, ready, meters, observer, start)


def plan_only(request: Request, store: Path) -> tuple[Plan, tuple[DeviceFacts, ...]]:
    """Returns what a run would do, and on which devices; measures nothing."""
    request = with_stored_scales(request, store)
    with _ready(request, store, write=False) as ready:
        facts = ready.timing.probe()
    return make_plan(request, facts, ready.text), facts


def _measure(
    run: Run,
    groups: Sequence[Group],
    store: Path,
    writer: RunWriter,
    ready: Ready,
    meters: Meters,
    observer: Observer,
    start: float,
    sessions: Sessions = MappingProxyType({}),
) -> Run:
    """Measures the groups one by one and stores each before the next."""
    worker = ready.timing
    noted: set[str] = set()
    measured: list[Record] = []
    quantisers = Quantisers(ready.switches.why_eager)
    errors: dict[str, tuple[Measurement, ...]] = {}
    lost: dict[str, str] = {}
    try:
        ready.wait_for_second()
        ceilings = _ceilings(run, groups, store, ready, observer)
        for place, group in enumerate(groups):
            # Note other runs on this machine at once: each disturbs the other.
            for stem in sorted(set(running_beside(writer.path)) - noted):
                writer.note(f"run {stem} was measured at the same time ({load_in_words()}): each disturbs the other")
                noted.add(stem)
            budget = share_of(run.request.budget, start, len(groups) - place)
            untimed = _untimed(run, group, worker if group is groups[-1] else None, ready.untimed)
            done = _group(group, run, budget, ready, meters, observer, quantisers, ceilings, lost, errors, untimed)
            # Earlier runs of the same cases widen the interval; this run joins them afterwards.
            with_earlier = with_reruns(done, run, store)
            measured += [replace(record, sessions=sessions.get(record.case.id, ())) for record in with_earlier]
            with hold_back_interrupts():
                writer.append(measured[-len(group.cases) :])
            for record in measured[-len(group.cases) :]:
                observer.finished(record)
            add_reruns(done, run, store)
        writer.finish("finished")
    except KeyboardInterrupt:
        with (
            ignore_interrupts(),
            contextlib.suppress(StoreError),
        ):  # without an end line it is unfinished, too
            writer.finish("interrupted")
    except StoreError as error:
        raise NotKept(str(error), replace(run, records=(*run.records, *measured), troubles=(str(error),))) from None
    finally:
        writer.close()
    with ignore_interrupts():
        return load_run(writer.path)


def _ceilings(run: Run, groups: Sequence[Group], store: Path, ready: Ready, observer: Observer) -> dict[str, Ceilings]:
    """Returns the ceilings of each device with this run's threads, if they are known or measured now."""
    if run.request.ranks is not None:  # several processes would share a measured rate
        return {}
    first = {case.case.device: case.case for group in reversed(groups) for case in reversed(group.cases) if case.runs}

    def measure(device: DeviceFacts) -> Ceilings:
        observer.working(first[device.key], MEASURING_CEILINGS, 0.0)
        return measure_ceilings(ready.timing, device)

    by_device = {}
    for device in (device_facts for device_facts in run.devices if device_facts.key in first):
        measure_now = partial(measure, device) if ready.switches.ceilings else None
        try:
            ceilings = current_ceilings(store, run.environment, device, measure_now)
        except WorkerError:  # the run goes on without a ceiling, in a fresh worker
            ready.timing.restart()
            continue
        if ceilings is not None:
            by_device[device.key] = ceilings
    return by_device


class Ready(NamedTuple):
    """The text, the switches and the workers of a run: one that times, one that does not and, on request, one that
    counts. `second` is the one that does not time, if it runs passes next to the other."""

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
        """Waits until the second worker has imported torch, before anything is timed."""
        if self.second is not None:
            with contextlib.suppress(WorkerError):  # the next request reports the reason
                self.second.within(START_SECONDS).versions(())


@contextmanager
def _ready(request: Request, store: Path, write: bool = True, begun: Sequence[ProcessWorker] = ()) -> Iterator[Ready]:
    """Rejects whatever can be rejected before a worker starts, then starts them unless they have `begun`. Nothing else
    measures in this process during the block."""
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
            check_store(store)  # before the text is written there: a new store must be created as one
        corpus = resolved.corpus(store, write)
        # Importing torch takes seconds, in which this process goes on.
        if not begun and write:
            begun = stack.enter_context(workers_ahead(request, resolved.switches.second))
        timing, untimed = (
            stack.enter_context(worker_for(request, corpus, worker)) for worker in (*begun, None, None)[:2]
        )
        counts = request.counters and write
        counting = stack.enter_context(counting_worker(settings_of(request, corpus))) if counts else None
        yield Ready(corpus, resolved.switches, timing, untimed, counting, untimed if len(begun) > 1 else None)


def settings_of(request: Request, corpus: Corpus | None) -> Settings:
    return Settings(request.threads, request.seed, request.imports, corpus.path if corpus else None)


@contextmanager
def worker_for(request: Request, corpus: Corpus | None, begun: ProcessWorker | None = None) -> Iterator[Worker]:
    """Yields the worker that a request needs, which may be `begun`, and always closes it."""
    settings = settings_of(request, corpus)
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


def _open_run(
    request: Request, ready: Ready, meters: Meters, command: str, folder: Path | None, compares: bool = True
) -> Run:
    """Returns the run with its header, before anything is measured except the overhead of the meters."""
    worker = ready.timing
    facts = worker.probe()
    plan = make_plan(request, facts, ready.text, compares)
    remarks = examine(plan, facts, worker, Limits(request.case_timeout))
    used = {planned.case.device for group in plan for planned in group.cases if planned.runs}
    ready.wait_for_second()
    environment = gather(worker.software(), __version__, request.threads, request.imports, folder=folder)
    for fact in facts:
        # Settings of devices that nothing runs on would make runs look different.
        if fact.key in used:
            environment = environment.also(device_state_of(fact, meters.of(fact)))
    return Run(
        id=secrets.token_hex(4),
        started=now(),
        command=command,
        request=request,
        plan=plan,
        environment=environment,
        devices=facts,
        overheads=tuple((fact.key, worker.within(START_SECONDS).overheads(fact)) for fact in facts if fact.key in used),
        notes=tuple(dict.fromkeys(remarks)),
    )


def examine(plan: Plan, facts: Sequence[DeviceFacts], worker: Worker, limits: Limits) -> list[str]:
    """Raises for impossible cases that only the worker can detect, before anything is stored. Returns remarks on the
    others."""
    devices, remarks = {fact.key: fact for fact in facts}, list[str]()
    for planned in (case for group in plan for case in group.cases if case.runs):
        if workloads.get(planned.case.workload).examined:
            try:
                remarks += worker.within(limits.numbers(planned.work)).examine(
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


def _untimed(run: Run, group: Group, last: Worker | None, other: Worker) -> Worker | None:
    """Returns the worker that counts a group's operators: the untimed one, or the worker that has timed the `last`
    group and is free. Compiled steps are counted elsewhere."""
    if run.origin == AGAIN or run.request.ranks is not None:
        return None  # operators of re-measured cases are known
    compiled = run.request.shares or any(case.work.setup_seconds for case in group.cases)
    brisk = is_brisk(run.request.brisk, run.request.budget, len(run.plan.groups))
    on_gpu = any(not case.case.device.startswith("cpu") for case in group.cases)
    return other if last is None or compiled or (brisk and on_gpu) else last


def share_of(budget: float | None, start: float, left: int) -> float | None:
    """Returns one part's share of what remains of a budget that started at `start`, in seconds."""
    return None if budget is None else max(0.0, budget - (time.monotonic() - start)) / left


def _group(
    group: Group,
    run: Run,
    budget: float | None,
    ready: Ready,
    meters: Meters,
    observer: Observer,
    quantisers: Quantisers,
    ceilings: Mapping[str, Ceilings],
    lost: dict[str, str],
    errors: dict[str, tuple[Measurement, ...]],
    untimed: Worker | None,
) -> tuple[Record, ...]:
    request, facts, switches = run.request, {device.key: device for device in run.devices}, ready.switches
    brisk = is_brisk(request.brisk, request.budget, len(run.plan.groups))
    windows = window_rule_for(request, len(run.plan.groups)) if request.ranks is None else None
    if not workloads.get(group.cases[0].case.workload).fused:
        windows, quantisers = None, Quantisers("the suite is about numbers, and compiles none")
    used = next((facts[planned.case.device] for planned in group.cases if planned.runs), None)
    searched = request.memory_limit is not None and group.setting in searched_for_batches(run.plan)
    method = Method(
        rule=rule_for(request.quick, request.rounds, budget, brisk),
        judge=is_decided,
        seed=request.seed,
        limits=Limits(request.case_timeout),
        quantisers=quantisers,
        windows=windows,
        capacity=CapacityRule(request.memory_limit or None, with_batch) if searched else None,
        traces=trace_folder(run),
        ceilings=ceilings,
        warm_up_seconds=switches.warm_up_seconds,
        lost=lost,
        choose=None if request.quick or brisk or request.budget is not None else find_fastest,
        tapes=switches.tapes,
        tapes_apart=switches.tapes_apart,
        looks_again=request.tape or not request.quick,
        shares=request.shares,
        brisk=brisk,
        errors=errors,
    )
    meter = meters.of(used) if used is not None else None
    second = ready.second if used is not None and not used.accelerated else None
    return GroupMeasurement(group, facts, ready.timing, observer, method, meter, untimed, ready.counting, second).run()
