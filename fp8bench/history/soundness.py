"""What a record must hold beyond its types before statistics can be made of it."""

from __future__ import annotations

import math

from fp8bench.model import CELL_PHASES, Capacity, MemoryUse, OperatorTime, Record, Timing

_LONGEST_NS = 1 << 62
_MOST = 1 << 62


def unsound(record: Record) -> str:
    """Why a record's samples cannot be what a clock gave; '' if they can."""
    numbers = (record.work.flops, record.work.bytes, record.work.least_memory)
    if not all(math.isfinite(one) and one >= 0 for one in numbers) or not 0 <= record.work.tokens < 1 << 62:
        return "its work is no count"
    if not all(_is_share_of_a_step(one) for one in record.operators):
        return "its operators have no times"
    if any(one.renewals < 0 for one in record.scales):
        return "its scales were renewed less than never"
    if record.capacity is not None and not _counts(record.capacity):
        return "its largest batch is no count"
    if record.memory is not None and not _sums(record.memory):
        return "its memory is no count, or what it is for does not sum to it"
    timings = (record.timing, record.control, record.paired_with)
    return next(filter(None, (_unsound(one) for one in timings if one is not None)), "")


def _is_share_of_a_step(one: OperatorTime) -> bool:
    return one.phase in CELL_PHASES and all(0 <= value < math.inf for value in (one.calls, one.seconds))


def _counts(one: Capacity) -> bool:
    values = (one.limit, one.batch, one.grain, one.tokens, one.peak, one.beyond, one.attempts)
    return all(0 <= value < _MOST for value in values if value is not None) and one.grain > 0


def _sums(one: MemoryUse) -> bool:
    parts = [size for _, size in one.roles]
    phases = [size for phase in one.phases for size in (phase.allocated, phase.reserved)]
    counts = (one.peak, *parts, *phases, one.reserved, one.process, one.resident)
    distinct = len(dict(one.roles)) == len(parts)
    whole = distinct and (not parts or sum(parts) == one.peak)
    return whole and all(0 <= count < _MOST for count in counts if count is not None)


def _unsound(timing: Timing) -> str:
    phases = timing.segments.phases
    cells = len(phases)
    if len(timing.segments.blocks) != cells or not set(phases) <= set(CELL_PHASES):
        return "its cells are of no known phases"
    if len({slot.round for slot in timing.slots}) != len(timing.slots):
        return "two slots have the same round"
    for slot in timing.slots:
        if not slot.calls_ns or set(map(len, slot.calls_ns)) != {cells}:
            return f"a step has not the {cells} cells of its segments"
        least, most = min(map(min, slot.calls_ns)), max(map(max, slot.calls_ns))
        if least < 0 or most >= _LONGEST_NS or not all(map(any, slot.calls_ns)):
            return "a step took no time, or more than any clock counts"
        if not all(0 <= one < math.inf for one in (slot.wall_seconds, slot.cpu_seconds, slot.host_seconds)):
            return "a slot's clocks have no times"
    return ""
