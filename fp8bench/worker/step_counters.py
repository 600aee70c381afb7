"""Counts what steps ask of allocators and of the processor, in a worker that times nothing.

Calls of the host's allocator are counted by the probe that the worker was started under (measure/handle.py), page
faults by the system, a GPU's allocations by torch's allocator and its profiler, and the processor's events by Linux's
perf_event_open. Each has steps of its own, after two warm-ups.

Perf events count the calling thread in user mode, one event after another: several at once may have to share counters,
and would be estimates. An event that cannot be counted has a reason.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from fp8bench.model import CELL_PHASES, UNATTRIBUTED, Measurement, specs
from fp8bench.model.readings import NoReading
from fp8bench.model.specs import MetricSpec
from fp8bench.protocols import Device, Markers, Phases, Setup, SilentPhases, TellingMarker, Workload
from fp8bench.worker.static_scales import step
from fp8bench.worker.switches import collected_by_hand
from fp8bench.worker.tracing import STEPS as TRACED
from fp8bench.worker.tracing import record

HARDWARE, SOFTWARE, CACHE = 0, 1, 3  # PERF_TYPE_*
_LAST_LEVEL, _READ, _ACCESS, _MISS = 2, 0, 0, 1
_NUMBERS = {"x86_64": 298, "aarch64": 241, "riscv64": 241, "ppc64le": 319, "s390x": 331}
# The first version of perf_event_attr, which every kernel takes.
_ATTRIBUTE = struct.Struct("=IIQQQQQIIQ")
_ENABLED_AND_RUNNING = 1 | 2
_EXCLUDE_KERNEL, _EXCLUDE_HYPERVISOR = 1 << 5, 1 << 6
_CLOSE_ON_EXEC = 8
_COUNTS = struct.Struct("=QQQ")
DEVICES = Path("/sys/bus/event_source/devices")
PARANOID = Path("/proc/sys/kernel/perf_event_paranoid")


@dataclass(frozen=True)
class PerfEvent:
    """An event as perf_event_open names it; `name` is the metric's."""

    name: str
    kind: int
    config: int


EVENTS = (
    PerfEvent(specs.INSTRUCTIONS.name, HARDWARE, 1),
    PerfEvent(specs.CYCLES.name, HARDWARE, 0),
    PerfEvent(specs.CACHE_LOADS.name, CACHE, _LAST_LEVEL | _READ << 8 | _ACCESS << 16),
    PerfEvent(specs.CACHE_LOAD_MISSES.name, CACHE, _LAST_LEVEL | _READ << 8 | _MISS << 16),
    PerfEvent(specs.CACHE_REFERENCES.name, HARDWARE, 2),
    PerfEvent(specs.CACHE_MISSES.name, HARDWARE, 3),
)
# The attribute of an event to a file descriptor; raises OSError.
Open = Callable[[bytes], int]


def _opened(attribute: bytes) -> int:
    number = _NUMBERS.get(platform.machine())
    if platform.system() != "Linux" or number is None:
        raise NoReading(f"perf events are Linux's, on {', '.join(_NUMBERS)}")
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    # Counts this thread, on any processor, in no group.
    descriptor = call(ctypes.c_long(number), attribute, 0, -1, -1, ctypes.c_ulong(_CLOSE_ON_EXEC))
    if descriptor < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return int(descriptor)


class PerfCounter:
    """Counts an event until it is closed."""

    def __init__(self, event: PerfEvent, opened: Open = _opened, devices: Path = DEVICES) -> None:
        flags = 0 if event.kind == SOFTWARE else _EXCLUDE_KERNEL | _EXCLUDE_HYPERVISOR
        attribute = _ATTRIBUTE.pack(
            event.kind, _ATTRIBUTE.size, event.config, 0, 0, _ENABLED_AND_RUNNING, flags, 0, 0, 0
        )
        try:
            self._file = opened(attribute)
        except OSError as error:
            raise NoReading(why_not(error, devices)) from None

    def read(self) -> int:
        """Returns the count so far; raises NoReading where others had the counter for part of the time."""
        words = os.read(self._file, _COUNTS.size)
        if len(words) != _COUNTS.size:
            raise NoReading(f"a perf event gave {len(words)} bytes in the place of {_COUNTS.size}")
        count, enabled, running = _COUNTS.unpack(words)
        if running < enabled:
            raise NoReading("another program holds the processor's counters: end it (perf, a watchdog) and ask again")
        return int(count)

    def close(self) -> None:
        os.close(self._file)


def why_not(error: OSError, devices: Path = DEVICES, paranoid: Path = PARANOID) -> str:
    if error.errno in (errno.ENOENT, errno.EOPNOTSUPP, errno.ENODEV, errno.EINVAL):
        if not any(devices.glob("cpu*")) and not any(devices.glob("armv*")):
            return (
                "the kernel sees no counters of a processor here: this is a virtual machine, and its host passes none "
                "on. Measure on the machine itself, or have the host pass a PMU on"
            )
        return f"this processor has no such counter, or counts it for all programs together ({error.strerror})"
    if error.errno in (errno.EACCES, errno.EPERM):
        try:
            level = int(paranoid.read_text())
        except (OSError, ValueError):
            level = 0
        if level > 2:
            return f"kernel.perf_event_paranoid is {level}: `sysctl kernel.perf_event_paranoid=2`, or CAP_PERFMON"
        return (
            "a filter of system calls forbids perf_event_open, as containers' usual ones do: allow it (docker run "
            "--security-opt seccomp=FILE, or --cap-add PERFMON)"
        )
    if error.errno == errno.ENOSYS:
        return "this kernel, or the sandbox around it, has no perf events"
    return f"the kernel counts no such event: {error.strerror}"


