"""Windows of energy, against the true energy of devices whose power is a formula.

The clock is the library's virtual one: figures are the same on every machine, and an hour takes seconds."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fp8bench.measure.sensors.energy import (
    FAST_COUNTER_PAUSE_SECONDS,
    THREAD_NAME,
    TICK_PAUSE_SECONDS,
    Energy,
    SamplerPolling,
    SourceKind,
)
from fp8bench.measure.sensors.mean_power import MIN_TICK_INTERVALS, CounterRhythm, CounterTick
from fp8bench.measure.sensors.meter import Meter, open_nvml_meter
from fp8bench.measure.sensors.nvml import Library
from fp8bench.measure.sensors.nvml_match import DeviceIdentity
from fp8bench.model.readings import Reading, UnavailableReading
from tests.measure.sensors.nvml.library import SINE, SQUARE, Simulation, uuid_of
from tests.measure.sensors.test_nvml_library import left_behind
from tests.measure.sensors.virtual import VirtualClock

Opened = Callable[[], Meter]


def run(
    meter: Meter, clock: VirtualClock, seconds: float | None = None
) -> tuple[Energy | UnavailableReading, float, float]:
    """The energy of a window, `seconds` long or as long as needed, with start and end."""
    with meter.window() as window:
        start = clock.now()
        clock.wait(lambda: window.has_failed or (clock.now() >= start + seconds if seconds else window.is_enough))
        end = clock.now()
    return window.energy, start, end


def measured(meter: Meter, clock: VirtualClock, seconds: float | None = None) -> tuple[Energy, float, float]:
    """The same, asserting that there is a number."""
    energy, start, end = run(meter, clock, seconds)
    assert isinstance(energy, Energy), energy
    return energy, start, end


def reason(energy: Energy | UnavailableReading) -> str:
    return energy.reason


@pytest.mark.parametrize("milliseconds", [1, 7, 33, 100, 300])
@pytest.mark.parametrize("lateness", [0.0, 5e-3])
def test_constant_power_within_one_per_cent(
    nvml: Simulation, opened: Opened, clock: VirtualClock, milliseconds: int, lateness: float
) -> None:
    nvml.state.device[0].period_ns = milliseconds * 1_000_000
    clock.lateness = lateness
    meter, chance = opened(), random.Random(milliseconds)
    assert (meter.kind, meter.refused, meter.why) == (SourceKind.COUNTER, (), "")
    assert meter.source.counter_rhythm.period == pytest.approx(milliseconds / 1e3, abs=2e-3 + 2 * lateness)
    for _ in range(12):
        nvml.state.now_ns += chance.randrange(10**9)
        energy, start, end = measured(meter, clock)
        assert energy.joules == pytest.approx(nvml.joules(start, end), rel=0.01)
        assert energy.seconds == pytest.approx(end - start)
        assert energy.measured_stretch.intervals >= MIN_TICK_INTERVALS
        assert energy.measured_stretch.uncertainty is not None and energy.measured_stretch.uncertainty <= 0.005
        assert abs(energy.watts / 300 - 1) <= energy.measured_stretch.uncertainty + 1e-9


@pytest.mark.parametrize("curve", [SQUARE, SINE])
def test_a_swinging_power_is_averaged(nvml: Simulation, opened: Opened, clock: VirtualClock, curve: int) -> None:
    device = nvml.state.device[0]
    device.curve, device.low, device.high, device.hertz = curve, 150.0, 300.0, 3.0
    meter, chance = opened(), random.Random(curve)
    for _ in range(40):
        nvml.state.now_ns += chance.randrange(10**9)
        energy, start, end = measured(meter, clock, 3.0)
        assert energy.joules == pytest.approx(nvml.joules(start, end), rel=0.03)
        # The offset of the ticks is unknown: they are whole periods apart, within the window.
        first = (int(start * 10) + 1) / 10
        truth = nvml.joules(first, first + round(energy.measured_stretch.seconds, 1))
        assert energy.measured_stretch.joules == pytest.approx(truth, rel=1e-4)
        assert energy.watts * round(energy.measured_stretch.seconds, 1) == pytest.approx(truth, rel=0.02)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
@given(milliseconds=st.integers(1, 2500), phase=st.integers(0, 99))
def test_few_intervals_give_no_number(nvml: Simulation, library: Library, milliseconds: int, phase: int) -> None:
    nvml.reset()
    clock = VirtualClock(nvml.state)
    meter = open_nvml_meter(DeviceIdentity(uuid_of(1)), clock, library)
    nvml.state.now_ns += phase * 1_000_000
    energy, start, end = run(meter, clock, milliseconds / 1000)
    meter.close()
    if isinstance(energy, Energy):
        assert energy.measured_stretch.intervals >= MIN_TICK_INTERVALS and end - start > 1.0
    else:
        assert energy.reason.startswith("not measurable: ") and end - start < 1.2


def test_a_window_that_never_gets_enough_ends_at_its_cap(nvml: Simulation, opened: Opened, clock: VirtualClock) -> None:
    meter = opened()
    nvml.state.device[0].period_ns = 1_000_000_000
    energy, start, end = run(meter, clock)
    assert end - start == pytest.approx(5.0, abs=0.1)
    assert reason(energy) in {
        f"not measurable: {count} tick interval(s) of the energy counter, 10 are needed" for count in (2, 3, 4)
    }


@pytest.mark.parametrize(("before", "after"), [(1, 40), (2, 90), (20, 100), (100, 240), (100, 37)])
def test_a_counter_may_change_its_period(
    nvml: Simulation, opened: Opened, clock: VirtualClock, before: int, after: int
) -> None:
    nvml.state.device[0].period_ns = before * 1_000_000
    meter = opened()
    nvml.state.device[0].period_ns = after * 1_000_000
    for _ in range(5):
        energy, start, end = measured(meter, clock)
        assert energy.measured_stretch.uncertainty is not None
        assert energy.joules == pytest.approx(nvml.joules(start, end), rel=energy.measured_stretch.uncertainty + 1e-6)


def test_a_counter_that_changes_its_pace_within_a_window(nvml: Simulation, opened: Opened, clock: VirtualClock) -> None:
    device = nvml.state.device[0]
    device.period_ns = 1_000_000
    meter = opened()
    with meter.window() as window:
        start = clock.now()
        clock.wait(lambda: clock.now() >= start + 0.3)
        device.period_ns = 40_000_000
        clock.wait(lambda: clock.now() >= start + 2.0)
        end = clock.now()
    assert window.energy.measured_stretch.uncertainty is not None
    assert window.energy.measured_stretch.seconds < 1.75
    assert window.energy.joules == pytest.approx(
        nvml.joules(start, end), rel=window.energy.measured_stretch.uncertainty + 1e-6
    )


def test_each_window_watches_the_state(nvml: Simulation, opened: Opened, clock: VirtualClock) -> None:
    device, meter = nvml.state.device[0], opened()
    device.more_reasons, device.reasons = 0x40, 0x4
    device.more_from_ns, device.more_until_ns = nvml.state.now_ns + 10**9, nvml.state.now_ns + 15 * 10**8
    energy, _, _ = measured(meter, clock, 3.0)
    assert energy.watched["throttle"] == Reading(0x44, "mask", "nvmlDeviceGetCurrentClocksEventReasons")
    assert energy.watched["sm_clock"] == energy.watched["sm_clock_lowest"]
    assert energy.watched["sm_clock"] == Reading(1.755e9, "Hz", "nvmlDeviceGetClockInfo")
    assert energy.watched["temperature"] == Reading(55, "degC", "nvmlDeviceGetTemperatureV")
    energy, _, _ = measured(meter, clock)
    assert energy.watched["throttle"] == Reading(0x4, "mask", "nvmlDeviceGetCurrentClocksEventReasons")
    nvml.fail("nvmlDeviceGetClockInfo", 10, first=nvml.calls()["nvmlDeviceGetClockInfo"])  # which leaves the energy
    energy, _, _ = measured(meter, clock, 3.0)
    assert energy.watched["sm_clock"] == UnavailableReading("NVML timed out (NVML error 10)")
    assert isinstance(energy.watched["throttle"], Reading)
    assert energy.watts == pytest.approx(300, rel=0.01)


def test_without_a_counter_power_is_integrated(nvml: Simulation, opened: Opened, clock: VirtualClock) -> None:
    device = nvml.state.device[0]
    device.curve, device.low, device.high, device.hertz = SINE, 250.0, 350.0, 3.0
    nvml.fail("nvmlDeviceGetTotalEnergyConsumption", 3)
    meter = opened()
    assert meter.why.startswith("counter: this device or its driver does not support it")
    energy, start, end = measured(meter, clock)
    assert (energy.source, energy.measured_stretch.uncertainty) == (SourceKind.INSTANT, None)
    assert energy.joules == pytest.approx(nvml.joules(start, end), rel=0.05)
    assert end - start < 3.0


def test_a_device_without_a_source_has_a_reason(nvml: Simulation, opened: Opened, clock: VirtualClock) -> None:
    for function in ("nvmlDeviceGetTotalEnergyConsumption", "nvmlDeviceGetFieldValues"):
        nvml.fail(function, 4)
    meter = opened()
    assert (meter.kind, meter.source) == (SourceKind.NONE, None)
    with meter.window() as window:
        assert window.is_enough and window.has_failed
    assert reason(window.energy) == reason(meter.measure_idle()) == meter.why
    assert meter.why.count("this user has no permission (NVML error 4)") == 2
    assert isinstance(meter.device.state()["temperature"], Reading)


def test_a_window_with_a_missing_reading_is_invalid(nvml: Simulation, opened: Opened, clock: VirtualClock) -> None:
    """For any number of ticks: the counter goes back after a driver reload, or fails half-way.

    The next window is valid, until the device vanishes.
    """
    meter, device = opened(), nvml.state.device[0]
    device.drop_at_ns, device.drop_mj = nvml.state.now_ns + 700_000_000, 900_000
    energy, start, end = run(meter, clock)
    assert reason(energy).startswith("the energy counter went back from ") and end - start < 1.0
    assert measured(meter, clock)[0].watts == pytest.approx(300, rel=0.01)
    first = nvml.calls()["nvmlDeviceGetTotalEnergyConsumption"] + 60
    nvml.fail("nvmlDeviceGetTotalEnergyConsumption", 999, first=first, last=first)
    assert reason(run(meter, clock, 3.0)[0]) == "an internal driver error (NVML error 999)"
    assert measured(meter, clock)[0].watts == pytest.approx(300, rel=0.01)
    device.lost_at_ns = nvml.state.now_ns + 500_000_000
    for _ in range(3):
        energy, start, end = run(meter, clock)
        assert "the GPU is lost" in reason(energy) and end - start < 1.0


def test_a_workload_that_raises_ends_its_window(nvml: Simulation, opened: Opened) -> None:

    def raising() -> None:
        with meter.window():
            assert [thread.name for thread in threading.enumerate()].count(THREAD_NAME) == 1
            raise ValueError("its own")

    meter = opened()
    with pytest.raises(ValueError, match="its own"):
        raising()
    assert THREAD_NAME not in [thread.name for thread in threading.enumerate()]


def test_an_interrupted_sampler_has_measured_nothing(
    nvml: Simulation, opened: Opened, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[object] = []
    monkeypatch.setattr(threading, "excepthook", told.append)
    meter = opened()
    with meter.window() as window:
        start = clock.now()
        clock.wait(lambda: clock.now() >= start + 1.5)
        monkeypatch.setattr(meter.device, "_library", None)
        clock.wait(lambda: bool(told))
    assert len(told) == 1
    assert reason(window.energy) == "the sampler's thread ended early"
    monkeypatch.undo()


@pytest.mark.slow
def test_a_counter_that_hangs_is_left_behind(nvml: Simulation) -> None:
    nvml.state.device[0].period_ns = 5_000_000
    meter = open_nvml_meter(DeviceIdentity(uuid_of(1)), library=Library(timeout=0.4))
    calls = nvml.calls()["nvmlDeviceGetTotalEnergyConsumption"]
    nvml.fail("nvmlDeviceGetTotalEnergyConsumption", first=calls + 2, delay=1.2)
    with meter.window(cap=0.1) as window:
        while not window.is_enough:
            time.sleep(0.001)  # the polling thread needs the interpreter lock too
    assert reason(window.energy) == "the energy source gave no answer for 0.4 s"
    with meter.window() as window:
        assert window.is_enough
    assert reason(window.energy) == "the energy source gave no answer for 0.4 s"
    state = meter.device.state()["power"]
    assert state == UnavailableReading("the energy source gave no answer for 0.4 s, and is not called again")
    meter.close()
    left_behind()


def test_reading_counters_stays_within_its_budget(nvml: Simulation, opened: Opened, clock: VirtualClock) -> None:
    nvml.state.device[0].period_ns = 20_000_000
    meter = opened()
    looks = [nvml.calls()["nvmlDeviceGetTotalEnergyConsumption"]]
    for clock.cpu_per_sleep in (0.0, 500e-6):
        dear, start, end = measured(meter, clock, 4.0)
        looks.append(nvml.calls()["nvmlDeviceGetTotalEnergyConsumption"])
    assert looks[2] - looks[1] < (looks[1] - looks[0]) / 2
    assert dear.joules == pytest.approx(nvml.joules(start, end), rel=0.01)


@pytest.mark.slow
def test_windows_in_real_time_have_the_true_energy(nvml: Simulation) -> None:
    nvml.state.device[0].period_ns = 10_000_000
    with open_nvml_meter(DeviceIdentity(uuid_of(1)), library=Library()) as meter, meter.window(cap=60.0) as window:
        while not window.is_enough:
            sum(range(1000))
    energy = window.energy
    assert energy.measured_stretch.uncertainty is not None
    # The offset between the host's clock and the counter's steps is arbitrary.
    assert abs(energy.watts / 300 - 1) <= energy.measured_stretch.uncertainty + 0.005


ROOT = Path(__file__).resolve().parents[3]


STEADY = CounterRhythm(0.1, 0.0, 0.1)
LAST = MIN_TICK_INTERVALS + 1


def tick(at: float, late: float = 0.0) -> CounterTick:
    return CounterTick(at - late / 2, at + late / 2, 0.0)


def test_the_first_ten_ticks_are_counted_between_ticks() -> None:
    pace = SamplerPolling(counts=True, rhythm=STEADY)
    now = 1.001 + pace.next(1.001, tick(1.0, 0.002), 1)
    assert now == pytest.approx(1.15)
    now = 1.17 + pace.next(1.17, tick(1.085, 0.17), 2)
    assert now == pytest.approx(1.25)
    assert pace.next(1.25, None, 2) == TICK_PAUSE_SECONDS


def test_after_ten_ticks_the_sampler_sleeps_until_the_next() -> None:
    pace = SamplerPolling(counts=True, rhythm=STEADY)
    pace.next(1.0, tick(1.0), 1)
    assert (
        1.95 + pace.next(1.95, tick(1.9, 0.1), MIN_TICK_INTERVALS) == pytest.approx(2.0 - 2 * TICK_PAUSE_SECONDS)
        and not pace.blind
    )
    assert pace.next(1.997, None, MIN_TICK_INTERVALS) == TICK_PAUSE_SECONDS
    assert 2.001 + pace.next(2.001, tick(2.0), LAST) == pytest.approx(2.1 - 2 * TICK_PAUSE_SECONDS)


def test_ticks_of_a_fast_counter_are_skipped() -> None:
    pace = SamplerPolling(counts=True, rhythm=CounterRhythm(0.02, 0.0, 0.02))
    assert pace.next(1.0, tick(1.0), LAST) == pytest.approx(0.06 - 2 * TICK_PAUSE_SECONDS) and pace.blind
    assert pace.next(1.056, tick(1.05), LAST) == TICK_PAUSE_SECONDS and not pace.blind
    assert pace.next(1.06, tick(1.06), LAST + 1) > TICK_PAUSE_SECONDS


def test_expensive_readings_become_rarer() -> None:
    fast, steady = (
        SamplerPolling(counts=True, rhythm=CounterRhythm(0.002, 0.0, 0.003)),
        SamplerPolling(counts=True, rhythm=STEADY),
    )
    for pace in (fast, steady):
        pace.limit_polling_cost(0.006, 0.5)
    assert fast.next(0.0, None, 0) == FAST_COUNTER_PAUSE_SECONDS
    for _ in range(20):
        fast.limit_polling_cost(0.02, 1.0)
        steady.limit_polling_cost(0.02, 1.0)
    assert fast.next(0.0, None, 0) == 0.05
    assert steady.next(1.0, tick(1.0), LAST) == pytest.approx(0.4 - 2 * TICK_PAUSE_SECONDS)
    assert steady.blind
