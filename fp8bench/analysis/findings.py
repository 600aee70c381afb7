"""Findings of the cases of a group: times, phases, a verdict, labels, and the labels that take the verdict away.

After a hard label (a device that its hardware slowed down, a process with less than a fifth of a core, identical code
that differs) the case is UNSURE and says why, and so is every case compared with a reference that has one. Its ratio
stays visible. An emulated case never has a verdict on speed.
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
from fp8bench.analysis.doubts import PlaceEffect, clock_offset, flat_times, place_effect, unsettled
from fp8bench.analysis.labels import Labelled, are_held_up, hard_labels, in_process, labels_of
from fp8bench.analysis.phase_gains import find_phase_gains, scale_to_ratio
from fp8bench.analysis.verdicts import fastest
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
# The relative tolerance for a half-width that comes from the spread of earlier runs.
_CLOSE = 1e-9
# A logarithm. Intervals that reach further say nothing either, and their ends overflow.
_MOST_REACH = 100.0


@dataclass(frozen=True)
class _Standard:
    """What a case is compared with: reference and control of its rounds, and the reference's hard labels.

    `place` is the effect of a place in these rounds, where that is more than noise. `claims` are the hard labels that
    `record` has wherever it was measured. `whole` means that whole steps were compared. `best` are the seconds of the
    reference's best case, by both of its entries.
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
    groups: dict[str, list[Record]] = {}
    for record in run.records:
        groups.setdefault(record.case.setting, []).append(record)
    overheads = dict(run.overheads)
    told = {case: (label,) for case, label in flat_times(run.records, run.request.threads).items()}
    beside = in_process(run)
    told = {record.case.id: (*told.get(record.case.id, ()), *beside) for record in run.records}
    return {
        finding.case.id: finding
        for records in groups.values()
        for finding in find(records, overheads, told, run.request.threads)
    }


def find(
    records: Sequence[Record],
    overheads: Mapping[str, Overheads],
    told: Mapping[str, Sequence[Labelled]] = MappingProxyType({}),
    threads: int = 1,
) -> list[Finding]:
    """Returns a finding for every record of one group; `told` are labels by case id from the rest of the run, `threads`
    those that torch had."""
    reference = next((record for record in records if record.is_reference and record.timing), None)
    shared, aa = _Standard(), None
    if reference is not None and reference.timing is not None:
        aa = verdicts.noise(reference.timing, reference.control)
        hard = hard_labels(reference.timing, reference.watch, aa, reference.case.device)
        emulated = reference.support.is_emulated
        together = [
            record.timing for record in records if record.timing and record.paired and record.paired_with is None
        ]
        place = _beyond_noise([*together, reference.control], aa)
        whole = verdicts.whole_steps(reference.timing, reference.control)
        claims = tuple(claims_of(reference, None))
        shared = _Standard(
            reference,
            reference.timing,
            reference.control,
            emulated,
            (*hard, *claims),
            place,
            claims,
            whole,
            _best_of_entries(reference, whole),
            threads,
        )
    made = [
        _finding(record, shared, aa, overheads.get(record.case.device), told.get(record.case.id, ()))
        for record in records
    ]
    return _chosen(records, made, shared)


def _best_of_entries(reference: Record, whole: bool) -> float:
    entries = [timing for timing in (reference.timing, reference.control) if timing is not None and timing.slots]
    logs = [math.log(best) for timing in entries if (best := verdicts.best_seconds(timing, whole)) > 0]
    return math.exp(fmean(logs)) if logs else 0.0


def _at_ratio(
    phases: tuple[tuple[str, float], ...], record: Record, base: float, ratio: Interval | None
) -> tuple[tuple[str, float], ...]:
    """Scales a best case to the reference's, times the ratio: times that are shown have the speed-up that is shown.

    The ratio is by as many rounds and calls on both sides, and a case by itself may have had more.
    """
    times = 1.0 if record.is_reference else ratio.point if ratio is not None else 0.0
    own, wanted = sum(seconds for _, seconds in phases), base * times
    if not (0 < own < math.inf and 0 < wanted < math.inf):
        return phases
    return tuple((phase, seconds * wanted / own) for phase, seconds in phases)


