"""Which of NVML's devices a CUDA device is.

NVML counts devices in PCI order and sees all of them; CUDA counts what CUDA_VISIBLE_DEVICES leaves, in an order of its
own. So an index says nothing: devices are matched by UUID, then by PCI address, then by what CUDA_VISIBLE_DEVICES
names, and where none of these decides, there is no match.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fp8bench.model.readings import NoReading

VISIBLE = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"


@dataclass(frozen=True)
class DeviceIdentity:
    """What is known of a CUDA device: its index among the visible ones, UUID and PCI address ('' if unknown).

    The UUID may lack NVML's 'GPU-' or 'MIG-', as torch's does. The address is domain:bus:device in hexadecimal.
    """

    index: int = 0
    uuid: str = ""
    pci: str = ""


@dataclass(frozen=True)
class ListedDevice:
    """A device as NVML lists it; `instances` are the UUIDs of its MIG instances."""

    uuid: str
    pci: str
    mig: bool = False
    instances: tuple[str, ...] = ()


@dataclass(frozen=True)
class Match:
    """The device, and the UUID of its MIG instance; None without MIG, and where it cannot be told."""

    device: ListedDevice
    instance: str | None = None

    def is_named(self, word: str) -> bool:
        return self.uuid.lower().startswith(word.lower())

    @property
    def uuid(self) -> str:
        return self.instance or self.device.uuid


def match(identity: DeviceIdentity, devices: Sequence[ListedDevice], environ: Mapping[str, str]) -> Match:
    if not devices:
        raise NoReading("NVML lists no device")
    uuid, address = _digits(identity.uuid), address_of(identity.pci)
    matched = next((candidate for candidate in _all(devices) if uuid and _digits(candidate.uuid) == uuid), None)
    matched = matched or next(
        (Match(device) for device in devices if address and address_of(device.pci) == address), None
    )
    if matched is None and (uuid or identity.pci):
        raise NoReading(f"NVML lists no device with UUID {identity.uuid or '?'} or PCI address {identity.pci or '?'}")
    if matched is None:
        matched = _by_variable(identity.index, devices, environ)
    if matched.device.mig and matched.instance is None:
        return Match(matched.device, _visible_instance(identity.index, matched.device, environ))
    return matched


def _digits(uuid: str) -> str:
    """A UUID without its prefix; '' for none and for the zeros that virtual devices have."""
    plain = uuid.strip().lower().removeprefix("gpu-").removeprefix("mig-")
    return plain if plain.strip("0-") else ""


def _all(devices: Sequence[ListedDevice]) -> list[Match]:
    return [Match(device, instance) for device in devices for instance in (None, *device.instances)]


def address_of(pci: str) -> tuple[int, ...] | None:
    """Domain, bus and device, without the function behind a dot; None for what is no such address."""
    parts = pci.partition(".")[0].split(":")
    try:
        numbers = [int(part, 16) for part in parts]
    except ValueError:
        return None
    return tuple([0, *numbers][-3:]) if len(numbers) in (2, 3) else None


def _by_variable(index: int, devices: Sequence[ListedDevice], environ: Mapping[str, str]) -> Match:
    """Finds the device by index in CUDA_VISIBLE_DEVICES; CUDA's order is not NVML's."""
    word = _visible_word(index, environ)
    if word is not None and not word.isdecimal():
        return _named(word, devices)
    position = index if word is None else int(word)
    if environ.get(ORDER) == "PCI_BUS_ID":
        ordered = sorted(devices, key=lambda device: address_of(device.pci) or ())
        if position < len(ordered):
            return Match(ordered[position])
        raise NoReading(f"NVML lists {len(devices)} device(s), and CUDA's is number {position}, from 0")
    if len(devices) == 1 and position == 0:
        return Match(devices[0])
    raise NoReading(
        f"NVML lists {len(devices)} device(s), and CUDA may count them in another order: neither a UUID nor a PCI "
        f"address is known (set {ORDER}=PCI_BUS_ID, or name UUIDs in {VISIBLE})"
    )


def _visible_word(index: int, environ: Mapping[str, str]) -> str | None:
    """The entry of CUDA_VISIBLE_DEVICES for a device; None if all are visible."""
    if VISIBLE not in environ:
        return None
    words = [word.strip() for word in environ[VISIBLE].split(",")]
    if index >= len(words) or not words[index]:
        raise NoReading(f"{VISIBLE}={environ[VISIBLE]} names no device {index}")
    return words[index]


def _named(word: str, devices: Sequence[ListedDevice]) -> Match:
    matches = [candidate for candidate in _all(devices) if candidate.is_named(word)]
    if len(matches) != 1:
        raise NoReading(f"{VISIBLE} names {word!r}, and NVML lists {len(matches)} such devices")
    return matches[0]


def _visible_instance(index: int, device: ListedDevice, environ: Mapping[str, str]) -> str | None:
    """The instance, where CUDA gave the whole device's UUID for it: the only one, or the one that is named."""
    if len(device.instances) == 1:
        return device.instances[0]
    try:
        word = _visible_word(index, environ)
        named = _named(word, [device]) if word is not None and word.lower().startswith("mig-") else None
    except NoReading:
        return None
    return named.instance if named else None
