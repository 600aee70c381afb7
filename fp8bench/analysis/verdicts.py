"""From samples to verdicts: faster, slower, same or unsure, and why.

A verdict is FASTER or SLOWER when the ratio's interval lies wholly outside +-max(0.5%, A/A floor), SAME when it lies
wholly inside +-2%, else UNSURE. Only the two best-case estimators of stats give verdicts; the ratio of medians is
shown beside them. An emulated case never has a verdict on speed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fp8bench import stats
from fp8bench.analysis.labels import labels_of
from fp8bench.model import (
    CELL_PHASES,
    Finding,
    Interval,
    Label,
    Level,
    Overheads,
    Record,
    Status,
    Timing,
    Verdict,
)

BAND = 0.005
SAME = 0.02
# While rounds still come, a decision needs more: each look is another chance to err.
EARLY_LEVEL = 0.998
EARLY_SAME = 0.01
FINAL_LEVEL = 0.99
LEAST_FOR_VERDICT = 6
BELOW_FLOOR_MARKERS = 20


def cells(timing: Timing, calls: int, rounds: Sequence[int] | None = None) -> stats.Floats:
    """Seconds by round and cell: the minimum over the first `calls` calls of each slot."""
    chosen = timing.slots if rounds is None else [slot for slot in timing.slots if slot.round in set(rounds)]
    return np.array([np.min(slot.calls_ns[:calls], axis=0) for slot in chosen], dtype=np.float64) * 1e-9


def totals(timing: Timing) -> stats.Floats:
    """Seconds of every call, in the order they ran."""
    return np.array([sum(call) for slot in timing.slots for call in slot.calls_ns], dtype=np.float64) * 1e-9


def slot_minima(timing: Timing, calls: int, rounds: Sequence[int]) -> stats.Floats:
    """Seconds of the fastest of the first `calls` calls of each slot."""
    wanted = set(rounds)
    minima = [min(sum(call) for call in slot.calls_ns[:calls]) for slot in timing.slots if slot.round in wanted]
    return np.array(minima, dtype=np.float64) * 1e-9


def _fewest_calls(*timings: Timing) -> int:
    return min(len(slot.calls_ns) for timing in timings for slot in timing.slots)


def compare(case: Timing, reference: Timing, level: float) -> Interval | None:
    """The ratio over the rounds that both were in; None without any.

    Both sides give the same number of calls a slot: a minimum over more calls would be lower for that alone.
    """
    rounds = sorted({slot.round for slot in case.slots} & {slot.round for slot in reference.slots})
    if not rounds:
        return None
    calls = _fewest_calls(case, reference)
    if calls > 1:
        return stats.paired_ratio(
            slot_minima(case, calls, rounds), slot_minima(reference, calls, rounds), level
        )  # fmt: skip
    return stats.segment_ratio(cells(case, 1, rounds), cells(reference, 1, rounds), level)


def until(timing: Timing, other: Timing) -> Timing:
    """The rounds of `timing` up to the last round of `other`."""
    last = max((slot.round for slot in other.slots), default=-1)
    return replace(timing, slots=tuple(slot for slot in timing.slots if slot.round <= last))


def noise_floor(reference: Timing, control: Timing | None, level: float = FINAL_LEVEL) -> float | None:
    """How far the A/A interval reaches from 1; None without a control."""
    interval = compare(control, reference, level) if control is not None and control.slots else None
    return interval.reach if interval is not None and math.isfinite(interval.reach) else None


def rule(interval: Interval, floor: float | None, same: float = SAME) -> Verdict:
    """The verdict an interval and a floor allow."""
    band = max(BAND, floor or 0.0)
    if interval.low > 1 + band:
        return Verdict.SLOWER
    if interval.high < 1 - band:
        return Verdict.FASTER
    if interval.low > 1 - same and interval.high < 1 + same:
        return Verdict.SAME
    return Verdict.UNSURE


def decided(case: Timing, reference: Timing, control: Timing | None) -> bool:
    """Whether measuring may stop for this case: a clear verdict at the stricter level of an early look."""
    interval = compare(case, reference, EARLY_LEVEL)
    if interval is None:
        return False
    floor = noise_floor(reference, until(control, case) if control is not None else None)
    return rule(interval, floor, EARLY_SAME) is not Verdict.UNSURE


def find(records: Sequence[Record], overheads: dict[str, Overheads]) -> list[Finding]:
    """A finding for every record of one group."""
    reference = next((record for record in records if record.is_reference and record.timing), None)
    return [_finding(record, reference, overheads.get(record.case.device)) for record in records]


def _finding(record: Record, reference: Record | None, overheads: Overheads | None) -> Finding:
    timing = record.timing
    if record.status is not Status.OK or timing is None or not timing.slots:
        return Finding(record.case, Verdict.NONE)
    phases = best_phases(timing)
    all_calls = totals(timing)
    finding = Finding(
        record.case,
        Verdict.NONE,
        best_seconds=sum(seconds for _, seconds in phases),
        median_seconds=float(np.median(all_calls)),
        spread=stats.spread(all_calls),
        phases=phases,
        below_floor=_below_floor(timing, phases, overheads),
    )
    against = record.paired_with or (reference.timing if reference is not None else None)
    control = record.control or (reference.control if reference is not None else None)
    finding = _with_verdict(finding, record, reference, against, control)
    return replace(finding, labels=labels_of(record, finding, against))


def _with_verdict(
    finding: Finding, record: Record, reference: Record | None, against: Timing | None, control: Timing | None
) -> Finding:
    assert record.timing is not None
    if record.support.level is Level.EMULATED:
        return replace(finding, verdict=Verdict.EMULATED)
    if record.is_reference:
        return replace(finding, verdict=Verdict.REFERENCE, floor=noise_floor(record.timing, record.control))
    if reference is None or against is None or not record.paired:
        return replace(finding, verdict=Verdict.UNSURE, why="it did not share rounds with a reference")
    if reference.support.level is Level.EMULATED:
        return replace(finding, verdict=Verdict.UNSURE, why="the reference is emulated, so its time is no speed")
    interval = compare(record.timing, against, FINAL_LEVEL)
    if interval is None:
        return replace(finding, verdict=Verdict.UNSURE, why="no round has both it and the reference")
    floor = noise_floor(against, until(control, record.timing) if control is not None else None)
    verdict = rule(interval, floor)
    if record.timing.num_rounds < LEAST_FOR_VERDICT:
        verdict = Verdict.UNSURE
    why = _why_unsure(interval, floor, record.timing.num_rounds) if verdict is Verdict.UNSURE else ""
    median_ratio = float(np.median(totals(record.timing)) / np.median(totals(against)))
    return replace(finding, verdict=verdict, ratio=interval, floor=floor, why=why, median_ratio=median_ratio)


def _why_unsure(interval: Interval, floor: float | None, rounds: int) -> str:
    if rounds < LEAST_FOR_VERDICT:
        return f"{rounds} rounds are too few for an interval; give it more time (--budget) or rounds"
    if floor is not None and floor > BAND and (interval.low > 1 + BAND or interval.high < 1 - BAND):
        return "the difference is no larger than the A/A noise floor of this group"
    return "the interval is too wide to tell; give it more time (--budget), or a quieter machine"


def best_phases(timing: Timing) -> tuple[tuple[str, float], ...]:
    """Best-case seconds of each phase: the sum of its cells' minima over all rounds. They sum to the step."""
    best = stats.best_by_segment(cells(timing, _fewest_calls(timing)))
    sums = dict.fromkeys(CELL_PHASES, 0.0)
    for phase, seconds in zip(timing.segments.phases, best, strict=True):
        sums[phase] += float(seconds)
    return tuple(sums.items())


def _below_floor(
    timing: Timing, phases: tuple[tuple[str, float], ...], overheads: Overheads | None
) -> tuple[str, ...]:
    """Phases shorter than 20 times what the markers inside them cost."""
    if overheads is None:
        return ()
    per_mark = max(overheads.marker_on, overheads.event_pair or 0.0)
    return tuple(
        phase
        for phase, seconds in phases
        if 0 < seconds < BELOW_FLOOR_MARKERS * per_mark and phase in timing.segments.phases
    )


def doubted(finding: Finding) -> bool:
    """Whether a label forbids showing the verdict as a plain fact."""
    return bool(set(finding.labels) - {Label.LAUNCH_BOUND})
