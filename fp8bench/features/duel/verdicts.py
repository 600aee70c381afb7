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
from fp8bench.analysis.verdicts import VERDICT_BAND, compute_best_phase_seconds, decide_verdict
from fp8bench.features.duel.values import AFTER, BEFORE, CaseResult, CaseSession, Duel
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
from fp8bench.model.specs import MEAN_TIME, TIME, Better, find_metric_spec

MIN_ROUNDS = 5
# With too few processes for an interval, a verdict requires a gap of this share: between the slowest process of one
# side and the fastest of the other.
CLEAR_DIFFERENCE = 0.10
_MAX_NAME_ASSIGNMENTS = 4096
_BISECTION_STEPS = 12
# Differences of log ratios below this count as zero.
_NEGLIGIBLE_SHIFT = 1e-9


@dataclass(frozen=True)
class DuelVerdict:
    """The verdict on the times of one case. `before` and `after` are the seconds of side A and side B, and `ratio` is
    `after` divided by `before`. A slow-down that both sides share in a session is removed from both. `mean_ratio` is
    the ratio of the means over all calls. `process_spread` is how much slower the slowest process of a side was than
    its fastest, as a share; the larger share of the two sides.

    The permutation test assigns the names A and B to processes. `permutation_p_value` is the fraction of assignments
    that put the sides at least as far apart, and `smallest_p_value` its smallest possible value. `error` is the
    standard deviation of the logarithm of the ratio over all assignments. `standardized_distance` is the measured
    logarithm divided by `error`, with `freedom` degrees of freedom. `rounds` is the number of rounds of
    the shortest session. `uses_whole_steps` is False if a best case is the sum of the best times of parts of a step.
    """

    verdict: Verdict
    ratio: Interval
    before: float
    after: float
    process_spread: float
    permutation_p_value: float
    smallest_p_value: float
    standardized_distance: float
    freedom: int
    rounds: int
    sessions: int
    mean_ratio: Interval
    error: float
    uses_whole_steps: bool = False

    @property
    def is_resolved(self) -> bool:
        return self.smallest_p_value <= 1 - self.ratio.level

    @property
    def can_judge(self) -> bool:
        """Whether there are enough processes and rounds to believe a difference of any size."""
        return self.is_resolved and self.rounds >= MIN_ROUNDS

    @property
    def is_uneven(self) -> bool:
        return self.is_resolved and verdicts.is_uneven(self.ratio, self.mean_ratio)


def judge_duel_sessions(
    sessions: Sequence[CaseSession], level: float = verdicts.FINAL_LEVEL, same_band: float = verdicts.SAME_BAND
) -> DuelVerdict | None:
    """Judges the times of a case in all sessions. Returns None if no round of any session has all processes."""
    shared_sessions = [session for session in sessions if _list_common_rounds(session)]
    if not shared_sessions:
        return None
    # Usually, the best case of a process is the sum of the best times of the parts of a step. If parts compensate for
    # each other, this sum is too low, and complete steps are compared.
    uses_whole_steps = 2 * sum(map(_do_step_parts_compensate, shared_sessions)) >= len(shared_sessions)
    # 1. For each process, compute the logarithms of its fastest time and of its mean time.
    log_seconds_by_session = [_compute_log_seconds(session, uses_whole_steps) for session in shared_sessions]
    logs, mean_logs = np.concatenate(log_seconds_by_session, axis=1)
    sizes = [(len(session.before), len(session.after)) for session in shared_sessions]
    after_process_mask = np.concatenate([[False] * count_a + [True] * count_b for count_a, count_b in sizes])
    # 2. Run a permutation test: assign processes to sides in other ways, and count how often the sides differ as much.
    assignments = _NameAssignments(logs, after_process_mask, sizes)
    rounds = min(len(_list_common_rounds(session)) for session in shared_sessions)
    log_seconds_a = logs[~after_process_mask]
    log_seconds_b = logs[after_process_mask]
    ratio = assignments.interval(level)
    mean_ratio = _NameAssignments(mean_logs, after_process_mask, sizes).interval(level)
    # 3. With too few processes for an interval, require that the processes of the sides do not overlap.
    has_enough_processes = assignments.smallest_p_value <= 1 - level
    verdict = (
        verdicts.decide_verdict(ratio, verdicts.VERDICT_BAND, same_band)
        if has_enough_processes
        else _judge_without_interval(log_seconds_a, log_seconds_b)
    )
    # 4. Without enough rounds, or if the means over all calls contradict the fastest calls, the verdict is UNSURE.
    if rounds < MIN_ROUNDS or not verdicts.mean_agrees_with_verdict(verdict, ratio, mean_ratio):
        verdict = Verdict.UNSURE
    # 5. Compute both sides' seconds from their ratio and geometric mean.
    common_log_seconds = (_mean_of_fastest(log_seconds_a) + _mean_of_fastest(log_seconds_b)) / 2
    process_spread = math.expm1(max(float(np.ptp(log_seconds_a)), float(np.ptp(log_seconds_b))))
    return DuelVerdict(
        verdict,
        ratio,
        math.exp(common_log_seconds - assignments.log_ratio / 2),
        math.exp(common_log_seconds + assignments.log_ratio / 2),
        process_spread,
        assignments.compute_p_value(0.0),
        assignments.smallest_p_value,
        assignments.standardized_distance,
        max(1, len(logs) - 1 - len(log_seconds_by_session)),
        rounds,
        len(log_seconds_by_session),
        mean_ratio,
        assignments.error,
        uses_whole_steps,
    )


