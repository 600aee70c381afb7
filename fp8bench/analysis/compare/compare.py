"""Compares two sides that were measured at different times: every case and figure that both have."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from fp8bench.analysis.compare.interval import (
    Estimate,
    FigureChange,
    RunDifference,
    compare_exact_values,
    compare_runs,
    judge_difference,
)
from fp8bench.analysis.compare.sides import (
    DifferingFact,
    MatchedFigures,
    Side,
    Sighting,
    list_differing_facts,
    match_exact_costs,
    match_noisy_costs,
    match_times,
)
from fp8bench.analysis.labels import AHEAD, FAR_AHEAD, disturbed_slots, positive_fact
from fp8bench.analysis.tapes import counts_of, describe_changes
from fp8bench.analysis.verdicts import agrees, is_uneven
from fp8bench.model import Case, Comparison, Direction, Evidence, Interval, Label, Record, SlotSample, Status, Verdict
from fp8bench.model.specs import COUNTS, RELATIVE, TIME
from fp8bench.units import percent

_VERDICTS = {
    Direction.BETTER: Verdict.FASTER,
    Direction.WORSE: Verdict.SLOWER,
    Direction.SAME: Verdict.SAME,
}
# Other programs disturbed one side more if the shares of disturbed slots, or the loads at the start, differ by this.
_DISTURBED_SHARE, _LOAD = 0.2, 1.0
# A step had a core for at least this share of its time, regardless of the system's waiting counters.
_LEAST_SHARE = 1e-3
_STATUS_WORDS = {Status.OK: "measured", Status.SKIPPED: "skipped", Status.FAILED: "failed"}


@dataclass(frozen=True)
class Compared:
    """Comparisons of two sides, ids of cases that only one side has, and facts that differ.

    `conditions` are the differing facts that times depend on ('threads was 1 and is 2'); '' if times compare.
    """

    before: Side
    after: Side
    comparisons: tuple[Comparison, ...]
    only_before: tuple[str, ...]
    only_after: tuple[str, ...]
    differing: tuple[DifferingFact, ...]
    conditions: str = ""

    @property
    def comparable(self) -> bool:
        return any(comparison.before is not None and comparison.after is not None for comparison in self.comparisons)


def compare(old_side: Side, new_side: Side, extra: Side | None = None) -> Compared:
    """Compares the cases that both sides have, in the order of the new side.

    Runs of the `extra` side only show how much runs differ.
    """
    facts = list_differing_facts(old_side.runs, new_side.runs)
    changed_conditions = [fact for fact in facts if fact.of_times]
    conditions = "; ".join(f"{fact.name} was {fact.before:.60} and is {fact.after:.60}" for fact in changed_conditions)
    comparisons: list[Comparison] = []
    for name, new_sightings in new_side.sightings.items():
        if name in old_side.sightings:
            extra_sightings = extra.sightings.get(name, ()) if extra is not None else ()
            comparisons += _compare_case(old_side.sightings[name], new_sightings, extra_sightings, conditions)
    return Compared(
        old_side,
        new_side,
        tuple(comparisons),
        _list_lone_cases(old_side, new_side),
        _list_lone_cases(new_side, old_side),
        facts,
        conditions,
    )


def _describe_busier_side(old: Sequence[Sighting], new: Sequence[Sighting]) -> str:
    """Returns how other programs used the machine more during one side; '' if both sides were alike, or on a GPU."""
    if not all(sighting.record.case.device.startswith("cpu") for sighting in (*old, *new)):
        return ""
    shares = [_disturbed_share(old), _disturbed_share(new)]
    if abs(shares[0] - shares[1]) > _DISTURBED_SHARE:
        old_words, new_words = (percent(share, 0) for share in shares)
        return (
            f"others took the CPU in {old_words} of the slots before and {new_words} of the slots now: "
            "measure both sides alike, or duel"
        )
    loads = [_list_loads(old), _list_loads(new)]
    if not all(loads):
        return ""
    means = [fmean(load) for load in loads]
    if abs(means[0] - means[1]) > _LOAD:
        old_words, new_words = (percent(load, 0) for load in means)
        return (
            f"the load at the start was {old_words} of the cores before and {new_words} of the cores now: "
            "measure both sides alike, or duel"
        )
    return ""


def _disturbed_share(side: Sequence[Sighting]) -> float:
    """Returns the share of slots whose wall clock ran ahead of the processor's time, the mean over runs."""
    shares = []
    for sighting in side:
        timing = sighting.record.timing
        has_slots = timing is not None and timing.slots
        shares.append(disturbed_slots(timing, AHEAD) / len(timing.slots) if timing is not None and has_slots else 0.0)
    return fmean(shares)


