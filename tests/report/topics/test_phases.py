"""Where time goes, as stacked bars and in half sentences; and where a lower precision gains, every number by hand."""

from __future__ import annotations

from dataclasses import replace

from fp8bench.model import CELL_PHASES, Finding, Label, PhaseGain
from fp8bench.report.elements import Stacks, Table, Text
from fp8bench.report.words.legend import PHASE_TITLES
from tests.materials import Made, built, many, of_kind, part, recased, shapes
from tests.runs import gemm, transformer
from tests.told_before import Told, as_before


def test_every_phase_has_a_title() -> None:
    assert set(PHASE_TITLES) == set(CELL_PHASES)


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


# Milliseconds of each phase in bf16 and in fp32.
STEP = {"data_load": (0.002, 0.001), "cast": (1, 0), "gemm": (2, 8), "attention": (1.5, 1), "elementwise": (0.5, 1)}


def with_gains(finding: Finding) -> Finding:
    """10 ms in fp32 and 5 ms in bf16: gemm is four times as fast, attention slower, and casts are added."""
    gains = []
    for phase, (own, reference) in STEP.items():
        saved = 1e-3 * (reference - own)
        gains.append(PhaseGain(phase, 1e-3 * own, 1e-3 * reference, saved - 2e-5, saved + 2e-5))
    return replace(finding, gains=tuple(gains))


def judged_alike(made: Made) -> Made:
    run, findings = made
    return run, {key: with_gains(finding) if finding.ratio else finding for key, finding in findings.items()}


@as_before
def test_gains() -> Told:
    yield (
        "where it gains and where not, and that a doubted case is labelled",
        part("gains", judged_alike(transformer())),
    )
    yield "few rounds have no interval", built("gains", transformer())
    elements = part("gains", judged_alike(many(20)))
    assert len(of_kind(elements, Table)) == 12
    yield "of many cases some have tables, and the others are counted", of_kind(elements, Text)
