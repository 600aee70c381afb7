"""Windows of energy against the true energy of devices whose power is a formula."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fp8bench.samplers.energy import Energy
from fp8bench.samplers.meter import Meter
from fp8bench.samplers.sources import SourceKind
from tests.samplers.nvml.library import Simulation
from tests.samplers.virtual import VirtualClock


def measured(meter: Meter, clock: VirtualClock, seconds: float | None = None) -> tuple[Energy, float, float]:
    """A window of so many seconds, or until it has enough; and when it began and ended."""
    with meter.window() as window:
        start = clock.now()
        clock.wait(lambda: clock.now() >= start + seconds if seconds else window.enough)
        end = clock.now()
    assert isinstance(window.energy, Energy), window.energy
    return window.energy, start, end


def test_constant_power(nvml: Simulation, opened: Callable[[], Meter], clock: VirtualClock) -> None:
    """The counter of a device at 300 W."""
    meter = opened()
    assert (meter.kind, meter.refused, meter.why) == (SourceKind.COUNTER, (), "")
    assert meter.source is not None and meter.source.rhythm.period == pytest.approx(0.1, rel=0.05)
    energy, start, end = measured(meter, clock)
    print(energy, end - start)
    assert energy.watts == pytest.approx(300, rel=0.01)
