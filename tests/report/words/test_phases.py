"""What the phases of a step do, in half sentences: every branch, singular and plural."""

from __future__ import annotations

import pytest

from fp8bench.model import CELL_PHASES, Finding, Verdict
from fp8bench.report.words.legend import PHASE_WORDS
from fp8bench.report.words.phases import Change, change_of, is_mixed, phase_clauses
from tests.runs import case

CASE = case("transformer", "bf16", {})


def step(below: tuple[str, ...] = (), **milliseconds: float) -> Finding:
    """A finding whose phases take so many milliseconds."""
    phases = tuple((name, 1e-3 * time) for name, time in milliseconds.items())
    return Finding(CASE, Verdict.FASTER, sum(time for _, time in phases), phases=phases, below_floor=below)


@pytest.mark.parametrize(
    ("own", "base", "clauses"),
    [
        (step(gemm=5, elementwise=5), step(gemm=7.5, elementwise=5), (
            "; products gain 1.50x; elementwise work takes 50% of the step and does not gain"
        )),
        (step(gemm=5, data_load=1, cast=4), step(gemm=5, data_load=1, cast=4), (
            "; data loading, casts and products take 100% of the step and do not gain"
        )),
        (step(gemm=5, attention=5), step(gemm=10, attention=6), "; products gain 2.00x and attention gains 1.20x"),
        (step(gemm=5, attention=6), step(gemm=10, attention=5), (
            "; products gain 2.00x; attention takes 1.20x as long"
        )),
        (step(gemm=8, cast=2), step(gemm=16), "; products gain 2.00x; casts take 20% of the step and come on top"),
        (step(gemm=8, accumulate=2), step(gemm=16), (
            "; products gain 2.00x; accumulation takes 20% of the step and comes on top"
        )),
        (step(gemm=8), step(gemm=8, optimizer_step=2), (
            "; products take 100% of the step and do not gain; the optimizer step falls away"
        )),
        (step(gemm=8), step(gemm=8, cast=2, unattributed=3), (
            "; products take 100% of the step and do not gain; casts and the rest fall away"
        )),
        # 3% or less of both steps is nothing to speak of; what the clock cannot tell is not spoken of.
        (step(gemm=98, cast=2), step(gemm=98, cast=1), "; products take 98% of the step and do not gain"),
        (step(("cast",), gemm=8, cast=2), step(gemm=16), "; products gain 2.00x"),
        (step(gemm=8, cast=2), step(("gemm",), gemm=16), "; casts take 20% of the step and come on top"),
    ],
)  # fmt: skip
def test_clauses(own: Finding, base: Finding, clauses: str) -> None:
    assert phase_clauses(own, base) == clauses


@pytest.mark.parametrize(
    ("own", "base", "change"),
    [
        (1.0, 1.04, Change.SAME),
        (1.0, 1.06, Change.GAINS),
        (1.06, 1.0, Change.LOSES),
        (1.0, 0.0, Change.NEW),
        (0.0, 1.0, Change.GONE),
    ],
)
def test_a_change_is_more_than_five_percent(own: float, base: float, change: Change) -> None:
    assert change_of(own, base) is change


def test_a_step_is_mixed_where_two_phases_matter() -> None:
    """What is unattributed is no phase."""
    assert is_mixed(step(gemm=5, elementwise=5))
    assert not any(map(is_mixed, (step(gemm=5, unattributed=5), step(gemm=98, cast=2), Finding(CASE, Verdict.NONE))))


def test_every_phase_has_words() -> None:
    assert set(PHASE_WORDS) == set(CELL_PHASES)
