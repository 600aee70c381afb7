"""What a gate says that it could have seen: as often as it says it does fail what is planted so; and what that ends."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from fp8bench.analysis.steps.change_points import PieceLevel, least_step
from fp8bench.analysis.steps.levels import LEAST_SPREAD
from fp8bench.features.duel.values import Session
from fp8bench.features.duel.verdicts import compared
from fp8bench.features.gate.judging import NIGHTS, GateOutcome, GateVerdict, Sight, Sights, first_look
from fp8bench.features.gate.power import Newest, Second, sights_of, sights_of_history
from fp8bench.features.gate.thresholds import ThresholdRule
from fp8bench.features.gate.view import seen, sentence, summary, warnings
from fp8bench.model import Comparison, Direction, Evidence, Interval, Noise
from suites.gate import Setting, nights, stored, trial
from tests.counts import counts, for_each, sampled
from tests.duels import result
from tests.fakes import steady
from tests.features.gate.test_judging import exact, figure
from tests.features.gate.test_judging import stored as few

DUEL = Noise(0.005, 11)
MANY = Noise(0.01, 8, 5, 5)


def seen_of(
    *figures: Comparison, second: Second = Second.AGAIN, rules: tuple[ThresholdRule, ...] = (), power: float = 0.8
) -> tuple[Sight, ...]:
    return sights_of(first_look(figures, rules), second, power, required=False).figures


@counts(60, 400)
@for_each("between", [0.01, 0.03])
def test_as_often_as_it_says_a_history_fails_what_is_planted(count: int, between: float) -> None:
    """80 of 100, give or take what so many builds and an unknown noise do."""
    row = trial(nights(30, between), count)
    away = 0.08 + 3 * math.sqrt(0.16 / count)
    assert abs(row.told - 0.8) < away and abs(row.failed - 0.8) < away
    assert row.seen > between and row.fails > 0.05


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting", sampled([Setting(3, 1, 0.02)], [Setting(1, 1, 0.02), Setting(3, 1, 0.02), Setting(5, 5, 0.02)])
)
def test_as_often_as_it_says_stored_runs_do(setting: Setting) -> None:
    row = trial(stored(setting), 60)
    away = 0.1 + 3 * math.sqrt(0.16 / 60)
    assert abs(row.told - 0.8) < away and abs(row.failed - 0.8) < away


def test_noise_decides_what_is_seen_and_the_threshold_what_fails() -> None:
    """More noise, more figures, a higher power, another look: each makes it less."""
    (usual,) = seen_of(figure(1.0, noise=DUEL), second=Second.DUEL)
    assert 0.015 < usual.seen < 0.04 and usual.fails > usual.threshold == 0.05 and usual.enough
    wide = Interval(1.0, 0.96, 1.04, 0.99)
    (noisy,) = seen_of(figure(1.0, ratio=wide, noise=Noise(0.015, 11)), second=Second.DUEL)
    assert noisy.seen > 0.05 and not noisy.enough
    among = seen_of(*(figure(1.0, noise=DUEL, case=f"gemm[m={n}]@cpu/bf16") for n in range(50)), second=Second.DUEL)
    assert all(other.seen > usual.seen for other in among)
    assert seen_of(figure(1.0, noise=DUEL), second=Second.DUEL, power=0.95)[0].seen > usual.seen
    assert seen_of(figure(1.0, noise=DUEL), second=Second.NONE)[0].seen < usual.seen
    # A difference of 5 us is more than 5% of a time of 10 us.
    (short,) = seen_of(figure(1.0, noise=DUEL, before=1e-5, after=1e-5), second=Second.DUEL)
    assert short.threshold == 0.5 and short.fails > 0.5 and short.seen == usual.seen


def test_stored_runs() -> None:
    """A known spread; a few runs beside a dozen of cases; a few runs alone, whose noise nobody knows."""
    (many,) = seen_of(figure(1.0, evidence=Evidence.CROSS_RUN, noise=MANY))
    assert 0.05 < many.seen < 0.1 and not many.unknown
    dozen = [
        few(1 + 0.002 * (n - 6), case=f"gemm[m={n}]@cpu/bf16", noise=Noise(0.003, 0, 1, 1)) for n in range(13)
    ]  # fmt: skip
    for sight in seen_of(*dozen):
        assert 0.1 < sight.seen < 0.2 and not sight.unknown and not sight.enough
    # A duel afterwards may fail what stored numbers may not.
    assert all(sight.seen < 0.1 for sight in seen_of(*dozen, second=Second.DUEL))
    (alone,) = seen_of(dozen[0])
    assert alone.unknown and alone.seen > 0.1 and not alone.enough
    assert seen_of(dozen[0], rules=(ThresholdRule("*", "*", 0.5),))[0].enough is False
    nothing = few(1.0, ratio=Interval(1.0, 1.0, 1.0, 0.0), noise=Noise(0.003, 0, 1, 1), why="a few rounds each")
    assert seen_of(nothing)[0].seen == math.inf and seen_of(nothing)[0].unknown == "a few rounds each"


def test_a_duel_without_an_interval() -> None:
    """Few processes do not tell how far processes lie apart, and of few rounds nothing is believed."""
    for many, rounds, known in ((4, 5, True), (2, 5, False), (4, 4, False)):
        slots = [steady(1000 + n, rounds) for n in range(4)]
        time = next(compared(result("bf16", *[Session(tuple(slots[:2]), tuple(slots[2:]))] * many)))
        assert (time.noise is not None) == known
    (sight,) = seen_of(figure(1.0, p_value=None, ratio=Interval(1.0, 0.0, math.inf, 0.99)), second=Second.DUEL)
    assert sight.seen == math.inf and "--sessions" in sight.unknown and not sight.enough
    # Memory, what a rule ignores, and a case that failed do not vary.
    assert seen_of(exact(1.0), figure(1.0, failed=True, direction=Direction.NONE)) == ()
    assert seen_of(figure(1.0, noise=DUEL), rules=(ThresholdRule("*", "*", ignored=True),)) == ()


FLAT = figure(1.0, evidence=Evidence.HISTORY, metric="relative_time", unit="x", before=1.0, after=1.0)


def history(*series: tuple[float, int], required: bool = True, metric: str = FLAT.metric) -> Sights:
    """Series of so much noise and so many nights."""
    newest = [
        Newest(
            replace(FLAT, metric=metric, case=f"gemm[m={place}]@box/bf16"),
            PieceLevel(noise, count - 1, count) if count >= 11 else None, count,
        )
        for place, (noise, count) in enumerate(series)
    ]  # fmt: skip
    return sights_of_history(newest, (), 0, Second.AGAIN, 0.8, required)


@for_each(
    ("noise", "count", "young", "blind"),
    [
        (0.01, 30, False, False), (0.01, 11, False, False), (0.05, 40, False, True), (0.05, 14, False, True),
        (0.05, 13, True, False), (0.001, 4, True, False), (0.05, 1, True, False),
    ],
)  # fmt: skip
def test_a_young_history_and_a_blind_one(noise: float, count: int, young: bool, blind: bool) -> None:
    sights = history((noise, count))
    assert (bool(sights.young), bool(sights.blind), sights.fails) == (young, blind, blind)
    assert not replace(sights, required=False).fails


def test_a_relative_loss_that_is_always_the_same_sees_its_threshold() -> None:
    """Of a tenth of what others go by."""
    (loss,) = history((LEAST_SPREAD, 14), metric="relative_loss").figures
    assert loss.enough and 0.001 < loss.seen < loss.threshold == 0.002
    (time,) = history((LEAST_SPREAD, 14)).figures
    assert time.enough and time.seen > 0.01


def test_how_many_nights_are_missing() -> None:
    """The fewest with which the threshold is seen, at the same noise; 11 where there is no noise to know yet."""
    (none,) = history((0.01, 4)).figures
    assert none.missing == 7
    noise = next(sight / 10000 for sight in range(100, 300) if not history((sight / 10000, 15)).figures[0].enough)
    (sight,) = history((noise, 15)).figures
    assert sight.missing is not None and sight.is_young and sight.nights is not None and sight.nights >= NIGHTS
    assert history((noise, 15 + sight.missing)).figures[0].enough
    assert not history((noise, 14 + sight.missing)).figures[0].enough


def test_the_least_step_is_the_code_s_own() -> None:
    """A level that has just begun shows no step; longer ones show smaller ones, down to a limit."""
    assert least_step(PieceLevel(0.01, 20, 5), 0.01) == (math.inf, math.inf)
    least = [least_step(PieceLevel(0.01, count, count), 0.01)[0] for count in (11, 14, 30, 100)]
    assert least == sorted(least, reverse=True) and least[-1] > 0.015
    assert least_step(PieceLevel(0.01, 100, 100), 1e-6)[0] > least[-1]


def verdict(sights: Sights, *outcomes: GateOutcome, **changes: object) -> GateVerdict:
    judged = tuple(replace(first_look([figure(1.0)])[0], outcome=outcome) for outcome in outcomes)
    return GateVerdict("b against a", judged, sights=sights, **changes)  # type: ignore[arg-type]


def test_how_it_ends() -> None:
    """4 where it is required and something is blind, after what failed and what is worse; a young history passes."""
    blind, young = history((0.05, 30)), history((0.05, 3))
    assert verdict(blind, GateOutcome.FINE).exit_code == 4
    assert "none would have been seen" in verdict(blind, GateOutcome.FINE).headline
    assert verdict(replace(blind, required=False), GateOutcome.FINE).exit_code == 0
    assert verdict(blind, GateOutcome.REGRESSION).exit_code == 1 and verdict(blind, GateOutcome.FAILED).exit_code == 3
    assert verdict(young).exit_code == 0
    too_young = verdict(young, problem="there is nothing to compare with", code=0)
    assert too_young.exit_code == 0 and too_young.headline == "the history is too young"


def test_words() -> None:
    """One line for all, with the worst and the threshold beside it; why, where nobody knows or nights are missing."""
    sights = history((0.01, 30), (0.05, 30), (0.01, 3))
    young, worst, best = sights.figures
    assert (young.nights, worst.nights, best.nights) == (3, 30, 30) and seen(young) == "nothing"
    assert "median of 2 figures; worst gemm[m=1]" in summary(replace(sights, figures=(worst, best)))
    assert "the only figure that varies is gemm[m=0]" in summary(replace(sights, figures=(best,)))
    blind, too_young = warnings(sights, 5)
    assert "cannot see its threshold of +5.0%" in blind and "no number of them" in blind
    assert "1 of 3 figures" in too_young and "8 more nights" in too_young and "8 more nights" in sentence(young, 0.8)
