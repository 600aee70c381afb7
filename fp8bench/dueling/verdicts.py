"""What the samples of a duel say: B against A, figure by figure.

Times by analysis.two_sides. Values (errors, memory) are the same whenever the same code runs, so that they need no
statistics.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import replace

from fp8bench.analysis.labels import labels_of
from fp8bench.analysis.two_sides import Judged, SideTimings, judge, why_unsure
from fp8bench.analysis.verdicts import best_phases
from fp8bench.comparing import student
from fp8bench.comparing.figures import TIME, is_cost
from fp8bench.dueling.duel import AFTER, BEFORE, Bout, Duel
from fp8bench.model import (
    Comparison,
    Direction,
    Evidence,
    Finding,
    Interval,
    Label,
    Measurement,
    Status,
    Verdict,
)

SECONDS = "s"
# What another order of a few sums changes an error by.
_SMALL = 1e-3
# They are about rounds, of which verdicts here are not made, or about noise, which is in the interval.
_OF_A_SUITE = {Label.NOISY, Label.FEW_SAMPLES, Label.BIMODAL, Label.DRIFT, Label.UNPAIRED}
_DIRECTIONS = {
    Verdict.FASTER: Direction.BETTER, Verdict.SLOWER: Direction.WORSE, Verdict.SAME: Direction.SAME,
    Verdict.UNSURE: Direction.UNSURE,
}  # fmt: skip


def judged(bout: Bout) -> Judged | None:
    """What the times of a bout say; None where there are none, or the case has failed."""
    return judge([SideTimings(one.before, one.after) for one in bout.sittings]) if bout.measured else None


def comparisons(duel: Duel) -> tuple[Comparison, ...]:
    """Every figure of every case, times first."""
    return tuple(one for bout in duel.bouts for one in compared(bout))


def compared(bout: Bout) -> Iterator[Comparison]:
    """The figures of one case."""
    yield _time(bout)
    names = dict.fromkeys(
        one.metric for record in (bout.before, bout.after) for one in record.measurements
        if is_cost(one.metric)
    )  # fmt: skip
    for name in names:
        yield _value(bout, name)


def _time(bout: Bout) -> Comparison:
    found = judged(bout)
    blank = _blank(bout, TIME, SECONDS)
    if found is None:
        return replace(blank, why=_why_none(bout))
    blank = replace(blank, before=found.before, after=found.after, labels=_labels(bout, found))
    old, new = bout.before.support.level, bout.after.support.level
    if old is not new:
        return replace(blank, why=f"{old} on side {BEFORE} and {new} on side {AFTER}: not the same work")
    why = why_unsure(found) if found.verdict is Verdict.UNSURE else ""
    way = _DIRECTIONS[found.verdict]
    return replace(blank, direction=way, ratio=found.ratio, p_value=p_value(found), why=why)


def p_value(found: Judged) -> float | None:
    """The chance of so great a difference if nothing had changed; None where processes are too few to say.

    Beyond the least that dealing names out can tell, by Student's t.
    """
    if not found.resolved:
        return None
    if found.chance > found.finest:
        return found.chance
    return min(found.chance, student.p_value(found.distance, found.freedom))


def _labels(bout: Bout, found: Judged) -> tuple[Label, ...]:
    """Reasons for doubt that hold for half of the processes."""
    labels: list[Label] = []
    for sitting in bout.sittings:
        for record, timings in ((bout.before, sitting.before), (bout.after, sitting.after)):
            for timing in timings:
                finding = Finding(record.case, found.verdict, phases=best_phases(timing))
                told = labels_of(replace(record, timing=timing), finding, None, None)
                labels += [one.label for one in told]
    processes = sum(len(one.before) + len(one.after) for one in bout.sittings)
    wanted = {label for label in labels if labels.count(label) >= processes / 2} - _OF_A_SUITE
    return tuple(label for label in Label if label in wanted)


def _why_none(bout: Bout) -> str:
    """Why a case has no comparison of times."""
    for side, record in ((BEFORE, bout.before), (AFTER, bout.after)):
        if record.status is Status.FAILED:
            return f"it failed on side {side}: {record.reason}"
    return bout.after.reason or bout.before.reason or "no round has both sides"


def _value(bout: Bout, metric: str) -> Comparison:
    """A value that is the same whenever the same code runs."""
    found = [record.measurement(metric) for record in (bout.before, bout.after)]
    unit = next(one.unit for one in found if one is not None)
    before, after = (_middle(one) for one in found)
    blank = replace(_blank(bout, metric, unit), before=before, after=after)
    if before is None or after is None:
        why = _why_none(bout) if bout.failed else f"only side {AFTER if before is None else BEFORE} has it"
        return replace(blank, why=why)
    if not (math.isfinite(before) and math.isfinite(after)):
        return replace(blank, why="it is no number that compares")
    ratio = Interval(after / before, after / before, after / before, 1.0) if before else None
    if before == after:
        return replace(blank, direction=Direction.SAME, ratio=ratio)
    if abs(after - before) <= _SMALL * abs(before):
        why = "it is not quite the same, by less than 0.1%: another order of sums may do so"
        return replace(blank, direction=Direction.UNSURE, ratio=ratio, why=why)
    return replace(blank, direction=Direction.BETTER if after < before else Direction.WORSE, ratio=ratio)


def _middle(one: Measurement | None) -> float | None:
    return statistics.median(one.samples) if one is not None and one.samples else None


def _blank(bout: Bout, metric: str, unit: str) -> Comparison:
    """A comparison that says nothing yet."""
    case = bout.after.case
    failed = bout.after.status is Status.FAILED and bout.before.status is not Status.FAILED
    return Comparison(case.id, case.workload, metric, unit, Direction.NONE, Evidence.PAIRED, failed=failed)
