"""Runs the untimed passes on cases (numerical errors, statistics of the data, memory, traces), and collects the
outcome of each case.

Every pass allocates new tensors for its cases.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8bench.errors import WorkerError, WorkerFault
from fp8bench.measure.handle import Worker
from fp8bench.measure.limits import RequestTimeLimits
from fp8bench.measure.sensors.meter import Meter
from fp8bench.measure.sensors.nvml import AbsentDevice, DeviceReader
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
from fp8bench.model.file_names import name_case_file
from fp8bench.model.ranks import FailedRank
from fp8bench.model.readings import Reading
from fp8bench.model.request import NVTX
from fp8bench.model.specs import find_metric_spec
from fp8bench.protocols import CannotMark, Observer
from fp8bench.protocols.axes import CACHE
from fp8bench.registry import precisions, workloads

if TYPE_CHECKING:
    from fp8bench.measure.handle import RemoteBench

OUT_OF_MEMORY = "out of memory, even alone"


@dataclass
class CaseOutcome:
    """The unfinished record of a case that is being measured. `failure` is the reason why the case failed, '' if it has
    not failed.
    """

    planned: PlannedCase
    failure: str = ""
    draft: Record = field(init=False)

    def __post_init__(self) -> None:
        self.draft = Record(self.planned.case, self.planned.support, Status.OK, self.planned.work)

    def note(self, **facts: Any) -> None:
        self.draft = replace(self.draft, **facts)

    def reset_draft_record(self) -> None:
        # The group is measured again from the start. Only the reason for the failure remains.
        failed_outcome_draft = self.draft
        self.__post_init__()
        self.note(detail=failed_outcome_draft.detail, failed_rank=failed_outcome_draft.failed_rank)

    @property
    def may_fit_memory(self) -> bool:
        return self.planned.support.level is not Level.REFUSED and self.failure in ("", OUT_OF_MEMORY)

    def make_record(self, is_reference: bool, skip_reason: str | None = None) -> Record:
        """Returns the finished record. `skip_reason` is by default the reason in the plan; '' for a measured case."""
        skip_reason = self.planned.skip if skip_reason is None else skip_reason
        status = Status.SKIPPED if skip_reason else Status.FAILED if self.failure else Status.OK
        finished_record = replace(
            self.draft, status=status, is_reference=is_reference, reason=skip_reason or self.failure
        )
        if status is Status.OK:
            return finished_record
        # A case may fail after it was timed. Then it must not show a speed.
        return replace(
            finished_record, timing=None, scales=(), energy=None, watch=None, replays=None, sustained=(), fresh=None
        )

    def refuse_case(self, reason: str) -> None:
        support = Support(Level.REFUSED, reason)
        self.planned = replace(self.planned, support=support, skip=reason)
        self.note(support=support)

    def fail_case(self, reason: str, cause: WorkerError) -> None:
        self.failure = reason
        failed_rank = cause.rank if isinstance(cause.rank, FailedRank) else None
        # A gate reads an empty `detail` as a dead worker process. So leave it empty if the worker was lost or hung.
        self.note(detail=(cause.trace or str(cause)) if isinstance(cause, WorkerFault) else "", failed_rank=failed_rank)

    def append_detail_text(self, reason: str) -> None:
        self.note(detail="; ".join(filter(None, (self.draft.detail, reason))))

    def add_measurements(self, measurements: Iterable[Measurement]) -> None:
        self.note(measurements=(*self.draft.measurements, *measurements))

    def copy_memory_figures(self, memory_outcome: CaseOutcome) -> None:
        """Copies the memory figures of a case, or the reason why they are missing, from the outcome that another worker
        measured.
        """
        self.note(memory=memory_outcome.draft.memory)
        self.add_measurements(memory_outcome.draft.measurements)
        self.append_detail_text(memory_outcome.draft.detail)


def ran_out_of_memory(cause: WorkerError) -> bool:
    """Returns whether the error is a lack of memory that the worker survived."""
    return isinstance(cause, WorkerFault) and cause.out_of_memory


# The name that TensorBoard's plugin shows as the worker. It shows traces of several runs in one folder as spans of
# this worker.
_TRACE_WORKER_NAME = "fp8bench"
_TRACE_SUFFIX = ".pt.trace.json.gz"


@dataclass(frozen=True)
class TraceFolder:
    """A folder of traces with a subfolder for each case, as TensorBoard expects. `run_start_ms` distinguishes runs in
    the same folder.

    With `marks_only` no file is written: steps and phases are only marked for a profiler that runs around this process.
    """

    path: Path
    run_start_ms: int
    marks_only: bool = False

    def name_trace_file(self, case: Case) -> str:
        return f"{name_case_file(case)}/{_TRACE_WORKER_NAME}.{self.run_start_ms}{_TRACE_SUFFIX}"


def make_trace_folder(run: Run) -> TraceFolder | None:
    """Returns the folder of traces that the request names, or None. If a run is resumed, its files get the same names
    as before.
    """
    if run.request.trace is None:
        return None
    run_start_ms = round(datetime.fromisoformat(run.started).timestamp() * 1000)
    return TraceFolder(Path(run.request.trace).absolute(), run_start_ms, run.request.trace == NVTX)


_PEAK_MEMORY_DESCRIPTION = "tensor memory allocated through torch, the state included, at the highest point of a step"
_DEVICE_MEMORY_DESCRIPTION = (
    "peak memory of hardware that stores the formats' codes and scales instead of emulated values"
)


def _make_peak_memory_measurements(use: MemoryUse) -> Iterator[Measurement]:
    yield Measurement(specs.PEAK_MEMORY, "B", (float(use.peak),), description=_PEAK_MEMORY_DESCRIPTION)
    if use.on_device is not None:
        provenance, device_bytes = Provenance.DERIVED, float(use.on_device)
        yield Measurement(
            specs.DEVICE_PEAK_MEMORY, "B", (device_bytes,), provenance, description=_DEVICE_MEMORY_DESCRIPTION
        )


# The untimed passes that `Passes.ask` runs, by the name of their Bench method, which is also the name of the record's
# field. Each has the text that shows progress, and the name of the figure in error messages.
PASS_TEXTS: Mapping[str, tuple[str, str]] = {
    "statistics": ("", "statistics of the data"),
    "products": ("looking at products", "check of its products"),
    "effect": ("checking what steps do", "check of what a step does"),
    "coverage": ("counting converted operations", "coverage"),
    "tape": ("counting operators", "tape"),
}


def make_numbers_key(case: Case) -> str:
    """Returns the case's id without the parameters that do not change its numbers. Cases with equal keys have equal
    numerical errors.
    """
    ignored_param_names = {CACHE.name, *workloads.get(case.workload).numbers_ignore}
    return replace(case, params=tuple(param for param in case.params if param[0] not in ignored_param_names)).id


def _has_products_to_check(outcome: CaseOutcome) -> bool:
    """Returns whether the products of the case must be checked. This is the case if one of its precisions has whole
    layers from a library, or has native products that a library could compute.
    """
    case, is_native = outcome.planned.case, outcome.planned.support.is_native
    map_precision_names = (name for _, name in case.precision_map)
    chosen_precisions = [precisions.get(word) for word in (case.precision, *map_precision_names)]
    return any(precision.whole_layers or (is_native and precision.takes_backend) for precision in chosen_precisions)


@dataclass(frozen=True)
class Passes:
    """Runs the untimed passes of cases in a worker, such as that for numerical errors. Stores the answer of a pass in
    the outcome of its case, or the reason for a missing answer. With `_is_untimed`, the worker never times steps, so it
    is not restarted to free GPU memory.
    """

    _worker: Worker
    _facts_by_device: Mapping[str, DeviceFacts]
    _time_limits: RequestTimeLimits
    _observer: Observer
    _is_untimed: bool = False

    def ask(self, question: str, outcomes: Sequence[CaseOutcome]) -> None:
        for outcome in outcomes:
            with self._requesting_answer(outcome, *PASS_TEXTS[question]) as (bench, case, facts):
                outcome.note(**{question: getattr(bench, question)(case, facts)})

    def check_products(self, outcomes: Sequence[CaseOutcome]) -> None:
        """Checks the products of cases that use a library or low-precision hardware. Refuses a case whose products fail
        or are wrong. A case fails if the check itself fails.
        """
        for outcome in filter(_has_products_to_check, outcomes):
            case, limits = outcome.planned.case, self._time_limits
            try:
                refusal_reason = self._worker.with_time_limit(limits.for_first_step(outcome.planned.work)).trial(
                    case, self._facts_by_device[case.device]
                )
            except WorkerError as cause:
                outcome.fail_case(f"its products could not be tried: {cause}", cause)
                self._worker.restart()
                continue
            if refusal_reason:
                outcome.refuse_case(refusal_reason)

    def measure_errors(
        self, outcomes: Sequence[CaseOutcome], known_errors: dict[str, tuple[Measurement, ...]] | None = None
    ) -> None:
        """Measures numerical errors. A case fails if its errors are not finite, or if measuring them raises an error.
        If the suite returns a reason in place of errors, only the reason is stored.

        A lack of memory does not fail a case, because the reference in fp64 may need more memory than the step.
        `known_errors` collects the errors of a run, so that cases with the same numbers are measured once.
        """
        for outcome in outcomes:
            # 1. Reuse the errors of a case with the same numbers.
            key = make_numbers_key(outcome.planned.case)
            if known_errors is not None and key in known_errors:
                outcome.add_measurements(known_errors[key])
                continue
            # 2. Measure the errors. If one is not finite, fail the case, but store all errors.
            with self._requesting_answer(outcome, "checking numbers", "numerical error", fails_case=True) as (
                bench,
                case,
                facts,
            ):
                errors = bench.error(case, facts)
                if isinstance(errors, str):
                    outcome.append_detail_text(f"no numerical error: {errors}")
                    continue
                not_finite_texts = [f"{name} is {value}" for name, value in errors.items() if not math.isfinite(value)]
                if not_finite_texts:
                    not_finite_fault = WorkerFault("its numbers are not finite", ", ".join(not_finite_texts))
                    outcome.fail_case(str(not_finite_fault), not_finite_fault)
                measurements = tuple(
                    Measurement(name, find_metric_spec(name).unit, (value,)) for name, value in errors.items()
                )
                outcome.add_measurements(measurements)
                # 3. Share only finite errors: a case that reuses errors is not failed by them.
                if known_errors is not None and not not_finite_texts:
                    known_errors[key] = measurements

    def measure_step_shares(self, outcomes: Sequence[CaseOutcome]) -> None:
        for outcome in outcomes:
            with self._requesting_answer(outcome, "timing its operators", "shares") as (bench, case, facts):
                shares = bench.shares(case, facts)
                if isinstance(shares, str):
                    outcome.append_detail_text(f"no shares: {shares}")
                else:
                    outcome.note(shares=shares)

    def measure_transfers(self, outcomes: Sequence[CaseOutcome]) -> None:
        """Measures the bytes that ranks send in a step, and how much of the transfer time is hidden by computing at
        the same time. Skips cases with one rank.
        """
        for outcome in (case_outcome for case_outcome in outcomes if case_outcome.planned.case.ranks > 1):
            time_limit = self._time_limits.for_untimed_pass(outcome.planned.work)
            with self._requesting_answer(outcome, "counting sent bytes", "bytes on the wire") as (_, case, facts):
                outcome.note(transfer=self._worker.ask(time_limit, "transfer", case, facts))
            # A separate request, so that the bytes remain if this one fails.
            with self._requesting_answer(outcome, "", "parts of a step") as (_, case, facts):
                if (parts := self._worker.ask(time_limit, "step_parts", case, facts)) is not None:
                    sent, overlap, scaling = parts
                    outcome.note(sent=sent, overlap=overlap, scaling=scaling)

    def count_allocations(self, outcomes: Sequence[CaseOutcome], unprobed: str) -> None:
        """Counts the memory allocations of steps. `unprobed` is the reason why the worker cannot observe allocations on
        the host, or ''.
        """
        for outcome in outcomes:
            with self._requesting_answer(outcome, "counting allocations", "counters") as (bench, case, facts):
                measurements, reasons = bench.counters(case, facts, unprobed)
                outcome.add_measurements(measurements)
                for reason in reasons:
                    outcome.append_detail_text(reason)
        self.release_gpu_memory(outcomes)

    def check_step_effects(self, outcomes: Sequence[CaseOutcome]) -> None:
        for outcome in outcomes:
            if outcome.draft.effect is None and outcome.planned.work.setup_seconds:
                outcome.note(effect=StepEffect(None, "another state would have to be compiled, which takes too long"))
        self.ask("effect", [case_outcome for case_outcome in outcomes if case_outcome.draft.effect is None])

    def measure_memory(
        self, outcomes: Sequence[CaseOutcome], meter: Meter | None = None, with_growth: bool = True
    ) -> None:
        """Measures the peak memory of a step. With `with_growth`, also measures how the memory grows from step to
        step.

        With a meter, adds the memory that the driver reports for the worker process.
        """
        device = None if meter is None or isinstance(meter.device, AbsentDevice) else meter.device
        for outcome in outcomes:
            with self._requesting_answer(outcome, "measuring memory", "peak memory") as (bench, case, facts):
                # With a key the state stays in memory, so that the driver's figure includes it.
                key = f"memory of {case.id}" if device is not None else ""
                # A duel compares source trees. `memory` of the older tree may not have the last parameter.
                memory_use = bench.memory(case, facts, key) if with_growth else bench.memory(case, facts, key, False)
                if device is not None:
                    memory_use = self._add_process_memory(memory_use, device)
                    self._worker.release(key)
                if isinstance(memory_use, str):
                    outcome.append_detail_text(f"no peak memory: {memory_use}")
                    continue
                outcome.note(memory=memory_use)
                outcome.add_measurements(_make_peak_memory_measurements(memory_use))
        # torch's profiler ran in this process, and may slow down its later steps.
        self.release_gpu_memory(
            [case_outcome for case_outcome in outcomes if case_outcome.draft.effect or case_outcome.draft.memory]
        )

    def record_step_traces(self, outcomes: Sequence[CaseOutcome], folder: TraceFolder) -> None:
        for outcome in outcomes:
            with self._requesting_answer(outcome, "recording a trace", "trace") as (bench, case, facts):
                if folder.marks_only:
                    bench.mark_slot(case, facts)
                    continue
                trace_file = folder.name_trace_file(case)
                bench.trace(case, facts, str(folder.path / trace_file))
                outcome.note(trace=trace_file)
        # A GPU profiler stays attached to its process and would slow later launches.
        self.release_gpu_memory(outcomes)

    def release_gpu_memory(self, outcomes: Sequence[CaseOutcome]) -> None:
        """Restarts the worker if a case was on a GPU, so that the worker holds no GPU memory while other cases are
        timed.
        """
        if not self._is_untimed and any(
            self._facts_by_device[outcome.planned.case.device].accelerated for outcome in outcomes
        ):
            self._worker.restart()

    def _add_process_memory(self, memory_use: MemoryUse | str, device: DeviceReader) -> MemoryUse | str:
        pid = self._worker.pid
        if isinstance(memory_use, str) or pid is None:
            return memory_use
        process_memory = device.process_memory(pid)
        if isinstance(process_memory, Reading):
            return replace(memory_use, process=int(process_memory.number))
        return replace(
            memory_use,
            why="; ".join(filter(None, (memory_use.why, f"no memory of the process: {process_memory.reason}"))),
        )

    @contextmanager
    def _requesting_answer(
        self, outcome: CaseOutcome, activity: str, missing_figure: str, fails_case: bool = False
    ) -> Iterator[tuple[RemoteBench, Case, DeviceFacts]]:
        """Yields the bench, the case and its device for one request. `activity` is the text that shows progress. If the
        request fails, the outcome gets the reason why `missing_figure` is missing.

        If `fails_case` is true, a failed request also fails the case, unless memory ran out.
        """
        case = outcome.planned.case
        if activity:
            self._observer.working(case, activity, 1.0)
        try:
            time_limit = self._time_limits.for_untimed_pass(outcome.planned.work)
            yield self._worker.with_time_limit(time_limit), case, self._facts_by_device[case.device]
        except WorkerError as cause:
            refusal_prefix = f"{CannotMark.__name__}: "
            reason = f"no {missing_figure}: {str(cause).removeprefix(refusal_prefix)}"
            # After a refusal or a lack of memory, the other states of the worker are intact, so it need not restart.
            if str(cause).startswith(refusal_prefix) or ran_out_of_memory(cause):
                outcome.append_detail_text(reason)
                return
            self._worker.restart()
            if fails_case:
                outcome.fail_case(reason, cause)
            else:
                outcome.append_detail_text(reason)