def _withhold_disturbed_time(
    comparison: Comparison, old: Sequence[Sighting], new: Sequence[Sighting], busier: str
) -> Comparison:
    """Withholds a difference in time that other programs may have caused on one side.

    A p-value already includes their waiting, because the spread of many runs does.
    """
    longer = max(_waiting_factor(old), _waiting_factor(new)) if comparison.p_value is None else 1.0
    comparison = replace(comparison, others=max(FAR_AHEAD, longer) if busier else longer)
    if comparison.direction is Direction.UNSURE:
        return replace(comparison, why=busier or comparison.why)
    if comparison.direction is Direction.SAME or comparison.ratio is None:
        return comparison
    if abs(math.log(comparison.ratio.point)) > math.log(comparison.others):
        return comparison
    waited = f"steps took up to {longer:.1f} times as long for want of a core: measure while others do less, or duel"
    return replace(comparison, direction=Direction.UNSURE, why=busier or waited)


def _waiting_factor(side: Sequence[Sighting]) -> float:
    """Returns how many times as long steps took because they waited for a core; 1 on a GPU."""
    slots: list[SlotSample] = []
    for sighting in side:
        timing = sighting.record.timing
        if timing is not None and sighting.record.case.device.startswith("cpu"):
            slots += timing.slots
    wall = sum(slot.wall_seconds for slot in slots)
    waited = sum(_seconds_off_core(slot) for slot in slots)
    return wall / max(wall - waited, wall * _LEAST_SHARE) if wall else 1.0


def _seconds_off_core(slot: SlotSample) -> float:
    if slot.waited_seconds is not None:
        return slot.waited_seconds
    return max(0.0, slot.wall_seconds - slot.cpu_seconds)


def _list_loads(side: Sequence[Sighting]) -> list[float]:
    """Returns the load of a core at the start of each run that recorded it."""
    loads = []
    for sighting in side:
        facts = sighting.run.environment.facts
        if cores := positive_fact(facts, "cpu_count"):
            loads.append(positive_fact(facts, "load_1min") / cores)
    return loads


def _list_lone_cases(side: Side, opposite: Side) -> tuple[str, ...]:
    """Returns the cases that the opposite side lacks, without those that were skipped."""
    lone = {name: sightings[-1] for name, sightings in side.sightings.items() if name not in opposite.sightings}
    return tuple(name for name, sighting in lone.items() if sighting.record.status is not Status.SKIPPED)


def _compare_case(
    old: Sequence[Sighting], new: Sequence[Sighting], extra: Sequence[Sighting], conditions: str
) -> Iterator[Comparison]:
    old_record, new_record = old[-1].record, new[-1].record
    case = new_record.case
    if old_record.status is new_record.status is Status.SKIPPED:
        return
    # 1. Nothing is compared unless both sides have the same work.
    if not (old_record.is_ok and new_record.is_ok):
        failed = new_record.status is Status.FAILED and old_record.status is not Status.FAILED
        reason = f"{_describe_status(old_record)} before, {_describe_status(new_record)} now"
        yield _no_comparison(case, reason, failed)
        return
    old, new, extra = (_with_version(side, case.version) for side in (old, new, extra))
    if not old:
        reason = f"version {old_record.case.version} before and {case.version} now: the work changed"
        yield _no_comparison(case, reason)
        return
    if old_record.support.level is not new_record.support.level:
        reason = f"{old_record.support.level} before and {new_record.support.level} now: not the same work"
        yield _no_comparison(case, reason)
        return
    # 2. Figures that a clock or a sensor measures have noise.
    old, new, extra = _choose_sightings(old), _choose_sightings(new), _choose_sightings(extra)
    busier = _describe_busier_side(old, new)
    labels = _collect_labels((*old, *new))
    for figures in (*match_times(old, new, extra), *match_noisy_costs(old, new, extra)):
        comparison = compare_figures(figures, case.id, case.workload, labels)
        if figures.metric in (TIME, RELATIVE):
            comparison = _withhold_disturbed_time(comparison, old, new, busier)
        if conditions:
            comparison = replace(comparison, direction=Direction.DIFFERS, why=conditions)
        yield comparison
    # 3. Memory, errors and counts are exact.
    for metric, old_values, new_values in match_exact_costs(old, new):
        change = compare_exact_values(old_values, new_values)
        yield _to_comparison(case.id, case.workload, metric.name, metric.unit, change)
    if old and new:
        yield from _compare_tapes(old[-1].record, new[-1].record)


