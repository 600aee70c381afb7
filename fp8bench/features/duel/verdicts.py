"""Judges two sides by samples from several processes each: is B slower than A, and how certain is that?

A process may be faster or slower than its neighbour for internal reasons (where its memory is, how its allocator
behaves), often by a percent, sometimes by half. So processes are compared, not rounds: each gives one number, its best
case. A side is the geometric mean of the fastest three fifths of its processes, which mostly leaves out slow modes that
some enter by chance; a smaller share gave wider intervals. Shared conditions of a session (a neighbour, a clock) are
removed first: each counts by its distance from the session's median.

If nothing had changed, the names A and B would be assigned to a session's processes by chance. The interval holds those
ratios that would not put the sides further apart than chance does, over all assignments of the names: an inverted
permutation test, exact for any distribution of times, including outliers and modes. With two processes per side it
needs three sessions; with fewer, only differences too large for noise are reported. Values (errors, memory) are the
same whenever the same code runs, and need no statistics.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp8bench.analysis import stats, verdicts
from fp8bench.analysis.compare.interval import compare_exact_values
from fp8bench.analysis.compare.interval import p_value as chance_of
from fp8bench.analysis.doubts import place_effect
from fp8bench.analysis.labels import labels_of
from fp8bench.analysis.verdicts import BAND, best_phases, rule
from fp8bench.features.duel.values import AFTER, BEFORE, CaseResult, Duel, Session
from fp8bench.model import (
    Comparison,
    Direction,
    Evidence,
    Finding,
    Interval,
    Label,
    Noise,
    Record,
    Status,
    Timing,
    Verdict,
)
from fp8bench.model.specs import MEAN, TIME, Better, spec_of

LEAST_ROUNDS = 5
# Without an interval, the nearest processes of different sides must differ by more than this.
BELIEVED = 0.10
_MOST_DEALS = 4096
_HALVINGS = 12
# Smaller shifts count as none.
_NOTHING = 1e-9


@dataclass(frozen=True)
class DuelVerdict:
    """The verdict on the times of one case. `ratio` is after over before, which are in seconds.

    A slow-down of a session on both sides is removed from both times; their product is that of the measured times.

    `apart` is the larger share by which a side's slowest process was slower than its fastest. `chance` is the share of
    assignments that put the sides as far apart, `finest` the least it can be. `distance` is the difference in standard
    deviations of the assignments (`error`, a logarithm), with `freedom` degrees of freedom. `rounds` is that of the
    session with the fewest. `typical` is the ratio of means over all calls. `whole`: whole steps were compared.
    """

    verdict: Verdict
    ratio: Interval
    before: float
    after: float
    apart: float
    chance: float
    finest: float
    distance: float
    freedom: int
    rounds: int
    sessions: int
    typical: Interval
    error: float
    whole: bool = False

    @property
    def resolved(self) -> bool:
        return self.finest <= 1 - self.ratio.level

    @property
    def can_judge(self) -> bool:
        """Whether there were enough processes and rounds to believe a difference of any size."""
        return self.resolved and self.rounds >= LEAST_ROUNDS

    @property
    def uneven(self) -> bool:
        return self.resolved and verdicts.is_uneven(self.ratio, self.typical)


def judge(
    sessions: Sequence[Session], level: float = verdicts.FINAL_LEVEL, same: float = verdicts.SAME
) -> DuelVerdict | None:
    """Judges all sessions; returns None if no session has a round with all of its entries."""
    shared = [session for session in sessions if _rounds(session)]
    if not shared:
        return None
    # Whole steps are compared if parts of a step compensate for each other by more than processes differ.
    whole_steps = 2 * sum(map(_make_up, shared)) >= len(shared)
    # 1. Compute logarithms of the best case and of all calls: one row per process.
    measured = [(session, _logs(session, whole_steps), len(_rounds(session))) for session in shared]
    logs, of_all_calls = np.concatenate([logs for _, logs, _ in measured], axis=1)
    is_after = np.concatenate(
        [[False] * len(session.before) + [True] * len(session.after) for session, _, _ in measured]
    )
    sizes = [(len(session.before), len(session.after)) for session, _, _ in measured]
    # 2. How often would randomly assigned names be as far apart?
    deals = _Deals(logs, is_after, sizes)
    rounds = min(rounds for _, _, rounds in measured)
    logs_a, logs_b = logs[~is_after], logs[is_after]
    ratio, typical = deals.interval(level), _Deals(of_all_calls, is_after, sizes).interval(level)
    # 3. With too few processes for an interval, sides differ only if they do not overlap.
    resolved = deals.finest <= 1 - level
    verdict = verdicts.rule(ratio, verdicts.BAND, same) if resolved else _without_interval(logs_a, logs_b)
    # 4. The mean over all calls must not contradict the fastest calls.
    if rounds < LEAST_ROUNDS or not verdicts.agrees(verdict, ratio, typical):
        verdict = Verdict.UNSURE
    # 5. Compute seconds of both sides around their common level.
    middle = (_fast_mean(logs_a) + _fast_mean(logs_b)) / 2
    apart = math.expm1(max(float(np.ptp(logs_a)), float(np.ptp(logs_b))))
    return DuelVerdict(
        verdict,
        ratio,
        math.exp(middle - deals.shift / 2),
        math.exp(middle + deals.shift / 2),
        apart,
        deals.chance(0.0),
        deals.finest,
        deals.distance,
        max(1, len(logs) - 1 - len(measured)),
        rounds,
        len(measured),
        typical,
        deals.error,
        whole_steps,
    )


def why_unsure(times: DuelVerdict) -> str:
    # In the order in which a reader can fix it.
    if times.rounds < LEAST_ROUNDS:
        rounds = "1 round a session is" if times.rounds == 1 else f"{times.rounds} rounds a session are"
        return f"{rounds} too few; give it more time (--budget) or rounds"
    if not times.resolved:
        return (
            f"{times.sessions} session{'s' * (times.sessions != 1)} cannot tell what two processes differ by anyway; "
            "give it more (--sessions)"
        )
    if times.uneven or verdicts.rule(times.ratio, verdicts.BAND) is not Verdict.UNSURE:
        return "the mean over all calls contradicts the fastest calls"
    return "processes of one side differ too much; use more of them (--sessions), or a quieter machine"


def _rounds(session: Session) -> list[int]:
    return verdicts.common_rounds([*session.before, *session.after]) if session.before and session.after else []


def _logs(session: Session, whole_steps: bool) -> NDArray[np.float64]:
    timings, rounds = [*session.before, *session.after], _rounds(session)
    of_all_calls = [float(verdicts.means(timing, rounds).mean()) for timing in timings]
    return np.log(np.array([_best(timings, rounds, whole_steps), of_all_calls], dtype=np.float64))


def _best(timings: Sequence[Timing], rounds: Sequence[int], whole_steps: bool) -> list[float]:
    return [
        float(stats.best_by_segment(timing).sum()) for timing in verdicts.to_comparable(timings, rounds, whole_steps)
    ]


def _make_up(session: Session) -> bool:
    rounds = _rounds(session)

    def distance(whole_steps: bool) -> float:
        return max(_apart(_best(side, rounds, whole_steps)) for side in (session.before, session.after))

    # Both by parts and by whole steps: parts that compensate for each other widen the first.
    floor = max(BAND, min(distance(False), distance(True)))
    return verdicts.cells_make_up([*session.before, *session.after], rounds, floor)


def _apart(seconds: Sequence[float]) -> float:
    return max(seconds) / min(seconds) - 1


def _fast_mean(logs: NDArray[np.float64]) -> Any:
    """Returns the mean of the lowest three fifths (rounded up) of each row."""
    # The slowest processes were disturbed; the fastest one alone may be luck.
    return np.sort(logs)[..., : -(-3 * logs.shape[-1] // 5)].mean(axis=-1)


def _without_interval(logs_a: NDArray[np.float64], logs_b: NDArray[np.float64]) -> Verdict:
    """Judges with too few processes for an interval. The nearest processes of different sides must be further apart
    than any two of one side, and than known noise."""
    if min(len(logs_a), len(logs_b)) < 2:
        return Verdict.UNSURE
    least = max(math.log1p(BELIEVED), float(np.ptp(logs_a)), float(np.ptp(logs_b)))
    if logs_b.min() - logs_a.max() > least:
        return Verdict.SLOWER
    return Verdict.FASTER if logs_a.min() - logs_b.max() > least else Verdict.UNSURE


class _Deals:
    """All ways of reassigning the names A and B to the processes of each session; a seeded sample if there are many."""

    def __init__(
        self, logs: NDArray[np.float64], is_after: NDArray[np.bool_], sizes: Sequence[tuple[int, int]]
    ) -> None:
        self._logs = logs
        self._is_after = is_after
        self._sessions = np.split(
            np.arange(len(logs)), np.cumsum([count_a + count_b for count_a, count_b in sizes])[:-1]
        )
        count = math.prod(math.comb(count_a + count_b, count_b) for count_a, count_b in sizes)
        if count <= _MOST_DEALS:
            choices = (itertools.combinations(range(count_a + count_b), count_b) for count_a, count_b in sizes)
            named = _mark_after(sizes, list(itertools.product(*choices)))
        else:
            # The true assignment and a seeded sample: the same samples always give the same verdict.
            draw = np.random.default_rng(0)
            deals = []
            for _ in range(_MOST_DEALS - 1):
                deal = [draw.permutation(count_a + count_b)[:count_b].tolist() for count_a, count_b in sizes]
                deals.append(deal)
            named = np.concatenate([[is_after], _mark_after(sizes, deals)])
        self.finest = 2 / count if all(count_a == count_b for count_a, count_b in sizes) else 1 / count
        self.finest = max(self.finest, 1 / len(named))
        # An assignment and its mirror image differ only in sign, and every one has equally many of each name.
        self._after, self._before = (np.nonzero(names)[1].reshape(len(named), -1) for names in (named, ~named))

    @property
    def shift(self) -> float:
        return self._apart(0.0)[1]

    def interval(self, level: float) -> Interval:
        """Returns the ratio of B to A; unbounded if there are too few assignments for this level. The bounds are the
        smallest and largest shift that chance explains. They are approached from outside, by bisection, because further
        inside chance may again explain less."""
        shift, low, high = self.shift, -math.inf, math.inf
        if self.finest <= 1 - level:
            reach = 2 * float(np.ptp(self._logs)) + abs(shift) + _NOTHING
            low, high = (self._bound(shift, outside, 1 - level) for outside in (-reach, reach))
        return Interval(math.exp(shift), math.exp(low), math.exp(high), level)

    def chance(self, shift: float) -> float:
        # Sums in a different order differ in the last bits: the true assignment must count.
        apart, observed = self._apart(shift)
        return float((np.abs(apart) >= abs(observed) - 1e-12).mean())

    def _bound(self, shift: float, outside: float, chance: float) -> float:
        # Even the farthest shift is as likely: no bound exists.
        if self.chance(shift + outside) > chance:
            return math.copysign(math.inf, outside)
        # Halve the distance, then bisect the last interval.
        while self.chance(shift + outside / 2) <= chance and abs(outside) > _NOTHING:
            outside /= 2
        inside = outside / 2
        for _ in range(_HALVINGS):
            middle = (inside + outside) / 2
            if self.chance(shift + middle) > chance:
                inside = middle
            else:
                outside = middle
        return shift + outside

    @cached_property
    def error(self) -> float:
        return float(np.std(self._apart(self.shift)[0]))

    @property
    def distance(self) -> float:
        shift = abs(self.shift)
        return shift / self.error if self.error else math.inf if shift else 0.0

    def _apart(self, shift: float) -> tuple[NDArray[np.float64], float]:
        logs = self._logs - shift * self._is_after
        for places in self._sessions:  # the same for every assignment: names do not change measurements
            logs[places] -= np.median(logs[places])
        means_a, means_b = (_fast_mean(logs[places]) for places in (self._before, self._after))
        return means_b - means_a, float(_fast_mean(logs[self._is_after]) - _fast_mean(logs[~self._is_after]))


def _mark_after(sizes: Sequence[tuple[int, int]], deals: Sequence[Sequence[Sequence[int]]]) -> NDArray[np.bool_]:
    ends = list(itertools.accumulate(count_a + count_b for count_a, count_b in sizes))
    rows = np.zeros((len(deals), ends[-1]), dtype=np.bool_)
    for row, deal in zip(rows, deals, strict=True):
        for begin, places in zip([0, *ends[:-1]], deal, strict=True):
            row[np.add(places, begin, dtype=np.intp)] = True
    return rows


# These labels are about rounds, which verdicts here do not use, or about noise, which the interval includes.
_OF_A_SUITE = {Label.NOISY, Label.FEW_SAMPLES, Label.BIMODAL, Label.DRIFT, Label.UNPAIRED}
_DIRECTIONS = {
    Verdict.FASTER: Direction.BETTER,
    Verdict.SLOWER: Direction.WORSE,
    Verdict.SAME: Direction.SAME,
    Verdict.UNSURE: Direction.UNSURE,
}


def judge_case(result: CaseResult) -> DuelVerdict | None:
    return judge(result.sessions) if result.measured else None


def comparisons(duel: Duel) -> tuple[Comparison, ...]:
    return tuple(itertools.chain.from_iterable(map(compare_case, duel.results)))


def compare_means(duel: Duel) -> Iterator[Comparison]:
    for result in duel.results:
        times = judge_case(result)
        if times is not None and times.resolved:
            direction = _DIRECTIONS[rule(times.typical, BAND)]
            yield replace(
                _blank(result, MEAN, "s"), direction=direction, ratio=times.typical, labels=_labels(result, times)
            )


def compare_case(result: CaseResult) -> Iterator[Comparison]:
    yield _time(result)
    measurements = (*result.before.measurements, *result.after.measurements)
    for name in dict.fromkeys(measurement.metric for measurement in measurements):
        if spec_of(name).better is Better.LOWER:
            yield _value(result, name)


def _time(result: CaseResult) -> Comparison:
    times = judge_case(result)
    blank = _blank(result, TIME, "s")
    if times is None:
        return replace(blank, why=_why_none(result))
    blank = replace(blank, before=times.before, after=times.after, labels=_labels(result, times))
    old, new = result.before.support.level, result.after.support.level
    if old is not new:
        return replace(blank, why=f"{old} on side {BEFORE} and {new} on side {AFTER}: not the same work")
    reason = why_unsure(times) if times.verdict is Verdict.UNSURE else ""
    direction = _DIRECTIONS[times.verdict]
    noise = Noise(times.error, times.freedom) if times.can_judge else None
    return replace(blank, direction=direction, ratio=times.ratio, p_value=p_value(times), why=reason, noise=noise)


def p_value(times: DuelVerdict) -> float | None:
    """Returns the probability of such a large difference if nothing had changed; None if there are too few processes.
    Below the resolution of the permutation test, Student's t is used."""
    if not times.resolved:
        return None
    if times.chance > times.finest:
        return times.chance
    return min(times.chance, chance_of(times.distance, times.freedom))


