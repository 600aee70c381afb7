"""Mean power from the ticks of counters and the readings of sensors."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8bench.measure.sensors.mean_power import (
    MIN_TICK_INTERVALS,
    CounterTick,
    PowerSample,
    has_enough_samples,
    is_resolved,
    measure_counter_rhythm,
    measure_mean_power,
    measure_tick_power,
)
from fp8bench.model.readings import NoReading
from tests.counts import for_each


def ticks(count: int, late: float = 0.002, watts: float = 300.0) -> list[CounterTick]:
    """A change every 100 ms, read at most `late` seconds later."""
    return [CounterTick(0.1 * number - late, 0.1 * number, watts * 0.1 * number) for number in range(count)]


@given(st.lists(st.floats(0.001, 500), min_size=MIN_TICK_INTERVALS, max_size=60), st.floats(1e-3, 0.4))
def test_the_energy_between_the_ends_is_the_counters(joules: list[float], period: float) -> None:
    at, total, seen = 0.0, 1e6, [CounterTick(-1e-6, 1e-6, 1e6)]
    for part in joules:
        at, total = at + period, total + part
        seen.append(CounterTick(at - 1e-6, at + 1e-6, total))
    stretch = measure_tick_power(seen)
    assert stretch.intervals == len(joules) and stretch.joules == pytest.approx(sum(joules))
    assert stretch.watts == pytest.approx(sum(joules) / (period * len(joules)))


@given(st.integers(0, MIN_TICK_INTERVALS))
def test_too_few_ticks_are_no_number(count: int) -> None:
    assert not is_resolved(ticks(count))
    with pytest.raises(NoReading, match=rf"^not measurable: {max(0, count - 1)} tick interval\(s\) of the energy"):
        measure_tick_power(ticks(count))


@given(
    st.floats(0.001, 0.05),
    st.floats(0.001, 0.05),
    st.floats(0, 1),
    st.floats(0, 1),
    st.integers(MIN_TICK_INTERVALS + 1, 30),
)
def test_the_uncertainty_bounds_the_error(first: float, last: float, a: float, b: float, count: int) -> None:
    seen = ticks(count)
    # These ends are used, as none are better.
    seen = [CounterTick(tick.seen_at - max(first, last), tick.seen_at, tick.joules) for tick in seen]
    truth = [seen[0].after + a * seen[0].time_range, seen[-1].after + b * seen[-1].time_range]
    stretch = measure_tick_power(seen)
    assert abs(stretch.seconds - (truth[1] - truth[0])) <= stretch.uncertainty * stretch.seconds * (1 + 1e-9)
    assert stretch.joules > 0


def test_a_late_tick_does_not_end_the_measured_part() -> None:
    seen = ticks(13)
    late = [CounterTick(seen[0].seen_at - 0.08, seen[0].seen_at, seen[0].joules), *seen[1:]]
    assert measure_tick_power(late).intervals == 11 and measure_tick_power(late).watts == pytest.approx(300)
    assert (
        measure_tick_power(late[:11]).intervals == MIN_TICK_INTERVALS
        and measure_tick_power(late[:11]).uncertainty > 0.03
    )
    at_the_end = [*seen[:-1], CounterTick(seen[-1].seen_at - 0.08, seen[-1].seen_at, seen[-1].joules)]
    assert measure_tick_power(at_the_end).intervals == 11


@for_each(("count", "late", "sharp"), [(11, 0.004, True), (11, 0.006, False), (21, 0.006, True)])
def test_a_window_is_resolved_when_its_ends_are_sharp_enough(count: int, late: float, sharp: bool) -> None:
    assert is_resolved(ticks(count, late)) is sharp


def test_ticks_have_a_period_a_spread_and_a_longest_gap() -> None:
    pace = measure_counter_rhythm([CounterTick(at, at, 0) for at in (0.0, 0.1, 0.2, 0.33, 0.4, 0.5)])
    assert [pace.period, pace.spread, pace.longest] == pytest.approx([0.1, 0.03, 0.13])


def readings(watts: list[float], pause: float = 0.1, start: float = 0.0) -> list[PowerSample]:
    return [PowerSample(start + pause * number, value) for number, value in enumerate(watts)]


def test_mean_power_is_weighted_by_time() -> None:
    uneven = [0.0, 0.01, 0.02, 0.03, 0.04, 0.05, 0.1, 0.3, 0.6, 0.9, 1.0]
    found = measure_mean_power([PowerSample(at, 100 + 100 * at) for at in uneven])
    assert (found.watts, found.seconds, found.intervals) == (pytest.approx(150), pytest.approx(1.0), 10)


@for_each(
    ("seen", "why"),
    [
        ([], "0 reading"),
        (readings([300.0] * 10), "10 reading"),
        (readings([300.0] * 50, pause=0.01), "50 reading.* over 0.49 s"),
    ],
)
def test_short_windows_give_no_number(seen: list[PowerSample], why: str) -> None:
    assert not has_enough_samples(seen)
    with pytest.raises(NoReading, match=f"^not measurable: {why}"):
        measure_mean_power(seen)
