"""Measures a step's memory in separate states: its peak, the composition of that, and whether a batch fits."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from fp8bench.model import UNATTRIBUTED, HeldBlock, MemoryCourse, MemoryRole, MemoryUse, Phase
from fp8bench.model.readings import Read, Reading
from fp8bench.model.words import LOADING
from fp8bench.profiler.allocations import AllocationStream, Begun, live_at_turns
from fp8bench.protocols import (
    MEMORY_OF,
    CannotLimit,
    Device,
    Markers,
    MemoryMeter,
    Operand,
    Phases,
    Role,
    Setup,
    SilentPhases,
    TellingMarker,
    WatchedArithmetic,
    Workload,
)
from fp8bench.protocols.arithmetic import Watch
from fp8bench.worker.device_layout import EMULATES_NOTHING, DeviceLedger, Hardware
from fp8bench.worker.host_counters import memory, reset_high_water
from fp8bench.worker.state_tensors import StateTensors, addresses_of, state_tensors
from fp8bench.worker.static_scales import step
from fp8bench.worker.switches import collected_by_hand

# Receives addresses of memory, and its purpose.
Told = Callable[[Sequence[int], MemoryRole], None]


class PreparedMemory(NamedTuple):
    """A state in memory, and a function that takes a step of it."""

    state: Any
    step: Callable[[Phases], None]


# Makes a setup whose casts report to the first argument, and the hardware's memory to the ledger; returns the function
# that prepares a state with it.
Make = Callable[[Told | None, DeviceLedger | None], Callable[[], PreparedMemory]]


def of_workload(workload: Workload, make_setup: Callable[[], Setup], hardware: Hardware = EMULATES_NOTHING) -> Make:
    def make(report: Told | None, ledger: DeviceLedger | None) -> Callable[[], PreparedMemory]:
        setup = make_setup() if ledger is None else hardware.laid_out(make_setup(), ledger)
        setup = setup if report is None else listening(setup, report)

        def prepare() -> PreparedMemory:
            state = workload.prepare(setup)
            return PreparedMemory(state, partial(step, workload, state, setup.scales))

        return prepare

    return make


class _SecondStep(NamedTuple):
    course: MemoryCourse | None
    prepared: PreparedMemory
    before: StateTensors
    resident: Read
    seconds: float


def memory_of_step(
    make: Make, device: Device, index: int, leaks: bool = True, hardware: Hardware = EMULATES_NOTHING
) -> tuple[MemoryUse | str, Any]:
    """Returns the memory of a step and its state; or the reason why it is unknown, and None. It measures the second
    step of a state, when everything that the first one makes and keeps exists. Counting slows a step down, so the state
    is used for nothing else. Without `leaks` the growth of memory is not measured."""
    # 1. Some devices cannot count memory.
    meter = device.memory_meter(index)
    if isinstance(meter, str):
        return meter, None
    with collected_by_hand():
        # 2. Emulation lays out what hardware would have; that may take a separate step.
        ledger = DeviceLedger(meter) if hardware.arithmetics and not hardware.why else None
        laid = _second_step(make, device, meter, ledger).course if ledger and hardware.apart else None
        second = _second_step(make, device, meter, None if laid else ledger)
        if second.course is None:
            return "torch's profiler recorded nothing", None
        # 3. Sum up what a step holds, by role.
        use = _use(second.course, second.before, state_tensors(second.prepared.state), second.resident)
        use = _on_device(use, laid or second.course, ledger, hardware)
        # 4. Measure growth, which takes many more steps.
        if not leaks:
            return use, second.prepared.state
        repeat_step = partial(second.prepared.step, SilentPhases())
        leak = leak_of(repeat_step, device.kind if device.kind == "cpu" else f"{device.kind}:{index}", second.seconds)
        return replace(use, leak=leak), second.prepared.state


def _second_step(make: Make, device: Device, meter: MemoryMeter, ledger: DeviceLedger | None) -> _SecondStep:
    prepare = make(meter.say, ledger)
    gc.collect(0)
    device.empty_cache()  # cached blocks would affect how new ones are cut
    meter.start()
    course = None
    try:
        prepared = prepare()
        prepared.step(SilentPhases())
        gc.collect(0)  # only the youngest generation: everything made since the start
        state_before = state_tensors(prepared.state)
        resident = reset_high_water()
        meter.mark()
        stack = [UNATTRIBUTED]  # backward may run on another thread, so threads share the phase
        begun = time.perf_counter()
        prepared.step(Markers(lambda name: TellingMarker(name, stack, meter.enter)))
        seconds = time.perf_counter() - begun
        if isinstance(resident, Reading):
            resident = memory()["rss_high_water"]
    finally:
        course = meter.stop()
    return _SecondStep(course, prepared, state_before, resident, seconds)


def _on_device(use: MemoryUse, course: MemoryCourse, ledger: DeviceLedger | None, hardware: Hardware) -> MemoryUse:
    """Adds what hardware would hold: the peak itself if nothing is emulated."""
    if hardware.why or ledger is not None:
        reason = hardware.why or (ledger.why() if ledger else "")
        return replace(use, on_device=None if reason else course.on_device, off_device=reason)
    return replace(use, on_device=use.peak)


def _use(course: MemoryCourse, state_before: StateTensors, state_after: StateTensors, resident: Read) -> MemoryUse:
    at_peak = roles(course.held, course.peak, state_before, state_after) if course.held else {}
    forward = roles(course.forward, sum(block.size for block in course.forward), state_before, state_after)
    whys = [course.why]
    if course.held and not at_peak:
        whys.append("torch's profiler saw more allocated than its allocator counts")
    if not isinstance(resident, Reading):
        whys.append(f"no resident memory: {resident.reason}")
    return MemoryUse(
        course.peak,
        tuple((role.value, size) for role, size in at_peak.items()),
        course.phases,
        course.reserved,
        resident=int(resident.number) if isinstance(resident, Reading) else None,
        why="; ".join(filter(None, whys)),
        forward=tuple((role.value, size) for role, size in forward.items()),
    )


_COPIES = {
    Role.INPUT: MemoryRole.LOW_ACTIVATIONS,
    Role.WEIGHT: MemoryRole.LOW_WEIGHTS,
    Role.GRADIENT: MemoryRole.GRADIENTS,
}


def listening(setup: Setup, report: Told) -> Setup:
    """Wraps the setup's arithmetics to report their casts; a cast without a copy is reported with its source."""
    watch = watch_of(report)
    return replace(
        setup,
        arithmetic=WatchedArithmetic(setup.arithmetic, watch),
        high=WatchedArithmetic(setup.high, watch),
        layers={key: WatchedArithmetic(arithmetic, watch) for key, arithmetic in setup.layers.items()},
    )


