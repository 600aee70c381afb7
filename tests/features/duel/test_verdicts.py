"""Verdicts from processes of two sides, compared with an independent permutation test and planted differences.

Then records and their values.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from fp8bench.features.duel.values import CaseResult, CaseSession
from fp8bench.features.duel.verdicts import (
    DuelVerdict,
    compare_case_sides,
    compute_p_value,
    explain_unsure_verdict,
    judge_duel_sessions,
)
from fp8bench.model import (
    Comparison,
    Direction,
    Evidence,
    Label,
    Level,
    Measurement,
    Record,
    Status,
    Support,
    Timing,
    Verdict,
)
from tests.counts import counts, for_each
from tests.fakes import called, record, steady, timing

Seconds = Sequence[tuple[float, ...]]


def session(before: Sequence[float], after: Sequence[float], rounds: int = 6) -> CaseSession:
    def side(times: Sequence[float]) -> tuple[Timing, ...]:
        return tuple(steady(round(1e9 * seconds), rounds) for seconds in times)

    return CaseSession(side(before), side(after))


def drawn(seed: int, sessions: int, slower: float = 0.0, spread: float = 0.005) -> list[CaseSession]:
    """Two processes per side and session, about 1 ms each; a session's common part drifts."""
    draw = np.random.default_rng(seed)
    found = []
    for _ in range(sessions):
        logs = draw.normal(draw.normal(0, 0.01), spread, 4) + np.array([0, 0, slower, slower])
        seconds = 1e-3 * np.exp(logs)
        found.append(session(seconds[:2], seconds[2:]))
    return found


def known(sessions: Sequence[CaseSession]) -> DuelVerdict:
    times = judge_duel_sessions(sessions)
    assert times is not None
    return times


def brute_chance(before: Seconds, after: Seconds) -> float:
    """The share of all permutations that separate the sides as much, by plain loops."""

    def low(values: Sequence[float]) -> float:
        return statistics.fmean(sorted(values)[: math.ceil(len(values) * 3 / 5)])

    def centred(old: Sequence[float], new: Sequence[float]) -> list[float]:
        logs = [math.log(value) for value in (*old, *new)]
        return [value - statistics.median(logs) for value in logs]

    pools = [centred(old, new) for old, new in zip(before, after, strict=True)]
    apart = []
    for deal in itertools.product(*(itertools.combinations(range(len(pool)), 2) for pool in pools)):
        first_side = []
        second_side = []
        for pool, places in zip(pools, deal, strict=True):
            for place, value in enumerate(pool):
                (second_side if place in places else first_side).append(value)
        apart.append(low(second_side) - low(first_side))
    measured = low(list(itertools.chain.from_iterable(pool[2:] for pool in pools)))
    measured -= low(list(itertools.chain.from_iterable(pool[:2] for pool in pools)))
    return sum(abs(value) >= abs(measured) - 1e-9 for value in apart) / len(apart)


def test_the_times_have_the_ratio_that_is_told() -> None:
    """A plain ratio may have the opposite sign: a session that is slow on both sides affects one side more."""
    sides = [((25.0, 25.5), (26.25, 25.0)), ((34.25, 34.25), (32.5, 33.25)), ((25.5, 25.25), (25.25, 26.25))]
    times = known([session(np.array(before) / 1e3, np.array(after) / 1e3) for before, after in sides])
    before, after = (
        statistics.geometric_mean(sorted(itertools.chain.from_iterable(processes))[:4])
        for processes in zip(*sides, strict=True)
    )
    assert after / before > 1.014 and times.ratio.point < 0.984
    assert times.after / times.before == pytest.approx(times.ratio.point)
    assert times.after * times.before == pytest.approx(before * after * 1e-6)
    for seed in range(5):
        times = known(drawn(seed, 4))
        assert times.after / times.before == pytest.approx(times.ratio.point)


@for_each(
    ("fastest", "slow", "verdict", "uneven"),
    [
        (0.975, 1.4, Verdict.UNSURE, True),
        (1.0, 1.4, Verdict.UNSURE, True),
        (1.0, 1.0, Verdict.SAME, False),
        (0.9, 0.9, Verdict.FASTER, False),
        (1.1, 2.0, Verdict.SLOWER, True),
    ],
)
def test_the_fastest_calls_do_not_decide_alone(fastest: float, slow: float, verdict: Verdict, uneven: bool) -> None:
    draw = np.random.default_rng(1)

    def process(*factors: float) -> Timing:
        own = 1e6 * math.exp(draw.normal(0, 0.002))
        return called(*[[round(own * factors[call % len(factors)]) for call in range(8)]] * 6)

    sessions = [
        CaseSession(
            (process(1.0), process(1.0)), (process(fastest, slow, slow, slow), process(slow, fastest, slow, slow))
        )
        for _ in range(4)
    ]
    times = known(sessions)
    assert (times.verdict, times.is_uneven) == (verdict, uneven)
    assert times.mean_ratio.point == pytest.approx((fastest + 3 * slow) / 4, rel=0.01)
    if uneven and verdict is Verdict.UNSURE:
        assert explain_unsure_verdict(times) == "the mean over all calls contradicts the fastest calls"
    time = next(compare_case_sides(CaseResult(record(None), record(None), tuple(sessions))))
    assert (Label.UNEVEN in time.labels) is uneven


