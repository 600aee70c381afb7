"""Gains by phase, from planted steps and from pure noise."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pytest

from fp8bench.analysis.findings import find
from fp8bench.analysis.phase_gains import PhaseGainCause, find_explaining_phases
from fp8bench.model import Finding, Interval, Level, PhaseGain, Timing
from tests.counts import for_each
from tests.fakes import MS, record, timing

ROUNDS = 40
PHASES = ("cast", "gemm", "attention", "optimizer_step", "unattributed")


def plant(milliseconds: Mapping[str, float], noise: float = 0.0, seed: int = 0) -> Timing:
    """Rounds of a step with these phase times and noise that only adds."""
    extra = np.random.default_rng(seed).exponential(noise, (ROUNDS, len(PHASES)))
    seconds = np.array([milliseconds.get(phase, 0.0) for phase in PHASES]) * (1 + extra)
    return timing(*[tuple(map(int, step * MS)) for step in seconds], phases=PHASES)


def judge(case: Timing, reference: Timing, control: Timing | None = None, level: Level = Level.NATIVE) -> Finding:
    entry = record(reference, "fp32", is_reference=True, control=control or reference)
    return find([entry, record(case, "bf16", level)], {})[1]


WIDE = {"gemm": 16.0, "attention": 3.0, "optimizer_step": 2.0, "unattributed": 9.0}


def test_gains_sum_to_the_difference_that_the_ratio_measures() -> None:
    narrow = {**WIDE, "cast": 1.5, "gemm": 7.0, "attention": 8.0}
    finding = judge(plant(narrow, 0.02, 1), plant(WIDE, 0.02, 2), plant(WIDE, 0.02, 3))
    seconds = sum(gain.seconds for gain in finding.gains)
    reference = sum(gain.reference_seconds for gain in finding.gains)
    assert seconds / reference == pytest.approx(finding.ratio.point, rel=1e-4)
    assert reference - seconds == pytest.approx(sum(gain.saved_seconds for gain in finding.gains))
    for gain in finding.gains:
        truth = (WIDE.get(gain.phase, 0.0) - narrow[gain.phase]) * 1e-3
        assert gain.low - 2e-4 < truth < gain.high + 2e-4


@for_each(
    ("changes", "cause", "phases"),
    [
        ({"gemm": 8.0, "attention": 10.8}, PhaseGainCause.CANCEL, ["gemm", "attention"]),
        ({"gemm": 8.0}, PhaseGainCause.ONE_PHASE, ["gemm"]),
        ({"gemm": 12.0, "cast": 3.5}, PhaseGainCause.CASTS, ["gemm", "cast"]),
        ({"attention": 2.0}, PhaseGainCause.SMALL_SHARE, ["attention"]),
        (
            {"gemm": 12.0, "attention": 6.0, "optimizer_step": 1.0},
            PhaseGainCause.PHASES,
            ["gemm", "attention", "optimizer_step"],
        ),
        ({"gemm": 18.0}, PhaseGainCause.PHASES, ["gemm"]),
    ],
)
def test_planted_changes_are_named(changes: Mapping[str, float], cause: PhaseGainCause, phases: list[str]) -> None:
    finding = judge(plant({**WIDE, **changes}, 0.01, 1), plant(WIDE, 0.01, 2), plant(WIDE, 0.01, 3))
    reason = find_explaining_phases(finding.gains)
    assert reason.cause is cause
    assert [gain.phase for gain in reason.gains] == phases


def test_noise_explains_no_speed_up() -> None:
    named = 0
    for seed in range(20):
        arms = [plant(WIDE, 0.05, 3 * seed + number) for number in range(3)]
        named += find_explaining_phases(judge(*arms).gains) is not None
    assert named <= 1


def test_a_phase_that_differs_from_its_own_control_is_not_named() -> None:
    control = plant({**WIDE, "attention": 9.0})
    finding = judge(plant({**WIDE, "attention": 2.0}), plant(WIDE), control)
    assert find_explaining_phases(finding.gains) is None


def test_steps_without_phases_and_emulations_have_no_gains() -> None:
    compiled, wide = plant({"unattributed": 20.0}), plant({"unattributed": 30.0})
    assert find_explaining_phases(judge(compiled, wide).gains) is None
    assert judge(plant(WIDE), plant(WIDE), level=Level.EMULATED).gains == ()


def test_few_rounds_have_no_gains() -> None:
    def shorten(whole: Timing) -> Timing:
        return Timing(whole.segments, whole.slots[:20])

    assert judge(shorten(plant({**WIDE, "gemm": 8.0})), shorten(plant(WIDE))).gains == ()


def test_an_untouched_reference_counts_its_products_with_the_rest() -> None:
    untouched = record(plant({"unattributed": 30.0}), "untouched", is_reference=True)
    case = record(plant({"gemm": 10.0, "cast": 2.0, "unattributed": 8.0}), "bf16")
    gains = {gain.phase: gain for gain in find([untouched, case], {})[1].gains}
    assert set(gains) == {"cast", "unattributed"}
    assert gains["unattributed"].saved_seconds == pytest.approx(12e-3) and gains["cast"].saved_seconds == pytest.approx(
        -2e-3
    )


def test_a_gain_whose_interval_contains_zero_is_not_clear() -> None:
    assert not PhaseGain("gemm", 1.0, 2.0, -0.1, 2.0).is_clear
    assert PhaseGain("gemm", 1.0, 2.0, 0.1, 2.0).is_clear
    assert not PhaseGain("gemm", 1.0, 2.0, 0.1, 2.0, control=1.5).is_clear
    assert find_explaining_phases(()) is None and math.isclose(PhaseGain("gemm", 1.0, 2.0, 0, 0).saved_seconds, 1.0)


def test_gains_sum_to_the_ratio_of_all_sessions() -> None:
    entry = record(plant(WIDE), "fp32", is_reference=True, control=plant(WIDE))
    case = record(plant({**WIDE, "gemm": 8.0}), "bf16", sessions=(Interval(0.6, 0.55, 0.65, 0.99),))
    finding = find([entry, case], {})[1]
    seconds = sum(gain.seconds for gain in finding.gains)
    reference = sum(gain.reference_seconds for gain in finding.gains)
    assert seconds / reference == pytest.approx(finding.ratio.point)
    assert finding.ratio.point < 22 / 30
    assert all(gain.low - 1e-9 <= gain.saved_seconds <= gain.high + 1e-9 for gain in finding.gains)
    assert [gain.phase for gain in finding.gains if gain.is_clear] == ["gemm"]
