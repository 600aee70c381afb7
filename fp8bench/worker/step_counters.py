"""Counts the memory allocations of steps, in a worker that times nothing.

Calls of the host's allocator are counted by a probe, a library that was preloaded into the worker
(measure/handle.py). Page faults are counted by the system, and allocations of a GPU by torch's allocator and
profiler. Each of these counts has separate steps, after two warm-up steps.
"""

from __future__ import annotations

import ctypes
import resource
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

from fp8bench.model import CELL_PHASES, UNATTRIBUTED, Measurement, specs
from fp8bench.model.specs import MetricSpec
from fp8bench.protocols import Device, Phases, Setup, SilentPhases, Workload
from fp8bench.worker.clock import make_reporting_phases
from fp8bench.worker.static_scales import step
from fp8bench.worker.switches import without_garbage_collection
from fp8bench.worker.tracing import TRACED_STEPS, record_trace

MEASURED_STEP_COUNT = 8
_WARM_UP_STEPS = 2
_CALIBRATING_CALLS = 1001
NO_ALLOCATOR_PROBE_REASON = "the system's loader preloads no library into the worker"
# The metrics that a reading of the host's counters has, in this order.
HOST_COUNTER_METRICS = (specs.ALLOCATOR_CALLS, specs.ALLOCATED_BYTES, specs.ALLOCATOR_TIME, specs.PAGE_FAULTS)
# The metric for each counter of torch's allocator, by the counter's name.
_DEVICE_COUNT_SPECS: Mapping[str, MetricSpec] = {
    "num_device_alloc": specs.DEVICE_ALLOCATIONS,
    "num_alloc_retries": specs.ALLOCATION_RETRIES,
}
# Calls of the driver that allocate or free memory. The cuMem calls belong to torch's expandable segments.
_DEVICE_MEMORY_CALLS = ("cudaMalloc", "cudaFree", "hipMalloc", "hipFree", "cuMemCreate", "cuMemMap", "cuMemUnmap")
# The measured counts of allocations, and the reasons why some counts are missing.
AllocationCounts = tuple[tuple[Measurement, ...], tuple[str, ...]]


