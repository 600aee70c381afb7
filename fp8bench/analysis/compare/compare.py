"""Compares two sides that were measured at different times: every case and figure that both have."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from fp8bench.analysis.compare.interval import Estimate, RunDifference, across, direction, exact_change
from fp8bench.analysis.compare.sides import Differing, MatchedFigures, Side, Sighting, counted, differing, sensed, timed
from fp8bench.analysis.labels import AHEAD, FAR_AHEAD, disturbed_slots, known_number
from fp8bench.analysis.tapes import counts_of, what_changed
from fp8bench.analysis.verdicts import agrees, uneven
from fp8bench.model import Case, Comparison, Direction, Evidence, Interval, Label, Record, Status, Verdict
from fp8bench.model.specs import COUNTS, RELATIVE, TIME
from fp8bench.units import percent

_VERDICTS = {
    Direction.BETTER: Verdict.FASTER,
    Direction.WORSE: Verdict.SLOWER,
    Direction.SAME: Verdict.SAME,
}
# Others disturbed one side more, if the shares of disturbed slots, or the loads of a core beforehand, differ by this.
_HELD_UP, _LOAD = 0.2, 1.0
_LEAST_SHARE = 1e-3
_BECAME = {Status.OK: "measured", Status.SKIPPED: "skipped", Status.FAILED: "failed"}


@dataclass(frozen=True)
class Compared:
    """Comparisons of two sides, ids of cases that only one side has, and facts that differ.

    `conditions` are those that times depend on, in words ('threads was 1 and is 2'); '' where times compare.
    """

    before: Side
    after: Side
    comparisons: tuple[Comparison, ...]
    only_before: tuple[str, ...]
    only_after: tuple[str, ...]
    differing: tuple[Differing, ...]
    conditions: str = ""

    @property
    def comparable(self) -> bool:
        return any(comparison.before is not None and comparison.after is not None for comparison in self.comparisons)


def compare(before: Side, after: Side, beside: Side | None = None) -> Compared:
    """Compares the sides in the order of the second one's cases. Runs `beside` them only show how much runs differ."""
    comparisons: list[Comparison] = []
    others = beside.sightings if beside is not None else {}
    differ = differing(before.runs, after.runs)
    conditions = "; ".join(
        f"{fact.name} was {fact.before:.60} and is {fact.after:.60}" for fact in differ if fact.of_times
    )
    for name, seen in after.sightings.items():
        if name in before.sightings:
            comparisons += _of_case(before.sightings[name], seen, others.get(name, ()), conditions)
    return Compared(
        before,
        after,
        tuple(comparisons),
        _alone(before.sightings, after.sightings),
        _alone(after.sightings, before.sightings),
        differ,
        conditions,
    )


def _busier(before: Sequence[Sighting], after: Sequence[Sighting]) -> str:
    """Returns how others used the machine more during one side; '' where both had it alike."""
    if not all(sighting.record.case.device.startswith("cpu") for sighting in (*before, *after)):
        return ""
    # The share of slots whose wall clock ran ahead of the processor's time.
    timings = [[sighting.record.timing for sighting in side] for side in (before, after)]
    held = [
        fmean(
            disturbed_slots(timing, AHEAD) / len(timing.slots) if timing is not None and timing.slots else 0.0
            for timing in side
        )
        for side in timings
    ]
    if abs(held[0] - held[1]) > _HELD_UP:
        words = (
            f"{percent(share, 0)} of the slots {when}" for share, when in zip(held, ("before", "now"), strict=True)
        )
        return f"others took the CPU in {' and '.join(words)}: measure both sides alike, or duel"
    loads = [fmean(known) if (known := list(_loads(side))) else None for side in (before, after)]
    if loads[0] is not None and loads[1] is not None and abs(loads[0] - loads[1]) > _LOAD:
        shares = [percent(load, 0) for load in loads if load is not None]
        return (
            f"the load at the start was {shares[0]} of the cores before and {shares[1]} of the cores now: "
            "measure both sides alike, or duel"
        )
    return ""


def _beside_others(said: Comparison, before: Sequence[Sighting], after: Sequence[Sighting], busier: str) -> Comparison:
    """Withholds a difference in time that others may have caused on one side.

    A p-value has the waiting in it already: the spread of many runs includes it.
    """
    longer = max(_longer(before), _longer(after)) if said.p_value is None else 1.0
    said = replace(said, others=max(FAR_AHEAD, longer) if busier else longer)
    if said.direction is Direction.UNSURE:
        return replace(said, why=busier or said.why)
    if (
        said.direction is Direction.SAME
        or said.ratio is None
        or abs(math.log(said.ratio.point)) > math.log(said.others)
    ):
        return said
    waited = f"steps took up to {longer:.1f} times as long for want of a core: measure while others do less, or duel"
    return replace(said, direction=Direction.UNSURE, why=busier or waited)


def _longer(side: Sequence[Sighting]) -> float:
    """Returns how many times as long steps took, on average, because they waited for a core; 1 on a device of its
    own."""
    cases = [sighting.record for sighting in side if sighting.record.case.device.startswith("cpu")]
    slots = [slot for record in cases if record.timing is not None for slot in record.timing.slots]
    wall = sum(slot.wall_seconds for slot in slots)
    waited = sum(
        max(0.0, slot.wall_seconds - slot.cpu_seconds) if slot.waited_seconds is None else slot.waited_seconds
        for slot in slots
    )
    return wall / max(wall - waited, wall * _LEAST_SHARE) if wall else 1.0


