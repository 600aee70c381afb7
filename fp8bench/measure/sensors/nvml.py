"""Reads one NVIDIA device through NVML: its handle, facts and state, in SI units."""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar

from fp8bench.measure.sensors.driver import (
    DRIVER_CALL_TIMEOUT,
    CallLibraryFunction,
    DeviceValueQuery,
    NoAnswer,
    QuerySubject,
    ReadValue,
    T,
    call_with_timeout,
)
from fp8bench.measure.sensors.nvml_match import DeviceIdentity, ListedDevice, match_device
from fp8bench.model import consumed
from fp8bench.model.readings import (
    NoReading,
    Reading,
    ReadingOrUnavailable,
    Readings,
    UnavailableReading,
    read_first_available,
    require_positive,
    try_reading,
)

NOT_SUPPORTED = 3
NVML_NOT_FOUND = 6
FUNCTION_NOT_FOUND = 13

ERROR_REASONS: dict[int, str] = {
    1: "NVML is not initialised",
    2: "NVML refused the arguments",
    3: "this device or its driver does not support it",
    4: "this user has no permission",
    5: "NVML was already initialised",
    6: "NVML found no such object",
    7: "the buffer for NVML's answer was too small",
    8: "the GPU's external power is not connected",
    9: "the NVIDIA driver is not loaded",
    10: "NVML timed out",
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
    26: "this driver's NVML no longer has the function",
    27: "the GPU is not ready yet",
    28: "NVML finds no GPU",
    29: "the GPU is in a state that does not allow it",
    30: "this kind of reset is not supported",
    999: "an internal driver error",
}


def describe_error(code: int) -> str:
    return f"{ERROR_REASONS.get(code, 'an error that fp8bench does not know')} (NVML error {code})"


LIBRARY_NAME = "NVML"


class Library:
    """Calls NVML functions by their names, through pynvml. Failures raise NoReading.

    If a call hangs, `hung` has the reason and no further call is made. The driver may hold a lock for which the next
    call would wait.
    """

    def __init__(self, timeout: float = DRIVER_CALL_TIMEOUT) -> None:
        self.timeout = timeout
        self.hung = ""
        self._module: Any = None
        self._users = 0
        self._lock = threading.Lock()

    def open(self) -> None:
        with self._lock:
            if not self._users:  # the meters of several devices share the library
                self.call_within_timeout(self._initialise)
            self._users += 1

    def close(self) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                with suppress(NoReading):
                    self.call_within_timeout(lambda: self.call("nvmlShutdown"))

    def call(self, function: str, *arguments: Any) -> Any:
        """Calls an NVML function, which may hang: use it in `call_within_timeout` or in a daemon thread."""
        if self.hung:
            raise NoReading(self.hung)
        nvml_function = getattr(self._module, function, None)
        if nvml_function is None:
            raise NoReading(f"the installed nvidia-ml-py has no {function}: it is too old")
        try:
            return nvml_function(*arguments)
        except UnicodeDecodeError as error:
            raise NoReading(f"{function} did not answer with text") from error
        except Exception as error:
            if not isinstance(error, self._module.NVMLError):
                raise
            raise NoReading(describe_error(error.value), error.value) from error

    def call_within_timeout(self, function: Callable[[], T]) -> T:
        """Runs a function that calls NVML, and raises NoReading if it takes longer than the timeout."""
        if self.hung:
            raise NoReading(self.hung)
        try:
            return call_with_timeout(self.timeout, function, LIBRARY_NAME)
        except NoAnswer as failure:
            self.mark_library_hung(failure.reason)
            raise NoReading(self.hung) from failure

    def mark_library_hung(self, reason: str) -> None:
        self.hung = self.hung or f"{reason}, and is not called again"

    def _initialise(self) -> None:
        try:
            import pynvml
        except ImportError as error:
            raise NoReading("the package nvidia-ml-py is not installed") from error
        self._module = pynvml
        self.call("nvmlInitWithFlags", 0)


NVML_LIBRARY = Library()


