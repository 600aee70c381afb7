"""One NVIDIA device as NVML sees it: a handle, what it is, and how it is just now."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from fp8bench.measure.sensors.looks import DriverDevice, Looks, Query
from fp8bench.measure.sensors.nvml_match import DeviceIdentity, Instance, Listed, Match, match
from fp8bench.measure.sensors.nvml_queries import (
    FUNCTION_NOT_FOUND,
    LIBRARY,
    NOT_FOUND,
    NOT_SUPPORTED,
    QUERIES,
    Library,
)
from fp8bench.model.readings import NoReading, Reading, Readings, Unavailable, attempt


class AbsentDevice(Looks):
    """Answers every question that NVML would be asked with the same reason."""

    queries = QUERIES
    silent = True

    def __init__(self, why: str) -> None:
        self._why = Unavailable(why)

    def _read(self, wanted: tuple[Query, ...]) -> Readings:
        return {query.name: self._why for query in wanted}


class NvmlDevice(DriverDevice):
    """The device that a CUDA device is; the handle is fetched once.

    Of a MIG instance NVML knows the memory; power, energy, clocks and temperature are the whole device's.
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

    def found(self) -> Any:
        call = self.library.call
        devices, reasons = listed(call)
        try:
            self.match = match(self._identity, devices, self._environ)
        except NoReading as failure:
            raise NoReading("; ".join([failure.reason, *reasons])) from failure
        instance, device = self.match.instance, self.match.device
        self.shared_by = len(device.instances) if device.mig else 0
        self._part = call("nvmlDeviceGetHandleByUUID", instance.uuid) if instance else None
        return call("nvmlDeviceGetHandleByUUID", device.uuid)


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
