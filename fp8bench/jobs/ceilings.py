"""Whole ceilings of this machine's devices: measured in several runs, kept in the store, and told.

The suite `ceilings` is a run like any other, with a record for each rate; the doctor tells them line by line.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path

from fp8bench import __version__
from fp8bench.analysis.roofline import Since, alike, since
from fp8bench.errors import UsageError, WorkerError
from fp8bench.files import make_store
from fp8bench.jobs.observer import JobObserver
from fp8bench.measure.ceilings import RUNS, WHOLE_SECONDS, pieces_of, whole_ceilings
from fp8bench.measure.environment import gather
from fp8bench.measure.handle import ProcessWorker, Worker, claimed
from fp8bench.measure.sensors.device_state import device_state_of
from fp8bench.measure.sensors.meter import meter_for
from fp8bench.model import (
    Case,
    Ceiling,
    Ceilings,
    DeviceFacts,
    Group,
    Level,
    Measurement,
    Plan,
    PlannedCase,
    Rate,
    Record,
    Request,
    Run,
    Scalar,
    Status,
    Support,
    Work,
    specs,
)
from fp8bench.model.raw import Settings
from fp8bench.model.run import CEILINGS
from fp8bench.pipeline import now
from fp8bench.plan.make import devices_asked
from fp8bench.registry import precisions
from fp8bench.report.topics.roofline import UNITS, lines_of, shape_words, since_words, spread_words
from fp8bench.store.ceilings import history_of_ceilings, new_ceilings
from fp8bench.store.runs.run_file import check_store, load_run, start_run

# What no product does has no precision of its own: its arrays are of these.
_ARRAYS = "fp32"


def ceilings_here(store: Path, observer: JobObserver, threads: int = 1) -> Iterator[tuple[DeviceFacts, Ceilings | str]]:
    """Of every device that works, a processor with so many threads; a sentence where they could not be measured."""
    make_store(store)
    with claimed(True), ProcessWorker(Settings(threads)) as worker:
        for device in (device_facts for device_facts in worker.probe() if not device_facts.unusable):
            try:
                yield device, _measured(worker, device, store, threads, observer)[1]
            except WorkerError as error:
                yield device, f"not measured: {error}"
                worker.restart()


def ceiling_lines(store: Path, observer: JobObserver, threads: int = 1) -> Iterator[str]:
    for device, found in ceilings_here(store, observer, threads):
        threaded = "" if device.accelerated else f", threads {threads}"
        yield f"{device.key}: what {device.name} does at most{threaded}, in {RUNS} runs"
        lines = [found] if isinstance(found, str) else lines_of(found, history_of_ceilings(store))
        yield from (f"  {line}" for line in lines)


def ceilings_run(request: Request, store: Path, observer: JobObserver, command: str) -> Run:
    """The suite: of the devices that were asked for, kept as a run, too. Everything else of a request is refused."""
    asked = Request(CEILINGS, devices=request.devices, threads=request.threads)
    if request != asked:
        raise UsageError(
            "the suite ceilings measures what a device does at most, and takes --devices, --threads and options that "
            "say where to write. Leave the others out."
        )
    check_store(store)
    started = now()
    with claimed(True), ProcessWorker(Settings(request.threads)) as worker:
        facts = worker.probe()
        environment = gather(worker.software(), __version__, request.threads)
        groups: list[tuple[Record, ...]] = []
        for device in devices_asked(request, facts):
            state, found = _measured(worker, device, store, request.threads, observer)
            environment = environment.also(state)
            earlier = alike(found, history_of_ceilings(store))
            groups += [
                tuple(_record(rate, device, since(rate, earlier)) for rate in some)
                for _, some in groupby(found.rates, lambda rate: rate.limit)
            ]
    planned = (tuple(PlannedCase(record.case, record.support, record.work) for record in group) for group in groups)
    plan = Plan(tuple(Group(cases, 0) for cases in planned))
    run = Run(secrets.token_hex(4), started, command, request, plan, environment, facts)
    writer = start_run(run, store)
    try:
        for group in groups:
            writer.append(group)
        writer.finish("finished")
    finally:
        writer.close()
    return load_run(writer.path)


def _measured(
    worker: Worker, device: DeviceFacts, store: Path, threads: int, observer: JobObserver
) -> tuple[dict[str, Scalar | None], Ceilings]:
    """What the device's driver says of it, and the ceilings, which are kept piece by piece."""
    with meter_for(device) as meter:
        state = device_state_of(device, meter)
    environment = gather(worker.software(), __version__, threads).also(state)

    def measure(begun: Ceilings | None, keep: Callable[[Ceilings], None]) -> Ceilings:
        if begun is not None:
            done, count = pieces_of(begun)
            observer.note(
                f"ceilings of {device.key}: goes on with {done} of {count} pieces of an interrupted measurement"
            )
        return whole_ceilings(worker, device, WHOLE_SECONDS, begun, keep)

    try:
        return state, new_ceilings(store, environment, device, measure)
    except KeyboardInterrupt:
        observer.note(f"ceilings of {device.key}: what was measured is kept, and the same command goes on with it")
        raise


def _record(rate: Rate, device: DeviceFacts, before: Since | None) -> Record:
    """A rate as what became of a case; without runs it was skipped, for the reason that the device gave."""
    name = rate.precision or _ARRAYS
    case = Case(CEILINGS, (("limit", rate.limit.value),), name, device.key)
    support = precisions.get(name).support(device) if rate.precision else Support(Level.NATIVE, "")
    first = name == _ARRAYS
    if rate.value is None:
        return Record(case, support, Status.SKIPPED, is_reference=first, reason=rate.why)
    said = [shape_words(rate), spread_words(rate), *([since_words(before)] if before is not None else [])]
    samples = Measurement(
        specs.CEILING_RATE, UNITS[rate.limit], rate.runs, description="the most that was done in a second"
    )
    return Record(
        case, support, Status.OK, Work(), first, detail="; ".join(said),
        measurements=(samples,), ceiling=Ceiling(rates=(rate,), device=device.name),
    )  # fmt: skip
