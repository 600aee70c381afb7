"""Ten thousand windows leave nothing behind."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from fp8bench.measure.sensors.energy import Energy
from fp8bench.measure.sensors.meter import Meter, nvml_meter
from fp8bench.measure.sensors.nvml import Library
from fp8bench.measure.sensors.nvml_match import DeviceIdentity
from fp8bench.model.readings import Reading
from fp8bench.worker import host_counters as host
from tests.counts import counts
from tests.measure.sensors.nvml.library import Simulation
from tests.measure.sensors.virtual import VirtualClock

MEBIBYTE = 2**20


def held() -> tuple[int, int, int]:
    """Threads, open files and resident bytes of this process."""
    gc.collect()
    files = Path("/proc/self/fd")
    if not files.is_dir():
        pytest.skip("needs Linux's /proc to count open files and resident memory")
    resident = host.memory()["rss"]
    assert isinstance(resident, Reading)
    return threading.active_count(), len(list(files.iterdir())), int(resident.number)


@pytest.mark.slow
@counts(1000, 10_000)
def test_windows(count: int, nvml: Simulation, opened: Callable[[], Meter], clock: VirtualClock) -> None:
    nvml.state.device[0].period_ns = 7_000_000
    meter = opened()
    threads, files, _ = held()
    resident = 0
    for number in range(count):
        if number == count // 5:
            resident = held()[2]
        with meter.window() as window:
            assert threading.active_count() <= threads + 1
            clock.wait(lambda window=window: window.enough)  # type: ignore[misc]
        assert isinstance(window.energy, Energy)
    assert held()[:2] == (threads, files)
    assert held()[2] - resident < 4 * MEBIBYTE
    calls = nvml.calls()
    assert calls["nvmlInitWithFlags"] == calls["nvmlDeviceGetHandleByUUID"] == 1
    assert nvml.state.shutdowns == 0


def test_openings(nvml: Simulation, clock: VirtualClock) -> None:
    nvml.state.device[0].period_ns = 7_000_000
    threads, files, _ = held()
    library = Library()
    for number in range(300):
        with nvml_meter(DeviceIdentity(0, uuid="" if number % 3 else "GPU-none"), {}, clock, library) as meter:
            meter.device.state()
    assert held()[:2] == (threads, files)
    assert nvml.state.inits == nvml.state.shutdowns == 300
