"""One group from plan to records: what a fault costs, who sits with whom when memory is short, and who leads."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fp8bench.analysis.findings import find
from fp8bench.analysis.verdicts import is_case_decided
from fp8bench.errors import WorkerError, WorkerFault, WorkerHung, WorkerLost
from fp8bench.measure import group as group_module
from fp8bench.measure.arm import QuantiserCompilation
from fp8bench.measure.group import GroupMeasurement, MeasurementMethod
from fp8bench.measure.passes import TraceFolder
from fp8bench.model import (
    Case,
    DeviceFacts,
    Label,
    Level,
    Measurement,
    MemoryUse,
    PlannedCase,
    Products,
    Provenance,
    Record,
    Status,
    StepEffect,
    TensorStatistics,
    Verdict,
)
from fp8bench.model.stopping import StoppingRule
from fp8bench.protocols import SilentObserver
from tests.counts import for_each
from tests.fakes import (
    CPU,
    GPU,
    FakeWorker,
    Fault,
    Listener,
    Script,
    broken,
    by_mode,
    group,
    lasting,
    planned,
)

EMULATED = Level.EMULATED
TEN = StoppingRule(fixed=10)
TRACES = TraceFolder(Path("/traces"), 7)


def measure(
    scripts: Mapping[str, Script],
    *cases: PlannedCase,
    reference: int = 0,
    capacity: int = 1000,
    rule: StoppingRule = TEN,
    seed: int = 0,
    observer: SilentObserver | None = None,
    traces: TraceFolder | None = None,
    facts: DeviceFacts = CPU,
) -> tuple[dict[str, Record], FakeWorker]:
    """The records by mode, and the worker with its log."""
    worker = FakeWorker(scripts, capacity)
    method = MeasurementMethod(rule=rule, judge=is_case_decided, seed=seed, trace_folder=traces)
    grouped = group(*cases, reference=reference)
    records = GroupMeasurement(grouped, {"cpu": facts}, worker, observer or SilentObserver(), method).run()
    assert [record.case for record in records] == [planned.case for planned in cases]
    assert worker.held == [], "a state was not released"
    return by_mode(records), worker


class Beginning(FakeWorker):
    """Logs when it begins."""

    def begin(self) -> None:
        self.log.append(("begin",))


class Meeting(FakeWorker):
    """One of two workers whose requests for memory and products each wait until the other one has begun."""

    def __init__(self, scripts: Mapping[str, Script], barrier: threading.Barrier) -> None:
        super().__init__(scripts)
        self._barrier = barrier

    def _memory(self, *arguments: Any) -> MemoryUse | str:
        self._barrier.wait(10)
        return super()._memory(*arguments)

    def _products(self, *arguments: Any) -> Products:
        self._barrier.wait(10)
        return super()._products(*arguments)


def by_two(
    first: FakeWorker,
    second: FakeWorker | None,
    facts: DeviceFacts = CPU,
    listener: Listener | None = None,
    quantisers: QuantiserCompilation | None = None,
    least_memory: float = 0.0,
) -> dict[str, Record]:
    method = MeasurementMethod(rule=TEN, judge=is_case_decided, seed=0, quantisers=quantisers)
    cases = [replace(case, work=replace(case.work, least_memory=least_memory)) for case in native("fp32", "bf16")]
    measurement = GroupMeasurement(
        group(*cases), {"cpu": facts}, first, listener or Listener(), method, _second_worker=second
    )
    return by_mode(measurement.run())


def test_a_second_worker_measures_memory_while_the_first_does_other_passes() -> None:
    barrier, scripts = threading.Barrier(2), {"fp32": Script(peak=3), "bf16": Script(peak=2)}
    first, second = Meeting(scripts, barrier), Meeting(scripts, barrier)
    records = by_two(first, second)
    alone = by_two(FakeWorker(scripts), None)
    assert records == alone and records["fp32"].memory == MemoryUse(3)
    # Nothing else is asked of it, and it is not restarted for what a profiler leaves.
    assert {entry[0] for entry in second.log} == {"memory"} and not second.restarts
    assert "memory" not in {entry[0] for entry in first.log} and "products" in {entry[0] for entry in first.log}


ERRORS = [("error", "fp32"), ("error", "bf16")]


@for_each(
    ("least_memory", "is_ahead"),
    [(1e6, True), (0.0, False), (CPU.memory_bytes / 8, False)],
)
def test_the_second_worker_measures_errors_of_small_cases_while_the_first_prepares(
    least_memory: float, is_ahead: bool
) -> None:
    scripts = {"bf16": Script(errors={"loss_error": 0.25})}
    first, second = FakeWorker(scripts), FakeWorker(scripts)
    records = by_two(first, second, least_memory=least_memory)
    (measurement,) = records["bf16"].measurements
    assert (measurement.metric, measurement.samples) == ("loss_error", (0.25,))
    asked = [[entry for entry in worker.log if entry[0] == "error"] for worker in (first, second)]
    assert asked == ([[], ERRORS] if is_ahead else [ERRORS, []])


def test_the_second_worker_compiles_what_was_timed_compiled() -> None:
    """Uncompiled quantisers hold more memory for a while."""
    scripts = {"bf16": Script(quantisers=[2], peak=2)}
    first, second = FakeWorker(scripts), FakeWorker(scripts)
    by_two(first, second, quantisers=QuantiserCompilation())
    asked = [entry[:2] for entry in second.log]
    assert ("prepare", "fp32") not in asked and second.held == []
    assert asked.index(("compile", "bf16")) < asked.index(("memory", "bf16"))


def test_the_first_worker_measures_what_the_second_cannot_prepare() -> None:
    scripts = {"bf16": Script(quantisers=[2], peak=2)}
    failing = FakeWorker({"bf16": Script(quantisers=[2], faults=[Fault("prepare", WorkerLost("it crashed"))])})
    records = by_two(FakeWorker(scripts), failing, quantisers=QuantiserCompilation())
    assert records["bf16"].memory == MemoryUse(2) and not records["bf16"].detail


def test_a_machine_that_cannot_hold_two_workers_measures_memory_with_one() -> None:
    first, second = FakeWorker({"fp32": Script(peak=3)}), FakeWorker({})
    records = by_two(first, second, replace(CPU, memory_bytes=1 << 20))
    assert second.log == [] and records["fp32"].memory == MemoryUse(3)


def test_an_interrupt_ends_both_workers() -> None:
    """Other cases are not measured in the second one, which would start again for them."""

    class Interrupted(Listener):
        def working(self, case: Case, doing: str, share: float) -> None:
            if doing == "looking at products":
                barrier.wait(10)  # the second is in its first request
                raise KeyboardInterrupt

    class Slow(FakeWorker):
        def _memory(self, *arguments: Any) -> MemoryUse | str:
            barrier.wait(10)
            ended.wait(10)
            raise WorkerLost("it was ended")

        def restart(self) -> None:
            super().restart()
            ended.set()

    barrier, ended = threading.Barrier(2), threading.Event()
    second = Slow({})
    with pytest.raises(KeyboardInterrupt):
        by_two(FakeWorker({}), second, listener=Interrupted())
    assert second.restarts and [name for name, _ in second.limits].count("memory") == 1


def test_the_untimed_worker_starts_after_all_timing() -> None:
    worker, other = FakeWorker({}), Beginning({})
    other.log = worker.log
    method = MeasurementMethod(rule=TEN, judge=is_case_decided, seed=0)
    cases = group(*native("fp32", "bf16"))
    GroupMeasurement(cases, {"cpu": CPU}, worker, SilentObserver(), method, _untimed_worker=other).run()
    asked = [entry[0] for entry in worker.log]
    begun = asked.index("begin")
    assert "slot" in asked[:begun] and "slot" not in asked[begun:] and "memory" in asked[begun:]


def native(*names: str) -> list[PlannedCase]:
    return [planned(name) for name in names]


def statuses(records: Mapping[str, Record]) -> dict[str, str]:
    return {mode: record.status.value for mode, record in records.items()}


def prepared(worker: FakeWorker) -> list[str]:
    return [entry[1] for entry in worker.log if entry[0] == "prepare"]


def test_a_group_becomes_one_record_a_case() -> None:
    cases = [*native("fp32"), planned("bf16", flops=1e6), planned("fp8", EMULATED)]
    cases.append(planned("tf32", Level.REFUSED, skip="no TF32 here"))
    records, worker = measure({"bf16": lasting(5, memory=1)}, *cases)
    assert statuses(records) == {"fp32": "ok", "bf16": "ok", "fp8": "ok", "tf32": "skipped"}
    assert records["tf32"].reason == "no TF32 here" and records["tf32"].timing is None
    assert records["bf16"].support == cases[1].support and records["bf16"].work.flops == 1e6
    assert [mode for mode, record in records.items() if record.is_reference] == ["fp32"]
    assert [mode for mode, record in records.items() if record.control] == ["fp32"]
    rounds = {mode: records[mode].timing.num_rounds for mode in ("fp32", "bf16", "fp8")}  # type: ignore[union-attr]
    assert rounds == {"fp32": 10, "bf16": 10, "fp8": 4}
    assert all(record.paired and record.paired_with is None for record in records.values())
    assert {record.stopped for record in records.values()} == {"10 rounds, a fixed number", ""}
    assert prepared(worker) == ["fp32", "fp32'", "bf16", "fp8"]
    assert worker.restarts == 0
    orders = [measure({}, *native("fp32", "bf16"), seed=seed)[1].slots() for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]


def test_an_emulated_reference_has_no_control() -> None:
    records, worker = measure({}, planned("fp8", EMULATED), planned("mxfp8", EMULATED))
    assert records["fp8"].is_reference and records["fp8"].control is None
    assert prepared(worker) == ["fp8", "mxfp8"]
    cases = planned("fp32"), planned("mxfp8", EMULATED), planned("fp8", EMULATED)
    records, _ = measure({"fp32": broken("slot")}, *cases)
    assert records["fp8"].is_reference and records["fp8"].control is None


def test_numerical_errors_are_measured_after_all_rounds() -> None:
    scripts = {
        "fp8": Script(errors={"product_error": 0.03, "loss_error": 1e-4}),
        "bf16": Script(errors="they are constant"),
    }
    records, worker = measure(scripts, *native("fp32", "fp8", "bf16"), planned("tf32", skip="no"))
    assert [(figure.metric, figure.samples, figure.unit) for figure in records["fp8"].measurements] == [
        ("product_error", (0.03,), "ratio"),
        ("loss_error", (1e-4,), "ratio"),
    ]
    assert [entry[1] for entry in worker.log if entry[0] == "error"] == ["fp32", "fp8", "bf16"]
    assert [entry[0] for entry in worker.log].index("error") > max(
        at for at, entry in enumerate(worker.log) if entry[0] in ("slot", "release")
    )
    assert records["bf16"].status is Status.OK and records["bf16"].measurements == () and records["bf16"].timing
    assert records["bf16"].detail.startswith("no numerical error: they are constant")


@for_each(
    "error", [WorkerFault("ValueError", "bad", "the trace"), WorkerLost("it crashed"), WorkerHung("no answer in 60 s")]
)
def test_a_case_without_its_numbers_fails(error: Exception) -> None:
    records, worker = measure({"bf16": broken("error", error=error)}, *native("fp32", "bf16", "fp16"))
    assert statuses(records) == {"fp32": "ok", "bf16": "failed", "fp16": "ok"}
    assert records["bf16"].reason == f"no numerical error: {error}"
    assert records["bf16"].detail == ("the trace" if isinstance(error, WorkerFault) else "")
    assert records["bf16"].timing is None and records["bf16"].measurements == ()
    assert worker.restarts == 1


def test_memory_is_measured_in_the_last_pass() -> None:
    scripts = {
        "fp32": Script(peak=3 << 20, errors={"product_error": 0.1}),
        "bf16": Script(errors={"product_error": math.nan}),
        "fp16": broken("slot"),
    }
    records, worker = measure(scripts, *native("fp32", "bf16", "fp16", "fp8"), planned("tf32", skip="no"))
    assert [figure.metric for figure in records["fp32"].measurements] == ["product_error", "peak_memory"]
    peak = records["fp32"].measurement("peak_memory")
    assert (peak.unit, peak.samples, peak.phase) == ("B", (3.0 * (1 << 20),), None)
    assert peak.provenance is Provenance.MEASURED and "the state included" in peak.description
    assert [entry for entry in worker.log if entry[0] == "memory"] == [("memory", "fp32"), ("memory", "fp8")]
    assert worker.log[-2:] == [("memory", "fp32"), ("memory", "fp8")]
    assert records["fp8"].measurements == () and records["fp8"].memory is None
    assert records["fp8"].detail == "no peak memory: the script has none"


@for_each(
    ("error", "restarts"),
    [
        (WorkerFault("ValueError", "bad", "the trace"), 1),
        (WorkerFault("OutOfMemoryError", "no memory left", "the trace", out_of_memory=True), 0),
        (WorkerLost("it crashed"), 1),
        (WorkerHung("no answer in 60 s"), 1),
    ],
)
@for_each(
    ("name", "what"),
    [
        ("statistics", "statistics of the data"),
        ("effect", "check of what a step does"),
        ("memory", "peak memory"),
        ("trace", "trace"),
    ],
)
def test_a_missing_answer_of_a_pass_fails_no_case(name: str, what: str, error: Exception, restarts: int) -> None:
    said: dict[str, Any] = {
        "errors": {"product_error": 0.1},
        "statistics": (TensorStatistics("a", "input", 4, 1.0),),
        "peak": 1,
    }
    scripts = {"fp32": Script(**said, faults=[Fault(name, error)]), "bf16": Script(**said)}
    records, worker = measure(scripts, *native("fp32", "bf16"), traces=TRACES)
    assert statuses(records) == {"fp32": "ok", "bf16": "ok"} and worker.restarts == restarts
    assert records["fp32"].detail == f"no {what}: {error}" and not records["fp32"].reason
    assert not records["bf16"].detail and records["bf16"].memory and records["bf16"].trace
    for record in records.values():
        assert record.timing is not None and record.measurement("product_error") is not None
    found = {
        "statistics": bool(records["fp32"].statistics),
        "effect": records["fp32"].effect == StepEffect(True),
        "memory": records["fp32"].memory is not None,
        "trace": bool(records["fp32"].trace),
    }
    assert found == {one: one != name for one in found}
    assert (records["fp32"].measurement("peak_memory") is not None) == found["memory"]


def test_allocations_are_counted_by_a_worker_that_is_not_timed() -> None:
    class Counting(FakeWorker):
        why = "there is no probe"

        def _counters(self, case: Case, facts: DeviceFacts, unprobed: str) -> tuple[Any, Any]:
            return (Measurement("peak_memory", "B", (3.0,)),), (f"no bytes: {unprobed}", "no calls")

    method = MeasurementMethod(rule=TEN, judge=is_case_decided, seed=0, trace_folder=None)
    grouped = group(*native("fp32", "bf16"))
    for record in GroupMeasurement(
        grouped, {"cpu": CPU}, FakeWorker({}), SilentObserver(), method, _counting_worker=Counting({})
    ).run():
        assert record.measurements[-1].samples == (3.0,)
        assert record.detail.endswith("; no bytes: there is no probe; no calls")


def test_traces_are_recorded_last() -> None:
    scripts = {"fp32": Script(peak=1), "fp16": broken("slot")}
    records, worker = measure(scripts, *native("fp32", "bf16", "fp16"), planned("tf32", skip="no"), traces=TRACES)
    files = {mode: f"gemm-m=64,n=64,k=64-cpu-{mode}/fp8bench.7.pt.trace.json.gz" for mode in ("fp32", "bf16")}
    assert worker.log[-2:] == [("trace", mode, f"/traces/{file}") for mode, file in files.items()]
    assert {mode: record.trace for mode, record in records.items()} == {**files, "fp16": "", "tf32": ""}
    assert worker.restarts == 1
    # A process that has traced a GPU never times it again: its profiler stays and slows each launch.
    for traces, restarts in ((None, 1), (TRACES, 2)):  # step effects are also checked under the profiler
        _, worker = measure({}, *native("fp32", "bf16"), traces=traces, facts=GPU)
        assert worker.restarts == restarts
        assert len([entry for entry in worker.log if entry[0] == "trace"]) == (2 if traces else 0)


@for_each(("name", "at"), [("prepare", 1), ("slot", 1), ("slot", 2), ("slot", 7)])
def test_a_case_that_raises_fails_alone(name: str, at: int) -> None:
    records, worker = measure({"bf16": broken(name, at)}, *native("fp32", "bf16", "fp16"))
    assert statuses(records) == {"fp32": "ok", "bf16": "failed", "fp16": "ok"}
    failed = records["bf16"]
    assert (failed.reason, failed.detail, failed.timing) == ("ValueError: no such thing", "the trace", None)
    for mode in ("fp32", "fp16"):
        timing = records[mode].timing
        assert [slot.round for slot in timing.slots] == list(range(10))
    assert worker.restarts == 1  # after a GPU error nothing in that process works
    assert ("error", "bf16") not in worker.log


@for_each("error", [WorkerLost("the worker crashed during 'slot'"), WorkerHung("no answer in 60 s")])
@for_each(("name", "at"), [("prepare", 1), ("slot", 6)])
def test_a_lost_worker_fails_only_its_case(error: Exception, name: str, at: int) -> None:
    records, worker = measure({"bf16": broken(name, at, error)}, *native("fp32", "bf16", "fp16"))
    assert statuses(records) == {"fp32": "ok", "bf16": "failed", "fp16": "ok"}
    assert records["bf16"].reason == str(error)
    assert worker.restarts == 1
    assert prepared(worker)[-3:] == ["fp32", "fp32'", "fp16"]
    assert records["fp32"].timing.num_rounds == 10
    assert records["fp32"].control.num_rounds == 10


class LostAtRelease(FakeWorker):
    """A worker that is lost when its first state is freed."""

    def release(self, key: str) -> tuple[str, ...]:
        if not self.restarts:
            raise WorkerLost("it was ended by SIGSEGV")
        return super().release(key)


def test_a_worker_that_is_lost_when_it_frees_a_state_is_restarted() -> None:
    worker = LostAtRelease({})
    records = GroupMeasurement(
        group(*native("fp32", "bf16")),
        {"cpu": CPU},
        worker,
        SilentObserver(),
        MeasurementMethod(rule=TEN, judge=is_case_decided, seed=0),
    ).run()
    assert statuses(by_mode(records)) == {"fp32": "ok", "bf16": "ok"} and worker.restarts == 1


def of_gpu(worker: FakeWorker, method: MeasurementMethod, *modes: str) -> dict[str, Record]:
    return by_mode(GroupMeasurement(group(*native(*modes)), {"cpu": GPU}, worker, SilentObserver(), method).run())


@for_each(
    ("struck", "unanswered"),
    [
        # A failed assertion in a kernel breaks only the context of its process.
        (WorkerFault("AcceleratorError", "CUDA error: device-side assert triggered"), None),
        # Memory used by another process may be free for the next case.
        (WorkerLost("it was ended by SIGSEGV"), WorkerFault("AcceleratorError", "out of memory", out_of_memory=True)),
    ],
)
def test_a_gpu_that_may_answer_is_measured_on(struck: WorkerError, unanswered: WorkerError | None) -> None:
    worker, method = (
        FakeWorker({"bf16": broken("slot", 3, struck)}),
        MeasurementMethod(rule=TEN, judge=is_case_decided, seed=0),
    )
    worker.unanswered = unanswered
    records = of_gpu(worker, method, "fp32", "bf16", "fp16")
    assert statuses(records) == {"fp32": "ok", "bf16": "failed", "fp16": "ok"} and method.lost_devices == {}
    assert records["bf16"].reason == str(struck)
    assert [entry for entry in worker.log if entry[0] == "answers"] == [("answers", "cuda:0")]


def test_a_lost_gpu_is_not_used_again() -> None:
    worker = FakeWorker({"bf16": broken("slot", 3, WorkerFault("AcceleratorError", "CUDA error: unknown error"))})
    worker.unanswered = WorkerFault("AcceleratorError", "CUDA error: no CUDA-capable device is detected")
    method = MeasurementMethod(rule=TEN, judge=is_case_decided, seed=0)
    records = of_gpu(worker, method, "fp32", "bf16", "fp16")
    assert statuses(records) == {"fp32": "failed", "bf16": "failed", "fp16": "failed"}
    assert records["bf16"].reason == "AcceleratorError: CUDA error: unknown error"
    lost = f"cpu does not answer a fresh process either: {worker.unanswered}"
    assert records["fp32"].reason == records["fp16"].reason == lost
    asked = len(worker.log)
    later = of_gpu(worker, method, "fp32", "tf32")
    assert {record.reason for record in later.values()} == {lost} and len(worker.log) == asked


@for_each("script", [broken("slot", 3), broken("prepare", 1, WorkerLost("crashed"))])
def test_a_failing_reference_hands_over_to_the_highest_native_precision_left(script: Script) -> None:
    cases = [*native("fp32", "fp8", "bf16"), planned("tf32", EMULATED)]
    records, _ = measure({"fp32": script}, *cases)
    assert statuses(records) == {"fp32": "failed", "fp8": "ok", "bf16": "ok", "tf32": "ok"}
    assert [mode for mode, record in records.items() if record.is_reference] == ["bf16"]
    assert [mode for mode, record in records.items() if record.control] == ["bf16"]
    assert records["fp8"].paired and records["fp8"].paired_with is None


def test_cases_that_do_not_fit_together_are_measured_in_pairs() -> None:
    scripts = {"fp32": Script(memory=10), "bf16": lasting(5, memory=10), "fp16": lasting(8, memory=10)}
    records, worker = measure(scripts, *native("fp32", "bf16", "fp16"), capacity=30)
    assert statuses(records) == {"fp32": "ok", "bf16": "ok", "fp16": "ok"}
    assert prepared(worker) == ["fp32", "fp32'", "bf16", "fp16", "fp32", "fp32'", "bf16", "fp32", "fp32'", "fp16"]
    assert records["fp32"].control is not None
    assert records["bf16"].paired_with is None and records["bf16"].control is None
    assert records["fp16"].paired_with is not None and records["fp16"].control is not None
    assert all(record.paired for record in records.values())
    findings = {finding.case.mode: finding for finding in find(list(records.values()), {})}
    assert findings["bf16"].ratio.point == pytest.approx(0.5)
    assert findings["fp16"].ratio.point == pytest.approx(0.8)


def test_a_pair_that_does_not_fit_is_measured_without_the_control() -> None:
    """It is not compared with another session's control, whose rounds have equal numbers but different conditions."""
    scripts = {
        "fp32": Script(memory=10),
        "fp32'": lasting(20, memory=10),
        "bf16": lasting(12, memory=15),
        "fp16": Script(memory=5),
    }
    records, worker = measure(scripts, *native("fp32", "fp16", "bf16"), capacity=25)
    assert prepared(worker)[-2:] == ["fp32", "bf16"]
    assert all(record.paired for record in records.values()) and records["fp32"].control is not None
    assert records["bf16"].paired_with is not None and records["bf16"].control is None
    findings = {finding.case.mode: finding for finding in find(list(records.values()), {})}
    assert findings["bf16"].ratio.point == pytest.approx(1.2)
    assert (findings["bf16"].verdict, findings["bf16"].floor) == (Verdict.SLOWER, None)