def paced(draw: np.random.Generator, wide: float) -> Timing:
    """Ten rounds of work of variable length, then a wait until 5 ms have passed."""
    work = 1 + wide * draw.random(10)
    rows = [(int(1e6 * milliseconds), int(1e6 * (5 - milliseconds)), 100_000) for milliseconds in work]
    return timing(*rows, phases=("gemm", "data_load", "elementwise"))


def test_a_side_that_varies_more_at_the_same_pace_is_no_faster() -> None:
    """The fastest stretches of different rounds would make it faster."""
    for seed in range(40):
        draw = np.random.default_rng(seed)
        sessions = []
        for _ in range(3):
            before = (paced(draw, 0.2), paced(draw, 0.2))
            after = (paced(draw, 0.8), paced(draw, 0.8))
            sessions.append(CaseSession(before, after))
        times = known(sessions)
        assert times.uses_whole_steps and times.verdict in (Verdict.SAME, Verdict.UNSURE), (seed, times)
    result = CaseResult(record(sessions[0].before[0]), record(sessions[0].after[0]), tuple(sessions))
    assert Label.WHOLE_STEPS in next(compare_case_sides(result)).labels


@for_each("slower", [0.0, 0.004, 0.02])
def test_chance_is_that_of_all_deals(slower: float) -> None:
    draw = np.random.default_rng(int(1e4 * slower))
    before = [tuple(1e-3 * np.exp(draw.normal(0, 0.005, 2))) for _ in range(3)]
    after = [tuple(1e-3 * np.exp(draw.normal(slower, 0.005, 2))) for _ in range(3)]
    times = known([session(old, new) for old, new in zip(before, after, strict=True)])
    assert times.permutation_p_value == pytest.approx(brute_chance(before, after), abs=1e-9)
    assert times.smallest_p_value == pytest.approx(2 / 6**3)


def test_an_end_of_the_interval_is_where_chance_would_do_as_much() -> None:
    sessions = drawn(3, 4, 0.03)
    times = known(sessions)
    for end, sign in ((times.ratio.low, 1), (times.ratio.high, -1)):
        for step, excused in ((-1e-3, False), (1e-3, True)):
            factor = end * math.exp(sign * step)
            scaled = []
            for session in sessions:
                nanoseconds = [process.slots[0].calls_ns[0][0] / factor for process in session.after]
                scaled.append(replace(session, after=tuple(steady(round(time), 6) for time in nanoseconds)))
            assert (known(scaled).permutation_p_value > 0.01) is excused


@pytest.mark.slow
@counts(20, 40)
def test_a_change_of_a_few_percent_is_found_and_none_is_not(count: int) -> None:
    slower = [known(drawn(seed, 4, 0.025)) for seed in range(count)]
    faster = [known(drawn(seed, 4, -0.025)) for seed in range(count)]
    flat = [known(drawn(seed, 4)) for seed in range(count)]
    assert sum(times.verdict is Verdict.SLOWER for times in slower) >= 0.9 * count
    assert sum(times.verdict is Verdict.FASTER for times in faster) >= 0.95 * count
    assert sum(times.verdict in (Verdict.SLOWER, Verdict.FASTER) for times in flat) <= 0.05 * count
    assert sum(times.ratio.low <= math.exp(0.025) <= times.ratio.high for times in slower) >= 0.9 * count


@counts(20, 40)
def test_slow_modes_are_no_change(count: int) -> None:
    draw = np.random.default_rng(5)
    alarms = 0
    for _ in range(count):
        factors = np.where(draw.random((4, 4)) < 0.4, 1.5, 1.0) * np.exp(draw.normal(0, 0.003, (4, 4))) * 1e-3
        times = known([session(row[:2], row[2:]) for row in factors])
        alarms += times.verdict in (Verdict.SLOWER, Verdict.FASTER)
    assert alarms <= 0.05 * count


def test_equal_sides_are_called_the_same() -> None:
    times = known([session((1e-3, 1e-3), (1e-3, 1e-3))] * 4)
    assert (times.verdict, times.ratio.point, times.permutation_p_value, times.process_spread) == (
        Verdict.SAME,
        1.0,
        1.0,
        0.0,
    )
    assert times.ratio.low == pytest.approx(1) and times.ratio.high == pytest.approx(1)


