"""From marks to cells: a step cut into stretches, and in each stretch the time of each phase.

A cell is the time one phase took within one stretch of 100 us or more (tried: stretches of 1 ms widen the interval of
a 30 ms step by a tenth and of 5 ms by two thirds; finer ones gain nothing). Cells are fixed by the marks of a
calibrating step, so that the same cell means the same work in every call, and cells sum to the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fp8bench.model import CELL_PHASES, Segments

LEAST_BLOCK_NS = 100_000
MOST_BLOCKS = 256


@dataclass(frozen=True)
class Segmentation:
    """Which cell each interval between marks belongs to."""

    codes: tuple[int, ...]
    cell_of: tuple[int, ...]
    segments: Segments

    def cells(self, codes: Sequence[int], intervals_ns: Sequence[int]) -> tuple[int, ...] | None:
        """The cells of one step, or None if its marks differ from the calibrating step's."""
        if tuple(codes) != self.codes:
            return None
        totals = [0] * len(self.segments.phases)
        for cell, interval in zip(self.cell_of, intervals_ns, strict=True):
            totals[cell] += interval
        return tuple(totals)


def block_length(step_ns: int) -> int:
    return max(LEAST_BLOCK_NS, step_ns // MOST_BLOCKS)


def segment(codes: Sequence[int], intervals_ns: Sequence[int], block_ns: int | None = None) -> Segmentation:
    """Cut a step at its marks into blocks, and number the (block, phase) cells in order of appearance."""
    block_ns = block_ns or block_length(sum(intervals_ns))
    cells: dict[tuple[int, int], int] = {}
    cell_of = []
    block, in_block = 0, 0
    for code, interval in zip(codes, intervals_ns, strict=True):
        if in_block >= block_ns:
            block, in_block = block + 1, 0
        cell_of.append(cells.setdefault((block, code), len(cells)))
        in_block += interval
    phases = tuple(CELL_PHASES[code] for _, code in cells)
    return Segmentation(tuple(codes), tuple(cell_of), Segments(phases, tuple(number for number, _ in cells)))


def by_phase(codes: Sequence[int]) -> Segmentation:
    """One cell a phase, for steps whose marks vary from call to call."""
    segments = Segments(CELL_PHASES, (0,) * len(CELL_PHASES))
    return Segmentation(tuple(codes), tuple(codes), segments)


def by_phase_totals(codes: Sequence[int], intervals_ns: Sequence[int]) -> tuple[int, ...]:
    totals = [0] * len(CELL_PHASES)
    for code, interval in zip(codes, intervals_ns, strict=True):
        totals[code] += interval
    return tuple(totals)
