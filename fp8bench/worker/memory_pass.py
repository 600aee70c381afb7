"""Measures the memory of a step in a separate state: its peak, what the peak consists of, and whether a batch fits."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from fp8bench.model import HeldBlock, MemoryCourse, MemoryRole, MemoryUse, Phase
from fp8bench.model.readings import Reading, ReadingOrUnavailable
from fp8bench.model.words import LOADING_PHASES
from fp8bench.profiler.allocations import AllocationStream, PhaseStart, list_bytes_at_phase_starts
from fp8bench.protocols import (
    MEMORY_ROLES,
    CannotLimit,
    Device,
    MemoryMeter,
    Operand,
    Phases,
    Role,
    Setup,
    SilentPhases,
    WatchedArithmetic,
    Workload,
)
from fp8bench.protocols.arithmetic import Watch
from fp8bench.worker.clock import make_reporting_phases
from fp8bench.worker.device_layout import NO_EMULATION, DeviceLedger, EmulatedHardware
from fp8bench.worker.host_counters import read_resident_memory, reset_peak_resident_memory
from fp8bench.worker.state_tensors import StateTensors, iterate_addresses, state_tensors
from fp8bench.worker.static_scales import step
from fp8bench.worker.switches import without_garbage_collection

# A callback that takes the addresses of allocated memory, and the purpose of this memory.
ReportMemoryRole = Callable[[Sequence[int], MemoryRole], None]


class StateWithStep(NamedTuple):
    """A prepared state, and a function that takes a step of it."""

    state: Any
    step: Callable[[Phases], None]


# Takes a callback and a ledger, either of which may be None, and returns a function that prepares a state. The state's
# casts report their memory to the callback, and record in the ledger the memory that hardware would hold.
MakeMemoryPreparation = Callable[[ReportMemoryRole | None, DeviceLedger | None], Callable[[], StateWithStep]]


def make_memory_pass_preparer(
    workload: Workload, make_setup: Callable[[], Setup], hardware: EmulatedHardware = NO_EMULATION
) -> MakeMemoryPreparation:
    def make_prepare(report: ReportMemoryRole | None, ledger: DeviceLedger | None) -> Callable[[], StateWithStep]:
        setup = make_setup()
        workload.preload(setup)
        setup = setup if ledger is None else hardware.wrap_setup(setup, ledger)
        setup = setup if report is None else report_casts(setup, report)

        def prepare() -> StateWithStep:
            state = workload.prepare(setup)
            return StateWithStep(state, partial(step, workload, state, setup.scales))

        return prepare

    return make_prepare


class _MeasuredStep(NamedTuple):
    memory_course: MemoryCourse | None
    state_with_step: StateWithStep
    before: StateTensors
    resident: ReadingOrUnavailable
    seconds: float


def measure_step_memory(
    make: MakeMemoryPreparation,
    device: Device,
    index: int,
    leaks: bool = True,
    hardware: EmulatedHardware = NO_EMULATION,
) -> tuple[MemoryUse | str, Any]:
    """Measures the memory of a step. Returns the memory and the measured state. If the memory is unknown, returns the
    reason and None.

    The second step of a state is measured, because the first step creates lasting objects. Counting makes a step
    slower, so the state is not used for anything else. With `leaks`, also measures whether memory grows from step to
    step.
    """
    # 1. Return the reason if the device cannot count memory.
    meter = device.memory_meter(index)
    if isinstance(meter, str):
        return meter, None
    with without_garbage_collection():
        # 2. If casts are emulated, record the memory that hardware would hold instead. This needs a separate step if
        # the emulation holds different tensors.
        device_ledger = DeviceLedger(meter) if hardware.arithmetics and not hardware.why else None
        device_memory_course = None
        if device_ledger and hardware.needs_separate_step:
            device_memory_course = _measure_second_step(make, device, meter, device_ledger).memory_course
        measured_step = _measure_second_step(make, device, meter, None if device_memory_course else device_ledger)
        if measured_step.memory_course is None:
            return "torch's profiler recorded nothing", None
        # 3. Sum up the memory of the step by its purpose.
        memory_use = _summarise_memory(
            measured_step.memory_course,
            measured_step.before,
            state_tensors(measured_step.state_with_step.state),
            measured_step.resident,
        )
        # Without emulation, the peak of the hardware's memory is the measured peak.
        hardware_peak_bytes = (
            (device_memory_course or measured_step.memory_course).on_device if device_ledger else memory_use.peak
        )
        reason = device_ledger.why() if device_ledger else hardware.why
        memory_use = replace(memory_use, on_device=None if reason else hardware_peak_bytes, off_device=reason)
        # 4. Measure the growth of memory, which takes many more steps.
        if not leaks:
            return memory_use, measured_step.state_with_step.state
        repeat_step = partial(measured_step.state_with_step.step, SilentPhases())
        device_key = device.kind if device.kind == "cpu" else f"{device.kind}:{index}"
        growth_bytes_per_step = measure_memory_growth(repeat_step, device_key, measured_step.seconds)
        return replace(memory_use, leak=growth_bytes_per_step), measured_step.state_with_step.state


def _measure_second_step(
    make: MakeMemoryPreparation, device: Device, meter: MemoryMeter, ledger: DeviceLedger | None
) -> _MeasuredStep:
    prepare = make(meter.say, ledger)
    gc.collect(0)
    device.empty_cache()  # cached blocks would change how new blocks are allocated
    meter.start()
    try:
        state_with_step = prepare()
        state_with_step.step(SilentPhases())
        gc.collect(0)  # generation 0 has all objects made since the collection above
        state_tensors_before_step = state_tensors(state_with_step.state)
        resident_memory_reading = reset_peak_resident_memory()
        meter.mark()
        start = time.perf_counter()
        state_with_step.step(make_reporting_phases(meter.enter))
        seconds = time.perf_counter() - start
        if isinstance(resident_memory_reading, Reading):
            resident_memory_reading = read_resident_memory()["rss_high_water"]
    finally:
        recorded_memory_course = meter.stop()
    return _MeasuredStep(
        recorded_memory_course, state_with_step, state_tensors_before_step, resident_memory_reading, seconds
    )


def _summarise_memory(
    course: MemoryCourse, state_before: StateTensors, state_after: StateTensors, resident: ReadingOrUnavailable
) -> MemoryUse:
    bytes_at_peak_by_role = sum_by_role(course.held, course.peak, state_before, state_after) if course.held else {}
    forward_bytes_by_role = sum_by_role(
        course.forward, sum(block.size for block in course.forward), state_before, state_after
    )
    reasons = [course.why]
    if course.held and not bytes_at_peak_by_role:
        reasons.append("torch's profiler saw more allocated bytes than torch's allocator counts")
    if not isinstance(resident, Reading):
        reasons.append(f"no resident memory: {resident.reason}")
    return MemoryUse(
        course.peak,
        tuple((role.value, size) for role, size in bytes_at_peak_by_role.items()),
        course.phases,
        course.reserved,
        resident=int(resident.number) if isinstance(resident, Reading) else None,
        why="; ".join(filter(None, reasons)),
        forward=tuple((role.value, size) for role, size in forward_bytes_by_role.items()),
    )


_COPY_ROLES = {
    Role.INPUT: MemoryRole.LOW_ACTIVATIONS,
    Role.WEIGHT: MemoryRole.LOW_WEIGHTS,
    Role.GRADIENT: MemoryRole.GRADIENTS,
}


def report_casts(setup: Setup, report: ReportMemoryRole) -> Setup:
    """Returns the setup with arithmetics whose casts call `report`: with the addresses and the purpose of the source
    tensor, and of the copy that the cast makes, if any.
    """
    watch = make_cast_watch(report)
    return replace(
        setup,
        arithmetic=WatchedArithmetic(setup.arithmetic, watch),
        high=WatchedArithmetic(setup.high, watch),
        layers={key: WatchedArithmetic(arithmetic, watch) for key, arithmetic in setup.layers.items()},
    )


def make_cast_watch(report: ReportMemoryRole) -> Watch:
    """Returns a function that reports the memory of each cast: the source tensor's, and the result's as a copy. If
    the result uses memory of the source, or of the cast in the other orientation, it is not reported as a copy.
    """
    import torch

    def watch(operand: Operand, source: Any, role: Role, other_orientation: Operand | None) -> None:
        if torch.compiler.is_compiling():  # while it is compiled, tensors have no addresses
            return
        source_addresses = [] if source is None else list(iterate_addresses(source))
        addresses_not_copied = {*source_addresses, *(_list_addresses(other_orientation) if other_orientation else ())}
        copied_operand_addresses = [
            address for address in _list_addresses(operand) if address not in addresses_not_copied
        ]
        for addresses, memory_role in (
            (source_addresses, MEMORY_ROLES[role]),
            (copied_operand_addresses, _COPY_ROLES[role]),
        ):
            if addresses:
                report(addresses, memory_role)

    return watch


def _list_addresses(operand: Operand) -> list[int]:
    return list(itertools.chain.from_iterable(map(iterate_addresses, operand.tensors)))


_LOW_PRECISION_ROLES = (MemoryRole.LOW_WEIGHTS, MemoryRole.LOW_ACTIVATIONS)
# Results that are made in these phases are unpacked sums, or moments restored for an update, but not activations.
_WORKSPACE_PHASES = (Phase.CAST, Phase.ACCUMULATE, Phase.OPTIMIZER_STEP)


def sum_by_role(
    held: Iterable[HeldBlock], peak: int, state_before: StateTensors, state_after: StateTensors
) -> dict[MemoryRole, int]:
    """Returns how many bytes each purpose (role) has, in the order of the roles and without zeros. They add up to the
    peak. `state_before` and `state_after` are the tensors that the state holds before and after the step. Counted
    memory without a known purpose is OTHER. The result is empty if tensors have more bytes than the allocator counts.
    """
    bytes_by_role = dict.fromkeys(MemoryRole, 0)
    for block in held:
        bytes_by_role[find_memory_role(block, state_before, state_after)] += block.size
    bytes_without_role = peak - sum(bytes_by_role.values())
    if bytes_without_role < 0:
        return {}
    bytes_by_role[MemoryRole.OTHER] += bytes_without_role
    return {role: size for role, size in bytes_by_role.items() if size}


def find_memory_role(block: HeldBlock, state_before: StateTensors, state_after: StateTensors) -> MemoryRole:
    """Returns the purpose of an allocation. It is the purpose of the state's tensor at this address after or before the
    step, else the purpose that casts have reported, else one derived from when and how long the memory was held.
    """
    existed_before_step = not block.phase
    if block.lasting and (role := state_after.get(block.address)):
        return role
    if existed_before_step and (role := state_before.get(block.address)):
        return role
    for role in block.said:
        if role in _LOW_PRECISION_ROLES:
            return role
    if block.phase in LOADING_PHASES:
        return MemoryRole.DATA
    # Only a tensor that existed before the step, or came from other ranks, can be a weight. Other tensors that are cast
    # like weights are intermediate results, such as moments, or a weight during its update.
    may_be_weight = existed_before_step or block.phase == Phase.COMMUNICATION
    for role in block.said:
        if may_be_weight or role is not MemoryRole.WEIGHTS:
            return role
    return MemoryRole.OTHER if existed_before_step else _find_role_by_lifetime(block)


def _find_role_by_lifetime(block: HeldBlock) -> MemoryRole:
    """Returns the purpose of an allocation that the step has made, from when and for how long its memory was held."""
    if block.awaited:
        return MemoryRole.ACTIVATIONS
    if block.brief:
        return MemoryRole.WORKSPACE
    if block.backward:
        return MemoryRole.GRADIENTS
    if block.phase in _WORKSPACE_PHASES:
        return MemoryRole.WORKSPACE
    return MemoryRole.OTHER if block.lasting else MemoryRole.ACTIVATIONS


def try_batch(make: MakeMemoryPreparation, device: Device, index: int, limit: int | None) -> int | None:
    """Prepares a state and takes two steps. Returns the peak of the state's tensors in bytes, or None if they are not
    counted.

    The second step has everything that the first step creates: the optimiser's moments, scales, workspaces. Raises
    the device's error if its memory is exhausted. Raises CannotLimit if the device cannot enforce `limit`, or could
    not notice that it was exceeded.
    """
    meter = device.memory_meter(index)
    if isinstance(meter, str) and limit is not None:
        raise CannotLimit(f"a memory limit needs a device that counts its memory: {meter}")
    memory_counter = meter if isinstance(meter, MemoryMeter) else None
    memory_limit = nullcontext() if limit is None else device.memory_limited(index, limit)
    with without_garbage_collection():
        gc.collect(1)  # frees tensors of the previous attempt that are in reference cycles
        device.empty_cache()  # cached memory would count as used
        if memory_counter is not None:
            # count bytes only: recording each allocation could affect cases that a GPU's worker times later
            memory_counter.start(blocks=False)
        try:
            with memory_limit:
                prepare = make(None, None)
                if memory_counter is not None:
                    memory_counter.mark()  # scales were calibrated in a separate state, whose memory is free again
                _state, take_step = prepare()
                for _ in range(2):
                    take_step(SilentPhases())
        finally:  # read the counter after the limit has ended, because reading needs memory
            recorded_memory_course = memory_counter.stop() if memory_counter is not None else None
        gc.collect(1)
    device.empty_cache()
    return recorded_memory_course.peak if recorded_memory_course is not None else None


# FIRST_STEPS steps are taken first. If memory grows during these steps, as many further steps are taken as fit into
# GROWTH_STEPS_SECONDS, but at least MIN_STEPS and at most MAX_STEPS.
FIRST_STEPS = 3
MIN_STEPS, MAX_STEPS = 12, 48
GROWTH_STEPS_SECONDS = 2.0
# The growth of memory is measured only for steps up to this many seconds.
LONGEST_STEP_SECONDS = 1.0
# Slower growth is not a leak: reaching 1 GiB would take more than four million steps.
MIN_GROWTH_BYTES = 256


def measure_memory_growth(step: Callable[[], None], device: str, seconds: float) -> float | None:
    """Returns by how many bytes the memory of tensors grows in each step, on device and host; 0.0 if the growth ends.

    None means unknown. `seconds` is the approximate time of a step.

    The first steps may create lasting objects (an optimiser's moments, a history of scales). A cache may grow until
    it is full, or be emptied from time to time. So only a few steps are taken first, and many more if memory has
    grown in these. The many steps are divided into quarters, and two conditions must be met. First, the minimum of
    held bytes must rise from each quarter to the next. It falls if a cache is emptied, and stays equal if a cache is
    full. Second, minimum and maximum must rise in the last quarter about as fast as before. They rise more slowly if
    a cache became full.

    This detects growth that happens in every third step or more often. A cache that needs more than `MAX_STEPS` steps
    to fill, or is emptied less often, cannot be distinguished from endless growth. Python's own memory is not
    examined. Under tracing it seems to grow by some KiB per step for dozens of honest steps, because new objects
    replace those made before tracing began.
    """
    # Most states stop growing within a few steps and need no more.
    held_bytes_after_first_steps = (
        _count_held_bytes(step, device, FIRST_STEPS) if seconds <= LONGEST_STEP_SECONDS else []
    )
    if not held_bytes_after_first_steps:
        return None
    if held_bytes_after_first_steps[-1] - held_bytes_after_first_steps[0] < MIN_GROWTH_BYTES:
        return 0.0
    step_count = min(MAX_STEPS, max(MIN_STEPS, int(GROWTH_STEPS_SECONDS / seconds)))
    # Round down to a multiple of 4, so that all quarters have the same length. Drop the first byte count, which was
    # taken before the first of these steps.
    return compute_growth(_count_held_bytes(step, device, step_count // 4 * 4, parts=4)[1:])


def compute_growth(held: Sequence[int]) -> float:
    """Returns the growth in bytes per step, from the bytes that were held after each of many steps; 0.0 if the growth
    ends.
    """
    steps_per_quarter = len(held) // 4
    held_bytes_by_quarter = [
        held[start : start + steps_per_quarter] for start in range(0, 4 * steps_per_quarter, steps_per_quarter)
    ]
    minimum_bytes_rises = [
        min(next_quarter) - min(quarter) for quarter, next_quarter in itertools.pairwise(held_bytes_by_quarter)
    ]
    last_quarter_rise = min(minimum_bytes_rises[-1], max(held_bytes_by_quarter[3]) - max(held_bytes_by_quarter[2]))
    growth_continues = min(minimum_bytes_rises) > 0 and last_quarter_rise >= max(minimum_bytes_rises) / 2
    bytes_per_step = sum(minimum_bytes_rises) / (len(minimum_bytes_rises) * steps_per_quarter)
    return bytes_per_step if growth_continues and bytes_per_step >= MIN_GROWTH_BYTES else 0.0


def _count_held_bytes(step: Callable[[], None], device: str, count: int, parts: int = 0) -> list[int]:
    """Returns how many more bytes are held than at the start: before the first step, and after each of `count` steps.
    Returns [] if bytes are not counted.

    After each step, only the youngest generation of garbage is collected. With `parts`, all garbage is collected after
    every `count // parts` steps.
    """
    allocation_stream = AllocationStream("cpu", device)
    gc.collect(2 if parts else 0)
    allocation_stream.start()
    try:
        allocation_stream.note(PhaseStart(""))
        for step_number in range(1, count + 1):
            step()
            gc.collect(2 if parts and step_number % (count // parts) == 0 else 0)
            allocation_stream.note(PhaseStart(""))
    finally:
        allocation_events = allocation_stream.stop()
    return list_bytes_at_phase_starts(allocation_events or [])
