"""Follows every allocation and release on a device, to the byte. torch's allocators report them to torch's profiler.

From these events it computes the peak of memory, and the allocations that are held at the peak.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from fp8bench.model import HeldBlock, MemoryCourse, MemoryRole, PhaseMemory
from fp8bench.model.consumed import DeviceNote, EmulationEnd, EmulationStart, Laid, Lifted
from fp8bench.profiler import silence_kineto
from fp8bench.protocols import MemoryMeter

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class MemoryChange:
    """An allocation at an address, or its release if `size` is negative. `node` is the number of the autograd node that
    caused it, or 0 outside of backward passes.
    """

    address: int
    size: int
    node: int = 0


@dataclass(frozen=True)
class PhaseStart:
    """The step enters a phase. The search for the peak of memory begins at the first PhaseStart."""

    phase: str


@dataclass(frozen=True)
class MemoryRoleNote:
    """Assigns a role, such as weights, to the allocations at these addresses."""

    addresses: tuple[int, ...]
    role: MemoryRole


@dataclass(frozen=True)
class LiveAllocationAddresses:
    """The addresses that are allocated according to torch's allocator. Allocations at other addresses were released
    without an event.
    """

    addresses: frozenset[int]


# A DeviceNote describes the memory of hardware with the emulated formats. From the note Laid to the note Lifted with
# the same key, such hardware would hold a tensor. Between EmulationStart and EmulationEnd an emulation runs, whose own
# memory the hardware would not need.
MemoryTraceNote = PhaseStart | MemoryRoleNote | LiveAllocationAddresses | DeviceNote
Event = MemoryChange | MemoryTraceNote


@dataclass
class _Allocation:
    """An allocation in the stream of events. `start_event` and `end_event` are the indices of its two events.
    `is_short_lived` means that it ends in the same phase and autograd node in which it began.
    """

    address: int
    size: int
    phase: str
    start_event: int
    phase_number: int
    node: int
    end_event: float = math.inf
    is_short_lived: bool = False
    roles: list[MemoryRole] = field(default_factory=list)

    def end(self, event_number: int, phase_number: int, node: int) -> None:
        self.end_event = event_number
        self.is_short_lived = (phase_number, node) == (self.phase_number, self.node)


class _PeakMemoryFinder:
    """Reads events one by one and finds the peak of memory. It ignores the release of an allocation that is older
    than the events. If a new allocation has an address that is still held, the old one was released without an event.
    """

    def __init__(self) -> None:
        self.blocks: list[_Allocation] = []
        # The indices of the events that start backward passes. Such an event is a memory change in an autograd node,
        # and the memory change before it, if there is one, is outside of nodes.
        self.backward_starts: list[int] = []
        self.peak: int | None = None
        self.peak_event = 0
        self.phases: dict[str, int] = {}
        self.first_phase_event: int | None = None
        self._held: dict[int, _Allocation] = {}
        self._current_bytes = 0
        self._phase = ""
        self._phase_number = 0
        self._node = 0

    def read(self, number: int, event: Event) -> None:
        match event:
            case MemoryChange():
                self._apply_memory_change(number, event)
            case PhaseStart():
                self.first_phase_event = number if self.first_phase_event is None else self.first_phase_event
                self._phase = event.phase
                self._phase_number += 1
            case MemoryRoleNote():
                for address in event.addresses:
                    block = self._held.get(address)
                    if block is not None and event.role not in block.roles:
                        block.roles.append(event.role)
            case LiveAllocationAddresses():
                for address in self._held.keys() - event.addresses:
                    self._end_allocation(address, number, self._node)
        if self._phase:
            self.phases[self._phase] = max(self._current_bytes, self.phases.get(self._phase, 0))
            if self.peak is None or self._current_bytes > self.peak:
                self.peak = self._current_bytes
                self.peak_event = number

    def _apply_memory_change(self, number: int, change: MemoryChange) -> None:
        if change.node and not self._node:
            self.backward_starts.append(number)
        self._node = change.node
        if change.address in self._held:
            self._end_allocation(change.address, number, change.node)
        if change.size > 0:
            block = _Allocation(change.address, change.size, self._phase, number, self._phase_number, change.node)
            self._held[change.address] = block
            self.blocks.append(block)
            self._current_bytes += change.size

    def _end_allocation(self, address: int, number: int, node: int) -> None:
        block = self._held.pop(address)
        block.end(number, self._phase_number, node)
        self._current_bytes -= block.size

    def list_blocks_held_after_event(self, event_index: int) -> tuple[HeldBlock, ...]:
        """Returns the allocations that are held after an event. Call this method only after all events were read."""
        held_blocks = (block for block in self.blocks if block.start_event <= event_index < block.end_event)
        return tuple(map(self._describe_block, held_blocks))

    def _describe_block(self, block: _Allocation) -> HeldBlock:
        """Describes an allocation. It is `awaited` if it was made in a phase, but not in a backward pass, and is still
        held when the next backward pass starts.
        """
        next_backward_index = bisect_right(self.backward_starts, block.start_event)
        is_held_when_backward_starts = (
            next_backward_index < len(self.backward_starts)
            and block.end_event > self.backward_starts[next_backward_index]
        )
        began_in_phase = bool(block.phase)
        return HeldBlock(
            block.address,
            block.size,
            block.phase,
            backward=block.node > 0,
            awaited=began_in_phase and not block.node and is_held_when_backward_starts,
            brief=began_in_phase and block.is_short_lived,
            lasting=block.end_event == math.inf,
            said=tuple(block.roles),  # the roles that notes assigned
        )


@dataclass(slots=True)
class _DeviceBlock:
    """A block of memory on a device. It is held as long as it has users: the allocation itself, and low-precision
    tensors that a real device would store in it. `is_counted` is False until the emulation that allocated the block
    ends, and for blocks that a device would not have.
    """

    size: int
    is_counted: bool = True
    num_users: int = 1


class _DevicePeakMemoryFinder:
    """Finds the peak of memory that a device would have if its hardware had the formats. Reads the same events as
    _PeakMemoryFinder, but replaces the allocations of the emulation by those that notes describe.
    """

    def __init__(self) -> None:
        self.peak: int | None = None
        self.has_notes = False
        self._held: dict[int, _DeviceBlock] = {}
        self._layouts: dict[int, _DeviceBlock] = {}
        self._emulation_blocks: dict[int, _DeviceBlock] | None = None
        self._current_bytes = 0
        self._has_begun = False

    def read(self, event: Event) -> None:
        # Events come in the order of execution, so apply each to the current memory of the device.
        match event:
            case MemoryChange():
                self._apply_memory_change(event)
            case PhaseStart():
                self._has_begun = True
            # A block that was released without an event is missing from the allocator's addresses.
            case LiveAllocationAddresses():
                for address in self._held.keys() - event.addresses:
                    self._release_device_block(self._held.pop(address))
            # Hardware does not need the memory of an emulation, so its blocks do not count until the emulation ends.
            case EmulationStart():
                self._emulation_blocks = {}
                self.has_notes = True
            case EmulationEnd():
                self._end_emulation(event.replaced)
            # From Laid on the hardware would hold a tensor, in new memory or in an existing block, until the Lifted
            # note with the same key.
            case Laid() if not event.address:
                self._layouts[event.key] = _DeviceBlock(event.size)
                self._current_bytes += event.size
            case Laid() if event.address in self._held:
                block = self._layouts[event.key] = self._held[event.address]
                block.num_users += 1
            case Lifted():
                if event.key in self._layouts:
                    self._release_device_block(self._layouts.pop(event.key))
        # memory of the emulation is not a part of the device's peak
        if self._has_begun and self._emulation_blocks is None:
            self.peak = max(self._current_bytes, self.peak or 0)

    def _apply_memory_change(self, change: MemoryChange) -> None:
        if change.address in self._held:
            self._release_device_block(self._held.pop(change.address))
        if change.size <= 0:
            return
        block = self._held[change.address] = _DeviceBlock(change.size, self._emulation_blocks is None)
        if self._emulation_blocks is None:
            self._current_bytes += block.size
        else:
            self._emulation_blocks[change.address] = block

    def _end_emulation(self, replaced: Sequence[int]) -> None:
        """Ends an emulation. Its blocks that still exist now count as memory of the device, except those at the
        `replaced` addresses: a device would store their values in its low-precision formats instead.
        """
        for address, block in (self._emulation_blocks or {}).items():
            if self._held.get(address) is block and address not in replaced:
                block.is_counted = True
                self._current_bytes += block.size
        self._emulation_blocks = None

    def _release_device_block(self, block: _DeviceBlock) -> None:
        block.num_users -= 1
        if not block.num_users and block.is_counted:
            self._current_bytes -= block.size


def find_memory_course(events: Iterable[Event]) -> MemoryCourse | None:
    """Returns the peak of memory since the first phase, the peak of each phase, and the blocks that are held at the
    peak and just before the first backward pass. Returns None without a phase.
    """
    # 1. Follow the memory that torch allocates, and the memory that hardware with the emulated formats would need.
    memory_peak_finder = _PeakMemoryFinder()
    device_peak_finder = _DevicePeakMemoryFinder()
    for number, event in enumerate(events):
        memory_peak_finder.read(number, event)
        device_peak_finder.read(event)
    if memory_peak_finder.peak is None or memory_peak_finder.first_phase_event is None:
        return None
    first_phase_event = memory_peak_finder.first_phase_event
    backward_start_index = next(
        (number for number in memory_peak_finder.backward_starts if number > first_phase_event), None
    )
    # 2. List what is held at the peak, and what forward keeps until the first backward pass of the step.
    phases = tuple(PhaseMemory(phase, peak) for phase, peak in memory_peak_finder.phases.items())
    blocks_at_peak = memory_peak_finder.list_blocks_held_after_event(memory_peak_finder.peak_event)
    blocks_before_backward = (
        ()
        if backward_start_index is None
        else memory_peak_finder.list_blocks_held_after_event(backward_start_index - 1)
    )
    device_peak_bytes = device_peak_finder.peak if device_peak_finder.has_notes else None
    return MemoryCourse(
        memory_peak_finder.peak, blocks_at_peak, phases, on_device=device_peak_bytes, forward=blocks_before_backward
    )


def list_bytes_at_phase_starts(events: Iterable[Event]) -> list[int]:
    """Returns the bytes that are held at the start of each phase. Allocations from before the events do not count."""
    allocated_bytes = 0
    bytes_at_phase_starts = []
    for event in events:
        match event:
            case MemoryChange():
                allocated_bytes += event.size
            case PhaseStart():
                bytes_at_phase_starts.append(allocated_bytes)
    return bytes_at_phase_starts


# The name of an allocation or release in torch's profiler.
_MEMORY_EVENT = "[memory]"
# The name of a node of a backward pass begins with this text.
_BACKWARD_EVENT = "autograd::engine::evaluate_function"
# The name of a note of fp8bench, before the number of the note.
_NOTE_EVENT_PREFIX = "fp8bench: note "


class AllocationStream:
    """Records the memory events of some devices ('cpu', 'cuda:1'), with fp8bench's notes between them.

    torch's profiler records the thread that started it, and the threads that autograd and torch's operations use for
    this thread. It records no other Python threads. It records on the host only, and is not attached to a GPU. One kind
    of event is missing: autograd's thread for a GPU releases the inputs of a node after the node has ended, and torch
    does not record these releases.
    """

    def __init__(self, *devices: str) -> None:
        self._devices = devices
        self._notes: list[MemoryTraceNote] = []
        self._profile: torch.autograd.profiler.profile | None = None
        self._contexts = ExitStack()

    def start(self, alone: bool = True) -> None:
        """Starts recording. With `alone`, also calls `keep_backward_in_thread`."""
        # Do not use torch.profiler.profile, which first imports torch's compiler.
        from torch.autograd.profiler import profile, record_function

        self._notes = []
        profiler = profile(use_kineto=True, profile_memory=True)
        with silence_kineto():
            profiler.__enter__()  # type: ignore[no-untyped-call]
        self._profile = profiler
        # torch keeps a GPU's memory events only within another event, so open one that lasts until `stop`.
        self._contexts.enter_context(record_function("fp8bench: whole"))
        if alone:
            self.keep_backward_in_thread()

    @property
    def listening(self) -> bool:
        return self._profile is not None

    def keep_backward_in_thread(self) -> None:
        """Makes backward passes run in the thread that starts them, until `stop`. So all their events are recorded."""
        import torch

        self._contexts.enter_context(torch.autograd.set_multithreading_enabled(False))

    def note(self, note: MemoryTraceNote) -> None:
        """Adds a note, such as the start of a phase, at this point of the stream of events. Does nothing before `start`
        and after `stop`.
        """
        from torch.autograd.profiler import record_function

        if self._profile is None:
            return
        self._notes.append(note)
        with record_function(f"{_NOTE_EVENT_PREFIX}{len(self._notes) - 1}"):
            pass

    def stop(self) -> list[Event] | None:
        """Stops recording and returns the events in order. Returns None if nothing was recorded. This
        method can be called after an exception.
        """
        profiler = self._profile
        self._profile = None
        if profiler is None:
            return None
        # Close the event that `start` has opened, so that the profiler records its end.
        self._contexts.close()
        profiler.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        if profiler.kineto_results is None:
            return None
        events: list[Event] = []
        # Sorting keeps the order of events that have the same time stamp.
        for _, name, fields, node in sorted(
            _iterate_changes_and_notes(profiler.kineto_results.experimental_event_tree()), key=itemgetter(0)
        ):
            if name != _MEMORY_EVENT:
                events.append(self._notes[int(name.removeprefix(_NOTE_EVENT_PREFIX))])
            elif str(fields.device) in self._devices:
                events.append(MemoryChange(fields.ptr, fields.alloc_size, node))
        return events


class StreamMeter(MemoryMeter):
    """The base class of memory meters that record allocations as a stream of events, with notes between them.
    Subclasses start and stop the stream.
    """

    def __init__(self, *devices: str) -> None:
        self._stream = AllocationStream(*devices)

    def say(self, addresses: Sequence[int], role: MemoryRole) -> None:
        """Notes the role of the allocations at these addresses."""
        self._stream.note(MemoryRoleNote(tuple(addresses), role))

    @property
    def listening(self) -> bool:
        return self._stream.listening

    def note(self, note: DeviceNote) -> None:
        self._stream.note(note)


def _iterate_changes_and_notes(tree: Sequence[Any]) -> Iterator[tuple[int, str, Any, int]]:
    """Yields the time, name, fields and backward node of each memory change and note. The tree has ten times as many
    other events, so the function reads as few of their attributes as possible. An event comes before its children.
    """
    unvisited_events = [(event, 0) for event in reversed(tree)]
    backward_node_count = 0
    while unvisited_events:
        event, backward_node_number = unvisited_events.pop()
        name = event.name
        if name == _MEMORY_EVENT:
            yield event.start_time_ns, name, event.extra_fields, backward_node_number
            continue
        if name.startswith(_NOTE_EVENT_PREFIX):
            yield event.start_time_ns, name, None, backward_node_number
        elif name.startswith(_BACKWARD_EVENT):
            backward_node_count += 1
            backward_node_number = backward_node_count
        elif backward_node_number:
            # Checkpointing runs forward operations again during backward. They count as forward (node 0). torch gives
            # them the scope FUNCTION and a sequence number. The function of a backward node also has a sequence number,
            # but a different scope.
            fields = event.extra_fields
            record_scope_name = getattr(getattr(fields, "scope", None), "name", "")
            if record_scope_name == "FUNCTION" and getattr(fields, "sequence_number", -1) >= 0:
                backward_node_number = 0
        unvisited_events.extend([(child, backward_node_number) for child in reversed(event.children)])
