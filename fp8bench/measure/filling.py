"""The worker's side of looking for the largest batch: one attempt, in a memory that ends where it was asked to."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from fp8bench.measure.garbage import collected_by_hand
from fp8bench.measure.static_scales import step
from fp8bench.model import UNATTRIBUTED
from fp8bench.protocols import CannotLimit, Device, MemoryMeter, Setup, SilentPhases, Workload


def fill(
    workload: Workload, make_setup: Callable[[], Setup], device: Device, index: int, limit: int | None
) -> int | None:
    """Bytes of tensors at the highest point of preparing a state and two steps; None where nobody counts.

    What does not fit while preparing does not fit. Raises what the device raises where its memory ends, and CannotLimit
    where it cannot end at `limit`, or nobody can tell that tensors have gone past it.
    """
    meter = device.memory_meter(index)
    if isinstance(meter, str) and limit is not None:
        raise CannotLimit(f"a limit needs somebody who counts: {meter}")
    ended: AbstractContextManager[None] = nullcontext() if limit is None else device.memory_limited(index, limit)
    with collected_by_hand():
        gc.collect(1)  # cycles that hold tensors of the attempt before
        device.empty_cache()  # what lies there would count as taken
        peak = _peak(workload, make_setup, meter if isinstance(meter, MemoryMeter) else None, ended)
        gc.collect(1)
    device.empty_cache()
    return peak


def _peak(
    workload: Workload,
    make_setup: Callable[[], Setup],
    meter: MemoryMeter | None,
    ended: AbstractContextManager[None],
) -> int | None:
    """The meter is read after the memory has its own end again: reading takes some, too."""
    if meter is None:
        with ended:
            _two_steps(workload, make_setup())
        return None
    meter.start(blocks=False)  # a GPU's worker goes on to time things
    try:
        with ended:
            setup = make_setup()  # scales from data are found with a state of its own, which is gone by now
            meter.enter(UNATTRIBUTED)
            _two_steps(workload, setup)
    finally:
        course = meter.stop()
    return course.peak if course is not None else None


def _two_steps(workload: Workload, setup: Setup) -> None:
    """What the first one makes and keeps is there in the second: the optimiser's moments, scales, workspaces."""
    state = workload.prepare(setup)
    for _ in range(2):
        step(workload, state, setup, SilentPhases())
