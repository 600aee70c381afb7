"""Brisk groups: omitted and remaining measurements, and their seconds by part compared with a normal group.

Seconds are modelled: steps, ticks and windows on a virtual clock, clocks recorded on a warming H200, and rounded costs
of worker starts and passes there.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from fp8bench.analysis.verdicts import is_case_decided
from fp8bench.errors import WorkerLost
from fp8bench.measure import group as group_module
from fp8bench.measure.device_watch import SessionWatch, Settler
from fp8bench.measure.group import GroupMeasurement, MeasurementMethod
from fp8bench.measure.passes import make_numbers_key
from fp8bench.measure.sensors.energy import TICK_PAUSE_SECONDS, Energy, SamplerPolling, Source, SourceKind
from fp8bench.measure.sensors.mean_power import CounterRhythm, CounterTick
from fp8bench.measure.sensors.meter import Meter
from fp8bench.measure.sensors.nvml import AbsentDevice
from fp8bench.measure.windows import WindowPass, WindowResults, WindowRule, make_window_rule
from fp8bench.model import Case, PlannedCase, Record, Request, StepEffect
from fp8bench.model.readings import Reading, Readings, UnavailableReading
from fp8bench.model.stopping import ClockSample, StoppingRule, is_clock_flat, is_run_brisk, make_stopping_rule
from tests.counts import for_each
from tests.fakes import GPU, Fault, Listener, Script, arm, group, lasting, planned
from tests.measure.powered import WATTS, Power, Runner, sampling
from tests.measure.sensors.virtual import VirtualClock

BRISK = WindowRule(2, 1.5, brisk=True)
# Megahertz of an H200 at its power cap every 0.175 s from the first product on (reports/gpu_h200_202611).
H200_CLOCKS = (1980, 1515, 1545, 1530, 1530, 1485, 1470, 1515, 1515, 1515, 1515, 1500, 1515, 1500, 1515, 1485)
# Rounded: a process with a CUDA context, and the passes after timing.
SECONDS = {"error": 0.8, "memory": 0.5, "effect": 0.5, "products": 0.2, "statistics": 0.2, "trial": 0.1}
START_SECONDS = 7.0
READ_SECONDS = 3e-3


class FineClock(VirtualClock):
    """Moves by a millisecond at a time, so that steps end when they end and not when the sampler wakes up."""

    def sleep(self, seconds: float, stop: threading.Event) -> bool:
        for _ in range(round(seconds / 1e-3)):
            if super().sleep(1e-3, stop):
                return True
        return stop.is_set()


class SlowCounter(Power):
    """A read takes as long as an H200's driver took for it, 3.2 ms."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = FineClock(self.state)

    def read(self) -> float:
        self.state.now_ns += round(READ_SECONDS * 1e9)
        return super().read()


class Gpu(AbsentDevice):
    """Tells the clocks and the temperature of a device that works since `busy_since`."""

    def __init__(self, power: Power) -> None:
        super().__init__("nothing else to say")
        self.power = power
        self.busy_since = power.clock.now()
        self.processes = 0

    def read_changing_state(self) -> Readings:
        seconds = self.power.clock.now() - self.busy_since
        look = min(len(H200_CLOCKS) - 1, int(seconds / 0.175))
        heat = 39 + 22 * min(1.0, seconds / 5)
        read = {
            "sm_clock": Reading(1e6 * H200_CLOCKS[look], "Hz", "test"),
            "temperature": Reading(heat, "degC", "test"),
        }
        return {**read, "throttle": Reading(4, "mask", "test")}

    def read_in_this_thread(self) -> Readings:
        return self.read_changing_state()

    def count_other_processes(self, pid: int) -> Reading:
        return Reading(self.processes, "", "test")


class Stopwatch(Runner):
    """Takes the model's seconds for each request, and starts again where a process would."""

    pid: int | None = None

    def ask(self, limit: float, name: str, *arguments: Any) -> Any:
        started = self.alive
        before = self.now_ns
        answer = super().ask(limit, name, *arguments)
        self.pid = 1
        seconds = SECONDS.get(name, 0.0) + (0.0 if started else START_SECONDS)
        if not sampling():
            self.power.state.now_ns += round(seconds * 1e9) + self.now_ns - before
        return answer

    def close(self) -> None:
        super().close()
        self.pid = None

    def clock(self) -> float:
        return self.power.clock.now()


class Parts(Listener):
    """Adds up seconds by what was being done."""

    def __init__(self, power: Power) -> None:
        super().__init__()
        self.power, self.last, self.doing = power, power.clock.now(), ""
        self.seconds: dict[str, float] = {}

    def working(self, case: Case, doing: str, share: float) -> None:
        now = self.power.clock.now()
        self.seconds[self.doing] = self.seconds.get(self.doing, 0.0) + now - self.last
        self.last, self.doing = now, doing


def with_operands(planned_case: PlannedCase, operands: str) -> PlannedCase:
    case = planned_case.case
    return replace(planned_case, case=replace(case, params=(*case.params, ("operands", operands))))


