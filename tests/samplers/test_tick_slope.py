"""From ticks to watts: exact where the counter is, and no number from too little."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8bench.samplers.readings import NoReading
from fp8bench.samplers.tick_slope import INTERVALS, Tick, resolved, rhythm, slope


def ticks(count: int, late: float = 0.002, watts: float = 300.0) -> list[Tick]:
    """A change every 100 ms, seen at most so late."""
    return [Tick(0.1 * number - late, 0.1 * number, watts * 0.1 * number) for number in range(count)]


@given(st.lists(st.floats(0.001, 500), min_size=INTERVALS, max_size=60), st.floats(1e-3, 0.4))
def test_the_energy_between_the_ends_is_the_counters(joules: list[float], period: float) -> None:
    """Whatever was drawn in each interval."""
    at, total, seen = 0.0, 1e6, [Tick(-1e-6, 1e-6, 1e6)]
    for part in joules:
        at, total = at + period, total + part
        seen.append(Tick(at - 1e-6, at + 1e-6, total))
    found = slope(seen)
    assert found.intervals == len(joules)
    assert found.joules == pytest.approx(sum(joules))
    assert found.watts == pytest.approx(sum(joules) / (period * len(joules)))


@given(st.integers(0, INTERVALS))
def test_too_few_ticks_are_no_number(count: int) -> None:
    """Ten intervals are eleven ticks."""
    assert not resolved(ticks(count))
    with pytest.raises(NoReading, match=rf"^not measurable: {max(0, count - 1)} tick interval\(s\) of the energy"):
        slope(ticks(count))


@given(st.floats(0.001, 0.05), st.floats(0.001, 0.05), st.floats(0, 1), st.floats(0, 1), st.integers(INTERVALS + 1, 30))
def test_the_uncertainty_bounds_the_error(first: float, last: float, a: float, b: float, count: int) -> None:
    """Wherever within its bounds a tick has really been."""
    seen = ticks(count)
    # Such ends are not passed over: there are no others as good.
    seen = [Tick(one.seen - max(first, last), one.seen, one.joules) for one in seen]
    truth = [seen[0].after + a * seen[0].late, seen[-1].after + b * seen[-1].late]
    found = slope(seen)
    watts = found.joules / (truth[1] - truth[0])
    assert abs(found.seconds - (truth[1] - truth[0])) <= found.uncertainty * found.seconds * (1 + 1e-9)
    assert watts > 0


def test_a_tick_that_was_seen_late_is_no_end() -> None:
    """Another one is, as long as ten intervals stay."""
    seen = ticks(13)
    late = [Tick(seen[0].seen - 0.08, seen[0].seen, seen[0].joules), *seen[1:]]
    assert slope(late).intervals == 11
    assert slope(late).watts == pytest.approx(300)
    assert slope(late[:11]).intervals == INTERVALS
    assert slope(late[:11]).uncertainty > 0.03
    at_the_end = [*seen[:-1], Tick(seen[-1].seen - 0.08, seen[-1].seen, seen[-1].joules)]
    assert slope(at_the_end).intervals == 11


def test_a_window_is_resolved_when_its_ends_are_sharp_enough() -> None:
    assert resolved(ticks(11, late=0.004))
    assert not resolved(ticks(11, late=0.006))
    assert resolved(ticks(21, late=0.006))


def test_the_rhythm() -> None:
    """The median interval, which one that was late does not move."""
    at = [0.0, 0.1, 0.2, 0.33, 0.4, 0.5]
    found = rhythm([Tick(one, one, 0) for one in at])
    assert found.period == pytest.approx(0.1)
    assert found.spread == pytest.approx(0.03)
    assert found.longest == pytest.approx(0.13)
