"""The outcome of a case so far, and the passes after the timing, each in states of its own: errors, statistics of the
data, memory, traces."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8bench.errors import WorkerError, WorkerFault
from fp8bench.measure.handle import Worker
from fp8bench.measure.limits import Limits
from fp8bench.measure.sensors.driver import Looks
from fp8bench.measure.sensors.meter import Meter
from fp8bench.measure.sensors.nvml import AbsentDevice
from fp8bench.model import (
    Case,
    DeviceFacts,
    Level,
    Measurement,
    MemoryUse,
    PlannedCase,
    Provenance,
    Record,
    Run,
    Status,
    StepEffect,
    Support,
    specs,
)
from fp8bench.model.file_names import name_of
from fp8bench.model.ranks import FailedRank
from fp8bench.model.readings import Reading
from fp8bench.model.request import NVTX
from fp8bench.model.specs import spec_of
from fp8bench.protocols import CannotMark, Observer
from fp8bench.protocols.axes import CACHE
from fp8bench.registry import workloads

if TYPE_CHECKING:
    from fp8bench.measure.handle import AskedBench

OUT_OF_MEMORY = "out of memory, even alone"


@dataclass
class CaseOutcome:
    """A record in the making; `failure` is why the case failed, '' while it is alive."""

    planned: PlannedCase
    failure: str = ""
    draft: Record = field(init=False)

    def __post_init__(self) -> None:
        self.draft = Record(self.planned.case, self.planned.support, Status.OK, self.planned.work)

    def note(self, **facts: Any) -> None:
        self.draft = replace(self.draft, **facts)

    def forget(self) -> None:
        failed = self.draft
        self.__post_init__()
        self.note(detail=failed.detail, failed_rank=failed.failed_rank)

    @property
    def may_fit(self) -> bool:
        return self.planned.support.level is not Level.REFUSED and self.failure in ("", OUT_OF_MEMORY)

    def record(self, is_reference: bool, left_out: str = "") -> Record:
        status = Status.SKIPPED if left_out else Status.FAILED if self.failure else Status.OK
        draft = replace(self.draft, status=status, is_reference=is_reference, reason=left_out or self.failure)
        if status is Status.OK:
            return draft
        return replace(draft, timing=None, scales=(), energy=None, watch=None, replays=None, sustained=(), fresh=None)

    def refuse(self, reason: str) -> None:
        support = Support(Level.REFUSED, reason)
        self.planned = replace(self.planned, support=support, skip=reason)
        self.note(support=support)

    def fail(self, reason: str, cause: WorkerError) -> None:
        self.failure = reason
        failed = cause.rank if isinstance(cause.rank, FailedRank) else None
        # Only a lost worker leaves no detail: a gate distinguishes a case's fault from a fault of its surroundings.
        self.note(detail=(cause.trace or str(cause)) if isinstance(cause, WorkerFault) else "", failed_rank=failed)

    def add_detail(self, reason: str) -> None:
        self.note(detail="; ".join(filter(None, (self.draft.detail, reason))))

    def take_memory(self, other: CaseOutcome) -> None:
        """Adds what another worker has measured of the same case's memory, or why it could not."""
        self.note(memory=other.draft.memory, measurements=(*self.draft.measurements, *other.draft.measurements))
        self.add_detail(other.draft.detail)


def ran_out_of_memory(cause: WorkerError) -> bool:
    """Whether memory did not suffice and the worker lives on."""
    return isinstance(cause, WorkerFault) and cause.out_of_memory


# TensorBoard's plugin shows this as the worker, and traces of several runs in one folder as its spans.
_TRACE_WORKER = "fp8bench"
_SUFFIX = ".pt.trace.json.gz"


@dataclass(frozen=True)
class TraceFolder:
    """A folder for each case, as TensorBoard wants it; `stamp` distinguishes runs in the same folder. With `marks_only`
    no file is written: a profiler around this process records the marked slots."""

    path: Path
    stamp: int
    marks_only: bool = False

    def file_of(self, case: Case) -> str:
        return f"{name_of(case)}/{_TRACE_WORKER}.{self.stamp}{_SUFFIX}"


def trace_folder(run: Run) -> TraceFolder | None:
    """The folder that the request names, or None. A resumed run gets the same names."""
    if run.request.trace is None:
        return None
    stamp = round(datetime.fromisoformat(run.started).timestamp() * 1000)
    return TraceFolder(Path(run.request.trace).absolute(), stamp, run.request.trace == NVTX)