def test_cases_too_large_for_a_pair_are_measured_alone() -> None:
    scripts = {"fp32": Script(memory=10), "bf16": Script(memory=20), "fp16": Script(memory=20)}
    records, worker = measure(scripts, *native("fp32", "bf16", "fp16"), capacity=25)
    assert prepared(worker) == [
        "fp32",
        "fp32'",
        "bf16",
        "fp32",
        "fp32'",
        "bf16",
        "fp32",
        "bf16",
        "fp32",
        "bf16",
        "fp32",
        "fp32'",
        "fp16",
        "fp32",
        "fp16",
        "fp16",
    ]
    assert [(record.paired, record.paired_with) for record in records.values()] == [
        (True, None),
        (False, None),
        (False, None),
    ]
    assert records["fp32"].control is None
    findings = {finding.case.mode: finding for finding in find(list(records.values()), {})}
    assert Label.UNPAIRED in findings["bf16"].labels and Label.UNPAIRED not in findings["fp32"].labels
    assert findings["bf16"].verdict is Verdict.UNSURE and "shares no rounds" in findings["bf16"].why


def test_a_case_that_does_not_fit_alone_fails() -> None:
    scripts = {"fp32": Script(memory=5), "bf16": Script(memory=5), "fp16": Script(memory=50)}
    records, worker = measure(scripts, *native("fp32", "bf16", "fp16"), capacity=25)
    assert statuses(records) == {"fp32": "ok", "bf16": "ok", "fp16": "failed"}
    assert (records["fp16"].reason, records["fp16"].detail) == ("out of memory, even alone", "the trace")
    assert prepared(worker)[-3:] == ["fp32", "fp32'", "bf16"] and worker.restarts == 0
    scripts = {"fp32": Script(memory=50), "bf16": Script(memory=10), "fp16": Script(memory=10)}
    records, _ = measure(scripts, *native("fp32", "bf16", "fp16"), capacity=30)
    assert statuses(records) == {"fp32": "failed", "bf16": "ok", "fp16": "ok"}
    assert records["fp32"].reason == "out of memory, even alone"
    assert records["fp16"].is_reference and records["bf16"].paired