def _labels(result: CaseResult, times: DuelVerdict) -> tuple[Label, ...]:
    processes: list[tuple[Record, Timing]] = []
    for session in result.sessions:
        processes += [(result.before, timing) for timing in session.before]
        processes += [(result.after, timing) for timing in session.after]
    labels: list[Label] = []
    for record, timing in processes:
        finding = Finding(record.case, times.verdict, phases=best_phases(timing))
        labels += [entry.label for entry in labels_of(replace(record, timing=timing), finding, None, None)]
    frequent = {label for label in labels if labels.count(label) >= len(processes) / 2} - _OF_A_SUITE
    if times.uneven:
        frequent.add(Label.UNEVEN)
    if times.whole:
        frequent.add(Label.WHOLE_STEPS)
    places = [place_effect([*session.before, *session.after]) for session in result.sessions]
    beyond = [place for place in places if place is not None and abs(place.ratio.point - 1) > max(BAND, times.apart)]
    if 2 * len(beyond) >= len(places):
        frequent.add(Label.POSITION)
    return tuple(label for label in Label if label in frequent)


def _why_none(result: CaseResult) -> str:
    for side, record in ((BEFORE, result.before), (AFTER, result.after)):
        if record.status is Status.FAILED:
            return f"it failed on side {side}: {record.reason}"
    return result.after.reason or result.before.reason or "no round has both sides"


def _value(result: CaseResult, metric: str) -> Comparison:
    both = [record.measurement(metric) for record in (result.before, result.after)]
    unit, *other_units = dict.fromkeys(measured.unit for measured in both if measured is not None)
    if other_units:
        return replace(
            _blank(result, metric, unit), why=f"its unit was {unit or 'none'} and is {other_units[0] or 'none'}"
        )
    samples = [measured.samples if measured is not None else () for measured in both]
    value_a, value_b = (statistics.median(values) if values else None for values in samples)
    blank = replace(_blank(result, metric, unit), before=value_a, after=value_b)
    if value_a is None or value_b is None:
        reason = _why_none(result) if result.failed else f"only side {AFTER if value_a is None else BEFORE} has it"
        return replace(blank, why=reason)
    return replace(blank, **compare_exact_values(*samples)._asdict())


def _blank(result: CaseResult, metric: str, unit: str) -> Comparison:
    case = result.after.case
    failed = result.after.status is Status.FAILED and result.before.status is not Status.FAILED
    return Comparison(case.id, case.workload, metric, unit, Direction.NONE, Evidence.PAIRED, failed=failed)