def explain_unsure_verdict(times: DuelVerdict) -> str:
    # Check the causes in the order in which a user should remove them.
    if times.rounds < MIN_ROUNDS:
        rounds = "1 round per session is" if times.rounds == 1 else f"{times.rounds} rounds per session are"
        return f"{rounds} too few; give more time (--budget) or --rounds"
    if not times.is_resolved:
        return (
            f"{times.sessions} session{'s' * (times.sessions != 1)} cannot show how much two equal processes differ; "
            "use more (--sessions)"
        )
    if times.is_uneven or verdicts.decide_verdict(times.ratio, verdicts.VERDICT_BAND) is not Verdict.UNSURE:
        return "the mean over all calls contradicts the fastest calls"
    return "processes of one side differ too much; use more of them (--sessions), or a quieter machine"


def _list_common_rounds(session: CaseSession) -> list[int]:
    return verdicts.find_common_rounds([*session.before, *session.after]) if session.before and session.after else []


def _compute_log_seconds(session: CaseSession, whole_steps: bool) -> NDArray[np.float64]:
    timings = [*session.before, *session.after]
    rounds = _list_common_rounds(session)
    mean_seconds = [float(verdicts.mean_seconds(timing, rounds).mean()) for timing in timings]
    return np.log([_list_best_step_seconds(timings, rounds, whole_steps), mean_seconds])


def _list_best_step_seconds(timings: Sequence[Timing], rounds: Sequence[int], whole_steps: bool) -> list[float]:
    return [
        float(stats.find_best_by_segment(timing).sum())
        for timing in verdicts.select_comparable_times(timings, rounds, whole_steps)
    ]


def _do_step_parts_compensate(session: CaseSession) -> bool:
    rounds = _list_common_rounds(session)

    def measure_spread(whole_steps: bool) -> float:
        return max(
            _measure_spread(_list_best_step_seconds(side, rounds, whole_steps))
            for side in (session.before, session.after)
        )

    # Compensation must exceed the spread of the processes. Take the smaller one of two spreads, because parts that
    # compensate for each other widen the spread of their sums.
    smallest_spread = max(VERDICT_BAND, min(measure_spread(False), measure_spread(True)))
    return verdicts.do_cells_compensate([*session.before, *session.after], rounds, smallest_spread)


def _measure_spread(seconds: Sequence[float]) -> float:
    return max(seconds) / min(seconds) - 1