def _chosen(records: Sequence[Record], made: list[Finding], shared: _Standard) -> list[Finding]:
    """Adds a word to the fastest of several that was not timed again: the choice makes its speed-up too good."""
    together = [
        (place, record.timing)
        for place, record in enumerate(records)
        if record.timing
        and record.paired
        and not record.is_reference
        and record.support.is_native
        and record.paired_with is None
    ]
    if shared.timing is None or len(together) < LEAST_CANDIDATES or any(record.fresh for record in records):
        return made
    best = fastest([timing for _, timing in together], shared.timing, shared.control)
    if best is None or not made[place := together[best][0]].judged:
        return made
    told = f"the fastest of {len(together)} by these rounds, and not timed again: chosen so, its speed-up is too good"
    made[place] = replace(made[place], why="; ".join(filter(None, (made[place].why, told))))
    return made


def _beyond_noise(timings: Sequence[Timing | None], aa: Interval | None) -> PlaceEffect | None:
    """Returns the effect of a place in these rounds if identical code differs by less."""
    effect = place_effect([timing for timing in timings if timing is not None])
    floor = max(verdicts.BAND, aa.reach if aa is not None else 0.0)
    return effect if effect is not None and abs(effect.ratio.point - 1) > floor else None


def _finding(
    record: Record, shared: _Standard, aa: Interval | None, overheads: Overheads | None, beside: Sequence[Labelled]
) -> Finding:
    timing = record.timing
    if not record.is_ok or timing is None or not timing.slots:
        return Finding(record.case, Verdict.NONE)
    standard = shared
    if record.paired_with is not None:  # the sitting that it was in has its own: never the control of another one
        hard = hard_labels(record.paired_with, None, None, record.case.device)
        own = verdicts.noise(record.paired_with, record.control)
        place = _beyond_noise([timing, record.paired_with, record.control], own)
        standard = replace(
            shared, timing=record.paired_with, control=record.control, hard=(*hard, *shared.claims), place=place
        )
    record, standard = _remeasured(record, standard)
    conclusion = _concluded(record, standard)
    whole = conclusion.whole if conclusion is not None else standard.whole if record.is_reference else None
    all_calls = verdicts.totals(timing)
    phases = _at_ratio(verdicts.best_phases(timing, whole), record, shared.best, conclusion and conclusion.ratio)
    finding, aa = _with_verdict(
        Finding(
            record.case,
            Verdict.NONE,
            best_seconds=sum(seconds for _, seconds in phases),
            median_seconds=float(np.median(all_calls)),
            spread=stats.spread(all_calls),
            phases=phases,
            below_floor=_below_floor(timing, phases, overheads),
            gains=_phase_gains(record, standard, conclusion),
        ),
        record,
        standard,
        conclusion,
        aa,
    )
    if record.fresh is not None:
        told = f"the fastest of {record.fresh.candidates}: its speed-up is by rounds after the choice"
        finding = replace(finding, why="; ".join(filter(None, (finding.why, told))))
    claims = (
        *claims_of(record, standard.record, standard.threads),
        *_of_clocks(record, standard),
        *(_of_whole_steps(record, standard) if whole else ()),
        *([standard.place.label] if standard.place is not None and record.paired else ()),
        *beside,
    )
    labels = labels_of(record, finding, standard.timing, aa, claims)
    finding = replace(
        finding,
        labels=tuple(labelled.label for labelled in labels),
        label_reasons=tuple((labelled.label, labelled.reason) for labelled in labels if labelled.reason),
    )
    return _withheld(finding, [label for label in labels if label.hard], standard.hard)


