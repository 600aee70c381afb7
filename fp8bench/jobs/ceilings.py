"""Whole ceilings of this machine's devices: measured in several runs, kept in the store, told line by line."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from fp8bench import __version__
from fp8bench.errors import WorkerError
from fp8bench.files import make_store
from fp8bench.measure.ceilings import RUNS, WHOLE_SECONDS
from fp8bench.measure.environment import gather
from fp8bench.measure.handle import ProcessWorker, claimed
from fp8bench.measure.limits import COMPILE_SECONDS
from fp8bench.measure.sensors.device_state import device_state_of
from fp8bench.measure.sensors.meter import meter_for
from fp8bench.model import Ceilings, DeviceFacts
from fp8bench.model.raw import Settings
from fp8bench.report.words.ceilings import lines_of
from fp8bench.store.ceilings import new_ceilings


def ceilings(store: Path, threads: int = 1) -> Iterator[str]:
    """Of every device that works, a processor with so many threads."""
    make_store(store)
    with claimed(True), ProcessWorker(Settings(threads)) as worker:
        for device in (one for one in worker.probe() if not one.unusable):
            with meter_for(device) as meter:
                state = device_state_of(device, meter)
            environment = gather(worker.software(), __version__, threads).also(state)
            threaded = "" if device.accelerated else f", threads {threads}"
            yield f"{device.key}: what {device.name} does at most{threaded}, in {RUNS} runs"
            try:
                found = new_ceilings(store, environment, device, partial(_measured, worker, device))
            except WorkerError as error:
                yield f"  not measured: {error}"
                worker.restart()
                continue
            yield from (f"  {line}" for line in lines_of(found))


def _measured(worker: ProcessWorker, device: DeviceFacts) -> Ceilings:
    found: Ceilings = worker.within(COMPILE_SECONDS).ceilings(device, WHOLE_SECONDS, RUNS)
    return found
