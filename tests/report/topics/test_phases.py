"""Where time goes, as stacked bars; and what phases do, in half sentences, every branch."""

from __future__ import annotations

from dataclasses import replace

from fp8bench.model import CELL_PHASES, Finding, Label, Verdict
from fp8bench.report.elements import Stacks, Text
from fp8bench.report.topics.phases import change_of, is_mixed, phase_clauses
from fp8bench.report.words.legend import PHASE_WORDS
from tests.materials import of_kind, part, recased, shapes
from tests.runs import case, gemm, transformer
from tests.told_before import Told, as_before

CASE = case("transformer", "bf16", {})


def step(below: tuple[str, ...] = (), **milliseconds: float) -> Finding:
    phases = tuple((name, 1e-3 * time) for name, time in milliseconds.items())
    return Finding(CASE, Verdict.FASTER, sum(time for _, time in phases), phases=phases, below_floor=below)


@as_before
def test_phase_clauses() -> Told:
    for claim, own, base in (
        ("products gain, other work does not", step(gemm=5, elementwise=5), step(gemm=7.5, elementwise=5)),
        ("nothing gains", step(gemm=5, data_load=1, cast=4), step(gemm=5, data_load=1, cast=4)),
        ("two gain", step(gemm=5, attention=5), step(gemm=10, attention=6)),
        ("one gains and one loses", step(gemm=5, attention=6), step(gemm=10, attention=5)),
        ("casts come on top", step(gemm=8, cast=2), step(gemm=16)),
        ("a phase in the singular comes on top", step(gemm=8, accumulate=2), step(gemm=16)),
        ("one falls away", step(gemm=8), step(gemm=8, optimizer_step=2)),
        ("two fall away", step(gemm=8), step(gemm=8, cast=2, unattributed=3)),
        ("3% or less of both steps is nothing to speak of", step(gemm=98, cast=2), step(gemm=98, cast=1)),
        ("what the clock cannot tell is not spoken of", step(("cast",), gemm=8, cast=2), step(gemm=16)),
        ("nor what it could not tell of the reference", step(gemm=8, cast=2), step(("gemm",), gemm=16)),
    ):
        yield claim, phase_clauses(own, base)
    for own_time, base_time in ((1.0, 1.04), (1.0, 1.06), (1.06, 1.0), (1.0, 0.0), (0.0, 1.0)):
        yield f"a change from {base_time} to {own_time} is more than 5%, or none", change_of(own_time, base_time).name


def test_a_step_is_mixed_where_two_phases_matter() -> None:
    assert is_mixed(step(gemm=5, elementwise=5))
    assert not any(map(is_mixed, (step(gemm=5, unattributed=5), step(gemm=98, cast=2), Finding(CASE, Verdict.NONE))))
    assert set(PHASE_WORDS) == set(CELL_PHASES)


@as_before
def test_phases() -> Told:
    yield "steps of very different length are shares, their labels say how long they are", part("phases", gemm())
    run, findings = transformer()
    fp8 = run.records[2].case.id
    findings[fp8] = replace(findings[fp8], labels=(Label.POWER_CAPPED,), below_floor=("data_load", "cast"))
    yield "phases below the clock's floor, and labels that cast doubt, are said", part("phases", (run, findings))
    run, findings = shapes({"m": 1}, {"m": 2}, {"m": 3}, labels=(Label.NOISY,))
    findings = {key: replace(finding, below_floor=("unattributed",)) for key, finding in findings.items()}
    yield "many cases are counted, not named", of_kind(part("phases", (run, findings)), Text)
    compiled = recased(transformer(), lambda case: replace(case, params=(*case.params, ("compile", "yes"))))
    yield "a compiled step says why so much is unattributed", of_kind(part("phases", compiled), Text)
    charts = of_kind(part("phases", transformer(), gemm()), Stacks)
    yield "a phase has its place, and its colour, in all suites", [", ".join(chart.parts) for chart in charts]