def test_running_out_of_memory_in_a_round_splits_the_session() -> None:
    error = WorkerFault("OutOfMemoryError", "no memory left", out_of_memory=True)
    records, worker = measure({"bf16": broken("slot", 6, error)}, *native("fp32", "bf16", "fp16"))
    assert statuses(records) == {"fp32": "ok", "bf16": "ok", "fp16": "ok"}
    assert prepared(worker)[4:] == ["fp32", "fp32'", "bf16", "fp32", "fp32'", "fp16"]
    assert {records[mode].timing.num_rounds for mode in records} == {10}  # type: ignore[union-attr]


def test_a_restarted_group_forgets_which_cases_were_alone() -> None:
    crash = Fault("slot", WorkerLost("crashed"), at=3 * 2 + 2 + 10 + 2 + 1)
    scripts = {"fp32": Script(memory=10, faults=[crash]), "bf16": Script(memory=20)}
    records, worker = measure(scripts, *native("fp32", "bf16", "fp8"), capacity=25)
    assert prepared(worker)[:9] == ["fp32", "fp32'", "bf16", "fp32", "fp32'", "bf16", "fp32", "bf16", "fp32"]
    assert prepared(worker)[9:12] == ["bf16", "fp32", "fp32'"]
    assert statuses(records) == {"fp32": "failed", "bf16": "ok", "fp8": "ok"}
    assert records["bf16"].is_reference and records["bf16"].paired
    assert records["fp8"].paired and records["fp8"].paired_with is None