def _loads(side: Sequence[Sighting]) -> Iterator[float]:
    for facts in (sighting.run.environment.facts for sighting in side):
        if cores := known_number(facts, "cpu_count"):
            yield known_number(facts, "load_1min") / cores


def _alone(own: Mapping[str, tuple[Sighting, ...]], other: Mapping[str, tuple[Sighting, ...]]) -> tuple[str, ...]:
    return tuple(
        name for name, seen in own.items() if name not in other and seen[-1].record.status is not Status.SKIPPED
    )


def _of_case(
    before: Sequence[Sighting], after: Sequence[Sighting], beside: Sequence[Sighting], conditions: str
) -> Iterator[Comparison]:
    old, new = before[-1].record, after[-1].record
    if old.status is new.status is Status.SKIPPED:
        return
    if new.status is not Status.OK or old.status is not Status.OK:
        failed = new.status is Status.FAILED and old.status is not Status.FAILED
        words = [_BECAME[record.status] + (f" ({record.reason})" if record.reason else "") for record in (old, new)]
        yield _none(new.case, f"{words[0]} before, {words[1]} now", failed)
        return
    version = new.case.version
    old_side, new_side, others = (
        [sighting for sighting in side if sighting.record.case.version == version] for side in (before, after, beside)
    )
    if not old_side:
        yield _none(new.case, f"version {old.case.version} before and {version} now: the work changed")
        return
    if old.support.level is not new.support.level:
        yield _none(new.case, f"{old.support.level} before and {new.support.level} now: not the same work")
        return
    kept = _whole(old_side), _whole(new_side)
    busier = _busier(*kept)
    for figures in (*timed(*kept, _whole(others)), *sensed(*kept, _whole(others))):
        said = of_times(figures, new.case.id, new.case.workload, _labels((*kept[0], *kept[1])))
        if figures.metric in (TIME, RELATIVE):
            said = _beside_others(said, *kept, busier)
        yield replace(said, direction=Direction.DIFFERS, why=conditions) if conditions else said
    for metric, first, second in counted(*kept):
        exact = exact_change(first, second)
        yield Comparison(
            new.case.id,
            new.case.workload,
            metric.name,
            metric.unit,
            exact.direction,
            Evidence.CROSS_RUN,
            exact.before,
            exact.after,
            exact.ratio,
            exact.p_value,
            why=exact.why,
            noise=exact.noise,
        )
    if all(kept):
        yield from _of_tapes(kept[0][-1].record, kept[1][-1].record)


def _of_tapes(old: Record, new: Record) -> Iterator[Comparison]:
    if old.tape is None or new.tape is None:
        return
    why = what_changed(old.tape, new.tape)
    for spec, first, second in zip(COUNTS, counts_of(old.tape), counts_of(new.tape), strict=True):
        exact = exact_change([float(first)], [float(second)], rounding=0.0)
        yield Comparison(
            new.case.id,
            new.case.workload,
            spec.name,
            spec.unit,
            exact.direction,
            Evidence.CROSS_RUN,
            exact.before,
            exact.after,
            exact.ratio,
            why=why if first != second else "",
        )


def _whole(side: Sequence[Sighting]) -> list[Sighting]:
    """Returns the sightings with numbers; those of --quick runs only where there are no others."""
    good = [sighting for sighting in side if sighting.record.is_ok]
    return [sighting for sighting in good if not sighting.run.request.quick] or good


def _none(case: Case, why: str, failed: bool = False) -> Comparison:
    return Comparison(case.id, case.workload, TIME, "s", Direction.NONE, Evidence.CROSS_RUN, why=why, failed=failed)


def of_times(figures: MatchedFigures, case: str, suite: str, labels: tuple[str, ...]) -> Comparison:
    difference = _at_shown(across(figures.before, figures.after, figures.beside), figures.shown)
    where, why = direction(difference)
    ratio = difference.ratio
    if figures.few and difference.alone:
        where, why = Direction.UNSURE, "a few runs of a few rounds each"
        ratio = Interval(ratio.point, ratio.point, ratio.point, 0.0)
    typical = across(figures.typical[0], figures.typical[1], figures.typical[2]).ratio if figures.typical else ratio
    contradicted = where in _VERDICTS and not agrees(_VERDICTS[where], ratio, typical)
    if contradicted:
        where, why = Direction.UNSURE, "the mean over all calls does not confirm what the fastest calls say"
    if uneven(ratio, typical) and (contradicted or not difference.alone):
        labels = tuple(label for label in Label if label in (*labels, Label.UNEVEN))
    before, after = figures.shown or (_middle(figures.before), _middle(figures.after))
    return Comparison(
        case,
        suite,
        figures.metric,
        figures.unit,
        where,
        Evidence.CROSS_RUN,
        before,
        after,
        ratio,
        difference.p_value,
        labels,
        why,
        noise=difference.noise,
    )


def _middle(side: Sequence[Estimate]) -> float:
    return math.exp(fmean(estimate.log for estimate in side))


def _at_shown(difference: RunDifference, shown: tuple[float, float] | None) -> RunDifference:
    """Gives a ratio the point of the times that every report shows of the runs; its interval holds both."""
    if shown is None:
        return difference
    ratio, point = difference.ratio, shown[1] / shown[0]
    return replace(
        difference, ratio=replace(ratio, point=point, low=min(ratio.low, point), high=max(ratio.high, point))
    )


def _labels(sightings: Sequence[Sighting]) -> tuple[str, ...]:
    labels = {label for sighting in sightings if sighting.finding is not None for label in sighting.finding.labels}
    labels.add(Label.CROSS_RUN)
    return tuple(label.value for label in Label if label in labels)
