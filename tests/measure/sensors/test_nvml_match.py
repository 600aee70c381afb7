"""Which of NVML's devices a CUDA device is: by UUID, by PCI address, by what is visible, never by an index alone."""

from __future__ import annotations

import pytest

from fp8bench.measure.sensors.nvml_match import DeviceIdentity, ListedDevice, match
from fp8bench.model.readings import NoReading
from tests.counts import for_each

A = ListedDevice("GPU-aaaa1111-0000-4000-8000-000000000001", "00000000:07:00.0")
B = ListedDevice("GPU-aaaa2222-0000-4000-8000-000000000002", "00000000:4C:00.0")
FIRST = "MIG-11111111-0000-4000-8000-000000000001"
SECOND = "MIG-22222222-0000-4000-8000-000000000002"
SPLIT = ListedDevice("GPU-cccc3333-0000-4000-8000-000000000003", "00000001:07:00.0", True, (FIRST, SECOND))
ALL = (A, B, SPLIT)
NOT_KNOWN = "CUDA may count them in another order"


@for_each(
    ("identity", "expected"),
    [
        (DeviceIdentity(0, uuid="aaaa2222-0000-4000-8000-000000000002"), B),
        (DeviceIdentity(0, uuid="GPU-AAAA2222-0000-4000-8000-000000000002"), B),
        (DeviceIdentity(0, pci="00000000:4C:00"), B),
        (DeviceIdentity(0, pci="0000:4c:00.0"), B),
        (DeviceIdentity(0, pci="4c:00.0"), B),
        # Virtual devices have a UUID of zeros.
        (DeviceIdentity(0, uuid="00000000-0000-0000-0000-000000000000", pci="0:4C:0"), B),
        # A UUID that is not listed, but an address that is.
        (DeviceIdentity(0, uuid="GPU-ffff", pci="0:4C:0"), B),
    ],
)
def test_by_what_cuda_says(identity: DeviceIdentity, expected: ListedDevice) -> None:
    assert match(identity, ALL, {}).device is expected


@for_each("identity", [DeviceIdentity(0, uuid="GPU-ffff"), DeviceIdentity(0, pci="0:99:0"), DeviceIdentity(0, pci="x")])
def test_a_device_that_nvml_does_not_list(identity: DeviceIdentity) -> None:
    with pytest.raises(NoReading, match="NVML lists no device with UUID"):
        match(identity, ALL, {})


@for_each(
    ("index", "environ", "expected"),
    [
        (0, {"CUDA_VISIBLE_DEVICES": "GPU-aaaa2"}, B),
        (1, {"CUDA_VISIBLE_DEVICES": " GPU-aaaa2 , gpu-AAAA1"}, A),
        (1, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, B),
        (0, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "1,0"}, B),
    ],
)
def test_by_what_is_visible(index: int, environ: dict[str, str], expected: ListedDevice) -> None:
    # NVML's own order does not matter.
    assert match(DeviceIdentity(index), (SPLIT, B, A), environ).device is expected


@for_each(
    ("index", "environ", "why"),
    [
        (0, {}, NOT_KNOWN),
        (0, {"CUDA_VISIBLE_DEVICES": "1,0"}, NOT_KNOWN),
        (0, {"CUDA_VISIBLE_DEVICES": "GPU-aaaa"}, "names 'GPU-aaaa', and NVML lists 2 such devices"),
        (0, {"CUDA_VISIBLE_DEVICES": "GPU-dddd"}, "NVML lists 0 such devices"),
        (0, {"CUDA_VISIBLE_DEVICES": "-1"}, "NVML lists 0 such devices"),
        (0, {"CUDA_VISIBLE_DEVICES": ""}, "names no device 0"),
        (2, {"CUDA_VISIBLE_DEVICES": "GPU-aaaa1,GPU-aaaa2"}, "names no device 2"),
        (3, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, "CUDA's is number 3"),
    ],
)
def test_what_cannot_be_told_is_not_guessed(index: int, environ: dict[str, str], why: str) -> None:
    with pytest.raises(NoReading, match=why):
        match(DeviceIdentity(index), ALL, environ)


def test_one_device_is_the_one() -> None:
    assert match(DeviceIdentity(0), (A,), {}).device is A
    assert match(DeviceIdentity(0), (A,), {"CUDA_VISIBLE_DEVICES": "0"}).device is A
    with pytest.raises(NoReading, match=NOT_KNOWN):
        match(DeviceIdentity(1), (A,), {})
    with pytest.raises(NoReading, match="NVML lists no device"):
        match(DeviceIdentity(0), (), {})


@for_each(
    ("identity", "environ", "instance"),
    [
        # CUDA may give an instance's UUID, or that of the whole device.
        (DeviceIdentity(0, uuid="22222222-0000-4000-8000-000000000002"), {}, SECOND),
        (DeviceIdentity(0, uuid=SPLIT.uuid), {"CUDA_VISIBLE_DEVICES": SECOND}, SECOND),
        (DeviceIdentity(0), {"CUDA_VISIBLE_DEVICES": "MIG-2222"}, SECOND),
        # CUDA takes one of the instances, and nobody knows which.
        (DeviceIdentity(0, uuid=SPLIT.uuid), {}, None),
        (DeviceIdentity(0, uuid=SPLIT.uuid), {"CUDA_VISIBLE_DEVICES": "2"}, None),
        (DeviceIdentity(0, uuid=SPLIT.uuid), {"CUDA_VISIBLE_DEVICES": "MIG-9999"}, None),
    ],
)
def test_mig(identity: DeviceIdentity, environ: dict[str, str], instance: str | None) -> None:
    found = match(identity, ALL, environ)
    assert (found.device, found.instance) == (SPLIT, instance)


def test_the_only_instance_is_the_one() -> None:
    alone = ListedDevice(SPLIT.uuid, SPLIT.pci, True, (SECOND,))
    assert match(DeviceIdentity(0, uuid=SPLIT.uuid), (alone,), {}).instance is SECOND