def watch_of(report: Told) -> Watch:
    """Returns a watch for WatchedArithmetic that reports what casts make. A copy is only memory that belongs neither to
    the source nor to the same operand in its other orientation."""
    import torch

    def watch(operand: Operand, source: Any, role: Role, other_orientation: Operand | None) -> None:
        if torch.compiler.is_compiling():  # tensors have no addresses yet
            return
        sources = [] if source is None else list(addresses_of(source))
        existing = {*sources, *_addresses(other_orientation)}
        copies = [address for address in _addresses(operand) if address not in existing]
        for addresses, memory_role in ((sources, MEMORY_OF[role]), (copies, _COPIES[role])):
            if addresses:
                report(addresses, memory_role)

    return watch


def _addresses(operand: Operand | None) -> list[int]:
    parts = () if operand is None else (operand.data, operand.scale)
    return list(itertools.chain.from_iterable(addresses_of(part) for part in parts if part is not None))


_LOW = (MemoryRole.LOW_WEIGHTS, MemoryRole.LOW_ACTIVATIONS)
# Results of these phases do not belong to the network: unpacked sums, moments restored for an update.
_ASIDE = (Phase.CAST, Phase.ACCUMULATE, Phase.OPTIMIZER_STEP)


def roles(
    held: Iterable[HeldBlock], peak: int, state_before: StateTensors, state_after: StateTensors
) -> dict[MemoryRole, int]:
    """Returns bytes by purpose, in the order of the roles, without zeros; they sum to the peak. `state_before` and
    `state_after` are what the state holds around the step. Counted but unidentified memory is OTHER. The result is
    empty if more is identified than the allocator counts."""
    sizes = dict.fromkeys(MemoryRole, 0)
    for block in held:
        sizes[role_of(block, state_before, state_after)] += block.size
    missing = peak - sum(sizes.values())
    if missing < 0:
        return {}
    sizes[MemoryRole.OTHER] += missing
    return {role: size for role, size in sizes.items() if size}


def role_of(block: HeldBlock, state_before: StateTensors, state_after: StateTensors) -> MemoryRole:
    """Returns the purpose of an allocation: its holder decides, then the casts' reports, then its lifetime."""
    old = not block.phase
    state = (state_after.get(block.address) if block.lasting else None) or (
        state_before.get(block.address) if old else None
    )
    copied = next((role for role in block.said if role in _LOW), None)
    if state or copied:
        return state or copied or MemoryRole.OTHER
    if block.phase in LOADING:
        return MemoryRole.DATA
    # A weight existed before the step, or comes from other ranks. Anything else that is cast like a weight is an
    # intermediate result: moments, or a weight that is being updated.
    may_be_weight = old or block.phase == Phase.COMMUNICATION
    reported = [role for role in block.said if may_be_weight or role is not MemoryRole.WEIGHTS]
    return reported[0] if reported else MemoryRole.OTHER if old else _by_its_time(block)


