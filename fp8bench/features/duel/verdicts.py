"""Judges two sides by samples of several processes each: is B slower than A, and how certain is that?

A process may be faster or slower than an equal one for internal reasons, such as where its memory is. The difference
is often a percent, and sometimes a factor of 1.5. So processes are compared, not rounds. Each process gives one
number, its best case. A side is the geometric mean of the fastest three fifths of its processes. This mostly excludes
slow modes that some processes enter by chance. A smaller fraction gave wider intervals.

Conditions that all processes of a session share (a neighbour, a clock) are removed first: each process counts by its
distance from the median of its session.

If nothing had changed, chance would assign the names A and B to the processes of a session. So all assignments of the
names are tried. The interval holds all ratios that put the sides no further apart than chance does. This is an
inverted permutation test. It is exact for any distribution of times, including outliers and modes. With two processes
per side, it needs three sessions. With fewer sessions, only differences too large for noise are reported. Values
(errors, memory) are equal whenever the same code runs, so they need no statistics.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp8bench.analysis import stats, verdicts
from fp8bench.analysis.compare.interval import compare_exact_values
from fp8bench.analysis.compare.interval import p_value as compute_student_p
from fp8bench.analysis.doubts import find_position_effect
from fp8bench.analysis.labels import collect_labels
from fp8bench.analysis.verdicts import BAND, best_phases, decide_verdict
from fp8bench.features.duel.values import AFTER, BEFORE, CaseResult, Duel, Session
from fp8bench.model import (
    Comparison,
    Direction,
    Evidence,
    Finding,
    Interval,
    Label,
    Noise,
    Status,
    Timing,
    Verdict,
)
from fp8bench.model.specs import MEAN_TIME, TIME, Better, spec_of

MIN_ROUNDS = 5
# With too few processes for an interval, the nearest processes of the two sides must differ by more than this share.
CLEAR_DIFFERENCE = 0.10
_MAX_ASSIGNMENTS = 4096
_BISECTION_STEPS = 12
# Shifts below this count as zero.
_NEGLIGIBLE_SHIFT = 1e-9


@dataclass(frozen=True)
class DuelVerdict:
    """The verdict on the times of one case. `ratio` is `after` / `before`, which are in seconds. If a session slows
    down both sides, this slow-down is removed from the two times. `apart` is how much slower the slowest process of
    a side was than its fastest, as a share, for the side with the larger share. `chance` is the fraction of name
    assignments that put the sides as far apart, and `finest` is the smallest fraction possible. `distance` is the
    difference in standard deviations of the assignments (`error`, a logarithm), with `freedom` degrees of freedom.
    `rounds` is the number of rounds in the session that has fewest. `typical` is the ratio of the means over all
    calls. `whole` is True if complete steps were compared, not their parts.
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
    def is_resolved(self) -> bool:
        return self.finest <= 1 - self.ratio.level

    @property
    def can_judge(self) -> bool:
        """Whether there are enough processes and rounds to believe a difference of any size."""
        return self.is_resolved and self.rounds >= MIN_ROUNDS

    @property
    def is_uneven(self) -> bool:
        return self.is_resolved and verdicts.is_uneven(self.ratio, self.typical)


