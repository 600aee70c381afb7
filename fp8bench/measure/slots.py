"""Computes the shape of a slot (the turn of one case in a round) and the cells of a step. The shape of a slot is its
number of timed calls, its number of discarded calls, and how long the device is kept busy before them.

A step is cut into blocks of 100 us or more. A cell is the time of one phase within one block. Longer blocks give wider
confidence intervals: for a step of 30 ms, blocks of 1 ms widen the interval by a tenth, and blocks of 5 ms by two
thirds. Shorter blocks gain nothing. The phase markers of one calibrating step define the cells, so that a cell is the
same work in every call. The times of all cells add up to the time of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fp8bench.model import CELL_PHASES, Segments
from fp8bench.model.raw import Filling
from fp8bench.protocols.axes import COLD

# A step shorter than REPEAT_BELOW_SECONDS is called several times in a slot, for about SLOT_SECONDS.
SLOT_SECONDS = 8e-3
REPEAT_BELOW_SECONDS = 4e-3
# The minimum number of calls in a slot on an accelerator. The device's queue is empty at first, so kernels of the first
# call wait for the host. Later calls find the queue as full as the host can keep it.
DEVICE_CALLS_PER_SLOT = 3
# The most calls of a slot with a cold cache. There are few, because flushing some megabytes takes longer than most
# steps.
MAX_COLD_CALLS = 4
# The longest time for which a device is kept busy. A queue holds about 1,024 launches of some 5 us each. When the
# queue is full the host waits, so a longer time gains nothing.
MAX_FILLING_SECONDS = 10e-3
# The host may take up to this many times as long to enqueue a later step as to enqueue the measured one.
_HOST_TIME_MARGIN = 1.25


@dataclass(frozen=True)
class SlotShape:
    """The calls in a slot (the turn of one case in a round): first `untimed_call_count` calls that are not timed, then
    `calls` that are timed.
    """

    calls: int = 1
    untimed_call_count: int = 0
    filling: Filling | None = None


def choose_timing_slot_shape(step_seconds: float, host_seconds: float, cache: str, has_queue: bool) -> SlotShape:
    """Chooses how many calls a slot has, and how long the device is kept busy before these calls.

    `host_seconds` is the time that the host needs to enqueue a step. `has_queue` is false if steps are not enqueued.
    """
    calls, untimed_call_count = 1, 0
    if step_seconds < REPEAT_BELOW_SECONDS:
        calls, untimed_call_count = max(2, round(SLOT_SECONDS / step_seconds)), 1
    if cache == COLD:
        calls = min(MAX_COLD_CALLS, calls)
    if not has_queue:
        return SlotShape(calls, untimed_call_count)
    calls = max(DEVICE_CALLS_PER_SLOT, calls)
    return SlotShape(calls, untimed_call_count, choose_slot_filling(host_seconds, calls))


def choose_slot_filling(host_seconds: float, calls: int) -> Filling | None:
    """Returns how long to keep the device busy while the host enqueues calls, and how many calls the host can enqueue
    in this time. If enqueueing all calls takes longer than MAX_FILLING_SECONDS, only the first calls of a slot are
    covered. Returns None if enqueueing takes no measurable time.
    """
    if host_seconds <= 0:
        return None
    covered_call_count = max(1, min(calls, int(MAX_FILLING_SECONDS / (_HOST_TIME_MARGIN * host_seconds))))
    return Filling(covered_call_count, min(MAX_FILLING_SECONDS, _HOST_TIME_MARGIN * host_seconds * covered_call_count))


MIN_BLOCK_NS = 100_000
MAX_BLOCKS = 256  # a longer step gets longer blocks, not more


@dataclass(frozen=True)
class StepSegmentation:
    """Assigns each interval between two phase markers of a step to a cell."""

    codes: tuple[int, ...]
    cell_by_interval: tuple[int, ...]
    segments: Segments

    def cells(self, codes: Sequence[int], intervals_ns: Sequence[int]) -> tuple[int, ...] | None:
        """Returns the nanoseconds of each cell in a step. Returns None if the sequence of phases differs from that of
        the step that defined the cells.
        """
        if tuple(codes) != self.codes:
            return None
        cell_totals_ns = [0] * len(self.segments.phases)
        for cell, interval in zip(self.cell_by_interval, intervals_ns, strict=True):
            cell_totals_ns[cell] += interval
        return tuple(cell_totals_ns)


def choose_block_ns(step_ns: int) -> int:
    return max(MIN_BLOCK_NS, step_ns // MAX_BLOCKS)


def cut_step_into_cells(
    codes: Sequence[int], intervals_ns: Sequence[int], block_ns: int | None = None, part_ends: str = ""
) -> StepSegmentation:
    """Cuts a step at its phase markers into blocks. A cell is a pair of block and phase, and cells are numbered in
    their order in the step.

    Some steps have parts, such as the sampling steps of a diffusion model. `part_ends` is then the last phase of each
    part, and a block also ends after this phase.
    """
    block_ns = block_ns or choose_block_ns(sum(intervals_ns))
    cell_number_by_block_and_phase: dict[tuple[int, int], int] = {}
    cell_by_interval = []
    block_number, block_elapsed_ns = 0, 0
    for code, interval in zip(codes, intervals_ns, strict=True):
        if block_elapsed_ns >= block_ns:
            block_number, block_elapsed_ns = block_number + 1, 0
        cell_by_interval.append(
            cell_number_by_block_and_phase.setdefault((block_number, code), len(cell_number_by_block_and_phase))
        )
        # After `part_ends` the block counts as full, so that the next interval begins a new block.
        block_elapsed_ns = block_ns if CELL_PHASES[code] == part_ends else block_elapsed_ns + interval
    phases = tuple(CELL_PHASES[code] for _, code in cell_number_by_block_and_phase)
    return StepSegmentation(
        tuple(codes),
        tuple(cell_by_interval),
        Segments(phases, tuple(number for number, _ in cell_number_by_block_and_phase)),
    )


def make_phase_segmentation(codes: Sequence[int]) -> StepSegmentation:
    segments = Segments(CELL_PHASES, (0,) * len(CELL_PHASES))
    return StepSegmentation(tuple(codes), tuple(codes), segments)


def sum_by_phase(codes: Sequence[int], intervals_ns: Sequence[int]) -> tuple[int, ...]:
    phase_totals_ns = [0] * len(CELL_PHASES)
    for code, interval in zip(codes, intervals_ns, strict=True):
        phase_totals_ns[code] += interval
    return tuple(phase_totals_ns)