def measured_groups(
    monkeypatch: pytest.MonkeyPatch, brisk: bool
) -> tuple[list[tuple[Record, ...]], list[dict[str, float]], Stopwatch, Stopwatch]:
    """Measures two groups of three cases in turns; returns their records, seconds by part, and both workers."""
    power = SlowCounter()
    device = Gpu(power)
    meter = Meter((Source(SourceKind.COUNTER, power.read),), device, "", power.clock)
    scripts: Mapping[str, Script] = {mode: lasting(step, errors={"product_error": 0.1}) for mode, step in STEPS.items()}
    timing, untimed = Stopwatch(power, scripts), Stopwatch(power, scripts)
    monkeypatch.setattr(group_module, "Settler", partial(Settler, clock=power.clock.now))
    monkeypatch.setattr(group_module, "WindowPass", partial(WindowPass, _clock=power.clock.now))
    windows = make_window_rule(Request("gemm", brisk=brisk), 2)
    method = MeasurementMethod(
        rule=make_stopping_rule(False, 30, None, brisk),
        judge=is_case_decided,
        seed=0,
        windows=windows,
        warm_up_seconds=30.0,
        brisk=brisk,
    )
    records, parts = [], []
    for operands in ("cast", "ready"):
        cases = group(*(with_operands(planned(mode), operands) for mode in STEPS))
        listener = Parts(power)
        device.busy_since = power.clock.now()
        measurement = GroupMeasurement(cases, {"cpu": GPU}, timing, listener, method, meter, untimed)
        records.append(measurement.run())
        listener.working(cases.cases[0].case, "", 0.0)
        parts.append({doing: seconds for doing, seconds in listener.seconds.items() if seconds > 0})
    return records, parts, timing, untimed


STEPS = {"bf16": 2.0, "fp8": 1.3, "fp32": 1.5}


def test_a_brisk_group_takes_a_third_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    usual, brisk = (measured_groups(monkeypatch, is_run_brisk)[1][1] for is_run_brisk in (False, True))
    assert sum(usual.values()) > 40 and sum(brisk.values()) < 16
    assert brisk["warming up"] < 2 < usual["warming up"]
    assert brisk["measuring energy"] < 9 < 20 < usual["measuring energy"]
    assert brisk["measuring"] < usual["measuring"] / 2
    assert "checking numbers" not in brisk and usual["checking numbers"] > 2


def test_a_brisk_group_keeps_control_energy_and_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    groups, _, timing, untimed = measured_groups(monkeypatch, True)
    for records in groups:
        lead, *_ = records
        assert lead.control.num_rounds == 30, "identical code is timed beside itself"
        for record in records:
            assert not record.energy.why and len(record.energy.windows) == 2
            assert record.energy.idle_before == record.energy.idle_after == pytest.approx(80, rel=0.01)
            for window in record.energy.windows:
                assert window.joules / window.seconds == pytest.approx(WATTS[record.case.mode], rel=0.01)
                assert window.uncertainty is not None and window.uncertainty < 0.01
            assert record.effect == StepEffect(True)
            assert [measurement.metric for measurement in record.measurements] == ["product_error"]
            assert record.watch.warm_up.settled
    # A worker that times steps has no profiler, and none starts later.
    assert {entry[0] for entry in timing.log}.isdisjoint({"memory"}) and untimed.slots() == []
    assert (timing.restarts, untimed.restarts) == (0, 0)
    assert [entry[1] for entry in timing.log if entry[0] == "trial"] == 2 * ["fp8"]
    assert [entry[0] for entry in timing.log].count("error") == 3


def windows_of_arms(steps: Mapping[str, Script], power: Power) -> tuple[dict[str, int], list[str]]:
    """Brisk windows per mode, and the order of all windows."""
    worker = Runner(power, steps)
    arms = [arm(mode) for mode in steps]
    for one in arms:
        one.prepare(worker)
    turns: list[str] = []
    energy = WindowPass(power.meter(), BRISK, 0, lambda one, share: turns.append(one.planned.case.mode))
    results = energy.measure(arms, worker)
    return {one.planned.case.mode: len(results[one.key].windows) for one in arms}, turns


def test_second_windows_come_in_the_opposite_order() -> None:
    counts, turns = windows_of_arms({"fp32": lasting(0.7), "bf16": lasting(0.7), "fp8": lasting(0.7)}, SlowCounter())
    assert turns == turns[:3] + turns[:3][::-1] and set(counts.values()) == {2}


def test_a_third_window_settles_two_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    power = SlowCounter()
    seen = {"fp8": 0}

    class Drifting(dict[str, float]):
        def __getitem__(self, mode: str) -> float:
            watts = super().__getitem__(mode)
            seen["fp8"] += mode == "fp8"
            return watts * (1.04 if mode == "fp8" and seen["fp8"] < 14 else 1.0)

    monkeypatch.setattr("tests.measure.powered.WATTS", Drifting(WATTS))
    counts, turns = windows_of_arms({"bf16": lasting(0.7), "fp8": lasting(0.7)}, power)
    assert counts == {"bf16": 2, "fp8": 3} and turns[-1] == "fp8" and len(turns) == 5


