"""One NVIDIA device as NVML sees it: its handle, facts and state; and NVML's queries in our units."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from fp8bench.measure.sensors.driver import (
    About,
    Ask,
    DriverDevice,
    DriverLibrary,
    Looks,
    Queries,
    Query,
    Way,
    others_queries,
)
from fp8bench.measure.sensors.nvml_match import DeviceIdentity, ListedDevice, Match, match
from fp8bench.model import consumed
from fp8bench.model.readings import NoReading, Reading, Readings, Unavailable, attempt, first_of, positive

NOT_SUPPORTED = 3
NOT_FOUND = 6
FUNCTION_NOT_FOUND = 13

REASONS: dict[int, str] = {
    1: "NVML is not initialised",
    2: "NVML refused the arguments",
    3: "this device or its driver does not support it",
    4: "this user has no permission",
    5: "NVML was already initialised",
    6: "NVML found no such thing",
    7: "NVML needed more room for its answer",
    8: "the GPU's external power is not connected",
    9: "the NVIDIA driver is not loaded",
    10: "NVML's own time ran out",
    11: "the GPU's interrupts do not work",
    12: "there is no NVML library (libnvidia-ml.so.1): no NVIDIA driver here",
    13: "this driver's NVML lacks the function: it is older than nvidia-ml-py",
    14: "the GPU's infoROM is corrupted",
    15: "the GPU is lost: it fell off the bus or cannot be reached",
    16: "the GPU must be reset first",
    17: "the operating system or a container blocks it",
    18: "NVML and the driver are of different versions: restart after the update",
    19: "the GPU is in use",
    20: "NVML ran out of memory",
    21: "NVML has no data",
    22: "a virtual GPU's ECC is not supported",
    23: "the GPU has no resources left for it",
    24: "this clock is not supported",
    25: "NVML does not know this version of the structure",
    26: "this driver's NVML has given the function up",
    27: "the GPU is not ready yet",
    28: "NVML finds no GPU",
    29: "the GPU is in a state that does not allow it",
    30: "this kind of reset is not supported",
    999: "an internal driver error",
}


def reason(code: int) -> str:
    return f"{REASONS.get(code, 'an error that fp8bench does not know')} (NVML error {code})"


class Library(DriverLibrary):
    """NVML by pynvml."""

    name, package, end = "NVML", "nvidia-ml-py", "nvmlShutdown"

    def load(self) -> Any:
        try:
            import pynvml
        except ImportError as error:
            raise NoReading("the package nvidia-ml-py is not installed") from error
        return pynvml

    def begin(self) -> None:
        self.call("nvmlInitWithFlags", 0)

    def failure(self, error: Exception) -> NoReading | None:
        return NoReading(reason(error.value), error.value) if isinstance(error, self._module.NVMLError) else None


LIBRARY = Library()


_MEGA = 1e6
_MILLI = 1e-3
_NANO = 1e-9
_SM, _MEMORY_CLOCK = 1, 2
_CHIP = 0
_POWER_INSTANT = 186
_MEMORY_V2 = 0x02000028


def field(ask: Ask, number: int) -> float:
    (value,) = ask("nvmlDeviceGetFieldValues", [number])
    if value.nvmlReturn:
        raise NoReading(reason(value.nvmlReturn))
    kinds = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
    if not 0 <= value.valueType < len(kinds):
        raise NoReading(f"field {number} is of a type that fp8bench does not know ({value.valueType})")
    return float(getattr(value.value, kinds[value.valueType]))


def _plain(function: str, unit: str, *arguments: Any, of: Callable[[Any], Any] = lambda answer: answer) -> Way:
    return lambda ask: Reading(of(ask(function, *arguments)), unit, function)


def _scaled(function: str, factor: float, unit: str, *arguments: Any) -> Way:
    return lambda ask: positive(ask(function, *arguments) * factor, unit, function)


def _first_of(*reads: Way) -> Way:
    return lambda ask: first_of(*(partial(read, ask) for read in reads))


def _switch(function: str, of: Callable[[Any], Any] = lambda answer: answer) -> Way:
    return _plain(function, "", of=lambda answer: "on" if of(answer) else "off")


def _version(number: int) -> str:
    """The newest CUDA that the driver supports: 12080 is '12.8'."""
    return f"{number // 1000}.{number % 1000 // 10}"


def _memory(part: str) -> Way:
    """The newer function tells the driver's own memory apart, the older one counts it in."""
    old, new = "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMemoryInfo_v2"
    return _first_of(
        lambda ask: Reading(getattr(ask(old, _MEMORY_V2), part), "B", new),
        _plain(old, "B", of=lambda memory: getattr(memory, part)),
    )


