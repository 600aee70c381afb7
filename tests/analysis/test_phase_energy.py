"""What phases take of a step's joules: measured by themselves, held against the step, or estimated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from fp8bench.analysis.labels import labels_of
from fp8bench.analysis.metrics import EnergyValidity, energy_validity, metrics_of
from fp8bench.analysis.phase_energy import PhaseEnergies, per_work, phase_energies
from fp8bench.model import (
    DeviceWatch,
    EnergyUse,
    EnergyWindow,
    Finding,
    Label,
    PhaseCount,
    PhaseEnergy,
    Provenance,
    Record,
    Status,
    Tape,
    Verdict,
    Work,
)
from tests.counts import for_each
from tests.energies import TOO_FEW, case, use
from tests.runs import NATIVE, samples

# A step of 10 ms: seconds and watts of its phases; it takes 3.03 J, and the rest of it idles at 82 W.
PHASES = {"gemm": (5e-3, 400.0), "cast": (1e-3, 100.0), "elementwise": (3.5e-3, 250.0), "optimizer_step": (1e-4, 600.0)}
REST = 4e-4
STEP = sum(seconds * watts for seconds, watts in PHASES.values()) + REST * 82.0
CASE = case("bf16", {"width": 64})
SECONDS = {**{phase: seconds for phase, (seconds, _) in PHASES.items()}, "unattributed": REST}
FINDING = Finding(CASE, Verdict.NONE, 0.01, 0.0101, 0.01, phases=tuple(SECONDS.items()))


def phase(name: str, *factors: float, times: int = 300, why: str = "", stretch: float = 1.0) -> PhaseEnergy:
    """Windows of a phase that give so many times its joules each."""
    seconds, watts = PHASES[name]
    windows = tuple(
        EnergyWindow(times, times * seconds * stretch, times * seconds * watts * one, 12, 0.004) for one in factors
    )
    return PhaseEnergy(name, windows, why)


def phases(**changes: PhaseEnergy) -> tuple[PhaseEnergy, ...]:
    return tuple(changes.get(name, phase(name, 1.0, 0.997, 1.002)) for name in PHASES)


def record(asked: Sequence[PhaseEnergy], joules: float = STEP, seconds: float = 0.01, **changes: object) -> Record:
    energy = replace(use((joules, joules * 1.002, joules * 0.998), seconds), phases=tuple(asked))
    return Record(CASE, NATIVE, Status.OK, energy=replace(energy, **changes))  # type: ignore[arg-type]


def found(*asked: PhaseEnergy, **changes: float) -> PhaseEnergies:
    told = phase_energies(record(asked, **changes), FINDING)
    assert told is not None
    return told


def joules(told: PhaseEnergies) -> Mapping[str, float]:
    return {one.phase: one.joules for one in told.phases}


def test_phases_are_measured_each_by_itself() -> None:
    """With the range of their windows and its uncertainty; what the step takes beside them is named."""
    told = found(*phases())
    for one in told.phases[:-1] if told.phases[-1].phase == "unattributed" else told.phases:
        if one.phase == "unattributed":
            continue
        seconds, watts = PHASES[one.phase]
        assert one.provenance is Provenance.MEASURED and one.joules == pytest.approx(seconds * watts)
        assert one.seconds == pytest.approx(seconds) and one.why == ""
        assert one.low == pytest.approx(one.joules * 0.997 * 0.996)
        assert one.high == pytest.approx(one.joules * 1.002 * 1.004)
    assert told.void == "" and told.residual is not None
    assert told.residual.middle == pytest.approx(REST * 82.0) and told.residual_seconds == pytest.approx(REST)
    assert told.residual.low < told.residual.middle < told.residual.high


def test_where_nobody_asked_they_share_a_step_by_time() -> None:
    """So that they sum to it; estimates all, and nothing is said against them."""
    told = found()
    assert {one.provenance for one in told.phases} == {Provenance.ESTIMATED} and told.residual is None
    assert joules(told)["gemm"] == pytest.approx(STEP / 2) and {one.why for one in told.phases} == {""}
    assert sum(joules(told).values()) == pytest.approx(STEP)


def test_what_cannot_be_done_by_itself_stays_an_estimate_with_its_reason() -> None:
    """The others are measured; its joules are in the residual."""
    told = found(*phases(cast=PhaseEnergy("cast", why="it is given a sparse tensor")))
    (cast,) = (one for one in told.phases if one.phase == "cast")
    assert cast.provenance is Provenance.ESTIMATED and cast.why == "it is given a sparse tensor"
    assert cast.joules == pytest.approx(STEP / 10) and told.void == "" and told.off_pace == ""
    assert told.residual is not None and told.residual.middle == pytest.approx(REST * 82.0 + 0.1)


def test_windows_that_do_not_agree_are_none() -> None:
    told = found(*phases(optimizer_step=phase("optimizer_step", 1.0, 1.05, 1.2)))
    (short,) = (one for one in told.phases if one.phase == "optimizer_step")
    assert short.provenance is Provenance.ESTIMATED and short.why == "its windows are 19.0% apart"


@for_each("factor", [0.8, 1.25])
def test_joules_that_do_not_come_to_the_step_are_void(factor: float) -> None:
    """Its largest phase takes another power by itself: all are estimates then, and say why; the residual is there."""
    told = found(*phases(gemm=phase("gemm", factor, factor)))
    assert told.void.startswith("they come to ") and "further apart than the error of both" in told.void
    assert {one.provenance for one in told.phases} == {Provenance.ESTIMATED}
    assert all(one.why == told.void for one in told.phases if one.phase != "unattributed")
    assert told.residual is not None


PACES = [(1.003, False, False), (0.95, True, False), (1.06, True, True), (0.5, True, True)]


@for_each(("stretch", "label", "void"), PACES)
def test_another_time_than_in_the_step_is_a_label_and_far_away_void(stretch: float, label: bool, void: bool) -> None:
    """Beyond the noise; at the same power, so that the joules are wrong by as much."""
    asked = [phase(name, stretch, stretch, stretch=stretch) for name in PHASES]
    told = phase_energies(record(asked), FINDING)
    assert told is not None and bool(told.off_pace) == label and bool(told.void) == void
    if label:
        assert "of their time in a step, where +-2.0% is noise" in told.off_pace
    assert (abs(stretch - 1) > 0.1) == ("that is not what the step does" in told.void)


@pytest.mark.parametrize(("joules", "void"), [(1.0, False), (1.3, True)])
def test_where_times_are_noise_joules_alone_decide(joules: float, void: bool) -> None:
    """As on a machine that others use: phases and steps take 30% more, or less, from window to window."""
    asked = [PhaseEnergy(name, tuple(
        EnergyWindow(300, 300 * seconds * more, 300 * seconds * watts * joules, 12, 0.004) for more in (1.0, 1.3, 1.4)
    )) for name, (seconds, watts) in PHASES.items()]  # fmt: skip
    told = phase_energies(record(asked), FINDING)
    assert told is not None and told.noise > 0.3 and told.off_pace == "" and bool(told.void) == void


def test_the_label_is_a_remark_with_its_reason() -> None:
    fast = record([phase(name, 0.95, 0.95, stretch=0.95) for name in PHASES])
    labels = labels_of(replace(fast, timing=samples(("gemm",), (10_000,))), FINDING, None, None)
    (pace,) = (one for one in labels if one.label is Label.REPLAY_PACE)
    assert not pace.hard and pace.reason.startswith("by themselves its phases take 0.950x of")


def test_joules_have_their_denominators() -> None:
    """A token is the step's, FLOPs are the phase's own; where some are unknown nobody divides by the others."""
    counts = (PhaseCount("gemm", flops=10**12, launches=1), PhaseCount("cast", flops=5, unknown=1))
    one = replace(record(phases()), work=Work(tokens=4), tape=Tape(phases=counts))
    by_phase = {part.phase: dict(per_work(one, part)) for part in found(*phases()).phases}
    assert by_phase["gemm"] == {"energy_per_token": pytest.approx(0.5), "energy_per_tflop": pytest.approx(2.0)}
    assert by_phase["cast"] == {"energy_per_token": pytest.approx(0.025)}
    rows = {(metric.phase, metric.name): metric.value for metric in metrics_of(one, FINDING, None)}
    assert rows["gemm", "energy"] == pytest.approx(2.0) and rows["gemm", "energy_per_tflop"] == pytest.approx(2.0)
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
)  # fmt: skip
def test_an_energy_is_certified_or_says_why_not(changes: dict[str, object], code: EnergyValidity) -> None:
    """The power cap's clock is the device's own; a limit that somebody changed is not."""
    one = record(())
    assert one.energy is not None
    energy: EnergyUse = replace(one.energy, **changes)  # type: ignore[arg-type]
    assert energy_validity(replace(one, energy=energy)) is code


def test_a_device_with_others_on_it_certifies_nothing() -> None:
    shared = replace(record(()), watch=DeviceWatch(10, 1.0, others=1))
    assert energy_validity(shared) is EnergyValidity.SHARED
    assert energy_validity(replace(shared, energy=None)) is None
