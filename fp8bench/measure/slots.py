"""The shape of a slot (its calls, those discarded first, how a device's queue is filled ahead), and the cells of a
step.

A cell is the time that one phase took within one stretch of 100 us or more of a step (tried: stretches of 1 ms widen
the interval of a 30 ms step by a tenth and of 5 ms by two thirds; finer ones gain nothing). Cells are fixed by the
marks of a calibrating step, so that the same cell means the same work in every call, and cells sum to the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fp8bench.model import CELL_PHASES, Segments
from fp8bench.model.raw import Filling
from fp8bench.protocols.axes import COLD

SLOT_SECONDS = 8e-3
REPEAT_BELOW_SECONDS = 4e-3
# On an accelerator a slot begins with an empty queue: short kernels of the first call wait for the host, those of later
# calls find the queue as full as the host can fill it.
DEVICE_CALLS = 3
# Flushing a cache of some megabytes takes longer than most steps.
COLD_CALLS = 4
# A queue takes about 1,024 launches, of some 5 us of the host each, and then the host waits: longer does not help.
MOST_FILLING_SECONDS = 10e-3
# For a host that is slower the next time.
_MARGIN = 1.25


@dataclass(frozen=True)
class SlotShape:
    """`discard` calls that are not timed, then `calls` that are."""

    calls: int = 1
    discard: int = 0
    filling: Filling | None = None


def shape_of(step_seconds: float, host_seconds: float, cache: str, queues: bool) -> SlotShape:
    """`host_seconds` is what the host takes to enqueue a step; `queues`: whether steps are enqueued at all."""
    calls, discard = 1, 0
    if step_seconds < REPEAT_BELOW_SECONDS:
        calls, discard = max(2, round(SLOT_SECONDS / step_seconds)), 1
    if cache == COLD:
        calls = min(COLD_CALLS, calls)
    if not queues:
        return SlotShape(calls, discard)
    calls = max(DEVICE_CALLS, calls)
    return SlotShape(calls, discard, filling_of(host_seconds, calls))


def filling_of(host_seconds: float, calls: int) -> Filling | None:
    """How to fill the queue before all calls, or before as many as the host enqueues in the most that is allowed.

    None where the host takes no measurable time.
    """
    if host_seconds <= 0:
        return None
    together = max(1, min(calls, int(MOST_FILLING_SECONDS / (_MARGIN * host_seconds))))
    return Filling(together, min(MOST_FILLING_SECONDS, _MARGIN * host_seconds * together))


LEAST_BLOCK_NS = 100_000
MOST_BLOCKS = 256


@dataclass(frozen=True)
class Segmentation:
    """Which cell each interval between marks belongs to."""

    codes: tuple[int, ...]
    cell_of: tuple[int, ...]
    segments: Segments

    def cells(self, codes: Sequence[int], intervals_ns: Sequence[int]) -> tuple[int, ...] | None:
        """Nanoseconds by cell of one step, or None if its marks differ from the calibrating step's."""
        if tuple(codes) != self.codes:
            return None
        totals = [0] * len(self.segments.phases)
        for cell, interval in zip(self.cell_of, intervals_ns, strict=True):
            totals[cell] += interval
        return tuple(totals)


def block_length(step_ns: int) -> int:
    return max(LEAST_BLOCK_NS, step_ns // MOST_BLOCKS)


def segment(
    codes: Sequence[int], intervals_ns: Sequence[int], block_ns: int | None = None, part_ends: str = ""
) -> Segmentation:
    """Cuts a step at its marks into blocks, and numbers the (block, phase) cells in order of appearance.

    A block also ends behind the phase `part_ends`, which ends a part of a step.
    """
    block_ns = block_ns or block_length(sum(intervals_ns))
    cells: dict[tuple[int, int], int] = {}
    cell_of = []
    block, in_block = 0, 0
    for code, interval in zip(codes, intervals_ns, strict=True):
        if in_block >= block_ns:
            block, in_block = block + 1, 0
        cell_of.append(cells.setdefault((block, code), len(cells)))
        in_block = block_ns if CELL_PHASES[code] == part_ends else in_block + interval
    phases = tuple(CELL_PHASES[code] for _, code in cells)
    return Segmentation(tuple(codes), tuple(cell_of), Segments(phases, tuple(number for number, _ in cells)))


def by_phase(codes: Sequence[int]) -> Segmentation:
    segments = Segments(CELL_PHASES, (0,) * len(CELL_PHASES))
    return Segmentation(tuple(codes), tuple(codes), segments)


def by_phase_totals(codes: Sequence[int], intervals_ns: Sequence[int]) -> tuple[int, ...]:
    totals = [0] * len(CELL_PHASES)
    for code, interval in zip(codes, intervals_ns, strict=True):
        totals[code] += interval
    return tuple(totals)