@for_each(
    ("before", "after", "verdict"),
    [
        ((1e-3, 1.02e-3), (1.5e-3, 1.6e-3), Verdict.SLOWER),
        ((1.5e-3, 1.6e-3), (1e-3, 1.02e-3), Verdict.FASTER),
        ((1e-3, 1.02e-3), (1.05e-3, 1.06e-3), Verdict.UNSURE),  # not beyond 10%
        ((1e-3, 1.3e-3), (1.2e-3, 1.6e-3), Verdict.UNSURE),  # not in all processes
        ((1e-3, 1.02e-3), (1.5e-3, 2.6e-3), Verdict.UNSURE),  # one side varies as much as the sides differ
        ((1e-3,), (1.5e-3,), Verdict.UNSURE),  # one process per side
    ],
)
def test_one_session_decides_only_what_noise_cannot_explain(
    before: Sequence[float], after: Sequence[float], verdict: Verdict
) -> None:
    times = known([session(before, after)])
    assert times.verdict is verdict and not times.is_resolved
    assert (times.ratio.low, times.ratio.high) == (0.0, math.inf)
    assert "--sessions" in explain_unsure_verdict(times)


def test_more_sessions_with_one_process_or_with_too_many_deals() -> None:
    pairs = [session((1e-3 * (1 + 0.001 * k),), (1.1e-3 * (1 + 0.001 * k),)) for k in range(8)]
    assert not known(pairs[:7]).is_resolved
    assert known(pairs).is_resolved and known(pairs).verdict is Verdict.SLOWER
    sessions = drawn(1, 8, 0.02)
    times = known(sessions)
    assert times == known(sessions)
    assert times.verdict is Verdict.SLOWER and times.smallest_p_value == pytest.approx(1 / 4096)


def test_only_rounds_that_all_were_in_count() -> None:
    early = timing([900_000], [1_000_000], [1_000_000])
    late = timing([1_000_000], [1_000_000], start=1)
    times = known([CaseSession((early, early), (late, late))])
    assert times.ratio.point == pytest.approx(1) and times.rounds == 2 and times.verdict is Verdict.UNSURE
    assert "2 rounds per session are too few" in explain_unsure_verdict(times)
    assert judge_duel_sessions([CaseSession((steady(1000, 3),), (steady(1000, 3, start=3),))]) is None
    assert judge_duel_sessions([]) is None
    assert judge_duel_sessions([CaseSession((steady(1000, 3),), ())]) is None


def in_nanoseconds(before: tuple[int, ...], after: tuple[int, ...], rounds: int = 8) -> CaseSession:
    return CaseSession(tuple(steady(time, rounds) for time in before), tuple(steady(time, rounds) for time in after))


SLOWER = tuple(in_nanoseconds((1000 + k, 1003 - k), (1050 + k, 1054 - k)) for k in range(4))


def measured(**values: float) -> Record:
    """A record with these values; peak_memory in bytes."""
    found = (Measurement(name, "B" if name == "peak_memory" else "ratio", (value,)) for name, value in values.items())
    return replace(record(None), measurements=tuple(found))


def compared_times(*sessions: CaseSession, before: Record | None = None, after: Record | None = None) -> Comparison:
    return next(compare_case_sides(CaseResult(before or record(None), after or record(None), sessions)))


def test_a_slower_side_is_found() -> None:
    slower = compared_times(*SLOWER)
    assert (slower.direction, slower.evidence, slower.unit, slower.failed, slower.why) == (
        Direction.WORSE,
        Evidence.PAIRED,
        "s",
        False,
        "",
    )
    assert slower.before == pytest.approx(1.0008e-6, rel=1e-3) and slower.after == pytest.approx(1.051e-6, rel=1e-3)
    assert slower.ratio is not None and slower.ratio.low < 1.05 < slower.ratio.high and slower.ratio.level == 0.99
    assert slower.p_value is not None and slower.p_value < 1e-4 < 2 / 6**4
    assert compute_p_value(known(SLOWER[:1])) is None and compared_times(SLOWER[0]).direction is Direction.UNSURE
    mixed = known([in_nanoseconds((1000, 1020 + k), (1010, 1015 - k)) for k in range(4)])
    assert compute_p_value(mixed) == mixed.permutation_p_value > 0.05, "no distribution is assumed"


def test_values_of_one_side_are_not_compared() -> None:
    """For decibels more is better, so only their error is compared."""
    result = CaseResult(measured(sqnr_db=30.0, utilisation_percent=3.0), measured(sqnr_db=20.0, peak_memory=8.0))
    found = {comparison.metric: comparison for comparison in compare_case_sides(result)}
    assert set(found) == {"time", "peak_memory"}
    assert found["peak_memory"].direction is Direction.NONE and "only side B" in found["peak_memory"].why


def test_what_failed_or_is_other_work_is_no_comparison() -> None:
    broke = record(None, status=Status.FAILED, reason="it broke")
    low = replace(record(None), support=Support(Level.EMULATED, "no kernel"))
    for found, failed, why in (
        (compared_times(*SLOWER, before=broke), False, "side A: it broke"),
        (compared_times(*SLOWER, after=broke), True, "side B: it broke"),
        (compared_times(*SLOWER, before=low), False, "the sides do different work"),
    ):
        assert (found.direction, found.ratio, found.failed) == (Direction.NONE, None, failed) and why in found.why
    assert compared_times(*SLOWER, before=low, after=low).direction is Direction.WORSE
