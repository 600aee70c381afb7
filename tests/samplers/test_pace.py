"""When a sampler looks."""

from __future__ import annotations

import pytest

from fp8bench.samplers.pace import FAST_PAUSE, PAUSE, POWER_PAUSE, Pace
from fp8bench.samplers.tick_slope import Rhythm, Tick

STEADY = Rhythm(0.1, 0.0, 0.1)


def tick(at: float) -> Tick:
    return Tick(at, at, 0.0)


def test_without_a_rhythm_it_looks_all_the_time() -> None:
    pace = Pace(counts=True)
    assert [pace.next(0.0, None), pace.next(0.1, tick(0.1))] == [PAUSE, PAUSE]
    assert Pace(counts=False).next(0.0, None) == POWER_PAUSE


def test_after_a_tick_it_sleeps_until_just_before_the_next() -> None:
    pace = Pace(counts=True, rhythm=STEADY)
    assert pace.next(1.0, None) == PAUSE
    rest = pace.next(2.001, tick(2.0))
    assert rest == pytest.approx(0.1 - 2 * PAUSE - 0.001)
    assert not pace.blind
    assert pace.next(2.096, None) == PAUSE


def test_a_tick_that_came_early_makes_it_wake_up_earlier() -> None:
    """It was there already when the rest was over."""
    pace = Pace(counts=True, rhythm=STEADY)
    first = pace.next(1.0, tick(1.0))
    second = pace.next(1.096, tick(1.05))
    assert second == pytest.approx(0.05 + 0.1 - 0.096 - 2 * 2 * PAUSE)
    assert first > second


def test_of_a_faster_counter_ticks_are_passed_over() -> None:
    """The change that is seen after such a rest is none to go by, and the rest is not repeated before the next one."""
    pace = Pace(counts=True, rhythm=Rhythm(0.02, 0.0, 0.02))
    assert pace.next(1.0, tick(1.0)) == pytest.approx(0.06 - 2 * PAUSE)
    assert pace.blind
    assert pace.next(1.056, tick(1.05)) == PAUSE
    assert not pace.blind
    assert pace.next(1.06, tick(1.06)) > PAUSE


def test_a_counter_faster_than_looks_is_looked_at_seldom() -> None:
    """Each look sees a change, and its age is known by the rhythm."""
    pace = Pace(counts=True, rhythm=Rhythm(0.002, 0.0, 0.003))
    assert pace.next(1.0, tick(1.0)) == FAST_PAUSE
    assert not pace.blind


def test_looking_that_is_too_dear_is_done_less() -> None:
    """Up to a limit: ten intervals shall fit into a window."""
    fast, steady = Pace(counts=True, rhythm=Rhythm(0.002, 0.0, 0.003)), Pace(counts=True, rhythm=STEADY)
    for pace in (fast, steady):
        pace.mind(0.001, 1.0)
    assert fast.next(0.0, None) == FAST_PAUSE
    for _ in range(20):
        fast.mind(0.02, 1.0)
        steady.mind(0.02, 1.0)
    assert fast.next(0.0, None) == 0.05
    assert steady.next(1.0, tick(1.0)) == pytest.approx(0.4 - 2 * PAUSE)
    assert steady.blind
