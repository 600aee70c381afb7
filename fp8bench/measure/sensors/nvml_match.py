"""Finds the NVML device of a CUDA device.

NVML counts devices in PCI order and sees all of them; CUDA counts those in CUDA_VISIBLE_DEVICES, in a different order.
So an index is not enough: devices are matched by UUID, then by PCI address.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fp8bench.model.readings import NoReading


@dataclass(frozen=True)
class DeviceIdentity:
    """Identity of a CUDA device: its UUID and PCI address ('' if unknown).

    The UUID may lack NVML's 'GPU-' or 'MIG-', as torch's does. The address is domain:bus:device in hexadecimal.
    """

    uuid: str = ""
    pci: str = ""


@dataclass(frozen=True)
class ListedDevice:
    """A device as NVML lists it; `instances` are the UUIDs of its MIG instances."""

    uuid: str
    pci: str
    mig: bool = False
    instances: tuple[str, ...] = ()


def match(identity: DeviceIdentity, devices: Sequence[ListedDevice]) -> tuple[ListedDevice, str | None]:
    """Returns the device, and the UUID of its MIG instance; None without MIG, and where it is unclear."""
    uuid, address = _digits(identity.uuid), address_of(identity.pci)
    for device in devices:
        for instance in device.instances:
            if uuid and _digits(instance) == uuid:
                return device, instance
    matching = next((device for device in devices if uuid and _digits(device.uuid) == uuid), None)
    matching = matching or next((device for device in devices if address and address_of(device.pci) == address), None)
    if matching is None:
        raise NoReading(f"NVML lists no device with UUID {identity.uuid or '?'} or PCI address {identity.pci or '?'}")
    return matching, matching.instances[0] if len(matching.instances) == 1 else None


def _digits(uuid: str) -> str:
    """A UUID without its prefix; '' for none and for the zeros that virtual devices have."""
    plain = uuid.strip().lower().removeprefix("gpu-").removeprefix("mig-")
    return plain if plain.strip("0-") else ""


def address_of(pci: str) -> tuple[int, ...] | None:
    """Domain, bus and device, without the function behind a dot; None for anything else."""
    parts = pci.partition(".")[0].split(":")
    try:
        numbers = [int(part, 16) for part in parts]
    except ValueError:
        return None
    return tuple([0, *numbers][-3:]) if len(numbers) in (2, 3) else None