def test_after_a_fault_no_third_window_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WindowResults, "needs_third_window", True)
    faulty = lasting(0.7, faults=[Fault("loop", WorkerLost("the worker crashed"), at=14)])
    power = SlowCounter()
    worker = Runner(power, {"bf16": lasting(0.7), "fp8": faulty})
    arms = [arm("bf16"), arm("fp8")]
    for one in arms:
        one.prepare(worker)
    results = WindowPass(power.meter(), BRISK, 0, lambda one, share: None).measure(arms, worker)
    looped = [entry[1] for entry in worker.log if entry[0] == "loop"]
    assert looped[-1] == "fp8" and worker.restarts == 1 and not worker.held
    assert "fp8 ended the windows: the worker crashed" in results[arms[1].key].why


def test_an_idle_window_that_failed_is_not_the_runs_idle_power() -> None:
    power = SlowCounter()
    meter = power.meter()
    power.broken = "the GPU is busy"
    assert isinstance(meter.measure_idle_energy_once(1.5), UnavailableReading)
    power.broken = ""
    idle = meter.measure_idle_energy_once(1.5)
    assert isinstance(idle, Energy) and meter.measure_idle_energy_once(1.5) is idle


def test_every_tick_is_waited_for() -> None:
    pace = SamplerPolling(counts=True, rhythm=CounterRhythm(0.02, 0.0, 0.02), every_tick=True)
    for count in (1, 2, 12):
        assert (
            pace.next(1.0, CounterTick(1.0, 1.0, 0.0), count) == pytest.approx(0.02 - 2 * TICK_PAUSE_SECONDS)
            and not pace.blind
        )
        assert pace.next(1.017, None, count) == TICK_PAUSE_SECONDS
        pace.limit_polling_cost(0.2, 1.0)
        assert pace.next(1.017, None, count) > TICK_PAUSE_SECONDS
        pace = SamplerPolling(counts=True, rhythm=CounterRhythm(0.02, 0.0, 0.02), every_tick=True)


def looks_at(clocks: tuple[float, ...]) -> list[ClockSample]:
    return [ClockSample(0.175 * place, 1e6 * clock, 40 + 2 * place) for place, clock in enumerate(clocks)]


def test_a_clock_is_flat_within_two_seconds_of_an_h200s_start() -> None:
    course = looks_at(H200_CLOCKS)
    flat = [is_clock_flat(course[: count + 1]) for count in range(len(course))]
    assert not any(flat[:6]) and flat.index(True) * 0.175 < 1.6
    assert not is_clock_flat(looks_at(tuple(1900 - 15 * place for place in range(9))))
    assert not is_clock_flat([replace(look, clock=None) for look in course])


@for_each(
    ("requested", "budget", "groups", "brisk"),
    [(True, None, 1, True), (False, None, 1, False), (False, 60.0, 2, False), (False, 60.0, 4, True)],
)
def test_a_short_budget_makes_groups_brisk(requested: bool, budget: float | None, groups: int, brisk: bool) -> None:
    assert is_run_brisk(requested, budget, groups) is brisk
    rule = make_window_rule(Request("gemm", brisk=requested, budget=budget), groups)
    assert rule.brisk is brisk and (rule.windows == 2 or not brisk)


def test_brisk_rounds_end_earlier_and_turns_of_seconds_stay_what_they_are() -> None:
    assert make_stopping_rule(False, None, None, True) == StoppingRule(least=10, budget=2.0)
    assert make_stopping_rule(True, None, None, True) == make_stopping_rule(True, None, None)
    for request in (Request("gemm", brisk=True, sustained=2.0), Request("gemm", brisk=True, energy_of="phases")):
        rule = make_window_rule(request, 1)
        assert not rule.brisk


def test_errors_are_shared_by_cases_with_the_same_numbers() -> None:
    case = planned("fp8").case
    ready, cold = (replace(case, params=(*case.params, pair)) for pair in (("operands", "ready"), ("cache", "cold")))
    layout, precision = replace(case, params=(*case.params, ("layout", "padded"))), planned("bf16").case
    assert make_numbers_key(ready) == make_numbers_key(cold) == make_numbers_key(case)
    assert len({make_numbers_key(case), make_numbers_key(layout), make_numbers_key(precision)}) == 3


def test_the_worker_that_times_nothing_is_no_stranger_on_the_device() -> None:
    device = Gpu(Power())
    for processes, idle_workers, strangers in ((1, 1, 0), (2, 1, 1), (1, 0, 1), (0, 1, 0)):
        device.processes = processes
        watch = SessionWatch(device, pid=1, idle_workers=idle_workers)
        watch.finish()
        assert watch.summarise_arm(arm("bf16")).others == strangers
