"""One NVIDIA device as NVML sees it: its handle, facts and state; and NVML's queries in our units."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from fp8bench.measure.sensors.driver import (
    TIMEOUT,
    About,
    Ask,
    Looks,
    NoAnswer,
    Queries,
    Query,
    T,
    Way,
    within,
)
from fp8bench.measure.sensors.nvml_match import DeviceIdentity, ListedDevice, match
from fp8bench.model import consumed
from fp8bench.model.readings import NoReading, Read, Reading, Readings, Unavailable, attempt, first_of, positive

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
    12: "the NVML library (libnvidia-ml.so.1) is missing: no NVIDIA driver here",
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


NAME = "NVML"


class Library:
    """NVML's functions by name, by pynvml; failures become NoReading.

    `hung` is why no more calls are made: a driver that has swallowed one call may hold a lock that the next one waits
    for, so the first call without an answer is the last one.
    """

    def __init__(self, timeout: float = TIMEOUT) -> None:
        self.timeout = timeout
        self.hung = ""
        self._module: Any = None
        self._users = 0
        self._lock = threading.Lock()

    def open(self) -> None:
        with self._lock:
            if not self._users:
                self.within_timeout(self._initialise)
            self._users += 1

    def close(self) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                with suppress(NoReading):
                    self.within_timeout(lambda: self.call("nvmlShutdown"))

    def call(self, function: str, *arguments: Any) -> Any:
        """Calls the package's function, which may hang: use it within `within_timeout` or a daemon thread."""
        if self.hung:
            raise NoReading(self.hung)
        named = getattr(self._module, function, None)
        if named is None:
            raise NoReading(f"the installed nvidia-ml-py has no {function}: it is too old")
        try:
            return named(*arguments)
        except UnicodeDecodeError as error:
            raise NoReading(f"{function} did not answer with text") from error
        except Exception as error:
            if not isinstance(error, self._module.NVMLError):
                raise
            raise NoReading(reason(error.value), error.value) from error

    def within_timeout(self, function: Callable[[], T]) -> T:
        """Runs a function that calls the library, and waits no longer than the timeout. Raises NoReading."""
        if self.hung:
            raise NoReading(self.hung)
        try:
            return within(self.timeout, function, NAME)
        except NoAnswer as failure:
            self.give_up(failure.reason)
            raise NoReading(self.hung) from failure

    def give_up(self, reason: str) -> None:
        self.hung = self.hung or f"{reason}, and is left alone since"

    def _initialise(self) -> None:
        try:
            import pynvml
        except ImportError as error:
            raise NoReading("the package nvidia-ml-py is not installed") from error
        self._module = pynvml
        self.call("nvmlInitWithFlags", 0)


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


def _scale_to(function: str, factor: float, unit: str, *arguments: Any) -> Way:
    return lambda ask: positive(ask(function, *arguments) * factor, unit, function)


def _first_of(*reads: Way) -> Way:
    return lambda ask: first_of(*(partial(read, ask) for read in reads))


def _switch(function: str, of: Callable[[Any], Any] = lambda answer: answer) -> Way:
    return _plain(function, "", of=lambda answer: "on" if of(answer) else "off")


def _version(number: int) -> str:
    """The newest CUDA that the driver supports: 12080 is '12.8'."""
    return f"{number // 1000}.{number % 1000 // 10}"


# On an older driver the function without a version raises something other than an NVMLError.
_PROCESSES = "nvmlDeviceGetComputeRunningProcesses_v3"


def others(pid: int) -> Query:
    """How many processes but `pid` are there.

    In a container a driver may list this process under another number: then one of the listed ones is it.
    """

    def count(processes: Sequence[Any]) -> int:
        strangers = [process for process in processes if process.pid != pid]
        return len(strangers) - (0 < len(strangers) == len(processes))

    return Query("others", _plain(_PROCESSES, "", of=count), About.PART)


def process_memory(pid: int) -> Query:
    """A process's memory on the device, its context included."""
    return Query("process_memory", _plain(_PROCESSES, "B", of=partial(_memory_of, pid)))


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
    Query("uuid", _plain("nvmlDeviceGetUUID", ""), About.PART),
    Query("pci", _plain("nvmlDeviceGetPciInfo", "", of=lambda info: info.busId)),
    Query("vbios", _plain("nvmlDeviceGetVbiosVersion", "")),
    Query("power_cap", _scale_to("nvmlDeviceGetEnforcedPowerLimit", _MILLI, "W")),
    Query("power_cap_default", _scale_to("nvmlDeviceGetPowerManagementDefaultLimit", _MILLI, "W")),
    Query("sm_clock_max", _scale_to("nvmlDeviceGetMaxClockInfo", _MEGA, "Hz", _SM)),
    Query("memory_clock_max", _scale_to("nvmlDeviceGetMaxClockInfo", _MEGA, "Hz", _MEMORY_CLOCK)),
    Query("persistence", _switch("nvmlDeviceGetPersistenceMode")),
    Query("ecc", _switch("nvmlDeviceGetEccMode", lambda modes: modes[0])),
    Query("mig", _switch("nvmlDeviceGetMigMode", lambda modes: modes[0])),
)