_MEGA = 1e6
_MILLI = 1e-3
_NANO = 1e-9
_SM_CLOCK, _MEMORY_CLOCK = 1, 2
_CHIP_TEMPERATURE_SENSOR = 0
_INSTANT_POWER_FIELD = 186
_MEMORY_STRUCTURE_V2 = 0x02000028  # the version, and the size of 40 bytes


def read_nvml_field(ask: CallLibraryFunction, number: int) -> float:
    (value,) = ask("nvmlDeviceGetFieldValues", [number])
    if value.nvmlReturn:
        raise NoReading(describe_error(value.nvmlReturn))
    # The members of NVML's union of values, in the order of its value types.
    field_names = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
    if not 0 <= value.valueType < len(field_names):
        raise NoReading(f"NVML's field {number} has a type that fp8bench does not know ({value.valueType})")
    return float(getattr(value.value, field_names[value.valueType]))


def _make_reader(
    function: str, unit: str, *arguments: Any, of: Callable[[Any], Any] = lambda answer: answer
) -> ReadValue:
    return lambda ask: Reading(of(ask(function, *arguments)), unit, function)


def _make_positive_value_reader(function: str, factor: float, unit: str, *arguments: Any) -> ReadValue:
    return lambda ask: require_positive(ask(function, *arguments) * factor, unit, function)


def _make_fallback_reader(*reads: ReadValue) -> ReadValue:
    return lambda ask: read_first_available(*(partial(read, ask) for read in reads))


def _make_switch_reader(function: str, of: Callable[[Any], Any] = lambda answer: answer) -> ReadValue:
    return _make_reader(function, "", of=lambda answer: "on" if of(answer) else "off")


def _format_cuda_version(number: int) -> str:
    """Formats the newest CUDA version that the driver supports: 12080 is '12.8'."""
    return f"{number // 1000}.{number % 1000 // 10}"


# The name has the version suffix `_v3`: on an older driver, the function without a suffix raises an error that is not
# an NVMLError.
_PROCESSES_FUNCTION = "nvmlDeviceGetComputeRunningProcesses_v3"


def make_other_processes_query(pid: int) -> DeviceValueQuery:
    """Returns a query for the number of processes on the device, not counting `pid`. In a container the driver may
    list this process under a different number. So if no process has the number `pid`, one process is counted as this
    one.
    """

    def count_strangers(processes: Sequence[Any]) -> int:
        other_processes = [process for process in processes if process.pid != pid]
        return len(other_processes) - (0 < len(other_processes) == len(processes))

    return DeviceValueQuery(
        "others", _make_reader(_PROCESSES_FUNCTION, "", of=count_strangers), QuerySubject.MIG_INSTANCE
    )


def make_process_memory_query(pid: int) -> DeviceValueQuery:
    """Returns a query for the bytes that a process holds on the device, its context included."""
    return DeviceValueQuery(
        "process_memory", _make_reader(_PROCESSES_FUNCTION, "B", of=partial(_find_process_bytes, pid))
    )


def _find_process_bytes(pid: int, processes: Sequence[Any]) -> int:
    used_bytes = [process.usedGpuMemory for process in processes if process.pid == pid]
    if not used_bytes:
        raise NoReading(
            f"process {pid} is not among the {len(processes)} processes that NVML lists: it has no context on the GPU, "
            "or NVML lists it by its number outside of the container"
        )
    if not used_bytes[0]:
        raise NoReading("the driver does not report the memory of single processes")
    return int(used_bytes[0])


def _read_throttled_seconds(violation: consumed.ThrottlingLimit) -> ReadValue:
    """Returns a function that reads for how many seconds one limit has throttled the clocks since the driver was
    loaded. 0 means never, so unlike power or clocks this value may be 0.
    """
    if violation.field is not None:
        number = violation.field
        return lambda ask: Reading(read_nvml_field(ask, number) * _NANO, "s", f"field {number}")
    return _make_reader(
        "nvmlDeviceGetViolationStatus", "s", violation.policy, of=lambda status: status.violationTime * _NANO
    )


