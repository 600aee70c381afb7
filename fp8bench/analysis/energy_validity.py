"""Whether an energy may be relied on: certified, or the first of the reasons why not, the gravest first."""

from __future__ import annotations

import functools
import operator
from enum import StrEnum

from fp8bench.analysis.energy import why_unresolved
from fp8bench.analysis.labels import shared
from fp8bench.model import Record
from fp8bench.model.consumed import CHOSEN, COUNTERS, LEAST_INTERVALS, TICK_INTERVALS, reasons_in


class EnergyValidity(StrEnum):
    """What an energy is worth."""

    CERTIFIED = "certified"
    SHARED = "shared-device"
    NO_COUNTER = "no-counter"
    TOO_FEW_TICKS = "too-few-ticks"
    THROTTLED = "throttled"
    LIMIT_CHANGED = "power-limit-changed"
    UNRESOLVED = "unresolved"


def energy_validity(record: Record) -> EnergyValidity | None:
    """None where nobody asked for its energy."""
    use = record.energy
    if use is None:
        return None
    if any(shared(record.watch)):
        return EnergyValidity.SHARED
    if use.source not in COUNTERS:
        return EnergyValidity.NO_COUNTER
    few = TICK_INTERVALS in use.why and not use.windows
    if few or any(window.intervals < LEAST_INTERVALS for window in use.windows):
        return EnergyValidity.TOO_FEW_TICKS
    seen = functools.reduce(operator.or_, (window.throttle or 0 for window in use.windows), 0)
    if any(name not in CHOSEN for name in reasons_in(seen)):
        return EnergyValidity.THROTTLED
    if len(use.power_limits) > 1:
        return EnergyValidity.LIMIT_CHANGED
    return EnergyValidity.UNRESOLVED if why_unresolved(use) else EnergyValidity.CERTIFIED
