"""Labels of a device that holds its clocks back, end to end: the real pynvml, the library of tests/samplers/nvml/."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.measure.sensors.nvml.library import Device, Simulation
from tests.test_energy_suite import GEMM, ran
from tests.test_energy_suite import simulation as simulation

WORDS = (*GEMM, "--rounds", "10", "--no-energy")


def findings(simulation: Simulation, folder: Path) -> dict[str, dict[str, Any]]:
    """By precision."""
    printed = json.loads(ran(simulation, folder, *WORDS, "--json")[1])
    return {record["case"]["precision"]: record["finding"] for record in printed["records"]}


# 1,755 MHz lie halfway between two figures: a mean of looks may fall to either side in its last bit.
CLOCK = re.compile(r"SM clock 1\.7[56] GHz")


def hot(simulation: Simulation) -> Device:
    """Slowed down by heat for an eighth of the time, at its power cap besides."""
    device = simulation.reset()
    device.reasons = 0x40 | 0x4
    device.violation[3] = 0.125
    return device


@pytest.mark.slow
def test_a_device_slowed_down_by_its_hardware_leaves_no_verdict(simulation: Simulation, tmp_path: Path) -> None:
    """The ratio stays, and the why names label and reason."""
    hot(simulation)
    found = findings(simulation, tmp_path)
    assert found["bf16"]["verdict"] == "unsure" and found["bf16"]["ratio"]["point"] > 0
    assert "throttled" in found["bf16"]["hard"] and "throttled (hw-thermal 1" in found["bf16"]["why"]
    for finding in found.values():
        assert {"throttled", "power-capped"} <= set(finding["labels"])
        reasons = dict(finding["label_reasons"])
        share = reasons["throttled"].removeprefix("hw-thermal ").removesuffix("% of the time")
        assert float(share) == pytest.approx(12.5, abs=1) and CLOCK.fullmatch(reasons["power-capped"])


@pytest.mark.slow
def test_a_power_cap_alone_takes_nothing_away(simulation: Simulation, tmp_path: Path) -> None:
    """Clocks that the cap allows are the device's own."""
    simulation.reset().reasons = 0x4
    for finding in findings(simulation, tmp_path).values():
        assert "power-capped" in finding["labels"] and "throttled" not in finding["labels"]
        assert "throttled" not in finding["hard"]
