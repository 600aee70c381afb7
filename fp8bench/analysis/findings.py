"""Findings of the cases of a group: times, phases, labels and a verdict.

A hard label (a device that its hardware slowed down, a process with less than a fifth of a core, identical code that
differs) takes the verdict away: the case is UNSURE, with the reason, and so is every case compared with a reference
that has one. Its ratio stays visible. An emulated case never has a verdict on speed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from types import MappingProxyType

import numpy as np

from fp8bench import units
from fp8bench.analysis import stats, verdicts
from fp8bench.analysis.claims import claims_of
from fp8bench.analysis.compare.interval import quantile
from fp8bench.analysis.doubts import PlaceEffect, clock_offset, flat_times, label_unsettled_device, place_effect
from fp8bench.analysis.labels import Labelled, are_held_up, hard_labels, label_in_process, labels_of
from fp8bench.analysis.phase_gains import find_phase_gains, scale_to_ratio
from fp8bench.model import (
    UNATTRIBUTED,
    Finding,
    Interval,
    Label,
    Overheads,
    PhaseGain,
    Record,
    Reruns,
    Run,
    Timing,
    Verdict,
)
from fp8bench.model.stopping import LEAST_CANDIDATES, LEAST_ROUNDS
from fp8bench.model.words import UNTOUCHED

BELOW_FLOOR_MARKERS = 20
_FINAL = verdicts.FINAL_LEVEL, verdicts.SAME
# The relative tolerance when a half-width is compared with the spread of earlier runs.
_CLOSE = 1e-9
# A logarithm: the ends of wider intervals overflow.
_MOST_REACH = 100.0


@dataclass(frozen=True)
class _Standard:
    """The standard that cases are compared with: the reference and control of the same rounds, and its hard labels.

    `place` is the effect of a position in these rounds, if it exceeds noise. `claims` are the hard labels that `record`
    has wherever it was measured. With `whole`, whole steps were compared. `best` is the reference's best case in
    seconds, by both of its entries.
    """

    record: Record | None = None
    timing: Timing | None = None
    control: Timing | None = None
    emulated: bool = False
    hard: tuple[Labelled, ...] = ()
    place: PlaceEffect | None = None
    claims: tuple[Labelled, ...] = ()
    whole: bool = False
    best: float = 0.0
    threads: int = 1


def findings(run: Run) -> dict[str, Finding]:
    """Returns the finding of each record by case id."""
    groups: dict[str, list[Record]] = {}
    labels: dict[str, tuple[Labelled, ...]] = {}
    run_labels = label_in_process(run)
    flat = flat_times(run.records, run.request.threads)
    for record in run.records:
        case = record.case
        groups.setdefault(case.setting, []).append(record)
        labels[case.id] = (flat[case.id], *run_labels) if case.id in flat else run_labels
    by_case = {}
    for records in groups.values():
        for finding in find(records, dict(run.overheads), labels, run.request.threads):
            by_case[finding.case.id] = finding
    return by_case


def find(
    records: Sequence[Record],
    overheads: Mapping[str, Overheads],
    run_labels: Mapping[str, Sequence[Labelled]] = MappingProxyType({}),
    threads: int = 1,
) -> list[Finding]:
    """Returns a finding for each record of one group.

    `run_labels` are labels by case id that need the rest of the run; `threads` are torch's.
    """
    reference = next((record for record in records if record.is_reference and record.timing), None)
    standard, aa = _Standard(), None
    if reference is not None and reference.timing is not None:
        aa = verdicts.aa_interval(reference.timing, reference.control)
        standard = _make_standard(reference, reference.timing, records, aa, threads)
    results = []
    for record in records:
        case = record.case
        results.append(_find_case(record, standard, aa, overheads.get(case.device), run_labels.get(case.id, ())))
    return _mark_chosen(records, results, standard)


def _make_standard(
    reference: Record, timing: Timing, records: Sequence[Record], aa: Interval | None, threads: int
) -> _Standard:
    claims = tuple(claims_of(reference, None))
    together = [record.timing for record in records if record.paired and record.paired_with is None]
    whole = verdicts.compares_whole_steps(timing, reference.control)
    return _Standard(
        reference,
        timing,
        reference.control,
        reference.support.is_emulated,
        (*hard_labels(timing, reference.watch, aa, reference.case.device), *claims),
        _place_beyond_noise([*together, reference.control], aa),
        claims,
        whole,
        _best_of_entries(reference, whole),
        threads,
    )


def _best_of_entries(reference: Record, whole: bool) -> float:
    """Returns the geometric mean of the best cases of the reference's entries; 0 without entries."""
    entries = [timing for timing in (reference.timing, reference.control) if timing is not None and timing.slots]
    seconds = [verdicts.best_seconds(timing, whole) for timing in entries]
    logs = [math.log(best) for best in seconds if best > 0]
    return math.exp(fmean(logs)) if logs else 0.0


