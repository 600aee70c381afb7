"""Which of NVML's devices a CUDA device is: by UUID or PCI address, never by an index."""

from __future__ import annotations

import pytest

from fp8bench.measure.sensors.nvml_match import DeviceIdentity, ListedDevice, match_device
from fp8bench.model.readings import NoReading
from tests.counts import for_each

A = ListedDevice("GPU-aaaa1111-0000-4000-8000-000000000001", "00000000:07:00.0")
B = ListedDevice("GPU-aaaa2222-0000-4000-8000-000000000002", "00000000:4C:00.0")
FIRST = "MIG-11111111-0000-4000-8000-000000000001"
SECOND = "MIG-22222222-0000-4000-8000-000000000002"
SPLIT = ListedDevice("GPU-cccc3333-0000-4000-8000-000000000003", "00000001:07:00.0", True, (FIRST, SECOND))
ALL = (A, B, SPLIT)


@for_each(
    ("identity", "expected"),
    [
        (DeviceIdentity(uuid="aaaa2222-0000-4000-8000-000000000002"), B),
        (DeviceIdentity(uuid="GPU-AAAA2222-0000-4000-8000-000000000002"), B),
        (DeviceIdentity(pci_address="00000000:4C:00"), B),
        (DeviceIdentity(pci_address="0000:4c:00.0"), B),
        (DeviceIdentity(pci_address="4c:00.0"), B),
        # Virtual devices have a UUID of zeros.
        (DeviceIdentity(uuid="00000000-0000-0000-0000-000000000000", pci_address="0:4C:0"), B),
        # An unlisted UUID with a listed address.
        (DeviceIdentity(uuid="GPU-ffff", pci_address="0:4C:0"), B),
    ],
)
def test_devices_are_matched_by_cudas_uuid_and_address(identity: DeviceIdentity, expected: ListedDevice) -> None:
    assert match_device(identity, ALL) == (expected, None)


@for_each(
    "identity",
    [
        DeviceIdentity(uuid="GPU-ffff"),
        DeviceIdentity(pci_address="0:99:0"),
        DeviceIdentity(pci_address="x"),
        DeviceIdentity(),
    ],
)
def test_a_device_unknown_to_nvml_gives_a_reason(identity: DeviceIdentity) -> None:
    with pytest.raises(NoReading, match="NVML lists no device with UUID"):
        match_device(identity, ALL)


def test_an_instance_is_matched_by_its_uuid() -> None:
    own = DeviceIdentity(uuid="22222222-0000-4000-8000-000000000002")
    assert match_device(own, ALL) == (SPLIT, SECOND)
    # CUDA uses one of the instances, but which one is unknown.
    assert match_device(DeviceIdentity(uuid=SPLIT.uuid), ALL) == (SPLIT, None)
    alone = ListedDevice(SPLIT.uuid, SPLIT.pci_address, True, (SECOND,))
    assert match_device(DeviceIdentity(uuid=SPLIT.uuid), (alone,)) == (alone, SECOND)
