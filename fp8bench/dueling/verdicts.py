"""What the samples of a duel say: B against A, figure by figure.

Times: the best cases of both sides over the rounds that all entries were in, each side by the geometric mean of its
entries. The verdict is that of analysis.verdicts; the band is as much as two processes of one side provably differ.
Values (errors, memory) are the same whenever the same code runs, so that they need no statistics.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import replace

from fp8bench.analysis.labels import labels_of
from fp8bench.analysis.two_sides import Judged, chance, judge, why_unsure
from fp8bench.analysis.verdicts import best_phases
from fp8bench.dueling.duel import AFTER, BEFORE, Bout, Duel
from fp8bench.model import (
    Comparison,
    Direction,
    Evidence,
    Finding,
    Interval,
    Measurement,
    Record,
    Status,
    Timing,
    Verdict,
)

TIME, SECONDS = "time", "s"
# More of these is better, or neither more nor less is; errors of the same tensors say what they would say.
_NOT_LOWER_ENDS = ("_db",)
_NOT_LOWER = frozenset({"utilisation_percent", "dynamic_range_octaves", "subnormal_percent"})
# What another order of a few sums changes an error by.
_SMALL = 1e-3
_DIRECTIONS = {
    Verdict.FASTER: Direction.BETTER, Verdict.SLOWER: Direction.WORSE, Verdict.SAME: Direction.SAME,
    Verdict.UNSURE: Direction.UNSURE,
}  # fmt: skip


def judged(bout: Bout) -> Judged | None:
    """What the times of a bout say; None where they were not taken in the same rounds."""
    before, after = _entries(bout.before), _entries(bout.after)
    return judge(before, after) if before and after and bout.after.paired else None


def comparisons(duel: Duel) -> tuple[Comparison, ...]:
    """Every figure of every case, times first."""
    return tuple(one for bout in duel.bouts for one in compared(bout))


def compared(bout: Bout) -> Iterator[Comparison]:
    """The figures of one case."""
    yield _time(bout)
    names = dict.fromkeys(
        one.metric for record in (bout.before, bout.after) for one in record.measurements
        if not one.metric.endswith(_NOT_LOWER_ENDS) and one.metric not in _NOT_LOWER
    )  # fmt: skip
    for name in names:
        yield _value(bout, name)


def _entries(record: Record) -> list[Timing]:
    return [one for one in (record.timing, record.control) if one is not None and one.slots]


def _time(bout: Bout) -> Comparison:
    found = judged(bout)
    blank = _blank(bout, TIME, SECONDS)
    if found is None:
        return replace(blank, why=_why_none(bout))
    blank = replace(blank, before=found.before, after=found.after, labels=tuple(_labels(bout, found)))
    old, new = bout.before.support.level, bout.after.support.level
    if old is not new:
        return replace(blank, why=f"{old} on side {BEFORE} and {new} on side {AFTER}: not the same work")
    why = why_unsure(found) if found.verdict is Verdict.UNSURE else ""
    way = _DIRECTIONS[found.verdict]
    return replace(blank, direction=way, ratio=found.ratio, p_value=chance(found), why=why)


def _labels(bout: Bout, found: Judged) -> Iterator[str]:
    record = bout.after
    assert record.timing is not None and bout.before.timing is not None
    phases = best_phases(record.timing)
    finding = Finding(record.case, found.verdict, phases=phases, floor=found.floor, ratio=found.ratio)
    yield from labels_of(record, finding, bout.before.timing)


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
