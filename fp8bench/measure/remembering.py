"""The worker's side of measuring memory: a step of a state of its own, its highest point, and what that is made of."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fp8bench.measure.garbage import collected_by_hand
from fp8bench.measure.holdings import Holdings, holdings
from fp8bench.measure.memory_roles import roles
from fp8bench.measure.static_scales import step
from fp8bench.measure.told_casts import telling
from fp8bench.measure.told_phases import TellingPhases
from fp8bench.model import MemoryCourse, MemoryUse
from fp8bench.protocols import Device, MemoryMeter, Setup, SilentPhases, Workload
from fp8bench.samplers.host import memory, reset_high_water
from fp8bench.samplers.readings import Read, Reading

_DISAGREE = "torch's profiler saw more allocated than its allocator counts"


@dataclass(frozen=True)
class Remembered:
    """What a case takes, and its state, which somebody else may want to look at from outside."""

    use: MemoryUse
    state: Any


def remember(workload: Workload, make_setup: Callable[[], Setup], device: Device, index: int) -> Remembered | str:
    """The memory of a step, or why nobody can say; then nothing was prepared.

    The second step of a state is looked at: what the first one makes and keeps is there by then. Whatever counts makes
    a step slower, so the state is used for nothing else.
    """
    meter = device.memory_meter(index)
    if isinstance(meter, str):
        return meter
    with collected_by_hand():
        setup = telling(make_setup(), meter.say)
        gc.collect(0)
        device.empty_cache()  # what lies there would decide how blocks are cut
        meter.start()
        course = None
        try:
            state = workload.prepare(setup)
            step(workload, state, setup, SilentPhases())
            gc.collect(0)  # the youngest only: all that has been made since the start
            before = holdings(state)
            resident = _watched_step(workload, state, setup, meter)
        finally:
            course = meter.stop()
        if course is None:
            return "torch's profiler recorded nothing"
        return Remembered(_use(course, before, holdings(state), resident), state)


def _watched_step(workload: Workload, state: Any, setup: Setup, meter: MemoryMeter) -> Read:
    """One step under the meter; the most that the process had in the machine's memory meanwhile."""
    began = reset_high_water()
    meter.mark()
    step(workload, state, setup, TellingPhases(meter.enter))
    return memory()["rss_high_water"] if isinstance(began, Reading) else began


def _use(course: MemoryCourse, before: Holdings, after: Holdings, resident: Read) -> MemoryUse:
    found = roles(course.held, course.peak, before, after) if course.held else {}
    whys = [course.why]
    if course.held and not found:
        whys.append(_DISAGREE)
    if not isinstance(resident, Reading):
        whys.append(f"no resident memory: {resident.reason}")
    return MemoryUse(
        course.peak,
        tuple((role.value, size) for role, size in found.items()),
        course.phases,
        course.reserved,
        resident=int(resident.number) if isinstance(resident, Reading) else None,
        why="; ".join(filter(None, whys)),
    )
