"""Windows of energy, on a virtual clock that steps and samplers move: energies are known exactly."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import pytest

from fp8bench.errors import WorkerError, WorkerFault, WorkerLost
from fp8bench.measure.energy import EnergyPass, EnergyRule, energy_rule_for
from fp8bench.measure.rounds import Arm
from fp8bench.model import EnergyUse, Level
from fp8bench.samplers.absent import AbsentDevice
from fp8bench.samplers.meter import Meter
from fp8bench.samplers.readings import NoReading
from fp8bench.samplers.sampling import NAME
from fp8bench.samplers.sources import Source, SourceKind
from tests.fakes import MS, FakeWorker, Fault, Script, arm, gemm_steps
from tests.samplers.nvml.library import State
from tests.samplers.virtual import VirtualClock

IDLE = 80.0
WATTS = {"fp32": 400.0, "bf16": 200.0, "fp8": 300.0}
TICK = 0.1
THREE = EnergyRule()


class Power:
    """A device that takes `watts`, which whoever runs on it sets; its counter changes every tick."""

    def __init__(self) -> None:
        self.state = State()
        self.clock = VirtualClock(self.state)
        self.watts = IDLE
        self.broken = ""
        self._joules = self._shown = self._since = 0.0
        self._next = TICK

    def set(self, watts: float) -> None:
        self._pass()
        self.watts = watts

    def read(self) -> float:
        if self.broken:
            raise NoReading(self.broken)
        self._pass()
        return self._shown

    def _pass(self) -> None:
        now = self.clock.now()
        while self._next <= now:
            self._shown = self._joules + self.watts * (self._next - self._since)
            self._next += TICK
        self._joules += self.watts * (now - self._since)
        self._since = now

    def meter(self) -> Meter:
        return Meter((Source(SourceKind.COUNTER, self.read),), AbsentDevice("nothing to say"), "", self.clock)


class Runner(FakeWorker):
    """Its steps take virtual time and their mode's power."""

    def __init__(self, power: Power, scripts: Mapping[str, Script]) -> None:
        super().__init__(scripts)
        self.power = power

    def _loop(self, key: str, steps: int) -> None:
        label = self._labels[key]
        self.log.append(("loop", label, steps))
        self._strike("loop", label)
        end = self.power.clock.now() + steps * sum(self._script(label).step(0)[1]) / 1e9
        self.power.set(WATTS[label])
        if any(thread.name == NAME for thread in threading.enumerate()):
            self.power.clock.wait(lambda: self.power.clock.now() >= end)
        else:  # without a sampler nobody else moves the clock
            self.power.state.now_ns = round(end * 1e9)
        self.power.set(IDLE)


def measured(
    scripts: Mapping[str, Script], rule: EnergyRule = THREE, *arms: Arm, power: Power | None = None
) -> tuple[dict[str, EnergyUse], Runner]:
    """The energies by mode of prepared arms, and the worker that ran them."""
    power = power or Power()
    worker = Runner(power, scripts)
    chosen = arms or tuple(arm(mode) for mode in scripts)
    for one in chosen:
        one.prepare(worker)
    energy = EnergyPass(power.meter(), rule, 0, lambda arm, share: None)
    found = energy.measure(chosen, worker)
    return {one.planned.case.mode: found[one.key] for one in chosen}, worker


def steps(milliseconds: int) -> Script:
    return Script(gemm_steps(milliseconds * MS))


def test_each_case_gets_the_energy_of_its_own_power() -> None:
    """Its joules are its own watts for as long as its steps took, whoever ran before and after it."""
    found, worker = measured({"fp32": steps(10), "bf16": steps(20)})
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
    """Every round of windows has every case once, and its rounds differ."""
    _, worker = measured({"fp32": steps(10), "bf16": steps(10), "fp8": steps(10)}, EnergyRule(6, 1.5))
    order = [entry[1] for entry in worker.log if entry[0] == "loop"]
    turns = [one for place, one in enumerate(order) if place == 0 or order[place - 1] != one]
    assert len(turns) >= 6 * 3 - 5 and len(set(zip(turns[::3], turns[1::3], strict=False))) > 1


