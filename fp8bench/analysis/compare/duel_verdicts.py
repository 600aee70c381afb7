"""What the samples of a duel say: B against A, figure by figure.

Times by duel_interval.py. Values (errors, memory) are the same whenever the same code runs, so that they need no
statistics.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import replace

from fp8bench.analysis.compare.duel_interval import Judged, judge, why_sure, why_unsure
from fp8bench.analysis.compare.interval import exact_change
from fp8bench.analysis.compare.interval import p_value as chance_of
from fp8bench.analysis.labels import labels_of
from fp8bench.analysis.metric import MEAN, TIME, Better, better_of
from fp8bench.analysis.places import place_effect
from fp8bench.analysis.verdicts import BAND, best_phases, rule
from fp8bench.model import Comparison, Direction, Evidence, Finding, Label, Measurement, Noise, Status, Verdict
from fp8bench.model.duel import AFTER, BEFORE, CaseResult, Duel

# They are about rounds, of which verdicts here are not made, or about noise, which is in the interval.
_OF_A_SUITE = {Label.NOISY, Label.FEW_SAMPLES, Label.BIMODAL, Label.DRIFT, Label.UNPAIRED}
_DIRECTIONS = {
    Verdict.FASTER: Direction.BETTER, Verdict.SLOWER: Direction.WORSE, Verdict.SAME: Direction.SAME,
    Verdict.UNSURE: Direction.UNSURE,
}  # fmt: skip


def judged(result: CaseResult) -> Judged | None:
    """What the times of a result say; None where there are none, or the case has failed."""
    return judge(result.sessions) if result.measured else None


def comparisons(duel: Duel) -> tuple[Comparison, ...]:
    """Every figure of every case, times first."""
    return tuple(one for result in duel.results for one in compared(result))


def of_means(duel: Duel) -> Iterator[Comparison]:
    """What the means over all calls say of each case; its time's comparison says it only where the two disagree."""
    for result in duel.results:
        found = judged(result)
        if found is not None and found.resolved:
            way = _DIRECTIONS[rule(found.typical, BAND)]
            yield replace(_blank(result, MEAN, "s"), direction=way, ratio=found.typical, labels=_labels(result, found))


def compared(result: CaseResult) -> Iterator[Comparison]:
    """The figures of one case."""
    yield _time(result)
    names = dict.fromkeys(
        one.metric for record in (result.before, result.after) for one in record.measurements
        if better_of(one.metric) is Better.LOWER
    )  # fmt: skip
    for name in names:
        yield _value(result, name)


def _time(result: CaseResult) -> Comparison:
    found = judged(result)
    blank = _blank(result, TIME, "s")
    if found is None:
        return replace(blank, why=_why_none(result))
    blank = replace(blank, before=found.before, after=found.after, labels=_labels(result, found))
    old, new = result.before.support.level, result.after.support.level
    if old is not new:
        return replace(blank, why=f"{old} on side {BEFORE} and {new} on side {AFTER}: not the same work")
    why = why_unsure(found) if found.verdict is Verdict.UNSURE else why_sure(found)
    way = _DIRECTIONS[found.verdict]
    noise = Noise(found.error, found.freedom) if found.can_judge else None
    return replace(blank, direction=way, ratio=found.ratio, p_value=p_value(found), why=why, noise=noise)


def p_value(found: Judged) -> float | None:
    """The chance of so great a difference if nothing had changed; None where processes are too few to say.

    Beyond the least that dealing names out can tell, by Student's t.
    """
    if not found.resolved:
        return None
    if found.chance > found.finest:
        return found.chance
    return min(found.chance, chance_of(found.distance, found.freedom))


def _labels(result: CaseResult, found: Judged) -> tuple[Label, ...]:
    """Reasons for doubt that hold for half of the processes."""
    labels: list[Label] = []
    for session in result.sessions:
        for record, timings in ((result.before, session.before), (result.after, session.after)):
            for timing in timings:
                finding = Finding(record.case, found.verdict, phases=best_phases(timing))
                told = labels_of(replace(record, timing=timing), finding, None, None)
                labels += [one.label for one in told]
    processes = sum(len(one.before) + len(one.after) for one in result.sessions)
    wanted = {label for label in labels if labels.count(label) >= processes / 2} - _OF_A_SUITE
    if found.uneven:
        wanted.add(Label.UNEVEN)
    places = [place_effect([*one.before, *one.after]) for one in result.sessions]
    beyond = [one for one in places if one is not None and abs(one.ratio.point - 1) > max(BAND, found.apart)]
    if 2 * len(beyond) >= len(places):
        wanted.add(Label.POSITION)
    return tuple(label for label in Label if label in wanted)


def _why_none(result: CaseResult) -> str:
    """Why a case has no comparison of times."""
    for side, record in ((BEFORE, result.before), (AFTER, result.after)):
        if record.status is Status.FAILED:
            return f"it failed on side {side}: {record.reason}"
    return result.after.reason or result.before.reason or "no round has both sides"


def _value(result: CaseResult, metric: str) -> Comparison:
    """A value that is the same whenever the same code runs."""
    found = [record.measurement(metric) for record in (result.before, result.after)]
    unit = next(one.unit for one in found if one is not None)
    before, after = (_middle(one) for one in found)
    blank = replace(_blank(result, metric, unit), before=before, after=after)
    if before is None or after is None:
        why = _why_none(result) if result.failed else f"only side {AFTER if before is None else BEFORE} has it"
        return replace(blank, why=why)
    said = exact_change(*(one.samples for one in found if one is not None))
    return replace(
        blank, direction=said.direction, before=said.before, after=said.after, ratio=said.ratio, p_value=said.p_value,
        why=said.why, noise=said.noise,
    )  # fmt: skip


def _middle(one: Measurement | None) -> float | None:
    return statistics.median(one.samples) if one is not None and one.samples else None


def _blank(result: CaseResult, metric: str, unit: str) -> Comparison:
    """A comparison that says nothing yet."""
    case = result.after.case
    failed = result.after.status is Status.FAILED and result.before.status is not Status.FAILED
    return Comparison(case.id, case.workload, metric, unit, Direction.NONE, Evidence.PAIRED, failed=failed)
