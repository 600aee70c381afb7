"""Where a lower precision gains, phase against phase: every number by hand."""

from __future__ import annotations

from dataclasses import replace

from fp8bench.model import Finding, Level, Record, Status, Verdict
from fp8bench.report.elements import Table, Text, Tone, Waterfall
from tests.counts import for_each
from tests.materials import Made, built, many, of_kind, part
from tests.runs import EMULATED, NATIVE, case, run_of, transformer

BEFORE = (("data_load", 1e-6), ("gemm", 8e-3), ("attention", 1e-3), ("elementwise", 1e-3), ("unattributed", 1e-5))
AFTER = (("data_load", 2e-6), ("cast", 1e-3), ("gemm", 2e-3), ("attention", 1.5e-3), ("elementwise", 5e-4))


def step(reference: Level = Level.NATIVE, low: Level = Level.NATIVE, **changes: object) -> Made:
    """10 ms in fp32 and 5 ms in bf16: gemm is four times as fast, attention is slower, casts come on top."""
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


def fall(made: Made) -> Waterfall:
    return of_kind(part("gains", made), Waterfall)[0]


def test_the_description_says_where_it_gains_and_where_not() -> None:
    assert fall(step()).description == (
        "The step takes 5.00 ms instead of 10.0 ms. It saves most in gemm (6.00 ms) and adds "
        "most in cast (1.00 ms). 50% of the step is no shorter than before (cast and attention)."
    )


def test_a_step_that_only_got_longer() -> None:
    slower = tuple((name, 2 * seconds) for name, seconds in BEFORE)
    chart = fall(step(best_seconds=2e-2, phases=slower))
    assert chart.description.endswith("instead of 10.0 ms. It saves in no phase and adds most in gemm (8.00 ms).")


def test_a_doubted_case_is_grey_with_its_labels() -> None:
    chart = fall(transformer())
    assert {mark.tone for mark in chart.changes} <= {Tone.DOUBT, Tone.PLAIN}
    assert chart.description.endswith("Labelled contended, few-samples.")


def test_no_verdict_on_phases_is_promised() -> None:
    assert "without a verdict" in part("gains", transformer()).lead


@for_each("levels", [(Level.EMULATED, Level.NATIVE), (Level.NATIVE, Level.EMULATED)])
def test_emulations_have_no_speed(levels: tuple[Level, Level]) -> None:
    """Neither as a case nor as a reference."""
    assert built("gains", step(*levels)) is None


def test_of_many_cases_some_are_drawn_and_the_others_are_counted() -> None:
    found = part("gains", many(20))
    assert (len(of_kind(found, Waterfall)), len(of_kind(found, Table))) == (4, 12)
    assert of_kind(found, Text)[-1].text.startswith("8 more cases are not told here")


def test_the_plain_ratio_of_a_step_names_the_paired_one() -> None:
    (table,) = of_kind(part("gains", transformer()), Table)
    assert table.rows[-1][3].text == "0.976x" and table.rows[-1][3].hint.endswith("it is 0.976x")