def judge_sessions(
    sessions: Sequence[Session], level: float = verdicts.FINAL_LEVEL, same: float = verdicts.SAME
) -> DuelVerdict | None:
    """Judges all sessions of a case. Returns None if no round of any session has all processes."""
    shared_sessions = [session for session in sessions if _list_rounds(session)]
    if not shared_sessions:
        return None
    # Compare complete steps if parts of a step compensate for each other by more than processes differ.
    uses_whole_steps = 2 * sum(map(_do_parts_compensate, shared_sessions)) >= len(shared_sessions)
    # 1. For each process, compute the logarithms of its best case and of its mean over all calls.
    session_logs = [_compute_logs(session, uses_whole_steps) for session in shared_sessions]
    logs, of_all_calls = np.concatenate(session_logs, axis=1)
    sizes = [(len(session.before), len(session.after)) for session in shared_sessions]
    is_after = np.concatenate([[False] * count_a + [True] * count_b for count_a, count_b in sizes])
    # 2. Find how often the sides are as far apart if the names of the sides are assigned at random.
    assignments = _NameAssignments(logs, is_after, sizes)
    rounds = min(len(_list_rounds(session)) for session in shared_sessions)
    logs_a = logs[~is_after]
    logs_b = logs[is_after]
    ratio = assignments.interval(level)
    typical = _NameAssignments(of_all_calls, is_after, sizes).interval(level)
    # 3. With too few processes for an interval, require that the processes of the sides do not overlap.
    is_resolved = assignments.finest <= 1 - level
    verdict = (
        verdicts.decide_verdict(ratio, verdicts.BAND, same) if is_resolved else _judge_without_interval(logs_a, logs_b)
    )
    # 4. Require that the mean over all calls does not contradict the fastest calls.
    if rounds < MIN_ROUNDS or not verdicts.mean_agrees(verdict, ratio, typical):
        verdict = Verdict.UNSURE
    # 5. Compute the seconds of both sides around their common level.
    common_level = (_mean_of_fastest(logs_a) + _mean_of_fastest(logs_b)) / 2
    process_spread = math.expm1(max(float(np.ptp(logs_a)), float(np.ptp(logs_b))))
    return DuelVerdict(
        verdict,
        ratio,
        math.exp(common_level - assignments.shift / 2),
        math.exp(common_level + assignments.shift / 2),
        process_spread,
        assignments.chance(0.0),
        assignments.finest,
        assignments.distance,
        max(1, len(logs) - 1 - len(session_logs)),
        rounds,
        len(session_logs),
        typical,
        assignments.error,
        uses_whole_steps,
    )


def explain_unsure(times: DuelVerdict) -> str:
    # The order is that in which a reader can remove the causes.
    if times.rounds < MIN_ROUNDS:
        rounds = "1 round per session is" if times.rounds == 1 else f"{times.rounds} rounds per session are"
        return f"{rounds} too few; give more time (--budget) or --rounds"
    if not times.is_resolved:
        return (
            f"{times.sessions} session{'s' * (times.sessions != 1)} cannot show how much two equal processes differ; "
            "use more (--sessions)"
        )
    if times.is_uneven or verdicts.decide_verdict(times.ratio, verdicts.BAND) is not Verdict.UNSURE:
        return "the mean over all calls contradicts the fastest calls"
    return "processes of one side differ too much; use more of them (--sessions), or a quieter machine"


def _list_rounds(session: Session) -> list[int]:
    return verdicts.find_common_rounds([*session.before, *session.after]) if session.before and session.after else []


def _compute_logs(session: Session, whole_steps: bool) -> NDArray[np.float64]:
    timings = [*session.before, *session.after]
    rounds = _list_rounds(session)
    mean_seconds = [float(verdicts.mean_seconds(timing, rounds).mean()) for timing in timings]
    return np.log([_list_best_seconds(timings, rounds, whole_steps), mean_seconds])


def _list_best_seconds(timings: Sequence[Timing], rounds: Sequence[int], whole_steps: bool) -> list[float]:
    return [
        float(stats.best_by_segment(timing).sum()) for timing in verdicts.to_comparable(timings, rounds, whole_steps)
    ]


def _do_parts_compensate(session: Session) -> bool:
    rounds = _list_rounds(session)

    def measure_spread(whole_steps: bool) -> float:
        return max(
            _measure_spread(_list_best_seconds(side, rounds, whole_steps)) for side in (session.before, session.after)
        )

    # Take the smaller of two spreads: of the sums of parts, and of complete steps. Parts that compensate for each other
    # widen the spread of the sums.
    floor = max(BAND, min(measure_spread(False), measure_spread(True)))
    return verdicts.do_cells_compensate([*session.before, *session.after], rounds, floor)


