"""The library of the tests itself: its energy is the integral of its power, and its counter steps as it is told."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from scipy.integrate import quad

from tests.counts import for_each
from tests.measure.sensors.nvml.library import CONSTANT, SINE, SQUARE, Simulation

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


def test_a_command_of_fp8bench_runs_with_it(nvml: Simulation) -> None:
    """As README.md of its folder says: nothing but two variables."""
    nvml.add("Second GPU", 2)
    done = subprocess.run(
        [sys.executable, "-m", "fp8bench", "doctor"], cwd=ROOT, env=nvml.environment(), capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert "driver 570.00.1, 2 device(s)" in done.stdout, done.stdout + done.stderr
