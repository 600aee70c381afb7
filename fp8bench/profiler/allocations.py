"""Follows every allocation and release of one device, to the byte, as torch's allocators report them to its profiler.

For a series of events it returns the peak, and the allocations held at it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from fp8bench.model import HeldBlock, MemoryCourse, MemoryRole, PhaseMemory
from fp8bench.model.consumed import DeviceNote, Emulating, EmulationEnd, Laid, Lifted
from fp8bench.profiler import quiet

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Sized:
    """Bytes that are allocated at an address, or freed if they are negative. `node` numbers the node of a backward pass
    that does it, 0 outside of any."""

    address: int
    size: int
    node: int = 0


@dataclass(frozen=True)
class Begun:
    """The step enters that phase. The first one begins the stretch."""

    phase: str


@dataclass(frozen=True)
class Said:
    """Assigns a role to the allocations at these addresses."""

    addresses: tuple[int, ...]
    role: MemoryRole


@dataclass(frozen=True)
class Live:
    """The addresses that the allocator itself counts as allocated. If others are held, their release went unheard."""

    addresses: frozenset[int]


Note = Begun | Said | Live | DeviceNote
Event = Sized | Note


@dataclass
class _HeldStretch:
    """An allocation in the stream: `born` and `gone` are numbers of events, `piece` is the number of its phase."""

    address: int
    size: int
    phase: str
    born: int
    piece: int
    node: int
    gone: int | None = None
    brief: bool = False
    said: dict[MemoryRole, None] = field(default_factory=dict)

    def end(self, number: int, piece: int, node: int) -> None:
        self.gone = number
        self.brief = (piece, node) == (self.piece, self.node)


class _Stretch:
    """Reads events one by one. Addresses connect them: the release of something allocated earlier does not count, and
    an allocation at an address that is held means that its release went unheard."""

    def __init__(self) -> None:
        self.blocks: list[_HeldStretch] = []
        self.backwards: list[int] = []
        self.peak: int | None = None
        self.at = 0
        self.phases: dict[str, int] = {}
        self.begun: int | None = None
        self._held: dict[int, _HeldStretch] = {}
        self._now = 0
        self._phase = ""
        self._piece = 0
        self._node = 0

    def read(self, number: int, event: Event) -> None:
        match event:
            case Sized():
                self._change(number, event)
            case Begun():
                self.begun = number if self.begun is None else self.begun
                self._phase = event.phase
                self._piece += 1
            case Said():
                for address in event.addresses:
                    if address in self._held:
                        self._held[address].said.setdefault(event.role)
            case Live():
                for address in self._held.keys() - event.addresses:
                    self._end(address, number, self._node)
        if self._phase:
            self.phases[self._phase] = max(self._now, self.phases.get(self._phase, 0))
            if self.peak is None or self._now > self.peak:
                self.peak, self.at = self._now, number

    def _change(self, number: int, change: Sized) -> None:
        if change.node and not self._node:
            self.backwards.append(number)
        self._node = change.node
        if change.address in self._held:
            self._end(change.address, number, change.node)
        if change.size > 0:
            block = _HeldStretch(change.address, change.size, self._phase, number, self._piece, change.node)
            self._held[change.address] = block
            self.blocks.append(block)
            self._now += change.size

    def _end(self, address: int, number: int, node: int) -> None:
        block = self._held.pop(address)
        block.end(number, self._piece, node)
        self._now -= block.size

    def held_after(self, number: int) -> tuple[HeldBlock, ...]:
        """Returns what is held after an event; needs all events to be read."""
        held = (block for block in self.blocks if block.born <= number and (block.gone is None or block.gone > number))
        return tuple(map(self._as_held, held))

    def _as_held(self, block: _HeldStretch) -> HeldBlock:
        following = bisect_right(self.backwards, block.born)
        awaited = following < len(self.backwards) and (block.gone is None or block.gone > self.backwards[following])
        inside = bool(block.phase)
        return HeldBlock(
            block.address,
            block.size,
            block.phase,
            block.node > 0,
            inside and not block.node and awaited,
            inside and block.brief,
            block.gone is None,
            tuple(block.said),
        )


@dataclass(slots=True)
class _DeviceBlock:
    """Memory that a device holds for `users`: who allocated it, and what was laid out in it."""

    size: int
    counts: bool = True
    users: int = 1


class _DeviceCount:
    """Counts what a device with the formats would hold: the same events, with notes in place of an emulation's."""

    def __init__(self) -> None:
        self.peak: int | None = None
        self.noted = False
        self._held: dict[int, _DeviceBlock] = {}
        self._laid: dict[int, _DeviceBlock] = {}
        self._aside: dict[int, _DeviceBlock] | None = None
        self._now = 0
        self._begun = False

    def read(self, event: Event) -> None:
        # Events come in the order of the device's stream, so that the state after each is the device's.
        match event:
            case Sized():
                self._change(event)
            case Begun():
                self._begun = True
            # Blocks whose release was not observed are missing from the allocator's addresses.
            case Live():
                for address in self._held.keys() - event.addresses:
                    self._let_go(self._held.pop(address))
            # A device would not need an emulation's memory: it is counted separately.
            case Emulating():
                self._aside, self.noted = {}, True
            case EmulationEnd():
                self._end(event.replaced)
            case Laid() if not event.address:
                self._laid[event.key] = _DeviceBlock(event.size)
                self._now += event.size
            case Laid() if event.address in self._held:
                block = self._laid[event.key] = self._held[event.address]
                block.users += 1
            case Lifted():
                if event.key in self._laid:
                    self._let_go(self._laid.pop(event.key))
        if self._begun and self._aside is None:  # an emulation's memory is not part of a device's peak
            self.peak = max(self._now, self.peak or 0)

    def _change(self, change: Sized) -> None:
        if change.address in self._held:
            self._let_go(self._held.pop(change.address))
        if change.size <= 0:
            return
        block = self._held[change.address] = _DeviceBlock(change.size, self._aside is None)
        if self._aside is None:
            self._now += block.size
        else:
            self._aside[change.address] = block

    def _end(self, replaced: Sequence[int]) -> None:
        for address, block in (self._aside or {}).items():
            if self._held.get(address) is block and address not in replaced:
                block.counts = True
                self._now += block.size
        self._aside = None

    def _let_go(self, block: _DeviceBlock) -> None:
        block.users -= 1
        if not block.users and block.counts:
            self._now -= block.size