def _measure_spread(seconds: Sequence[float]) -> float:
    return max(seconds) / min(seconds) - 1


def _mean_of_fastest(logs: NDArray[np.float64]) -> Any:
    """Returns the mean of the lowest three fifths (rounded up) of each row."""
    # The slowest processes were disturbed, and the fastest one alone may be lucky.
    return np.sort(logs)[..., : -(-3 * logs.shape[-1] // 5)].mean(axis=-1)


def _judge_without_interval(logs_a: NDArray[np.float64], logs_b: NDArray[np.float64]) -> Verdict:
    """Judges a case with too few processes for an interval. The sides only count as different if even their nearest
    processes differ enough: by more than any two processes of one side, and by more than known noise.
    """
    if min(len(logs_a), len(logs_b)) < 2:
        return Verdict.UNSURE
    min_distance = max(math.log1p(CLEAR_DIFFERENCE), float(np.ptp(logs_a)), float(np.ptp(logs_b)))
    if logs_b.min() - logs_a.max() > min_distance:
        return Verdict.SLOWER
    return Verdict.FASTER if logs_a.min() - logs_b.max() > min_distance else Verdict.UNSURE


class _NameAssignments:
    """All ways to assign the names A and B to the processes of each session. If there are too many of them, a seeded
    random sample.
    """

    def __init__(
        self, logs: NDArray[np.float64], is_after: NDArray[np.bool_], sizes: Sequence[tuple[int, int]]
    ) -> None:
        self._logs = logs
        self._is_after = is_after
        session_ends = np.cumsum([count_a + count_b for count_a, count_b in sizes])
        self._sessions = np.split(np.arange(len(logs)), session_ends[:-1])
        assignment_count = math.prod(math.comb(count_a + count_b, count_b) for count_a, count_b in sizes)
        if assignment_count <= _MAX_ASSIGNMENTS:
            choices = (itertools.combinations(range(count_a + count_b), count_b) for count_a, count_b in sizes)
            after_masks = _mark_named_b(sizes, list(itertools.product(*choices)))
        else:
            # Use the true assignment and a seeded sample, so that the same samples always give the same verdict.
            rng = np.random.default_rng(0)
            sampled = []
            for _ in range(_MAX_ASSIGNMENTS - 1):
                assignment = [rng.permutation(count_a + count_b)[:count_b].tolist() for count_a, count_b in sizes]
                sampled.append(assignment)
            after_masks = np.concatenate([[is_after], _mark_named_b(sizes, sampled)])
        has_mirror_images = all(count_a == count_b for count_a, count_b in sizes)
        self.finest = max((1 + has_mirror_images) / assignment_count, 1 / len(after_masks))
        # An assignment and its mirror image differ only in sign, and every assignment has equally many of each name.
        self._after, self._before = (
            np.nonzero(names)[1].reshape(len(after_masks), -1) for names in (after_masks, ~after_masks)
        )

    @property
    def shift(self) -> float:
        return self._measure_distances(0.0)[1]

    def interval(self, level: float) -> Interval:
        """Returns the ratio of B to A with its interval. The interval is unbounded if there are too few assignments
        for this level. Its bounds are the smallest and the largest shift that chance explains. Between them may be
        shifts that chance does not explain, so bisection approaches the bounds from outside.
        """
        shift = self.shift
        low = -math.inf
        high = math.inf
        if self.finest <= 1 - level:
            reach = 2 * float(np.ptp(self._logs)) + abs(shift) + _NEGLIGIBLE_SHIFT
            low, high = (self._find_bound(shift, outside, 1 - level) for outside in (-reach, reach))
        return Interval(math.exp(shift), math.exp(low), math.exp(high), level)

    def chance(self, shift: float) -> float:
        # Sums in a different order differ in the last bits, but the true assignment must count.
        apart, observed = self._measure_distances(shift)
        return float((np.abs(apart) >= abs(observed) - 1e-12).mean())

    def _find_bound(self, shift: float, outside: float, chance: float) -> float:
        # Even the farthest shift is explained by chance, so no bound exists.
        if self.chance(shift + outside) > chance:
            return math.copysign(math.inf, outside)
        # Halve the distance until chance explains the shift, then bisect the last interval.
        while self.chance(shift + outside / 2) <= chance and abs(outside) > _NEGLIGIBLE_SHIFT:
            outside /= 2
        explained_offset = outside / 2
        for _ in range(_BISECTION_STEPS):
            middle_offset = (explained_offset + outside) / 2
            if self.chance(shift + middle_offset) > chance:
                explained_offset = middle_offset
            else:
                outside = middle_offset
        return shift + outside

    @cached_property
    def error(self) -> float:
        return float(np.std(self._measure_distances(self.shift)[0]))

    @property
    def distance(self) -> float:
        shift = abs(self.shift)
        return shift / self.error if self.error else math.inf if shift else 0.0

    def _measure_distances(self, shift: float) -> tuple[NDArray[np.float64], float]:
        logs = self._logs - shift * self._is_after
        # the median of a session is the same for every assignment of names
        for places in self._sessions:
            logs[places] -= np.median(logs[places])
        distances = _mean_of_fastest(logs[self._after]) - _mean_of_fastest(logs[self._before])
        observed = _mean_of_fastest(logs[self._is_after]) - _mean_of_fastest(logs[~self._is_after])
        return distances, float(observed)


def _mark_named_b(
    sizes: Sequence[tuple[int, int]], assignments: Sequence[Sequence[Sequence[int]]]
) -> NDArray[np.bool_]:
    """Returns a row for each assignment that is True for the processes with the name B. `sizes` has the numbers of
    processes of each session.
    """
    ends = list(itertools.accumulate(count_a + count_b for count_a, count_b in sizes))
    rows = np.zeros((len(assignments), ends[-1]), dtype=np.bool_)
    for row, assignment in zip(rows, assignments, strict=True):
        for begin, places in zip([0, *ends[:-1]], assignment, strict=True):
            row[np.add(places, begin, dtype=np.intp)] = True
    return rows


# These labels are ignored: they are about rounds, which these verdicts do not use, or about noise, which the interval
# includes.
_IGNORED_LABELS = {Label.NOISY, Label.FEW_SAMPLES, Label.BIMODAL, Label.DRIFT, Label.UNPAIRED}
_DIRECTIONS = {
    Verdict.FASTER: Direction.BETTER,
    Verdict.SLOWER: Direction.WORSE,
    Verdict.SAME: Direction.SAME,
    Verdict.UNSURE: Direction.UNSURE,
}


def judge_case(result: CaseResult) -> DuelVerdict | None:
    return judge_sessions(result.sessions) if result.is_measured else None


def comparisons(duel: Duel) -> tuple[Comparison, ...]:
    return tuple(itertools.chain.from_iterable(map(compare_case, duel.results)))


def compare_means(duel: Duel) -> Iterator[Comparison]:
    for result in duel.results:
        times = judge_case(result)
        if times is not None and times.is_resolved:
            direction = _DIRECTIONS[decide_verdict(times.typical, BAND)]
            yield replace(
                _make_empty_comparison(result, MEAN_TIME, "s"),
                direction=direction,
                ratio=times.typical,
                labels=_choose_labels(result, times),
            )


def compare_case(result: CaseResult) -> Iterator[Comparison]:
    yield _compare_times(result)
    measurements = (*result.before.measurements, *result.after.measurements)
    for name in dict.fromkeys(measurement.metric for measurement in measurements):
        if spec_of(name).better is Better.LOWER:
            yield _compare_values(result, name)


def _compare_times(result: CaseResult) -> Comparison:
    times = judge_case(result)
    comparison = _make_empty_comparison(result, TIME, "s")
    if times is None:
        return replace(comparison, why=_explain_missing(result))
    comparison = replace(comparison, before=times.before, after=times.after, labels=_choose_labels(result, times))
    level_a = result.before.support.level
    level_b = result.after.support.level
    if level_a is not level_b:
        reason = f"{level_a} on side {BEFORE} and {level_b} on side {AFTER}, so the sides do different work"
        return replace(comparison, why=reason)
    return replace(
        comparison,
        direction=_DIRECTIONS[times.verdict],
        ratio=times.ratio,
        p_value=compute_p_value(times),
        why=explain_unsure(times) if times.verdict is Verdict.UNSURE else "",
        noise=Noise(times.error, times.freedom) if times.can_judge else None,
    )


def compute_p_value(times: DuelVerdict) -> float | None:
    """Returns the probability of such a large difference if nothing had changed. Returns None if there are too few
    processes. For probabilities below the resolution of the permutation test, Student's t is used.
    """
    if not times.is_resolved:
        return None
    if times.chance > times.finest:
        return times.chance
    return min(times.chance, compute_student_p(times.distance, times.freedom))


def _choose_labels(result: CaseResult, times: DuelVerdict) -> tuple[Label, ...]:
    processes = []
    large_effects = 0
    for session in result.sessions:
        processes += [(result.before, timing) for timing in session.before]
        processes += [(result.after, timing) for timing in session.after]
        effect = find_position_effect([*session.before, *session.after])
        large_effects += effect is not None and abs(effect.ratio.point - 1) > max(BAND, times.apart)
    labels: Counter[Label] = Counter()
    for record, timing in processes:
        finding = Finding(record.case, times.verdict, phases=best_phases(timing))
        labels.update(entry.label for entry in collect_labels(replace(record, timing=timing), finding, None, None))
    chosen_labels = {label for label, count in labels.items() if 2 * count >= len(processes)} - _IGNORED_LABELS
    if times.is_uneven:
        chosen_labels.add(Label.UNEVEN)
    if times.whole:
        chosen_labels.add(Label.WHOLE_STEPS)
    if 2 * large_effects >= len(result.sessions):
        chosen_labels.add(Label.POSITION)
    return tuple(label for label in Label if label in chosen_labels)


def _explain_missing(result: CaseResult) -> str:
    for side, record in ((BEFORE, result.before), (AFTER, result.after)):
        if record.status is Status.FAILED:
            return f"it failed on side {side}: {record.reason}"
    return result.after.reason or result.before.reason or "no round has times of both sides"


def _compare_values(result: CaseResult, metric: str) -> Comparison:
    measurements = [record.measurement(metric) for record in (result.before, result.after)]
    unit, *other_units = dict.fromkeys(measured.unit for measured in measurements if measured is not None)
    comparison = _make_empty_comparison(result, metric, unit)
    if other_units:
        return replace(comparison, why=f"its unit was {unit or 'none'} and is now {other_units[0] or 'none'}")
    samples = [measured.samples if measured is not None else () for measured in measurements]
    value_a, value_b = (statistics.median(values) if values else None for values in samples)
    comparison = replace(comparison, before=value_a, after=value_b)
    if value_a is None or value_b is None:
        reason = f"only side {AFTER if value_a is None else BEFORE} has it"
        return replace(comparison, why=_explain_missing(result) if result.has_failed else reason)
    return replace(comparison, **compare_exact_values(*samples)._asdict())


def _make_empty_comparison(result: CaseResult, metric: str, unit: str) -> Comparison:
    case = result.after.case
    has_newly_failed = result.after.status is Status.FAILED and result.before.status is not Status.FAILED
    return Comparison(case.id, case.workload, metric, unit, Direction.NONE, Evidence.PAIRED, failed=has_newly_failed)