FACT_QUERIES: tuple[DeviceValueQuery, ...] = (
    DeviceValueQuery("driver", _make_reader("nvmlSystemGetDriverVersion", ""), QuerySubject.DRIVER),
    DeviceValueQuery(
        "cuda_driver", _make_reader("nvmlSystemGetCudaDriverVersion", "", of=_format_cuda_version), QuerySubject.DRIVER
    ),
    DeviceValueQuery("uuid", _make_reader("nvmlDeviceGetUUID", ""), QuerySubject.MIG_INSTANCE),
    DeviceValueQuery("pci", _make_reader("nvmlDeviceGetPciInfo", "", of=lambda info: info.busId)),
    DeviceValueQuery("vbios", _make_reader("nvmlDeviceGetVbiosVersion", "")),
    DeviceValueQuery("power_cap", _make_positive_value_reader("nvmlDeviceGetEnforcedPowerLimit", _MILLI, "W")),
    DeviceValueQuery(
        "power_cap_default", _make_positive_value_reader("nvmlDeviceGetPowerManagementDefaultLimit", _MILLI, "W")
    ),
    DeviceValueQuery("sm_clock_max", _make_positive_value_reader("nvmlDeviceGetMaxClockInfo", _MEGA, "Hz", _SM_CLOCK)),
    DeviceValueQuery(
        "memory_clock_max", _make_positive_value_reader("nvmlDeviceGetMaxClockInfo", _MEGA, "Hz", _MEMORY_CLOCK)
    ),
    DeviceValueQuery("persistence", _make_switch_reader("nvmlDeviceGetPersistenceMode")),
    DeviceValueQuery("ecc", _make_switch_reader("nvmlDeviceGetEccMode", lambda modes: modes[0])),
    DeviceValueQuery("mig", _make_switch_reader("nvmlDeviceGetMigMode", lambda modes: modes[0])),
)

# Joules since the driver was loaded. The counter changes once per period.
READ_TOTAL_ENERGY = _make_positive_value_reader("nvmlDeviceGetTotalEnergyConsumption", _MILLI, "J")
# NVML's power usage: on current devices the mean of the last second, on A100 and older devices the present power.
READ_AVERAGE_POWER = _make_positive_value_reader("nvmlDeviceGetPowerUsage", _MILLI, "W")


def instant_power(ask: CallLibraryFunction) -> Reading:
    return require_positive(
        read_nvml_field(ask, _INSTANT_POWER_FIELD) * _MILLI, "W", f"field {_INSTANT_POWER_FIELD} (instant)"
    )


# Values that are read within a window. Power is not among them, because the energy is measured.
IN_WINDOW_QUERIES: tuple[DeviceValueQuery, ...] = (
    DeviceValueQuery("sm_clock", _make_positive_value_reader("nvmlDeviceGetClockInfo", _MEGA, "Hz", _SM_CLOCK)),
    # Older drivers lack nvmlDeviceGetTemperatureV, and current ones deprecate nvmlDeviceGetTemperature.
    DeviceValueQuery("temperature", _make_fallback_reader(
        _make_reader("nvmlDeviceGetTemperatureV", "degC", _CHIP_TEMPERATURE_SENSOR),
        _make_reader("nvmlDeviceGetTemperature", "degC", _CHIP_TEMPERATURE_SENSOR),
    )),
    # A bit mask of throttle reasons; 0 if the clocks are not throttled.
    DeviceValueQuery("throttle", _make_fallback_reader(
        _make_reader("nvmlDeviceGetCurrentClocksEventReasons", "mask"),
        _make_reader("nvmlDeviceGetCurrentClocksThrottleReasons", "mask"),
    )),
)  # fmt: skip
DEVICE_STATE_QUERIES: tuple[DeviceValueQuery, ...] = (
    DeviceValueQuery("power", _make_fallback_reader(instant_power, READ_AVERAGE_POWER)),
    *IN_WINDOW_QUERIES,
    DeviceValueQuery("use", _make_reader("nvmlDeviceGetUtilizationRates", "share", of=lambda rates: rates.gpu / 100)),
    DeviceValueQuery(
        "memory_use", _make_reader("nvmlDeviceGetUtilizationRates", "share", of=lambda rates: rates.memory / 100)
    ),
    # Version 2 of NVML's memory structure reports the memory of the driver separately from used memory.
    DeviceValueQuery(
        "memory_used",
        _make_reader("nvmlDeviceGetMemoryInfo", "B", _MEMORY_STRUCTURE_V2, of=lambda memory: memory.used),
        QuerySubject.MIG_INSTANCE,
    ),
)
THROTTLE_QUERIES: tuple[DeviceValueQuery, ...] = tuple(
    DeviceValueQuery(violation.name, _read_throttled_seconds(violation)) for violation in consumed.VIOLATIONS
)


