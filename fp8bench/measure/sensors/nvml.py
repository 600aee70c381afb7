"""One NVIDIA device as NVML sees it: a handle, what it is, and how it is just now.

Every bundle of calls is waited for no longer than the timeout, and each value comes or fails by itself.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from fp8bench.measure.sensors import nvml_queries as queries
from fp8bench.measure.sensors.nvml_library import FUNCTION_NOT_FOUND, LIBRARY, NOT_FOUND, NOT_SUPPORTED, Library
from fp8bench.measure.sensors.nvml_match import Identity, Instance, Listed, Match, match
from fp8bench.measure.sensors.nvml_queries import About, Query
from fp8bench.model.readings import NoReading, Read, Reading, Readings, Unavailable, attempt


class Looks(ABC):
    """What can be asked of a device beside its energy; each value comes, or says why it does not."""

    def facts(self) -> Readings:
        """What does not change while a run lasts: name, driver, limits, modes."""
        return self._read(queries.FACTS)

    def state(self) -> Readings:
        """How it is just now: power, clocks, temperature, throttle reasons, use, memory."""
        return self._read(queries.STATE)

    def violations(self) -> Readings:
        """For how long each limit has held the clocks back so far; `readings.grown` gives the time in between."""
        return self._read(queries.VIOLATIONS)

    def process_memory(self, pid: int | None = None) -> Read:
        """What a process holds on the device, its context included; this one's by default."""
        query = queries.process_memory(os.getpid() if pid is None else pid)
        return self._read((query,))[query.name]

    def glance(self) -> Readings:
        """What may change from one second to the next: clocks, temperature, throttle reasons."""
        return self._read(queries.CHANGING)

    def changing(self) -> Readings:
        """The same, read in the calling thread, which must be one that may hang."""
        return self._read(queries.CHANGING)

    def close(self) -> None:
        """Lets the device go."""

    @abstractmethod
    def _read(self, wanted: tuple[Query, ...]) -> Readings: ...


class AbsentDevice(Looks):
    """Answers every question with the same reason."""

    def __init__(self, why: str) -> None:
        self._why = Unavailable(why)

    def _read(self, wanted: tuple[Query, ...]) -> Readings:
        return {query.name: self._why for query in wanted}


class NvmlDevice(Looks):
    """The device that a CUDA device is. NVML stays initialised until `close`; the handle is fetched once.

    Of a MIG instance NVML knows the memory; power, energy, clocks and temperature are the whole device's.
    """

    def __init__(self, identity: Identity, environ: Mapping[str, str] = os.environ, library: Library = LIBRARY) -> None:
        """Raises NoReading where NVML does not work or does not know the device."""
        self.library = library
        library.open()
        try:
            self.match, self.handle, self._part = library.bounded(lambda: self._find(identity, environ))
        except NoReading:
            library.close()
            raise

    def close(self) -> None:
        self.library.close()

    def changing(self) -> Readings:
        return {query.name: self._attempt(query) for query in queries.CHANGING}

    @property
    def shared_by(self) -> int:
        """How many MIG instances share the device, and with it its power; 0 without MIG."""
        return len(self.match.device.instances) if self.match.device.mig else 0

    def ask(self, function: str, *arguments: Any) -> Any:
        """A call about the whole device, unbounded: it may hang."""
        return self.library.call(function, self.handle, *arguments)

    def _attempt(self, query: Query) -> Read:
        """One value, in the calling thread."""
        handles = {About.SYSTEM: (), About.DEVICE: (self.handle,), About.PART: (self._part or self.handle,)}
        handle = handles[query.about]
        return attempt(lambda: query.read(lambda function, *rest: self.library.call(function, *handle, *rest)))

    def _read(self, wanted: tuple[Query, ...]) -> Readings:
        done: dict[str, Read] = {}

        def body() -> None:
            for query in wanted:
                done[query.name] = self._attempt(query)

        try:
            self.library.bounded(body)
        except NoReading as failure:
            why = Unavailable(failure.reason)
            return {query.name: done.get(query.name, why) for query in wanted}
        return done

    def _find(self, identity: Identity, environ: Mapping[str, str]) -> tuple[Match, Any, Any]:
        """The match, its handle, and that of its MIG instance."""
        devices, reasons = listed(self.library.call)
        try:
            found = match(identity, devices, environ)
        except NoReading as failure:
            raise NoReading("; ".join([failure.reason, *reasons])) from failure
        handle = self.library.call("nvmlDeviceGetHandleByUUID", found.device.uuid)
        part = self.library.call("nvmlDeviceGetHandleByUUID", found.instance.uuid) if found.instance else None
        return found, handle, part


def listed(call: Callable[..., Any]) -> tuple[list[Listed], list[str]]:
    """All devices that NVML can describe, and why others are none of them.

    One that is lost, or that this user may not see, does not hide the others.
    """
    devices, reasons = [], []
    for index in range(call("nvmlDeviceGetCount")):
        try:
            devices.append(_listed(call, call("nvmlDeviceGetHandleByIndex", index)))
        except NoReading as failure:
            reasons.append(f"NVML's device {index}: {failure.reason}")
    return devices, reasons


def _listed(call: Callable[..., Any], handle: Any) -> Listed:
    uuid = call("nvmlDeviceGetUUID", handle)
    # Without an address it may still be found by its UUID.
    pci = attempt(lambda: Reading(call("nvmlDeviceGetPciInfo", handle).busId, "", ""))
    address = str(pci.value) if isinstance(pci, Reading) else ""
    mig = _mig(call, handle)
    return Listed(uuid, address, mig, tuple(_instances(call, handle)) if mig else ())


def _mig(call: Callable[..., Any], handle: Any) -> bool:
    """Whether the device is split. Who does not know that does not know whose energy it would be."""
    try:
        return bool(call("nvmlDeviceGetMigMode", handle)[0])
    except NoReading as failure:
        if failure.code in (NOT_SUPPORTED, FUNCTION_NOT_FOUND):
            return False
        raise


def _instances(call: Callable[..., Any], handle: Any) -> list[Instance]:
    """The MIG instances that are there; their numbers have gaps."""
    found = []
    for number in range(call("nvmlDeviceGetMaxMigDeviceCount", handle)):
        try:
            one = call("nvmlDeviceGetMigDeviceHandleByIndex", handle, number)
        except NoReading as failure:
            if failure.code == NOT_FOUND:
                continue
            raise
        names = ("nvmlDeviceGetUUID", "nvmlDeviceGetGpuInstanceId", "nvmlDeviceGetComputeInstanceId")
        found.append(Instance(*(call(name, one) for name in names)))
    return found
