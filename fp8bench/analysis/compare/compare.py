"""Compares two sides that were measured at different times. Each side is one or several runs. Every case and every
figure that both sides have is compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from fp8bench.analysis.compare.interval import (
    FigureChange,
    RunDifference,
    compare_exact_values,
    compare_runs,
    geometric_mean,
    judge_difference,
)
from fp8bench.analysis.compare.sides import (
    ComparisonSide,
    DifferingRunFact,
    MatchedFigures,
    Sighting,
    list_differing_run_facts,
    match_exact_costs,
    match_noisy_costs,
    match_step_times,
)
from fp8bench.analysis.labels import MIN_DISTURBED_RATIO, STARVED_RATIO, count_disturbed_slots, read_positive_fact
from fp8bench.analysis.tapes import describe_tape_changes, get_tape_counts
from fp8bench.analysis.verdicts import is_uneven, mean_agrees_with_verdict
from fp8bench.model import Case, Comparison, Direction, Evidence, Interval, Label, Record, SlotSample, Status, Verdict
from fp8bench.model.specs import COUNTS, RELATIVE_TIME, TIME
from fp8bench.units import percent

_VERDICT_BY_DIRECTION = {
    Direction.BETTER: Verdict.FASTER,
    Direction.WORSE: Verdict.SLOWER,
    Direction.SAME: Verdict.SAME,
}
# One side's machine was busier if its share of disturbed slots is higher by the first number, or if its load per core
# when the runs started is higher by the second.
_MIN_EXTRA_DISTURBED_SHARE, _MIN_EXTRA_LOAD = 0.2, 1.0
# The system may report too much waiting. So assume at least this share of the wall-clock time as CPU time.
_MIN_CPU_TIME_SHARE = 1e-3
_WORD_BY_CASE_STATUS = {Status.OK: "measured", Status.SKIPPED: "skipped", Status.FAILED: "failed"}


@dataclass(frozen=True)
class ComparedSides:
    """The comparisons of two sides, the ids of cases that only one side has, and the facts about the runs that differ.

    `conditions` describes the differing facts that times depend on, like 'threads was 1 and is 2'. It is '' if times
    are comparable.
    """

    before: ComparisonSide
    after: ComparisonSide
    comparisons: tuple[Comparison, ...]
    only_before: tuple[str, ...]
    only_after: tuple[str, ...]
    differing_facts: tuple[DifferingRunFact, ...]
    conditions: str = ""

    @property
    def comparable(self) -> bool:
        return any(comparison.before is not None and comparison.after is not None for comparison in self.comparisons)


def compare(old_side: ComparisonSide, new_side: ComparisonSide, extra: ComparisonSide | None = None) -> ComparedSides:
    """Compares the cases that both sides have, in the order of the new side.

    Runs of the `extra` side are not compared. They only show how much runs of the same code differ.
    """
    differing_facts = list_differing_run_facts(old_side.runs, new_side.runs)
    changed_time_facts = [fact for fact in differing_facts if fact.of_times]
    conditions = "; ".join(f"{fact.name} was {fact.before:.60} and is {fact.after:.60}" for fact in changed_time_facts)
    comparisons: list[Comparison] = []
    for name, new_sightings in new_side.sightings_by_case.items():
        if name in old_side.sightings_by_case:
            extra_case_sightings = extra.sightings_by_case.get(name, ()) if extra is not None else ()
            comparisons += _compare_case(
                old_side.sightings_by_case[name], new_sightings, extra_case_sightings, conditions
            )
    return ComparedSides(
        old_side,
        new_side,
        tuple(comparisons),
        _list_unmatched_cases(old_side, new_side),
        _list_unmatched_cases(new_side, old_side),
        differing_facts,
        conditions,
    )


def _describe_busier_side(old: Sequence[Sighting], new: Sequence[Sighting]) -> str:
    """Describes how much more other programs used the machine during the runs of one side. Returns '' on a GPU, and
    if both sides had a similar load.
    """
    if not all(sighting.record.case.device.startswith("cpu") for sighting in (*old, *new)):
        return ""
    advice_text = "measure both sides under the same load, or duel"
    old_share, new_share = _average_disturbed_share(old), _average_disturbed_share(new)
    if abs(old_share - new_share) > _MIN_EXTRA_DISTURBED_SHARE:
        slot_shares_text = f"{percent(old_share, 0)} of the slots before and {percent(new_share, 0)} of the slots now"
        return f"other programs took the CPU in {slot_shares_text}: {advice_text}"
    old_loads, new_loads = _list_start_loads(old), _list_start_loads(new)
    if not old_loads or not new_loads:
        return ""
    old_load, new_load = fmean(old_loads), fmean(new_loads)
    if abs(old_load - new_load) > _MIN_EXTRA_LOAD:
        core_loads_text = f"{percent(old_load, 0)} of the cores before and {percent(new_load, 0)} of the cores now"
        return f"the load at the start was {core_loads_text}: {advice_text}"
    return ""


def _average_disturbed_share(side: Sequence[Sighting]) -> float:
    """Returns the share of slots (timed turns of a case) whose wall-clock time far exceeds their CPU time, as the mean
    over the runs of a side.
    """
    shares = []
    for sighting in side:
        timing = sighting.record.timing
        if timing is not None and timing.slots:
            shares.append(count_disturbed_slots(timing, MIN_DISTURBED_RATIO) / len(timing.slots))
    return sum(shares) / len(side)


def _withhold_disturbed_time(
    comparison: Comparison, old: Sequence[Sighting], new: Sequence[Sighting], busier: str
) -> Comparison:
    """Makes a difference in time UNSURE if other programs may have caused it by slowing down the runs of one side.

    Without a p-value, the difference is also UNSURE if it is not larger than the delay of steps that waited for a core.
    With a p-value, the spread of many runs already includes this delay.
    """
    core_wait_factor = (
        max(_compute_waiting_factor(old), _compute_waiting_factor(new)) if comparison.p_value is None else 1.0
    )
    comparison = replace(comparison, others=max(STARVED_RATIO, core_wait_factor) if busier else core_wait_factor)
    if comparison.direction is Direction.UNSURE:
        return replace(comparison, why=busier or comparison.why)
    if comparison.direction is Direction.SAME or comparison.ratio is None:
        return comparison
    if abs(math.log(comparison.ratio.point)) > math.log(comparison.others):
        return comparison
    waiting_reason = (
        f"steps took up to {core_wait_factor:.1f} times as long because they waited for a core: "
        "measure on a quieter machine, or duel"
    )
    return replace(comparison, direction=Direction.UNSURE, why=busier or waiting_reason)


def _compute_waiting_factor(side: Sequence[Sighting]) -> float:
    """Returns how many times as long steps took because they waited for a core, or 1 on a GPU."""
    slots: list[SlotSample] = []
    for sighting in side:
        timing = sighting.record.timing
        if timing is not None and sighting.record.case.device.startswith("cpu"):
            slots += timing.slots
    wall_seconds = sum(slot.wall_seconds for slot in slots)
    waiting_seconds = sum(_get_seconds_off_core(slot) for slot in slots)
    return (
        wall_seconds / max(wall_seconds - waiting_seconds, wall_seconds * _MIN_CPU_TIME_SHARE) if wall_seconds else 1.0
    )


def _get_seconds_off_core(slot: SlotSample) -> float:
    if slot.waited_seconds is not None:
        return slot.waited_seconds
    return max(0.0, slot.wall_seconds - slot.cpu_seconds)


def _list_start_loads(side: Sequence[Sighting]) -> list[float]:
    """Returns the load per core at the start of each run that recorded it."""
    load_averages_per_core = []
    for sighting in side:
        facts = sighting.run.environment.facts
        if cores := read_positive_fact(facts, "cpu_count"):
            load_averages_per_core.append(read_positive_fact(facts, "load_1min") / cores)
    return load_averages_per_core


def _list_unmatched_cases(side: ComparisonSide, other_side: ComparisonSide) -> tuple[str, ...]:
    """Returns the ids of the cases that `side` has and `other_side` lacks, without skipped cases."""
    unmatched_sightings = {
        name: case_sightings[-1]
        for name, case_sightings in side.sightings_by_case.items()
        if name not in other_side.sightings_by_case
    }
    return tuple(name for name, sighting in unmatched_sightings.items() if sighting.record.status is not Status.SKIPPED)


def _compare_case(
    old: Sequence[Sighting], new: Sequence[Sighting], extra: Sequence[Sighting], conditions: str
) -> Iterator[Comparison]:
    old_record, new_record = old[-1].record, new[-1].record
    case = new_record.case
    if old_record.status is new_record.status is Status.SKIPPED:
        return
    # 1. Compare only if both sides did the same work.
    if not (old_record.is_ok and new_record.is_ok):
        newly_failed = new_record.status is Status.FAILED and old_record.status is not Status.FAILED
        reason = f"{_describe_status(old_record)} before, {_describe_status(new_record)} now"
        yield _make_missing_comparison(case, reason, newly_failed)
        return
    old, new, extra = (_select_case_version(side, case.version) for side in (old, new, extra))
    if not old:
        reason = f"version {old_record.case.version} before and {case.version} now: the work changed"
        yield _make_missing_comparison(case, reason)
        return
    if old_record.support.level is not new_record.support.level:
        reason = f"{old_record.support.level} before and {new_record.support.level} now: they do different work"
        yield _make_missing_comparison(case, reason)
        return
    # 2. Compare times and energy, whose values are noisy.
    old, new, extra = _choose_usable_sightings(old), _choose_usable_sightings(new), _choose_usable_sightings(extra)
    busier_side_text = _describe_busier_side(old, new)
    labels = _collect_labels((*old, *new))
    for figures in (*match_step_times(old, new, extra), *match_noisy_costs(old, new, extra)):
        comparison = compare_matched_figures(figures, case.id, case.workload, labels)
        if figures.metric in (TIME, RELATIVE_TIME):
            comparison = _withhold_disturbed_time(comparison, old, new, busier_side_text)
        # Times and energy depend on the conditions, so the code need not be the cause of a difference.
        if conditions:
            comparison = replace(comparison, direction=Direction.DIFFERS, why=conditions)
        yield comparison
    # 3. Compare memory, errors and counts, which are exact.
    for metric, old_values, new_values in match_exact_costs(old, new):
        change = compare_exact_values(old_values, new_values)
        yield _make_figure_comparison(case.id, case.workload, metric.name, metric.unit, change)
    if old and new:
        yield from _compare_tapes(old[-1].record, new[-1].record)


def _describe_status(record: Record) -> str:
    reason = f" ({record.reason})" if record.reason else ""
    return _WORD_BY_CASE_STATUS[record.status] + reason


def _select_case_version(side: Sequence[Sighting], version: str) -> list[Sighting]:
    return [sighting for sighting in side if sighting.record.case.version == version]


def _compare_tapes(old: Record, new: Record) -> Iterator[Comparison]:
    if old.tape is None or new.tape is None:
        return
    case, changes = new.case, describe_tape_changes(old.tape, new.tape)
    for spec, old_count, new_count in zip(COUNTS, get_tape_counts(old.tape), get_tape_counts(new.tape), strict=True):
        # Counts are integers, so no difference is due to rounding.
        change = compare_exact_values([float(old_count)], [float(new_count)], rounding=0.0)
        change = change._replace(why=changes if old_count != new_count else "")
        yield _make_figure_comparison(case.id, case.workload, spec.name, spec.unit, change)


def _make_figure_comparison(case: str, suite: str, metric: str, unit: str, change: FigureChange) -> Comparison:
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


def _choose_usable_sightings(side: Sequence[Sighting]) -> list[Sighting]:
    """Returns the successful measurements of a case. Measurements of --quick runs are used only if no other run
    succeeded.
    """
    measured_sightings = [sighting for sighting in side if sighting.record.is_ok]
    full_run_sightings = [sighting for sighting in measured_sightings if not sighting.run.request.quick]
    return full_run_sightings or measured_sightings


def _make_missing_comparison(case: Case, reason: str, failed: bool = False) -> Comparison:
    return Comparison(case.id, case.workload, TIME, "s", Direction.NONE, Evidence.CROSS_RUN, why=reason, failed=failed)


def compare_matched_figures(figures: MatchedFigures, case: str, suite: str, labels: tuple[str, ...]) -> Comparison:
    """Compares one noisy figure of a case. The result is UNSURE if the mean over all calls contradicts the fastest
    calls.
    """
    # 1. Compare the fastest calls.
    difference = _move_to_reported_ratio(compare_runs(figures.old, figures.new, figures.extra), figures.shown_values)
    direction, reason = judge_difference(difference)
    ratio = difference.ratio
    if figures.has_few_rounds and difference.is_spread_unknown:
        direction, reason = Direction.UNSURE, "a few runs of a few rounds each are too few"
        ratio = Interval(ratio.point, ratio.point, ratio.point, 0.0)
    # 2. Check this result against the mean over all calls.
    mean_ratio = compare_runs(*figures.mean_estimates).ratio if figures.mean_estimates else ratio
    is_verdict_contradicted = direction in _VERDICT_BY_DIRECTION and not mean_agrees_with_verdict(
        _VERDICT_BY_DIRECTION[direction], ratio, mean_ratio
    )
    if is_verdict_contradicted:
        direction, reason = Direction.UNSURE, "the mean over all calls contradicts the fastest calls"
    if is_uneven(ratio, mean_ratio) and (is_verdict_contradicted or not difference.is_spread_unknown):
        labels = tuple(label for label in Label if label in (*labels, Label.UNEVEN))
    old_value, new_value = figures.shown_values or (geometric_mean(figures.old), geometric_mean(figures.new))
    change = FigureChange(direction, old_value, new_value, ratio, difference.p_value, reason, difference.noise)
    return replace(_make_figure_comparison(case, suite, figures.metric, figures.unit, change), labels=labels)


def _move_to_reported_ratio(difference: RunDifference, reported_seconds: tuple[float, float] | None) -> RunDifference:
    """Replaces the ratio of old and new side by the ratio of the times that the reports of both sides show. The
    interval is widened to contain both ratios.
    """
    if reported_seconds is None:
        return difference
    ratio, reported_ratio = difference.ratio, reported_seconds[1] / reported_seconds[0]
    ratio = replace(
        ratio, point=reported_ratio, low=min(ratio.low, reported_ratio), high=max(ratio.high, reported_ratio)
    )
    return replace(difference, ratio=ratio)


def _collect_labels(sightings: Sequence[Sighting]) -> tuple[str, ...]:
    # Both sides were measured at different times.
    labels = {Label.CROSS_RUN}
    for sighting in sightings:
        if sighting.finding is not None:
            labels.update(sighting.finding.labels)
    return tuple(label.value for label in Label if label in labels)