def _scale_to_ratio(
    phases: tuple[tuple[str, float], ...], record: Record, reference_seconds: float, ratio: Interval | None
) -> tuple[tuple[str, float], ...]:
    """Scales a best case to the reference's time times the ratio, so that displayed times have the displayed speed-up.

    The ratio uses equally many rounds and calls on both sides; a case alone may have more.
    """
    factor = ratio.point if ratio is not None else 0.0
    seconds = sum(seconds for _, seconds in phases)
    scaled = reference_seconds * (1.0 if record.is_reference else factor)
    if not (0 < seconds < math.inf and 0 < scaled < math.inf):
        return phases
    return tuple((phase, of_phase * scaled / seconds) for phase, of_phase in phases)


def _mark_chosen(records: Sequence[Record], results: list[Finding], standard: _Standard) -> list[Finding]:
    """Adds a note to the fastest of several cases if it was not timed again: choosing it inflates its speed-up."""
    if standard.timing is None or any(record.fresh for record in records):
        return results
    places, timings = [], []
    for place, record in enumerate(records):
        is_candidate = record.support.is_native and not record.is_reference
        if record.timing and is_candidate and record.paired and record.paired_with is None:
            places.append(place)
            timings.append(record.timing)
    if len(timings) < LEAST_CANDIDATES:
        return results
    fastest = verdicts.find_fastest(timings, standard.timing, standard.control)
    if fastest is not None and results[places[fastest]].is_judged:
        note = (
            f"the fastest of {len(timings)} by these rounds, and not timed again: chosen so, its speed-up is too good"
        )
        results[places[fastest]] = _with_note(results[places[fastest]], note)
    return results


def _with_note(finding: Finding, note: str) -> Finding:
    return replace(finding, why=f"{finding.why}; {note}" if finding.why else note)


def _place_beyond_noise(timings: Sequence[Timing | None], aa: Interval | None) -> PlaceEffect | None:
    """Returns the effect of a position in these rounds if it exceeds how much identical code differs."""
    effect = place_effect([timing for timing in timings if timing is not None])
    floor = max(verdicts.BAND, aa.reach if aa is not None else 0.0)
    return effect if effect is not None and abs(effect.ratio.point - 1) > floor else None


def _find_case(
    record: Record,
    standard: _Standard,
    aa: Interval | None,
    overheads: Overheads | None,
    run_labels: Sequence[Labelled],
) -> Finding:
    timing = record.timing
    if not record.is_ok or timing is None or not timing.slots:
        return Finding(record.case, Verdict.NONE)
    # 1. Choose the rounds that judge the case: those of its sitting, or those after it was chosen as the fastest.
    standard = _of_sitting(record, timing, standard)
    if record.fresh is not None:
        standard = replace(standard, timing=record.fresh.reference, control=record.fresh.control)
        record = replace(record, timing=record.fresh.timing)
    conclusion = _conclude(record, standard)
    # 2. Scale times so that they match the displayed speed-up.
    whole = conclusion.whole if conclusion is not None else standard.whole if record.is_reference else None
    ratio = conclusion.ratio if conclusion is not None else None
    phases = _scale_to_ratio(verdicts.best_phases(timing, whole), record, standard.best, ratio)
    all_calls = verdicts.totals(timing)
    blank = Finding(
        record.case,
        Verdict.NONE,
        best_seconds=sum(seconds for _, seconds in phases),
        median_seconds=float(np.median(all_calls)),
        spread=stats.spread(all_calls),
        phases=phases,
        below_floor=_below_floor(timing, phases, overheads),
        gains=_phase_gains(record, standard, conclusion),
    )
    # 3. Add the verdict, labels, and what withdraws the verdict.
    finding, aa = _with_verdict(blank, record, standard, conclusion, aa)
    if record.fresh is not None:
        note = f"the fastest of {record.fresh.candidates}: its speed-up is by rounds after the choice"
        finding = _with_note(finding, note)
    claims = [*claims_of(record, standard.record, standard.threads), *_clock_labels(record, standard)]
    if whole:
        claims.append(_whole_steps_label(record, standard))
    if standard.place is not None and record.paired:
        claims.append(standard.place.label)
    labels = labels_of(record, finding, standard.timing, aa, [*claims, *run_labels])
    finding = replace(
        finding,
        labels=tuple(labelled.label for labelled in labels),
        label_reasons=tuple((labelled.label, labelled.reason) for labelled in labels if labelled.reason),
    )
    return _withhold_verdict(finding, [label for label in labels if label.hard], standard.hard)


