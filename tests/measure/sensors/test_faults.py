"""Every function of NVML that we call fails, with some codes or all: at the start, from the middle on, at the end.

Whatever fails, the run goes on: each value is what it was without the fault, or there is a reason in its place.
"""

from __future__ import annotations

import threading

import pytest

from fp8bench.measure.sensors.driver import wait_for_thread_end
from fp8bench.measure.sensors.energy import Energy
from fp8bench.measure.sensors.meter import open_nvml_meter
from fp8bench.measure.sensors.nvml import Library
from fp8bench.measure.sensors.nvml_match import DeviceIdentity
from fp8bench.model.readings import Reading, ReadingOrUnavailable, UnavailableReading, subtract_counters
from tests.measure.sensors.nvml.library import GIGABYTE, Simulation
from tests.measure.sensors.virtual import VirtualClock

CODES = (*range(1, 25), 999)
# Not supported, and an error code in no list.
SAMPLE = (3, 999)
# All calls of the samplers in a run on a MIG instance that has its GPU alone.
FUNCTIONS = (
    "nvmlInitWithFlags", "nvmlShutdown", "nvmlSystemGetDriverVersion", "nvmlSystemGetCudaDriverVersion",
    "nvmlDeviceGetCount_v2", "nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetHandleByUUID",
    "nvmlDeviceGetUUID", "nvmlDeviceGetPciInfo_v3", "nvmlDeviceGetVbiosVersion", "nvmlDeviceGetMigMode",
    "nvmlDeviceGetMaxMigDeviceCount", "nvmlDeviceGetMigDeviceHandleByIndex",
    "nvmlDeviceGetEnforcedPowerLimit",
    "nvmlDeviceGetPowerManagementDefaultLimit", "nvmlDeviceGetMaxClockInfo", "nvmlDeviceGetPersistenceMode",
    "nvmlDeviceGetEccMode", "nvmlDeviceGetMemoryInfo_v2",
    "nvmlDeviceGetTotalEnergyConsumption", "nvmlDeviceGetFieldValues", "nvmlDeviceGetPowerUsage",
    "nvmlDeviceGetClockInfo", "nvmlDeviceGetTemperatureV", "nvmlDeviceGetTemperature",
    "nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons",
    "nvmlDeviceGetUtilizationRates", "nvmlDeviceGetViolationStatus", "nvmlDeviceGetComputeRunningProcesses_v3",
)  # fmt: skip
# Called only after another failure: a fault there is a second fault.
ELSE = {
    "nvmlDeviceGetPowerUsage": "nvmlDeviceGetFieldValues",
    "nvmlDeviceGetTemperature": "nvmlDeviceGetTemperatureV",
    "nvmlDeviceGetCurrentClocksThrottleReasons": "nvmlDeviceGetCurrentClocksEventReasons",
}
# Faults without effect: in the last call, and an answer that there is no second instance, which is true.
UNNOTICED = {*(("nvmlShutdown", code) for code in CODES), ("nvmlDeviceGetMigDeviceHandleByIndex", 6)}


def prepared(nvml: Simulation) -> None:
    """A counter with 7 ms ticks, for short windows, and one MIG instance."""
    device = nvml.reset()
    device.period_ns, device.sensor_ns = 7_000_000, 7_000_000
    nvml.split(device, 1)


def run(nvml: Simulation) -> dict[str, ReadingOrUnavailable | Energy]:
    """All results of a run of two windows, by name."""
    clock = VirtualClock(nvml.state)
    instance = nvml.state.device[0].instance[0].uuid.decode()
    said: dict[str, ReadingOrUnavailable | Energy] = {}
    with open_nvml_meter(DeviceIdentity(uuid=instance), clock, Library(timeout=60.0)) as meter:
        said["kind"] = Reading(meter.kind, "", "")
        said |= meter.device.facts()
        before = meter.device.read_throttled_seconds()
        for number in (1, 2):
            with meter.window() as window:
                start = clock.now()
                clock.wait(lambda window=window: window.is_enough)  # type: ignore[misc]
                end = clock.now()
            said[f"energy {number}"] = window.energy
            if isinstance(window.energy, Energy):
                assert window.energy.joules == pytest.approx(nvml.joules(start, end), rel=0.01)
                said |= {f"{name} in window {number}": read for name, read in window.energy.watched.items()}
            said |= {f"{name} after window {number}": read for name, read in meter.device.state().items()}
        said |= {
            f"violation {name}": read
            for name, read in subtract_counters(before, meter.device.read_throttled_seconds()).items()
        }
        said["process_memory"] = meter.device.process_memory()
    return said


def plain(said: ReadingOrUnavailable | Energy) -> object:
    """The fields that must agree between two runs: times and joules vary."""
    if isinstance(said, Energy):
        return (said.source, round(said.watts))
    return (said.value, said.source) if isinstance(said, Reading) else said.reason


def test_the_list_has_all_functions_that_a_run_calls(nvml: Simulation) -> None:
    prepared(nvml)
    run(nvml)
    called = {name for name in nvml.calls() if name.startswith("nvml")}
    assert called == set(FUNCTIONS) - set(ELSE)


@pytest.mark.parametrize("codes", [SAMPLE, pytest.param(CODES, marks=pytest.mark.nightly)], ids=["some", "all"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_each_failing_function_gives_a_reason(nvml: Simulation, function: str, codes: tuple[int, ...]) -> None:
    healthy = {name: plain(said) for name, said in faulty(nvml, function).items()}
    calls = nvml.calls()[function]
    assert calls and "energy 2" in healthy
    for code in codes:
        for first in (0, calls // 2, calls - 1):
            said = faulty(nvml, function, code, first)
            for name, one in said.items():
                sound(name, one, healthy)
            assert nvml.state.inits == nvml.state.shutdowns or function == "nvmlShutdown"
            noticed = {name: plain(reading) for name, reading in said.items()} != healthy
            assert noticed or (function, code) in UNNOTICED, f"code {code} from call {first} on was not noticed"


def test_a_driver_is_not_accused_of_a_stop_of_our_own_process() -> None:
    """Its time limit expires on continuing, before the calling thread has had a core."""
    waits: list[float | None] = []

    class Thread(threading.Thread):
        def join(self, timeout: float | None = None) -> None:
            waits.append(timeout)

        def is_alive(self) -> bool:
            return len(waits) < 2

    assert wait_for_thread_end(Thread(), 5.0) and waits == [2.5, 2.5]


def faulty(nvml: Simulation, function: str, code: int = 0, first: int = 0) -> dict[str, ReadingOrUnavailable | Energy]:
    """A run in which a function fails from one of its calls on."""
    prepared(nvml)
    if function in ELSE:
        nvml.fail(ELSE[function], 3)
    nvml.fail(function, code, first=first)
    return run(nvml)


def sound(name: str, said: ReadingOrUnavailable | Energy, healthy: dict[str, object]) -> None:
    """Asserts that a value equals the one without the fault, or the truth, or is a reason."""
    if isinstance(said, UnavailableReading):
        assert len(said.reason) > 10, (name, said)
    elif isinstance(said, Energy):
        assert said.watts == pytest.approx(300, rel=0.01), (name, said)
    elif said.unit == "B":
        assert said.value in (GIGABYTE, 2 * GIGABYTE), (name, said)
    elif name != "kind" and name in healthy:
        was = healthy[name]
        assert isinstance(was, str) or (isinstance(was, tuple) and was[0] == said.value), (name, said)