@for_each(("capacity", "together"), [(1000, True), (25, False)])
def test_a_reference_that_fails_by_its_numbers_leaves_no_false_pairs(capacity: int, together: bool) -> None:
    scripts = {
        "fp32": Script(memory=10, errors={"e": math.nan}),
        "bf16": Script(memory=5),
        "fp16": Script(memory=5),
    }
    records, _ = measure(scripts, *native("fp32", "bf16", "fp16"), capacity=capacity)
    assert statuses(records) == {"fp32": "failed", "bf16": "ok", "fp16": "ok"}
    after = next(record for record in records.values() if record.is_reference)
    (other,) = (record for record in records.values() if record.status is Status.OK and not record.is_reference)
    assert after.status is Status.OK and other.paired is together
    assert other.paired_with is None and other.control is None


def test_preparing_counts_against_a_whole_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = FakeWorker({"bf16": Script(preparing_ns=5 * 10**9)})

    class Clock:
        monotonic = staticmethod(worker.clock)

    monkeypatch.setattr(group_module, "time", Clock)
    rule = StoppingRule(budget=4.0, ceiling=4.0, whole=True)
    cases = group(*native("fp32", "bf16"))
    method = MeasurementMethod(rule=rule, judge=is_case_decided, seed=0)
    records = GroupMeasurement(cases, {"cpu": CPU}, worker, SilentObserver(), method).run()
    assert [record.stopped for record in records] == ["time was up after 1 round"] * 2


