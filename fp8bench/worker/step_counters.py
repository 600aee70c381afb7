"""Counts allocations of steps, in a worker that times nothing.

Calls of the host's allocator are counted by the probe that the worker was started with (measure/handle.py), page faults
by the system, and a GPU's allocations by torch's allocator and its profiler. Each has separate steps, after two
warm-ups.
"""

from __future__ import annotations

import ctypes
import resource
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fp8bench.model import CELL_PHASES, UNATTRIBUTED, Measurement, specs
from fp8bench.model.specs import MetricSpec
from fp8bench.protocols import Device, Markers, Phases, Setup, SilentPhases, TellingMarker, Workload
from fp8bench.worker.static_scales import step
from fp8bench.worker.switches import collected_by_hand
from fp8bench.worker.tracing import STEPS as TRACED
from fp8bench.worker.tracing import record

STEPS = 8
_WARM_UPS = 2
_CALIBRATING = 1001
NO_PROBE = "the system's loader preloads no library into the worker"
# The metrics of one reading, in order.
HOST = (specs.ALLOCATOR_CALLS, specs.ALLOCATED_BYTES, specs.ALLOCATOR_TIME, specs.PAGE_FAULTS)
# Keyed by the names of torch's allocator.
_DEVICE_COUNTS: Mapping[str, MetricSpec] = {
    "num_device_alloc": specs.DEVICE_ALLOCATIONS,
    "num_alloc_retries": specs.ALLOCATION_RETRIES,
}
# Calls by which a driver allocates or frees memory; the cuMem ones belong to expandable segments.
_DEVICE_CALLS = ("cudaMalloc", "cudaFree", "hipMalloc", "hipFree", "cuMemCreate", "cuMemMap", "cuMemUnmap")
# The counts of a step, and the reasons for missing ones.
Counted = tuple[tuple[Measurement, ...], tuple[str, ...]]


class Probe:
    """The preloaded library in front of this process's allocator."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._numbers = (ctypes.c_uint64 * 4)()
        library.fp8bench_probe_cost.restype = ctypes.c_uint64
        costs = [library.fp8bench_probe_cost(_CALIBRATING) / _CALIBRATING for _ in range(5)]
        # Timing a call reads the clock twice; one reading is inside the time.
        self._cost = min(costs)

    def switch(self, on: bool) -> None:
        self._library.fp8bench_probe_switch(int(on))

    def read(self) -> tuple[float, float, float]:
        """Returns calls of the allocator, bytes that it returned, and seconds in it."""
        self._library.fp8bench_probe_read(self._numbers)
        allocations, releases, size, nanoseconds = self._numbers
        calls = allocations + releases
        return float(calls), float(size), max(0.0, nanoseconds - calls * self._cost) * 1e-9


def found_probe() -> Probe | None:
    library = ctypes.CDLL(None)
    return Probe(library) if hasattr(library, "fp8bench_probe_read") else None


@dataclass
class PhaseReadings:
    """Readings of counters that only grow, by the phase that a step was in. Each phase change reads twice and nothing
    between the two counts, so that the cost of a reading is excluded."""

    read: Callable[[], Sequence[float]]
    steps: list[dict[str, list[float]]] = field(default_factory=list)
    _phase: str = UNATTRIBUTED
    _last: Sequence[float] = ()

    def run(self, take_step: Callable[[Phases], object]) -> None:
        stack = [UNATTRIBUTED]  # backward may run on another thread: phases share it
        phases = Markers(lambda name: TellingMarker(name, stack, self.turn))
        self.steps.append({})
        self._phase, self._last = UNATTRIBUTED, self.read()
        take_step(phases)
        self.turn(UNATTRIBUTED)

    def turn(self, phase: str) -> None:
        reading = self.read()
        counts = self.steps[-1].setdefault(self._phase, [0.0] * len(reading))
        for place, (now, last) in enumerate(zip(reading, self._last, strict=True)):
            counts[place] += now - last
        self._phase = phase
        self._last = self.read()

    def measurements(self, figures: Sequence[MetricSpec]) -> list[Measurement]:
        marked = set().union(*self.steps)
        present = [name for name in CELL_PHASES if name in marked]
        measured = []
        for place, spec in enumerate(figures):
            totals = tuple(sum(part[place] for part in counts.values()) for counts in self.steps)
            measured.append(Measurement(spec.name, spec.unit, totals))
            for name in present:
                parts = tuple(counts[name][place] if name in counts else 0.0 for counts in self.steps)
                measured.append(Measurement(spec.name, spec.unit, parts, phase=name))
        return measured


def counters_of_step(workload: Workload, setup: Setup, device: Device, index: int, unprobed: str = "") -> Counted:
    state = workload.prepare(setup)
    run_once = partial(step, workload, state, setup.scales)

    def run(phases: Phases) -> None:
        run_once(phases)
        device.synchronise(index)

    with collected_by_hand():
        for _ in range(_WARM_UPS):
            run(SilentPhases())
        host, host_reasons = _host(run, unprobed or NO_PROBE)
        on_device, device_reasons = _device(run, device, index)
    return (*host, *on_device), tuple(dict.fromkeys((*host_reasons, *device_reasons)))


def _host(run: Callable[[Phases], None], unprobed: str) -> Counted:
    probe = found_probe()

    def read() -> Sequence[float]:
        faults = float(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
        return (*probe.read(), faults) if probe is not None else (faults,)

    # The probe counts only in these steps, because every call that it sees costs time.
    readings = PhaseReadings(read)
    if probe is not None:
        probe.switch(True)
    try:
        for _ in range(STEPS):
            readings.run(run)
    finally:
        if probe is not None:
            probe.switch(False)
    if probe is None:
        return tuple(readings.measurements(HOST[-1:])), (f"no calls of the allocator: {unprobed}",)
    return tuple(readings.measurements(HOST)), ()


def _device(run: Callable[[Phases], None], device: Device, index: int) -> Counted:
    """Counts requests of torch's allocator to a GPU's driver, and the time of these calls on the host."""
    if device.allocations(index) is None:
        return (), ()
    samples: dict[MetricSpec, list[float]] = {spec: [] for spec in _DEVICE_COUNTS.values()}
    for _ in range(STEPS):
        counts_before = device.allocations(index) or {}
        run(SilentPhases())
        counts_after = device.allocations(index) or {}
        for name, spec in _DEVICE_COUNTS.items():
            samples[spec].append(float(counts_after.get(name, 0) - counts_before.get(name, 0)))
    seconds = device_call_seconds(record(run, device.kind)["traceEvents"]) / TRACED
    measured = [Measurement(spec.name, spec.unit, tuple(counts)) for spec, counts in samples.items()]
    return (*measured, Measurement(specs.DEVICE_ALLOCATOR_TIME.name, "s", (seconds,))), ()


def device_call_seconds(events: Sequence[Mapping[str, Any]]) -> float:
    """Sums the calls in a trace that take memory from a driver, or give it back."""
    return 1e-6 * sum(
        float(event.get("dur", 0.0))
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and str(event.get("name", "")).startswith(_DEVICE_CALLS)
    )
