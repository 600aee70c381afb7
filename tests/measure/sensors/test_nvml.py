"""Readings of a device through the real pynvml: unit conversion and single failures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fp8bench.measure.sensors.nvml import Library, NvmlDevice
from fp8bench.measure.sensors.nvml_match import DeviceIdentity
from fp8bench.model.readings import NoReading, Reading, UnavailableReading, subtract_counters
from tests.measure.sensors.nvml.library import GIGABYTE, Simulation, pci_of, uuid_of
from tests.measure.sensors.virtual import VirtualClock

ROOT = Path(__file__).resolve().parents[3]


def values(readings: object) -> dict[str, object]:
    """Values with units; reasons unchanged."""
    return {
        name: (read.value, read.unit) if isinstance(read, Reading) else read.reason for name, read in readings.items()
    }


def test_a_device_states_its_facts(device: NvmlDevice) -> None:
    assert values(device.facts()) == {
        "driver": ("570.00.1", ""),
        "cuda_driver": ("12.8", ""),
        "uuid": (uuid_of(1), ""),
        "pci": (pci_of(1), ""),
        "vbios": ("96.00.00.00.01", ""),
        "power_cap": (650.0, "W"),
        "power_cap_default": (700.0, "W"),
        "sm_clock_max": (1.98e9, "Hz"),
        "memory_clock_max": (2.619e9, "Hz"),
        "persistence": ("on", ""),
        "ecc": ("on", ""),
        "mig": ("off", ""),
    }


def test_a_device_states_its_readings(nvml: Simulation, device: NvmlDevice) -> None:
    nvml.state.device[0].reasons = 0x44
    assert values(device.state()) == {
        "power": (300.0, "W"),
        "sm_clock": (1.755e9, "Hz"),
        "temperature": (55, "degC"),
        "throttle": (0x44, "mask"),
        "use": (0.98, "share"),
        "memory_use": (0.4, "share"),
        "memory_used": (3 * GIGABYTE, "B"),
    }


def test_violations_are_seconds_that_grow(nvml: Simulation, device: NvmlDevice, clock: VirtualClock) -> None:
    nvml.state.device[0].violation[:] = [0.5, 0.0, 0.0, 0.25, 0.0]
    nvml.state.now_ns = 10_000_000_000
    before = device.read_throttled_seconds()
    nvml.state.now_ns = 12_000_000_000
    assert values(subtract_counters(before, device.read_throttled_seconds())) == {
        "power-cap": (1.0, "s"),
        "thermal": (0.0, "s"),
        "sw-thermal": (0.0, "s"),
        "hw-thermal": (0.5, "s"),
        "hw-power-brake": (0.0, "s"),
    }


def test_a_lost_device_gives_a_reason(nvml: Simulation, device: NvmlDevice) -> None:
    nvml.state.device[0].lost_at_ns = 0
    facts = device.facts()
    assert isinstance(facts.pop("driver"), Reading) and isinstance(facts.pop("cuda_driver"), Reading)
    for read in (
        *facts.values(),
        *device.state().values(),
        *device.read_throttled_seconds().values(),
        device.process_memory(),
    ):
        assert "the GPU is lost" in read.reason


def test_a_lost_neighbour_does_not_hide_a_device(nvml: Simulation, library: Library) -> None:
    nvml.add("Second GPU", 2)
    nvml.state.device[0].lost_at_ns = 0
    device = NvmlDevice(DeviceIdentity(uuid=uuid_of(2)), library)
    assert values(device.facts())["uuid"] == (uuid_of(2), "")
    device.close()
    nvml.state.device[1].lost_at_ns = 0
    with pytest.raises(NoReading, match="the GPU is lost"):
        NvmlDevice(DeviceIdentity(uuid=uuid_of(2)), library)
    assert nvml.state.inits == nvml.state.shutdowns == 2


def test_memory_of_processes_is_read(nvml: Simulation, device: NvmlDevice) -> None:
    gpu = nvml.state.device[0]
    gpu.processes, gpu.pid[1], gpu.process_bytes[1] = 2, 1, 40 * GIGABYTE
    assert device.process_memory() == Reading(2 * GIGABYTE, "B", "nvmlDeviceGetComputeRunningProcesses_v3")
    assert device.process_memory(1) == Reading(40 * GIGABYTE, "B", "nvmlDeviceGetComputeRunningProcesses_v3")
    for unknown in (-1, 0):
        gpu.process_bytes[0] = unknown
        assert device.process_memory() == UnavailableReading(
            "the driver does not report the memory of single processes"
        )
    gpu.pid[0] = 2
    read = device.process_memory()
    assert "not among the 2 processes that NVML lists" in read.reason
    gpu.processes = 0
    read = device.process_memory()
    assert "not among the 0" in read.reason


def test_other_processes_on_the_device_are_found(nvml: Simulation, device: NvmlDevice) -> None:
    gpu = nvml.state.device[0]
    gpu.processes, gpu.pid[1] = 2, 1
    for pid in (os.getpid(), 1, 77):
        assert device.count_other_processes(pid) == Reading(1, "", "nvmlDeviceGetComputeRunningProcesses_v3")
    gpu.processes = 1
    assert device.count_other_processes(os.getpid()) == Reading(0, "", "nvmlDeviceGetComputeRunningProcesses_v3")
    nvml.fail("nvmlDeviceGetComputeRunningProcesses_v3", 15)
    read = device.count_other_processes(1)
    assert "lost" in read.reason


def test_a_mig_instance_is_read(nvml: Simulation, library: Library) -> None:
    gpu = nvml.state.device[0]
    nvml.split(gpu, 3)
    uuid = gpu.instance[1].uuid.decode()
    device = NvmlDevice(DeviceIdentity(uuid=uuid), library)
    assert device.mig_instance_count == 3
    facts, state = values(device.facts()), values(device.state())
    assert (facts["uuid"], facts["mig"]) == ((uuid, ""), ("on", ""))
    assert facts["power_cap"] == (650.0, "W")
    assert (state["memory_used"], state["power"]) == ((GIGABYTE, "B"), (300.0, "W"))
    device.close()


def test_an_old_driver_gives_reasons_for_missing_values(nvml: Simulation, old_driver: Path) -> None:
    script = (
        "import json\n"
        "from fp8bench.measure.sensors.nvml_match import DeviceIdentity\n"
        "from fp8bench.measure.sensors.nvml import NvmlDevice\n"
        f"device = NvmlDevice(DeviceIdentity({uuid_of(1)!r}))\n"
        "reads = {**device.facts(), **device.state(), **device.read_throttled_seconds()}\n"
        "reads['process'] = device.process_memory()\n"
        "device.close()\n"
        "print(json.dumps({name: getattr(read, 'source', None) or read.reason for name, read in reads.items()}))\n"
    )
    environment = nvml.environment()
    environment["LD_LIBRARY_PATH"] = str(old_driver.parent)
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    said = json.loads(done.stdout)
    assert said["throttle"] == "nvmlDeviceGetCurrentClocksThrottleReasons"
    assert said["temperature"] == "nvmlDeviceGetTemperature"
    assert said["memory_used"].startswith("this driver's NVML lacks the function")
    assert said["power"] == "nvmlDeviceGetPowerUsage"
    assert said["process"].startswith("this driver's NVML lacks the function")
    assert said["hw-thermal"].startswith("this device or its driver does not support it")
    assert said["power-cap"] == "nvmlDeviceGetViolationStatus"
