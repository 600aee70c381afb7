"""What windows say: joules of a step, net of idling, for what it does, and against the reference."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8bench.analysis.energy import (
    Demand,
    energy_figures,
    energy_ratio,
    energy_samples,
    other_pace,
    why_no_energy,
    why_unresolved,
)
from fp8bench.model import EnergyUse, EnergyWindow, Finding, Label, Record, Status, Verdict, Work
from tests.counts import for_each
from tests.energies import IDLE, case, energetic, use, window
from tests.runs import EMULATED, NATIVE


def record(energy: EnergyUse | None, mode: str = "bf16", **changes: object) -> Record:
    made = Record(case(mode, {"width": 64}), NATIVE, Status.OK, energy=energy)
    return replace(made, **changes)  # type: ignore[arg-type]


def reference(*joules: float, **changes: object) -> Record:
    return record(use(joules), "fp32", is_reference=True, **changes)


def test_a_step_takes_the_middle_of_its_windows() -> None:
    """Windows differ in length: joules of a step are those of a window over its steps."""
    windows = (window(2.0, steps=100), window(2.2, steps=37), window(1.9, steps=251))
    found = energy_figures(record(EnergyUse("counter", windows, 80.0, 84.0)))
    assert found is not None
    assert (found.gross.middle, found.gross.low, found.gross.high) == pytest.approx((2.0, 1.9, 2.2))
    assert energy_samples(EnergyUse("counter", windows)) == pytest.approx((2.0, 2.2, 1.9))
    assert found.watts == pytest.approx(200.0) and found.source == "counter"
    assert (found.sm_clock, found.temperature, found.uncertainty) == (1.41e9, 61.0, 0.004)


def test_net_is_what_comes_on_top_of_idling_for_as_long() -> None:
    """At 2 J and 10 ms a step, 82 W of idling are 0.82 J of it; its ends take either idle power."""
    found = energy_figures(record(use((2.0, 2.1, 2.2))))
    assert found is not None and found.net is not None and found.idle == IDLE + 1
    assert found.net.middle == pytest.approx(2.1 - 0.82)
    assert found.net.low == pytest.approx(2.0 - 0.83) and found.net.high == pytest.approx(2.2 - 0.81)


@for_each(
    ("changes", "why"),
    [
        ({"idle_after": None}, "the idle power after its windows was not measured"),
        ({"idle_before": None}, "the idle power before its windows was not measured"),
        ({"idle_before": None, "why": "idle power: no answer for 5 s"}, "idle power: no answer for 5 s"),
        ({"idle_before": math.nan}, "the idle power before its windows was not measured"),
        ({"idle_before": 220.0, "idle_after": 230.0}, "what it takes beyond idling, 225 W, is too little to tell"),
        ({"idle_before": 199.5, "idle_after": 199.5}, "what it takes beyond idling, 200 W, is too little to tell"),
    ],
)  # fmt: skip
def test_without_an_idle_power_there_is_no_net_and_the_reason(changes: dict[str, object], why: str) -> None:
    """Never 0, and never below: gross stands."""
    found = energy_figures(record(replace(use((2.0,)), **changes)))  # type: ignore[arg-type]
    assert found is not None and found.net is None and found.net_why == why and found.gross.middle == 2.0


def test_joules_for_each_count_of_work() -> None:
    """Of gross; a count that does not apply has none."""
    found = energy_figures(record(use((2.0,)), work=Work(flops=4e12, tokens=1000)))
    assert found is not None and found.per == (("energy_per_token", 0.002), ("energy_per_tflop", 0.5))
    found = energy_figures(record(use((2.0,)), work=Work(bytes=5e8)))
    assert found is not None and found.per == (("energy_per_gb", 4.0),)


def test_a_sensor_has_no_uncertainty_and_no_comparison_is_a_fact() -> None:
    base, own = (record(use(joules, source="instant"), is_reference=which) for joules, which in
                 (((3.0, 3.0, 3.0), True), ((1.0, 1.0, 1.0), False)))  # fmt: skip
    found, ratio = energy_figures(own), energy_ratio(own, base)
    assert found is not None and found.uncertainty is None and ratio is not None
    assert ratio.point == pytest.approx(1 / 3) and ratio.demand is Demand.UNCLEAR
    assert ratio.why == "it is unknown how far its power sensor can be off"


@for_each(
    ("own", "demand"),
    [
        ((1.90, 1.89, 1.91), Demand.LESS),
        ((4.0, 4.1, 4.05), Demand.MORE),
        ((3.0, 3.1, 3.05), Demand.UNCLEAR),
        ((3.02, 2.95, 3.09), Demand.UNCLEAR),
        ((2.2, 2.7, 2.4), Demand.UNCLEAR),  # apart, and by less than they are wide
    ],
)
def test_less_or_more_only_where_windows_lie_well_apart(own: tuple[float, ...], demand: Demand) -> None:
    ratio = energy_ratio(record(use(own)), reference(3.10, 3.08, 3.13))
    assert ratio is not None and ratio.demand is demand and bool(ratio.why) == (demand is Demand.UNCLEAR)
    assert ratio.point == pytest.approx(sorted(own)[1] / 3.10)
    assert ratio.low == pytest.approx(min(own) * 0.996 / (3.13 * 1.004))
    assert ratio.high == pytest.approx(max(own) * 1.004 / (3.08 * 0.996))


def test_uncertainty_counts_as_width() -> None:
    """Windows that agree to the last digit are no better than their counter."""
    exact, rough = (energy_ratio(record(use((2.96,) * 3, uncertainty=unsure)),
                                 record(use((3.0,) * 3, uncertainty=unsure), is_reference=True))
                    for unsure in (0.001, 0.005))  # fmt: skip
    assert exact is not None and exact.demand is Demand.LESS
    assert rough is not None and rough.demand is Demand.UNCLEAR


@for_each(
    ("changes", "labels", "why"),
    [
        ({"energy": use((1.0, 1.0))}, (), "2 windows are too few to compare"),
        ({"energy": use((1.0,))}, (), "one window is too few to compare"),
        ({"paired": False}, (), "it was measured at another time than the reference"),
        ({}, (Label.THROTTLED, Label.FEW_SAMPLES), "throttled"),
        ({}, (Label.ENERGY_UNRESOLVED, Label.CONTENDED), "contended, energy-unresolved"),
    ],
)
def test_what_casts_doubt_leaves_no_fact(changes: dict[str, object], labels: tuple[Label, ...], why: str) -> None:
    own = replace(record(use((1.0, 1.0, 1.0))), **changes)  # type: ignore[arg-type]
    ratio = energy_ratio(own, reference(3.0, 3.0, 3.0), labels)
    assert ratio is not None and (ratio.demand, ratio.why) == (Demand.UNCLEAR, why)


def test_what_does_not_compare_has_no_ratio() -> None:
    """The reference itself, emulations on either side, other sources, and cases without a window."""
    base, own = reference(3.0, 3.0, 3.0), record(use((1.0, 1.0, 1.0)))
    assert energy_ratio(base, base) is None and energy_ratio(own, None) is None
    assert energy_ratio(replace(own, support=EMULATED), base) is None
    assert energy_ratio(own, replace(base, support=EMULATED)) is None
    assert energy_ratio(own, replace(base, energy=use((3.0,), source="average"))) is None
    assert energy_ratio(own, replace(base, energy=EnergyUse("counter", why="too few ticks"))) is None
    assert energy_ratio(replace(own, energy=None), base) is None


@for_each(
    ("median", "spread", "windows", "pace"),
    [
        (0.0100, 0.01, (0.0100, 0.0101, 0.0100), None),
        (0.0090, 0.01, (0.0100, 0.0101, 0.0100), 10 / 9),  # a clock that a longer load does not keep
        (0.0120, 0.01, (0.0100, 0.0101, 0.0100), 10 / 12),
        (0.0099, 0.01, (0.0100, 0.0100, 0.0100), None),  # less than what counts as the same
        (0.0090, 0.20, (0.0100, 0.0101, 0.0100), None),  # as far as slots lie apart
        (0.0090, 0.01, (0.0090, 0.0100, 0.0110), None),  # as far as windows do
        (None, None, (0.01,), None),
        (0.0, None, (0.01,), None),
        (math.nan, None, (0.01,), None),
    ],
)
def test_steps_of_windows_that_take_another_time_than_in_slots(
    median: float | None, spread: float | None, windows: tuple[float, ...], pace: float | None
) -> None:
    """Where that is beyond the noise of both."""
    one = record(EnergyUse("counter", tuple(window(1.0, seconds) for seconds in windows)))
    figures = energy_figures(one)
    assert figures is not None and figures.seconds.middle == pytest.approx(np.median(windows))
    found = other_pace(figures, Finding(one.case, Verdict.NONE, median_seconds=median, spread=spread))
    assert found == (None if pace is None else pytest.approx(pace))


def test_why_there_is_no_figure() -> None:
    """Nothing is said where nobody asked."""
    assert why_no_energy(record(None)) == "" and energy_figures(record(None)) is None
    assert why_no_energy(record(use((1.0,)))) == ""
    assert why_no_energy(record(EnergyUse("none", why="no NVML here"))) == "no NVML here"
    assert why_no_energy(record(EnergyUse("counter"))) == "no window was measured, and nothing says why"


def test_noise_alone_is_seldom_taken_for_a_difference() -> None:
    """Two sides of three windows each of one distribution, with a counter that is better than their spread."""
    random = np.random.default_rng(7)
    found = []
    for _ in range(3000):
        own, base = random.normal(3.0, 0.15, (2, 3))
        ratio = energy_ratio(
            record(use(tuple(own), uncertainty=1e-4)), record(use(tuple(base), uncertainty=1e-4), is_reference=True)
        )
        assert ratio is not None and ratio.low <= ratio.point <= ratio.high
        found.append(ratio.demand is not Demand.UNCLEAR)
    assert np.mean(found) < 0.015


numbers = st.floats(allow_nan=True, allow_infinity=True)
shares = st.one_of(st.none(), st.floats())
watts = st.one_of(st.none(), numbers)
windows = st.builds(EnergyWindow, st.integers(-2, 5), numbers, numbers, st.integers(), shares)
nonsense = st.builds(
    EnergyUse,
    st.sampled_from(["counter", "instant", "none", "?"]),
    st.lists(windows, max_size=4).map(tuple),
    watts,
    watts,
    st.text(max_size=9),
)


@given(nonsense, nonsense)
def test_nonsense_in_a_file_is_no_figure(first: EnergyUse, second: EnergyUse) -> None:
    """What is not a number of joules does not count, and never is a figure of 0."""
    own, base = record(first), record(second, is_reference=True)
    found = energy_figures(own)
    assert (found is None) == bool(why_no_energy(own))
    if found is not None:
        assert 0 < found.gross.low <= found.gross.middle <= found.gross.high < math.inf
        assert found.net is not None or found.net_why
        assert found.net is None or found.net.middle > 0
    ratio = energy_ratio(own, base)
    assert ratio is None or 0 < ratio.low <= ratio.point <= ratio.high


def test_the_run_of_the_reports_tests() -> None:
    """One of each kind."""
    run, findings = energetic()
    base, *others = run.records
    found = [energy_ratio(one, base, findings[one.case.id].labels) for one in others]
    assert [one and one.demand for one in found] == [Demand.LESS, Demand.UNCLEAR, None, None]


def seen(
    joules: float, uncertainty: float | None = 0.004, steps: int = 100, throttle: int | None = None
) -> EnergyWindow:
    """So many joules a step."""
    return EnergyWindow(steps, 2.0, joules * steps, 20, uncertainty, throttle=throttle)


def used(*windows: EnergyWindow, source: str = "counter", why: str = "") -> EnergyUse:
    return EnergyUse(source, windows, 60.0, 61.0, why)


@for_each(
    ("energy", "why"),
    [
        # Nobody asked, nothing could tell it, or all windows agree; a missing idle power spoils the net energy alone.
        (None, ""),
        (used(source="none", why="no GPU, and RAPL may be read by root only"), ""),
        (used(seen(1.0), seen(1.02), seen(0.99)), ""),
        (used(seen(1.0, 0.01)), ""),
        (used(seen(1.0), seen(1.025), seen(0.976)), ""),
        (used(seen(1.0, steps=10), seen(1.0, steps=1000), source="rapl"), ""),
        (used(seen(1.0, throttle=0x1 | 0x4 | 0x2)), ""),
        (replace(used(seen(1.0)), idle_before=None, why="idle power: a call failed"), ""),
        (used(why="7 tick interval(s), 10 are needed"), "7 tick interval(s), 10 are needed"),
        (used(), "no window was measured"),
        (replace(used(why="the device has gone"), idle_after=None), "the device has gone"),
        (used(seen(1.0), why="a call failed"), "a call failed"),
        (used(seen(1.0), seen(1.0, 0.0101)), "a window is sure to +-1.0% only"),
        (used(seen(1.0), seen(1.0, 0.03)), "a window is sure to +-3.0% only"),
        (used(seen(0.97), seen(1.0), seen(1.021)), "its windows are 5.1% apart"),
        (used(seen(1.0), seen(2.0)), "its windows are 66.7% apart"),
        (used(seen(1.0, None), source="average"), "error unknown, source average"),
        (used(seen(1.0, throttle=0x40 | 0x4)), "clocks were held back in its windows: hw-thermal"),
        (used(seen(0.0)), "a window has no energy"),
        (used(seen(math.nan)), "a window has no energy"),
        (used(seen(math.inf), seen(1.0)), "a window has no energy"),
        (used(seen(1.0), seen(1.0, steps=0)), "a window has no energy"),
        (used(seen(1.0, 0.02), seen(1.2, 0.02)), "a window is sure to +-2.0% only; its windows are 18.2% apart"),
    ],
)  # fmt: skip
def test_unresolved(energy: EnergyUse | None, why: str) -> None:
    """Every reason by itself, at its bound where it has one, and two together."""
    assert why_unresolved(energy) == why