def _by_its_time(block: HeldBlock) -> MemoryRole:
    if block.awaited:
        return MemoryRole.ACTIVATIONS
    if block.brief:
        return MemoryRole.WORKSPACE
    if block.backward:
        return MemoryRole.GRADIENTS
    if block.phase in _ASIDE:
        return MemoryRole.WORKSPACE
    return MemoryRole.OTHER if block.lasting else MemoryRole.ACTIVATIONS


def try_batch(make: Make, device: Device, index: int, limit: int | None) -> int | None:
    """Prepares a state and takes two steps; returns the peak of tensors' bytes, None if it is not counted.

    The second step has what the first one makes and keeps: moments of the optimiser, scales, workspaces. Raises the
    device's error if its memory is exhausted; and CannotLimit if it cannot enforce `limit`, or exceeding it would go
    unnoticed.
    """
    meter = device.memory_meter(index)
    if isinstance(meter, str) and limit is not None:
        raise CannotLimit(f"a limit needs a counter: {meter}")
    counter = meter if isinstance(meter, MemoryMeter) else None
    limited = nullcontext() if limit is None else device.memory_limited(index, limit)
    with collected_by_hand():
        gc.collect(1)  # frees cycles that hold tensors of the previous attempt
        device.empty_cache()  # cached memory would count as used
        if counter is not None:
            counter.start(blocks=False)  # a GPU's worker times things afterwards
        try:
            with limited:
                prepare = make(None, None)
                if counter is not None:
                    counter.mark()  # a separate state was used to find scales from data, and has been freed
                _state, take_step = prepare()
                for _ in range(2):
                    take_step(SilentPhases())
        finally:  # after the limit ends, because reading takes memory, too
            course = counter.stop() if counter is not None else None
        gc.collect(1)
    device.empty_cache()
    return course.peak if course is not None else None


# The number of steps that are always taken, and the bounds of further steps if these leave something behind: as many as
# fit into MANY_SECONDS.
FEW = 3
LEAST, MOST = 12, 48
MANY_SECONDS = 2.0
# Longer steps are not judged.
LONGEST_SECONDS = 1.0
# Smaller leaks take more than four million steps to reach a GiB.
LEAST_BYTES = 256


def leak_of(step: Callable[[], None], device: str, seconds: float) -> float | None:
    """Returns by how many bytes each step makes tensors' memory grow, on device and host; 0.0 if growth ends.

    None means unknown. `seconds` is the approximate time of a step.

    First steps may create lasting objects (an optimiser's moments, a history of scales), and a cache may grow until it
    is full, or be emptied occasionally. So a few steps are taken first, and many only if more is held after the few
    than before. The many are divided into quarters. The minimum held must rise from each quarter to the next: a cache
    that is emptied falls back, and a full one stays. Both minimum and maximum must also rise about as fast at the end
    as before, which they do not in a cache that became full.

    This detects growth that happens in every third step or more often. A cache that takes more than `MOST` steps to
    fill, or is emptied less often, cannot be distinguished from endless growth. Python's own memory is not examined:
    traced, it seems to grow by some KiB per step for dozens of honest steps, while new objects replace those made
    before tracing began.
    """
    # Most steps hold equally much after a few: then the many are skipped.
    few = _held_after(step, device, FEW) if seconds <= LONGEST_SECONDS else []
    if not few:
        return None
    if few[-1] - few[0] < LEAST_BYTES:
        return 0.0
    # The first value is from before the first of them.
    many = min(MOST, max(LEAST, int(MANY_SECONDS / seconds)))
    return growth(_held_after(step, device, many // 4 * 4, parts=4)[1:])


def growth(held: Sequence[int]) -> float:
    """Returns the growth in bytes per step, from the bytes held after each of many steps; 0.0 if it does not
    continue."""
    length = len(held) // 4
    quarters = [held[start : start + length] for start in range(0, 4 * length, length)]
    rises = [min(next_quarter) - min(quarter) for quarter, next_quarter in itertools.pairwise(quarters)]
    last = min(rises[-1], max(quarters[3]) - max(quarters[2]))
    goes_on = min(rises) > 0 and last >= max(rises) / 2
    a_step = sum(rises) / (len(rises) * length)
    return a_step if goes_on and a_step >= LEAST_BYTES else 0.0


def _held_after(step: Callable[[], None], device: str, count: int, parts: int = 0) -> list[int]:
    """Returns bytes held beyond the start, before the first step and after each; empty if they are not counted. Young
    garbage is collected after each step, all of it at the end of each of `parts` equal parts."""
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