def test_an_emulated_case_has_one_window() -> None:
    """Its energy is the cost of emulation."""
    scripts = {"fp32": steps(10), "fp8": steps(10)}
    found, _ = measured(scripts, EnergyRule(), arm("fp32"), arm("fp8", Level.EMULATED))
    assert [len(found[mode].windows) for mode in ("fp32", "fp8")] == [3, 1]


def test_a_long_step_runs_once_at_a_time() -> None:
    """A window that is longer than it need be is no worse."""
    found, worker = measured({"fp32": steps(4_000)}, EnergyRule(1, 1.5))
    assert {entry[2] for entry in worker.log if entry[0] == "loop"} == {1}
    (window,) = found["fp32"].windows
    assert window.joules / window.seconds == pytest.approx(400.0, rel=0.01) and window.seconds >= 4


def test_without_a_source_nothing_runs_and_the_reason_is_kept() -> None:
    """Nobody waits for a device that says nothing."""
    worker = FakeWorker({"fp32": steps(10)})
    one = arm("fp32")
    meter = Meter((), AbsentDevice("no"), "this is a virtual machine")
    found = EnergyPass(meter, EnergyRule(), 0, lambda arm, share: None).measure([one], worker)
    assert found == {one.key: EnergyUse("none", why="this is a virtual machine")} and not worker.log


@pytest.mark.parametrize(
    "error", [WorkerFault("ValueError", "boom", "trace"), WorkerLost("the worker crashed"), WorkerLost("killed")]
)
def test_a_case_that_fails_here_costs_energies_and_nothing_else(error: WorkerError) -> None:
    """What was measured before it stays; what comes after says who ended it; the worker is fresh again."""
    faulty = Script(gemm_steps(10 * MS), faults=[Fault("loop", error, at=1)])
    found, worker = measured({"fp32": steps(10), "bf16": faulty}, EnergyRule(2, 1.5))
    assert not found["bf16"].windows and f"bf16 ended the windows: {error}" in found["bf16"].why
    assert len(found["fp32"].windows) < 2 and "bf16 ended the windows" in found["fp32"].why
    assert not worker.held


def test_numbers_that_have_blown_up_take_another_power() -> None:
    """So that window does not count."""
    found, _ = measured({"fp32": Script(gemm_steps(10 * MS), wrong="the loss is NaN")}, EnergyRule(1, 1.5))
    assert not found["fp32"].windows and found["fp32"].why.endswith("more steps: the loss is NaN")


def test_a_source_that_fails_in_the_middle_is_a_reason_and_no_zero() -> None:
    """The windows before it stay."""
    power = Power()
    worker = Runner(power, {"fp32": steps(10)})
    one = arm("fp32")
    one.prepare(worker)
    meter = power.meter()
    told: list[float] = []

    def tell(arm: Arm, share: float) -> None:
        told.append(share)
        power.broken = "the GPU is lost" if len(told) == 2 else ""

    use = EnergyPass(meter, EnergyRule(2, 1.5), 0, tell).measure([one], worker)[one.key]
    assert len(use.windows) == 1 and use.windows[0].joules > 0
    assert use.why == "the GPU is lost; idle power: the GPU is lost" and use.idle_after is None


@pytest.mark.parametrize(
    ("quick", "budget", "windows"), [(False, None, 3), (True, None, 1), (False, 5.0, 1), (True, 5.0, 1)]
)
def test_who_is_in_a_hurry_gets_one_window(quick: bool, budget: float | None, windows: int) -> None:
    """Each takes ten changes of the counter at least, whatever is asked."""
    assert energy_rule_for(quick, budget).windows == windows
