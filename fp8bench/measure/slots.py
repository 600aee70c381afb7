"""How many calls a slot has, how many come before them, and how a device's queue is filled ahead of them."""

from __future__ import annotations

from dataclasses import dataclass

from fp8bench.model.raw import Filling
from fp8bench.protocols.axes import COLD

SLOT_SECONDS = 8e-3
REPEAT_BELOW_SECONDS = 4e-3
# A slot begins with nothing queued on a device of its own: short kernels of the first call wait for the host, and those
# of the next ones find the queue as full as the host can fill it.
DEVICE_CALLS = 3
# Flushing a cache of some megabytes takes longer than most steps.
COLD_CALLS = 4
# A queue takes about 1,024 launches, of some 5 us of the host each, and then the host waits: longer helps nobody. It is
# also too short for clocks to fall far.
MOST_FILLING_SECONDS = 10e-3
# A host is not equally fast each time.
_MARGIN = 1.25


@dataclass(frozen=True)
class SlotShape:
    """`discard` calls that are not timed, and then `calls` that are."""

    calls: int = 1
    discard: int = 0
    filling: Filling | None = None


def shape_of(step_seconds: float, host_seconds: float, cache: str, queues: bool) -> SlotShape:
    """For steps that take so long, and the host so long to enqueue; `queues` says whether they are enqueued at all."""
    calls, discard = 1, 0
    if step_seconds < REPEAT_BELOW_SECONDS:
        calls, discard = max(2, round(SLOT_SECONDS / step_seconds)), 1
    if cache == COLD:
        calls = min(COLD_CALLS, calls)
    if not queues:
        return SlotShape(calls, discard)
    calls = max(DEVICE_CALLS, calls)
    return SlotShape(calls, discard, filling_of(host_seconds, calls))


def filling_of(host_seconds: float, calls: int) -> Filling | None:
    """For calls that take the host so long each: before all of them, or before as many as it enqueues in the most.

    None where it takes no time that could be told.
    """
    if host_seconds <= 0:
        return None
    together = max(1, min(calls, int(MOST_FILLING_SECONDS / (_MARGIN * host_seconds))))
    return Filling(together, min(MOST_FILLING_SECONDS, _MARGIN * host_seconds * together))
