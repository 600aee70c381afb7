"""What is to be said of a case beside its verdict, read off its samples and off what its device said meanwhile."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fp8bench import stats, units
from fp8bench.analysis.contention import AHEAD, FAR_AHEAD, contended, disturbed_slots
from fp8bench.analysis.resolution import why_unresolved
from fp8bench.analysis.throttles import clock_of, power_capped, throttle_reasons, throttled_by_hardware
from fp8bench.analysis.trust import Labelled
from fp8bench.analysis.verdicts import LEAST_FOR_VERDICT, SAME
from fp8bench.model import DeviceWatch, Finding, Interval, Label, Level, Record, Timing

NOISY_FLOOR = 0.03
DRIFT_CORRELATION = 0.6
DRIFT_SHARE = 0.02
FEW_ROUNDS = 16
BIMODAL_EXPLAINED = 0.9
BIMODAL_GAP = 0.05
BIMODAL_LESSER = 0.2


def labels_of(record: Record, finding: Finding, reference: Timing | None, aa: Interval | None) -> tuple[Labelled, ...]:
    """All labels of one case, in the order of Label; `aa` is the A/A interval of the rounds it was in."""
    found = [*_of_the_machine(record, aa), *_of_the_samples(record, finding, reference)]
    return tuple(sorted(found, key=lambda one: list(Label).index(one.label)))


def hard_labels(timing: Timing, watch: DeviceWatch | None, aa: Interval | None, device: str) -> tuple[Labelled, ...]:
    """Those that leave no verdict, for a case and for the reference it is held against."""
    found = [*_told_apart(aa, timing.num_rounds), *_contended(timing, device), *_throttled(watch)]
    return tuple(one for one in found if one.hard)


def _of_the_machine(record: Record, aa: Interval | None) -> Iterator[Labelled]:
    """What was wrong with where it ran."""
    assert record.timing is not None
    yield from _told_apart(aa, record.timing.num_rounds)
    yield from _contended(record.timing, record.case.device)
    yield from _throttled(record.watch)
    if power_capped(record.watch):
        yield Labelled(Label.POWER_CAPPED, clock_of(record.watch))
    if why := why_unresolved(record.energy):
        yield Labelled(Label.ENERGY_UNRESOLVED, why)


def _of_the_samples(record: Record, finding: Finding, reference: Timing | None) -> Iterator[Labelled]:
    """What can be said of the times themselves."""
    timing = record.timing
    assert timing is not None
    if finding.floor is not None and finding.floor > NOISY_FLOOR:
        yield Labelled(Label.NOISY)
    if _launch_bound(record, timing):
        yield Labelled(Label.LAUNCH_BOUND)
    if record.support.level is not Level.EMULATED:
        yield from _of_a_speed(record, timing, reference)
    if not record.paired:
        yield Labelled(Label.UNPAIRED)
    if timing.varying:
        yield Labelled(Label.VARYING)
    if timing.eager:
        yield Labelled(Label.EAGER_QUANTISER, timing.eager)
    if set(finding.below_floor) >= {phase for phase, seconds in finding.phases if seconds > 0}:
        yield Labelled(Label.BELOW_FLOOR)


def _of_a_speed(record: Record, timing: Timing, reference: Timing | None) -> Iterator[Labelled]:
    """Labels that only matter where a time is read as a speed."""
    if timing.num_rounds < FEW_ROUNDS:
        yield Labelled(Label.FEW_SAMPLES)
    if _bimodal(timing):
        yield Labelled(Label.BIMODAL)
    if reference is not None and not record.is_reference and record.paired and _drifts(timing, reference):
        yield Labelled(Label.DRIFT)


def _told_apart(aa: Interval | None, rounds: int) -> Iterator[Labelled]:
    """Identical code, held against itself, lies further from 1 than what counts as the same."""
    if aa is not None and rounds >= LEAST_FOR_VERDICT and aa.clearance >= SAME:
        low, high = (units.ratio(bound).removesuffix("x") for bound in (aa.low, aa.high))
        yield Labelled(Label.AA_FAILED, f"A/A {units.ratio(aa.point)} [{low}, {high}]", hard=True)


def _contended(timing: Timing, device: str) -> Iterator[Labelled]:
    """A host waits for a GPU anyway, so that its clocks tell nothing there."""
    if not device.startswith("cpu") or not contended(timing):
        return
    hard = contended(timing, FAR_AHEAD)
    slots = f"{disturbed_slots(timing, FAR_AHEAD if hard else AHEAD)} of {len(timing.slots)} slots"
    yield Labelled(Label.CONTENDED, f"less than a fifth of a core in {slots}" if hard else slots, hard)


def _throttled(watch: DeviceWatch | None) -> Iterator[Labelled]:
    if reasons := throttle_reasons(watch):
        yield Labelled(Label.THROTTLED, ", ".join(reasons), throttled_by_hardware(watch))


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