def _describe_status(record: Record) -> str:
    reason = f" ({record.reason})" if record.reason else ""
    return _STATUS_WORDS[record.status] + reason


def _with_version(side: Sequence[Sighting], version: str) -> list[Sighting]:
    return [sighting for sighting in side if sighting.record.case.version == version]


def _compare_tapes(old: Record, new: Record) -> Iterator[Comparison]:
    if old.tape is None or new.tape is None:
        return
    case, changes = new.case, describe_changes(old.tape, new.tape)
    for spec, old_count, new_count in zip(COUNTS, counts_of(old.tape), counts_of(new.tape), strict=True):
        change = compare_exact_values([float(old_count)], [float(new_count)], rounding=0.0)
        change = change._replace(why=changes if old_count != new_count else "")
        yield _to_comparison(case.id, case.workload, spec.name, spec.unit, change)


def _to_comparison(case: str, suite: str, metric: str, unit: str, change: FigureChange) -> Comparison:
    return Comparison(
        case,
        suite,
        metric,
        unit,
        change.direction,
        Evidence.CROSS_RUN,
        change.before,
        change.after,
        change.ratio,
        change.p_value,
        why=change.why,
        noise=change.noise,
    )


def _choose_sightings(side: Sequence[Sighting]) -> list[Sighting]:
    """Returns the sightings with figures; those of --quick runs only if no others exist."""
    measured = [sighting for sighting in side if sighting.record.is_ok]
    thorough = [sighting for sighting in measured if not sighting.run.request.quick]
    return thorough or measured


def _no_comparison(case: Case, reason: str, failed: bool = False) -> Comparison:
    return Comparison(case.id, case.workload, TIME, "s", Direction.NONE, Evidence.CROSS_RUN, why=reason, failed=failed)


def compare_figures(figures: MatchedFigures, case: str, suite: str, labels: tuple[str, ...]) -> Comparison:
    """Compares one noisy figure; the mean over all calls may contradict its fastest calls."""
    # 1. Judge the fastest calls.
    difference = _move_to_shown(compare_runs(figures.old, figures.new, figures.extra), figures.shown)
    where, reason = judge_difference(difference)
    ratio = difference.ratio
    if figures.few and difference.alone:
        where, reason = Direction.UNSURE, "a few runs of a few rounds each"
        ratio = Interval(ratio.point, ratio.point, ratio.point, 0.0)
    # 2. Compare them with all calls.
    typical = compare_runs(*figures.typical).ratio if figures.typical else ratio
    contradicted = where in _VERDICTS and not agrees(_VERDICTS[where], ratio, typical)
    if contradicted:
        where, reason = Direction.UNSURE, "the mean over all calls contradicts the fastest calls"
    if is_uneven(ratio, typical) and (contradicted or not difference.alone):
        labels = tuple(label for label in Label if label in (*labels, Label.UNEVEN))
    old, new = figures.shown or (_geometric_mean(figures.old), _geometric_mean(figures.new))
    change = FigureChange(where, old, new, ratio, difference.p_value, reason, difference.noise)
    return replace(_to_comparison(case, suite, figures.metric, figures.unit, change), labels=labels)


def _geometric_mean(side: Sequence[Estimate]) -> float:
    return math.exp(fmean(estimate.log for estimate in side))


def _move_to_shown(difference: RunDifference, shown: tuple[float, float] | None) -> RunDifference:
    """Moves a ratio to the ratio of the times in both runs' reports; the interval is widened to hold both points."""
    if shown is None:
        return difference
    ratio, point = difference.ratio, shown[1] / shown[0]
    ratio = replace(ratio, point=point, low=min(ratio.low, point), high=max(ratio.high, point))
    return replace(difference, ratio=ratio)


def _collect_labels(sightings: Sequence[Sighting]) -> tuple[str, ...]:
    labels = {Label.CROSS_RUN}
    for sighting in sightings:
        if sighting.finding is not None:
            labels.update(sighting.finding.labels)
    return tuple(label.value for label in Label if label in labels)
