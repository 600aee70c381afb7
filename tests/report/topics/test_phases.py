"""Where time goes, as stacked bars and in half sentences; and where a lower precision gains, every number by hand."""

from __future__ import annotations

from dataclasses import replace

from fp8bench.model import CELL_PHASES, Finding, Label, Level, Record, Status, Verdict
from fp8bench.report.elements import Stacks, Table, Text
from fp8bench.report.panels import phases_beside
from fp8bench.report.words.legend import PHASE_TITLES
from tests.materials import Made, built, many, of_kind, part, recased, shapes
from tests.runs import EMULATED, NATIVE, case, gemm, run_of, transformer
from tests.told_before import Told, as_before

CASE = case("transformer", "bf16", {})


def step(below: tuple[str, ...] = (), **milliseconds: float) -> Finding:
    phases = tuple((name, 1e-3 * time) for name, time in milliseconds.items())
    return Finding(CASE, Verdict.FASTER, sum(time for _, time in phases), phases=phases, below_floor=below)


def test_what_an_untouched_model_does_not_mark_is_compared_with_its_unattributed_time() -> None:
    """10 ms of products would else be a loss of 10 ms beside a step that is 9 ms shorter."""
    came = replace(step(gemm=0, optimizer_step=1, unattributed=24), case=replace(CASE, precision="untouched"))
    copy = step(cast=1, gemm=10, optimizer_step=1, unattributed=4)
    beside = phases_beside(came, copy)
    assert {phase: round(1e3 * (own - base)) for phase, (base, own) in beside.items()} == {
        "cast": 1, "optimizer_step": 0, "gemm and unattributed": -10
    }  # fmt: skip
    assert "gemm" in phases_beside(replace(came, case=CASE), copy)


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


BEFORE = (("data_load", 1e-6), ("gemm", 8e-3), ("attention", 1e-3), ("elementwise", 1e-3), ("unattributed", 1e-5))
AFTER = (("data_load", 2e-6), ("cast", 1e-3), ("gemm", 2e-3), ("attention", 1.5e-3), ("elementwise", 5e-4))


def two_steps(reference: Level = Level.NATIVE, low: Level = Level.NATIVE, **changes: object) -> Made:
    """10 ms in fp32 and 5 ms in bf16: gemm is four times as fast, attention slower, and casts come on top."""
    fp32, bf16 = (case("model", name, {"size": 1}) for name in ("fp32", "bf16"))
    records = [
        Record(fp32, NATIVE if reference is Level.NATIVE else EMULATED, Status.OK, is_reference=True),
        Record(bf16, NATIVE if low is Level.NATIVE else EMULATED, Status.OK),
    ]
    findings = {
        fp32.id: Finding(fp32, Verdict.REFERENCE, 1e-2, phases=BEFORE, below_floor=("data_load",)),
        bf16.id: replace(Finding(bf16, Verdict.FASTER, 5e-3, phases=AFTER), **changes),  # type: ignore[arg-type]
    }
    return run_of(records), findings


@as_before
def test_gains() -> Told:
    yield "where it gains and where not", part("gains", two_steps())
    yield "a doubted case is grey with its labels; its plain ratio names the paired one", part("gains", transformer())
    yield "an emulation has no speed", built("gains", two_steps(Level.EMULATED))
    yield "neither has what is held against one", built("gains", two_steps(low=Level.EMULATED))
    elements = part("gains", many(20))
    assert len(of_kind(elements, Table)) == 12
    yield "of many cases some have tables, and the others are counted", of_kind(elements, Text)