_PROCESSES = ("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetComputeRunningProcesses_v2")


def _running_processes(ask: Ask) -> tuple[list[tuple[int, int]], str]:
    try:
        source = _PROCESSES[0]
        processes = ask(source)
    except NoReading:
        source = _PROCESSES[1]
        processes = ask(source)
    return [(process.pid, process.usedGpuMemory or 0) for process in processes], source


def others(pid: int) -> tuple[Query, ...]:
    return others_queries(pid, _running_processes)


def process_memory(pid: int) -> Query:
    """What a process holds on the device, its context included.

    pynvml's function without a version is not used: on an older driver it raises what is no NVMLError.
    """
    ways = (_plain(function, "B", of=partial(_memory_of, pid)) for function in _PROCESSES)
    return Query("process_memory", _first_of(*ways))


def _memory_of(pid: int, processes: Sequence[Any]) -> int:
    used = [process.usedGpuMemory for process in processes if process.pid == pid]
    if not used:
        raise NoReading(
            f"process {pid} is not among the {len(processes)} that NVML lists: it has no context there, or another "
            "number outside its container"
        )
    if not used[0]:
        raise NoReading("the driver does not report the memory of single processes")
    return int(used[0])


def _violation(violation: consumed.Violation) -> Way:
    """Seconds since the driver was loaded; unlike other quantities it may be 0."""
    if violation.field is not None:
        number = violation.field
        return lambda ask: Reading(field(ask, number) * _NANO, "s", f"field {number}")
    return _plain("nvmlDeviceGetViolationStatus", "s", violation.policy, of=lambda status: status.violationTime * _NANO)


FACTS: tuple[Query, ...] = (
    Query("driver", _plain("nvmlSystemGetDriverVersion", ""), About.SYSTEM),
    Query("cuda_driver", _plain("nvmlSystemGetCudaDriverVersion", "", of=_version), About.SYSTEM),
    Query("name", _plain("nvmlDeviceGetName", ""), About.PART),
    Query("uuid", _plain("nvmlDeviceGetUUID", ""), About.PART),
    Query("pci", _plain("nvmlDeviceGetPciInfo", "", of=lambda info: info.busId)),
    Query("vbios", _plain("nvmlDeviceGetVbiosVersion", "")),
    Query("power_cap", _scaled("nvmlDeviceGetEnforcedPowerLimit", _MILLI, "W")),
    Query("power_cap_set", _scaled("nvmlDeviceGetPowerManagementLimit", _MILLI, "W")),
    Query("power_cap_default", _scaled("nvmlDeviceGetPowerManagementDefaultLimit", _MILLI, "W")),
    Query("sm_clock_max", _scaled("nvmlDeviceGetMaxClockInfo", _MEGA, "Hz", _SM)),
    Query("memory_clock_max", _scaled("nvmlDeviceGetMaxClockInfo", _MEGA, "Hz", _MEMORY_CLOCK)),
    Query("persistence", _switch("nvmlDeviceGetPersistenceMode")),
    Query("ecc", _switch("nvmlDeviceGetEccMode", lambda modes: modes[0])),
    Query("mig", _switch("nvmlDeviceGetMigMode", lambda modes: modes[0])),
    Query("memory_total", _memory("total"), About.PART),
)

# Since the driver was loaded, in steps of the counter's period.
ENERGY = _scaled("nvmlDeviceGetTotalEnergyConsumption", _MILLI, "J")
# The mean of the last second on current devices; the present power on A100 and older.
AVERAGE_POWER = _scaled("nvmlDeviceGetPowerUsage", _MILLI, "W")


def instant_power(ask: Ask) -> Reading:
    return positive(field(ask, _POWER_INSTANT) * _MILLI, "W", f"field {_POWER_INSTANT} (instant)")


