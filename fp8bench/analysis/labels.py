"""Reasons for doubt, read off the samples."""

from __future__ import annotations

import numpy as np

from fp8bench import stats
from fp8bench.model import Finding, Label, Level, Record, Timing

NOISY_FLOOR = 0.03
CONTENDED_WALL = 1.1
CONTENDED_SHARE = 0.5
DRIFT_CORRELATION = 0.6
DRIFT_SHARE = 0.02
FEW_ROUNDS = 16
BIMODAL_EXPLAINED = 0.9
BIMODAL_GAP = 0.05
BIMODAL_LESSER = 0.2


def labels_of(record: Record, finding: Finding, reference: Timing | None) -> tuple[Label, ...]:
    """All labels of one case, in the order of Label."""
    timing = record.timing
    assert timing is not None
    found = set()
    if finding.floor is not None and finding.floor > NOISY_FLOOR:
        found.add(Label.NOISY)
    if _contended(record, timing):
        found.add(Label.CONTENDED)
    if _launch_bound(record, timing):
        found.add(Label.LAUNCH_BOUND)
    if record.support.level is not Level.EMULATED:
        found |= _native_labels(record, timing, reference)
    if not record.paired:
        found.add(Label.UNPAIRED)
    if timing.varying:
        found.add(Label.VARYING)
    if timing.eager:
        found.add(Label.EAGER_QUANTISER)
    if set(finding.below_floor) >= {phase for phase, seconds in finding.phases if seconds > 0}:
        found.add(Label.BELOW_FLOOR)
    return tuple(label for label in Label if label in found)


def _native_labels(record: Record, timing: Timing, reference: Timing | None) -> set[Label]:
    """Labels that only matter where a time is read as a speed."""
    found = set()
    if timing.num_rounds < FEW_ROUNDS:
        found.add(Label.FEW_SAMPLES)
    if _bimodal(timing):
        found.add(Label.BIMODAL)
    if reference is not None and not record.is_reference and record.paired and _drifts(timing, reference):
        found.add(Label.DRIFT)
    return found


def _contended(record: Record, timing: Timing) -> bool:
    """In most slots the wall clock ran well ahead of the processor time, so somebody else had the core."""
    if not record.case.device.startswith("cpu"):
        return False
    ahead = [slot.wall_seconds > CONTENDED_WALL * slot.cpu_seconds for slot in timing.slots]
    return sum(ahead) > CONTENDED_SHARE * len(ahead)


def _launch_bound(record: Record, timing: Timing) -> bool:
    """The host took longer to enqueue a step than the device to run it."""
    if record.case.device.startswith("cpu"):
        return False
    host = np.median([slot.host_seconds for slot in timing.slots])
    device = np.median([sum(call) for slot in timing.slots for call in slot.calls_ns]) * 1e-9
    return bool(host > 0.95 * device)


def _slot_minima(timing: Timing) -> dict[int, float]:
    return {slot.round: min(sum(call) for call in slot.calls_ns) * 1e-9 for slot in timing.slots}


def _bimodal(timing: Timing) -> bool:
    """Two clusters of best cases, both well populated and at least 5% apart."""
    minima = np.array(list(_slot_minima(timing).values()))
    explained, lesser = stats.split_gap(minima)
    wide = float(np.ptp(minima)) > BIMODAL_GAP * float(np.median(minima))
    return wide and explained > BIMODAL_EXPLAINED and lesser >= BIMODAL_LESSER


def _drifts(timing: Timing, reference: Timing) -> bool:
    """The ratio moves with the rounds, by more than 2% from the first third to the last."""
    case, base = _slot_minima(timing), _slot_minima(reference)
    rounds = sorted(case.keys() & base.keys())
    if len(rounds) < FEW_ROUNDS:
        return False
    ratios = np.log(np.array([case[one] / base[one] for one in rounds]))
    third = len(ratios) // 3
    moved = abs(float(np.median(ratios[-third:]) - np.median(ratios[:third])))
    return abs(stats.rank_correlation(ratios)) > DRIFT_CORRELATION and moved > DRIFT_SHARE
