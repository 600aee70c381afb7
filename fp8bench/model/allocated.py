"""What an allocator was seen to hold at the highest point of a stretch of work. Bytes; never stored."""

from __future__ import annotations

from dataclasses import dataclass

from fp8bench.model.consumed import PhaseMemory
from fp8bench.model.words import MemoryRole


@dataclass(frozen=True)
class HeldBlock:
    """One allocation that was held at the highest point.

    `phase` is what the step was at when it was made, '' before the stretch; `backward` says that a backward pass made
    it, `awaited` that a forward pass did and that it was still held when a backward pass began, `brief` that it went
    within the piece of a phase (in backward: the node of autograd's graph) that had made it, `lasting` that it was
    there at the end. `said` is what was said of its address meanwhile.
    """

    address: int
    size: int
    phase: str = ""
    backward: bool = False
    awaited: bool = False
    brief: bool = False
    lasting: bool = False
    said: tuple[MemoryRole, ...] = ()


@dataclass(frozen=True)
class MemoryCourse:
    """The highest point of a stretch, what was held there, and the highest points of its phases.

    `held` are () where nobody could see single allocations; then `why` says why. They may sum to less than `peak`.
    """

    peak: int
    held: tuple[HeldBlock, ...] = ()
    phases: tuple[PhaseMemory, ...] = ()
    reserved: int | None = None
    why: str = ""