def _mean_of_fastest(logs: NDArray[np.float64]) -> Any:
    """Returns the mean of the lowest three fifths of each row. The number of values is rounded up."""
    # The slowest processes were disturbed, and the fastest one alone may be lucky.
    return np.sort(logs)[..., : -(-3 * logs.shape[-1] // 5)].mean(axis=-1)


def _judge_without_interval(logs_a: NDArray[np.float64], logs_b: NDArray[np.float64]) -> Verdict:
    """Judges a case with too few processes for an interval. The sides count as different only if all processes of one
    side are slower than all of the other. The gap between them must exceed CLEAR_DIFFERENCE, and the range of the
    processes of each side.
    """
    # A single process does not show how much equal processes differ.
    if min(len(logs_a), len(logs_b)) < 2:
        return Verdict.UNSURE
    min_log_distance = max(math.log1p(CLEAR_DIFFERENCE), float(np.ptp(logs_a)), float(np.ptp(logs_b)))
    if logs_b.min() - logs_a.max() > min_log_distance:
        return Verdict.SLOWER
    return Verdict.FASTER if logs_a.min() - logs_b.max() > min_log_distance else Verdict.UNSURE


class _NameAssignments:
    """All ways to assign the names A and B to the processes of each session. If there are too many of them, a seeded
    random sample.
    """

    def __init__(
        self, logs: NDArray[np.float64], is_after: NDArray[np.bool_], sizes: Sequence[tuple[int, int]]
    ) -> None:
        self._logs = logs
        self._is_after = is_after
        session_end_indices = np.cumsum([count_a + count_b for count_a, count_b in sizes])
        self._sessions = np.split(np.arange(len(logs)), session_end_indices[:-1])
        side_assignment_count = math.prod(math.comb(count_a + count_b, count_b) for count_a, count_b in sizes)
        if side_assignment_count <= _MAX_NAME_ASSIGNMENTS:
            b_index_choices = (itertools.combinations(range(count_a + count_b), count_b) for count_a, count_b in sizes)
            is_named_b = _mark_processes_named_b(sizes, list(itertools.product(*b_index_choices)))
        else:
            # There are too many assignments: use the actual one and a random sample, with a fixed seed so that the same
            # times always give the same verdict.
            rng = np.random.default_rng(0)
            sampled_assignments = []
            for _ in range(_MAX_NAME_ASSIGNMENTS - 1):
                sampled_assignment = [
                    rng.permutation(count_a + count_b)[:count_b].tolist() for count_a, count_b in sizes
                ]
                sampled_assignments.append(sampled_assignment)
            is_named_b = np.concatenate([[is_after], _mark_processes_named_b(sizes, sampled_assignments)])
        # With equally many processes on both sides, exchanging A and B keeps the distance, so two assignments are most
        # extreme.
        has_mirror_images = all(count_a == count_b for count_a, count_b in sizes)
        self.smallest_p_value = max((1 + has_mirror_images) / side_assignment_count, 1 / len(is_named_b))
        # For each assignment, list the processes named B and those named A. Their numbers are the same in all
        # assignments.
        self._after_indices, self._before_indices = (
            np.nonzero(names)[1].reshape(len(is_named_b), -1) for names in (is_named_b, ~is_named_b)
        )

    @property
    def log_ratio(self) -> float:
        return self._measure_side_distances(0.0)[1]

    def interval(self, level: float) -> Interval:
        """Returns the ratio of B to A with its interval at a confidence level. The interval is unbounded if the sides
        have too few processes for this level. Its bounds are the smallest and the largest ratio that chance explains.
        Some ratios between the bounds may not be explained by chance, so bisection approaches each bound from outside.
        """
        log_ratio = self.log_ratio
        low = -math.inf
        high = math.inf
        if self.smallest_p_value <= 1 - level:
            largest_log_ratio_offset = 2 * float(np.ptp(self._logs)) + abs(log_ratio) + _NEGLIGIBLE_SHIFT
            low, high = (
                self._find_interval_bound(log_ratio, outer_offset, 1 - level)
                for outer_offset in (-largest_log_ratio_offset, largest_log_ratio_offset)
            )
        return Interval(math.exp(log_ratio), math.exp(low), math.exp(high), level)

    def compute_p_value(self, log_shift: float) -> float:
        # Allow for rounding: the actual assignment must count, but is summed in a different order.
        distances, observed_log_distance = self._measure_side_distances(log_shift)
        return float((np.abs(distances) >= abs(observed_log_distance) - 1e-12).mean())

    def _find_interval_bound(self, log_ratio: float, outer_offset: float, p_limit: float) -> float:
        # An offset is the distance of a log ratio from the measured one. If chance explains even the largest offset,
        # the interval has no bound.
        if self.compute_p_value(log_ratio + outer_offset) > p_limit:
            return math.copysign(math.inf, outer_offset)
        # Halve the offset until chance explains it, then bisect between the last two offsets.
        while self.compute_p_value(log_ratio + outer_offset / 2) <= p_limit and abs(outer_offset) > _NEGLIGIBLE_SHIFT:
            outer_offset /= 2
        explained_log_offset = outer_offset / 2
        for _ in range(_BISECTION_STEPS):
            bisected_log_offset = (explained_log_offset + outer_offset) / 2
            if self.compute_p_value(log_ratio + bisected_log_offset) > p_limit:
                explained_log_offset = bisected_log_offset
            else:
                outer_offset = bisected_log_offset
        return log_ratio + outer_offset

    @cached_property
    def error(self) -> float:
        return float(np.std(self._measure_side_distances(self.log_ratio)[0]))

    @property
    def standardized_distance(self) -> float:
        log_ratio_size = abs(self.log_ratio)
        return log_ratio_size / self.error if self.error else math.inf if log_ratio_size else 0.0

    def _measure_side_distances(self, log_shift: float) -> tuple[NDArray[np.float64], float]:
        centred_logs = self._logs - log_shift * self._is_after
        # the median of a session does not depend on the assignment of processes to sides
        for process_indices in self._sessions:
            centred_logs[process_indices] -= np.median(centred_logs[process_indices])
        assigned_distances = _mean_of_fastest(centred_logs[self._after_indices]) - _mean_of_fastest(
            centred_logs[self._before_indices]
        )
        observed_log_distance = _mean_of_fastest(centred_logs[self._is_after]) - _mean_of_fastest(
            centred_logs[~self._is_after]
        )
        return assigned_distances, float(observed_log_distance)


def _mark_processes_named_b(
    sizes: Sequence[tuple[int, int]], assignments: Sequence[Sequence[Sequence[int]]]
) -> NDArray[np.bool_]:
    """Returns one row per assignment. A row has one boolean per process, which is True if the assignment names the
    process B, and False if it names it A.

    `sizes` has the numbers of processes named A and B in each session. An assignment lists, for each session, the
    indices of the processes named B in that session.
    """
    session_end_indices = list(itertools.accumulate(count_a + count_b for count_a, count_b in sizes))
    rows = np.zeros((len(assignments), session_end_indices[-1]), dtype=np.bool_)
    for row, assignment in zip(rows, assignments, strict=True):
        for begin, b_positions in zip([0, *session_end_indices[:-1]], assignment, strict=True):
            row[np.add(b_positions, begin, dtype=np.intp)] = True
    return rows


# These labels are ignored: they are about rounds, which a duel's verdict does not use, or about noise, which its
# interval includes.
_LABELS_IGNORED_IN_DUELS = {Label.NOISY, Label.FEW_SAMPLES, Label.BIMODAL, Label.DRIFT, Label.UNPAIRED}
_DIRECTION_BY_VERDICT = {
    Verdict.FASTER: Direction.BETTER,
    Verdict.SLOWER: Direction.WORSE,
    Verdict.SAME: Direction.SAME,
    Verdict.UNSURE: Direction.UNSURE,
}


def judge_case(result: CaseResult) -> DuelVerdict | None:
    return judge_duel_sessions(result.sessions) if result.is_measured else None


def comparisons(duel: Duel) -> tuple[Comparison, ...]:
    return tuple(itertools.chain.from_iterable(map(compare_case_sides, duel.results)))


def compare_means(duel: Duel) -> Iterator[Comparison]:
    for result in duel.results:
        time_verdict = judge_case(result)
        if time_verdict is not None and time_verdict.is_resolved:
            direction = _DIRECTION_BY_VERDICT[decide_verdict(time_verdict.mean_ratio, VERDICT_BAND)]
            yield replace(
                _make_empty_comparison(result, MEAN_TIME, "s"),
                direction=direction,
                ratio=time_verdict.mean_ratio,
                labels=_choose_duel_labels(result, time_verdict),
            )


def compare_case_sides(result: CaseResult) -> Iterator[Comparison]:
    yield _compare_case_times(result)
    measurements = (*result.before.measurements, *result.after.measurements)
    for name in dict.fromkeys(measurement.metric for measurement in measurements):
        if find_metric_spec(name).better is Better.LOWER:
            yield _compare_values(result, name)


def _compare_case_times(result: CaseResult) -> Comparison:
    time_verdict = judge_case(result)
    comparison = _make_empty_comparison(result, TIME, "s")
    # 1. Without times of both sides, only explain why they are missing.
    if time_verdict is None:
        return replace(comparison, why=_explain_missing_times(result))
    comparison = replace(
        comparison,
        before=time_verdict.before,
        after=time_verdict.after,
        labels=_choose_duel_labels(result, time_verdict),
    )
    # 2. Do not compare different work, such as a native case with an emulated one.
    support_level_a = result.before.support.level
    support_level_b = result.after.support.level
    if support_level_a is not support_level_b:
        reason = (
            f"{support_level_a} on side {BEFORE} and {support_level_b} on side {AFTER}, so the sides do different work"
        )
        return replace(comparison, why=reason)
    return replace(
        comparison,
        direction=_DIRECTION_BY_VERDICT[time_verdict.verdict],
        ratio=time_verdict.ratio,
        p_value=compute_p_value(time_verdict),
        why=explain_unsure_verdict(time_verdict) if time_verdict.verdict is Verdict.UNSURE else "",
        noise=Noise(time_verdict.error, time_verdict.freedom) if time_verdict.can_judge else None,
    )


def compute_p_value(times: DuelVerdict) -> float | None:
    """Returns the probability of at least the measured difference if both sides were equally fast; None if there are
    too few processes. Below the resolution of the permutation test, Student's t is used.
    """
    if not times.is_resolved:
        return None
    if times.permutation_p_value > times.smallest_p_value:
        return times.permutation_p_value
    return min(times.permutation_p_value, compute_student_p(times.standardized_distance, times.freedom))


def _choose_duel_labels(result: CaseResult, times: DuelVerdict) -> tuple[Label, ...]:
    # 1. Collect the times of all processes, and count the sessions in which the order of processes matters.
    records_and_timings = []
    large_position_effect_count = 0
    for session in result.sessions:
        records_and_timings += [(result.before, timing) for timing in session.before]
        records_and_timings += [(result.after, timing) for timing in session.after]
        position_effect = find_position_effect([*session.before, *session.after])
        large_position_effect_count += position_effect is not None and abs(position_effect.ratio.point - 1) > max(
            VERDICT_BAND, times.process_spread
        )
    # 2. Keep the labels that at least half of the processes have.
    labels: Counter[Label] = Counter()
    for record, timing in records_and_timings:
        finding = Finding(record.case, times.verdict, phases=compute_best_phase_seconds(timing))
        labels.update(entry.label for entry in collect_labels(replace(record, timing=timing), finding, None, None))
    chosen_labels = {
        label for label, count in labels.items() if 2 * count >= len(records_and_timings)
    } - _LABELS_IGNORED_IN_DUELS
    # 3. Add the labels of the duel as a whole.
    if times.is_uneven:
        chosen_labels.add(Label.UNEVEN)
    if times.uses_whole_steps:
        chosen_labels.add(Label.WHOLE_STEPS)
    if 2 * large_position_effect_count >= len(result.sessions):
        chosen_labels.add(Label.POSITION)
    return tuple(label for label in Label if label in chosen_labels)


def _explain_missing_times(result: CaseResult) -> str:
    for side, record in ((BEFORE, result.before), (AFTER, result.after)):
        if record.status is Status.FAILED:
            return f"it failed on side {side}: {record.reason}"
    return result.after.reason or result.before.reason or "no round has times of both sides"


def _compare_values(result: CaseResult, metric: str) -> Comparison:
    side_measurements = [record.measurement(metric) for record in (result.before, result.after)]
    unit, *other_units = dict.fromkeys(measurement.unit for measurement in side_measurements if measurement is not None)
    comparison = _make_empty_comparison(result, metric, unit)
    if other_units:
        return replace(comparison, why=f"its unit was {unit or 'none'} and is now {other_units[0] or 'none'}")
    samples = [measurement.samples if measurement is not None else () for measurement in side_measurements]
    value_a, value_b = (statistics.median(values) if values else None for values in samples)
    comparison = replace(comparison, before=value_a, after=value_b)
    if value_a is None or value_b is None:
        reason = f"only side {AFTER if value_a is None else BEFORE} has it"
        return replace(comparison, why=_explain_missing_times(result) if result.has_failed else reason)
    return replace(comparison, **compare_exact_values(*samples)._asdict())


def _make_empty_comparison(result: CaseResult, metric: str, unit: str) -> Comparison:
    case = result.after.case
    has_newly_failed = result.after.status is Status.FAILED and result.before.status is not Status.FAILED
    return Comparison(case.id, case.workload, metric, unit, Direction.NONE, Evidence.PAIRED, failed=has_newly_failed)