def _of_sitting(record: Record, timing: Timing, standard: _Standard) -> _Standard:
    """Returns the reference and its control, both from the session of the case."""
    if record.paired_with is None:
        return standard
    hard = hard_labels(record.paired_with, None, None, record.case.device)
    aa = verdicts.aa_interval(record.paired_with, record.control)
    place = _place_beyond_noise([timing, record.paired_with, record.control], aa)
    hard = (*hard, *standard.claims)
    return replace(standard, timing=record.paired_with, control=record.control, hard=hard, place=place)


def _whole_steps_label(record: Record, standard: _Standard) -> Labelled:
    """Returns a label naming the arm whose sum of fastest cells is below its fastest step: the case or the
    reference."""
    most, reason = 0.0, ""
    arms = ((record.timing, ""), (standard.timing, "of the reference "), (standard.control, "of the reference "))
    for timing, whose in arms:
        share = verdicts.below_every_step(timing) if timing and timing.slots else 0.0
        if timing is None or share <= most:
            continue
        fastest = float(verdicts.totals(timing).min())
        by_cells, by_steps = units.seconds(fastest * (1 - share)), units.seconds(fastest)
        reason = f"{whose}{by_cells} by stretches, {by_steps} the fastest of {timing.num_calls} steps"
        most = share
    return Labelled(Label.WHOLE_STEPS, reason)


def _clock_labels(record: Record, standard: _Standard) -> Iterator[Labelled]:
    """Yields labels for clocks that moved before the first round, or differed from the reference's."""
    yield from label_unsettled_device(record.watch)
    if record.is_reference or not record.paired or record.support.is_emulated or record.timing is None:
        return
    if standard.record is not None and standard.timing is not None and not standard.emulated:
        entries = verdicts.entries_of(standard.timing, standard.control)
        yield from clock_offset(record.timing, entries, standard.record.case.mode)


def _conclude(record: Record, standard: _Standard) -> verdicts.Conclusion | None:
    """Returns the conclusion from a case's samples; None if they are not a speed, or share no rounds with the
    reference."""
    if record.support.is_emulated or standard.emulated or record.is_reference or not record.paired:
        return None
    if record.timing is None or standard.timing is None:
        return None
    timings = [record.timing, *verdicts.entries_of(standard.timing, standard.control)]
    held_up = record.case.device.startswith("cpu") and are_held_up(*timings)
    return verdicts.conclude(
        record.timing, standard.timing, standard.control, *_FINAL, reach_of(record.reruns), record.sessions, held_up
    )


def _phase_gains(record: Record, standard: _Standard, conclusion: verdicts.Conclusion | None) -> tuple[PhaseGain, ...]:
    """Returns what each phase gains; () if the step has no speed, or too few rounds for an interval."""
    if conclusion is None or record.timing is None or standard.timing is None:
        return ()
    timings = [record.timing, *verdicts.entries_of(standard.timing, standard.control)]
    rounds = verdicts.common_rounds(timings)
    if len(rounds) < LEAST_ROUNDS or set(timings[0].segments.phases) == {UNATTRIBUTED}:
        return ()
    unmarked = standard.record is not None and standard.record.case.precision == UNTOUCHED
    gains = find_phase_gains(timings, rounds, conclusion.whole, unmarked)
    return scale_to_ratio(gains, conclusion.ratio.point) if record.sessions else gains


def _with_verdict(
    finding: Finding, record: Record, standard: _Standard, conclusion: verdicts.Conclusion | None, aa: Interval | None
) -> tuple[Finding, Interval | None]:
    """Returns the finding with its verdict, and the A/A interval of its rounds."""
    assert record.timing is not None
    if record.support.is_emulated:
        return replace(finding, verdict=Verdict.EMULATED), None
    if record.is_reference:
        return replace(finding, verdict=Verdict.REFERENCE, floor=_noise_floor(aa, standard)), aa
    if standard.timing is None or not record.paired:
        return _unsure(finding, "it did not share rounds with a reference"), None
    if standard.emulated:
        return _unsure(finding, "the reference is emulated, so its time is no speed"), None
    if conclusion is None:
        return _unsure(finding, "no round has both it and the reference"), None
    floor = _noise_floor(conclusion.aa, standard)
    finding = replace(
        finding,
        verdict=conclusion.verdict,
        ratio=conclusion.ratio,
        typical=conclusion.typical,
        floor=floor,
        why=_why_unsure(conclusion, record, floor) if conclusion.verdict is Verdict.UNSURE else "",
    )
    return finding, conclusion.aa