_PEAK_MEMORY = "tensor memory allocated through torch, the state included, at the highest point of a step"


_ON_DEVICE = "peak memory with the formats' codes and scales in the place of an emulation's values"


def _peaks(use: MemoryUse) -> Iterator[Measurement]:
    yield Measurement(specs.PEAK_MEMORY, "B", (float(use.peak),), description=_PEAK_MEMORY)
    if use.on_device is not None:
        derived, size = Provenance.DERIVED, float(use.on_device)
        yield Measurement(specs.DEVICE_PEAK_MEMORY, "B", (size,), derived, description=_ON_DEVICE)


# Method of the bench and field of the record -> the observer's words during it, the detail's word for its answer.
QUESTIONS: Mapping[str, tuple[str, str]] = {
    "statistics": ("", "statistics of the data"),
    "products": ("looking at products", "look at its products"),
    "effect": ("checking what steps do", "look at what a step does"),
    "coverage": ("counting what is converted", "coverage"),
    "tape": ("counting operators", "tape"),
}


def numbers_key(case: Case) -> str:
    """Names the numbers that a case's errors are about: its id without parameters that change no number."""
    idle = {CACHE.name, *workloads.get(case.workload).numbers_ignore}
    return replace(case, params=tuple(param for param in case.params if param[0] not in idle)).id


