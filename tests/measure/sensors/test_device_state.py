"""A device's settings, by the real pynvml and the library in nvml/."""

from __future__ import annotations

import re

import pytest

from fp8bench.measure.sensors.device_state import (
    describe_driver,
    describe_energy_source,
    format_device_lines,
    read_device_settings,
)
from fp8bench.measure.sensors.meter import Meter, open_meter
from fp8bench.measure.sensors.nvml import AbsentDevice, Library
from fp8bench.model import DeviceFacts
from tests.measure.sensors.nvml.library import Simulation, uuid_of

GPU = DeviceFacts("cuda", 1, "a GPU", 1, "2.13", cuda="13.0", uuid=uuid_of(1))
CPU = DeviceFacts("cpu", 0, "a processor", 1, "2.13")


def test_a_run_stores_the_settings_of_its_gpu(nvml: Simulation) -> None:
    with open_meter(GPU, {}) as meter:
        found = read_device_settings(GPU, meter)
    assert found["cuda:1 driver"] == "570.00.1" and found["cuda:1 power_cap"] == 650.0
    assert (found["cuda:1 ecc"], found["cuda:1 mig"], found["cuda:1 persistence"]) == ("on", "off", "on")
    assert found["cuda:1 sm_clock_max"] == 1980e6 and found["cuda:1 unknown"] is None
    assert found["cuda:1 energy_source"] == "counter" and 0.09 < float(found["cuda:1 energy_period"] or 0) < 0.11
    assert found["cuda:1 energy_why"] is None


def test_missing_facts_are_none_and_have_a_reason(nvml: Simulation) -> None:
    nvml.fail("nvmlDeviceGetEccMode", 3)
    nvml.fail("nvmlDeviceGetEnforcedPowerLimit", 4)
    with open_meter(GPU, {}, energy=False) as meter:
        found = read_device_settings(GPU, meter)
        lines = "\n".join(format_device_lines(meter))
    assert found["cuda:1 ecc"] is None and found["cuda:1 power_cap"] is None
    assert "ecc: " in str(found["cuda:1 unknown"]) and "power_cap: " in str(found["cuda:1 unknown"])
    assert "unknown   " in lines and "ECC" not in lines and "power cap" not in lines


def test_a_device_without_a_driver_has_reasons() -> None:
    meter = Meter((), AbsentDevice("a CPU has no NVML"), "there is no RAPL")
    assert read_device_settings(CPU, meter) == {
        "cpu energy_source": "none",
        "cpu energy_period": None,
        "cpu energy_why": "there is no RAPL",
    }
    assert list(format_device_lines(meter)) == ["energy    cannot be measured: there is no RAPL"]
    state = read_device_settings(GPU, Meter((), AbsentDevice("no driver"), "no driver"))
    assert state["cuda:1 driver"] is None and str(state["cuda:1 unknown"]).endswith("mig: no driver")


@pytest.mark.slow
def test_the_doctor_shows_the_devices_state(nvml: Simulation) -> None:
    device = nvml.state.device[0]
    device.reasons, device.celsius = 0x44, 91
    with open_meter(GPU, {}) as meter:
        lines = list(format_device_lines(meter))
    driver, settings, now, energy = lines
    assert driver.startswith(f"driver    570.00.1, CUDA up to 12.8, {uuid_of(1)}, PCI ")
    assert settings.split(None, 1)[1].startswith("power cap 650 W of 700 W, clock up to 1.98 GHz, ECC on, MIG off")
    assert "300 W" in now and "91 degC" in now and now.endswith("clocks held back by power-cap, hw-thermal")
    period = re.fullmatch(r"energy    counter, changes every (\d+\.?\d*) ms", energy)
    assert 90 < float(period[1]) < 110


def test_a_worse_source_has_the_reason_for_no_better_one(nvml: Simulation) -> None:
    nvml.fail("nvmlDeviceGetTotalEnergyConsumption", 3)
    with open_meter(GPU, {}) as meter:
        assert describe_energy_source(meter).startswith("instant; no better source: counter: ")


def test_the_driver_lists_devices_that_torch_does_not_see(nvml: Simulation, library: Library) -> None:
    """A CPU wheel of torch on a machine with GPUs is a frequent mistake."""
    nvml.add("Second GPU", 2)
    assert describe_driver(library) == "driver 570.00.1, 2 device(s)"
    nvml.fail("nvmlSystemGetDriverVersion", 15)
    assert describe_driver(library).startswith("NVML says: the GPU is lost")
    nvml.state.faults = 0
    nvml.fail("nvmlInitWithFlags", 9)
    assert describe_driver(library).startswith("NVML says: the NVIDIA driver is not loaded")
