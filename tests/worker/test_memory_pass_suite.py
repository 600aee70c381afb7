"""The pass that measures memory as its parent runs it: what the driver counts of the worker, and what faults cost."""

from __future__ import annotations

from collections.abc import Mapping

from fp8bench.errors import WorkerFault, WorkerHung
from fp8bench.measure.limits import DEFAULT_TIME_LIMITS
from fp8bench.measure.passes import CaseOutcome, Passes
from fp8bench.measure.sensors.meter import Meter
from fp8bench.measure.sensors.nvml import AbsentDevice, DeviceReader
from fp8bench.model import DeviceFacts, MemoryUse
from fp8bench.model.readings import Reading, ReadingOrUnavailable, Readings, UnavailableReading
from fp8bench.protocols import SilentObserver
from tests.counts import for_each
from tests.facts import CPU
from tests.fakes import GPU, FakeWorker, Fault, Script, planned


class Driver(DeviceReader):
    """A driver that counts process memory, or gives a reason; it records which states still exist."""

    def __init__(self, worker: FakeWorker, read: ReadingOrUnavailable) -> None:
        self.worker = worker
        self.read = read
        self.asked: list[tuple[int | None, list[str]]] = []

    def process_memory(self, pid: int | None = None) -> ReadingOrUnavailable:
        self.asked.append((pid, list(self.worker.remembered)))
        return self.read

    def power_limit(self) -> ReadingOrUnavailable:
        return UnavailableReading("not asked here")

    def _read_queries(self, wanted: object) -> Readings:
        return {}


def remembered(
    scripts: Mapping[str, Script], read: ReadingOrUnavailable | None, facts: DeviceFacts = CPU
) -> tuple[list[CaseOutcome], FakeWorker, Driver | None]:
    worker = FakeWorker(scripts)
    driver = None if read is None else Driver(worker, read)
    outcomes = [CaseOutcome(planned(mode)) for mode in scripts]
    passes = Passes(worker, {"cpu": facts}, DEFAULT_TIME_LIMITS, SilentObserver())
    passes.measure_memory(outcomes, Meter((), driver or AbsentDevice("no driver")))
    return outcomes, worker, driver


def test_the_driver_is_asked_while_the_state_is_there() -> None:
    outcomes, worker, driver = remembered({"fp32": Script(peak=7), "bf16": Script(peak=5)}, Reading(99, "B", "NVML"))
    assert [outcome.draft.memory for outcome in outcomes] == [MemoryUse(7, process=99), MemoryUse(5, process=99)]
    assert driver is not None and [pid for pid, _ in driver.asked] == [worker.pid] * 2
    assert [len(states) for _, states in driver.asked] == [1, 1] and worker.remembered == []
    assert not any(outcome.draft.detail for outcome in outcomes)


@for_each(
    ("peak", "read", "memory", "asked"),
    [
        (
            7,
            UnavailableReading("NVML does not list it"),
            MemoryUse(7, why="no memory of the process: NVML does not list it"),
            1,
        ),
        (7, None, MemoryUse(7), 0),  # a CPU has no driver, so there is no request and no measurement
        (None, Reading(99, "B", "NVML"), None, 0),  # a device that cannot count is a reason too
    ],
)
def test_who_cannot_say_is_a_reason(
    peak: int | None, read: ReadingOrUnavailable | None, memory: MemoryUse | None, asked: int
) -> None:
    (outcome,), worker, driver = remembered({"fp32": Script(peak=peak)}, read)
    assert outcome.draft.memory == memory and len(driver.asked if driver is not None else ()) == asked
    assert outcome.draft.detail == ("" if peak else "no peak memory: the script has none")
    assert worker.remembered == [] and (driver is not None or ("release", "?") not in worker.log)


@for_each(
    ("error", "restarts"),
    [(WorkerFault("OutOfMemoryError", "full", "", out_of_memory=True), 0), (WorkerHung("60 s"), 1)],
)
def test_a_fault_costs_one_case(error: Exception, restarts: int) -> None:
    scripts = {"fp32": Script(peak=7, faults=[Fault("memory", error)]), "bf16": Script(peak=5)}
    (first, second), worker, driver = remembered(scripts, Reading(99, "B", "NVML"))
    assert first.draft.memory is None and first.draft.detail == f"no peak memory: {error}"
    assert second.draft.memory == MemoryUse(5, process=99) and worker.restarts == restarts
    assert driver is not None and len(driver.asked) == 1


@for_each(("facts", "peak", "restarts"), [(CPU, 7, 0), (GPU, 7, 1), (GPU, None, 0)])
def test_no_gpu_is_timed_in_a_process_that_listened(facts: DeviceFacts, peak: int | None, restarts: int) -> None:
    _, worker, _ = remembered({"fp32": Script(peak=peak)}, None, facts)
    assert worker.restarts == restarts
