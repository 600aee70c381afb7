"""Which meter a device gets."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from fp8bench.measure.sensors import meter as opening
from fp8bench.measure.sensors.energy import Energy, SourceKind
from fp8bench.measure.sensors.meter import Meter, open_meter, open_nvml_meter, open_rapl_meter
from fp8bench.measure.sensors.nvml import Library
from fp8bench.measure.sensors.nvml_match import DeviceIdentity
from fp8bench.model import DeviceFacts
from fp8bench.model.readings import Reading, UnavailableReading
from tests.counts import counts, for_each
from tests.measure.sensors.nvml.library import Simulation, pci_of, uuid_of
from tests.measure.sensors.test_energy import measured
from tests.measure.sensors.test_rapl import zone
from tests.measure.sensors.virtual import VirtualClock

CPU = DeviceFacts("cpu", 0, "a processor", 1, "2.13")
GPU = DeviceFacts("cuda", 0, "a GPU", 1, "2.13", cuda="13.0")
AMD = DeviceFacts("cuda", 0, "a GPU", 1, "2.13", hip="7.0")


def test_a_gpu_is_measured_by_nvml(nvml: Simulation) -> None:
    nvml.add("Second GPU", 2).high = 120.0
    nvml.state.device[1].period_ns = 10_000_000
    with open_meter(replace(GPU, uuid=uuid_of(2)), {}) as meter:
        assert meter.kind is SourceKind.COUNTER
        assert meter.device.facts()["uuid"] == Reading(uuid_of(2), "", "nvmlDeviceGetUUID")


def test_an_unknown_gpu_has_reasons(nvml: Simulation) -> None:
    with open_meter(replace(GPU, uuid="GPU-ffff"), {}) as meter:
        why = UnavailableReading("NVML lists no device with UUID GPU-ffff or PCI address ?")
        device = meter.device
        reads = (*device.facts().values(), *device.state().values(), *device.read_throttled_seconds().values())
        assert {*reads, *device.read_in_this_thread().values(), device.process_memory(), meter.measure_idle()} == {why}
    inits = nvml.state.inits
    with open_meter(AMD, {}) as meter:  # NVML may exist for another device
        assert meter.kind is SourceKind.NONE and "AMD devices" in meter.why
    assert nvml.state.inits == inits


def test_a_processor_is_measured_by_rapl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening.rapl, "RAPL_FOLDER", tmp_path / "absent")
    with open_meter(CPU, {}) as meter:
        assert meter.kind in (SourceKind.NONE, SourceKind.RAPL)
        assert meter.device.process_memory() == UnavailableReading("a CPU has no NVML")
    with open_rapl_meter(tmp_path / "absent") as meter:
        assert meter.why.startswith(f"there is no {tmp_path}/absent: ")
        assert meter.measure_idle() == UnavailableReading(meter.why)


def test_rapl_counters_become_energy(
    tmp_path: Path, nvml: Simulation, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = zone(tmp_path, "intel-rapl:0", "package-0", limit=80_000_000 - 1)
    zone(tmp_path, "intel-rapl:0:0", "dram", limit=80_000_000 - 1)

    def energy_uj(part: opening.rapl.EnergyDomain) -> int:
        watts = 65 if part.counter.parent == package else 5
        return nvml.state.now_ns // 1_000_000 * watts * 1_000 % 80_000_000

    monkeypatch.setattr(opening.rapl, "_read_energy_uj", energy_uj)
    with open_rapl_meter(tmp_path, clock) as meter:
        assert (meter.kind, meter.why) == (SourceKind.RAPL, "")
        for _ in range(8):
            energy, start, end = measured(meter, clock)
            assert energy.joules == pytest.approx(70 * (end - start), rel=0.01)
            assert energy.source is SourceKind.RAPL


@for_each("name", [uuid_of(2), uuid_of(2)[4:], pci_of(2), "00:20:00.0"])
def test_a_variable_names_the_device_of_all_cases(nvml: Simulation, name: str) -> None:
    nvml.reset()
    nvml.add("Second GPU", 2).period_ns = 10_000_000
    with open_meter(CPU, {opening.NVML_DEVICE_VARIABLE: name}) as meter:
        assert meter.device.facts()["uuid"] == Reading(uuid_of(2), "", "nvmlDeviceGetUUID")
        assert meter.kind is SourceKind.COUNTER


def test_mig_instances_that_share_a_gpu_share_its_energy(
    nvml: Simulation, clock: VirtualClock, library: Library
) -> None:
    device = nvml.state.device[0]
    nvml.split(device, 2)
    uuid = device.instance[0].uuid.decode()
    with open_nvml_meter(DeviceIdentity(uuid=uuid), clock, library) as meter:
        assert meter.measure_idle() == UnavailableReading(
            "2 MIG instances share the GPU, and only the energy of the whole GPU is known"
        )
        assert isinstance(meter.device.state()["sm_clock"], Reading)
    nvml.split(device, 1)
    with open_nvml_meter(DeviceIdentity(uuid=uuid), clock, library) as meter:
        assert isinstance(meter.measure_idle(), Energy)


def test_without_energy_the_device_is_still_read(nvml: Simulation) -> None:
    with open_meter(replace(GPU, uuid=uuid_of(1)), {}, energy=False) as meter:
        assert meter.kind is SourceKind.NONE and nvml.calls().get("nvmlDeviceGetTotalEnergyConsumption", 0) == 0
        with meter.window() as window:
            assert window.is_enough
        assert window.energy == UnavailableReading("--no-energy was given")
        temperature = meter.device.read_changing_state()["temperature"]
        assert temperature.number == 55
    with open_meter(CPU, {}, energy=False) as meter:
        assert meter.why == "--no-energy was given"


def held() -> tuple[set[threading.Thread], int]:
    """Threads and open files of this process."""
    files = Path("/proc/self/fd")
    if not files.is_dir():
        pytest.skip("needs Linux's /proc to count open files")
    return set(threading.enumerate()), len(list(files.iterdir()))


@counts(20, 1000)
def test_many_windows_leak_neither_threads_nor_files(
    count: int, nvml: Simulation, opened: Callable[[], Meter], clock: VirtualClock
) -> None:
    nvml.state.device[0].period_ns = 7_000_000
    meter = opened()
    threads, files = held()
    for _ in range(count):
        with meter.window() as window:
            clock.wait(lambda window=window: window.is_enough)  # type: ignore[misc]
        assert isinstance(window.energy, Energy)
    now, files_now = held()
    assert now <= threads and files_now <= files
    calls = nvml.calls()
    assert calls["nvmlInitWithFlags"] == calls["nvmlDeviceGetHandleByUUID"] == 1
    assert nvml.state.shutdowns == 0
