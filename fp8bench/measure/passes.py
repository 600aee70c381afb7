"""What one case has come to so far, and the passes after the timing, each in states of its own.

Numerical errors, what the data are, memory, traces.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path

from fp8bench.errors import WorkerError, WorkerFault
from fp8bench.files import name_of
from fp8bench.measure.handle import Worker
from fp8bench.measure.limits import Limits
from fp8bench.measure.sensors.meter import Meter
from fp8bench.measure.sensors.nvml import AbsentDevice, Looks
from fp8bench.model import (
    Capacity,
    Case,
    DeviceFacts,
    DeviceWatch,
    EnergyUse,
    LayerScale,
    Level,
    Measurement,
    MemoryUse,
    OperatorTime,
    PlannedCase,
    Provenance,
    Record,
    Run,
    Status,
    TensorStatistics,
    Timing,
)
from fp8bench.model.readings import Reading
from fp8bench.protocols import Observer
from fp8bench.units import unit_of

OUT_OF_MEMORY = "out of memory, even alone"


@dataclass
class CaseOutcome:
    """A record in the making. `failure` is the reason of a case that failed, '' while it is alive."""

    planned: PlannedCase
    timing: Timing | None = None
    control: Timing | None = None
    paired_with: Timing | None = None
    paired: bool = True
    stopped: str = ""
    failure: str = ""
    detail: str = ""
    measurements: list[Measurement] = field(default_factory=list)
    statistics: tuple[TensorStatistics, ...] = ()
    trace: str = ""
    operators: tuple[OperatorTime, ...] = ()
    scales: tuple[LayerScale, ...] = ()
    energy: EnergyUse | None = None
    watch: DeviceWatch | None = None
    capacity: Capacity | None = None
    memory: MemoryUse | None = None

    def forget(self) -> None:
        """Whatever was measured beside others, which begins again."""
        self.timing = self.control = self.paired_with = self.energy = self.watch = None
        self.paired, self.stopped = True, ""

    @property
    def may_fit(self) -> bool:
        """Whether it would run with a batch that is small enough."""
        return self.planned.support.level is not Level.REFUSED and self.failure in ("", OUT_OF_MEMORY)

    def record(self, is_reference: bool, left_out: str = "") -> Record:
        """What became of the case; `left_out` says why it was not measured. Of one that failed no times are kept."""
        reason = left_out or self.failure
        timed = self if not reason else CaseOutcome(self.planned)
        return Record(
            case=self.planned.case,
            support=self.planned.support,
            status=Status.SKIPPED if left_out else Status.FAILED if reason else Status.OK,
            work=self.planned.work,
            is_reference=is_reference,
            reason=reason,
            detail=self.detail,
            timing=timed.timing,
            control=self.control,
            paired_with=self.paired_with,
            paired=self.paired,
            measurements=tuple(self.measurements),
            stopped=self.stopped,
            statistics=self.statistics,
            trace=self.trace,
            operators=self.operators,
            scales=timed.scales,
            energy=timed.energy,
            watch=timed.watch,
            memory=self.memory,
            capacity=self.capacity,
        )

    def lacks(self, why: str) -> None:
        """Something about it could not be had, which does not fail it."""
        self.detail = "; ".join(filter(None, (self.detail, why)))


def exhausted(cause: WorkerError) -> bool:
    """Whether memory did not suffice, and the worker lives on."""
    return isinstance(cause, WorkerFault) and cause.out_of_memory


# In the plugin's words the worker; traces of several runs in one folder are its spans.
_TRACE_WORKER = "fp8bench"
_SUFFIX = ".pt.trace.json.gz"


@dataclass(frozen=True)
class TraceFolder:
    """A folder for each case, as TensorBoard wants it; `stamp` tells the runs in it apart."""

    path: Path
    stamp: int

    def file_of(self, case: Case) -> str:
        """The file of a case, within the folder."""
        return f"{name_of(case)}/{_TRACE_WORKER}.{self.stamp}{_SUFFIX}"


def trace_folder(run: Run) -> TraceFolder | None:
    """The folder that a run was asked for; a run that is resumed writes the same names."""
    if run.request.trace is None:
        return None
    return TraceFolder(
        Path(run.request.trace).absolute(), round(datetime.fromisoformat(run.started).timestamp() * 1000)
    )


_PEAK_MEMORY = "tensor memory allocated through torch, the state included, at the highest point of a step"


class Passes:
    """Asks the worker, and writes down in the outcomes what it says, or why it says nothing."""

    def __init__(self, worker: Worker, facts: Mapping[str, DeviceFacts], limits: Limits, observer: Observer) -> None:
        self._worker = worker
        self._facts = facts
        self._limits = limits
        self._observer = observer

    def errors(self, outcomes: Sequence[CaseOutcome]) -> None:
        """Numerical errors of every case. Whose numbers cannot be had fails.

        Not for want of memory, though: a reference in fp64 may need more than the step.
        """
        for outcome in outcomes:
            case = outcome.planned.case
            self._observer.working(case, "checking numbers", 1.0)
            try:
                errors = self._worker.error(case, self._facts[case.device], self._limits.numbers(outcome.planned.work))
            except WorkerError as cause:
                why = f"no numerical error: {cause}"
                if exhausted(cause):
                    outcome.lacks(why)
                    continue
                self._worker.restart()
                outcome.failure = why
                outcome.detail = cause.trace if isinstance(cause, WorkerFault) else ""
                continue
            outcome.failure = _not_finite(errors)
            outcome.measurements += [
                Measurement(name, unit_of(name), (value,), Provenance.MEASURED) for name, value in errors.items()
            ]

    def statistics(self, reference: CaseOutcome) -> None:
        """What the data are, asked of one case; they describe those of all, so that they do not fail that one."""
        case = reference.planned.case
        try:
            limit = self._limits.numbers(reference.planned.work)
            reference.statistics = self._worker.statistics(case, self._facts[case.device], limit)
        except WorkerError as cause:
            self._missed(reference, f"no statistics of the data: {cause}", cause)

    def memory(self, outcomes: Sequence[CaseOutcome], meter: Meter | None = None) -> None:
        """Memory at the highest point of a step; a case without it stands all the same.

        The driver's count of the worker's process comes from the meter, where there is a driver.
        """
        device = None if meter is None or isinstance(meter.device, AbsentDevice) else meter.device
        for outcome in outcomes:
            case = outcome.planned.case
            self._observer.working(case, "measuring memory", 1.0)
            key = f"memory of {case.id}" if device is not None else ""
            limit = self._limits.numbers(outcome.planned.work)
            try:
                found = self._worker.memory(case, self._facts[case.device], limit, key)
                if device is not None:
                    found = self._seen_from_outside(found, device)
                    self._worker.release(key)
            except WorkerError as cause:
                self._missed(outcome, f"no peak memory: {cause}", cause)
                continue
            if isinstance(found, str):
                outcome.lacks(f"no peak memory: {found}")
                continue
            outcome.memory = found
            outcome.measurements.append(Measurement("peak_memory", "B", (float(found.peak),), description=_PEAK_MEMORY))
        if any(one.memory is not None and self._facts[one.planned.case.device].accelerated for one in outcomes):
            self._worker.restart()  # torch's profiler was on in it, and nobody knows that it leaves no trace

    def traces(self, outcomes: Sequence[CaseOutcome], folder: TraceFolder) -> None:
        """A few steps of every case into a file of its own; a case without it stands all the same."""
        for outcome in outcomes:
            case = outcome.planned.case
            self._observer.working(case, "recording a trace", 1.0)
            name, limit = folder.file_of(case), self._limits.numbers(outcome.planned.work)
            try:
                outcome.operators = self._worker.trace(case, self._facts[case.device], folder.path / name, limit)
            except WorkerError as cause:
                self._missed(outcome, f"no trace: {cause}", cause)
                continue
            outcome.trace = name
        if any(self._facts[outcome.planned.case.device].accelerated for outcome in outcomes):
            # A GPU's profiler stays attached to a process that has used it, and would slow its launches down.
            self._worker.restart()

    def _seen_from_outside(self, found: MemoryUse | str, device: Looks) -> MemoryUse | str:
        """With what the driver counts for the worker's process, or why it counts nothing."""
        pid = self._worker.pid
        if isinstance(found, str) or pid is None:
            return found
        read = device.process_memory(pid)
        if isinstance(read, Reading):
            return replace(found, process=int(read.number))
        return replace(found, why="; ".join(filter(None, (found.why, f"no memory of the process: {read.reason}"))))

    def _missed(self, outcome: CaseOutcome, why: str, cause: WorkerError) -> None:
        if not exhausted(cause):
            self._worker.restart()
        outcome.lacks(why)


def _not_finite(errors: Mapping[str, float]) -> str:
    """Why a case fails whose numbers are no numbers; '' if they are."""
    wrong = [f"{name} is {value}" for name, value in errors.items() if not math.isfinite(value)]
    return f"its numbers are not finite: {', '.join(wrong)}" if wrong else ""
