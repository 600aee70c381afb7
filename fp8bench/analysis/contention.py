"""Whether other work took the processor from a case, by its clocks slot by slot."""

from __future__ import annotations

from collections.abc import Sequence

from fp8bench.model import SlotSample, Timing

# The wall clock over the processor time. At the lower one a case is contended, at the higher one it got less than a
# fifth of a core, and its fastest rounds need not be undisturbed ones.
AHEAD = 1.1
FAR_AHEAD = 5.0
# In more than so many of the slots.
SHARE = 0.5
# What a hypervisor took explains a delay if it comes to this share of it.
_STOLEN_SHARE = 0.5


def disturbed_slots(timing: Timing, ahead: float) -> int:
    """In how many slots the wall clock ran so far ahead of the processor time.

    The processor time of the process is all there is to say with one thread. With several it hides a delay, because
    threads that wait for a late one spin and count as busy. There the thread that runs the steps is asked, whose own
    time keeps up with the wall clock as long as nobody takes its core. It falls behind too where it sleeps until the
    others are done, so that it counts only if the system says that somebody took a core meanwhile.
    """
    process = [slot for slot in timing.slots if slot.wall_seconds > ahead * slot.cpu_seconds]
    thread = [slot for slot in timing.slots if _thread_behind(slot, ahead)]
    return max(len(process), len(thread) if _taken(thread) else 0)


def contended(timing: Timing, ahead: float = AHEAD) -> bool:
    """Whether that was so in most slots."""
    return disturbed_slots(timing, ahead) > SHARE * len(timing.slots)


def _thread_behind(slot: SlotSample, ahead: float) -> bool:
    return slot.thread_seconds is not None and slot.wall_seconds > ahead * slot.thread_seconds


def _taken(slots: Sequence[SlotSample]) -> bool:
    """Whether somebody took a core: once a slot on average, or for about as long as the thread was late.

    All slots together, because stolen time is counted in steps of 10 ms, which may be longer than a slot.
    """
    preempted = sum(slot.preemptions or 0 for slot in slots)
    stolen = sum(slot.stolen_seconds or 0.0 for slot in slots)
    late = sum(slot.wall_seconds - (slot.thread_seconds or 0.0) for slot in slots)
    return bool(slots) and (preempted >= len(slots) or stolen >= _STOLEN_SHARE * late)
