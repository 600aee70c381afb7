"""When a sampler looks."""

from __future__ import annotations

import pytest

from fp8bench.measure.sensors.energy import FAST_PAUSE, PAUSE, POWER_PAUSE, Polling
from fp8bench.measure.sensors.mean_power import INTERVALS, Rhythm, Tick

STEADY = Rhythm(0.1, 0.0, 0.1)
LAST = INTERVALS + 1


def tick(at: float, late: float = 0.0) -> Tick:
    return Tick(at - late / 2, at + late / 2, 0.0)


def test_without_a_rhythm_it_looks_all_the_time() -> None:
    pace = Polling(counts=True)
    assert [pace.next(0.0, None, 0), pace.next(0.1, tick(0.1), 1), pace.next(3.0, tick(3.0), 99)] == [PAUSE] * 3
    assert Polling(counts=False).next(0.0, None, 0) == POWER_PAUSE
    assert Polling(counts=True, rhythm=STEADY).next(1.0, None, 0) == PAUSE, "so is the first tick"


def test_up_to_the_tenth_they_are_counted_halfway_between_two() -> None:
    pace = Polling(counts=True, rhythm=STEADY)
    now = 1.001 + pace.next(1.001, tick(1.0, 0.002), 1)
    assert now == pytest.approx(1.15)
    now = 1.17 + pace.next(1.17, tick(1.085, 0.17), 2)
    assert now == pytest.approx(1.25)
    assert pace.next(1.25, None, 2) == PAUSE


def test_the_tenth_is_followed_by_a_rest_until_just_before_the_next() -> None:
    pace = Polling(counts=True, rhythm=STEADY)
    pace.next(1.0, tick(1.0), 1)
    assert 1.95 + pace.next(1.95, tick(1.9, 0.1), INTERVALS) == pytest.approx(2.0 - 2 * PAUSE) and not pace.blind
    assert pace.next(1.997, None, INTERVALS) == PAUSE
    assert 2.001 + pace.next(2.001, tick(2.0), LAST) == pytest.approx(2.1 - 2 * PAUSE)


def test_a_tick_that_came_early_makes_it_wake_up_earlier() -> None:
    pace = Polling(counts=True, rhythm=STEADY)
    assert 1.0 + pace.next(1.0, tick(1.0), LAST) == pytest.approx(1.1 - 2 * PAUSE)
    assert 1.096 + pace.next(1.096, tick(1.09), LAST + 1) == pytest.approx(1.19 - 4 * PAUSE)


def test_of_a_faster_counter_ticks_are_passed_over() -> None:
    pace = Polling(counts=True, rhythm=Rhythm(0.02, 0.0, 0.02))
    assert pace.next(1.0, tick(1.0), LAST) == pytest.approx(0.06 - 2 * PAUSE) and pace.blind
    assert pace.next(1.056, tick(1.05), LAST) == PAUSE and not pace.blind
    assert pace.next(1.06, tick(1.06), LAST + 1) > PAUSE


def test_a_counter_faster_than_looks_is_looked_at_seldom() -> None:
    pace = Polling(counts=True, rhythm=Rhythm(0.002, 0.0, 0.003))
    assert [pace.next(1.0, tick(1.0), count) for count in (0, 1, LAST)] == [FAST_PAUSE] * 3
    assert not pace.blind


def test_looking_that_is_too_dear_is_done_less() -> None:
    fast, steady = Polling(counts=True, rhythm=Rhythm(0.002, 0.0, 0.003)), Polling(counts=True, rhythm=STEADY)
    for pace in (fast, steady):
        pace.mind(0.006, 0.5)
    assert fast.next(0.0, None, 0) == FAST_PAUSE
    for _ in range(20):
        fast.mind(0.02, 1.0)
        steady.mind(0.02, 1.0)
    assert fast.next(0.0, None, 0) == 0.05
    assert steady.next(1.0, tick(1.0), LAST) == pytest.approx(0.4 - 2 * PAUSE)
    assert steady.blind
