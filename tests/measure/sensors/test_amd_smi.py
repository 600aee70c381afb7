"""What AMD SMI says of a device, through a package with its names: in our units, each value by itself."""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fp8bench.measure.sensors import amd_smi
from fp8bench.measure.sensors.amd_smi import AmdDevice, AmdLibrary
from fp8bench.measure.sensors.device_state import device_lines, device_state_of
from fp8bench.measure.sensors.energy import SourceKind
from fp8bench.measure.sensors.meter import amd_meter, meter_for
from fp8bench.measure.sensors.nvml_match import DeviceIdentity
from fp8bench.model.readings import NoReading
from tests.counts import for_each
from tests.facts import MI300X
from tests.measure.sensors.amd import GIGABYTE, KINDS, AmdGpu, AmdSmi, AmdSmiException, said_by
from tests.measure.sensors.test_nvml import values

_FIRST, _SECOND = "0000:0C:00.0", "0000:22:00.0"
_IDENTITY = DeviceIdentity(pci="00000000:22:00")


@pytest.fixture
def smi(monkeypatch: pytest.MonkeyPatch) -> AmdSmi:
    fake = AmdSmi([AmdGpu(_FIRST, clock=900), AmdGpu(_SECOND)])
    monkeypatch.setitem(sys.modules, "amdsmi", fake)
    return fake


@pytest.fixture
def device(smi: AmdSmi) -> Iterator[AmdDevice]:
    opened = AmdDevice(_IDENTITY, AmdLibrary())
    yield opened
    opened.close()


def test_facts(device: AmdDevice) -> None:
    assert values(device.facts()) == {
        "driver": ("6.14.14", ""),
        "name": ("AMD Instinct MI300X", ""),
        "uuid": (f"uuid of {_SECOND}", ""),
        "pci": (_SECOND, ""),
        "vbios": ("022.040.003.043.000001", ""),
        "power_cap": (700.0, "W"),
        "power_cap_default": (750.0, "W"),
        "sm_clock_max": (2.1e9, "Hz"),
        "memory_clock_max": (1.3e9, "Hz"),
        "partition": ("SPX", ""),
        "memory_total": (192 * GIGABYTE, "B"),
    }


def test_state(device: AmdDevice) -> None:
    assert values(device.state()) == {
        "power": (650.0, "W"), "sm_clock": (2.1e9, "Hz"), "memory_clock": (1.3e9, "Hz"), "temperature": (61, "degC"),
        "throttle": (0, "mask"), "use": (0.98, "share"), "memory_use": (0.4, "share"),
        "memory_used": (3 * GIGABYTE, "B"),
    }  # fmt: skip
    assert device.process_memory(42) == device._attempt(device.queries.process_memory(42))
    assert values({"own": device.process_memory(42), "other": device.process_memory(43)}) == {
        "own": (GIGABYTE, "B"), "other": "process 43 is not among the 1 that AMD SMI lists"
    }  # fmt: skip


@for_each(("name", "bit"), [("ppt", 0x4), ("socket_thm", 0x20), ("hbm_thm", 0x20), ("vr_thm", 0x40), ("prochot", 0x40)])
def test_what_holds_the_clocks_back_from_look_to_look(smi: AmdSmi, device: AmdDevice, name: str, bit: int) -> None:
    held, seen = smi.gpus[1].held, []
    for samples in (0, 5, 0):
        before = held[f"{name}_residency_acc"]
        assert isinstance(before, int)
        held[f"{name}_residency_acc"] = before + samples
        seen.append(values(device.changing())["throttle"])
    assert seen == [(0, "mask"), (bit, "mask"), (0, "mask")]


def test_what_a_device_does_not_know_has_its_reason_and_hides_nothing_else(smi: AmdSmi, device: AmdDevice) -> None:
    smi.gpus[1].clock = "N/A"
    smi.gpus[1].held["ppt_residency_acc"] = "N/A"
    smi.fails["amdsmi_get_temp_metric"] = AmdSmiException(2, "AMDSMI_STATUS_NOT_SUPPORTED - Feature not supported")
    found = values(device.state())
    assert found["sm_clock"] == "AMD SMI does not know its clk (N/A)"
    assert found["throttle"] == "AMD SMI does not know its ppt_residency_acc (N/A)"
    assert found["temperature"] == "AMDSMI_STATUS_NOT_SUPPORTED - Feature not supported (AMD SMI error 2)"
    assert found["power"] == (650.0, "W")
    assert set(values(device.violations()).values()) == {"AMD SMI counts samples of it, not seconds"}