def _of_whole_steps(record: Record, standard: _Standard) -> Iterator[Labelled]:
    """Yields a label that says whose cells sum to less than its fastest step: the case's or the reference's."""
    arms = (record.timing, ""), (standard.timing, "of the reference "), (standard.control, "of the reference ")
    shares = [(verdicts.below_every_step(timing), timing, whose) for timing, whose in arms if timing and timing.slots]
    share, timing, whose = max(shares, key=lambda arm: arm[0])
    fastest = float(verdicts.totals(timing).min())
    made = f"{units.seconds(fastest * (1 - share))} by stretches, {units.seconds(fastest)} the fastest of"
    yield Labelled(Label.WHOLE_STEPS, f"{whose}{made} {timing.num_calls} steps" if share else "")


def _of_clocks(record: Record, standard: _Standard) -> Iterator[Labelled]:
    """Yields labels for clocks that moved before the first round, or differed from the reference's."""
    yield from unsettled(record.watch)
    if record.is_reference or not record.paired or record.support.is_emulated or record.timing is None:
        return
    if standard.record is not None and standard.timing is not None and not standard.emulated:
        entries = verdicts.entries_of(standard.timing, standard.control)
        yield from clock_offset(record.timing, entries, standard.record.case.mode)


def _remeasured(record: Record, standard: _Standard) -> tuple[Record, _Standard]:
    """Takes the fastest of several by the rounds after the choice; others stay as they are."""
    fresh = record.fresh
    if fresh is None:
        return record, standard
    own = replace(standard, timing=fresh.reference, control=fresh.control)
    return replace(record, timing=fresh.timing), own


def _concluded(record: Record, standard: _Standard) -> verdicts.Conclusion | None:
    """Returns the conclusion of its samples; None where they are no speed, or have no rounds with the reference."""
    of_speed = not record.support.is_emulated and not standard.emulated and not record.is_reference
    if record.timing is None or standard.timing is None or not (of_speed and record.paired):
        return None
    timings = [record.timing, *verdicts.entries_of(standard.timing, standard.control)]
    held_up = record.case.device.startswith("cpu") and are_held_up(*timings)
    return verdicts.conclude(
        record.timing, standard.timing, standard.control, *_FINAL, reach_of(record.reruns), record.sessions, held_up
    )


def _phase_gains(record: Record, standard: _Standard, conclusion: verdicts.Conclusion | None) -> tuple[PhaseGain, ...]:
    """Returns what each phase gains; nothing where the step has no speed, or too few rounds for an interval."""
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
    assert record.timing is not None
    if record.support.is_emulated:
        return replace(finding, verdict=Verdict.EMULATED), None
    if record.is_reference:
        return replace(finding, verdict=Verdict.REFERENCE, floor=_floor(aa, standard)), aa
    if standard.timing is None or not record.paired:
        return _unsure(finding, "it did not share rounds with a reference"), None
    if standard.emulated:
        return _unsure(finding, "the reference is emulated, so its time is no speed"), None
    if conclusion is None:
        return _unsure(finding, "no round has both it and the reference"), None
    aa, floor = conclusion.aa, _floor(conclusion.aa, standard)
    why = _why_unsure(conclusion, record, floor) if conclusion.verdict is Verdict.UNSURE else ""
    return replace(
        finding,
        verdict=conclusion.verdict,
        ratio=conclusion.ratio,
        typical=conclusion.typical,
        floor=floor,
        why=why,
    ), aa


def reach_of(reruns: Reruns | None) -> float:
    """Returns how far, as a logarithm, an interval must reach from its point because earlier runs differ."""
    if reruns is None or reruns.freedom < 1 or not 0 <= reruns.spread < math.inf:  # who changes a file may write any
        return 0.0
    return min(quantile(verdicts.FINAL_LEVEL, reruns.freedom) * reruns.spread, _MOST_REACH)


