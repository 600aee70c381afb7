"""The library of the tests itself: its energy is the integral of its power, and its counter steps as it is told."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pynvml
import pytest
from scipy.integrate import quad

from fp8bench.measure.sensors.nvml import NvmlDevice
from tests.counts import for_each
from tests.measure.sensors.nvml.library import CONSTANT, SINE, SQUARE, Simulation
from tests.measure.sensors.virtual import VirtualClock

ROOT = Path(__file__).resolve().parents[3]


@for_each("curve", [CONSTANT, SQUARE, SINE])
@for_each(("start", "end"), [(0.0, 1.0), (0.13, 3.31), (7.0, 7.02)])
@for_each("phase", [0.0, 0.7])
def test_the_energy_is_the_integral_of_the_power(
    nvml: Simulation, curve: int, start: float, end: float, phase: float
) -> None:
    """Against SciPy's quadrature, told where the square jumps."""
    device = nvml.state.device[0]
    device.curve, device.low, device.high, device.hertz, device.phase = curve, 150.0, 300.0, 3.0, phase
    jumps = [jump for number in range(80) if start < (jump := (number / 2 - phase) / 3) < end]
    truth, _ = quad(nvml.watts, start, end, points=jumps or None, limit=400)
    assert nvml.joules(start, end) == pytest.approx(truth, rel=1e-6)


def test_the_counter_shows_the_energy_of_its_last_step(
    nvml: Simulation, device: NvmlDevice, clock: VirtualClock
) -> None:
    nvml.state.device[0].base_mj = 5_000
    for seconds, shown in ((1.0, 305_000), (1.099, 305_000), (1.1, 335_000), (1.15, 335_000), (1.2, 365_000)):
        nvml.state.now_ns = round(seconds * 1e9)
        assert pynvml.nvmlDeviceGetTotalEnergyConsumption(device.handle) == shown


def test_jitter_makes_a_step_late_and_never_early(nvml: Simulation, device: NvmlDevice, clock: VirtualClock) -> None:
    nvml.state.device[0].jitter_ns = 60_000_000
    last, late = None, []
    for millisecond in range(2_000):
        nvml.state.now_ns = millisecond * 1_000_000
        shown = pynvml.nvmlDeviceGetTotalEnergyConsumption(device.handle)
        if last is not None and shown != last:
            late.append(millisecond % 100)
        last = shown
    assert len(late) == pytest.approx(20, abs=1) and max(late) <= 60 and len(set(late)) > 10


def test_the_average_lags_behind(nvml: Simulation, device: NvmlDevice, clock: VirtualClock) -> None:
    one = nvml.state.device[0]
    one.curve, one.low, one.high, one.hertz, one.phase = SQUARE, 100.0, 300.0, 0.25, 0.5
    shown = []
    for seconds in (2.0, 2.5, 3.0):
        nvml.state.now_ns = round(seconds * 1e9)
        shown.append(pynvml.nvmlDeviceGetPowerUsage(device.handle) / 1e3)
    assert shown == pytest.approx([100, 200, 300], abs=1)


def test_a_command_of_fp8bench_runs_with_it(nvml: Simulation) -> None:
    """As README.md of its folder says: nothing but two variables."""
    nvml.add("Second GPU", 2)
    done = subprocess.run(
        [sys.executable, "-m", "fp8bench", "doctor"], cwd=ROOT, env=nvml.environment(), capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert "driver 570.00.1, 2 device(s)" in done.stdout, done.stdout + done.stderr
