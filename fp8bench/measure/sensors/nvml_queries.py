"""What is asked of a device: a name for each value, its unit, and the NVML functions that know it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from fp8bench.measure.sensors.nvml_library import reason
from fp8bench.model import consumed
from fp8bench.model.readings import NoReading, Reading, first_of, positive

# A call of pynvml about one device: the function's name, then the arguments behind the handle.
Ask = Callable[..., Any]

_MEGA = 1e6
_MILLI = 1e-3
_NANO = 1e-9
_SM, _MEMORY_CLOCK = 1, 2
_CHIP = 0
_POWER_INSTANT = 186
_MEMORY_V2 = 0x02000028


class About(Enum):
    """What a value is about: the driver, the whole device, or a MIG instance of it where there is one."""

    SYSTEM = auto()
    DEVICE = auto()
    PART = auto()


@dataclass(frozen=True)
class Query:
    """One value."""

    name: str
    read: Callable[[Ask], Reading]
    about: About = About.DEVICE


def energy(ask: Ask) -> Reading:
    """What the device has taken since its driver was loaded, in steps of the counter's period."""
    return positive(ask(ENERGY) * _MILLI, "J", ENERGY)


def instant_power(ask: Ask) -> Reading:
    """The power just now."""
    return positive(field(ask, _POWER_INSTANT) * _MILLI, "W", f"field {_POWER_INSTANT} (instant)")


def average_power(ask: Ask) -> Reading:
    """The power over the last second on current devices; just now on A100 and older."""
    return positive(ask("nvmlDeviceGetPowerUsage") * _MILLI, "W", "nvmlDeviceGetPowerUsage")


def throttle(ask: Ask) -> Reading:
    """The mask of reasons; 0 is no reason."""
    return first_of(
        lambda: _plain("nvmlDeviceGetCurrentClocksEventReasons", "mask")(ask),
        lambda: _plain("nvmlDeviceGetCurrentClocksThrottleReasons", "mask")(ask),
    )


def field(ask: Ask, number: int) -> float:
    """One value of nvmlDeviceGetFieldValues, which fails by itself."""
    (value,) = ask("nvmlDeviceGetFieldValues", [number])
    if value.nvmlReturn:
        raise NoReading(reason(value.nvmlReturn))
    kinds = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
    if not 0 <= value.valueType < len(kinds):
        raise NoReading(f"field {number} is of a type that fp8bench does not know ({value.valueType})")
    return float(getattr(value.value, kinds[value.valueType]))


ENERGY = "nvmlDeviceGetTotalEnergyConsumption"


def _plain(function: str, unit: str, *arguments: Any) -> Callable[[Ask], Reading]:
    """A value as NVML says it."""
    return lambda ask: Reading(ask(function, *arguments), unit, function)


def _scaled(function: str, factor: float, unit: str, *arguments: Any) -> Callable[[Ask], Reading]:
    """A quantity that is never 0, in our unit."""
    return lambda ask: positive(ask(function, *arguments) * factor, unit, function)


def _switch(function: str, read: Callable[[Any], Any] = lambda answer: answer) -> Callable[[Ask], Reading]:
    """'on' or 'off'."""
    return lambda ask: Reading("on" if read(ask(function)) else "off", "", function)


def _cuda_driver(ask: Ask) -> Reading:
    """The newest CUDA that the driver knows: 12080 is '12.8'."""
    function = "nvmlSystemGetCudaDriverVersion"
    major, minor = divmod(ask(function), 1000)
    return Reading(f"{major}.{minor // 10}", "", function)


def _temperature(ask: Ask) -> Reading:
    """Of the chip; the older function is to go."""
    return first_of(
        lambda: _plain("nvmlDeviceGetTemperatureV", "degC", _CHIP)(ask),
        lambda: _plain("nvmlDeviceGetTemperature", "degC", _CHIP)(ask),
    )


def _pci(ask: Ask) -> Reading:
    return Reading(ask("nvmlDeviceGetPciInfo").busId, "", "nvmlDeviceGetPciInfo")


def _share(part: str) -> Callable[[Ask], Reading]:
    function = "nvmlDeviceGetUtilizationRates"
    return lambda ask: Reading(getattr(ask(function), part) / 100, "share", function)


def _memory(part: str) -> Callable[[Ask], Reading]:
    """The device's memory: the newer function tells what the driver keeps for itself apart, the older counts it in."""
    old, new = "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMemoryInfo_v2"
    return lambda ask: first_of(
        lambda: Reading(getattr(ask(old, _MEMORY_V2), part), "B", new),
        lambda: Reading(getattr(ask(old), part), "B", old),
    )


def process_memory(pid: int) -> Query:
    """What a process holds on the device, its context included.

    Not by pynvml's function without a version: where the driver lacks the newest one it raises what is no NVMLError.
    """
    newest, older = "nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetComputeRunningProcesses_v2"
    return Query(
        "process_memory",
        lambda ask: first_of(
            lambda: _memory_of(pid, ask(newest), newest),
            lambda: _memory_of(pid, ask(older), older),
        ),
    )


def _memory_of(pid: int, processes: Sequence[Any], function: str) -> Reading:
    used = [process.usedGpuMemory for process in processes if process.pid == pid]
    if not used:
        raise NoReading(
            f"process {pid} is not among the {len(processes)} that NVML lists: it has no context there, or another "
            "number outside its container"
        )
    if not used[0]:
        raise NoReading("the driver does not report the memory of single processes")
    return Reading(used[0], "B", function)


def _violation(one: consumed.Violation) -> Callable[[Ask], Reading]:
    """Seconds since the driver was loaded; 0 is a count."""
    if one.field is not None:
        number = one.field
        return lambda ask: Reading(field(ask, number) * _NANO, "s", f"field {number}")
    function = "nvmlDeviceGetViolationStatus"
    return lambda ask: Reading(ask(function, one.policy).violationTime * _NANO, "s", function)


FACTS: tuple[Query, ...] = (
    Query("driver", _plain("nvmlSystemGetDriverVersion", ""), About.SYSTEM),
    Query("cuda_driver", _cuda_driver, About.SYSTEM),
    Query("name", _plain("nvmlDeviceGetName", ""), About.PART),
    Query("uuid", _plain("nvmlDeviceGetUUID", ""), About.PART),
    Query("pci", _pci),
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

POWER = Query("power", lambda ask: first_of(lambda: instant_power(ask), lambda: average_power(ask)))
SM_CLOCK = Query("sm_clock", _scaled("nvmlDeviceGetClockInfo", _MEGA, "Hz", _SM))
MEMORY_CLOCK = Query("memory_clock", _scaled("nvmlDeviceGetClockInfo", _MEGA, "Hz", _MEMORY_CLOCK))
TEMPERATURE = Query("temperature", _temperature)
THROTTLE = Query("throttle", throttle)

STATE: tuple[Query, ...] = (
    POWER,
    SM_CLOCK,
    MEMORY_CLOCK,
    TEMPERATURE,
    THROTTLE,
    Query("use", _share("gpu")),
    Query("memory_use", _share("memory")),
    Query("memory_used", _memory("used"), About.PART),
)
# What is looked at now and then within a window. Not the power: the energy is measured anyway.
RESTLESS: tuple[Query, ...] = (SM_CLOCK, MEMORY_CLOCK, TEMPERATURE, THROTTLE)
VIOLATIONS: tuple[Query, ...] = tuple(Query(one.name, _violation(one)) for one in consumed.VIOLATIONS)