def _floor(aa: Interval | None, standard: _Standard) -> float | None:
    """Returns the most that identical code may differ by: in these rounds, or between runs where that is learned."""
    reruns = standard.record.reruns if standard.record is not None else None
    return max(aa.reach, math.expm1(reach_of(reruns))) if aa is not None else None


def _unsure(finding: Finding, why: str) -> Finding:
    return replace(finding, verdict=Verdict.UNSURE, why=why)


def _why_unsure(conclusion: verdicts.Conclusion, record: Record, floor: float | None) -> str:
    assert record.timing is not None
    interval, rounds, reruns = conclusion.ratio, record.timing.num_rounds, record.reruns
    if rounds < verdicts.LEAST_FOR_VERDICT:
        few = "1 round is" if rounds == 1 else f"{rounds} rounds are"
        return f"{few} too few for a verdict; give it more time (--budget) or rounds"
    if verdicts.rule(interval, verdicts.band_of(conclusion.aa)) is not Verdict.UNSURE:
        return "the mean over all calls does not confirm it; give it more time (--budget)"
    if interval.low > 1 + verdicts.BAND or interval.high < 1 - verdicts.BAND:
        return "the reference differs from its own control by as much"
    if rounds < LEAST_ROUNDS:
        return f"{rounds} rounds are a quick look, and they do not agree; give it {LEAST_ROUNDS} or more (no --quick)"
    if reruns is not None and interval.half_width <= reach_of(reruns) * (1 + _CLOSE):
        apart = units.percent(math.expm1(reach_of(reruns)))
        return (
            f"runs on this machine come out up to {apart} apart, by {reruns.runs} earlier ones: more rounds do not help"
        )
    grounds = [f"{rounds} rounds"]
    grounds += ["others took the CPU in most of them"] if interval.level == 0.0 else []
    grounds += [f"noise floor {units.percent(floor)} (A/A)"] if floor is not None else []
    return f"{', '.join(grounds)}: {_describe_sight(interval, verdicts.band_of(conclusion.aa))}"


# An interval of 99% lies beyond the band in nine of ten runs if its point lies so many half-widths from the band:
# 1 + 1.2816 / 2.5758.
_NINE_OF_TEN = 1.5


def _describe_sight(interval: Interval, band: float) -> str:
    """Says which difference rounds as many and as noisy would show in nine of ten runs."""
    if math.isinf(interval.half_width):
        return "no difference would have been seen"
    least = math.expm1(math.log1p(band) + _NINE_OF_TEN * interval.half_width)
    return f"a difference of {units.percent(least)} or more would have been seen"


def _withheld(finding: Finding, own: Sequence[Labelled], of_reference: Sequence[Labelled]) -> Finding:
    """Removes the verdict where a hard label of the case or of its reference forbids one."""
    foreign = [label for label in of_reference if label.label not in {mine.label for mine in own}]
    if finding.ratio is None or not (own or foreign):
        return finding
    whys = [f"labelled {' and '.join(map(_with_reason, own))}"] if own else []
    whys += [f"the reference is labelled {' and '.join(map(_with_reason, foreign))}"] if foreign else []
    hard = tuple(label.label for label in (*own, *foreign))
    return replace(_unsure(finding, f"{'; '.join(whys)}, so there is no verdict"), hard=hard)


def _with_reason(labelled: Labelled) -> str:
    return f"{labelled.label} ({labelled.reason})" if labelled.reason else str(labelled.label)


def _below_floor(timing: Timing, phases: tuple[tuple[str, float], ...], overheads: Overheads | None) -> tuple[str, ...]:
    """Returns phases that are shorter than 20 times the cost of marking them."""
    if overheads is None:
        return ()
    per_mark = max(overheads.marker_on, overheads.event_pair or 0.0)
    entries = dict(timing.entries)
    return tuple(
        phase for phase, seconds in phases if 0 < seconds < BELOW_FLOOR_MARKERS * per_mark * entries.get(phase, 1)
    )