@for_each(("address", "where"), [("0000:99:00.0", "0000:99:00.0"), ("", "a known address")])
def test_no_device_is_guessed(smi: AmdSmi, address: str, where: str) -> None:
    """HIP counts in an order of its own: another device's power would be taken for this one's."""
    with pytest.raises(NoReading, match=rf"lists 2 device\(s\), none at {where}"):
        AmdDevice(DeviceIdentity(pci=address), AmdLibrary())
    assert smi.begun == 0


@for_each(
    ("broken", "why"),
    [
        (None, "the package amdsmi, which comes with ROCm, is not installed"),
        (AmdSmi([]), "AMDSMI_STATUS_DRIVER_NOT_LOADED - Driver not loaded (AMD SMI error 34)"),
    ],
)
def test_a_machine_without_it_says_so(broken: AmdSmi | None, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if broken is not None:
        broken.fails["amdsmi_init"] = AmdSmiException(34, "AMDSMI_STATUS_DRIVER_NOT_LOADED - Driver not loaded")
    monkeypatch.setitem(sys.modules, "amdsmi", broken)
    with amd_meter(_IDENTITY, library=AmdLibrary()) as meter:
        assert (meter.kind, meter.why) == (SourceKind.NONE, why)


def test_energy_comes_in_joules_and_power_is_the_second_best_source(device: AmdDevice, smi: AmdSmi) -> None:
    assert amd_smi.energy(device.ask).number == pytest.approx((1 << 40) * 15.259e-6)
    assert amd_smi.power(device.ask).number == 650.0
    smi.gpus[1].watts = "N/A"
    with pytest.raises(NoReading, match=r"current_socket_power .*average_socket_power"):
        amd_smi.power(device.ask)


def test_parts_of_one_device_have_no_energy_of_their_own(smi: AmdSmi) -> None:
    smi.gpus.append(AmdGpu("0000:22:00.1"))
    with amd_meter(_IDENTITY, library=AmdLibrary()) as meter:
        assert meter.kind is SourceKind.NONE
        assert meter.why == "2 compute partitions share the GPU, and its energy is known as a whole only"


def test_a_run_and_the_doctor_tell_of_it(smi: AmdSmi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(amd_smi, "LIBRARY", AmdLibrary())
    facts = replace(MI300X, pci=_SECOND)
    with meter_for(facts, {}, energy=False) as meter:
        state = device_state_of(facts, meter)
        assert state["cuda:0 power_cap"] == 700.0
        assert state["cuda:0 partition"] == "SPX"
        assert state["cuda:0 energy_why"] == "--no-energy was given"
        lines = "\n".join(device_lines(meter))
    assert "driver    6.14.14, uuid of 0000:22:00.0, PCI 0000:22:00.0" in lines
    assert "power cap 700 W of 750 W, clock up to 2.10 GHz, compute partition SPX" in lines


def test_the_names_are_those_of_amds_package() -> None:
    """Its source is read: to be imported it wants ROCm's library."""
    spec = importlib.util.find_spec("amdsmi")
    if spec is None or spec.origin is None:
        pytest.skip("amdsmi is not installed")
    source = (Path(spec.origin).parent / "amdsmi_interface.py").read_text()
    tree = ast.parse(source)
    functions = {node.name: ast.unparse(node) for node in tree.body if isinstance(node, ast.FunctionDef)}
    for name, keys in said_by(AmdSmi([AmdGpu(_FIRST)])).items():
        for key in keys:
            assert f"'{key}'" in functions[name], (name, key)
    classes = {node.name: ast.unparse(node) for node in tree.body if isinstance(node, ast.ClassDef)}
    for kind, members in vars(KINDS).items():
        for member in members:
            assert f"{member.name} = " in classes[kind]
    assert {"amdsmi_init", "amdsmi_shut_down", "amdsmi_get_processor_handles"} <= set(functions)