def test_the_observer_is_told_of_every_activity() -> None:
    listener = Listener()
    measure({}, *native("fp32", "bf16"), observer=listener)
    assert listener.told[:3] == [("fp32", "preparing", 0.0), ("fp32", "preparing", 0.0), ("bf16", "preparing", 0.0)]
    shares = [share for _, doing, share in listener.told if doing == "measuring"]
    assert shares == [round_ / 10 for round_ in range(10) for _ in range(3)]
    after = ("checking numbers", "looking at products", "checking what steps do", "measuring memory")
    assert listener.told[-8:] == [(mode, doing, 1.0) for doing in after for mode in ("fp32", "bf16")]


def test_a_wrong_native_product_is_refused() -> None:
    scripts = {"fp8": Script(wrong_product="fp8: its forward product is wrong")}
    records, worker = measure(scripts, planned("bf16"), planned("fp8"), planned("mxfp8", EMULATED))
    refused = records["fp8"]
    assert refused.status is Status.SKIPPED and refused.support.level is Level.REFUSED
    assert refused.reason == refused.support.reason == "fp8: its forward product is wrong"
    assert records["bf16"].status is records["mxfp8"].status is Status.OK
    assert [entry[1] for entry in worker.log if entry[0] == "trial"] == ["fp8"] and not worker.slots("fp8")
    scripts = {"fp8": broken("trial", error=WorkerLost("it crashed"))}
    records, worker = measure(scripts, planned("bf16"), planned("fp8"))
    assert statuses(records) == {"bf16": "ok", "fp8": "failed"} and worker.restarts
    assert "could not be tried: it crashed" in records["fp8"].reason
