"""Where time goes, as stacked bars, every value by hand; and what phases do, in half sentences, every branch."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fp8bench.model import CELL_PHASES, Finding, Label, Verdict
from fp8bench.report.elements import ChartAxis, Stacks, Text, Tone
from fp8bench.report.topics.phases import COMPILED, PhaseChange, change_of, is_mixed, phase_clauses
from fp8bench.report.words.legend import PHASE_WORDS
from tests.counts import for_each
from tests.materials import of_kind, part, recased, shapes
from tests.runs import case, gemm, transformer

CASE = case("transformer", "bf16", {})
PARTS = (
    "data load", "cast", "gemm", "attention", "accumulate", "optimizer step", "elementwise", "unattributed",
)  # fmt: skip


def step(below: tuple[str, ...] = (), **milliseconds: float) -> Finding:
    """A finding whose phases take so many milliseconds."""
    phases = tuple((name, 1e-3 * time) for name, time in milliseconds.items())
    return Finding(CASE, Verdict.FASTER, sum(time for _, time in phases), phases=phases, below_floor=below)


@for_each(
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


@for_each(
    ("own", "base", "change"),
    [
        (1.0, 1.04, PhaseChange.SAME),
        (1.0, 1.06, PhaseChange.GAINS),
        (1.06, 1.0, PhaseChange.LOSES),
        (1.0, 0.0, PhaseChange.NEW),
        (0.0, 1.0, PhaseChange.GONE),
    ],
)
def test_a_change_is_more_than_five_percent(own: float, base: float, change: PhaseChange) -> None:
    assert change_of(own, base) is change


def test_a_step_is_mixed_where_two_phases_matter() -> None:
    """What is unattributed is no phase."""
    assert is_mixed(step(gemm=5, elementwise=5))
    assert not any(map(is_mixed, (step(gemm=5, unattributed=5), step(gemm=98, cast=2), Finding(CASE, Verdict.NONE))))


def test_every_phase_has_words() -> None:
    assert set(PHASE_WORDS) == set(CELL_PHASES)


def test_steps_of_very_different_length_are_shares() -> None:
    """206 us beside 3.05 ms: in seconds the phases of the short one would be a line. Labels say how long a step is."""
    native, _ = of_kind(part("phases", gemm()), Stacks)
    assert native.axis == ChartAxis("share of the step", "%") and native.parts == ("cast", "gemm", "unattributed")
    assert native.rows[0] == ("m=256 n=256 k=256 fp32, 412 us", pytest.approx((0, 97, 3)))
    assert native.rows[1] == ("m=256 n=256 k=256 bf16, 206 us", pytest.approx((10, 87, 3)))
    assert len(native.rows) == 6 and native.description == "gemm takes most of every step, 87% to 97%."


def test_what_cannot_be_known_is_said_in_words() -> None:
    """Phases below the clock's floor, and labels; a label that only says whose time it is casts no doubt."""
    run, findings = transformer()
    fp8 = run.records[2].case.id
    findings[fp8] = replace(findings[fp8], labels=(Label.POWER_CAPPED,), below_floor=("data_load", "cast"))
    texts = of_kind(part("phases", (run, findings)), Text)
    floor, labels = (one.text for one in texts)
    assert floor.startswith("transformer, too short to be told from the cost of marking it (less than 20 times that): ")
    assert floor.endswith(": data load in bf16 and fp8; cast in fp8.")
    assert labels == "transformer, labelled: contended and few-samples in fp16."
    assert {one.tone for one in texts} == {Tone.DOUBT}


def test_many_cases_are_counted_not_named() -> None:
    run, findings = shapes({"m": 1}, {"m": 2}, {"m": 3}, labels=(Label.NOISY,))
    findings = {key: replace(one, below_floor=("unattributed",)) for key, one in findings.items()}
    texts = [one.text for one in of_kind(part("phases", (run, findings)), Text)]
    assert texts[0].endswith(": unattributed in all 9.") and texts[1] == "gemm, labelled: noisy in 3 of 9."


def test_a_compiled_step_says_why_so_much_is_unattributed() -> None:
    compiled = recased(transformer(), lambda case: replace(case, params=(*case.params, ("compile", "yes"))))
    assert COMPILED in [one.text for one in of_kind(part("phases", compiled), Text)]
    assert COMPILED not in [one.text for one in of_kind(part("phases", transformer()), Text)]


def test_a_phase_has_one_colour_in_all_suites() -> None:
    """Colours go by place: a suite without a phase leaves its place empty."""
    charts = of_kind(part("phases", transformer(), gemm()), Stacks)
    assert len(charts) == 4 and {chart.parts for chart in charts} == {PARTS}
