"""NVML for tests that request it: the library in nvml/ with one healthy device by default."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fp8bench.measure.sensors.meter import Meter, open_nvml_meter
from fp8bench.measure.sensors.nvml import Library, NvmlDevice
from fp8bench.measure.sensors.nvml_match import DeviceIdentity
from tests.measure.sensors.nvml.library import Simulation, build, uuid_of, why_not
from tests.measure.sensors.virtual import VirtualClock


@pytest.fixture(scope="session")
def simulation(tmp_path_factory: pytest.TempPathFactory) -> Simulation:
    """The library, built and loaded once."""
    if why_not():
        pytest.skip(why_not())
    simulation = Simulation(build(tmp_path_factory.mktemp("nvml")))
    simulation.load()
    return simulation


@pytest.fixture
def nvml(simulation: Simulation, monkeypatch: pytest.MonkeyPatch) -> Iterator[Simulation]:
    """Makes pynvml use that library even if another test loaded a real one; asserts that no thread remains."""
    import pynvml

    before = set(threading.enumerate())
    monkeypatch.setattr(pynvml, "nvmlLib", simulation.loaded)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    simulation.reset()
    yield simulation
    assert not set(threading.enumerate()) - before


@pytest.fixture
def library() -> Library:
    """NVML in the state of a new process."""
    return Library()


@pytest.fixture
def device(nvml: Simulation, library: Library) -> Iterator[NvmlDevice]:
    """The first device."""
    opened = NvmlDevice(DeviceIdentity(uuid=uuid_of(1)), library)
    yield opened
    opened.close()


@pytest.fixture
def clock(nvml: Simulation) -> VirtualClock:
    """A clock that only samplers advance."""
    return VirtualClock(nvml.state)


@pytest.fixture
def opened(nvml: Simulation, library: Library, clock: VirtualClock) -> Iterator[Callable[[], Meter]]:
    """Opens the meter of the first device, on the virtual clock."""
    meters: list[Meter] = []

    def opened() -> Meter:
        meters.append(open_nvml_meter(DeviceIdentity(uuid=uuid_of(1)), clock, library))
        return meters[-1]

    yield opened
    for meter in meters:
        meter.close()


@pytest.fixture(scope="session")
def old_driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library without functions that older drivers lack."""
    if why_not():
        pytest.skip(why_not())
    return build(tmp_path_factory.mktemp("old"), "-DOLD_DRIVER")