class DeviceReader(ABC):
    """Reads the values of a device other than its energy. Each value is a reading, or the reason why it is missing."""

    # The number of parts that the device is split into (MIG), which share power and clocks; 0 if it is not split.
    mig_instance_count: int = 0
    # True if the device reports neither clocks nor temperatures.
    has_no_sensors: ClassVar[bool] = False

    def facts(self) -> Readings:
        """Reads what is constant during a run: name, driver, limits, modes."""
        return self._read_queries(FACT_QUERIES)

    def power_limit(self) -> ReadingOrUnavailable:
        facts = self._read_queries(tuple(query for query in FACT_QUERIES if query.name == "power_cap"))
        return facts.get("power_cap", UnavailableReading("the device reports no power limit"))

    def state(self) -> Readings:
        return self._read_queries(DEVICE_STATE_QUERIES)

    def read_throttled_seconds(self) -> Readings:
        """Reads for how many seconds each limit has throttled the clocks since some fixed time. The caller takes the
        difference of two such readings by `readings.subtract_counters`.
        """
        return self._read_queries(THROTTLE_QUERIES)

    def process_memory(self, pid: int | None = None) -> ReadingOrUnavailable:
        """Reads the bytes that a process (by default this one) holds on the device, its context included."""
        memory_query = make_process_memory_query(os.getpid() if pid is None else pid)
        return self._read_queries((memory_query,))[memory_query.name]

    def count_other_processes(self, pid: int) -> ReadingOrUnavailable:
        """Reads how many processes other than `pid` use the device."""
        process_count_query = make_other_processes_query(pid)
        return self._read_queries((process_count_query,))[process_count_query.name]

    def read_changing_state(self) -> Readings:
        """Reads the state that may change every second: clocks, temperature, throttle reasons."""
        return self._read_queries(IN_WINDOW_QUERIES)

    def read_in_this_thread(self) -> Readings:
        """Reads the same values as `read_changing_state`, but in the calling thread, which may then hang."""
        return self._read_queries(IN_WINDOW_QUERIES)

    def close(self) -> None: ...

    @abstractmethod
    def _read_queries(self, queries: tuple[DeviceValueQuery, ...]) -> Readings: ...


class AbsentDevice(DeviceReader):
    """A device that cannot be read: every query has the same reason in place of a value."""

    has_no_sensors = True

    def __init__(self, reason: str) -> None:
        self._why = UnavailableReading(reason)

    def _read_queries(self, queries: tuple[DeviceValueQuery, ...]) -> Readings:
        return {query.name: self._why for query in queries}