def reach_of(reruns: Reruns | None) -> float:
    """Returns how far, as a logarithm, an interval must reach from its point because earlier runs differ."""
    # An edited file may hold any number.
    if reruns is None or reruns.freedom < 1 or not 0 <= reruns.spread < math.inf:
        return 0.0
    return min(quantile(verdicts.FINAL_LEVEL, reruns.freedom) * reruns.spread, _MOST_REACH)


def _noise_floor(aa: Interval | None, standard: _Standard) -> float | None:
    """Returns the largest difference of identical code: in these rounds, or between runs if that is known."""
    reruns = standard.record.reruns if standard.record is not None else None
    return max(aa.reach, math.expm1(reach_of(reruns))) if aa is not None else None


def _unsure(finding: Finding, why: str) -> Finding:
    return replace(finding, verdict=Verdict.UNSURE, why=why)


def _why_unsure(conclusion: verdicts.Conclusion, record: Record, floor: float | None) -> str:
    """Returns the first reason that applies, with what to do about it."""
    assert record.timing is not None
    interval, rounds, reruns = conclusion.ratio, record.timing.num_rounds, record.reruns
    if rounds < verdicts.LEAST_FOR_VERDICT:
        few = "1 round is" if rounds == 1 else f"{rounds} rounds are"
        return f"{few} too few for a verdict; give it more time (--budget) or rounds"
    if verdicts.rule(interval, verdicts.band_of(conclusion.aa)) is not Verdict.UNSURE:
        return "the mean over all calls contradicts the fastest calls; give it more time (--budget)"
    if interval.low > 1 + verdicts.BAND or interval.high < 1 - verdicts.BAND:
        return "the reference differs from its own control by as much"
    if rounds < LEAST_ROUNDS:
        return f"{rounds} rounds are a quick look, and they do not agree; give it {LEAST_ROUNDS} or more (no --quick)"
    if reruns is not None and interval.half_width <= reach_of(reruns) * (1 + _CLOSE):
        apart = units.percent(math.expm1(reach_of(reruns)))
        return (
            f"runs on this machine come out up to {apart} apart, by {reruns.runs} earlier ones: more rounds do not help"
        )
    reasons = [f"{rounds} rounds"]
    if interval.level == 0.0:
        reasons.append("others took the CPU in most of them")
    if floor is not None:
        reasons.append(f"noise floor {units.percent(floor)} (A/A)")
    return f"{', '.join(reasons)}: {_describe_sight(interval, verdicts.band_of(conclusion.aa))}"


# An interval of 99% lies beyond the band in nine of ten runs if its point is this many half-widths away: 1 + 1.2816 /
# 2.5758.
_NINE_OF_TEN = 1.5


def _describe_sight(interval: Interval, band: float) -> str:
    """Describes the smallest difference that this many rounds with this noise would show in nine of ten runs."""
    if math.isinf(interval.half_width):
        return "no difference would have been seen"
    least = math.expm1(math.log1p(band) + _NINE_OF_TEN * interval.half_width)
    return f"a difference of {units.percent(least)} or more would have been seen"


def _withhold_verdict(
    finding: Finding, case_labels: Sequence[Labelled], reference_labels: Sequence[Labelled]
) -> Finding:
    """Removes the verdict if a hard label of the case or of its reference forbids one."""
    names = {labelled.label for labelled in case_labels}
    foreign = [labelled for labelled in reference_labels if labelled.label not in names]
    if finding.ratio is None or not (case_labels or foreign):
        return finding
    reasons = []
    if case_labels:
        reasons.append(f"labelled {_join_labels(case_labels)}")
    if foreign:
        reasons.append(f"the reference is labelled {_join_labels(foreign)}")
    unsure = _unsure(finding, f"{'; '.join(reasons)}, so there is no verdict")
    return replace(unsure, hard=tuple(labelled.label for labelled in (*case_labels, *foreign)))


def _join_labels(labels: Sequence[Labelled]) -> str:
    words = [f"{labelled.label} ({labelled.reason})" if labelled.reason else labelled.label for labelled in labels]
    return " and ".join(words)


def _below_floor(timing: Timing, phases: tuple[tuple[str, float], ...], overheads: Overheads | None) -> tuple[str, ...]:
    """Returns the phases shorter than 20 times the cost of marking them."""
    if overheads is None:
        return ()
    per_mark = max(overheads.marker_on, overheads.event_pair or 0.0)
    entries = dict(timing.entries)
    return tuple(
        phase for phase, seconds in phases if 0 < seconds < BELOW_FLOOR_MARKERS * per_mark * entries.get(phase, 1)
    )