def course(events: Iterable[Event]) -> MemoryCourse | None:
    """Returns the peak of a stretch and what is held there; None if no phase begins it."""
    stretch, device = _Stretch(), _DeviceCount()
    for number, event in enumerate(events):
        stretch.read(number, event)
        device.read(event)
    if stretch.peak is None or stretch.begun is None:
        return None
    begun = stretch.begun
    turn = next((number for number in stretch.backwards if number > begun), 0)
    phases = tuple(PhaseMemory(phase, most) for phase, most in stretch.phases.items())
    held, forward = stretch.held_after(stretch.at), stretch.held_after(turn - 1)
    on_device = device.peak if device.noted else None
    return MemoryCourse(stretch.peak, held, phases, on_device=on_device, forward=forward)


def live_at_turns(events: Iterable[Event]) -> list[int]:
    """Returns the bytes held whenever a phase begins, beyond what was held before the events."""
    live, turns = 0, []
    for event in events:
        match event:
            case Sized():
                live += event.size
            case Begun():
                turns.append(live)
    return turns


# The profiler's names of an allocation or release, and of a node of a backward pass; and our prefix of notes.
_CHANGE = "[memory]"
_NODE = "autograd::engine::evaluate_function"
_NOTE = "fp8bench: note "


class AllocationStream:
    """The events of some devices ('cpu', 'cuda:1'), with our notes in between.

    The profiler hears the thread that started it and the threads on which autograd and torch's own operations work for
    it, not other threads of Python. It only listens on the host: nothing is attached to a GPU. torch keeps a GPU's
    allocations only if they lie within another event, so a record stays open from start to stop. Autograd's own thread
    for a GPU frees what a node was given after the node has ended, where nobody hears it.
    """

    def __init__(self, *devices: str) -> None:
        self._devices = devices
        self._notes: list[Note] = []
        self._profile: torch.autograd.profiler.profile | None = None
        self._whole = ExitStack()

    def start(self, alone: bool = True) -> None:
        # Not torch.profiler's, which imports torch's compiler first: 1.4 s.
        from torch.autograd.profiler import profile, record_function

        self._notes = []
        profiler = profile(use_kineto=True, profile_memory=True)
        with quiet():
            profiler.__enter__()  # type: ignore[no-untyped-call]
        self._profile = profiler
        self._whole.enter_context(record_function("fp8bench: whole"))
        if alone:
            self.alone()

    @property
    def listening(self) -> bool:
        return self._profile is not None

    def alone(self) -> None:
        """Lets backward passes run in the thread that starts them until `stop`, so that all of them is heard."""
        import torch

        self._whole.enter_context(torch.autograd.set_multithreading_enabled(False))

    def note(self, note: Note) -> None:
        """Adds a note at this point of the stream, if it is listening."""
        from torch.autograd.profiler import record_function

        if self._profile is None:
            return
        self._notes.append(note)
        with record_function(f"{_NOTE}{len(self._notes) - 1}"):
            pass

    def stop(self) -> list[Event] | None:
        """Stops listening and returns the events in order; None if nothing was recorded. Safe after exceptions."""
        profiler, self._profile = self._profile, None
        if profiler is None:
            return None
        self._whole.close()
        profiler.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        if profiler.kineto_results is None:
            return None
        events: list[Event] = []
        # The sort is stable, so that events within one tick of the clock stay in order.
        for _, name, fields, node in sorted(
            _changes_and_notes(profiler.kineto_results.experimental_event_tree()), key=itemgetter(0)
        ):
            if name != _CHANGE:
                events.append(self._notes[int(name.removeprefix(_NOTE))])
            elif str(fields.device) in self._devices:
                events.append(Sized(fields.ptr, fields.alloc_size, node))
        return events


def _changes_and_notes(tree: Sequence[Any]) -> Iterator[tuple[int, str, Any, int]]:
    """Yields the time, name, fields and backward node of changes and notes; children come after their parents. Each
    access to an event of the profiler is a call of C++, and there are ten times as many events."""
    waiting = [(event, 0) for event in reversed(tree)]
    nodes = 0
    while waiting:
        event, node = waiting.pop()
        name = event.name
        if name == _CHANGE:
            yield event.start_time_ns, name, event.extra_fields, node
            continue
        if name.startswith(_NOTE):
            yield event.start_time_ns, name, None, node
        elif name.startswith(_NODE):
            nodes += 1
            node = nodes
        elif node:
            # A forward operation of a block that is recomputed within backward gets the number of a separate backward
            # pass; the function of a node itself has the number of its forward.
            fields = event.extra_fields
            scope = getattr(getattr(fields, "scope", None), "name", "")
            if scope == "FUNCTION" and getattr(fields, "sequence_number", -1) >= 0:
                node = 0
        waiting.extend([(child, node) for child in reversed(event.children)])
