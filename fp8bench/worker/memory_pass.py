"""A step's memory, in states of their own: its highest point and what that is made of, and whether a batch fits."""

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
)  # fmt: skip
from fp8bench.protocols.arithmetic import Watch
from fp8bench.worker.device_layout import EMULATES_NOTHING, DeviceLedger, Hardware
from fp8bench.worker.host_counters import memory, reset_high_water
from fp8bench.worker.state_tensors import StateTensors, addresses_of, state_tensors
from fp8bench.worker.static_scales import step
from fp8bench.worker.switches import collected_by_hand

# Told of where something lies, and what it is for.
Told = Callable[[Sequence[int], MemoryRole], None]


class PreparedMemory(NamedTuple):
    """A state in memory, and a step of it."""

    state: Any
    step: Callable[[Phases], None]


# Finds what a state needs, whose casts tell of what they make if somebody is told, and of what hardware would have of
# it if there is a ledger; and then prepares it.
Make = Callable[[Told | None, DeviceLedger | None], Callable[[], PreparedMemory]]


def of_workload(workload: Workload, make_setup: Callable[[], Setup], hardware: Hardware = EMULATES_NOTHING) -> Make:
    def make(told: Told | None, ledger: DeviceLedger | None) -> Callable[[], PreparedMemory]:
        setup = make_setup() if ledger is None else hardware.laid_out(make_setup(), ledger)
        setup = setup if told is None else listening(setup, told)

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
    """The memory of a step and the state; or why nobody can say, and no state. Without `leaks` nobody looks for any.

    The second step of a state is looked at: what the first one makes and keeps is there by then. Whatever counts makes
    a step slower, so the state is used for nothing else.
    """
    meter = device.memory_meter(index)
    if isinstance(meter, str):
        return meter, None
    with collected_by_hand():
        ledger = DeviceLedger(meter) if hardware.arithmetics and not hardware.why else None
        laid = _second_step(make, device, meter, ledger).course if ledger and hardware.apart else None
        own = _second_step(make, device, meter, None if laid else ledger)
        if own.course is None:
            return "torch's profiler recorded nothing", None
        use = _use(own.course, own.before, state_tensors(own.prepared.state), own.resident)
        use = _on_device(use, laid or own.course, ledger, hardware)
        if not leaks:
            return use, own.prepared.state
        again = partial(own.prepared.step, SilentPhases())
        leak = leak_of(again, device.kind if device.kind == "cpu" else f"{device.kind}:{index}", own.seconds)
        return replace(use, leak=leak), own.prepared.state


def _second_step(make: Make, device: Device, meter: MemoryMeter, ledger: DeviceLedger | None) -> _SecondStep:
    prepare = make(meter.say, ledger)
    gc.collect(0)
    device.empty_cache()  # what lies there would decide how blocks are cut
    meter.start()
    course = None
    try:
        prepared = prepare()
        prepared.step(SilentPhases())
        gc.collect(0)  # the youngest only: all that has been made since the start
        before = state_tensors(prepared.state)
        resident = reset_high_water()
        meter.mark()
        stack = [UNATTRIBUTED]  # backward may run on another thread: phases share it
        begun = time.perf_counter()
        prepared.step(Markers(lambda name: TellingMarker(name, stack, meter.enter)))
        seconds = time.perf_counter() - begun
        if isinstance(resident, Reading):
            resident = memory()["rss_high_water"]
    finally:
        course = meter.stop()
    return _SecondStep(course, prepared, before, resident, seconds)


def _on_device(use: MemoryUse, course: MemoryCourse, ledger: DeviceLedger | None, hardware: Hardware) -> MemoryUse:
    """With what hardware would hold: the peak itself where nothing is emulated."""
    if hardware.why or ledger is not None:
        why = hardware.why or (ledger.why() if ledger else "")
        return replace(use, on_device=None if why else course.on_device, off_device=why)
    return replace(use, on_device=use.peak)