# Since the driver was loaded, in steps of the counter's period.
ENERGY = _scale_to("nvmlDeviceGetTotalEnergyConsumption", _MILLI, "J")
# The mean of the last second on current devices; the present power on A100 and older.
AVERAGE_POWER = _scale_to("nvmlDeviceGetPowerUsage", _MILLI, "W")


def instant_power(ask: Ask) -> Reading:
    return positive(field(ask, _POWER_INSTANT) * _MILLI, "W", f"field {_POWER_INSTANT} (instant)")


# Sampled within a window. Not the power: the energy is measured anyway.
CHANGING: tuple[Query, ...] = (
    Query("sm_clock", _scale_to("nvmlDeviceGetClockInfo", _MEGA, "Hz", _SM)),
    # Temperature of the chip; NVML is to drop the older function.
    Query("temperature", _first_of(
        _plain("nvmlDeviceGetTemperatureV", "degC", _CHIP), _plain("nvmlDeviceGetTemperature", "degC", _CHIP)
    )),
    # A mask of reasons, 0 without one.
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
    # The version that reports the driver's own memory separately.
    Query("memory_used", _plain("nvmlDeviceGetMemoryInfo", "B", _MEMORY_V2, of=lambda memory: memory.used), About.PART),
)
VIOLATIONS: tuple[Query, ...] = tuple(Query(violation.name, _violation(violation)) for violation in consumed.VIOLATIONS)
QUERIES = Queries(FACTS, STATE, CHANGING, VIOLATIONS, process_memory, others)


class AbsentDevice(Looks):
    """Answers every query with the same reason."""

    queries = QUERIES
    silent = True

    def __init__(self, reason: str) -> None:
        self._why = Unavailable(reason)

    def _read(self, queries: tuple[Query, ...]) -> Readings:
        return {query.name: self._why for query in queries}


class NvmlDevice(Looks):
    """The NVML device that a CUDA device is. NVML stays initialised until `close`.

    A bundle of calls is waited for no longer than the library's timeout; each value comes or fails by itself. For a MIG
    instance NVML reports the memory; power, energy, clocks and temperature are the whole device's.
    """

    def __init__(self, identity: DeviceIdentity, library: Library = LIBRARY) -> None:
        """Raises NoReading where the library does not work or does not know the device."""
        self._identity, self._library, self.queries = identity, library, QUERIES
        library.open()
        try:
            self._handle, self._part = library.within_timeout(self._find_handles)
        except NoReading:
            library.close()
            raise

    def _find_handles(self) -> tuple[Any, Any]:
        """Returns the handles of the device, and of its MIG instance that is used; twice its own where undivided."""
        call = self._library.call
        devices, reasons = list_devices(call)
        try:
            device, instance = match(self._identity, devices)
        except NoReading as failure:
            raise NoReading("; ".join([failure.reason, *reasons])) from failure
        self.shared_by = len(device.instances) if device.mig else 0
        handle = call("nvmlDeviceGetHandleByUUID", device.uuid)
        return handle, call("nvmlDeviceGetHandleByUUID", instance) if instance else handle

    def close(self) -> None:
        self._library.close()

    def changing(self) -> Readings:
        return {query.name: self._attempt(query) for query in self.queries.changing}

    def ask(self, function: str, *arguments: Any) -> Any:
        return self._library.call(function, self._handle, *arguments)

    def _attempt(self, query: Query) -> Read:
        handles = {About.SYSTEM: (), About.DEVICE: (self._handle,), About.PART: (self._part,)}
        handle = handles[query.about]
        return attempt(
            lambda: query.read(lambda function, *arguments: self._library.call(function, *handle, *arguments))
        )

    def _read(self, queries: tuple[Query, ...]) -> Readings:
        done: dict[str, Read] = {}

        def body() -> None:
            for query in queries:
                done[query.name] = self._attempt(query)

        try:
            self._library.within_timeout(body)
        except NoReading as failure:
            unavailable = Unavailable(failure.reason)
            return {query.name: done.get(query.name, unavailable) for query in queries}
        return done


def list_devices(call: Callable[..., Any]) -> tuple[list[ListedDevice], list[str]]:
    """All devices that NVML can describe, and the reasons for those that it cannot."""
    devices, reasons = [], []
    for index in range(call("nvmlDeviceGetCount")):
        try:
            devices.append(_describe_device(call, call("nvmlDeviceGetHandleByIndex", index)))
        except NoReading as failure:
            reasons.append(f"NVML's device {index}: {failure.reason}")
    return devices, reasons


def _describe_device(call: Callable[..., Any], handle: Any) -> ListedDevice:
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
