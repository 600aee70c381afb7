"""Energy windows: joules per step and phase, net of idle power, per unit of work, and against the reference."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8bench.analysis.energy import (
    EnergyDemand,
    PhaseEnergies,
    compare_window_step_time,
    energy_figures,
    energy_ratio,
    energy_samples,
    explain_unresolved_energy,
    phase_energies,
    why_no_energy,
)
from fp8bench.analysis.labels import collect_labels
from fp8bench.analysis.metrics import EnergyValidity, classify_energy_validity, iterate_case_metrics
from fp8bench.model import (
    DeviceWatch,
    EnergyUse,
    EnergyWindow,
    Finding,
    Label,
    PhaseEnergy,
    Provenance,
    Record,
    Status,
    Verdict,
    Work,
)
from tests.counts import for_each
from tests.energies import IDLE, TOO_FEW, case, use, window
from tests.runs import EMULATED, NATIVE, samples


def record(energy: EnergyUse | None, mode: str = "bf16", **changes: object) -> Record:
    made = Record(case(mode, {"width": 64}), NATIVE, Status.OK, energy=energy)
    return replace(made, **changes)  # type: ignore[arg-type]


def reference(*joules: float, **changes: object) -> Record:
    return record(use(joules), "fp32", is_reference=True, **changes)


def test_a_steps_energy_is_the_median_of_its_windows() -> None:
    windows = (window(2.0, steps=100), window(2.2, steps=37), window(1.9, steps=251))
    found = energy_figures(record(EnergyUse("counter", windows, 80.0, 84.0)))
    assert (found.gross_energy.middle, found.gross_energy.low, found.gross_energy.high) == pytest.approx(
        (2.0, 1.9, 2.2)
    )
    assert energy_samples(EnergyUse("counter", windows)) == pytest.approx((2.0, 2.2, 1.9))
    assert found.watts == pytest.approx(200.0) and found.source == "counter"
    assert (found.sm_clock, found.uncertainty) == (1.41e9, 0.004)
    worked = [energy_figures(record(use((2.0,)), work=work)) for work in (Work(4e12, 1000), Work(bytes=5e8))]
    per = [figures.per if figures is not None else None for figures in worked]
    assert per == [(("energy_per_token", 0.002), ("energy_per_tflop", 0.5)), (("energy_per_gb", 4.0),)]


def test_net_energy_is_the_energy_beyond_idling() -> None:
    found = energy_figures(record(use((2.0, 2.1, 2.2))))
    assert found.idle == IDLE + 1
    assert found.net_energy.middle == pytest.approx(2.1 - 0.82)
    assert found.net_energy.low == pytest.approx(2.0 - 0.83) and found.net_energy.high == pytest.approx(2.2 - 0.81)


@for_each(
    ("changes", "why"),
    [
        ({"idle_after": None}, "the idle power after its windows was not measured"),
        ({"idle_before": None, "why": "idle power: no answer for 5 s"}, "idle power: no answer for 5 s"),
        ({"idle_before": math.nan}, "the idle power before its windows was not measured"),
        ({"idle_before": 199.5, "idle_after": 199.5}, "its energy beyond idling at 200 W is too small to measure"),
    ],
)
def test_without_idle_power_net_energy_has_a_reason(changes: dict[str, object], why: str) -> None:
    found = energy_figures(record(replace(use((2.0,)), **changes)))  # type: ignore[arg-type]
    assert found.net_energy is None and found.net_why == why and found.gross_energy.middle == 2.0


@for_each(
    ("own", "demand"),
    [
        ((1.90, 1.89, 1.91), EnergyDemand.LESS),
        ((4.0, 4.1, 4.05), EnergyDemand.MORE),
        ((3.0, 3.1, 3.05), EnergyDemand.UNCLEAR),
        ((3.02, 2.95, 3.09), EnergyDemand.UNCLEAR),
        ((2.2, 2.7, 2.4), EnergyDemand.UNCLEAR),  # apart, but by less than their width
    ],
)
def test_energy_is_less_or_more_only_if_windows_are_far_apart(own: tuple[float, ...], demand: EnergyDemand) -> None:
    exact, rough = (
        energy_ratio(
            record(use((2.96,) * 3, uncertainty=unsure)), record(use((3.0,) * 3, uncertainty=unsure), is_reference=True)
        )
        for unsure in (0.001, 0.005)  # windows that agree exactly are still limited by the counter's resolution
    )
    assert (exact.demand, rough.demand) == (EnergyDemand.LESS, EnergyDemand.UNCLEAR)
    ratio = energy_ratio(record(use(own)), reference(3.10, 3.08, 3.13))
    assert ratio.demand is demand and bool(ratio.why) == (demand is EnergyDemand.UNCLEAR)
    assert ratio.point == pytest.approx(sorted(own)[1] / 3.10)
    assert ratio.low == pytest.approx(min(own) * 0.996 / (3.13 * 1.004))
    assert ratio.high == pytest.approx(max(own) * 1.004 / (3.08 * 0.996))


@for_each(
    ("changes", "labels", "why"),
    [
        ({"energy": use((1.0, 1.0))}, (), "2 windows are too few to compare"),
        ({"energy": use((1.0,))}, (), "one window is too few to compare"),
        ({"paired": False}, (), "it was measured at a different time than the reference"),
        ({}, (Label.THROTTLED, Label.FEW_SAMPLES), "throttled"),
        ({}, (Label.ENERGY_UNRESOLVED, Label.CONTENDED), "contended, energy-unresolved"),
    ],
)
def test_doubtful_windows_leave_the_demand_unclear(
    changes: dict[str, object], labels: tuple[Label, ...], why: str
) -> None:
    own = replace(record(use((1.0, 1.0, 1.0))), **changes)  # type: ignore[arg-type]
    ratio = energy_ratio(own, reference(3.0, 3.0, 3.0), labels)
    assert (ratio.demand, ratio.why) == (EnergyDemand.UNCLEAR, why)


def test_cases_that_are_not_comparable_have_no_energy_ratio() -> None:
    base, own = reference(3.0, 3.0, 3.0), record(use((1.0, 1.0, 1.0)))
    assert energy_ratio(base, base) is None and energy_ratio(own, None) is None
    assert energy_ratio(replace(own, support=EMULATED), base) is None
    assert energy_ratio(own, replace(base, support=EMULATED)) is None
    assert energy_ratio(own, replace(base, energy=use((3.0,), source="average"))) is None
    assert energy_ratio(own, replace(base, energy=EnergyUse("counter", why="too few ticks"))) is None
    assert energy_ratio(replace(own, energy=None), base) is None
    assert why_no_energy(record(None)) == "" and energy_figures(record(None)) is None
    assert why_no_energy(record(use((1.0,)))) == ""
    assert why_no_energy(record(EnergyUse("none", why="no NVML here"))) == "no NVML here"
    assert why_no_energy(record(EnergyUse("counter"))) == "no window was measured, for an unknown reason"
    base, own = (
        record(use(joules, source="instant"), is_reference=which)
        for joules, which in (((3.0, 3.0, 3.0), True), ((1.0, 1.0, 1.0), False))
    )
    found, ratio = energy_figures(own), energy_ratio(own, base)
    assert found.uncertainty is None
    assert ratio.point == pytest.approx(1 / 3) and ratio.demand is EnergyDemand.UNCLEAR
    assert ratio.why == "the error of its power sensor is unknown"


@for_each(
    ("median", "spread", "windows", "pace"),
    [
        (0.0100, 0.01, (0.0100, 0.0101, 0.0100), None),
        (0.0090, 0.01, (0.0100, 0.0101, 0.0100), 10 / 9),  # a clock that does not hold under longer load
        (0.0120, 0.01, (0.0100, 0.0101, 0.0100), 10 / 12),
        (0.0099, 0.01, (0.0100, 0.0100, 0.0100), None),  # less than the threshold for "same"
        (0.0090, 0.20, (0.0100, 0.0101, 0.0100), None),  # the spread of slots
        (0.0090, 0.01, (0.0090, 0.0100, 0.0110), None),  # the spread of windows
        (None, None, (0.01,), None),
        (0.0, None, (0.01,), None),
    ],
)
def test_the_pace_of_windows_is_compared_with_slots(
    median: float | None, spread: float | None, windows: tuple[float, ...], pace: float | None
) -> None:
    one = record(EnergyUse("counter", tuple(window(1.0, seconds) for seconds in windows)))
    figures = energy_figures(one)
    assert figures.seconds.middle == pytest.approx(np.median(windows))
    found = compare_window_step_time(figures, Finding(one.case, Verdict.NONE, median_seconds=median, spread=spread))
    assert found == (None if pace is None else pytest.approx(pace))


def test_noise_alone_is_seldom_taken_for_a_difference() -> None:
    random = np.random.default_rng(7)
    found = []
    for _ in range(3000):
        own, base = random.normal(3.0, 0.15, (2, 3))
        ratio = energy_ratio(
            record(use(tuple(own), uncertainty=1e-4)), record(use(tuple(base), uncertainty=1e-4), is_reference=True)
        )
        assert ratio.low <= ratio.point <= ratio.high
        found.append(ratio.demand is not EnergyDemand.UNCLEAR)
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


@pytest.mark.slow
@settings(max_examples=25)
@given(nonsense, nonsense)
def test_impossible_numbers_in_a_file_give_no_figure(first: EnergyUse, second: EnergyUse) -> None:
    own, base = record(first), record(second, is_reference=True)
    found = energy_figures(own)
    assert (found is None) == bool(why_no_energy(own))
    if found is not None:
        assert 0 < found.gross_energy.low <= found.gross_energy.middle <= found.gross_energy.high < math.inf
        assert found.net_energy is not None or found.net_why
        assert found.net_energy is None or found.net_energy.middle > 0
    ratio = energy_ratio(own, base)
    assert ratio is None or 0 < ratio.low <= ratio.point <= ratio.high


def seen(
    joules: float, uncertainty: float | None = 0.004, steps: int = 100, throttle: int | None = None
) -> EnergyWindow:
    return EnergyWindow(steps, 2.0, joules * steps, 20, uncertainty, throttle=throttle)


def used(*windows: EnergyWindow, source: str = "counter", why: str = "") -> EnergyUse:
    return EnergyUse(source, windows, 60.0, 61.0, why)


@for_each(
    ("energy", "why"),
    [
        # Energy not requested, not measurable, or windows identical; missing idle power affects only net energy.
        (None, ""),
        (used(source="none", why="no GPU, and RAPL may be read by root only"), ""),
        (used(seen(1.0), seen(1.02), seen(0.99)), ""),
        (used(seen(1.0), seen(1.025), seen(0.976)), ""),
        (used(seen(1.0, throttle=0x1 | 0x4 | 0x2)), ""),
        (replace(used(seen(1.0)), idle_before=None, why="idle power: a call failed"), ""),
        (used(why="7 tick interval(s), 10 are needed"), "7 tick interval(s), 10 are needed"),
        (used(), "no window was measured"),
        (replace(used(why="the device has gone"), idle_after=None), "the device has gone"),
        (used(seen(1.0), why="a call failed"), "a call failed"),
        (used(seen(1.0), seen(1.0, 0.0101)), "a window's uncertainty is +-1.0%"),
        (used(seen(0.97), seen(1.0), seen(1.021)), "its windows are 5.1% apart"),
        (used(seen(1.0, None), source="average"), "error unknown, source average"),
        (used(seen(1.0, throttle=0x40 | 0x4)), "clocks were throttled in its windows: hw-thermal"),
        (used(seen(0.0)), "a window has no energy"),
        (used(seen(math.nan)), "a window has no energy"),
        (used(seen(1.0), seen(1.0, steps=0)), "a window has no energy"),
        (used(seen(1.0, 0.02), seen(1.2, 0.02)), "a window's uncertainty is +-2.0%; its windows are 18.2% apart"),
    ],
)
def test_unresolved_energy_has_a_reason(energy: EnergyUse | None, why: str) -> None:
    assert explain_unresolved_energy(energy) == why


# A 10 ms step of 3.03 J: seconds and watts by phase; the rest runs at idle power, 82 W.
PHASES = {"gemm": (5e-3, 400.0), "cast": (1e-3, 100.0), "elementwise": (3.5e-3, 250.0), "optimizer_step": (1e-4, 600.0)}
REST = 4e-4
STEP = sum(seconds * watts for seconds, watts in PHASES.values()) + REST * 82.0
CASE = case("bf16", {"width": 64})
SECONDS = {**{phase: seconds for phase, (seconds, _) in PHASES.items()}, "unattributed": REST}
FINDING = Finding(CASE, Verdict.NONE, 0.01, 0.0101, 0.01, phases=tuple(SECONDS.items()))


def phase(name: str, *factors: float, times: int = 300, why: str = "", stretch: float = 1.0) -> PhaseEnergy:
    """Windows of a phase, each the given multiple of its joules."""
    seconds, watts = PHASES[name]
    windows = tuple(
        EnergyWindow(times, times * seconds * stretch, times * seconds * watts * one, 12, 0.004) for one in factors
    )
    return PhaseEnergy(name, windows, why)


def phases(**changes: PhaseEnergy) -> tuple[PhaseEnergy, ...]:
    return tuple(changes.get(name, phase(name, 1.0, 0.997, 1.002)) for name in PHASES)


def phased(asked: Sequence[PhaseEnergy], joules: float = STEP, seconds: float = 0.01, **changes: object) -> Record:
    energy = replace(use((joules, joules * 1.002, joules * 0.998), seconds), phases=tuple(asked))
    return Record(CASE, NATIVE, Status.OK, energy=replace(energy, **changes))  # type: ignore[arg-type]


def found(*asked: PhaseEnergy, **changes: float) -> PhaseEnergies:
    told = phase_energies(phased(asked, **changes), FINDING)
    assert told is not None
    return told


def joules(told: PhaseEnergies) -> Mapping[str, float]:
    return {one.phase: one.joules for one in told.phases}


def test_phases_have_separate_energies() -> None:
    told = found(*phases())
    for one in told.phases[:-1] if told.phases[-1].phase == "unattributed" else told.phases:
        if one.phase == "unattributed":
            continue
        seconds, watts = PHASES[one.phase]
        assert one.provenance is Provenance.MEASURED and one.joules == pytest.approx(seconds * watts)
        assert one.seconds == pytest.approx(seconds) and one.why == ""
        assert one.range.low == pytest.approx(one.joules * 0.997 * 0.996)
        assert one.range.high == pytest.approx(one.joules * 1.002 * 1.004)
    assert told.void_reason == ""
    assert told.residual.middle == pytest.approx(REST * 82.0)
    assert told.residual.low < told.residual.middle < told.residual.high


def test_an_unmeasured_phase_is_estimated_and_has_a_reason() -> None:
    told = found()
    assert {one.provenance for one in told.phases} == {Provenance.ESTIMATED} and told.residual is None
    assert joules(told)["gemm"] == pytest.approx(STEP / 2) and {one.why for one in told.phases} == {""}
    assert sum(joules(told).values()) == pytest.approx(STEP)
    told = found(*phases(cast=PhaseEnergy("cast", why="it is given a sparse tensor")))
    (cast,) = (one for one in told.phases if one.phase == "cast")
    assert cast.provenance is Provenance.ESTIMATED and cast.why == "it is given a sparse tensor"
    assert cast.joules == pytest.approx(STEP / 10) and told.void_reason == "" and told.pace_mismatch_text == ""
    assert told.residual.middle == pytest.approx(REST * 82.0 + 0.1)
    told = found(*phases(optimizer_step=phase("optimizer_step", 1.0, 1.05, 1.2)))
    (short,) = (one for one in told.phases if one.phase == "optimizer_step")
    assert short.provenance is Provenance.ESTIMATED and short.why == "its windows are 19.0% apart"


@for_each("factor", [0.8, 1.25])
def test_phases_whose_joules_do_not_fit_the_step_are_void(factor: float) -> None:
    told = found(*phases(gemm=phase("gemm", factor, factor)))
    assert (
        told.void_reason.startswith("the phases sum to ")
        and "they differ by more than their errors" in told.void_reason
    )
    assert {one.provenance for one in told.phases} == {Provenance.ESTIMATED}
    assert all(one.why == told.void_reason for one in told.phases if one.phase != "unattributed")
    assert told.residual is not None


PACES = [(1.003, False, False), (0.95, True, False), (1.06, True, True), (0.5, True, True)]


@for_each(("stretch", "label", "void"), PACES)
def test_phases_that_take_another_time_than_in_the_step_are_labelled(stretch: float, label: bool, void: bool) -> None:
    asked = [phase(name, stretch, stretch, stretch=stretch) for name in PHASES]
    told = phase_energies(phased(asked), FINDING)
    assert bool(told.pace_mismatch_text) == label and bool(told.void_reason) == void
    if label:
        assert "of their time in a step, where +-2.0% is noise" in told.pace_mismatch_text
    assert (abs(stretch - 1) > 0.1) == ("they behave differently in the step" in told.void_reason)


@pytest.mark.parametrize(("joules", "void"), [(1.0, False), (1.3, True)])
def test_noisy_times_leave_the_check_to_joules(joules: float, void: bool) -> None:
    asked = [
        PhaseEnergy(
            name,
            tuple(
                EnergyWindow(300, 300 * seconds * more, 300 * seconds * watts * joules, 12, 0.004)
                for more in (1.0, 1.3, 1.4)
            ),
        )
        for name, (seconds, watts) in PHASES.items()
    ]
    told = phase_energies(phased(asked), FINDING)
    assert told.noise > 0.3 and told.pace_mismatch_text == "" and bool(told.void_reason) == void


def test_the_label_is_a_remark_and_a_shared_device_certifies_nothing() -> None:
    fast = phased([phase(name, 0.95, 0.95, stretch=0.95) for name in PHASES])
    labels = collect_labels(replace(fast, timing=samples(("gemm",), (10_000,))), FINDING, None, None)
    (pace,) = (label for label in labels if label.label is Label.REPLAY_PACE)
    assert not pace.hard and pace.reason.startswith("run separately, its phases take 0.950x of")
    shared = replace(phased(()), watch=DeviceWatch(10, 1.0, others=1))
    assert classify_energy_validity(shared) is EnergyValidity.SHARED
    assert classify_energy_validity(replace(shared, energy=None)) is None


def test_phase_energies_have_bounds_and_a_residual() -> None:
    rows = {
        (metric.phase, metric.name): metric.value for metric in iterate_case_metrics(phased(phases()), FINDING, None)
    }
    assert rows["gemm", "energy"] == pytest.approx(2.0)
    assert rows["gemm", "energy_low"] == pytest.approx(2.0 * 0.997 * 0.996)
    assert rows["step", "energy_residual"] == pytest.approx(REST * 82.0)


@for_each(
    ("changes", "code"),
    [
        ({}, EnergyValidity.CERTIFIED),
        ({"source": "none", "windows": ()}, EnergyValidity.NO_COUNTER),
        ({"source": "instant"}, EnergyValidity.NO_COUNTER),
        ({"windows": (), "why": TOO_FEW}, EnergyValidity.TOO_FEW_TICKS),
        ({"windows": (EnergyWindow(10, 0.1, 3.0, 9, 0.004),)}, EnergyValidity.TOO_FEW_TICKS),
        ({"windows": (EnergyWindow(10, 0.1, 3.0, 12, 0.004, throttle=0x40),)}, EnergyValidity.THROTTLED),
        ({"windows": (EnergyWindow(10, 0.1, 3.0, 12, 0.004, throttle=0x4),)}, EnergyValidity.CERTIFIED),
        ({"power_limits": (650.0,)}, EnergyValidity.CERTIFIED),
        ({"power_limits": (650.0, 500.0)}, EnergyValidity.LIMIT_CHANGED),
        ({"windows": (EnergyWindow(10, 0.1, 3.0, 12, 0.04),)}, EnergyValidity.UNRESOLVED),
        ({"windows": (), "why": "the GPU is lost"}, EnergyValidity.UNRESOLVED),
    ],
)
def test_an_energy_is_certified_or_has_a_reason(changes: dict[str, object], code: EnergyValidity) -> None:
    one = phased(())
    assert one.energy is not None
    energy: EnergyUse = replace(one.energy, **changes)  # type: ignore[arg-type]
    assert classify_energy_validity(replace(one, energy=energy)) is code