def _use(course: MemoryCourse, before: StateTensors, after: StateTensors, resident: Read) -> MemoryUse:
    found = roles(course.held, course.peak, before, after) if course.held else {}
    forward = roles(course.forward, sum(block.size for block in course.forward), before, after)
    whys = [course.why]
    if course.held and not found:
        whys.append("torch's profiler saw more allocated than its allocator counts")
    if not isinstance(resident, Reading):
        whys.append(f"no resident memory: {resident.reason}")
    return MemoryUse(
        course.peak,
        tuple((role.value, size) for role, size in found.items()),
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


def listening(setup: Setup, told: Told) -> Setup:
    """The setup, whose casts are told of. A cast that changes nothing makes no copy, and is told of by its source."""
    watch = watch_of(told)
    return replace(
        setup,
        arithmetic=WatchedArithmetic(setup.arithmetic, watch),
        high=WatchedArithmetic(setup.high, watch),
        layers={key: WatchedArithmetic(arithmetic, watch) for key, arithmetic in setup.layers.items()},
    )


def watch_of(told: Told) -> Watch:
    """What a WatchedArithmetic is given, so that its casts tell of what they make."""
    return partial(_tell, told)


def _tell(told: Told, operand: Operand, source: Any, role: Role, before: Operand | None) -> None:
    """What is neither the source's memory nor that of the same operand in its other orientation is a copy."""
    import torch

    if torch.compiler.is_compiling():  # nothing lies anywhere yet
        return
    sources = [] if source is None else list(addresses_of(source))
    known = {*sources, *_addresses(before)}
    made = [address for address in _addresses(operand) if address not in known]
    for addresses, role_of_memory in ((sources, MEMORY_OF[role]), (made, _COPIES[role])):
        if addresses:
            told(addresses, role_of_memory)


def _addresses(operand: Operand | None) -> list[int]:
    parts = () if operand is None else (operand.data, operand.scale)
    return [address for part in parts if part is not None for address in addresses_of(part)]


_LOW = (MemoryRole.LOW_WEIGHTS, MemoryRole.LOW_ACTIVATIONS)
# What these make and hand on is not a network's: unpacked sums, moments restored for an update.
_ASIDE = (Phase.CAST, Phase.ACCUMULATE, Phase.OPTIMIZER_STEP)


def roles(held: Iterable[HeldBlock], peak: int, before: StateTensors, after: StateTensors) -> dict[MemoryRole, int]:
    """Bytes by what they are for, in the order of the roles, and only those that occur; they sum to the peak.

    `before` and `after` the step is what the state holds. What an allocator counts and nobody sees is OTHER; empty
    where more is seen than it counts.
    """
    sizes = dict.fromkeys(MemoryRole, 0)
    for block in held:
        sizes[role_of(block, before, after)] += block.size
    missing = peak - sum(sizes.values())
    if missing < 0:
        return {}
    sizes[MemoryRole.OTHER] += missing
    return {role: size for role, size in sizes.items() if size}


def role_of(block: HeldBlock, before: StateTensors, after: StateTensors) -> MemoryRole:
    """What one allocation is for: who holds it says best, then what was said of it, then when it came and went."""
    old = not block.phase
    state = (after.get(block.address) if block.lasting else None) or (before.get(block.address) if old else None)
    copied = next((role for role in block.said if role in _LOW), None)
    if state or copied:
        return state or copied or MemoryRole.OTHER
    if block.phase in LOADING:
        return MemoryRole.DATA
    # A weight lasts, or comes from other ranks. What else a step makes to be cast as one is a weight on its way, as
    # moments are that are cast alike.
    comes = old or block.phase == Phase.COMMUNICATION
    said = [role for role in block.said if comes or role is not MemoryRole.WEIGHTS]
    return said[0] if said else MemoryRole.OTHER if old else _by_its_time(block)


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
    """Bytes of tensors at the highest point of preparing a state and two steps; None where nobody counts.

    What does not fit while preparing does not fit. Raises what the device raises where its memory ends, and CannotLimit
    where it cannot end at `limit`, or nobody can tell that tensors have gone past it.
    """
    meter = device.memory_meter(index)
    if isinstance(meter, str) and limit is not None:
        raise CannotLimit(f"a limit needs a counter: {meter}")
    counter = meter if isinstance(meter, MemoryMeter) else None
    ended = nullcontext() if limit is None else device.memory_limited(index, limit)
    with collected_by_hand():
        gc.collect(1)  # cycles that hold tensors of the attempt before
        device.empty_cache()  # what lies there would count as taken
        if counter is not None:
            counter.start(blocks=False)  # a GPU's worker goes on to time things
        try:
            with ended:
                _two_steps(make(None, None), counter)
        finally:  # reading takes some memory, too, which has its own end again by now
            course = counter.stop() if counter is not None else None
        gc.collect(1)
    device.empty_cache()
    return course.peak if course is not None else None


def _two_steps(prepare: Callable[[], PreparedMemory], counter: MemoryMeter | None) -> None:
    """What the first one makes and keeps is there in the second: the optimiser's moments, scales, workspaces."""
    if counter is not None:
        counter.mark()  # scales from data were found with a state of its own, which is gone by now
    _state, step_under = prepare()
    for _ in range(2):
        step_under(SilentPhases())


# Steps that are always looked at, and of those that follow where these leave something behind.
FEW = 3
LEAST, MOST = 12, 48
# Of steps that take longer nothing is said. The many take about so long in all, where the least of them do.
LONGEST_SECONDS = 1.0
MANY_SECONDS = 2.0
# Less a step takes four million steps to a GiB.
LEAST_BYTES = 256


def leak_of(step: Callable[[], None], device: str, seconds: float) -> float | None:
    """Bytes by which each step makes the memory of tensors grow, on the device and on the host; 0.0 where that ends,
    None where nobody can say. `seconds` is about what a step takes.

    First steps may make what lasts (an optimiser's moments, a history of scales), and a cache may grow until it is
    full, or be emptied now and then. So a few steps are looked at, and only where more is held after them than before,
    many. Of these, cut into four, the least that is held must rise from quarter to quarter: what is emptied falls back,
    what is full stays. And least and most must rise as fast at the end as before, or nearly so: in a cache that became
    full they do not.

    Seen is what grows in every third step, or more often; a cache that takes more than `MOST` steps to fill, or is
    emptied less often, cannot be told from one that never ends. What Python holds beside tensors is not looked at:
    traced, it seems to grow by some KiB a step for dozens of honest steps, while new objects take the place of those
    that were not traced.
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
