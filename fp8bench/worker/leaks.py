"""Whether the memory of tensors, on the device and on the host, grows from step to step, and goes on growing.

First steps may make what lasts (an optimiser's moments, a history of scales), and a cache may grow until it is full, or
be emptied now and then. So a few steps are looked at, and only where more is held after them than before, many. Of
these, cut into four, the least that is held must rise from quarter to quarter: what is emptied falls back, what is full
stays. And least and most must rise as fast at the end as before, or nearly so: in a cache that became full they do not.

Seen is what grows in every third step, or more often; a cache that takes more than `MOST` steps to fill, or is emptied
less often, cannot be told from one that never ends. What Python holds beside tensors is not looked at: traced, it seems
to grow by some KiB a step for dozens of honest steps, while new objects take the place of those that were not traced.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Sequence

from fp8bench.profiler.allocations import AllocationStream, Begun, live_at_turns

# Steps that are always looked at, and of those that follow where these leave something behind.
FEW = 3
LEAST, MOST = 12, 48
# Of steps that take longer nothing is said. The many take about so long in all, where the least of them do.
LONGEST_SECONDS = 1.0
MANY_SECONDS = 2.0
# Less a step takes four million steps to a GiB.
LEAST_BYTES = 256


def leak_of(step: Callable[[], None], device: str, seconds: float) -> float | None:
    """Bytes by which each step makes memory grow, 0.0 where that ends; None where nobody can say.

    `seconds` is about what a step takes.
    """
    few = _held_after(step, device, FEW) if seconds <= LONGEST_SECONDS else []
    if not few:
        return None
    if few[-1] - few[0] < LEAST_BYTES:
        return 0.0
    many = min(MOST, max(LEAST, int(MANY_SECONDS / seconds)))
    return growth(_held_after(step, device, many // 4 * 4, parts=4)[1:])


def growth(held: Sequence[int]) -> float:
    """Bytes a step, of what is held after each of many; 0.0 if it does not go on."""
    length = len(held) // 4
    quarters = [held[start : start + length] for start in range(0, 4 * length, length)]
    rises = [min(after) - min(before) for before, after in itertools.pairwise(quarters)]
    last = min(rises[-1], max(quarters[3]) - max(quarters[2]))
    goes_on = min(rises) > 0 and last >= max(rises) / 2
    a_step = sum(rises) / (len(rises) * length)
    return a_step if goes_on and a_step >= LEAST_BYTES else 0.0


def _held_after(step: Callable[[], None], device: str, count: int, parts: int = 0) -> list[int]:
    """Bytes beyond what there was, before the first step and after each of so many; none where nobody counts them.

    Garbage that steps have just made goes at once, other garbage at the end of each of some equal parts.
    """
    stream = AllocationStream("cpu", device)
    gc.collect(2 if parts else 0)
    stream.start()
    try:
        stream.note(Begun(""))
        for number in range(1, count + 1):
            step()
            gc.collect(2 if parts and number % (count // parts) == 0 else 0)
            stream.note(Begun(""))
    finally:
        events = stream.stop()
    return live_at_turns(events or [])