def counted(steps: Callable[[], object], event: PerfEvent, opened: Open = _opened) -> int | str:
    try:
        counter = PerfCounter(event, opened)
    except NoReading as none:
        return none.reason
    try:
        before = counter.read()
        steps()
        return counter.read() - before
    except NoReading as none:
        return none.reason
    finally:
        counter.close()


STEPS = 8
_WARM_UPS = 2
_CALIBRATING = 1001
NO_PROBE = "the system's loader preloads no library into the worker"
# The metrics of one reading, in its order.
HOST = (specs.ALLOCATOR_CALLS, specs.ALLOCATED_BYTES, specs.ALLOCATOR_TIME, specs.PAGE_FAULTS)
# By the names of torch's allocator.
_DEVICE_COUNTS: Mapping[str, MetricSpec] = {
    "num_device_alloc": specs.DEVICE_ALLOCATIONS, "num_alloc_retries": specs.ALLOCATION_RETRIES,
}  # fmt: skip
# Calls by which a driver gives or takes memory; the cuMem ones belong to expandable segments.
_DEVICE_CALLS = ("cudaMalloc", "cudaFree", "hipMalloc", "hipFree", "cuMemCreate", "cuMemMap", "cuMemUnmap")
# What was counted, and why something was not.
Counted = tuple[tuple[Measurement, ...], tuple[str, ...]]


class Probe:
    """The preloaded library in front of this process's allocator."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._numbers = (ctypes.c_uint64 * 4)()
        library.fp8bench_probe_cost.restype = ctypes.c_uint64
        costs = [library.fp8bench_probe_cost(_CALIBRATING) / _CALIBRATING for _ in range(5)]
        # Timing a call reads the clock twice; one reading lies inside the time.
        self._cost = min(costs)

    def switch(self, on: bool) -> None:
        self._library.fp8bench_probe_switch(int(on))

    def read(self) -> tuple[float, float, float]:
        """Returns calls of the allocator, bytes that it gave, and seconds in it."""
        self._library.fp8bench_probe_read(self._numbers)
        allocations, releases, size, nanoseconds = self._numbers
        calls = allocations + releases
        return float(calls), float(size), max(0.0, nanoseconds - calls * self._cost) * 1e-9


def found_probe() -> Probe | None:
    library = ctypes.CDLL(None)
    return Probe(library) if hasattr(library, "fp8bench_probe_read") else None


@dataclass
class PhaseReadings:
    """Readings of counters that only grow, by the phase that a step was in. Each turn reads twice and nothing between
    the two counts, so that what a reading itself adds is left out."""

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
        for place, (now, before) in enumerate(zip(reading, self._last, strict=True)):
            counts[place] += now - before
        self._phase = phase
        self._last = self.read()

    def measurements(self, figures: Sequence[MetricSpec]) -> list[Measurement]:
        present = [name for name in CELL_PHASES if any(name in counts for counts in self.steps)]
        measured = []
        for place, spec in enumerate(figures):
            whole = tuple(sum(part[place] for part in counts.values()) for counts in self.steps)
            measured.append(Measurement(spec.name, spec.unit, whole))
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
        parts = (_host(run, unprobed or NO_PROBE), _processor(run), _device(run, device, index))
    measured = tuple(measurement for measurements, _ in parts for measurement in measurements)
    return measured, tuple(dict.fromkeys(why for _, whys in parts for why in whys))


def _host(run: Callable[[Phases], None], unprobed: str) -> Counted:
    probe = found_probe()

    def read() -> Sequence[float]:
        faults = float(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
        return (*probe.read(), faults) if probe is not None else (faults,)

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


def _processor(run: Callable[[Phases], None]) -> Counted:
    silent = SilentPhases()
    samples: dict[str, list[float]] = {event.name: [] for event in EVENTS}
    reasons: dict[str, list[str]] = {}
    for event in EVENTS:
        for _ in range(STEPS):
            count = counted(lambda: run(silent), event)
            if isinstance(count, str):
                reasons.setdefault(count, []).append(event.name)
                break
            samples[event.name].append(float(count))
    measured = tuple(
        Measurement(name, specs.spec_of(name).unit, tuple(counts)) for name, counts in samples.items() if counts
    )
    return measured, tuple(f"no {', '.join(dict.fromkeys(names))}: {why}" for why, names in reasons.items())


def _device(run: Callable[[Phases], None], device: Device, index: int) -> Counted:
    """Counts what torch's allocator asked of a GPU's driver, and the time of these calls on the host."""
    if device.allocations(index) is None:
        return (), ()
    samples: dict[MetricSpec, list[float]] = {spec: [] for spec in _DEVICE_COUNTS.values()}
    for _ in range(STEPS):
        before = device.allocations(index) or {}
        run(SilentPhases())
        after = device.allocations(index) or {}
        for name, spec in _DEVICE_COUNTS.items():
            samples[spec].append(float(after.get(name, 0) - before.get(name, 0)))
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