class NvmlDevice(DeviceReader):
    """Reads the NVML device that belongs to a CUDA device. NVML stays initialised until `close`. Several calls together
    take no longer than the library's timeout. Each value may fail separately. A MIG instance (a part of a device) has a
    separate figure for memory. The power, energy, clocks and temperature of an instance are those of the whole device.
    """

    def __init__(self, identity: DeviceIdentity, library: Library = NVML_LIBRARY) -> None:
        """Raises NoReading if the library does not work or does not list the device."""
        self._identity, self._library = identity, library
        library.open()
        try:
            self._handle, self._part = library.call_within_timeout(self._find_nvml_handles)
        except NoReading:
            library.close()
            raise

    def _find_nvml_handles(self) -> tuple[Any, Any]:
        """Returns the NVML handles of the device and of its MIG instance in use. Without MIG, both are the handle of
        the device.
        """
        call = self._library.call
        devices, reasons = list_devices(call)
        try:
            device, instance = match_device(self._identity, devices)
        except NoReading as failure:
            raise NoReading("; ".join([failure.reason, *reasons])) from failure
        self.mig_instance_count = len(device.instances) if device.is_split_by_mig else 0
        nvml_device_handle = call("nvmlDeviceGetHandleByUUID", device.uuid)
        return nvml_device_handle, call("nvmlDeviceGetHandleByUUID", instance) if instance else nvml_device_handle

    def close(self) -> None:
        self._library.close()

    def read_in_this_thread(self) -> Readings:
        return {query.name: self._try_device_query(query) for query in IN_WINDOW_QUERIES}

    def ask(self, function: str, *arguments: Any) -> Any:
        return self._library.call(function, self._handle, *arguments)

    def _try_device_query(self, query: DeviceValueQuery) -> ReadingOrUnavailable:
        handle_arguments_by_subject = {
            QuerySubject.DRIVER: (),
            QuerySubject.DEVICE: (self._handle,),
            QuerySubject.MIG_INSTANCE: (self._part,),
        }
        subject_handles = handle_arguments_by_subject[query.subject]
        return try_reading(
            lambda: query.read(lambda function, *arguments: self._library.call(function, *subject_handles, *arguments))
        )

    def _read_queries(self, queries: tuple[DeviceValueQuery, ...]) -> Readings:
        readings_by_name: dict[str, ReadingOrUnavailable] = {}

        def run_all_queries() -> None:
            for query in queries:
                readings_by_name[query.name] = self._try_device_query(query)

        try:
            self._library.call_within_timeout(run_all_queries)
        except NoReading as failure:
            # Values that were read before the library hung remain valid.
            unavailable_reading = UnavailableReading(failure.reason)
            return {query.name: readings_by_name.get(query.name, unavailable_reading) for query in queries}
        return readings_by_name


def list_devices(call: Callable[..., Any]) -> tuple[list[ListedDevice], list[str]]:
    """Returns all devices that NVML can describe, and the reasons for those that it cannot."""
    devices, reasons = [], []
    for index in range(call("nvmlDeviceGetCount")):
        try:
            devices.append(_describe_device(call, call("nvmlDeviceGetHandleByIndex", index)))
        except NoReading as failure:
            reasons.append(f"NVML's device {index}: {failure.reason}")
    return devices, reasons


def _describe_device(call: Callable[..., Any], handle: Any) -> ListedDevice:
    uuid = call("nvmlDeviceGetUUID", handle)
    # If the address cannot be read, the device can still be matched by its UUID.
    pci_address_reading = try_reading(lambda: Reading(call("nvmlDeviceGetPciInfo", handle).busId, "", ""))
    address = str(pci_address_reading.value) if isinstance(pci_address_reading, Reading) else ""
    is_split_by_mig = _is_split_by_mig(call, handle)
    return ListedDevice(
        uuid, address, is_split_by_mig, tuple(_list_mig_instances(call, handle)) if is_split_by_mig else ()
    )


def _is_split_by_mig(call: Callable[..., Any], handle: Any) -> bool:
    """Returns whether the device is split by MIG. False if the device or its driver does not support MIG. Raises
    NoReading if it is unknown for another reason.
    """
    try:
        return bool(call("nvmlDeviceGetMigMode", handle)[0])
    except NoReading as failure:
        if failure.code in (NOT_SUPPORTED, FUNCTION_NOT_FOUND):
            return False
        raise


def _list_mig_instances(call: Callable[..., Any], handle: Any) -> list[str]:
    """Returns the UUIDs of the MIG instances. Instance numbers that are not in use are skipped."""
    uuids = []
    for number in range(call("nvmlDeviceGetMaxMigDeviceCount", handle)):
        try:
            instance_handle = call("nvmlDeviceGetMigDeviceHandleByIndex", handle, number)
        except NoReading as failure:
            if failure.code == NVML_NOT_FOUND:
                continue
            raise
        uuids.append(call("nvmlDeviceGetUUID", instance_handle))
    return uuids
