"""When energy is a number that one may work with."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from fp8bench.analysis.resolution import why_unresolved
from fp8bench.model import EnergyUse, EnergyWindow


def window(
    joules: float, uncertainty: float | None = 0.004, steps: int = 100, throttle: int | None = None
) -> EnergyWindow:
    """So many joules a step."""
    return EnergyWindow(steps, 2.0, joules * steps, 20, uncertainty, throttle=throttle)


def use(*windows: EnergyWindow, source: str = "counter", why: str = "") -> EnergyUse:
    return EnergyUse(source, windows, 60.0, 61.0, why)


@pytest.mark.parametrize(
    "energy",
    [
        None,
        use(source="none", why="no GPU, and RAPL may be read by root only"),
        use(window(1.0), window(1.02), window(0.99)),
        use(window(1.0, 0.01)),
        use(window(1.0), window(1.025), window(0.976)),
        use(window(1.0, steps=10), window(1.0, steps=1000), source="rapl"),
        use(window(1.0, throttle=0x1 | 0x4 | 0x2)),
        replace(use(window(1.0)), idle_before=None, why="idle power: a call failed"),
    ],
)
def test_resolved_or_never_promised(energy: EnergyUse | None) -> None:
    """Nobody asked, nothing could tell it, or all windows agree; a missing idle power spoils the net energy alone."""
    assert why_unresolved(energy) == ""


@pytest.mark.parametrize(
    ("energy", "why"),
    [
        (use(why="7 tick interval(s), 10 are needed"), "7 tick interval(s), 10 are needed"),
        (use(), "no window was measured"),
        (replace(use(why="the device has gone"), idle_after=None), "the device has gone"),
        (use(window(1.0), why="a call failed"), "a call failed"),
        (use(window(1.0), window(1.0, 0.0101)), "a window is sure to +-1.0% only"),
        (use(window(1.0), window(1.0, 0.03)), "a window is sure to +-3.0% only"),
        (use(window(0.97), window(1.0), window(1.021)), "its windows are 5.1% apart"),
        (use(window(1.0), window(2.0)), "its windows are 66.7% apart"),
        (
            use(window(1.0, None), source="average"),
            "error unknown, source average",
        ),
        (use(window(1.0, throttle=0x40 | 0x4)), "clocks were held back in its windows: hw-thermal"),
        (use(window(0.0)), "a window has no energy"),
        (use(window(math.nan)), "a window has no energy"),
        (use(window(math.inf), window(1.0)), "a window has no energy"),
        (use(window(1.0), window(1.0, steps=0)), "a window has no energy"),
        (use(window(1.0, 0.02), window(1.2, 0.02)), "a window is sure to +-2.0% only; its windows are 18.2% apart"),
    ],
)  # fmt: skip
def test_unresolved(energy: EnergyUse, why: str) -> None:
    """Every reason by itself, at its bound where it has one, and two together."""
    assert why_unresolved(energy) == why