@dataclass(frozen=True)
class Passes:
    """Asks the worker about cases, and stores the answers, or the reasons for missing ones, in their outcomes.

    A worker that `times_nothing` is not restarted for what a profiler leaves in its process.
    """

    _worker: Worker
    _facts: Mapping[str, DeviceFacts]
    _limits: Limits
    _observer: Observer
    _times_nothing: bool = False

    def ask(self, question: str, outcomes: Sequence[CaseOutcome]) -> None:
        for outcome in outcomes:
            with self._asking(outcome, *QUESTIONS[question]) as (bench, case, facts):
                outcome.note(**{question: getattr(bench, question)(case, facts)})

    def errors(
        self, outcomes: Sequence[CaseOutcome], measured: dict[str, tuple[Measurement, ...]] | None = None
    ) -> None:
        """Measures numerical errors. A case fails without them, unless only memory was short: a reference in fp64 may
        need more than the step.

        `measured` keeps the errors of a run, so that cases with the same numbers share them.
        """
        for outcome in outcomes:
            key = numbers_key(outcome.planned.case)
            if measured is not None and key in measured:
                outcome.note(measurements=(*outcome.draft.measurements, *measured[key]))
                continue
            with self._asking(outcome, "checking numbers", "numerical error", fails=True) as (bench, case, facts):
                errors = bench.error(case, facts)
                if isinstance(errors, str):
                    outcome.add_detail(f"no numerical error: {errors}")
                    continue
                wrong = [f"{name} is {value}" for name, value in errors.items() if not math.isfinite(value)]
                if wrong:
                    fault = WorkerFault("its numbers are not finite", ", ".join(wrong))
                    outcome.fail(str(fault), fault)
                found = tuple(Measurement(name, spec_of(name).unit, (value,)) for name, value in errors.items())
                outcome.note(measurements=(*outcome.draft.measurements, *found))
                if measured is not None and not wrong:
                    measured[key] = found

    def shares(self, outcomes: Sequence[CaseOutcome]) -> None:
        for outcome in outcomes:
            with self._asking(outcome, "finding its parts", "shares") as (bench, case, facts):
                shares = bench.shares(case, facts)
                if isinstance(shares, str):
                    outcome.add_detail(f"no shares: {shares}")
                else:
                    outcome.note(shares=shares)

    def transfers(self, outcomes: Sequence[CaseOutcome]) -> None:
        """Finds what steps of several ranks send, and how far computing hides it; skips cases of one rank."""
        for outcome in (case_outcome for case_outcome in outcomes if case_outcome.planned.case.ranks > 1):
            limit = self._limits.numbers(outcome.planned.work)
            with self._asking(outcome, "counting what is sent", "bytes on the wire") as (_, case, facts):
                outcome.note(transfer=self._worker.ask(limit, "transfer", case, facts))
            with self._asking(outcome, "", "parts of a step") as (_, case, facts):
                if (parts := self._worker.ask(limit, "step_parts", case, facts)) is not None:
                    sent, overlap, scaling = parts
                    outcome.note(sent=sent, overlap=overlap, scaling=scaling)

    def counters(self, outcomes: Sequence[CaseOutcome], unprobed: str) -> None:
        """Counts allocations of steps; `unprobed` is the reason if the worker has no allocator probe."""
        for outcome in outcomes:
            with self._asking(outcome, "counting allocations", "counters") as (bench, case, facts):
                measurements, reasons = bench.counters(case, facts, unprobed)
                outcome.note(measurements=(*outcome.draft.measurements, *measurements))
                for reason in reasons:
                    outcome.add_detail(reason)
        self.leave_gpus(outcomes)

    def effects(self, outcomes: Sequence[CaseOutcome]) -> None:
        for outcome in outcomes:
            if outcome.draft.effect is None and outcome.planned.work.setup_seconds:
                outcome.note(effect=StepEffect(None, "its state is compiled, which takes too long for this"))
        self.ask("effect", [case_outcome for case_outcome in outcomes if case_outcome.draft.effect is None])

    def memory(self, outcomes: Sequence[CaseOutcome], meter: Meter | None = None, leaks: bool = True) -> None:
        """Memory at the highest point of a step, and whether it grows.

        With a meter, the driver's count of the worker's process is added.
        """
        device = None if meter is None or isinstance(meter.device, AbsentDevice) else meter.device
        for outcome in outcomes:
            with self._asking(outcome, "measuring memory", "peak memory") as (bench, case, facts):
                key = f"memory of {case.id}" if device is not None else ""
                # A duel's worker may be of a tree whose `memory` does not take this argument.
                use = bench.memory(case, facts, key) if leaks else bench.memory(case, facts, key, False)
                if device is not None:
                    use = self._with_process_memory(use, device)
                    self._worker.release(key)
                if isinstance(use, str):
                    outcome.add_detail(f"no peak memory: {use}")
                    continue
                outcome.note(memory=use, measurements=(*outcome.draft.measurements, *_peaks(use)))
        # torch's profiler was on in this process, and may leave something behind.
        self.leave_gpus(
            [case_outcome for case_outcome in outcomes if case_outcome.draft.effect or case_outcome.draft.memory]
        )

    def traces(self, outcomes: Sequence[CaseOutcome], folder: TraceFolder) -> None:
        for outcome in outcomes:
            with self._asking(outcome, "recording a trace", "trace") as (bench, case, facts):
                if folder.marks_only:
                    bench.mark_slot(case, facts)
                    continue
                name = folder.file_of(case)
                bench.trace(case, facts, str(folder.path / name))
                outcome.note(trace=name)
        # A GPU's profiler stays attached to a process that has used it, and would slow its launches down.
        self.leave_gpus(outcomes)

    def leave_gpus(self, outcomes: Sequence[CaseOutcome]) -> None:
        """Restarts the worker if any case was on a GPU, so that it holds no memory there while others are timed."""
        if not self._times_nothing and any(
            self._facts[outcome.planned.case.device].accelerated for outcome in outcomes
        ):
            self._worker.restart()

    def _with_process_memory(self, use: MemoryUse | str, device: Looks) -> MemoryUse | str:
        pid = self._worker.pid
        if isinstance(use, str) or pid is None:
            return use
        read = device.process_memory(pid)
        if isinstance(read, Reading):
            return replace(use, process=int(read.number))
        return replace(use, why="; ".join(filter(None, (use.why, f"no memory of the process: {read.reason}"))))

    @contextmanager
    def _asking(
        self, outcome: CaseOutcome, doing: str, lacking: str, fails: bool = False
    ) -> Iterator[tuple[AskedBench, Case, DeviceFacts]]:
        """Yields the bench, case and device to ask. If a request fails the reason is noted, and with `fails` the case
        fails unless memory ran out."""
        case = outcome.planned.case
        if doing:
            self._observer.working(case, doing, 1.0)
        try:
            limit = self._limits.numbers(outcome.planned.work)
            yield self._worker.within(limit), case, self._facts[case.device]
        except WorkerError as cause:
            refusal = f"{CannotMark.__name__}: "
            reason = f"no {lacking}: {str(cause).removeprefix(refusal)}"
            # A worker that refused, or only ran out of memory, still holds its other states: it need not restart.
            if str(cause).startswith(refusal) or ran_out_of_memory(cause):
                outcome.add_detail(reason)
                return
            self._worker.restart()
            if fails:
                outcome.fail(reason, cause)
            else:
                outcome.add_detail(reason)
