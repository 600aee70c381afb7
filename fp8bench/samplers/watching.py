"""What a window's looks at the device's state come to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from operator import or_
from statistics import median

from fp8bench.samplers.readings import Read, Reading, Readings, Unavailable


def _union(numbers: Sequence[float]) -> float:
    return reduce(or_, (int(number) for number in numbers))


# Name -> of which value, and what of its looks.
_SUMMARIES: dict[str, tuple[str, Callable[[Sequence[float]], float]]] = {
    "throttle": ("throttle", _union),
    "sm_clock": ("sm_clock", median),
    "sm_clock_lowest": ("sm_clock", min),
    "memory_clock": ("memory_clock", median),
    "temperature": ("temperature", max),
}


def watched(looks: Sequence[Readings]) -> Readings:
    """All throttle reasons of the window, the median and lowest clocks, the highest temperature.

    A value that failed in one look is unavailable: what it was then may have been what matters.
    """
    return {name: _summary([look[of] for look in looks], how) for name, (of, how) in _SUMMARIES.items()}


def _summary(reads: Sequence[Read], how: Callable[[Sequence[float]], float]) -> Read:
    if not reads:
        return Unavailable("the window ended before anyone looked")
    failed = next((read for read in reads if isinstance(read, Unavailable)), None)
    if failed is not None:
        return failed
    known = [read for read in reads if isinstance(read, Reading)]
    return Reading(how([read.number for read in known]), known[0].unit, known[0].source)
