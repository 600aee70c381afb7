"""Windows of energy, on a virtual clock that steps and samplers move: energies are known exactly."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest

from fp8bench.analysis.verdicts import is_case_decided
from fp8bench.errors import WorkerError, WorkerFault, WorkerLost
from fp8bench.measure.arm import MeasuredArm
from fp8bench.measure.group import GroupMeasurement, MeasurementMethod
from fp8bench.measure.sensors.meter import Meter
from fp8bench.measure.sensors.nvml import AbsentDevice
from fp8bench.measure.windows import WindowPass, WindowRule
from fp8bench.model import DeviceFacts, EnergyUse, Level, PhaseEnergy, PlannedCase, Record
from fp8bench.model.readings import Reading, Readings
from fp8bench.model.stopping import StoppingRule
from fp8bench.protocols import SilentObserver
from tests.counts import for_each
from tests.fakes import (
    CAST,
    CPU,
    GEMM,
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
)
from tests.measure.powered import IDLE, PHASE_WATTS, WATTS, Power, Runner

THREE = WindowRule()
TURNS = WindowRule(4, 1.5, 2.0)


def measured(
    scripts: Mapping[str, Script], rule: WindowRule = THREE, *arms: MeasuredArm, power: Power | None = None
) -> tuple[dict[str, EnergyUse], Runner]:
    """Energies by mode of prepared arms, and the worker that ran them."""
    power = power or Power()
    worker = Runner(power, scripts)
    chosen = arms or tuple(arm(mode) for mode in scripts)
    for one in chosen:
        one.prepare(worker)
    energy = WindowPass(power.meter(), rule, 0, lambda arm, share: None)
    found = energy.measure(chosen, worker)
    return {arm.planned.case.mode: found[arm.key].energy_use for arm in chosen}, worker


def test_each_case_gets_the_energy_of_its_own_power() -> None:
    found, worker = measured({"fp32": lasting(10), "bf16": lasting(20)})
    for mode, use in found.items():
        assert use.source == "counter" and len(use.windows) == 3 and use.why == ""
        assert use.idle_before == pytest.approx(IDLE, rel=0.01) and use.idle_after == pytest.approx(IDLE, rel=0.01)
        for window in use.windows:
            assert window.joules / window.seconds == pytest.approx(WATTS[mode], rel=0.01)
            assert window.intervals >= 10 and window.uncertainty is not None and window.uncertainty < 0.01
        ran = [entry[2] for entry in worker.log if entry[:2] == ("loop", mode)]
        warm = max(1, round(0.3 / {"fp32": 0.01, "bf16": 0.02}[mode]))
        assert sum(window.steps for window in use.windows) == sum(ran) - 3 * warm


def test_cases_take_turns_in_random_order() -> None:
    _, worker = measured({"fp32": lasting(10), "bf16": lasting(10), "fp8": lasting(10)}, WindowRule(6, 1.5))
    order = [entry[1] for entry in worker.log if entry[0] == "loop"]
    turns = [key for place, key in enumerate(order) if place == 0 or order[place - 1] != key]
    assert len(turns) >= 6 * 3 - 5 and len(set(zip(turns[::3], turns[1::3], strict=False))) > 1


def test_an_emulated_case_has_one_window_and_a_long_step_runs_once_at_a_time() -> None:
    scripts = {"fp32": lasting(4_000), "fp8": lasting(10)}
    found, worker = measured(scripts, WindowRule(), arm("fp32"), arm("fp8", Level.EMULATED))
    assert [len(found[mode].windows) for mode in ("fp32", "fp8")] == [3, 1]
    assert {entry[2] for entry in worker.log if entry[:2] == ("loop", "fp32")} == {1}
    for window in found["fp32"].windows:
        assert window.joules / window.seconds == pytest.approx(400.0, rel=0.01) and window.seconds >= 4


@for_each("error", [WorkerFault("ValueError", "boom", "trace"), WorkerLost("the worker crashed"), WorkerLost("killed")])
def test_a_fault_in_a_window_costs_only_energies(error: WorkerError) -> None:
    faulty = lasting(10, faults=[Fault("loop", error, at=1)])
    found, worker = measured({"fp32": lasting(10), "bf16": faulty}, WindowRule(2, 1.5))
    assert not found["bf16"].windows and f"bf16 ended the windows: {error}" in found["bf16"].why
    assert len(found["fp32"].windows) < 2 and "bf16 ended the windows" in found["fp32"].why
    assert not worker.held
    # Diverging values change the power, so such a window does not count.
    found, _ = measured({"fp32": lasting(10, wrong="the loss is NaN")}, WindowRule(1, 1.5))
    assert not found["fp32"].windows and found["fp32"].why.endswith("more steps: the loss is NaN")


def test_a_source_that_fails_in_the_middle_gives_a_reason() -> None:
    power, reference = Power(), arm("fp32")
    worker = Runner(power, {"fp32": lasting(10)})
    reference.prepare(worker)
    told: list[float] = []

    def tell(arm: MeasuredArm, share: float) -> None:
        told.append(share)
        power.broken = "the GPU is lost" if len(told) == 2 else ""

    use = WindowPass(power.meter(), WindowRule(2, 1.5), 0, tell).measure([reference], worker)[reference.key].energy_use
    assert len(use.windows) == 1 and use.windows[0].joules > 0
    assert use.why == "the GPU is lost; idle power: the GPU is lost" and use.idle_after is None


@for_each(("rule", "turns"), [(THREE, 0), (TURNS, 4)])
def test_without_a_source_only_turns_run_and_the_reason_is_kept(rule: WindowRule, turns: int) -> None:
    worker, reference = FakeWorker({"fp32": lasting(10)}), arm("fp32")
    reference.prepare(worker)
    meter = Meter((), AbsentDevice("no"), "this is a virtual machine")
    found = WindowPass(meter, rule, 0, lambda arm, share: None, worker.clock).measure([reference], worker)
    assert [round(sum(turn.seconds), 6) for turn in found[reference.key].turns] == [2.0] * turns
    assert found[reference.key].energy_use == EnergyUse("none", why="this is a virtual machine")
    assert bool([entry for entry in worker.log if entry[0] == "loop"]) is bool(turns)


def grouped(
    scripts: Mapping[str, Script],
    *cases: PlannedCase,
    capacity: int = 1000,
    energy: WindowRule | None = THREE,
    facts: DeviceFacts = CPU,
) -> tuple[dict[str, Record], Runner]:
    """The records by mode of a whole group, and the worker that ran it."""
    power = Power()
    worker = Runner(power, scripts, capacity)
    method = MeasurementMethod(rule=StoppingRule(fixed=10), judge=is_case_decided, seed=0, windows=energy)
    measured = GroupMeasurement(group(*cases), {"cpu": facts}, worker, SilentObserver(), method, power.meter())
    records = by_mode(measured.run())
    assert not worker.held
    return records, worker


def test_a_group_is_timed_first_and_no_sampler_is_alive_meanwhile() -> None:
    scripts = {"fp32": lasting(10), "bf16": lasting(20)}
    records, worker = grouped(scripts, planned("fp32"), planned("bf16"), planned("fp8", Level.REFUSED, skip="no"))
    assert [len(use.windows) for mode in scripts if (use := records[mode].energy)] == [3, 3]
    assert records["fp8"].energy is None
    names = [entry[0] for entry in worker.log]
    last_slot = max(place for place, name in enumerate(names) if name == "slot")
    first_loop, first_release = names.index("loop"), names.index("release")
    assert last_slot < first_loop < max(p for p, n in enumerate(names) if n == "loop") < first_release
    assert names.count("prepare") == 3 and {entry[1] for entry in worker.log if entry[0] == "loop"} == set(scripts)
    assert worker.sampled == 0 and worker.slots()


def test_cases_that_do_not_fit_together_have_windows_where_they_sat() -> None:
    scripts = {"fp32": lasting(10, memory=400), "bf16": lasting(10, memory=500), "fp8": lasting(10, memory=500)}
    records, worker = grouped(scripts, planned("fp32"), planned("bf16"), planned("fp8"))
    for mode in scripts:
        use = records[mode].energy
        assert len(use.windows) == 3
        assert use.windows[0].joules / use.windows[0].seconds == pytest.approx(WATTS[mode], rel=0.01)
    loops = [entry[1] for entry in worker.log if entry[0] == "loop"]
    turns = [key for place, key in enumerate(loops) if place == 0 or loops[place - 1] != key]
    assert 1 <= turns.count("fp32") <= 3


def test_a_worker_lost_in_a_window_keeps_the_timing() -> None:
    faulty = lasting(10, faults=[Fault("loop", WorkerLost("it crashed"))])
    records, worker = grouped({"fp32": faulty, "bf16": lasting(10)}, planned("fp32"), planned("bf16"))
    assert {record.status.value for record in records.values()} == {"ok"} and worker.restarts == 1
    assert all(record.timing is not None and record.timing.num_rounds == 10 for record in records.values())
    use = records["fp32"].energy
    assert use.windows == () and "fp32 ended the windows: it crashed" in use.why
    assert worker.log[-1][0] == "memory"


def test_a_turn_lasts_as_long_as_was_asked_and_its_chunks_are_timed() -> None:
    power = Power()
    worker = Runner(power, {"fp32": lasting(10), "bf16": lasting(20), "fp8": lasting(10)})
    arms = [arm("fp32"), arm("bf16"), arm("fp8", Level.EMULATED)]
    for entry in arms:
        entry.prepare(worker)
    found = WindowPass(power.meter(), TURNS, 0, lambda arm, share: None, power.clock.now).measure(arms, worker)
    for entry, milliseconds in zip(arms[:2], (10, 20), strict=True):
        own, mode = found[entry.key], entry.planned.case.mode
        assert len(own.turns) == len(own.windows) == 4
        for turn, window in zip(own.turns, own.windows, strict=True):
            assert 2.0 <= sum(turn.seconds) < 2.5 and turn.steps * len(turn.seconds) == window.steps
            assert sum(turn.seconds) / window.steps == pytest.approx(milliseconds / 1e3)
            assert turn.watts == pytest.approx(WATTS[mode], rel=0.01)
            assert turn.settling is None and turn.clock is None  # this device cannot report its clock
    emulated = found[arms[2].key]
    assert emulated.turns == [] and len(emulated.windows) == 1
    assert ("loop", "fp32", 100) in worker.log, "half a turn ahead, blindly"
    rule = WindowRule(3, 1.5, 1.0, energy=False)
    records, _ = grouped({"fp32": lasting(10), "bf16": lasting(20)}, planned("fp32"), planned("bf16"), energy=rule)
    assert all(len(record.sustained) == 3 and record.energy is None for record in records.values())


class Heating(AbsentDevice):
    """A device that reaches a different temperature for each case within seconds."""

    def __init__(self, worker: FakeWorker) -> None:
        super().__init__("nothing to say")
        self.worker, self.heat, self.last = worker, 40.0, 0.0

    def read_changing_state(self) -> Readings:
        loops = [entry[1] for entry in self.worker.log if entry[0] == "loop"]
        goal = {"fp32": 80.0, "bf16": 60.0}[loops[-1]] if loops else 40.0
        now = self.worker.clock()
        self.heat += (goal - self.heat) * (1 - math.exp(-(now - self.last) / 2))
        self.last = now
        return {
            "temperature": Reading(self.heat, "degC", "test"),
            "sm_clock": Reading(2e9 - 5e6 * self.heat, "Hz", "test"),
        }


def test_a_turn_begins_when_the_device_has_settled_for_its_case() -> None:
    worker = FakeWorker({"fp32": lasting(10), "bf16": lasting(20)})
    arms = [arm("fp32"), arm("bf16")]
    for one in arms:
        one.prepare(worker)
    meter = Meter((), Heating(worker), "no energy")
    found = WindowPass(meter, WindowRule(4, 1.5, 6.0), 0, lambda arm, share: None, worker.clock).measure(arms, worker)
    for one, heat in zip(arms, (80.0, 60.0), strict=True):
        turns = found[one.key].turns
        assert len(turns) == 4
        for turn in turns:
            assert turn.settling.settled and turn.settling.limit == 12.0
            assert turn.settling.looks[-1].temperature == pytest.approx(heat, abs=1.5)
            assert turn.clock == pytest.approx(2e9 - 5e6 * heat, rel=0.004)


def test_a_cold_cache_has_no_energy() -> None:
    """Windows hold only steps, which would run with a hot cache; for rotating states they are valid."""
    arms = [arm("fp32", cache="cold"), arm("bf16", cache="rotating")]
    found, worker = measured({"fp32": lasting(10), "bf16": lasting(10)}, WindowRule(1, 1.5), *arms)
    assert found["fp32"].windows == () and "cold cache" in found["fp32"].why
    assert len(found["bf16"].windows) == 1 and {entry[1] for entry in worker.log if entry[0] == "loop"} == {"bf16"}
    cold, worker = measured({"fp32": lasting(10)}, WindowRule(1, 1.5), arms[0])
    assert cold["fp32"].source == "counter" and not [entry for entry in worker.log if entry[0] == "loop"]


# A step with a cast of 0.2 ms, a product of 19 ms and a remainder.
PARTS = Script(lambda call: ((UNATTRIBUTED, CAST, GEMM), (MS // 10, MS // 5, 19 * MS)))
NOBODY = "nobody does unattributed by itself"


def phases_measured(
    windows: int = 2, levels: dict[str, Level] | None = None, spoilt: str = "", **scripts: Script
) -> tuple[dict[str, dict[str, PhaseEnergy]], Runner]:
    """Energies by mode and phase, and the worker."""
    power = Power()
    worker = Runner(power, scripts)
    worker.spoilt = spoilt
    arms = [arm(mode, (levels or {}).get(mode, Level.NATIVE)) for mode in scripts]
    for one in arms:
        one.prepare(worker)
    found = WindowPass(power.meter(), WindowRule(windows), 0, lambda arm, share: None).measure_phases(arms, worker)
    by_mode = {}
    for measured_arm in arms:
        by_mode[measured_arm.planned.case.mode] = {part.phase: part for part in found[measured_arm.key]}
    return by_mode, worker


def test_each_phase_gets_the_energy_of_its_own_power() -> None:
    found, worker = phases_measured(fp32=PARTS, bf16=PARTS)
    for phases in found.values():
        assert list(phases) == ["unattributed", "cast", "gemm"]
        assert phases["unattributed"] == PhaseEnergy("unattributed", (), NOBODY)
        for phase in ("cast", "gemm"):
            assert len(phases[phase].windows) == 2 and phases[phase].why == ""
            for window in phases[phase].windows:
                assert window.joules / window.seconds == pytest.approx(PHASE_WATTS[phase], rel=0.01)
                assert window.intervals >= 10
    held = [entry[1:] for entry in worker.log if entry[0] == "hold" and entry[2] != "unattributed"]
    assert sorted(held[:4]) == sorted(held[4:]) and len({mode for mode, _ in held[:3]}) == 2


def test_a_phase_that_spoils_its_numbers_has_no_window_and_is_tried_once() -> None:
    found, worker = phases_measured(
        3, {"fp8": Level.EMULATED}, spoilt="what it writes is no longer finite", fp32=PARTS, fp8=PARTS
    )
    assert found["fp32"]["cast"] == PhaseEnergy("cast", (), "what it writes is no longer finite")
    assert [len(found[mode]["gemm"].windows) for mode in ("fp32", "fp8")] == [3, 1], "an emulated case has one"
    assert [entry[1:] for entry in worker.log if entry[0] == "hold"].count(("fp32", "cast")) == 1


def test_a_source_that_fails_in_a_phase_gives_its_reason() -> None:
    power, reference = Power(), arm("fp32")
    worker = Runner(power, {"fp32": PARTS})
    reference.prepare(worker)
    meter = power.meter()
    power.broken = "the GPU is lost"
    phases = WindowPass(meter, WindowRule(1), 0, lambda arm, share: None).measure_phases([reference], worker)
    assert {part.why for part in phases[reference.key]} == {NOBODY, "the GPU is lost"}
