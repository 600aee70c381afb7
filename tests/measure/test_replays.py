"""Replays on a virtual clock: who is captured, who takes turns, and what becomes of those who are not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fp8bench.analysis.verdicts import is_case_decided
from fp8bench.errors import WorkerFault, WorkerLost
from fp8bench.measure.arm import MeasuredArm
from fp8bench.measure.group import GroupMeasurement, MeasurementMethod
from fp8bench.measure.rounds import REPLAY_ROUNDS, StepReplayPass
from fp8bench.measure.slots import choose_slot_filling
from fp8bench.model import DeviceFacts, Level, Record, ReplayTimes, StaticScales
from fp8bench.model.raw import Filling, RawStep
from fp8bench.model.stopping import StoppingRule
from fp8bench.protocols import SilentObserver
from fp8bench.report.words.naming import describe_graph_replays
from tests.counts import for_each
from tests.fakes import (
    CAST,
    CPU,
    GEMM,
    GPU,
    MS,
    UNATTRIBUTED,
    FakeWorker,
    Fault,
    Script,
    arm,
    by_mode,
    group,
    lasting,
    planned,
    record,
)

STATIC = replace(planned("fp8").case, static=StaticScales(8, refresh=4))
ROTATING = planned("fp32", cache="rotating")
LOADING = replace(
    arm("fp32", facts=GPU), planned=replace(ROTATING, case=replace(ROTATING.case, workload="transformer"))
)
RENEWED = replace(arm("fp8", facts=GPU), planned=replace(planned("fp8"), case=STATIC))


def replayed(scripts: dict[str, Script], *arms: MeasuredArm) -> tuple[dict[str, ReplayTimes], FakeWorker]:
    """Replay results by mode for prepared arms, and the worker."""
    worker = FakeWorker(scripts)
    chosen = arms or tuple(arm(mode, facts=GPU) for mode in scripts)
    for one in chosen:
        one.prepare(worker)
    found = StepReplayPass(0, lambda arm, share: None).measure(chosen, worker)
    return {arm.planned.case.mode: found[arm.key] for arm in chosen}, worker


def measured(scripts: dict[str, Script], *modes: str, facts: DeviceFacts = GPU) -> tuple[dict[str, Record], FakeWorker]:
    worker = FakeWorker(scripts)
    cases = [planned(mode, Level.EMULATED if mode == "fp8" else Level.NATIVE) for mode in modes]
    method = MeasurementMethod(rule=StoppingRule(fixed=3, ceiling=1e9), judge=is_case_decided, seed=0)
    records = GroupMeasurement(group(*cases), {"cpu": facts}, worker, SilentObserver(), method).run()
    return by_mode(records), worker


def test_cases_take_turns_in_replays() -> None:
    found, worker = replayed({"fp32": lasting(2), "bf16": lasting(1)})
    for mode, milliseconds, calls in (("fp32", 2, 4), ("bf16", 1, 8)):
        timing = found[mode].timing
        assert found[mode].why == "" and timing.segments.phases == ("unattributed",)
        assert [slot.calls_ns for slot in timing.slots] == [((milliseconds * MS // 2,),) * calls] * REPLAY_ROUNDS
    asked = [entry[1] for entry in worker.log if entry[0] == "replay"]
    assert all(set(asked[at : at + 2]) == {"fp32", "bf16"} for at in range(0, 2 * REPLAY_ROUNDS, 2))
    assert worker.restarts == 0


def test_a_graph_with_marks_gives_the_phases_of_a_replay() -> None:
    marked = RawStep((UNATTRIBUTED, CAST, GEMM, CAST), (0, 300, 500, 200))
    found, _ = replayed({"fp8": lasting(1, replay_phases=marked), "bf16": lasting(1)})
    assert dict(found["fp8"].phases) == pytest.approx({"cast": 500e-9, "gemm": 500e-9}) and found["bf16"].phases == ()
    words = describe_graph_replays(replace(record("fp8"), replays=found["fp8"]))
    assert words == "phases of a replay: cast 50%, gemm 50%"
    for error in (WorkerFault("RuntimeError", "no"), WorkerLost("it crashed")):
        failing = lasting(1, replay_phases=marked, faults=[Fault("replay_phases", error)])
        found, worker = replayed({"fp8": failing, "bf16": lasting(1, replay_phases=marked)})
        assert found["fp8"].timing is not None and found["fp8"].phases == ()
        # Nobody knows what the failed capture left, so the other is not captured again, and the process is replaced.
        assert found["bf16"].timing is not None and found["bf16"].phases == () and worker.restarts == 1
    rotating = replace(arm("fp32", facts=GPU), planned=ROTATING)
    found, _ = replayed({"fp32": lasting(1, replay_phases=marked)}, rotating)
    assert found["fp32"].timing is not None and found["fp32"].phases == ()


def test_data_that_replays_do_not_load_is_named() -> None:
    loading = replace(planned("fp32").case, workload="transformer")
    one = replace(arm("bf16", facts=GPU), planned=replace(planned("bf16"), case=loading))
    fillings: dict[str, Filling | None] = {}
    for workload, chosen in (("transformer", one), ("gemm", arm("bf16", facts=GPU))):
        found, worker = replayed({chosen.planned.case.mode: lasting(1)}, chosen)
        (replays,) = found.values()
        assert replays.timing is not None and replays.loaded == ("its batches" if workload == "transformer" else "")
        (fillings[workload],) = {entry[4] for entry in worker.log if entry[0] == "replay"}
    assert fillings == {"transformer": choose_slot_filling(20e-6, 1), "gemm": choose_slot_filling(20e-6, 8)}


def test_steps_that_are_not_captured_have_a_reason() -> None:
    found, worker = replayed(
        {"fp32": lasting(1), "bf16": lasting(1, uncapturable="it waits for a value of the device")}
    )
    assert found["bf16"] == ReplayTimes(None, "it waits for a value of the device")
    assert found["fp32"].timing is not None and worker.restarts == 1
    for untried, why in (
        (
            LOADING,
            "its states rotate, and its batches would have to be loaded between the steps of a replay",
        ),
        (RENEWED, "its scales are renewed after a number of steps, which only the host counts"),
    ):
        found, worker = replayed({untried.planned.case.mode: lasting(1)}, untried)
        assert [*found.values()] == [ReplayTimes(None, why)]
        assert not [entry for entry in worker.log if entry[0] == "capture"]


@for_each("name", ["capture", "replay", "check"])
@for_each("error", [WorkerFault("RuntimeError", "an illegal access"), WorkerLost("it crashed")])
def test_a_fault_costs_replays_alone(name: str, error: Exception) -> None:
    script = lasting(1, faults=[Fault(name, error, at=2 if name == "check" else 1)])
    records, _ = measured({"fp32": script, "bf16": lasting(1)}, "fp32", "bf16")
    assert {record.status.value for record in records.values()} == {"ok"}
    assert all(record.timing is not None for record in records.values())
    kept = records["fp32"].replays
    assert kept.timing is None and str(error) in kept.why


def test_a_group_replays_what_is_native_on_a_device() -> None:
    records, worker = measured({}, "fp32", "bf16", "fp8")
    assert [records[mode].replays is not None for mode in ("fp32", "bf16", "fp8")] == [True, True, False]
    assert {entry[1] for entry in worker.log if entry[0] == "capture"} == {"fp32", "bf16"}
    last = max(at for at, entry in enumerate(worker.log) if entry[0] == "slot")
    assert min(at for at, entry in enumerate(worker.log) if entry[0] == "capture") > last
    records, worker = measured({}, "fp32", "bf16", facts=CPU)
    assert all(record.replays is None for record in records.values())