class AllocatorProbe:
    """The preloaded library that counts the calls of this process's memory allocator."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._numbers = (ctypes.c_uint64 * 4)()
        # By default ctypes would read the result as a 32-bit integer.
        library.fp8bench_probe_cost.restype = ctypes.c_uint64
        clock_reading_costs = [library.fp8bench_probe_cost(_CALIBRATING_CALLS) / _CALIBRATING_CALLS for _ in range(5)]
        # The clock is read before and after a call. About one reading falls into the measured time, and is subtracted.
        self._cost = min(clock_reading_costs)

    def switch_probe(self, on: bool) -> None:
        self._library.fp8bench_probe_switch(int(on))

    def read(self) -> tuple[float, float, float]:
        """Returns the number of calls of the allocator, the bytes that it returned, and the seconds spent in it."""
        self._library.fp8bench_probe_read(self._numbers)
        allocations, releases, size, nanoseconds = self._numbers
        calls = allocations + releases
        # The cost is an estimate, and may exceed the measured time.
        return float(calls), float(size), max(0.0, nanoseconds - calls * self._cost) * 1e-9


def find_allocator_probe() -> AllocatorProbe | None:
    library = ctypes.CDLL(None)
    return AllocatorProbe(library) if hasattr(library, "fp8bench_probe_read") else None


@dataclass
class PhaseCounterReadings:
    """Readings of counters that only grow, by the phase of the step.

    At each change of phase the counters are read twice. Changes between these two readings are not counted, so that the
    cost of reading is excluded.
    """

    read: Callable[[], Sequence[float]]
    steps: list[dict[str, list[float]]] = field(default_factory=list)
    _phase: str = UNATTRIBUTED
    _last_reading: Sequence[float] = ()

    def run(self, take_step: Callable[[Phases], object]) -> None:
        phases = make_reporting_phases(self.change_phase)
        self.steps.append({})
        self._phase = UNATTRIBUTED
        self._last_reading = self.read()
        take_step(phases)
        self.change_phase(UNATTRIBUTED)

    def change_phase(self, phase: str) -> None:
        reading = self.read()
        phase_totals = self.steps[-1].setdefault(self._phase, [0.0] * len(reading))
        for index, (present, last) in enumerate(zip(reading, self._last_reading, strict=True)):
            phase_totals[index] += present - last
        self._phase = phase
        self._last_reading = self.read()

    def measurements(self, figures: Sequence[MetricSpec]) -> list[Measurement]:
        marked_phases = set().union(*self.steps)
        marked_cell_phases = [name for name in CELL_PHASES if name in marked_phases]
        measurements = []
        for index, spec in enumerate(figures):
            step_totals = tuple(sum(part[index] for part in counts.values()) for counts in self.steps)
            measurements.append(Measurement(spec.name, spec.unit, step_totals))
            for name in marked_cell_phases:
                phase_totals = tuple(counts[name][index] if name in counts else 0.0 for counts in self.steps)
                measurements.append(Measurement(spec.name, spec.unit, phase_totals, phase=name))
        return measurements


def count_step_allocations(
    workload: Workload, setup: Setup, device: Device, index: int, unprobed: str = ""
) -> AllocationCounts:
    state = workload.prepare(setup)
    take_step = partial(step, workload, state, setup.scales)

    def run(phases: Phases) -> None:
        take_step(phases)
        device.synchronise(index)

    with without_garbage_collection():
        for _ in range(_WARM_UP_STEPS):
            run(SilentPhases())
        host_counts, host_reasons = _count_host_allocations(run, unprobed or NO_ALLOCATOR_PROBE_REASON)
        on_device, device_reasons = _count_device_allocations(run, device, index)
    return (*host_counts, *on_device), tuple(dict.fromkeys((*host_reasons, *device_reasons)))


def _count_host_allocations(run: Callable[[Phases], None], unprobed: str) -> AllocationCounts:
    probe = find_allocator_probe()

    def read() -> Sequence[float]:
        page_faults = float(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
        return (*probe.read(), page_faults) if probe is not None else (page_faults,)

    # The probe slows down every call of the memory allocator, so turn it on only during these steps.
    phase_readings = PhaseCounterReadings(read)
    if probe is not None:
        probe.switch_probe(True)
    try:
        for _ in range(MEASURED_STEP_COUNT):
            phase_readings.run(run)
    finally:
        if probe is not None:
            probe.switch_probe(False)
    if probe is None:
        return tuple(phase_readings.measurements(HOST_COUNTER_METRICS[-1:])), (
            f"no calls of the allocator: {unprobed}",
        )
    return tuple(phase_readings.measurements(HOST_COUNTER_METRICS)), ()


def _count_device_allocations(run: Callable[[Phases], None], device: Device, index: int) -> AllocationCounts:
    """Counts how often torch's allocator requests memory from a GPU's driver, and the seconds that this takes on the
    host.
    """
    if device.allocations(index) is None:
        return (), ()
    allocator_readings = [device.allocations(index) or {}]
    for _ in range(MEASURED_STEP_COUNT):
        run(SilentPhases())
        allocator_readings.append(device.allocations(index) or {})
    seconds = sum_device_call_seconds(record_trace(run, device.kind)["traceEvents"]) / TRACED_STEPS
    measurements = []
    for name, spec in _DEVICE_COUNT_SPECS.items():
        counts_per_step = tuple(
            float(later.get(name, 0) - earlier.get(name, 0)) for earlier, later in pairwise(allocator_readings)
        )
        measurements.append(Measurement(spec.name, spec.unit, counts_per_step))
    return (*measurements, Measurement(specs.DEVICE_ALLOCATOR_TIME.name, "s", (seconds,))), ()


def sum_device_call_seconds(events: Sequence[Mapping[str, Any]]) -> float:
    """Returns the seconds of all calls in a trace that allocate memory from a driver or free it."""
    return 1e-6 * sum(
        float(event.get("dur", 0.0))
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver")
        and str(event.get("name", "")).startswith(_DEVICE_MEMORY_CALLS)
    )
