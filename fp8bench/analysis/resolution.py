"""Whether a case's energy is a number that one may work with, and why not."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence

from fp8bench import units
from fp8bench.analysis.throttles import CHOSEN
from fp8bench.model import EnergyUse, EnergyWindow
from fp8bench.throttling import reasons_in

NO_SOURCE = "none"
MOST_UNCERTAIN = 0.01
# Of joules a step, from the lowest window to the highest, as a share of the middle one.
MOST_APART = 0.05


def why_unresolved(energy: EnergyUse | None) -> str:
    """'' if it is resolved, if nobody asked for it, and if the device has no source: nothing was promised then.

    A sensor of power is never resolved: nobody knows how far it is off. A missing idle power alone leaves the gross
    energy as good as it is.
    """
    return "" if energy is None or energy.source == NO_SOURCE else "; ".join(_reasons(energy))


def _reasons(energy: EnergyUse) -> Iterator[str]:
    windows = energy.windows
    if not windows:
        yield energy.why or "no window was measured"
        return
    if energy.why and energy.idle_before is not None and energy.idle_after is not None:
        yield energy.why
    if any(window.uncertainty is None for window in windows):
        yield f"error unknown, source {energy.source}"
    worst = max(window.uncertainty or 0.0 for window in windows)
    if worst > MOST_UNCERTAIN:
        yield f"a window is sure to +-{units.percent(worst)} only"
    yield from _disagreement(windows)
    held = [name for name in reasons_in(_seen(windows)) if name not in CHOSEN]
    if held:
        yield f"clocks were held back in its windows: {', '.join(held)}"


def _disagreement(windows: Sequence[EnergyWindow]) -> Iterator[str]:
    joules = [window.joules / window.steps for window in windows if window.steps > 0]
    if len(joules) < len(windows) or not all(0 < one < math.inf for one in joules):
        yield "a window has no energy"
        return
    apart = (max(joules) - min(joules)) / statistics.median(joules)
    if apart > MOST_APART:
        yield f"its windows are {units.percent(apart)} apart"


def _seen(windows: Sequence[EnergyWindow]) -> int:
    """All bits of all windows."""
    mask = 0
    for window in windows:
        mask |= window.throttle or 0
    return mask
