"""A stretch of allocations and releases: its highest point, and what is held there."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from fp8bench.model import HeldBlock, MemoryCourse, MemoryRole, PhaseMemory


@dataclass(frozen=True)
class Change:
    """So many bytes are allocated at an address, or given back if they are fewer than 0.

    `node` numbers the node of a backward pass that does it, 0 outside of any.
    """

    address: int
    size: int
    node: int = 0


@dataclass(frozen=True)
class Turn:
    """The step goes on in that phase. The first turn begins the stretch."""

    phase: str


@dataclass(frozen=True)
class Word:
    """What is held at these addresses is for that."""

    addresses: tuple[int, ...]
    role: MemoryRole


Event = Change | Turn | Word


@dataclass
class _Block:
    """An allocation on its way: events by their number in the stream, pieces of phases by theirs."""

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
    """What the events read so far say.

    Addresses tell what belongs together: a release of what was allocated before does not count, and where something is
    allocated at an address that is held, its release was not told.
    """

    def __init__(self) -> None:
        self.blocks: list[_Block] = []
        self.backwards: list[int] = []
        self.peak: int | None = None
        self.at = 0
        self.phases: dict[str, int] = {}
        self._held: dict[int, _Block] = {}
        self._now = 0
        self._phase = ""
        self._piece = 0
        self._node = 0

    def read(self, number: int, event: Event) -> None:
        match event:
            case Change():
                self._change(number, event)
            case Turn():
                self._phase = event.phase
                self._piece += 1
            case Word():
                for address in event.addresses:
                    if address in self._held:
                        self._held[address].said.setdefault(event.role)
        if self._phase:
            self.phases[self._phase] = max(self._now, self.phases.get(self._phase, 0))
            if self.peak is None or self._now > self.peak:
                self.peak, self.at = self._now, number

    def _change(self, number: int, change: Change) -> None:
        if change.node and not self._node:
            self.backwards.append(number)
        self._node = change.node
        before = self._held.pop(change.address, None)
        if before is not None:
            before.end(number, self._piece, change.node)
            self._now -= before.size
        if change.size > 0:
            block = _Block(change.address, change.size, self._phase, number, self._piece, change.node)
            self._held[change.address] = block
            self.blocks.append(block)
            self._now += change.size


def course(events: Iterable[Event]) -> MemoryCourse | None:
    """What a stretch of events comes to; None without a turn, with which it would begin."""
    stretch = _Stretch()
    for number, event in enumerate(events):
        stretch.read(number, event)
    if stretch.peak is None:
        return None
    held = [one for one in stretch.blocks if one.born <= stretch.at and (one.gone is None or one.gone > stretch.at)]
    phases = tuple(PhaseMemory(phase, most) for phase, most in stretch.phases.items())
    return MemoryCourse(stretch.peak, tuple(_as_held(one, stretch.backwards) for one in held), phases)


def _as_held(block: _Block, backwards: Sequence[int]) -> HeldBlock:
    following = bisect_right(backwards, block.born)
    came = following < len(backwards) and (block.gone is None or block.gone > backwards[following])
    inside = bool(block.phase)
    return HeldBlock(
        block.address, block.size, block.phase, block.node > 0, inside and not block.node and came,
        inside and block.brief, block.gone is None, tuple(block.said),
    )  # fmt: skip
