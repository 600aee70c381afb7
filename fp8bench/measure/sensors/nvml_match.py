"""Finds the NVML device that belongs to a CUDA device.

NVML lists all devices in PCI order. CUDA lists those in CUDA_VISIBLE_DEVICES, in a different order. So indices do not
match, and devices are matched by UUID, then by PCI address.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fp8bench.model.readings import NoReading


@dataclass(frozen=True)
class DeviceIdentity:
    """The UUID and PCI address of a CUDA device ('' if unknown).

    The UUID may lack NVML's prefix 'GPU-' or 'MIG-', as torch's does. The address is domain:bus:device in
    hexadecimal.
    """

    uuid: str = ""
    pci_address: str = ""


@dataclass(frozen=True)
class ListedDevice:
    """A device as NVML lists it. `instances` are the UUIDs of its MIG instances."""

    uuid: str
    pci_address: str
    is_split_by_mig: bool = False
    instances: tuple[str, ...] = ()


def match_device(identity: DeviceIdentity, devices: Sequence[ListedDevice]) -> tuple[ListedDevice, str | None]:
    """Returns the matching NVML device, and the UUID of the MIG instance in use. Raises NoReading if no device
    matches.

    The instance is None without MIG, and if it is unclear which instance is used.
    """
    uuid, address = _strip_prefix(identity.uuid), parse_pci_address(identity.pci_address)
    # The UUID from CUDA may be that of a MIG instance.
    for device in devices:
        for instance in device.instances:
            if uuid and _strip_prefix(instance) == uuid:
                return device, instance
    matching_device = next((device for device in devices if uuid and _strip_prefix(device.uuid) == uuid), None)
    matching_device = matching_device or next(
        (device for device in devices if address and parse_pci_address(device.pci_address) == address), None
    )
    if matching_device is None:
        raise NoReading(
            f"NVML lists no device with UUID {identity.uuid or '?'} or PCI address {identity.pci_address or '?'}"
        )
    return matching_device, matching_device.instances[0] if len(matching_device.instances) == 1 else None


def _strip_prefix(uuid: str) -> str:
    """Returns a UUID without its prefix, in lower case; '' if it is empty or all zeros, as in virtual devices."""
    uuid_digits = uuid.strip().lower().removeprefix("gpu-").removeprefix("mig-")
    return uuid_digits if uuid_digits.strip("0-") else ""


def parse_pci_address(pci_address: str) -> tuple[int, ...] | None:
    """Parses a PCI address into domain, bus and device, without the function after the dot. Returns None if it is
    invalid.
    """
    parts = pci_address.partition(".")[0].split(":")
    try:
        numbers = [int(part, 16) for part in parts]
    except ValueError:
        return None
    return tuple([0, *numbers][-3:]) if len(numbers) in (2, 3) else None  # a missing domain is 0