# Sampled within a window. Not the power: the energy is measured anyway.
CHANGING: tuple[Query, ...] = (
    Query("sm_clock", _scaled("nvmlDeviceGetClockInfo", _MEGA, "Hz", _SM)),
    Query("memory_clock", _scaled("nvmlDeviceGetClockInfo", _MEGA, "Hz", _MEMORY_CLOCK)),
    # Of the chip; NVML is to drop the older function.
    Query("temperature", _first_of(
        _plain("nvmlDeviceGetTemperatureV", "degC", _CHIP), _plain("nvmlDeviceGetTemperature", "degC", _CHIP)
    )),
    # A mask; 0 is no reason.
    Query("throttle", _first_of(
        _plain("nvmlDeviceGetCurrentClocksEventReasons", "mask"),
        _plain("nvmlDeviceGetCurrentClocksThrottleReasons", "mask"),
    )),
)  # fmt: skip
STATE: tuple[Query, ...] = (
    Query("power", _first_of(instant_power, AVERAGE_POWER)),
    *CHANGING,
    Query("use", _plain("nvmlDeviceGetUtilizationRates", "share", of=lambda rates: rates.gpu / 100)),
    Query("memory_use", _plain("nvmlDeviceGetUtilizationRates", "share", of=lambda rates: rates.memory / 100)),
    Query("memory_used", _memory("used"), About.PART),
)
VIOLATIONS: tuple[Query, ...] = tuple(Query(violation.name, _violation(violation)) for violation in consumed.VIOLATIONS)
QUERIES = Queries(FACTS, STATE, CHANGING, VIOLATIONS, process_memory, others)


class AbsentDevice(Looks):
    """Answers every query with the same reason."""

    queries = QUERIES
    silent = True

    def __init__(self, why: str) -> None:
        self._why = Unavailable(why)

    def _read(self, wanted: tuple[Query, ...]) -> Readings:
        return {query.name: self._why for query in wanted}


class NvmlDevice(DriverDevice):
    """The NVML device that a CUDA device is.

    For a MIG instance NVML tells the memory; power, energy, clocks and temperature are the whole device's.
    """

    match: Match
    _part: Any

    def __init__(
        self, identity: DeviceIdentity, environ: Mapping[str, str] = os.environ, library: Library = LIBRARY
    ) -> None:
        self._identity, self._environ = identity, environ
        super().__init__(library, QUERIES)

    @property
    def part(self) -> Any:
        return self._part or self.handle

    def find_handle(self) -> Any:
        call = self.library.call
        devices, reasons = listed(call)
        try:
            self.match = match(self._identity, devices, self._environ)
        except NoReading as failure:
            raise NoReading("; ".join([failure.reason, *reasons])) from failure
        instance, device = self.match.instance, self.match.device
        self.shared_by = len(device.instances) if device.mig else 0
        self._part = call("nvmlDeviceGetHandleByUUID", instance) if instance else None
        return call("nvmlDeviceGetHandleByUUID", device.uuid)


def listed(call: Callable[..., Any]) -> tuple[list[ListedDevice], list[str]]:
    """All devices that NVML can describe, and the reasons for those that it cannot."""
    devices, reasons = [], []
    for index in range(call("nvmlDeviceGetCount")):
        try:
            devices.append(_listed(call, call("nvmlDeviceGetHandleByIndex", index)))
        except NoReading as failure:
            reasons.append(f"NVML's device {index}: {failure.reason}")
    return devices, reasons


def _listed(call: Callable[..., Any], handle: Any) -> ListedDevice:
    uuid = call("nvmlDeviceGetUUID", handle)
    # Without an address it may still be found by its UUID.
    pci = attempt(lambda: Reading(call("nvmlDeviceGetPciInfo", handle).busId, "", ""))
    address = str(pci.value) if isinstance(pci, Reading) else ""
    mig = _mig(call, handle)
    return ListedDevice(uuid, address, mig, tuple(_instances(call, handle)) if mig else ())


def _mig(call: Callable[..., Any], handle: Any) -> bool:
    """Whether the device is split. If that is unknown, it is unknown whose energy it would be."""
    try:
        return bool(call("nvmlDeviceGetMigMode", handle)[0])
    except NoReading as failure:
        if failure.code in (NOT_SUPPORTED, FUNCTION_NOT_FOUND):
            return False
        raise


def _instances(call: Callable[..., Any], handle: Any) -> list[str]:
    """UUIDs of the MIG instances; their numbers have gaps."""
    instances = []
    for number in range(call("nvmlDeviceGetMaxMigDeviceCount", handle)):
        try:
            instance = call("nvmlDeviceGetMigDeviceHandleByIndex", handle, number)
        except NoReading as failure:
            if failure.code == NOT_FOUND:
                continue
            raise
        instances.append(call("nvmlDeviceGetUUID", instance))
    return instances
